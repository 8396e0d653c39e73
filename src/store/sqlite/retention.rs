//! How what is over is removed.

use chrono::TimeDelta;
use diesel::dsl::{exists, not, sql};
use diesel::prelude::*;
use diesel::sql_types::{Bool, Text};
use diesel::sqlite::{Sqlite, SqliteConnection};

use super::{NEWEST, clock, read_state};
use crate::domain::Time;
use crate::domain::text::IdempotencyKey;
use crate::store::rows::{At, read_text};
use crate::store::schema::{
    Instant, processed_orders as gate, run_history as history, run_ledger as ledger,
    run_outbox as outbox,
};
use crate::store::{Removed, StoreError, Sweep, Table};

/// The shortest time that is stored.
const TICK: TimeDelta = TimeDelta::milliseconds(1);

pub(super) fn remove(
    connection: &mut SqliteConnection,
    sweep: &Sweep,
) -> Result<Removed, StoreError> {
    let now = clock();
    let found = candidates(connection, sweep, now)?;
    let (keys, next) = sweep.choose(found, TICK);
    let mut count = 0;
    for key in keys.into_iter().map(IdempotencyKey::from_store) {
        match read_state(connection, &key) {
            Ok(Some(state)) if state.is_over(now, sweep.kept) => {
                forget(connection, &key)?;
                count += 1;
            }
            Ok(_) => {}
            Err(unreadable @ StoreError::Unexpected(_)) => log::warn!("not removed: {unreadable}"),
            Err(error) => return Err(error),
        }
    }
    Ok(sweep.removed(count, next, TICK))
}

/// Removes effects that were delivered so long ago, a batch of them, and says how many.
pub(super) fn remove_effects(
    connection: &mut SqliteConnection,
    kept: TimeDelta,
    limit: u32,
) -> QueryResult<u64> {
    let over: Vec<(String, i32)> = outbox::table
        .filter(sql::<Bool>("status = 'delivered'"))
        .filter(outbox::settled_at.le(At(clock() - kept)))
        .order(outbox::settled_at)
        .limit(limit.into())
        .select((outbox::idempotency_key, outbox::seq))
        .load(connection)?;
    for (key, seq) in &over {
        diesel::delete(outbox::table.find((key, seq))).execute(connection)?;
    }
    Ok(over.len() as u64)
}

/// What has not changed for so long, in the order of its changes, and whether it looks as if it were
/// over.
fn candidates(
    connection: &mut SqliteConnection,
    sweep: &Sweep,
    now: Time,
) -> QueryResult<Vec<(String, Time, bool)>> {
    let until = At(now - sweep.kept);
    let from = sweep.from.map(At);
    let has_passed = || {
        sql::<Bool>("(expires_at IS NULL OR expires_at <= ")
            .bind::<Instant, _>(At(now))
            .sql(")")
    };
    match sweep.table {
        Table::Ledger => {
            let mut query = ledger::table
                .filter(ledger::updated_at.le(until))
                .into_boxed::<Sqlite>();
            if let Some(from) = from {
                query = query.filter(ledger::updated_at.ge(from));
            }
            let found: Vec<(String, At, bool)> = query
                .order(ledger::updated_at)
                .limit(sweep.scan())
                .select((
                    ledger::idempotency_key,
                    ledger::updated_at,
                    sql::<Bool>("status <> 'pending' AND NOT conflict").and(has_passed()),
                ))
                .load(connection)?;
            Ok(found
                .into_iter()
                .map(|(key, at, is_over)| (key, at.0, is_over))
                .collect())
        }
        Table::Gate => {
            let changed = |comparison: &str, at: At| {
                sql::<Bool>(&format!("{NEWEST} {comparison} ")).bind::<Instant, _>(at)
            };
            let mut query = gate::table
                .filter(sql::<Bool>("NOT in_ledger"))
                .filter(not(exists(
                    ledger::table.filter(ledger::idempotency_key.eq(gate::idempotency_key)),
                )))
                .filter(changed("<=", until))
                .into_boxed::<Sqlite>();
            // A time that cannot be read counts as that of the epoch, but says nothing of how old the row is.
            query = match from {
                Some(from) => query.filter(changed(">=", from)),
                None => query.filter(changed(">", At(Time::UNIX_EPOCH))),
            };
            let found: Vec<(String, String, bool)> = query
                .order(sql::<Text>(NEWEST))
                .limit(sweep.scan())
                .select((gate::idempotency_key, sql::<Text>(NEWEST), has_passed()))
                .load(connection)?;
            Ok(found
                .into_iter()
                .map(|(key, at, is_over)| (key, read_text(&at), is_over))
                .collect())
        }
    }
}

fn forget(connection: &mut SqliteConnection, key: &IdempotencyKey) -> QueryResult<()> {
    let key = key.as_str();
    diesel::delete(history::table.filter(history::idempotency_key.eq(key))).execute(connection)?;
    diesel::delete(ledger::table.find(key)).execute(connection)?;
    diesel::delete(gate::table.find(key)).execute(connection)?;
    Ok(())
}
