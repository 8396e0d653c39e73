//! Who wins a key: the rules of the contract's table, in one place.

use std::borrow::Borrow;
use std::collections::BTreeMap;

use chrono::TimeDelta;
use serde_json::Value;

use super::Time;
use super::ledger::{After, Event, Happening, Holder, KeyState, Phase, Status, seconds};
#[cfg(feature = "planted-faults")]
use super::planted;
use super::text::IdempotencyKey;

/// How long a pending claim is believed to be alive where the caller does not say, in seconds.
pub const DEFAULT_LEASE_SECONDS: u32 = 900;

/// What to do with a pending key whose lease has run out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnStale {
    /// Leave it for review.
    #[default]
    Hold,
    /// Claim it anew.
    TakeOver,
}

/// Where a claim comes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Door {
    /// `POST /claim`.
    Gate,
    /// `POST /ledger/pending`, which opens the ledger entry of a key, claimed before or not.
    Ledger,
}

/// A wish to be the one who does the work.
#[derive(Debug, Clone, PartialEq)]
pub struct Claim {
    /// Whose work.
    pub key: IdempotencyKey,
    /// The order's name; absent: what the key has already, or the key itself.
    pub order_id: Option<String>,
    /// Who asks.
    pub holder: Option<Holder>,
    /// The dedupe window in seconds; none: for ever.
    pub ttl_seconds: Option<u32>,
    /// SHA-256 of the canonical payload.
    pub payload_sha256: Option<Vec<u8>>,
    /// The lease in seconds where the ledger entry is to be opened.
    pub pending: Option<u32>,
    /// What to do with a stale key.
    pub on_stale: OnStale,
    /// Where the claim comes in.
    pub door: Door,
}

/// The key was claimed with another payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyReused;

/// What a claim comes to.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// Whether the caller does the work.
    pub claimed: bool,
    /// Whether that had been said to the same caller before.
    pub replayed: bool,
    /// The state after it.
    pub state: KeyState,
    /// What is to be written.
    pub change: Change,
}

/// What a decision asks the store to write.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// Nothing.
    None,
    /// One more duplicate was turned away.
    Seen,
    /// The state, and these events.
    State(Vec<Event>),
}

/// What a claim comes to, or that its key was claimed with another payload.
pub type Decided = Result<Verdict, KeyReused>;

/// The reply to a claim.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// Whose work.
    pub key: IdempotencyKey,
    /// Whether the caller does the work.
    pub claimed: bool,
    /// Whether that had been said to the same caller before.
    pub replayed: bool,
    /// The state of the work after the claim.
    pub status: Status,
    /// What else is known of the key.
    pub state: KeyState,
    /// What is probably a mistake.
    pub warnings: Vec<String>,
}

const NO_CLAIMANT: &str = "no claimant: if the reply is lost, the repeated request is taken for a duplicate and the work is never done; send one, such as {{ $execution.id + '@' + $execution.resumeUrl.hash('sha256').slice(0,12) + ':' + $runIndex + ':' + $itemIndex }}";
const OPENED_ELSEWHERE: &str = "the key was claimed at the gate alone, by somebody else or without a claimant, and only its claimant can open it: send the same claimant in both calls, or \"pending\": true in /claim";

/// Decides a claim on a key in `state`, or on an unknown one.
///
/// The same text is recognised as the claimant of the last attempt for `replay_window` after
/// its claim or opening.
///
/// # Errors
///
/// [`KeyReused`] where the key was claimed with another payload and its window has not passed.
pub fn decide(
    state: Option<&KeyState>,
    claim: &Claim,
    now: Time,
    replay_window: TimeDelta,
) -> Result<Decision, KeyReused> {
    let Some(state) = state else {
        return Ok(first_claim(claim, now));
    };
    let window_passed = state.window_passed(now);
    let is_reset = matches!(state.phase, Phase::Reset { .. });
    if !window_passed && !is_reset && is_mismatch(state, claim) {
        return Err(KeyReused);
    }
    let is_holder = claim.holder.is_some() && claim.holder == state.holder;
    #[cfg(feature = "planted-faults")]
    let is_holder = is_holder && !planted::is(planted::Fault::RepeatNotRecognised);
    let opens = claim.door == Door::Ledger && state.phase == Phase::Claimed;
    // The first opening knows its holder however late it comes.
    if is_holder && (opens || now - state.recognised_from < replay_window) {
        return Ok(ask_again(state, claim, now));
    }
    let after = match &state.phase {
        _ if window_passed => After::Window,
        Phase::Reset { .. } if !state.conflict => After::Reset,
        Phase::Failed { retry: true, .. } if !state.conflict => After::Failed,
        Phase::Pending { lease_expires_at }
            if *lease_expires_at <= now
                && claim.on_stale == OnStale::TakeOver
                && !state.conflict =>
        {
            After::Stale
        }
        _ => return Ok(turn_away(state, now)),
    };
    Ok(claim_anew(state, claim, after, now))
}

fn is_mismatch(state: &KeyState, claim: &Claim) -> bool {
    matches!((&state.payload_sha256, &claim.payload_sha256), (Some(first), Some(now)) if first != now)
}

fn first_claim(claim: &Claim, now: Time) -> Decision {
    let state = KeyState {
        order_id: claim
            .order_id
            .clone()
            .unwrap_or_else(|| claim.key.as_str().to_owned()),
        attempt: 1,
        holder: claim.holder.clone(),
        processed_at: now,
        recognised_from: now,
        payload_sha256: claim.payload_sha256.clone(),
        ttl_seconds: claim.ttl_seconds,
        expires_at: None,
        seen_again: 0,
        last_seen_at: None,
        updated_at: now,
        phase: Phase::Claimed,
        conflict: false,
        in_ledger: false,
    };
    won(state, claim.pending, None, now)
}

fn claim_anew(state: &KeyState, claim: &Claim, after: After, now: Time) -> Decision {
    // As if it had never been claimed, but for the attempt.
    let is_free = matches!(after, After::Window | After::Reset);
    let attempt = state.attempt + 1;
    #[cfg(feature = "planted-faults")]
    let attempt = match after {
        After::Stale if planted::is(planted::Fault::AttemptNotRaised) => state.attempt,
        _ => attempt,
    };
    let next = KeyState {
        order_id: claim
            .order_id
            .clone()
            .unwrap_or_else(|| state.order_id.clone()),
        attempt,
        holder: claim.holder.clone(),
        processed_at: now,
        recognised_from: now,
        payload_sha256: if is_free {
            claim.payload_sha256.clone()
        } else {
            state.payload_sha256.clone()
        },
        ttl_seconds: claim.ttl_seconds,
        updated_at: now,
        phase: Phase::Claimed,
        conflict: state.conflict && !is_free,
        ..state.clone()
    };
    // What takes over a pending key is pending, whether it asked for that or not.
    let lease = match after {
        After::Stale => Some(claim.pending.unwrap_or(DEFAULT_LEASE_SECONDS)),
        After::Failed | After::Window | After::Reset => claim.pending,
    };
    won(next, lease, Some(after), now)
}

fn won(mut state: KeyState, lease: Option<u32>, after: Option<After>, now: Time) -> Decision {
    state.start_window(now);
    let happening = match lease {
        Some(lease) => {
            let lease_expires_at = now + seconds(lease);
            state.phase = Phase::Pending { lease_expires_at };
            state.in_ledger = true;
            Happening::Pending {
                lease_expires_at,
                after,
            }
        }
        None => Happening::Claimed { after },
    };
    // What is claimed at the gate alone has no history.
    let events = if state.in_ledger {
        vec![event(&state, happening, now)]
    } else {
        Vec::new()
    };
    Decision {
        claimed: true,
        replayed: false,
        state,
        change: Change::State(events),
    }
}

/// The claimant of the last attempt asks again.
fn ask_again(state: &KeyState, claim: &Claim, now: Time) -> Decision {
    let mut next = state.clone();
    let mut events = Vec::new();
    match state.phase {
        Phase::Done { .. } | Phase::Failed { .. } | Phase::Reset { .. } => {
            return turn_away(state, now);
        }
        Phase::Claimed => {
            if let Some(lease) = claim.pending {
                let lease_expires_at = now + seconds(lease);
                next.phase = Phase::Pending { lease_expires_at };
                next.recognised_from = now;
                next.in_ledger = true;
                // It is open now and will not run out: from here on the payload is judged again.
                if state.window_passed(now) {
                    next.payload_sha256.clone_from(&claim.payload_sha256);
                }
                if !state.in_ledger {
                    events.push(state.gate_event());
                }
                let happening = Happening::Pending {
                    lease_expires_at,
                    after: None,
                };
                events.push(event(&next, happening, now));
            }
        }
        Phase::Pending { lease_expires_at } => {
            if lease_expires_at <= now {
                let lease = claim.pending.unwrap_or(DEFAULT_LEASE_SECONDS);
                let lease_expires_at = now + seconds(lease);
                next.phase = Phase::Pending { lease_expires_at };
                events.push(event(&next, Happening::Renewed { lease_expires_at }, now));
            }
        }
    }
    let opened_here = claim.door == Door::Ledger && state.phase == Phase::Claimed;
    let change = if events.is_empty() {
        Change::None
    } else {
        next.updated_at = now;
        Change::State(events)
    };
    Decision {
        claimed: true,
        replayed: !opened_here,
        state: next,
        change,
    }
}

fn turn_away(state: &KeyState, now: Time) -> Decision {
    Decision {
        claimed: false,
        replayed: false,
        state: KeyState {
            seen_again: state.seen_again + 1,
            last_seen_at: Some(now),
            ..state.clone()
        },
        change: Change::Seen,
    }
}

fn event(state: &KeyState, happening: Happening, now: Time) -> Event {
    Event {
        at: now,
        attempt: state.attempt,
        holder: state.holder.clone(),
        happening,
    }
}

/// The verdict of a claim that has made the row of its key, at this time.
pub fn first(claim: &Claim, at: Time) -> Verdict {
    verdict(claim, first_claim(claim, at), at)
}

/// What the store found for a key.
#[derive(Debug, Clone, PartialEq)]
#[expect(
    clippy::large_enum_variant,
    reason = "there are as many as a batch has keys, and most are known or all are new"
)]
pub enum Found {
    /// Nothing: the claim has just made the row, at this time.
    New(Time),
    /// A key claimed before.
    Known(KeyState),
}

impl Found {
    /// When the claim has made the row; none where it was there.
    pub fn made_at(&self) -> Option<Time> {
        match self {
            Self::New(at) => Some(*at),
            Self::Known(_) => None,
        }
    }
}

/// How the claims of a batch belong together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Batch {
    /// An array that one caller sent. Of several claims on one key the first has the answer; the
    /// later ones are duplicates, whatever their claimants.
    Array,
    /// Callers who know nothing of each other, and happen to ask at the same time. Each has the
    /// answer that it would have, had they asked one after the other.
    Lane,
}

/// What a batch of claims asks the store to write for one key.
#[derive(Debug, Clone, PartialEq)]
pub struct Write {
    /// Whose work.
    pub key: IdempotencyKey,
    /// The state after all claims of the batch.
    pub state: KeyState,
    /// Whether more than the counters changed.
    pub changed: bool,
    /// Whether it changed again after that: a row that the batch has made does not say all then.
    pub changed_again: bool,
    /// How many duplicates were turned away.
    pub seen: u64,
    /// What to add to the history.
    pub events: Vec<Event>,
}

/// Decides a batch of claims, in their order.
///
/// # Panics
///
/// Where `found` lacks the key of a claim: to go on would be to guess.
pub fn decide_all(
    claims: &[impl Borrow<Claim>],
    batch: Batch,
    found: &BTreeMap<IdempotencyKey, Found>,
    now: Time,
    replay_window: TimeDelta,
) -> (Vec<Decided>, Vec<Write>) {
    let mut writes: BTreeMap<IdempotencyKey, Write> = BTreeMap::new();
    let mut verdicts = Vec::with_capacity(claims.len());
    for claim in claims {
        let claim = claim.borrow();
        // A key that was made before the others could be locked is decided as of then, and so is what is said of it.
        let at = match found.get(&claim.key) {
            Some(Found::New(at)) if !writes.contains_key(&claim.key) => *at,
            _ => now,
        };
        let decision = match writes.get(&claim.key).map(|write| &write.state) {
            Some(state) if batch == Batch::Lane => decide(Some(state), claim, now, replay_window),
            Some(state) if !state.window_passed(now) && is_mismatch(state, claim) => Err(KeyReused),
            Some(state) => Ok(turn_away(state, now)),
            None => match found.get(&claim.key) {
                Some(Found::Known(state)) => decide(Some(state), claim, now, replay_window),
                Some(Found::New(_)) => decide(None, claim, at, replay_window),
                None => panic!("the store has found no row of a key that is claimed"),
            },
        };
        verdicts.push(decision.map(|decision| {
            let write = writes.entry(claim.key.clone()).or_insert_with(|| Write {
                key: claim.key.clone(),
                state: decision.state.clone(),
                changed: false,
                changed_again: false,
                seen: 0,
                events: Vec::new(),
            });
            write.state = decision.state.clone();
            match &decision.change {
                Change::None => {}
                Change::Seen => write.seen += 1,
                Change::State(events) => {
                    write.changed_again = write.changed;
                    write.changed = true;
                    write.events.extend_from_slice(events);
                }
            }
            verdict(claim, decision, at)
        }));
    }
    (verdicts, writes.into_values().collect())
}

fn verdict(claim: &Claim, decision: Decision, now: Time) -> Verdict {
    let mut warnings = Vec::new();
    if claim.holder.is_none() {
        warnings.push(NO_CLAIMANT.to_owned());
    }
    if claim.door == Door::Ledger && !decision.claimed && decision.state.phase == Phase::Claimed {
        warnings.push(OPENED_ELSEWHERE.to_owned());
    }
    Verdict {
        key: claim.key.clone(),
        claimed: decision.claimed,
        replayed: decision.replayed,
        status: decision.state.status(now),
        state: decision.state,
        warnings,
    }
}

impl Verdict {
    /// The provider's id, where the effect happened.
    pub fn external_id(&self) -> Option<&String> {
        self.state.effect().0
    }

    /// The stored result, where the effect happened.
    pub fn result(&self) -> Option<&Value> {
        self.state.effect().1
    }
}

#[cfg(test)]
mod tests;
