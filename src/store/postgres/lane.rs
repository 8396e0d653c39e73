//! A lane's own connection. It needs no pool, since one batch comes at a time, and a batch that
//! fails is tried again claim by claim, on connections of the pool.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::pg::PgConnection;
use diesel::result::Error as DieselError;

use super::connect::Server;
use super::insert::{Made, insert};
use super::is_read_only;
use crate::domain::claim::Claim;
use crate::store::{StoreError, one_line};

/// A connection that was not used for so long is asked whether it still lives. One that dies in
/// use leaves nobody knowing what has become of the statement; one that died meanwhile need not.
const RESTED: Duration = Duration::from_millis(10);

/// It waits for no lock for long, since others wait behind it. Its statements are the same for any
/// number of claims, so a plan made once serves them all; not one that reads whole tables, though,
/// which is cheap only as long as they are empty. What it commits is flushed, whatever the server's
/// default.
const SESSION: &str = "SET lock_timeout = '200ms'; \
    SET statement_timeout = '2s'; \
    SET plan_cache_mode = force_generic_plan; \
    SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off; \
    SET default_transaction_isolation = 'read committed'; \
    SELECT set_config('synchronous_commit', 'on', false) \
    WHERE current_setting('synchronous_commit') = 'off'";

/// In one message with the beginning, and set in the transaction: see [`super::SETTINGS`]. Behind a
/// pooler there is nothing else.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; \
    SET LOCAL lock_timeout = '200ms'; \
    SET LOCAL statement_timeout = '2s'; \
    SET LOCAL idle_in_transaction_session_timeout = '5s'; \
    SET LOCAL enable_seqscan = off; \
    SELECT set_config('synchronous_commit', 'on', true) \
    WHERE current_setting('synchronous_commit') = 'off'";

/// The connection, once there is one.
pub(super) struct Lane {
    server: Server,
    kept: Option<(PgConnection, Instant)>,
}

impl Lane {
    pub(super) fn new(server: Server) -> Self {
        Self { server, kept: None }
    }

    /// The connection, taken: one that is left in the middle of something is not used again.
    fn take(&mut self) -> Result<PgConnection, StoreError> {
        if let Some((mut connection, used)) = self.kept.take()
            && (used.elapsed() < RESTED || lives(&mut connection))
        {
            self.server.keep_nothing_if_pooled(&mut connection);
            return Ok(connection);
        }
        let mut connection = self
            .server
            .connect()
            .map_err(|error| StoreError::Unavailable(one_line(&error.to_string())))?;
        if !self.server.is_pooled() {
            connection.batch_execute(SESSION)?;
            expect_writable(&mut connection)?;
        }
        Ok(connection)
    }

    fn keep(&mut self, connection: PgConnection) {
        self.kept = Some((connection, Instant::now()));
    }

    /// Makes the rows of all keys that have none, in one statement that commits by itself: one
    /// round trip, and one flush.
    pub(super) fn win(&mut self, claims: &[&Claim]) -> Result<Option<Made>, StoreError> {
        if self.server.is_pooled() {
            return self.transact(|connection| Ok(insert(connection, claims)?));
        }
        let mut connection = self.take()?;
        match insert(&mut connection, claims) {
            Ok(made) => {
                self.keep(connection);
                Ok(made)
            }
            // A server that still answers has said what became of the statement: it was undone.
            Err(error @ DieselError::DatabaseError(..)) if lives(&mut connection) => {
                self.keep(connection);
                self.server.learned(Err(error.into()))
            }
            Err(error) => Err(StoreError::CommitLost(one_line(&error.to_string()))),
        }
    }

    /// Runs `work`, of which each statement is a transaction, once; behind a pooler, all of it is one.
    pub(super) fn run<T>(
        &mut self,
        work: impl FnOnce(&mut PgConnection) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        if self.server.is_pooled() {
            return self.transact(work);
        }
        let mut connection = self.take()?;
        let done = work(&mut connection);
        if done.is_ok() || lives(&mut connection) {
            self.keep(connection);
        }
        self.server.learned(done)
    }

    /// Runs `work` in a transaction, once.
    pub(super) fn transact<T>(
        &mut self,
        work: impl FnOnce(&mut PgConnection) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut connection = self.take()?;
        let is_pooled = self.server.is_pooled();
        let done = connection
            .batch_execute(BEGIN)
            .map_err(StoreError::from)
            .and_then(|()| match is_pooled {
                true => expect_writable(&mut connection),
                false => Ok(()),
            })
            .and_then(|()| work(&mut connection));
        let end = if done.is_ok() { "COMMIT" } else { "ROLLBACK" };
        let ended = connection.batch_execute(end);
        if ended.is_ok() {
            self.keep(connection);
        }
        let done = self.server.learned(done)?;
        ended.map_err(|error| StoreError::CommitLost(one_line(&error.to_string())))?;
        Ok(done)
    }
}

/// One batch comes at a time, so nobody waits here.
pub(super) fn enter<T>(lane: &Mutex<T>) -> MutexGuard<'_, T> {
    lane.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A standby may lag behind, and would answer all the same where nothing is to be written.
fn expect_writable(connection: &mut PgConnection) -> Result<(), StoreError> {
    if is_read_only(connection)? {
        return Err(StoreError::Unavailable("the server is read-only".into()));
    }
    Ok(())
}

fn lives(connection: &mut PgConnection) -> bool {
    connection.batch_execute("SELECT").is_ok()
}
