//! `POST /retry`: what a failed call means.

use actix_web::web::{Data, Json};
use chrono::Utc;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Number, Value};
use utoipa::ToSchema;

use super::problem::Problem;
use super::request::{Attempt, JsonBody, Whole, decode};
use crate::domain::Invalid;
use crate::domain::retry::{
    self, Advice, Cause, Decision, DuplicateRisk, FailedCall, Failure, MAX_RETRY_AFTER, Policy,
    RetryAfter,
};

/// A call that failed. Exactly one of `status_code` and `failure`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"status_code": 429, "attempt": 1, "retry_after": "2"}))]
pub struct RetryRequest {
    /// What it was answered. Anything below 400 is no failure.
    #[schema(value_type = Option<i32>, minimum = 400, maximum = 599)]
    status_code: Option<Whole<400, 599>>,
    /// How it ended without an answer. `connection_refused`, `dns`, `unreachable` and `tls` are
    /// those of a connection that was never made, and `unknown` is anything that has no name
    /// here. `no_effect` is what is to be said after a `check` that found nothing.
    #[schema(value_type = Option<FailureName>)]
    failure: Option<Failure>,
    /// Which of the calls for one effect it was, from 1.
    #[schema(value_type = i32, minimum = 1, maximum = 2_147_483_647)]
    attempt: Attempt,
    /// The header `Retry-After` as it came: seconds, as a number or as text, or an HTTP date.
    #[schema(value_type = Option<Value>)]
    retry_after: Option<RetryAfterMember>,
    /// Whether the call carries a key by which the provider recognises a repeat.
    #[schema(default = false)]
    idempotent: Option<bool>,
    /// Whether to make the wait longer by chance, by up to half of it, so that callers who failed
    /// together do not return together.
    #[schema(default = false)]
    jitter: Option<bool>,
}

/// How a call ended that was not answered.
#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
#[expect(dead_code, reason = "it only describes the names of `Failure`")]
enum FailureName {
    Timeout,
    ConnectionReset,
    ConnectionRefused,
    Dns,
    Unreachable,
    Tls,
    Unknown,
    NoEffect,
}

/// [`RetryAfter`], as callers write it.
#[derive(Debug, Clone, Copy)]
struct RetryAfterMember(RetryAfter);

impl<'de> Deserialize<'de> for RetryAfterMember {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let read = match Value::deserialize(deserializer)? {
            Value::String(text) => RetryAfter::parse(&text),
            Value::Number(number) => whole_seconds(&number).map(RetryAfter::Seconds),
            _ => Err("must be seconds, or text".into()),
        };
        read.map(Self).map_err(serde::de::Error::custom)
    }
}

/// As in JSON Schema, `60.0` is a whole number.
fn whole_seconds(number: &Number) -> Result<u64, String> {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "it is whole, and a double holds every whole number within these bounds"
    )]
    number
        .as_f64()
        .filter(|number| number.fract() == 0.0)
        .filter(|number| (0.0..=MAX_RETRY_AFTER as f64).contains(number))
        .map(|number| number as u64)
        .ok_or_else(|| format!("must be a whole number from 0 to {MAX_RETRY_AFTER}"))
}

/// What a failed call means.
#[derive(Debug, Serialize, ToSchema)]
#[schema(example = json!({
    "decision": "retry", "wait_seconds": 2, "duplicate_risk": "none",
    "reason": "429: the provider has too many requests, so it was not looked at; repeat it"
}))]
pub struct RetryReply {
    /// What to do.
    decision: DecisionName,
    /// How long to wait before that; with `fix` and `give_up`, how long the provider asks to be
    /// left alone. Never less than `retry_after`, and whole without `jitter`.
    #[schema(value_type = f64, minimum = 0)]
    wait_seconds: Number,
    /// Whether one more call could make a second effect.
    duplicate_risk: DuplicateRiskName,
    /// Why, for people; begins with the status code or the failure.
    reason: String,
}

/// `retry`: wait, and call again; where the call carries a key, with the same one. `check`: wait, and
/// find out whether the effect happened, from the provider or the ledger; where it did not, ask here
/// again, with the failure `no_effect`. `fix`: somebody has to change something first. `give_up`: do
/// not call again.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum DecisionName {
    Retry,
    Check,
    Fix,
    GiveUp,
}

impl From<Decision> for DecisionName {
    fn from(decision: Decision) -> Self {
        match decision {
            Decision::Retry => Self::Retry,
            Decision::Check => Self::Check,
            Decision::Fix => Self::Fix,
            Decision::GiveUp => Self::GiveUp,
        }
    }
}

/// `none`: no call so far can have had an effect. `controlled`: one may have had it, but the key keeps
/// the provider from making a second. `high`: one may have had it, and nothing does.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum DuplicateRiskName {
    None,
    Controlled,
    High,
}

impl From<DuplicateRisk> for DuplicateRiskName {
    fn from(risk: DuplicateRisk) -> Self {
        match risk {
            DuplicateRisk::None => Self::None,
            DuplicateRisk::Controlled => Self::Controlled,
            DuplicateRisk::High => Self::High,
        }
    }
}

impl From<Advice> for RetryReply {
    fn from(advice: Advice) -> Self {
        let seconds = Number::from(advice.wait.as_secs());
        let wait_seconds = match advice.wait.subsec_nanos() {
            0 => seconds,
            _ => Number::from_f64(advice.wait.as_secs_f64()).unwrap_or(seconds),
        };
        Self {
            decision: advice.decision.into(),
            wait_seconds,
            duplicate_risk: advice.duplicate_risk.into(),
            reason: advice.reason,
        }
    }
}

/// What a failed call means
///
/// Says whether to repeat it, when, and what that risks, by the RFC of the status code. Ask once
/// after each call that failed. Nothing is stored. There are as many tries as `RETRY_WAITS` has
/// waits, and a provider that asks for more than `RETRY_AFTER_LIMIT` seconds is given up.
#[utoipa::path(post, path = "/retry", tag = "retry",
    request_body(content = RetryRequest, examples(
        ("answered" = (value = json!({"status_code": 503, "attempt": 1, "retry_after": "Mon, 30 Nov 2026 09:12:00 GMT", "idempotent": true}))),
        ("not answered" = (value = json!({"failure": "timeout", "attempt": 2, "jitter": true}))),
        ("after a check" = (value = json!({"failure": "no_effect", "attempt": 2})))
    )),
    responses((status = 200, description = "The advice", body = RetryReply)))]
pub async fn advise(body: JsonBody, policy: Data<Policy>) -> Result<Json<RetryReply>, Problem> {
    let request: RetryRequest = decode(body.0, "")?;
    let cause = match (request.status_code, request.failure) {
        (Some(_), Some(_)) => {
            let fault = "cannot be given beside \"status_code\": give one of them";
            return Err(Invalid::new("/failure", fault).into());
        }
        (Some(Whole(code)), None) => Cause::Status(u16::try_from(code).unwrap_or(u16::MAX)),
        (None, Some(failure)) => Cause::Failure(failure),
        (None, None) => {
            let fault = "is missing: give \"status_code\" or \"failure\"";
            return Err(Invalid::new("/status_code", fault).into());
        }
    };
    let call = FailedCall {
        cause,
        attempt: request.attempt.0,
        retry_after: request.retry_after.map(|member| member.0),
        idempotent: request.idempotent.unwrap_or(false),
        jitter: request.jitter.unwrap_or(false),
    };
    let random = |most| fastrand::u64(0..=most);
    Ok(Json(
        retry::advise(&call, &policy, Utc::now(), random).into(),
    ))
}
