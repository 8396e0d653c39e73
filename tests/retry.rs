//! `POST /retry`: what a failed call means. The rules are tested where they are; here, that they
//! are reached, and that requests are read strictly.

use chrono::{TimeDelta, Utc};
use serde_json::{Value, json};

use super::helpers::service::{command, finish, refusal};
use super::helpers::{Backend, Database, Service, on_both};

fn advice(service: &Service, call: Value) -> Value {
    service.post("/retry", &call).ok()
}

/// What a date of `Retry-After` looks like that is so many seconds away.
fn http_date(seconds: i64) -> String {
    let date = Utc::now() + TimeDelta::seconds(seconds);
    date.format("%a, %d %b %Y %H:%M:%S GMT").to_string()
}

#[test]
fn a_failed_call_is_judged() {
    on_both(|service| {
        let before = service.database.dump();
        for (call, decision, wait, risk) in [
            (
                json!({"status_code": 429, "attempt": 1}),
                "retry",
                1,
                "none",
            ),
            (
                json!({"status_code": 502, "attempt": 2}),
                "check",
                2,
                "high",
            ),
            (
                json!({"status_code": 502, "attempt": 2, "idempotent": true}),
                "retry",
                2,
                "controlled",
            ),
            (
                json!({"status_code": 502, "attempt": 3, "idempotent": true}),
                "give_up",
                0,
                "controlled",
            ),
            (json!({"status_code": 404, "attempt": 1}), "fix", 0, "none"),
            (
                json!({"failure": "timeout", "attempt": 1}),
                "check",
                1,
                "high",
            ),
            (
                json!({"failure": "timeout", "attempt": 1, "idempotent": true}),
                "retry",
                1,
                "controlled",
            ),
            (
                json!({"failure": "connection_reset", "attempt": 3}),
                "check",
                5,
                "high",
            ),
            (
                json!({"failure": "connection_reset", "attempt": 4}),
                "give_up",
                0,
                "high",
            ),
            (
                json!({"failure": "connection_refused", "attempt": 2}),
                "retry",
                2,
                "none",
            ),
            (json!({"failure": "dns", "attempt": 1}), "retry", 1, "none"),
            (json!({"failure": "tls", "attempt": 1}), "fix", 0, "none"),
            (
                json!({"failure": "no_effect", "attempt": 2}),
                "retry",
                2,
                "none",
            ),
            (
                json!({"failure": "no_effect", "attempt": 3}),
                "give_up",
                0,
                "none",
            ),
        ] {
            let mut reply = advice(service, call.clone());
            let cause = [&call["status_code"], &call["failure"]]
                .into_iter()
                .find(|cause| !cause.is_null());
            let cause = cause.unwrap().to_string();
            let reason = reply.as_object_mut().unwrap().remove("reason").unwrap();
            assert!(
                reason
                    .as_str()
                    .unwrap()
                    .starts_with(&format!("{}: ", cause.trim_matches('"'))),
                "{reason}"
            );
            assert_eq!(
                reply,
                json!({"decision": decision, "wait_seconds": wait, "duplicate_risk": risk}),
                "{call}"
            );
        }
        assert_eq!(service.database.dump(), before);
    });
}

#[test]
fn retry_after_is_read_in_every_form() {
    let service = Service::start(Backend::Sqlite);
    for (retry_after, wait) in [
        (json!(2), 2),
        (json!(2.0), 2),
        (json!("2"), 2),
        (json!(0), 1),
        (json!(null), 1),
        (json!(300), 300),
        (json!(http_date(-60)), 1),
    ] {
        let reply = advice(
            &service,
            json!({"status_code": 429, "attempt": 1, "retry_after": retry_after}),
        );
        assert_eq!(
            (&reply["decision"], &reply["wait_seconds"]),
            (&json!("retry"), &json!(wait)),
            "{retry_after}"
        );
    }
    // What is left of it depends on the time, but never on less than it says.
    let reply = advice(
        &service,
        json!({"status_code": 503, "attempt": 1, "idempotent": true, "retry_after": http_date(120)}),
    );
    assert_eq!(reply["decision"], "retry");
    let wait = reply["wait_seconds"].as_u64().unwrap();
    assert!((100..=120).contains(&wait), "{reply}");
    // More than anybody waits for is told as it is.
    for retry_after in [
        json!(301),
        json!(9_007_199_254_740_991_u64),
        json!("9007199254740991"),
    ] {
        let reply = advice(
            &service,
            json!({"status_code": 429, "attempt": 1, "retry_after": retry_after}),
        );
        assert_eq!(reply["decision"], "give_up");
        assert_eq!(
            reply["wait_seconds"].to_string(),
            retry_after.to_string().trim_matches('"')
        );
        assert!(
            reply["reason"]
                .as_str()
                .unwrap()
                .contains("the limit is 300 s"),
            "{reply}"
        );
    }
}

#[test]
fn jitter_is_asked_for() {
    let service = Service::start(Backend::Sqlite);
    let call = json!({"status_code": 429, "attempt": 1, "retry_after": 40, "jitter": true});
    let waits: Vec<f64> = (0..20)
        .map(|_| {
            advice(&service, call.clone())["wait_seconds"]
                .as_f64()
                .unwrap()
        })
        .collect();
    assert!(
        waits.iter().all(|wait| (40.0..=60.0).contains(wait)),
        "{waits:?}"
    );
    assert!(waits.iter().any(|wait| *wait != waits[0]), "{waits:?}");
}

#[test]
fn requests_are_read_strictly() {
    let service = Service::start(Backend::Sqlite);
    let refused = |call: Value, pointer: &str| {
        let reply = service.post("/retry", &call);
        assert_eq!(reply.problem(422), "invalid_request", "{call}");
        assert_eq!(reply.pointers(), [pointer], "{call}");
        reply.body["detail"].as_str().unwrap().to_owned()
    };
    // Exactly one cause.
    refused(json!({"attempt": 1}), "/status_code");
    refused(
        json!({"status_code": null, "failure": null, "attempt": 1}),
        "/status_code",
    );
    refused(
        json!({"status_code": 500, "failure": "timeout", "attempt": 1}),
        "/failure",
    );
    // No failed call has these.
    for code in [
        json!(200),
        json!(204),
        json!(304),
        json!(399),
        json!(600),
        json!(0),
        json!(-500),
        json!(500.5),
        json!("500"),
        json!(true),
    ] {
        let detail = refused(json!({"status_code": code, "attempt": 1}), "/status_code");
        assert!(detail.contains("from 400 to 599"), "{detail}");
    }
    for failure in [
        json!("ECONNRESET"),
        json!("Timeout"),
        json!(""),
        json!(" dns"),
    ] {
        let detail = refused(json!({"failure": failure, "attempt": 1}), "/failure");
        let names = "\"timeout\", \"connection_reset\", \"connection_refused\", \"dns\", \"unreachable\", \"tls\", \"unknown\", \"no_effect\"";
        assert!(detail.contains(names), "{detail}");
    }
    refused(json!({"failure": 1, "attempt": 1}), "/failure");
    // Without its number, every try would be the first.
    refused(json!({"status_code": 500}), "/attempt");
    for attempt in [
        json!(null),
        json!(0),
        json!(-1),
        json!(1.5),
        json!("1"),
        json!(2_147_483_648_u64),
    ] {
        refused(json!({"status_code": 500, "attempt": attempt}), "/attempt");
    }
    for retry_after in [
        json!(-1),
        json!(1.5),
        json!(9_007_199_254_740_992_u64),
        json!(1e300),
        json!("soon"),
        json!(""),
        json!("-1"),
        json!("9007199254740992"),
        json!("2026-11-30T09:12:00Z"),
        json!(true),
        json!([2]),
        json!({}),
    ] {
        refused(
            json!({"status_code": 429, "attempt": 1, "retry_after": retry_after}),
            "/retry_after",
        );
    }
    for flag in [json!(1), json!("true"), json!([])] {
        refused(
            json!({"status_code": 500, "attempt": 1, "idempotent": flag}),
            "/idempotent",
        );
        refused(
            json!({"status_code": 500, "attempt": 1, "jitter": flag}),
            "/jitter",
        );
    }
    refused(
        json!({"status_code": 500, "attempt": 1, "retry-after": 2}),
        "/retry-after",
    );
}

#[test]
fn the_bounds_themselves_are_accepted() {
    let service = Service::start(Backend::Sqlite);
    for call in [
        json!({"status_code": 400, "attempt": i32::MAX}),
        json!({"status_code": 599, "attempt": 1.0}),
        json!({"status_code": 500.0, "failure": null, "attempt": 1, "retry_after": null, "idempotent": null, "jitter": null}),
        json!({"status_code": null, "failure": "unknown", "attempt": 1}),
    ] {
        advice(&service, call);
    }
}

#[test]
fn the_patience_is_set() {
    let settings = [("RETRY_WAITS", "4,0"), ("RETRY_AFTER_LIMIT", "10")];
    let service = Service::start_on(Database::new(Backend::Sqlite), &settings);
    for (attempt, retry_after, decision, wait) in [
        (1, 0, "retry", 4),
        (2, 0, "give_up", 0),
        (1, 10, "retry", 10),
        (1, 11, "give_up", 11),
    ] {
        let reply = advice(
            &service,
            json!({"status_code": 429, "attempt": attempt, "retry_after": retry_after}),
        );
        assert_eq!(
            (&reply["decision"], &reply["wait_seconds"]),
            (&json!(decision), &json!(wait)),
            "{reply}"
        );
    }
    let too_many = ("RETRY_WAITS", "1,1,1,1,1,1,1,1,1,1,1");
    let output = finish(&mut command(
        &Database::new(Backend::Sqlite),
        &[],
        &[too_many],
    ));
    assert!(refusal(&output).contains("RETRY_WAITS"));
}
