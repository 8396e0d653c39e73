//! How what is over is removed.

use std::collections::{BTreeMap, HashSet};

use chrono::TimeDelta;
use diesel::connection::SimpleConnection;
use diesel::dsl::{exists, not, sql};
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Bool, Double};

use super::{ByKey, clock};
use crate::domain::Time;
use crate::store::rows::{self, At, GateRow, LedgerRow};
use crate::store::schema::{
    processed_orders as gate, run_history as history, run_ledger as ledger,
};
use crate::store::{Removed, StoreError, Sweep, Table};

/// Only one replica at a time removes. Any number will do that nobody else takes; this one spells
/// "purge".
const LOCK: i64 = 0x70_75_72_67_65;

/// The shortest time that is stored.
const TICK: TimeDelta = TimeDelta::microseconds(1);

pub(super) fn remove(
    connection: &mut PgConnection,
    sweep: &Sweep,
) -> Result<Option<Removed>, StoreError> {
    if !is_alone(connection)? {
        return Ok(None);
    }
    let now = clock(connection)?;
    let found = candidates(connection, sweep, now)?;
    let (keys, next) = sweep.choose(found, TICK);
    let count = forget(connection, &keys, sweep, now)?;
    Ok(Some(sweep.removed(count, next, TICK)))
}

/// Removes effects that were delivered so long ago, a batch of them, and says how many.
pub(super) fn remove_effects(
    connection: &mut PgConnection,
    kept: TimeDelta,
    limit: u32,
) -> Result<Option<u64>, StoreError> {
    if !is_alone(connection)? {
        return Ok(None);
    }
    let removed = diesel::sql_query(
        "DELETE FROM run_outbox WHERE (idempotency_key, seq) IN ( \
             SELECT idempotency_key, seq FROM run_outbox \
             WHERE status = 'delivered' \
                 AND settled_at <= statement_timestamp() - make_interval(secs => $1) \
             ORDER BY settled_at LIMIT $2 FOR UPDATE SKIP LOCKED)",
    )
    .bind::<Double, _>(kept.as_seconds_f64())
    .bind::<BigInt, _>(i64::from(limit))
    .execute(connection)?;
    Ok(Some(removed as u64))
}

/// Whether no other replica is at it, until the transaction ends.
fn is_alone(connection: &mut PgConnection) -> QueryResult<bool> {
    diesel::select(
        sql::<Bool>("pg_try_advisory_xact_lock(")
            .bind::<BigInt, _>(LOCK)
            .sql(")"),
    )
    .get_result(connection)
}

/// What has not changed for so long, in the order of its changes, and whether it looks as if it were
/// over.
fn candidates(
    connection: &mut PgConnection,
    sweep: &Sweep,
    now: Time,
) -> QueryResult<Vec<(String, Time, bool)>> {
    let until = At(now - sweep.kept);
    let from = sweep.from.map(At);
    let has_passed = "(expires_at IS NULL OR expires_at <= statement_timestamp())";
    let found: Vec<(String, At, bool)> = match sweep.table {
        Table::Ledger => {
            let mut query = ledger::table
                .filter(ledger::updated_at.le(until))
                .into_boxed();
            if let Some(from) = from {
                query = query.filter(ledger::updated_at.ge(from));
            }
            let is_over = format!("status <> 'pending' AND NOT conflict AND {has_passed}");
            query
                .order(ledger::updated_at)
                .limit(sweep.scan())
                .select((
                    ledger::idempotency_key,
                    ledger::updated_at,
                    sql::<Bool>(&is_over),
                ))
                .load(connection)?
        }
        Table::Gate => {
            let mut query = gate::table
                .filter(sql::<Bool>("NOT in_ledger"))
                .filter(not(exists(
                    ledger::table.filter(ledger::idempotency_key.eq(gate::idempotency_key)),
                )))
                .filter(gate::processed_at.le(until))
                .into_boxed();
            // `-infinity` says nothing of how old the row is.
            query = match from {
                Some(from) => query.filter(gate::processed_at.ge(from)),
                None => query.filter(gate::processed_at.gt(At(Time::MIN_UTC))),
            };
            query
                .order(gate::processed_at)
                .limit(sweep.scan())
                .select((
                    gate::idempotency_key,
                    gate::processed_at,
                    sql::<Bool>(has_passed),
                ))
                .load(connection)?
        }
    };
    let found = found.into_iter();
    Ok(found
        .map(|(key, at, is_over)| (key, at.0, is_over))
        .collect())
}

/// Removes those of these keys that are over, judged with their rows locked. Nobody is waited for: a key
/// of which somebody else has locked a row is in use, and is left.
fn forget(
    connection: &mut PgConnection,
    keys: &[String],
    sweep: &Sweep,
    now: Time,
) -> Result<u64, StoreError> {
    let gate_rows: BTreeMap<String, GateRow> = gate::table
        .filter(gate::idempotency_key.eq_any(keys))
        .order(ByKey)
        .for_update()
        .skip_locked()
        .select(GateRow::as_select())
        .load(connection)?
        .into_iter()
        .map(|row: GateRow| (row.idempotency_key.clone(), row))
        .collect();
    let entries: BTreeMap<String, LedgerRow> = ledger::table
        .filter(ledger::idempotency_key.eq_any(keys))
        .order(ByKey)
        .for_update()
        .skip_locked()
        .select(LedgerRow::as_select())
        .load(connection)?
        .into_iter()
        .map(|row: LedgerRow| (row.idempotency_key.clone(), row))
        .collect();
    let in_gate: HashSet<String> = gate::table
        .filter(gate::idempotency_key.eq_any(keys))
        .select(gate::idempotency_key)
        .load(connection)?
        .into_iter()
        .collect();
    let in_ledger: Vec<String> = ledger::table
        .filter(ledger::idempotency_key.eq_any(keys))
        .select(ledger::idempotency_key)
        .load(connection)?;
    // Where the gate has no row, it gets one until the end: a claim that comes now waits for that, and then
    // finds the key unknown.
    let missing = keys.iter().filter(|key| !in_gate.contains(*key));
    let made = stand_in(connection, &missing.collect::<Vec<_>>())?;
    let is_free = |key: &&String| gate_rows.contains_key(*key) || made.contains(*key);
    let in_use: HashSet<&String> = keys
        .iter()
        .filter(|key| !is_free(key))
        .chain(in_ledger.iter().filter(|key| !entries.contains_key(*key)))
        .collect();
    let mut over = Vec::new();
    for key in keys.iter().filter(|key| !in_use.contains(key)) {
        match rows::state(gate_rows.get(key), entries.get(key)) {
            Ok(Some(state)) if state.is_over(now, sweep.kept) => over.push(key.as_str()),
            Ok(_) => {}
            Err(unreadable) => log::warn!("not removed: {unreadable}"),
        }
    }
    let gone: Vec<&str> = over
        .iter()
        .copied()
        .chain(made.iter().map(String::as_str))
        .collect();
    diesel::delete(history::table.filter(history::idempotency_key.eq_any(&over)))
        .execute(connection)?;
    diesel::delete(ledger::table.filter(ledger::idempotency_key.eq_any(&over)))
        .execute(connection)?;
    diesel::delete(gate::table.filter(gate::idempotency_key.eq_any(&gone))).execute(connection)?;
    Ok(over.len() as u64)
}

/// Makes a row of the gate for each of these keys that has none, and says which those were.
fn stand_in(connection: &mut PgConnection, keys: &[&String]) -> QueryResult<HashSet<String>> {
    if keys.is_empty() {
        return Ok(HashSet::new());
    }
    // Somebody else may be making one.
    connection.batch_execute("SET LOCAL lock_timeout = '100ms'")?;
    let rows: Vec<_> = keys
        .iter()
        .map(|&key| (gate::idempotency_key.eq(key), gate::order_id.eq(key)))
        .collect();
    let made: Vec<String> = diesel::insert_into(gate::table)
        .values(rows)
        .on_conflict(gate::idempotency_key)
        .do_nothing()
        .returning(gate::idempotency_key)
        .get_results(connection)?;
    Ok(made.into_iter().collect())
}
