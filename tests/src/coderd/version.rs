//! Decides whether a requested API version can be served (1.7).

/// What the server implements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ApiVersion {
    pub major: i64,
    pub minor: i64,
}

impl Default for ApiVersion {
    /// As of Coder 2.26.
    fn default() -> Self {
        Self { major: 2, minor: 6 }
    }
}

impl ApiVersion {
    /// `Err`: the detail of the validation of `version`. An absent or empty version counts as 2.0.
    pub(crate) fn check(self, requested: Option<&str>) -> Result<(), String> {
        let text = requested.filter(|text| !text.is_empty()).unwrap_or("2.0");
        let mut parts = text.split('.');
        let (Some(major), Some(minor), None) = (parts.next(), parts.next(), parts.next()) else {
            return Err(format!("invalid version string: {text}"));
        };
        let major: i64 = major.parse().map_err(|_| format!("invalid major version: {text}"))?;
        let minor: i64 = minor.parse().map_err(|_| format!("invalid minor version: {text}"))?;
        let server = format!("server is at version {}.{}", self.major, self.minor);
        if major > self.major {
            return Err(format!("{server}, behind requested major version {text}"));
        }
        if major < self.major {
            return Err(format!("version {text} is no longer supported"));
        }
        if minor > self.minor {
            return Err(format!("{server}, behind requested minor version {text}"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table of 1.7, row by row, and its lenient parsing (HTTP-11, HTTP-12).
    #[test]
    fn versions_are_judged_as_upstream_does() {
        let server = ApiVersion { major: 2, minor: 2 };
        for (text, detail) in [
            ("2", "invalid version string: 2"),
            ("2.2.1", "invalid version string: 2.2.1"),
            ("x.2", "invalid major version: x.2"),
            ("2.x", "invalid minor version: 2.x"),
            ("3.0", "server is at version 2.2, behind requested major version 3.0"),
            ("2.3", "server is at version 2.2, behind requested minor version 2.3"),
            ("1.0", "version 1.0 is no longer supported"),
        ] {
            assert_eq!(server.check(Some(text)), Err(detail.to_owned()));
        }
        for text in [None, Some(""), Some("2.0"), Some("2.2"), Some("2.-1"), Some("02.2")] {
            assert_eq!(server.check(text), Ok(()), "{text:?}");
        }
    }
}
