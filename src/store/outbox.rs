//! What the outbox holds, as both stores tell it.

use chrono::TimeDelta;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Nullable};
use serde::{Deserialize, Serialize};

use super::StoreError;
use super::rows::At;
use super::schema::{Instant, run_outbox};
use crate::domain::effect::{Delivery, Effect, Topics};
use crate::domain::text::IdempotencyKey;
use crate::domain::{Time, rfc3339};

/// Which effects are to be delivered now, and by when the one who asks will have settled them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// Of these topics.
    pub topics: Topics,
    /// The topics that somebody delivers. An effect waits for those of its key before it, but not for one that
    /// nobody delivers.
    pub routed: Topics,
    /// How many at most.
    pub limit: u32,
    /// How long they are left to the one who asks, in seconds.
    pub seconds: u32,
}

/// Effects to be delivered now.
#[derive(Debug, Clone, PartialEq)]
pub struct Leased {
    /// The effects, of each key the first that is due.
    pub effects: Vec<LeasedEffect>,
    /// How long it takes until the next one is due; none: nothing waits.
    pub next: Option<TimeDelta>,
}

/// An effect that is to be delivered now, by the one who leased it.
#[derive(Debug, Clone, PartialEq)]
pub struct LeasedEffect {
    /// The lease.
    pub lease: LeaseId,
    /// What it is about.
    pub topic: String,
    /// JSON, to be sent byte for byte.
    pub payload: String,
    /// How many tries of it failed.
    pub failures: u32,
    /// When it was due, before any try.
    pub due_at: Time,
    /// When it was leased.
    pub leased_at: Time,
}

/// Names a lease: no other one of the effect has the same number of tries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseId {
    /// Whose effect.
    pub key: IdempotencyKey,
    /// Which of the key's effects.
    pub seq: i32,
    /// Its name.
    pub id: String,
    /// Which try of it.
    pub tries: i32,
}

/// How the try of a lease ended, and what comes of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Settled {
    /// The lease.
    pub lease: LeaseId,
    /// Where the effect stands now.
    pub delivery: Delivery,
    /// How long to wait before it is tried again, where it is pending.
    pub wait: TimeDelta,
    /// How many tries of it have failed.
    pub failures: u32,
    /// What to note of the try.
    pub attempt: Try,
}

/// What became of settlements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Noted {
    /// Of how many the lease still held. The others were left: somebody else has these effects by now.
    pub held: usize,
    /// Whether other effects of their keys have waited for them.
    pub has_next: bool,
}

/// A try to deliver an effect. One whose replica died before it could note it leaves no trace but its number.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Try {
    /// Its number, from 1.
    #[serde(rename = "try")]
    pub number: i32,
    /// When it began.
    #[serde(with = "rfc3339")]
    pub at: Time,
    /// The status code of the answer; none where there was no answer.
    pub status_code: Option<u16>,
    /// What went wrong, for a person to read; none where it was delivered.
    pub error: Option<String>,
    /// How long it took, in milliseconds.
    pub milliseconds: u64,
}

/// An effect, and how its delivery goes.
#[derive(Debug, Clone, PartialEq)]
pub struct Parcel {
    /// Its name.
    pub id: String,
    /// Whose work it follows from.
    pub key: IdempotencyKey,
    /// What it is about.
    pub topic: String,
    /// JSON, as it is sent; empty in lists.
    pub payload: String,
    /// Where it stands.
    pub delivery: Delivery,
    /// When it was stored.
    pub created_at: Time,
    /// When it is tried next; none where it is settled, or under way.
    pub next_at: Option<Time>,
    /// When it was settled; none where it is pending.
    pub settled_at: Option<Time>,
    /// How many tries have begun.
    pub tries: u32,
    /// The tries that were noted, in order; empty in lists.
    pub log: Vec<Try>,
}

/// Which effects to list.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ParcelFilter {
    /// Only those that stand there.
    pub delivery: Option<Delivery>,
    /// Only those of this topic.
    pub topic: Option<String>,
    /// How many at most.
    pub limit: u32,
    /// Only those older than the one of this name.
    pub cursor: Option<String>,
}

/// A part of the list of effects.
#[derive(Debug, Clone, PartialEq)]
pub struct ParcelPage {
    /// The effects, newest first.
    pub parcels: Vec<Parcel>,
    /// Where the next part begins; none at the end.
    pub next: Option<String>,
}

impl ParcelPage {
    /// Puts a page together from what was found, in order and `limit + 1` at most.
    pub(super) fn of_rows(
        mut rows: Vec<OutboxHead>,
        limit: u32,
        now: Time,
    ) -> Result<Self, StoreError> {
        let has_more = rows.len() > limit as usize;
        rows.truncate(limit as usize);
        let next = rows.last().filter(|_| has_more).map(|row| row.id.clone());
        let parcels = rows.into_iter().map(|row| row.parcel(now));
        Ok(Self {
            parcels: parcels.collect::<Result<_, _>>()?,
            next,
        })
    }
}

/// What waits in the outbox, and what is dead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Undelivered {
    /// How many effects are pending; [`Self::BOUND`] also where there are more.
    pub waiting: usize,
    /// How long ago the oldest of these was due; zero where nothing waits that is due.
    pub oldest: TimeDelta,
    /// How many are dead; [`Self::BOUND`] also where there are more.
    pub dead: usize,
}

impl Undelivered {
    /// How many effects of each kind are looked at.
    pub const BOUND: u32 = 10_000;

    pub(super) fn of_row(row: &UndeliveredRow, now: Time) -> Self {
        let number = |number: i64| usize::try_from(number).unwrap_or_default();
        let age = row.oldest.map_or(TimeDelta::zero(), |at| now - at.0);
        Self {
            waiting: number(row.waiting),
            oldest: age.max(TimeDelta::zero()),
            dead: number(row.dead),
        }
    }
}

/// What waits, and what is dead.
#[derive(Debug, QueryableByName)]
pub(super) struct UndeliveredRow {
    #[diesel(sql_type = BigInt)]
    waiting: i64,
    /// When the oldest was due.
    #[diesel(sql_type = Nullable<Instant>)]
    oldest: Option<At>,
    #[diesel(sql_type = BigInt)]
    dead: i64,
}

/// A row of the outbox.
#[derive(Debug, Clone, Queryable, QueryableByName, Selectable, Insertable)]
#[diesel(table_name = run_outbox, treat_none_as_default_value = false)]
pub(super) struct OutboxRow {
    pub(super) idempotency_key: String,
    pub(super) seq: i32,
    pub(super) id: String,
    pub(super) topic: String,
    pub(super) payload: String,
    pub(super) status: String,
    pub(super) created_at: At,
    pub(super) due_at: At,
    pub(super) next_at: At,
    pub(super) is_leased: bool,
    pub(super) tries: i32,
    pub(super) failures: i32,
    pub(super) settled_at: Option<At>,
    pub(super) log: String,
}

/// A row of the outbox without its payload and its log: a page of them may be much larger than what it shows.
#[derive(Debug, Clone, Queryable, Selectable)]
#[diesel(table_name = run_outbox)]
pub(super) struct OutboxHead {
    idempotency_key: String,
    id: String,
    topic: String,
    status: String,
    created_at: At,
    next_at: At,
    is_leased: bool,
    tries: i32,
    settled_at: Option<At>,
}

impl OutboxHead {
    /// What the row says at `now`.
    fn parcel(self, now: Time) -> Result<Parcel, StoreError> {
        let delivery = Delivery::of_name(&self.status).ok_or_else(|| {
            let (id, status) = (&self.id, &self.status);
            StoreError::Unexpected(format!("run_outbox {id:?}: the unknown status {status:?}"))
        })?;
        let is_under_way = self.is_leased && self.next_at.0 > now;
        let is_waiting = delivery == Delivery::Pending && !is_under_way;
        Ok(Parcel {
            id: self.id,
            key: IdempotencyKey::from_store(self.idempotency_key),
            topic: self.topic,
            payload: String::new(),
            delivery,
            created_at: self.created_at.0,
            next_at: is_waiting.then_some(self.next_at.0),
            settled_at: self.settled_at.map(|at| at.0),
            tries: self.tries.cast_unsigned(),
            log: Vec::new(),
        })
    }
}

impl OutboxRow {
    /// The row of an effect that is stored just now, with this number among those of its key.
    pub(super) fn new(key: &IdempotencyKey, seq: i32, effect: &Effect, now: Time) -> Self {
        let due_at = At(effect.due.at(now));
        Self {
            idempotency_key: key.as_str().to_owned(),
            seq,
            id: effect.id.clone(),
            topic: effect.topic.clone(),
            payload: effect.payload.clone(),
            status: Delivery::Pending.name().to_owned(),
            created_at: At(now),
            due_at,
            next_at: due_at,
            is_leased: false,
            tries: 0,
            failures: 0,
            settled_at: None,
            log: String::new(),
        }
    }

    /// What somebody has to deliver who has leased it at `now`.
    pub(super) fn leased(self, now: Time) -> LeasedEffect {
        LeasedEffect {
            lease: LeaseId {
                key: IdempotencyKey::from_store(self.idempotency_key),
                seq: self.seq,
                id: self.id,
                tries: self.tries,
            },
            topic: self.topic,
            payload: self.payload,
            failures: self.failures.cast_unsigned(),
            due_at: self.due_at.0,
            leased_at: now,
        }
    }

    /// What the row says at `now`.
    pub(super) fn parcel(self, now: Time) -> Result<Parcel, StoreError> {
        let log = self.log.lines().map(serde_json::from_str);
        let log = log.collect::<Result<_, _>>().map_err(|error| {
            StoreError::Unexpected(format!("run_outbox {:?}: {error}", self.id))
        })?;
        let head = OutboxHead {
            idempotency_key: self.idempotency_key,
            id: self.id,
            topic: self.topic,
            status: self.status,
            created_at: self.created_at,
            next_at: self.next_at,
            is_leased: self.is_leased,
            tries: self.tries,
            settled_at: self.settled_at,
        };
        Ok(Parcel {
            payload: self.payload,
            log,
            ..head.parcel(now)?
        })
    }
}

impl Settled {
    /// What is added to the log.
    pub(super) fn line(&self) -> Result<String, StoreError> {
        serde_json::to_string(&self.attempt)
            .map(|line| line + "\n")
            .map_err(|error| StoreError::Unexpected(error.to_string()))
    }
}
