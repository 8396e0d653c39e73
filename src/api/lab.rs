//! `/lab`: retries of one payment, with and without a key, to run in front of somebody. Served where `LAB` is on.

use std::sync::LazyLock;

use actix_web::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY};
use actix_web::web::{Data, Path};
use actix_web::{HttpRequest, HttpResponse};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use utoipa::{IntoParams, ToSchema};

use super::auth::Caller;
use super::claim::StatusName;
use super::outbox::{self, EffectsReply, OutboxQuery};
use super::problem::{Code, Problem};
use super::request::{NoQuery, Query, WholeParameter, decode};
use crate::domain::rfc3339;
use crate::domain::text::{IdempotencyKey, Name};
use crate::lab::{Lab, LabError, WINDOW_SECONDS};
use crate::store::Entry;
use crate::store::lab::{Account, OPENING_CENTS, Payment, Sum, Variant};

/// Where the caller does not say.
const DEFAULT_ACCOUNT: &str = "acc-1";
const DEFAULT_ATTEMPTS: u32 = 5;
const DEFAULT_AMOUNT: u32 = 2500;

const MAX_ATTEMPTS: u32 = 64;
/// In cents.
const MAX_AMOUNT: u32 = 1_000_000;

/// A payment, and how often it is tried.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ChargeQuery {
    /// The key of the payment: each try has the same.
    #[param(value_type = String, min_length = 1, max_length = 255, example = "order-4711")]
    key: IdempotencyKey,
    /// Who pays.
    #[param(value_type = Option<String>, min_length = 1, max_length = 255, default = "acc-1")]
    account: Option<Name>,
    /// How often it is tried, at once.
    #[param(value_type = Option<i32>, minimum = 1, maximum = 64, default = 5)]
    attempts: Option<WholeParameter<1, MAX_ATTEMPTS>>,
    /// How much is to be paid, once, in cents.
    #[param(value_type = Option<i32>, minimum = 1, maximum = 1_000_000, default = 2500)]
    amount: Option<WholeParameter<1, MAX_AMOUNT>>,
}

/// What to show.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct StateQuery {
    /// Only the accounts of this name.
    #[param(value_type = Option<String>, min_length = 1, max_length = 255)]
    account: Option<Name>,
}

/// What the tries of a payment came to.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChargeReply {
    /// How each try decided whether to charge: `unsafe` (it just did), `in_memory` (by a map in the memory of
    /// this process), `idempotent` (by the gate).
    variant: &'static str,
    /// The key of the payment.
    key: String,
    /// Who pays.
    account: String,
    /// How often it was tried in this call.
    attempts: u32,
    /// How much was to be paid, once, in cents.
    amount_cents: i64,
    /// How many of these tries charged.
    charges_applied: i64,
    /// How many did not, since the payment was known: with `charges_applied` it makes `attempts`.
    duplicates_prevented: i64,
    /// How much these tries took, in cents.
    charged_cents: i64,
    /// How much of it was too much, in cents: all but the first charge of the key, be that of an earlier call.
    overcharged_cents: i64,
    /// How often the key was charged by now, by all calls and replicas.
    charges_of_key: i64,
    /// What the account of this variant holds after it, in cents; below zero where more was taken than there was.
    balance_cents: i64,
}

/// What the lab holds.
#[derive(Debug, Serialize, ToSchema)]
pub struct StateReply {
    /// The keys that the gate of the lab holds, newest change first, and a hundred at most.
    keys: Vec<HeldKey>,
    /// Whether there are more of them.
    more_keys: bool,
    /// How many keys are in the memory of this process, and of no other.
    keys_in_memory: usize,
    /// For how long a payment that is sent again counts as a repeat, in seconds.
    window_seconds: u32,
    /// What an account holds before its first charge, in cents.
    opening_cents: i64,
    /// The accounts by their names, one of each variant that charged it, and a hundred at most.
    accounts: Vec<AccountReply>,
}

/// A key that the gate of the lab holds.
#[derive(Debug, Serialize, ToSchema)]
struct HeldKey {
    /// The key.
    key: String,
    /// The state of the payment: `done` once it is charged.
    status: StatusName,
    /// The id of the charge.
    charge_id: Option<String>,
    /// How long ago it was claimed, in seconds.
    age_seconds: i64,
    /// When the window passes.
    #[schema(format = DateTime)]
    expires_at: Option<String>,
    /// How many duplicates were turned away.
    duplicates_prevented: u64,
}

/// An account.
#[derive(Debug, Serialize, ToSchema)]
struct AccountReply {
    /// Which variant charges it.
    variant: String,
    /// Its name.
    account: String,
    /// What it holds, in cents.
    balance_cents: i64,
    /// How much was taken that should not have been, in cents.
    overcharged_cents: i64,
}

/// All that the lab did since it was emptied.
#[derive(Debug, Serialize, ToSchema)]
pub struct SummaryReply {
    /// One of each variant.
    variants: Vec<SumReply>,
}

/// What was done by one variant.
#[derive(Debug, Serialize, ToSchema)]
struct SumReply {
    /// Which.
    variant: &'static str,
    /// How many payments.
    keys: i64,
    /// How many tries.
    attempts: i64,
    /// How many of them charged.
    charges_applied: i64,
    /// How many did not.
    duplicates_prevented: i64,
    /// How much was taken, in cents.
    charged_cents: i64,
    /// How much of it was too much, in cents.
    overcharged_cents: i64,
}

/// The lab is empty.
#[derive(Debug, Serialize, ToSchema)]
pub struct ResetReply {
    /// `true`
    reset: bool,
}

impl From<LabError> for Problem {
    fn from(error: LabError) -> Self {
        match error {
            LabError::KeyReused => {
                Self::key_reused(["/account", "/amount"].map(str::to_owned).into_iter())
            }
            LabError::Gate(error) => error.into(),
        }
    }
}

impl HeldKey {
    fn new(entry: Entry) -> Self {
        let state = entry.state;
        Self {
            key: entry.key.as_str().to_owned(),
            status: state.status(entry.now).into(),
            charge_id: state.effect().0.cloned(),
            age_seconds: (entry.now - state.processed_at).num_seconds(),
            expires_at: state.expires_at.map(rfc3339::format),
            duplicates_prevented: state.seen_again,
        }
    }
}

impl From<Account> for AccountReply {
    fn from(account: Account) -> Self {
        Self {
            variant: account.variant,
            account: account.account,
            balance_cents: account.balance_cents,
            overcharged_cents: account.overcharged_cents,
        }
    }
}

impl SumReply {
    /// Zeros where the variant did nothing.
    fn new(variant: Variant, sum: Option<&Sum>) -> Self {
        let number = |member: fn(&Sum) -> i64| sum.map_or(0, member);
        Self {
            variant: variant.name(),
            keys: number(|sum| sum.keys),
            attempts: number(|sum| sum.charges + sum.prevented),
            charges_applied: number(|sum| sum.charges),
            duplicates_prevented: number(|sum| sum.prevented),
            charged_cents: number(|sum| sum.charged_cents),
            overcharged_cents: number(|sum| sum.overcharged_cents),
        }
    }
}

/// A reply that holds for now only; what asks for it may have charged.
fn fresh(reply: &impl Serialize) -> HttpResponse {
    HttpResponse::Ok()
        .insert_header((CACHE_CONTROL, "no-store"))
        .json(reply)
}

/// Charge without a key
///
/// Every try charges, as retries do where nobody asks whether it is the first time. It acts, so it answers no HEAD.
#[utoipa::path(get, path = "/lab/charge-unsafe", operation_id = "lab_charge_unsafe", tag = "lab", params(ChargeQuery),
    responses((status = 200, description = "What the tries came to", body = ChargeReply)))]
pub async fn charge_unsafe(
    query: Query,
    caller: Caller,
    lab: Data<Lab>,
) -> Result<HttpResponse, Problem> {
    charge(Variant::Unsafe, query, caller, &lab).await
}

/// Charge once in each process
///
/// A try charges where a map in the memory of this process has not seen the key: right with one process, and wrong
/// with two. It acts, so it answers no HEAD.
#[utoipa::path(get, path = "/lab/charge-in-memory", operation_id = "lab_charge_in_memory", tag = "lab", params(ChargeQuery),
    responses((status = 200, description = "What the tries came to", body = ChargeReply)))]
pub async fn charge_in_memory(
    query: Query,
    caller: Caller,
    lab: Data<Lab>,
) -> Result<HttpResponse, Problem> {
    charge(Variant::InMemory, query, caller, &lab).await
}

/// Charge once
///
/// Every try claims the key as `/claim` does, at the gate of the lab, and the one that wins charges: charge and
/// report are one transaction. A key that was charged with another account or amount is refused. It acts, so it
/// answers no HEAD.
#[utoipa::path(get, path = "/lab/charge-idempotent", operation_id = "lab_charge_idempotent", tag = "lab", params(ChargeQuery),
    responses((status = 200, description = "What the tries came to", body = ChargeReply)),
    extensions(("x-problems" = json!(["key_reused"]))))]
pub async fn charge_idempotent(
    query: Query,
    caller: Caller,
    lab: Data<Lab>,
) -> Result<HttpResponse, Problem> {
    charge(Variant::Idempotent, query, caller, &lab).await
}

async fn charge(
    variant: Variant,
    query: Query,
    caller: Caller,
    lab: &Lab,
) -> Result<HttpResponse, Problem> {
    let query: ChargeQuery = decode(Value::Object(query.0), "")?;
    let account = query.account.map(Name::into_string);
    let payment = Payment {
        key: query.key,
        account: account.unwrap_or_else(|| DEFAULT_ACCOUNT.to_owned()),
        amount_cents: query
            .amount
            .map_or(DEFAULT_AMOUNT, |amount| amount.0)
            .into(),
    };
    let attempts = query
        .attempts
        .map_or(DEFAULT_ATTEMPTS, |attempts| attempts.0);
    let charged = lab
        .charge(variant, payment.clone(), attempts, caller.0)
        .await?;
    Ok(fresh(&ChargeReply {
        variant: variant.name(),
        key: payment.key.as_str().to_owned(),
        account: payment.account,
        attempts,
        amount_cents: payment.amount_cents,
        charges_applied: charged.charges,
        duplicates_prevented: charged.prevented,
        charged_cents: charged.charges * payment.amount_cents,
        overcharged_cents: charged.overcharges * payment.amount_cents,
        charges_of_key: charged.totals.charges,
        balance_cents: charged.totals.balance_cents,
    }))
}

/// What the lab holds
///
/// The keys of its gate with their age and window, and what each account holds by now.
#[utoipa::path(get, path = "/lab/idempotency/state", operation_id = "lab_state", tag = "lab", params(StateQuery),
    responses((status = 200, description = "Keys and accounts", body = StateReply)))]
pub async fn state(query: Query, lab: Data<Lab>) -> Result<HttpResponse, Problem> {
    let query: StateQuery = decode(Value::Object(query.0), "")?;
    let held = lab.held(query.account.map(Name::into_string)).await?;
    Ok(fresh(&StateReply {
        more_keys: held.keys.next.is_some(),
        keys: held.keys.entries.into_iter().map(HeldKey::new).collect(),
        keys_in_memory: held.in_memory,
        window_seconds: WINDOW_SECONDS,
        opening_cents: OPENING_CENTS,
        accounts: held.accounts.into_iter().map(AccountReply::from).collect(),
    }))
}

/// List the effects of the lab
///
/// As `GET /outbox` does, of the lab's: each charge at the gate stores one, in the transaction of the charge.
#[utoipa::path(get, path = "/lab/outbox", operation_id = "lab_outbox", tag = "lab", params(OutboxQuery),
    responses((status = 200, description = "A part of the list", body = EffectsReply)))]
pub async fn outbox(query: Query, lab: Data<Lab>) -> Result<HttpResponse, Problem> {
    let page = outbox::list_of(query, lab.gate()).await?;
    Ok(fresh(&page))
}

/// Sum up
///
/// What each variant did since the lab was emptied, on all replicas.
#[utoipa::path(get, path = "/lab/diagnostics/summary", operation_id = "lab_summary", tag = "lab",
    responses((status = 200, description = "Sums by variant", body = SummaryReply)))]
pub async fn summary(_: NoQuery, lab: Data<Lab>) -> Result<HttpResponse, Problem> {
    let sums = lab.sums().await?;
    let of = |variant: Variant| sums.iter().find(|sum| sum.variant == variant.name());
    Ok(fresh(&SummaryReply {
        variants: Variant::ALL
            .into_iter()
            .map(|variant| SumReply::new(variant, of(variant)))
            .collect(),
    }))
}

/// Empty the lab
///
/// And only the lab, on all replicas: their maps in memory begin anew with the next charge. It acts, so it answers
/// no HEAD.
#[utoipa::path(get, path = "/lab/reset-lab", operation_id = "lab_reset", tag = "lab",
    responses((status = 200, description = "It is empty", body = ResetReply)))]
pub async fn reset(_: NoQuery, lab: Data<Lab>) -> Result<HttpResponse, Problem> {
    lab.reset().await?;
    Ok(fresh(&ResetReply { reset: true }))
}

/// A receipt that came, in the reply to the one who brought it.
#[derive(Serialize)]
struct ReceiptReply {
    /// Whether it came for the first time.
    first: bool,
}

/// Takes what the lab's outbox delivers. Only this process knows the path.
pub async fn receive(
    token: Path<String>,
    request: HttpRequest,
    lab: Data<Lab>,
) -> Result<HttpResponse, Problem> {
    let is_ours = bool::from(token.as_bytes().ct_eq(lab.token().as_bytes()));
    let id = request.headers().get("webhook-id").filter(|_| is_ours);
    let id = id.and_then(|id| IdempotencyKey::try_from(id.to_str().ok()?.to_owned()).ok());
    let id = id.ok_or_else(|| Problem::new(Code::NotFound, "the lab expects nothing there"))?;
    let first = lab.receive(id).await?;
    Ok(fresh(&ReceiptReply { first }))
}

const PAGE: &str = include_str!("lab.html");

/// Lets the page run its own script and style, and speak to its own service; nothing else.
static POLICY: LazyLock<String> = LazyLock::new(|| {
    let hash = |element: &str| {
        let inside = PAGE
            .split_once(&format!("<{element}>"))
            .and_then(|(_, rest)| rest.split_once(&format!("</{element}>")))
            .map_or("", |(inside, _)| inside);
        format!("'sha256-{}'", STANDARD.encode(Sha256::digest(inside)))
    };
    format!(
        "default-src 'none'; script-src {}; style-src {}; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        hash("script"),
        hash("style"),
    )
});

/// The page of the lab
///
/// Buttons, and the balances of an account. It holds nothing, so it needs no API key: what it shows, it asks for with
/// the key that is typed into it.
#[utoipa::path(get, path = "/lab", operation_id = "lab_page", tag = "lab",
    responses((status = 200, description = "The page", body = String, content_type = "text/html")))]
pub async fn page(_: NoQuery) -> HttpResponse {
    HttpResponse::Ok()
        .content_type("text/html; charset=utf-8")
        .insert_header((CONTENT_SECURITY_POLICY, POLICY.as_str()))
        .body(PAGE)
}
