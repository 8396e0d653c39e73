//! `GET /openapi.json`: the description of everything else.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use actix_web::HttpResponse;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::OpenApi;

use super::outbox::MAX_DELAY;
use super::problem::Code;
use super::request::NoQuery;
use super::request_log::REQUEST_ID_HEADER;
use super::{auth, claim, health, key, lab, ledger, metrics, outbox, problem, retry, review};
use crate::domain::retry::MAX_RETRY_AFTER;

/// Control characters, as a part of a class of a regular expression.
const CONTROL: &str = r"\u0000-\u001f\u007f-\u009f";

/// The extension in which an operation names the codes of its own problems; it becomes
/// responses.
const PROBLEMS: &str = "x-problems";

#[derive(OpenApi)]
#[openapi(
    info(
        title = "dedup-gate",
        description = "Makes n8n workflows safe to run twice: a gate that answers \"is this the first time?\" and a ledger of what became of the work.\n\nTimes are RFC 3339 in UTC with milliseconds. Unknown members and query parameters are refused, and null in an optional member means that it is absent (in `payload` and `result` it is a value). A body has 256 KiB at most (BODY_LIMIT) and nests 128 deep at most; a member given twice, a lone surrogate or a number beyond the range of a double is malformed. Lengths are counted in bytes of UTF-8.\n\nA duplicate is a success. Every reply that is not 2xx is application/problem+json (RFC 9457): beside those named below, 404 `not_found` for an unknown path, and 405 `method_not_allowed` with `Allow`. Whatever answers GET answers HEAD, but for what charges or empties the lab. A request may name itself by `X-Request-Id` (1 to 128 visible ASCII characters; another one is replaced); the reply has the id by which the service's log knows it.",
        license(name = "MIT", identifier = "MIT")
    ),
    tags(
        (name = "key", description = "Keys made of the values that identify the work"),
        (name = "claim", description = "Is this the first time?"),
        (name = "ledger", description = "What became of the work"),
        (name = "outbox", description = "What must happen after the work, delivered at least once"),
        (name = "retry", description = "What a failed call means"),
        (name = "health", description = "How the service is"),
        (name = "lab", description = "Retries of one payment, with and without a key; where the service runs with LAB alone, else 404. Its accounts, keys and ledger are its own")
    ),
    paths(
        key::derive,
        claim::claim,
        ledger::pending,
        ledger::done,
        ledger::failed,
        ledger::renew,
        review::review,
        review::reset,
        ledger::list,
        ledger::entry,
        outbox::list_effects,
        outbox::effect,
        outbox::redeliver,
        retry::advise,
        health::alive,
        health::ready,
        metrics::scrape,
        lab::page,
        lab::charge_unsafe,
        lab::charge_in_memory,
        lab::charge_idempotent,
        lab::state,
        lab::summary,
        lab::outbox,
        lab::reset
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
        "description": "Describes every endpoint, as `dedup-gate openapi` prints it.",
        "responses": {"200": {"description": "The OpenAPI description",
            "content": {"application/json": {"schema": {"type": "object"}}}}}
    }});
    document["components"]["securitySchemes"] = json!({
        "apiKey": {"type": "apiKey", "in": "header", "name": auth::API_KEY_HEADER,
            "description": "A secret of API_KEYS; what n8n's Header Auth credential sends. Where API_KEYS is not set, none is needed."},
        "bearer": {"type": "http", "scheme": "bearer", "description": "The same secret"}
    });
    document["components"]["headers"] = json!({REQUEST_ID_HEADER: {"required": true,
        "description": "The id of the request: the caller's, or one that was made",
        "schema": {"type": "string", "pattern": "^[!-~]+$", "minLength": 1, "maxLength": 128}}});
    complete_schemas(&mut document["components"]["schemas"]);
    let Some(paths) = document["paths"].as_object_mut() else {
        return;
    };
    add_keys_named_like_reports(paths);
    for (path, methods) in &mut *paths {
        if path != "/ledger" && !path.starts_with("/lab/") {
            continue;
        }
        let parameters = methods.pointer_mut("/get/parameters");
        for parameter in parameters
            .and_then(Value::as_array_mut)
            .into_iter()
            .flatten()
        {
            let name = parameter["name"].as_str().unwrap_or_default().to_owned();
            add_pattern(&name, &mut parameter["schema"]);
        }
    }
    add_links(paths);
    for (path, methods) in paths {
        for (method, operation) in methods.as_object_mut().into_iter().flatten() {
            complete_operation(path, method, operation);
        }
    }
}

fn complete_schemas(schemas: &mut Value) {
    let recipes = [("parts", "array"), ("fields", "object")];
    require_one(&mut schemas["KeyRequest"], &recipes);
    let keys = [&[("idempotency_key", "string")], &recipes[..]].concat();
    require_one(&mut schemas["ClaimRequest"], &keys);
    let causes = [("status_code", "integer"), ("failure", "string")];
    require_one(&mut schemas["RetryRequest"], &causes);
    schemas["RetryRequest"]["properties"]["retry_after"]["oneOf"] = json!([
        {"type": "integer", "minimum": 0, "maximum": MAX_RETRY_AFTER}, {"type": "string"}, {"type": "null"}
    ]);
    schemas["Effect"]["properties"]["deliver_after"]["oneOf"] = json!([
        {"type": "integer", "minimum": 0, "maximum": MAX_DELAY}, {"type": "string", "format": "date-time"},
        {"type": "null"}
    ]);
    for schema in ["KeyRequest", "ClaimRequest"] {
        let properties = &mut schemas[schema]["properties"];
        properties["parts"]["items"] = json!({"type": ["string", "number", "boolean", "null"],
            "description": "null, empty and blank ones with `allow_empty` only"});
        properties["fields"]["minProperties"] = json!(1);
        properties["fields"]["maxProperties"] = json!(64);
    }
    let many = &mut schemas["ClaimBody"]["oneOf"][1];
    many["minItems"] = json!(1);
    many["maxItems"] = json!(1000);
    // What may be null is there all the same; only the history is absent in lists.
    for reply in [
        "VerdictReply",
        "EntryReply",
        "EventReply",
        "ListReply",
        "HeldKey",
    ] {
        let members: Vec<String> = schemas[reply]["properties"]
            .as_object()
            .into_iter()
            .flat_map(|properties| properties.keys())
            .filter(|member| *member != "history")
            .cloned()
            .collect();
        schemas[reply]["required"] = json!(members);
    }
    schemas["ReportReply"]["unevaluatedProperties"] = json!(false);
    for (name, schema) in schemas.as_object_mut().into_iter().flatten() {
        if name.ends_with("Request") {
            for (member, schema) in schema["properties"].as_object_mut().into_iter().flatten() {
                add_pattern(member, schema);
            }
        }
    }
}

/// What every text of bounded length holds. `\s` of ECMA-262 is what `trim` removes.
fn add_pattern(member: &str, schema: &mut Value) {
    if schema["maxLength"].is_null() {
        return;
    }
    schema["pattern"] = json!(if matches!(member, "idempotency_key" | "key") {
        format!("^[^\\s{CONTROL}]([^{CONTROL}]*[^\\s{CONTROL}])?$")
    } else {
        format!("^[^{CONTROL}]+$")
    });
    if schema["type"] != json!(["string", "null"]) {
        return;
    }
    // Tools that read bounds of a text do not expect that it may be null too.
    let bounds = ["type", "minLength", "maxLength", "pattern"];
    let mut text: Map<String, Value> = bounds
        .iter()
        .map(|bound| ((*bound).to_owned(), schema[*bound].take()))
        .collect();
    text.insert("type".to_owned(), json!("string"));
    if let Some(schema) = schema.as_object_mut() {
        schema.retain(|_, value| !value.is_null());
        schema.insert("oneOf".to_owned(), json!([text, {"type": "null"}]));
    }
}

/// Where `POST` takes a report, `GET` reads the entry of the key that is named like the report.
/// OpenAPI prefers a concrete path to a template, so that this has to be said.
fn add_keys_named_like_reports(paths: &mut Map<String, Value>) {
    let template = paths["/ledger/{idempotency_key}"]["get"].clone();
    for (path, methods) in paths {
        let Some(name) = path.strip_prefix("/ledger/") else {
            continue;
        };
        if methods["get"].is_null() {
            let mut entry = template.clone();
            entry["operationId"] = json!(format!("entry_of_{name}"));
            entry["summary"] = json!(format!("Read the entry of the key `{name}`"));
            entry["description"] =
                json!("What `GET /ledger/{idempotency_key}` says of a key of this name.");
            if let Some(entry) = entry.as_object_mut() {
                entry.remove("parameters");
            }
            methods["get"] = entry;
        }
    }
}

/// What a verdict says of key and attempt is what the next requests need.
fn add_links(paths: &mut Map<String, Value>) {
    let report = |operation: &str, description: &str| {
        json!({
            "operationId": operation,
            "description": description,
            "requestBody": {
                "idempotency_key": "$response.body#/idempotency_key",
                "attempt": "$response.body#/attempt"
            }
        })
    };
    let links = json!({
        "done": report("done", "Where `claimed` is true, after the work"),
        "failed": report("failed", "Where `claimed` is true and the work failed"),
        "entry": {
            "operationId": "entry",
            "description": "What is known of the key",
            "parameters": {"idempotency_key": "$response.body#/idempotency_key"}
        }
    });
    for path in ["/claim", "/ledger/pending"] {
        paths[path]["post"]["responses"]["200"]["links"] = links.clone();
    }
    paths["/ledger"]["get"]["responses"]["200"]["links"] = json!({"next": {
        "operationId": "list",
        "description": "Where `next_cursor` is not null",
        "parameters": {"cursor": "$response.body#/next_cursor"}
    }});
}

fn complete_operation(path: &str, method: &str, operation: &mut Value) {
    let is_open = path.starts_with("/health") || matches!(path, "/openapi.json" | "/lab");
    operation["security"] = if is_open {
        json!([])
    } else {
        json!([{"apiKey": []}, {"bearer": []}])
    };
    let mut codes = vec![Code::InvalidRequest];
    if !is_open {
        codes.push(Code::Unauthorized);
    }
    if !matches!(
        path,
        "/health" | "/openapi.json" | "/metrics" | "/key" | "/retry" | "/lab"
    ) {
        codes.extend([Code::Internal, Code::StoreUnavailable, Code::Overloaded]);
    }
    if path.starts_with("/lab") {
        codes.push(Code::NotFound);
    }
    if method == "post" {
        codes.extend([
            Code::MalformedJson,
            Code::PayloadTooLarge,
            Code::UnsupportedMediaType,
        ]);
    }
    let own = operation
        .as_object_mut()
        .and_then(|operation| operation.remove(PROBLEMS));
    codes.extend(
        own.iter()
            .filter_map(Value::as_array)
            .flatten()
            .filter_map(|code| Code::deserialize(code).ok()),
    );
    let mut statuses: BTreeMap<u16, Vec<Code>> = BTreeMap::new();
    for code in codes {
        statuses.entry(code.status()).or_default().push(code);
    }
    for (status, codes) in statuses {
        operation["responses"][status.to_string()] = problem_response(status, &codes);
    }
    for (_, response) in operation["responses"].as_object_mut().into_iter().flatten() {
        let id = json!({"$ref": format!("#/components/headers/{REQUEST_ID_HEADER}")});
        response["headers"][REQUEST_ID_HEADER] = id;
    }
}

/// A reply with one of these codes, which share a status.
fn problem_response(status: u16, codes: &[Code]) -> Value {
    let mut description: Vec<String> = codes
        .iter()
        .map(|code| format!("`{}`: {}", code.name(), code.title()))
        .collect();
    let headers = match status {
        401 => json!({"WWW-Authenticate": {"required": true,
            "description": "Which scheme to use", "schema": {"type": "string"}}}),
        503 => json!({"Retry-After": {"required": true,
            "description": "Seconds to wait", "schema": {"type": "integer", "minimum": 1}}}),
        _ => Value::Null,
    };
    if status == 503 {
        description
            .push("nothing is known of what was asked: ask again, with the same claimant".into());
    }
    let mut response = json!({
        "description": description.join("; "),
        "content": {"application/problem+json": {"schema": {
            "allOf": [
                {"$ref": "#/components/schemas/Problem"},
                {"type": "object", "properties": {
                    "status": {"type": "integer", "enum": [status]},
                    "code": {"type": "string", "enum": codes}
                }}
            ]
        }}}
    });
    if !headers.is_null() {
        response["headers"] = headers;
    }
    response
}

/// Exactly one of these members, of these types, is given; null counts as absent.
fn require_one(schema: &mut Value, members: &[(&str, &str)]) {
    let choices: Vec<Value> = members
        .iter()
        .map(|(given, given_type)| {
            let properties: Map<String, Value> = members
                .iter()
                .map(|(member, _)| {
                    let wanted = if member == given { given_type } else { "null" };
                    ((*member).to_owned(), json!({"type": wanted}))
                })
                .collect();
            json!({"required": [given], "properties": properties})
        })
        .collect();
    schema["oneOf"] = Value::from(choices);
}
