//! What a person decides where no run can: review and reset.

use actix_web::web::{Data, Json};
use serde::Deserialize;
use utoipa::ToSchema;

use super::ledger::{ReportReply, act};
use super::problem::Problem;
use super::request::{Attempt, JsonBody, decode};
use crate::domain::Invalid;
use crate::domain::act::{Act, Reset, Review};
use crate::domain::ledger::ReviewDecision;
use crate::domain::text::{IdempotencyKey, Name, Reason};
use crate::gate::Gate;

/// What became of work that hangs, or that holds a conflict.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"idempotency_key": "order-2041", "attempt": 1, "decision": "done", "external_id": "ch_3Nf8", "reviewer": "ana@example.com", "reason": "the charge stands in the provider's dashboard"}))]
pub struct ReviewRequest {
    /// The key.
    #[schema(value_type = String, min_length = 1, max_length = 255)]
    idempotency_key: IdempotencyKey,
    /// The attempt that the reviewer has seen; it must be the current one.
    #[schema(value_type = i32, minimum = 1, maximum = 2_147_483_647)]
    attempt: Attempt,
    /// What became of it.
    decision: ReviewDecisionName,
    /// The provider's id, with `done` only. At most 255 bytes.
    #[schema(value_type = Option<String>, min_length = 1, max_length = 255)]
    external_id: Option<Name>,
    /// Who decides. At most 255 bytes.
    #[schema(value_type = String, min_length = 1, max_length = 255)]
    reviewer: Name,
    /// What they go by. At most 2,000 bytes.
    #[schema(value_type = String, min_length = 1, max_length = 2000)]
    reason: Reason,
}

/// `done`: the effect happened. `release`: it did not, and the key may be claimed again. `fail`: it
/// did not, and the key stays closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(try_from = "String")]
#[schema(rename_all = "snake_case")]
pub(super) enum ReviewDecisionName {
    Done,
    Release,
    Fail,
}

impl TryFrom<String> for ReviewDecisionName {
    type Error = &'static str;

    fn try_from(name: String) -> Result<Self, Self::Error> {
        match name.as_str() {
            "done" => Ok(Self::Done),
            "release" => Ok(Self::Release),
            "fail" => Ok(Self::Fail),
            _ => Err(r#"must be "done", "release" or "fail""#),
        }
    }
}

/// Work that is over is wanted again.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"idempotency_key": "order-2041", "attempt": 1, "reviewer": "ana@example.com", "reason": "the parcel was lost, send another"}))]
pub struct ResetRequest {
    /// The key.
    #[schema(value_type = String, min_length = 1, max_length = 255)]
    idempotency_key: IdempotencyKey,
    /// The attempt that they have seen; it must be the current one.
    #[schema(value_type = i32, minimum = 1, maximum = 2_147_483_647)]
    attempt: Attempt,
    /// Who decides. At most 255 bytes.
    #[schema(value_type = String, min_length = 1, max_length = 255)]
    reviewer: Name,
    /// What they go by. At most 2,000 bytes.
    #[schema(value_type = String, min_length = 1, max_length = 2000)]
    reason: Reason,
}

/// Decide what became of work that hangs
///
/// For a pending or stale entry, and for one that holds a `conflict`, which it clears. The decision
/// stands in the history as `reviewed`. The `attempt` must be the current one, so that a late run and
/// a reviewer cannot overwrite each other. One that says word for word what an earlier one of the same
/// attempt has said is taken for its repeat, and changes nothing: say what you have seen since.
#[utoipa::path(post, path = "/ledger/review", tag = "ledger",
    request_body = ReviewRequest,
    responses((status = 200, description = "The entry", body = ReportReply)),
    extensions(("x-problems" = json!(["unknown_key", "superseded", "conflict"]))))]
pub async fn review(body: JsonBody, gate: Data<Gate>) -> Result<Json<ReportReply>, Problem> {
    let request: ReviewRequest = decode(body.0, "")?;
    if request.external_id.is_some() && request.decision != ReviewDecisionName::Done {
        return Err(Invalid::new("/external_id", "goes with \"decision\": \"done\" only").into());
    }
    let review = Review {
        key: request.idempotency_key,
        attempt: request.attempt.0,
        decision: match request.decision {
            ReviewDecisionName::Done => ReviewDecision::Done {
                external_id: request.external_id.map(Name::into_string),
            },
            ReviewDecisionName::Release => ReviewDecision::Release,
            ReviewDecisionName::Fail => ReviewDecision::Fail,
        },
        reviewer: request.reviewer.into_string(),
        reason: request.reason.into_string(),
    };
    act(&gate, Act::Review(review)).await
}

/// Repeat work on purpose
///
/// A settled key, or one claimed at the gate alone, is free again: the next claim wins it, with the
/// next attempt. Its history stays, and what its last attempt reports from now on is `superseded`.
/// What is pending or stale, or holds a `conflict`, is to be reviewed first. The same words of the same
/// attempt are a repeat, and change nothing.
#[utoipa::path(post, path = "/ledger/reset", tag = "ledger",
    request_body = ResetRequest,
    responses((status = 200, description = "The entry", body = ReportReply)),
    extensions(("x-problems" = json!(["unknown_key", "superseded", "conflict"]))))]
pub async fn reset(body: JsonBody, gate: Data<Gate>) -> Result<Json<ReportReply>, Problem> {
    let request: ResetRequest = decode(body.0, "")?;
    let reset = Reset {
        key: request.idempotency_key,
        attempt: request.attempt.0,
        reviewer: request.reviewer.into_string(),
        reason: request.reason.into_string(),
    };
    act(&gate, Act::Reset(reset)).await
}
