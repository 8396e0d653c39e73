//! Times as text: RFC 3339 in UTC with milliseconds. For `#[serde(with = "rfc3339")]`.

use chrono::{DateTime, SecondsFormat};
use serde::{Deserialize, Deserializer, Serializer, de::Error};

use super::Time;

/// Unix times in milliseconds: the first and the last that the format can write.
const FIRST: i64 = -62_167_219_200_000;
const LAST: i64 = 253_402_300_799_999;

/// `time` as text; one beyond the years 0 to 9999 as the nearest that has four digits.
pub fn format(time: Time) -> String {
    DateTime::from_timestamp_millis(time.timestamp_millis().clamp(FIRST, LAST))
        .unwrap_or(time)
        .to_rfc3339_opts(SecondsFormat::Millis, true)
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
