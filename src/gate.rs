//! The use cases, and the way to the store: the lanes that gather concurrent claims and acts
//! into one transaction, how many other calls the store gets at a time, and how long a caller waits.
//!
//! Claims have two lanes. The first decides what is new, which it does best alone; what is known
//! already, or is opened in the ledger with its claim, takes more statements, and goes on to the
//! second. Acts on what is claimed have a lane of their own, so that
//! they wait for no claim.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use chrono::TimeDelta;
use prometheus::Histogram;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::task::spawn_blocking;
use tokio::time::timeout_at;

use crate::domain::act::Act;
use crate::domain::claim::{Claim, Decided};
use crate::domain::text::IdempotencyKey;
use crate::metrics::{Load, Metrics};
use crate::store::outbox::{
    Lease, Leased, Noted, Parcel, ParcelFilter, ParcelPage, Settled, Undelivered,
};
use crate::store::{Acted, Backlog, Entry, Filter, Page, Removed, Store, StoreError, Sweep};

/// Within this time every caller has an answer, be it that there is none: the contract promises
/// three seconds.
const DEADLINE: Duration = Duration::from_millis(2500);

/// A lane that is at one batch for so long hangs: the store ends what takes longer than two seconds.
const HUNG: Duration = Duration::from_secs(5);

/// How many callers may wait for the store outside the lanes of claims. What they send, or wait
/// for, may be large.
const QUEUE: usize = 512;

/// Asks the store, and never for longer than a caller waits.
pub struct Gate {
    store: Arc<dyn Store>,
    metrics: Arc<Metrics>,
    busy: [Busy; 3],
    claims: Lane<Claim, Decided>,
    /// The second lane, which the first one fills.
    known: Lane<Claim, Decided>,
    acts: Lane<Act, Option<Acted>>,
    /// As many as the store takes calls at a time beside the lanes, so that threads do not pile up
    /// behind it.
    connections: Arc<Semaphore>,
    connections_max: u32,
    queue: Semaphore,
    /// Counts how often effects may have become due.
    effects: watch::Sender<u64>,
}

/// How many claims a lane takes.
#[derive(Debug, Clone, Copy)]
pub struct LaneLimits {
    /// How many may wait.
    pub queue: usize,
    /// How many go into one batch; this bounds acts too.
    pub batch: usize,
}

/// Where questions queue up that are answered together.
type Lane<Q, A> = mpsc::Sender<Waiting<Q, A>>;

/// A question that waits in a lane.
struct Waiting<Q, A> {
    question: Q,
    asker: Asker<Q, A>,
}

/// Who waits for the answer, and until when.
struct Asker<Q, A> {
    deadline: Instant,
    reply: oneshot::Sender<Answer<Q, A>>,
}

/// What a lane has to say of a question.
enum Answer<Q, A> {
    Decided(Result<A, GateError>),
    /// It has failed, maybe by another's fault: it is to be tried alone.
    Alone(Q),
}

/// Why the gate has no answer. Nothing is known then of what was asked: asking again tells.
#[derive(Debug, Clone, thiserror::Error)]
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
    pub fn new(
        store: Arc<dyn Store>,
        connections: u32,
        limits: LaneLimits,
        metrics: Arc<Metrics>,
    ) -> Self {
        let (claims, new) = mpsc::channel(limits.queue);
        let (known, left) = mpsc::channel(limits.queue);
        let (acts, wanted) = mpsc::channel(QUEUE);
        let meters = [
            ("new", "claim_new"),
            ("known", "claim_known"),
            ("acts", "act_gathered"),
        ]
        .map(|(lane, operation)| Meter::new(&metrics, lane, operation));
        let busy = meters.each_ref().map(|meter| Arc::clone(&meter.busy));
        let [of_new, of_known, of_acts] = meters;
        let [first, second, third] = [&store, &store, &store].map(Arc::clone);
        let [count_first, count_second] = [&metrics, &metrics].map(Arc::clone);
        let next = known.clone();
        // They end when the gate has gone, and with it the last of the callers.
        thread::spawn(move || {
            let decide = |claims: &[Claim]| {
                let decided = first.claim_new(claims);
                count_first.count_claims(decided.iter().flatten().flatten());
                decided
            };
            run_lane(new, limits.batch, &of_new, decide, Some(&next));
        });
        thread::spawn(move || {
            let decide = |claims: &[Claim]| {
                let decided = second.claim_known(claims);
                count_second.count_claims(decided.iter().flatten());
                all_decided(decided)
            };
            run_lane(left, limits.batch, &of_known, decide, None);
        });
        let (effects, _) = watch::channel(0);
        let stored = effects.clone();
        thread::spawn(move || {
            let decide = |acts: &[Act]| {
                let acted = third.act_gathered(acts);
                if acted
                    .iter()
                    .flatten()
                    .flatten()
                    .any(|acted| acted.has_effects)
                {
                    stored.send_modify(|count| *count += 1);
                }
                all_decided(acted)
            };
            run_lane(wanted, limits.batch, &of_acts, decide, None);
        });
        Self {
            store,
            metrics,
            busy,
            claims,
            known,
            acts,
            connections: Arc::new(Semaphore::new(connections as usize)),
            connections_max: connections,
            queue: Semaphore::new(QUEUE),
            effects,
        }
    }

    /// Decides a claim, together with those that are asked for at the same time.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn claim(&self, claim: Claim) -> Result<Decided, GateError> {
        let alone = |store: &dyn Store, metrics: &Metrics, claim| {
            let decided = store.claim_all(&[claim])?.remove(0);
            metrics.count_claims([&decided]);
            Ok(decided)
        };
        self.gather(&self.claims, claim, "claim_all", alone).await
    }

    /// Decides an array of claims in a transaction of its own. One key that is reused with
    /// another payload refuses them all.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn claim_all(&self, claims: Vec<Claim>) -> Result<Vec<Decided>, GateError> {
        let metrics = Arc::clone(&self.metrics);
        self.ask("claim_all", move |store| {
            let decided = store.claim_all(&claims)?;
            // One that is refused refuses them all: nothing else was decided then.
            let is_refused = decided.iter().any(Result::is_err);
            metrics.count_claims(decided.iter().filter(|claim| claim.is_err() == is_refused));
            Ok(decided)
        })
        .await
    }

    /// Does what is asked of a claimed key, together with what is asked at the same time; none where
    /// the key is unknown.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn act(&self, act: Act) -> Result<Option<Acted>, GateError> {
        let stored = self.effects.clone();
        let alone = move |store: &dyn Store, _: &Metrics, act| {
            let acted = store.act(&act)?;
            if acted.as_ref().is_some_and(|acted| acted.has_effects) {
                stored.send_modify(|count| *count += 1);
            }
            Ok(acted)
        };
        self.gather(&self.acts, act, "act", alone).await
    }

    /// What is known of a key; none where it is unknown.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn entry(&self, key: IdempotencyKey) -> Result<Option<Entry>, GateError> {
        self.ask("entry", move |store| store.entry(&key)).await
    }

    /// Entries, newest change first.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn list(&self, filter: Filter) -> Result<Page, GateError> {
        self.ask("list", move |store| store.list(&filter)).await
    }

    /// What is pending.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn backlog(&self) -> Result<Backlog, GateError> {
        self.ask("backlog", |store| store.backlog()).await
    }

    /// How busy the gate is just now.
    pub fn load(&self) -> Load {
        let in_use = self.connections_max as usize - self.connections.available_permits();
        Load {
            queued: [
                ("new", queued(&self.claims)),
                ("known", queued(&self.known)),
                ("acts", queued(&self.acts)),
            ],
            // A call whose asker has given up has a connection, but no place any more.
            waiting: (QUEUE - self.queue.available_permits()).saturating_sub(in_use),
            in_use,
            connections: self.connections_max as usize,
        }
    }

    /// Removes what is over, a batch of it; none where another replica is at it.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn remove(&self, sweep: Sweep) -> Result<Option<Removed>, GateError> {
        self.ask("remove", move |store| store.remove(&sweep)).await
    }

    /// Removes effects that were delivered so long ago, `limit` at most; none where another replica is at it.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn remove_effects(
        &self,
        kept: TimeDelta,
        limit: u32,
    ) -> Result<Option<u64>, GateError> {
        self.ask("remove_effects", move |store| {
            store.remove_effects(kept, limit)
        })
        .await
    }

    /// Changes whenever effects may have become due: stored by this replica or by another one that tells, or
    /// waited for by others of their key.
    pub fn effects_changed(&self) -> watch::Receiver<u64> {
        self.effects.subscribe()
    }

    /// Notes that effects were stored beside the gate.
    pub fn note_effects(&self) {
        self.effects.send_modify(|count| *count += 1);
    }

    /// Has the store tell when other replicas store effects. Returns whether it does just now.
    pub fn listen(&self) -> Arc<AtomicBool> {
        let stored = self.effects.clone();
        self.store
            .listen(Box::new(move || stored.send_modify(|count| *count += 1)))
    }

    /// Gives out effects that are due.
    ///
    /// # Errors
    ///
    /// There is no answer; what was given out all the same is due again when its lease has run out.
    pub async fn lease_effects(&self, lease: Lease) -> Result<Leased, GateError> {
        self.ask("lease_effects", move |store| store.lease_effects(&lease))
            .await
    }

    /// Notes how tries ended.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn settle_effects(&self, settled: Vec<Settled>) -> Result<Noted, GateError> {
        let changed = self.effects.clone();
        self.ask("settle_effects", move |store| {
            let noted = store.settle_effects(&settled)?;
            if noted.has_next {
                changed.send_modify(|count| *count += 1);
            }
            Ok(noted)
        })
        .await
    }

    /// Effects, newest first.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn list_effects(&self, filter: ParcelFilter) -> Result<ParcelPage, GateError> {
        self.ask("list_effects", move |store| store.list_effects(&filter))
            .await
    }

    /// The effect of this name; none where it is unknown.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn effect(&self, id: String) -> Result<Option<Parcel>, GateError> {
        self.ask("effect", move |store| store.effect(&id)).await
    }

    /// Makes an effect due once more; none where it is unknown.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn redeliver(&self, id: String) -> Result<Option<(Parcel, bool)>, GateError> {
        let stored = self.effects.clone();
        self.ask("redeliver", move |store| {
            let redelivered = store.redeliver(&id)?;
            stored.send_modify(|count| *count += 1);
            Ok(redelivered)
        })
        .await
    }

    /// What waits in the outbox, and what is dead.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn undelivered(&self) -> Result<Undelivered, GateError> {
        self.ask("undelivered", |store| store.undelivered()).await
    }

    /// Whether the store can be reached, and no lane hangs on it.
    ///
    /// # Errors
    ///
    /// It can not.
    pub async fn ready(&self) -> Result<(), GateError> {
        let is_hung = |busy: &Busy| {
            let since = *busy.lock().unwrap_or_else(PoisonError::into_inner);
            since.is_some_and(|since| since.elapsed() > HUNG)
        };
        if self.busy.iter().any(is_hung) {
            return Err(StoreError::Unavailable("a lane waits for it in vain".into()).into());
        }
        self.ask("ready", |store| store.ready()).await
    }

    /// Runs what is asked of a database beside the gate, within the bounds of a call to its store.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn beside<T: Send + 'static>(
        &self,
        operation: &'static str,
        question: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, GateError> {
        self.ask(operation, |_| question()).await
    }

    /// Waits in a lane for the answer; `alone`, which is this operation of the store, gets it where
    /// the batch has failed.
    async fn gather<Q: Send + 'static, A: Send + 'static>(
        &self,
        lane: &Lane<Q, A>,
        question: Q,
        operation: &'static str,
        alone: impl FnOnce(&dyn Store, &Metrics, Q) -> Result<A, StoreError> + Send + 'static,
    ) -> Result<A, GateError> {
        let deadline = Instant::now() + DEADLINE;
        let (reply, answer) = oneshot::channel();
        let asker = Asker { deadline, reply };
        let waiting = Waiting { question, asker };
        lane.try_send(waiting).map_err(|error| match error {
            TrySendError::Full(_) => GateError::Overloaded,
            TrySendError::Closed(_) => StoreError::Unexpected("the lane has ended".into()).into(),
        })?;
        match timeout_at(deadline.into(), answer).await {
            Ok(Ok(Answer::Decided(decided))) => decided,
            Ok(Ok(Answer::Alone(question))) => {
                let metrics = Arc::clone(&self.metrics);
                let alone = move |store: &dyn Store| alone(store, &metrics, question);
                self.ask_until(deadline, operation, alone).await
            }
            // The lane drops what it comes to too late.
            Ok(Err(_)) | Err(_) => Err(StoreError::Unavailable("no answer in time".into()).into()),
        }
    }

    async fn ask<T: Send + 'static>(
        &self,
        operation: &'static str,
        question: impl FnOnce(&dyn Store) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, GateError> {
        self.ask_until(Instant::now() + DEADLINE, operation, question)
            .await
    }

    /// Runs `question` on a thread that may block, with a connection to itself. Whoever waits
    /// is answered by the deadline; a question whose asker was told that there is no answer
    /// is not put to the store any more, unless it is there already. `operation` names it in the
    /// metrics.
    async fn ask_until<T: Send + 'static>(
        &self,
        deadline: Instant,
        operation: &'static str,
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
        let seconds = self.metrics.store_seconds(operation);
        let answer = spawn_blocking(move || {
            let _connection = connection;
            if Instant::now() >= deadline {
                return Err(StoreError::Unavailable("no thread in time".into()));
            }
            seconds.observe_closure_duration(|| question(&*store))
        });
        match timeout_at(deadline.into(), answer).await {
            Ok(Ok(answer)) => Ok(answer?),
            Ok(Err(panicked)) => Err(StoreError::Unexpected(panicked.to_string()).into()),
            Err(_) => Err(StoreError::Unavailable("no answer in time".into()).into()),
        }
    }
}

/// Since when a lane has been deciding a batch; none while it waits for one.
type Busy = Arc<Mutex<Option<Instant>>>;

/// What is measured of a lane's batches.
struct Meter {
    sizes: Histogram,
    seconds: Histogram,
    busy: Busy,
}

impl Meter {
    fn new(metrics: &Metrics, lane: &'static str, operation: &'static str) -> Self {
        Self {
            sizes: metrics.batch_sizes(lane),
            seconds: metrics.store_seconds(operation),
            busy: Busy::default(),
        }
    }

    fn observe<T>(&self, size: usize, decide: impl FnOnce() -> T) -> T {
        #[expect(clippy::cast_precision_loss, reason = "a batch has 1,000 at most")]
        self.sizes.observe(size as f64);
        self.seconds.observe_closure_duration(decide)
    }

    fn set_busy(&self, since: Option<Instant>) {
        *self.busy.lock().unwrap_or_else(PoisonError::into_inner) = since;
    }
}

/// How many questions wait in a lane.
fn queued<Q, A>(lane: &Lane<Q, A>) -> usize {
    lane.max_capacity() - lane.capacity()
}

/// The answers of a lane that leaves nothing to another.
fn all_decided<A>(answers: Vec<Result<A, StoreError>>) -> Vec<Result<Option<A>, StoreError>> {
    let answers = answers.into_iter();
    answers.map(|answer| answer.map(Some)).collect()
}

/// Takes whatever has queued up while the last batch was decided, and decides it as one. Nothing
/// waits for more to come. A question whose asker has gone is decided all the same. What `decide`
/// leaves goes on to the `next` lane.
fn run_lane<Q, A>(
    mut queue: mpsc::Receiver<Waiting<Q, A>>,
    batch: usize,
    meter: &Meter,
    decide: impl Fn(&[Q]) -> Vec<Result<Option<A>, StoreError>>,
    next: Option<&Lane<Q, A>>,
) {
    let mut waiting = Vec::with_capacity(batch);
    while queue.blocking_recv_many(&mut waiting, batch) > 0 {
        let now = Instant::now();
        waiting.retain(|waiting: &Waiting<Q, A>| now < waiting.asker.deadline);
        let (questions, askers): (Vec<Q>, Vec<Asker<Q, A>>) = waiting
            .drain(..)
            .map(|waiting| (waiting.question, waiting.asker))
            .unzip();
        if questions.is_empty() {
            continue;
        }
        meter.set_busy(Some(now));
        // A panic must not end the lane. Nobody knows what has happened before it.
        let decide = || meter.observe(questions.len(), || decide(&questions));
        let decided = catch_unwind(AssertUnwindSafe(decide)).unwrap_or_else(|_| {
            let panicked = || StoreError::CommitLost("the store has panicked".into());
            questions.iter().map(|_| Err(panicked())).collect()
        });
        meter.set_busy(None);
        for ((question, asker), decided) in questions.into_iter().zip(askers).zip(decided) {
            let answer = match decided {
                Ok(Some(decided)) => Answer::Decided(Ok(decided)),
                Err(lost @ StoreError::CommitLost(_)) => Answer::Decided(Err(lost.into())),
                Err(error) => {
                    log::debug!("what failed in a batch is tried alone: {error}");
                    Answer::Alone(question)
                }
                Ok(None) => {
                    if let Some(Ok(place)) = next.map(mpsc::Sender::try_reserve) {
                        place.send(Waiting { question, asker });
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
