//! `GET /metrics`: what has been counted, for Prometheus.

use actix_web::HttpResponse;
use actix_web::web::Data;

use super::request::NoQuery;
use crate::gate::{Gate, GateError};
use crate::metrics::Metrics;
use crate::store::Backlog;
use crate::store::outbox::Undelivered;

/// Prometheus' text format, which is of this version.
const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Metrics
///
/// In Prometheus' text format. Counters are those of this process; `dedup_gate_pending_entries`,
/// `dedup_gate_stale_entries`, `dedup_gate_oldest_pending_age_seconds`, `dedup_gate_outbox_waiting`,
/// `dedup_gate_outbox_dead` and `dedup_gate_outbox_oldest_waiting_age_seconds` are read from the database, and are
/// absent, with `dedup_gate_store_up` at 0, where it cannot be asked: of two questions, each has 2.5 seconds.
#[utoipa::path(get, path = "/metrics", tag = "health", responses(
    (status = 200, description = "The metrics", body = String, content_type = "text/plain")
))]
pub async fn scrape(_: NoQuery, gate: Data<Gate>, metrics: Data<Metrics>) -> HttpResponse {
    // Before the store is asked, which takes a connection itself.
    let load = gate.load();
    let read = async { Ok((gate.backlog().await?, gate.undelivered().await?)) };
    let read: Result<(Backlog, Undelivered), GateError> = read.await;
    let mut response = HttpResponse::Ok();
    response.content_type(TEXT_FORMAT);
    if let Err(fault) = &read {
        response.extensions_mut().insert(fault.clone());
    }
    response.body(metrics.text(&load, read.as_ref().ok()))
}
