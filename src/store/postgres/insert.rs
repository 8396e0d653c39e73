//! The statement by which keys are won, prepared once for each connection.

use std::collections::HashMap;

use diesel::pg::{Pg, PgConnection};
use diesel::prelude::*;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::serialize::ToSql;
use diesel::sql_types::{Array, Binary, Bool, HasSqlType, Integer, Nullable, Text};

use crate::domain::Time;
use crate::domain::claim::Claim;
use crate::store::rows::At;
use crate::store::schema::Instant;

/// The keys whose rows were made just now.
pub(super) struct Made {
    pub(super) at: Time,
    pub(super) keys: Vec<String>,
    /// Those of them that the ledger knows all the same: somebody has deleted their rows of the
    /// gate, and what is done stays done.
    pub(super) in_ledger: Vec<String>,
}

impl Made {
    /// The keys that are won by it, and when.
    pub(super) fn won(&self) -> HashMap<&str, Time> {
        let is_won = |key: &&String| !self.in_ledger.contains(key);
        let won = self.keys.iter().filter(is_won);
        won.map(|key| (key.as_str(), self.at)).collect()
    }
}

/// Makes the rows of all keys that have none, in one statement, and says which those were; none
/// where no key was new. This is where a key is won: Postgres lets one of any number of concurrent
/// inserts through, and the others wait here for it to commit or to roll back.
pub(super) fn insert(
    connection: &mut PgConnection,
    claims: &[&Claim],
) -> QueryResult<Option<Made>> {
    type Row = (At, Option<Vec<String>>, Vec<String>);
    let made: Option<Row> = match claims {
        [_] => Insert::<true>::of(claims).get_result(connection),
        _ => Insert::<false>::of(claims).get_result(connection),
    }
    .optional()?;
    Ok(made.and_then(|(at, keys, in_ledger)| {
        Some(Made {
            at: at.0,
            keys: keys?,
            in_ledger,
        })
    }))
}

/// The claims by columns: each is an array, so that the statement is the same for any number of
/// them. A lone claim is a row of values instead, which takes Postgres a tenth less time.
struct Insert<'a, const LONE: bool> {
    keys: Vec<&'a str>,
    order_ids: Vec<Option<&'a str>>,
    claimants: Vec<Option<&'a str>>,
    api_keys: Vec<Option<&'a str>>,
    payloads: Vec<Option<&'a [u8]>>,
    windows: Vec<Option<i32>>,
    opened: Vec<bool>,
}

impl<'a, const LONE: bool> Insert<'a, LONE> {
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

/// Binds a column, or the value of a lone claim.
fn bind<'b, const LONE: bool, ST: 'static, T>(
    out: &mut AstPass<'_, 'b, Pg>,
    column: &'b Vec<T>,
) -> QueryResult<()>
where
    Pg: HasSqlType<ST>,
    T: ToSql<ST, Pg>,
    Vec<T>: ToSql<Array<ST>, Pg>,
{
    match column.as_slice() {
        [value] if LONE => out.push_bind_param::<ST, T>(value),
        _ => out.push_bind_param::<Array<ST>, Vec<T>>(column),
    }
}

impl<const LONE: bool> QueryFragment<Pg> for Insert<'_, LONE> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql(if LONE { "" } else { "WITH new AS (" });
        out.push_sql(
            "INSERT INTO processed_orders (idempotency_key, order_id, processed_at, claimant, \
                 api_key, payload_sha256, ttl_seconds, expires_at, in_ledger) \
             SELECT k, coalesce(o, k), statement_timestamp(), c, a, p, t, \
                 statement_timestamp() + make_interval(secs => t), l \
             FROM ",
        );
        out.push_sql(if LONE { "(VALUES (" } else { "unnest(" });
        bind::<LONE, Text, _>(&mut out, &self.keys)?;
        out.push_sql(", ");
        bind::<LONE, Nullable<Text>, _>(&mut out, &self.order_ids)?;
        out.push_sql(", ");
        bind::<LONE, Nullable<Text>, _>(&mut out, &self.claimants)?;
        out.push_sql(", ");
        bind::<LONE, Nullable<Text>, _>(&mut out, &self.api_keys)?;
        out.push_sql(", ");
        bind::<LONE, Nullable<Binary>, _>(&mut out, &self.payloads)?;
        out.push_sql(", ");
        bind::<LONE, Nullable<Integer>, _>(&mut out, &self.windows)?;
        out.push_sql(", ");
        bind::<LONE, Bool, _>(&mut out, &self.opened)?;
        out.push_sql(if LONE { "))" } else { ")" });
        out.push_sql(
            " AS claim (k, o, c, a, p, t, l) \
             ON CONFLICT (idempotency_key) DO NOTHING RETURNING ",
        );
        out.push_sql(if LONE {
            "statement_timestamp(), ARRAY[idempotency_key], dedup_gate_won(ARRAY[idempotency_key])"
        } else {
            "idempotency_key) \
             SELECT statement_timestamp(), array_agg(idempotency_key), \
                 dedup_gate_won(array_agg(idempotency_key)) \
             FROM new"
        });
        Ok(())
    }
}

impl<const LONE: bool> QueryId for Insert<'_, LONE> {
    type QueryId = Insert<'static, LONE>;
    const HAS_STATIC_QUERY_ID: bool = true;
}

impl<const LONE: bool> Query for Insert<'_, LONE> {
    type SqlType = (Instant, Nullable<Array<Text>>, Array<Text>);
}

impl<const LONE: bool> RunQueryDsl<PgConnection> for Insert<'_, LONE> {}
