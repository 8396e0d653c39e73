//! JSON as the keys need it: read strictly, written canonically.

use std::fmt;

use serde::de::{DeserializeSeed, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// How deep arrays and objects may nest.
pub const MAX_DEPTH: usize = 128;

/// Reads a JSON document in which nothing is ambiguous.
///
/// # Errors
///
/// A message with line and column for what is not JSON (RFC 8259), is not UTF-8, nests deeper
/// than [`MAX_DEPTH`], names a member twice, holds a lone surrogate, or holds a number beyond the
/// range of a double.
pub fn parse(text: &[u8]) -> Result<Value, String> {
    let mut reader = serde_json::Deserializer::from_slice(text);
    // The visitor below counts the depth itself: serde_json would stop one level too early.
    reader.disable_recursion_limit();
    let value = Strict { depth: 0 }
        .deserialize(&mut reader)
        .map_err(|error| error.to_string())?;
    reader.end().map_err(|error| error.to_string())?;
    Ok(value)
}

/// Builds a [`Value`] and refuses what serde_json would let pass silently.
#[derive(Clone, Copy)]
struct Strict {
    depth: usize,
}

impl Strict {
    fn deeper<E: Error>(self) -> Result<Self, E> {
        if self.depth == MAX_DEPTH {
            return Err(E::custom(format_args!(
                "nested deeper than {MAX_DEPTH} levels"
            )));
        }
        Ok(Self {
            depth: self.depth + 1,
        })
    }
}

impl<'de> DeserializeSeed<'de> for Strict {
    type Value = Value;

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value)
            .map(Value::Number)
            .ok_or_else(|| E::custom("number out of range"))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E: Error>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let inner = self.deeper()?;
        let mut array = Vec::new();
        while let Some(item) = items.next_element_seed(inner)? {
            array.push(item);
        }
        Ok(Value::Array(array))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
        let inner = self.deeper()?;
        let mut object = Map::new();
        while let Some(name) = members.next_key::<String>()? {
            if object.contains_key(&name) {
                return Err(A::Error::custom(format_args!(
                    "the member {name:?} is given twice"
                )));
            }
            object.insert(name, members.next_value_seed(inner)?);
        }
        Ok(Value::Object(object))
    }
}

/// `number` as JavaScript writes it (`Number::toString` of ECMA-262, which RFC 8785 section
/// 3.2.2.3 prescribes too). Integers past 2^53 become the nearest double first, as they do in
/// `JSON.parse`.
pub fn javascript_number(number: &Number) -> String {
    // Every serde_json number without `arbitrary_precision` converts; a NaN cannot occur.
    let double = number.as_f64().unwrap_or(f64::NAN);
    ryu_js::Buffer::new().format(double).to_owned()
}

/// `value` in the canonical form of RFC 8785 (JCS): no white space, members sorted by the UTF-16
/// code units of their names, numbers and strings as JavaScript writes them.
pub fn canonical(value: &Value) -> String {
    let mut text = String::new();
    write_canonical(value, &mut text);
    text
}

fn write_canonical(value: &Value, out: &mut String) {
    match value {
        Value::Number(number) => out.push_str(&javascript_number(number)),
        Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                write_canonical(item, out);
            }
            out.push(']');
        }
        Value::Object(members) => {
            let mut sorted: Vec<(&String, &Value)> = members.iter().collect();
            sorted.sort_unstable_by(|(a, _), (b, _)| a.encode_utf16().cmp(b.encode_utf16()));
            out.push('{');
            for (index, (name, member)) in sorted.into_iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                write_string(name, out);
                out.push(':');
                write_canonical(member, out);
            }
            out.push('}');
        }
        Value::String(text) => write_string(text, out),
        Value::Null => out.push_str("null"),
        Value::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
    }
}

/// serde_json escapes exactly what RFC 8785 section 3.2.2.2 asks for.
fn write_string(text: &str, out: &mut String) {
    out.push_str(&Value::from(text).to_string());
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn refused(text: &str) -> String {
        parse(text.as_bytes()).expect_err(text)
    }

    #[test]
    fn ambiguous_documents_are_refused() {
        assert!(refused(r#"{"a":1,"b":{"x":1,"x":2}}"#).contains("\"x\" is given twice"));
        assert!(refused(r#"{"a":1,"\u0061":2}"#).contains("\"a\" is given twice"));
        for lone in [r#"["\ud800"]"#, r#"["\ud800\u0041"]"#, r#"{"\udfff":1}"#] {
            assert!(parse(lone.as_bytes()).is_err(), "{lone}");
        }
        assert!(refused("1e999").contains("out of range"));
        assert!(refused("[1] 2").contains("trailing"));
        assert!(refused("").contains("EOF"));
        assert!(parse(b"[\"\xff\"]").is_err());
    }

    #[test]
    fn nesting_ends_at_128() {
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert!(parse(nested(MAX_DEPTH).as_bytes()).is_ok());
        assert!(refused(&nested(MAX_DEPTH + 1)).contains("nested deeper"));
        assert!(refused(&"[".repeat(10_000)).contains("nested deeper"));
    }

    /// The sample of RFC 8785, section 3.2.
    #[test]
    fn rfc_8785_sample() {
        let input = r#"{
            "numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
            "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
            "literals": [null, true, false]
        }"#;
        let expected = concat!(
            r#"{"literals":[null,true,false],"#,
            r#""numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],"#,
            r#""string":"€$\u000f\nA'B\"\\\\\"/"}"#
        );
        assert_eq!(canonical(&parse(input.as_bytes()).unwrap()), expected);
    }

    /// Section 3.2.3: names sort by UTF-16 code units, so that U+1F600 comes before U+FB33.
    #[test]
    fn rfc_8785_sorting() {
        let input = concat!(
            r#"{"\u20ac":"Euro Sign","\r":"Carriage Return","\ufb33":"Hebrew Letter Dalet With Dagesh","#,
            r#""1":"One","\ud83d\ude00":"Emoji: Grinning Face","\u0080":"Control","\u00f6":"Latin Small Letter O With Diaeresis"}"#
        );
        let Value::Object(sorted) =
            parse(canonical(&parse(input.as_bytes()).unwrap()).as_bytes()).unwrap()
        else {
            panic!("not an object")
        };
        let order: Vec<&str> = sorted.values().filter_map(Value::as_str).collect();
        assert_eq!(
            order,
            [
                "Carriage Return",
                "One",
                "Control",
                "Latin Small Letter O With Diaeresis",
                "Euro Sign",
                "Emoji: Grinning Face",
                "Hebrew Letter Dalet With Dagesh"
            ]
        );
    }

    /// The table of RFC 8785, appendix B: IEEE 754 bits and the text they serialise to.
    #[test]
    fn rfc_8785_appendix_b() {
        let table: &[(u64, &str)] = &[
            (0x0000_0000_0000_0000, "0"),
            (0x8000_0000_0000_0000, "0"),
            (0x0000_0000_0000_0001, "5e-324"),
            (0x8000_0000_0000_0001, "-5e-324"),
            (0x7fef_ffff_ffff_ffff, "1.7976931348623157e+308"),
            (0xffef_ffff_ffff_ffff, "-1.7976931348623157e+308"),
            (0x4340_0000_0000_0000, "9007199254740992"),
            (0xc340_0000_0000_0000, "-9007199254740992"),
            (0x4430_0000_0000_0000, "295147905179352830000"),
            (0x44b5_2d02_c7e1_4af5, "9.999999999999997e+22"),
            (0x44b5_2d02_c7e1_4af6, "1e+23"),
            (0x44b5_2d02_c7e1_4af7, "1.0000000000000001e+23"),
            (0x444b_1ae4_d6e2_ef4e, "999999999999999700000"),
            (0x444b_1ae4_d6e2_ef4f, "999999999999999900000"),
            (0x444b_1ae4_d6e2_ef50, "1e+21"),
            (0x3eb0_c6f7_a0b5_ed8c, "9.999999999999997e-7"),
            (0x3eb0_c6f7_a0b5_ed8d, "0.000001"),
            (0x41b3_de43_5555_5553, "333333333.3333332"),
            (0x41b3_de43_5555_5554, "333333333.33333325"),
            (0x41b3_de43_5555_5555, "333333333.3333333"),
            (0x41b3_de43_5555_5556, "333333333.3333334"),
            (0x41b3_de43_5555_5557, "333333333.33333343"),
            (0xbecb_f647_612f_3696, "-0.0000033333333333333333"),
            (0x4314_3ff3_c1cb_0959, "1424953923781206.2"),
        ];
        for (bits, text) in table {
            let number = Number::from_f64(f64::from_bits(*bits)).unwrap();
            assert_eq!(&javascript_number(&number), text);
        }
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(|n| Number::from_f64(n).map_or(Value::Null, Value::Number)),
            ".*".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::btree_map(".*", inner, 0..6)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        /// Canonical text is JSON, is its own canonical form, and no member order shows in it.
        #[test]
        fn canonical_form_is_stable(value in any_json()) {
            let text = canonical(&value);
            let read = parse(text.as_bytes()).unwrap();
            prop_assert_eq!(canonical(&read), text.clone());
            fn reversed(value: &Value) -> Value {
                match value {
                    Value::Object(members) => Value::Object(
                        members.iter().rev().map(|(name, member)| (name.clone(), reversed(member))).collect(),
                    ),
                    Value::Array(items) => items.iter().map(reversed).collect(),
                    other => other.clone(),
                }
            }
            prop_assert_eq!(canonical(&reversed(&value)), text);
        }
    }
}
