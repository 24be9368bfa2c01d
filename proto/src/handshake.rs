//! Decides the header line by which both ends introduce themselves.
//!
//! `codervpn` SP role SP versions LF, plain ASCII, single spaces. An end writes
//! its own role and expects the opposite one. Both write and read at the same
//! time; bytes behind the line feed belong to the first frame.

use std::fmt;
use std::time::Duration;

use thiserror::Error;

use crate::version::{Version, VersionError, VersionList};

/// From the first byte attempted until the peer's header is judged.
pub const TIMEOUT: Duration = Duration::from_secs(5);

/// Reading fails when so many bytes hold no line feed. It bounds what a peer
/// can make us keep before it has said who it is.
pub const MAX_HEADER: usize = 256;

const PREAMBLE: &str = "codervpn";

/// What an end of a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    Manager,
    Tunnel,
    Client,
    Service,
}

impl Role {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Manager => "manager",
            Self::Tunnel => "tunnel",
            Self::Client => "client",
            Self::Service => "service",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The line an end writes, line feed included.
#[must_use]
pub fn header_line(role: Role, versions: &VersionList) -> String {
    format!("{PREAMBLE} {role} {versions}\n")
}

/// Collects the peer's header from bytes in any splitting.
#[derive(Debug, Default)]
pub struct HeaderReader {
    content: Vec<u8>,
    read: usize,
}

/// What [`HeaderReader::feed`] made of its input.
#[derive(Debug, PartialEq, Eq)]
pub enum Feed {
    /// Everything was taken; more is needed.
    More,
    /// The line ended; so many bytes of the input belonged to it, line feed
    /// included. The rest is the beginning of the first frame.
    Done(usize),
}

impl HeaderReader {
    pub fn feed(&mut self, bytes: &[u8]) -> Result<Feed, HandshakeError> {
        let room = MAX_HEADER - self.read;
        let looked_at = &bytes[..bytes.len().min(room)];
        match looked_at.iter().position(|&b| b == b'\n') {
            Some(end) => {
                self.content.extend_from_slice(&looked_at[..end]);
                self.read += end + 1;
                Ok(Feed::Done(end + 1))
            }
            None => {
                self.content.extend_from_slice(looked_at);
                self.read += looked_at.len();
                if self.read == MAX_HEADER {
                    return Err(HandshakeError::TooLong { header: escape(&self.content) });
                }
                Ok(Feed::More)
            }
        }
    }

    /// The header without its line feed; what there is of it before `Done`.
    #[must_use]
    pub fn content(&self) -> &[u8] {
        &self.content
    }
}

/// Checks a header line without its line feed and settles the version.
pub fn validate(content: &[u8], expected: Role, ours: &VersionList) -> Result<Version, HandshakeError> {
    let header = || escape(content);
    let text = std::str::from_utf8(content)
        .ok()
        .filter(|text| text.is_ascii())
        .ok_or_else(|| HandshakeError::NotAHeader { header: header() })?;
    let mut parts = text.split(' ');
    let (Some(PREAMBLE), Some(role), Some(versions), None) = (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(HandshakeError::NotAHeader { header: header() });
    };
    if role != expected.name() {
        return Err(HandshakeError::WrongRole { expected, header: header() });
    }
    let theirs =
        VersionList::parse(versions).map_err(|reason| HandshakeError::BadVersion { reason, header: header() })?;
    ours.negotiate(&theirs).ok_or_else(|| HandshakeError::NoCommonVersion { ours: ours.clone(), theirs })
}

/// Why a connection never got past its header lines. `header` is the peer's,
/// escaped and cut, safe to be logged.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum HandshakeError {
    #[error("the other end sent no end of line within {MAX_HEADER} bytes: \"{header}\"")]
    TooLong { header: String },
    #[error("the other end does not speak CoderVPN: \"{header}\"")]
    NotAHeader { header: String },
    #[error("the other end is not a CoderVPN {expected}: \"{header}\"")]
    WrongRole { expected: Role, header: String },
    #[error("the other end sent a malformed version ({reason}): \"{header}\"")]
    BadVersion { reason: VersionError, header: String },
    #[error("no common protocol version: we speak {ours}, the other end {theirs}")]
    NoCommonVersion { ours: VersionList, theirs: VersionList },
}

/// Printable ASCII as it is, the rest as escapes, at most [`MAX_HEADER`] bytes.
fn escape(bytes: &[u8]) -> String {
    let mut text = bytes.escape_ascii().to_string();
    text.truncate(MAX_HEADER);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ours() -> VersionList {
        VersionList::current()
    }

    fn read(bytes: &[u8]) -> Result<(Vec<u8>, usize), HandshakeError> {
        let mut reader = HeaderReader::default();
        match reader.feed(bytes)? {
            Feed::Done(used) => Ok((reader.content().to_vec(), used)),
            Feed::More => panic!("no line feed in {bytes:?}"),
        }
    }

    #[test]
    fn vectors_of_9_1() {
        for (role, version, hex) in [
            (Role::Manager, "1.3", "636f64657276706e206d616e6167657220312e330a"),
            (Role::Tunnel, "1.3", "636f64657276706e2074756e6e656c20312e330a"),
            (Role::Client, "1.3", "636f64657276706e20636c69656e7420312e330a"),
            (Role::Service, "1.3", "636f64657276706e207365727669636520312e330a"),
            (Role::Client, "1.1", "636f64657276706e20636c69656e7420312e310a"),
            (Role::Tunnel, "1.2", "636f64657276706e2074756e6e656c20312e320a"),
            (Role::Tunnel, "1.3,2.0", "636f64657276706e2074756e6e656c20312e332c322e300a"),
        ] {
            let versions = VersionList::parse(version).unwrap();
            let line = header_line(role, &versions);
            let as_hex: String = line.bytes().map(|b| format!("{b:02x}")).collect();
            assert_eq!(as_hex, hex);

            let (content, used) = read(line.as_bytes()).unwrap();
            assert_eq!(used, line.len());
            let negotiated = validate(&content, role, &ours()).unwrap();
            assert_eq!(negotiated, Version::new(1, negotiated.minor));
            assert_eq!(Some(negotiated), ours().negotiate(&versions));

            // R-22: the same one byte at a time.
            let mut reader = HeaderReader::default();
            let (last, first) = line.as_bytes().split_last().unwrap();
            for byte in first {
                assert_eq!(reader.feed(&[*byte]), Ok(Feed::More));
            }
            assert_eq!(reader.feed(&[*last]), Ok(Feed::Done(1)));
            assert_eq!(reader.content(), content);
        }
    }

    #[test]
    fn reject_table_of_2_4() {
        let not_a_header = |c: &str| HandshakeError::NotAHeader { header: c.to_owned() };
        let wrong_role = |c: &str| HandshakeError::WrongRole { expected: Role::Manager, header: c.to_owned() };
        let bad_version =
            |reason: VersionError| move |c: &str| HandshakeError::BadVersion { reason, header: c.replace('\r', "\\r") };
        type Expected<'a> = &'a dyn Fn(&str) -> HandshakeError;
        let cases: [(&str, Expected<'_>); 14] = [
            ("codervpn manager", &not_a_header),
            ("codervpn  manager 1.3", &not_a_header),
            ("codervpn manager 1.3 ", &not_a_header),
            ("ssh manager 1.3", &not_a_header),
            ("codervpn cats 1.3", &wrong_role),
            ("codervpn tunnel 1.3", &wrong_role),
            ("codervpn 1.3 manager", &wrong_role),
            ("codervpn manager 1.0,1.2", &bad_version(VersionError::NotAscending)),
            ("codervpn manager 2.0,3.1,1.2", &bad_version(VersionError::NotAscending)),
            ("codervpn manager 0.1", &bad_version(VersionError::MajorZero)),
            ("codervpn manager 1", &bad_version(VersionError::NotTwoNumbers)),
            ("codervpn manager 1.x", &bad_version(VersionError::NotTwoNumbers)),
            ("codervpn manager 2.0", &|_| HandshakeError::NoCommonVersion {
                ours: ours(),
                theirs: VersionList::parse("2.0").unwrap(),
            }),
            ("codervpn manager 1.3\r", &bad_version(VersionError::NotTwoNumbers)),
        ];
        for (content, expected) in cases {
            assert_eq!(validate(content.as_bytes(), Role::Manager, &ours()), Err(expected(content)), "{content:?}");
        }
        assert!(matches!(
            validate(b"\xff\x00", Role::Manager, &ours()),
            Err(HandshakeError::NotAHeader { header }) if header == "\\xff\\x00"
        ));
        assert!(matches!(validate(b"", Role::Manager, &ours()), Err(HandshakeError::NotAHeader { .. })));
    }

    #[test]
    fn r22_a_header_has_at_most_255_bytes_before_its_line_feed() {
        let fits = format!("codervpn tunnel {}\n", "1.3,".repeat(60).trim_end_matches(','));
        assert_eq!(fits.len(), 256);
        let (content, _) = read(fits.as_bytes()).unwrap();
        assert!(matches!(validate(&content, Role::Tunnel, &ours()), Err(HandshakeError::BadVersion { .. })));

        let too_long = format!("codervpn tunnel {}\n", "1".repeat(240));
        let mut reader = HeaderReader::default();
        assert_eq!(reader.feed(&too_long.as_bytes()[..255]), Ok(Feed::More));
        // Fails on the 256th byte, before the line feed was looked at.
        assert!(matches!(reader.feed(&too_long.as_bytes()[255..256]), Err(HandshakeError::TooLong { .. })));
    }

    #[test]
    fn r22_bytes_behind_the_header_are_left_alone() {
        let (content, used) = read(b"codervpn client 1.3\n\0\0\0\x06").unwrap();
        assert_eq!(content, b"codervpn client 1.3");
        assert_eq!(used, 20);
    }
}
