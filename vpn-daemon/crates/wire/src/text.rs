//! Decides what text of a stranger may look like before it reaches a log, a screen or another program.

/// Longest text of a relay or peer that is kept (T-21).
pub(crate) const MAX_FOREIGN_TEXT: usize = 512;

/// Text of a stranger: lossy UTF-8, without control characters, at most [`MAX_FOREIGN_TEXT`] bytes.
pub(crate) fn foreign(bytes: &[u8]) -> String {
    let head = bytes.get(..MAX_FOREIGN_TEXT).unwrap_or(bytes);
    let mut text: String = String::from_utf8_lossy(head).chars().filter(|c| !is_hidden(*c)).collect();
    let mut end = text.len().min(MAX_FOREIGN_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    text
}

/// Control characters, and the marks that reorder the text around them on a screen.
fn is_hidden(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    /// T-21: capped and stripped.
    #[test]
    fn t21_foreign_text_is_short_and_plain() {
        assert_eq!(foreign(b"a\x1b[31mb\r\nc"), "a[31mbc");
        assert_eq!(foreign("x\u{202e}y".as_bytes()), "xy");
        assert_eq!(foreign(&[b'z'; 4096]).len(), MAX_FOREIGN_TEXT);
        assert!(foreign(&[0xff; 4096]).len() <= MAX_FOREIGN_TEXT);
    }
}
