//! Lists of entries, and what is pending.

use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Bool, Text};
use diesel::sqlite::{Sqlite, SqliteConnection};

use super::super::rows::{At, BacklogRow, GateRow, LedgerRow, Seen};
use super::super::schema::{Instant, processed_orders as gate_rows, run_ledger as ledger_rows};
use super::super::{Backlog, Entry, Filter, StoreError};
use super::{NEWEST, with_time};
use crate::domain::Time;
use crate::domain::ledger::Status;

/// Entries of the ledger, one more than asked for, so that it shows whether there are more.
pub(super) fn ledger(
    connection: &mut SqliteConnection,
    filter: &Filter,
    now: Time,
) -> Result<Vec<Entry>, StoreError> {
    let mut query = ledger_rows::table
        .left_join(gate_rows::table.on(gate_rows::idempotency_key.eq(ledger_rows::idempotency_key)))
        .select((
            LedgerRow::as_select(),
            (gate_rows::seen_again, gate_rows::last_seen_at).nullable(),
        ))
        .into_boxed::<Sqlite>();
    // Written out where a partial index serves it: SQLite compares the text of the condition.
    query = match filter.status {
        None => query,
        Some(Status::Done) => query.filter(ledger_rows::status.eq("done")),
        Some(Status::Claimed) => {
            query.filter(sql::<Bool>("status = 'claimed' AND status <> 'done'"))
        }
        Some(Status::Failed) => query.filter(sql::<Bool>("status = 'failed' AND status <> 'done'")),
        Some(Status::Pending) => query
            .filter(sql::<Bool>("status = 'pending' AND status <> 'done'"))
            .filter(ledger_rows::lease_expires_at.gt(At(now))),
        Some(Status::Stale) => query
            .filter(sql::<Bool>("status = 'pending' AND status <> 'done'"))
            .filter(ledger_rows::lease_expires_at.le(At(now))),
    };
    query = match filter.conflict {
        None => query,
        Some(true) => query.filter(ledger_rows::conflict),
        Some(false) => query.filter(diesel::dsl::not(ledger_rows::conflict)),
    };
    if let Some(order_id) = &filter.order_id {
        query = query.filter(ledger_rows::order_id.eq(order_id));
    }
    if let Some(key) = &filter.key {
        query = query.filter(ledger_rows::idempotency_key.eq(key.as_str()));
    }
    if let Some(cursor) = &filter.cursor {
        let at = At(cursor.updated_at);
        query = query.filter(ledger_rows::updated_at.le(at)).filter(
            ledger_rows::updated_at
                .lt(at)
                .or(ledger_rows::idempotency_key.lt(cursor.key.as_str())),
        );
    }
    let rows: Vec<(LedgerRow, Option<Seen>)> = query
        .order((
            ledger_rows::updated_at.desc(),
            ledger_rows::idempotency_key.desc(),
        ))
        .limit(i64::from(filter.limit) + 1)
        .load(connection)?;
    rows.into_iter()
        .map(|(row, seen)| Entry::of_ledger(&row, seen.unwrap_or_default(), now))
        .collect()
}

/// Keys that are claimed at the gate alone, one more than asked for.
pub(super) fn gate(
    connection: &mut SqliteConnection,
    filter: &Filter,
    now: Time,
) -> Result<Vec<Entry>, StoreError> {
    // The hint decides by which index the list is read; the ledger decides what is in it.
    let mut query = gate_rows::table
        .filter(sql::<Bool>("NOT in_ledger"))
        .filter(diesel::dsl::not(diesel::dsl::exists(
            ledger_rows::table.filter(ledger_rows::idempotency_key.eq(gate_rows::idempotency_key)),
        )))
        .select((GateRow::as_select(), sql::<Text>(NEWEST)))
        .into_boxed::<Sqlite>();
    if let Some(order_id) = &filter.order_id {
        query = query.filter(gate_rows::order_id.eq(order_id));
    }
    if let Some(key) = &filter.key {
        query = query.filter(gate_rows::idempotency_key.eq(key.as_str()));
    }
    if let Some(cursor) = &filter.cursor {
        query = query.filter(
            sql::<Bool>(&format!("({NEWEST}, processed_orders.idempotency_key) < ("))
                .bind::<Instant, _>(At(cursor.updated_at))
                .sql(", ")
                .bind::<Text, _>(cursor.key.as_str())
                .sql(")"),
        );
    }
    let rows: Vec<(GateRow, String)> = query
        .order(sql::<Text>(&format!(
            "{NEWEST} DESC, processed_orders.idempotency_key DESC"
        )))
        .limit(i64::from(filter.limit) + 1)
        .load(connection)?;
    Ok(rows
        .into_iter()
        .map(|row| Entry::of_gate(&with_time(row), now))
        .collect())
}

/// What is pending, as far as the bound goes, in the order of the index `run_ledger_open`.
pub(super) fn backlog(connection: &mut SqliteConnection, now: Time) -> Result<Backlog, StoreError> {
    let row: BacklogRow = diesel::sql_query(
        "SELECT count(*) AS pending, min(processed_at) AS oldest, \
             count(*) FILTER (WHERE lease_expires_at <= ?) AS stale \
         FROM (SELECT lease_expires_at, processed_at FROM run_ledger \
             WHERE status = 'pending' AND status <> 'done' ORDER BY updated_at LIMIT ?)",
    )
    .bind::<Instant, _>(At(now))
    .bind::<BigInt, _>(i64::from(Backlog::BOUND))
    .get_result(connection)?;
    Ok(Backlog::of_row(&row, now))
}
