//! What is known of a key, and what a report of its work changes.

use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::effect::Effect;
#[cfg(feature = "planted-faults")]
use super::planted;
use super::text::IdempotencyKey;
use super::{Time, rfc3339};

/// Who asks: a claimant's text belongs to the name of the API key that sent it, so that two
/// n8n instances with a key each are two claimants even where their execution ids coincide.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// The claimant, as sent.
    pub claimant: String,
    /// The name of the API key; none where no keys are configured.
    pub api_key: Option<String>,
}

/// The state of a key's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Claimed at the gate alone.
    Claimed,
    /// Under way; its lease is alive.
    Pending,
    /// Under way as far as anybody knows; its lease has run out.
    Stale,
    /// Its effect happened.
    Done,
    /// Its effect did not happen, or a person has set the key free.
    Failed,
}

/// Where the work of an attempt stands. Whether a pending one is stale is a question of the time.
#[derive(Debug, Clone, PartialEq)]
pub enum Phase {
    /// Claimed at the gate alone.
    Claimed,
    /// Under way.
    Pending {
        /// Until when it is believed to be alive.
        lease_expires_at: Time,
    },
    /// Its effect happened.
    Done {
        /// The provider's id.
        external_id: Option<String>,
        /// What the caller wants repeated to whoever asks again.
        result: Option<Value>,
    },
    /// Its effect did not happen.
    Failed {
        /// Why.
        reason: Option<String>,
        /// Whether the key may be claimed again.
        retry: bool,
    },
    /// A person has set the key free, and ended its attempt: whatever it reports comes too late.
    Reset {
        /// Why.
        reason: String,
    },
}

/// All that is known of a key.
#[derive(Debug, Clone, PartialEq)]
pub struct KeyState {
    /// The order's name.
    pub order_id: String,
    /// 1 for the first claim, +1 each time the key is claimed anew: the fencing token.
    pub attempt: u32,
    /// Who claimed the attempt, where they said so.
    pub holder: Option<Holder>,
    /// When the attempt was claimed.
    pub processed_at: Time,
    /// From when on the holder is recognised when it asks again: the claim, or its opening.
    pub recognised_from: Time,
    /// SHA-256 of the canonical form of what the key was first claimed with.
    pub payload_sha256: Option<Vec<u8>>,
    /// The dedupe window in seconds; none: for ever.
    pub ttl_seconds: Option<u32>,
    /// When the window passes.
    pub expires_at: Option<Time>,
    /// How many duplicates were turned away.
    pub seen_again: u64,
    /// When the last of them was.
    pub last_seen_at: Option<Time>,
    /// When anything but the two members above last changed.
    pub updated_at: Time,
    /// Where the work stands.
    pub phase: Phase,
    /// Whether a report was refused that says an effect happened which nobody expected.
    pub conflict: bool,
    /// Whether the ledger has a row of the key; it is then the truth, and the gate's row only
    /// says that there is a key.
    pub in_ledger: bool,
}

impl KeyState {
    /// The state of the key's work at `now`.
    pub fn status(&self, now: Time) -> Status {
        match self.phase {
            Phase::Claimed => Status::Claimed,
            Phase::Pending { lease_expires_at } if lease_expires_at <= now => Status::Stale,
            Phase::Pending { .. } => Status::Pending,
            Phase::Done { .. } => Status::Done,
            Phase::Failed { .. } | Phase::Reset { .. } => Status::Failed,
        }
    }

    /// An answer that changes nothing.
    pub(super) fn answer(&self, answer: Result<bool, Refusal>) -> Settlement {
        Settlement {
            state: self.clone(),
            events: Vec::new(),
            effects: Vec::new(),
            answer,
        }
    }

    /// Until when the work is believed to be alive; none where it is not under way.
    pub fn lease_expires_at(&self) -> Option<Time> {
        match self.phase {
            Phase::Pending { lease_expires_at } => Some(lease_expires_at),
            _ => None,
        }
    }

    /// The provider's id and the result, where the effect happened.
    pub fn effect(&self) -> (Option<&String>, Option<&Value>) {
        match &self.phase {
            Phase::Done {
                external_id,
                result,
            } => (external_id.as_ref(), result.as_ref()),
            _ => (None, None),
        }
    }

    /// Whether the dedupe window has passed at `now`. A pending key never runs out.
    pub fn window_passed(&self, now: Time) -> bool {
        !matches!(self.phase, Phase::Pending { .. })
            && self.expires_at.is_some_and(|end| end <= now)
    }

    /// Whether nothing can be wanted of the key any more that has not changed for so long: it is settled,
    /// or claimed at the gate alone, holds no conflict, and its window has passed, where it has one.
    pub fn is_over(&self, now: Time, kept: TimeDelta) -> bool {
        !matches!(self.phase, Phase::Pending { .. })
            && !self.conflict
            && self.updated_at <= now - kept
            && self.expires_at.is_none_or(|end| end <= now)
    }

    /// Starts the dedupe window at `now`.
    pub fn start_window(&mut self, now: Time) {
        self.expires_at = self.ttl_seconds.map(|ttl| now + seconds(ttl));
    }

    /// What the history of a key starts with that was claimed at the gate alone, where no
    /// history is written.
    pub fn gate_event(&self) -> Event {
        Event {
            at: self.processed_at,
            attempt: self.attempt,
            holder: self.holder.clone(),
            happening: Happening::Claimed { after: None },
        }
    }
}

/// `count` seconds.
pub fn seconds(count: u32) -> TimeDelta {
    TimeDelta::seconds(count.into())
}

/// Something that happened to a key's work. History is only ever added to.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// When.
    pub at: Time,
    /// To which attempt.
    pub attempt: u32,
    /// Who said so, where they did.
    pub holder: Option<Holder>,
    /// What.
    pub happening: Happening,
}

impl Event {
    /// Whether an attempt began here.
    fn is_claim(&self) -> bool {
        matches!(
            self.happening,
            Happening::Claimed { .. } | Happening::Pending { .. }
        )
    }
}

/// Why a key could be claimed anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum After {
    /// The lease had run out and the claimant took over.
    Stale,
    /// The attempt before had failed.
    Failed,
    /// The dedupe window had passed.
    Window,
    /// A person had set the key free.
    Reset,
}

/// What can happen to a key's work. Written as `event` and `detail`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", content = "detail", rename_all = "snake_case")]
pub enum Happening {
    /// Claimed at the gate alone.
    Claimed {
        /// What made a claim after the first one possible.
        after: Option<After>,
    },
    /// Claimed or opened with a ledger entry.
    Pending {
        /// Until when it is believed to be alive.
        #[serde(with = "rfc3339")]
        lease_expires_at: Time,
        /// What made a claim after the first one possible.
        after: Option<After>,
    },
    /// The lease had run out, and its holder asked again.
    Renewed {
        /// Until when it is believed to be alive now.
        #[serde(with = "rfc3339")]
        lease_expires_at: Time,
    },
    /// The effect happened; or its id became known.
    Done {
        /// The provider's id.
        external_id: Option<String>,
    },
    /// The effect did not happen.
    Failed {
        /// Why.
        reason: Option<String>,
        /// Whether the key may be claimed again.
        retry: bool,
    },
    /// A report was refused that says an effect happened.
    Conflict {
        /// Why it was refused.
        refused: RefusalKind,
        /// The provider's id in the report.
        external_id: Option<String>,
        /// The result in the report.
        result: Option<Value>,
    },
    /// Effects were stored together with an outcome.
    Effects {
        /// With which.
        outcome: OutcomeKind,
        /// Their ids, in order.
        ids: Vec<String>,
    },
    /// A person has decided what became of the work; the outcome follows.
    Reviewed {
        /// What.
        #[serde(flatten)]
        decision: ReviewDecision,
        /// Who.
        reviewer: String,
        /// What they go by.
        reason: String,
    },
    /// A person has set the key free.
    Reset {
        /// Who.
        reviewer: String,
        /// What they go by.
        reason: String,
    },
}

/// What a person says became of the work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "decision", rename_all = "snake_case")]
pub enum ReviewDecision {
    /// The effect happened.
    Done {
        /// The provider's id.
        external_id: Option<String>,
    },
    /// It did not, and the key may be claimed again.
    Release,
    /// It did not, and never shall.
    Fail,
}

impl ReviewDecision {
    /// The provider's id, where the effect happened.
    pub fn external_id(&self) -> Option<&String> {
        match self {
            Self::Done { external_id } => external_id.as_ref(),
            Self::Release | Self::Fail => None,
        }
    }
}

/// What somebody says became of the work.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// Whose work.
    pub key: IdempotencyKey,
    /// Which attempt; none: the current one.
    pub attempt: Option<u32>,
    /// Who reports, where they say so.
    pub holder: Option<Holder>,
    /// What became of it.
    pub outcome: Outcome,
    /// What must happen now, in order.
    pub effects: Vec<Effect>,
}

/// How the work of an attempt ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// The effect happened.
    Done {
        /// The provider's id.
        external_id: Option<String>,
        /// What to repeat to whoever asks again.
        result: Option<Value>,
    },
    /// The effect did not happen.
    Failed {
        /// Why.
        reason: Option<String>,
        /// Whether the key may be claimed again.
        retry: bool,
    },
}

impl Outcome {
    /// The outcome without its particulars.
    pub fn kind(&self) -> OutcomeKind {
        match self {
            Self::Done { .. } => OutcomeKind::Done,
            Self::Failed { .. } => OutcomeKind::Failed,
        }
    }
}

/// [`Outcome`] without its particulars, as the history keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutcomeKind {
    /// The effect of the work happened.
    Done,
    /// It did not.
    Failed,
}

/// Why a report is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// The attempt named has not begun.
    AttemptAhead {
        /// The attempt that is current.
        current: u32,
    },
    /// Several attempts have begun, and the report says neither which it means nor who reports.
    AttemptRequired {
        /// The attempt that is current.
        current: u32,
    },
    /// A later attempt has begun.
    Superseded {
        /// The attempt that is current.
        current: u32,
    },
    /// The attempt was ended by a reset.
    Ended,
    /// Somebody else holds the attempt.
    NotHolder,
    /// The effect has been reported already, and differently.
    AlreadyDone {
        /// The id that was reported first.
        external_id: Option<String>,
        /// The id in this report.
        reported_external_id: Option<String>,
    },
    /// The state of the work does not allow it; why, and what to do instead.
    Unfit(&'static str),
}

/// [`Refusal`] without its particulars, as the history keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "each is the refusal of its name")]
pub enum RefusalKind {
    AttemptAhead,
    AttemptRequired,
    Superseded,
    NotHolder,
    AlreadyDone,
    Conflict,
}

impl Refusal {
    /// The refusal without its particulars.
    pub fn kind(&self) -> RefusalKind {
        match self {
            Self::AttemptAhead { .. } => RefusalKind::AttemptAhead,
            Self::AttemptRequired { .. } => RefusalKind::AttemptRequired,
            Self::Superseded { .. } | Self::Ended => RefusalKind::Superseded,
            Self::NotHolder => RefusalKind::NotHolder,
            Self::AlreadyDone { .. } => RefusalKind::AlreadyDone,
            Self::Unfit(_) => RefusalKind::Conflict,
        }
    }
}

/// What a report, or another act, does to a key.
#[derive(Debug, Clone, PartialEq)]
pub struct Settlement {
    /// The state after it.
    pub state: KeyState,
    /// What to add to the history.
    pub events: Vec<Event>,
    /// What to add to the outbox.
    pub effects: Vec<Effect>,
    /// Whether it changed anything, or why it was refused. A refused report of an effect is
    /// written down all the same, as a conflict.
    pub answer: Result<bool, Refusal>,
}

impl Settlement {
    /// Whether there is anything to write.
    pub fn is_change(&self) -> bool {
        self.answer == Ok(true) || !self.events.is_empty()
    }
}

/// Judges a report, and stores its effects where it is accepted.
///
/// Once for each attempt and outcome: a repeat, whatever it was changed by on its way, has had its effects
/// already. One that brings the first of them to an outcome that is known without any (a review may have
/// said so before) is accepted for their sake.
pub fn settle(state: &KeyState, history: &[Event], report: &Report, now: Time) -> Settlement {
    let settlement = judge(state, history, report, now);
    if report.effects.is_empty() || settlement.answer.is_err() {
        return settlement;
    }
    let meant = meant_attempt(state, history, report);
    let attempt = meant.unwrap_or(state.attempt);
    let kind = report.outcome.kind();
    let has_effects = history.iter().any(|event| {
        event.attempt == attempt
            && matches!(event.happening, Happening::Effects { outcome, .. } if outcome == kind)
    });
    #[cfg(feature = "planted-faults")]
    let has_effects = has_effects && !planted::is(planted::Fault::EffectsStoredAgain);
    if has_effects {
        return settlement;
    }
    let happening = Happening::Effects {
        outcome: kind,
        ids: report
            .effects
            .iter()
            .map(|effect| effect.id.clone())
            .collect(),
    };
    let mut events = settlement.events;
    let holder = match events.last() {
        Some(outcome) => outcome.holder.clone(),
        None => report.holder.clone(),
    };
    events.push(Event {
        at: now,
        attempt,
        holder,
        happening,
    });
    Settlement {
        state: KeyState {
            updated_at: now,
            ..settlement.state
        },
        events,
        effects: report.effects.clone(),
        answer: Ok(true),
    }
}

/// Judges a report, in the order of the contract's rules.
fn judge(state: &KeyState, history: &[Event], report: &Report, now: Time) -> Settlement {
    let unchanged = |answer| state.answer(answer);
    if holds(state, history, report) {
        return unchanged(Ok(false));
    }
    let meant = meant_attempt(state, history, report);
    let attempt = meant.unwrap_or(state.attempt);
    let event = |happening| Event {
        at: now,
        attempt,
        holder: report.holder.clone().or_else(|| {
            // Who names the current attempt, or the only one that there is, speaks for its holder.
            let is_named = report.attempt.is_some() || state.attempt == 1;
            state
                .holder
                .clone()
                .filter(|_| is_named && attempt == state.attempt)
        }),
        happening,
    };
    let with_entry = |state: KeyState, event: Event, answer| {
        let mut events = Vec::new();
        if !state.in_ledger {
            events.push(state.gate_event());
        }
        events.push(event);
        Settlement {
            state: KeyState {
                in_ledger: true,
                updated_at: now,
                ..state
            },
            events,
            effects: Vec::new(),
            answer,
        }
    };

    if let Outcome::Done {
        external_id: Some(id),
        ..
    } = &report.outcome
        && meant.is_some_and(|attempt| lacks_external_id(history, attempt))
    {
        let mut next = state.clone();
        if let Phase::Done { external_id, .. } = &mut next.phase
            && external_id.is_none()
            && nameless_attempt(history) == meant
        {
            *external_id = Some(id.clone());
        }
        let filled_in = event(Happening::Done {
            external_id: Some(id.clone()),
        });
        return with_entry(next, filled_in, Ok(true));
    }

    match refusal(state, report) {
        Some(refusal) => {
            let Outcome::Done {
                external_id,
                result,
            } = &report.outcome
            else {
                return unchanged(Err(refusal));
            };
            let happening = Happening::Conflict {
                refused: refusal.kind(),
                external_id: external_id.clone(),
                result: result.clone(),
            };
            if is_known_conflict(history, attempt, report, &refusal, external_id.as_ref()) {
                return unchanged(Err(refusal));
            }
            let next = KeyState {
                conflict: true,
                ..state.clone()
            };
            with_entry(next, event(happening), Err(refusal))
        }
        None => {
            let (phase, happening) = match report.outcome.clone() {
                Outcome::Done {
                    external_id,
                    result,
                } => (
                    Phase::Done {
                        external_id: external_id.clone(),
                        result,
                    },
                    Happening::Done { external_id },
                ),
                Outcome::Failed { reason, retry } => (
                    Phase::Failed {
                        reason: reason.clone(),
                        retry,
                    },
                    Happening::Failed { reason, retry },
                ),
            };
            let mut next = KeyState {
                phase,
                ..state.clone()
            };
            next.start_window(now);
            with_entry(next, event(happening), Ok(true))
        }
    }
}

/// Which attempt a report means: the one it names; else the last one of its claimant, so that a
/// delayed repeat is known for what it is; else the current one. None where the claimant is not
/// the holder and never was.
fn meant_attempt(state: &KeyState, history: &[Event], report: &Report) -> Option<u32> {
    let is_holder = |holder: &Holder| state.holder.as_ref().is_none_or(|own| own == holder);
    match (&report.holder, report.attempt) {
        (_, Some(attempt)) => Some(attempt),
        (Some(holder), None) if !is_holder(holder) => history
            .iter()
            .rfind(|event| event.is_claim() && event.holder.as_ref() == Some(holder))
            .map(|event| event.attempt),
        (_, None) => Some(state.attempt),
    }
}

/// Rule 2: whether the entry or its history already holds what the report says.
fn holds(state: &KeyState, history: &[Event], report: &Report) -> bool {
    let is_current = report
        .attempt
        .is_none_or(|attempt| attempt == state.attempt);
    let meant = meant_attempt(state, history, report);
    let is_in_history = |says_the_same: &dyn Fn(&Happening) -> bool| {
        history
            .iter()
            .any(|event| Some(event.attempt) == meant && says_the_same(&event.happening))
    };
    match &report.outcome {
        Outcome::Done {
            external_id: reported,
            ..
        } => {
            let same = |known: &Option<String>| reported.is_none() || reported == known;
            (is_current
                && matches!(&state.phase, Phase::Done { external_id, .. } if same(external_id)))
                || is_in_history(
                    &|happening| matches!(happening, Happening::Done { external_id } if same(external_id)),
                )
        }
        Outcome::Failed { .. } => {
            (is_current && matches!(state.phase, Phase::Failed { .. }))
                || is_in_history(&|happening| matches!(happening, Happening::Failed { .. }))
        }
    }
}

/// Whether the attempt is done, and nobody has named its id yet.
fn lacks_external_id(history: &[Event], attempt: u32) -> bool {
    let mut ids = history
        .iter()
        .filter(|event| event.attempt == attempt)
        .filter_map(|event| match &event.happening {
            Happening::Done { external_id } => Some(external_id),
            _ => None,
        })
        .peekable();
    ids.peek().is_some() && ids.all(Option::is_none)
}

/// Which attempt's effect the entry holds, where it is done and has no id. Since a late report may
/// have made it so, this need not be the current one; but it is the last of which somebody said so,
/// whatever a review has decided before, and whatever ids were filled in.
fn nameless_attempt(history: &[Event]) -> Option<u32> {
    history
        .iter()
        .rfind(|event| matches!(event.happening, Happening::Done { external_id: None }))
        .map(|event| event.attempt)
}

/// Rules 3 to 6.
fn refusal(state: &KeyState, report: &Report) -> Option<Refusal> {
    let current = state.attempt;
    let is_done = matches!(report.outcome, Outcome::Done { .. });
    if report.attempt.is_some_and(|attempt| attempt > current) {
        return Some(Refusal::AttemptAhead { current });
    }
    if report.attempt.is_none() && report.holder.is_none() && current > 1 {
        return Some(Refusal::AttemptRequired { current });
    }
    if is_done && matches!(state.phase, Phase::Failed { .. }) {
        return None;
    }
    let is_superseded = report.attempt.is_some_and(|attempt| attempt < current);
    #[cfg(feature = "planted-faults")]
    let is_superseded = is_superseded && !planted::is(planted::Fault::AttemptNotCompared);
    if is_superseded {
        return Some(Refusal::Superseded { current });
    }
    if matches!(state.phase, Phase::Reset { .. }) {
        return Some(Refusal::Ended);
    }
    if report.holder.is_some() && state.holder.is_some() && report.holder != state.holder {
        return Some(Refusal::NotHolder);
    }
    if let Phase::Done { external_id, .. } = &state.phase {
        let reported_external_id = match &report.outcome {
            Outcome::Done { external_id, .. } => external_id.clone(),
            Outcome::Failed { .. } => None,
        };
        return Some(Refusal::AlreadyDone {
            external_id: external_id.clone(),
            reported_external_id,
        });
    }
    None
}

/// Whether the same refused report stands in the history: a repeat of it is no news, and must
/// not bring back a conflict that somebody has reviewed.
fn is_known_conflict(
    history: &[Event],
    attempt: u32,
    report: &Report,
    refusal: &Refusal,
    reported: Option<&String>,
) -> bool {
    let is_vague = |kind| {
        matches!(
            kind,
            RefusalKind::AttemptAhead | RefusalKind::AttemptRequired
        )
    };
    history.iter().any(|event| {
        let Happening::Conflict {
            refused,
            external_id,
            ..
        } = &event.happening
        else {
            return false;
        };
        event.attempt == attempt
            // What was refused for its attempt says nothing of what that attempt itself reports later.
            && (*refused == refusal.kind() || !is_vague(*refused))
            && (report.holder.is_none() || event.holder == report.holder)
            && external_id.as_ref() == reported
    })
}

#[cfg(test)]
mod tests;
