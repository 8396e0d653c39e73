//! Times as text: RFC 3339 in UTC with milliseconds. For `#[serde(with = "rfc3339")]`.

use chrono::{DateTime, SecondsFormat};
use serde::{Deserialize, Deserializer, Serializer, de::Error};

use super::Time;

/// `time` as text.
pub fn format(time: Time) -> String {
    time.to_rfc3339_opts(SecondsFormat::Millis, true)
}

/// Writes a time.
///
/// # Errors
///
/// Those of the serializer.
pub fn serialize<S: Serializer>(time: &Time, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&format(*time))
}

/// Reads a time.
///
/// # Errors
///
/// The text is no time of RFC 3339.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Time, D::Error> {
    let text = String::deserialize(deserializer)?;
    DateTime::parse_from_rfc3339(&text)
        .map(|time| time.to_utc())
        .map_err(D::Error::custom)
}
