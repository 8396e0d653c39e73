//! The store on Postgres. Any number of replicas may share one database.

mod act;
mod adopt;
mod claim;
mod connect;
mod insert;
mod lab;
mod lane;
mod list;
mod listen;
mod outbox;
mod retention;

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant as Clock};

use chrono::TimeDelta;
use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::migration::MigrationSource;
use diesel::pg::{Pg, PgConnection};
use diesel::prelude::*;
use diesel::query_builder::{AstPass, QueryFragment, QueryId};
use diesel::r2d2::Pool;
use diesel::result::{DatabaseErrorKind, Error as DieselError};
use diesel::sql_types::{BigInt, Bool, Text};
use diesel_migrations::{EmbeddedMigrations, MigrationHarness, embed_migrations};

use self::act::{act_all, read_history};
use self::claim::New;
use self::connect::Server;
use self::lane::Lane;

use super::outbox::{Lease, Leased, Noted, Parcel, ParcelFilter, ParcelPage, Settled, Undelivered};
use super::rows::{self, At, GateRow, HistoryRow, LedgerRow};
use super::schema::{
    Instant, processed_orders as gate, run_history as history, run_ledger as ledger,
};
use super::{
    Acted, Backlog, Entry, Filter, Page, Removed, StartError, Store, StoreError, Sweep, one_line,
};
use crate::domain::Time;
use crate::domain::act::Act;
use crate::domain::claim::{Batch, Claim, Decided};
use crate::domain::ledger::Event;
use crate::domain::text::IdempotencyKey;

const MIGRATIONS: EmbeddedMigrations = embed_migrations!("migrations/postgres");

/// The migration that makes the function; it may be run again.
const LANE: &str = include_str!("../../../migrations/postgres/2026-11-30-000002_lane/up.sql");

/// How long a connection may take, be it a new one or one of the pool.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// A transaction that the server rolled back (a deadlock, say) is tried again this often, and
/// only within this time.
const TRIES: u32 = 3;
const RETRY_WITHIN: Duration = Duration::from_millis(1500);

/// Set in each transaction, not in the session, so that they hold behind a pooler too. A claim
/// is never confirmed before it is flushed, whatever the server's default. All rows are found by
/// their keys: a plan that reads a whole table, made while that is empty, would be kept.
const SETTINGS: &str = "SET LOCAL lock_timeout = '1500ms'; \
    SET LOCAL enable_seqscan = off; \
    SET LOCAL statement_timeout = '2s'; \
    SET LOCAL idle_in_transaction_session_timeout = '5s'; \
    SELECT set_config('synchronous_commit', 'on', true) \
    WHERE current_setting('synchronous_commit') = 'off'";

/// Serialises the migrations of replicas that start at once. Any number will do that nobody
/// else takes; this one spells "dedup".
const MIGRATION_LOCK: i64 = 0x64_65_64_75_70;

/// The gate and the ledger in a Postgres database.
pub struct PostgresStore {
    server: Server,
    pool: Pool<Server>,
    /// For claims on keys that are new, most of them.
    new: Mutex<New>,
    /// For the others.
    known: Mutex<Lane>,
    acts: Mutex<Lane>,
    replay_window: TimeDelta,
}

/// How a transaction ends that is not to be committed.
enum Undo<T> {
    /// The database could not do it.
    Failed(StoreError),
    /// The server rolled it back; it may be tried again.
    RolledBack(StoreError),
    /// It has an answer, and nothing is to be written.
    Answer(Box<T>),
}

impl<T> From<DieselError> for Undo<T> {
    fn from(error: DieselError) -> Self {
        let is_rolled_back = matches!(
            error,
            DieselError::DatabaseError(
                DatabaseErrorKind::SerializationFailure | DatabaseErrorKind::Unknown,
                _
            )
        );
        let error = StoreError::from(error);
        if is_rolled_back {
            Self::RolledBack(error)
        } else {
            Self::Failed(error)
        }
    }
}

impl<T> From<StoreError> for Undo<T> {
    fn from(error: StoreError) -> Self {
        Self::Failed(error)
    }
}

impl PostgresStore {
    /// Connects, migrates the database, and makes a pool of at most `connections` beside the lanes'.
    /// `is_pooled` says whether a pooler in transaction mode stands before the database; where it
    /// does not, that is found out.
    ///
    /// # Errors
    ///
    /// The database is out of reach, or holds tables that cannot be adopted.
    pub fn open(
        url: &str,
        is_pooled: Option<bool>,
        connections: u32,
        replay_window: TimeDelta,
    ) -> Result<Self, StartError> {
        let server = Server::new(url, is_pooled)?;
        Self::migrate(&server)?;
        if server.is_pooled() {
            log::info!("a pooler in transaction mode stands before the database");
        }
        let pool = Pool::builder()
            .max_size(connections)
            .min_idle(Some(1))
            .connection_timeout(CONNECT_TIMEOUT)
            .error_handler(Box::new(LogAtDebug))
            .build_unchecked(server.clone());
        Ok(Self {
            pool,
            server: server.clone(),
            new: Mutex::new(New {
                lane: Lane::new(server.clone()),
                left: HashSet::new(),
            }),
            known: Mutex::new(Lane::new(server.clone())),
            acts: Mutex::new(Lane::new(server)),
            replay_window,
        })
    }

    fn migrate(server: &Server) -> Result<(), StartError> {
        let mut connection = server
            .connect()
            .map_err(|error| StartError::Unavailable(one_line(&error.to_string())))?;
        connection
            .build_transaction()
            .read_committed()
            .run(|connection| {
                // Replicas that start at once wait for each other here.
                connection.batch_execute("SET LOCAL lock_timeout = '20s'")?;
                diesel::sql_query("SELECT pg_advisory_xact_lock($1)")
                    .bind::<BigInt, _>(MIGRATION_LOCK)
                    .execute(connection)?;
                let applied = applied_migrations(connection)?;
                let ours = our_migrations()?;
                // Nothing is written where nothing is to be done: the role may not be allowed to.
                let is_current = ours.iter().all(|version| applied.contains(version));
                let has_function: bool = diesel::select(sql::<Bool>(
                    "to_regprocedure('dedup_gate_won(text[])') IS NOT NULL",
                ))
                .get_result(connection)?;
                if is_current && has_function {
                    return Ok(());
                }
                if is_read_only(connection)? {
                    return Err(Migration::Waiting("the server is read-only"));
                }
                if let Some(fault) = adopt::fault(connection, &applied)? {
                    return Err(Migration::Fault(fault));
                }
                // Whoever waits for this lock makes all others wait behind it, so not for long.
                connection.batch_execute(
                    "SET LOCAL lock_timeout = '2s'; \
                     DO $$ BEGIN IF to_regclass('processed_orders') IS NOT NULL THEN \
                         LOCK TABLE processed_orders IN ACCESS EXCLUSIVE MODE; \
                     END IF; END $$",
                )?;
                if is_current {
                    // A dump of tables alone holds no function.
                    return Ok(connection.batch_execute(LANE)?);
                }
                connection
                    .run_pending_migrations(MIGRATIONS)
                    .map_err(Migration::Failed)?;
                Ok(())
            })
            .map_err(|error| match error {
                Migration::Fault(fault) => StartError::Unusable(fault),
                Migration::Failed(error) => StartError::Unusable(format!(
                    "cannot migrate: {}",
                    one_line(&error.to_string())
                )),
                Migration::Database(error) => StartError::Unavailable(one_line(&error.to_string())),
                Migration::Waiting(what) => StartError::Unavailable(what.into()),
            })
    }

    /// Runs `work` on what the database holds at one moment.
    fn read<T>(
        &self,
        work: impl FnOnce(&mut PgConnection) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.pool
            .get()?
            .build_transaction()
            .repeatable_read()
            .read_only()
            .run(|connection| {
                connection.batch_execute("SET LOCAL statement_timeout = '2s'")?;
                work(connection)
            })
    }

    /// Runs `work` in a transaction. What the server rolls back is tried again, as long as
    /// there is time; a commit whose answer was lost is not, for it may have happened.
    fn transact<T>(
        &self,
        work: impl Fn(&mut PgConnection) -> Result<T, Undo<T>>,
    ) -> Result<T, StoreError> {
        let begun = Clock::now();
        let mut connection = self.pool.get()?;
        let mut tries = 1;
        loop {
            let done = connection
                .build_transaction()
                .read_committed()
                .run(|connection| {
                    connection.batch_execute(SETTINGS)?;
                    work(connection)
                });
            match done {
                Ok(answer) => return Ok(answer),
                Err(Undo::Answer(answer)) => return Ok(*answer),
                Err(Undo::RolledBack(error)) if tries < TRIES && begun.elapsed() < RETRY_WITHIN => {
                    log::debug!("trying a transaction again: {error}");
                    tries += 1;
                }
                Err(Undo::Failed(error) | Undo::RolledBack(error)) => {
                    return self.server.learned(Err(error));
                }
            }
        }
    }
}

/// Why the migration stopped.
enum Migration {
    Waiting(&'static str),
    Fault(String),
    Failed(Box<dyn std::error::Error + Send + Sync>),
    Database(DieselError),
}

impl From<DieselError> for Migration {
    fn from(error: DieselError) -> Self {
        Self::Database(error)
    }
}

/// The versions of the migrations that the binary holds, in order.
fn our_migrations() -> Result<Vec<String>, Migration> {
    let migrations = MigrationSource::<Pg>::migrations(&MIGRATIONS).map_err(Migration::Failed)?;
    Ok(migrations
        .iter()
        .map(|migration| migration.name().version().to_string())
        .collect())
}

/// The versions that the database has.
fn applied_migrations(connection: &mut PgConnection) -> QueryResult<Vec<String>> {
    let has_list: bool = diesel::select(sql::<Bool>(
        "to_regclass('__diesel_schema_migrations') IS NOT NULL",
    ))
    .get_result(connection)?;
    if !has_list {
        return Ok(Vec::new());
    }
    sql::<Text>("SELECT version::text FROM __diesel_schema_migrations").load(connection)
}

fn is_read_only(connection: &mut PgConnection) -> QueryResult<bool> {
    diesel::select(sql::<Bool>(
        "pg_is_in_recovery() OR current_setting('default_transaction_read_only')::bool",
    ))
    .get_result(connection)
}

/// r2d2 tries to connect again by itself; what a caller gets is logged where it is answered.
#[derive(Debug)]
struct LogAtDebug;

impl diesel::r2d2::HandleError<diesel::r2d2::Error> for LogAtDebug {
    fn handle_error(&self, error: diesel::r2d2::Error) {
        log::debug!("no connection: {}", one_line(&error.to_string()));
    }
}

diesel::define_sql_function! {
    /// The time of the database, as it is just now.
    fn clock_timestamp() -> Instant;
}

diesel::define_sql_function! {
    /// The time of the database when the statement came.
    fn statement_timestamp() -> Instant;
}

/// The database's time, after whatever lock was waited for.
fn clock(connection: &mut PgConnection) -> QueryResult<Time> {
    diesel::select(clock_timestamp())
        .get_result::<At>(connection)
        .map(|at| at.0)
}

/// The order in which rows are locked: that of the bytes of their keys, as here, whatever the
/// collation. Not by `sql()`, whose statements are not kept prepared.
#[derive(Clone, Copy, QueryId, diesel::expression::ValidGrouping)]
struct ByKey;

impl Expression for ByKey {
    type SqlType = Text;
}

impl<Source> AppearsOnTable<Source> for ByKey {}

impl QueryFragment<Pg> for ByKey {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql("idempotency_key COLLATE \"C\"");
        Ok(())
    }
}

/// Locks the gate's rows of these keys, in the order of the keys, so that two batches cannot
/// lock each other out.
fn lock_gate(
    connection: &mut PgConnection,
    keys: &[&str],
) -> QueryResult<BTreeMap<String, GateRow>> {
    if keys.is_empty() {
        return Ok(BTreeMap::new());
    }
    let rows: Vec<GateRow> = gate::table
        .filter(gate::idempotency_key.eq_any(keys))
        .order(ByKey)
        .for_update()
        .select(GateRow::as_select())
        .load(connection)?;
    Ok(rows
        .into_iter()
        .map(|row| (row.idempotency_key.clone(), row))
        .collect())
}

/// Locks the ledger's rows of these keys, in the order of the keys.
fn lock_ledger(
    connection: &mut PgConnection,
    keys: &[&str],
) -> QueryResult<BTreeMap<String, LedgerRow>> {
    if keys.is_empty() {
        return Ok(BTreeMap::new());
    }
    let rows: Vec<LedgerRow> = ledger::table
        .filter(ledger::idempotency_key.eq_any(keys))
        .order(ByKey)
        .for_update()
        .select(LedgerRow::as_select())
        .load(connection)?;
    Ok(rows
        .into_iter()
        .map(|row| (row.idempotency_key.clone(), row))
        .collect())
}

/// Writes rows of the ledger, which are locked or not there yet.
fn write_entries(connection: &mut PgConnection, entries: &[LedgerRow]) -> Result<(), StoreError> {
    use diesel::query_dsl::methods::FilterDsl;
    use diesel::upsert::excluded;
    // A statement takes 65,535 parameters at most.
    for chunk in entries.chunks(1000) {
        let written = diesel::insert_into(ledger::table)
            .values(chunk)
            .on_conflict(ledger::idempotency_key)
            .do_update()
            .set((
                ledger::order_id.eq(excluded(ledger::order_id)),
                ledger::status.eq(excluded(ledger::status)),
                ledger::attempt.eq(excluded(ledger::attempt)),
                ledger::claimant.eq(excluded(ledger::claimant)),
                ledger::api_key.eq(excluded(ledger::api_key)),
                ledger::processed_at.eq(excluded(ledger::processed_at)),
                ledger::recognised_from.eq(excluded(ledger::recognised_from)),
                ledger::payload_sha256.eq(excluded(ledger::payload_sha256)),
                ledger::ttl_seconds.eq(excluded(ledger::ttl_seconds)),
                ledger::expires_at.eq(excluded(ledger::expires_at)),
                ledger::lease_expires_at.eq(excluded(ledger::lease_expires_at)),
                ledger::external_id.eq(excluded(ledger::external_id)),
                ledger::result.eq(excluded(ledger::result)),
                ledger::reason.eq(excluded(ledger::reason)),
                ledger::retry.eq(excluded(ledger::retry)),
                ledger::reset.eq(excluded(ledger::reset)),
                ledger::conflict.eq(excluded(ledger::conflict)),
                ledger::updated_at.eq(excluded(ledger::updated_at)),
            ))
            .filter(ledger::attempt.le(excluded(ledger::attempt)))
            .execute(connection)?;
        expect_written(written, chunk.len())?;
    }
    Ok(())
}

/// Notes that these keys, claimed at the gate alone before, have an entry now.
fn mark_opened(connection: &mut PgConnection, keys: &[&str]) -> QueryResult<()> {
    diesel::update(gate::table.filter(gate::idempotency_key.eq_any(keys)))
        .set(gate::in_ledger.eq(true))
        .execute(connection)?;
    Ok(())
}

/// Writes the rows of keys that are claimed anew at the gate alone, which are locked.
fn write_gate(connection: &mut PgConnection, rows: &[GateRow]) -> Result<(), StoreError> {
    use diesel::query_dsl::methods::FilterDsl;
    use diesel::upsert::excluded;
    if rows.is_empty() {
        return Ok(());
    }
    let written = diesel::insert_into(gate::table)
        .values(rows)
        .on_conflict(gate::idempotency_key)
        .do_update()
        .set((
            gate::order_id.eq(excluded(gate::order_id)),
            gate::processed_at.eq(excluded(gate::processed_at)),
            gate::attempt.eq(excluded(gate::attempt)),
            gate::claimant.eq(excluded(gate::claimant)),
            gate::api_key.eq(excluded(gate::api_key)),
            gate::payload_sha256.eq(excluded(gate::payload_sha256)),
            gate::ttl_seconds.eq(excluded(gate::ttl_seconds)),
            gate::expires_at.eq(excluded(gate::expires_at)),
        ))
        .filter(gate::attempt.le(excluded(gate::attempt)))
        .execute(connection)?;
    expect_written(written, rows.len())
}

/// The rows are locked, so each names the attempt that was read; if one does not, something
/// is wrong, and nothing is committed.
fn expect_written(written: usize, expected: usize) -> Result<(), StoreError> {
    if written == expected {
        return Ok(());
    }
    Err(StoreError::Unexpected(format!(
        "{written} of {expected} rows were written: an attempt went backwards"
    )))
}

/// Adds to the histories of these keys, whose rows are locked.
fn write_events(
    connection: &mut PgConnection,
    events: &[(&IdempotencyKey, &[Event])],
) -> Result<(), StoreError> {
    let keys: Vec<&str> = events.iter().map(|(key, _)| key.as_str()).collect();
    if events.iter().all(|(_, events)| events.is_empty()) {
        return Ok(());
    }
    let last: BTreeMap<String, Option<i32>> = history::table
        .filter(history::idempotency_key.eq_any(&keys))
        .group_by(history::idempotency_key)
        .select((history::idempotency_key, diesel::dsl::max(history::seq)))
        .load(connection)?
        .into_iter()
        .collect();
    let mut rows = Vec::new();
    for (key, events) in events {
        let seq = last.get(key.as_str()).copied().flatten().unwrap_or(0) + 1;
        rows.extend(HistoryRow::of_events(key, events, seq)?);
    }
    for chunk in rows.chunks(4000) {
        diesel::insert_into(history::table)
            .values(chunk)
            .execute(connection)?;
    }
    Ok(())
}

impl Store for PostgresStore {
    fn claim_all(&self, claims: &[Claim]) -> Result<Vec<Decided>, StoreError> {
        self.transact(|connection| {
            let verdicts = self.decide(connection, claims, Batch::Array)?;
            if verdicts.iter().any(Result::is_err) {
                return Err(Undo::Answer(Box::new(verdicts)));
            }
            Ok(verdicts)
        })
    }

    fn claim_new(&self, claims: &[Claim]) -> Vec<Result<Option<Decided>, StoreError>> {
        self.decide_new(claims)
    }

    fn claim_known(&self, claims: &[Claim]) -> Vec<Result<Decided, StoreError>> {
        self.decide_known(claims)
    }

    fn act(&self, act: &Act) -> Result<Option<Acted>, StoreError> {
        let acts = std::slice::from_ref(act);
        Ok(self
            .transact(|connection| Ok(act_all(connection, acts)?))?
            .remove(0))
    }

    fn act_gathered(&self, acts: &[Act]) -> Vec<Result<Option<Acted>, StoreError>> {
        let mut lane = lane::enter(&self.acts);
        match lane.transact(|connection| act_all(connection, acts)) {
            Ok(acted) => acted.into_iter().map(Ok).collect(),
            Err(error) => vec![Err(error); acts.len()],
        }
    }

    fn entry(&self, key: &IdempotencyKey) -> Result<Option<Entry>, StoreError> {
        self.read(|connection| {
            let row: Option<GateRow> = gate::table
                .find(key.as_str())
                .select(GateRow::as_select())
                .first(connection)
                .optional()?;
            let entry: Option<LedgerRow> = ledger::table
                .find(key.as_str())
                .select(LedgerRow::as_select())
                .first(connection)
                .optional()?;
            let Some(state) = rows::state(row.as_ref(), entry.as_ref())? else {
                return Ok(None);
            };
            let history = read_history(connection, key)?;
            Ok(Some(Entry {
                key: key.clone(),
                history: super::history(&state, history),
                state,
                now: clock(connection)?,
            }))
        })
    }

    fn list(&self, filter: &Filter) -> Result<Page, StoreError> {
        self.read(|connection| {
            let now = clock(connection)?;
            let entries = list::ledger(connection, filter, now)?;
            let gate = if filter.includes_gate() {
                list::gate(connection, filter, now)?
            } else {
                Vec::new()
            };
            Ok(Page::merge(entries, gate, filter.limit))
        })
    }

    fn backlog(&self) -> Result<Backlog, StoreError> {
        self.read(|connection| {
            let now = clock(connection)?;
            list::backlog(connection, now)
        })
    }

    fn remove(&self, sweep: &Sweep) -> Result<Option<Removed>, StoreError> {
        self.transact(|connection| Ok(retention::remove(connection, sweep)?))
    }

    fn remove_effects(&self, kept: TimeDelta, limit: u32) -> Result<Option<u64>, StoreError> {
        self.transact(|connection| Ok(retention::remove_effects(connection, kept, limit)?))
    }

    fn lease_effects(&self, lease: &Lease) -> Result<Leased, StoreError> {
        self.transact(|connection| Ok(outbox::lease(connection, lease)?))
    }

    fn settle_effects(&self, settled: &[Settled]) -> Result<Noted, StoreError> {
        self.transact(|connection| Ok(outbox::settle(connection, settled)?))
    }

    fn list_effects(&self, filter: &ParcelFilter) -> Result<ParcelPage, StoreError> {
        self.read(|connection| {
            let now = clock(connection)?;
            outbox::list(connection, filter, now)
        })
    }

    fn effect(&self, id: &str) -> Result<Option<Parcel>, StoreError> {
        self.read(|connection| {
            let now = clock(connection)?;
            outbox::find(connection, id, now)
        })
    }

    fn redeliver(&self, id: &str) -> Result<Option<(Parcel, bool)>, StoreError> {
        self.transact(|connection| Ok(outbox::redeliver(connection, id)?))
    }

    fn undelivered(&self) -> Result<Undelivered, StoreError> {
        self.read(|connection| {
            let now = clock(connection)?;
            outbox::undelivered(connection, now)
        })
    }

    fn listen(&self, on_effects: Box<dyn Fn() + Send>) -> Arc<AtomicBool> {
        listen::start(&self.server, on_effects)
    }

    fn ready(&self) -> Result<(), StoreError> {
        self.read(|connection| {
            if is_read_only(connection)? {
                return Err(StoreError::Unavailable("the server is read-only".into()));
            }
            let may_write: bool = diesel::select(sql::<Bool>(
                "has_table_privilege('processed_orders', 'SELECT, INSERT, UPDATE') \
                 AND has_table_privilege('run_ledger', 'SELECT, INSERT, UPDATE') \
                 AND has_table_privilege('run_history', 'SELECT, INSERT') \
                 AND has_table_privilege('run_outbox', 'SELECT, INSERT, UPDATE') \
                 AND has_function_privilege('dedup_gate_won(text[])', 'EXECUTE')",
            ))
            .get_result(connection)?;
            if !may_write {
                return Err(StoreError::Unavailable("the tables are read-only".into()));
            }
            Ok(())
        })
    }
}
