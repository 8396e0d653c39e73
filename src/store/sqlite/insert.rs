//! The statement by which a key is won, prepared once.

use diesel::prelude::*;
use diesel::query_builder::{AstPass, QueryFragment, QueryId};
use diesel::sql_types::{Binary, Bool, Integer, Nullable, Text};
use diesel::sqlite::{Sqlite, SqliteConnection};

use crate::domain::Time;
use crate::domain::claim::Claim;
use crate::domain::ledger::seconds;
use crate::store::rows::At;
use crate::store::schema::Instant;

/// Makes the row of the key, unless there is one, and says whether it was made.
pub(super) fn insert(
    connection: &mut SqliteConnection,
    claim: &Claim,
    now: Time,
) -> QueryResult<bool> {
    let holder = claim.holder.as_ref();
    let insert = Insert {
        key: claim.key.as_str(),
        order_id: claim.order_id.as_deref().unwrap_or(claim.key.as_str()),
        processed_at: At(now),
        claimant: holder.map(|holder| holder.claimant.as_str()),
        api_key: holder.and_then(|holder| holder.api_key.as_deref()),
        payload_sha256: claim.payload_sha256.as_deref(),
        ttl_seconds: claim.ttl_seconds.map(u32::cast_signed),
        expires_at: claim.ttl_seconds.map(|ttl| At(now + seconds(ttl))),
        in_ledger: claim.pending.is_some(),
    };
    insert.execute(connection).map(|made| made == 1)
}

struct Insert<'a> {
    key: &'a str,
    order_id: &'a str,
    processed_at: At,
    claimant: Option<&'a str>,
    api_key: Option<&'a str>,
    payload_sha256: Option<&'a [u8]>,
    ttl_seconds: Option<i32>,
    expires_at: Option<At>,
    in_ledger: bool,
}

impl QueryFragment<Sqlite> for Insert<'_> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Sqlite>) -> QueryResult<()> {
        out.push_sql(
            "INSERT INTO processed_orders (idempotency_key, order_id, processed_at, claimant, \
                 api_key, payload_sha256, ttl_seconds, expires_at, in_ledger) VALUES (",
        );
        out.push_bind_param::<Text, _>(self.key)?;
        out.push_sql(", ");
        out.push_bind_param::<Text, _>(self.order_id)?;
        out.push_sql(", ");
        out.push_bind_param::<Instant, _>(&self.processed_at)?;
        out.push_sql(", ");
        out.push_bind_param::<Nullable<Text>, _>(&self.claimant)?;
        out.push_sql(", ");
        out.push_bind_param::<Nullable<Text>, _>(&self.api_key)?;
        out.push_sql(", ");
        out.push_bind_param::<Nullable<Binary>, _>(&self.payload_sha256)?;
        out.push_sql(", ");
        out.push_bind_param::<Nullable<Integer>, _>(&self.ttl_seconds)?;
        out.push_sql(", ");
        out.push_bind_param::<Nullable<Instant>, _>(&self.expires_at)?;
        out.push_sql(", ");
        out.push_bind_param::<Bool, _>(&self.in_ledger)?;
        out.push_sql(") ON CONFLICT (idempotency_key) DO NOTHING");
        Ok(())
    }
}

impl QueryId for Insert<'_> {
    type QueryId = Insert<'static>;
    const HAS_STATIC_QUERY_ID: bool = true;
}

impl RunQueryDsl<SqliteConnection> for Insert<'_> {}
