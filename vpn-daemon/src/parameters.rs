//! What a start was asked with, checked once: a URL that can be dialled, a token that cannot be printed.

use base64::Engine as _;
use codervpn_control::api::{Deployment, Telemetry};
use codervpn_proto::ext::FailureCode;
use codervpn_proto::vpn::StartRequest;
use secrecy::{ExposeSecret, SecretString};
use sha2::{Digest as _, Sha256};

use crate::failure::Failure;

/// The parameters of one start. Neither `Debug` nor `Display`: the token must have no way into a log.
#[derive(Clone)]
pub struct Parameters {
    pub deployment: Deployment,
    pub token: SecretString,
    /// In order, duplicates kept; compared as a list (codervpn-protocol 6.3).
    pub headers: Vec<(String, String)>,
    pub telemetry: Telemetry,
}

impl Parameters {
    /// Checks a request. The device fields are filled in where the client left them empty (11.1), the file
    /// descriptor of a client is ignored (11.5.5).
    pub fn from_request(request: StartRequest, device: &Device) -> Result<Self, Failure> {
        let deployment = parse_deployment(&request.coder_url)?;
        if request.api_token.is_empty() {
            return Err(Failure::new(FailureCode::MissingToken, "no session token was given")
                .remedy("run `codervpn login URL`"));
        }
        if request.api_token.bytes().any(|byte| !(0x21..=0x7e).contains(&byte)) {
            return Err(Failure::new(FailureCode::BadRequest, "the session token has characters that no token has")
                .remedy("run `codervpn login URL` and paste the token alone"));
        }
        let mut headers = Vec::with_capacity(request.headers.len());
        for header in request.headers {
            check_header(&header.name, &header.value)?;
            headers.push((header.name, header.value));
        }
        let or = |given: String, own: &str| if given.is_empty() { own.to_owned() } else { given };
        let telemetry = Telemetry {
            device_id: or(request.device_id, &device.id),
            device_os: or(request.device_os, Device::OS),
            version: or(request.coder_desktop_version, env!("CARGO_PKG_VERSION")),
        };
        Ok(Self { deployment, token: request.api_token.into(), headers, telemetry })
    }

    /// Whether a second start asks for the very same thing.
    pub fn same(&self, other: &Self) -> bool {
        self.deployment == other.deployment
            && self.telemetry == other.telemetry
            && self.token.expose_secret() == other.token.expose_secret()
            && self.headers == other.headers
    }
}

/// The deployment's address, or what is wrong with it.
pub fn parse_deployment(text: &str) -> Result<Deployment, Failure> {
    if text.trim().is_empty() {
        return Err(
            Failure::new(FailureCode::BadUrl, "no URL of a deployment was given").remedy("run `codervpn login URL`")
        );
    }
    Deployment::parse(text).map_err(|error| Failure::new(FailureCode::BadUrl, error.to_string()))
}

/// Checks every header of a client.
pub fn check_headers<'a>(headers: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<(), Failure> {
    headers.into_iter().try_for_each(|(name, value)| check_header(name, value))
}

fn check_header(name: &str, value: &str) -> Result<(), Failure> {
    if is_legal_header(name, value) {
        return Ok(());
    }
    // The value may be secret, so only the name is repeated.
    Err(Failure::new(FailureCode::BadRequest, format!("{name:?} is not a legal header"))
        .remedy("a header has a name of letters, digits and '-', and a value on one line"))
}

/// A name that is a token of RFC 9110, a value on one line.
pub fn is_legal_header(name: &str, value: &str) -> bool {
    !name.is_empty()
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b))
        && !value.bytes().any(|b| b < 0x20 || b == 0x7f)
}

/// How this machine names itself to the deployment.
#[derive(Debug, Clone, Default)]
pub struct Device {
    /// base64 of SHA-256 over the machine id: the formula of other frontends, so that a switch keeps the identity.
    pub id: String,
}

impl Device {
    const OS: &'static str = "Linux";

    /// `machine_id`: the content of /etc/machine-id, empty where there is none.
    pub fn from_machine_id(machine_id: &str) -> Self {
        let machine_id = machine_id.trim();
        if machine_id.is_empty() {
            return Self::default();
        }
        Self { id: base64::engine::general_purpose::STANDARD.encode(Sha256::digest(machine_id)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use codervpn_proto::vpn::start_request::Header;

    fn request() -> StartRequest {
        StartRequest {
            coder_url: "https://coder.example.com/".into(),
            api_token: "abc-DEF_123".into(),
            ..StartRequest::default()
        }
    }

    fn refused(request: StartRequest) -> Failure {
        match Parameters::from_request(request, &Device::default()) {
            Err(failure) => failure,
            Ok(_) => panic!("accepted"),
        }
    }

    #[test]
    fn missing_fields_are_named() {
        let failure = refused(StartRequest { coder_url: String::new(), ..request() });
        assert_eq!(failure.code, FailureCode::BadUrl);
        assert!(failure.to_string().contains("URL"), "{failure}");
        let failure = refused(StartRequest { api_token: String::new(), ..request() });
        assert_eq!(failure.code, FailureCode::MissingToken);
    }

    #[test]
    fn urls_that_cannot_be_dialled_are_refused() {
        for url in ["ftp://coder.example.com", "coder.example.com", "https://", "https://user:secret@coder.example.com"]
        {
            let failure = refused(StartRequest { coder_url: url.into(), ..request() });
            assert_eq!(failure.code, FailureCode::BadUrl, "{url}");
            assert!(!failure.to_string().contains("secret"), "R-26: {failure}");
        }
    }

    #[test]
    fn a_token_or_header_with_line_breaks_is_refused_without_repeating_it() {
        let failure = refused(StartRequest { api_token: "to\nken".into(), ..request() });
        assert_eq!(failure.code, FailureCode::BadRequest);
        assert!(!failure.to_string().contains("ken\""), "{failure}");
        let header = Header { name: "X-Front".into(), value: "hidden\r\nEvil: 1".into() };
        let failure = refused(StartRequest { headers: vec![header], ..request() });
        assert!(failure.to_string().contains("X-Front") && !failure.to_string().contains("hidden"), "{failure}");
    }

    #[test]
    fn device_fields_are_filled_only_where_empty() {
        let device = Device::from_machine_id("0123456789abcdef0123456789abcdef\n");
        let Ok(own) = Parameters::from_request(request(), &device) else { panic!("refused") };
        // base64 of SHA-256 over the trimmed text, as other frontends compute it.
        assert_eq!(own.telemetry.device_id, "PrG9Q5lH63YpmOVmzMLgmceREYsvQFecxPfaK1Bht/k=");
        assert_eq!(own.telemetry.device_os, "Linux");
        let named = StartRequest { device_id: "dev-1".into(), device_os: "Plan 9".into(), ..request() };
        let Ok(named) = Parameters::from_request(named, &device) else { panic!("refused") };
        assert_eq!((named.telemetry.device_id.as_str(), named.telemetry.device_os.as_str()), ("dev-1", "Plan 9"));
        assert!(Device::from_machine_id("  \n").id.is_empty());
    }

    #[test]
    fn sameness_includes_everything_but_spelling_of_the_url() {
        let parse = |request| match Parameters::from_request(request, &Device::default()) {
            Ok(parameters) => parameters,
            Err(failure) => panic!("{failure}"),
        };
        let one = parse(request());
        assert!(one.same(&parse(StartRequest { coder_url: "https://coder.example.com".into(), ..request() })));
        assert!(!one.same(&parse(StartRequest { api_token: "other".into(), ..request() })));
        let header = |value: &str| Header { name: "A".into(), value: value.into() };
        let two = parse(StartRequest { headers: vec![header("1"), header("2")], ..request() });
        assert!(!two.same(&parse(StartRequest { headers: vec![header("2"), header("1")], ..request() })));
    }
}
