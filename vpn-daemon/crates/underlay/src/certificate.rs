//! Reads subject and issuer out of a certificate, for error texts only. A
//! certificate that cannot be read yields "unknown"; whether it is trusted is
//! never decided here.

/// Longest text taken from a certificate or its verifier.
const MAX_TEXT: usize = 256;

const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const OID: u8 = 0x06;
const VERSION: u8 = 0xa0;
/// X.520 attribute types share this prefix (2.5.4).
const X520: [u8; 2] = [0x55, 0x04];

/// Who a certificate is for and who signed it, as a person would write it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CertificateText {
    pub(crate) subject: String,
    pub(crate) issuer: String,
}

impl CertificateText {
    pub(crate) fn parse(der: &[u8]) -> CertificateText {
        names(der).unwrap_or_else(|| CertificateText { subject: "unknown".into(), issuer: "unknown".into() })
    }
}

/// Cuts a foreign text to a length that fits an error line and drops control
/// characters.
pub(crate) fn bounded(text: &str) -> String {
    bounded_to(text, MAX_TEXT)
}

pub(crate) fn bounded_to(text: &str, limit: usize) -> String {
    let mut out = String::new();
    for c in text.chars() {
        if out.len() + c.len_utf8() > limit {
            out.push('…');
            break;
        }
        if c.is_control() {
            if matches!(c, '\n' | '\r' | '\t') && !out.ends_with(' ') {
                out.push(' ');
            }
        } else {
            out.push(c);
        }
    }
    out
}

/// One DER element: its tag, its content and what follows it.
struct Element<'a> {
    tag: u8,
    content: &'a [u8],
    rest: &'a [u8],
}

fn element(input: &[u8]) -> Option<Element<'_>> {
    let (&tag, input) = input.split_first()?;
    let (&first, mut input) = input.split_first()?;
    let length = if first < 0x80 {
        usize::from(first)
    } else {
        let count = usize::from(first & 0x7f);
        if count == 0 || count > 4 || input.len() < count {
            return None;
        }
        let (bytes, after) = input.split_at(count);
        input = after;
        bytes.iter().fold(0usize, |length, byte| (length << 8) | usize::from(*byte))
    };
    if input.len() < length {
        return None;
    }
    let (content, rest) = input.split_at(length);
    Some(Element { tag, content, rest })
}

fn expect(input: &[u8], tag: u8) -> Option<Element<'_>> {
    element(input).filter(|e| e.tag == tag)
}

/// Certificate ::= SEQ { tbs SEQ { [0] version?, serial, algorithm, issuer,
/// validity, subject, … } … }
fn names(der: &[u8]) -> Option<CertificateText> {
    let certificate = expect(der, SEQUENCE)?;
    let tbs = expect(certificate.content, SEQUENCE)?;
    let mut input = tbs.content;
    if let Some(version) = expect(input, VERSION) {
        input = version.rest;
    }
    let serial = element(input)?;
    let algorithm = expect(serial.rest, SEQUENCE)?;
    let issuer = expect(algorithm.rest, SEQUENCE)?;
    let validity = expect(issuer.rest, SEQUENCE)?;
    let subject = expect(validity.rest, SEQUENCE)?;
    Some(CertificateText { subject: distinguished_name(subject.content), issuer: distinguished_name(issuer.content) })
}

fn distinguished_name(mut input: &[u8]) -> String {
    let mut parts = Vec::new();
    while let Some(set) = expect(input, SET) {
        input = set.rest;
        parts.extend(attribute(set.content));
    }
    if parts.is_empty() {
        return "none".into();
    }
    bounded(&parts.join(", "))
}

fn attribute(set: &[u8]) -> Option<String> {
    let pair = expect(set, SEQUENCE)?;
    let kind = expect(pair.content, OID)?;
    let value = element(kind.rest)?;
    let name = match kind.content.strip_prefix(&X520)? {
        [3] => "CN",
        [6] => "C",
        [7] => "L",
        [8] => "ST",
        [10] => "O",
        [11] => "OU",
        _ => return None,
    };
    // BMPString and UniversalString are not used by anybody's roots.
    Some(format!("{name}={}", String::from_utf8_lossy(value.content)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn certificate() -> Vec<u8> {
        let mut parameters = rcgen::CertificateParams::new(vec!["a.example".into()]).unwrap();
        parameters.distinguished_name = rcgen::DistinguishedName::new();
        parameters.distinguished_name.push(rcgen::DnType::OrganizationName, "Acme");
        parameters.distinguished_name.push(rcgen::DnType::CommonName, "Acme Root");
        let key = rcgen::KeyPair::generate().unwrap();
        parameters.self_signed(&key).unwrap().der().to_vec()
    }

    #[test]
    fn names_are_read() {
        let text = CertificateText::parse(&certificate());
        assert_eq!(text.subject, "O=Acme, CN=Acme Root");
        assert_eq!(text.issuer, text.subject);
    }

    #[test]
    fn no_cut_of_a_certificate_panics() {
        let whole = certificate();
        for length in 0..whole.len() {
            let _ = CertificateText::parse(&whole[..length]);
        }
        for at in 0..200 {
            let mut broken = whole.clone();
            broken[at] ^= 0xff;
            let _ = CertificateText::parse(&broken);
        }
    }

    #[test]
    fn foreign_text_is_cut_and_cleaned() {
        let text = bounded(&format!("a\u{1b}[31m\nb{}", "x".repeat(1000)));
        assert!(text.starts_with("a[31m b"));
        assert!(text.len() <= MAX_TEXT + 3);
    }
}
