//! The use cases, and the way to the store: the lane that gathers concurrent claims into one
//! statement, how many other calls the store gets at a time, and how long a caller waits.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::spawn_blocking;
use tokio::time::timeout_at;

use crate::domain::claim::{Batch, Claim, KeyReused, Verdict};
use crate::domain::ledger::Report;
use crate::domain::text::IdempotencyKey;
use crate::store::{Entry, Filter, Page, Settled, Store, StoreError};

/// Within this time every caller has an answer, be it that there is none: the contract promises
/// three seconds.
const DEADLINE: Duration = Duration::from_millis(2500);

/// How many callers may wait for the store outside the lane. What they wait for may be large.
const QUEUE: usize = 512;

/// Asks the store, and never for longer than a caller waits.
pub struct Gate {
    store: Arc<dyn Store>,
    lane: mpsc::Sender<Waiting>,
    /// As many as the store takes calls at a time beside the lane, so that threads do not pile up
    /// behind it.
    connections: Arc<Semaphore>,
    queue: Semaphore,
}

/// How many claims the lane takes.
#[derive(Debug, Clone, Copy)]
pub struct LaneLimits {
    /// How many may wait.
    pub queue: usize,
    /// How many go into one statement.
    pub batch: usize,
}

/// A claim that waits in the lane.
struct Waiting {
    claim: Claim,
    deadline: Instant,
    asker: oneshot::Sender<Answer>,
}

/// What the lane has to say of a claim.
enum Answer {
    Decided(Result<Verdict, KeyReused>),
    /// The batch has failed, maybe by another's fault: it is to be tried alone.
    Alone(Claim),
    /// Nobody knows what has become of the batch.
    Lost(String),
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
    /// A gate before a store that takes `connections` calls at a time beside the lane.
    pub fn new(store: Arc<dyn Store>, connections: u32, limits: LaneLimits) -> Self {
        let (lane, waiting) = mpsc::channel(limits.queue);
        let behind = Arc::clone(&store);
        // It ends when the gate has gone, and with it the last of the callers.
        thread::spawn(move || run_lane(&*behind, waiting, limits.batch));
        Self {
            store,
            lane,
            connections: Arc::new(Semaphore::new(connections as usize)),
            queue: Semaphore::new(QUEUE),
        }
    }

    /// Decides a claim, together with those that are asked for at the same time.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn claim(&self, claim: Claim) -> Result<Result<Verdict, KeyReused>, GateError> {
        let deadline = Instant::now() + DEADLINE;
        let (asker, answer) = oneshot::channel();
        let waiting = Waiting {
            claim,
            deadline,
            asker,
        };
        self.lane.try_send(waiting).map_err(|error| match error {
            TrySendError::Full(_) => GateError::Overloaded,
            TrySendError::Closed(_) => StoreError::Unexpected("the lane has ended".into()).into(),
        })?;
        match timeout_at(deadline.into(), answer).await {
            Ok(Ok(Answer::Decided(verdict))) => Ok(verdict),
            Ok(Ok(Answer::Alone(claim))) => {
                let alone = move |store: &dyn Store| store.claim(&[claim], Batch::Array);
                Ok(self.ask_until(deadline, alone).await?.remove(0))
            }
            Ok(Ok(Answer::Lost(why))) => Err(StoreError::CommitLost(why).into()),
            // The lane drops what it comes to too late.
            Ok(Err(_)) | Err(_) => Err(StoreError::Unavailable("no answer in time".into()).into()),
        }
    }

    /// Decides an array of claims in a transaction of its own. One key that is reused with
    /// another payload refuses them all.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn claim_all(
        &self,
        claims: Vec<Claim>,
    ) -> Result<Vec<Result<Verdict, KeyReused>>, GateError> {
        self.ask(move |store| store.claim(&claims, Batch::Array))
            .await
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

    async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&dyn Store) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, GateError> {
        self.ask_until(Instant::now() + DEADLINE, question).await
    }

    /// Runs `question` on a thread that may block, with a connection to itself. Whoever waits
    /// is answered by the deadline; a question whose asker was told that there is no answer
    /// is not put to the store any more, unless it is there already.
    async fn ask_until<T: Send + 'static>(
        &self,
        deadline: Instant,
        question: impl FnOnce(&dyn Store) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, GateError> {
        let Ok(_place) = self.queue.try_acquire() else {
            return Err(GateError::Overloaded);
        };
        let connection = Arc::clone(&self.connections).acquire_owned();
        let connection = timeout_at(deadline.into(), connection)
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
        match timeout_at(deadline.into(), answer).await {
            Ok(Ok(answer)) => Ok(answer?),
            Ok(Err(panicked)) => Err(StoreError::Unexpected(panicked.to_string()).into()),
            Err(_) => Err(StoreError::Unavailable("no answer in time".into()).into()),
        }
    }
}

/// Takes whatever has queued up while the last statement ran, and puts it to the store as one.
/// Nothing waits for more to come. A claim whose caller has gone is decided all the same.
fn run_lane(store: &dyn Store, mut queue: mpsc::Receiver<Waiting>, batch: usize) {
    let mut waiting = Vec::with_capacity(batch);
    while queue.blocking_recv_many(&mut waiting, batch) > 0 {
        let now = Instant::now();
        let in_time = waiting.drain(..).filter(|waiting| now < waiting.deadline);
        let (claims, askers): (Vec<Claim>, Vec<_>) = in_time
            .map(|waiting| (waiting.claim, waiting.asker))
            .unzip();
        if claims.is_empty() {
            continue;
        }
        // A panic must not end the lane: what is tried alone then is answered as any other.
        let decided = catch_unwind(AssertUnwindSafe(|| store.claim(&claims, Batch::Lane)))
            .unwrap_or_else(|_| Err(StoreError::Unexpected("the store has panicked".into())));
        let answers: Vec<Answer> = match decided {
            Ok(verdicts) => verdicts.into_iter().map(Answer::Decided).collect(),
            Err(StoreError::CommitLost(why)) => vec![why; claims.len()]
                .into_iter()
                .map(Answer::Lost)
                .collect(),
            Err(error) => {
                log::debug!("{} claims are tried alone: {error}", claims.len());
                claims.into_iter().map(Answer::Alone).collect()
            }
        };
        for (asker, answer) in askers.into_iter().zip(answers) {
            // Nobody listens any more where the caller has gone.
            let _ = asker.send(answer);
        }
    }
}
