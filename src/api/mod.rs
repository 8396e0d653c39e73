//! HTTP, and nothing else. This file is the whole route table; each noun has a file with its
//! requests, its replies, its handlers and what the OpenAPI says of them.

pub mod auth;
pub mod claim;
pub mod health;
pub mod key;
pub mod lab;
pub mod ledger;
pub mod metrics;
pub mod openapi;
pub mod outbox;
pub mod problem;
pub mod request;
pub mod request_log;
pub mod retry;
pub mod review;

use actix_web::guard;
use actix_web::http::header::{ALLOW, HeaderValue};
use actix_web::middleware::from_fn;
use actix_web::web::Data;
use actix_web::{HttpRequest, HttpResponse, Resource, ResponseError, Route, web};

use self::problem::{Code, Problem};
use self::request::BodyLimit;
use crate::lab::Lab;

/// All routes; those of the lab where there is one.
pub fn configure(app: &mut web::ServiceConfig, body_limit: usize, lab: Option<Data<Lab>>) {
    if let Some(lab) = &lab {
        app.app_data(lab.clone())
            .service(resource("/lab", "GET, HEAD").route(get().to(lab::page)))
            .route("/lab/receipts/{token}", web::post().to(lab::receive));
    }
    app.app_data(BodyLimit(body_limit))
        // `OPTIONS *` has no path, so that no scope takes it.
        .default_service(web::to(not_found))
        .service(resource("/health", "GET, HEAD").route(get().to(health::alive)))
        .service(resource("/health/ready", "GET, HEAD").route(get().to(health::ready)))
        .service(resource("/openapi.json", "GET, HEAD").route(get().to(openapi::document)))
        .service(
            web::scope("")
                .wrap(from_fn(auth::authenticate))
                .service(resource("/metrics", "GET, HEAD").route(get().to(metrics::scrape)))
                .service(resource("/key", "POST").route(web::post().to(key::derive)))
                .service(resource("/claim", "POST").route(web::post().to(claim::claim)))
                .service(resource("/retry", "POST").route(web::post().to(retry::advise)))
                .service(resource("/ledger", "GET, HEAD").route(get().to(ledger::list)))
                .service(entry_resource("/ledger/pending").route(web::post().to(ledger::pending)))
                .service(entry_resource("/ledger/done").route(web::post().to(ledger::done)))
                .service(entry_resource("/ledger/failed").route(web::post().to(ledger::failed)))
                .service(entry_resource("/ledger/renew").route(web::post().to(ledger::renew)))
                .service(entry_resource("/ledger/review").route(web::post().to(review::review)))
                .service(entry_resource("/ledger/reset").route(web::post().to(review::reset)))
                .service(
                    resource("/ledger/{idempotency_key}", "GET, HEAD")
                        .route(get().to(ledger::entry)),
                )
                .service(resource("/outbox", "GET, HEAD").route(get().to(outbox::list_effects)))
                .service(resource("/outbox/{id}", "GET, HEAD").route(get().to(outbox::effect)))
                .service(
                    resource("/outbox/{id}/redeliver", "POST")
                        .route(web::post().to(outbox::redeliver)),
                )
                .configure(|routes| {
                    if lab.is_some() {
                        configure_lab(routes);
                    }
                })
                .default_service(web::to(not_found)),
        );
}

/// What charges answers no HEAD, which asks for nothing to be done.
fn configure_lab(routes: &mut web::ServiceConfig) {
    let acts = web::get;
    routes
        .service(resource("/lab/charge-unsafe", "GET").route(acts().to(lab::charge_unsafe)))
        .service(resource("/lab/charge-in-memory", "GET").route(acts().to(lab::charge_in_memory)))
        .service(resource("/lab/charge-idempotent", "GET").route(acts().to(lab::charge_idempotent)))
        .service(resource("/lab/reset-lab", "GET").route(acts().to(lab::reset)))
        .service(resource("/lab/idempotency/state", "GET, HEAD").route(get().to(lab::state)))
        .service(resource("/lab/outbox", "GET, HEAD").route(get().to(lab::outbox)))
        .service(resource("/lab/diagnostics/summary", "GET, HEAD").route(get().to(lab::summary)));
}

/// A path, and the methods that it knows.
fn resource(path: &str, methods: &'static str) -> Resource {
    web::resource(path).default_service(web::to(move || method_not_allowed(methods)))
}

/// What may be said of an entry. A key may be named like it: then GET reads that key.
fn entry_resource(path: &str) -> Resource {
    resource(path, "GET, HEAD, POST").route(get().to(ledger::entry))
}

/// RFC 9110, section 9.3.2: whatever answers GET answers HEAD.
fn get() -> Route {
    web::route().guard(guard::Any(guard::Get()).or(guard::Head()))
}

async fn method_not_allowed(methods: &'static str) -> HttpResponse {
    let problem = Problem::new(
        Code::MethodNotAllowed,
        format!("this path answers {methods}"),
    );
    let mut response = problem.error_response();
    response
        .headers_mut()
        .insert(ALLOW, HeaderValue::from_static(methods));
    response
}

async fn not_found(request: HttpRequest) -> Problem {
    Problem::new(
        Code::NotFound,
        format!("there is nothing at {}", request.path()),
    )
}
