//! The workflows that tell people what hangs.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::helpers::wait_until;
use super::stage::{Stage, order, stage};

/// The path of the messages of `7. Stale review`.
const STALE: &str = "/stale";

/// Runs `7. Stale review` as its schedule does.
fn review(stage: &Stage) {
    let execution = stage.n8n.execute("dedupGate0000007", "Every 15 minutes");
    assert_eq!(stage.n8n.outcome(execution), "success");
}

#[test]
fn each_stale_entry_is_told_once() {
    let stage = stage();
    // More than a page.
    let claims: Vec<Value> = (0..103)
        .map(|number| {
            let key = format!("hung-{number}");
            json!({"idempotency_key": key, "order_id": key, "claimant": "9@abc:0:0", "pending": true})
        })
        .collect();
    stage.gate.post("/claim", &json!(claims));
    review(&stage);
    assert!(
        stage.provider.take_messages(STALE).is_empty(),
        "their leases are alive"
    );
    stage.gate.let_leases_run_out();
    review(&stage);
    let messages = stage.provider.take_messages(STALE);
    let told: BTreeSet<&str> = messages
        .iter()
        .map(|message| message["entry"]["order_id"].as_str().unwrap())
        .collect();
    assert_eq!((messages.len(), told.len()), (103, 103));
    for message in &messages {
        let entry = &message["entry"];
        assert_eq!(
            (&entry["status"], &entry["attempt"]),
            (&json!("stale"), &json!(1))
        );
        assert!(
            message["text"]
                .as_str()
                .unwrap()
                .contains(entry["order_id"].as_str().unwrap())
        );
    }
    review(&stage);
    assert!(
        stage.provider.take_messages(STALE).is_empty(),
        "all is told"
    );
}

/// Nobody takes the messages: the next review sends them.
#[test]
fn a_message_that_could_not_be_sent_is_sent_later() {
    let mut stage = stage();
    let claim = json!({"idempotency_key": "untold", "claimant": "9@abc:0:0", "pending": true});
    stage.gate.post("/claim", &claim);
    stage.gate.let_leases_run_out();
    stage.provider.stop();
    review(&stage);
    stage.provider.start();
    review(&stage);
    let messages = stage.provider.take_messages(STALE);
    assert_eq!(messages.len(), 1);
    assert_eq!(messages[0]["entry"]["idempotency_key"], "untold");
}

/// n8n tells which execution failed, and the message which entries it may hold. Nothing is
/// written: whether the work was done, nobody has said.
#[test]
fn a_failed_run_is_told_with_what_it_may_hold() {
    let stage = stage();
    stage.n8n.fire("order-triage", &order("another")).ok();
    assert_eq!(stage.n8n.fire("dies", &order("dead")).status, 500);
    let execution = stage.n8n.executions_with("error").pop().unwrap();
    let mut messages = Vec::new();
    wait_until("it is told", || {
        messages = stage.provider.take_messages("/failed-run");
        !messages.is_empty()
    });
    let message = &messages[0];
    let text = message["text"].as_str().unwrap();
    assert!(
        text.contains("Dies after the claim") && text.contains("the run dies here"),
        "{message}"
    );
    assert!(
        message["execution"]
            .as_str()
            .unwrap()
            .ends_with(&execution.to_string()),
        "{message}"
    );
    let entry = stage.gate.entry_of("dead");
    assert_eq!(entry["status"], "pending");
    let held =
        json!([{"order_id": "dead", "idempotency_key": entry["idempotency_key"], "attempt": 1}]);
    assert_eq!(message["may_hold"], held);
}
