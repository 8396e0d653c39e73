//! How a key is made of the work it stands for.

use chrono::{DateTime, NaiveDateTime, TimeDelta};
use serde::Deserialize;
use serde_json::{Map, Number, Value};
use sha2::{Digest, Sha256};
use unicode_normalization::{UnicodeNormalization, is_nfc};
use uuid::{Builder, Uuid};

use super::json::{canonical, javascript_number};
use super::text::{self, IdempotencyKey};
use super::{Invalid, Time};

/// The namespace of the UUIDs (version 5, RFC 9562) that go with the keys.
pub const UUID_NAMESPACE: Uuid = Uuid::from_u128(0x9acf_0a2f_76a2_5cd1_ae81_b865_e32c_71da);

/// How many warnings a reply holds at most.
const MAX_WARNINGS: usize = 20;

/// How many characters of a member's pointer a warning repeats at most.
const MAX_POINTER: usize = 300;

/// The largest integer that a double, and so JavaScript, surely holds exactly:
/// `Number.MAX_SAFE_INTEGER`.
const MAX_SAFE_INTEGER: f64 = 9_007_199_254_740_991.0;

/// Members that differ between two attempts at the same work, in lower case and without `_`
/// and `-`.
const CHANGING_MEMBERS: [&str; 15] = [
    "attempt",
    "attemptcount",
    "attemptnumber",
    "attempts",
    "currenttime",
    "deliveryid",
    "executionid",
    "nonce",
    "now",
    "requestid",
    "retries",
    "retry",
    "retrycount",
    "runindex",
    "timestamp",
];

/// A step of normalisation. The order in which a caller lists them does not matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Normalization {
    /// Unicode Normalization Form C (UAX #15).
    Nfc,
    /// White space at both ends removed, as JavaScript's `trim` does.
    Trim,
    /// Lower case, as JavaScript's `toLowerCase` does.
    Lowercase,
}

impl TryFrom<String> for Normalization {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        match name.as_str() {
            "nfc" => Ok(Self::Nfc),
            "trim" => Ok(Self::Trim),
            "lowercase" => Ok(Self::Lowercase),
            _ => Err(r#"must be "nfc", "trim" or "lowercase""#.into()),
        }
    }
}

/// What a key is made of.
#[derive(Debug, Clone, PartialEq)]
pub enum Material {
    /// Joined with `:`, each as a JavaScript template literal writes it.
    Parts(Vec<Value>),
    /// Written canonically (RFC 8785).
    Fields(Map<String, Value>),
}

/// What a key is made of, and how.
#[derive(Debug, Clone, PartialEq)]
pub struct Recipe {
    /// The values that identify the work.
    pub material: Material,
    /// Keeps the keys of two uses apart.
    pub scope: Option<String>,
    /// Steps applied to the scope and to every string value at any depth.
    pub normalize: Vec<Normalization>,
    /// Whether null, empty and blank values are let through.
    pub allow_empty: bool,
}

/// A key that was made of values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DerivedKey {
    /// SHA-256 of [`Self::canonical`], in lower-case hex.
    pub key: IdempotencyKey,
    /// The text that was hashed.
    pub canonical: String,
    /// What is probably a mistake in the values.
    pub warnings: Vec<String>,
}

/// Which version a key's UUID is stamped with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum UuidVersion {
    /// What it is: derived from a name by SHA-1 (RFC 9562, section 5.5).
    #[default]
    V5,
    /// The same bytes stamped as random, for APIs that accept nothing else.
    V4,
}

/// The UUID that goes with a key, for headers such as `PayPal-Request-Id`.
pub fn uuid_of(key: &IdempotencyKey, version: UuidVersion) -> Uuid {
    let uuid = Uuid::new_v5(&UUID_NAMESPACE, key.as_str().as_bytes());
    match version {
        UuidVersion::V5 => uuid,
        UuidVersion::V4 => Builder::from_random_bytes(uuid.into_bytes()).into_uuid(),
    }
}

impl Recipe {
    /// Makes the key. `now` only serves the warning about values that are the present time.
    ///
    /// # Errors
    ///
    /// Every part or top-level member that is null, empty or blank without `allow_empty`, every
    /// array or object among the parts, and a wrong number of either.
    pub fn derive(&self, now: Time) -> Result<DerivedKey, Vec<Invalid>> {
        let scope = self.scope.as_deref().map(|scope| self.normalized(scope));
        let mut faults = Vec::new();
        let mut warnings = Warnings::new(now);
        if let Some(scope) = &scope {
            self.check_not_blank(scope, "/scope", &mut faults);
            warnings.text(scope, "/scope");
        }
        let canonical = match &self.material {
            Material::Parts(parts) => {
                self.join(scope.as_deref(), parts, &mut faults, &mut warnings)
            }
            Material::Fields(fields) => self.write(scope, fields, &mut faults, &mut warnings),
        };
        if !faults.is_empty() {
            return Err(faults);
        }
        Ok(DerivedKey {
            key: IdempotencyKey::from_store(hex(&Sha256::digest(&canonical))),
            canonical,
            warnings: warnings.finish(),
        })
    }

    fn join(
        &self,
        scope: Option<&str>,
        parts: &[Value],
        faults: &mut Vec<Invalid>,
        warnings: &mut Warnings,
    ) -> String {
        if !(1..=32).contains(&parts.len()) {
            faults.push(Invalid::new(
                "/parts",
                format!("must have 1 to 32 elements, not {}", parts.len()),
            ));
            return String::new();
        }
        let mut texts = Vec::with_capacity(parts.len() + 1);
        if let Some(scope) = scope {
            warnings.colon(scope, "/scope");
            texts.push(scope.to_owned());
        }
        for (index, part) in parts.iter().enumerate() {
            let pointer = format!("/parts/{index}");
            match part {
                Value::String(text) => {
                    let text = self.normalized(text);
                    self.check_not_blank(&text, &pointer, faults);
                    warnings.text(&text, &pointer);
                    warnings.colon(&text, &pointer);
                    texts.push(text);
                }
                Value::Number(number) => {
                    warnings.number(number, &pointer);
                    texts.push(javascript_number(number));
                }
                Value::Bool(value) => texts.push(value.to_string()),
                Value::Null if self.allow_empty => texts.push("null".into()),
                Value::Null => faults.push(Invalid::new(pointer, EMPTY)),
                Value::Array(_) | Value::Object(_) => faults.push(Invalid::new(
                    pointer,
                    "must be a string, a number or a boolean; for arrays and objects use \"fields\"",
                )),
            }
        }
        texts.join(":")
    }

    fn write(
        &self,
        scope: Option<String>,
        fields: &Map<String, Value>,
        faults: &mut Vec<Invalid>,
        warnings: &mut Warnings,
    ) -> String {
        if !(1..=64).contains(&fields.len()) {
            faults.push(Invalid::new(
                "/fields",
                format!("must have 1 to 64 members, not {}", fields.len()),
            ));
            return String::new();
        }
        let mut normalized = Map::with_capacity(fields.len());
        for (name, member) in fields {
            let member = self.normalized_value(member);
            let pointer = format!("/fields/{}", escaped(name));
            match &member {
                Value::Null if !self.allow_empty => faults.push(Invalid::new(&pointer, EMPTY)),
                Value::String(text) => self.check_not_blank(text, &pointer, faults),
                _ => {}
            }
            warnings.member(name, &member, &pointer);
            normalized.insert(name.clone(), member);
        }
        let fields = Value::Object(normalized);
        canonical(&match scope {
            Some(scope) => Value::Array(vec![scope.into(), fields]),
            None => fields,
        })
    }

    fn check_not_blank(&self, text: &str, pointer: &str, faults: &mut Vec<Invalid>) {
        if !self.allow_empty && text::trim(text).is_empty() {
            faults.push(Invalid::new(pointer, EMPTY));
        }
    }

    /// Always in the order NFC, trim, lower case.
    fn normalized(&self, text: &str) -> String {
        let mut text = text.to_owned();
        if self.normalize.contains(&Normalization::Nfc) {
            text = text.nfc().collect();
        }
        if self.normalize.contains(&Normalization::Trim) {
            text = text::trim(&text).to_owned();
        }
        if self.normalize.contains(&Normalization::Lowercase) {
            text = text.to_lowercase();
        }
        text
    }

    fn normalized_value(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => self.normalized(text).into(),
            Value::Array(items) => items
                .iter()
                .map(|item| self.normalized_value(item))
                .collect(),
            Value::Object(members) => Value::Object(
                members
                    .iter()
                    .map(|(name, member)| (name.clone(), self.normalized_value(member)))
                    .collect(),
            ),
            other => other.clone(),
        }
    }
}

const EMPTY: &str = "is null, empty or only white space: the key would be the same for everybody who sends nothing here; set \"allow_empty\": true if that is meant";

/// A member's name as a token of an RFC 6901 pointer.
pub fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Collects what is probably a mistake, up to [`MAX_WARNINGS`].
struct Warnings {
    now: Time,
    found: Vec<String>,
    more: usize,
}

impl Warnings {
    fn new(now: Time) -> Self {
        Self {
            now,
            found: Vec::new(),
            more: 0,
        }
    }

    fn finish(mut self) -> Vec<String> {
        if self.more > 0 {
            self.found.push(format!("and {} more", self.more));
        }
        self.found
    }

    fn add(&mut self, pointer: &str, text: &str) {
        if self.found.len() < MAX_WARNINGS {
            let pointer: String = pointer.chars().take(MAX_POINTER).collect();
            self.found.push(format!("{pointer} {text}"));
        } else {
            self.more += 1;
        }
    }

    /// Warns about a member and everything below it.
    fn member(&mut self, name: &str, value: &Value, pointer: &str) {
        let plain: String = name
            .chars()
            .filter(|c| !matches!(c, '_' | '-'))
            .flat_map(char::to_lowercase)
            .collect();
        if CHANGING_MEMBERS.contains(&plain.as_str()) {
            self.add(
                pointer,
                "usually changes between attempts at the same work; then no two attempts share a key",
            );
        }
        if !is_nfc(name) {
            self.add(pointer, NOT_NFC);
        }
        self.value(value, pointer);
    }

    fn value(&mut self, value: &Value, pointer: &str) {
        match value {
            Value::String(text) => self.text(text, pointer),
            Value::Number(number) => self.number(number, pointer),
            Value::Array(items) => {
                for (index, item) in items.iter().enumerate() {
                    self.value(item, &format!("{pointer}/{index}"));
                }
            }
            Value::Object(members) => {
                for (name, member) in members {
                    self.member(name, member, &format!("{pointer}/{}", escaped(name)));
                }
            }
            Value::Null | Value::Bool(_) => {}
        }
    }

    fn text(&mut self, text: &str, pointer: &str) {
        if !is_nfc(text) {
            self.add(pointer, NOT_NFC);
        }
        if time_in_text(text).is_some_and(|time| self.is_now(time)) {
            self.add(pointer, IS_NOW);
        }
    }

    fn number(&mut self, number: &Number, pointer: &str) {
        let double = number.as_f64().unwrap_or_default();
        if double.abs() > MAX_SAFE_INTEGER && double.fract() == 0.0 {
            self.add(
                pointer,
                "is an integer past 2^53, which JavaScript (and so n8n) rounds: send it as a string",
            );
        }
        if time_in_number(double).is_some_and(|time| self.is_now(time)) {
            self.add(pointer, IS_NOW);
        }
    }

    fn colon(&mut self, text: &str, pointer: &str) {
        if text.contains(':') {
            self.add(
                pointer,
                "contains \":\", the separator: [\"a:b\",\"c\"] and [\"a\",\"b:c\"] share a key; use \"fields\"",
            );
        }
    }

    fn is_now(&self, time: Time) -> bool {
        (time - self.now).abs() <= TimeDelta::seconds(60)
    }
}

const NOT_NFC: &str = "is not in Unicode NFC, so text that looks the same may give another key; \"normalize\": [\"nfc\"] helps for values";
const IS_NOW: &str =
    "is the present time, which changes between attempts; then no two attempts share a key";

/// Reads ISO 8601 as JavaScript and n8n write it, and digits that count seconds or milliseconds.
fn time_in_text(text: &str) -> Option<Time> {
    let text = text::trim(text);
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return time_in_number(text.parse().ok()?);
    }
    if let Ok(time) = DateTime::parse_from_rfc3339(text) {
        return Some(time.to_utc());
    }
    ["%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%d %H:%M:%S%.f"]
        .iter()
        .find_map(|format| NaiveDateTime::parse_from_str(text, format).ok())
        .map(|time| time.and_utc())
}

/// Unix time in seconds, or in milliseconds where it is too large for that.
fn time_in_number(number: f64) -> Option<Time> {
    let milliseconds = if number.abs() < 1e11 {
        number * 1000.0
    } else {
        number
    };
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a number beyond i64 saturates, and is no time that chrono takes"
    )]
    DateTime::from_timestamp_millis(milliseconds as i64)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn recipe(request: Value) -> Recipe {
        let text = |name: &str| request[name].as_str().map(str::to_owned);
        Recipe {
            material: match &request["parts"] {
                Value::Array(parts) => Material::Parts(parts.clone()),
                _ => Material::Fields(request["fields"].as_object().unwrap().clone()),
            },
            scope: text("scope"),
            normalize: serde_json::from_value(
                request.get("normalize").cloned().unwrap_or(json!([])),
            )
            .unwrap(),
            allow_empty: request["allow_empty"] == true,
        }
    }

    fn now() -> Time {
        "2026-11-30T12:00:00Z".parse().unwrap()
    }

    fn derive(request: Value) -> DerivedKey {
        recipe(request).derive(now()).unwrap()
    }

    fn pointers(request: Value) -> Vec<String> {
        let faults = recipe(request).derive(now()).unwrap_err();
        faults.into_iter().map(|fault| fault.pointer).collect()
    }

    fn warned(request: Value) -> Vec<String> {
        derive(request)
            .warnings
            .into_iter()
            .map(|warning| warning.split(' ').next().unwrap().to_owned())
            .collect()
    }

    #[test]
    fn vectors() {
        let upload = json!({"customer_id":"C-7","lines":[{"sku":"LUNA-1","qty":2}],"created_at":"2026-11-30T09:12:00Z"});
        for (request, key) in [
            (
                json!({"parts":["ORD-2041",129.9]}),
                "5fd4b988da1e9a5bbdd5d16bc450989caf8bec1a3a2ee087a0f8afbf128d90a0",
            ),
            (
                json!({"parts":["ORD-2041",120.0]}),
                "04500a149bc225d79aa61dd62eeac1a106ce0e61ec95af676c3abb1d3a60de77",
            ),
            (
                json!({"parts":["a",1e-7]}),
                "b99c69e031e6111dce7f91d1960114f81445fd18dd41a7e02b68f56e13b5181b",
            ),
            (
                json!({"fields":upload}),
                "b490d542c7810a65ab589f1d920d28747dd1e5bea9914bfe926959567f21096b",
            ),
            (
                json!({"fields":upload,"scope":"order-triage"}),
                "407a1019fa66cb69585f946c28fca3487b0e8a65af239cfd90035cd6cdca6aff",
            ),
        ] {
            assert_eq!(derive(request).key.as_str(), key);
        }
    }

    #[test]
    fn uuids() {
        let key = derive(json!({"parts":["ORD-2041",129.9]})).key;
        assert_eq!(
            uuid_of(&key, UuidVersion::V5).to_string(),
            "a01bce06-78c0-57e2-9110-22202ca56f08"
        );
        assert_eq!(
            uuid_of(&key, UuidVersion::V4).to_string(),
            "a01bce06-78c0-47e2-9110-22202ca56f08"
        );
    }

    #[test]
    fn a_scope_is_the_first_part() {
        assert_eq!(
            derive(json!({"parts":["a"],"scope":"s"})).canonical,
            derive(json!({"parts":["s","a"]})).canonical
        );
    }

    #[test]
    fn normalisation_is_always_in_the_same_order() {
        let text = "  E\u{301}COLE\u{a0}";
        for order in [
            json!(["lowercase", "trim", "nfc"]),
            json!(["nfc", "lowercase", "trim"]),
        ] {
            assert_eq!(
                derive(json!({"parts":[text],"normalize":order})).canonical,
                "école"
            );
        }
        let deep = derive(
            json!({"fields":{"A":[{"B":" X "}]},"scope":" S ","normalize":["trim","lowercase"]}),
        );
        assert_eq!(deep.canonical, r#"["s",{"A":[{"B":"x"}]}]"#);
    }

    #[test]
    fn nothing_is_not_a_value() {
        assert_eq!(
            pointers(json!({"parts":["a",null,""," \u{feff}"],"scope":" "})),
            ["/scope", "/parts/1", "/parts/2", "/parts/3"]
        );
        assert_eq!(
            pointers(json!({"fields":{"a/b":null,"c":""}})),
            ["/fields/a~1b", "/fields/c"]
        );
        assert_eq!(
            derive(json!({"parts":["a",null,""],"allow_empty":true})).canonical,
            "a:null:"
        );
        // Only what stands at the top is asked for; an empty value deeper down is content.
        assert_eq!(
            derive(json!({"fields":{"a":{"b":null}}})).canonical,
            r#"{"a":{"b":null}}"#
        );
    }

    #[test]
    fn parts_are_scalars_and_counted() {
        assert_eq!(
            pointers(json!({"parts":[[1],{"a":1}],"allow_empty":true})),
            ["/parts/0", "/parts/1"]
        );
        assert_eq!(pointers(json!({"parts":[]})), ["/parts"]);
        assert_eq!(pointers(json!({"parts":vec![1;33]})), ["/parts"]);
        assert_eq!(pointers(json!({"fields":{}})), ["/fields"]);
    }

    #[test]
    fn warnings_name_what_is_suspicious() {
        assert_eq!(
            warned(
                json!({"parts":["a:b",9_007_199_254_740_993_u64,"e\u{301}",9_007_199_254_740_991_u64],"scope":"x:y"})
            ),
            ["/scope", "/parts/0", "/parts/1", "/parts/2"]
        );
        assert_eq!(
            warned(
                json!({"fields":{"executionId":7,"lines":[{"Retry-Count":1}],"created_at":"2020-01-01T00:00:00Z"},"scope":"x:y"})
            ),
            ["/fields/executionId", "/fields/lines/0/Retry-Count"]
        );
        for time in [
            json!("2026-11-30T12:00:59.000Z"),
            json!("2026-11-30T07:59:30.000-04:00"),
            json!("2026-11-30 12:00:00"),
            json!(now().timestamp()),
            json!(now().timestamp_millis()),
            json!(now().timestamp_millis().to_string()),
        ] {
            assert_eq!(warned(json!({"fields":{"at":time}})), ["/fields/at"]);
        }
        assert!(warned(json!({"fields":{"at":"2026-11-30T12:02:00Z","n":1e300}})).len() == 1);
        assert!(warned(json!({"parts":["ORD-2041",129.9]})).is_empty());
    }

    #[test]
    fn warnings_are_bounded() {
        let many: Map<String, Value> = (0..64)
            .map(|i| (format!("m{i}"), json!({"now": 1})))
            .collect();
        let warnings = derive(json!({"fields":many})).warnings;
        assert_eq!(warnings.len(), MAX_WARNINGS + 1);
        assert_eq!(warnings.last().unwrap(), "and 44 more");
    }
}
