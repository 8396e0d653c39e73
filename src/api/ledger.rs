//! `/ledger`: what became of the work.

use actix_web::HttpRequest;
use actix_web::web::{Data, Json};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use chrono::DateTime;
use percent_encoding::percent_decode_str;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use super::auth::Caller;
use super::claim::{
    LeaseSeconds, OnStaleMember, OnStaleName, StatusName, VerdictReply, digest, holder,
};
use super::outbox::{EffectRequest, effects};
use super::problem::{Code, Problem};
use super::request::{Attempt, JsonBody, Limit, NoQuery, Query, any_value, decode};
use crate::domain::act::{Act, Renewal};
use crate::domain::claim::{Claim, DEFAULT_LEASE_SECONDS, Door};
use crate::domain::ledger::{Event, Outcome, Phase, Report, Status};
use crate::domain::route::Routes;
use crate::domain::text::{IdempotencyKey, Name, Reason};
use crate::domain::{Invalid, Time, rfc3339};
use crate::gate::Gate;
use crate::store::{Cursor, Entry, Filter};

/// How many bytes a result may have as JSON text without white space.
const MAX_RESULT: usize = 64 * 1024;

/// The work begins.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"idempotency_key": "order-2041", "claimant": "1042@9f2c41d07be3:0:0", "lease_seconds": 600}))]
pub struct PendingRequest {
    /// The key.
    #[schema(value_type = String, min_length = 1, max_length = 255)]
    idempotency_key: IdempotencyKey,
    /// The order's name; the key where absent. At most 255 bytes.
    #[schema(value_type = Option<String>, min_length = 1, max_length = 255)]
    order_id: Option<Name>,
    /// Who begins. A key claimed at the gate alone is opened for the same claimant only.
    #[schema(value_type = Option<String>, min_length = 1, max_length = 255)]
    claimant: Option<Name>,
    /// How long the work is believed to be alive, in seconds.
    #[schema(value_type = Option<i32>, minimum = 1, maximum = 2_592_000, default = 900)]
    lease_seconds: Option<LeaseSeconds>,
    /// What to do with a pending key whose lease has run out.
    #[schema(value_type = Option<OnStaleName>, default = "hold")]
    on_stale: Option<OnStaleMember>,
    /// See `/claim`.
    #[serde(default, deserialize_with = "any_value")]
    payload: Option<Value>,
}

/// The effect happened.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"idempotency_key": "order-2041", "attempt": 1, "external_id": "ch_3Nf8", "result": {"charged": 129.9}}))]
pub struct DoneRequest {
    /// The key, as the verdict named it.
    #[schema(value_type = String, min_length = 1, max_length = 255)]
    idempotency_key: IdempotencyKey,
    /// The provider's id. At most 255 bytes.
    #[schema(value_type = Option<String>, min_length = 1, max_length = 255)]
    external_id: Option<Name>,
    /// What to repeat to whoever asks again; at most 64 KiB.
    #[serde(default, deserialize_with = "any_value")]
    result: Option<Value>,
    /// Who reports; must be the holder of the attempt.
    #[schema(value_type = Option<String>, min_length = 1, max_length = 255)]
    claimant: Option<Name>,
    /// The attempt of the verdict.
    #[schema(value_type = Option<i32>, minimum = 1, maximum = 2_147_483_647)]
    attempt: Option<Attempt>,
    /// What must happen now, in order: stored together with the outcome, or not at all, and delivered
    /// afterwards, at least once. A repeat of the report stores nothing twice.
    #[schema(max_items = 20)]
    effects: Option<Vec<EffectRequest>>,
}

/// The effect did not happen.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"idempotency_key": "order-2041", "attempt": 1, "reason": "card declined"}))]
pub struct FailedRequest {
    /// The key, as the verdict named it.
    #[schema(value_type = String, min_length = 1, max_length = 255)]
    idempotency_key: IdempotencyKey,
    /// The attempt of the verdict.
    #[schema(value_type = i32, minimum = 1, maximum = 2_147_483_647)]
    attempt: Attempt,
    /// Why. At most 2,000 bytes.
    #[schema(value_type = Option<String>, min_length = 1, max_length = 2000)]
    reason: Option<Reason>,
    /// Whether the key may be claimed again.
    #[schema(default = true)]
    retry: Option<bool>,
    /// Who reports; must be the holder of the attempt.
    #[schema(value_type = Option<String>, min_length = 1, max_length = 255)]
    claimant: Option<Name>,
    /// What must happen now; see `/ledger/done`.
    #[schema(max_items = 20)]
    effects: Option<Vec<EffectRequest>>,
}

/// The work takes longer.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"idempotency_key": "order-2041", "attempt": 1, "lease_seconds": 600}))]
pub struct RenewRequest {
    /// The key, as the verdict named it.
    #[schema(value_type = String, min_length = 1, max_length = 255)]
    idempotency_key: IdempotencyKey,
    /// Who asks; must be the holder of the attempt.
    #[schema(value_type = Option<String>, min_length = 1, max_length = 255)]
    claimant: Option<Name>,
    /// The attempt of the verdict; one of `claimant` and `attempt` is required.
    #[schema(value_type = Option<i32>, minimum = 1, maximum = 2_147_483_647)]
    attempt: Option<Attempt>,
    /// How long the work is believed to be alive from now on, in seconds.
    #[schema(value_type = Option<i32>, minimum = 1, maximum = 2_592_000, default = 900)]
    lease_seconds: Option<LeaseSeconds>,
}

/// What is known of a key.
#[derive(Debug, Serialize, ToSchema)]
#[schema(example = json!({
    "idempotency_key": "order-2041", "order_id": "ORD-2041", "status": "done", "attempt": 1,
    "claimant": "1042@9f2c41d07be3:0:0", "external_id": "ch_3Nf8", "result": {"charged": 129.9}, "reason": null,
    "seen_again": 1, "processed_at": "2026-11-30T09:12:00.000Z", "updated_at": "2026-11-30T09:12:02.000Z",
    "lease_expires_at": null, "expires_at": null, "conflict": false,
    "history": [
        {"at": "2026-11-30T09:12:00.000Z", "event": "pending", "attempt": 1, "claimant": "1042@9f2c41d07be3:0:0",
         "detail": {"lease_expires_at": "2026-11-30T09:27:00.000Z", "after": null}},
        {"at": "2026-11-30T09:12:02.000Z", "event": "done", "attempt": 1, "claimant": "1042@9f2c41d07be3:0:0",
         "detail": {"external_id": "ch_3Nf8"}}
    ]
}))]
pub struct EntryReply {
    /// The key.
    idempotency_key: String,
    /// The order's name.
    order_id: String,
    /// The state of the work.
    status: StatusName,
    /// The current attempt.
    #[schema(minimum = 1)]
    attempt: u32,
    /// Who holds it.
    claimant: Option<String>,
    /// The provider's id, where the work is done.
    external_id: Option<String>,
    /// What `/ledger/done` stored.
    result: Option<Value>,
    /// Why it failed.
    reason: Option<String>,
    /// How many duplicates were turned away.
    seen_again: u64,
    /// When the attempt was claimed.
    #[schema(format = DateTime)]
    processed_at: String,
    /// When anything but `seen_again` last changed.
    #[schema(format = DateTime)]
    updated_at: String,
    /// Until when the work is believed to be alive; null where it is not under way.
    #[schema(format = DateTime)]
    lease_expires_at: Option<String>,
    /// When the dedupe window passes; null: never.
    #[schema(format = DateTime)]
    expires_at: Option<String>,
    /// Whether a report was refused that says an effect happened: look at the history.
    conflict: bool,
    /// What happened, in order; absent in lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(required = false, nullable = false)]
    history: Option<Vec<EventReply>>,
}

/// Something that happened to the work.
#[derive(Debug, Serialize, ToSchema)]
struct EventReply {
    /// When.
    #[schema(format = DateTime)]
    at: String,
    /// `claimed`, `pending`, `renewed`, `done`, `failed`, `effects`, `conflict`, `reviewed` or `reset`; more
    /// may come.
    event: String,
    /// To which attempt.
    #[schema(minimum = 1)]
    attempt: u32,
    /// Who said so.
    claimant: Option<String>,
    /// What belongs to the event, such as an `external_id` or a `reason`.
    #[schema(value_type = Option<Object>)]
    detail: Value,
}

/// The entry after a report.
#[derive(Debug, Serialize, ToSchema)]
pub struct ReportReply {
    /// The entry.
    #[serde(flatten)]
    entry: EntryReply,
    /// Whether the report changed anything; false: it was known already.
    changed: bool,
}

/// A part of the list.
#[derive(Debug, Serialize, ToSchema)]
pub struct ListReply {
    /// The entries, newest change first.
    entries: Vec<EntryReply>,
    /// Send it as `cursor` for the next part; null at the end.
    next_cursor: Option<String>,
}

impl EntryReply {
    fn new(entry: Entry, has_history: bool) -> Self {
        let at = |time: Option<Time>| time.map(rfc3339::format);
        let state = entry.state;
        let status = state.status(entry.now).into();
        let lease_expires_at = state.lease_expires_at();
        let (external_id, result, reason) = match state.phase {
            Phase::Done {
                external_id,
                result,
            } => (external_id, result, None),
            Phase::Failed { reason, .. } => (None, None, reason),
            Phase::Reset { reason } => (None, None, Some(reason)),
            Phase::Claimed | Phase::Pending { .. } => (None, None, None),
        };
        Self {
            idempotency_key: entry.key.as_str().to_owned(),
            order_id: state.order_id,
            status,
            attempt: state.attempt,
            claimant: state.holder.map(|holder| holder.claimant),
            external_id,
            result,
            reason,
            seen_again: state.seen_again,
            processed_at: rfc3339::format(state.processed_at),
            updated_at: rfc3339::format(state.updated_at),
            lease_expires_at: at(lease_expires_at),
            expires_at: at(state.expires_at),
            conflict: state.conflict,
            history: has_history.then(|| entry.history.into_iter().map(EventReply::new).collect()),
        }
    }
}

impl EventReply {
    fn new(event: Event) -> Self {
        // A happening is written as its name and its particulars.
        let mut happening = serde_json::to_value(&event.happening).unwrap_or_default();
        Self {
            at: rfc3339::format(event.at),
            event: happening["event"].as_str().unwrap_or_default().to_owned(),
            attempt: event.attempt,
            claimant: event.holder.map(|holder| holder.claimant),
            detail: happening["detail"].take(),
        }
    }
}

/// Open the entry
///
/// Opens the ledger entry of a key before the work begins, and answers as `/claim` does. An
/// unknown key is claimed in the same transaction. What is done is answered with the stored
/// `external_id` and `result`, so that a retry need not call the API again.
#[utoipa::path(post, path = "/ledger/pending", tag = "ledger",
    request_body = PendingRequest,
    responses((status = 200, description = "The verdict", body = VerdictReply)),
    extensions(("x-problems" = json!(["key_reused"]))))]
pub async fn pending(
    body: JsonBody,
    caller: Caller,
    gate: Data<Gate>,
) -> Result<Json<VerdictReply>, Problem> {
    let request: PendingRequest = decode(body.0, "")?;
    let claim = Claim {
        key: request.idempotency_key,
        order_id: request.order_id.map(Name::into_string),
        holder: holder(request.claimant, &caller),
        ttl_seconds: None,
        payload_sha256: digest(request.payload.as_ref()),
        pending: Some(
            request
                .lease_seconds
                .map_or(DEFAULT_LEASE_SECONDS, |lease| lease.0),
        ),
        on_stale: request
            .on_stale
            .map(|on_stale| on_stale.0)
            .unwrap_or_default(),
        door: Door::Ledger,
    };
    let verdict = gate.claim(claim).await?;
    verdict
        .map(|verdict| Json(VerdictReply::new(verdict, Vec::new())))
        .map_err(|_| Problem::key_reused(std::iter::once("/payload".to_owned())))
}

/// Report that the effect happened
///
/// Send the `attempt` of the verdict. A report that is known already changes nothing. One that
/// is refused (409, or 422 for the attempt) is kept in the history as a `conflict`: an effect
/// that happened is never forgotten.
#[utoipa::path(post, path = "/ledger/done", tag = "ledger",
    request_body = DoneRequest,
    responses((status = 200, description = "The entry", body = ReportReply)),
    extensions(("x-problems" = json!(["unknown_key", "already_done", "superseded", "not_holder", "attempt_required"]))))]
pub async fn done(
    body: JsonBody,
    caller: Caller,
    gate: Data<Gate>,
    routes: Data<Routes>,
) -> Result<Json<ReportReply>, Problem> {
    let request: DoneRequest = decode(body.0, "")?;
    if let Some(result) = &request.result {
        let size = result.to_string().len();
        if size > MAX_RESULT {
            let fault = format!("has {size} bytes as JSON; at most {MAX_RESULT} are allowed");
            return Err(Invalid::new("/result", fault).into());
        }
    }
    let report = Report {
        key: request.idempotency_key,
        attempt: request.attempt.map(|attempt| attempt.0),
        holder: holder(request.claimant, &caller),
        outcome: Outcome::Done {
            external_id: request.external_id.map(Name::into_string),
            result: request.result,
        },
        effects: effects(request.effects, &routes)?,
    };
    act(&gate, Act::Report(report)).await
}

/// Report that the effect did not happen
///
/// `attempt` is required, so that a repeated report cannot fail somebody else's attempt.
#[utoipa::path(post, path = "/ledger/failed", tag = "ledger",
    request_body = FailedRequest,
    responses((status = 200, description = "The entry", body = ReportReply)),
    extensions(("x-problems" = json!(["unknown_key", "already_done", "superseded", "not_holder"]))))]
pub async fn failed(
    body: JsonBody,
    caller: Caller,
    gate: Data<Gate>,
    routes: Data<Routes>,
) -> Result<Json<ReportReply>, Problem> {
    let request: FailedRequest = decode(body.0, "")?;
    let report = Report {
        key: request.idempotency_key,
        attempt: Some(request.attempt.0),
        holder: holder(request.claimant, &caller),
        outcome: Outcome::Failed {
            reason: request.reason.map(Reason::into_string),
            retry: request.retry.unwrap_or(true),
        },
        effects: effects(request.effects, &routes)?,
    };
    act(&gate, Act::Report(report)).await
}

/// Renew the lease
///
/// For work that takes longer than its lease: it is believed to be alive for `lease_seconds` from now
/// on. A lease is never shortened, and only the holder renews it.
#[utoipa::path(post, path = "/ledger/renew", tag = "ledger",
    request_body = RenewRequest,
    responses((status = 200, description = "The entry", body = ReportReply)),
    extensions(("x-problems" = json!(["unknown_key", "already_done", "superseded", "not_holder", "conflict"]))))]
pub async fn renew(
    body: JsonBody,
    caller: Caller,
    gate: Data<Gate>,
) -> Result<Json<ReportReply>, Problem> {
    let request: RenewRequest = decode(body.0, "")?;
    if request.claimant.is_none() && request.attempt.is_none() {
        let fault = "is missing: give \"attempt\" or \"claimant\"";
        return Err(Invalid::new("/attempt", fault).into());
    }
    let renewal = Renewal {
        key: request.idempotency_key,
        attempt: request.attempt.map(|attempt| attempt.0),
        holder: holder(request.claimant, &caller),
        lease_seconds: request
            .lease_seconds
            .map_or(DEFAULT_LEASE_SECONDS, |lease| lease.0),
    };
    act(&gate, Act::Renewal(renewal)).await
}

pub(super) async fn act(gate: &Gate, act: Act) -> Result<Json<ReportReply>, Problem> {
    let key = act.key().clone();
    let acted = gate.act(act).await?.ok_or_else(|| unknown_key(&key))?;
    let changed = acted.answer?;
    Ok(Json(ReportReply {
        entry: EntryReply::new(acted.entry, true),
        changed,
    }))
}

fn unknown_key(key: &IdempotencyKey) -> Problem {
    Problem::new(
        Code::UnknownKey,
        format!("the key {:?} was never claimed", key.as_str()),
    )
}

/// Read an entry
///
/// What is known of a key, with its history. The key is percent-encoded in the path; for the
/// keys `.` and `..`, which clients collapse, there is `GET /ledger?idempotency_key=`.
#[utoipa::path(get, path = "/ledger/{idempotency_key}", tag = "ledger",
    params(("idempotency_key" = String, Path, min_length = 1, max_length = 255, description = "The key, percent-encoded")),
    responses((status = 200, description = "The entry", body = EntryReply)),
    extensions(("x-problems" = json!(["unknown_key"]))))]
pub async fn entry(
    request: HttpRequest,
    _: NoQuery,
    gate: Data<Gate>,
) -> Result<Json<EntryReply>, Problem> {
    let key = key_in_path(request.uri().path())?;
    let entry = gate
        .entry(key.clone())
        .await?
        .ok_or_else(|| unknown_key(&key))?;
    Ok(Json(EntryReply::new(entry, true)))
}

/// The key behind `/ledger/`. The path is decoded here, since the router replaces what is not
/// UTF-8, and one key would be taken for another.
fn key_in_path(path: &str) -> Result<IdempotencyKey, Invalid> {
    let encoded = path.strip_prefix("/ledger/").unwrap_or_default();
    percent_decode_str(encoded)
        .decode_utf8()
        .map_err(|_| "is not UTF-8".to_owned())
        .and_then(|text| IdempotencyKey::try_from(text.into_owned()))
        .map_err(|fault| Invalid::new("/idempotency_key", fault))
}

/// Which entries to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListQuery {
    /// Only those in this state. `pending` leaves out what is stale; keys claimed at the gate
    /// alone are listed by `claimed` only (or by their own name).
    #[param(inline, value_type = Option<StatusName>)]
    status: Option<StatusParameter>,
    /// Only those with (`true`) or without (`false`) a conflict.
    #[param(value_type = Option<bool>)]
    conflict: Option<BoolParameter>,
    /// Only those of this order.
    #[param(value_type = Option<String>, min_length = 1, max_length = 255)]
    order_id: Option<Name>,
    /// Only that of this key.
    #[param(value_type = Option<String>, min_length = 1, max_length = 255)]
    idempotency_key: Option<IdempotencyKey>,
    /// How many at most.
    #[param(value_type = Option<i32>, minimum = 1, maximum = 500, default = 50)]
    limit: Option<Limit>,
    /// The `next_cursor` of the part before.
    #[param(value_type = Option<String>)]
    cursor: Option<CursorParameter>,
}

#[derive(Debug, Deserialize)]
#[serde(try_from = "String")]
struct StatusParameter(Status);

impl TryFrom<String> for StatusParameter {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        serde_json::from_value(Value::from(text))
            .map(Self)
            .map_err(|_| "must be claimed, pending, stale, done or failed")
    }
}

#[derive(Debug, Deserialize)]
#[serde(try_from = "String")]
struct BoolParameter(bool);

impl TryFrom<String> for BoolParameter {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse().map(Self).map_err(|_| "must be true or false")
    }
}

/// A cursor, which callers do not look into.
#[derive(Debug, Deserialize)]
#[serde(try_from = "String")]
struct CursorParameter(Cursor);

impl TryFrom<String> for CursorParameter {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let decode = || {
            let plain = String::from_utf8(URL_SAFE_NO_PAD.decode(text).ok()?).ok()?;
            let (microseconds, key) = plain.split_once(' ')?;
            // No key holds a NUL, and Postgres refuses a text that does.
            let key = (!key.contains('\0')).then(|| IdempotencyKey::from_store(key.to_owned()))?;
            Some(Cursor {
                updated_at: DateTime::from_timestamp_micros(microseconds.parse().ok()?)?,
                key,
            })
        };
        decode().map(Self).ok_or("is not a cursor of this service")
    }
}

fn cursor_text(cursor: &Cursor) -> String {
    let plain = format!(
        "{} {}",
        cursor.updated_at.timestamp_micros(),
        cursor.key.as_str()
    );
    URL_SAFE_NO_PAD.encode(plain)
}

/// List entries
///
/// Newest change first, and stable while rows are added; duplicates change nothing of the
/// order. Without `status` the ledger is listed, not the keys claimed at the gate alone.
#[utoipa::path(get, path = "/ledger", tag = "ledger", params(ListQuery),
    responses((status = 200, description = "A part of the list", body = ListReply)))]
pub async fn list(query: Query, gate: Data<Gate>) -> Result<Json<ListReply>, Problem> {
    let query: ListQuery = decode(Value::Object(query.0), "")?;
    let filter = Filter {
        status: query.status.map(|status| status.0),
        conflict: query.conflict.map(|conflict| conflict.0),
        order_id: query.order_id.map(Name::into_string),
        key: query.idempotency_key,
        limit: query.limit.unwrap_or(Limit::DEFAULT).0,
        cursor: query.cursor.map(|cursor| cursor.0),
    };
    let page = gate.list(filter).await?;
    Ok(Json(ListReply {
        next_cursor: page.next.as_ref().map(cursor_text),
        entries: page
            .entries
            .into_iter()
            .map(|entry| EntryReply::new(entry, false))
            .collect(),
    }))
}
