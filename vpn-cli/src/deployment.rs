//! Decides what a person may give as the address of a deployment.

use url::{Host, Url};

use crate::problem::Problem;

const EXAMPLE: &str = "give the address you open Coder with in a browser, such as https://coder.example.com";

/// Without a scheme https is meant. Query and fragment are cut off; credentials are refused and not repeated.
pub(crate) fn parse(text: &str) -> Result<Url, Problem> {
    let text = text.trim();
    let with_scheme = if text.contains("://") { text.to_owned() } else { format!("https://{text}") };
    let bad = |why: &str| {
        let shown = if text.contains('@') { "the URL".to_owned() } else { format!("{text:?}") };
        Problem::usage(format!("{shown} is not the URL of a deployment: {why}"), EXAMPLE)
    };
    let mut url = Url::parse(&with_scheme).map_err(|error| bad(&error.to_string()))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(bad("only http and https are possible"));
    }
    if url.host().is_none() {
        return Err(bad("it names no host"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(bad("it must not hold a user name or password"));
    }
    url.set_query(None);
    url.set_fragment(None);
    Ok(url)
}

/// Whether the token would cross a network where others can read it.
pub(crate) fn is_readable_by_others(url: &Url) -> bool {
    let loopback = match url.host() {
        Some(Host::Domain(name)) => name == "localhost" || name.ends_with(".localhost"),
        Some(Host::Ipv4(address)) => address.is_loopback(),
        Some(Host::Ipv6(address)) => address.is_loopback(),
        None => false,
    };
    url.scheme() == "http" && !loopback
}

/// For texts: without the final slash.
pub(crate) fn shown(url: &str) -> &str {
    url.trim_end_matches('/')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::Exit;

    #[test]
    fn https_is_meant_without_a_scheme() {
        for (text, expected) in [
            ("coder.example.com", "https://coder.example.com/"),
            ("localhost:3000", "https://localhost:3000/"),
            ("http://127.0.0.1:3000/?a=b#c", "http://127.0.0.1:3000/"),
            (" https://coder.example.com/path/ ", "https://coder.example.com/path/"),
        ] {
            assert_eq!(parse(text).unwrap().as_str(), expected);
        }
    }

    #[test]
    fn other_things_are_refused_with_a_usage_error() {
        for text in ["", "https://", "ftp://coder.example.com", "https://a b", "https://u:SECRET@host", "u:SECRET@host"]
        {
            let problem = parse(text).unwrap_err();
            assert_eq!(problem.exit, Exit::Usage, "{text}");
            assert!(!problem.what.contains("SECRET"), "{}", problem.what);
        }
    }

    #[test]
    fn plain_http_is_fine_on_this_machine_only() {
        for text in
            ["http://localhost", "http://coder.localhost:8", "http://127.1.2.3", "http://[::1]:9", "https://x.y"]
        {
            assert!(!is_readable_by_others(&parse(text).unwrap()), "{text}");
        }
        for text in ["http://10.0.0.1", "http://coder.example.com", "http://localhost.example.com"] {
            assert!(is_readable_by_others(&parse(text).unwrap()), "{text}");
        }
    }
}
