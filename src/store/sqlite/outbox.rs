//! How effects are stored, leased, settled and listed.

use diesel::dsl::{exists, max, sql};
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Bool, Text};
use diesel::sqlite::{Sqlite, SqliteConnection};

use crate::domain::Time;
use crate::domain::effect::{Delivery, Effect, Topics};
use crate::domain::ledger::seconds;
use crate::domain::text::IdempotencyKey;
use crate::store::StoreError;
use crate::store::outbox::{
    Lease, Leased, Noted, OutboxHead, OutboxRow, Parcel, ParcelFilter, ParcelPage, Settled,
    Undelivered, UndeliveredRow,
};
use crate::store::rows::At;
use crate::store::schema::{Instant, run_outbox as outbox};

/// Stores effects of a key.
pub(super) fn store(
    connection: &mut SqliteConnection,
    key: &IdempotencyKey,
    effects: &[Effect],
    now: Time,
) -> Result<(), StoreError> {
    if effects.is_empty() {
        return Ok(());
    }
    let last: Option<i32> = outbox::table
        .filter(outbox::idempotency_key.eq(key.as_str()))
        .select(max(outbox::seq))
        .first(connection)?;
    for (seq, effect) in (last.unwrap_or(0) + 1..).zip(effects) {
        diesel::insert_into(outbox::table)
            .values(OutboxRow::new(key, seq, effect, now))
            .execute(connection)?;
    }
    Ok(())
}

/// Effects that are due, of each key the first. One that waits for another try lets those behind it pass; one
/// that is due, or under way, does not.
pub(super) fn lease(
    connection: &mut SqliteConnection,
    lease: &Lease,
    now: Time,
) -> Result<Leased, StoreError> {
    let (topics, are_these) = named(&lease.topics)?;
    let (routed, are_routed) = named(&lease.routed)?;
    let due: Vec<OutboxRow> = diesel::sql_query(
        "SELECT * FROM run_outbox AS mine \
         WHERE status = 'pending' AND next_at <= ?1 \
             AND (topic IN (SELECT value FROM json_each(?2))) = ?3 \
             AND NOT EXISTS (SELECT 1 FROM run_outbox AS before \
                 WHERE before.idempotency_key = mine.idempotency_key AND before.seq < mine.seq \
                     AND before.settled_at IS NULL AND (before.is_leased OR before.next_at <= ?1) \
                     AND (before.topic IN (SELECT value FROM json_each(?4))) = ?5) \
         ORDER BY next_at LIMIT ?6",
    )
    .bind::<Instant, _>(At(now))
    .bind::<Text, _>(&topics)
    .bind::<Bool, _>(are_these)
    .bind::<Text, _>(routed)
    .bind::<Bool, _>(are_routed)
    .bind::<BigInt, _>(i64::from(lease.limit))
    .load(connection)?;
    let mut effects = Vec::with_capacity(due.len());
    for mut row in due {
        row.tries += 1;
        diesel::update(outbox::table.find((&row.idempotency_key, row.seq)))
            .set((
                outbox::is_leased.eq(true),
                outbox::tries.eq(row.tries),
                outbox::next_at.eq(At(now + seconds(lease.seconds))),
            ))
            .execute(connection)?;
        effects.push(row.leased(now));
    }
    let next: Option<At> = outbox::table
        .filter(sql::<Bool>("status = 'pending'"))
        .filter(outbox::next_at.gt(At(now)))
        .filter(
            sql::<Bool>("(topic IN (SELECT value FROM json_each(")
                .bind::<Text, _>(topics)
                .sql("))) = ")
                .bind::<Bool, _>(are_these),
        )
        .order(outbox::next_at)
        .select(outbox::next_at)
        .first(connection)
        .optional()?;
    Ok(Leased {
        effects,
        next: next.map(|at| at.0 - now),
    })
}

/// The topics that are named as JSON, and whether they are meant rather than all others.
fn named(topics: &Topics) -> Result<(String, bool), StoreError> {
    let (topics, are_these) = topics.named();
    let topics =
        serde_json::to_string(topics).map_err(|error| StoreError::Unexpected(error.to_string()))?;
    Ok((topics, are_these))
}

/// Notes how tries ended, of those whose leases still hold.
pub(super) fn settle(
    connection: &mut SqliteConnection,
    settled: &[Settled],
    now: Time,
) -> Result<Noted, StoreError> {
    let mut held = 0;
    for settled in settled {
        let lease = &settled.lease;
        let row = outbox::table
            .find((lease.key.as_str(), lease.seq))
            .filter(outbox::id.eq(&lease.id))
            .filter(outbox::tries.eq(lease.tries))
            .filter(outbox::is_leased);
        let is_over = settled.delivery != Delivery::Pending;
        held += diesel::update(row)
            .set((
                outbox::status.eq(settled.delivery.name()),
                outbox::is_leased.eq(false),
                outbox::failures.eq(settled.failures.cast_signed()),
                outbox::log.eq(outbox::log.concat(settled.line()?)),
                outbox::next_at.eq(At(now + settled.wait)),
                outbox::settled_at.eq(is_over.then_some(At(now))),
            ))
            .execute(connection)?;
    }
    let keys = settled.iter().map(|settled| settled.lease.key.as_str());
    let next = outbox::table
        .filter(outbox::idempotency_key.eq_any(keys))
        .filter(outbox::settled_at.is_null())
        .filter(diesel::dsl::not(outbox::is_leased))
        .filter(outbox::next_at.le(At(now)));
    let has_next = diesel::select(exists(next)).get_result(connection)?;
    Ok(Noted { held, has_next })
}

/// The effect of this name.
pub(super) fn find(
    connection: &mut SqliteConnection,
    id: &str,
    now: Time,
) -> Result<Option<Parcel>, StoreError> {
    let row: Option<OutboxRow> = outbox::table
        .filter(outbox::id.eq(id))
        .select(OutboxRow::as_select())
        .first(connection)
        .optional()?;
    row.map(|row| row.parcel(now)).transpose()
}

/// Makes the effect of this name due once more, unless it is under way; whether there was anything to do. None
/// where it is unknown.
pub(super) fn redeliver(
    connection: &mut SqliteConnection,
    id: &str,
    now: Time,
) -> Result<Option<(Parcel, bool)>, StoreError> {
    let rows = outbox::table
        .filter(outbox::id.eq(id))
        .filter(diesel::dsl::not(outbox::is_leased).or(outbox::next_at.le(At(now))));
    let changed = diesel::update(rows)
        .set((
            outbox::status.eq(Delivery::Pending.name()),
            outbox::is_leased.eq(false),
            outbox::failures.eq(0),
            outbox::settled_at.eq(None::<At>),
            outbox::due_at.eq(At(now)),
            outbox::next_at.eq(At(now)),
        ))
        .execute(connection)?;
    Ok(find(connection, id, now)?.map(|parcel| (parcel, changed > 0)))
}

/// Effects, newest first.
pub(super) fn list(
    connection: &mut SqliteConnection,
    filter: &ParcelFilter,
    now: Time,
) -> Result<ParcelPage, StoreError> {
    let mut query = outbox::table
        .select(OutboxHead::as_select())
        .into_boxed::<Sqlite>();
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
        query = query.filter(outbox::id.lt(cursor));
    }
    let rows = query
        .order(outbox::id.desc())
        .limit(i64::from(filter.limit) + 1)
        .load(connection)?;
    ParcelPage::of_rows(rows, filter.limit, now)
}

/// What waits, and what is dead, as far as the bound goes.
pub(super) fn undelivered(
    connection: &mut SqliteConnection,
    now: Time,
) -> Result<Undelivered, StoreError> {
    let row: UndeliveredRow = diesel::sql_query(
        "SELECT waiting, oldest, dead FROM \
             (SELECT count(*) AS waiting, min(due_at) AS oldest \
              FROM (SELECT due_at FROM run_outbox WHERE status = 'pending' ORDER BY next_at LIMIT ?1)), \
             (SELECT count(*) AS dead \
              FROM (SELECT 1 FROM run_outbox WHERE status = 'dead' AND status <> 'delivered' LIMIT ?1))",
    )
    .bind::<BigInt, _>(i64::from(Undelivered::BOUND))
    .get_result(connection)?;
    Ok(Undelivered::of_row(&row, now))
}
