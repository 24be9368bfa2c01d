//! Decides which version of CoderVPN a connection speaks.
//!
//! Each end offers a list of `major.minor`. The highest common major wins, with
//! the smaller of the two minors. Minors only add, so the negotiated one gates
//! which messages we originate and never which fields we parse.

use std::fmt;

use thiserror::Error;

/// One version, `major.minor`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    pub major: u64,
    pub minor: u64,
}

impl Version {
    /// What we speak, in every role.
    pub const CURRENT: Self = Self::new(1, 3);
    /// The first with `wake`.
    pub const WAKE: Self = Self::new(1, 3);

    #[must_use]
    pub const fn new(major: u64, minor: u64) -> Self {
        Self { major, minor }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A legal list: not empty, majors at least 1 and strictly ascending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VersionList(Vec<Version>);

impl VersionList {
    /// The list we advertise.
    #[must_use]
    pub fn current() -> Self {
        Self(vec![Version::CURRENT])
    }

    pub fn new(versions: impl Into<Vec<Version>>) -> Result<Self, VersionError> {
        let versions = versions.into();
        let mut last = 0;
        for version in &versions {
            if version.major == 0 {
                return Err(VersionError::MajorZero);
            }
            if version.major <= last {
                return Err(VersionError::NotAscending);
            }
            last = version.major;
        }
        if versions.is_empty() {
            return Err(VersionError::Empty);
        }
        Ok(Self(versions))
    }

    /// Parses the third part of a header line.
    pub fn parse(text: &str) -> Result<Self, VersionError> {
        let versions = text.split(',').map(parse_version).collect::<Result<Vec<_>, _>>()?;
        Self::new(versions)
    }

    /// The version both ends speak; the same whichever end asks.
    #[must_use]
    pub fn negotiate(&self, theirs: &Self) -> Option<Version> {
        self.0.iter().rev().find_map(|ours| {
            let theirs = theirs.0.iter().find(|v| v.major == ours.major)?;
            Some(Version::new(ours.major, ours.minor.min(theirs.minor)))
        })
    }
}

impl fmt::Display for VersionList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, version) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str(",")?;
            }
            write!(f, "{version}")?;
        }
        Ok(())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum VersionError {
    #[error("the version list is empty")]
    Empty,
    #[error("a version is not two decimal numbers with a dot between them")]
    NotTwoNumbers,
    #[error("a major version is 0")]
    MajorZero,
    #[error("major versions do not ascend")]
    NotAscending,
}

fn parse_version(text: &str) -> Result<Version, VersionError> {
    let (major, minor) = text.split_once('.').ok_or(VersionError::NotTwoNumbers)?;
    Ok(Version::new(parse_number(major)?, parse_number(minor)?))
}

/// `u64::from_str` would take a plus sign.
fn parse_number(text: &str) -> Result<u64, VersionError> {
    if !text.bytes().all(|b| b.is_ascii_digit()) {
        return Err(VersionError::NotTwoNumbers);
    }
    text.parse().map_err(|_| VersionError::NotTwoNumbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negotiation_table_of_2_4() {
        for (ours, theirs, expected) in [
            ("1.3", "1.3", Some("1.3")),
            ("1.3", "1.1", Some("1.1")),
            ("1.2", "1.3,2.1", Some("1.2")),
            ("1.2,2.4,3.2", "1.2,2.3", Some("2.3")),
            ("1.2,2.4,3.2", "2.3,3.3", Some("3.2")),
            ("1.2,2.4,3.2", "4.1,5.2", None),
            ("1.3", "2.0", None),
        ] {
            let ours = VersionList::parse(ours).unwrap();
            let theirs = VersionList::parse(theirs).unwrap();
            let expected = expected.map(str::to_owned);
            assert_eq!(ours.negotiate(&theirs).map(|v| v.to_string()), expected);
            assert_eq!(theirs.negotiate(&ours).map(|v| v.to_string()), expected);
        }
    }

    #[test]
    fn lists_are_strict_except_for_leading_zeros() {
        for (text, error) in [
            ("", VersionError::NotTwoNumbers),
            ("1", VersionError::NotTwoNumbers),
            ("1.", VersionError::NotTwoNumbers),
            (".1", VersionError::NotTwoNumbers),
            ("1.2.3", VersionError::NotTwoNumbers),
            ("1.x", VersionError::NotTwoNumbers),
            ("+1.2", VersionError::NotTwoNumbers),
            ("1.-2", VersionError::NotTwoNumbers),
            ("1.3,", VersionError::NotTwoNumbers),
            ("1.3, 2.0", VersionError::NotTwoNumbers),
            ("1.18446744073709551616", VersionError::NotTwoNumbers),
            ("0.1", VersionError::MajorZero),
            ("1.0,1.2", VersionError::NotAscending),
            ("2.0,3.1,1.2", VersionError::NotAscending),
        ] {
            assert_eq!(VersionList::parse(text), Err(error), "{text:?}");
        }
        let zeros = VersionList::parse("01.03,2.18446744073709551615").unwrap();
        assert_eq!(zeros.to_string(), "1.3,2.18446744073709551615");
        assert_eq!(VersionList::new([]), Err(VersionError::Empty));
    }
}
