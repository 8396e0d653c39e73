//! The store on an embedded SQLite file: one writer, in WAL mode, flushed at each commit.

mod adopt;
mod insert;
mod lab;
mod list;
mod outbox;
mod retention;

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use chrono::{SubsecRound, TimeDelta, Utc};
use diesel::connection::SimpleConnection;
use diesel::dsl::{exists, sql};
use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, CustomizeConnection, Pool};
use diesel::result::Error as DieselError;
use diesel::sql_types::Text;
use diesel::sqlite::SqliteConnection;
use diesel_migrations::{EmbeddedMigrations, MigrationHarness, embed_migrations};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use self::insert::insert;
use super::outbox::{Lease, Leased, Noted, Parcel, ParcelFilter, ParcelPage, Settled, Undelivered};
use super::rows::{self, At, GateRow, HistoryRow, LedgerRow};
use super::schema::{processed_orders as gate, run_history as history, run_ledger as ledger};
use super::{
    Acted, Backlog, Entry, Filter, Known, Page, Removed, StartError, Store, StoreError, Sweep,
};
use crate::domain::Time;
use crate::domain::act::Act;
use crate::domain::claim::{Batch, Claim, Decided, Found, Write, decide_all};
use crate::domain::ledger::{Event, KeyState};
use crate::domain::text::IdempotencyKey;

const MIGRATIONS: EmbeddedMigrations = embed_migrations!("migrations/sqlite");

/// How long a connection of the pool, or another process's lock on the file, is waited for.
const BUSY_TIMEOUT: Duration = Duration::from_secs(2);

/// How many pages the log takes before it is carried into the file, which happens between two
/// commits: 32 MiB. Random keys write a page each, and most pages several times meanwhile, so eight
/// times SQLite's default makes claims a quarter faster.
const CHECKPOINT_PAGES: u32 = 8000;

/// How many requests may read at the same time.
const READERS: u32 = 4;

/// When a key was claimed at the gate, in the form that we write: raw SQL writes the time in
/// forms of its own (`CURRENT_TIMESTAMP` does), and what SQLite takes for a time is one. Lists
/// are ordered by it; the index of the migration is on the same expression.
const NEWEST: &str = "coalesce(strftime('%Y-%m-%dT%H:%M:%fZ', processed_orders.processed_at), '1970-01-01T00:00:00.000Z')";

/// The gate and the ledger in a SQLite file.
pub struct SqliteStore {
    /// One connection: SQLite has one writer, and waiting here is fairer than in the file's lock.
    writer: Pool<ConnectionManager<SqliteConnection>>,
    readers: Pool<ConnectionManager<SqliteConnection>>,
    path: String,
    /// Which file it is, whatever its path leads to later.
    file: (u64, u64),
    replay_window: TimeDelta,
}

/// Device and inode of a file.
fn file_id(path: &str) -> std::io::Result<(u64, u64)> {
    let file = std::fs::metadata(path)?;
    Ok((file.dev(), file.ino()))
}

/// Makes each commit durable, and each connection wait for the locks of other processes.
#[derive(Debug)]
struct Settings {
    path: String,
    /// Which file it has to be.
    file: (u64, u64),
}

impl CustomizeConnection<SqliteConnection, diesel::r2d2::Error> for Settings {
    /// One that was opened while another file was in the place of ours would outlive its return.
    fn on_acquire(&self, connection: &mut SqliteConnection) -> Result<(), diesel::r2d2::Error> {
        if !file_id(&self.path).is_ok_and(|id| id == self.file) {
            let elsewhere =
                ConnectionError::BadConnection("the file was deleted or replaced".into());
            return Err(diesel::r2d2::Error::ConnectionError(elsewhere));
        }
        configure(connection).map_err(diesel::r2d2::Error::QueryError)
    }
}

/// A file that is there: one that is missing is not to be made, and left in the way of its return.
fn existing(path: &str) -> String {
    const RESERVED: &AsciiSet = &CONTROLS.add(b'%').add(b'?').add(b'#');
    format!("file:{}?mode=rw", utf8_percent_encode(path, RESERVED))
}

fn configure(connection: &mut SqliteConnection) -> QueryResult<()> {
    connection.batch_execute(&busy_timeout())?;
    connection.batch_execute(&format!(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; \
         PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES};"
    ))
}

fn busy_timeout() -> String {
    format!("PRAGMA busy_timeout = {};", BUSY_TIMEOUT.as_millis())
}

/// How a transaction ends that is not to be committed.
enum Undo<T> {
    /// The database could not do it.
    Failed(StoreError),
    /// It has an answer, and nothing is to be written.
    Answer(Box<T>),
}

impl<T> From<DieselError> for Undo<T> {
    fn from(error: DieselError) -> Self {
        Self::Failed(error.into())
    }
}

impl<T> From<StoreError> for Undo<T> {
    fn from(error: StoreError) -> Self {
        Self::Failed(error)
    }
}

impl SqliteStore {
    /// How many calls it takes at a time. Those that write take turns.
    pub const CONNECTIONS: u32 = READERS;

    /// Opens the file, which is made where there is none, and migrates it.
    ///
    /// # Errors
    ///
    /// The file cannot be opened or made, or holds tables that cannot be adopted.
    pub fn open(path: &str, replay_window: TimeDelta) -> Result<Self, StartError> {
        Self::migrate(path)?;
        let file = file_id(path).map_err(|error| {
            StartError::Unusable(format!("cannot use the SQLite file {path}: {error}"))
        })?;
        let pool = |size| {
            Pool::builder()
                .max_size(size)
                .min_idle(Some(1))
                // A file does not hang up.
                .test_on_check_out(false)
                .connection_timeout(BUSY_TIMEOUT)
                .connection_customizer(Box::new(Settings {
                    path: path.to_owned(),
                    file,
                }))
                .build_unchecked(ConnectionManager::new(existing(path)))
        };
        Ok(Self {
            writer: pool(1),
            readers: pool(READERS),
            path: path.to_owned(),
            file,
            replay_window,
        })
    }

    fn migrate(path: &str) -> Result<(), StartError> {
        let unusable = |error: &dyn std::fmt::Display| {
            StartError::Unusable(format!("cannot use the SQLite file {path}: {error}"))
        };
        let mut connection = SqliteConnection::establish(path).map_err(|error| unusable(&error))?;
        connection
            .batch_execute(&busy_timeout())
            .map_err(|error| unusable(&error))?;
        connection
            .immediate_transaction(|connection| {
                let applied = connection.applied_migrations().map_err(Migration::Failed)?;
                let applied: Vec<String> = applied.iter().map(ToString::to_string).collect();
                if let Some(fault) = adopt::fault(connection, &applied)? {
                    return Err(Migration::Fault(fault));
                }
                connection
                    .run_pending_migrations(MIGRATIONS)
                    .map_err(Migration::Failed)?;
                Ok(())
            })
            .map_err(|error| match error {
                Migration::Fault(fault) => unusable(&fault),
                Migration::Failed(error) => unusable(&error),
                Migration::Database(error) => unusable(&error),
            })?;
        // Only now: the journal's mode stays in the file, and one that is refused is left alone.
        configure(&mut connection).map_err(|error| unusable(&error))
    }

    /// A file that was deleted or replaced under the service would take what it is given, and
    /// lose it with the process.
    fn check_file(&self) -> Result<(), StoreError> {
        if file_id(&self.path).is_ok_and(|id| id == self.file) {
            return Ok(());
        }
        Err(StoreError::Unavailable(format!(
            "the SQLite file {} was deleted or replaced: put it back, or start again",
            self.path
        )))
    }

    /// Runs `work` in a transaction that writes. It takes the file's lock at once: one that
    /// read first could not write after somebody else had.
    fn transact<T>(
        &self,
        work: impl FnOnce(&mut SqliteConnection) -> Result<T, Undo<T>>,
    ) -> Result<T, StoreError> {
        self.check_file()?;
        match self.writer.get()?.immediate_transaction(work) {
            Ok(answer) => Ok(answer),
            Err(Undo::Answer(answer)) => Ok(*answer),
            Err(Undo::Failed(error)) => Err(error),
        }
    }

    /// Runs `work` on what the file holds at one moment.
    fn read<T>(
        &self,
        work: impl FnOnce(&mut SqliteConnection) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.check_file()?;
        let connection: &mut SqliteConnection = &mut *self.readers.get()?;
        connection.transaction(work)
    }

    /// Decides a batch of claims in one transaction, in their order.
    fn claim(&self, claims: &[Claim], batch: Batch) -> Result<Vec<Decided>, StoreError> {
        let firsts = super::first_of_each_key(claims);
        self.transact(|connection| {
            let now = clock();
            let mut found = BTreeMap::new();
            for (&key, claim) in &firsts {
                found.insert(key.clone(), find(connection, claim, now)?);
            }
            let (verdicts, writes) = decide_all(claims, batch, &found, now, self.replay_window);
            if batch == Batch::Array && verdicts.iter().any(Result::is_err) {
                return Err(Undo::Answer(Box::new(verdicts)));
            }
            for changes in &writes {
                write(connection, changes, &found[&changes.key])?;
            }
            Ok(verdicts)
        })
    }
}

/// Why the migration stopped.
enum Migration {
    Fault(String),
    Failed(Box<dyn std::error::Error + Send + Sync>),
    Database(DieselError),
}

impl From<DieselError> for Migration {
    fn from(error: DieselError) -> Self {
        Self::Database(error)
    }
}

/// The database's clock is this process's, in the precision that is stored.
fn clock() -> Time {
    Utc::now().trunc_subsecs(3)
}

/// A row of the gate, with its time as SQLite reads it.
fn with_time((mut row, time): (GateRow, String)) -> GateRow {
    row.processed_at = At(rows::read_text(&time));
    row
}

fn read_state(
    connection: &mut SqliteConnection,
    key: &IdempotencyKey,
) -> Result<Option<KeyState>, StoreError> {
    let row: Option<(GateRow, String)> = gate::table
        .find(key.as_str())
        .select((GateRow::as_select(), sql::<Text>(NEWEST)))
        .first(connection)
        .optional()?;
    let row = row.map(with_time);
    let entry: Option<LedgerRow> = ledger::table
        .find(key.as_str())
        .select(LedgerRow::as_select())
        .first(connection)
        .optional()?;
    rows::state(row.as_ref(), entry.as_ref())
}

/// Whether the ledger knows a key. The gate may have none: somebody may delete a row of the gate by
/// hand, and what is done stays done.
fn is_in_ledger(connection: &mut SqliteConnection, key: &IdempotencyKey) -> QueryResult<bool> {
    diesel::select(exists(ledger::table.find(key.as_str()))).get_result(connection)
}

/// Makes the row of the key, which is where it is won, or says what is known of it.
fn find(connection: &mut SqliteConnection, claim: &Claim, now: Time) -> Result<Found, StoreError> {
    if insert(connection, claim, now)? && !is_in_ledger(connection, &claim.key)? {
        return Ok(Found::New(now));
    }
    match read_state(connection, &claim.key)? {
        Some(state) => Ok(Found::Known(state)),
        None => Err(StoreError::Unexpected(format!(
            "the row of {:?} neither can be made nor is there",
            claim.key.as_str()
        ))),
    }
}

fn write(
    connection: &mut SqliteConnection,
    write: &Write,
    found: &Found,
) -> Result<(), StoreError> {
    let key = write.key.as_str();
    if write.seen > 0 {
        diesel::update(gate::table.find(key))
            .set((
                gate::seen_again.eq(gate::seen_again + write.seen.cast_signed()),
                gate::last_seen_at.eq(write.state.last_seen_at.map(At)),
            ))
            .execute(connection)?;
    }
    if write.changed {
        if write.state.in_ledger {
            write_entry(connection, &write.key, &write.state)?;
            let is_marked = match found {
                Found::Known(state) => state.in_ledger,
                Found::New(_) => !write.changed_again,
            };
            if !is_marked {
                mark_opened(connection, &write.key)?;
            }
        } else if write.changed_again || matches!(found, Found::Known(_)) {
            // A row that was made just now says all this already.
            write_gate(connection, &write.key, &write.state)?;
        }
        write_events(connection, &write.key, &write.events)?;
    }
    Ok(())
}

fn write_entry(
    connection: &mut SqliteConnection,
    key: &IdempotencyKey,
    state: &KeyState,
) -> Result<(), StoreError> {
    use diesel::query_dsl::methods::FilterDsl;
    let row = LedgerRow::of_state(key, state);
    let written = diesel::insert_into(ledger::table)
        .values(&row)
        .on_conflict(ledger::idempotency_key)
        .do_update()
        .set(&row)
        .filter(ledger::attempt.le(row.attempt))
        .execute(connection)?;
    expect_written(written)
}

/// Notes that this key, claimed at the gate alone before, has an entry now.
fn mark_opened(connection: &mut SqliteConnection, key: &IdempotencyKey) -> QueryResult<()> {
    diesel::update(gate::table.find(key.as_str()))
        .set(gate::in_ledger.eq(true))
        .execute(connection)?;
    Ok(())
}

fn write_gate(
    connection: &mut SqliteConnection,
    key: &IdempotencyKey,
    state: &KeyState,
) -> Result<(), StoreError> {
    let row = GateRow::of_state(key, state);
    let written = diesel::update(gate::table.find(key.as_str()))
        .filter(gate::attempt.le(row.attempt))
        .set((
            gate::order_id.eq(&row.order_id),
            gate::processed_at.eq(row.processed_at),
            gate::attempt.eq(row.attempt),
            gate::claimant.eq(&row.claimant),
            gate::api_key.eq(&row.api_key),
            gate::payload_sha256.eq(&row.payload_sha256),
            gate::ttl_seconds.eq(row.ttl_seconds),
            gate::expires_at.eq(row.expires_at),
        ))
        .execute(connection)?;
    expect_written(written)
}

/// The file is locked, so each write names the attempt that was read; if one does not,
/// something is wrong, and nothing is committed.
fn expect_written(written: usize) -> Result<(), StoreError> {
    if written == 1 {
        return Ok(());
    }
    Err(StoreError::Unexpected(
        "nothing was written: an attempt went backwards".into(),
    ))
}

fn write_events(
    connection: &mut SqliteConnection,
    key: &IdempotencyKey,
    events: &[Event],
) -> Result<(), StoreError> {
    if events.is_empty() {
        return Ok(());
    }
    let last: Option<i32> = history::table
        .filter(history::idempotency_key.eq(key.as_str()))
        .select(diesel::dsl::max(history::seq))
        .first(connection)?;
    for row in HistoryRow::of_events(key, events, last.unwrap_or(0) + 1)? {
        diesel::insert_into(history::table)
            .values(row)
            .execute(connection)?;
    }
    Ok(())
}

fn read_history(
    connection: &mut SqliteConnection,
    key: &IdempotencyKey,
) -> Result<Vec<Event>, StoreError> {
    let rows: Vec<HistoryRow> = history::table
        .filter(history::idempotency_key.eq(key.as_str()))
        .order(history::seq)
        .select(HistoryRow::as_select())
        .load(connection)?;
    rows.iter().map(HistoryRow::event).collect()
}

/// Does what is asked, in its order; none where a key is unknown.
fn act_all(
    connection: &mut SqliteConnection,
    acts: &[Act],
) -> Result<Vec<Option<Acted>>, StoreError> {
    let now = clock();
    let mut found: BTreeMap<&IdempotencyKey, Known> = BTreeMap::new();
    for key in acts.iter().map(Act::key) {
        if !found.contains_key(key)
            && let Some(state) = read_state(connection, key)?
        {
            found.insert(key, Known::new(state, read_history(connection, key)?));
        }
    }
    let acted = acts
        .iter()
        .map(|act| Some(found.get_mut(act.key())?.act(act, now)))
        .collect();
    found.retain(|_, known| known.is_changed);
    for (key, known) in found {
        write_entry(connection, key, &known.state)?;
        if known.is_opened() {
            mark_opened(connection, key)?;
        }
        write_events(connection, key, known.events())?;
        outbox::store(connection, key, &known.effects, now)?;
    }
    Ok(acted)
}

impl Store for SqliteStore {
    fn claim_all(&self, claims: &[Claim]) -> Result<Vec<Decided>, StoreError> {
        self.claim(claims, Batch::Array)
    }

    /// There is one writer, so all is decided at once.
    fn claim_new(&self, claims: &[Claim]) -> Vec<Result<Option<Decided>, StoreError>> {
        let decided = self.claim_known(claims).into_iter();
        decided.map(|decided| decided.map(Some)).collect()
    }

    fn claim_known(&self, claims: &[Claim]) -> Vec<Result<Decided, StoreError>> {
        match self.claim(claims, Batch::Lane) {
            Ok(decided) => decided.into_iter().map(Ok).collect(),
            Err(error) => vec![Err(error); claims.len()],
        }
    }

    fn act(&self, act: &Act) -> Result<Option<Acted>, StoreError> {
        let acts = std::slice::from_ref(act);
        Ok(self
            .transact(|connection| Ok(act_all(connection, acts)?))?
            .remove(0))
    }

    fn act_gathered(&self, acts: &[Act]) -> Vec<Result<Option<Acted>, StoreError>> {
        match self.transact(|connection| Ok(act_all(connection, acts)?)) {
            Ok(acted) => acted.into_iter().map(Ok).collect(),
            Err(error) => vec![Err(error); acts.len()],
        }
    }

    fn entry(&self, key: &IdempotencyKey) -> Result<Option<Entry>, StoreError> {
        self.read(|connection| {
            let Some(state) = read_state(connection, key)? else {
                return Ok(None);
            };
            let history = read_history(connection, key)?;
            Ok(Some(Entry {
                key: key.clone(),
                history: super::history(&state, history),
                state,
                now: clock(),
            }))
        })
    }

    fn list(&self, filter: &Filter) -> Result<Page, StoreError> {
        self.read(|connection| {
            let now = clock();
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
        self.read(|connection| list::backlog(connection, clock()))
    }

    fn remove(&self, sweep: &Sweep) -> Result<Option<Removed>, StoreError> {
        self.transact(|connection| Ok(Some(retention::remove(connection, sweep)?)))
    }

    fn remove_effects(&self, kept: TimeDelta, limit: u32) -> Result<Option<u64>, StoreError> {
        self.transact(|connection| Ok(Some(retention::remove_effects(connection, kept, limit)?)))
    }

    fn lease_effects(&self, lease: &Lease) -> Result<Leased, StoreError> {
        self.transact(|connection| Ok(outbox::lease(connection, lease, clock())?))
    }

    fn settle_effects(&self, settled: &[Settled]) -> Result<Noted, StoreError> {
        self.transact(|connection| Ok(outbox::settle(connection, settled, clock())?))
    }

    fn list_effects(&self, filter: &ParcelFilter) -> Result<ParcelPage, StoreError> {
        self.read(|connection| outbox::list(connection, filter, clock()))
    }

    fn effect(&self, id: &str) -> Result<Option<Parcel>, StoreError> {
        self.read(|connection| outbox::find(connection, id, clock()))
    }

    fn redeliver(&self, id: &str) -> Result<Option<(Parcel, bool)>, StoreError> {
        self.transact(|connection| Ok(outbox::redeliver(connection, id, clock())?))
    }

    fn undelivered(&self) -> Result<Undelivered, StoreError> {
        self.read(|connection| outbox::undelivered(connection, clock()))
    }

    /// A file tells nobody.
    fn listen(&self, _: Box<dyn Fn() + Send>) -> Arc<AtomicBool> {
        Arc::default()
    }

    /// Takes the lock that a write takes, and writes nothing.
    fn ready(&self) -> Result<(), StoreError> {
        self.transact(|connection| {
            gate::table
                .select(gate::attempt)
                .limit(1)
                .load::<i32>(connection)?;
            ledger::table
                .select(ledger::attempt)
                .limit(1)
                .load::<i32>(connection)?;
            history::table
                .select(history::attempt)
                .limit(1)
                .load::<i32>(connection)?;
            Ok(())
        })
    }
}
