//! How webhooks are signed: Standard Webhooks 1.0.0, the symmetric scheme
//! (<https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md>).

use std::fmt;

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use base64::engine::{DecodePaddingMode, general_purpose};
use hmac::{Hmac, KeyInit, Mac};
use secrecy::zeroize::Zeroizing;
use secrecy::{ExposeSecret, SecretBox};
use sha2::Sha256;

/// How many bytes a secret has.
const LENGTHS: std::ops::RangeInclusive<usize> = 24..=64;

/// SHA-256's block, which no secret exceeds. HMAC fills a shorter key up with zeroes (RFC 2104,
/// section 2), so that a secret may be kept as the block that it becomes.
const BLOCK: usize = 64;

/// The specification leaves open whether secrets are padded, and its libraries read both.
const EITHER_PADDING: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// What a sender and a receiver share. It does not show in `Debug`, and its memory is wiped.
pub struct SigningSecret(SecretBox<[u8; BLOCK]>);

impl SigningSecret {
    /// The secrets of `OUTBOX_SECRETS`: `whsec_` and 24 to 64 bytes in base64, separated by commas.
    ///
    /// # Errors
    ///
    /// One line, which names the entry by its number and repeats nothing of it.
    pub fn parse_list(list: &str) -> Result<Vec<Self>, String> {
        let entries = list.split(',').zip(1..);
        entries
            .map(|(entry, number)| {
                Self::parse(entry.trim())
                    .map_err(|fault| format!("OUTBOX_SECRETS: entry {number} {fault}"))
            })
            .collect()
    }

    fn parse(text: &str) -> Result<Self, String> {
        let encoded = text
            .strip_prefix("whsec_")
            .ok_or("does not begin with whsec_")?;
        let bytes = EITHER_PADDING
            .decode(encoded)
            .map(Zeroizing::new)
            .map_err(|_| "is not base64 after whsec_")?;
        if !LENGTHS.contains(&bytes.len()) {
            return Err(format!(
                "has {} bytes; a secret has {} to {} (openssl rand -base64 32 makes one)",
                bytes.len(),
                LENGTHS.start(),
                LENGTHS.end()
            ));
        }
        let mut block = Box::new([0; BLOCK]);
        block[..bytes.len()].copy_from_slice(&bytes);
        Ok(Self(SecretBox::new(block)))
    }

    /// One signature as it stands in the header.
    fn sign(&self, id: &str, timestamp: &str, body: &[u8]) -> String {
        let mut mac = Hmac::<Sha256>::new(self.0.expose_secret().into());
        for part in [id.as_bytes(), b".", timestamp.as_bytes(), b".", body] {
            mac.update(part);
        }
        let signature = mac.finalize().into_bytes();
        format!("v1,{}", general_purpose::STANDARD.encode(signature))
    }
}

impl fmt::Debug for SigningSecret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("SigningSecret(…)")
    }
}

/// The header `webhook-signature`: a signature for each of the secrets, so that one can be replaced
/// while receivers still check with another. `timestamp` is in Unix seconds, and of the try rather
/// than of the event; `id` must not hold a `.`, or what is signed could be read in two ways.
pub fn signatures(secrets: &[SigningSecret], id: &str, timestamp: i64, body: &[u8]) -> String {
    let timestamp = timestamp.to_string();
    let signatures: Vec<String> = secrets
        .iter()
        .map(|secret| secret.sign(id, &timestamp, body))
        .collect();
    signatures.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    const ID: &str = "msg_p5jXN8AQM9LWM0D4loKWxJek";
    const BODY: &[u8] = br#"{"test": 2432232314}"#;
    const SIGNATURE: &str = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";

    fn base64_of(length: usize) -> String {
        general_purpose::STANDARD.encode(vec![7; length])
    }

    #[test]
    fn the_example_of_the_libraries_comes_out_the_same() {
        let secrets = SigningSecret::parse_list(SECRET).unwrap();
        assert_eq!(signatures(&secrets, ID, 1_614_265_330, BODY), SIGNATURE);
    }

    #[test]
    fn each_secret_signs_in_its_turn() {
        let other = format!("whsec_{}", base64_of(64));
        let secrets = SigningSecret::parse_list(&format!("{other}, {SECRET}")).unwrap();
        let all = signatures(&secrets, ID, 1_614_265_330, BODY);
        let alone = signatures(&secrets[..1], ID, 1_614_265_330, BODY);
        assert_eq!(all, format!("{alone} {SIGNATURE}"));
        assert_eq!(signatures(&[], ID, 1_614_265_330, BODY), "");
    }

    #[test]
    fn a_secret_has_24_to_64_bytes_padded_or_not() {
        for length in 24..=64 {
            let padded = format!("whsec_{}", base64_of(length));
            let both = format!("{padded},{}", padded.trim_end_matches('='));
            let secrets = SigningSecret::parse_list(&both).unwrap();
            let signed = signatures(&secrets, "id", 0, b"");
            let (one, other) = signed.split_once(' ').unwrap();
            assert_eq!(one, other);
        }
    }

    #[test]
    fn a_refusal_names_the_entry_and_not_the_secret() {
        let long = base64_of(65);
        for bad in [
            "",
            "hunter2",
            "whsec_",
            "whsec_hunter2",
            "whsec_hunter2!",
            "WHSEC_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
            &format!("whsec_hunter2{long}"),
            &format!("whsec_{}", base64_of(23)),
            &format!("whsec_{long}"),
            "whsk_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        ] {
            let refused = SigningSecret::parse_list(&format!("{SECRET},{bad}")).unwrap_err();
            assert!(refused.starts_with("OUTBOX_SECRETS: entry 2 "), "{refused}");
            assert!(!refused.contains("hunter2"), "{refused}");
            assert!(!refused.contains("MfKQ"), "{refused}");
        }
    }

    #[test]
    fn a_secret_does_not_show_in_debug() {
        let secrets = SigningSecret::parse_list(SECRET).unwrap();
        assert_eq!(format!("{secrets:?}"), "[SigningSecret(…)]");
    }
}
