//! The use cases, and the way to the store: how many calls it gets at a time, and how long a
//! caller waits for an answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::domain::claim::{Claim, KeyReused, Verdict};
use crate::domain::ledger::Report;
use crate::domain::text::IdempotencyKey;
use crate::store::{Entry, Filter, Page, Settled, Store, StoreError};

/// Within this time every caller has an answer, be it that there is none: the contract promises
/// three seconds.
const DEADLINE: Duration = Duration::from_millis(2500);

/// How many callers may wait for the store.
const QUEUE: usize = 512;

/// Asks the store, and never for longer than a caller waits.
pub struct Gate {
    store: Arc<dyn Store>,
    /// As many as the store takes calls at a time, so that threads do not pile up behind it.
    connections: Arc<Semaphore>,
    queue: Semaphore,
}

/// Why the gate has no answer. Nothing is known then of what was asked: asking again tells.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    /// More was asked than the store can answer in time.
    #[error("the store has more to do than it can answer in time")]
    Overloaded,
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Gate {
    /// A gate before a store that takes `connections` calls at a time.
    pub fn new(store: Arc<dyn Store>, connections: u32) -> Self {
        Self {
            store,
            connections: Arc::new(Semaphore::new(connections as usize)),
            queue: Semaphore::new(QUEUE),
        }
    }

    /// Decides claims in one transaction. One key that is reused with another payload refuses
    /// them all.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn claim(
        &self,
        claims: Vec<Claim>,
    ) -> Result<Vec<Result<Verdict, KeyReused>>, GateError> {
        self.ask(move |store| store.claim(&claims)).await
    }

    /// Records what became of the work; none where the key is unknown.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn settle(&self, report: Report) -> Result<Option<Settled>, GateError> {
        self.ask(move |store| store.settle(&report)).await
    }

    /// What is known of a key; none where it is unknown.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn entry(&self, key: IdempotencyKey) -> Result<Option<Entry>, GateError> {
        self.ask(move |store| store.entry(&key)).await
    }

    /// Entries, newest change first.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn list(&self, filter: Filter) -> Result<Page, GateError> {
        self.ask(move |store| store.list(&filter)).await
    }

    /// Whether the store can be reached.
    ///
    /// # Errors
    ///
    /// It can not.
    pub async fn ready(&self) -> Result<(), GateError> {
        self.ask(|store| store.ready()).await
    }

    /// Runs `question` on a thread that may block, with a connection to itself. Whoever waits
    /// is answered within [`DEADLINE`]; a question whose asker was told that there is no answer
    /// is not put to the store any more, unless it is there already.
    async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&dyn Store) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, GateError> {
        let Ok(_place) = self.queue.try_acquire() else {
            return Err(GateError::Overloaded);
        };
        let deadline = Instant::now() + DEADLINE;
        let connection = timeout(DEADLINE, Arc::clone(&self.connections).acquire_owned())
            .await
            .map_err(|_| GateError::Overloaded)?
            .map_err(|_| GateError::Overloaded)?;
        let store = Arc::clone(&self.store);
        let answer = spawn_blocking(move || {
            let _connection = connection;
            if Instant::now() >= deadline {
                return Err(StoreError::Unavailable("no thread in time".into()));
            }
            question(&*store)
        });
        match timeout(deadline - Instant::now(), answer).await {
            Ok(Ok(answer)) => Ok(answer?),
            Ok(Err(panicked)) => Err(StoreError::Unexpected(panicked.to_string()).into()),
            Err(_) => Err(StoreError::Unavailable("no answer in time".into()).into()),
        }
    }
}
