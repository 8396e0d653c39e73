//! `GET /ledger` and `GET /ledger/{idempotency_key}`.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::helpers::service::encoded;
use super::helpers::{Database, Service, on_both, postgres::SHARED};

/// The keys of a list, which must fit on one page.
fn keys(service: &Service, query: &str) -> Vec<String> {
    let list = service.get(&format!("/ledger?{query}")).ok();
    assert_eq!(list["next_cursor"], Value::Null);
    keys_of(list["entries"].as_array().unwrap())
}

fn keys_of(entries: &[Value]) -> Vec<String> {
    let key = |entry: &Value| entry["idempotency_key"].as_str().unwrap().to_owned();
    entries.iter().map(key).collect()
}

/// One page of a list, and the query of the next.
fn page(service: &Service, query: &str) -> (Vec<Value>, Option<String>) {
    let list = service.get(&format!("/ledger?{query}")).ok();
    let first = query.split("&cursor=").next().unwrap();
    let next = list["next_cursor"]
        .as_str()
        .map(|cursor| format!("{first}&cursor={}", encoded(cursor)));
    (list["entries"].as_array().unwrap().clone(), next)
}

/// All entries from a page on. Every page but the last must be full.
fn follow(service: &Service, query: String, limit: usize) -> Vec<Value> {
    let mut entries = Vec::new();
    let mut next = Some(query);
    while let Some(query) = next {
        let (found, behind) = page(service, &query);
        assert!(behind.is_none() || found.len() == limit);
        entries.extend(found);
        assert!(entries.len() <= 1000, "the list does not end");
        next = behind;
    }
    entries
}

/// All entries of a list, read in pages.
fn all(service: &Service, filter: &str, limit: usize) -> Vec<Value> {
    follow(service, format!("{filter}&limit={limit}"), limit)
}

/// Checks that a list holds these keys, each once, with the newest change first.
fn assert_is_complete(entries: &[Value], expected: &BTreeSet<String>) {
    let found = keys_of(entries);
    assert_eq!(found.len(), expected.len());
    assert_eq!(&found.into_iter().collect::<BTreeSet<_>>(), expected);
    let changed = |entry: &Value| entry["updated_at"].as_str().unwrap().to_owned();
    assert!(entries.is_sorted_by(|newer, older| changed(newer) >= changed(older)));
}

/// Claims keys in one array, so that many have the same time.
fn claim_all(service: &Service, keys: &[String], claimant: &str, pending: bool) {
    let claim = |key| json!({"idempotency_key": key, "claimant": claimant, "pending": pending});
    let verdicts = service.claim(keys.iter().map(claim).collect());
    for verdict in verdicts.as_array().unwrap() {
        assert_eq!(verdict["claimed"], true);
    }
}

fn numbered(name: &str, count: usize) -> Vec<String> {
    (0..count)
        .map(|number| format!("{name}-{number}"))
        .collect()
}

/// A key in each state, of the same name.
fn key_in_each_state(service: &Service) {
    service.claim(json!({"idempotency_key": "claimed", "claimant": "a", "order_id": "ORD-1"}));
    for key in ["pending", "stale", "done", "failed"] {
        service.claim(json!({
            "idempotency_key": key, "claimant": "a", "order_id": "ORD-1",
            "pending": true, "lease_seconds": 600
        }));
    }
    service.database.age("stale", 601);
    for outcome in ["done", "failed"] {
        let report = json!({"idempotency_key": outcome, "attempt": 1});
        service.post(&format!("/ledger/{outcome}"), &report).ok();
    }
}

/// Claims keys of the ledger anew at the gate, so that the ledger has them as claimed.
fn claimed_in_the_ledger(service: &Service, keys: &[String]) {
    claim_all(service, keys, "a", true);
    for key in keys {
        let report = json!({"idempotency_key": key, "attempt": 1});
        service.failed(report).ok();
    }
    claim_all(service, keys, "b", false);
}

// Filters.

#[test]
fn each_status_lists_its_keys_alone() {
    on_both(|service| {
        key_in_each_state(service);
        for status in ["claimed", "pending", "stale", "done", "failed"] {
            let list = service.get(&format!("/ledger?status={status}")).ok();
            assert_eq!(keys_of(list["entries"].as_array().unwrap()), [status]);
            assert_eq!(list["entries"][0]["status"], status);
        }
    });
}

#[test]
fn keys_at_the_gate_alone_are_not_listed_without_a_status() {
    on_both(|service| {
        key_in_each_state(service);
        let found = keys(service, "");
        assert_eq!(found, ["failed", "done", "pending", "stale"]);
        assert_eq!(keys(service, "order_id=ORD-1"), found);
    });
}

#[test]
fn claimed_lists_the_ledger_and_the_gate() {
    on_both(|service| {
        service.claim(json!({"idempotency_key": "gate"}));
        claimed_in_the_ledger(service, &["ledger".to_owned()]);
        assert_eq!(keys(service, "status=claimed"), ["ledger", "gate"]);
        assert_eq!(keys(service, ""), ["ledger"]);
    });
}

#[test]
fn a_key_at_the_gate_is_listed_by_its_own_name() {
    on_both(|service| {
        key_in_each_state(service);
        assert_eq!(keys(service, "idempotency_key=claimed"), ["claimed"]);
        assert_eq!(keys(service, "idempotency_key=done"), ["done"]);
        assert_eq!(keys(service, "idempotency_key=unknown"), [""; 0]);
    });
}

#[test]
fn filters_are_joined() {
    on_both(|service| {
        key_in_each_state(service);
        assert_eq!(
            keys(service, "idempotency_key=claimed&status=claimed"),
            ["claimed"]
        );
        assert_eq!(
            keys(service, "idempotency_key=claimed&status=done"),
            [""; 0]
        );
        assert_eq!(keys(service, "idempotency_key=done&status=done"), ["done"]);
        assert_eq!(keys(service, "status=done&order_id=ORD-1"), ["done"]);
        assert_eq!(keys(service, "status=done&order_id=ORD-2"), [""; 0]);
        assert_eq!(
            keys(service, "idempotency_key=claimed&conflict=true"),
            [""; 0]
        );
    });
}

#[test]
fn an_order_is_listed_with_all_its_keys() {
    on_both(|service| {
        for (key, order) in [("k1", "ORD 1+1"), ("k2", "ORD 1+1"), ("k3", "ORD-2")] {
            service.claim(json!({"idempotency_key": key, "order_id": order, "pending": true}));
        }
        service.claim(json!({"idempotency_key": "gate", "order_id": "ORD 1+1"}));
        let order = encoded("ORD 1+1");
        assert_eq!(keys(service, &format!("order_id={order}")), ["k2", "k1"]);
        assert_eq!(
            keys(service, &format!("order_id={order}&status=claimed")),
            ["gate"]
        );
    });
}

#[test]
fn conflicts_are_listed() {
    on_both(|service| {
        key_in_each_state(service);
        let report = json!({"idempotency_key": "pending", "claimant": "z"});
        assert_eq!(service.done(report).problem(409), "not_holder");
        assert_eq!(keys(service, "conflict=true"), ["pending"]);
        assert_eq!(keys(service, "conflict=true&status=done"), [""; 0]);
        let list = service.get("/ledger?conflict=true").ok();
        assert_eq!(list["entries"][0]["conflict"], true);
    });
}

#[test]
fn a_parameter_out_of_its_bounds_is_refused_by_name() {
    on_both(|service| {
        for (query, pointer) in [
            ("limit=0", "/limit"),
            ("limit=501", "/limit"),
            ("limit=-1", "/limit"),
            ("limit=1.5", "/limit"),
            ("limit=", "/limit"),
            ("limit=50&limit=50", "/limit"),
            ("status=open", "/status"),
            ("status=", "/status"),
            ("conflict=maybe", "/conflict"),
            ("cursor=x", "/cursor"),
            ("cursor=", "/cursor"),
            ("order_id=", "/order_id"),
            ("idempotency_key=%00", "/idempotency_key"),
            ("statsu=done", "/statsu"),
        ] {
            let reply = service.get(&format!("/ledger?{query}"));
            assert_eq!(reply.problem(422), "invalid_request", "{query}");
            assert_eq!(reply.pointers(), [pointer]);
        }
    });
}

// Pages.

#[test]
fn a_page_holds_fifty_entries_where_nobody_says() {
    on_both(|service| {
        claim_all(service, &numbered("key", 60), "a", true);
        let (entries, next) = page(service, "status=pending");
        assert_eq!(entries.len(), 50);
        assert_eq!(follow(service, next.unwrap(), 50).len(), 10);
    });
}

#[test]
fn a_page_holds_one_to_five_hundred_entries() {
    on_both(|service| {
        claim_all(service, &numbered("key", 501), "a", true);
        for limit in [1, 500] {
            let (entries, next) = page(service, &format!("limit={limit}"));
            assert_eq!(entries.len(), limit);
            assert!(next.is_some());
        }
    });
}

#[test]
fn a_list_that_ends_with_a_full_page_has_no_next() {
    on_both(|service| {
        claim_all(service, &numbered("key", 20), "a", true);
        let (entries, next) = page(service, "limit=20");
        assert_eq!((entries.len(), next), (20, None));
    });
}

#[test]
fn pages_hold_every_entry_once() {
    on_both(|service| {
        let mut expected = BTreeSet::new();
        for name in ["a", "B", "\u{e9}", "_"] {
            let keys = numbered(name, 90);
            claim_all(service, &keys, "a", true);
            expected.extend(keys);
        }
        // Some change again, one at a time.
        for number in (0..90).step_by(9) {
            let report = json!({"idempotency_key": format!("B-{number}"), "attempt": 1});
            service.done(report).ok();
        }
        for limit in [7, 90, 359] {
            assert_is_complete(&all(service, "", limit), &expected);
        }
        expected.retain(|key| !key.starts_with("B-") || key[2..].parse::<u32>().unwrap() % 9 > 0);
        assert_is_complete(&all(service, "status=pending", 64), &expected);
    });
}

#[test]
fn pages_of_claimed_hold_the_gate_and_the_ledger_once() {
    on_both(|service| {
        let mut expected = BTreeSet::new();
        for name in ["first", "second", "third"] {
            let gate = numbered(&format!("{name}-gate"), 70);
            let ledger = numbered(&format!("{name}-ledger"), 10);
            claim_all(service, &gate, "a", false);
            claimed_in_the_ledger(service, &ledger);
            expected.extend(gate.into_iter().chain(ledger));
        }
        for limit in [7, 100] {
            assert_is_complete(&all(service, "status=claimed", limit), &expected);
        }
    });
}

#[test]
fn pages_are_complete_whatever_the_collation_of_the_database() {
    let settings = "LOCALE_PROVIDER icu ICU_LOCALE 'en-US' TEMPLATE template0";
    SHARED
        .try_sql("postgres", &format!("CREATE DATABASE collated {settings}"))
        .unwrap();
    let service = Service::start_on(Database::at(SHARED.url("collated")), &[]);
    let names = ["a", "B", "c", "_", "-", "\u{e9}", "E", "Z", "1", "~"];
    for pending in [true, false] {
        let key = |name| format!("{name}{pending}");
        let keys: Vec<String> = names.into_iter().map(key).collect();
        claim_all(&service, &keys, "a", pending);
        let filter = if pending {
            "status=pending"
        } else {
            "status=claimed"
        };
        assert_is_complete(&all(&service, filter, 3), &keys.into_iter().collect());
    }
}

#[test]
fn pages_are_stable_while_entries_are_added() {
    on_both(|service| {
        for (name, filter, pending) in [
            ("ledger", "status=pending", true),
            ("gate", "status=claimed", false),
        ] {
            let before = numbered(name, 100);
            claim_all(service, &before, "a", pending);
            let (mut entries, mut next) = page(service, &format!("{filter}&limit=30"));
            while let Some(query) = next {
                let later = numbered(&format!("later-{name}-{}", entries.len()), 20);
                claim_all(service, &later, "a", pending);
                let (found, behind) = page(service, &query);
                entries.extend(found);
                assert!(entries.len() <= 1000, "the list does not end");
                next = behind;
            }
            assert_is_complete(&entries, &before.into_iter().collect());
        }
    });
}

#[test]
fn duplicates_change_neither_the_time_nor_the_order() {
    on_both(|service| {
        claim_all(service, &numbered("gate", 3), "a", false);
        claim_all(service, &numbered("ledger", 3), "a", true);
        let lists = || {
            ["status=claimed", ""].map(|query| {
                let list = service.get(&format!("/ledger?{query}")).ok();
                let mut entries = list["entries"].as_array().unwrap().clone();
                for entry in &mut entries {
                    entry.as_object_mut().unwrap().shift_remove("seen_again");
                }
                entries
            })
        };
        let before = lists();
        for key in ["gate-0", "ledger-0"] {
            let verdict = service.claim(json!({"idempotency_key": key, "claimant": "b"}));
            assert_eq!(verdict["seen_again"], 1);
            assert_eq!(
                service.claim(json!({"idempotency_key": key, "claimant": "a"}))["replayed"],
                true
            );
        }
        assert_eq!(lists(), before);
        assert_eq!(service.entry("gate-0")["seen_again"], 1);
        let listed = service.get("/ledger?idempotency_key=ledger-0").ok();
        assert_eq!(listed["entries"][0]["seen_again"], 1);
    });
}

#[test]
fn a_change_moves_an_entry_to_the_front() {
    on_both(|service| {
        for (key, age) in [("k1", 3), ("k2", 2), ("k3", 1)] {
            service.pending_key(key, "a", 600);
            service.database.age(key, age);
        }
        assert_eq!(keys(service, ""), ["k3", "k2", "k1"]);
        service
            .done(json!({"idempotency_key": "k1", "attempt": 1}))
            .ok();
        assert_eq!(keys(service, ""), ["k1", "k3", "k2"]);
    });
}

#[test]
fn a_list_shows_what_the_entry_shows() {
    on_both(|service| {
        key_in_each_state(service);
        for key in ["claimed", "pending", "stale", "done", "failed"] {
            let mut entry = service.entry(key);
            assert!(
                entry
                    .as_object_mut()
                    .unwrap()
                    .shift_remove("history")
                    .is_some()
            );
            let list = service.get(&format!("/ledger?idempotency_key={key}")).ok();
            assert_eq!(list["entries"], json!([entry]));
        }
    });
}

// Keys in paths.

#[test]
fn every_key_can_be_read_by_its_path() {
    on_both(|service| {
        let longest = format!("{}a", "\u{e9}".repeat(127));
        for key in [
            "pending",
            "done",
            "failed",
            "a/b",
            "a%2Fb",
            "/",
            "//",
            "a?b",
            "a#b",
            "a%b",
            "%",
            "a b",
            "a+b",
            "a.b",
            "\u{1f600} \u{e9}\u{301}",
            "caf\u{e9}",
            "cafe\u{301}",
            "a\"b\\c",
            longest.as_str(),
        ] {
            service.claim(json!({"idempotency_key": key}));
            assert_eq!(service.entry(key)["idempotency_key"], key);
            let query = format!("idempotency_key={}", encoded(key));
            assert_eq!(keys(service, &query), [key]);
        }
    });
}

#[test]
fn keys_that_clients_collapse_are_read_by_the_query() {
    on_both(|service| {
        for key in [".", ".."] {
            service.pending_key(key, "a", 600);
            assert_eq!(keys(service, &format!("idempotency_key={key}")), [key]);
        }
    });
}

#[test]
fn a_key_is_not_taken_for_another() {
    on_both(|service| {
        for key in ["a/b", "\u{fffd}", "A"] {
            service.claim(json!({"idempotency_key": key}));
        }
        // What is decoded once is not decoded again.
        for path in ["/ledger/a%252Fb", "/ledger/a"] {
            assert_eq!(service.get(path).problem(404), "unknown_key");
        }
        // What is not UTF-8 is no key.
        let reply = service.get("/ledger/%FF");
        assert_eq!(reply.problem(422), "invalid_request");
        assert_eq!(reply.pointers(), ["/idempotency_key"]);
    });
}

#[test]
fn what_cannot_be_a_key_is_refused_in_the_path() {
    on_both(|service| {
        let too_long = format!("/ledger/{}", "a".repeat(256));
        for path in [
            "/ledger/%20a",
            "/ledger/a%0A",
            "/ledger/%00",
            too_long.as_str(),
        ] {
            let reply = service.get(path);
            assert_eq!(reply.problem(422), "invalid_request", "{path}");
            assert_eq!(reply.pointers(), ["/idempotency_key"]);
        }
    });
}

#[test]
fn a_key_that_was_never_claimed_is_unknown() {
    on_both(|service| {
        for path in [
            "/ledger/key",
            "/ledger/pending",
            "/ledger/done",
            "/ledger/failed",
        ] {
            assert_eq!(service.get(path).problem(404), "unknown_key");
        }
    });
}

#[test]
fn a_path_that_is_only_posted_to_is_not_read() {
    on_both(|service| {
        for path in ["/claim", "/key", "/retry"] {
            let reply = service.get(path);
            assert_eq!(reply.problem(405), "method_not_allowed");
            assert_eq!(reply.headers["allow"], "POST");
        }
        let reply = service.post("/ledger/key", &json!({}));
        assert_eq!(reply.problem(405), "method_not_allowed");
        assert_eq!(reply.headers["allow"], "GET, HEAD");
    });
}

#[test]
fn a_report_is_not_mistaken_for_the_key_of_its_name() {
    on_both(|service| {
        service.pending_key("done", "a", 600);
        let report = json!({"idempotency_key": "done", "attempt": 1});
        assert_eq!(service.done(report).ok()["status"], "done");
        assert_eq!(service.get("/ledger/done").ok()["status"], "done");
    });
}
