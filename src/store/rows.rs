//! Rows, and what they say of a key.

use chrono::{DateTime, Datelike, Utc};
use diesel::data_types::PgTimestamp;
use diesel::deserialize::{self, FromSql, FromSqlRow};
use diesel::expression::AsExpression;
use diesel::pg::{Pg, PgValue};
use diesel::prelude::*;
use diesel::serialize::{self, IsNull, Output, ToSql};
use diesel::sql_types::{BigInt, Nullable, Text, Timestamptz};
use diesel::sqlite::{Sqlite, SqliteValue};
use serde::Deserialize;
use serde_json::{Value, json};

use super::StoreError;
use super::schema::{Instant, processed_orders, run_history, run_ledger};
use crate::domain::ledger::{Event, Holder, KeyState, Phase};
use crate::domain::text::IdempotencyKey;
use crate::domain::{Time, rfc3339};

/// A point in time in a row of either database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, AsExpression, FromSqlRow)]
#[diesel(sql_type = Instant)]
pub(super) struct At(pub(super) Time);

/// Unix times in microseconds: where Postgres counts from, and the first that it takes.
const YEAR_2000: i64 = 946_684_800_000_000;
const POSTGRES_BEGINS: i64 = -210_866_803_200_000_000;
/// The year from which on a time counts as the last that there is. Postgres takes later ones,
/// chrono hardly.
const LAST_YEAR: i32 = 262_000;

/// Raw SQL may write `infinity` on Postgres: it is the last time that there is, and `-infinity`
/// the first, so that lists keep their order.
impl FromSql<Instant, Pg> for At {
    fn from_sql(value: PgValue<'_>) -> deserialize::Result<Self> {
        let PgTimestamp(since_2000) = FromSql::<Timestamptz, Pg>::from_sql(value)?;
        let time = since_2000
            .checked_add(YEAR_2000)
            .and_then(DateTime::from_timestamp_micros);
        Ok(Self(time.unwrap_or(if since_2000 > 0 {
            DateTime::<Utc>::MAX_UTC
        } else {
            DateTime::<Utc>::MIN_UTC
        })))
    }
}

impl ToSql<Instant, Pg> for At {
    fn to_sql<'b>(&'b self, out: &mut Output<'b, '_, Pg>) -> serialize::Result {
        let micros = self.0.timestamp_micros();
        let since_2000 = if self.0.year() >= LAST_YEAR {
            i64::MAX
        } else if micros < POSTGRES_BEGINS {
            i64::MIN
        } else {
            micros - YEAR_2000
        };
        ToSql::<Timestamptz, Pg>::to_sql(&PgTimestamp(since_2000), &mut out.reborrow())
    }
}

impl FromSql<Instant, Sqlite> for At {
    fn from_sql(value: SqliteValue<'_, '_, '_>) -> deserialize::Result<Self> {
        let text: String = FromSql::<Text, Sqlite>::from_sql(value)?;
        Ok(Self(read_text(&text)))
    }
}

impl ToSql<Instant, Sqlite> for At {
    fn to_sql<'b>(&'b self, out: &mut Output<'b, '_, Sqlite>) -> serialize::Result {
        out.set_value(rfc3339::format(self.0));
        Ok(IsNull::No)
    }
}

/// Reads what we write. Text that is no time counts as long ago: one odd row made by hand must
/// not keep a key from being answered.
pub(super) fn read_text(text: &str) -> Time {
    DateTime::parse_from_rfc3339(text).map_or(DateTime::<Utc>::UNIX_EPOCH, |time| time.to_utc())
}

/// A row of the gate.
#[derive(Debug, Clone, Queryable, Selectable, Insertable)]
#[diesel(table_name = processed_orders, treat_none_as_default_value = false)]
pub(super) struct GateRow {
    pub(super) idempotency_key: String,
    pub(super) order_id: String,
    pub(super) processed_at: At,
    pub(super) attempt: i32,
    pub(super) claimant: Option<String>,
    pub(super) api_key: Option<String>,
    pub(super) payload_sha256: Option<Vec<u8>>,
    pub(super) ttl_seconds: Option<i32>,
    pub(super) expires_at: Option<At>,
    /// A hint that keeps lists of the gate quick: keys of raw SQL may lack it.
    pub(super) in_ledger: bool,
    pub(super) seen_again: i64,
    pub(super) last_seen_at: Option<At>,
}

/// What is pending.
#[derive(Debug, QueryableByName)]
pub(super) struct BacklogRow {
    #[diesel(sql_type = BigInt)]
    pub(super) pending: i64,
    #[diesel(sql_type = BigInt)]
    pub(super) stale: i64,
    /// When the oldest attempt was claimed.
    #[diesel(sql_type = Nullable<Instant>)]
    pub(super) oldest: Option<At>,
}

/// A row of the ledger.
#[derive(Debug, Clone, Queryable, Selectable, Insertable, AsChangeset)]
#[diesel(table_name = run_ledger, treat_none_as_default_value = false, treat_none_as_null = true)]
pub(super) struct LedgerRow {
    pub(super) idempotency_key: String,
    pub(super) order_id: String,
    pub(super) status: String,
    pub(super) attempt: i32,
    pub(super) claimant: Option<String>,
    pub(super) api_key: Option<String>,
    pub(super) processed_at: At,
    pub(super) recognised_from: At,
    pub(super) payload_sha256: Option<Vec<u8>>,
    pub(super) ttl_seconds: Option<i32>,
    pub(super) expires_at: Option<At>,
    pub(super) lease_expires_at: Option<At>,
    pub(super) external_id: Option<String>,
    pub(super) result: Option<String>,
    pub(super) reason: Option<String>,
    pub(super) retry: Option<bool>,
    pub(super) reset: bool,
    pub(super) conflict: bool,
    pub(super) updated_at: At,
}

/// A row of the history.
#[derive(Debug, Clone, Queryable, Selectable, Insertable)]
#[diesel(table_name = run_history, treat_none_as_default_value = false)]
pub(super) struct HistoryRow {
    pub(super) idempotency_key: String,
    pub(super) seq: i32,
    pub(super) at: At,
    pub(super) event: String,
    pub(super) attempt: i32,
    pub(super) claimant: Option<String>,
    pub(super) api_key: Option<String>,
    pub(super) detail: Option<String>,
}

/// What a list shows of a row of the ledger that the gate keeps.
pub(super) type Seen = (i64, Option<At>);

impl GateRow {
    /// The gate's row of a key in this state.
    pub(super) fn of_state(key: &IdempotencyKey, state: &KeyState) -> Self {
        let (claimant, api_key) = holder_columns(state.holder.as_ref());
        Self {
            idempotency_key: key.as_str().to_owned(),
            order_id: state.order_id.clone(),
            processed_at: At(state.processed_at),
            attempt: state.attempt.cast_signed(),
            claimant,
            api_key,
            payload_sha256: state.payload_sha256.clone(),
            ttl_seconds: state.ttl_seconds.map(u32::cast_signed),
            expires_at: state.expires_at.map(At),
            in_ledger: state.in_ledger,
            seen_again: state.seen_again.cast_signed(),
            last_seen_at: state.last_seen_at.map(At),
        }
    }
}

impl LedgerRow {
    /// The ledger's row of a key in this state.
    pub(super) fn of_state(key: &IdempotencyKey, state: &KeyState) -> Self {
        let (claimant, api_key) = holder_columns(state.holder.as_ref());
        let mut row = Self {
            idempotency_key: key.as_str().to_owned(),
            order_id: state.order_id.clone(),
            status: String::new(),
            attempt: state.attempt.cast_signed(),
            claimant,
            api_key,
            processed_at: At(state.processed_at),
            recognised_from: At(state.recognised_from),
            payload_sha256: state.payload_sha256.clone(),
            ttl_seconds: state.ttl_seconds.map(u32::cast_signed),
            expires_at: state.expires_at.map(At),
            lease_expires_at: None,
            external_id: None,
            result: None,
            reason: None,
            retry: None,
            reset: false,
            conflict: state.conflict,
            updated_at: At(state.updated_at),
        };
        match &state.phase {
            Phase::Claimed => row.status = "claimed".into(),
            Phase::Pending { lease_expires_at } => {
                row.status = "pending".into();
                row.lease_expires_at = Some(At(*lease_expires_at));
            }
            Phase::Done {
                external_id,
                result,
            } => {
                row.status = "done".into();
                row.external_id.clone_from(external_id);
                row.result = result.as_ref().map(Value::to_string);
            }
            Phase::Failed { reason, retry } => {
                row.status = "failed".into();
                row.reason.clone_from(reason);
                row.retry = Some(*retry);
            }
            Phase::Reset { reason } => {
                row.status = "failed".into();
                row.reason = Some(reason.clone());
                row.retry = Some(true);
                row.reset = true;
            }
        }
        row
    }

    fn phase(&self) -> Result<Phase, StoreError> {
        let unexpected = |what: &str| {
            StoreError::Unexpected(format!("run_ledger {:?} has {what}", self.idempotency_key))
        };
        match self.status.as_str() {
            "claimed" => Ok(Phase::Claimed),
            "pending" => match self.lease_expires_at {
                Some(At(lease_expires_at)) => Ok(Phase::Pending { lease_expires_at }),
                None => Err(unexpected("no lease")),
            },
            "done" => Ok(Phase::Done {
                external_id: self.external_id.clone(),
                result: self
                    .result
                    .as_deref()
                    .map(stored_json)
                    .transpose()
                    .map_err(|error| unexpected(&format!("an unreadable result: {error}")))?,
            }),
            "failed" if self.reset => Ok(Phase::Reset {
                reason: self.reason.clone().unwrap_or_default(),
            }),
            "failed" => Ok(Phase::Failed {
                reason: self.reason.clone(),
                retry: self.retry.unwrap_or(false),
            }),
            other => Err(unexpected(&format!("the unknown status {other:?}"))),
        }
    }
}

/// What the rows of a key say together: the ledger where it has a row, else the gate.
pub(super) fn state(
    gate: Option<&GateRow>,
    ledger: Option<&LedgerRow>,
) -> Result<Option<KeyState>, StoreError> {
    let seen = gate.map_or((0, None), |gate| (gate.seen_again, gate.last_seen_at));
    match (gate, ledger) {
        (_, Some(row)) => ledger_state(row, seen).map(Some),
        (Some(row), None) => Ok(Some(gate_state(row))),
        (None, None) => Ok(None),
    }
}

/// What a row of the gate says of a key that the ledger does not know.
pub(super) fn gate_state(row: &GateRow) -> KeyState {
    KeyState {
        order_id: row.order_id.clone(),
        attempt: row.attempt.cast_unsigned(),
        holder: holder(row.claimant.as_ref(), row.api_key.as_ref()),
        processed_at: row.processed_at.0,
        recognised_from: row.processed_at.0,
        payload_sha256: row.payload_sha256.clone(),
        ttl_seconds: row.ttl_seconds.map(i32::cast_unsigned),
        expires_at: row.expires_at.map(|at| at.0),
        seen_again: row.seen_again.cast_unsigned(),
        last_seen_at: row.last_seen_at.map(|at| at.0),
        updated_at: row.processed_at.0,
        phase: Phase::Claimed,
        conflict: false,
        in_ledger: false,
    }
}

/// What a row of the ledger says of a key, with the counters of the gate.
pub(super) fn ledger_state(row: &LedgerRow, seen: Seen) -> Result<KeyState, StoreError> {
    Ok(KeyState {
        order_id: row.order_id.clone(),
        attempt: row.attempt.cast_unsigned(),
        holder: holder(row.claimant.as_ref(), row.api_key.as_ref()),
        processed_at: row.processed_at.0,
        recognised_from: row.recognised_from.0,
        payload_sha256: row.payload_sha256.clone(),
        ttl_seconds: row.ttl_seconds.map(i32::cast_unsigned),
        expires_at: row.expires_at.map(|at| at.0),
        seen_again: seen.0.cast_unsigned(),
        last_seen_at: seen.1.map(|at| at.0),
        updated_at: row.updated_at.0,
        phase: row.phase()?,
        conflict: row.conflict,
        in_ledger: true,
    })
}

impl HistoryRow {
    /// The rows of these events, the first with the number `seq`.
    pub(super) fn of_events(
        key: &IdempotencyKey,
        events: &[Event],
        seq: i32,
    ) -> Result<Vec<Self>, StoreError> {
        (seq..)
            .zip(events)
            .map(|(seq, event)| {
                let unexpected =
                    |error: serde_json::Error| StoreError::Unexpected(error.to_string());
                let happening = serde_json::to_value(&event.happening).map_err(unexpected)?;
                let (claimant, api_key) = holder_columns(event.holder.as_ref());
                Ok(Self {
                    idempotency_key: key.as_str().to_owned(),
                    seq,
                    at: At(event.at),
                    event: happening["event"].as_str().unwrap_or_default().to_owned(),
                    attempt: event.attempt.cast_signed(),
                    claimant,
                    api_key,
                    detail: happening.get("detail").map(Value::to_string),
                })
            })
            .collect()
    }

    /// The event that the row stands for.
    pub(super) fn event(&self) -> Result<Event, StoreError> {
        let unexpected = |error: serde_json::Error| {
            StoreError::Unexpected(format!(
                "run_history {:?} {}: {error}",
                self.idempotency_key, self.seq
            ))
        };
        let detail: Option<Value> = self
            .detail
            .as_deref()
            .map(stored_json)
            .transpose()
            .map_err(unexpected)?;
        Ok(Event {
            at: self.at.0,
            attempt: self.attempt.cast_unsigned(),
            holder: holder(self.claimant.as_ref(), self.api_key.as_ref()),
            happening: serde_json::from_value(json!({"event": self.event, "detail": detail}))
                .map_err(unexpected)?,
        })
    }
}

/// JSON that we wrote. What is allowed to nest to the limit of a request may stand a few levels
/// deeper here, so there is no limit.
fn stored_json(text: &str) -> serde_json::Result<Value> {
    let mut reader = serde_json::Deserializer::from_str(text);
    reader.disable_recursion_limit();
    Value::deserialize(&mut reader)
}

fn holder_columns(holder: Option<&Holder>) -> (Option<String>, Option<String>) {
    match holder {
        Some(holder) => (Some(holder.claimant.clone()), holder.api_key.clone()),
        None => (None, None),
    }
}

fn holder(claimant: Option<&String>, api_key: Option<&String>) -> Option<Holder> {
    claimant.map(|claimant| Holder {
        claimant: claimant.clone(),
        api_key: api_key.cloned(),
    })
}
