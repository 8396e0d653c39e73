//! The OpenAPI description says what the service does: all of it, and nothing else.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;
use std::sync::LazyLock;

use serde_json::{Map, Value, json};

use super::helpers::raw::Connection;
use super::helpers::service::run;
use super::helpers::{Backend, Database, Service, on_both};

const METHODS: [&str; 8] = [
    "get", "head", "post", "put", "patch", "delete", "options", "trace",
];

/// Every `code` of the contract that the service has by now.
const CODES: [&str; 17] = [
    "malformed_json",
    "unauthorized",
    "not_found",
    "unknown_key",
    "method_not_allowed",
    "already_done",
    "superseded",
    "not_holder",
    "conflict",
    "payload_too_large",
    "unsupported_media_type",
    "invalid_request",
    "attempt_required",
    "key_reused",
    "internal",
    "store_unavailable",
    "overloaded",
];

/// The description as the binary prints it.
static DOCUMENT: LazyLock<Value> = LazyLock::new(|| serde_json::from_str(&printed()).unwrap());

fn printed() -> String {
    let output = run(&Database::new(Backend::Sqlite), &["openapi"], &[]);
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

/// All that is described is there where the lab is.
const LAB: (&str, &str) = ("LAB", "true");

/// Whether something is done by a `GET`, which is no `HEAD` then.
fn acts(path: &str) -> bool {
    path.starts_with("/lab/charge-") || path == "/lab/reset-lab"
}

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn paths() -> &'static Map<String, Value> {
    DOCUMENT["paths"].as_object().unwrap()
}

/// Path, method and description of every operation.
fn operations() -> impl Iterator<Item = (&'static str, &'static str, &'static Value)> {
    paths().iter().flat_map(|(path, item)| {
        let item = item.as_object().unwrap();
        item.iter()
            .map(|(method, operation)| (path.as_str(), method.as_str(), operation))
    })
}

/// What a response's schema says of the codes in it.
fn codes_of(response: &'static Value) -> impl Iterator<Item = &'static str> {
    let schema = &response["content"]["application/problem+json"]["schema"];
    let codes = &schema["allOf"][1]["properties"]["code"]["enum"];
    let codes = codes.as_array().into_iter().flatten();
    codes.map(|code| code.as_str().unwrap())
}

/// The paths that take a body.
pub(super) fn posts() -> BTreeSet<&'static str> {
    operations()
        .filter(|(_, _, operation)| operation.get("requestBody").is_some())
        .map(|(path, _, _)| path)
        .collect()
}

/// Whether the description announces such a problem for the operation at a path, be that a
/// template or what is made of one.
pub(super) fn documented(method: &str, path: &str, status: u16, code: &str) -> bool {
    let item = paths().get(path).unwrap_or_else(|| {
        assert!(path.starts_with("/ledger/"), "{path}");
        &paths()["/ledger/{idempotency_key}"]
    });
    let response = &item[method]["responses"][status.to_string()];
    codes_of(response).any(|described| described == code)
}

#[test]
fn the_file_in_the_repository_is_the_description() {
    let file = std::fs::read_to_string(repository().join("openapi.json")).unwrap_or_default();
    assert!(
        file == printed(),
        "openapi.json is not what the binary prints; renew it: cargo run -- openapi > openapi.json"
    );
}

#[test]
fn the_service_gives_its_description() {
    on_both(|service| {
        let reply = service.get("/openapi.json");
        assert_eq!(reply.headers["content-type"], "application/json");
        assert_eq!(reply.ok(), *DOCUMENT);
    });
}

#[test]
fn every_route_is_described_and_every_described_path_is_a_route() {
    let routes = std::fs::read_to_string(repository().join("src/api/mod.rs")).unwrap();
    let routes: BTreeSet<&str> = routes
        .split("resource(\"")
        .skip(1)
        .map(|rest| rest.split('"').next().unwrap())
        .collect();
    let described: BTreeSet<&str> = paths().keys().map(String::as_str).collect();
    assert_eq!(described, routes);
}

#[test]
fn a_path_answers_the_methods_that_are_described_and_no_others() {
    let service = Service::start_on(Database::new(Backend::Sqlite), &[LAB]);
    for (path, item) in paths() {
        for method in METHODS {
            // RFC 9110: whatever answers GET answers HEAD.
            let described = match method {
                "head" if !acts(path) => "get",
                method => method,
            };
            let mut connection = Connection::open(&service);
            connection.send(format!(
                "{} {} HTTP/1.1\r\nHost: test\r\n\r\n",
                method.to_uppercase(),
                path.replace("{idempotency_key}", "x"),
            ));
            let reply = connection.reply_to(method);
            let status = reply.status;
            let is_described = item.get(described).is_some();
            assert_eq!(status != 405, is_described, "{method} {path}: {status}");
            if let Some(allow) = reply.headers.get("allow") {
                let allowed = allow.to_str().unwrap().to_lowercase();
                let allowed: BTreeSet<&str> =
                    allowed.split(", ").filter(|m| *m != "head").collect();
                let methods = item.as_object().unwrap().keys().map(String::as_str);
                assert_eq!(allowed, methods.collect(), "{path}");
            }
        }
    }
}

#[test]
fn every_code_is_described() {
    let schemas = &DOCUMENT["components"]["schemas"];
    let described: BTreeSet<&str> = schemas["Code"]["enum"]
        .as_array()
        .unwrap()
        .iter()
        .map(|code| code.as_str().unwrap())
        .collect();
    assert_eq!(described, BTreeSet::from(CODES));
    // Each belongs to an operation, but for those that belong to none by their nature.
    let announced: BTreeSet<&str> = operations()
        .flat_map(|(_, _, operation)| operation["responses"].as_object().unwrap().values())
        .flat_map(codes_of)
        .chain(["not_found", "method_not_allowed"])
        .collect();
    assert_eq!(announced, BTreeSet::from(CODES));
}

#[test]
fn all_but_health_and_description_need_a_key() {
    let schemes = &DOCUMENT["components"]["securitySchemes"];
    assert_eq!(schemes["apiKey"]["name"], "X-API-Key");
    assert_eq!(schemes["bearer"]["scheme"], "bearer");
    for (path, method, operation) in operations() {
        let is_open = ["/health", "/health/ready", "/openapi.json", "/lab"].contains(&path);
        let expected = if is_open {
            json!([])
        } else {
            json!([{"apiKey": []}, {"bearer": []}])
        };
        assert_eq!(operation["security"], expected, "{method} {path}");
        assert_eq!(
            operation["responses"]["401"].is_null(),
            is_open,
            "{method} {path}"
        );
    }
}

#[test]
fn every_operation_is_described() {
    let mut ids = BTreeSet::new();
    for (path, method, operation) in operations() {
        for member in ["summary", "description", "operationId"] {
            let text = operation[member].as_str().unwrap_or_default();
            assert!(!text.is_empty(), "{method} {path} has no {member}");
        }
        assert!(
            ids.insert(operation["operationId"].as_str()),
            "{method} {path}"
        );
        for parameter in operation["parameters"].as_array().into_iter().flatten() {
            assert!(parameter["description"].is_string(), "{path} {parameter}");
        }
        for (status, response) in operation["responses"].as_object().unwrap() {
            let media_type = match status.as_str() {
                "200" if path == "/metrics" => "text/plain",
                "200" if path == "/lab" => "text/html",
                "200" => "application/json",
                _ => "application/problem+json",
            };
            let content = response["content"].as_object().unwrap();
            assert_eq!(
                content.keys().collect::<Vec<_>>(),
                [media_type],
                "{method} {path} {status}"
            );
            assert!(
                response["description"].is_string(),
                "{method} {path} {status}"
            );
        }
    }
}

#[test]
fn every_member_is_described() {
    for (name, schema) in DOCUMENT["components"]["schemas"].as_object().unwrap() {
        for (member, schema) in schema["properties"].as_object().into_iter().flatten() {
            let choices = schema["oneOf"].as_array();
            let described = schema["description"].is_string()
                || choices.is_some_and(|choices| {
                    choices
                        .iter()
                        .any(|choice| choice["description"].is_string())
                });
            assert!(described, "{name}.{member}: {schema}");
        }
    }
}

/// What a body or its schema gives as examples.
fn examples(operation: &'static Value) -> Vec<&'static Value> {
    let content = &operation["requestBody"]["content"]["application/json"];
    let named = content["examples"].as_object().into_iter().flatten();
    let mut examples: Vec<&Value> = named.map(|(_, example)| &example["value"]).collect();
    if let Some(reference) = content["schema"]["$ref"].as_str() {
        let schema = DOCUMENT.pointer(reference.trim_start_matches('#')).unwrap();
        examples.extend(schema.get("example"));
    }
    examples
}

#[test]
fn every_example_is_a_request_that_is_accepted() {
    on_both(|service| {
        for (path, method, operation) in operations() {
            if method != "post" || operation.get("requestBody").is_none() {
                continue;
            }
            assert!(!examples(operation).is_empty(), "{path} has no example");
            for example in examples(operation) {
                // The reports are about a key that was claimed.
                let status = service.post(path, example).status;
                let is_report = path.starts_with("/ledger/") && path != "/ledger/pending";
                let accepted: &[u16] = if is_report { &[200, 409] } else { &[200] };
                assert!(accepted.contains(&status), "{path} {example}: {status}");
            }
        }
    });
}

#[test]
fn a_key_that_is_named_like_a_report_is_read_as_described() {
    on_both(|service| {
        for path in posts() {
            if let Some(name) = path.strip_prefix("/ledger/") {
                assert!(paths()[path].get("get").is_some(), "{path}");
                service.claim(json!({"idempotency_key": name}));
                assert_eq!(service.get(path).ok()["idempotency_key"], name);
            }
        }
    });
}

/// A request that follows a link has its unsound parameters replaced by those of the link, and
/// schemathesis would wonder why it is accepted: there, sound ones are sent alone.
const SETTINGS: &str = "\
[phases.stateful.generation]
mode = \"positive\"
max-examples = 20
";

/// Lets schemathesis loose on a service: it makes requests of the description, sound and
/// unsound, and compares the replies with what the description says.
fn schemathesis(backend: Backend) {
    let seed = std::env::var("SEED").unwrap_or_else(|_| "2041".into());
    println!("SEED={seed}");
    let service = Service::start_on(Database::new(backend), &[("API_KEYS", "n8n:s3cret"), LAB]);
    // Not among the checks: `positive_data_acceptance`, since what a schema lets pass may
    // rightly be refused (an unknown key, a text of 255 characters that has more bytes, a
    // cursor that nobody gave, `lease_seconds` without `pending`).
    let said = run_phases(
        &service,
        &seed,
        &["Examples", "Coverage", "Fuzzing"],
        "positive_data_acceptance",
    );
    let count = operations().count();
    assert!(said.contains(&format!("Tested: {count}")), "{said}");
    // Now and then the stateful phase takes a parameter for unsound that it did not send.
    run_phases(
        &service,
        &seed,
        &["Stateful"],
        "positive_data_acceptance,negative_data_rejection",
    );
    assert!(!service.log().contains("panicked"), "{}", service.log());
}

/// Runs some of schemathesis' phases with all checks but these, and gives its summary.
fn run_phases(service: &Service, seed: &str, phases: &[&str], excluded_checks: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("schemathesis.toml"), SETTINGS).unwrap();
    let output = Command::new("schemathesis")
        .current_dir(folder.path())
        .args(["run", &format!("{}/openapi.json", service.base)])
        .args(["--header", "X-API-Key: s3cret"])
        .args(["--checks", "all", "--exclude-checks", excluded_checks])
        .args(["--phases", &phases.join(",").to_lowercase()])
        .args(["--max-examples", "50", "--seed", seed])
        // Keys are of the test, not of chance: headers that are no HTTP never reach the service.
        .args(["--generation-with-security-parameters", "false"])
        .args(["--generation-database", "none", "--warnings", "off"])
        .args(["--continue-on-failure", "--no-color"])
        .output()
        .expect("schemathesis is needed: scripts/test installs it");
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    let backend = service.database.backend;
    assert!(
        output.status.success(),
        "on {backend:?}, seed {seed}:\n{said}{complained}"
    );
    for phase in phases {
        assert!(said.contains(&format!("✅ {phase}")), "{phase}: {said}");
    }
    said.into_owned()
}

#[test]
fn schemathesis_finds_no_fault_on_sqlite() {
    schemathesis(Backend::Sqlite);
}

#[test]
fn schemathesis_finds_no_fault_on_postgres() {
    schemathesis(Backend::Postgres);
}
