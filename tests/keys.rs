//! `POST /key`, and the same recipes in `POST /claim`: JavaScript is the judge.

use chrono::{TimeDelta, Utc};
use serde_json::{Value, json};

use super::helpers::node::javascript;
use super::helpers::random::Random;
use super::helpers::{Backend, Reply, Service, on_both};

/// How a Code node of n8n makes a key of `parts`.
const CODE_NODE: &str = "
    const {parts} = JSON.parse(line);
    const text = parts.map(p => `${p}`).join(':');
    return [text, crypto.createHash('sha256').update(text).digest('hex')];";

/// RFC 8785 in a few lines, with the steps of normalisation.
const CANONICAL: &str = "
    const {fields, scope, normalize = []} = JSON.parse(line);
    const normal = text => {
        if (normalize.includes('nfc')) text = text.normalize('NFC');
        if (normalize.includes('trim')) text = text.trim();
        if (normalize.includes('lowercase')) text = text.toLowerCase();
        return text;
    };
    const write = value => {
        if (typeof value === 'string') return JSON.stringify(normal(value));
        if (Array.isArray(value)) return '[' + value.map(write).join(',') + ']';
        if (value === null || typeof value !== 'object') return JSON.stringify(value);
        const names = Object.keys(value).sort();
        return '{' + names.map(name => JSON.stringify(name) + ':' + write(value[name])).join(',') + '}';
    };
    const text = write(scope === undefined ? fields : [scope, fields]);
    return [text, crypto.createHash('sha256').update(text).digest('hex')];";

/// The vectors of the contract.
fn vectors() -> Vec<(Value, &'static str)> {
    let upload = json!({
        "customer_id": "C-7", "lines": [{"sku": "LUNA-1", "qty": 2}],
        "created_at": "2026-11-30T09:12:00Z"
    });
    vec![
        (
            json!({"parts": ["ORD-2041", 129.9]}),
            "5fd4b988da1e9a5bbdd5d16bc450989caf8bec1a3a2ee087a0f8afbf128d90a0",
        ),
        (
            json!({"parts": ["ORD-2041", 120.0]}),
            "04500a149bc225d79aa61dd62eeac1a106ce0e61ec95af676c3abb1d3a60de77",
        ),
        (
            json!({"parts": ["a", 1e-7]}),
            "b99c69e031e6111dce7f91d1960114f81445fd18dd41a7e02b68f56e13b5181b",
        ),
        (
            json!({"fields": upload}),
            "b490d542c7810a65ab589f1d920d28747dd1e5bea9914bfe926959567f21096b",
        ),
        (
            json!({"fields": upload, "scope": "order-triage"}),
            "407a1019fa66cb69585f946c28fca3487b0e8a65af239cfd90035cd6cdca6aff",
        ),
    ]
}

fn post_raw(service: &Service, path: &str, body: &str) -> Reply {
    let headers = [("Content-Type", "application/json")];
    service.send("POST", path, &headers, body.as_bytes())
}

fn key(service: &Service, body: &Value) -> Value {
    service.post("/key", body).ok()
}

/// The pointers that a reply's warnings begin with.
fn warned(reply: &Value) -> Vec<&str> {
    let warnings = reply["warnings"].as_array().unwrap();
    warnings
        .iter()
        .map(|warning| warning.as_str().unwrap().split(' ').next().unwrap())
        .collect()
}

/// Texts that are hard on whoever quotes, splits or folds them.
const PIECES: [&str; 40] = [
    "a",
    "Z",
    "ORD-2041",
    " ",
    "  ",
    ":",
    "::",
    "\"",
    "'",
    "\\",
    "/",
    "\n",
    "\r\n",
    "\t",
    "\u{8}",
    "\u{c}",
    "\u{1}",
    "\u{1f}",
    "\u{7f}",
    "\u{80}",
    "\u{85}",
    "\u{a0}",
    "\u{180e}",
    "\u{2003}",
    "\u{2028}",
    "\u{2029}",
    "\u{feff}",
    "É",
    "E\u{301}",
    "A\u{30a}\u{327}",
    "\u{212b}",
    "ß",
    "ẞ",
    "İ",
    "ΑΣ",
    "ﬁ",
    "\u{1100}\u{1161}\u{11a8}",
    "한",
    "😀",
    "𐐀",
];

fn random_text(random: &mut Random) -> String {
    (0..random.below(6))
        .map(|_| *random.one_of(&PIECES))
        .collect()
}

/// A string literal, with some of its characters escaped that need not be.
fn string_literal(random: &mut Random, text: &str) -> String {
    let mut literal = String::from("\"");
    for c in text.chars() {
        if c < ' ' || c == '"' || c == '\\' || random.below(8) == 0 {
            for unit in c.encode_utf16(&mut [0; 2]) {
                literal.push_str(&format!("\\u{unit:04x}"));
            }
        } else {
            literal.push(c);
        }
    }
    literal.push('"');
    literal
}

/// A number literal; one that JavaScript reads as infinite is malformed for the service.
fn number_literal(random: &mut Random) -> String {
    const SPELLINGS: [&str; 24] = [
        "0",
        "-0",
        "-0.0",
        "0e0",
        "1E5",
        "1e+5",
        "1.0",
        "120.00",
        "0.1e-6",
        "1e-7",
        "1e21",
        "123456789012345678901234567890",
        "-0.00000000000000000000000000000000001",
        "1e-400",
        "5e-324",
        "2.4703282292062328e-324",
        "2.2250738585072014e-308",
        "2.225073858507201e-308",
        "1.7976931348623157e308",
        "-1.7976931348623157E+308",
        "0.1000000000000000055511151231257827",
        "9007199254740993.0",
        "179769313486231570000e288",
        "0.30000000000000004",
    ];
    const EDGES: [i128; 9] = [
        0,
        100,
        1 << 31,
        1 << 32,
        1 << 53,
        (1 << 53) + (1 << 52),
        1 << 63,
        1 << 64,
        10_i128.pow(21),
    ];
    let near = |random: &mut Random| i128::try_from(random.below(9)).unwrap() - 4;
    match random.below(7) {
        0 => (*random.one_of(&SPELLINGS)).to_owned(),
        1 => {
            let sign = *random.one_of(&[1, -1]);
            (sign * (*random.one_of(&EDGES) + near(random))).to_string()
        }
        // Any double: the huge, the tiny and the denormal too, in the shortest digits or more.
        2 | 3 => {
            let double = f64::from_bits(random.bits());
            let double = if double.is_finite() { double } else { 0.5 };
            match random.below(3) {
                0 => format!("{double:e}"),
                1 => format!("{double:.25E}"),
                _ => format!("{double}"),
            }
        }
        4 => format!(
            "{:.*e}",
            random.below(20),
            f64::from_bits(random.bits() % (1 << 52))
        ),
        5 => format!("{}.{:0>4}", random.below(100_000), random.below(10_000)),
        _ => {
            let digits: String = (0..1 + random.below(40))
                .map(|_| char::from(b'0' + u8::try_from(random.below(10)).unwrap()))
                .collect();
            format!("{}.{digits}e{}", random.below(10), random.below(40))
        }
    }
}

fn random_scalar(random: &mut Random) -> String {
    match random.below(8) {
        0..4 => number_literal(random),
        4..7 => {
            let text = random_text(random);
            string_literal(random, &text)
        }
        _ => (*random.one_of(&["true", "false", "null"])).to_owned(),
    }
}

/// JSON of which the order of members can be changed.
#[derive(Clone)]
enum Json {
    Literal(String),
    Array(Vec<Json>),
    Object(Vec<(String, Json)>),
}

impl Json {
    fn random(random: &mut Random, depth: usize) -> Self {
        match random.below(5) {
            0 if depth > 0 => Self::random_object(random, depth),
            1 if depth > 0 => Self::Array(
                (0..random.below(4))
                    .map(|_| Self::random(random, depth - 1))
                    .collect(),
            ),
            _ => Self::Literal(random_scalar(random)),
        }
    }

    /// An object with one member at least.
    fn random_object(random: &mut Random, depth: usize) -> Self {
        let mut members: Vec<(String, Self)> = Vec::new();
        for index in 0..1 + random.below(6) {
            let mut name = match random.below(6) {
                0 => index.to_string(),
                1 => (*random.one_of(&["__proto__", "toString", "\u{fb33}", "\u{10000}"])).into(),
                _ => random_text(random),
            };
            if members.iter().any(|(other, _)| *other == name) {
                name.push_str(&format!("#{index}"));
            }
            members.push((name, Self::random(random, depth - 1)));
        }
        Self::Object(members)
    }

    fn shuffle(&mut self, random: &mut Random) {
        match self {
            Self::Literal(_) => {}
            Self::Array(items) => items.iter_mut().for_each(|item| item.shuffle(random)),
            Self::Object(members) => {
                random.shuffle(members);
                for (_, member) in members {
                    member.shuffle(random);
                }
            }
        }
    }

    fn text(&self, random: &mut Random) -> String {
        match self {
            Self::Literal(text) => text.clone(),
            Self::Array(items) => {
                let items: Vec<String> = items.iter().map(|item| item.text(random)).collect();
                format!("[{}]", items.join(" , "))
            }
            Self::Object(members) => {
                let members: Vec<String> = members
                    .iter()
                    .map(|(name, member)| {
                        let name = string_literal(random, name);
                        format!("{name} : {}", member.text(random))
                    })
                    .collect();
                format!("{{{}}}", members.join(","))
            }
        }
    }
}

/// Posts each request to `/key`; text and digest must be those that JavaScript gives.
fn agrees_with_javascript(service: &Service, script: &str, requests: &[String]) {
    for (request, expected) in requests.iter().zip(javascript(script, requests)) {
        let reply = post_raw(service, "/key", request);
        assert_eq!(reply.status, 200, "{request}: {}", reply.body);
        assert_eq!(reply.body["canonical"], expected[0], "{request}");
        assert_eq!(reply.body["idempotency_key"], expected[1], "{request}");
    }
}

#[test]
fn key_gives_the_contracts_vectors() {
    on_both(|service| {
        for (request, digest) in vectors() {
            assert_eq!(key(service, &request)["idempotency_key"], digest);
        }
        let reply = key(service, &json!({"parts": ["ORD-2041", 129.9]}));
        assert_eq!(reply["uuid"], "a01bce06-78c0-57e2-9110-22202ca56f08");
        assert_eq!(reply["canonical"], "ORD-2041:129.9");
        assert_eq!(reply["warnings"], json!([]));
    });
}

#[test]
fn claim_takes_the_same_recipes_and_gives_the_same_keys() {
    on_both(|service| {
        for (request, digest) in vectors() {
            let verdict = service.claim(request.clone());
            assert_eq!(verdict["claimed"], true, "{request}");
            assert_eq!(verdict["idempotency_key"], digest);
            assert_eq!(verdict["order_id"], digest);
            let by_name = service.claim(json!({"idempotency_key": digest}));
            assert_eq!(by_name["claimed"], false, "{request}");
        }
        let recipe = json!({"parts": [" É "], "scope": "S", "normalize": ["trim", "lowercase"]});
        let verdict = service.claim(recipe.clone());
        assert_eq!(
            verdict["idempotency_key"],
            key(service, &recipe)["idempotency_key"]
        );
        assert_eq!(
            verdict["idempotency_key"],
            key(service, &json!({"parts": ["s", "é"]}))["idempotency_key"]
        );
    });
}

#[test]
fn an_array_of_claims_may_mix_the_ways_to_name_a_key() {
    on_both(|service| {
        let mut claims: Vec<Value> = vectors().into_iter().map(|(request, _)| request).collect();
        claims.push(json!({"idempotency_key": "order-1"}));
        let verdicts = service.claim(Value::from(claims));
        let keys: Vec<&Value> = verdicts
            .as_array()
            .unwrap()
            .iter()
            .map(|verdict| &verdict["idempotency_key"])
            .collect();
        let mut expected: Vec<&str> = vectors().into_iter().map(|(_, digest)| digest).collect();
        expected.push("order-1");
        assert_eq!(json!(keys), json!(expected));
    });
}

#[test]
fn parts_are_hashed_as_a_code_node_hashes_them() {
    let mut random = Random::new();
    let requests: Vec<String> = (0..3000)
        .map(|_| {
            let parts: Vec<String> = (0..1 + random.below(5))
                .map(|_| random_scalar(&mut random))
                .collect();
            format!(r#"{{"parts":[{}],"allow_empty":true}}"#, parts.join(","))
        })
        .collect();
    agrees_with_javascript(&Service::start(Backend::Sqlite), CODE_NODE, &requests);
}

#[test]
fn fields_are_hashed_in_their_canonical_form() {
    let mut random = Random::new();
    let requests: Vec<String> = (0..1000)
        .map(|_| {
            let fields = Json::random_object(&mut random, 4).text(&mut random);
            format!(r#"{{"fields":{fields},"allow_empty":true}}"#)
        })
        .collect();
    agrees_with_javascript(&Service::start(Backend::Sqlite), CANONICAL, &requests);
}

#[test]
fn the_order_of_members_does_not_matter() {
    let service = Service::start(Backend::Sqlite);
    let mut random = Random::new();
    for _ in 0..200 {
        let mut fields = Json::random_object(&mut random, 4);
        let mut request = |random: &mut Random| {
            let text = format!(r#"{{"fields":{},"allow_empty":true}}"#, fields.text(random));
            fields.shuffle(random);
            text
        };
        let (one, other) = (request(&mut random), request(&mut random));
        let digest =
            |request: &str| post_raw(&service, "/key", request).ok()["idempotency_key"].clone();
        assert_eq!(digest(&one), digest(&other), "{one}\n{other}");
    }
}

#[test]
fn values_that_differ_have_keys_that_differ() {
    let service = Service::start(Backend::Sqlite);
    let digest = |fields: &str| {
        let body = format!(r#"{{"fields":{fields},"allow_empty":true}}"#);
        post_raw(&service, "/key", &body).ok()["idempotency_key"].to_string()
    };
    let different = [
        r#"{"a":1}"#,
        r#"{"a":"1"}"#,
        r#"{"a":[1]}"#,
        r#"{"a":true}"#,
        r#"{"a":"true"}"#,
        r#"{"a":null}"#,
        r#"{"a":"null"}"#,
        r#"{"a":""}"#,
        r#"{"a":"b","c":"d"}"#,
        r#"{"a":"b\",\"c\":\"d"}"#,
        r#"{"A":1}"#,
        r#"{"a":{"a":1}}"#,
        "{\"a\":\"\u{e9}\"}",
        "{\"a\":\"e\u{301}\"}",
        r#"{"a":1.0000000000000002}"#,
    ];
    let mut digests: Vec<String> = different.iter().map(|fields| digest(fields)).collect();
    digests.sort();
    digests.dedup();
    assert_eq!(digests.len(), different.len());
    for same in [r#"{"a":1.0}"#, r#"{ "a" : 1e0 }"#, r#"{"\u0061":10e-1}"#] {
        assert_eq!(digest(same), digest(r#"{"a":1}"#), "{same}");
    }
}

#[test]
fn normalisation_is_javascripts_in_a_fixed_order() {
    let mut random = Random::new();
    let requests: Vec<String> = (0..1000)
        .map(|_| {
            let mut steps = ["\"nfc\"", "\"trim\"", "\"lowercase\""];
            random.shuffle(&mut steps);
            let steps = steps[..random.below(4)].join(",");
            let fields = Json::random_object(&mut random, 3).text(&mut random);
            let scope = random_text(&mut random);
            let scope = string_literal(&mut random, &scope);
            format!(
                r#"{{"fields":{fields},"scope":{scope},"normalize":[{steps}],"allow_empty":true}}"#
            )
        })
        .collect();
    agrees_with_javascript(&Service::start(Backend::Sqlite), CANONICAL, &requests);
}

#[test]
fn parts_and_their_scope_are_normalised_too() {
    let script = "
        const {parts, scope} = JSON.parse(line);
        const text = [scope, ...parts]
            .map(p => typeof p === 'string' ? p.normalize('NFC').trim().toLowerCase() : `${p}`)
            .join(':');
        return [text, crypto.createHash('sha256').update(text).digest('hex')];";
    let mut random = Random::new();
    let requests: Vec<String> = (0..500)
        .map(|_| {
            let [scope, part] = [(); 2].map(|()| {
                let text = random_text(&mut random);
                string_literal(&mut random, &text)
            });
            let number = number_literal(&mut random);
            format!(
                r#"{{"parts":[{part},{number}],"scope":{scope},"normalize":["lowercase","nfc","trim"],"allow_empty":true}}"#
            )
        })
        .collect();
    agrees_with_javascript(&Service::start(Backend::Sqlite), script, &requests);
}

#[test]
fn a_scope_becomes_the_first_part() {
    let service = Service::start(Backend::Sqlite);
    let reply = key(&service, &json!({"parts": ["a", 1], "scope": "s"}));
    assert_eq!(reply["canonical"], "s:a:1");
}

#[test]
fn a_scope_and_fields_become_an_array() {
    let service = Service::start(Backend::Sqlite);
    let reply = key(&service, &json!({"fields": {"a": 1}, "scope": "s"}));
    assert_eq!(reply["canonical"], r#"["s",{"a":1}]"#);
}

#[test]
fn normalisation_leaves_names_of_members_alone() {
    let service = Service::start(Backend::Sqlite);
    let request = json!({"fields": {" E\u{301} ": [" E\u{301} "]}, "normalize": ["nfc", "trim", "lowercase"]});
    assert_eq!(
        key(&service, &request)["canonical"],
        json!({" E\u{301} ": ["é"]}).to_string()
    );
}

#[test]
fn nothing_is_a_value_only_where_that_is_allowed() {
    let service = Service::start(Backend::Sqlite);
    let canonical = |request: Value| key(&service, &request)["canonical"].clone();
    assert_eq!(
        canonical(json!({"parts": [null, "", " "], "allow_empty": true})),
        "null:: "
    );
    assert_eq!(
        canonical(json!({"fields": {"a": null, "b": ""}, "allow_empty": true})),
        r#"{"a":null,"b":""}"#
    );
    // An empty value deeper down is content; so are false, zero, and an empty array or object.
    assert_eq!(
        canonical(json!({"fields": {"a": {"b": null}, "c": false, "d": 0, "e": [], "f": {}}})),
        r#"{"a":{"b":null},"c":false,"d":0,"e":[],"f":{}}"#
    );
    // What normalisation empties is empty.
    let emptied = json!({"parts": ["\u{feff}\u{a0}"], "normalize": ["trim"]});
    assert_eq!(service.post("/key", &emptied).pointers(), ["/parts/0"]);
}

#[test]
fn the_uuid_is_a_version_5_of_the_key_or_is_stamped_as_version_4() {
    let script = "
        const {key, version} = JSON.parse(line);
        const namespace = Buffer.from('9acf0a2f76a25cd1ae81b865e32c71da', 'hex');
        const bytes = crypto.createHash('sha1').update(namespace).update(key).digest().subarray(0, 16);
        bytes[6] = bytes[6] & 0x0f | version << 4;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        return bytes.toString('hex').replace(/^(.{8})(.{4})(.{4})(.{4})/, '$1-$2-$3-$4-');";
    let service = Service::start(Backend::Sqlite);
    let (mut uuids, mut lines) = (Vec::new(), Vec::new());
    for number in 0..50 {
        for version in [
            None,
            Some(json!(5)),
            Some(json!(4)),
            Some(json!(4.0)),
            Some(Value::Null),
        ] {
            let mut request = json!({"parts": ["uuid", number]});
            if let Some(version) = &version {
                request["uuid_version"] = version.clone();
            }
            let reply = key(&service, &request);
            let version = version.and_then(|version| version.as_f64()).unwrap_or(5.0);
            lines.push(json!({"key": reply["idempotency_key"], "version": version}).to_string());
            uuids.push(reply["uuid"].clone());
        }
    }
    assert_eq!(uuids, javascript(script, &lines));
}

#[test]
fn members_that_change_between_attempts_are_warned_about() {
    let service = Service::start(Backend::Sqlite);
    for name in [
        "timestamp",
        "now",
        "executionId",
        "execution_id",
        "attempt",
        "retry",
        "retry_count",
        "nonce",
    ] {
        let fields = json!({"order": 1, "lines": [{name: 1}]});
        let reply = key(&service, &json!({"fields": fields}));
        assert_eq!(warned(&reply), [format!("/fields/lines/0/{name}")]);
        assert!(warned(&key(&service, &json!({"parts": [name]}))).is_empty());
    }
    for name in ["created_at", "updated_at", "paid_at", "date", "known"] {
        let fields = json!({name: "2026-11-30T09:12:00Z"});
        assert!(warned(&key(&service, &json!({"fields": fields}))).is_empty());
    }
}

#[test]
fn a_value_that_is_the_present_time_is_warned_about() {
    let service = Service::start(Backend::Sqlite);
    let at = |seconds: i64| Utc::now() + TimeDelta::seconds(seconds);
    for time in [at(-50), at(0), at(50)] {
        for value in [
            json!(time.to_rfc3339()),
            json!(time.timestamp()),
            json!(time.timestamp_millis()),
        ] {
            let reply = key(&service, &json!({"fields": {"created_at": value}}));
            assert_eq!(warned(&reply), ["/fields/created_at"], "{value}");
            let reply = key(&service, &json!({"parts": ["a", value]}));
            assert!(warned(&reply).contains(&"/parts/1"), "{value}");
        }
    }
    for time in [at(-90), at(90)] {
        let reply = key(
            &service,
            &json!({"fields": {"created_at": time.to_rfc3339()}}),
        );
        assert!(warned(&reply).is_empty(), "{time}");
    }
}

#[test]
fn an_integer_that_javascript_rounds_is_warned_about() {
    let service = Service::start(Backend::Sqlite);
    let parts = json!({"parts": [9_007_199_254_740_991_i64, 9_007_199_254_740_993_i64, -9_007_199_254_740_993_i64, 1e17]});
    assert_eq!(
        warned(&key(&service, &parts)),
        ["/parts/1", "/parts/2", "/parts/3"]
    );
}

#[test]
fn text_that_is_not_in_nfc_is_warned_about() {
    let service = Service::start(Backend::Sqlite);
    let fields = json!({"é": "é", "lines": [{"e\u{301}": 1}], "name": "e\u{301}"});
    assert_eq!(
        warned(&key(
            &service,
            &json!({"fields": fields, "scope": "e\u{301}"})
        )),
        ["/scope", "/fields/lines/0/e\u{301}", "/fields/name"]
    );
    let normalized = json!({"fields": {"name": "e\u{301}"}, "normalize": ["nfc"]});
    assert!(warned(&key(&service, &normalized)).is_empty());
}

#[test]
fn a_part_with_the_separator_is_warned_about() {
    let service = Service::start(Backend::Sqlite);
    let reply = key(&service, &json!({"parts": ["a:b", "c"], "scope": "s:"}));
    assert_eq!(warned(&reply), ["/scope", "/parts/0"]);
    let fields = json!({"fields": {"a:b": "c:d"}, "scope": "s:"});
    assert!(warned(&key(&service, &fields)).is_empty());
}

#[test]
fn claim_warns_as_key_does_and_about_a_missing_claimant() {
    on_both(|service| {
        let request = json!({"parts": ["a:b"], "claimant": "a"});
        assert_eq!(warned(&service.claim(request)), ["/parts/0"]);
        let verdict = service.claim(json!({"parts": ["a:b"]}));
        assert_eq!(verdict["warnings"].as_array().unwrap().len(), 2);
        assert!(verdict["warnings"].to_string().contains("no claimant"));
    });
}

#[test]
fn warnings_stay_small_whatever_is_sent() {
    let service = Service::start(Backend::Sqlite);
    let suspicious: Vec<Value> = (0..100).map(|_| json!({"nonce": 1})).collect();
    let fields = json!({"n".repeat(100_000): suspicious});
    let reply = key(&service, &json!({"fields": fields}));
    let warnings = reply["warnings"].to_string();
    assert!(warnings.len() < 20_000, "{} bytes", warnings.len());
}

#[test]
fn every_fault_of_a_recipe_is_named_by_its_pointer() {
    let service = Service::start(Backend::Sqlite);
    let many_parts = Value::from(vec![1; 33]);
    let many_fields: Value = (0..65).map(|i| (format!("m{i}"), json!(i))).collect();
    let cases: Vec<(Value, &[&str])> = vec![
        (json!({}), &["/parts"]),
        (json!({"parts": null, "fields": null}), &["/parts"]),
        (json!({"parts": ["a"], "fields": {"a": 1}}), &["/fields"]),
        (
            json!({"scope": "s", "normalize": [], "allow_empty": false}),
            &["/scope", "/normalize", "/allow_empty"],
        ),
        (json!({"parts": []}), &["/parts"]),
        (json!({"parts": many_parts}), &["/parts"]),
        (json!({"parts": "a"}), &["/parts"]),
        (json!({"parts": {"0": "a"}}), &["/parts"]),
        (json!({"parts": ["a", null]}), &["/parts/1"]),
        (
            json!({"parts": ["", " ", "\u{feff}\u{a0}\u{2003}\n"]}),
            &["/parts/0", "/parts/1", "/parts/2"],
        ),
        (
            json!({"parts": [["a"], {"a": 1}]}),
            &["/parts/0", "/parts/1"],
        ),
        (
            json!({"parts": [["a"]], "allow_empty": true}),
            &["/parts/0"],
        ),
        (json!({"fields": {}}), &["/fields"]),
        (json!({"fields": many_fields}), &["/fields"]),
        (json!({"fields": [1]}), &["/fields"]),
        (json!({"fields": "a"}), &["/fields"]),
        (
            json!({"fields": {"a/b": null, "c~d": "", "e": " "}}),
            &["/fields/a~1b", "/fields/c~0d", "/fields/e"],
        ),
        (json!({"parts": ["a"], "scope": ""}), &["/scope"]),
        (json!({"parts": ["a"], "scope": " "}), &["/scope"]),
        (json!({"parts": ["a"], "scope": 1}), &["/scope"]),
        (json!({"parts": ["a"], "normalize": "nfc"}), &["/normalize"]),
        (
            json!({"parts": ["a"], "normalize": ["nfc", "NFC"]}),
            &["/normalize/1"],
        ),
        (json!({"parts": ["a"], "normalize": [1]}), &["/normalize/0"]),
        (
            json!({"parts": ["a"], "normalize": [{"nfc": null}]}),
            &["/normalize/0"],
        ),
        (
            json!({"parts": ["a"], "allow_empty": "true"}),
            &["/allow_empty"],
        ),
        (json!({"parts": ["a"], "allow_empty": 1}), &["/allow_empty"]),
        (
            json!({"parts": ["a"], "uuid_version": 1}),
            &["/uuid_version"],
        ),
        (
            json!({"parts": ["a"], "uuid_version": "5"}),
            &["/uuid_version"],
        ),
        (
            json!({"parts": ["a"], "uuid_version": 4.5}),
            &["/uuid_version"],
        ),
        (
            json!({"parts": ["a"], "idempotency_key": "k"}),
            &["/idempotency_key"],
        ),
        (json!({"parts": ["a"], "Scope": "s"}), &["/Scope"]),
        (json!({"parts": ["a"], "a/b~c": 1}), &["/a~1b~0c"]),
        (json!(["a"]), &[""]),
        (json!("a"), &[""]),
        (json!(null), &[""]),
    ];
    for (request, pointers) in cases {
        let reply = service.post("/key", &request);
        assert_eq!(reply.problem(422), "invalid_request", "{request}");
        assert_eq!(reply.pointers(), pointers, "{request}");
    }
}

#[test]
fn the_bounds_of_a_recipe_are_inclusive() {
    let service = Service::start(Backend::Sqlite);
    key(&service, &json!({"parts": vec![1; 32], "scope": "s"}));
    let fields: Value = (0..64).map(|i| (format!("m{i}"), json!(i))).collect();
    key(&service, &json!({"fields": fields}));
}

#[test]
fn null_in_an_optional_member_of_a_recipe_means_absent() {
    let service = Service::start(Backend::Sqlite);
    let request = json!({
        "parts": ["a"], "fields": null, "scope": null, "normalize": null,
        "allow_empty": null, "uuid_version": null
    });
    assert_eq!(
        key(&service, &request),
        key(&service, &json!({"parts": ["a"]}))
    );
}
