//! Claims, and reports, that are decided together know nothing of each other.

use std::sync::{Arc, Barrier};

use chrono::TimeDelta;
use dedup_gate::domain::act::Act;
use dedup_gate::domain::claim::{Claim, Door, OnStale};
use dedup_gate::domain::ledger::{Happening, Holder, Outcome, Phase, Report};
use dedup_gate::domain::text::IdempotencyKey;
use dedup_gate::store::postgres::PostgresStore;
use dedup_gate::store::sqlite::SqliteStore;
use dedup_gate::store::{Acted, Entry, Store};
use serde_json::{Value, json};

use super::helpers::lossy::Lossy;
use super::helpers::postgres::{Postgres, SHARED};
use super::helpers::raw::Connection;
use super::helpers::service::Client;
use super::helpers::transaction::OpenTransaction;
use super::helpers::{Backend, Database, Reply, Service, on_both, wait_until};

fn claim_at_once(service: &Client, claims: &[Value]) -> Vec<Reply> {
    post_at_once(service, "/claim", claims)
}

/// Sends all bodies at the same time, each on a connection of its own.
fn post_at_once(service: &Client, path: &str, bodies: &[Value]) -> Vec<Reply> {
    let start = Barrier::new(bodies.len());
    std::thread::scope(|scope| {
        let senders: Vec<_> = bodies
            .iter()
            .map(|body| {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    service.post(path, body)
                })
            })
            .collect();
        senders
            .into_iter()
            .map(|sender| sender.join().unwrap())
            .collect()
    })
}

#[test]
fn a_reused_key_refuses_nobody_elses_claim() {
    on_both(|service| {
        service.claim(json!({"idempotency_key": "reused", "payload": 1}));
        for round in 0..10 {
            let claims: Vec<Value> = (0..32)
                .map(|number| match number % 2 {
                    0 => json!({"idempotency_key": "reused", "payload": 2}),
                    _ => json!({"idempotency_key": format!("{round}-{number}"), "claimant": "a"}),
                })
                .collect();
            for (number, reply) in claim_at_once(service, &claims).into_iter().enumerate() {
                if number % 2 == 0 {
                    assert_eq!(reply.problem(422), "key_reused");
                } else {
                    assert_eq!(reply.ok()["claimed"], true);
                }
            }
        }
        assert_eq!(service.entry("reused")["seen_again"], 0);
    });
}

/// The same claimant sends its claim again while the first one is on its way, and opens the entry
/// with a third.
#[test]
fn a_claimant_that_repeats_itself_at_once_hears_the_same() {
    on_both(|service| {
        for round in 0..20 {
            let key = format!("repeated-{round}");
            let claim = json!({"idempotency_key": key, "claimant": "a"});
            let opening = json!({"idempotency_key": key, "claimant": "a", "pending": true});
            let other = json!({"idempotency_key": key, "claimant": "b"});
            let claims: Vec<Value> = [[claim, opening].as_slice(), &vec![other; 6]].concat();
            let claimed: Vec<bool> = claim_at_once(service, &claims)
                .into_iter()
                .map(|reply| reply.ok()["claimed"].as_bool().unwrap())
                .collect();
            // Whoever came first; and the one claimant of both hears the same twice.
            assert_eq!(claimed[0], claimed[1], "{claimed:?}");
            let entry = service.entry(&key);
            assert_eq!(entry["attempt"], 1);
            assert_eq!(
                entry["status"],
                if claimed[0] { "pending" } else { "claimed" }
            );
            assert_eq!(entry["claimant"], if claimed[0] { "a" } else { "b" });
        }
    });
}

/// Somebody holds one key locked: the claims that happen to be decided with it are not held up.
#[test]
fn a_locked_key_holds_up_nobody_elses_claim() {
    let service = Service::start(Backend::Postgres);
    let transaction = OpenTransaction::hold(&service, "held");
    let key = |number| match number {
        7 => "held".to_owned(),
        _ => format!("free-{number}"),
    };
    let claims: Vec<Value> = (0..32)
        .map(|number| json!({"idempotency_key": key(number), "claimant": "a"}))
        .collect();
    for (number, reply) in claim_at_once(&service, &claims).into_iter().enumerate() {
        if number == 7 {
            assert_eq!(reply.problem(503), "store_unavailable");
        } else {
            assert_eq!(reply.ok()["claimed"], true);
        }
    }
    transaction.release();
    wait_until("the key is free", || {
        service.post("/claim", &claims[7]).status == 200
    });
}

#[test]
fn a_locked_key_holds_up_nobody_elses_report() {
    let service = Service::start(Backend::Postgres);
    let reports: Vec<Value> = (0..32)
        .map(|number| json!({"idempotency_key": format!("k-{number}"), "attempt": 1, "external_id": "ch"}))
        .collect();
    for report in &reports {
        let key = &report["idempotency_key"];
        service.claim(json!({"idempotency_key": key, "claimant": "a", "pending": true}));
    }
    let transaction = OpenTransaction::lock(&service, "k-7");
    let replies = post_at_once(&service, "/ledger/done", &reports);
    for (number, reply) in replies.into_iter().enumerate() {
        if number == 7 {
            assert_eq!(reply.problem(503), "store_unavailable");
        } else {
            assert_eq!(reply.ok()["changed"], true);
        }
    }
    transaction.release();
    wait_until("the key is free", || {
        service.post("/ledger/done", &reports[7]).status == 200
    });
    assert_eq!(service.entry("k-7")["status"], "done");
}

#[test]
fn a_full_lane_says_so_at_once() {
    let postgres = Postgres::start(&[]);
    let settings = [("CLAIM_QUEUE", "2"), ("CLAIM_BATCH", "1")];
    let service = Service::start_on(Database::at(postgres.create("gate")), &settings);
    service.claim(json!({"idempotency_key": "before", "claimant": "a"}));
    postgres.signal_all("STOP");
    let claims: Vec<Value> = (0..16)
        .map(|number| json!({"idempotency_key": format!("k-{number}"), "claimant": "a"}))
        .collect();
    let replies = claim_at_once(&service, &claims);
    postgres.signal_all("CONT");
    let codes: Vec<String> = replies.iter().map(|reply| reply.problem(503)).collect();
    // One is at the store, and two wait; there may be a few more where one took another's place.
    let full = codes.iter().filter(|code| *code == "overloaded").count();
    assert!(full >= 10, "{codes:?}");
    assert!(
        replies
            .iter()
            .all(|reply| reply.headers["retry-after"] == "1")
    );
    // Asking again with the same claimant gives the truth, whatever became of the first time.
    for claim in &claims {
        wait_until("it is decided", || {
            service.post("/claim", claim).status == 200
        });
        assert_eq!(service.claim(claim.clone())["claimed"], true);
    }
}

/// The caller hangs up while its claim is on its way: it is decided all the same.
#[test]
fn a_claim_whose_caller_has_gone_is_decided() {
    let service = Service::start(Backend::Postgres);
    let transaction = OpenTransaction::hold(&service, "gone");
    let mut connection = Connection::open(&service);
    let body = r#"{"idempotency_key": "gone", "claimant": "a"}"#;
    connection.send_head("/claim", &format!("Content-Length: {}\r\n", body.len()));
    connection.send(body);
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    wait_until("the claim waits for the lock", || {
        service.database.sql(waiting) == "1"
    });
    drop(connection);
    transaction.release();
    wait_until("it is decided", || {
        service.get("/ledger/gone").status == 200
    });
    let other = service.claim(json!({"idempotency_key": "gone", "claimant": "b"}));
    assert_eq!(other["claimed"], false);
}

/// A service whose connections to Postgres go through a proxy.
fn behind_proxy() -> (Lossy, Service) {
    let direct = Database::new(Backend::Postgres);
    let proxy = Lossy::start(0, SHARED.port());
    let port = format!(":{}/", SHARED.port());
    let url = direct.url.replace(&port, &format!(":{}/", proxy.port));
    let service = Service::start_on(Database::at(url + "?sslmode=disable"), &[]);
    (proxy, service)
}

/// The commit has happened, and its answer is lost. Nobody may ask again but the caller: without a
/// claimant, it would be told that somebody else has claimed.
#[test]
fn a_lost_commit_is_not_answered_by_a_guess() {
    let (proxy, service) = behind_proxy();
    // The statement that wins a key commits by itself.
    let claim = json!({"idempotency_key": "nobody's"});
    proxy.lose("nobody's", 1);
    assert_eq!(
        service.post("/claim", &claim).problem(503),
        "store_unavailable"
    );
    assert_eq!(proxy.left(), 0);
    let entry = service.entry("nobody's");
    assert_eq!(
        (&entry["status"], &entry["seen_again"]),
        (&json!("claimed"), &json!(0))
    );

    let claim = json!({"idempotency_key": "a's", "claimant": "a", "pending": true});
    proxy.lose("COMMIT\0", 1);
    assert_eq!(
        service.post("/claim", &claim).problem(503),
        "store_unavailable"
    );
    let verdict = service.claim(claim);
    assert_eq!(
        (&verdict["claimed"], &verdict["replayed"]),
        (&json!(true), &json!(true))
    );
}

/// The connection breaks before the commit: nothing has happened, and each claim is tried alone.
#[test]
fn a_connection_that_breaks_before_the_commit_fails_no_claim() {
    let (proxy, service) = behind_proxy();
    for round in 0..5 {
        proxy.lose(
            "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '200ms'",
            1,
        );
        let claims: Vec<Value> = (0..16)
            .map(|number| json!({"idempotency_key": format!("{round}-{number}"), "claimant": "a", "pending": true}))
            .collect();
        for reply in claim_at_once(&service, &claims) {
            assert_eq!(reply.ok()["claimed"], true);
        }
        assert_eq!(proxy.left(), 0);
    }
}

/// A claim of `a`'s, for use straight at a store.
fn claim(key: &str, pending: Option<u32>) -> Claim {
    Claim {
        key: IdempotencyKey::from_store(key.into()),
        order_id: None,
        holder: Some(Holder {
            claimant: "a".into(),
            api_key: None,
        }),
        ttl_seconds: None,
        payload_sha256: None,
        pending,
        on_stale: OnStale::Hold,
        door: Door::Gate,
    }
}

/// A store of its own.
fn store(backend: Backend) -> (Database, Box<dyn Store>) {
    let database = Database::new(backend);
    let window = TimeDelta::seconds(1800);
    let store: Box<dyn Store> = match backend {
        Backend::Sqlite => Box::new(SqliteStore::open(&database.path(), window).unwrap()),
        Backend::Postgres => Box::new(PostgresStore::open(&database.url, None, 1, window).unwrap()),
    };
    (database, store)
}

fn report(key: &str, attempt: Option<u32>, claimant: Option<&str>, outcome: Outcome) -> Act {
    Act::Report(Report {
        key: IdempotencyKey::from_store(key.into()),
        attempt,
        holder: claimant.map(|claimant| Holder {
            claimant: claimant.into(),
            api_key: None,
        }),
        outcome,
        effects: Vec::new(),
    })
}

/// Reports that share a batch come to what they would come to one after the other.
#[test]
fn a_batch_of_reports_is_judged_in_its_order() {
    let done = |external_id: Option<&str>| Outcome::Done {
        external_id: external_id.map(str::to_owned),
        result: Some(json!({"paid": true})),
    };
    let failed = |retry| Outcome::Failed {
        reason: Some("declined".into()),
        retry,
    };
    let reports = [
        report("twice", Some(1), None, done(None)),
        report("twice", Some(1), None, done(Some("ch_1"))),
        report("unknown", Some(1), None, done(None)),
        report("twice", Some(1), None, done(Some("ch_1"))),
        report("twice", Some(1), None, done(Some("ch_2"))),
        report("twice", Some(1), None, failed(true)),
        report("gate", Some(1), Some("a"), failed(true)),
        report("gate", None, Some("b"), done(Some("ch_3"))),
        report("ahead", Some(2), None, done(Some("ch_4"))),
        report("ahead", Some(2), None, done(Some("ch_4"))),
        report("other", None, Some("b"), done(Some("ch_5"))),
        report("other", None, Some("a"), done(Some("ch_6"))),
        report("raw", None, None, failed(false)),
    ];
    for backend in Backend::ALL {
        let outcome = |gathered: bool| {
            let (database, store) = store(backend);
            for (key, lease) in [
                ("twice", Some(900)),
                ("gate", None),
                ("ahead", None),
                ("other", Some(60)),
            ] {
                store.claim_all(&[claim(key, lease)]).unwrap();
            }
            database.sql(
                "INSERT INTO processed_orders (idempotency_key, order_id) VALUES ('raw', 'x')",
            );
            let settled: Vec<Option<Acted>> = if gathered {
                let settled = store.act_gathered(&reports).into_iter();
                settled.map(Result::unwrap).collect()
            } else {
                reports
                    .iter()
                    .map(|report| store.act(report).unwrap())
                    .collect()
            };
            let answers: Vec<String> = settled
                .iter()
                .map(|settled| match settled {
                    Some(settled) => format!("{:?} {:?}", settled.answer, summary(&settled.entry)),
                    None => "unknown".to_owned(),
                })
                .collect();
            let entries: Vec<String> = ["twice", "gate", "ahead", "other", "raw"]
                .map(|key| IdempotencyKey::from_store(key.into()))
                .map(|key| store.entry(&key).unwrap().unwrap())
                .map(|entry| format!("{:?}", summary(&entry)))
                .to_vec();
            let marked = database.sql("SELECT count(*) FROM processed_orders WHERE in_ledger");
            (answers, entries, marked)
        };
        let (answers, entries, marked) = outcome(true);
        assert_eq!(marked, "5", "{backend:?}");
        assert!(answers[1].starts_with("Ok(true)"), "{}", answers[1]);
        assert!(answers[3].starts_with("Ok(false)"), "{}", answers[3]);
        assert!(answers[4].starts_with("Err(AlreadyDone"), "{}", answers[4]);
        assert_eq!((answers, entries, marked), outcome(false), "{backend:?}");
    }
}

/// What of an entry does not depend on the time.
fn summary(entry: &Entry) -> (String, Phase, bool, bool, u32, Vec<(u32, Happening)>) {
    let state = &entry.state;
    let phase = match &state.phase {
        Phase::Pending { .. } => Phase::Claimed,
        phase => phase.clone(),
    };
    let happenings = entry
        .history
        .iter()
        .filter_map(|event| match &event.happening {
            Happening::Pending { .. } => None,
            happening => Some((event.attempt, happening.clone())),
        });
    let status = format!("{:?}", state.status(entry.now));
    (
        status,
        phase,
        state.conflict,
        state.in_ledger,
        state.attempt,
        happenings.collect(),
    )
}

/// One batch makes a row and opens its entry: straight at the stores, since no caller can choose
/// what shares a batch.
#[test]
fn what_a_batch_opens_behind_its_own_claim_is_stored() {
    for backend in Backend::ALL {
        let (database, store) = store(backend);
        let decided = store.claim_known(&[claim("k", None), claim("k", Some(900))]);
        assert!(
            decided
                .into_iter()
                .all(|decided| decided.unwrap().unwrap().claimed)
        );
        let is_marked = "SELECT count(*) FROM processed_orders WHERE in_ledger";
        assert_eq!(database.sql(is_marked), "1", "{backend:?}");
        assert_eq!(database.sql("SELECT status FROM run_ledger"), "pending");
        assert_eq!(database.sql("SELECT count(*) FROM run_history"), "2");
    }
}

/// The ledger knows a key whose row of the gate somebody has deleted: whoever claims it in the
/// same batch as others is told so, and the others are not held up.
#[test]
fn what_is_done_stays_done_where_its_row_of_the_gate_is_deleted() {
    on_both(|service| {
        service.claim(json!({"idempotency_key": "paid", "claimant": "a", "pending": true}));
        let report = json!({"idempotency_key": "paid", "attempt": 1, "external_id": "ch_1"});
        service.post("/ledger/done", &report).ok();
        service
            .database
            .sql("DELETE FROM processed_orders WHERE idempotency_key = 'paid'");
        let claims: Vec<Value> = (0..16)
            .map(|number| match number {
                3 => json!({"idempotency_key": "paid", "claimant": "b"}),
                _ => json!({"idempotency_key": format!("free-{number}"), "claimant": "b"}),
            })
            .collect();
        for (number, reply) in claim_at_once(service, &claims).into_iter().enumerate() {
            assert_eq!(reply.ok()["claimed"], number != 3);
        }
        let again = service.claim(json!({"idempotency_key": "paid", "claimant": "c"}));
        assert_eq!(
            (
                &again["claimed"],
                &again["external_id"],
                &again["seen_again"]
            ),
            (&json!(false), &json!("ch_1"), &json!(2))
        );
    });
}

/// Straight at the store, since a claim that a lane fails is tried alone.
#[test]
fn a_lane_goes_by_no_default_of_the_database() {
    let database = Database::new(Backend::Postgres);
    let window = TimeDelta::seconds(1800);
    let store = PostgresStore::open(&database.url, None, 1, window).unwrap();
    let name = database.sql("SELECT current_database()");
    for setting in [
        "default_transaction_isolation = 'serializable'",
        "synchronous_commit = off",
    ] {
        database.sql(&format!("ALTER DATABASE {name} SET {setting}"));
    }
    let decided = store.claim_new(&[claim("k", None)]).remove(0);
    assert!(decided.unwrap().unwrap().unwrap().claimed);
    let again = store.claim_known(&[claim("k", None)]).remove(0);
    assert!(again.unwrap().unwrap().replayed);
}

/// A plan that is made while the tables hold next to nothing would read them whole, and be kept.
#[test]
fn no_claim_and_no_report_reads_a_whole_table() {
    let database = Arc::new(Database::new(Backend::Postgres));
    let service = Service::start_beside(Arc::clone(&database), &[]);
    let scans = |kind: &str| -> u64 {
        let sum = format!(
            "SELECT sum({kind}) FROM pg_stat_user_tables WHERE relname IN ('processed_orders', 'run_ledger', 'run_history')"
        );
        database.sql(&sum).parse().unwrap()
    };
    let before = (scans("seq_scan"), scans("idx_scan"));
    for number in 0..20 {
        let claimed = json!({"idempotency_key": format!("gate-{number}"), "claimant": "a"});
        let opened = json!({"idempotency_key": format!("ledger-{number}"), "claimant": "a", "pending": true});
        for claim in [&claimed, &opened] {
            service.claim(claim.clone());
            let mut other = claim.clone();
            other["claimant"] = json!("b");
            assert_eq!(service.claim(other)["claimed"], false);
        }
        let report = json!({"idempotency_key": format!("ledger-{number}"), "attempt": 1});
        service.post("/ledger/done", &report).ok();
        database.sql("ANALYZE");
    }
    // What a connection has read is told when it ends, at the latest.
    drop(service);
    let others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
    wait_until("its connections have ended", || database.sql(others) == "0");
    assert!(scans("idx_scan") > before.1 + 100);
    assert_eq!(scans("seq_scan"), before.0);
}
