//! `9. Effects receiver`: what the outbox delivers at least once is done once.

use std::sync::Arc;
use std::thread;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use chrono::Utc;
use dedup_gate::domain::webhook::{SigningSecret, signatures};
use serde_json::{Value, json};

use super::helpers::service::Client;
use super::helpers::{Database, Reply, wait_within};
use super::stage::{PATIENCE, Stage, WEBHOOK_SECRET, import_each, stage, webhook_secret};

/// A secret of bytes that are no text.
const BYTES: [u8; 24] = [0xfe; 24];

/// Secrets, as `OUTBOX_SECRETS` has them.
fn whsec(secret: &[u8]) -> String {
    format!("whsec_{}", STANDARD.encode(secret))
}

/// Starts the service anew, so that it delivers to the workflow.
fn deliver_to_n8n(stage: &mut Stage, secrets: &str) {
    let database = stage.gate.kill();
    deliver_from(stage, database, secrets);
}

fn deliver_from(stage: &mut Stage, database: Arc<Database>, secrets: &str) {
    let routes = format!("*={}/webhook/effects", stage.n8n.url());
    let settings = [
        ("OUTBOX_ROUTES", routes.as_str()),
        ("OUTBOX_SECRETS", secrets),
        ("OUTBOX_TIMEOUT", "10"),
        ("OUTBOX_RETRY_WAITS", "1,1,1"),
    ];
    stage.gate.open_with(database, &settings);
}

/// Reports work as done, with its effects, and gives their names in this order.
fn report(stage: &Stage, key: &str, effects: &[Value]) -> Vec<String> {
    let claim = json!({"idempotency_key": key, "claimant": "7@abc:0:0", "pending": true});
    stage.gate.post("/claim", &claim);
    let done = json!({"idempotency_key": key, "attempt": 1, "effects": effects});
    stage.gate.post("/ledger/done", &done);
    let name = |effect: &Value| {
        let topic = effect["topic"].as_str().unwrap();
        let listed = stage.gate.get(&format!("/outbox?topic={topic}"));
        let listed = listed["effects"].as_array().unwrap();
        let ours = listed
            .iter()
            .find(|effect| effect["idempotency_key"] == key);
        ours.unwrap()["id"].as_str().unwrap().to_owned()
    };
    effects.iter().map(name).collect()
}

/// An effect, once it has this status, after so many tries at least.
fn settled(stage: &Stage, id: &str, status: &str, tries: u64) -> Value {
    let mut effect = Value::Null;
    wait_within(PATIENCE, "the effect is settled", || {
        effect = stage.gate.get(&format!("/outbox/{id}"));
        effect["status"] == status && effect["tried"].as_u64() >= Some(tries)
    });
    effect
}

/// What the tries were answered.
fn answers(effect: &Value) -> Vec<u64> {
    let tries = effect["tries"].as_array().unwrap();
    let status = |attempt: &Value| attempt["status_code"].as_u64().unwrap();
    tries.iter().map(status).collect()
}

fn mail(order: &str) -> Value {
    json!({"topic": "mail", "payload": {"to": "ana@example.com", "order": order}})
}

/// How often the mail about an order was sent.
fn mails(stage: &Stage, order: &str) -> usize {
    let subject = format!("Your order {order}");
    stage.provider.messages_with("subject", &subject).len()
}

/// What the CRM was told of an effect.
fn told(stage: &Stage, id: &str) -> Vec<Value> {
    let path = format!("/events/{id}");
    stage.provider.messages_with("path", &path)
}

/// A delivery, as the outbox sends it.
#[derive(Clone)]
struct Delivery {
    id: String,
    timestamp: String,
    signature: String,
    topic: &'static str,
    body: String,
}

impl Delivery {
    fn of_mail(id: &str, order: &str) -> Self {
        let body = mail(order)["payload"].to_string();
        Self::signed(id, Utc::now().timestamp(), &body, WEBHOOK_SECRET.as_bytes())
    }

    fn signed(id: &str, timestamp: i64, body: &str, secret: &[u8]) -> Self {
        let secrets = SigningSecret::parse_list(&whsec(secret)).unwrap();
        Self {
            id: id.to_owned(),
            timestamp: timestamp.to_string(),
            signature: signatures(&secrets, id, timestamp, body.as_bytes()),
            topic: "mail",
            body: body.to_owned(),
        }
    }

    fn send(&self, client: &Client) -> Reply {
        let headers = [
            ("Content-Type", "application/json"),
            ("webhook-id", &self.id),
            ("webhook-timestamp", &self.timestamp),
            ("webhook-signature", &self.signature),
            ("x-dedup-gate-topic", self.topic),
            ("x-dedup-gate-key", "order-1"),
        ];
        client.send("POST", "/webhook/effects", &headers, self.body.as_bytes())
    }
}

/// Delivered again by hand, each is answered from the ledger.
#[test]
fn effects_of_two_topics_are_each_done_once() {
    let mut stage = stage();
    deliver_to_n8n(&mut stage, &whsec(WEBHOOK_SECRET.as_bytes()));
    let since = stage.n8n.last_execution();
    // Whatever is JSON arrives as it was.
    let payload = json!({"text": "dos cafés ☕\u{2028}", "sum": 129.90});
    let effects = [mail("once"), json!({"topic": "crm", "payload": payload})];
    let ids = report(&stage, "once", &effects);
    for id in &ids {
        assert_eq!(answers(&settled(&stage, id, "delivered", 1)), [200]);
        let redeliver = format!("/outbox/{id}/redeliver");
        assert_eq!(stage.gate.post(&redeliver, &json!({}))["changed"], true);
        assert_eq!(answers(&settled(&stage, id, "delivered", 2)), [200, 200]);
        let entry = stage.gate.get(&format!("/ledger/{id}"));
        assert_eq!(
            (&entry["status"], &entry["attempt"]),
            (&json!("done"), &json!(1))
        );
        assert_eq!(entry["seen_again"], 1);
    }
    assert_eq!(mails(&stage, "once"), 1);
    let told = told(&stage, &ids[1]);
    assert_eq!(told.len(), 1);
    assert_eq!(
        (&told[0]["text"], &told[0]["sum"]),
        (&payload["text"], &payload["sum"])
    );
    assert_eq!(stage.n8n.executions_since(since), ["success"; 4]);
}

/// The service is killed (-9) after it has sent, and before it knows what was answered: once the lease
/// has run out, it sends again.
#[test]
fn an_effect_whose_sender_dies_is_done_once() {
    let mut stage = stage();
    let secrets = whsec(WEBHOOK_SECRET.as_bytes());
    deliver_to_n8n(&mut stage, &secrets);
    stage.provider.behave("/mails", &json!([{"delay": 3_000}]));
    let ids = report(&stage, "killed", &[mail("killed")]);
    wait_within(PATIENCE, "the mail is sent", || {
        mails(&stage, "killed") == 1
    });
    let database = stage.gate.kill();
    deliver_from(&mut stage, database, &secrets);
    let effect = settled(&stage, &ids[0], "delivered", 2);
    // Of the first try, nobody has noted an answer.
    assert_eq!((answers(&effect), &effect["tried"]), (vec![200], &json!(2)));
    assert_eq!(mails(&stage, "killed"), 1);
}

#[test]
fn of_tries_at_once_one_does_the_work() {
    let stage = stage();
    stage.provider.behave("/mails", &json!([{"delay": 2_000}]));
    let delivery = Delivery::of_mail("msg_at_once", "at-once");
    let senders: Vec<_> = (0..5)
        .map(|_| {
            let (delivery, client) = (delivery.clone(), stage.n8n.client());
            thread::spawn(move || delivery.send(&client))
        })
        .collect();
    let replies = senders.into_iter().map(|sender| sender.join().unwrap());
    let (done, later): (Vec<_>, Vec<_>) = replies.partition(|reply| reply.status == 200);
    assert!(!done.is_empty());
    assert!(!later.is_empty());
    for reply in later {
        assert_eq!(
            (reply.status, &reply.body["status"]),
            (409, &json!("pending"))
        );
        // So that the outbox comes again once it is known.
        assert_eq!(reply.headers["retry-after"], "30");
    }
    assert_eq!(delivery.send(&stage.n8n.client()).ok()["status"], "done");
    assert_eq!(mails(&stage, "at-once"), 1);
}

#[test]
fn what_is_not_genuine_is_refused_and_nothing_is_claimed() {
    let stage = stage();
    let now = Utc::now().timestamp();
    let secret = WEBHOOK_SECRET.as_bytes();
    let genuine = Delivery::of_mail("msg_forged", "forged");
    let signed_at = |timestamp| Delivery::signed("msg_forged", timestamp, &genuine.body, secret);
    // Where the id may hold a dot, what is signed can be read in another way.
    let shifted = Delivery {
        id: format!("msg_forged.{now}"),
        timestamp: now.to_string(),
        body: "5".into(),
        ..Delivery::signed("msg_forged", now, &format!("{now}.5"), secret)
    };
    let with = |change: fn(&mut Delivery)| {
        let mut delivery = genuine.clone();
        change(&mut delivery);
        delivery
    };
    for (name, delivery) in [
        (
            "another secret",
            Delivery::signed("msg_forged", now, &genuine.body, &BYTES),
        ),
        ("another id", with(|delivery| delivery.id.push('1'))),
        (
            "another time",
            with(|delivery| delivery.timestamp.push('1')),
        ),
        ("another body", with(|delivery| delivery.body.push(' '))),
        ("no body", with(|delivery| delivery.body.clear())),
        ("no signature", with(|delivery| delivery.signature.clear())),
        (
            "another scheme",
            with(|delivery| delivery.signature.replace_range(..2, "v2")),
        ),
        (
            "a part of it",
            with(|delivery| delivery.signature.truncate(20)),
        ),
        ("an old one", signed_at(now - 320)),
        ("one of the future", signed_at(now + 320)),
        ("a dot in the id", shifted),
    ] {
        let reply = delivery.send(&stage.n8n.client());
        assert_eq!(
            (reply.status, &reply.body["status"]),
            (401, &json!("refused")),
            "{name}"
        );
    }
    let unsigned = stage.n8n.fire("effects", &mail("forged")["payload"]);
    assert_eq!(unsigned.status, 401);
    assert!(stage.gate.entries("").is_empty());
    assert_eq!(mails(&stage, "forged"), 0);
    // What differs is what was forged.
    genuine.send(&stage.n8n.client()).ok();
    assert_eq!(mails(&stage, "forged"), 1);
}

/// While secrets are replaced, each delivery is signed with both, in either order.
#[test]
fn one_of_two_signatures_is_enough() {
    let mut stage = stage();
    let (ours, other) = (whsec(WEBHOOK_SECRET.as_bytes()), whsec(&BYTES));
    for (order, secrets) in [
        ("rotated-1", format!("{other},{ours}")),
        ("rotated-2", format!("{ours},{other}")),
    ] {
        deliver_to_n8n(&mut stage, &secrets);
        let ids = report(&stage, order, &[mail(order)]);
        settled(&stage, &ids[0], "delivered", 1);
        assert_eq!(mails(&stage, order), 1);
    }
}

/// The credential's field takes text, and an expression, which may give bytes.
#[test]
fn a_secret_of_any_bytes_is_given_by_an_expression() {
    let stage = stage();
    let hex: String = BYTES.iter().map(|byte| format!("{byte:02x}")).collect();
    let expression =
        format!("={{{{ new Uint8Array('{hex}'.match(/../g).map(byte => parseInt(byte, 16))) }}}}");
    let body = mail("bytes")["payload"].to_string();
    let now = Utc::now().timestamp();
    import_each(&stage.n8n, &[webhook_secret(&expression)]);
    let client = stage.n8n.client();
    let [taken, refused] = [&BYTES[..], WEBHOOK_SECRET.as_bytes()]
        .map(|secret| Delivery::signed("msg_bytes", now, &body, secret).send(&client));
    import_each(&stage.n8n, &[webhook_secret(WEBHOOK_SECRET)]);
    assert_eq!((taken.status, refused.status), (200, 401));
    assert_eq!(mails(&stage, "bytes"), 1);
}

/// Nothing has happened, or a repeat does no harm: the next delivery does it.
#[test]
fn work_that_fails_is_done_by_a_later_delivery() {
    let mut stage = stage();
    deliver_to_n8n(&mut stage, &whsec(WEBHOOK_SECRET.as_bytes()));
    let fails_with = |status: u16| json!([{"charge": false, "status": status}]);
    stage.provider.behave("/mails", &fails_with(429));
    stage.provider.behave("/events", &fails_with(500));
    let effects = [mail("failed"), json!({"topic": "crm", "payload": {}})];
    let ids = report(&stage, "failed", &effects);
    for (id, status) in ids.iter().zip(["429", "500"]) {
        let effect = settled(&stage, id, "delivered", 2);
        assert_eq!(answers(&effect), [502, 200]);
        let entry = stage.gate.get(&format!("/ledger/{id}"));
        assert_eq!(
            (&entry["status"], &entry["attempt"]),
            (&json!("done"), &json!(2))
        );
        let history = entry["history"].to_string();
        assert!(history.contains(status), "{history}");
    }
    assert_eq!(mails(&stage, "failed"), 1);
    assert_eq!(told(&stage, &ids[1]).len(), 1);
}

/// A mail that may have been sent is not sent again: somebody has to look.
#[test]
fn a_mail_that_may_have_been_sent_is_left_pending() {
    let mut stage = stage();
    deliver_to_n8n(&mut stage, &whsec(WEBHOOK_SECRET.as_bytes()));
    stage.provider.behave("/mails", &json!([{"status": 500}]));
    let ids = report(&stage, "uncertain", &[mail("uncertain")]);
    let effect = settled(&stage, &ids[0], "pending", 2);
    wait_within(PATIENCE, "it was tried again", || {
        answers(&stage.gate.get(&format!("/outbox/{}", ids[0]))) == [502, 409]
    });
    assert_eq!(effect["payload"]["order"], "uncertain");
    let pending = stage.gate.listed("pending");
    assert_eq!(pending.into_iter().collect::<Vec<_>>(), ["mail uncertain"]);
    assert_eq!(mails(&stage, "uncertain"), 1);
}

/// It is not swallowed: once there is a branch for it, it can be delivered again.
#[test]
fn an_unknown_topic_is_told_and_becomes_dead() {
    let mut stage = stage();
    deliver_to_n8n(&mut stage, &whsec(WEBHOOK_SECRET.as_bytes()));
    let ids = report(
        &stage,
        "unknown",
        &[json!({"topic": "fax", "payload": null})],
    );
    let effect = settled(&stage, &ids[0], "dead", 4);
    assert_eq!(answers(&effect), [502; 4]);
    let entry = stage.gate.get(&format!("/ledger/{}", ids[0]));
    assert_eq!(
        (&entry["status"], &entry["attempt"], &entry["reason"]),
        (
            &json!("failed"),
            &json!(4),
            &json!("no branch for this topic")
        )
    );
}
