//! `GET /openapi.json`: the description of everything else.

use std::sync::LazyLock;

use actix_web::HttpResponse;
use serde_json::{Value, json};
use utoipa::OpenApi;

use super::request::NoQuery;
use super::{auth, claim, health, key, ledger, problem};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "dedup-gate",
        description = "Makes n8n workflows safe to run twice: a gate that answers \"is this the first time?\" and a ledger of what became of the work.\n\nTimes are RFC 3339 in UTC with milliseconds. Unknown members and query parameters are refused. Every reply that is not 2xx is application/problem+json (RFC 9457).",
        license(name = "MIT", identifier = "MIT")
    ),
    tags(
        (name = "key", description = "Keys made of the values that identify the work"),
        (name = "claim", description = "Is this the first time?"),
        (name = "ledger", description = "What became of the work"),
        (name = "health", description = "How the service is")
    ),
    paths(
        key::derive,
        claim::claim,
        ledger::pending,
        ledger::done,
        ledger::failed,
        ledger::list,
        ledger::entry,
        health::alive,
        health::ready
    ),
    components(schemas(problem::ProblemReply))
)]
struct Document;

static TEXT: LazyLock<String> = LazyLock::new(|| {
    let mut document = serde_json::to_value(Document::openapi()).unwrap_or_default();
    complete(&mut document);
    format!("{document:#}\n")
});

/// The description, as JSON.
pub fn text() -> &'static str {
    &TEXT
}

/// The OpenAPI description.
pub async fn document(_: NoQuery) -> HttpResponse {
    HttpResponse::Ok()
        .content_type("application/json")
        .body(text())
}

/// Adds what holds for every operation, and what attributes cannot say.
fn complete(document: &mut Value) {
    document["paths"]["/openapi.json"] = json!({"get": {
        "tags": ["health"], "summary": "This description", "operationId": "openapi",
        "responses": {"200": {"description": "The OpenAPI description",
            "content": {"application/json": {"schema": {"type": "object"}}}}}
    }});
    document["components"]["securitySchemes"] = json!({
        "apiKey": {"type": "apiKey", "in": "header", "name": auth::API_KEY_HEADER,
            "description": "A secret of API_KEYS; what n8n's Header Auth credential sends"},
        "bearer": {"type": "http", "scheme": "bearer", "description": "The same secret"}
    });
    require_one_key(document, "KeyRequest", &["parts", "fields"]);
    require_one_key(
        document,
        "ClaimRequest",
        &["idempotency_key", "parts", "fields"],
    );
    for schema in ["KeyRequest", "ClaimRequest"] {
        let fields = &mut document["components"]["schemas"][schema]["properties"]["fields"];
        fields["minProperties"] = json!(1);
        fields["maxProperties"] = json!(64);
    }
    let many = &mut document["components"]["schemas"]["ClaimBody"]["oneOf"][1];
    many["minItems"] = json!(1);
    many["maxItems"] = json!(1000);
    document["components"]["schemas"]["ReportReply"]["unevaluatedProperties"] = json!(false);
    let Some(paths) = document["paths"].as_object_mut() else {
        return;
    };
    for (path, methods) in paths {
        for (method, operation) in methods.as_object_mut().into_iter().flatten() {
            let is_open = path.starts_with("/health") || path == "/openapi.json";
            operation["security"] = if is_open {
                json!([])
            } else {
                json!([{"apiKey": []}, {"bearer": []}])
            };
            let mut problems = vec![("422", "A member or parameter is at fault; see `errors`")];
            if !is_open {
                problems.push(("401", "No valid API key"));
            }
            if !matches!(path.as_str(), "/health" | "/openapi.json" | "/key") {
                problems.extend([
                    ("500", "A fault of the service"),
                    ("503", "The database is out of reach, or there is too much to do: ask again, with the same claimant"),
                ]);
            }
            if method == "post" {
                problems.extend([
                    ("400", "The body is not JSON, or is ambiguous"),
                    ("413", "The body is too large"),
                    ("415", "The body is not declared as JSON"),
                ]);
            }
            for (status, description) in problems {
                operation["responses"][status] = json!({
                    "description": description,
                    "content": {"application/problem+json":
                        {"schema": {"$ref": "#/components/schemas/Problem"}}}
                });
            }
            if !operation["responses"]["503"].is_null() {
                operation["responses"]["503"]["headers"] = json!({"Retry-After":
                    {"description": "Seconds to wait", "schema": {"type": "integer", "minimum": 1}}});
            }
        }
    }
}

/// Exactly one of these members is given, and null counts as absent.
fn require_one_key(document: &mut Value, schema: &str, members: &[&str]) {
    let choices: Vec<Value> = members
        .iter()
        .map(|given| {
            let properties: serde_json::Map<String, Value> = members
                .iter()
                .map(|member| {
                    let schema = if member == given {
                        json!({"not": {"type": "null"}})
                    } else {
                        json!({"type": "null"})
                    };
                    ((*member).to_owned(), schema)
                })
                .collect();
            json!({"required": [given], "properties": properties})
        })
        .collect();
    document["components"]["schemas"][schema]["oneOf"] = Value::from(choices);
}
