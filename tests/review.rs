//! Renewal, review and reset: what keeps work alive, and what a person decides where no run can.

use serde_json::{Value, json};

use super::helpers::service::Client;
use super::helpers::{Reply, on_both, wait_until};

fn pending(service: &Client, key: &str, lease_seconds: u32) {
    let claim = json!({"idempotency_key": key, "claimant": "a", "pending": true, "lease_seconds": lease_seconds});
    assert_eq!(service.claim(claim)["claimed"], true);
}

fn review(service: &Client, key: &str, attempt: u32, decision: &str) -> Reply {
    let review = json!({"idempotency_key": key, "attempt": attempt, "decision": decision,
        "reviewer": "ana", "reason": "seen at the provider"});
    service.post("/ledger/review", &review)
}

fn reset(service: &Client, key: &str, attempt: u32) -> Reply {
    let reset = json!({"idempotency_key": key, "attempt": attempt, "reviewer": "ana", "reason": "lost in the post"});
    service.post("/ledger/reset", &reset)
}

fn events(entry: &Value) -> Vec<&str> {
    let history = entry["history"].as_array().unwrap();
    history
        .iter()
        .map(|event| event["event"].as_str().unwrap())
        .collect()
}

#[test]
fn a_lease_is_renewed_by_its_holder() {
    on_both(|service| {
        pending(service, "long", 60);
        let before = service.entry("long");
        let renew = |members: Value| {
            let mut renewal = json!({"idempotency_key": "long"});
            renewal
                .as_object_mut()
                .unwrap()
                .extend(members.as_object().unwrap().clone());
            service.post("/ledger/renew", &renewal)
        };
        let renewed = renew(json!({"claimant": "a", "lease_seconds": 600})).ok();
        assert_eq!(renewed["changed"], true);
        assert!(renewed["lease_expires_at"].as_str() > before["lease_expires_at"].as_str());
        assert!(renewed["updated_at"].as_str() >= before["updated_at"].as_str());
        // Never shortened; 900 where it does not say.
        let shorter = renew(json!({"attempt": 1, "lease_seconds": 1})).ok();
        assert_eq!(shorter["changed"], false);
        assert_eq!(shorter["lease_expires_at"], renewed["lease_expires_at"]);
        assert_eq!(renew(json!({"attempt": 1})).ok()["changed"], true);
        assert_eq!(
            service.entry("long")["lease_expires_at"],
            renew(json!({"attempt": 1, "lease_seconds": 1})).ok()["lease_expires_at"]
        );
        // Only the holder.
        assert_eq!(renew(json!({"claimant": "b"})).problem(409), "not_holder");
        assert_eq!(renew(json!({})).problem(422), "invalid_request");
        assert_eq!(renew(json!({"attempt": 2})).problem(422), "invalid_request");
        service
            .post(
                "/ledger/done",
                &json!({"idempotency_key": "long", "attempt": 1}),
            )
            .ok();
        assert_eq!(renew(json!({"attempt": 1})).problem(409), "already_done");

        service.claim(json!({"idempotency_key": "gate", "claimant": "a"}));
        let gate = json!({"idempotency_key": "gate", "attempt": 1});
        assert_eq!(
            service.post("/ledger/renew", &gate).problem(409),
            "conflict"
        );
        let unknown = json!({"idempotency_key": "unknown", "attempt": 1});
        assert_eq!(
            service.post("/ledger/renew", &unknown).problem(404),
            "unknown_key"
        );
    });
}

/// The lease runs out, the entry is listed as stale, and its holder, who lives after all, takes it
/// up again.
#[test]
fn a_lease_that_has_run_out_is_renewed_until_somebody_takes_over() {
    on_both(|service| {
        pending(service, "slow", 1);
        wait_until("it is stale", || service.entry("slow")["status"] == "stale");
        let renewal = json!({"idempotency_key": "slow", "claimant": "a", "lease_seconds": 1});
        let renewed = service.post("/ledger/renew", &renewal).ok();
        assert_eq!(renewed["status"], "pending");
        assert_eq!(events(&renewed), ["pending", "renewed"]);

        wait_until("it is stale", || service.entry("slow")["status"] == "stale");
        let take_over =
            json!({"idempotency_key": "slow", "claimant": "b", "on_stale": "take_over"});
        assert_eq!(service.claim(take_over)["claimed"], true);
        assert_eq!(
            service.post("/ledger/renew", &renewal).problem(409),
            "not_holder"
        );
        let by_attempt = json!({"idempotency_key": "slow", "attempt": 1});
        assert_eq!(
            service.post("/ledger/renew", &by_attempt).problem(409),
            "superseded"
        );
    });
}

#[test]
fn a_person_decides_what_became_of_work_that_hangs() {
    on_both(|service| {
        for (key, decision, status, claimed) in [
            ("paid", "done", "done", false),
            ("free", "release", "failed", true),
            ("over", "fail", "failed", false),
        ] {
            pending(service, key, 1);
            wait_until("it is stale", || service.entry(key)["status"] == "stale");
            let reviewed = review(service, key, 1, decision).ok();
            assert_eq!(
                (&reviewed["changed"], &reviewed["status"]),
                (&json!(true), &json!(status))
            );
            assert_eq!(events(&reviewed), ["pending", "reviewed", status]);
            let event = &reviewed["history"][1];
            assert_eq!(event["claimant"], Value::Null);
            assert_eq!(event["detail"]["reviewer"], "ana");
            assert_eq!(event["detail"]["reason"], "seen at the provider");
            assert_eq!(event["detail"]["decision"], decision);
            assert_eq!(review(service, key, 1, decision).ok()["changed"], false);
            let next = service.claim(json!({"idempotency_key": key, "claimant": "b"}));
            assert_eq!(next["claimed"], claimed);
        }
        assert_eq!(
            review(service, "free", 1, "fail").problem(409),
            "superseded"
        );
        assert_eq!(
            review(service, "free", 3, "fail").problem(422),
            "invalid_request"
        );
        assert_eq!(review(service, "free", 2, "fail").problem(409), "conflict");
        assert_eq!(
            review(service, "unknown", 1, "fail").problem(404),
            "unknown_key"
        );
    });
}

#[test]
fn a_review_clears_a_conflict() {
    on_both(|service| {
        pending(service, "twice", 900);
        let done = |id: &str| {
            let report = json!({"idempotency_key": "twice", "attempt": 1, "external_id": id});
            service.post("/ledger/done", &report)
        };
        done("ch_1").ok();
        assert_eq!(done("ch_2").problem(409), "already_done");
        assert_eq!(reset(service, "twice", 1).problem(409), "conflict");
        let decision = json!({"idempotency_key": "twice", "attempt": 1, "decision": "done", "external_id": "ch_2",
            "reviewer": "ana", "reason": "ch_1 is refunded"});
        let reviewed = service.post("/ledger/review", &decision).ok();
        assert_eq!(reviewed["conflict"], false);
        assert_eq!(reviewed["external_id"], "ch_2");
        assert_eq!(
            events(&reviewed),
            ["pending", "done", "conflict", "reviewed", "done"]
        );
        let list = service.get("/ledger?conflict=true").ok();
        assert_eq!(list["entries"], json!([]));
    });
}

#[test]
fn work_that_is_over_is_repeated_on_purpose() {
    on_both(|service| {
        pending(service, "parcel", 900);
        assert_eq!(reset(service, "parcel", 1).problem(409), "conflict");
        let done = json!({"idempotency_key": "parcel", "attempt": 1, "external_id": "p1"});
        service.post("/ledger/done", &done).ok();
        assert_eq!(reset(service, "parcel", 2).problem(422), "invalid_request");
        let free = reset(service, "parcel", 1).ok();
        assert_eq!(free["changed"], true);
        assert_eq!(
            (&free["status"], &free["reason"]),
            (&json!("failed"), &json!("lost in the post"))
        );
        assert_eq!(events(&free), ["pending", "done", "reset"]);
        assert_eq!(reset(service, "parcel", 1).ok()["changed"], false);
        assert_eq!(
            service.get("/ledger?status=failed").ok()["entries"][0]["idempotency_key"],
            "parcel"
        );
        // A late report of the attempt that it ended; the one that was known is no news.
        assert_eq!(service.post("/ledger/done", &done).ok()["changed"], false);
        let failed = json!({"idempotency_key": "parcel", "attempt": 1});
        assert_eq!(
            service.post("/ledger/failed", &failed).problem(409),
            "superseded"
        );

        let claim = json!({"idempotency_key": "parcel", "claimant": "b", "pending": true});
        let again = service.claim(claim.clone());
        assert_eq!(
            (&again["claimed"], &again["attempt"]),
            (&json!(true), &json!(2))
        );
        // The reset that was sent again, late, ends nothing.
        assert_eq!(reset(service, "parcel", 1).ok()["changed"], false);
        assert_eq!(service.claim(claim)["replayed"], true);
        assert_eq!(
            service.entry("parcel")["history"][3]["detail"]["after"],
            "reset"
        );
    });
}

#[test]
fn a_key_at_the_gate_alone_is_set_free() {
    on_both(|service| {
        service.claim(json!({"idempotency_key": "gate", "claimant": "a", "payload": 1}));
        service
            .database
            .sql("INSERT INTO processed_orders (idempotency_key, order_id) VALUES ('raw', 'x')");
        for key in ["gate", "raw"] {
            let free = reset(service, key, 1).ok();
            assert_eq!(events(&free), ["claimed", "reset"]);
            let other = json!({"idempotency_key": key, "claimant": "b", "payload": 2});
            let verdict = service.claim(other);
            assert_eq!(
                (&verdict["claimed"], &verdict["attempt"]),
                (&json!(true), &json!(2))
            );
            assert_eq!(verdict["status"], "claimed");
            // What attempt 1 did all the same is not lost, and keeps the key closed.
            let done = json!({"idempotency_key": key, "attempt": 1, "external_id": "late"});
            assert_eq!(
                service.post("/ledger/done", &done).problem(409),
                "superseded"
            );
            assert_eq!(service.entry(key)["conflict"], true);
        }
        assert_eq!(reset(service, "unknown", 1).problem(404), "unknown_key");
    });
}

#[test]
fn what_a_person_decides_is_complete() {
    on_both(|service| {
        pending(service, "k", 900);
        let whole = json!({"idempotency_key": "k", "attempt": 1, "decision": "release", "reviewer": "ana", "reason": "seen"});
        for path in ["/ledger/review", "/ledger/reset"] {
            for member in whole.as_object().unwrap().keys() {
                let mut part = whole.clone();
                if path == "/ledger/reset" {
                    part.as_object_mut().unwrap().remove("decision");
                }
                if part.as_object_mut().unwrap().remove(member).is_none() {
                    continue;
                }
                let refused = service.post(path, &part);
                assert_eq!(refused.problem(422), "invalid_request");
                assert_eq!(refused.body["errors"][0]["pointer"], format!("/{member}"));
            }
        }
        for (member, value) in [
            ("decision", json!("undo")),
            ("external_id", json!("ch_1")),
            ("reviewer", json!("")),
            ("reason", json!("x".repeat(2001))),
            ("attempt", json!(0)),
            ("claimant", json!("a")),
        ] {
            let mut wrong = whole.clone();
            wrong[member] = value;
            let refused = service.post("/ledger/review", &wrong);
            assert_eq!(refused.problem(422), "invalid_request");
            assert_eq!(refused.body["errors"][0]["pointer"], format!("/{member}"));
        }
        assert_eq!(service.entry("k")["status"], "pending");
    });
}

/// Whoever comes first, the run or the reviewer, the other is told.
#[test]
fn a_run_and_a_reviewer_cannot_overwrite_each_other() {
    on_both(|service| {
        for round in 0..10 {
            let key = format!("race-{round}");
            pending(service, &key, 900);
            let done = json!({"idempotency_key": key, "attempt": 1, "external_id": "ch_1"});
            let (run, reviewer) = std::thread::scope(|scope| {
                let run = scope.spawn(|| service.post("/ledger/done", &done));
                let reviewer = scope.spawn(|| review(service, &key, 1, "fail"));
                (run.join().unwrap(), reviewer.join().unwrap())
            });
            let entry = service.entry(&key);
            // The effect did happen: it is never overwritten by a decision that has not seen it.
            assert_eq!(
                (&entry["status"], &entry["external_id"]),
                (&json!("done"), &json!("ch_1"))
            );
            assert_eq!(run.ok()["changed"], true);
            match reviewer.status {
                200 => assert_eq!(events(&entry), ["pending", "reviewed", "failed", "done"]),
                _ => assert_eq!(reviewer.problem(409), "conflict"),
            }
        }
    });
}
