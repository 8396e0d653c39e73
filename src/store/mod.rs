//! Where keys are kept: SQL, and nothing else.
//!
//! [`Store`] is all that the rest of the service knows of a database. Postgres and SQLite each
//! implement it in their own way; the rows and the tables are the same.

mod adopt;
pub mod lab;
pub mod outbox;
pub mod postgres;
mod rows;
mod schema;
pub mod sqlite;

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use chrono::TimeDelta;
use diesel::r2d2::PoolError;
use diesel::result::{DatabaseErrorKind, Error as DieselError};

use self::outbox::{Lease, Leased, Noted, Parcel, ParcelFilter, ParcelPage, Settled, Undelivered};
use self::rows::{BacklogRow, GateRow, LedgerRow, Seen};
use crate::domain::Time;
use crate::domain::act::{Act, act};
use crate::domain::claim::{Claim, Decided};
use crate::domain::effect::Effect;
use crate::domain::ledger::{Event, KeyState, Refusal, Status};
use crate::domain::text::IdempotencyKey;

/// A database that keeps the gate and the ledger. Every call is one transaction (but
/// [`Store::claim_new`] and [`Store::claim_known`]), blocks the thread that makes it, and has either happened wholly or not
/// at all when it fails; only where the connection broke during the commit nobody knows, and asking
/// again tells.
pub trait Store: Send + Sync {
    /// Decides an array of claims, in their order. One key that is reused with another payload
    /// refuses them all: then nothing is written, and the claims at fault say so.
    ///
    /// # Errors
    ///
    /// The database could not do it.
    fn claim_all(&self, claims: &[Claim]) -> Result<Vec<Decided>, StoreError>;

    /// Decides what can be decided at once of claims whose callers know nothing of each other.
    /// Each has an answer, or an error, of its own; or none, and then it is for
    /// [`Store::claim_known`]. One call comes at a time.
    fn claim_new(&self, claims: &[Claim]) -> Vec<Result<Option<Decided>, StoreError>>;

    /// Decides what that leaves, one call at a time.
    fn claim_known(&self, claims: &[Claim]) -> Vec<Result<Decided, StoreError>>;

    /// Does what is asked of a claimed key, and records it; none where the key is unknown.
    ///
    /// # Errors
    ///
    /// The database could not do it.
    fn act(&self, act: &Act) -> Result<Option<Acted>, StoreError>;

    /// The same for acts whose callers know nothing of each other, in their order and in one
    /// transaction. One call comes at a time.
    fn act_gathered(&self, acts: &[Act]) -> Vec<Result<Option<Acted>, StoreError>>;

    /// What is known of a key; none where it is unknown.
    ///
    /// # Errors
    ///
    /// The database could not do it.
    fn entry(&self, key: &IdempotencyKey) -> Result<Option<Entry>, StoreError>;

    /// Entries, newest change first.
    ///
    /// # Errors
    ///
    /// The database could not do it.
    fn list(&self, filter: &Filter) -> Result<Page, StoreError>;

    /// What is pending, at a bounded cost: no more than [`Backlog::BOUND`] entries are read, by an
    /// index.
    ///
    /// # Errors
    ///
    /// The database could not do it.
    fn backlog(&self) -> Result<Backlog, StoreError>;

    /// Removes what is over, a batch of it; none where another replica is at it.
    ///
    /// # Errors
    ///
    /// The database could not do it.
    fn remove(&self, sweep: &Sweep) -> Result<Option<Removed>, StoreError>;

    /// Removes effects that were delivered so long ago, `limit` at most, and says how many; none where another
    /// replica is at it.
    ///
    /// # Errors
    ///
    /// The database could not do it.
    fn remove_effects(&self, kept: TimeDelta, limit: u32) -> Result<Option<u64>, StoreError>;

    /// Gives out effects that are due, to be delivered and then settled by the one who asks. Those whose lease
    /// has run out are due again.
    ///
    /// # Errors
    ///
    /// The database could not do it.
    fn lease_effects(&self, lease: &Lease) -> Result<Leased, StoreError>;

    /// Notes how tries ended. Those whose lease has run out, and that somebody else has by now, are left.
    ///
    /// # Errors
    ///
    /// The database could not do it.
    fn settle_effects(&self, settled: &[Settled]) -> Result<Noted, StoreError>;

    /// Effects, newest first.
    ///
    /// # Errors
    ///
    /// The database could not do it.
    fn list_effects(&self, filter: &ParcelFilter) -> Result<ParcelPage, StoreError>;

    /// The effect of this name, with its tries; none where it is unknown.
    ///
    /// # Errors
    ///
    /// The database could not do it.
    fn effect(&self, id: &str) -> Result<Option<Parcel>, StoreError>;

    /// Makes the effect of this name due at once, whatever has become of it, and says whether it was not under
    /// way anyway; none where it is unknown.
    ///
    /// # Errors
    ///
    /// The database could not do it.
    fn redeliver(&self, id: &str) -> Result<Option<(Parcel, bool)>, StoreError>;

    /// What waits in the outbox, and what is dead, at a bounded cost: no more than [`Undelivered::BOUND`] of
    /// each are read.
    ///
    /// # Errors
    ///
    /// The database could not do it.
    fn undelivered(&self) -> Result<Undelivered, StoreError>;

    /// Calls `on_effects` whenever somebody else may have stored effects in the database, from now on, where the
    /// database tells. Returns whether it does just now.
    fn listen(&self, on_effects: Box<dyn Fn() + Send>) -> Arc<AtomicBool>;

    /// Whether the database can be reached and written to.
    ///
    /// # Errors
    ///
    /// It can not.
    fn ready(&self) -> Result<(), StoreError>;
}

/// What is known of a key at a point in time.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Whose work.
    pub key: IdempotencyKey,
    /// What is known of it.
    pub state: KeyState,
    /// What happened to it; empty in lists.
    pub history: Vec<Event>,
    /// The database's time at which it was read.
    pub now: Time,
}

impl Entry {
    /// An element of a list, from a row of the ledger.
    fn of_ledger(row: &LedgerRow, seen: Seen, now: Time) -> Result<Self, StoreError> {
        Ok(Self {
            key: IdempotencyKey::from_store(row.idempotency_key.clone()),
            state: rows::ledger_state(row, seen)?,
            history: Vec::new(),
            now,
        })
    }

    /// An element of a list, from a row of the gate.
    fn of_gate(row: &GateRow, now: Time) -> Self {
        Self {
            key: IdempotencyKey::from_store(row.idempotency_key.clone()),
            state: rows::gate_state(row),
            history: Vec::new(),
            now,
        }
    }
}

/// The history of a key: where the ledger has none, the claim at the gate.
fn history(state: &KeyState, written: Vec<Event>) -> Vec<Event> {
    if state.in_ledger {
        written
    } else {
        vec![state.gate_event()]
    }
}

/// The first claim on each key of a batch, in the order of the keys.
fn first_of_each_key<C: Borrow<Claim>>(claims: &[C]) -> BTreeMap<&IdempotencyKey, &Claim> {
    let mut firsts = BTreeMap::new();
    for claim in claims {
        let claim = claim.borrow();
        firsts.entry(&claim.key).or_insert(claim);
    }
    firsts
}

/// What an act came to.
#[derive(Debug, Clone)]
pub struct Acted {
    /// The entry after it.
    pub entry: Entry,
    /// Whether it changed anything, or why it was refused.
    pub answer: Result<bool, Refusal>,
    /// Whether effects were stored.
    pub has_effects: bool,
}

/// A claimed key, as it was found and as the acts of a batch change it.
struct Known {
    state: KeyState,
    history: Vec<Event>,
    is_changed: bool,
    was_in_ledger: bool,
    /// How many events are written already.
    written: usize,
    /// What is to be added to the outbox.
    effects: Vec<Effect>,
}

impl Known {
    fn new(state: KeyState, history: Vec<Event>) -> Self {
        Self {
            is_changed: false,
            was_in_ledger: state.in_ledger,
            written: history.len(),
            effects: Vec::new(),
            state,
            history,
        }
    }

    /// What is to be added to the history.
    fn events(&self) -> &[Event] {
        &self.history[self.written..]
    }

    /// Whether the key was claimed at the gate alone, and has an entry now.
    fn is_opened(&self) -> bool {
        !self.was_in_ledger && self.state.in_ledger
    }

    fn act(&mut self, wanted: &Act, now: Time) -> Acted {
        let settlement = act(&self.state, &self.history, wanted, now);
        self.is_changed |= settlement.is_change();
        self.state = settlement.state;
        self.history.extend(settlement.events);
        let has_effects = !settlement.effects.is_empty();
        self.effects.extend(settlement.effects);
        Acted {
            has_effects,
            entry: Entry {
                key: wanted.key().clone(),
                history: history(&self.state, self.history.clone()),
                state: self.state.clone(),
                now,
            },
            answer: settlement.answer,
        }
    }
}

/// Which batch of what is over is to be removed.
#[derive(Debug, Clone, PartialEq)]
pub struct Sweep {
    /// Where to look.
    pub table: Table,
    /// From which change on; none: from the first.
    pub from: Option<Time>,
    /// How long it must have been unchanged.
    pub kept: TimeDelta,
    /// How many keys at most.
    pub limit: u32,
}

/// Where to look for what is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Table {
    /// Entries of the ledger.
    Ledger,
    /// Keys claimed at the gate alone.
    Gate,
}

/// What was removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Removed {
    /// How many keys, with all that was known of them.
    pub count: u64,
    /// From which change on there may be more; none: there is nothing more.
    pub next: Option<Time>,
}

impl Sweep {
    /// How many rows are looked at for one batch: what must stay lies between what may go.
    const SCANNED_FOR_EACH: u32 = 10;

    fn scan(&self) -> i64 {
        i64::from(self.limit * Self::SCANNED_FOR_EACH)
    }

    /// Of the rows that were looked at, with the times of their changes and whether they are over, the keys
    /// for this batch, and where the next one begins. `tick` is the shortest time that the database tells.
    fn choose(
        &self,
        found: Vec<(String, Time, bool)>,
        tick: TimeDelta,
    ) -> (Vec<String>, Option<Time>) {
        let is_whole = (found.len() as i64) < self.scan();
        let first = found.first().map(|(_, at, _)| *at);
        let last = found.last().map(|(_, at, _)| *at);
        let limit = self.limit as usize;
        let mut over = found.into_iter().filter(|(_, _, is_over)| *is_over);
        let keys: Vec<(String, Time)> = over
            .by_ref()
            .take(limit)
            .map(|(key, at, _)| (key, at))
            .collect();
        let next = match (over.next(), last) {
            (Some((_, at, _)), _) => Some(at),
            (None, Some(last)) if !is_whole => {
                // More of one time than are looked at, and none of them over: they would be found again.
                let is_stuck = keys.is_empty() && first == Some(last);
                Some(if is_stuck { last + tick } else { last })
            }
            _ => None,
        };
        (keys.into_iter().map(|(key, _)| key).collect(), next)
    }

    /// What became of a batch. Where nothing was removed, since all that looked as if it were over is in use,
    /// the next one goes on behind its time: it would find the same.
    fn removed(&self, count: u64, next: Option<Time>, tick: TimeDelta) -> Removed {
        let is_stuck = count == 0 && next.is_some() && next == self.from;
        Removed {
            count,
            next: next.map(|next| if is_stuck { next + tick } else { next }),
        }
    }
}

/// Which entries to list.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Filter {
    /// Only those in this status. Keys at the gate alone are listed by [`Status::Claimed`] and
    /// by their own name only.
    pub status: Option<Status>,
    /// Only those with, or only those without a conflict.
    pub conflict: Option<bool>,
    /// Only those of this order.
    pub order_id: Option<String>,
    /// Only that of this key.
    pub key: Option<IdempotencyKey>,
    /// How many at most.
    pub limit: u32,
    /// Only those behind this one.
    pub cursor: Option<Cursor>,
}

impl Filter {
    /// Whether keys are asked for that are claimed at the gate alone.
    fn includes_gate(&self) -> bool {
        let by_status = match self.status {
            Some(status) => status == Status::Claimed,
            None => self.key.is_some(),
        };
        by_status && self.conflict != Some(true)
    }
}

/// A place in a list: behind the entry that was changed then and has this key.
#[derive(Debug, Clone, PartialEq)]
pub struct Cursor {
    /// When the entry was last changed.
    pub updated_at: Time,
    /// Its key.
    pub key: IdempotencyKey,
}

/// A part of a list.
#[derive(Debug)]
pub struct Page {
    /// The entries, without their history.
    pub entries: Vec<Entry>,
    /// Where the next part begins; none at the end.
    pub next: Option<Cursor>,
}

impl Page {
    /// Puts a page together from what the ledger and the gate hold, each in order and each of
    /// `limit + 1` entries at most.
    fn merge(mut entries: Vec<Entry>, gate: Vec<Entry>, limit: u32) -> Self {
        entries.extend(gate);
        entries.sort_by(|a, b| (b.state.updated_at, &b.key).cmp(&(a.state.updated_at, &a.key)));
        let limit = limit as usize;
        let has_more = entries.len() > limit;
        entries.truncate(limit);
        let next = entries.last().filter(|_| has_more).map(|last| Cursor {
            updated_at: last.state.updated_at,
            key: last.key.clone(),
        });
        Self { entries, next }
    }
}

/// What is pending in the ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backlog {
    /// How many entries are pending, stale ones included; [`Self::BOUND`] also where there are more.
    pub pending: usize,
    /// How many of these are stale.
    pub stale: usize,
    /// How long ago the oldest attempt of these was claimed; zero where nothing is pending.
    pub oldest: TimeDelta,
}

impl Backlog {
    /// How many pending entries are looked at: those that have not changed for longest, which is
    /// where leases run out first. Where more are pending, something is wrong that this shows too.
    pub const BOUND: u32 = 10_000;

    fn of_row(row: &BacklogRow, now: Time) -> Self {
        let number = |number: i64| usize::try_from(number).unwrap_or_default();
        let age = row.oldest.map_or(TimeDelta::zero(), |at| now - at.0);
        Self {
            pending: number(row.pending),
            stale: number(row.stale),
            oldest: age.max(TimeDelta::zero()),
        }
    }
}

/// Why the database could not do something. The texts are for the log.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// It is out of reach, is going down, is full, or did not answer in time: what was asked
    /// may be asked again.
    #[error("the database is out of reach: {0}")]
    Unavailable(String),
    /// The connection broke during the commit: nobody knows whether it has happened. Whoever
    /// asked may ask again, but nobody for them: without a claimant, the claim that did happen
    /// would be answered as somebody else's.
    #[error("the commit was not answered: {0}")]
    CommitLost(String),
    /// It said something that it should never have to say.
    #[error("unexpected answer of the database: {0}")]
    Unexpected(String),
}

/// Why the service cannot start on a database. The texts are for whoever starts it.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// It is out of reach: trying again may help.
    #[error("{0}")]
    Unavailable(String),
    /// It holds something that is not ours, or that we may not change.
    #[error("{0}")]
    Unusable(String),
}

/// Databases write their errors over several lines.
fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

impl From<PoolError> for StoreError {
    fn from(error: PoolError) -> Self {
        Self::Unavailable(one_line(&error.to_string()))
    }
}

impl From<DieselError> for StoreError {
    fn from(error: DieselError) -> Self {
        let text = one_line(&error.to_string());
        match error {
            // A statement never finds its data wrong: what is sent is checked, and what is
            // stored is ours. So a kind that diesel has no name for comes from the server's
            // state: shutting down, read-only, out of space, a lock or a statement that took
            // too long.
            DieselError::DatabaseError(
                DatabaseErrorKind::ClosedConnection
                | DatabaseErrorKind::UnableToSendCommand
                | DatabaseErrorKind::SerializationFailure
                | DatabaseErrorKind::ReadOnlyTransaction
                | DatabaseErrorKind::Unknown,
                _,
            )
            | DieselError::BrokenTransactionManager
            | DieselError::AlreadyInTransaction
            | DieselError::NotInTransaction
            | DieselError::RollbackErrorOnCommit { .. } => Self::Unavailable(text),
            _ => Self::Unexpected(text),
        }
    }
}
