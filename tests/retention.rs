//! What is over is removed, and nothing else.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value, json};

use super::helpers::service::run;
use super::helpers::transaction::OpenTransaction;
use super::helpers::{Backend, Database, Service, on_both, wait_until};

const DAY: u32 = 86_400;
const RETENTION: (&str, &str) = ("RETENTION", "86400");

fn purge(database: &Database) -> String {
    let output = run(database, &["purge"], &[RETENTION]);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn done(service: &Service, key: &str, external_id: &str) {
    let report = json!({"idempotency_key": key, "attempt": 1, "external_id": external_id});
    service.post("/ledger/done", &report);
}

#[test]
fn what_is_over_is_removed_and_nothing_else() {
    on_both(|service| {
        let database = &service.database;
        let gate = |key: &str, ttl_seconds: Value| {
            service.claim(
                json!({"idempotency_key": key, "claimant": "a", "ttl_seconds": ttl_seconds}),
            );
        };
        let open = |key: &str, ttl_seconds: Value| {
            service.claim(
                json!({"idempotency_key": key, "claimant": "a", "ttl_seconds": ttl_seconds,
                "pending": true, "lease_seconds": 60}),
            );
        };
        for key in ["gate-old", "gate-young"] {
            gate(key, Value::Null);
        }
        gate("gate-window", json!(10 * DAY));
        gate("gate-window-passed", json!(DAY));
        for key in [
            "done-old",
            "done-young",
            "failed",
            "reset",
            "stale",
            "conflict",
        ] {
            open(key, Value::Null);
        }
        open("done-window", json!(10 * DAY));
        open("done-window-passed", json!(DAY));
        for key in [
            "done-old",
            "done-young",
            "reset",
            "conflict",
            "done-window",
            "done-window-passed",
        ] {
            done(service, key, "ch_1");
        }
        service
            .post(
                "/ledger/failed",
                &json!({"idempotency_key": "failed", "attempt": 1}),
            )
            .ok();
        let reset =
            json!({"idempotency_key": "reset", "attempt": 1, "reviewer": "ana", "reason": "again"});
        service.post("/ledger/reset", &reset).ok();
        done(service, "conflict", "ch_2");
        database.sql(
            "INSERT INTO processed_orders (idempotency_key, order_id) VALUES ('raw-old', 'x')",
        );

        database.age_all(2 * DAY);
        let young = match database.backend {
            Backend::Postgres => "now()",
            Backend::Sqlite => "strftime('%Y-%m-%dT%H:%M:%fZ', 'now')",
        };
        database.sql(&format!("UPDATE processed_orders SET processed_at = {young} WHERE idempotency_key = 'gate-young'"));
        database.sql(&format!(
            "UPDATE run_ledger SET updated_at = {young} WHERE idempotency_key = 'done-young'"
        ));

        assert_eq!(purge(database), "removed 7 keys\n");
        let is_known = |key: &str| service.get(&format!("/ledger/{key}")).status == 200;
        for key in [
            "gate-young",
            "gate-window",
            "done-young",
            "done-window",
            "stale",
            "conflict",
        ] {
            assert!(is_known(key), "{key}");
        }
        for key in [
            "gate-old",
            "gate-window-passed",
            "done-old",
            "done-window-passed",
            "failed",
            "reset",
            "raw-old",
        ] {
            assert!(!is_known(key), "{key}");
            for table in ["processed_orders", "run_ledger", "run_history"] {
                let rows = format!("SELECT count(*) FROM {table} WHERE idempotency_key = '{key}'");
                assert_eq!(database.sql(&rows), "0", "{table} {key}");
            }
            let again = service.claim(json!({"idempotency_key": key, "claimant": "b"}));
            assert_eq!(
                (&again["claimed"], &again["attempt"]),
                (&json!(true), &json!(1))
            );
        }
        assert_eq!(purge(database), "removed 0 keys\n");
    });
}

/// Many more than a batch holds, and what must stay lies in between.
#[test]
fn a_service_removes_by_itself_what_is_over() {
    for backend in Backend::ALL {
        let database = Arc::new(Database::new(backend));
        drop(Service::start_beside(Arc::clone(&database), &[]));
        let rows = |table: &str, columns: &str, values: &str| {
            database.sql(&format!(
                "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 6000) \
                 INSERT INTO {table} (idempotency_key, order_id, {columns}) SELECT 'k-' || i, 'x', {values} FROM n WHERE {}",
                if table == "run_ledger" { "i % 2 = 0" } else { "true" }
            ));
        };
        let old = "'2026-01-01T00:00:00.000Z'";
        let is_odd = match backend {
            Backend::Postgres => format!("{old}::timestamptz, i % 2 = 0"),
            Backend::Sqlite => format!("{old}, i % 2 = 0"),
        };
        rows("processed_orders", "processed_at, in_ledger", &is_odd);
        let time = match backend {
            Backend::Postgres => format!("{old}::timestamptz"),
            Backend::Sqlite => old.to_owned(),
        };
        // Every tenth hangs.
        let lease = format!("CASE WHEN i % 10 = 0 THEN {time} END");
        rows(
            "run_ledger",
            "status, attempt, processed_at, recognised_from, updated_at, lease_expires_at",
            &format!(
                "CASE WHEN i % 10 = 0 THEN 'pending' ELSE 'done' END, 1, {time}, {time}, {time}, {lease}"
            ),
        );
        let service = Service::start_beside(Arc::clone(&database), &[RETENTION]);
        let left = || database.sql("SELECT count(*) FROM processed_orders");
        wait_until("all but what hangs is removed", || left() == "600");
        assert_eq!(database.sql("SELECT count(*) FROM run_ledger"), "600");
        wait_until("it says so", || service.log().contains("removed 5400 keys"));
        let stale = service.get("/ledger?status=stale&limit=500").ok();
        assert_eq!(stale["entries"].as_array().unwrap().len(), 500);
    }
}

/// Each key is removed once, whoever is at it, and claimed once after that, however many want it.
#[test]
fn what_is_claimed_while_it_is_removed_has_one_winner() {
    const KEYS: usize = 1500;
    on_both(|service| {
        let claims = |claimant: &str, keys: std::ops::Range<usize>| {
            let claims: Vec<Value> = keys
                .map(|number| json!({"idempotency_key": format!("k-{number}"), "claimant": claimant}))
                .collect();
            service.post("/claim", &json!(claims)).ok()
        };
        for start in (0..KEYS).step_by(500) {
            claims("first", start..start + 500);
        }
        service.database.age_all(2 * DAY);
        let (removed, won) = std::thread::scope(|scope| {
            let purges = [(); 2].map(|()| scope.spawn(|| purge(&service.database)));
            let rivals: Vec<_> = (0..4)
                .map(|rival| {
                    scope.spawn(move || {
                        let mut won = BTreeMap::new();
                        for number in 0..KEYS {
                            let key = format!("k-{}", (number * 7 + rival * 3) % KEYS);
                            let claim = json!({"idempotency_key": key, "claimant": format!("rival-{rival}")});
                            if service.claim(claim)["claimed"] == true {
                                *won.entry(key).or_insert(0) += 1;
                            }
                        }
                        won
                    })
                })
                .collect();
            let removed: u64 = purges
                .into_iter()
                .map(|purge| purge.join().unwrap())
                .map(|said| {
                    said.trim_start_matches("removed ")
                        .trim_end_matches(" keys\n")
                        .parse::<u64>()
                        .unwrap()
                })
                .sum();
            let mut won: BTreeMap<String, u32> = BTreeMap::new();
            for rival in rivals {
                for (key, count) in rival.join().unwrap() {
                    *won.entry(key).or_insert(0) += count;
                }
            }
            (removed, won)
        });
        assert_eq!(removed, KEYS as u64);
        assert!(won.values().all(|&count| count == 1), "{won:?}");
        let rows = service
            .database
            .sql("SELECT count(*) FROM processed_orders");
        assert_eq!(rows, won.len().to_string());
    });
}

/// A row that somebody has locked is in use, and nobody waits for it.
#[test]
fn what_is_in_use_is_left() {
    let service = Service::start(Backend::Postgres);
    for key in ["locked", "ledger", "free"] {
        service.claim(json!({"idempotency_key": key, "claimant": "a", "pending": true}));
        done(&service, key, "ch_1");
    }
    service.database.age_all(2 * DAY);
    let lock = |table: &str, key: &str| {
        let sql = format!(
            "SELECT idempotency_key FROM {table} WHERE idempotency_key = '{key}' FOR UPDATE"
        );
        OpenTransaction::begin(&service, &sql, key)
    };
    // More of one time than a batch holds.
    service.database.sql(
        "INSERT INTO processed_orders (idempotency_key, order_id, processed_at) \
         SELECT 'many ' || i, 'x', '2020-01-01' FROM generate_series(1, 600) i",
    );
    let many =
        "SELECT count(*) FROM (SELECT FROM processed_orders WHERE order_id = 'x' FOR UPDATE) row";
    let many = OpenTransaction::begin(&service, many, "600");
    let locks = [
        lock("processed_orders", "locked"),
        lock("run_ledger", "ledger"),
    ];
    assert_eq!(purge(&service.database), "removed 1 keys\n");
    many.release();
    for lock in locks {
        lock.release();
    }
    for key in ["locked", "ledger"] {
        assert_eq!(service.entry(key)["status"], "done");
        assert_eq!(service.entry(key)["history"].as_array().unwrap().len(), 2);
    }
    assert_eq!(purge(&service.database), "removed 602 keys\n");
}

/// Many of one time look as if they were over, and are not, or are in use: what comes behind them is
/// removed, and the removal ends.
#[test]
fn a_removal_ends_whatever_stands_in_its_way() {
    on_both(|service| {
        let database = &service.database;
        let fill = |prefix: &str, count: u32, time: &str| {
            database.sql(&format!(
                "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count}) \
                 INSERT INTO processed_orders (idempotency_key, order_id, processed_at) \
                 SELECT '{prefix}-' || i, 'x', {time} FROM n"
            ));
        };
        let time = |text: &str| match database.backend {
            Backend::Postgres => format!("TIMESTAMPTZ '{text}'"),
            Backend::Sqlite => format!("'{text}'"),
        };
        // The gate was restored from a copy, while the ledger has what is under way.
        fill("live", 700, &time("2020-01-01T00:00:00.000Z"));
        let now = match database.backend {
            Backend::Postgres => "now()",
            Backend::Sqlite => "strftime('%Y-%m-%dT%H:%M:%fZ', 'now')",
        };
        database.sql(&format!(
            "INSERT INTO run_ledger (idempotency_key, order_id, status, attempt, processed_at, recognised_from, \
                 lease_expires_at, updated_at) \
             SELECT idempotency_key, 'x', 'pending', 1, {now}, {now}, {now}, {now} FROM processed_orders"
        ));
        fill("old", 1, &time("2021-01-01T00:00:00.000Z"));
        if database.backend == Backend::Postgres {
            fill("never", 5001, "TIMESTAMPTZ '-infinity'");
            database.sql("UPDATE processed_orders SET expires_at = 'infinity' WHERE idempotency_key LIKE 'never%'");
        }
        // One that nobody can read.
        service.pending_key("unreadable", "a", 60);
        done(service, "unreadable", "ch_1");
        database.sql(&format!(
            "UPDATE run_ledger SET result = '{{x', updated_at = {} WHERE idempotency_key = 'unreadable'",
            time("2019-01-01T00:00:00.000Z")
        ));
        assert_eq!(purge(database), "removed 1 keys\n");
        assert_eq!(service.get("/ledger/old-1").status, 404);
        assert_eq!(database.sql("SELECT count(*) FROM run_ledger"), "701");
    });
}

/// An entry whose row of the gate somebody has deleted is being removed, and its key is claimed: by the
/// claim that comes just then, and not by nobody.
#[test]
fn a_key_is_claimed_while_its_entry_without_a_row_of_the_gate_is_removed() {
    let service = Service::start(Backend::Postgres);
    service.database.sql(
        "INSERT INTO run_ledger (idempotency_key, order_id, status, attempt, processed_at, recognised_from, updated_at) \
             VALUES ('k', 'x', 'done', 1, '2020-01-01', '2020-01-01', '2020-01-01'); \
         CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.5); RETURN NULL; END'; \
         CREATE TRIGGER slowly BEFORE DELETE ON run_history FOR EACH STATEMENT EXECUTE FUNCTION slowly()",
    );
    let is_removing = "SELECT count(*) FROM pg_stat_activity \
         WHERE datname = current_database() AND wait_event = 'PgSleep'";
    std::thread::scope(|scope| {
        let purge = scope.spawn(|| purge(&service.database));
        wait_until("it is being removed", || {
            service.database.sql(is_removing) == "1"
        });
        // Nobody would know this claim again.
        let verdict = service.claim(json!({"idempotency_key": "k"}));
        assert_eq!(
            (&verdict["claimed"], &verdict["attempt"]),
            (&json!(true), &json!(1))
        );
        assert_eq!(purge.join().unwrap(), "removed 1 keys\n");
    });
}

#[test]
fn settings_that_lose_keys_too_early_are_refused() {
    let database = Database::new(Backend::Sqlite);
    type Settings = &'static [(&'static str, &'static str)];
    let cases: [(&str, Settings, &str); 3] = [
        ("purge", &[], "RETENTION is not set"),
        ("purge", &[("RETENTION", "86399")], "86400"),
        (
            "serve",
            &[RETENTION, ("REPLAY_WINDOW", "86401")],
            "RETENTION is shorter than REPLAY_WINDOW",
        ),
    ];
    for (command, settings, said) in cases {
        let output = run(&database, &[command], settings);
        assert!(!output.status.success());
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains(said), "{text}");
    }
}
