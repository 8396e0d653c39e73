//! The workflows do what they are for.

use serde_json::{Value, json};

use super::helpers::Backend;
use super::stage::{Stage, fire_all, order, stage, stage_on};

/// Every webhook that charges orders one by one.
const WEBHOOKS: [&str; 4] = [
    "dedup-gate",
    "order-triage",
    "order-native-key",
    "order-by-reference",
];

#[track_caller]
fn assert_all_succeed(stage: &Stage, since: u64, count: usize) {
    let statuses = stage.n8n.executions_since(since);
    assert_eq!(statuses, vec!["success"; count], "{}", stage.n8n.log());
}

#[test]
fn an_order_fired_twice_is_charged_once() {
    for backend in Backend::ALL {
        let stage = stage_on(backend);
        for webhook in WEBHOOKS {
            let since = stage.n8n.last_execution();
            let order_id = format!("ORD-2041-{backend:?}-{webhook}");
            let first = stage.n8n.fire(webhook, &order(&order_id)).ok();
            let second = stage.n8n.fire(webhook, &order(&order_id)).ok();
            let charges = stage.provider.charges_of(&order_id);
            assert_eq!(charges.len(), 1, "{webhook}");
            assert_eq!(first["external_id"], charges[0]["id"], "{webhook}: {first}");
            if webhook == "dedup-gate" {
                assert_eq!(second["status"], "already processed");
            } else {
                assert_eq!(
                    second,
                    json!({"status": "done", "order_id": order_id, "external_id": charges[0]["id"]})
                );
                assert_eq!(
                    stage.gate.entry_of(&order_id)["external_id"],
                    charges[0]["id"]
                );
            }
            assert_all_succeed(&stage, since, 2);
        }
    }
}

#[test]
fn twenty_identical_webhooks_at_once_are_charged_once() {
    let stage = stage();
    for webhook in WEBHOOKS {
        let since = stage.n8n.last_execution();
        for round in 0..5 {
            let order_id = format!("ORD-{webhook}-{round}");
            let replies = fire_all(&stage.n8n, webhook, &vec![order(&order_id); 20], 20);
            assert_eq!(stage.provider.charges_of(&order_id).len(), 1, "{webhook}");
            // The others are told that it is done, or that somebody is at it.
            for reply in replies.into_iter().map(Option::unwrap) {
                assert!(matches!(reply.status, 200 | 409), "{}", reply.body);
            }
        }
        assert_all_succeed(&stage, since, 100);
    }
}

#[test]
fn two_hundred_orders_each_twice_are_each_charged_once() {
    let stage = stage();
    for webhook in ["dedup-gate", "order-triage"] {
        let since = stage.n8n.last_execution();
        let prefix = format!("many-{webhook}-");
        let orders: Vec<Value> = (0..400)
            .map(|number| order(&format!("{prefix}{}", number / 2)))
            .collect();
        fire_all(&stage.n8n, webhook, &orders, 20);
        let counts = stage.provider.counts(&prefix);
        assert_eq!(counts.len(), 200);
        assert!(counts.values().all(|count| *count == 1), "{counts:?}");
        assert_all_succeed(&stage, since, 400);
    }
}

#[test]
fn fifty_items_of_which_ten_are_repeats_are_forty_charges() {
    let stage = stage();
    let since = stage.n8n.last_execution();
    let orders: Vec<Value> = (0..50)
        .map(|number| order(&format!("item-{}", number % 40)))
        .collect();
    let reply = stage
        .n8n
        .fire("claim-once", &json!({"orders": orders}))
        .ok();
    assert_eq!(reply["charged"].as_array().unwrap().len(), 40, "{reply}");
    assert_eq!(
        reply["already_processed"].as_array().unwrap().len(),
        10,
        "{reply}"
    );
    let counts = stage.provider.counts("item-");
    assert_eq!(counts.len(), 40);
    assert!(counts.values().all(|count| *count == 1), "{counts:?}");
    // The workflow, and the one that it calls.
    assert_all_succeed(&stage, since, 2);
}
