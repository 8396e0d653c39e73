//! `GET /metrics`: each number is what happened, and what is made of them in deploy/ exists.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use super::helpers::postgres::{Postgres, said_by};
use super::helpers::samples::Samples;
use super::helpers::{Backend, Database, Service, on_both, on_both_with, wait_until};

/// The contract: no answer takes longer than this, be it that there is none.
const PROMISE: Duration = Duration::from_secs(3);

/// What comes from the store.
const FROM_STORE: [&str; 3] = [
    "pending_entries",
    "stale_entries",
    "oldest_pending_age_seconds",
];

fn increases<const N: usize>(expected: [(&str, f64); N]) -> BTreeMap<String, f64> {
    expected.map(|(name, by)| (name.to_owned(), by)).into()
}

fn deploy(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("deploy")
        .join(path)
}

/// What `promtool check metrics` complains of, which reads as Prometheus does.
fn complaints(metrics: &str) -> String {
    let mut promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool is needed: scripts/test installs it");
    let mut input = promtool.stdin.take().unwrap();
    input.write_all(metrics.as_bytes()).unwrap();
    drop(input);
    let output = promtool.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8(said).unwrap();
    assert_eq!(output.status.success(), said.is_empty(), "{said}");
    said
}

#[test]
fn prometheus_can_read_it() {
    on_both(|service| {
        service.pending_key("key", "a", 60);
        let reply = service.get("/metrics");
        let media_type = "text/plain; version=0.0.4; charset=utf-8";
        assert_eq!(reply.headers["content-type"], media_type);
        assert_eq!(complaints(&reply.text), "");
        assert_ne!(complaints("bad_total{"), "");
        // Each family says what it is.
        for line in reply.text.lines().filter(|line| !line.starts_with('#')) {
            let name = line.split(['{', ' ']).next().unwrap();
            let family = ["_bucket", "_sum", "_count"]
                .iter()
                .find_map(|suffix| name.strip_suffix(suffix))
                .unwrap_or(name);
            for kind in ["HELP", "TYPE"] {
                let comment = format!("# {kind} {family} ");
                assert!(reply.text.contains(&comment), "{comment}");
            }
        }
    });
}

#[test]
fn claims_are_counted_by_verdict() {
    on_both(|service| {
        let claim = |key: &str, claimant: &str, payload: u32| {
            let claim = json!({"idempotency_key": key, "claimant": claimant, "payload": payload});
            service.post("/claim", &claim)
        };
        let before = Samples::of(service);
        for key in ["k1", "k2", "k3", "k4", "k5"] {
            claim(key, "a", 1).ok();
        }
        for _ in 0..3 {
            assert_eq!(claim("k1", "a", 1).ok()["replayed"], true);
        }
        for claimant in ["b", "c", "d", "e"] {
            assert_eq!(claim("k1", claimant, 1).ok()["claimed"], false);
        }
        for _ in 0..2 {
            assert_eq!(claim("k1", "a", 2).problem(422), "key_reused");
        }
        let now = Samples::of(service);
        assert_eq!(
            now.since(&before, "claims_total"),
            increases([
                ("claims_total{verdict=\"claimed\"}", 5.0),
                ("claims_total{verdict=\"replayed\"}", 3.0),
                ("claims_total{verdict=\"duplicate\"}", 4.0),
                ("claims_total{verdict=\"key_reused\"}", 2.0),
            ])
        );
        assert_eq!(
            now.since(&before, "duplicates_prevented_total"),
            increases([("duplicates_prevented_total{status=\"claimed\"}", 4.0)])
        );
    });
}

#[test]
fn claims_of_arrays_and_of_the_ledger_are_counted_too() {
    on_both(|service| {
        let before = Samples::of(service);
        let keys = |keys: &[&str], payload: u32| {
            let claim = |key| json!({"idempotency_key": key, "payload": payload});
            Value::from(keys.iter().map(claim).collect::<Vec<_>>())
        };
        service.post("/claim", &keys(&["a", "b", "a"], 1)).ok();
        service.pending(json!({"idempotency_key": "c", "claimant": "x"}));
        service.pending(json!({"idempotency_key": "c", "claimant": "x"}));
        // Two are refused, and with them the array: nothing is claimed.
        let refused = service.post("/claim", &keys(&["a", "new", "b"], 2));
        assert_eq!(refused.problem(422), "key_reused");
        let now = Samples::of(service);
        assert_eq!(
            now.since(&before, "claims_total"),
            increases([
                ("claims_total{verdict=\"claimed\"}", 3.0),
                ("claims_total{verdict=\"replayed\"}", 1.0),
                ("claims_total{verdict=\"duplicate\"}", 1.0),
                ("claims_total{verdict=\"key_reused\"}", 2.0),
            ])
        );
    });
}

#[test]
fn duplicates_are_counted_by_the_status_of_the_work() {
    on_both(|service| {
        service.claim(json!({"idempotency_key": "claimed", "claimant": "a"}));
        for key in ["pending", "stale", "done", "failed"] {
            service.pending_key(key, "a", 60);
        }
        service.database.age("stale", 61);
        let attempt = |key| json!({"idempotency_key": key, "attempt": 1});
        service.done(attempt("done")).ok();
        let mut failed = attempt("failed");
        failed["retry"] = json!(false);
        service.failed(failed).ok();
        let before = Samples::of(service);
        let mut expected = BTreeMap::new();
        for (key, times) in ["claimed", "pending", "stale", "done", "failed"]
            .into_iter()
            .zip(1..)
        {
            for _ in 0..times {
                let verdict = service.claim(json!({"idempotency_key": key, "claimant": "b"}));
                assert_eq!(verdict["status"], key);
            }
            let name = format!("duplicates_prevented_total{{status=\"{key}\"}}");
            expected.insert(name, f64::from(times));
        }
        let now = Samples::of(service);
        assert_eq!(now.since(&before, "duplicates_prevented_total"), expected);
        assert_eq!(
            now.since(&before, "claims_total"),
            increases([("claims_total{verdict=\"duplicate\"}", 15.0)])
        );
    });
}

#[test]
fn problems_are_counted_by_code() {
    let settings = [("API_KEYS", "n8n:s3cret"), ("BODY_LIMIT", "1024")];
    on_both_with(&settings, |service| {
        let post = |path: &str, body: Value| service.post_as("s3cret", path, &body);
        let headers = [
            ("X-API-Key", "s3cret"),
            ("Content-Type", "application/json"),
        ];
        let send = |method, path, body: &[u8]| service.send(method, path, &headers, body);
        let key = |key: &str| json!({"idempotency_key": key, "claimant": "a", "pending": true, "payload": 1});
        post("/claim", key("twice")).ok();
        let read = || {
            let reply = send("GET", "/metrics", b"");
            let lines = reply.text.lines();
            let problems = lines.filter_map(|line| {
                let (code, count) = line
                    .strip_prefix("dedup_gate_problems_total{code=\"")?
                    .split_once("\"} ")?;
                Some((code.to_owned(), count.parse().unwrap()))
            });
            problems.collect::<BTreeMap<String, u64>>()
        };
        let before = read();
        // Whoever watches for the first of its kind needs the zero before it.
        let schemas = service.get("/openapi.json").ok()["components"]["schemas"].clone();
        let codes = schemas["Code"]["enum"].as_array().unwrap().clone();
        let codes: BTreeSet<&str> = codes.iter().map(|code| code.as_str().unwrap()).collect();
        assert_eq!(
            before.keys().map(String::as_str).collect::<BTreeSet<_>>(),
            codes
        );
        assert!(before.values().all(|count| *count == 0), "{before:?}");

        let mut reused = key("twice");
        reused["payload"] = json!(2);
        let report = |key: &str, more: Value| {
            let mut report = json!({"idempotency_key": key});
            report
                .as_object_mut()
                .unwrap()
                .extend(more.as_object().unwrap().clone());
            post("/ledger/done", report)
        };
        let met = [
            send("POST", "/claim", b"{"),
            service.get("/ledger"),
            send("GET", "/nowhere", b""),
            send("GET", "/ledger/unheard-of", b""),
            send("DELETE", "/claim", b""),
            send("DELETE", "/health", b""),
            send("POST", "/claim", &[b' '; 2000]),
            service.send("POST", "/claim", &headers[..1], b"{}"),
            post("/claim", json!({})),
            post("/claim", reused),
            report("twice", json!({"claimant": "b"})),
        ];
        post(
            "/claim",
            json!({"idempotency_key": "again", "claimant": "a", "pending": true}),
        )
        .ok();
        let failed = json!({"idempotency_key": "again", "attempt": 1});
        post("/ledger/failed", failed.clone()).ok();
        post(
            "/claim",
            json!({"idempotency_key": "again", "claimant": "b", "pending": true}),
        )
        .ok();
        let met = met.into_iter().chain([
            report("again", json!({})),
            report("again", json!({"attempt": 1})),
        ]);
        let mut expected = BTreeMap::new();
        for reply in met {
            let code = reply.problem(reply.status);
            *expected.entry(code).or_insert(0) += 1;
        }
        report("again", json!({"attempt": 2, "external_id": "one"})).ok();
        let other = report("again", json!({"attempt": 2, "external_id": "two"}));
        assert_eq!(other.problem(409), "already_done");
        expected.insert("already_done".to_owned(), 1);
        let mut now = read();
        now.retain(|_, count| *count > 0);
        assert_eq!(now, expected);
        assert_eq!(
            now.len(),
            13,
            "all but those of a store that fails: {now:?}"
        );
    });
}

#[test]
fn what_is_pending_is_read_from_the_store() {
    on_both(|service| {
        let read = || {
            let samples = Samples::of(service);
            assert_eq!(samples.get("store_up"), Some(1.0));
            FROM_STORE.map(|name| samples.get(name).unwrap())
        };
        assert_eq!(read(), [0.0, 0.0, 0.0]);
        service.claim(json!({"idempotency_key": "gate"}));
        for (key, lease, age) in [("a", 60, 61), ("b", 6000, 4000), ("c", 6000, 0)] {
            service.pending_key(key, "x", lease);
            service.database.age(key, age);
        }
        let [pending, stale, oldest] = read();
        assert_eq!((pending, stale), (3.0, 1.0));
        // What took place since is the machine's business.
        assert!((4000.0..5000.0).contains(&oldest), "{oldest}");
        for key in ["a", "b"] {
            let report = json!({"idempotency_key": key, "attempt": 1});
            service.done(report).ok();
        }
        let [pending, stale, oldest] = read();
        assert_eq!((pending, stale), (1.0, 0.0));
        assert!((0.0..1000.0).contains(&oldest), "{oldest}");
    });
}

/// Where there are very many, a part is read, in the order of the index, and the number says so.
#[test]
fn reading_what_is_pending_is_bounded() {
    on_both(|service| {
        let numbers = match service.database.backend {
            Backend::Postgres => "generate_series(1, 12000) AS numbers (n)",
            Backend::Sqlite => {
                "(WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 12000) SELECT n FROM numbers)"
            }
        };
        // The later half of what is read is stale, and so is all that is not.
        let at = |minute: &str| format!("'2026-01-01T{minute}:00.000Z'");
        let (early, late, never) = (at("00:01"), at("00:02"), "'2999-01-01T00:00:00.000Z'");
        let lease = format!("CASE WHEN n <= 5000 THEN {never} ELSE {late} END");
        let changed = format!("CASE WHEN n <= 5000 THEN {early} ELSE {late} END");
        let cast = match service.database.backend {
            Backend::Postgres => "::timestamptz",
            Backend::Sqlite => "",
        };
        service.database.sql(&format!(
            "INSERT INTO run_ledger (idempotency_key, order_id, status, attempt, processed_at, recognised_from, lease_expires_at, updated_at)
             SELECT 'k' || n, 'o', 'pending', 1, {early}{cast}, {early}{cast}, ({lease}){cast}, ({changed}){cast} FROM {numbers}"
        ));
        let samples = Samples::of(service);
        assert_eq!(samples.get("pending_entries"), Some(10_000.0));
        assert_eq!(samples.get("stale_entries"), Some(5000.0));
    });
}

#[test]
fn what_is_pending_is_read_by_an_index() {
    on_both(|service| {
        service.pending_key("key", "a", 60);
        match service.database.backend {
            Backend::Postgres => {
                let counts = "SELECT seq_scan, (SELECT idx_scan FROM pg_stat_user_indexes WHERE indexrelname = 'run_ledger_open') FROM pg_stat_user_tables WHERE relname = 'run_ledger'";
                let read = || -> Vec<u64> {
                    let row = service.database.sql(counts);
                    row.split('|').map(|count| count.parse().unwrap()).collect()
                };
                // Few rows, and the planner knows: it would rather read the table.
                service.database.sql("ANALYZE");
                let before = read();
                wait_until("the server has counted", || {
                    Samples::of(service);
                    read()[1] > before[1]
                });
                assert_eq!(read()[0], before[0]);
            }
            Backend::Sqlite => {
                // The statement as src/store/sqlite/list.rs has it.
                let source = include_str!("../src/store/sqlite/list.rs");
                let (_, statement) = source.split_once("sql_query(\n        \"").unwrap();
                let (statement, _) = statement.split_once("\",").unwrap();
                let statement = statement.replace("\\\n", "");
                let plan = format!("EXPLAIN QUERY PLAN {statement}");
                let plan = service.database.sql(&plan);
                assert!(
                    plan.contains("USING INDEX run_ledger_open (status=?)"),
                    "{plan}"
                );
                assert!(!plan.contains("TEMP B-TREE"), "{plan}");
            }
        }
    });
}

#[test]
fn lanes_and_store_are_measured() {
    on_both(|service| {
        let before = Samples::of(service);
        for key in ["a", "b", "c"] {
            service.claim(json!({"idempotency_key": key, "claimant": "x"}));
            service.claim(json!({"idempotency_key": key, "claimant": "y"}));
            service.pending(json!({"idempotency_key": key, "claimant": "x"}));
            service
                .done(json!({"idempotency_key": key, "attempt": 1}))
                .ok();
        }
        let array = json!([{"idempotency_key": "d"}, {"idempotency_key": "e"}]);
        service.post("/claim", &array).ok();
        service.entry("a");
        service.get("/ledger").ok();
        service.get("/health/ready").ok();
        let now = Samples::of(service);
        // All claims come into the first lane. Postgres' second one has those that are known.
        let known = match service.database.backend {
            Backend::Postgres => 6.0,
            Backend::Sqlite => 0.0,
        };
        let counts = |name: &str, label: &str| {
            let family = format!("{name}{{{label}=");
            let counts = now.since(&before, &family);
            let label = |sample: String| sample.split('"').nth(1).unwrap().to_owned();
            let counts = counts.into_iter();
            counts
                .map(|(sample, count)| (label(sample), count))
                .collect()
        };
        let expected = |counts: &[(&str, f64)]| {
            let counts = counts.iter().filter(|(_, count)| *count > 0.0);
            counts
                .map(|(label, count)| ((*label).to_owned(), *count))
                .collect()
        };
        let lanes: BTreeMap<String, f64> =
            expected(&[("new", 9.0), ("known", known), ("acts", 3.0)]);
        assert_eq!(lanes, counts("batch_size_sum", "lane"));
        assert_eq!(lanes, counts("batch_size_count", "lane"));
        let operations: BTreeMap<String, f64> = expected(&[
            ("claim_new", 9.0),
            ("claim_known", known),
            ("claim_all", 1.0),
            ("act_gathered", 3.0),
            ("entry", 1.0),
            ("list", 1.0),
            ("ready", 1.0),
            ("backlog", 1.0),
            ("undelivered", 1.0),
        ]);
        assert_eq!(
            operations,
            counts("store_duration_seconds_count", "operation")
        );
    });
}

/// Neither ends the scrape: the rest is told in time, and nothing old is told for new.
#[test]
fn a_store_out_of_reach_leaves_the_other_metrics() {
    let postgres = Postgres::start(&[]);
    // A pool of one: a connection that is being made while the server is halted would not be.
    let settings = [("DATABASE_CONNECTIONS", "4")];
    let service = Service::start_on(Database::at(postgres.create("gate")), &settings);
    let before = Samples::of(&service);
    assert_eq!(before.get("store_up"), Some(1.0));
    let assert_partial = || {
        let reply = service.with_timeout(PROMISE).get("/metrics");
        assert_eq!(complaints(&reply.text), "");
        let samples = Samples::of(&service);
        assert_eq!(samples.get("store_up"), Some(0.0));
        assert_eq!(FROM_STORE.map(|name| samples.get(name)), [None; 3]);
        samples
    };
    postgres.end("KILL");
    let claim = json!({"idempotency_key": "key", "claimant": "a"});
    assert_eq!(
        service.post("/claim", &claim).problem(503),
        "store_unavailable"
    );
    let increase = assert_partial().since(&before, "problems_total");
    let expected = increases([("problems_total{code=\"store_unavailable\"}", 1.0)]);
    assert_eq!(increase, expected);
    postgres.start_again();
    wait_until("the store is back", || {
        Samples::of(&service).get("store_up") == Some(1.0)
    });
    // It takes connections and never answers.
    postgres.signal_all("STOP");
    assert_partial();
    postgres.signal_all("CONT");
    wait_until("the store is back", || {
        let samples = Samples::of(&service);
        FROM_STORE.iter().all(|name| samples.get(name).is_some())
    });
}

#[test]
fn a_file_that_is_gone_leaves_the_other_metrics() {
    let service = Service::start(Backend::Sqlite);
    let path = service.database.path();
    let aside = format!("{path}.aside");
    std::fs::rename(&path, &aside).unwrap();
    let samples = Samples::of(&service);
    assert_eq!(samples.get("store_up"), Some(0.0));
    assert_eq!(FROM_STORE.map(|name| samples.get(name)), [None; 3]);
    std::fs::rename(&aside, &path).unwrap();
    assert_eq!(Samples::of(&service).get("store_up"), Some(1.0));
}

/// The server is halted: what has come to it stays, and what comes then is to be seen waiting.
#[test]
fn queues_and_pool_are_shown() {
    let postgres = Postgres::start(&[]);
    let settings = [
        ("CLAIM_QUEUE", "2"),
        ("CLAIM_BATCH", "1"),
        ("DATABASE_CONNECTIONS", "4"),
    ];
    let service = Service::start_on(Database::at(postgres.create("gate")), &settings);
    // From here on both lanes, and the pool, have a connection.
    service.claim(json!({"idempotency_key": "key", "claimant": "a"}));
    service.pending(json!({"idempotency_key": "key", "claimant": "a"}));
    let done = json!({"idempotency_key": "key", "attempt": 1});
    service.done(done.clone()).ok();
    let calm = Samples::of(&service);
    for (name, value) in [
        ("queue_depth{lane=\"new\"}", 0.0),
        ("queue_depth{lane=\"known\"}", 0.0),
        ("queue_depth{lane=\"acts\"}", 0.0),
        ("pool_queue_depth", 0.0),
        ("pool_connections_in_use", 0.0),
        ("pool_connections_max", 1.0),
    ] {
        assert_eq!(calm.get(name), Some(value), "{name}");
    }
    postgres.signal_all("STOP");
    let is_seen = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for number in 0..8 {
            let claim = json!({"idempotency_key": format!("k-{number}"), "claimant": "a"});
            let service = &service;
            scope.spawn(move || service.post("/claim", &claim));
        }
        for _ in 0..4 {
            scope.spawn(|| service.done(done.clone()));
            scope.spawn(|| {
                while !is_seen.load(Ordering::SeqCst) {
                    service.get("/ledger/key");
                }
            });
        }
        // One of each lane is at the store.
        wait_until("all of it shows", || {
            let now = Samples::of(&service);
            now.get("queue_depth{lane=\"new\"}") == Some(2.0)
                && now.get("queue_depth{lane=\"acts\"}") == Some(3.0)
                && now.get("pool_connections_in_use") == Some(1.0)
                && now.get("pool_queue_depth") > Some(0.0)
                && now.get("problems_total{code=\"overloaded\"}") >= Some(5.0)
        });
        is_seen.store(true, Ordering::SeqCst);
    });
    postgres.signal_all("CONT");
    wait_until("nothing waits any more", || {
        let now = Samples::of(&service);
        now.get("queue_depth{lane=\"new\"}") == Some(0.0)
            && now.get("queue_depth{lane=\"acts\"}") == Some(0.0)
            && now.get("pool_connections_in_use") == Some(0.0)
    });
}

#[test]
fn it_needs_a_key_where_keys_are_configured() {
    let settings = [("API_KEYS", "n8n:s3cret,prometheus:read-only")];
    let service = Service::start_on(Database::new(Backend::Sqlite), &settings);
    assert_eq!(service.get("/metrics").problem(401), "unauthorized");
    let bearer = [("Authorization", "Bearer read-only")];
    assert_eq!(service.send("GET", "/metrics", &bearer, b"").status, 200);
    assert_eq!(service.send("HEAD", "/metrics", &bearer, b"").status, 200);
}

/// No label holds what a caller sent.
#[test]
fn metrics_name_no_key_and_no_caller() {
    let settings = [("API_KEYS", "n8n-name:s3cret")];
    let service = Service::start_on(Database::new(Backend::Sqlite), &settings);
    let claim = json!({"idempotency_key": "the-key", "order_id": "the-order", "claimant": "the-claimant", "pending": true});
    service.post_as("s3cret", "/claim", &claim).ok();
    let headers = [("X-API-Key", "s3cret"), ("X-Request-Id", "the-request")];
    service.send("GET", "/the-path?the-query=1", &headers, b"");
    let text = service.send("GET", "/metrics", &headers, b"").text;
    assert!(
        !text.contains("n8n-name") && !text.contains("s3cret"),
        "{text}"
    );
    assert!(!text.contains("\"the-"), "{text}");
}

// What is made of it, in deploy/.

/// The service's metrics, without the suffixes of histograms.
fn names_in(text: &str) -> BTreeSet<&str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| word.starts_with("dedup_gate_"))
        .collect()
}

fn assert_names_exist(expressions: &str) {
    let service = Service::start(Backend::Sqlite);
    let text = service.get("/metrics").text;
    let samples: BTreeSet<&str> = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split(['{', ' ']).next().unwrap())
        .collect();
    let names = names_in(expressions);
    assert!(!names.is_empty());
    for name in names {
        assert!(samples.contains(name), "{name} is no metric");
    }
}

fn promtool(arguments: &[&str]) {
    let said = said_by(
        Command::new("promtool")
            .current_dir(deploy("prometheus"))
            .args(arguments),
    );
    said.unwrap_or_else(|complaint| panic!("promtool {arguments:?}: {complaint}"));
}

#[test]
fn the_alert_rules_are_valid_and_go_off() {
    let rules = std::fs::read_to_string(deploy("prometheus/alerts.yml")).unwrap();
    assert_eq!(rules.matches("- alert:").count(), 4);
    assert_names_exist(&rules);
    promtool(&["check", "rules", "alerts.yml"]);
    promtool(&["check", "config", "prometheus.yml"]);
    promtool(&["test", "rules", "alerts_test.yml"]);
}

#[test]
fn the_dashboard_is_of_metrics_that_exist() {
    let dashboard = std::fs::read_to_string(deploy("grafana/dedup-gate.json")).unwrap();
    assert_names_exist(&dashboard);
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let ids: BTreeSet<u64> = panels
        .iter()
        .map(|panel| panel["id"].as_u64().unwrap())
        .collect();
    assert_eq!(ids.len(), panels.len());
    let targets = panels
        .iter()
        .flat_map(|panel| panel["targets"].as_array().unwrap());
    let expressions: Vec<String> = targets
        .map(|target| target["expr"].as_str().unwrap())
        .map(|expression| expression.replace("$__rate_interval", "5m"))
        .map(|expression| expression.replace("$__range", "6h"))
        .collect();
    // Whatever is counted or measured is to be seen.
    let service = Service::start(Backend::Sqlite);
    let shown = expressions.join("\n");
    for line in service.get("/metrics").text.lines() {
        if let Some(family) = line.strip_prefix("# TYPE ") {
            let family = family.split(' ').next().unwrap();
            assert!(shown.contains(family), "{family} is not shown");
        }
    }
    // As rules, the expressions are what promtool checks.
    let rules: Vec<Value> = (0..)
        .zip(&expressions)
        .map(
            |(number, expression)| json!({"record": format!("shown:{number}"), "expr": expression}),
        )
        .collect();
    let file = tempfile::NamedTempFile::new().unwrap();
    let rules = json!({"groups": [{"name": "dashboard", "rules": rules}]});
    std::fs::write(file.path(), rules.to_string()).unwrap();
    promtool(&["check", "rules", file.path().to_str().unwrap()]);
}

#[test]
fn the_readmes_name_every_metric_and_no_other() {
    let service = Service::start(Backend::Sqlite);
    let text = service.get("/metrics").text;
    let families: BTreeSet<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
        .collect();
    for readme in [
        include_str!("../README.md"),
        include_str!("../README.es.md"),
    ] {
        assert_eq!(names_in(readme), families);
    }
}
