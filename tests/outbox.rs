//! Effects: stored with the outcome or not at all, and delivered at least once.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use chrono::TimeDelta;
use dedup_gate::domain::effect::{Delivery, Topics};
use dedup_gate::store::Store;
use dedup_gate::store::outbox::{Lease, LeasedEffect, Settled, Try, Undelivered};
use dedup_gate::store::postgres::PostgresStore;
use serde_json::{Value, json};

use super::helpers::pgbouncer::PgBouncer;
use super::helpers::postgres::Postgres;
use super::helpers::receiver::{Answer, Receiver};
use super::helpers::service::run;
use super::helpers::{
    Backend, Database, Reply, Service, on_both, on_both_with, wait_until, wait_within,
};

/// Runs a check against both stores, each with a receiver of its own that all topics go to.
fn with_receiver(settings: &[(&str, &str)], check: impl Fn(&Service, &Receiver)) {
    for backend in Backend::ALL {
        let receiver = Receiver::start();
        let service = start(&Arc::new(Database::new(backend)), &receiver, settings);
        check(&service, &receiver);
    }
}

/// A replica whose topics all go to this receiver.
fn start(database: &Arc<Database>, receiver: &Receiver, settings: &[(&str, &str)]) -> Service {
    let routes = format!("*={}", receiver.url("/hook"));
    let settings = [settings, &[("OUTBOX_ROUTES", routes.as_str())]].concat();
    Service::start_beside(Arc::clone(database), &settings)
}

/// Reports that the work of a new key is done.
fn done(service: &Service, key: &str, effects: Value) -> Reply {
    service.pending_key(key, "a", 60);
    report(service, key, effects)
}

fn report(service: &Service, key: &str, effects: Value) -> Reply {
    service.done(json!({"idempotency_key": key, "attempt": 1, "effects": effects}))
}

fn effect(topic: &str, payload: impl Into<Value>) -> Value {
    json!({"topic": topic, "payload": payload.into()})
}

/// The ids of a key's effects, as its history has them.
fn ids(service: &Service, key: &str) -> Vec<String> {
    let entry = service.entry(key);
    let history = entry["history"].as_array().unwrap();
    let events = history.iter().filter(|event| event["event"] == "effects");
    let ids = events.flat_map(|event| event["detail"]["ids"].as_array().unwrap());
    ids.map(|id| id.as_str().unwrap().to_owned()).collect()
}

fn stands(service: &Service, id: &str) -> Value {
    service.get(&format!("/outbox/{id}")).ok()
}

fn wait_for_status(service: &Service, id: &str, status: &str) -> Value {
    let mut found = Value::Null;
    wait_until(&format!("{id} is {status}"), || {
        found = stands(service, id);
        found["status"] == status
    });
    found
}

#[test]
fn they_are_delivered_as_they_were_stored() {
    let secrets = [(
        "OUTBOX_SECRETS",
        "whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA,whsec_BBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBB",
    )];
    with_receiver(&secrets, |service, receiver| {
        let payload =
            json!({"z": 1, "a": [1.5, null, "ñ\u{2028}\n"], "n": 9_007_199_254_740_993_u64});
        let reply = done(
            service,
            "orden/ñ 1%",
            json!([{"topic": "mail.sent", "payload": payload}, {"topic": "crm", "payload": null}]),
        );
        assert_eq!(reply.ok()["changed"], true);
        let ids = ids(service, "orden/ñ 1%");
        assert_eq!(ids.len(), 2);
        let received = receiver.wait_for(2);
        assert_eq!(received[0].id(), ids[0]);
        assert_eq!(
            received[0].text(),
            "{\"z\":1,\"a\":[1.5,null,\"ñ\u{2028}\\n\"],\"n\":9007199254740993}"
        );
        assert_eq!(received[1].text(), "null");
        let headers = &received[0].headers;
        assert_eq!(received[0].path, "/hook");
        assert_eq!(headers["content-type"], "application/json");
        assert_eq!(headers["x-dedup-gate-topic"], "mail.sent");
        assert_eq!(headers["x-dedup-gate-key"], "orden/%C3%B1%201%25");
        assert_eq!(headers["webhook-signature"].matches("v1,").count(), 2);
        let found = wait_for_status(service, &ids[0], "delivered");
        assert_eq!(found["payload"], payload);
        assert_eq!(found["idempotency_key"], "orden/ñ 1%");
        assert_eq!(found["tried"], 1);
        assert_eq!(found["tries"][0]["status_code"], 200);
        assert_eq!(found["tries"][0]["error"], Value::Null);
        assert_eq!(found["next_try_at"], Value::Null);
    });
}

#[test]
fn a_repeated_report_stores_nothing_twice() {
    with_receiver(&[], |service, receiver| {
        let effects = json!([effect("mail", 1)]);
        done(service, "k", effects.clone()).ok();
        receiver.wait_for(1);
        for _ in 0..3 {
            assert_eq!(report(service, "k", effects.clone()).ok()["changed"], false);
        }
        let named = json!({"idempotency_key": "k", "attempt": 1, "external_id": "ch_1", "effects": effects});
        assert_eq!(service.done(named).ok()["changed"], true);
        // Another key's, behind which a second one of this key would have come.
        done(service, "last", json!([effect("mail", 2)])).ok();
        let bodies = receiver.wait_for(2);
        let bodies: Vec<&str> = bodies.iter().map(|received| received.text()).collect();
        assert_eq!(bodies, ["1", "2"]);
        assert_eq!(ids(service, "k").len(), 1);
    });
}

/// A hundred at once, of which a lane makes few batches.
#[test]
fn repeats_at_once_store_nothing_twice() {
    with_receiver(&[], |service, receiver| {
        service.pending_key("k", "a", 60);
        std::thread::scope(|scope| {
            for _ in 0..100 {
                scope.spawn(|| report(service, "k", json!([effect("mail", 1)])).ok());
            }
        });
        let id = ids(service, "k");
        assert_eq!(id.len(), 1);
        wait_for_status(service, &id[0], "delivered");
        assert_eq!(
            service.get("/outbox").ok()["effects"]
                .as_array()
                .unwrap()
                .len(),
            1
        );
        assert_eq!(receiver.received().len(), 1);
    });
}

#[test]
fn failed_has_effects_of_its_own() {
    with_receiver(&[], |service, receiver| {
        service.pending_key("k", "a", 60);
        let failed = json!({"idempotency_key": "k", "attempt": 1, "effects": [effect("sorry", "card declined")]});
        service.failed(failed.clone()).ok();
        service.failed(failed).ok();
        report(service, "k", json!([effect("thanks", "paid")])).ok();
        let topics: Vec<String> = receiver
            .wait_for(2)
            .iter()
            .map(|received| received.headers["x-dedup-gate-topic"].clone())
            .collect();
        assert_eq!(topics, ["sorry", "thanks"]);
        assert_eq!(ids(service, "k").len(), 2);
    });
}

/// A review may have said before the run that the work is done.
#[test]
fn the_first_effects_of_a_known_outcome_are_stored() {
    with_receiver(&[], |service, receiver| {
        service.pending_key("k", "a", 60);
        let review = json!({"idempotency_key": "k", "attempt": 1, "decision": "done", "external_id": "ch_1",
            "reviewer": "ana", "reason": "asked the bank"});
        service.post("/ledger/review", &review).ok();
        let late = json!({"idempotency_key": "k", "attempt": 1, "external_id": "ch_1", "effects": [effect("mail", 1)]});
        assert_eq!(service.done(late).ok()["changed"], true);
        receiver.wait_for(1);
    });
}

#[test]
fn what_is_refused_stores_nothing() {
    with_receiver(&[], |service, receiver| {
        done(service, "k", json!([])).ok();
        let other = json!({"idempotency_key": "k", "attempt": 1, "external_id": "x", "effects": [effect("mail", 1)]});
        let ahead = json!({"idempotency_key": "k", "attempt": 9, "effects": [effect("mail", 2)]});
        let failed = json!({"idempotency_key": "k", "attempt": 1, "effects": [effect("mail", 3)]});
        // It fills in the id that the first report lacked; the second one is another effect.
        let first = json!({"idempotency_key": "k", "attempt": 1, "external_id": "y"});
        service.done(first).ok();
        assert_eq!(service.done(other).problem(409), "already_done");
        assert_eq!(service.done(ahead).problem(422), "invalid_request");
        assert_eq!(service.failed(failed).problem(409), "already_done");
        let unknown = json!({"idempotency_key": "unknown", "effects": [effect("mail", 4)]});
        assert_eq!(service.done(unknown).problem(404), "unknown_key");
        assert_eq!(
            service.get("/outbox").ok(),
            json!({"effects": [], "next_cursor": null})
        );
        assert!(receiver.received().is_empty());
    });
}

#[test]
fn a_topic_without_a_route_is_refused_at_once() {
    for backend in Backend::ALL {
        let receiver = Receiver::start();
        let routes = format!("mail={}", receiver.url("/"));
        let service = Service::start_on(Database::new(backend), &[("OUTBOX_ROUTES", &routes)]);
        let reply = done(&service, "k", json!([effect("mail", 1), effect("sms", 2)]));
        assert_eq!(reply.problem(422), "invalid_request");
        assert_eq!(reply.pointers(), ["/effects/1/topic"]);
        assert_eq!(service.entry("k")["status"], "pending");
        let failed = json!({"idempotency_key": "k", "attempt": 1, "effects": [effect("sms", 2)]});
        assert_eq!(service.failed(failed).pointers(), ["/effects/0/topic"]);
        assert_eq!(service.entry("k")["status"], "pending");
        report(&service, "k", json!([effect("mail", 1)])).ok();
        receiver.wait_for(1);
    }
}

#[test]
fn without_routes_there_are_no_effects() {
    on_both(|service| {
        let reply = done(service, "k", json!([effect("mail", 1)]));
        assert_eq!(reply.pointers(), ["/effects/0/topic"]);
        report(service, "k", json!([])).ok();
        assert_eq!(service.entry("k")["status"], "done");
    });
}

#[test]
fn bad_effects_are_named() {
    let routes = [("OUTBOX_ROUTES", "*=http://127.0.0.1:9/")];
    on_both_with(&routes, |service| {
        service.pending_key("k", "a", 60);
        let too_many: Vec<Value> = (0..21).map(|number| effect("mail", number)).collect();
        for (effects, pointer) in [
            (json!(too_many), "/effects"),
            (json!({}), "/effects"),
            (json!([7]), "/effects/0"),
            (json!([{"topic": "mail"}]), "/effects/0/payload"),
            (json!([{"payload": 1}]), "/effects/0/topic"),
            (
                json!([effect("mail", 1), effect("", 1)]),
                "/effects/1/topic",
            ),
            (json!([effect("*", 1)]), "/effects/0/topic"),
            (json!([effect("a b", 1)]), "/effects/0/topic"),
            (json!([effect(&"a".repeat(129), 1)]), "/effects/0/topic"),
            (
                json!([{"topic": "mail", "payload": 1, "url": "http://x/"}]),
                "/effects/0/url",
            ),
            (
                json!([{"topic": "mail", "payload": 1, "deliver_after": "soon"}]),
                "/effects/0/deliver_after",
            ),
            (
                json!([{"topic": "mail", "payload": 1, "deliver_after": -1}]),
                "/effects/0/deliver_after",
            ),
            (
                json!([{"topic": "mail", "payload": 1, "deliver_after": 1.5}]),
                "/effects/0/deliver_after",
            ),
            (
                json!([{"topic": "mail", "payload": 1, "deliver_after": 31_536_001}]),
                "/effects/0/deliver_after",
            ),
            (
                json!([{"topic": "mail", "payload": 1, "deliver_after": true}]),
                "/effects/0/deliver_after",
            ),
            (
                json!([{"topic": "mail", "payload": 1, "deliver_after": "2026-11-30T09:12:00"}]),
                "/effects/0/deliver_after",
            ),
        ] {
            let reply = report(service, "k", effects.clone());
            assert_eq!(reply.problem(422), "invalid_request", "{effects}");
            assert_eq!(reply.pointers(), [pointer], "{effects}: {}", reply.text);
        }
        assert_eq!(service.entry("k")["status"], "pending");
        let most: Vec<Value> = (0..20).map(|number| effect("mail", number)).collect();
        report(service, "k", json!(most)).ok();
        assert_eq!(ids(service, "k").len(), 20);
    });
}

#[test]
fn one_that_is_put_off_waits() {
    with_receiver(&[], |service, receiver| {
        let later = json!([
            {"topic": "mail", "payload": "later", "deliver_after": 2},
            {"topic": "mail", "payload": "by then", "deliver_after": "2000-01-01T00:00:00+01:00"},
            {"topic": "mail", "payload": "next year", "deliver_after": "2999-01-01T00:00:00Z"},
        ]);
        done(service, "k", later).ok();
        let received = receiver.wait_for(2);
        let bodies: Vec<&str> = received.iter().map(|received| received.text()).collect();
        assert_eq!(bodies, ["\"by then\"", "\"later\""]);
        let ids = ids(service, "k");
        let found = wait_for_status(service, &ids[0], "delivered");
        let at =
            |text: &Value| chrono::DateTime::parse_from_rfc3339(text.as_str().unwrap()).unwrap();
        let waited = at(&found["tries"][0]["at"]) - at(&found["created_at"]);
        assert!(waited >= chrono::TimeDelta::seconds(2), "{found}");
        let last = stands(service, &ids[2]);
        assert_eq!(last["next_try_at"], "2999-01-01T00:00:00.000Z");
        assert_eq!(last["tried"], 0);
    });
}

#[test]
fn a_failed_try_is_repeated_under_the_same_id() {
    with_receiver(&[("OUTBOX_RETRY_WAITS", "1,1,1,1")], |service, receiver| {
        let mut answers = [
            Answer::Status(500),
            Answer::Drop,
            Answer::With(302, "location", "http://127.0.0.1:9/".into()),
            Answer::With(429, "retry-after", "3".into()),
        ]
        .into_iter();
        receiver.behave(move |_| answers.next().unwrap_or(Answer::Status(204)));
        done(service, "k", json!([effect("mail", 1)])).ok();
        let received = receiver.wait_for(5);
        let names: BTreeSet<&str> = received.iter().map(|received| received.id()).collect();
        assert_eq!(names.len(), 1);
        let found = wait_for_status(service, received[0].id(), "delivered");
        let codes: Vec<&Value> = (0..5)
            .map(|index| &found["tries"][index]["status_code"])
            .collect();
        assert_eq!(
            codes,
            [
                &json!(500),
                &Value::Null,
                &json!(302),
                &json!(429),
                &json!(204)
            ]
        );
        assert_eq!(found["tried"], 5);
        assert!(
            (0..4).all(|index| found["tries"][index]["error"].is_string()),
            "{found}"
        );
        assert!(received[4].at - received[3].at >= Duration::from_secs(3));
    });
}

#[test]
fn one_that_nobody_takes_is_dead_until_a_person_wants_it() {
    with_receiver(&[("OUTBOX_RETRY_WAITS", "0,0")], |service, receiver| {
        receiver.behave(|_| Answer::Status(500));
        done(service, "k", json!([effect("mail", 1)])).ok();
        let id = ids(service, "k").remove(0);
        let found = wait_for_status(service, &id, "dead");
        assert_eq!(found["tried"], 3);
        assert_eq!(receiver.received().len(), 3);
        let dead = service.get("/outbox?status=dead&topic=mail").ok();
        assert_eq!(dead["effects"][0]["id"], *id);
        let metrics = service.get("/metrics").text;
        for line in [
            "dedup_gate_outbox_tries_total{outcome=\"failed\"} 2",
            "dedup_gate_outbox_tries_total{outcome=\"dead\"} 1",
            "dedup_gate_outbox_dead 1",
            "dedup_gate_outbox_waiting 0",
        ] {
            assert!(metrics.lines().any(|found| found == line), "{line}");
        }

        let mut answers = [Answer::Status(503), Answer::Status(503)].into_iter();
        receiver.behave(move |_| answers.next().unwrap_or(Answer::Status(200)));
        let redelivered = service
            .post(&format!("/outbox/{id}/redeliver"), &json!({}))
            .ok();
        assert_eq!(redelivered["changed"], true);
        let found = wait_for_status(service, &id, "delivered");
        assert_eq!(found["tried"], 6);
        assert!(
            receiver
                .received()
                .iter()
                .all(|received| received.id() == id)
        );
        // One that was delivered may be wanted again, too.
        service
            .post(&format!("/outbox/{id}/redeliver"), &json!({}))
            .ok();
        receiver.wait_for(7);
        wait_for_status(service, &id, "delivered");
    });
}

#[test]
fn a_receiver_that_is_gone_is_asked_once() {
    with_receiver(&[], |service, receiver| {
        receiver.behave(|_| Answer::Status(410));
        done(service, "k", json!([effect("mail", 1)])).ok();
        let id = ids(service, "k").remove(0);
        assert_eq!(wait_for_status(service, &id, "dead")["tried"], 1);
        assert_eq!(receiver.received().len(), 1);
    });
}

#[test]
fn a_key_s_effects_are_delivered_in_order_and_one_that_fails_is_passed() {
    with_receiver(&[("OUTBOX_RETRY_WAITS", "600")], |service, receiver| {
        receiver.behave(|received| match received.text() {
            "3" => Answer::Status(500),
            // So that the next one would be there first, were it sent.
            _ => Answer::Late(Duration::from_millis(50), 200),
        });
        let effects: Vec<Value> = (0..8)
            .map(|number| effect(&format!("t{}", number % 3), number))
            .collect();
        done(service, "k", json!(effects)).ok();
        let received = receiver.wait_for(8);
        let bodies: Vec<&str> = received.iter().map(|received| received.text()).collect();
        assert_eq!(bodies, ["0", "1", "2", "3", "4", "5", "6", "7"]);
        let ids = ids(service, "k");
        wait_for_status(service, &ids[7], "delivered");
        let metrics = service.get("/metrics").text;
        let value = |name: &str| -> f64 {
            let line = metrics
                .lines()
                .find(|line| line.starts_with(&format!("{name} ")));
            line.unwrap().rsplit_once(' ').unwrap().1.parse().unwrap()
        };
        assert_eq!(value("dedup_gate_outbox_waiting"), 1.0);
        assert!(value("dedup_gate_outbox_oldest_waiting_age_seconds") > 0.0);
        assert_eq!(value("dedup_gate_outbox_delivery_seconds_count"), 7.0);
        assert!(value("dedup_gate_outbox_delivery_seconds_sum") > 0.0);
        let failed = stands(service, &ids[3]);
        assert_eq!(
            (&failed["status"], &failed["tried"]),
            (&json!("pending"), &json!(1))
        );
    });
}

/// The one that hangs has more effects than are sent at a time.
#[test]
fn a_receiver_that_hangs_holds_up_no_other_topic() {
    for backend in Backend::ALL {
        let (hanging, healthy) = (Receiver::start(), Receiver::start());
        hanging.behave(|_| Answer::Hang);
        let routes = format!("slow={},*={}", hanging.url("/"), healthy.url("/"));
        let settings = [("OUTBOX_ROUTES", routes.as_str()), ("OUTBOX_TIMEOUT", "60")];
        let service = Service::start_on(Database::new(backend), &settings);
        for number in 0..100 {
            done(
                &service,
                &format!("slow {number}"),
                json!([effect("slow", number)]),
            )
            .ok();
        }
        hanging.wait_for(32);
        for number in 0..40 {
            done(
                &service,
                &format!("k {number}"),
                json!([effect("mail", number)]),
            )
            .ok();
        }
        healthy.wait_for(40);
        assert_eq!(hanging.received().len(), 32);
    }
}

/// Which of two routes an earlier effect of the key takes makes no difference.
#[test]
fn an_effect_waits_for_none_that_nobody_delivers() {
    for backend in Backend::ALL {
        let database = Arc::new(Database::new(backend));
        let receiver = Receiver::start();
        {
            let nobody = Receiver::start();
            nobody.behave(|_| Answer::Status(500));
            let service = start(&database, &nobody, &[("OUTBOX_RETRY_WAITS", "3600")]);
            done(&service, "k", json!([effect("old", 1), effect("mail", 2)])).ok();
            for id in ids(&service, "k") {
                wait_until("its failure is noted", || {
                    stands(&service, &id)["next_try_at"].is_string()
                        && stands(&service, &id)["tried"] == 1
                });
            }
        }
        database.sql("UPDATE run_outbox SET next_at = created_at");
        // A topic that has lost its route.
        let routes = format!("mail={}", receiver.url("/"));
        let service = Service::start_beside(Arc::clone(&database), &[("OUTBOX_ROUTES", &routes)]);
        assert_eq!(receiver.wait_for(1)[0].text(), "2");
        wait_until("it warns", || {
            service.log().contains("names no route for: old")
        });
        let old = service.get("/outbox?topic=old").ok()["effects"][0]["id"].clone();
        let path = format!("/outbox/{}/redeliver", old.as_str().unwrap());
        assert_eq!(service.post(&path, &json!({})).problem(409), "conflict");
        let waiting = service.get("/outbox?status=pending").ok();
        assert!(
            waiting["effects"]
                .as_array()
                .unwrap()
                .iter()
                .any(|effect| effect["topic"] == "old")
        );
    }
}

#[test]
fn a_list_is_read_part_by_part_and_shows_what_it_is_asked_for() {
    with_receiver(&[], |service, receiver| {
        let mut all = Vec::new();
        for number in 0..5 {
            let key = format!("k{number}");
            done(
                service,
                &key,
                json!([effect("mail", number), effect("crm", number)]),
            )
            .ok();
            all.extend(ids(service, &key));
        }
        receiver.wait_for(10);
        all.sort_unstable_by(|a, b| b.cmp(a));
        let mut found = Vec::new();
        let mut cursor = String::new();
        loop {
            let page = service.get(&format!("/outbox?limit=3{cursor}")).ok();
            let effects = page["effects"].as_array().unwrap();
            assert!(effects.len() <= 3);
            assert!(
                effects
                    .iter()
                    .all(|effect| effect.get("payload").is_none() && effect.get("tries").is_none())
            );
            found.extend(
                effects
                    .iter()
                    .map(|effect| effect["id"].as_str().unwrap().to_owned()),
            );
            let Some(next) = page["next_cursor"].as_str() else {
                break;
            };
            cursor = format!("&cursor={next}");
        }
        assert_eq!(found, all);
        wait_until("all are delivered", || {
            service.get("/outbox?status=delivered").ok()["effects"]
                .as_array()
                .unwrap()
                .len()
                == 10
        });
        let of_crm = service.get("/outbox?topic=crm&status=delivered").ok();
        assert_eq!(of_crm["effects"].as_array().unwrap().len(), 5);
        assert_eq!(
            service.get("/outbox?topic=other").ok()["effects"],
            json!([])
        );
        for (query, pointer) in [
            ("status=done", "/status"),
            ("topic=a%20b", "/topic"),
            ("limit=0", "/limit"),
            ("limit=501", "/limit"),
            ("cursor=x", "/cursor"),
            ("cursor=msg_%00", "/cursor"),
            ("order_id=x", "/order_id"),
        ] {
            assert_eq!(
                service.get(&format!("/outbox?{query}")).pointers(),
                [pointer],
                "{query}"
            );
        }
        for id in ["msg_0", "x", "%00", "a%2Fb"] {
            assert_eq!(
                service.get(&format!("/outbox/{id}")).problem(404),
                "not_found"
            );
            let redeliver = service.post(&format!("/outbox/{id}/redeliver"), &json!({}));
            assert_eq!(redeliver.problem(404), "not_found");
        }
    });
}

/// Killed between sending and settling: whoever is left sends it again when its lease has run out.
#[test]
fn what_a_dead_replica_has_sent_is_sent_again_by_another() {
    for backend in Backend::ALL {
        let database = Arc::new(Database::new(backend));
        let receiver = Receiver::start();
        let (reached, has_reached) = mpsc::channel();
        receiver.behave(move |_| {
            let is_first = reached.send(()).is_ok();
            if is_first {
                Answer::Hang
            } else {
                Answer::Status(200)
            }
        });
        let settings = [("OUTBOX_TIMEOUT", "1")];
        let first = start(&database, &receiver, &[("OUTBOX_TIMEOUT", "120")]);
        // The lease is as long as this replica believes; shortened so that the test need not wait for it.
        done(&first, "k", json!([effect("mail", 1)])).ok();
        has_reached.recv().unwrap();
        drop(has_reached);
        first.signal("KILL");
        drop(first);
        let later = match backend {
            Backend::Postgres => "now()",
            Backend::Sqlite => "strftime('%Y-%m-%dT%H:%M:%fZ', 'now')",
        };
        database.sql(&format!("UPDATE run_outbox SET next_at = {later}"));
        let second = start(&database, &receiver, &settings);
        let received = receiver.wait_for(2);
        assert_eq!(received[0].id(), received[1].id());
        let found = wait_for_status(&second, received[0].id(), "delivered");
        // Of the first try nobody knows how it ended.
        assert_eq!(found["tried"], 2);
        assert_eq!(found["tries"].as_array().unwrap().len(), 1);
        assert_eq!(found["tries"][0]["try"], 2);
    }
}

/// A replica that was held up, and whose effect somebody else has delivered by now, changes nothing.
#[test]
fn a_late_settlement_changes_nothing() {
    for backend in Backend::ALL {
        let database = Arc::new(Database::new(backend));
        let receiver = Receiver::start();
        receiver.behave(|_| Answer::Late(Duration::from_secs(2), 500));
        let slow = start(&database, &receiver, &[("OUTBOX_RETRY_WAITS", "600")]);
        done(&slow, "k", json!([effect("mail", 1)])).ok();
        receiver.wait_for(1);
        // Its lease has run out, and another replica has it.
        database.sql("UPDATE run_outbox SET tries = tries + 1");
        wait_until("it notices", || {
            slow.log().contains("settled after their lease")
        });
        let id = ids(&slow, "k").remove(0);
        let found = stands(&slow, &id);
        assert_eq!(found["status"], "pending");
        assert_eq!(found["tries"], json!([]));
        let metrics = slow.get("/metrics").text;
        assert!(
            metrics.contains("dedup_gate_outbox_lost_leases_total 1"),
            "{metrics}"
        );
    }
}

#[test]
fn a_replica_that_ends_settles_what_is_on_its_way() {
    for backend in Backend::ALL {
        let database = Arc::new(Database::new(backend));
        let receiver = Receiver::start();
        receiver.behave(|_| Answer::Late(Duration::from_secs(1), 200));
        let mut service = start(&database, &receiver, &[]);
        done(&service, "k", json!([effect("mail", 1)])).ok();
        let id = ids(&service, "k").remove(0);
        receiver.wait_for(1);
        service.signal("TERM");
        assert!(service.wait().success());
        let next = start(&database, &receiver, &[]);
        assert_eq!(stands(&next, &id)["status"], "delivered");
        assert_eq!(receiver.received().len(), 1);
    }
}

/// One that hangs does not keep the others from being settled before the process has to end.
#[test]
fn a_replica_that_ends_settles_what_has_ended() {
    for backend in Backend::ALL {
        let database = Arc::new(Database::new(backend));
        let receiver = Receiver::start();
        receiver.behave(|received| match received.text() {
            "1" => Answer::Hang,
            _ => Answer::Late(Duration::from_secs(1), 200),
        });
        let mut service = start(&database, &receiver, &[("OUTBOX_TIMEOUT", "120")]);
        done(&service, "hangs", json!([effect("mail", 1)])).ok();
        done(&service, "k", json!([effect("mail", 2)])).ok();
        let id = ids(&service, "k").remove(0);
        receiver.wait_for(2);
        service.signal("TERM");
        assert!(service.wait().success());
        let next = Service::start_beside(Arc::clone(&database), &[]);
        assert_eq!(stands(&next, &id)["status"], "delivered");
    }
}

/// What another replica stores is heard of, although this one has looked just now and would do so again in half
/// a minute only.
#[test]
fn replicas_tell_each_other() {
    let database = Arc::new(Database::new(Backend::Postgres));
    let (first, second) = (Receiver::start(), Receiver::start());
    let storing = start(&database, &first, &[]);
    let listening = start(&database, &second, &[]);
    // The one that stores cannot deliver: all its places are taken.
    first.behave(|_| Answer::Hang);
    second.behave(|_| Answer::Hang);
    for number in 0..64 {
        done(
            &storing,
            &format!("k{number}"),
            json!([effect("mail", number)]),
        )
        .ok();
    }
    wait_within(
        Duration::from_secs(15),
        "both have their hands full",
        || first.received().len() + second.received().len() == 64,
    );
    assert_eq!(second.received().len(), 32);
    drop(listening);
}

#[test]
fn an_effect_is_delivered_once_by_two_replicas() {
    let database = Arc::new(Database::new(Backend::Postgres));
    let receiver = Receiver::start();
    let replicas = [0, 1].map(|_| start(&database, &receiver, &[]));
    for number in 0..200 {
        let effects = json!([effect("mail", number), effect("crm", number)]);
        done(&replicas[number % 2], &format!("k{number}"), effects).ok();
    }
    let received = receiver.wait_for(400);
    let names: BTreeSet<&str> = received.iter().map(|received| received.id()).collect();
    assert_eq!(names.len(), 400);
    wait_until("all are settled", || {
        replicas[0].get("/outbox?status=pending").ok()["effects"] == json!([])
    });
    assert_eq!(receiver.received().len(), 400);
}

#[test]
fn effects_wait_for_a_database_that_is_away() {
    let postgres = Postgres::start(&[]);
    let database = Arc::new(Database::at(postgres.create("outbox")));
    let receiver = Receiver::start();
    let (reached, has_reached) = mpsc::channel();
    receiver.behave(move |_| {
        let _ = reached.send(());
        Answer::Late(Duration::from_secs(1), 200)
    });
    let service = start(&database, &receiver, &[]);
    done(&service, "k", json!([effect("mail", 1)])).ok();
    has_reached.recv().unwrap();
    // Between sending and settling.
    postgres.end("QUIT");
    wait_until("it notices", || {
        service.log().contains("effects wait for the store")
    });
    postgres.start_again();
    let mut id = String::new();
    wait_until("the service answers", || {
        let reply = service.get("/outbox?status=delivered");
        let found = reply.status == 200 && reply.body["effects"][0]["id"].is_string();
        if found {
            id = reply.body["effects"][0]["id"].as_str().unwrap().to_owned();
        }
        found
    });
    assert_eq!(stands(&service, &id)["tried"], 1);
    // And it hears again of what is stored.
    done(&service, "l", json!([effect("mail", 2)])).ok();
    receiver.wait_for(2);
}

#[test]
fn effects_are_delivered_behind_a_pooler() {
    let postgres = Postgres::start(&[]);
    postgres.create("outbox");
    let pooler = PgBouncer::start(&postgres, "transaction", 3, "");
    let database = Arc::new(Database::at(pooler.url("outbox")));
    let receiver = Receiver::start();
    let service = start(&database, &receiver, &[]);
    for number in 0..20 {
        done(
            &service,
            &format!("k{number}"),
            json!([effect("mail", number)]),
        )
        .ok();
    }
    receiver.wait_for(20);
}

/// Each of those that wait looks for those before it, of which many were delivered.
#[test]
fn a_key_with_a_long_history_holds_up_nobody() {
    with_receiver(&[], |service, receiver| {
        let (first, numbers) = match service.database.backend {
            Backend::Postgres => ("now()", "generate_series(1, 8000) AS n (n)"),
            Backend::Sqlite => (
                "'2026-01-01T00:00:00.000Z'",
                "(WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 8000) SELECT n FROM n)",
            ),
        };
        service.database.sql(&format!(
            "INSERT INTO run_outbox (idempotency_key, seq, id, topic, payload, status, created_at, due_at, next_at, settled_at) \
             SELECT 'hot', n, 'msg_hot' || n, 'mail', n, CASE WHEN n <= 5000 THEN 'delivered' ELSE 'pending' END, \
                 {first}, {first}, {first}, CASE WHEN n <= 5000 THEN {first} END FROM {numbers}"
        ));
        done(service, "k", json!([effect("mail", "prompt")])).ok();
        wait_until("both keys are delivered", || {
            let received = receiver.received();
            let has = |text: &str| received.iter().any(|received| received.text() == text);
            has("\"prompt\"") && has("5003")
        });
        let bodies: Vec<u32> = receiver
            .received()
            .iter()
            .filter_map(|received| received.text().parse().ok())
            .collect();
        assert!(
            bodies.iter().copied().eq((5001..).take(bodies.len())),
            "{bodies:?}"
        );
    });
}

/// A replica hears that what its effects have waited for is settled by another; by itself it would look again in half a
/// minute.
#[test]
fn replicas_tell_each_other_whom_others_wait_for() {
    let database = Arc::new(Database::new(Backend::Postgres));
    let receiver = Receiver::start();
    receiver.behave(|received| match received.text() {
        "1" => Answer::Late(Duration::from_secs(4), 200),
        _ => Answer::Status(200),
    });
    let mut first = start(&database, &receiver, &[]);
    done(&first, "k", json!([effect("mail", 1), effect("mail", 2)])).ok();
    receiver.wait_for(1);
    let second = start(&database, &receiver, &[]);
    let id = ids(&second, "k").remove(1);
    // It settles what is on its way, and takes nothing more.
    first.signal("TERM");
    assert!(first.wait().success());
    wait_within(Duration::from_secs(15), "the other one goes on", || {
        stands(&second, &id)["status"] == "delivered"
    });
}

#[test]
fn what_was_delivered_is_removed_after_its_time() {
    with_receiver(&[("OUTBOX_RETRY_WAITS", "600")], |service, receiver| {
        receiver.behave(
            |received| match received.headers["x-dedup-gate-topic"].as_str() {
                "gone" => Answer::Status(410),
                "down" => Answer::Status(500),
                _ => Answer::Status(200),
            },
        );
        let effects = json!([
            effect("gone", 1),
            effect("down", 2),
            effect("mail", 3),
            effect("mail", 4)
        ]);
        done(service, "k", effects).ok();
        let ids = ids(service, "k");
        wait_for_status(service, &ids[3], "delivered");
        let database = &service.database;
        let purge = || {
            let output = run(database, &["purge"], &[("RETENTION", "86400")]);
            String::from_utf8(output.stdout).unwrap()
        };
        assert_eq!(purge(), "removed 0 keys\n");
        let old = match database.backend {
            Backend::Postgres => "settled_at - interval '2 days'",
            Backend::Sqlite => "strftime('%Y-%m-%dT%H:%M:%fZ', settled_at, '-2 days')",
        };
        database.sql(&format!(
            "UPDATE run_outbox SET settled_at = {old} WHERE settled_at IS NOT NULL AND topic <> 'x'"
        ));
        assert_eq!(purge(), "removed 0 keys, and 2 delivered effects\n");
        let left = service.get("/outbox").ok();
        let left: BTreeSet<&str> = left["effects"]
            .as_array()
            .unwrap()
            .iter()
            .map(|effect| effect["topic"].as_str().unwrap())
            .collect();
        assert_eq!(left, BTreeSet::from(["down", "gone"]));
    });
}

/// What the planner knows of the table is from before: then nothing was pending.
#[test]
fn a_lease_reads_little_of_a_large_backlog() {
    let database = Database::new(Backend::Postgres);
    let window = TimeDelta::seconds(60);
    let store = PostgresStore::open(&database.url, None, 2, window).unwrap();
    let fill = |name: &str, status: &str, settled_at: &str| {
        database.sql(&format!(
            "INSERT INTO run_outbox (idempotency_key, seq, id, topic, payload, status, created_at, due_at, next_at, settled_at) \
             SELECT '{name}' || n, 1, 'msg_{name}' || n, 'mail', '{{}}', '{status}', now(), now(), now(), {settled_at} \
             FROM generate_series(1, 20000) n"
        ));
    };
    fill("old", "delivered", "now()");
    database.sql("VACUUM ANALYZE run_outbox");
    fill("new", "pending", "NULL");
    let rows_read = || -> u64 {
        let sum = "SELECT seq_tup_read + coalesce(idx_tup_fetch, 0) FROM pg_stat_user_tables WHERE relname = 'run_outbox'";
        database.sql(sum).parse().unwrap()
    };
    let before = rows_read();
    let lease = Lease {
        topics: Topics::AllBut(Vec::new()),
        routed: Topics::AllBut(Vec::new()),
        limit: 32,
        seconds: 60,
    };
    let leased = store.lease_effects(&lease).unwrap();
    assert_eq!(leased.effects.len(), 32);
    let settled: Vec<Settled> = leased.effects.into_iter().map(delivered).collect();
    assert_eq!(store.settle_effects(&settled).unwrap().held, 32);
    store.undelivered().unwrap();
    // What a connection has read is told when it ends, at the latest.
    drop(store);
    let others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
    wait_until("its connections have ended", || database.sql(others) == "0");
    let read = rows_read() - before;
    let counted = u64::from(Undelivered::BOUND);
    assert!((counted..counted + 1000).contains(&read), "{read} rows");
}

fn delivered(effect: LeasedEffect) -> Settled {
    Settled {
        attempt: Try {
            number: effect.lease.tries,
            at: effect.leased_at,
            status_code: Some(200),
            error: None,
            milliseconds: 1,
        },
        lease: effect.lease,
        delivery: Delivery::Delivered,
        wait: TimeDelta::zero(),
        failures: 0,
    }
}
