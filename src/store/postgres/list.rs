//! Lists of entries, and what is pending.

use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::pg::{Pg, PgConnection};
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Bool, Text};

use super::super::rows::{At, BacklogRow, GateRow, LedgerRow, Seen};
use super::super::schema::{Instant, processed_orders as gate_rows, run_ledger as ledger_rows};
use super::super::{Backlog, Entry, Filter, StoreError};
use crate::domain::Time;
use crate::domain::ledger::Status;

/// Entries of the ledger, one more than asked for, so that it shows whether there are more.
pub(super) fn ledger(
    connection: &mut PgConnection,
    filter: &Filter,
    now: Time,
) -> Result<Vec<Entry>, StoreError> {
    let mut query = ledger_rows::table
        .left_join(gate_rows::table.on(gate_rows::idempotency_key.eq(ledger_rows::idempotency_key)))
        .select((
            LedgerRow::as_select(),
            (gate_rows::seen_again, gate_rows::last_seen_at).nullable(),
        ))
        .into_boxed::<Pg>();
    // Written out where a partial index serves it: a parameter would hide that.
    query = match filter.status {
        None => query,
        Some(Status::Claimed) => query.filter(sql::<Bool>("status = 'claimed'")),
        Some(Status::Failed) => query.filter(sql::<Bool>("status = 'failed'")),
        Some(Status::Done) => query.filter(sql::<Bool>("status = 'done'")),
        Some(Status::Pending) => query
            .filter(sql::<Bool>("status = 'pending'"))
            .filter(ledger_rows::lease_expires_at.gt(At(now))),
        Some(Status::Stale) => query
            .filter(sql::<Bool>("status = 'pending'"))
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
                .or(sql::<Bool>("run_ledger.idempotency_key COLLATE \"C\" < ")
                    .bind::<Text, _>(cursor.key.as_str())),
        );
    }
    let rows: Vec<(LedgerRow, Option<Seen>)> = query
        .order((
            ledger_rows::updated_at.desc(),
            sql::<Text>("run_ledger.idempotency_key COLLATE \"C\" DESC"),
        ))
        .limit(i64::from(filter.limit) + 1)
        .load(connection)?;
    rows.into_iter()
        .map(|(row, seen)| Entry::of_ledger(&row, seen.unwrap_or_default(), now))
        .collect()
}

/// Keys that are claimed at the gate alone, one more than asked for.
pub(super) fn gate(
    connection: &mut PgConnection,
    filter: &Filter,
    now: Time,
) -> Result<Vec<Entry>, StoreError> {
    // The hint decides by which index the list is read; the ledger decides what is in it.
    let mut query = gate_rows::table
        .filter(sql::<Bool>("NOT in_ledger"))
        .filter(diesel::dsl::not(diesel::dsl::exists(
            ledger_rows::table.filter(ledger_rows::idempotency_key.eq(gate_rows::idempotency_key)),
        )))
        .select(GateRow::as_select())
        .into_boxed::<Pg>();
    if let Some(order_id) = &filter.order_id {
        query = query.filter(gate_rows::order_id.eq(order_id));
    }
    if let Some(key) = &filter.key {
        query = query.filter(gate_rows::idempotency_key.eq(key.as_str()));
    }
    if let Some(cursor) = &filter.cursor {
        let at = At(cursor.updated_at);
        query = query.filter(gate_rows::processed_at.le(at)).filter(
            gate_rows::processed_at.lt(at).or(sql::<Bool>(
                "processed_orders.idempotency_key COLLATE \"C\" < ",
            )
            .bind::<Text, _>(cursor.key.as_str())),
        );
    }
    let rows: Vec<GateRow> = query
        .order((
            gate_rows::processed_at.desc(),
            sql::<Text>("processed_orders.idempotency_key COLLATE \"C\" DESC"),
        ))
        .limit(i64::from(filter.limit) + 1)
        .load(connection)?;
    Ok(rows.iter().map(|row| Entry::of_gate(row, now)).collect())
}

/// What is pending, as far as the bound goes. The index `run_ledger_open` has the entries in their
/// order; a plan that gathers all of them first, to sort them, would be bound by nothing.
pub(super) fn backlog(connection: &mut PgConnection, now: Time) -> Result<Backlog, StoreError> {
    connection.batch_execute(
        "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL enable_sort = off",
    )?;
    let row: BacklogRow = diesel::sql_query(
        "SELECT count(*) AS pending, min(processed_at) AS oldest, \
             count(*) FILTER (WHERE lease_expires_at <= $1) AS stale \
         FROM (SELECT lease_expires_at, processed_at FROM run_ledger WHERE status = 'pending' \
             ORDER BY updated_at LIMIT $2) AS longest_unchanged",
    )
    .bind::<Instant, _>(At(now))
    .bind::<BigInt, _>(i64::from(Backlog::BOUND))
    .get_result(connection)?;
    Ok(Backlog::of_row(&row, now))
}
