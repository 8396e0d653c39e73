//! What can be said of a key that is claimed: a report of its run, a renewal of its lease, or what
//! a person decides where no run can.

use super::Time;
use super::ledger::{
    Event, Happening, Holder, KeyState, Phase, Refusal, Report, ReviewDecision, Settlement,
    seconds, settle,
};
use super::text::IdempotencyKey;

/// One of them.
#[derive(Debug, Clone, PartialEq)]
pub enum Act {
    /// What became of the work.
    Report(Report),
    /// The work takes longer.
    Renewal(Renewal),
    /// A person decides what became of the work.
    Review(Review),
    /// A person wants the work repeated.
    Reset(Reset),
}

/// The holder of a pending attempt is alive, and needs more time.
#[derive(Debug, Clone, PartialEq)]
pub struct Renewal {
    /// Whose work.
    pub key: IdempotencyKey,
    /// Which attempt. Who names it is taken for its holder, unless the claimant says otherwise.
    pub attempt: Option<u32>,
    /// Who asks, where they say so.
    pub holder: Option<Holder>,
    /// How long the work is believed to be alive from now on, in seconds.
    pub lease_seconds: u32,
}

/// A person has looked at what hangs, or at a conflict.
#[derive(Debug, Clone, PartialEq)]
pub struct Review {
    /// Whose work.
    pub key: IdempotencyKey,
    /// Which attempt they have seen.
    pub attempt: u32,
    /// What they say became of it.
    pub decision: ReviewDecision,
    /// Who they are.
    pub reviewer: String,
    /// What they go by.
    pub reason: String,
}

/// A person wants work repeated that is over.
#[derive(Debug, Clone, PartialEq)]
pub struct Reset {
    /// Whose work.
    pub key: IdempotencyKey,
    /// Which attempt they have seen.
    pub attempt: u32,
    /// Who they are.
    pub reviewer: String,
    /// What they go by.
    pub reason: String,
}

impl Act {
    /// Whose work.
    pub fn key(&self) -> &IdempotencyKey {
        match self {
            Self::Report(Report { key, .. })
            | Self::Renewal(Renewal { key, .. })
            | Self::Review(Review { key, .. })
            | Self::Reset(Reset { key, .. }) => key,
        }
    }
}

/// What an act does to a key in `state`, with this history.
pub fn act(state: &KeyState, history: &[Event], act: &Act, now: Time) -> Settlement {
    match act {
        Act::Report(report) => settle(state, history, report, now),
        Act::Renewal(renewal) => renew(state, renewal, now),
        Act::Review(wanted) => review(state, history, wanted, now),
        Act::Reset(wanted) => reset(state, history, wanted, now),
    }
}

/// Only the holder renews, and a lease is never shortened. A renewal in time leaves no trace in the
/// history, which would grow for as long as the work takes; one of a lease that had run out, and
/// that was listed as stale, does.
fn renew(state: &KeyState, renewal: &Renewal, now: Time) -> Settlement {
    let refused = |refusal| state.answer(Err(refusal));
    if let Some(refusal) = wrong_attempt(state, renewal.attempt) {
        return refused(refusal);
    }
    let is_holder = match (&renewal.holder, &state.holder) {
        (Some(holder), Some(own)) => holder == own,
        // The attempt speaks for a holder that is not known, or does not say who it is.
        _ => renewal.attempt.is_some(),
    };
    if !is_holder {
        return refused(Refusal::NotHolder);
    }
    let lease_expires_at = match &state.phase {
        Phase::Pending { lease_expires_at } => *lease_expires_at,
        Phase::Done { external_id, .. } => {
            return refused(Refusal::AlreadyDone {
                external_id: external_id.clone(),
                reported_external_id: None,
            });
        }
        Phase::Reset { .. } => return refused(Refusal::Ended),
        Phase::Failed { .. } => {
            return refused(Refusal::Unfit("the attempt has failed: claim the key anew"));
        }
        Phase::Claimed => {
            return refused(Refusal::Unfit(
                "the key is claimed at the gate alone, and has no lease: open it with /ledger/pending",
            ));
        }
    };
    let renewed = now + seconds(renewal.lease_seconds);
    if renewed <= lease_expires_at {
        return state.answer(Ok(false));
    }
    let happening = Happening::Renewed {
        lease_expires_at: renewed,
    };
    Settlement {
        state: KeyState {
            phase: Phase::Pending {
                lease_expires_at: renewed,
            },
            updated_at: now,
            ..state.clone()
        },
        events: if lease_expires_at <= now {
            vec![event(state, state.holder.clone(), happening, now)]
        } else {
            Vec::new()
        },
        effects: Vec::new(),
        answer: Ok(true),
    }
}

/// A review stands in the history, and behind it the outcome that it decides on.
fn review(state: &KeyState, history: &[Event], review: &Review, now: Time) -> Settlement {
    let reviewed = Happening::Reviewed {
        decision: review.decision.clone(),
        reviewer: review.reviewer.clone(),
        reason: review.reason.clone(),
    };
    // A repeat, however late: it must not clear a conflict that nobody has seen yet.
    if is_in_history(history, review.attempt, &reviewed) {
        return state.answer(Ok(false));
    }
    if let Some(refusal) = wrong_attempt(state, Some(review.attempt)) {
        return state.answer(Err(refusal));
    }
    if !state.conflict && !matches!(state.phase, Phase::Pending { .. }) {
        return state.answer(Err(Refusal::Unfit(
            "there is nothing to review: the work is not under way, and there is no conflict",
        )));
    }
    let mut next = KeyState {
        conflict: false,
        updated_at: now,
        ..state.clone()
    };
    let mut events = vec![event(state, None, reviewed, now)];
    if let Some(outcome) = decided(state, review) {
        next.phase = match outcome.clone() {
            Happening::Failed { reason, retry } => Phase::Failed { reason, retry },
            _ => Phase::Done {
                external_id: review.decision.external_id().cloned(),
                result: None,
            },
        };
        next.start_window(now);
        events.push(event(state, None, outcome, now));
    }
    Settlement {
        state: next,
        events,
        effects: Vec::new(),
        answer: Ok(true),
    }
}

/// The outcome that a review decides on; none where that is what is known already.
fn decided(state: &KeyState, review: &Review) -> Option<Happening> {
    let failed = |retry| Happening::Failed {
        reason: Some(review.reason.clone()),
        retry,
    };
    match &review.decision {
        ReviewDecision::Release => Some(failed(true)),
        ReviewDecision::Fail => Some(failed(false)),
        ReviewDecision::Done { external_id } => {
            let is_known = matches!(&state.phase, Phase::Done { external_id: known, .. }
                if external_id.is_none() || external_id == known);
            (!is_known).then(|| Happening::Done {
                external_id: external_id.clone(),
            })
        }
    }
}

/// What is over is free again, and its attempt is ended.
fn reset(state: &KeyState, history: &[Event], reset: &Reset, now: Time) -> Settlement {
    let happening = Happening::Reset {
        reviewer: reset.reviewer.clone(),
        reason: reset.reason.clone(),
    };
    if is_in_history(history, reset.attempt, &happening) {
        return state.answer(Ok(false));
    }
    if let Some(refusal) = wrong_attempt(state, Some(reset.attempt)) {
        return state.answer(Err(refusal));
    }
    if matches!(state.phase, Phase::Pending { .. }) {
        return state.answer(Err(Refusal::Unfit(
            "the work is under way, or hangs: review it first",
        )));
    }
    if state.conflict {
        return state.answer(Err(Refusal::Unfit(
            "the entry holds a conflict, so another effect may have happened: review it first",
        )));
    }
    if matches!(state.phase, Phase::Reset { .. }) {
        return state.answer(Ok(false));
    }
    let gate_event = (!state.in_ledger).then(|| state.gate_event());
    Settlement {
        state: KeyState {
            phase: Phase::Reset {
                reason: reset.reason.clone(),
            },
            in_ledger: true,
            updated_at: now,
            ..state.clone()
        },
        events: gate_event
            .into_iter()
            .chain([event(state, None, happening, now)])
            .collect(),
        effects: Vec::new(),
        answer: Ok(true),
    }
}

fn wrong_attempt(state: &KeyState, attempt: Option<u32>) -> Option<Refusal> {
    let current = state.attempt;
    match attempt {
        Some(attempt) if attempt > current => Some(Refusal::AttemptAhead { current }),
        Some(attempt) if attempt < current => Some(Refusal::Superseded { current }),
        _ => None,
    }
}

fn is_in_history(history: &[Event], attempt: u32, happening: &Happening) -> bool {
    history
        .iter()
        .any(|event| event.attempt == attempt && event.happening == *happening)
}

fn event(state: &KeyState, holder: Option<Holder>, happening: Happening, now: Time) -> Event {
    Event {
        at: now,
        attempt: state.attempt,
        holder,
        happening,
    }
}

#[cfg(test)]
mod tests;
