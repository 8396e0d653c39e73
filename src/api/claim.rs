//! `POST /claim`: is this the first time?

use actix_web::web::{Data, Json};
use chrono::Utc;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use utoipa::ToSchema;

use super::auth::Caller;
use super::key::{NormalizationName, RecipeMembers};
use super::problem::Problem;
use super::request::{JsonBody, Whole, any_value, decode, first_faults};
use crate::domain::claim::{Claim, DEFAULT_LEASE_SECONDS, Door, OnStale, Verdict};
use crate::domain::json::canonical;
use crate::domain::key::Normalization;
use crate::domain::ledger::{Holder, Status};
use crate::domain::text::{IdempotencyKey, Name};
use crate::domain::{Invalid, Time, rfc3339};
use crate::gate::Gate;

/// How many claims an array may hold.
const MAX_CLAIMS: usize = 1000;

/// How long a pending claim is believed to be alive, in seconds.
pub(super) type LeaseSeconds = Whole<1, 2_592_000>;

/// A claim. The key is given as `idempotency_key`, or as `parts` or `fields` with their options
/// as in `/key`; exactly one of the three.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"parts": ["ORD-2041", 129.9], "order_id": "ORD-2041", "claimant": "1042@9f2c41d07be3:0:0", "pending": true}))]
pub struct ClaimRequest {
    /// The key: at most 255 bytes, without control characters, and without white space at
    /// either end.
    #[schema(value_type = Option<String>, min_length = 1, max_length = 255)]
    idempotency_key: Option<IdempotencyKey>,
    /// See `/key`.
    #[schema(min_items = 1, max_items = 32)]
    parts: Option<Vec<Value>>,
    /// See `/key`.
    #[schema(value_type = Option<Object>)]
    fields: Option<Map<String, Value>>,
    /// See `/key`; with `parts` or `fields` only.
    scope: Option<String>,
    /// See `/key`; with `parts` or `fields` only.
    #[schema(value_type = Option<Vec<NormalizationName>>)]
    normalize: Option<Vec<Normalization>>,
    /// See `/key`; with `parts` or `fields` only.
    #[schema(default = false)]
    allow_empty: Option<bool>,
    /// The order's name; the key where absent. At most 255 bytes.
    #[schema(value_type = Option<String>, min_length = 1, max_length = 255)]
    order_id: Option<Name>,
    /// Who claims: one execution, run and item. The same claimant asking again gets the same
    /// answer, so that a lost reply loses no order. At most 255 bytes.
    #[schema(value_type = Option<String>, min_length = 1, max_length = 255)]
    claimant: Option<Name>,
    /// The dedupe window in seconds, after which the key may be claimed anew; absent: for ever. It runs
    /// from the claim that wins, and anew from the report that settles it.
    #[schema(value_type = Option<i32>, minimum = 1, maximum = 315_360_000)]
    ttl_seconds: Option<Whole<1, 315_360_000>>,
    /// Any JSON, null included. The same key with another payload is refused (`key_reused`).
    /// Only its digest is kept.
    #[serde(default, deserialize_with = "any_value")]
    payload: Option<Value>,
    /// Whether to open the ledger entry in the same transaction.
    #[schema(default = false)]
    pending: Option<bool>,
    /// How long the claim is believed to be alive, in seconds; with `pending` only.
    #[schema(value_type = Option<i32>, minimum = 1, maximum = 2_592_000, default = 900)]
    lease_seconds: Option<LeaseSeconds>,
    /// What to do with a pending key whose lease has run out.
    #[schema(value_type = Option<OnStaleName>, default = "hold")]
    on_stale: Option<OnStaleMember>,
}

/// `hold`: leave it for review. `take_over`: claim it anew.
#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
#[expect(dead_code, reason = "it only describes the names of `OnStaleMember`")]
pub(super) enum OnStaleName {
    Hold,
    TakeOver,
}

/// What to do with a stale key, as callers write it.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(try_from = "String")]
pub(super) struct OnStaleMember(pub(super) OnStale);

impl TryFrom<String> for OnStaleMember {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        match name.as_str() {
            "hold" => Ok(Self(OnStale::Hold)),
            "take_over" => Ok(Self(OnStale::TakeOver)),
            _ => Err(r#"must be "hold" or "take_over""#.into()),
        }
    }
}

/// One claim, or an array of 1 to 1,000 that are decided in one transaction.
#[derive(Deserialize, ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "it only describes the body")]
pub(super) enum ClaimBody {
    One(Box<ClaimRequest>),
    Many(Vec<ClaimRequest>),
}

/// The answer to a claim.
#[derive(Debug, Serialize, ToSchema)]
#[schema(example = json!({
    "claimed": true, "status": "pending",
    "idempotency_key": "5fd4b988da1e9a5bbdd5d16bc450989caf8bec1a3a2ee087a0f8afbf128d90a0",
    "order_id": "ORD-2041", "attempt": 1, "replayed": false,
    "processed_at": "2026-11-30T09:12:00.000Z", "expires_at": null,
    "lease_expires_at": "2026-11-30T09:27:00.000Z", "external_id": null, "result": null,
    "seen_again": 0, "last_seen_at": null, "warnings": []
}))]
pub struct VerdictReply {
    /// Whether the caller does the work: the member to branch on.
    claimed: bool,
    /// The state of the work after this call.
    status: StatusName,
    /// The key.
    idempotency_key: String,
    /// The order's name.
    order_id: String,
    /// 1 for the first claim, +1 each time the key is claimed anew. Send it with every report.
    #[schema(minimum = 1)]
    attempt: u32,
    /// Whether the same had been said to the same claimant before.
    replayed: bool,
    /// When the attempt was claimed.
    #[schema(format = DateTime)]
    processed_at: String,
    /// When the dedupe window passes; null: never.
    #[schema(format = DateTime)]
    expires_at: Option<String>,
    /// Until when the work is believed to be alive; null where it is not under way.
    #[schema(format = DateTime)]
    lease_expires_at: Option<String>,
    /// The provider's id, where the work is done.
    external_id: Option<String>,
    /// What `/ledger/done` stored. Null in the answer to an array: ask for the entry.
    result: Option<Value>,
    /// How many duplicates were turned away.
    seen_again: u64,
    /// When the last of them was.
    #[schema(format = DateTime)]
    last_seen_at: Option<String>,
    /// What is probably a mistake.
    warnings: Vec<String>,
}

/// The state of a key's work.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum StatusName {
    /// Claimed at the gate alone.
    Claimed,
    /// Under way.
    Pending,
    /// Pending, and its lease has run out.
    Stale,
    /// The effect happened.
    Done,
    /// The effect did not happen.
    Failed,
}

impl From<Status> for StatusName {
    fn from(status: Status) -> Self {
        match status {
            Status::Claimed => Self::Claimed,
            Status::Pending => Self::Pending,
            Status::Stale => Self::Stale,
            Status::Done => Self::Done,
            Status::Failed => Self::Failed,
        }
    }
}

/// One verdict, or an array of them in the order of the claims.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum ClaimReply {
    /// The answer to one claim.
    One(Box<VerdictReply>),
    /// The answer to an array of claims.
    Many(Vec<VerdictReply>),
}

impl VerdictReply {
    /// The reply to one claim. `warnings` are those of its key.
    pub(super) fn new(verdict: Verdict, warnings: Vec<String>) -> Self {
        let external_id = verdict.external_id().cloned();
        let result = verdict.result().cloned();
        let state = verdict.state;
        let lease_expires_at = state.lease_expires_at();
        let at = |time: Option<Time>| time.map(rfc3339::format);
        Self {
            claimed: verdict.claimed,
            status: verdict.status.into(),
            idempotency_key: verdict.key.as_str().to_owned(),
            order_id: state.order_id,
            attempt: state.attempt,
            replayed: verdict.replayed,
            processed_at: rfc3339::format(state.processed_at),
            expires_at: at(state.expires_at),
            lease_expires_at: at(lease_expires_at),
            external_id,
            result,
            seen_again: state.seen_again,
            last_seen_at: at(state.last_seen_at),
            warnings: [verdict.warnings, warnings].concat(),
        }
    }
}

/// Whoever claims or reports: the claimant belongs to the API key that sent it.
pub(super) fn holder(claimant: Option<Name>, caller: &Caller) -> Option<Holder> {
    claimant.map(|claimant| Holder {
        claimant: claimant.into_string(),
        api_key: caller.0.clone(),
    })
}

/// The digest of a payload.
pub(super) fn digest(payload: Option<&Value>) -> Option<Vec<u8>> {
    payload.map(|payload| Sha256::digest(canonical(payload)).to_vec())
}

impl ClaimRequest {
    /// The claim, and the warnings about its key.
    fn into_claim(self, caller: &Caller, now: Time) -> Result<(Claim, Vec<String>), Vec<Invalid>> {
        let is_pending = self.pending.unwrap_or(false);
        if self.lease_seconds.is_some() && !is_pending {
            return Err(vec![Invalid::new(
                "/lease_seconds",
                "goes with \"pending\": true only",
            )]);
        }
        let recipe = RecipeMembers {
            parts: self.parts,
            fields: self.fields,
            scope: self.scope,
            normalize: self.normalize,
            allow_empty: self.allow_empty,
        }
        .recipe()?;
        let (key, warnings) = match (self.idempotency_key, recipe) {
            (Some(key), None) => (key, Vec::new()),
            (None, Some(recipe)) => {
                let derived = recipe.derive(now)?;
                (derived.key, derived.warnings)
            }
            (Some(_), Some(_)) => {
                return Err(vec![Invalid::new(
                    "/idempotency_key",
                    "cannot be given beside \"parts\" or \"fields\": give one of the three",
                )]);
            }
            (None, None) => {
                return Err(vec![Invalid::new(
                    "/idempotency_key",
                    "is missing: give \"idempotency_key\", \"parts\" or \"fields\"",
                )]);
            }
        };
        let claim = Claim {
            key,
            order_id: self.order_id.map(Name::into_string),
            holder: holder(self.claimant, caller),
            ttl_seconds: self.ttl_seconds.map(|ttl| ttl.0),
            payload_sha256: digest(self.payload.as_ref()),
            pending: is_pending.then(|| {
                self.lease_seconds
                    .map_or(DEFAULT_LEASE_SECONDS, |lease| lease.0)
            }),
            on_stale: self.on_stale.map(|on_stale| on_stale.0).unwrap_or_default(),
            door: Door::Gate,
        };
        Ok((claim, warnings))
    }
}

/// Claim a key
///
/// Is this the first time? Exactly one caller hears `claimed: true` for a key and attempt; a
/// duplicate is a success with `claimed: false`. A claim without `pending` is final unless its
/// caller reports `failed`: if it dies before the work, nobody is told. An array is decided in one transaction: one
/// fault refuses it whole.
#[utoipa::path(post, path = "/claim", tag = "claim",
    request_body(content = ClaimBody, examples(
        ("one" = (value = json!({"parts": ["ORD-2041", 129.9], "order_id": "ORD-2041", "claimant": "1042@9f2c41d07be3:0:0"}))),
        ("pending" = (value = json!({"idempotency_key": "order-2041", "claimant": "1042@9f2c41d07be3:0:0", "pending": true, "lease_seconds": 600}))),
        ("array" = (value = json!([{"idempotency_key": "order-1", "claimant": "1042@9f2c41d07be3:0:0"}, {"idempotency_key": "order-2", "claimant": "1042@9f2c41d07be3:0:1"}])))
    )),
    responses((status = 200, description = "The verdict, or an array of verdicts in the order of the claims", body = ClaimReply)),
    extensions(("x-problems" = json!(["key_reused"]))))]
pub async fn claim(
    body: JsonBody,
    caller: Caller,
    gate: Data<Gate>,
) -> Result<Json<ClaimReply>, Problem> {
    let (documents, is_array) = match body.0 {
        Value::Array(items) if items.is_empty() || items.len() > MAX_CLAIMS => {
            let fault = format!("must hold 1 to {MAX_CLAIMS} claims, not {}", items.len());
            return Err(Invalid::new("", fault).into());
        }
        Value::Array(items) => (items, true),
        other => (vec![other], false),
    };
    let pointer = |index: usize| {
        if is_array {
            format!("/{index}")
        } else {
            String::new()
        }
    };
    let now = Utc::now();
    let mut claims = Vec::with_capacity(documents.len());
    let mut warnings = Vec::with_capacity(documents.len());
    let mut faults = Vec::new();
    for (index, document) in documents.into_iter().enumerate() {
        let at = pointer(index);
        let claim = decode::<ClaimRequest>(document, &at)
            .map_err(|fault| vec![fault])
            .and_then(|request| {
                request.into_claim(&caller, now).map_err(|faults| {
                    faults
                        .into_iter()
                        .map(|fault| Invalid::new(format!("{at}{}", fault.pointer), fault.detail))
                        .collect()
                })
            });
        match claim {
            Ok((claim, about_key)) => {
                claims.push(claim);
                warnings.push(about_key);
            }
            Err(found) => faults.extend(found),
        }
    }
    if !faults.is_empty() {
        return Err(first_faults(faults).into());
    }

    let decided = if is_array {
        gate.claim_all(claims).await?
    } else {
        vec![gate.claim(claims.remove(0)).await?]
    };
    let mut verdicts = Vec::with_capacity(decided.len());
    let mut reused = Vec::new();
    for (index, (verdict, about_key)) in decided.into_iter().zip(warnings).enumerate() {
        match verdict {
            Ok(verdict) => verdicts.push(VerdictReply::new(verdict, about_key)),
            Err(_) => reused.push(format!("{}/payload", pointer(index))),
        }
    }
    if !reused.is_empty() {
        return Err(Problem::key_reused(reused.into_iter()));
    }
    Ok(Json(if is_array {
        for verdict in &mut verdicts {
            verdict.result = None;
        }
        ClaimReply::Many(verdicts)
    } else {
        ClaimReply::One(Box::new(verdicts.remove(0)))
    }))
}
