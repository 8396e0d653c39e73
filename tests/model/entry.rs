//! The model's store: a key's rows, as small as the rules allow.
//!
//! [`Entry::load`] gives the rules what the service's store gives them, [`Entry::save`] keeps what they
//! say. Kept is what the rules read, and nothing else: no counters, no times of day, no texts. A point in
//! time is kept as what the rules make of it: is it past? The tests in `abridged.rs` show
//! that nothing is missing.

use std::sync::LazyLock;

use chrono::TimeDelta;
use dedup_gate::domain::Time;
use dedup_gate::domain::ledger::{
    Event, Happening, Holder, KeyState, Phase, RefusalKind, ReviewDecision, seconds,
};
use dedup_gate::domain::text::IdempotencyKey;

/// A caller: one execution of a workflow, or a person.
pub(crate) type Caller = u8;

/// A key's attempt.
pub(crate) type Attempt = u8;

/// How long a lease, a dedupe window and the replay window are, in seconds. Any length does: each
/// of them runs out whenever it likes.
pub(crate) const LEASE: u32 = 900;
pub(crate) const WINDOW: u32 = 86_400;
pub(crate) const REPLAY_WINDOW: TimeDelta = TimeDelta::minutes(30);

/// It is always now; instead of the clock going on, what lies ahead comes to pass.
pub(crate) const NOW: Time = Time::UNIX_EPOCH;

/// The text of every key: keys have nothing to do with each other, so each may have the same.
pub(crate) static KEY: LazyLock<IdempotencyKey> =
    LazyLock::new(|| IdempotencyKey::from_store("order".to_owned()));

/// Who reviews and resets, and what they go by.
pub(crate) const REVIEWER: &str = "reviewer";
pub(crate) const REASON: &str = "reason";

/// A key's rows.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Entry {
    /// The attempt that is current.
    pub(crate) attempt: Attempt,
    /// Who claimed it.
    pub(crate) holder: Option<Caller>,
    /// Whether it is within the replay window.
    pub(crate) is_recognised: bool,
    /// Where its work stands.
    pub(crate) standing: Standing,
    /// Its dedupe window.
    pub(crate) window: Window,
    /// Whether there is a conflict.
    pub(crate) conflict: bool,
    /// Whether the ledger has a row.
    pub(crate) in_ledger: bool,
    /// What happened.
    pub(crate) history: Vec<Mark>,
}

/// [`Phase`], abridged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Standing {
    /// Claimed at the gate alone.
    Claimed,
    /// Under way.
    Pending {
        /// Whether its lease has run out.
        is_stale: bool,
    },
    /// Its effect happened; the provider's id is the caller's.
    Done { id: Option<Caller> },
    /// Its effect did not happen.
    Failed { retry: bool },
    /// A person has set the key free.
    Reset,
}

/// A dedupe window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Window {
    /// For ever.
    Endless,
    /// Not passed yet.
    Open,
    /// Passed.
    Passed,
}

/// [`Event`], abridged: those that the rules read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Mark {
    /// To which attempt.
    pub(crate) attempt: Attempt,
    /// What.
    pub(crate) what: What,
}

/// [`Happening`], abridged. Whose a report was is read of conflicts only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum What {
    Claimed {
        holder: Option<Caller>,
    },
    Done {
        id: Option<Caller>,
    },
    Failed,
    Conflict {
        /// Where it was refused for the attempt that it named, or did not name.
        vague: Option<Vague>,
        holder: Option<Caller>,
        id: Option<Caller>,
    },
    Reviewed(Judgement),
    Reset,
}

/// [`RefusalKind`], abridged to what says nothing of the attempt it is filed under.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Vague {
    Ahead,
    Required,
}

impl Vague {
    fn of(refused: RefusalKind) -> Option<Self> {
        match refused {
            RefusalKind::AttemptAhead => Some(Self::Ahead),
            RefusalKind::AttemptRequired => Some(Self::Required),
            _ => None,
        }
    }

    fn load(vague: Option<Self>) -> RefusalKind {
        match vague {
            Some(Self::Ahead) => RefusalKind::AttemptAhead,
            Some(Self::Required) => RefusalKind::AttemptRequired,
            None => RefusalKind::Conflict,
        }
    }
}

/// [`ReviewDecision`], abridged. A person knows no id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Judgement {
    Done,
    Release,
    Fail,
}

impl From<Judgement> for ReviewDecision {
    fn from(judgement: Judgement) -> Self {
        match judgement {
            Judgement::Done => Self::Done { external_id: None },
            Judgement::Release => Self::Release,
            Judgement::Fail => Self::Fail,
        }
    }
}

impl Judgement {
    fn of(decision: &ReviewDecision) -> Self {
        match decision {
            ReviewDecision::Done { .. } => Self::Done,
            ReviewDecision::Release => Self::Release,
            ReviewDecision::Fail => Self::Fail,
        }
    }
}

/// The claimant of this caller.
pub(crate) fn holder(caller: Caller) -> Holder {
    Holder {
        claimant: text(caller),
        api_key: None,
    }
}

/// The text by which a caller, or its effect, is known.
pub(crate) fn text(caller: Caller) -> String {
    char::from(b'a' + caller).to_string()
}

fn caller(text: &str) -> Caller {
    text.as_bytes()[0] - b'a'
}

fn caller_of(holder: Option<&Holder>) -> Option<Caller> {
    holder.map(|holder| caller(&holder.claimant))
}

fn id_of(text: Option<&String>) -> Option<Caller> {
    text.map(|id| caller(id))
}

impl Entry {
    /// What the rules are given.
    pub(crate) fn load(&self) -> (KeyState, Vec<Event>) {
        let state = KeyState {
            order_id: KEY.as_str().to_owned(),
            attempt: self.attempt.into(),
            holder: self.holder.map(holder),
            processed_at: NOW,
            recognised_from: if self.is_recognised {
                NOW
            } else {
                NOW - REPLAY_WINDOW
            },
            payload_sha256: None,
            ttl_seconds: (self.window != Window::Endless).then_some(WINDOW),
            expires_at: match self.window {
                Window::Endless => None,
                Window::Open => Some(NOW + seconds(WINDOW)),
                Window::Passed => Some(NOW),
            },
            seen_again: 0,
            last_seen_at: None,
            updated_at: NOW,
            phase: match self.standing {
                Standing::Claimed => Phase::Claimed,
                Standing::Pending { is_stale } => Phase::Pending {
                    lease_expires_at: if is_stale { NOW } else { NOW + seconds(LEASE) },
                },
                Standing::Done { id } => Phase::Done {
                    external_id: id.map(text),
                    result: None,
                },
                Standing::Failed { retry } => Phase::Failed {
                    reason: None,
                    retry,
                },
                Standing::Reset => Phase::Reset {
                    reason: REASON.to_owned(),
                },
            },
            conflict: self.conflict,
            in_ledger: self.in_ledger,
        };
        (state, self.history.iter().map(Mark::load).collect())
    }

    /// What is kept at `now` of a state, and of what was added to the `history`.
    pub(crate) fn save(
        state: &KeyState,
        mut history: Vec<Mark>,
        added: &[Event],
        now: Time,
    ) -> Self {
        for mark in added.iter().filter_map(Mark::of) {
            // Claimed and then opened: to the rules, that is one claim.
            if history.last() != Some(&mark) {
                history.push(mark);
            }
        }
        Self {
            attempt: attempt(state.attempt),
            holder: caller_of(state.holder.as_ref()),
            is_recognised: now - state.recognised_from < REPLAY_WINDOW,
            standing: match &state.phase {
                Phase::Claimed => Standing::Claimed,
                Phase::Pending { lease_expires_at } => Standing::Pending {
                    is_stale: *lease_expires_at <= now,
                },
                Phase::Done { external_id, .. } => Standing::Done {
                    id: id_of(external_id.as_ref()),
                },
                Phase::Failed { retry, .. } => Standing::Failed { retry: *retry },
                Phase::Reset { .. } => Standing::Reset,
            },
            window: match state.expires_at {
                None => Window::Endless,
                Some(end) if end <= now => Window::Passed,
                Some(_) => Window::Open,
            },
            conflict: state.conflict,
            in_ledger: state.in_ledger,
            history,
        }
    }
}

/// An attempt, as the model counts them.
pub(crate) fn attempt(number: u32) -> Attempt {
    Attempt::try_from(number).expect("a model has a few attempts")
}

impl Mark {
    fn load(&self) -> Event {
        let by = match self.what {
            What::Claimed { holder } | What::Conflict { holder, .. } => holder,
            _ => None,
        };
        Event {
            at: NOW,
            attempt: self.attempt.into(),
            holder: by.map(holder),
            happening: match self.what {
                What::Claimed { .. } => Happening::Claimed { after: None },
                What::Done { id } => Happening::Done {
                    external_id: id.map(text),
                },
                What::Failed => Happening::Failed {
                    reason: None,
                    retry: true,
                },
                What::Conflict { vague, id, .. } => Happening::Conflict {
                    refused: Vague::load(vague),
                    external_id: id.map(text),
                    result: None,
                },
                What::Reviewed(judgement) => Happening::Reviewed {
                    decision: judgement.into(),
                    reviewer: REVIEWER.to_owned(),
                    reason: REASON.to_owned(),
                },
                What::Reset => Happening::Reset {
                    reviewer: REVIEWER.to_owned(),
                    reason: REASON.to_owned(),
                },
            },
        }
    }

    /// None of what the rules do not read.
    fn of(event: &Event) -> Option<Self> {
        let holder = caller_of(event.holder.as_ref());
        let what = match &event.happening {
            Happening::Claimed { .. } | Happening::Pending { .. } => What::Claimed { holder },
            Happening::Renewed { .. } => return None,
            Happening::Done { external_id } => What::Done {
                id: id_of(external_id.as_ref()),
            },
            Happening::Failed { .. } => What::Failed,
            Happening::Effects { .. } => unreachable!("no report of the model has effects"),
            Happening::Conflict {
                refused,
                external_id,
                ..
            } => What::Conflict {
                vague: Vague::of(*refused),
                holder,
                id: id_of(external_id.as_ref()),
            },
            Happening::Reviewed { decision, .. } => What::Reviewed(Judgement::of(decision)),
            Happening::Reset { .. } => What::Reset,
        };
        Some(Self {
            attempt: attempt(event.attempt),
            what,
        })
    }
}
