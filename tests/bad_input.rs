//! Bad input is answered with a problem that names the member, and changes nothing.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Map, Value, json};

use super::helpers::raw::Connection;
use super::helpers::service::encoded;
use super::helpers::{Backend, Database, Reply, Service, on_both, on_both_with};
use super::openapi::{documented, posts};

/// Every path that takes a body, with the members of a request that it would accept.
const ENDPOINTS: [(&str, &str); 9] = [
    ("/key", r#""parts":["a"]"#),
    ("/retry", r#""status_code":502,"attempt":1"#),
    ("/claim", r#""idempotency_key":"new""#),
    ("/ledger/pending", r#""idempotency_key":"new""#),
    ("/ledger/done", r#""idempotency_key":"open","attempt":1"#),
    ("/ledger/failed", r#""idempotency_key":"open","attempt":1"#),
    ("/ledger/renew", r#""idempotency_key":"open","attempt":1"#),
    (
        "/ledger/review",
        r#""idempotency_key":"open","attempt":1,"decision":"fail","reviewer":"ana","reason":"seen""#,
    ),
    (
        "/ledger/reset",
        r#""idempotency_key":"open","attempt":1,"reviewer":"ana","reason":"again""#,
    ),
];

/// Every path that is read.
const READ: [&str; 5] = [
    "/health",
    "/health/ready",
    "/openapi.json",
    "/ledger",
    "/ledger/open",
];

const JSON: (&str, &str) = ("Content-Type", "application/json");

/// A service with keys in every state, which no bad input may change.
struct Guarded<'a> {
    service: &'a Service,
    before: String,
}

impl<'a> Guarded<'a> {
    fn new(service: &'a Service) -> Self {
        service.claim(json!({"idempotency_key": "gate", "claimant": "a"}));
        for key in ["open", "done", "failed"] {
            service.pending_key(key, "a", 900);
        }
        let report = |key: &str| json!({"idempotency_key": key, "attempt": 1});
        service.done(report("done")).ok();
        service.failed(report("failed")).ok();
        Self {
            service,
            before: service.database.dump(),
        }
    }

    fn unchanged(&self, after: &str) {
        assert_eq!(self.service.database.dump(), self.before, "{after}");
    }

    /// Posts a body, which must be refused in this way.
    fn refuses(&self, path: &str, body: impl AsRef<[u8]>, code: &str, pointers: &[&str]) {
        let body = body.as_ref();
        let reply = self.service.send("POST", path, &[JSON], body);
        let start = &body[..body.len().min(200)];
        let what = format!("POST {path} {}", String::from_utf8_lossy(start));
        is_problem(&reply, "post", path, code, &what);
        let found = match reply.body.get("errors") {
            Some(_) => reply.pointers(),
            None => Vec::new(),
        };
        assert_eq!(found, pointers, "{what}: {}", reply.body);
    }
}

/// The status that goes with a code.
fn status_of(code: &str) -> u16 {
    match code {
        "malformed_json" => 400,
        "unauthorized" => 401,
        "not_found" | "unknown_key" => 404,
        "method_not_allowed" => 405,
        "payload_too_large" => 413,
        "unsupported_media_type" => 415,
        "invalid_request" | "key_reused" => 422,
        other => panic!("{other}"),
    }
}

/// A well-formed, small problem that the description announces.
fn is_problem(reply: &Reply, method: &str, path: &str, code: &str, what: &str) {
    assert_eq!(reply.body["code"], code, "{what}: {}", reply.body);
    reply.problem(status_of(code));
    let size = reply.body.to_string().len();
    assert!(size < 3000, "{what}: {size} bytes");
    let path = path.split('?').next().unwrap();
    assert!(
        documented(method, path, reply.status, code),
        "the description does not announce {code} for {method} {path}"
    );
}

fn nested(depth: usize) -> String {
    format!("{}{}", "[".repeat(depth), "]".repeat(depth))
}

fn with(members: &str, more: &str) -> String {
    format!("{{{members},{more}}}")
}

#[test]
fn these_are_all_endpoints_that_take_a_body() {
    assert_eq!(posts(), ENDPOINTS.map(|(path, _)| path).into());
}

#[test]
fn what_is_not_json_is_malformed() {
    on_both(|service| {
        let guarded = Guarded::new(service);
        for (path, members) in ENDPOINTS {
            let valid = format!("{{{members}}}");
            let bodies: Vec<Vec<u8>> = vec![
                b"".to_vec(),
                b" ".to_vec(),
                b"{".to_vec(),
                b"{]".to_vec(),
                b"nul".to_vec(),
                b"'a'".to_vec(),
                format!("{valid}x").into(),
                format!("{valid}{valid}").into(),
                format!("{{{members},}}").into(),
                with(members, r#""x":01"#).into(),
                with(members, r#""x":+1"#).into(),
                with(members, r#""x":.5"#).into(),
                with(members, r#""x":NaN"#).into(),
                with(members, r#""x":0x10"#).into(),
                with(members, r#"x:1"#).into(),
                with(members, "\"x\":1 // comment").into(),
                with(members, r#""x":"\x41""#).into(),
                // A raw control character in a string.
                with(members, "\"x\":\"a\nb\"").into(),
                with(members, "\"x\":\"a\0b\"").into(),
                // A byte order mark, and another encoding.
                format!("\u{feff}{valid}").into(),
                valid.encode_utf16().flat_map(u16::to_le_bytes).collect(),
            ];
            for body in bodies {
                guarded.refuses(path, body, "malformed_json", &[]);
            }
            guarded.unchanged(path);
        }
    });
}

#[test]
fn what_is_ambiguous_json_is_malformed() {
    on_both(|service| {
        let guarded = Guarded::new(service);
        for (path, members) in ENDPOINTS {
            let bytes = |more: &[u8]| [b"{", members.as_bytes(), b",", more, b"}"].concat();
            let bodies: Vec<Vec<u8>> = vec![
                // A member given twice: plainly, by an escape, deeper down.
                with(members, members).into(),
                with(members, r#""x":1,"x":1"#).into(),
                with(members, r#""x":1,"\u0078":1"#).into(),
                with(members, r#""x":[{"y":1,"y":2}]"#).into(),
                // Lone surrogates: high, low, in the wrong order, in a name.
                with(members, r#""x":"\ud800""#).into(),
                with(members, r#""x":"\udc00""#).into(),
                with(members, r#""x":"\udc00\ud800""#).into(),
                with(members, r#""x":"\ud800a""#).into(),
                with(members, r#""\udfff":1"#).into(),
                // Not UTF-8: a stray byte, an overlong slash, a surrogate, beyond U+10FFFF, cut off.
                bytes(b"\"x\":\"\xff\""),
                bytes(b"\"x\":\"\xc0\xaf\""),
                bytes(b"\"x\":\"\xed\xa0\x80\""),
                bytes(b"\"x\":\"\xf4\x90\x80\x80\""),
                bytes(b"\"x\":\"\xe2\x82\""),
                bytes(b"\"\xff\":1"),
                // Beyond the range of a double.
                with(members, r#""x":1e309"#).into(),
                with(members, r#""x":-1e999"#).into(),
                with(members, &format!("\"x\":{}", "9".repeat(400))).into(),
                // Deeper than 128; the object around it is one level.
                with(members, &format!("\"x\":{}", nested(128))).into(),
                with(members, &format!("\"x\":{}", nested(10_000))).into(),
                nested(129).into(),
                "[".repeat(10_000).into(),
                "{\"a\":".repeat(10_000).into(),
            ];
            for body in bodies {
                guarded.refuses(path, body, "malformed_json", &[]);
            }
            guarded.unchanged(path);
        }
    });
}

#[test]
fn nesting_of_128_passes() {
    on_both(|service| {
        let post = |path: &str, members: &str| {
            // The object around it is the first of the 128 levels.
            let body = with(members, &nested(127));
            let body = body.replacen(&format!(",{}", nested(127)), &nested(127), 1);
            service.send("POST", path, &[JSON], body.as_bytes()).ok()
        };
        post("/claim", r#""idempotency_key":"deep","payload":"#);
        post(
            "/ledger/pending",
            r#""idempotency_key":"deeper","payload":"#,
        );
        let entry = post("/ledger/done", r#""idempotency_key":"deeper","result":"#);
        assert_eq!(entry["result"].to_string(), nested(127));
        let body = format!(r#"{{"fields":{{"a":{}}}}}"#, nested(126));
        service.send("POST", "/key", &[JSON], body.as_bytes()).ok();
    });
}

#[test]
fn a_body_that_is_no_object_is_refused() {
    on_both(|service| {
        let guarded = Guarded::new(service);
        for (path, members) in ENDPOINTS {
            for body in ["null", "true", "1", "\"a\"", "\"{}\""] {
                guarded.refuses(path, body, "invalid_request", &[""]);
            }
            if path != "/claim" {
                guarded.refuses(path, "[]", "invalid_request", &[""]);
                guarded.refuses(path, format!("[{{{members}}}]"), "invalid_request", &[""]);
            }
        }
        guarded.unchanged("bodies that are no objects");
    });
}

#[test]
fn an_array_of_claims_is_refused_whole_and_names_the_elements() {
    on_both(|service| {
        let guarded = Guarded::new(service);
        let refuses = |body: &str, pointers: &[&str]| {
            guarded.refuses("/claim", body, "invalid_request", pointers);
            guarded.unchanged(body);
        };
        let new = r#"{"idempotency_key":"new"}"#;
        refuses("[]", &[""]);
        refuses(&format!("[{}]", vec![new; 1001].join(",")), &[""]);
        refuses("[1]", &["/0"]);
        refuses("[[]]", &["/0"]);
        refuses(&format!("[[{new}]]"), &["/0"]);
        refuses(
            &format!("[{new},null,{new},{{}}]"),
            &["/1", "/3/idempotency_key"],
        );
        refuses(
            &format!(r#"[{new},{{"idempotency_key":"b","claimaint":"x"}}]"#),
            &["/1/claimaint"],
        );
        refuses(
            &format!(r#"[{new},{{"parts":["a",null,""]}}]"#),
            &["/1/parts/1", "/1/parts/2"],
        );
        refuses(
            &format!(r#"[{new},{{"idempotency_key":"b","lease_seconds":1}}]"#),
            &["/1/lease_seconds"],
        );
    });
}

#[test]
fn an_array_with_very_many_faults_names_the_first_of_them() {
    let service = Service::start(Backend::Sqlite);
    let reply = service.post("/claim", &Value::from(vec![json!({"a": 1}); 1000]));
    assert_eq!(reply.problem(422), "invalid_request");
    let pointers = reply.pointers();
    assert_eq!((pointers.len(), pointers[0].as_str()), (50, "/0/a"));
}

#[test]
fn unknown_members_are_named() {
    on_both(|service| {
        let guarded = Guarded::new(service);
        for (path, members) in ENDPOINTS {
            for (name, pointer) in [
                ("claimaint", "/claimaint"),
                ("Claimant", "/Claimant"),
                ("error", "/error"),
                ("__proto__", "/__proto__"),
                ("a/b~c", "/a~1b~0c"),
                ("", "/"),
                ("\\u0000", "/\0"),
                ("\\ud83d\\ude00", "/😀"),
            ] {
                for value in ["null", "1"] {
                    let body = with(members, &format!("\"{name}\":{value}"));
                    guarded.refuses(path, body, "invalid_request", &[pointer]);
                }
            }
            guarded.unchanged(path);
        }
    });
}

#[test]
fn a_missing_key_is_named() {
    on_both(|service| {
        let guarded = Guarded::new(service);
        for (path, _) in &ENDPOINTS[2..] {
            for members in ["", r#""idempotency_key":null"#] {
                let more = match *path {
                    "/claim" | "/ledger/pending" => r#""claimant":"a""#,
                    _ => r#""attempt":1"#,
                };
                let body = if members.is_empty() {
                    format!("{{{more}}}")
                } else {
                    with(members, more)
                };
                guarded.refuses(path, body, "invalid_request", &["/idempotency_key"]);
            }
        }
        guarded.unchanged("requests without a key");
    });
}

#[test]
fn failed_needs_an_attempt() {
    on_both(|service| {
        let guarded = Guarded::new(service);
        for body in [
            r#"{"idempotency_key":"open"}"#,
            r#"{"idempotency_key":"open","attempt":null}"#,
        ] {
            guarded.refuses("/ledger/failed", body, "invalid_request", &["/attempt"]);
        }
        guarded.unchanged("reports without an attempt");
    });
}

#[test]
fn a_report_of_an_unknown_key_is_refused() {
    on_both(|service| {
        let guarded = Guarded::new(service);
        for path in ["/ledger/done", "/ledger/failed"] {
            let body = r#"{"idempotency_key":"new","attempt":1}"#;
            guarded.refuses(path, body, "unknown_key", &[]);
        }
        guarded.unchanged("reports of an unknown key");
    });
}

/// Values that no text of 1 to `max` bytes without control characters has.
fn wrong_texts(max: usize) -> Vec<Value> {
    let mut values = vec![
        json!(1),
        json!(true),
        json!([]),
        json!(["a"]),
        json!({}),
        json!({"a": "b"}),
        json!(""),
        json!("a".repeat(max + 1)),
        // So many characters, but twice as many bytes.
        json!("é".repeat(max / 2 + 1)),
        json!("😀".repeat(max / 4 + 1)),
        json!("x".repeat(200_000)),
    ];
    let controls = [
        '\0', '\u{1}', '\t', '\n', '\r', '\u{1f}', '\u{7f}', '\u{80}', '\u{9f}',
    ];
    values.extend(controls.map(|control| json!(format!("a{control}b"))));
    values
}

/// Values that are no whole number from 1 to `max`.
fn wrong_numbers(max: i64) -> Vec<Value> {
    let mut values: Vec<Value> = [
        "0", "-0.0", "-1", "1e99", "1.5", "0.999999", "\"1\"", "true", "[]", "[1]", "{}",
    ]
    .iter()
    .map(|literal| serde_json::from_str(literal).unwrap())
    .collect();
    values.extend([
        json!(max + 1),
        json!(i64::MAX),
        json!(u64::MAX),
        json!(i64::MIN),
        json!("x".repeat(200_000)),
    ]);
    values
}

fn wrong_flags() -> Vec<Value> {
    vec![
        json!(0),
        json!(1),
        json!("true"),
        json!(""),
        json!([]),
        json!([true]),
        json!({}),
        json!("x".repeat(200_000)),
    ]
}

fn wrong_on_stale() -> Vec<Value> {
    vec![
        json!("HOLD"),
        json!(""),
        json!("take over"),
        json!(1),
        json!(true),
        json!(["hold"]),
        json!({"hold": null}),
        json!("x".repeat(200_000)),
    ]
}

fn wrong_keys() -> Vec<Value> {
    let mut values = wrong_texts(255);
    // What JavaScript's `trim` would remove.
    for space in [
        ' ', '\u{a0}', '\u{1680}', '\u{2003}', '\u{2028}', '\u{3000}', '\u{feff}',
    ] {
        values.extend([
            json!(format!("{space}a")),
            json!(format!("a{space}")),
            json!(space),
        ]);
    }
    values
}

/// The members of an endpoint that takes keys, each with values that it must refuse.
fn wrong_members(path: &str) -> Vec<(&'static str, Vec<Value>)> {
    let mut members = vec![
        ("idempotency_key", wrong_keys()),
        ("claimant", wrong_texts(255)),
    ];
    match path {
        "/claim" => members.extend([
            ("order_id", wrong_texts(255)),
            ("ttl_seconds", wrong_numbers(315_360_000)),
            ("pending", wrong_flags()),
            ("lease_seconds", wrong_numbers(2_592_000)),
            ("on_stale", wrong_on_stale()),
        ]),
        "/ledger/pending" => members.extend([
            ("order_id", wrong_texts(255)),
            ("lease_seconds", wrong_numbers(2_592_000)),
            ("on_stale", wrong_on_stale()),
        ]),
        "/ledger/done" => members.extend([
            ("external_id", wrong_texts(255)),
            ("attempt", wrong_numbers(i32::MAX.into())),
        ]),
        "/ledger/failed" => members.extend([
            ("attempt", wrong_numbers(i32::MAX.into())),
            ("reason", wrong_texts(2000)),
            ("retry", wrong_flags()),
        ]),
        "/ledger/renew" => members.extend([
            ("attempt", wrong_numbers(i32::MAX.into())),
            ("lease_seconds", wrong_numbers(2_592_000)),
        ]),
        "/ledger/review" | "/ledger/reset" => {
            members.retain(|(member, _)| *member != "claimant");
            members.extend([
                ("attempt", wrong_numbers(i32::MAX.into())),
                ("reviewer", wrong_texts(255)),
                ("reason", wrong_texts(2000)),
            ]);
        }
        other => panic!("{other}"),
    }
    members
}

/// A request that would be accepted but for one member, which has this value.
fn spoilt(path: &str, member: &str, value: &Value) -> Value {
    let (_, members) = ENDPOINTS.iter().find(|(known, _)| *known == path).unwrap();
    let mut request: Value = serde_json::from_str(&format!("{{{members}}}")).unwrap();
    if (path, member) == ("/claim", "lease_seconds") {
        request["pending"] = json!(true);
    }
    request[member] = value.clone();
    request
}

#[test]
fn values_of_the_wrong_type_or_out_of_bounds_are_named() {
    on_both(|service| {
        let guarded = Guarded::new(service);
        for (path, _) in &ENDPOINTS[2..] {
            for (member, values) in wrong_members(path) {
                for value in values {
                    let body = spoilt(path, member, &value).to_string();
                    guarded.refuses(path, body, "invalid_request", &[&format!("/{member}")]);
                }
                guarded.unchanged(&format!("{path} {member}"));
            }
        }
    });
}

#[test]
fn values_are_checked_in_every_element_of_an_array() {
    on_both(|service| {
        let guarded = Guarded::new(service);
        for (member, values) in wrong_members("/claim") {
            for value in values {
                let claims = json!([{"idempotency_key": "good"}, spoilt("/claim", member, &value)]);
                let pointer = format!("/1/{member}");
                guarded.refuses("/claim", claims.to_string(), "invalid_request", &[&pointer]);
            }
            guarded.unchanged(member);
        }
    });
}

#[test]
fn the_bounds_themselves_pass() {
    on_both(|service| {
        let long = "é".repeat(127) + "x";
        for seconds in [json!(1), json!(2_592_000), json!(60.0)] {
            service.claim(json!({"idempotency_key": long, "order_id": long, "claimant": long, "pending": true, "lease_seconds": seconds}));
            service.pending(
                json!({"idempotency_key": "p", "order_id": long, "lease_seconds": seconds}),
            );
        }
        for (key, seconds) in [("short", 1), ("long", 315_360_000)] {
            service.claim(json!({"idempotency_key": key, "ttl_seconds": seconds}));
        }
        let reason = "é".repeat(1000);
        service
            .failed(json!({"idempotency_key": "p", "attempt": 1, "reason": reason}))
            .ok();
        assert_eq!(service.entry("p")["reason"], reason);
        service
            .done(json!({"idempotency_key": long, "attempt": 1, "external_id": long}))
            .ok();
        assert_eq!(service.entry(&long)["external_id"], long);
        // The largest attempt that can be named lies ahead of all that have begun.
        let ahead = service.done(json!({"idempotency_key": "short", "attempt": i32::MAX}));
        assert_eq!(ahead.pointers(), ["/attempt"]);
    });
}

#[test]
fn only_keys_may_not_begin_or_end_with_white_space() {
    on_both(|service| {
        let request =
            json!({"idempotency_key": "a b\u{a0}c", "order_id": " o ", "claimant": "\u{feff}"});
        let verdict = service.claim(request);
        assert_eq!(verdict["idempotency_key"], "a b\u{a0}c");
        assert_eq!(verdict["order_id"], " o ");
        // U+180E and U+200B are not what JavaScript calls white space.
        service.claim(json!({"idempotency_key": "\u{180e}a\u{200b}"}));
    });
}

#[test]
fn a_result_may_have_64_kib() {
    on_both(|service| {
        let guarded = Guarded::new(service);
        let report = |length: usize| json!({"idempotency_key": "open", "attempt": 1, "result": "x".repeat(length - 2)});
        let over = report(64 * 1024 + 1).to_string();
        guarded.refuses("/ledger/done", over, "invalid_request", &["/result"]);
        guarded.unchanged("a result over 64 KiB");
        let entry = service.done(report(64 * 1024)).ok();
        assert_eq!(entry["result"].as_str().unwrap().len(), 64 * 1024 - 2);
        assert_eq!(service.entry("open")["result"], entry["result"]);
    });
}

#[test]
fn options_that_a_request_cannot_use_are_refused() {
    on_both(|service| {
        let guarded = Guarded::new(service);
        for (path, body, pointers) in [
            (
                "/claim",
                r#"{"idempotency_key":"new","lease_seconds":60}"#,
                vec!["/lease_seconds"],
            ),
            (
                "/claim",
                r#"{"idempotency_key":"new","pending":false,"lease_seconds":60}"#,
                vec!["/lease_seconds"],
            ),
            (
                "/claim",
                r#"{"idempotency_key":"new","scope":"s"}"#,
                vec!["/scope"],
            ),
            (
                "/claim",
                r#"{"idempotency_key":"new","scope":"s","normalize":["nfc"],"allow_empty":false}"#,
                vec!["/scope", "/normalize", "/allow_empty"],
            ),
            (
                "/claim",
                r#"{"parts":["a"],"uuid_version":4}"#,
                vec!["/uuid_version"],
            ),
            (
                "/claim",
                r#"{"parts":["a"],"fields":{"a":1}}"#,
                vec!["/fields"],
            ),
            (
                "/claim",
                r#"{"idempotency_key":"new","parts":["a"]}"#,
                vec!["/idempotency_key"],
            ),
            (
                "/claim",
                r#"{"idempotency_key":"new","fields":{"a":1}}"#,
                vec!["/idempotency_key"],
            ),
            ("/claim", r#"{"parts":[["a"]]}"#, vec!["/parts/0"]),
            ("/claim", r#"{"fields":{"a":null}}"#, vec!["/fields/a"]),
            ("/ledger/pending", r#"{"parts":["a"]}"#, vec!["/parts"]),
            (
                "/ledger/pending",
                r#"{"idempotency_key":"new","pending":true}"#,
                vec!["/pending"],
            ),
            (
                "/ledger/pending",
                r#"{"idempotency_key":"new","ttl_seconds":60}"#,
                vec!["/ttl_seconds"],
            ),
            (
                "/ledger/done",
                r#"{"idempotency_key":"open","reason":"r"}"#,
                vec!["/reason"],
            ),
            (
                "/ledger/done",
                r#"{"idempotency_key":"open","retry":true}"#,
                vec!["/retry"],
            ),
            (
                "/ledger/failed",
                r#"{"idempotency_key":"open","attempt":1,"external_id":"e"}"#,
                vec!["/external_id"],
            ),
            (
                "/ledger/failed",
                r#"{"idempotency_key":"open","attempt":1,"result":1}"#,
                vec!["/result"],
            ),
        ] {
            guarded.refuses(path, body, "invalid_request", &pointers);
            guarded.unchanged(body);
        }
    });
}

#[test]
fn null_in_an_optional_member_means_absent() {
    on_both(|service| {
        let verdict = service.claim(json!({
            "idempotency_key": "k", "parts": null, "fields": null, "scope": null, "normalize": null,
            "allow_empty": null, "order_id": null, "claimant": null, "ttl_seconds": null,
            "pending": null, "lease_seconds": null, "on_stale": null
        }));
        assert_eq!(
            (&verdict["status"], &verdict["order_id"]),
            (&json!("claimed"), &json!("k"))
        );
        assert_eq!(verdict["expires_at"], Value::Null);
        let verdict = service.claim(json!({"idempotency_key": null, "parts": ["a"]}));
        assert_eq!(verdict["claimed"], true);

        let verdict = service.pending(json!({
            "idempotency_key": "p", "order_id": null, "claimant": null, "lease_seconds": null, "on_stale": null
        }));
        assert_eq!(
            (&verdict["claimed"], &verdict["order_id"]),
            (&json!(true), &json!("p"))
        );
        let entry = service.failed(json!({
            "idempotency_key": "p", "attempt": 1, "reason": null, "retry": null, "claimant": null
        }));
        assert_eq!(entry.ok()["reason"], Value::Null);
        assert_eq!(
            service.pending(json!({"idempotency_key": "p"}))["claimed"],
            true
        );
        let entry = service.done(json!({
            "idempotency_key": "k", "external_id": null, "claimant": null, "attempt": null, "result": null
        }));
        assert_eq!(entry.ok()["external_id"], Value::Null);
    });
}

#[test]
fn null_is_a_payload() {
    on_both(|service| {
        for (key, path) in [("a", "/claim"), ("b", "/ledger/pending")] {
            let claim = |payload: Value| {
                service.post(path, &json!({"idempotency_key": key, "payload": payload}))
            };
            claim(Value::Null).ok();
            claim(Value::Null).ok();
            let reply = claim(json!(0));
            is_problem(&reply, "post", path, "key_reused", key);
            assert_eq!(reply.pointers(), ["/payload"]);
        }
    });
}

#[test]
fn queries_are_refused_where_there_are_no_parameters() {
    on_both(|service| {
        let guarded = Guarded::new(service);
        let queries: [(&str, &[&str]); 8] = [
            ("x=1", &["/x"]),
            ("x", &["/x"]),
            ("x=1&y=2", &["/x", "/y"]),
            ("x=1&x=1", &["/x"]),
            ("a%2Fb=1", &["/a~1b"]),
            ("%FF=1", &["/\u{fffd}"]),
            ("x=%C3", &["/x"]),
            ("=1", &["/"]),
        ];
        for (query, pointers) in queries {
            for (path, members) in ENDPOINTS {
                let path = format!("{path}?{query}");
                guarded.refuses(&path, format!("{{{members}}}"), "invalid_request", pointers);
            }
            for path in READ.iter().filter(|path| **path != "/ledger") {
                let reply = service.get(&format!("{path}?{query}"));
                is_problem(&reply, "get", path, "invalid_request", query);
                assert_eq!(reply.pointers(), pointers, "{path}?{query}");
            }
            guarded.unchanged(query);
        }
        service.get("/ledger/open?").ok();
    });
}

fn is_bad_query(service: &Service, query: &str, pointers: &[&str]) {
    let reply = service.get(&format!("/ledger?{query}"));
    is_problem(&reply, "get", "/ledger", "invalid_request", query);
    assert_eq!(reply.pointers(), pointers, "{query}");
}

#[test]
fn parameters_of_the_list_are_checked() {
    on_both(|service| {
        let guarded = Guarded::new(service);
        let long = format!("order_id={}", "a".repeat(256));
        let queries: Vec<(&str, &[&str])> = vec![
            ("x=1", &["/x"]),
            ("Limit=1", &["/Limit"]),
            ("limit=1&limit=1", &["/limit"]),
            ("limit=1&%6cimit=1", &["/limit"]),
            ("status=", &["/status"]),
            ("status=open", &["/status"]),
            ("status=DONE", &["/status"]),
            ("status=done,failed", &["/status"]),
            ("conflict=", &["/conflict"]),
            ("conflict=1", &["/conflict"]),
            ("conflict=TRUE", &["/conflict"]),
            ("limit=", &["/limit"]),
            ("limit=0", &["/limit"]),
            ("limit=501", &["/limit"]),
            ("limit=-1", &["/limit"]),
            ("limit=%2B5", &["/limit"]),
            ("limit=5.0", &["/limit"]),
            ("limit=1e2", &["/limit"]),
            ("limit=%205", &["/limit"]),
            ("limit=99999999999999999999", &["/limit"]),
            ("limit=null", &["/limit"]),
            ("order_id=", &["/order_id"]),
            ("order_id=a%00", &["/order_id"]),
            ("order_id=a%0Ab", &["/order_id"]),
            (&long, &["/order_id"]),
            ("order_id=%FF", &["/order_id"]),
            ("order_id=%ED%A0%80", &["/order_id"]),
            ("idempotency_key=", &["/idempotency_key"]),
            ("idempotency_key=%00", &["/idempotency_key"]),
            ("idempotency_key=+a", &["/idempotency_key"]),
            ("idempotency_key=a%EF%BB%BF", &["/idempotency_key"]),
            ("cursor=", &["/cursor"]),
            ("cursor=x", &["/cursor"]),
            ("cursor=%00", &["/cursor"]),
            ("cursor=../../etc/passwd", &["/cursor"]),
        ];
        for (query, pointers) in queries {
            is_bad_query(service, query, pointers);
        }
        guarded.unchanged("queries");
        for limit in [1, 500] {
            service.get(&format!("/ledger?limit={limit}")).ok();
        }
    });
}

#[test]
fn forged_cursors_are_refused() {
    on_both(|service| {
        Guarded::new(service);
        for plain in [
            "",
            " ",
            "1",
            "x a",
            "1.5 a",
            "1e5 a",
            "9223372036854775808 a",
            "-9223372036854775808 a",
            "9223372036854775807 a",
            "1 a\0b",
        ] {
            is_bad_query(
                service,
                &format!("cursor={}", URL_SAFE_NO_PAD.encode(plain)),
                &["/cursor"],
            );
        }
        let not_utf8 = URL_SAFE_NO_PAD.encode(b"1 \xff");
        is_bad_query(service, &format!("cursor={not_utf8}"), &["/cursor"]);
        let page = service.get("/ledger?limit=1").ok();
        let cursor = page["next_cursor"].as_str().unwrap().to_owned();
        service.get(&format!("/ledger?cursor={cursor}")).ok();
        // The first and the last time, and what lies about the first of Postgres.
        for possible in [
            "-8334601228800000000 a",
            "-210866803200000001 a",
            "-210866803200000000 a",
            "8210266876799999999 a",
            "1 ",
            "1  a\n",
        ] {
            let cursor = URL_SAFE_NO_PAD.encode(possible);
            service.get(&format!("/ledger?cursor={cursor}")).ok();
        }
        is_bad_query(service, &format!("cursor={cursor}%3D"), &["/cursor"]);
        is_bad_query(service, &format!("cursor={cursor}!"), &["/cursor"]);
    });
}

#[test]
fn keys_in_paths_are_checked() {
    on_both(|service| {
        let long = "a".repeat(256);
        let wide = encoded(&"é".repeat(128));
        for segment in [
            "%00",
            "a%00b",
            "%0A",
            "%7F",
            "%C2%85",
            "%FF",
            "%C0%AF",
            "%ED%A0%80",
            "%F4%90%80%80",
            "a%E2%82",
            "%20a",
            "a%20",
            "%EF%BB%BFa",
            "a%C2%A0",
            "%E2%80%83",
            &long,
            &wide,
        ] {
            let path = format!("/ledger/{segment}");
            let reply = service.get(&path);
            is_problem(
                &reply,
                "get",
                "/ledger/{idempotency_key}",
                "invalid_request",
                segment,
            );
            assert_eq!(reply.pointers(), ["/idempotency_key"], "{segment}");
        }
        let reply = service.get("/ledger/%25zz");
        is_problem(
            &reply,
            "get",
            "/ledger/{idempotency_key}",
            "unknown_key",
            "%25zz",
        );
        let reply = service.get("/ledger/%zz");
        assert_eq!(reply.problem(404), "unknown_key");
    });
}

#[test]
fn unknown_paths_are_not_found() {
    on_both(|service| {
        for path in [
            "/",
            "/nope",
            "/Key",
            "/key/",
            "/claim/",
            "/claims",
            "/ledger/",
            "/ledger/a/b",
            "/ledger/pending/x",
            "/health/",
            "/health/live",
            "/openapi.yaml",
            "/openapi.json/",
            "/%6Bey%00",
            "/../claim%2F",
        ] {
            for method in ["GET", "POST", "DELETE"] {
                let reply = service.send(method, path, &[JSON], b"");
                assert_eq!(reply.problem(404), "not_found", "{method} {path}");
            }
        }
        let reply = service.get(&format!("/nope/{}", "x".repeat(50_000)));
        assert_eq!(reply.problem(404), "not_found");
        assert!(reply.body.to_string().len() < 3000);
    });
}

#[test]
fn a_path_answers_only_its_methods_and_says_which() {
    on_both(|service| {
        let guarded = Guarded::new(service);
        for (path, allowed) in [
            ("/key", "POST"),
            ("/retry", "POST"),
            ("/claim", "POST"),
            ("/ledger/pending", "GET, HEAD, POST"),
            ("/ledger/done", "GET, HEAD, POST"),
            ("/ledger/failed", "GET, HEAD, POST"),
            ("/ledger/renew", "GET, HEAD, POST"),
            ("/ledger/review", "GET, HEAD, POST"),
            ("/ledger/reset", "GET, HEAD, POST"),
            ("/ledger", "GET, HEAD"),
            ("/ledger/open", "GET, HEAD"),
            ("/health", "GET, HEAD"),
            ("/health/ready", "GET, HEAD"),
            ("/openapi.json", "GET, HEAD"),
        ] {
            for method in [
                "GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND",
            ] {
                if allowed.split(", ").any(|allowed| allowed == method) {
                    continue;
                }
                let mut connection = Connection::open(service);
                connection.send(format!("{method} {path} HTTP/1.1\r\nHost: test\r\n\r\n"));
                let reply = connection.reply();
                assert_eq!(reply.problem(405), "method_not_allowed", "{method} {path}");
                assert_eq!(reply.headers["allow"], allowed, "{method} {path}");
            }
        }
        guarded.unchanged("wrong methods");
    });
}

#[test]
fn the_media_type_must_be_json_in_utf_8() {
    on_both(|service| {
        let guarded = Guarded::new(service);
        for (path, members) in ENDPOINTS {
            let body = format!("{{{members}}}");
            let mut refused: Vec<Vec<(&str, &str)>> = vec![
                vec![],
                vec![JSON, ("Content-Encoding", "gzip")],
                vec![JSON, ("Content-Encoding", "br")],
            ];
            refused.extend(
                [
                    "text/plain",
                    "text/json",
                    "json",
                    "application/jsonx",
                    "application/problem+json",
                    "application/x-www-form-urlencoded",
                    "multipart/form-data; boundary=x",
                    "application/json; charset=iso-8859-1",
                    "application/json; charset=utf-16",
                ]
                .map(|media_type| vec![("Content-Type", media_type)]),
            );
            for headers in refused {
                let reply = service.send("POST", path, &headers, body.as_bytes());
                is_problem(
                    &reply,
                    "post",
                    path,
                    "unsupported_media_type",
                    &format!("{headers:?}"),
                );
            }
            guarded.unchanged(path);
        }
        for accepted in [
            "application/json; charset=utf-8",
            "application/json;charset=\"UTF-8\"",
            "Application/JSON",
            "application/json; profile=x",
        ] {
            let headers = [("Content-Type", accepted), ("Content-Encoding", "identity")];
            service
                .send("POST", "/key", &headers, br#"{"parts":["a"]}"#)
                .ok();
        }
    });
}

#[test]
fn callers_need_a_key() {
    on_both_with(&[("API_KEYS", "n8n:s3cret,shop:other")], |service| {
        let before = service.database.dump();
        let without: [&[(&str, &str)]; 11] = [
            &[],
            &[("X-API-Key", "")],
            &[("X-API-Key", "wrong")],
            &[("X-API-Key", "s3cre")],
            &[("X-API-Key", "s3crets")],
            &[("X-API-Key", "S3CRET")],
            &[("X-API-Key", "n8n:s3cret")],
            &[("Authorization", "Bearer wrong")],
            &[("Authorization", "Bearer")],
            &[("Authorization", "s3cret")],
            &[("Authorization", "Basic s3cret")],
        ];
        for headers in without {
            for (path, members) in ENDPOINTS {
                let headers = [headers, &[JSON]].concat();
                let body = format!("{{{members}}}");
                let reply = service.send("POST", path, &headers, body.as_bytes());
                is_problem(
                    &reply,
                    "post",
                    path,
                    "unauthorized",
                    &format!("{headers:?}"),
                );
                assert!(reply.headers.contains_key("www-authenticate"));
            }
            for path in ["/ledger", "/ledger/open"] {
                let reply = service.send("GET", path, headers, b"");
                is_problem(&reply, "get", path, "unauthorized", &format!("{headers:?}"));
            }
        }
        assert_eq!(service.database.dump(), before);
        for headers in [
            ("X-API-Key", "s3cret"),
            ("x-api-key", "other"),
            ("Authorization", "Bearer s3cret"),
            ("Authorization", "bearer other"),
        ] {
            service.send("GET", "/ledger", &[headers], b"").ok();
        }
        for path in ["/health", "/health/ready", "/openapi.json"] {
            service.get(path).ok();
        }
    });
}

#[test]
fn a_key_that_is_not_ascii_is_wrong() {
    let database = Database::new(Backend::Sqlite);
    let service = Service::start_on(database, &[("API_KEYS", "n8n:s3cret")]);
    let mut connection = Connection::open(&service);
    connection.send(b"GET /ledger HTTP/1.1\r\nHost: test\r\nX-API-Key: s3cret\xff\r\n\r\n");
    assert_eq!(connection.reply().problem(401), "unauthorized");
}

/// A claim of which the body has so many bytes.
fn claim_of(length: usize) -> Vec<u8> {
    let around = r#"{"idempotency_key":"large","payload":""}"#.len();
    let payload = "x".repeat(length - around);
    format!(r#"{{"idempotency_key":"large","payload":"{payload}"}}"#).into_bytes()
}

const LIMIT: usize = 256 * 1024;

#[test]
fn a_body_may_have_256_kib() {
    on_both(|service| {
        let guarded = Guarded::new(service);
        for (path, _) in ENDPOINTS {
            guarded.refuses(path, claim_of(LIMIT + 1), "payload_too_large", &[]);
        }
        guarded.unchanged("bodies that are too large");
        let verdict = service
            .send("POST", "/claim", &[JSON], &claim_of(LIMIT))
            .ok();
        assert_eq!(verdict["claimed"], true);
    });
}

#[test]
fn the_limit_of_a_body_is_a_setting() {
    on_both_with(&[("BODY_LIMIT", "1024")], |service| {
        let send = |length: usize| service.send("POST", "/claim", &[JSON], &claim_of(length));
        assert_eq!(send(1025).problem(413), "payload_too_large");
        send(1024).ok();
    });
}

const TEN_MB: usize = 10 * 1024 * 1024;

/// Sends 10 MB in chunks.
fn send_chunks(connection: &mut Connection) {
    for _ in 0..TEN_MB / 0x10000 {
        connection.send(b"10000\r\n");
        connection.send([b'x'; 0x10000]);
        connection.send(b"\r\n");
    }
    connection.send(b"0\r\n\r\n");
}

#[test]
fn a_client_that_sends_10_mb_hears_that_it_is_too_much() {
    on_both(|service| {
        let guarded = Guarded::new(service);
        for (path, _) in ENDPOINTS {
            // An ordinary client, which announces the length.
            guarded.refuses(path, claim_of(TEN_MB), "payload_too_large", &[]);
            // One that does not know the length in advance.
            let mut connection = Connection::open(service);
            connection.send_head(path, "Transfer-Encoding: chunked\r\n");
            send_chunks(&mut connection);
            assert_eq!(connection.reply().problem(413), "payload_too_large");
        }
        guarded.unchanged("bodies of 10 MB");
    });
}

#[test]
fn a_connection_goes_on_after_a_body_that_was_too_large() {
    let service = Service::start(Backend::Sqlite);
    let mut connection = Connection::open(&service);
    for _ in 0..2 {
        connection.send_head("/claim", &format!("Content-Length: {TEN_MB}\r\n"));
        connection.send(claim_of(TEN_MB));
        assert_eq!(connection.reply().problem(413), "payload_too_large");
    }
}

#[test]
fn a_client_that_announces_a_gigabyte_is_told_at_once() {
    let service = Service::start(Backend::Sqlite);
    let mut connection = Connection::open(&service);
    connection.send_head("/claim", "Content-Length: 1073741824\r\n");
    assert_eq!(connection.reply().problem(413), "payload_too_large");
}

#[test]
fn a_client_that_waits_for_leave_to_send_is_answered() {
    let service = Service::start(Backend::Sqlite);
    let body = br#"{"parts":["a"]}"#;
    let mut connection = Connection::open(&service);
    let headers = format!("Expect: 100-continue\r\nContent-Length: {}\r\n", body.len());
    connection.send_head("/key", &headers);
    assert_eq!(connection.reply().status, 100);
    connection.send(body);
    connection.reply().ok();
}

#[test]
fn other_refusals_reach_a_client_that_sends_10_mb_too() {
    let database = Database::new(Backend::Sqlite);
    let service = Service::start_on(database, &[("API_KEYS", "n8n:s3cret")]);
    let key = "X-API-Key: s3cret\r\n";
    for (path, headers, status, code) in [
        ("/claim", "", 401, "unauthorized"),
        ("/nope", key, 404, "not_found"),
        ("/ledger", key, 405, "method_not_allowed"),
        ("/health", "", 405, "method_not_allowed"),
    ] {
        let mut connection = Connection::open(&service);
        connection.send_head(path, &format!("{headers}Content-Length: {TEN_MB}\r\n"));
        connection.send(claim_of(TEN_MB));
        assert_eq!(connection.reply().problem(status), code, "{path}");
        let mut connection = Connection::open(&service);
        connection.send_head(path, &format!("{headers}Transfer-Encoding: chunked\r\n"));
        send_chunks(&mut connection);
        assert_eq!(connection.reply().problem(status), code, "{path}, chunked");
    }
}

#[test]
fn pipelined_requests_are_answered_in_their_order() {
    on_both(|service| {
        let request = |body: &str| {
            format!(
                "POST /claim HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            )
        };
        let mut connection = Connection::open(service);
        connection.send(
            [
                request(r#"{"idempotency_key":"p"}"#),
                request("{"),
                request(r#"{"idempotency_key":"p"}"#),
                "GET /nope HTTP/1.1\r\nHost: test\r\n\r\n".into(),
                "DELETE /claim HTTP/1.1\r\nHost: test\r\n\r\n".into(),
            ]
            .concat(),
        );
        assert_eq!(connection.reply().ok()["claimed"], true);
        assert_eq!(connection.reply().problem(400), "malformed_json");
        assert_eq!(connection.reply().ok()["claimed"], false);
        assert_eq!(connection.reply().problem(404), "not_found");
        assert_eq!(connection.reply().problem(405), "method_not_allowed");
    });
}

#[test]
fn a_request_that_comes_in_halves_is_answered_and_keeps_nobody_waiting() {
    on_both(|service| {
        let body = r#"{"idempotency_key":"halves"}"#;
        let (first, second) = body.split_at(10);
        let mut connection = Connection::open(service);
        connection.send("POST /claim HTTP/1.1\r\nHost: te");
        service.get("/health/ready").ok();
        connection.send(format!(
            "st\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{first}",
            body.len()
        ));
        service.get("/health/ready").ok();
        connection.send(second);
        assert_eq!(connection.reply().ok()["claimed"], true);
    });
}

#[test]
fn a_body_that_breaks_off_claims_nothing() {
    on_both(|service| {
        let guarded = Guarded::new(service);
        let body = r#"{"idempotency_key":"cut"}"#;
        for headers in [
            format!("Content-Length: {}\r\n", body.len() + 1),
            "Transfer-Encoding: chunked\r\n".to_owned(),
        ] {
            let mut connection = Connection::open(service);
            connection.send_head("/claim", &headers);
            if headers.starts_with("Transfer") {
                connection.send(format!("{:x}\r\n{body}\r\n", body.len()));
            } else {
                connection.send(body);
            }
            connection.finish_sending();
            connection.wait_for_the_end();
            guarded.unchanged(&headers);
        }
        let verdict = service.claim(json!({"idempotency_key": "cut"}));
        assert_eq!(verdict["claimed"], true);
    });
}

#[test]
fn chunks_that_are_none_are_malformed() {
    on_both(|service| {
        let guarded = Guarded::new(service);
        let mut connection = Connection::open(service);
        connection.send_head("/claim", "Transfer-Encoding: chunked\r\n");
        connection.send("zz\r\n{\"idempotency_key\":\"chunk\"}\r\n0\r\n\r\n");
        assert_eq!(connection.reply().problem(400), "malformed_json");
        guarded.unchanged("chunks that are none");
    });
}

#[test]
fn clients_that_go_away_leave_the_service_answering() {
    on_both(|service| {
        let whole = format!(
            "POST /claim HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: 27\r\n\r\n{}",
            r#"{"idempotency_key":"leaver"}"#
        );
        for length in [0, 5, 40, 80, whole.len() - 1, whole.len()] {
            for _ in 0..20 {
                Connection::open(service).send(&whole.as_bytes()[..length]);
            }
        }
        service.get("/health/ready").ok();
        let verdict = service.claim(json!({"idempotency_key": "stayer"}));
        assert_eq!(verdict["claimed"], true);
        assert!(!service.log().contains("panicked"), "{}", service.log());
    });
}

/// Odd values, and such as pass.
fn odd_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        prop::sample::select(vec![
            json!(null),
            json!(true),
            json!(false),
            json!(0),
            json!(-0.0),
            json!(1),
            json!(2),
            json!(60),
            json!(1.5),
            json!(-1),
            json!(1e99),
            json!(5e-324),
            json!(i64::MIN),
            json!(u64::MAX),
            json!(2_147_483_648_u32),
            json!(""),
            json!(" "),
            json!("a"),
            json!("b"),
            json!("done"),
            json!("take_over"),
            json!("hold"),
            json!("nfc"),
            json!("trim"),
            json!("\0"),
            json!("a\u{0}b"),
            json!("\u{feff}"),
            json!("\u{7f}"),
            json!("😀"),
            json!("'; DROP TABLE run_ledger; --"),
            json!("%00"),
            json!("\\u0000"),
            json!("\u{10ffff}"),
            json!("\u{fffe}"),
            json!("a".repeat(255)),
            json!("é".repeat(128)),
            json!("x".repeat(70_000)),
        ]),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,20}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            odd_object(inner),
        ]
    })
}

/// An object of members that some endpoint knows, and of others.
fn odd_object(value: impl Strategy<Value = Value>) -> impl Strategy<Value = Value> {
    let name = prop_oneof![
        9 => prop::sample::select(vec![
            "idempotency_key", "parts", "fields", "scope", "normalize", "allow_empty", "uuid_version", "order_id",
            "claimant", "ttl_seconds", "payload", "pending", "lease_seconds", "on_stale", "external_id", "result",
            "attempt", "reason", "retry", "effects",
        ]).prop_map(str::to_owned),
        1 => ".{0,8}",
    ];
    prop::collection::btree_map(name, value, 0..6)
        .prop_map(|members| Value::Object(members.into_iter().collect::<Map<_, _>>()))
}

/// Whatever was sent: a success, or a refusal that is a well-formed problem and no fault of the
/// service.
fn is_answered(reply: &Reply) -> Result<(), TestCaseError> {
    prop_assert!(reply.status < 500, "{} {}", reply.status, reply.body);
    if reply.status == 200 {
        prop_assert!(!reply.body.is_null());
        prop_assert!(reply.body.get("error").is_none());
    } else {
        let code = reply.problem(reply.status);
        prop_assert!(reply.body["type"].as_str().unwrap().ends_with(&code));
        if reply.status == 422 {
            prop_assert!(!reply.pointers().is_empty());
        }
    }
    Ok(())
}

/// Shrunk failures are printed; nothing is written beside the tests.
fn runner(cases: u32) -> TestRunner {
    TestRunner::new(Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    })
}

#[test]
fn no_json_makes_the_service_fail() {
    let document = prop_oneof![
        4 => odd_object(odd_value()),
        1 => prop::collection::vec(odd_object(odd_value()), 0..4).prop_map(Value::from),
        1 => odd_value(),
    ];
    on_both(|service| {
        runner(300)
            .run(&document, |document| {
                for (path, members) in ENDPOINTS {
                    is_answered(&service.post(path, &document))?;
                    // With what an acceptable request has, so that more get past the first check.
                    if let Value::Object(odd) = &document {
                        let mut request: Map<String, Value> =
                            serde_json::from_str(&format!("{{{members}}}")).unwrap();
                        request.extend(odd.clone());
                        is_answered(&service.post(path, &Value::Object(request)))?;
                    }
                }
                Ok(())
            })
            .unwrap();
    });
}

#[test]
fn no_bytes_make_the_service_fail() {
    let valid = r#"{"idempotency_key":"é\u00e9😀","claimant":"a","attempt":1,"payload":{"a":[1.5e3,null,"\ud83d\ude00"]}}"#;
    let damage = prop::collection::vec((0..valid.len(), any::<u8>(), any::<bool>()), 1..4);
    on_both(|service| {
        runner(300)
            .run(&damage, |damage| {
                let mut body = valid.as_bytes().to_vec();
                for (at, byte, replaces) in damage {
                    if replaces {
                        body[at] = byte;
                    } else {
                        body.insert(at, byte);
                    }
                }
                for (path, _) in ENDPOINTS {
                    is_answered(&service.send("POST", path, &[JSON], &body))?;
                }
                Ok(())
            })
            .unwrap();
    });
}

#[test]
fn no_path_or_query_makes_the_service_fail() {
    let cursor = (any::<i64>(), ".{0,10}").prop_map(|(time, key)| {
        format!("cursor={}", URL_SAFE_NO_PAD.encode(format!("{time} {key}")))
    });
    let bytes = prop::collection::vec(any::<u8>(), 0..20).prop_map(|bytes| {
        percent_encoding::percent_encode(&bytes, percent_encoding::NON_ALPHANUMERIC).to_string()
    });
    let name = prop::sample::select(vec![
        "status",
        "conflict",
        "order_id",
        "idempotency_key",
        "limit",
        "cursor",
        "x",
    ]);
    let target = prop_oneof![
        cursor.prop_map(|cursor| format!("/ledger?{cursor}")),
        (name, bytes.clone()).prop_map(|(name, value)| format!("/ledger?{name}={value}")),
        bytes.clone().prop_map(|query| format!("/ledger?{query}")),
        bytes.prop_map(|key| format!("/ledger/{key}")),
    ];
    on_both(|service| {
        runner(400)
            .run(&target, |target| is_answered(&service.get(&target)))
            .unwrap();
    });
}

#[test]
fn a_body_that_never_ends_does_not_hold_its_connection() {
    let service = Service::start(Backend::Sqlite);
    let mut connection = Connection::open(&service);
    connection.send_head("/claim", "Content-Length: 100\r\n");
    connection.send("{");
    assert_eq!(connection.reply().problem(400), "malformed_json");
    connection.wait_for_the_end();
}
