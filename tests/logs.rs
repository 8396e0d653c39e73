//! Requests have ids, a line each at debug, and faults one at warn or error; and no line says what
//! is nobody else's business.

use std::collections::BTreeSet;

use serde_json::json;

use super::helpers::postgres::Postgres;
use super::helpers::raw::Connection;
use super::helpers::{Backend, Database, Reply, Service, on_both, on_both_with, wait_until};

fn id_of(reply: &Reply) -> &str {
    let mut ids = reply.headers.get_all("x-request-id").iter();
    let id = ids.next().expect("an id").to_str().unwrap();
    assert!(ids.next().is_none());
    id
}

/// The lines about a request, which is logged after it is answered.
fn lines_about(service: &Service, id: &str, count: usize) -> Vec<String> {
    let about = format!("request_id={id} ");
    let mut lines = Vec::new();
    wait_until("it is logged", || {
        let log = service.log();
        let found = log.lines().filter(|line| line.contains(&about));
        lines = found.map(str::to_owned).collect();
        lines.len() >= count
    });
    lines
}

fn get_as(service: &Service, id: &str, path: &str) -> Reply {
    service.send("GET", path, &[("X-Request-Id", id)], b"")
}

#[test]
fn a_sound_id_is_returned() {
    let service = Service::start(Backend::Sqlite);
    let long = "x".repeat(128);
    for id in ["a", "9f2c-41d0", "!\"#$%&'()*+,-./:;<=>?@[]^_`{|}~", &long] {
        assert_eq!(id_of(&get_as(&service, id, "/health")), id);
    }
}

#[test]
fn an_unsound_id_is_replaced() {
    let service = Service::start(Backend::Sqlite);
    let long = "x".repeat(129);
    for id in ["", "a b", "a\tb", "naïve", "a\u{7f}", "\u{9b}31m", &long] {
        let mut connection = Connection::open(&service);
        connection.send(format!(
            "GET /health HTTP/1.1\r\nHost: test\r\nX-Request-Id: {id}\r\n\r\n"
        ));
        let reply = connection.reply();
        // What is not HTTP at all never gets this far.
        if reply.status == 400 {
            continue;
        }
        assert_eq!(reply.status, 200, "{id:?}");
        let made = id_of(&reply);
        assert_ne!(made, id);
        let is_sound = |c: char| c.is_ascii_hexdigit() || c == '-';
        assert!(!made.is_empty() && made.chars().all(is_sound), "{made}");
    }
}

#[test]
fn every_reply_has_an_id_of_its_own() {
    on_both_with(&[("API_KEYS", "n8n:s3cret")], |service| {
        let mut ids = BTreeSet::new();
        let mut count = 0;
        let key = ("X-API-Key", "s3cret");
        let json = ("Content-Type", "application/json");
        let body = br#"{"idempotency_key": "key"}"#.as_slice();
        for (method, path, headers, body, status) in [
            ("GET", "/health", [].as_slice(), b"".as_slice(), 200),
            ("GET", "/health/ready", &[], b"", 200),
            ("GET", "/openapi.json", &[], b"", 200),
            ("GET", "/metrics", &[key], b"", 200),
            ("HEAD", "/metrics", &[key], b"", 200),
            ("POST", "/claim", &[key, json], body, 200),
            ("GET", "/ledger/key", &[key], b"", 200),
            ("POST", "/claim", &[key, json], b"{", 400),
            ("POST", "/claim", &[json], body, 401),
            ("GET", "/nowhere", &[key], b"", 404),
            ("GET", "/nowhere", &[], b"", 401),
            ("DELETE", "/health", &[], b"", 405),
            ("DELETE", "/claim", &[key], b"", 405),
            ("POST", "/claim", &[key], body, 415),
            ("POST", "/claim", &[key, json], b"{}", 422),
        ] {
            let reply = service.send(method, path, headers, body);
            assert_eq!(reply.status, status, "{method} {path}");
            ids.insert(id_of(&reply).to_owned());
            count += 1;
        }
        assert_eq!(ids.len(), count);
    });
}

#[test]
fn a_request_without_a_path_is_answered_as_the_others() {
    let service = Service::start(Backend::Sqlite);
    let mut connection = Connection::open(&service);
    connection.send("OPTIONS * HTTP/1.1\r\nHost: test\r\n\r\n");
    let reply = connection.reply();
    assert_eq!(reply.problem(404), "not_found");
    id_of(&reply);
}

#[test]
fn each_request_is_a_line_at_debug() {
    let settings = [("API_KEYS", "n8n:s3cret"), ("RUST_LOG", "dedup_gate=debug")];
    on_both_with(&settings, |service| {
        let key = ("X-API-Key", "s3cret");
        let said = |id: &str, method: &str, path: &str, headers: &[(&str, &str)]| {
            let headers = [&[("X-Request-Id", id)], headers].concat();
            let reply = service.send(method, path, &headers, b"");
            assert_eq!(id_of(&reply), id);
            let mut lines = lines_about(service, id, 1);
            assert_eq!(lines.len(), 1, "{lines:?}");
            let line = lines.remove(0);
            assert!(line.contains(" DEBUG "), "{line}");
            let (_, rest) = line.split_once(&format!("request_id={id} ")).unwrap();
            let (rest, milliseconds) = rest.split_once(" ms=").unwrap();
            assert!(milliseconds.parse::<f64>().unwrap() >= 0.0, "{line}");
            rest.to_owned()
        };
        // The key in the path, and the query, stay out of it.
        assert_eq!(
            said("r1", "GET", "/ledger/anna%40example.com", &[key]),
            "method=GET route=/ledger/{idempotency_key} status=404 api_key=n8n"
        );
        assert_eq!(
            said("r2", "GET", "/ledger?order_id=anna", &[key]),
            "method=GET route=/ledger status=200 api_key=n8n"
        );
        assert_eq!(
            said("r3", "GET", "/anna/nowhere", &[key]),
            "method=GET route=- status=404 api_key=n8n"
        );
        assert_eq!(
            said("r4", "GET", "/health", &[]),
            "method=GET route=/health status=200 api_key=-"
        );
        assert_eq!(
            said("r5", "DELETE", "/claim", &[("X-API-Key", "wrong")]),
            "method=DELETE route=/claim status=401 api_key=-"
        );
        assert_eq!(
            said("r6", "DELETE", "/claim", &[key]),
            "method=DELETE route=/claim status=405 api_key=n8n"
        );
        assert!(!service.log().contains("anna"), "{}", service.log());
    });
}

#[test]
fn nothing_is_logged_of_a_request_by_default() {
    let mut service = Service::start(Backend::Sqlite);
    get_as(&service, "the-id", "/health");
    get_as(&service, "the-id", "/nowhere");
    service.signal("TERM");
    service.wait();
    assert!(!service.log().contains("the-id"), "{}", service.log());
}

#[test]
fn a_store_out_of_reach_is_a_line_at_warn() {
    let postgres = Postgres::start(&[]);
    let service = Service::start_on(Database::at(postgres.create("gate")), &[]);
    let headers = |id| [("X-Request-Id", id), ("Content-Type", "application/json")];
    let claim = br#"{"idempotency_key": "anna", "claimant": "a", "payload": "p4yload"}"#;
    postgres.end("INT");
    let reply = service.send("POST", "/claim", &headers("r1"), claim);
    assert_eq!(reply.problem(503), "store_unavailable");
    assert_eq!(get_as(&service, "r2", "/ledger/anna").status, 503);
    // Not a problem of whoever asks, but a fault all the same.
    assert_eq!(get_as(&service, "r3", "/metrics").status, 200);
    for (id, said) in [
        ("r1", "method=POST route=/claim status=503 api_key=-: "),
        (
            "r2",
            "method=GET route=/ledger/{idempotency_key} status=503 api_key=-: ",
        ),
        ("r3", "method=GET route=/metrics status=200 api_key=-: "),
    ] {
        let lines = lines_about(&service, id, 1);
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains(" WARN "), "{lines:?}");
        let said = format!("request_id={id} {said}the database is out of reach: ");
        assert!(lines[0].contains(&said), "{lines:?}");
    }
    let log = service.log();
    let logged = log.lines().filter(|line| line.contains(" WARN ")).count();
    assert_eq!(logged, 3, "{log}");
    assert!(!log.contains("anna") && !log.contains("p4yload"), "{log}");
}

#[test]
fn a_fault_of_the_service_is_a_line_at_error() {
    on_both(|service| {
        service.pending_key("key", "a", 60);
        let done = json!({"idempotency_key": "key", "attempt": 1, "result": {"r3sult": 1}});
        service.done(done).ok();
        // Somebody has been at the tables.
        service
            .database
            .sql("UPDATE run_ledger SET result = '{\"r3sult\": 1'");
        let reply = get_as(service, "r1", "/ledger/key");
        assert_eq!(reply.problem(500), "internal");
        let lines = lines_about(service, "r1", 1);
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains(" ERROR "), "{lines:?}");
        assert!(lines[0].contains("unreadable result"), "{lines:?}");
        assert!(!service.log().contains("r3sult"), "{}", service.log());
    });
}

/// Whatever is turned on, and whatever goes wrong.
#[test]
fn no_line_says_a_secret_a_payload_or_a_result() {
    let settings = [("API_KEYS", "n8n:s3cret"), ("RUST_LOG", "trace")];
    on_both_with(&settings, |service| {
        let post = |path: &str, body: &serde_json::Value| service.post_as("s3cret", path, body);
        let claim = json!({"idempotency_key": "key", "claimant": "cl4imant", "payload": {"a": "p4yload"}, "pending": true});
        post("/claim", &claim).ok();
        post(
            "/claim",
            &json!([{"idempotency_key": "other", "payload": "p4yload"}]),
        )
        .ok();
        let done = json!({"idempotency_key": "key", "attempt": 1, "external_id": "ext3rnal", "result": {"a": "r3sult"}});
        post("/ledger/done", &done).ok();
        post("/claim", &claim).ok();
        let refused = json!({"idempotency_key": "key", "payload": "p4yload", "unknown": "p4yload"});
        assert_eq!(post("/claim", &refused).status, 422);
        let reason = json!({"idempotency_key": "key", "attempt": 1, "reason": "r3ason"});
        assert_eq!(post("/ledger/failed", &reason).status, 409);
        let headers = [("Authorization", "Bearer s3cret"), ("X-Request-Id", "last")];
        service.send("GET", "/ledger?order_id=ord3r", &headers, b"");
        let wrong = [("X-API-Key", "wr0ng"), ("Content-Type", "application/json")];
        service.send("POST", "/claim", &wrong, b"{\"payload\": \"p4yload\"");
        lines_about(service, "last", 1);
        let log = service.log();
        for word in [
            "s3cret", "wr0ng", "p4yload", "r3sult", "r3ason", "ext3rnal", "cl4imant", "ord3r",
        ] {
            assert!(!log.contains(word), "{word}: {log}");
        }
    });
}

/// The password of the database neither, where it cannot be reached.
#[test]
fn no_line_says_the_databases_password() {
    let postgres = Postgres::start(&[]);
    let url = postgres.create("gate");
    let url = url.replace("postgres@", "postgres:passw0rd@");
    let settings = [("RUST_LOG", "trace")];
    let service = Service::start_on(Database::at(url), &settings);
    service.claim(json!({"idempotency_key": "key"}));
    postgres.end("INT");
    assert_eq!(get_as(&service, "r1", "/health/ready").status, 503);
    assert_eq!(get_as(&service, "r2", "/ledger/key").status, 503);
    lines_about(&service, "r2", 2);
    assert!(!service.log().contains("passw0rd"), "{}", service.log());
}
