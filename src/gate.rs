//! The use cases, and the way to the store: the lanes that gather concurrent claims into one
//! statement, how many other calls the store gets at a time, and how long a caller waits.
//!
//! There are two lanes. The first decides what is new, which it does best alone; what is known
//! already, or is opened in the ledger with its claim, takes more statements, and goes on to the
//! second.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::spawn_blocking;
use tokio::time::timeout_at;

use crate::domain::claim::{Claim, Decided};
use crate::domain::ledger::Report;
use crate::domain::text::IdempotencyKey;
use crate::store::{Entry, Filter, Page, Settled, Store, StoreError};

/// Within this time every caller has an answer, be it that there is none: the contract promises
/// three seconds.
const DEADLINE: Duration = Duration::from_millis(2500);

/// How many callers may wait for the store outside the lanes. What they wait for may be large.
const QUEUE: usize = 512;

/// Asks the store, and never for longer than a caller waits.
pub struct Gate {
    store: Arc<dyn Store>,
    lane: mpsc::Sender<Waiting>,
    /// As many as the store takes calls at a time beside the lanes, so that threads do not pile up
    /// behind it.
    connections: Arc<Semaphore>,
    queue: Semaphore,
}

/// How many claims a lane takes.
#[derive(Debug, Clone, Copy)]
pub struct LaneLimits {
    /// How many may wait.
    pub queue: usize,
    /// How many go into one statement.
    pub batch: usize,
}

/// A claim that waits in a lane.
struct Waiting {
    claim: Claim,
    asker: Asker,
}

/// Who waits for the answer, and until when.
struct Asker {
    deadline: Instant,
    reply: oneshot::Sender<Answer>,
}

/// What a lane has to say of a claim.
enum Answer {
    Decided(Result<Decided, GateError>),
    /// It has failed, maybe by another's fault: it is to be tried alone.
    Alone(Claim),
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
    /// A gate before a store that takes `connections` calls at a time beside the lanes.
    pub fn new(store: Arc<dyn Store>, connections: u32, limits: LaneLimits) -> Self {
        let (lane, new) = mpsc::channel(limits.queue);
        let (left, known) = mpsc::channel(limits.queue);
        let (first, second) = (Arc::clone(&store), Arc::clone(&store));
        // They end when the gate has gone, and with it the last of the callers.
        thread::spawn(move || {
            run_lane(
                new,
                limits.batch,
                |claims| first.claim_new(claims),
                Some(&left),
            );
        });
        thread::spawn(move || {
            let decide = |claims: &[Claim]| {
                let decided = second.claim_known(claims).into_iter();
                decided.map(|decided| decided.map(Some)).collect()
            };
            run_lane(known, limits.batch, decide, None);
        });
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
    pub async fn claim(&self, claim: Claim) -> Result<Decided, GateError> {
        let deadline = Instant::now() + DEADLINE;
        let (reply, answer) = oneshot::channel();
        let asker = Asker { deadline, reply };
        let waiting = Waiting { claim, asker };
        self.lane.try_send(waiting).map_err(|error| match error {
            TrySendError::Full(_) => GateError::Overloaded,
            TrySendError::Closed(_) => StoreError::Unexpected("the lane has ended".into()).into(),
        })?;
        match timeout_at(deadline.into(), answer).await {
            Ok(Ok(Answer::Decided(decided))) => decided,
            Ok(Ok(Answer::Alone(claim))) => {
                let alone = move |store: &dyn Store| store.claim_all(&[claim]);
                Ok(self.ask_until(deadline, alone).await?.remove(0))
            }
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
    pub async fn claim_all(&self, claims: Vec<Claim>) -> Result<Vec<Decided>, GateError> {
        self.ask(move |store| store.claim_all(&claims)).await
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

/// Takes whatever has queued up while the last batch was decided, and decides it as one. Nothing
/// waits for more to come. A claim whose caller has gone is decided all the same. What `decide`
/// leaves goes on to the `next` lane.
fn run_lane(
    mut queue: mpsc::Receiver<Waiting>,
    batch: usize,
    decide: impl Fn(&[Claim]) -> Vec<Result<Option<Decided>, StoreError>>,
    next: Option<&mpsc::Sender<Waiting>>,
) {
    let mut waiting = Vec::with_capacity(batch);
    while queue.blocking_recv_many(&mut waiting, batch) > 0 {
        let now = Instant::now();
        waiting.retain(|waiting: &Waiting| now < waiting.asker.deadline);
        let (claims, askers): (Vec<Claim>, Vec<Asker>) = waiting
            .drain(..)
            .map(|waiting| (waiting.claim, waiting.asker))
            .unzip();
        if claims.is_empty() {
            continue;
        }
        // A panic must not end the lane. Nobody knows what has happened before it.
        let decided = catch_unwind(AssertUnwindSafe(|| decide(&claims))).unwrap_or_else(|_| {
            let panicked = || StoreError::CommitLost("the store has panicked".into());
            claims.iter().map(|_| Err(panicked())).collect()
        });
        for ((claim, asker), decided) in claims.into_iter().zip(askers).zip(decided) {
            let answer = match decided {
                Ok(Some(decided)) => Answer::Decided(Ok(decided)),
                Err(lost @ StoreError::CommitLost(_)) => Answer::Decided(Err(lost.into())),
                Err(error) => {
                    log::debug!("a claim is tried alone: {error}");
                    Answer::Alone(claim)
                }
                Ok(None) => {
                    if let Some(Ok(place)) = next.map(mpsc::Sender::try_reserve) {
                        place.send(Waiting { claim, asker });
                        continue;
                    }
                    Answer::Decided(Err(GateError::Overloaded))
                }
            };
            // Nobody listens any more where the caller has gone.
            let _ = asker.reply.send(answer);
        }
    }
}
