//! Tables that exist already, made by hand, and hands that write beside the service.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use super::helpers::service::{encoded, refusal, run};
use super::helpers::{Backend, Database, Service, on_both};

/// A database in which somebody has run SQL by hand.
fn made_by_hand(backend: Backend, sql: &str) -> Database {
    let database = Database::new(backend);
    database.sql(sql);
    database
}

/// The gate as the contract describes it.
fn gate(backend: Backend) -> &'static str {
    match backend {
        Backend::Postgres => {
            "CREATE TABLE processed_orders (idempotency_key TEXT PRIMARY KEY, \
             order_id TEXT NOT NULL, processed_at TIMESTAMPTZ NOT NULL DEFAULT now());"
        }
        Backend::Sqlite => {
            "CREATE TABLE processed_orders (idempotency_key TEXT PRIMARY KEY, \
             order_id TEXT NOT NULL, processed_at TIMESTAMPTZ NOT NULL DEFAULT CURRENT_TIMESTAMP);"
        }
    }
}

/// Starts the service, in turn, on either store with a gate made by hand that has two rows.
fn on_both_adopted(check: impl Fn(&Service)) {
    for backend in Backend::ALL {
        let database = made_by_hand(backend, gate(backend));
        database.sql(
            "INSERT INTO processed_orders VALUES \
                 ('k1', 'ORD-1', '2025-01-02 03:04:05.678+00:00'), \
                 ('k2', 'ORD-2', '2025-01-02 03:04:06+00:00')",
        );
        check(&Service::start_on(database, &[]));
    }
}

/// The raw statement of the contract; what it returns is the key, or nothing.
fn raw_claim(service: &Service, key: &str) -> String {
    service.database.sql(&format!(
        "INSERT INTO processed_orders (idempotency_key, order_id) VALUES ('{key}', 'ORD-raw') \
         ON CONFLICT (idempotency_key) DO NOTHING RETURNING idempotency_key"
    ))
}

fn claim(service: &Service, key: &str) -> Value {
    service.claim(json!({"idempotency_key": key, "claimant": "a"}))
}

fn done_key(service: &Service, key: &str) {
    service.pending_key(key, "a", 600);
    let report = json!({"idempotency_key": key, "attempt": 1, "external_id": "ch_1"});
    service.done(report).ok();
}

/// The keys that are claimed, newest first, read in pages of one.
fn listed_one_by_one(service: &Service) -> Vec<String> {
    let mut keys = Vec::new();
    let mut query = "status=claimed&limit=1".to_owned();
    loop {
        let list = service.get(&format!("/ledger?{query}")).ok();
        let key = list["entries"][0]["idempotency_key"].as_str().unwrap();
        keys.push(key.to_owned());
        assert!(keys.len() <= 100, "the list does not end");
        let Some(cursor) = list["next_cursor"].as_str() else {
            return keys;
        };
        query = format!("status=claimed&limit=1&cursor={}", encoded(cursor));
    }
}

/// All that a database holds: the bytes of the file, or the tables, columns and indexes.
fn contents(database: &Database) -> Vec<u8> {
    match database.backend {
        Backend::Sqlite => std::fs::read(database.path()).unwrap(),
        Backend::Postgres => {
            let mine = "NOT IN ('pg_catalog', 'information_schema')";
            let columns = database.sql(&format!(
                "SELECT table_schema, table_name, column_name, data_type, is_nullable, \
                     column_default \
                 FROM information_schema.columns WHERE table_schema {mine} ORDER BY 1, 2, 3"
            ));
            let indexes = database.sql(&format!(
                "SELECT indexdef FROM pg_indexes WHERE schemaname {mine} ORDER BY 1"
            ));
            format!("{columns}\n{indexes}").into_bytes()
        }
    }
}

/// Checks that the service does not start on a database, leaves it alone, and says why.
fn assert_refused(database: &Database, reasons: &[&str]) -> String {
    let before = contents(database);
    let line = refusal(&run(database, &[], &[]));
    assert!(contents(database) == before, "changed: {line}");
    for reason in reasons {
        assert!(line.contains(reason), "{reason:?} is missing: {line}");
    }
    line
}

// What is adopted.

#[test]
fn rows_made_by_hand_count_as_claimed_and_keep_their_times() {
    on_both_adopted(|service| {
        let verdict = claim(service, "k1");
        assert_eq!(verdict["claimed"], false);
        assert_eq!(verdict["status"], "claimed");
        assert_eq!(verdict["attempt"], 1);
        assert_eq!(verdict["order_id"], "ORD-1");
        assert_eq!(verdict["processed_at"], "2025-01-02T03:04:05.678Z");
        assert_eq!(
            service.entry("k2")["processed_at"],
            "2025-01-02T03:04:06.000Z"
        );
        let list = service.get("/ledger?status=claimed").ok();
        assert_eq!(list["entries"][0]["idempotency_key"], "k2");
        assert_eq!(list["entries"][1]["idempotency_key"], "k1");
        assert_eq!(claim(service, "k3")["claimed"], true);
    });
}

#[test]
fn a_row_made_by_hand_is_not_opened() {
    on_both_adopted(|service| {
        for claimant in [Value::Null, json!("a")] {
            let verdict = service.pending(json!({"idempotency_key": "k1", "claimant": claimant}));
            assert_eq!(verdict["claimed"], false);
            assert_eq!(verdict["status"], "claimed");
            assert!(
                verdict["warnings"].to_string().contains("/claim"),
                "{verdict}"
            );
        }
    });
}

#[test]
fn what_became_of_a_row_made_by_hand_is_recorded() {
    on_both_adopted(|service| {
        let report = json!({"idempotency_key": "k1", "external_id": "ch_1"});
        let entry = service.done(report).ok();
        assert_eq!(entry["status"], "done");
        assert_eq!(entry["order_id"], "ORD-1");
        assert_eq!(entry["processed_at"], "2025-01-02T03:04:05.678Z");
        assert_eq!(claim(service, "k1")["external_id"], "ch_1");
    });
}

#[test]
fn an_adopted_database_is_known_at_the_next_start() {
    for backend in Backend::ALL {
        let database = Arc::new(made_by_hand(backend, gate(backend)));
        let first = Service::start_beside(Arc::clone(&database), &[]);
        assert_eq!(claim(&first, "key")["claimed"], true);
        drop(first);
        let second = Service::start_beside(database, &[]);
        assert_eq!(claim(&second, "key")["replayed"], true);
    }
}

/// A dump of our tables alone holds neither the list of migrations nor the function.
#[test]
fn restored_tables_are_completed() {
    for lost in [
        "DROP TABLE __diesel_schema_migrations",
        "DROP FUNCTION dedup_gate_won",
    ] {
        let database = Arc::new(Database::new(Backend::Postgres));
        let service = Service::start_beside(Arc::clone(&database), &[]);
        done_key(&service, "key");
        drop(service);
        database.sql(lost);
        let service = Service::start_beside(database, &[]);
        assert_eq!(claim(&service, "key")["external_id"], "ch_1");
        assert_eq!(claim(&service, "new")["claimed"], true);
    }
}

#[test]
fn sqlite_times_of_every_form_are_read_and_listed() {
    let database = made_by_hand(Backend::Sqlite, gate(Backend::Sqlite));
    database.sql("INSERT INTO processed_orders (idempotency_key, order_id) VALUES ('now', 'o')");
    let forms = [
        ("space", "2025-01-09 10:00:00", "2025-01-09T10:00:00.000Z"),
        (
            "fraction",
            "2025-01-08 10:00:00.25",
            "2025-01-08T10:00:00.250Z",
        ),
        (
            "rfc 3339",
            "2025-01-07T10:00:00Z",
            "2025-01-07T10:00:00.000Z",
        ),
        (
            "offset",
            "2025-01-06T10:00:00+02:00",
            "2025-01-06T08:00:00.000Z",
        ),
        (
            "no offset",
            "2025-01-05T10:00:00",
            "2025-01-05T10:00:00.000Z",
        ),
        ("minutes", "2025-01-04 10:00", "2025-01-04T10:00:00.000Z"),
        ("day", "2025-01-03", "2025-01-03T00:00:00.000Z"),
        (
            "space and offset",
            "2025-01-02 10:00:00+02:00",
            "2025-01-02T08:00:00.000Z",
        ),
        ("no time", "yesterday", "1970-01-01T00:00:00.000Z"),
    ];
    for (key, text, _) in forms {
        database.sql(&format!(
            "INSERT INTO processed_orders VALUES ('{key}', 'o', '{text}')"
        ));
    }
    let service = Service::start_on(database, &[]);
    for (key, _, time) in forms {
        assert_eq!(claim(&service, key)["processed_at"], time, "{key}");
    }
    let listed = listed_one_by_one(&service);
    let expected: Vec<&str> = ["now"]
        .into_iter()
        .chain(forms.map(|(key, ..)| key))
        .collect();
    assert_eq!(listed, expected);
}

#[test]
fn times_finer_than_a_millisecond_lose_no_entry() {
    on_both_adopted(|service| {
        let mut expected = BTreeSet::from(["k1".to_owned(), "k2".to_owned()]);
        for number in 0..40 {
            // From 0.000050 s on, in steps that a millisecond holds several of, and with keys
            // that run the other way.
            let key = format!("fine-{:02}", 39 - number);
            let fraction = 50 + number * 170;
            service.database.sql(&format!(
                "INSERT INTO processed_orders (idempotency_key, order_id, processed_at) VALUES \
                     ('{key}', 'o', '2025-03-01 00:00:00.{fraction:06}+00:00')"
            ));
            expected.insert(key);
        }
        let listed = listed_one_by_one(service);
        assert_eq!(listed.len(), expected.len());
        assert_eq!(listed.into_iter().collect::<BTreeSet<_>>(), expected);
    });
}

#[test]
fn times_that_rfc_3339_cannot_write_are_read_and_listed() {
    let service = Service::start(Backend::Postgres);
    let times = [
        "infinity",
        "infinity",
        "20000-01-01",
        "2025-03-01",
        "0044-03-15 BC",
        "-infinity",
        "-infinity",
    ];
    for (time, number) in times.iter().zip(0..) {
        service.database.sql(&format!(
            "INSERT INTO processed_orders (idempotency_key, order_id, processed_at) \
             VALUES ('odd-{number}', 'o', '{time}')"
        ));
        // Whoever asks is taken for its claimant, so that the replay window is looked at too.
        service
            .database
            .sql("UPDATE processed_orders SET claimant = 'b'");
        let verdict = claim(&service, &format!("odd-{number}"));
        assert_eq!(verdict["claimed"], false, "{time}");
    }
    let expected: BTreeSet<String> = (0..times.len())
        .map(|number| format!("odd-{number}"))
        .collect();
    let listed = listed_one_by_one(&service);
    assert_eq!(listed.into_iter().collect::<BTreeSet<_>>(), expected);
}

// Raw SQL beside the service.

#[test]
fn raw_sql_and_the_service_see_each_others_keys() {
    on_both_adopted(|service| {
        assert_eq!(raw_claim(service, "k1"), "");
        assert_eq!(raw_claim(service, "raw"), "raw");
        assert_eq!(raw_claim(service, "raw"), "");
        let verdict = claim(service, "raw");
        assert_eq!(verdict["claimed"], false);
        assert_eq!(verdict["order_id"], "ORD-raw");
        assert_eq!(claim(service, "claimed")["claimed"], true);
        assert_eq!(raw_claim(service, "claimed"), "");
        service.pending_key("pending", "a", 600);
        assert_eq!(raw_claim(service, "pending"), "");
        done_key(service, "done");
        assert_eq!(raw_claim(service, "done"), "");
    });
}

#[test]
fn raw_sql_works_on_tables_that_the_service_made() {
    on_both(|service| {
        assert_eq!(raw_claim(service, "raw"), "raw");
        assert_eq!(claim(service, "raw")["claimed"], false);
        let verdict = service.pending(json!({"idempotency_key": "raw", "claimant": "a"}));
        assert_eq!(verdict["claimed"], false);
        let listed = service.get("/ledger?status=claimed").ok();
        assert_eq!(listed["entries"][0]["idempotency_key"], "raw");
        assert_eq!(listed["entries"][0]["claimant"], Value::Null);
    });
}

#[test]
fn a_raw_transaction_that_is_rolled_back_claims_nothing() {
    on_both(|service| {
        service.database.sql(
            "BEGIN; INSERT INTO processed_orders (idempotency_key, order_id) \
             VALUES ('key', 'o'); ROLLBACK;",
        );
        assert_eq!(claim(service, "key")["claimed"], true);
    });
}

#[test]
fn a_gate_row_deleted_by_hand_frees_a_key_at_the_gate() {
    on_both(|service| {
        claim(service, "key");
        service.database.sql("DELETE FROM processed_orders");
        let verdict = service.claim(json!({"idempotency_key": "key", "claimant": "b"}));
        assert_eq!(verdict["claimed"], true);
        assert_eq!(verdict["attempt"], 1);
    });
}

#[test]
fn a_gate_row_deleted_by_hand_does_not_undo_the_ledger() {
    on_both(|service| {
        done_key(service, "done");
        service.pending_key("pending", "a", 600);
        service.database.sql("DELETE FROM processed_orders");
        assert_eq!(service.entry("done")["external_id"], "ch_1");
        for status in ["done", "pending"] {
            let verdict = service.claim(json!({"idempotency_key": status, "claimant": "b"}));
            assert_eq!(verdict["claimed"], false);
            assert_eq!(verdict["status"], status);
            assert_eq!(verdict["seen_again"], 1);
        }
        let report = json!({"idempotency_key": "pending", "attempt": 1});
        service.database.sql("DELETE FROM processed_orders");
        assert_eq!(service.done(report).ok()["status"], "done");
        // A row of raw SQL in its place changes nothing either.
        service.database.sql("DELETE FROM processed_orders");
        assert_eq!(raw_claim(service, "done"), "done");
        assert_eq!(claim(service, "done")["status"], "done");
        let claimed = service.get("/ledger?status=claimed").ok();
        assert_eq!(claimed["entries"], json!([]));
    });
}

#[test]
fn rows_deleted_by_hand_during_use_disturb_nobody() {
    on_both(|service| {
        done_key(service, "done");
        let is_over = AtomicBool::new(false);
        std::thread::scope(|threads| {
            threads.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    // It may lose to the service where they lock each other out.
                    let _ = service.database.try_sql("DELETE FROM processed_orders");
                }
            });
            for number in 0..100 {
                let keys = ["done", "pending", "gate", "new"].map(|key| match key {
                    "new" => format!("{key}-{number}"),
                    key => key.to_owned(),
                });
                let claim = |key| json!({"idempotency_key": key, "pending": key != "gate"});
                let verdicts = service.post("/claim", &keys.iter().map(claim).collect());
                // The scope waits for the thread, so nothing may panic before it ends.
                if verdicts.status != 200
                    || verdicts.body[0]["status"] != "done"
                    || verdicts.body[1]["claimed"] != (number == 0)
                    || verdicts.body[3]["claimed"] != true
                {
                    is_over.store(true, Ordering::Relaxed);
                    panic!("{number}: {}", verdicts.body);
                }
            }
            is_over.store(true, Ordering::Relaxed);
        });
    });
}

// What is refused.

#[test]
fn a_ledger_that_lacks_columns_stops_the_start() {
    for backend in Backend::ALL {
        let database = made_by_hand(
            backend,
            "CREATE TABLE run_ledger (idempotency_key TEXT PRIMARY KEY, order_id TEXT NOT NULL, \
                 status TEXT NOT NULL)",
        );
        assert_refused(
            &database,
            &["run_ledger", "attempt", "external_id", "lease_expires_at"],
        );
    }
}

#[test]
fn a_ledger_with_columns_of_another_type_stops_the_start() {
    let service = Service::start(Backend::Postgres);
    let database = &service.database;
    database.sql(
        "DROP TABLE __diesel_schema_migrations; \
         ALTER TABLE run_ledger ALTER COLUMN updated_at TYPE timestamp; \
         ALTER TABLE run_ledger ALTER COLUMN external_id TYPE uuid USING NULL",
    );
    assert_refused(
        database,
        &[
            "run_ledger",
            "updated_at is timestamp without time zone",
            "external_id is uuid",
        ],
    );
}

#[test]
fn a_history_of_another_shape_stops_the_start() {
    for backend in Backend::ALL {
        let database = made_by_hand(backend, "CREATE TABLE run_history (id INTEGER PRIMARY KEY)");
        assert_refused(&database, &["run_history", "idempotency_key", "seq"]);
    }
}

#[test]
fn the_advised_way_to_another_schema_works() {
    let database = made_by_hand(
        Backend::Postgres,
        "CREATE TABLE run_ledger (idempotency_key TEXT PRIMARY KEY, state TEXT)",
    );
    let line = assert_refused(&database, &["run_ledger"]);
    // Both halves of the advice are taken from the line itself.
    let (_, rest) = line.split_once("(CREATE SCHEMA").unwrap();
    let (schema, rest) = rest.split_once(')').unwrap();
    let (_, rest) = rest.split_once('?').unwrap();
    let options = rest.split_whitespace().next().unwrap();
    database.sql(&format!("CREATE SCHEMA {schema}"));
    let elsewhere = Database::at(format!("{}?{options}", database.url));
    let service = Service::start_on(elsewhere, &[]);
    done_key(&service, "key");
    assert_eq!(
        database.sql("SELECT count(*) FROM dedup_gate.run_ledger"),
        "1"
    );
    assert_eq!(database.sql("SELECT count(*) FROM public.run_ledger"), "0");
}

#[test]
fn the_advised_way_to_another_file_works() {
    let database = made_by_hand(Backend::Sqlite, "CREATE TABLE run_ledger (id INTEGER)");
    let line = assert_refused(&database, &["run_ledger", "DATABASE_URL=sqlite:PATH"]);
    assert!(line.contains("another file"), "{line}");
    let url = format!("{}-other", database.url);
    let service = Service::start_on(database, &[("DATABASE_URL", &url)]);
    assert_eq!(claim(&service, "key")["claimed"], true);
}

#[test]
fn migrate_refuses_what_serve_refuses() {
    for backend in Backend::ALL {
        let database = made_by_hand(backend, "CREATE TABLE run_ledger (id INTEGER)");
        let before = contents(&database);
        let line = refusal(&run(&database, &["migrate"], &[]));
        assert!(line.contains("run_ledger"), "{line}");
        assert!(contents(&database) == before, "changed: {line}");
    }
}

#[test]
fn a_gate_on_postgres_that_cannot_be_adopted_stops_the_start() {
    let database = made_by_hand(
        Backend::Postgres,
        "CREATE TABLE orders (id TEXT PRIMARY KEY); \
         CREATE COLLATION no_case \
             (provider = icu, locale = 'und-u-ks-level2', deterministic = false)",
    );
    let rest = "order_id TEXT NOT NULL, processed_at TIMESTAMPTZ NOT NULL DEFAULT now()";
    let key = "idempotency_key TEXT PRIMARY KEY";
    for (table, reason) in [
        (
            format!("idempotency_key TEXT NOT NULL, {rest}"),
            "primary key",
        ),
        (
            format!("id BIGSERIAL PRIMARY KEY, idempotency_key TEXT, {rest}"),
            "primary key",
        ),
        (
            format!("idempotency_key TEXT, {rest}, PRIMARY KEY (idempotency_key, order_id)"),
            "primary key",
        ),
        (
            format!("idempotency_key VARCHAR(64) PRIMARY KEY, {rest}"),
            "idempotency_key is character varying(64)",
        ),
        (
            format!("idempotency_key UUID PRIMARY KEY, {rest}"),
            "idempotency_key is uuid",
        ),
        (
            format!("{key}, {rest}, attempt INTEGER"),
            "attempt may be NULL",
        ),
        (
            format!("idempotency_key TEXT UNIQUE, {rest}"),
            "idempotency_key may be NULL",
        ),
        (
            format!("idempotency_key TEXT COLLATE no_case PRIMARY KEY, {rest}"),
            "byte by byte",
        ),
        (
            format!("{key}, {rest}, customer TEXT NOT NULL"),
            "customer is NOT NULL",
        ),
        (
            format!("{key}, {rest}, UNIQUE (order_id)"),
            "processed_orders_order_id_key",
        ),
        (
            format!("{key}, {rest}, CONSTRAINT only_ord CHECK (order_id LIKE 'ORD%')"),
            "only_ord",
        ),
        (
            format!("{key}, {rest}, CONSTRAINT to_order FOREIGN KEY (order_id) REFERENCES orders"),
            "to_order",
        ),
        (
            format!("{key}, order_id TEXT NOT NULL, processed_at TIMESTAMP NOT NULL"),
            "processed_at is timestamp without time zone",
        ),
        (
            format!("{key}, order_id BIGINT NOT NULL, processed_at TIMESTAMPTZ NOT NULL"),
            "order_id is bigint",
        ),
        (
            format!("{key}, processed_at TIMESTAMPTZ NOT NULL"),
            "lacks the column order_id",
        ),
        (
            format!("{key}, order_id TEXT, processed_at TIMESTAMPTZ NOT NULL"),
            "order_id may be NULL",
        ),
        (
            format!("{key}, order_id TEXT NOT NULL, processed_at TIMESTAMPTZ DEFAULT now()"),
            "processed_at may be NULL",
        ),
    ] {
        database.sql(&format!("CREATE TABLE processed_orders ({table})"));
        assert_refused(&database, &["processed_orders", reason]);
        database.sql("DROP TABLE processed_orders");
    }
}

#[test]
fn a_view_is_not_a_gate() {
    let database = made_by_hand(
        Backend::Postgres,
        "CREATE TABLE orders (id TEXT PRIMARY KEY, at TIMESTAMPTZ NOT NULL); \
         CREATE VIEW processed_orders AS SELECT id AS idempotency_key, id AS order_id, \
             at AS processed_at FROM orders",
    );
    assert_refused(&database, &["processed_orders", "primary key"]);
}

#[test]
fn a_gate_on_sqlite_that_cannot_be_adopted_stops_the_start() {
    let rest = "order_id TEXT NOT NULL, processed_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP";
    let key = "idempotency_key TEXT PRIMARY KEY";
    for (table, reason) in [
        (
            format!("idempotency_key TEXT NOT NULL, {rest}"),
            "primary key",
        ),
        (
            format!("idempotency_key TEXT COLLATE NOCASE PRIMARY KEY, {rest}"),
            "byte by byte",
        ),
        (
            format!("idempotency_key INTEGER PRIMARY KEY, {rest}"),
            "idempotency_key is INTEGER",
        ),
        (
            format!("idempotency_key PRIMARY KEY, {rest}"),
            "idempotency_key is ",
        ),
        (
            format!("{key}, {rest}, customer TEXT NOT NULL"),
            "customer is NOT NULL",
        ),
        (
            format!("{key}, {rest}, UNIQUE (order_id)"),
            "sqlite_autoindex_processed_orders_2",
        ),
        (format!("{key}, {rest}, attempt TEXT"), "attempt"),
        (
            format!("{key}, order_id TEXT NOT NULL"),
            "lacks the column processed_at",
        ),
        (
            format!("{key}, order_id TEXT, processed_at TEXT NOT NULL"),
            "order_id may be NULL",
        ),
    ] {
        let database = made_by_hand(
            Backend::Sqlite,
            &format!("CREATE TABLE processed_orders ({table})"),
        );
        assert_refused(&database, &["processed_orders", reason]);
    }
}

/// The tables would be made in the role's own schema, and hide the rows that raw SQL sees.
#[test]
fn a_gate_in_a_schema_behind_the_first_stops_the_start() {
    let database = made_by_hand(
        Backend::Postgres,
        "CREATE TABLE processed_orders (idempotency_key TEXT PRIMARY KEY, order_id TEXT NOT NULL, \
             processed_at TIMESTAMPTZ NOT NULL DEFAULT now()); \
         INSERT INTO processed_orders VALUES ('old', 'o'); \
         CREATE SCHEMA postgres",
    );
    let line = assert_refused(&database, &["processed_orders", "public", "postgres"]);
    let (_, rest) = line.split_once('?').unwrap();
    let options = rest.split([',', ' ']).next().unwrap();
    let advised = Database::at(format!("{}?{options}", database.url));
    let service = Service::start_on(advised, &[]);
    assert_eq!(claim(&service, "old")["claimed"], false);
}

/// A trigger of somebody else's may keep the row from appearing: there is an answer all the same.
#[test]
fn a_row_that_cannot_be_made_is_no_claim() {
    let service = Service::start(Backend::Postgres);
    service.database.sql(
        "CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; \
         CREATE TRIGGER nothing BEFORE INSERT ON processed_orders \
             FOR EACH ROW EXECUTE FUNCTION nothing()",
    );
    let body = json!({"idempotency_key": "key", "claimant": "a"});
    let reply = service.post("/claim", &body);
    assert_eq!(reply.problem(503), "store_unavailable");
    service
        .database
        .sql("DROP TRIGGER nothing ON processed_orders");
    assert_eq!(claim(&service, "key")["claimed"], true);
}
