//! The contract's rules, as a caller meets them, on both stores.
//!
//! Unless a test says otherwise, `a` claimed the key, and asks again within the replay window.

use chrono::{DateTime, FixedOffset, SecondsFormat};
use serde_json::{Value, json};

use super::helpers::{Service, on_both, on_both_with, wait_until};

/// Everybody but `a`.
const OTHERS: [Option<&str>; 2] = [Some("b"), None];

/// A claim, with more members.
fn claim_of(key: &str, claimant: Option<&str>, more: &Value) -> Value {
    let mut claim = json!({"idempotency_key": key, "claimant": claimant});
    let members = claim.as_object_mut().unwrap();
    members.extend(more.as_object().unwrap().clone());
    claim
}

/// Claims at the gate alone.
fn claim(service: &Service, key: &str, claimant: Option<&str>) -> Value {
    service.claim(claim_of(key, claimant, &json!({})))
}

/// Claims with a ledger entry.
fn claim_pending(service: &Service, key: &str, claimant: Option<&str>) -> Value {
    service.claim(claim_of(key, claimant, &json!({"pending": true})))
}

/// Claims with a ledger entry, and takes over what is stale.
fn take_over(service: &Service, key: &str, claimant: Option<&str>) -> Value {
    let more = json!({"pending": true, "on_stale": "take_over"});
    service.claim(claim_of(key, claimant, &more))
}

/// A key that `a` has pending, and whose lease has run out.
fn stale_key(service: &Service, key: &str) {
    service.pending_key(key, "a", 600);
    service.database.age(key, 601);
}

/// A key that `a` has done.
fn done_key(service: &Service, key: &str) {
    service.pending_key(key, "a", 600);
    let report = json!({
        "idempotency_key": key, "attempt": 1, "external_id": "ch_1", "result": {"charged": 129.9}
    });
    assert_eq!(service.done(report).ok()["changed"], true);
}

/// A key that failed when `a` had it.
fn failed_key(service: &Service, key: &str, retry: bool) {
    service.pending_key(key, "a", 600);
    let report = json!({
        "idempotency_key": key, "attempt": 1, "reason": "card declined", "retry": retry
    });
    assert_eq!(service.failed(report).ok()["changed"], true);
}

/// A key whose first attempt, by `a`, failed, and whose second `b` has pending.
fn second_attempt(service: &Service, key: &str) {
    failed_key(service, key, true);
    let verdict = claim_pending(service, key, Some("b"));
    assert_eq!(gist(&verdict), (true, "pending", 2, false));
}

/// What a verdict says first: `claimed`, `status`, `attempt`, `replayed`.
fn gist(verdict: &Value) -> (bool, &str, u64, bool) {
    (
        verdict["claimed"].as_bool().unwrap(),
        verdict["status"].as_str().unwrap(),
        verdict["attempt"].as_u64().unwrap(),
        verdict["replayed"].as_bool().unwrap(),
    )
}

/// The names of what happened to a key.
fn events(service: &Service, key: &str) -> Vec<String> {
    let entry = service.entry(key);
    let history = entry["history"].as_array().unwrap();
    let name = |event: &Value| event["event"].as_str().unwrap().to_owned();
    history.iter().map(name).collect()
}

/// A time, which must be in UTC with milliseconds.
fn time(value: &Value) -> DateTime<FixedOffset> {
    let text = value.as_str().unwrap();
    let time = DateTime::parse_from_rfc3339(text).unwrap();
    assert_eq!(time.to_rfc3339_opts(SecondsFormat::Millis, true), text);
    time
}

fn seconds_between(earlier: &Value, later: &Value) -> i64 {
    let difference = time(later) - time(earlier);
    assert_eq!(difference.num_milliseconds() % 1000, 0, "{difference}");
    difference.num_seconds()
}

// What replies look like.

fn assert_members(value: &Value, names: &[&str]) {
    let members: Vec<&String> = value.as_object().unwrap().keys().collect();
    assert_eq!(members, names);
}

fn assert_time_or_null(value: &Value) {
    assert!(value.is_null() || time(value).timestamp() > 0);
}

fn assert_text_or_null(value: &Value) {
    assert!(value.is_null() || value.is_string(), "{value}");
}

fn assert_is_verdict(verdict: &Value) {
    assert_members(
        verdict,
        &[
            "claimed",
            "status",
            "idempotency_key",
            "order_id",
            "attempt",
            "replayed",
            "processed_at",
            "expires_at",
            "lease_expires_at",
            "external_id",
            "result",
            "seen_again",
            "last_seen_at",
            "warnings",
        ],
    );
    gist(verdict);
    assert!(verdict["idempotency_key"].is_string());
    assert!(verdict["order_id"].is_string());
    assert!(verdict["seen_again"].is_u64());
    time(&verdict["processed_at"]);
    for member in ["expires_at", "lease_expires_at", "last_seen_at"] {
        assert_time_or_null(&verdict[member]);
    }
    assert_text_or_null(&verdict["external_id"]);
    let warnings = verdict["warnings"].as_array().unwrap();
    assert!(warnings.iter().all(Value::is_string));
}

#[test]
fn a_verdict_has_every_member_in_every_state() {
    on_both(|service| {
        let mut verdicts = vec![
            claim(service, "gate", Some("a")),
            claim(service, "gate", Some("a")),
            claim(service, "gate", None),
            service.claim(claim_of("window", None, &json!({"ttl_seconds": 60}))),
            claim_pending(service, "open", Some("a")),
            service.pending(json!({"idempotency_key": "gate"})),
            service.pending(json!({"idempotency_key": "opened"})),
        ];
        stale_key(service, "stale");
        done_key(service, "done");
        failed_key(service, "failed", false);
        for key in ["stale", "done", "failed"] {
            verdicts.push(claim(service, key, Some("b")));
            verdicts.push(service.pending(json!({"idempotency_key": key})));
        }
        let array = service.claim(json!([{"idempotency_key": "new"}, {"idempotency_key": "done"}]));
        verdicts.extend(array.as_array().unwrap().clone());
        verdicts.iter().for_each(assert_is_verdict);
        let is_shown = |status: &&str| verdicts.iter().any(|verdict| verdict["status"] == **status);
        assert!(
            ["claimed", "pending", "stale", "done", "failed"]
                .iter()
                .all(is_shown)
        );
    });
}

#[test]
fn an_entry_has_every_member_in_every_state() {
    let members = [
        "idempotency_key",
        "order_id",
        "status",
        "attempt",
        "claimant",
        "external_id",
        "result",
        "reason",
        "seen_again",
        "processed_at",
        "updated_at",
        "lease_expires_at",
        "expires_at",
        "conflict",
        "history",
    ];
    on_both(|service| {
        claim(service, "gate", None);
        service.pending_key("pending", "a", 600);
        stale_key(service, "stale");
        done_key(service, "done");
        failed_key(service, "failed", false);
        for key in ["gate", "pending", "stale", "done", "failed"] {
            let entry = service.entry(key);
            assert_members(&entry, &members);
            assert!(entry["status"].is_string());
            assert!(entry["attempt"].is_u64());
            assert!(entry["seen_again"].is_u64());
            assert!(entry["conflict"].is_boolean());
            for member in ["processed_at", "updated_at"] {
                time(&entry[member]);
            }
            for member in ["lease_expires_at", "expires_at"] {
                assert_time_or_null(&entry[member]);
            }
            for member in ["claimant", "external_id", "reason"] {
                assert_text_or_null(&entry[member]);
            }
            let history = entry["history"].as_array().unwrap();
            assert!(!history.is_empty());
            for event in history {
                assert_members(event, &["at", "event", "attempt", "claimant", "detail"]);
                time(&event["at"]);
                assert!(event["attempt"].is_u64());
            }
        }
        let report = json!({"idempotency_key": "pending", "attempt": 1});
        assert_members(
            &service.done(report).ok(),
            &[&members[..], &["changed"]].concat(),
        );
        let list = service.get("/ledger?status=done").ok();
        assert_members(&list, &["entries", "next_cursor"]);
        assert_members(&list["entries"][0], &members[..14]);
    });
}

#[test]
fn no_success_has_a_top_level_error() {
    on_both(|service| {
        done_key(service, "key");
        let error = json!({"error": "inside"});
        let report = json!({"idempotency_key": "error", "attempt": 1, "result": error});
        let successes = [
            service.post("/key", &json!({"fields": error})),
            service.post("/claim", &json!({"fields": error, "payload": error})),
            service.post(
                "/claim",
                &json!([{"idempotency_key": "error"}, {"fields": error}]),
            ),
            service.post("/ledger/pending", &json!({"idempotency_key": "key"})),
            service.post("/ledger/done", &report),
            service.post("/claim", &json!({"idempotency_key": "error"})),
            service.get("/ledger/error"),
            service.get("/ledger"),
            service.get("/health"),
            service.get("/health/ready"),
            service.get("/openapi.json"),
        ];
        for success in successes {
            let body = success.ok();
            let elements = body.as_array().cloned().unwrap_or_else(|| vec![body]);
            for element in elements {
                assert!(element.get("error").is_none(), "{element}");
            }
        }
    });
}

#[test]
fn the_order_is_named_after_the_key_where_nobody_names_it() {
    on_both(|service| {
        assert_eq!(claim(service, "key", Some("a"))["order_id"], "key");
        let order = json!({"order_id": "ORD-2041"});
        let first = service.claim(claim_of("other", Some("a"), &order));
        assert_eq!(first["order_id"], "ORD-2041");
        let duplicate = service.claim(claim_of("other", Some("b"), &json!({"order_id": "x"})));
        assert_eq!(duplicate["order_id"], "ORD-2041");
        assert_eq!(service.entry("other")["order_id"], "ORD-2041");
    });
}

#[test]
fn a_claim_without_a_claimant_is_warned() {
    on_both(|service| {
        assert_eq!(claim(service, "key", Some("a"))["warnings"], json!([]));
        let warnings = claim(service, "key", None)["warnings"].clone();
        assert_eq!(warnings.as_array().unwrap().len(), 1, "{warnings}");
        assert!(warnings[0].as_str().unwrap().contains("claimant"));
        assert_eq!(claim(service, "other", None)["warnings"], warnings);
    });
}

#[test]
fn a_claim_has_the_warnings_of_its_key() {
    on_both(|service| {
        let recipe = json!({"parts": ["a:b", "c"]});
        let warnings = service.post("/key", &recipe).ok()["warnings"].clone();
        assert_eq!(warnings.as_array().unwrap().len(), 1, "{warnings}");
        let one = service.claim(json!({"parts": ["a:b", "c"], "claimant": "a"}));
        assert_eq!(one["warnings"], warnings);
        let many = service.claim(json!([
            {"parts": ["a", "c"], "claimant": "a"}, {"parts": ["a:b", "c"], "claimant": "a"}
        ]));
        assert_eq!(many[0]["warnings"], json!([]));
        assert_eq!(many[1]["warnings"], warnings);
    });
}

#[test]
fn seen_again_counts_the_duplicates_that_were_turned_away() {
    on_both(|service| {
        let first = service.claim(claim_of("key", Some("a"), &json!({"payload": 1})));
        assert_eq!(first["seen_again"], 0);
        assert_eq!(first["last_seen_at"], Value::Null);
        let replay = claim(service, "key", Some("a"));
        assert_eq!(replay["seen_again"], 0);
        assert_eq!(claim(service, "key", Some("b"))["seen_again"], 1);
        let mismatch = json!({"idempotency_key": "key", "payload": 2});
        service.post("/claim", &mismatch).problem(422);
        let second = claim(service, "key", None);
        assert_eq!(second["seen_again"], 2);
        let again = service.claim(json!([{"idempotency_key": "key"}, {"idempotency_key": "key"}]));
        assert_eq!(again[0]["seen_again"], 3);
        assert_eq!(again[1]["seen_again"], 4);
        assert!(time(&again[1]["last_seen_at"]) >= time(&second["last_seen_at"]));
        assert_eq!(service.entry("key")["seen_again"], 4);
    });
}

// The table of /claim.

#[test]
fn an_unknown_key_is_won() {
    on_both(|service| {
        for (key, claimant) in [("a", Some("a")), ("nobody", None)] {
            let verdict = claim(service, key, claimant);
            assert_eq!(gist(&verdict), (true, "claimed", 1, false));
            assert_eq!(verdict["lease_expires_at"], Value::Null);
        }
        let verdict = claim_pending(service, "open", Some("a"));
        assert_eq!(gist(&verdict), (true, "pending", 1, false));
        let lease = seconds_between(&verdict["processed_at"], &verdict["lease_expires_at"]);
        assert_eq!(lease, 900);
    });
}

#[test]
fn a_claimed_key_is_repeated_to_its_claimant() {
    on_both(|service| {
        let first = claim(service, "key", Some("a"));
        let again = claim(service, "key", Some("a"));
        assert_eq!(gist(&again), (true, "claimed", 1, true));
        assert_eq!(again["processed_at"], first["processed_at"]);
    });
}

#[test]
fn a_claimed_key_is_opened_by_its_claimant_that_claims_pending() {
    on_both(|service| {
        claim(service, "key", Some("a"));
        let opened = claim_pending(service, "key", Some("a"));
        assert_eq!(gist(&opened), (true, "pending", 1, true));
        assert_eq!(events(service, "key"), ["claimed", "pending"]);
    });
}

#[test]
fn a_claimed_key_is_lost_to_others() {
    on_both(|service| {
        claim(service, "key", Some("a"));
        for other in OTHERS {
            let verdict = claim(service, "key", other);
            assert_eq!(gist(&verdict), (false, "claimed", 1, false));
            let verdict = claim_pending(service, "key", other);
            assert_eq!(gist(&verdict), (false, "claimed", 1, false));
        }
    });
}

#[test]
fn a_claim_without_a_claimant_is_never_recognised() {
    on_both(|service| {
        claim(service, "key", None);
        assert_eq!(
            gist(&claim(service, "key", None)),
            (false, "claimed", 1, false)
        );
    });
}

#[test]
fn a_pending_key_is_repeated_to_its_claimant() {
    on_both(|service| {
        let first = service.pending_key("key", "a", 600);
        for again in [
            claim_pending(service, "key", Some("a")),
            claim(service, "key", Some("a")),
        ] {
            assert_eq!(gist(&again), (true, "pending", 1, true));
            assert_eq!(again["lease_expires_at"], first["lease_expires_at"]);
        }
    });
}

#[test]
fn a_pending_key_is_lost_to_others() {
    on_both(|service| {
        service.pending_key("key", "a", 600);
        for other in OTHERS {
            let verdict = claim_pending(service, "key", other);
            assert_eq!(gist(&verdict), (false, "pending", 1, false));
            let verdict = take_over(service, "key", other);
            assert_eq!(gist(&verdict), (false, "pending", 1, false));
        }
    });
}

#[test]
fn a_stale_key_is_renewed_by_its_claimant() {
    on_both(|service| {
        for take_over in ["hold", "take_over"] {
            stale_key(service, take_over);
            let more = json!({"pending": true, "lease_seconds": 300, "on_stale": take_over});
            let renewed = service.claim(claim_of(take_over, Some("a"), &more));
            assert_eq!(gist(&renewed), (true, "pending", 1, true));
            let entry = service.entry(take_over);
            let lease = seconds_between(&entry["updated_at"], &renewed["lease_expires_at"]);
            assert_eq!(lease, 300);
            assert_eq!(events(service, take_over), ["pending", "renewed"]);
        }
    });
}

#[test]
fn a_stale_key_is_held() {
    on_both(|service| {
        stale_key(service, "key");
        for other in OTHERS {
            let held = claim_pending(service, "key", other);
            assert_eq!(gist(&held), (false, "stale", 1, false));
            let held = service.claim(claim_of("key", other, &json!({"on_stale": "hold"})));
            assert_eq!(gist(&held), (false, "stale", 1, false));
        }
    });
}

#[test]
fn a_stale_key_is_taken_over() {
    on_both(|service| {
        for other in OTHERS {
            let key = other.unwrap_or("nobody");
            stale_key(service, key);
            let taken = take_over(service, key, other);
            assert_eq!(gist(&taken), (true, "pending", 2, false));
            assert_eq!(service.entry(key)["claimant"], json!(other));
            // The lease is alive again, and there is no second winner.
            assert_eq!(
                gist(&take_over(service, key, Some("c"))),
                (false, "pending", 2, false)
            );
        }
    });
}

#[test]
fn a_stale_key_that_is_taken_over_at_the_gate_is_pending() {
    on_both(|service| {
        stale_key(service, "key");
        let more = json!({"on_stale": "take_over"});
        let taken = service.claim(claim_of("key", Some("b"), &more));
        assert_eq!(gist(&taken), (true, "pending", 2, false));
        let lease = seconds_between(&taken["processed_at"], &taken["lease_expires_at"]);
        assert_eq!(lease, 900);
    });
}

#[test]
fn a_done_key_has_its_result_for_everybody() {
    on_both(|service| {
        done_key(service, "key");
        for claimant in [Some("a"), Some("b"), None] {
            for verdict in [
                claim(service, "key", claimant),
                claim_pending(service, "key", claimant),
                take_over(service, "key", claimant),
            ] {
                assert_eq!(gist(&verdict), (false, "done", 1, false));
                assert_eq!(verdict["external_id"], "ch_1");
                assert_eq!(verdict["result"], json!({"charged": 129.9}));
            }
        }
    });
}

#[test]
fn a_failed_key_is_not_won_again_by_its_claimant() {
    on_both(|service| {
        failed_key(service, "key", true);
        let delayed = claim_pending(service, "key", Some("a"));
        assert_eq!(gist(&delayed), (false, "failed", 1, false));
    });
}

#[test]
fn a_failed_key_is_won_by_others() {
    on_both(|service| {
        for other in OTHERS {
            let key = format!("gate-{other:?}");
            failed_key(service, &key, true);
            assert_eq!(
                gist(&claim(service, &key, other)),
                (true, "claimed", 2, false)
            );
            let key = format!("ledger-{other:?}");
            failed_key(service, &key, true);
            let verdict = claim_pending(service, &key, other);
            assert_eq!(gist(&verdict), (true, "pending", 2, false));
            let entry = service.entry(&key);
            assert_eq!(entry["reason"], Value::Null);
            assert_eq!(entry["claimant"], json!(other));
        }
    });
}

#[test]
fn a_key_that_failed_for_good_is_lost_to_everybody() {
    on_both(|service| {
        failed_key(service, "key", false);
        for claimant in [Some("a"), Some("b"), None] {
            let verdict = take_over(service, "key", claimant);
            assert_eq!(gist(&verdict), (false, "failed", 1, false));
        }
    });
}

/// Makes a key of each state, claimed with a window of 60 seconds, which passes.
fn after_the_window(service: &Service, suffix: &str) -> [String; 4] {
    let keys = ["claimed", "done", "failed", "for_good"].map(|state| format!("{state}-{suffix}"));
    let window = json!({"ttl_seconds": 60});
    let pending = json!({"ttl_seconds": 60, "pending": true});
    service.claim(claim_of(&keys[0], Some("a"), &window));
    for key in &keys[1..] {
        service.claim(claim_of(key, Some("a"), &pending));
    }
    let report = |key: &str, more: Value| claim_of(key, Some("a"), &more);
    service
        .done(report(&keys[1], json!({"external_id": "ch_1"})))
        .ok();
    service.failed(report(&keys[2], json!({"attempt": 1}))).ok();
    service
        .failed(report(&keys[3], json!({"attempt": 1, "retry": false})))
        .ok();
    for key in &keys {
        service.database.age(key, 61);
    }
    keys
}

#[test]
fn a_key_whose_window_has_passed_is_won_by_others() {
    on_both(|service| {
        for other in OTHERS {
            for key in after_the_window(service, other.unwrap_or("nobody")) {
                assert_eq!(
                    gist(&claim(service, &key, other)),
                    (true, "claimed", 2, false),
                    "{key}"
                );
                assert_eq!(service.entry(&key)["external_id"], Value::Null);
            }
            for key in after_the_window(service, other.map_or("nobody's entry", |_| "b's entry")) {
                let verdict = claim_pending(service, &key, other);
                assert_eq!(gist(&verdict), (true, "pending", 2, false), "{key}");
            }
        }
    });
}

#[test]
fn a_key_whose_window_has_passed_is_as_before_for_its_claimant() {
    on_both(|service| {
        let [claimed, done, failed, for_good] = after_the_window(service, "a");
        assert_eq!(
            gist(&claim(service, &claimed, Some("a"))),
            (true, "claimed", 1, true)
        );
        let verdict = claim(service, &done, Some("a"));
        assert_eq!(gist(&verdict), (false, "done", 1, false));
        assert_eq!(verdict["external_id"], "ch_1");
        assert_eq!(
            gist(&claim(service, &failed, Some("a"))),
            (false, "failed", 1, false)
        );
        assert_eq!(
            gist(&claim(service, &for_good, Some("a"))),
            (false, "failed", 1, false)
        );
    });
}

// Windows and leases.

#[test]
fn a_window_runs_from_the_claim_that_won() {
    on_both(|service| {
        let window = json!({"ttl_seconds": 100});
        let first = service.claim(claim_of("key", Some("a"), &window));
        assert_eq!(
            seconds_between(&first["processed_at"], &first["expires_at"]),
            100
        );
        service.database.age("key", 99);
        // A duplicate does not lengthen it.
        let longer = json!({"ttl_seconds": 1000});
        let duplicate = service.claim(claim_of("key", Some("b"), &longer));
        assert_eq!(gist(&duplicate), (false, "claimed", 1, false));
        service.database.age("key", 1);
        assert_eq!(
            gist(&claim(service, "key", Some("b"))),
            (true, "claimed", 2, false)
        );
    });
}

#[test]
fn without_a_window_a_key_is_known_for_ever() {
    on_both(|service| {
        assert_eq!(claim(service, "key", Some("a"))["expires_at"], Value::Null);
        service.database.age("key", 315_360_000);
        assert_eq!(
            gist(&claim(service, "key", Some("b"))),
            (false, "claimed", 1, false)
        );
    });
}

#[test]
fn a_new_window_has_the_length_of_the_claim_that_began_it() {
    on_both(|service| {
        for (key, more, length) in [
            ("shorter", json!({"ttl_seconds": 7}), Some(7)),
            ("for ever", json!({}), None),
        ] {
            service.claim(claim_of(key, Some("a"), &json!({"ttl_seconds": 60})));
            service.database.age(key, 61);
            let verdict = service.claim(claim_of(key, Some("b"), &more));
            assert_eq!(gist(&verdict), (true, "claimed", 2, false));
            let expires_at = &verdict["expires_at"];
            let found = (!expires_at.is_null())
                .then(|| seconds_between(&verdict["processed_at"], expires_at));
            assert_eq!(found, length);
        }
    });
}

#[test]
fn a_window_runs_anew_from_the_report_that_settles() {
    on_both(|service| {
        for outcome in ["done", "failed"] {
            let more = json!({"ttl_seconds": 100, "pending": true, "lease_seconds": 600});
            service.claim(claim_of(outcome, Some("a"), &more));
            service.database.age(outcome, 90);
            let report = if outcome == "done" {
                json!({"idempotency_key": outcome, "attempt": 1})
            } else {
                json!({"idempotency_key": outcome, "attempt": 1, "retry": false})
            };
            let entry = service.post(&format!("/ledger/{outcome}"), &report).ok();
            assert_eq!(
                seconds_between(&entry["updated_at"], &entry["expires_at"]),
                100
            );
            service.database.age(outcome, 90);
            assert_eq!(
                gist(&claim(service, outcome, Some("b"))),
                (false, outcome, 1, false)
            );
            service.database.age(outcome, 11);
            assert_eq!(
                gist(&claim(service, outcome, Some("b"))),
                (true, "claimed", 2, false)
            );
        }
    });
}

#[test]
fn a_pending_key_never_runs_out() {
    on_both(|service| {
        let more = json!({"ttl_seconds": 10, "pending": true, "lease_seconds": 1000});
        service.claim(claim_of("key", Some("a"), &more));
        service.database.age("key", 500);
        assert_eq!(
            gist(&claim(service, "key", Some("b"))),
            (false, "pending", 1, false)
        );
        service.database.age("key", 600);
        assert_eq!(
            gist(&claim(service, "key", Some("b"))),
            (false, "stale", 1, false)
        );
    });
}

#[test]
fn a_window_of_a_second_passes_by_itself() {
    on_both(|service| {
        service.claim(claim_of("key", Some("a"), &json!({"ttl_seconds": 1})));
        assert_eq!(claim(service, "key", Some("b"))["claimed"], false);
        let mut last = Value::Null;
        wait_until("the window has passed", || {
            last = claim(service, "key", Some("b"));
            last["claimed"] == true
        });
        assert_eq!(gist(&last), (true, "claimed", 2, false));
    });
}

#[test]
fn a_lease_of_a_second_runs_out_by_itself() {
    on_both(|service| {
        let verdict = service.pending_key("key", "a", 1);
        assert_eq!(verdict["status"], "pending");
        wait_until("the lease has run out", || {
            service.entry("key")["status"] == "stale"
        });
        assert_eq!(
            gist(&claim(service, "key", Some("b"))),
            (false, "stale", 1, false)
        );
        assert_eq!(
            gist(&take_over(service, "key", Some("b"))),
            (true, "pending", 2, false)
        );
    });
}

// The replay window.

#[test]
fn after_the_replay_window_the_same_text_is_another_claimant() {
    on_both_with(&[("REPLAY_WINDOW", "60")], |service| {
        claim(service, "claimed", Some("a"));
        service.pending_key("pending", "a", 600);
        service.pending_key("stale", "a", 50);
        failed_key(service, "failed", true);
        let late = |key| {
            service.database.age(key, 61);
            take_over(service, key, Some("a"))
        };
        assert_eq!(gist(&late("claimed")), (false, "claimed", 1, false));
        assert_eq!(gist(&late("pending")), (false, "pending", 1, false));
        assert_eq!(gist(&late("stale")), (true, "pending", 2, false));
        assert_eq!(gist(&late("failed")), (true, "pending", 2, false));
    });
}

#[test]
fn inside_the_replay_window_a_claimant_is_recognised() {
    on_both_with(&[("REPLAY_WINDOW", "60")], |service| {
        claim(service, "key", Some("a"));
        service.database.age("key", 50);
        assert_eq!(
            gist(&claim(service, "key", Some("a"))),
            (true, "claimed", 1, true)
        );
    });
}

#[test]
fn the_replay_window_is_half_an_hour_where_nobody_sets_it() {
    on_both(|service| {
        claim(service, "key", Some("a"));
        service.database.age("key", 1790);
        assert_eq!(claim(service, "key", Some("a"))["replayed"], true);
        service.database.age("key", 10);
        assert_eq!(claim(service, "key", Some("a"))["claimed"], false);
    });
}

#[test]
fn the_replay_window_runs_anew_from_the_opening() {
    on_both_with(&[("REPLAY_WINDOW", "60")], |service| {
        claim(service, "key", Some("a"));
        service.database.age("key", 50);
        let opened = service.pending(claim_of("key", Some("a"), &json!({})));
        assert_eq!(gist(&opened), (true, "pending", 1, false));
        service.database.age("key", 50);
        assert_eq!(
            gist(&claim(service, "key", Some("a"))),
            (true, "pending", 1, true)
        );
    });
}

#[test]
fn the_first_opening_knows_its_holder_after_the_replay_window() {
    on_both_with(&[("REPLAY_WINDOW", "60")], |service| {
        claim(service, "key", Some("a"));
        service.database.age("key", 500);
        let opened = service.pending(claim_of("key", Some("a"), &json!({})));
        assert_eq!(gist(&opened), (true, "pending", 1, false));
        service.database.age("key", 61);
        let repeated = service.pending(claim_of("key", Some("a"), &json!({})));
        assert_eq!(gist(&repeated), (false, "pending", 1, false));
    });
}

#[test]
fn reports_know_their_holder_after_the_replay_window() {
    on_both_with(&[("REPLAY_WINDOW", "60")], |service| {
        service.pending_key("done", "a", 600);
        service.pending_key("failed", "a", 600);
        service.database.age("done", 500);
        service.database.age("failed", 500);
        let report = claim_of("done", Some("a"), &json!({}));
        assert_eq!(service.done(report).ok()["status"], "done");
        let report = claim_of("failed", Some("a"), &json!({"attempt": 1}));
        assert_eq!(service.failed(report).ok()["status"], "failed");
    });
}

// Payloads.

#[test]
fn the_same_key_with_another_payload_is_refused_before_any_other_rule() {
    on_both(|service| {
        let first = json!({"payload": {"total": 129.9}, "pending": true});
        service.claim(claim_of("open", Some("a"), &first));
        service.claim(claim_of("done", Some("a"), &first));
        service
            .done(json!({"idempotency_key": "done", "attempt": 1}))
            .ok();
        for key in ["open", "done"] {
            for claimant in [Some("a"), Some("b"), None] {
                let claim = claim_of(key, claimant, &json!({"payload": {"total": 120}}));
                for path in ["/claim", "/ledger/pending"] {
                    let reply = service.post(path, &claim);
                    assert_eq!(reply.problem(422), "key_reused");
                    assert_eq!(reply.pointers(), ["/payload"]);
                }
            }
            assert_eq!(service.entry(key)["seen_again"], 0);
        }
    });
}

#[test]
fn payloads_are_the_same_where_their_json_values_are() {
    on_both(|service| {
        let send = |payload: &str, claimant: &str| {
            let body = format!(
                r#"{{"idempotency_key":"key","claimant":"{claimant}","payload":{payload}}}"#
            );
            let json = [("Content-Type", "application/json")];
            service.send("POST", "/claim", &json, body.as_bytes()).ok()
        };
        assert_eq!(send(r#"{"a":1.0,"b":["x"]}"#, "a")["claimed"], true);
        assert_eq!(
            send(r#"{ "b": ["\u0078"], "a": 1e0 }"#, "b")["claimed"],
            false
        );
    });
}

#[test]
fn a_payload_of_null_is_a_payload() {
    on_both(|service| {
        let null = json!({"payload": null});
        service.claim(claim_of("key", Some("a"), &null));
        assert_eq!(
            service.claim(claim_of("key", Some("a"), &null))["replayed"],
            true
        );
        let reply = service.post(
            "/claim",
            &claim_of("key", Some("a"), &json!({"payload": 0})),
        );
        assert_eq!(reply.problem(422), "key_reused");
    });
}

#[test]
fn without_a_payload_on_either_side_nothing_mismatches() {
    on_both(|service| {
        let payload = json!({"payload": 1});
        claim(service, "without", Some("a"));
        let verdict = service.claim(claim_of("without", Some("b"), &payload));
        assert_eq!(gist(&verdict), (false, "claimed", 1, false));
        service.claim(claim_of("with", Some("a"), &payload));
        assert_eq!(claim(service, "with", Some("a"))["replayed"], true);
    });
}

#[test]
fn a_payload_binds_inside_its_window_alone() {
    on_both(|service| {
        let first = json!({"payload": 1, "ttl_seconds": 60});
        service.claim(claim_of("key", Some("a"), &first));
        service.database.age("key", 61);
        let second = json!({"payload": 2, "ttl_seconds": 60});
        let verdict = service.claim(claim_of("key", Some("b"), &second));
        assert_eq!(gist(&verdict), (true, "claimed", 2, false));
        let reply = service.post("/claim", &claim_of("key", Some("c"), &first));
        assert_eq!(reply.problem(422), "key_reused");
    });
}

#[test]
fn a_payload_binds_the_attempts_after_a_failure_too() {
    on_both(|service| {
        let first = json!({"payload": 1, "pending": true});
        service.claim(claim_of("key", Some("a"), &first));
        service
            .failed(json!({"idempotency_key": "key", "attempt": 1}))
            .ok();
        let other = json!({"payload": 2, "pending": true});
        let reply = service.post("/claim", &claim_of("key", Some("b"), &other));
        assert_eq!(reply.problem(422), "key_reused");
        assert_eq!(
            gist(&claim_pending(service, "key", Some("b"))),
            (true, "pending", 2, false)
        );
        let reply = service.post("/claim", &claim_of("key", Some("c"), &other));
        assert_eq!(reply.problem(422), "key_reused");
    });
}

// Arrays.

#[test]
fn an_array_is_answered_in_its_order() {
    on_both(|service| {
        claim(service, "known", Some("a"));
        let keys = ["z", "a", "known", "m", "\u{e9}", "Z"];
        let claims: Vec<Value> = keys
            .iter()
            .map(|key| claim_of(key, Some("b"), &json!({})))
            .collect();
        let verdicts = service.claim(json!(claims));
        let verdicts = verdicts.as_array().unwrap();
        assert_eq!(verdicts.len(), keys.len());
        for (key, verdict) in keys.iter().zip(verdicts) {
            assert_eq!(verdict["idempotency_key"], *key);
            assert_eq!(verdict["claimed"], *key != "known");
        }
    });
}

#[test]
fn an_array_of_one_is_answered_by_an_array() {
    on_both(|service| {
        let verdicts = service.claim(json!([{"idempotency_key": "key"}]));
        assert_eq!(verdicts.as_array().unwrap().len(), 1);
    });
}

#[test]
fn the_same_key_twice_in_an_array_is_claimed_once() {
    on_both(|service| {
        for pending in [false, true] {
            let key = format!("key-{pending}");
            let element = |claimant| claim_of(&key, claimant, &json!({"pending": pending}));
            let array = json!([
                element(Some("a")),
                element(Some("b")),
                element(Some("a")),
                element(None)
            ]);
            let won: Vec<bool> = service
                .claim(array.clone())
                .as_array()
                .unwrap()
                .iter()
                .map(|verdict| verdict["claimed"].as_bool().unwrap())
                .collect();
            assert_eq!(won, [true, false, false, false]);
            // The array sent again: the first is recognised, the others are duplicates.
            let again = service.claim(array);
            assert_eq!(again[0]["replayed"], true);
            assert_eq!(again[2]["claimed"], false);
        }
    });
}

#[test]
fn one_invalid_element_refuses_the_array_and_claims_nothing() {
    on_both(|service| {
        let array = json!([
            {"idempotency_key": "k0"}, {"idempotency_key": "k1"}, {"idempotency_key": "k2"},
            {"idempotency_key": "k3", "claimant": ""},
            {"idempotency_key": "k4", "ttl_seconds": 0},
            {"parts": ["a", null]},
            {"idempotency_key": "k6", "claimaint": "a"},
            7
        ]);
        let reply = service.post("/claim", &array);
        assert_eq!(reply.problem(422), "invalid_request");
        assert_eq!(
            reply.pointers(),
            [
                "/3/claimant",
                "/4/ttl_seconds",
                "/5/parts/1",
                "/6/claimaint",
                "/7"
            ]
        );
        let count = service
            .database
            .sql("SELECT count(*) FROM processed_orders");
        assert_eq!(count, "0");
    });
}

#[test]
fn one_mismatching_payload_refuses_the_array_and_claims_nothing() {
    on_both(|service| {
        service.claim(json!({"idempotency_key": "known", "payload": 1}));
        let array = json!([
            {"idempotency_key": "k0", "pending": true}, {"idempotency_key": "known"},
            {"idempotency_key": "k2"}, {"idempotency_key": "known", "payload": 2},
        ]);
        let reply = service.post("/claim", &array);
        assert_eq!(reply.problem(422), "key_reused");
        assert_eq!(reply.pointers(), ["/3/payload"]);
        let rows = "SELECT idempotency_key, seen_again FROM processed_orders";
        assert_eq!(service.database.sql(rows), "known|0");
        assert_eq!(service.database.sql("SELECT count(*) FROM run_ledger"), "0");
    });
}

#[test]
fn a_key_with_two_payloads_in_one_array_refuses_it() {
    on_both(|service| {
        let array = json!([
            {"idempotency_key": "key", "payload": 1}, {"idempotency_key": "key", "payload": 2}
        ]);
        let reply = service.post("/claim", &array);
        assert_eq!(reply.problem(422), "key_reused");
        assert_eq!(reply.pointers(), ["/1/payload"]);
        service.get("/ledger/key").problem(404);
    });
}

#[test]
fn an_array_has_no_results() {
    on_both(|service| {
        done_key(service, "key");
        let verdicts = service.claim(json!([{"idempotency_key": "key"}]));
        assert_eq!(gist(&verdicts[0]), (false, "done", 1, false));
        assert_eq!(verdicts[0]["external_id"], "ch_1");
        assert_eq!(verdicts[0]["result"], Value::Null);
    });
}

#[test]
fn an_array_holds_one_to_a_thousand_claims() {
    on_both(|service| {
        let array = |length: usize| {
            let element = |number| json!({"idempotency_key": format!("key-{number}"), "claimant": "a", "pending": true});
            (0..length).map(element).collect::<Value>()
        };
        for length in [0, 1001] {
            let reply = service.post("/claim", &array(length));
            assert_eq!(reply.problem(422), "invalid_request");
            assert_eq!(reply.pointers(), [""]);
        }
        let first = claim_array(service, &array(1000));
        let verdicts = first.as_array().unwrap();
        assert_eq!(verdicts.len(), 1000);
        for (number, verdict) in verdicts.iter().enumerate() {
            assert_eq!(verdict["claimed"], true);
            assert_eq!(verdict["status"], "pending");
            assert_eq!(verdict["idempotency_key"], format!("key-{number}"));
        }
        let again = claim_array(service, &array(1000));
        let is_replay = |verdict: &Value| gist(verdict) == (true, "pending", 1, true);
        assert!(again.as_array().unwrap().iter().all(is_replay));
    });
}

/// Claims, and asks again where a busy machine did not answer in time, as callers do.
fn claim_array(service: &Service, claims: &Value) -> Value {
    let mut reply = service.post("/claim", claims);
    wait_until("the array is answered", || {
        if reply.status == 503 {
            reply = service.post("/claim", claims);
        }
        reply.status != 503
    });
    reply.ok()
}

// POST /ledger/pending.

#[test]
fn pending_claims_an_unknown_key() {
    on_both(|service| {
        let request = json!({
            "idempotency_key": "key", "claimant": "a", "order_id": "ORD-2041", "lease_seconds": 600
        });
        let verdict = service.pending(request.clone());
        assert_eq!(gist(&verdict), (true, "pending", 1, false));
        assert_eq!(verdict["order_id"], "ORD-2041");
        assert_eq!(verdict["expires_at"], Value::Null);
        let lease = seconds_between(&verdict["processed_at"], &verdict["lease_expires_at"]);
        assert_eq!(lease, 600);
        assert_eq!(gist(&service.pending(request)), (true, "pending", 1, true));
        assert_eq!(claim(service, "key", Some("b"))["claimed"], false);
    });
}

#[test]
fn pending_opens_what_the_same_claimant_claimed() {
    on_both(|service| {
        claim(service, "key", Some("a"));
        let request = claim_of("key", Some("a"), &json!({}));
        assert_eq!(
            gist(&service.pending(request.clone())),
            (true, "pending", 1, false)
        );
        assert_eq!(gist(&service.pending(request)), (true, "pending", 1, true));
        assert_eq!(events(service, "key"), ["claimed", "pending"]);
    });
}

#[test]
fn pending_tells_others_how_to_open_what_is_claimed() {
    on_both(|service| {
        claim(service, "by a", Some("a"));
        claim(service, "by nobody", None);
        for (key, claimant) in [
            ("by a", Some("b")),
            ("by a", None),
            ("by nobody", Some("a")),
            ("by nobody", None),
        ] {
            let verdict = service.pending(claim_of(key, claimant, &json!({})));
            assert_eq!(gist(&verdict), (false, "claimed", 1, false));
            let warnings = verdict["warnings"].to_string();
            assert!(
                warnings.contains("same claimant in both calls"),
                "{warnings}"
            );
            assert!(
                warnings.contains(r#"\"pending\": true in /claim"#),
                "{warnings}"
            );
        }
    });
}

#[test]
fn pending_knows_what_is_done() {
    on_both(|service| {
        done_key(service, "key");
        for claimant in [Some("a"), Some("b"), None] {
            let verdict = service.pending(claim_of("key", claimant, &json!({})));
            assert_eq!(gist(&verdict), (false, "done", 1, false));
            assert_eq!(verdict["external_id"], "ch_1");
            assert_eq!(verdict["result"], json!({"charged": 129.9}));
        }
    });
}

#[test]
fn pending_begins_a_new_attempt_after_a_failure() {
    on_both(|service| {
        failed_key(service, "key", true);
        let verdict = service.pending(claim_of("key", Some("a"), &json!({})));
        assert_eq!(gist(&verdict), (false, "failed", 1, false));
        let verdict = service.pending(claim_of("key", Some("b"), &json!({})));
        assert_eq!(gist(&verdict), (true, "pending", 2, false));
    });
}

#[test]
fn pending_holds_or_takes_over_what_is_stale() {
    on_both(|service| {
        stale_key(service, "key");
        let held = service.pending(claim_of("key", Some("b"), &json!({})));
        assert_eq!(gist(&held), (false, "stale", 1, false));
        let more = json!({"on_stale": "take_over", "lease_seconds": 60});
        let taken = service.pending(claim_of("key", Some("b"), &more));
        assert_eq!(gist(&taken), (true, "pending", 2, false));
        let lease = seconds_between(&taken["processed_at"], &taken["lease_expires_at"]);
        assert_eq!(lease, 60);
    });
}

// POST /ledger/done and POST /ledger/failed, in the order of the contract's rules.

/// The two reports, of attempt 1.
fn reports(key: &str) -> [(&'static str, Value); 2] {
    let report = json!({"idempotency_key": key, "attempt": 1});
    [("done", report.clone()), ("failed", report)]
}

#[test]
fn rule_1_a_report_of_an_unknown_key_is_refused() {
    on_both(|service| {
        for (outcome, report) in reports("key") {
            let reply = service.post(&format!("/ledger/{outcome}"), &report);
            assert_eq!(reply.problem(404), "unknown_key");
        }
        service.get("/ledger/key").problem(404);
    });
}

#[test]
fn rule_1_a_report_makes_the_entry_of_a_key_at_the_gate() {
    on_both(|service| {
        for outcome in ["done", "failed"] {
            claim(service, outcome, Some("a"));
            let report = json!({"idempotency_key": outcome, "attempt": 1});
            let entry = service.post(&format!("/ledger/{outcome}"), &report).ok();
            assert_eq!(entry["changed"], true);
            assert_eq!(entry["status"], outcome);
            assert_eq!(entry["claimant"], "a");
            assert_eq!(events(service, outcome), ["claimed", outcome]);
        }
    });
}

#[test]
fn rule_1_a_report_is_recorded_after_its_window() {
    on_both(|service| {
        let window = json!({"ttl_seconds": 60});
        service.claim(claim_of("key", Some("a"), &window));
        service.database.age("key", 61);
        let entry = service.done(claim_of("key", Some("a"), &json!({}))).ok();
        assert_eq!(entry["status"], "done");
        assert_eq!(claim(service, "key", Some("b"))["claimed"], false);
    });
}

#[test]
fn rule_2_a_repeated_report_changes_nothing() {
    on_both(|service| {
        done_key(service, "done");
        failed_key(service, "failed", true);
        for (outcome, report) in [
            (
                "done",
                json!({"idempotency_key": "done", "attempt": 1, "external_id": "ch_1"}),
            ),
            ("done", json!({"idempotency_key": "done"})),
            ("done", json!({"idempotency_key": "done", "claimant": "z"})),
            (
                "failed",
                json!({"idempotency_key": "failed", "attempt": 1, "reason": "another"}),
            ),
            (
                "failed",
                json!({"idempotency_key": "failed", "attempt": 1, "retry": false}),
            ),
        ] {
            let before = service.entry(outcome);
            let mut reply = service.post(&format!("/ledger/{outcome}"), &report).ok();
            let members = reply.as_object_mut().unwrap();
            assert_eq!(members.shift_remove("changed"), Some(json!(false)));
            assert_eq!(reply, before);
            assert_eq!(service.entry(outcome), before);
        }
    });
}

#[test]
fn rule_2_a_repeated_failure_does_not_fail_the_next_attempt() {
    on_both(|service| {
        second_attempt(service, "key");
        for report in [
            json!({"idempotency_key": "key", "attempt": 1}),
            json!({"idempotency_key": "key", "attempt": 1, "claimant": "a"}),
        ] {
            let entry = service.failed(report).ok();
            assert_eq!(entry["changed"], false);
            assert_eq!(entry["status"], "pending");
            assert_eq!(entry["attempt"], 2);
        }
    });
}

#[test]
fn rule_2_a_repeated_done_is_known_in_the_next_window() {
    on_both(|service| {
        let more = json!({"ttl_seconds": 60, "pending": true});
        service.claim(claim_of("key", Some("a"), &more));
        let report = json!({"idempotency_key": "key", "attempt": 1, "external_id": "ch_1"});
        service.done(report.clone()).ok();
        service.database.age("key", 61);
        assert_eq!(claim_pending(service, "key", Some("b"))["attempt"], 2);
        let entry = service.done(report).ok();
        assert_eq!(entry["changed"], false);
        assert_eq!(entry["status"], "pending");
        assert_eq!(entry["conflict"], false);
    });
}

#[test]
fn rule_2_a_first_external_id_is_filled_in() {
    on_both(|service| {
        service.pending_key("key", "a", 600);
        let bare = json!({"idempotency_key": "key", "attempt": 1, "result": "kept"});
        assert_eq!(service.done(bare).ok()["external_id"], Value::Null);
        let named = json!({"idempotency_key": "key", "attempt": 1, "external_id": "ch_1"});
        let entry = service.done(named.clone()).ok();
        assert_eq!(entry["changed"], true);
        assert_eq!(entry["external_id"], "ch_1");
        assert_eq!(entry["result"], "kept");
        assert_eq!(service.done(named).ok()["changed"], false);
        let other = json!({"idempotency_key": "key", "attempt": 1, "external_id": "ch_2"});
        assert_eq!(service.done(other).problem(409), "already_done");
    });
}

#[test]
fn rule_3_an_attempt_that_has_not_begun_is_refused() {
    on_both(|service| {
        for outcome in ["done", "failed"] {
            service.pending_key(outcome, "a", 600);
            let report = json!({"idempotency_key": outcome, "attempt": 2});
            let reply = service.post(&format!("/ledger/{outcome}"), &report);
            assert_eq!(reply.problem(422), "invalid_request");
            assert_eq!(reply.pointers(), ["/attempt"]);
            assert_eq!(service.entry(outcome)["status"], "pending");
            assert_eq!(service.entry(outcome)["conflict"], outcome == "done");
        }
    });
}

#[test]
fn rule_3_done_names_the_attempt_or_the_claimant_after_the_first_attempt() {
    on_both(|service| {
        second_attempt(service, "key");
        let reply = service.done(json!({"idempotency_key": "key", "external_id": "ch_1"}));
        assert_eq!(reply.problem(422), "attempt_required");
        assert_eq!(reply.pointers(), ["/attempt"]);
        assert_eq!(service.entry("key")["conflict"], true);
        let reply = service.done(claim_of("key", Some("b"), &json!({"external_id": "ch_1"})));
        assert_eq!(reply.ok()["status"], "done");
    });
}

#[test]
fn done_needs_neither_attempt_nor_claimant_at_the_first_attempt() {
    on_both(|service| {
        service.pending_key("key", "a", 600);
        let entry = service.done(json!({"idempotency_key": "key"})).ok();
        assert_eq!(entry["status"], "done");
        assert_eq!(entry["changed"], true);
    });
}

#[test]
fn failed_always_names_the_attempt() {
    on_both(|service| {
        service.pending_key("key", "a", 600);
        for attempt in [None, Some(Value::Null)] {
            let mut report = json!({"idempotency_key": "key", "claimant": "a"});
            if let Some(attempt) = attempt {
                report["attempt"] = attempt;
            }
            let reply = service.failed(report);
            assert_eq!(reply.status, 422);
        }
        assert_eq!(service.entry("key")["status"], "pending");
    });
}

#[test]
fn rule_4_done_after_failed_is_accepted_from_anybody() {
    on_both(|service| {
        for (key, more) in [
            ("holder", json!({"claimant": "a"})),
            ("other", json!({"claimant": "z"})),
            ("nobody", json!({"attempt": 1})),
            ("bare", json!({})),
        ] {
            failed_key(service, key, false);
            let entry = service.done(claim_of(key, None, &more)).ok();
            assert_eq!(entry["changed"], true);
            assert_eq!(entry["status"], "done");
            assert_eq!(entry["reason"], Value::Null);
            assert_eq!(entry["conflict"], false);
        }
        second_attempt(service, "earlier");
        service
            .failed(json!({"idempotency_key": "earlier", "attempt": 2}))
            .ok();
        let report = json!({"idempotency_key": "earlier", "attempt": 1, "claimant": "z"});
        assert_eq!(service.done(report).ok()["status"], "done");
        assert_eq!(
            events(service, "earlier"),
            ["pending", "failed", "pending", "failed", "done"]
        );
    });
}

#[test]
fn rule_5_a_report_of_an_earlier_attempt_is_superseded() {
    on_both(|service| {
        stale_key(service, "key");
        assert_eq!(take_over(service, "key", Some("b"))["attempt"], 2);
        for (outcome, report) in reports("key") {
            let reply = service.post(&format!("/ledger/{outcome}"), &report);
            assert_eq!(reply.problem(409), "superseded");
        }
        // Superseded comes before the question who reports.
        let report = claim_of(
            "key",
            Some("z"),
            &json!({"attempt": 1, "external_id": "ch_9"}),
        );
        assert_eq!(service.done(report).problem(409), "superseded");
        let entry = service.entry("key");
        assert_eq!(entry["status"], "pending");
        assert_eq!(entry["attempt"], 2);
    });
}

#[test]
fn rule_5_a_report_of_somebody_else_is_refused() {
    on_both(|service| {
        service.pending_key("key", "a", 600);
        for (outcome, mut report) in reports("key") {
            report["claimant"] = json!("b");
            let reply = service.post(&format!("/ledger/{outcome}"), &report);
            assert_eq!(reply.problem(409), "not_holder");
        }
        assert_eq!(service.entry("key")["status"], "pending");
    });
}

#[test]
fn rule_5_anybody_reports_where_nobody_holds() {
    on_both(|service| {
        for outcome in ["done", "failed"] {
            claim_pending(service, outcome, None);
            let report = json!({"idempotency_key": outcome, "attempt": 1, "claimant": "z"});
            let entry = service.post(&format!("/ledger/{outcome}"), &report).ok();
            assert_eq!(entry["status"], outcome);
        }
    });
}

#[test]
fn rule_6_another_external_id_is_refused_with_both() {
    on_both(|service| {
        done_key(service, "key");
        let reply = service.done(json!({"idempotency_key": "key", "external_id": "ch_2"}));
        assert_eq!(reply.problem(409), "already_done");
        assert_eq!(reply.body["external_id"], "ch_1");
        assert_eq!(reply.body["reported_external_id"], "ch_2");
        let entry = service.entry("key");
        assert_eq!(entry["external_id"], "ch_1");
        assert_eq!(entry["conflict"], true);
    });
}

#[test]
fn rule_6_failed_after_done_is_refused() {
    on_both(|service| {
        done_key(service, "key");
        let reply = service.failed(json!({"idempotency_key": "key", "attempt": 1}));
        assert_eq!(reply.problem(409), "already_done");
        assert_eq!(reply.body["external_id"], "ch_1");
        let entry = service.entry("key");
        assert_eq!(entry["status"], "done");
        assert_eq!(entry["conflict"], false);
        assert_eq!(events(service, "key"), ["pending", "done"]);
    });
}

#[test]
fn a_report_reads_the_same_in_its_reply_and_in_the_entry() {
    on_both(|service| {
        service.pending_key("key", "a", 600);
        let result = json!({"z": 1, "a": [null, true, "\u{1f600}", {"deep": [1e300, 0.1, -5]}]});
        let report = json!({"idempotency_key": "key", "attempt": 1, "external_id": "ch_1", "result": result});
        let mut reply = service.done(report).ok();
        reply.as_object_mut().unwrap().shift_remove("changed");
        let entry = service.entry("key");
        assert_eq!(reply, entry);
        assert_eq!(entry["result"].to_string(), result.to_string());
        let verdict = claim(service, "key", Some("b"));
        assert_eq!(verdict["result"].to_string(), result.to_string());
    });
}

#[test]
fn a_result_has_64_kib_at_most() {
    on_both(|service| {
        service.pending_key("key", "a", 600);
        let report = |letters: usize| json!({"idempotency_key": "key", "attempt": 1, "result": "x".repeat(letters)});
        let reply = service.done(report(65_535));
        assert_eq!(reply.problem(422), "invalid_request");
        assert_eq!(reply.pointers(), ["/result"]);
        assert_eq!(service.done(report(65_534)).ok()["status"], "done");
    });
}

// Conflicts: an effect that was refused is never lost.

/// Puts a conflict on a key: a report of `done` that names an attempt that has not begun.
fn refused_effect(service: &Service, key: &str) {
    let report = json!({
        "idempotency_key": key, "attempt": 99, "external_id": "ch_9", "result": {"charged": 9}
    });
    service.done(report).problem(422);
    assert_eq!(service.entry(key)["conflict"], true);
}

#[test]
fn every_refused_effect_stands_in_the_history() {
    on_both(|service| {
        done_key(service, "already_done");
        service.pending_key("not_holder", "a", 600);
        second_attempt(service, "superseded");
        second_attempt(service, "attempt_required");
        service.pending_key("attempt_ahead", "a", 600);
        for (key, more) in [
            ("already_done", json!({})),
            ("not_holder", json!({"claimant": "z"})),
            ("superseded", json!({"attempt": 1})),
            ("attempt_required", json!({})),
            ("attempt_ahead", json!({"attempt": 3})),
        ] {
            let effect = json!({"external_id": "ch_9", "result": {"charged": 9}});
            let mut report = claim_of(key, None, &effect);
            report
                .as_object_mut()
                .unwrap()
                .extend(more.as_object().unwrap().clone());
            let status = service.entry(key)["status"].clone();
            assert!(service.done(report).status >= 400);
            let entry = service.entry(key);
            assert_eq!(entry["conflict"], true, "{key}");
            assert_eq!(entry["status"], status);
            let last = entry["history"].as_array().unwrap().last().unwrap();
            assert_eq!(last["event"], "conflict");
            assert_eq!(last["detail"]["refused"], key);
            assert_eq!(last["detail"]["external_id"], "ch_9");
            assert_eq!(last["detail"]["result"], json!({"charged": 9}));
        }
        let listed = service.get("/ledger?conflict=true").ok();
        assert_eq!(listed["entries"].as_array().unwrap().len(), 5);
    });
}

#[test]
fn a_refused_effect_of_a_key_at_the_gate_makes_the_entry() {
    on_both(|service| {
        claim(service, "key", Some("a"));
        let report = claim_of("key", Some("z"), &json!({"external_id": "ch_9"}));
        assert_eq!(service.done(report).problem(409), "not_holder");
        let entry = service.entry("key");
        assert_eq!(entry["status"], "claimed");
        assert_eq!(entry["conflict"], true);
        assert_eq!(events(service, "key"), ["claimed", "conflict"]);
    });
}

#[test]
fn a_conflict_is_written_down_once() {
    on_both(|service| {
        done_key(service, "key");
        for _ in 0..2 {
            let report = json!({"idempotency_key": "key", "attempt": 1, "external_id": "ch_2"});
            assert_eq!(service.done(report).problem(409), "already_done");
        }
        assert_eq!(events(service, "key"), ["pending", "done", "conflict"]);
    });
}

#[test]
fn a_refused_failure_is_no_conflict() {
    on_both(|service| {
        second_attempt(service, "key");
        for report in [
            json!({"idempotency_key": "key", "attempt": 3}),
            json!({"idempotency_key": "key", "attempt": 2, "claimant": "a"}),
        ] {
            assert!(service.failed(report).status >= 400);
        }
        assert_eq!(service.entry("key")["conflict"], false);
        assert_eq!(events(service, "key"), ["pending", "failed", "pending"]);
    });
}

#[test]
fn with_a_conflict_failed_counts_as_for_good() {
    on_both(|service| {
        service.pending_key("before", "a", 600);
        refused_effect(service, "before");
        service
            .failed(json!({"idempotency_key": "before", "attempt": 1, "retry": true}))
            .ok();
        failed_key(service, "after", true);
        refused_effect(service, "after");
        for key in ["before", "after"] {
            for verdict in [
                claim_pending(service, key, Some("b")),
                service.pending(claim_of(key, Some("b"), &json!({}))),
            ] {
                assert_eq!(gist(&verdict), (false, "failed", 1, false));
            }
        }
    });
}

#[test]
fn with_a_conflict_take_over_counts_as_hold() {
    on_both(|service| {
        stale_key(service, "key");
        refused_effect(service, "key");
        assert_eq!(
            gist(&take_over(service, "key", Some("b"))),
            (false, "stale", 1, false)
        );
        let renewed = claim_pending(service, "key", Some("a"));
        assert_eq!(gist(&renewed), (true, "pending", 1, true));
    });
}

#[test]
fn a_conflict_ends_with_its_window() {
    on_both(|service| {
        let more = json!({"ttl_seconds": 60, "pending": true});
        service.claim(claim_of("key", Some("a"), &more));
        service
            .failed(json!({"idempotency_key": "key", "attempt": 1}))
            .ok();
        refused_effect(service, "key");
        assert_eq!(claim_pending(service, "key", Some("b"))["claimed"], false);
        service.database.age("key", 61);
        let verdict = claim_pending(service, "key", Some("b"));
        assert_eq!(gist(&verdict), (true, "pending", 2, false));
        assert_eq!(service.entry("key")["conflict"], false);
    });
}

#[test]
fn the_history_tells_what_happened_in_order() {
    on_both(|service| {
        claim(service, "key", Some("a"));
        service.pending(claim_of("key", Some("a"), &json!({"lease_seconds": 600})));
        service
            .failed(json!({"idempotency_key": "key", "attempt": 1, "reason": "card declined"}))
            .ok();
        claim_pending(service, "key", Some("b"));
        service
            .done(json!({"idempotency_key": "key", "attempt": 2, "external_id": "ch_1"}))
            .ok();
        let entry = service.entry("key");
        let history = entry["history"].as_array().unwrap();
        let lines: Vec<(&str, u64, &str)> = history
            .iter()
            .map(|event| {
                (
                    event["event"].as_str().unwrap(),
                    event["attempt"].as_u64().unwrap(),
                    event["claimant"].as_str().unwrap(),
                )
            })
            .collect();
        assert_eq!(
            lines,
            [
                ("claimed", 1, "a"),
                ("pending", 1, "a"),
                ("failed", 1, "a"),
                ("pending", 2, "b"),
                ("done", 2, "b"),
            ]
        );
        assert!(history.is_sorted_by_key(|event| time(&event["at"])));
        assert_eq!(history[2]["detail"]["reason"], "card declined");
        assert_eq!(history[3]["detail"]["after"], "failed");
        assert_eq!(history[4]["detail"]["external_id"], "ch_1");
        assert_eq!(entry["processed_at"], history[3]["at"]);
        assert_eq!(entry["updated_at"], history[4]["at"]);
    });
}

/// A result may nest to the limit of a request; the conflict that keeps it nests deeper.
#[test]
fn a_result_that_nests_to_the_limit_is_read_again() {
    on_both(|service| {
        service.pending_key("key", "a", 600);
        let deep = format!("{}{}", "[".repeat(127), "]".repeat(127));
        let deep: Value = serde_json::from_str(&deep).unwrap();
        service
            .done(
                json!({"idempotency_key": "key", "attempt": 1, "external_id": "x", "result": deep}),
            )
            .ok();
        let other =
            json!({"idempotency_key": "key", "attempt": 1, "external_id": "y", "result": deep});
        assert_eq!(service.done(other.clone()).problem(409), "already_done");
        assert_eq!(service.done(other).problem(409), "already_done");
        let entry = service.get("/ledger/key");
        assert_eq!(entry.status, 200);
    });
}

/// As many keys as an array may hold, claimed anew after their window.
#[test]
fn a_full_array_is_claimed_anew_after_its_window() {
    on_both(|service| {
        let claims = |claimant: &str| {
            (0..1000)
                .map(|number| {
                    json!({"idempotency_key": format!("key-{number}"), "claimant": claimant,
                        "ttl_seconds": 60, "payload": number})
                })
                .collect::<Value>()
        };
        service.claim(claims("a"));
        service.database.age_all(61);
        let verdicts = service.claim(claims("b"));
        for verdict in verdicts.as_array().unwrap() {
            assert_eq!(
                (&verdict["claimed"], &verdict["attempt"]),
                (&json!(true), &json!(2))
            );
        }
    });
}
