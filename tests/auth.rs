//! API keys: who may call, and who is who.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use serde_json::{Value, json};

use super::helpers::{Backend, Database, Reply, Service};

/// Two names; the first has a secret that is going and one that is coming.
const API_KEYS: &str = "n8n:old-secret,n8n:new-secret,shop:shop-secret";

/// A service with these keys. What is tested is in front of the store.
fn service() -> Service {
    let settings = [("API_KEYS", API_KEYS)];
    Service::start_on(Database::new(Backend::Sqlite), &settings)
}

fn claim_as(service: &Service, secret: &str, key: &str, claimant: &str) -> Value {
    let claim = json!({"idempotency_key": key, "claimant": claimant});
    service.post_as(secret, "/claim", &claim).ok()
}

/// Lists, with this header.
fn list(service: &Service, header: &str, value: &str) -> Reply {
    service.send("GET", "/ledger", &[(header, value)], b"")
}

fn assert_unauthorized(reply: &Reply) {
    assert_eq!(reply.problem(401), "unauthorized");
    assert!(
        reply.headers["www-authenticate"]
            .to_str()
            .unwrap()
            .starts_with("Bearer")
    );
}

#[test]
fn every_key_is_let_in() {
    let service = service();
    for secret in ["old-secret", "new-secret", "shop-secret"] {
        assert_eq!(list(&service, "X-API-Key", secret).status, 200);
        assert_eq!(
            list(&service, "Authorization", &format!("Bearer {secret}")).status,
            200
        );
    }
}

#[test]
fn the_scheme_is_written_in_any_case() {
    let service = service();
    for scheme in ["Bearer", "bearer", "BEARER", "bEaReR"] {
        let reply = list(&service, "Authorization", &format!("{scheme} shop-secret"));
        assert_eq!(reply.status, 200, "{scheme}");
    }
    assert_eq!(list(&service, "x-api-key", "shop-secret").status, 200);
}

#[test]
fn without_a_key_nobody_is_let_in() {
    let service = service();
    let claim = json!({"idempotency_key": "key"});
    for path in [
        "/key",
        "/retry",
        "/claim",
        "/ledger/pending",
        "/ledger/done",
        "/ledger/failed",
        "/ledger/renew",
        "/ledger/review",
        "/ledger/reset",
    ] {
        assert_unauthorized(&service.post(path, &claim));
    }
    for path in [
        "/ledger",
        "/ledger/key",
        "/ledger/pending",
        "/metrics",
        "/nowhere",
    ] {
        assert_unauthorized(&service.get(path));
    }
    assert_eq!(
        service
            .database
            .sql("SELECT count(*) FROM processed_orders"),
        "0"
    );
}

#[test]
fn what_is_no_key_is_not_let_in() {
    let service = service();
    let long = "a".repeat(8000);
    let longer = format!("shop-secret{long}");
    for secret in [
        "",
        "shop",
        "shop-secre",
        "shop-secrets",
        "shop-secret,old-secret",
        "SHOP-SECRET",
        "shop:shop-secret",
        "n8n",
        API_KEYS,
        &long,
        &longer,
    ] {
        assert_unauthorized(&list(&service, "X-API-Key", secret));
        assert_unauthorized(&list(
            &service,
            "Authorization",
            &format!("Bearer {secret}"),
        ));
    }
}

#[test]
fn another_scheme_is_not_let_in() {
    let service = service();
    for value in [
        "shop-secret",
        "Bearer",
        "Bearershop-secret",
        "Basic shop-secret",
        "Basic c2hvcDpzaG9wLXNlY3JldA==",
        "Token shop-secret",
    ] {
        assert_unauthorized(&list(&service, "Authorization", value));
    }
}

#[test]
fn bytes_that_are_no_text_are_not_let_in() {
    let service = service();
    let secrets = [
        &b"\xff\xfe"[..],
        b"shop-secret\xe9",
        "shop-s\u{e9}cret".as_bytes(),
    ];
    for secret in secrets {
        for header in ["X-API-Key: ", "Authorization: Bearer "] {
            let answer = answer_to_bytes(&service, &[header.as_bytes(), secret].concat());
            assert!(answer.starts_with("HTTP/1.1 401 "), "{answer}");
        }
    }
    let answer = answer_to_bytes(&service, b"X-API-Key: shop-secret");
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
}

/// The answer to `GET /ledger` with a header that no client would send.
fn answer_to_bytes(service: &Service, header: &[u8]) -> String {
    let address = service.base.trim_start_matches("http://");
    let mut connection = TcpStream::connect(address).unwrap();
    let head = b"GET /ledger HTTP/1.1\r\nHost: gate\r\nConnection: close\r\n";
    let request = [head, header, b"\r\n\r\n"].concat();
    connection.write_all(&request).unwrap();
    let mut answer = String::new();
    connection.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn a_wrong_key_is_answered_before_the_body_is_read() {
    let service = service();
    let reply = service.send("POST", "/claim", &[("X-API-Key", "wrong")], b"{");
    assert_unauthorized(&reply);
}

#[test]
fn what_tells_of_the_service_itself_needs_no_key() {
    let service = service();
    for path in ["/health", "/health/ready", "/openapi.json"] {
        assert_eq!(service.get(path).status, 200);
        let wrong = [("X-API-Key", "wrong")];
        assert_eq!(service.send("GET", path, &wrong, b"").status, 200);
    }
}

#[test]
fn without_keys_everybody_is_let_in() {
    let service = Service::start(Backend::Sqlite);
    assert_eq!(service.get("/ledger").status, 200);
    assert_eq!(list(&service, "X-API-Key", "any").status, 200);
}

// Who is who.

#[test]
fn both_secrets_of_a_name_are_one_claimant() {
    for backend in Backend::ALL {
        let service = Service::start_on(Database::new(backend), &[("API_KEYS", API_KEYS)]);
        assert_eq!(
            claim_as(&service, "old-secret", "key", "7:0:0")["claimed"],
            true
        );
        assert_eq!(
            claim_as(&service, "new-secret", "key", "7:0:0")["replayed"],
            true
        );
        let open = json!({"idempotency_key": "key", "claimant": "7:0:0"});
        let opened = service.post_as("new-secret", "/ledger/pending", &open).ok();
        assert_eq!(opened["status"], "pending");
        let done = service.post_as("old-secret", "/ledger/done", &open).ok();
        assert_eq!(done["status"], "done");
    }
}

#[test]
fn equal_claimants_of_two_names_are_two_claimants() {
    for backend in Backend::ALL {
        let service = Service::start_on(Database::new(backend), &[("API_KEYS", API_KEYS)]);
        assert_eq!(
            claim_as(&service, "old-secret", "key", "7:0:0")["claimed"],
            true
        );
        assert_eq!(
            claim_as(&service, "shop-secret", "key", "7:0:0")["claimed"],
            false
        );
        let same = json!({"idempotency_key": "key", "claimant": "7:0:0", "attempt": 1});
        let open = json!({"idempotency_key": "key", "claimant": "7:0:0"});
        let opened = service
            .post_as("shop-secret", "/ledger/pending", &open)
            .ok();
        assert_eq!(opened["claimed"], false);
        for path in ["/ledger/done", "/ledger/failed"] {
            let reply = service.post_as("shop-secret", path, &same);
            assert_eq!(reply.problem(409), "not_holder");
        }
    }
}

#[test]
fn a_claimant_outlives_the_rotation_of_its_secret() {
    let database = Arc::new(Database::new(Backend::Sqlite));
    let start = |keys| Service::start_beside(Arc::clone(&database), &[("API_KEYS", keys)]);
    let before = start("n8n:old-secret");
    assert_eq!(
        claim_as(&before, "old-secret", "key", "7:0:0")["claimed"],
        true
    );
    drop(before);
    let after = start("n8n:new-secret");
    assert_unauthorized(&list(&after, "X-API-Key", "old-secret"));
    assert_eq!(
        claim_as(&after, "new-secret", "key", "7:0:0")["replayed"],
        true
    );
}

#[test]
fn a_claimant_without_a_key_is_not_the_one_with_a_key() {
    let database = Arc::new(Database::new(Backend::Sqlite));
    let before = Service::start_beside(Arc::clone(&database), &[]);
    let claim = json!({"idempotency_key": "key", "claimant": "7:0:0"});
    assert_eq!(before.claim(claim)["claimed"], true);
    drop(before);
    let after = Service::start_beside(database, &[("API_KEYS", API_KEYS)]);
    assert_eq!(
        claim_as(&after, "old-secret", "key", "7:0:0")["claimed"],
        false
    );
}
