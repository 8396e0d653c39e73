//! `GET /health` and `GET /health/ready`.

use actix_web::web::{Data, Json};
use serde::Serialize;
use utoipa::ToSchema;

use super::problem::Problem;
use super::request::NoQuery;
use crate::gate::Gate;

/// How the service is.
#[derive(Debug, Serialize, ToSchema)]
pub struct Health {
    /// `ok`
    #[schema(example = "ok")]
    status: &'static str,
}

/// Is the process alive?
///
/// It does not ask the database, so that an orchestrator does not restart a service that would
/// recover by itself.
#[utoipa::path(get, path = "/health", tag = "health", responses(
    (status = 200, description = "It is alive", body = Health)
))]
pub async fn alive(_: NoQuery) -> Json<Health> {
    Json(Health { status: "ok" })
}

/// Can the service answer?
///
/// It can where the database can be reached.
#[utoipa::path(get, path = "/health/ready", tag = "health", responses(
    (status = 200, description = "The database can be reached", body = Health)
))]
pub async fn ready(_: NoQuery, gate: Data<Gate>) -> Result<Json<Health>, Problem> {
    gate.ready().await?;
    Ok(Json(Health { status: "ok" }))
}
