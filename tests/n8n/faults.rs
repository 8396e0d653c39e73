//! What goes wrong between n8n, the service and the provider: nothing is charged twice, and
//! nothing is lost unseen.

use serde_json::{Value, json};

use super::helpers::{Reply, wait_until};
use super::instance::try_fire;
use super::stage::{Stage, fire_all, order, stage};

/// The webhooks that charge orders at a provider that knows no idempotency keys.
const WEBHOOKS: [&str; 3] = ["dedup-gate", "order-triage", "order-by-reference"];

/// What the sender hears.
#[track_caller]
fn assert_told(reply: &Reply, status: u16, told: &str) {
    assert_eq!(
        (reply.status, &reply.body["status"]),
        (status, &json!(told))
    );
}

#[track_caller]
fn assert_charged_once(stage: &Stage, order_id: &str) -> Value {
    let mut charges = stage.provider.charges_of(order_id);
    assert_eq!(charges.len(), 1, "{order_id}: {charges:?}");
    charges.remove(0)
}

/// What `/key` says of an order.
fn key_of(stage: &Stage, order_id: &str) -> Value {
    stage
        .gate
        .post("/key", &json!({"parts": [order_id, 129.9]}))
}

/// The reply is lost after the commit: *Retry On Fail* sends the same claimant again, which hears
/// what it was not told.
#[test]
fn a_claim_whose_reply_is_lost_is_charged_once() {
    let mut stage = stage();
    let proxy = stage.gate.open_behind_proxy();
    for (number, (webhook, request)) in [
        ("dedup-gate", "POST /claim "),
        ("claim-once", "POST /claim "),
        ("order-triage", "POST /claim "),
        ("order-triage", "POST /ledger/done "),
        ("order-native-key", "POST /claim "),
        ("order-by-reference", "POST /ledger/pending "),
        ("order-by-reference", "POST /ledger/done "),
    ]
    .into_iter()
    .enumerate()
    {
        let order_id = format!("lost-{number}");
        let mut body = order(&order_id);
        if webhook == "claim-once" {
            body = json!({"orders": [body]});
        }
        proxy.lose(request, 2);
        stage.n8n.fire(webhook, &body).ok();
        assert_eq!(proxy.left(), 0, "{webhook}");
        assert_charged_once(&stage, &order_id);
        if webhook.starts_with("order") {
            assert_eq!(stage.gate.entry_of(&order_id)["status"], "done");
        }
    }
}

/// The provider refuses, twice: nothing has happened, so each delivery tries anew.
#[test]
fn an_order_that_was_refused_is_charged_by_a_later_delivery() {
    let stage = stage();
    for (webhook, status) in [
        ("order-triage", 402),
        ("order-triage", 429),
        ("order-native-key", 402),
        ("order-by-reference", 402),
        ("order-by-reference", 429),
    ] {
        let order_id = format!("refused-{webhook}-{status}");
        // Each delivery of one that knows the key is a key of its own, and three tries; and what
        // was not looked at is repeated by the one that asks what a failure means.
        let tries = match (webhook, status) {
            ("order-native-key", _) | ("order-by-reference", 429) => 3,
            _ => 1,
        };
        let refusal = json!({"charge": false, "status": status});
        stage
            .provider
            .behave(&order_id, &json!(vec![refusal; 2 * tries]));
        for attempt in [1, 2] {
            let reply = stage.n8n.fire(webhook, &order(&order_id));
            assert_told(&reply, 502, "failed");
            let entry = stage.gate.entry_of(&order_id);
            assert_eq!(
                (&entry["status"], &entry["attempt"]),
                (&json!("failed"), &json!(attempt))
            );
            assert!(
                entry["reason"]
                    .as_str()
                    .unwrap()
                    .starts_with(&status.to_string()),
                "{entry}"
            );
        }
        let reply = stage.n8n.fire(webhook, &order(&order_id)).ok();
        let charge = assert_charged_once(&stage, &order_id);
        assert_eq!(reply["external_id"], charge["id"]);
        assert_eq!(stage.gate.entry_of(&order_id)["attempt"], 3);
    }
}

/// Nobody listens at the provider's address: nothing has happened either.
#[test]
fn an_order_whose_provider_is_down_is_charged_by_a_later_delivery() {
    let mut stage = stage();
    stage.provider.stop();
    for webhook in ["order-triage", "order-by-reference"] {
        let reply = stage.n8n.fire(webhook, &order(&format!("down-{webhook}")));
        assert_told(&reply, 502, "failed");
    }
    stage.provider.start();
    for webhook in ["order-triage", "order-by-reference"] {
        let order_id = format!("down-{webhook}");
        stage.n8n.fire(webhook, &order(&order_id)).ok();
        assert_charged_once(&stage, &order_id);
    }
}

/// It charged, and then its answer was dropped, was a 500, or came too late. Without a means to
/// ask, what is uncertain stays pending, is never repeated, and is listed.
#[test]
fn a_charge_whose_answer_is_lost_stays_pending_for_review() {
    let stage = stage();
    let answers = [
        ("drop", json!([{"drop": true}])),
        ("500", json!([{"status": 500}])),
        ("502-uncharged", json!([{"status": 502, "charge": false}])),
        ("late", json!([{"delay": 35_000}])),
    ];
    for (name, answers) in &answers {
        stage.provider.behave(&format!("uncertain-{name}"), answers);
    }
    let orders: Vec<Value> = answers
        .iter()
        .map(|(name, _)| order(&format!("uncertain-{name}")))
        .collect();
    for reply in fire_all(&stage.n8n, "order-triage", &orders, orders.len()) {
        let reply = reply.unwrap();
        assert_told(&reply, 502, "uncertain");
    }
    // Delivered again, it is still somebody's: not done, so not acknowledged.
    for reply in fire_all(&stage.n8n, "order-triage", &orders, orders.len()) {
        let reply = reply.unwrap();
        assert_told(&reply, 409, "pending");
    }
    stage.gate.let_leases_run_out();
    assert_eq!(stage.gate.listed("stale").len(), orders.len());
    for (name, _) in &answers {
        let order_id = format!("uncertain-{name}");
        let reply = stage.n8n.fire("order-triage", &order(&order_id));
        assert_told(&reply, 409, "stale");
        assert_eq!(stage.provider.requests_for(&order_id).len(), 1);
    }
}

/// Of the tries of *Retry On Fail*, n8n shows the error of the last: a refusal of that one says
/// nothing of those before.
#[test]
fn a_charge_behind_a_refused_repetition_stays_pending() {
    let stage = stage();
    for (name, last) in [("429", 429), ("401", 401), ("500", 500)] {
        let order_id = format!("hidden-{name}");
        let refusal = json!({"charge": false, "status": last});
        stage
            .provider
            .behave(&order_id, &json!([{"drop": true}, refusal, refusal]));
        let reply = stage.n8n.fire("order-native-key", &order(&order_id));
        assert_told(&reply, 502, "uncertain");
        let reply = stage.n8n.fire("order-native-key", &order(&order_id));
        assert_told(&reply, 409, "pending");
        assert_charged_once(&stage, &order_id);
    }
    stage.gate.let_leases_run_out();
    assert_eq!(stage.gate.listed("stale").len(), 3);
}

/// A success that names no charge is none: somebody else's page, an empty answer.
#[test]
fn an_answer_without_an_id_is_not_taken_for_a_charge() {
    let stage = stage();
    let answers = [
        "<html>Maintenance</html>",
        "",
        "[]",
        "{}",
        "{\"id\": null}",
        "[{\"id\": \"ch_1\"}]",
        "5",
    ];
    let orders: Vec<Value> = (0..answers.len())
        .map(|number| order(&format!("odd-{number}")))
        .collect();
    for webhook in ["order-triage", "order-native-key", "order-by-reference"] {
        for (order, raw) in orders.iter().zip(answers) {
            let behaviour = json!([{"charge": false, "status": 200, "raw": raw}]);
            stage
                .provider
                .behave(order["order_id"].as_str().unwrap(), &behaviour);
        }
        for reply in fire_all(&stage.n8n, webhook, &orders, orders.len()) {
            assert_eq!(reply.unwrap().status, 500, "{webhook}");
        }
        assert_eq!(
            stage.gate.listed("pending").len(),
            answers.len(),
            "{webhook}"
        );
        stage.gate.forget_all();
    }
}

/// An answer of the search that is no list of charges says neither that there is one nor that
/// there is none.
#[test]
fn an_odd_answer_of_the_search_decides_nothing() {
    let stage = stage();
    let answers = [
        "<html>Please log in</html>",
        "",
        "[]",
        "{}",
        "{\"data\": null}",
        "{\"data\": \"none\"}",
        "{\"data\": {}}",
        "{\"data\": [], \"error\": \"try later\"}",
        "{\"errors\": [1], \"data\": []}",
    ];
    let orders: Vec<Value> = (0..answers.len())
        .map(|number| order(&format!("search-{number}")))
        .collect();
    for (order, raw) in orders.iter().zip(answers) {
        let order_id = order["order_id"].as_str().unwrap();
        stage.provider.behave(order_id, &json!([{"drop": true}]));
        let key = key_of(&stage, order_id);
        stage.provider.behave(
            key["idempotency_key"].as_str().unwrap(),
            &json!([{"raw": raw}]),
        );
    }
    for reply in fire_all(&stage.n8n, "order-by-reference", &orders, orders.len()) {
        assert_eq!(reply.unwrap().status, 500);
    }
    assert_eq!(stage.gate.listed("pending").len(), answers.len());
    stage.gate.let_leases_run_out();
    for (order, reply) in orders
        .iter()
        .zip(fire_all(&stage.n8n, "order-by-reference", &orders, 4))
    {
        let charge = assert_charged_once(&stage, order["order_id"].as_str().unwrap());
        assert_eq!(reply.unwrap().ok()["external_id"], charge["id"]);
    }
}

/// Behind the error of a charge, *Retry execution* would go on without the gate: so n8n has nothing
/// to retry.
#[test]
fn an_uncertain_charge_leaves_nothing_to_retry() {
    let stage = stage();
    for webhook in ["dedup-gate", "order-triage", "claim-once"] {
        let order_id = format!("once-{webhook}");
        stage.provider.behave(&order_id, &json!([{"drop": true}]));
        let body = match webhook {
            "claim-once" => json!({"orders": [order(&order_id), order("once-beside")]}),
            _ => order(&order_id),
        };
        let since = stage.n8n.last_execution();
        let reply = stage.n8n.fire(webhook, &body);
        assert_eq!(reply.status, 502, "{webhook}: {}", reply.body);
        if webhook == "claim-once" {
            assert_eq!(reply.body, json!({"uncertain": [order_id]}));
        }
        assert!(
            stage
                .n8n
                .executions_since(since)
                .iter()
                .all(|status| status == "success")
        );
        assert_charged_once(&stage, &order_id);
    }
    assert_charged_once(&stage, "once-beside");
}

/// What only the gate knows, nobody has an outcome of: it is not acknowledged.
#[test]
fn a_key_claimed_at_the_gate_alone_is_not_acknowledged() {
    let stage = stage();
    stage
        .gate
        .post("/claim", &json!({"parts": ["at-the-gate", 129.9]}));
    for webhook in ["order-triage", "order-native-key", "order-by-reference"] {
        let reply = stage.n8n.fire(webhook, &order("at-the-gate"));
        assert_told(&reply, 409, "claimed");
    }
    assert!(stage.provider.charges_of("at-the-gate").is_empty());
}

/// n8n has rounded such an id before anybody could see it: two orders would be one.
#[test]
fn an_id_that_was_rounded_is_refused() {
    let stage = stage();
    for webhook in [
        "dedup-gate",
        "order-triage",
        "order-native-key",
        "order-by-reference",
    ] {
        let body = json!({"order_id": 9_007_199_254_740_993_u64, "order_total": 1});
        assert_eq!(stage.n8n.fire(webhook, &body).status, 500, "{webhook}");
    }
    let blank = json!({"orders": [order("good"), {"order_id": "", "order_total": 1}]});
    assert_eq!(stage.n8n.fire("claim-once", &blank).status, 500);
    assert!(stage.provider.charges_of("good").is_empty());
    let good = json!({"orders": [order("good")]});
    let reply = stage.n8n.fire("claim-once", &good).ok();
    assert_eq!(reply, json!({"charged": ["good"], "already_processed": []}));
    let reply = stage.n8n.fire("claim-once", &good).ok();
    assert_eq!(reply, json!({"charged": [], "already_processed": ["good"]}));
    assert_charged_once(&stage, "good");
}

/// The same where the provider can be asked.
#[test]
fn a_charge_whose_answer_is_lost_is_found_by_reference() {
    let stage = stage();
    let answers = [
        ("drop", json!([{"drop": true}]), true),
        ("500", json!([{"status": 500}]), true),
        ("late", json!([{"delay": 35_000}]), true),
        (
            "502-uncharged",
            json!(vec![json!({"status": 502, "charge": false}); 3]),
            false,
        ),
    ];
    for (name, answers, _) in &answers {
        stage.provider.behave(&format!("asked-{name}"), answers);
    }
    let orders: Vec<Value> = answers
        .iter()
        .map(|(name, ..)| order(&format!("asked-{name}")))
        .collect();
    let replies = fire_all(&stage.n8n, "order-by-reference", &orders, orders.len());
    for ((name, _, charged), reply) in answers.iter().zip(replies) {
        let (order_id, reply) = (format!("asked-{name}"), reply.unwrap());
        if *charged {
            let charge = assert_charged_once(&stage, &order_id);
            assert_eq!(reply.ok()["external_id"], charge["id"]);
            assert_eq!(stage.gate.entry_of(&order_id)["external_id"], charge["id"]);
        } else {
            assert_told(&reply, 502, "failed");
            stage.n8n.fire("order-by-reference", &order(&order_id)).ok();
            assert_charged_once(&stage, &order_id);
        }
    }
}

/// What a failed call means is asked, and kept to: the provider is left alone for as long as it
/// wants, and asked before what may have been charged is repeated.
#[test]
fn a_charge_is_repeated_as_the_advice_says() {
    let stage = stage();
    let order_id = "advised";
    let answers = json!([
        {"charge": false, "status": 429, "retry_after": 2},
        {"charge": false, "status": 502},
        {"status": 200},
    ]);
    stage.provider.behave(order_id, &answers);
    let since = stage.n8n.last_execution();
    let reply = stage.n8n.fire("order-by-reference", &order(order_id)).ok();
    let charge = assert_charged_once(&stage, order_id);
    assert_eq!(reply["external_id"], charge["id"]);
    let entry = stage.gate.entry_of(order_id);
    assert_eq!(
        (&entry["status"], &entry["external_id"], &entry["attempt"]),
        (&json!("done"), &charge["id"], &json!(1))
    );
    assert_eq!(stage.n8n.executions_since(since), ["success"]);
    let requests = stage.provider.requests_for(order_id);
    let key = &entry["idempotency_key"];
    assert!(
        requests.iter().all(|request| request["reference"] == *key),
        "{requests:?}"
    );
    let times: Vec<u64> = requests
        .iter()
        .map(|request| request["at"].as_u64().unwrap())
        .collect();
    // `Retry-After`; then the time that a search needs to see a charge, and the second wait.
    assert_eq!(times.len(), 3, "{requests:?}");
    assert!(times[1] - times[0] >= 2_000, "{times:?}");
    assert!(times[2] - times[1] >= 22_000, "{times:?}");
}

/// Where nobody says what a failed call means, the provider is asked, and nothing is repeated.
#[test]
fn without_advice_a_charge_is_not_repeated() {
    let mut stage = stage();
    let proxy = stage.gate.open_behind_proxy();
    for (name, answer) in [
        ("turned-away", json!({"charge": false, "status": 429})),
        ("charged", json!({"status": 502})),
    ] {
        let order_id = format!("unadvised-{name}");
        stage.provider.behave(&order_id, &json!([answer]));
        proxy.lose("POST /retry ", 5);
        let reply = stage.n8n.fire("order-by-reference", &order(&order_id));
        assert_eq!(proxy.left(), 0, "{name}");
        assert_eq!(stage.provider.requests_for(&order_id).len(), 1, "{name}");
        match name {
            "charged" => {
                let charge = assert_charged_once(&stage, &order_id);
                assert_eq!(reply.ok()["external_id"], charge["id"]);
            }
            _ => assert_told(&reply, 502, "failed"),
        }
    }
}

/// More than a run can wait for is left to the sender where nothing has happened, and to a later
/// delivery where something may have.
#[test]
fn a_provider_that_wants_to_be_left_alone_for_long_is_not_called_again() {
    let stage = stage();
    for (status, seconds, told) in [
        (429, 61, "failed"),
        (429, 3_600, "failed"),
        (503, 61, "uncertain"),
        (503, 3_600, "uncertain"),
    ] {
        let order_id = format!("later-{status}-{seconds}");
        let answer = json!({"charge": false, "status": status, "retry_after": seconds});
        stage.provider.behave(&order_id, &json!([answer]));
        let reply = stage.n8n.fire("order-by-reference", &order(&order_id));
        assert_told(&reply, 502, told);
        assert_eq!(stage.provider.requests_for(&order_id).len(), 1);
    }
    assert_eq!(stage.gate.listed("pending").len(), 2);
}

/// Neither the charge nor the search is answered: it stays pending, and whoever delivers it again
/// once the lease has run out asks anew.
#[test]
fn a_charge_that_cannot_be_asked_for_is_found_later() {
    let stage = stage();
    let order_id = "unasked";
    let key = key_of(&stage, order_id);
    let key = key["idempotency_key"].as_str().unwrap();
    stage.provider.behave(order_id, &json!([{"drop": true}]));
    stage.provider.behave(
        key,
        &json!([{"status": 500}, {"status": 500}, {"status": 500}]),
    );
    let reply = stage.n8n.fire("order-by-reference", &order(order_id));
    assert_told(&reply, 502, "uncertain");
    let reply = stage.n8n.fire("order-by-reference", &order(order_id));
    assert_told(&reply, 409, "pending");
    stage.gate.let_leases_run_out();
    assert_eq!(stage.gate.listed("stale").len(), 1);
    let reply = stage.n8n.fire("order-by-reference", &order(order_id)).ok();
    assert_eq!(
        reply["external_id"],
        assert_charged_once(&stage, order_id)["id"]
    );
    assert_eq!(stage.gate.entry_of(order_id)["status"], "done");
}

/// A provider that knows the key may be asked again and again: it charges once.
#[test]
fn a_native_key_makes_retry_on_fail_safe() {
    let stage = stage();
    for provider in ["stripe", "paypal"] {
        let order_id = format!("native-{provider}");
        let mut body = order(&order_id);
        body["provider"] = json!(provider);
        stage
            .provider
            .behave(&order_id, &json!([{"drop": true}, {"status": 500}]));
        let reply = stage.n8n.fire("order-native-key", &body).ok();
        let charge = assert_charged_once(&stage, &order_id);
        assert_eq!(reply["external_id"], charge["id"]);
        assert_eq!(charge["amount"], 129.9);
        let requests = stage.provider.requests_for(&order_id);
        assert_eq!(requests.len(), 3);
        let verdict = stage.gate.entry_of(&order_id);
        let key = match provider {
            "stripe" => verdict["idempotency_key"].clone(),
            _ => key_of(&stage, &order_id)["uuid"].take(),
        };
        assert!(
            requests.iter().all(|request| request["key"] == key),
            "{requests:?}"
        );
        assert_eq!(verdict["external_id"], charge["id"]);
    }
}

/// The gate is down: it fails closed, and the sender hears that it has to deliver again.
#[test]
fn while_the_gate_is_down_nothing_is_charged() {
    let mut stage = stage();
    let database = stage.gate.kill();
    for webhook in [&WEBHOOKS[..], &["order-native-key"]].concat() {
        let reply = stage
            .n8n
            .fire(webhook, &order(&format!("closed-{webhook}")));
        assert_eq!(reply.status, 500);
    }
    let body = json!({"orders": [order("closed-claim-once")]});
    assert_eq!(stage.n8n.fire("claim-once", &body).status, 500);
    assert_eq!(stage.provider.counts("closed-").len(), 0);
    stage.gate.open_on(database);
    for webhook in [&WEBHOOKS[..], &["order-native-key"]].concat() {
        stage
            .n8n
            .fire(webhook, &order(&format!("closed-{webhook}")))
            .ok();
    }
    stage.n8n.fire("claim-once", &body).ok();
    let counts = stage.provider.counts("closed-");
    assert_eq!(counts.len(), 5);
    assert!(counts.values().all(|count| *count == 1), "{counts:?}");
}

/// Delivers until each order is acknowledged, or at rest: each is charged once and done, or stays
/// pending, is charged at most once, and is listed once its lease has run out.
fn assert_nothing_is_lost(stage: &Stage, webhook: &str, orders: &[Value]) {
    for _ in 0..3 {
        fire_all(&stage.n8n, webhook, orders, 10);
    }
    stage.gate.let_leases_run_out();
    let (done, stale) = (stage.gate.listed("done"), stage.gate.listed("stale"));
    for order in orders {
        let order_id = order["order_id"].as_str().unwrap();
        let charges = stage.provider.charges_of(order_id).len();
        if stale.contains(order_id) {
            assert!(charges <= 1, "{order_id}: {charges} charges");
        } else {
            assert!(
                done.contains(order_id),
                "{order_id}: {}",
                stage.gate.entry_of(order_id)
            );
            assert_eq!(charges, 1, "{order_id}");
        }
    }
    let since = stage.n8n.last_execution();
    for order_id in &stale {
        let reply = stage.n8n.fire(webhook, &order(order_id));
        assert_told(&reply, 409, "stale");
    }
    assert_eq!(
        stage.n8n.executions_since(since),
        vec!["success"; stale.len()]
    );
}

/// The gate is killed (-9) and started again among a hundred webhooks, three times.
#[test]
fn the_gate_is_killed_among_a_hundred_webhooks() {
    let mut stage = stage();
    let orders: Vec<Value> = (0..100)
        .map(|number| order(&format!("killed-{number}")))
        .collect();
    let Stage {
        n8n,
        provider,
        gate,
    } = &mut *stage;
    std::thread::scope(|scope| {
        let senders = scope.spawn(|| fire_all(n8n, "order-triage", &orders, 10));
        for time in 1..=3 {
            wait_until("some are through", || {
                provider.counts("killed-").len() >= 20 * time
            });
            let database = gate.kill();
            gate.open_on(database);
        }
        senders.join().unwrap();
    });
    assert_nothing_is_lost(&stage, "order-triage", &orders);
}

/// n8n is killed (-9) among webhooks: between claim, charge and report of some of them.
#[test]
fn n8n_is_killed_between_claim_and_done() {
    let mut stage = stage();
    let orders: Vec<Value> = (0..30)
        .map(|number| order(&format!("crash-{number}")))
        .collect();
    // These it is killed in for sure: charged, and not answered yet.
    for number in 0..5 {
        let late = json!([{"delay": 20_000}]);
        stage.provider.behave(&format!("crash-{number}"), &late);
    }
    let Stage { n8n, provider, .. } = &mut *stage;
    std::thread::scope(|scope| {
        for order in &orders {
            let client = n8n.client();
            scope.spawn(move || try_fire(&client, "order-triage", order));
        }
        wait_until("some are charged", || {
            let counts = provider.counts("crash-");
            counts.len() >= 8
                && (0..5).all(|number| counts.contains_key(&format!("crash-{number}")))
        });
        n8n.kill();
    });
    stage.n8n.start();
    let crashed = stage.n8n.executions_with("crashed");
    assert!(!crashed.is_empty(), "n8n knows what it was killed in");
    for number in 0..5 {
        assert_eq!(
            stage.gate.entry_of(&format!("crash-{number}"))["status"],
            "pending"
        );
    }
    // Whatever n8n makes of these, it charges nothing that was charged.
    for execution in crashed {
        stage.n8n.retry(execution);
    }
    assert_nothing_is_lost(&stage, "order-triage", &orders);
    let stale = stage.gate.listed("stale");
    assert!(
        (0..5).all(|number| stale.contains(&format!("crash-{number}"))),
        "{stale:?}"
    );
}

/// An execution that failed is retried, as the editor does: it goes on where it failed, under
/// another execution id.
#[test]
fn a_failed_execution_is_retried_from_n8n() {
    let mut stage = stage();

    // It failed before the claim.
    let database = stage.gate.kill();
    assert_eq!(
        stage
            .n8n
            .fire("order-triage", &order("retried-early"))
            .status,
        500
    );
    let failed = stage.n8n.last_execution();
    stage.gate.open_on(database);
    stage.n8n.retry(failed);
    wait_until("it is done", || {
        stage.gate.entry_of("retried-early")["status"] == "done"
    });
    stage.n8n.fire("order-triage", &order("retried-early")).ok();
    assert_charged_once(&stage, "retried-early");

    // It failed after the charge: what is known is reported, under the claim's attempt.
    stage
        .provider
        .behave("retried-late", &json!([{"delay": 2_000}]));
    let Stage {
        n8n,
        provider,
        gate,
    } = &mut *stage;
    let database = std::thread::scope(|scope| {
        let sender = scope.spawn(|| n8n.fire("order-triage", &order("retried-late")));
        wait_until("it is charged", || {
            !provider.charges_of("retried-late").is_empty()
        });
        let database = gate.kill();
        assert_eq!(sender.join().unwrap().status, 500);
        database
    });
    let failed = stage.n8n.last_execution();
    stage.gate.open_on(database);
    assert_eq!(stage.gate.entry_of("retried-late")["status"], "pending");
    stage.n8n.retry(failed);
    wait_until("it is done", || {
        stage.gate.entry_of("retried-late")["status"] == "done"
    });
    let charge = assert_charged_once(&stage, "retried-late");
    assert_eq!(
        stage.gate.entry_of("retried-late")["external_id"],
        charge["id"]
    );
}
