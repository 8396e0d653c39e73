//! The statement by which keys are won, prepared once for each connection.

use diesel::pg::{Pg, PgConnection};
use diesel::prelude::*;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::sql_types::{Array, Binary, Bool, Integer, Nullable, Text};

use crate::domain::Time;
use crate::domain::claim::Claim;
use crate::domain::text::IdempotencyKey;
use crate::store::rows::At;
use crate::store::schema::Instant;

/// Makes the rows of all keys that have none, in one statement, and says which those were.
/// This is where a key is won: Postgres lets one of any number of concurrent inserts through,
/// and the others wait here for it to commit or to roll back.
pub(super) fn insert(
    connection: &mut PgConnection,
    claims: &[&Claim],
) -> QueryResult<Vec<(IdempotencyKey, Time)>> {
    let rows: Vec<(String, At)> = Insert::of(claims).load(connection)?;
    Ok(rows
        .into_iter()
        .map(|(key, at)| (IdempotencyKey::from_store(key), at.0))
        .collect())
}

/// One array a column, so that the statement is the same for any number of claims.
struct Insert<'a> {
    keys: Vec<&'a str>,
    order_ids: Vec<Option<&'a str>>,
    claimants: Vec<Option<&'a str>>,
    api_keys: Vec<Option<&'a str>>,
    payloads: Vec<Option<&'a [u8]>>,
    windows: Vec<Option<i32>>,
    opened: Vec<bool>,
}

impl<'a> Insert<'a> {
    fn of(claims: &[&'a Claim]) -> Self {
        fn column<'a, T>(claims: &[&'a Claim], of: impl Fn(&'a Claim) -> T) -> Vec<T> {
            claims.iter().map(|claim| of(claim)).collect()
        }
        Self {
            keys: column(claims, |claim| claim.key.as_str()),
            order_ids: column(claims, |claim| claim.order_id.as_deref()),
            claimants: column(claims, |claim| {
                claim.holder.as_ref().map(|holder| holder.claimant.as_str())
            }),
            api_keys: column(claims, |claim| claim.holder.as_ref()?.api_key.as_deref()),
            payloads: column(claims, |claim| claim.payload_sha256.as_deref()),
            windows: column(claims, |claim| claim.ttl_seconds.map(u32::cast_signed)),
            opened: column(claims, |claim| claim.pending.is_some()),
        }
    }
}

impl QueryFragment<Pg> for Insert<'_> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql(
            "WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now) \
             INSERT INTO processed_orders (idempotency_key, order_id, processed_at, claimant, \
                 api_key, payload_sha256, ttl_seconds, expires_at, in_ledger) \
             SELECT k, coalesce(o, k), now, c, a, p, t, now + make_interval(secs => t), l \
             FROM unnest(",
        );
        out.push_bind_param::<Array<Text>, _>(&self.keys)?;
        out.push_sql(", ");
        out.push_bind_param::<Array<Nullable<Text>>, _>(&self.order_ids)?;
        out.push_sql(", ");
        out.push_bind_param::<Array<Nullable<Text>>, _>(&self.claimants)?;
        out.push_sql(", ");
        out.push_bind_param::<Array<Nullable<Text>>, _>(&self.api_keys)?;
        out.push_sql(", ");
        out.push_bind_param::<Array<Nullable<Binary>>, _>(&self.payloads)?;
        out.push_sql(", ");
        out.push_bind_param::<Array<Nullable<Integer>>, _>(&self.windows)?;
        out.push_sql(", ");
        out.push_bind_param::<Array<Bool>, _>(&self.opened)?;
        out.push_sql(
            ") AS new (k, o, c, a, p, t, l), clock \
             ON CONFLICT (idempotency_key) DO NOTHING \
             RETURNING idempotency_key, processed_at",
        );
        Ok(())
    }
}

impl QueryId for Insert<'_> {
    type QueryId = Insert<'static>;
    const HAS_STATIC_QUERY_ID: bool = true;
}

impl Query for Insert<'_> {
    type SqlType = (Text, Instant);
}

impl RunQueryDsl<PgConnection> for Insert<'_> {}
