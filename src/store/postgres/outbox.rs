//! How effects are stored, leased, settled and listed.

use std::collections::BTreeMap;

use diesel::connection::SimpleConnection;
use diesel::dsl::{max, sql};
use diesel::pg::{Pg, PgConnection};
use diesel::prelude::*;
use diesel::sql_types::{Array, BigInt, Bool, Double, Integer, Text};

use super::clock;
use crate::domain::Time;
use crate::domain::effect::{Delivery, Effect};
use crate::domain::text::IdempotencyKey;
use crate::store::StoreError;
use crate::store::outbox::{
    Lease, Leased, Noted, OutboxHead, OutboxRow, Parcel, ParcelFilter, ParcelPage, Settled,
    Undelivered, UndeliveredRow,
};
use crate::store::rows::At;
use crate::store::schema::run_outbox as outbox;

/// Where replicas hear that an effect was stored.
pub(super) const CHANNEL: &str = "dedup_gate_outbox";

/// What is due is read in its order, by the index of what is pending, and everything else is found by its key. What
/// the planner knows of the table is from before a backlog built up, when next to nothing was pending: it would gather
/// all that is, and sort it, for each lease.
const PLANS: &str = "SET LOCAL enable_sort = off; SET LOCAL enable_bitmapscan = off; \
    SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off";

/// Stores effects of keys whose rows are locked, and tells all replicas, once it is committed.
pub(super) fn store(
    connection: &mut PgConnection,
    effects: &[(&IdempotencyKey, &[Effect])],
    now: Time,
) -> Result<(), StoreError> {
    if effects.iter().all(|(_, effects)| effects.is_empty()) {
        return Ok(());
    }
    let keys: Vec<&str> = effects.iter().map(|(key, _)| key.as_str()).collect();
    let last: BTreeMap<String, Option<i32>> = outbox::table
        .filter(outbox::idempotency_key.eq_any(&keys))
        .group_by(outbox::idempotency_key)
        .select((outbox::idempotency_key, max(outbox::seq)))
        .load(connection)?
        .into_iter()
        .collect();
    let mut rows = Vec::new();
    for (key, effects) in effects {
        let seq = last.get(key.as_str()).copied().flatten().unwrap_or(0) + 1;
        let numbered = (seq..).zip(*effects);
        rows.extend(numbered.map(|(seq, effect)| OutboxRow::new(key, seq, effect, now)));
    }
    // A statement takes 65,535 parameters at most.
    for chunk in rows.chunks(2000) {
        diesel::insert_into(outbox::table)
            .values(chunk)
            .execute(connection)?;
    }
    wake(connection)
}

/// Tells all replicas that something is due, once it is committed.
pub(super) fn wake(connection: &mut PgConnection) -> Result<(), StoreError> {
    diesel::sql_query("SELECT pg_notify($1, '')")
        .bind::<Text, _>(CHANNEL)
        .execute(connection)?;
    Ok(())
}

/// Effects that are due, of each key the first. One that waits for another try lets those behind it pass; one
/// that is due, or under way, does not. Nobody waits for anybody's lock.
///
/// Those before it are found by the index of what is not settled, which has the keys in order. It is asked in a subquery
/// that cannot become a join: for one, the planner would read that index whole, since it knows of a time when it
/// was empty.
pub(super) fn lease(connection: &mut PgConnection, lease: &Lease) -> Result<Leased, StoreError> {
    connection.batch_execute(PLANS)?;
    let (topics, are_these) = lease.topics.named();
    let (routed, are_routed) = lease.routed.named();
    let rows: Vec<OutboxRow> = diesel::sql_query(
        "WITH due AS ( \
             SELECT idempotency_key, seq FROM run_outbox AS mine \
             WHERE status = 'pending' AND next_at <= statement_timestamp() \
                 AND (topic = ANY ($1)) = $2 \
                 AND (SELECT before.seq FROM run_outbox AS before \
                     WHERE before.idempotency_key = mine.idempotency_key AND before.seq < mine.seq \
                         AND before.settled_at IS NULL \
                         AND (before.is_leased OR before.next_at <= statement_timestamp()) \
                         AND (before.topic = ANY ($3)) = $4 LIMIT 1) IS NULL \
             ORDER BY next_at LIMIT $5 FOR UPDATE SKIP LOCKED) \
         UPDATE run_outbox AS leased SET is_leased = true, tries = tries + 1, \
             next_at = statement_timestamp() + make_interval(secs => $6) \
         FROM due WHERE leased.idempotency_key = due.idempotency_key AND leased.seq = due.seq \
         RETURNING leased.*",
    )
    .bind::<Array<Text>, _>(topics)
    .bind::<Bool, _>(are_these)
    .bind::<Array<Text>, _>(routed)
    .bind::<Bool, _>(are_routed)
    .bind::<BigInt, _>(i64::from(lease.limit))
    .bind::<Double, _>(f64::from(lease.seconds))
    .load(connection)?;
    let now = clock(connection)?;
    let next: Option<At> = outbox::table
        .filter(sql::<Bool>("status = 'pending'"))
        .filter(outbox::next_at.gt(At(now)))
        .filter(
            sql::<Bool>("(topic = ANY (")
                .bind::<Array<Text>, _>(topics)
                .sql(")) = ")
                .bind::<Bool, _>(are_these),
        )
        .order(outbox::next_at)
        .select(outbox::next_at)
        .first(connection)
        .optional()?;
    Ok(Leased {
        effects: rows.into_iter().map(|row| row.leased(now)).collect(),
        next: next.map(|at| at.0 - now),
    })
}

/// Notes how tries ended, of those whose leases still hold. Where others of their keys have waited for them, all
/// replicas are told.
pub(super) fn settle(
    connection: &mut PgConnection,
    settled: &[Settled],
) -> Result<Noted, StoreError> {
    let lines = settled
        .iter()
        .map(Settled::line)
        .collect::<Result<Vec<_>, _>>()?;
    let column = |of: fn(&Settled) -> &str| settled.iter().map(of).collect::<Vec<&str>>();
    let number = |of: fn(&Settled) -> i32| settled.iter().map(of).collect::<Vec<i32>>();
    let waits: Vec<f64> = settled
        .iter()
        .map(|settled| settled.wait.as_seconds_f64())
        .collect();
    connection.batch_execute(PLANS)?;
    let keys = column(|settled| settled.lease.key.as_str());
    let held = diesel::sql_query(
        "UPDATE run_outbox AS tried SET status = settled.status, is_leased = false, \
             failures = settled.failures, log = tried.log || settled.line, \
             next_at = clock_timestamp() + make_interval(secs => settled.wait), \
             settled_at = CASE WHEN settled.status <> 'pending' THEN clock_timestamp() END \
         FROM unnest($1::text[], $2::int[], $3::text[], $4::int[], $5::text[], $6::float8[], $7::int[], $8::text[]) \
             AS settled (idempotency_key, seq, id, tries, status, wait, failures, line) \
         WHERE tried.idempotency_key = settled.idempotency_key AND tried.seq = settled.seq \
             AND tried.id = settled.id AND tried.tries = settled.tries AND tried.is_leased",
    )
    .bind::<Array<Text>, _>(&keys)
    .bind::<Array<Integer>, _>(number(|settled| settled.lease.seq))
    .bind::<Array<Text>, _>(column(|settled| &settled.lease.id))
    .bind::<Array<Integer>, _>(number(|settled| settled.lease.tries))
    .bind::<Array<Text>, _>(column(|settled| settled.delivery.name()))
    .bind::<Array<Double>, _>(waits)
    .bind::<Array<Integer>, _>(number(|settled| settled.failures.cast_signed()))
    .bind::<Array<Text>, _>(lines)
    .execute(connection)?;
    let has_next = diesel::select(
        sql::<Bool>("EXISTS (SELECT FROM run_outbox WHERE idempotency_key = ANY (")
            .bind::<Array<Text>, _>(keys)
            .sql(") AND settled_at IS NULL AND NOT is_leased AND next_at <= clock_timestamp())"),
    )
    .get_result(connection)?;
    if has_next {
        wake(connection)?;
    }
    Ok(Noted { held, has_next })
}

/// The effect of this name.
pub(super) fn find(
    connection: &mut PgConnection,
    id: &str,
    now: Time,
) -> Result<Option<Parcel>, StoreError> {
    let row: Option<OutboxRow> = outbox::table
        .filter(sql::<Bool>("id COLLATE \"C\" = ").bind::<Text, _>(id))
        .select(OutboxRow::as_select())
        .first(connection)
        .optional()?;
    row.map(|row| row.parcel(now)).transpose()
}

/// Makes the effect of this name due once more, unless it is under way; whether there was anything to do. None
/// where it is unknown.
pub(super) fn redeliver(
    connection: &mut PgConnection,
    id: &str,
) -> Result<Option<(Parcel, bool)>, StoreError> {
    let changed = diesel::sql_query(
        "UPDATE run_outbox SET status = 'pending', is_leased = false, failures = 0, settled_at = NULL, \
             due_at = clock_timestamp(), next_at = clock_timestamp() \
         WHERE id COLLATE \"C\" = $1 AND (NOT is_leased OR next_at <= clock_timestamp())",
    )
    .bind::<Text, _>(id)
    .execute(connection)?;
    if changed > 0 {
        wake(connection)?;
    }
    let now = clock(connection)?;
    Ok(find(connection, id, now)?.map(|parcel| (parcel, changed > 0)))
}

/// Effects, newest first.
pub(super) fn list(
    connection: &mut PgConnection,
    filter: &ParcelFilter,
    now: Time,
) -> Result<ParcelPage, StoreError> {
    let mut query = outbox::table
        .select(OutboxHead::as_select())
        .into_boxed::<Pg>();
    if let Some(delivery) = filter.delivery {
        query = query.filter(outbox::status.eq(delivery.name()));
        if delivery != Delivery::Delivered {
            // So that the index of those is seen to serve.
            query = query.filter(sql::<Bool>("status <> 'delivered'"));
        }
    }
    if let Some(topic) = &filter.topic {
        query = query.filter(outbox::topic.eq(topic));
    }
    if let Some(cursor) = &filter.cursor {
        query = query.filter(sql::<Bool>("id COLLATE \"C\" < ").bind::<Text, _>(cursor));
    }
    let rows = query
        .order(sql::<Text>("id COLLATE \"C\" DESC"))
        .limit(i64::from(filter.limit) + 1)
        .load(connection)?;
    ParcelPage::of_rows(rows, filter.limit, now)
}

/// What waits, and what is dead, as far as the bound goes.
pub(super) fn undelivered(
    connection: &mut PgConnection,
    now: Time,
) -> Result<Undelivered, StoreError> {
    connection.batch_execute(PLANS)?;
    let row: UndeliveredRow = diesel::sql_query(
        "SELECT waiting, oldest, dead FROM \
             (SELECT count(*) AS waiting, min(due_at) AS oldest \
              FROM (SELECT due_at FROM run_outbox WHERE status = 'pending' ORDER BY next_at LIMIT $1) AS pending) AS pending, \
             (SELECT count(*) AS dead \
              FROM (SELECT 1 FROM run_outbox WHERE status = 'dead' AND status <> 'delivered' LIMIT $1) AS dead) AS dead",
    )
    .bind::<BigInt, _>(i64::from(Undelivered::BOUND))
    .get_result(connection)?;
    Ok(Undelivered::of_row(&row, now))
}
