//! Behind PgBouncer in transaction mode, where each transaction may be another session's.

use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;

use super::helpers::pgbouncer::PgBouncer;
use super::helpers::postgres::{SHARED, psql};
use super::helpers::service::run;
use super::helpers::{Database, Service, wait_until};

/// An empty database, and its name.
fn database(pooler: &PgBouncer, name: &str) -> Arc<Database> {
    SHARED.create(name);
    Arc::new(Database::at(pooler.url(name)))
}

const FOUND: &str = "a pooler in transaction mode";

#[test]
fn it_is_found_out() {
    for (number, (mode, sessions, settings, found)) in [
        ("transaction", 1, "", true),
        ("transaction", 3, "", true),
        ("transaction", 3, "server_round_robin = 1", true),
        ("session", 20, "", false),
    ]
    .into_iter()
    .enumerate()
    {
        let pooler = PgBouncer::start(&SHARED, mode, sessions, settings);
        let database = database(&pooler, &format!("pooler_found_{number}"));
        let service = Service::start_beside(Arc::clone(&database), &[]);
        assert_eq!(service.log().contains(FOUND), found, "{mode}, {sessions}");
        assert_eq!(
            service.claim(json!({"idempotency_key": "k"}))["claimed"],
            true
        );
        drop(service);
        // What is found out can be said as well.
        let said = (!found).to_string();
        if !found {
            let service = Service::start_beside(database, &[("DATABASE_POOLER", &said)]);
            assert!(service.log().contains(FOUND));
        }
    }
    let direct = SHARED.create("pooler_found_none");
    let service = Service::start_on(Database::at(direct), &[]);
    assert!(!service.log().contains(FOUND));
}

/// Others use it at the same time, and take its sessions by turns.
#[test]
fn it_is_found_out_among_others() {
    let pooler = PgBouncer::start(&SHARED, "transaction", 5, "server_round_robin = 1");
    let database = database(&pooler, "pooler_busy");
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let _ = psql(&database.url, "SELECT 1");
                }
            });
        }
        let outputs: Vec<Output> = (0..10).map(|_| run(&database, &["migrate"], &[])).collect();
        is_over.store(true, Ordering::Relaxed);
        for output in outputs {
            assert!(output.status.success(), "{output:?}");
            assert!(String::from_utf8(output.stderr).unwrap().contains(FOUND));
        }
    });
}

/// It was one for sessions at the start. What was set for them is there no more, and that shows.
#[test]
fn it_is_found_out_later() {
    let mut pooler = PgBouncer::start(&SHARED, "session", 20, "");
    let database = database(&pooler, "pooler_later");
    let service = Service::start_beside(database, &[]);
    let claim = |number: usize| json!({"idempotency_key": format!("k-{number}"), "claimant": "a", "pending": number.is_multiple_of(2)});
    service.claim(claim(0));
    assert!(!service.log().contains(FOUND));
    pooler.end();
    pooler.set("pool_mode = session", "pool_mode = transaction");
    pooler.set("default_pool_size = 20", "default_pool_size = 2");
    pooler.start_again();
    std::thread::scope(|scope| {
        for part in 0..8 {
            let (service, claim) = (&service, &claim);
            scope.spawn(move || {
                for number in (part..200).step_by(8) {
                    wait_until("it is claimed", || {
                        service.post("/claim", &claim(number)).status == 200
                    });
                    let report = json!({"idempotency_key": format!("k-{number}"), "attempt": 1});
                    wait_until("it is done", || {
                        service.post("/ledger/done", &report).status == 200
                    });
                }
            });
        }
    });
    assert!(service.log().contains(FOUND), "{}", service.log());
    for number in 200..300 {
        assert_eq!(service.claim(claim(number))["claimed"], true);
    }
}

/// Others use the same sessions, and must find them as they left them.
#[test]
fn nothing_is_left_in_a_session() {
    let pooler = PgBouncer::start(&SHARED, "transaction", 1, "");
    let database = database(&pooler, "pooler_sessions");
    let service = Service::start_beside(Arc::clone(&database), &[]);
    let state = "SELECT pg_backend_pid(), (SELECT count(*) FROM pg_prepared_statements), \
        (SELECT string_agg(name || '=' || setting, ',' ORDER BY name) FROM pg_settings \
         WHERE source = 'session' AND name NOT IN ('TimeZone', 'client_encoding', 'application_name'))";
    let before = psql(&database.url, state).unwrap();
    for number in 0..5 {
        let key = format!("k-{number}");
        service.claim(json!({"idempotency_key": key, "claimant": "a", "pending": true}));
        assert_eq!(
            service.claim(json!({"idempotency_key": key, "claimant": "b"}))["claimed"],
            false
        );
        let report = json!({"idempotency_key": key, "attempt": 1});
        service.post("/ledger/done", &report).ok();
        service.claim(json!({"idempotency_key": format!("gate-{number}"), "claimant": "a"}));
        let array =
            json!([{"idempotency_key": format!("array-{number}")}, {"idempotency_key": "k-0"}]);
        service.post("/claim", &array).ok();
        service.get("/ledger?status=done").ok();
        service.get("/health/ready").ok();
    }
    let after = psql(&database.url, state).unwrap();
    assert_eq!(before, after);
    assert!(after.contains("|0|"), "{after}");
}

#[test]
fn a_pooler_that_dies_is_used_again() {
    let mut pooler = PgBouncer::start(&SHARED, "transaction", 3, "");
    let database = database(&pooler, "pooler_dies");
    let service = Service::start_beside(database, &[]);
    let claim = json!({"idempotency_key": "k", "claimant": "a"});
    assert_eq!(service.claim(claim.clone())["claimed"], true);
    pooler.end();
    assert_eq!(
        service.post("/claim", &claim).problem(503),
        "store_unavailable"
    );
    pooler.start_again();
    wait_until("it answers", || {
        service.post("/claim", &claim).status == 200
    });
    assert_eq!(service.claim(claim)["replayed"], true);
}
