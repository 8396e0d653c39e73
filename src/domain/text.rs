//! Short texts that callers send: how long they may be and what they may hold.

use serde::Deserialize;

/// Whether JavaScript's `String.prototype.trim` removes `c`: ECMA-262's `WhiteSpace` and
/// `LineTerminator`, which is Unicode's `White_Space` without U+0085 and with U+FEFF.
pub fn is_white_space(c: char) -> bool {
    c == '\u{FEFF}' || (c.is_whitespace() && c != '\u{85}')
}

/// `text` without white space at either end, as JavaScript's `trim` does it.
pub fn trim(text: &str) -> &str {
    text.trim_matches(is_white_space)
}

fn check(text: &str, max_bytes: usize) -> Result<(), String> {
    if text.is_empty() {
        return Err("must not be empty".into());
    }
    if text.len() > max_bytes {
        return Err(format!(
            "is {} bytes long in UTF-8; at most {max_bytes} are allowed",
            text.len()
        ));
    }
    match text.chars().find(|c| c.is_control()) {
        Some(c) => Err(format!(
            "must not hold control characters (found U+{:04X})",
            u32::from(c)
        )),
        None => Ok(()),
    }
}

/// A text of 1 to `MAX` bytes of UTF-8 without control characters.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Deserialize)]
#[serde(try_from = "String")]
pub struct Text<const MAX: usize>(String);

impl<const MAX: usize> Text<MAX> {
    /// The text itself.
    pub fn into_string(self) -> String {
        self.0
    }
}

impl<const MAX: usize> TryFrom<String> for Text<MAX> {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        check(&text, MAX).map(|()| Self(text))
    }
}

/// An order's name, a claimant, or a provider's id.
pub type Name = Text<255>;
/// Why something failed, for a person to read.
pub type Reason = Text<2000>;

/// Identifies the work, never the attempt: 1 to 255 bytes without control characters, and
/// without white space at either end. It is never changed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(try_from = "String")]
pub struct IdempotencyKey(String);

impl IdempotencyKey {
    /// The key's text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// A key read from the store, where rows of raw SQL may hold any text.
    pub fn from_store(text: String) -> Self {
        Self(text)
    }
}

impl TryFrom<String> for IdempotencyKey {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        check(&text, 255)?;
        if trim(&text).len() != text.len() {
            return Err("must not begin or end with white space".into());
        }
        Ok(Self(text))
    }
}

/// What an effect is about, and so where it goes: 1 to 128 ASCII letters, digits, `.`, `_`, `-`, `:`
/// and `/`. A header, a URL and a label of a metric can all hold it as it is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(try_from = "String")]
pub struct Topic(String);

impl Topic {
    /// The topic's text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Topic {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let is_plain =
            |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'.' | b'_' | b'-' | b':' | b'/');
        if (1..=128).contains(&text.len()) && text.bytes().all(is_plain) {
            Ok(Self(text))
        } else {
            Err("must be 1 to 128 ASCII letters, digits, '.', '_', '-', ':' or '/'".into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn white_space_is_what_javascript_trims() {
        // `Array.from({length: 65536}, (_, i) => i).filter(i => !String.fromCharCode(i).trim())`
        let javascript = [
            9, 10, 11, 12, 13, 32, 160, 5760, 8192, 8193, 8194, 8195, 8196, 8197, 8198, 8199, 8200,
            8201, 8202, 8232, 8233, 8239, 8287, 12288, 65279,
        ];
        let ours: Vec<u32> = (0..0x11_0000)
            .filter(|&code| char::from_u32(code).is_some_and(is_white_space))
            .collect();
        assert_eq!(ours, javascript);
    }

    #[test]
    fn length_is_counted_in_bytes() {
        assert!(Name::try_from("é".repeat(127)).is_ok());
        assert!(Name::try_from("é".repeat(128)).is_err());
        assert!(Name::try_from("a".repeat(255)).is_ok());
        assert!(Name::try_from(String::new()).is_err());
    }

    #[test]
    fn control_characters_are_refused_and_named() {
        for c in ['\0', '\n', '\u{7f}', '\u{9f}'] {
            let refused = Name::try_from(format!("a{c}b")).unwrap_err();
            assert!(
                refused.contains(&format!("U+{:04X}", u32::from(c))),
                "{refused}"
            );
        }
    }

    #[test]
    fn a_key_has_no_white_space_at_its_ends() {
        assert!(IdempotencyKey::try_from("a b".to_owned()).is_ok());
        for bad in [" a", "a\u{feff}", "\u{2003}a"] {
            assert!(IdempotencyKey::try_from(bad.to_owned()).is_err());
        }
    }

    #[test]
    fn a_topic_is_plain_and_short() {
        for good in ["a", "order.paid", "n8n:mail/v2_x-y", &"a".repeat(128)] {
            assert!(Topic::try_from(good.to_owned()).is_ok(), "{good}");
        }
        for bad in ["", "*", "a b", "a=b", "a,b", "é", "a\n", &"a".repeat(129)] {
            assert!(Topic::try_from(bad.to_owned()).is_err(), "{bad}");
        }
    }
}
