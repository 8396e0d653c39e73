//! Is there an order of a key's calls, each at one moment between its beginning and its end, in which
//! the service's own rules give all the answers that were heard?
//!
//! The search is Wing and Gong's ("Testing and verifying concurrent objects", 1993), with Lowe's memory
//! of what was tried ("Testing for linearizability", 2017). The rules are `decide()` and `act()`; what they
//! leave open is the time, which lies between the beginning and the end of the call as well.

use std::collections::HashSet;

use chrono::{SubsecRound, TimeDelta};
use dedup_gate::api::problem::{Problem, ProblemReply};
use dedup_gate::domain::Time;
use dedup_gate::domain::act::{Act, act};
use dedup_gate::domain::claim::{Change, DEFAULT_LEASE_SECONDS, decide};
use dedup_gate::domain::ledger::{Event, KeyState, Refusal, Status, seconds};
use serde_json::Value;

use super::history::{Call, Heard, Request};

/// How many times the rules may be asked for one key. What takes more is not passed, but reported.
const STEPS: u64 = 1_000_000;

/// Replies give times in milliseconds, cut off.
const PRECISION: TimeDelta = TimeDelta::milliseconds(1);

/// How long a claimant is recognised: the service's default. A run is shorter.
const REPLAY_WINDOW: TimeDelta = TimeDelta::seconds(1800);

/// Why a key's history does not pass.
#[derive(Debug)]
pub(crate) enum Fault {
    /// No order explains it; these calls are those of the order that goes furthest.
    NotLinearizable(Vec<usize>),
    /// It took too many steps to say.
    TooManySteps,
}

/// Looks for an order that explains the calls of one key, and gives the number of steps it took.
///
/// Where the last call has read the entry, its history says what was written, and in which order:
/// an order of the calls that writes anything else need not be followed any further.
pub(crate) fn check(calls: &[Call]) -> Result<u64, Fault> {
    assert!(calls.len() <= 128, "a key has so many calls at most");
    let mut search = Search {
        calls,
        answered: (0..calls.len())
            .filter(|&index| calls[index].answer.is_ok())
            .fold(0, |set, index| set | bit(index)),
        written: calls.last().and_then(last_read),
        instants: instants(calls),
        end: calls.iter().map(|call| call.returned.at).max(),
        tried: HashSet::new(),
        furthest: 0,
        steps: 0,
    };
    match search.explains(0, Model::default()) {
        Some(true) => Ok(search.steps),
        Some(false) => Err(Fault::NotLinearizable(
            (0..calls.len())
                .filter(|&index| search.furthest & bit(index) != 0)
                .collect(),
        )),
        None => Err(Fault::TooManySteps),
    }
}

fn bit(index: usize) -> u128 {
    1 << index
}

/// A key as the rules know it. What they do not go by is left out, so that states are equal that
/// behave alike.
#[derive(Debug, Clone, Default, PartialEq)]
struct Model {
    state: Option<KeyState>,
    history: Vec<Event>,
}

/// What the rules answer.
enum Said {
    Verdict {
        claimed: bool,
        replayed: bool,
        state: KeyState,
    },
    KeyReused,
    Entry {
        state: KeyState,
        history: Vec<Event>,
        changed: Option<bool>,
    },
    Refused(Refusal),
    UnknownKey,
}

impl Model {
    fn answer(&self, request: &Request, now: Time) -> (Self, Said) {
        let same = |said| (self.clone(), said);
        match (request, &self.state) {
            (Request::Claim(claim, _), state) => {
                let Ok(decision) = decide(state.as_ref(), claim, now, REPLAY_WINDOW) else {
                    return same(Said::KeyReused);
                };
                let events = match decision.change {
                    Change::None | Change::Seen => Vec::new(),
                    Change::State(events) => events,
                };
                let said = Said::Verdict {
                    claimed: decision.claimed,
                    replayed: decision.replayed,
                    state: decision.state.clone(),
                };
                (self.after(decision.state, events), said)
            }
            (Request::Act(_) | Request::Read(_), None) => same(Said::UnknownKey),
            (Request::Act(wanted), Some(state)) => {
                let settlement = act(state, &self.history, wanted, now);
                let next = self.after(settlement.state, settlement.events);
                let said = match settlement.answer {
                    Ok(changed) => next.entry(Some(changed)),
                    Err(refusal) => Said::Refused(refusal),
                };
                (next, said)
            }
            (Request::Read(_), Some(_)) => same(self.entry(None)),
        }
    }

    fn after(&self, state: KeyState, events: Vec<Event>) -> Self {
        let mut history = self.history.clone();
        history.extend(events);
        Self {
            state: Some(KeyState {
                seen_again: 0,
                last_seen_at: None,
                updated_at: Time::UNIX_EPOCH,
                ..state
            }),
            history,
        }
    }

    fn entry(&self, changed: Option<bool>) -> Said {
        let Some(state) = &self.state else {
            return Said::UnknownKey;
        };
        Said::Entry {
            state: state.clone(),
            // A key at the gate alone has no history but this.
            history: if state.in_ledger {
                self.history.clone()
            } else {
                vec![state.gate_event()]
            },
            changed,
        }
    }
}

impl Said {
    /// Whether that is what was heard.
    fn agrees(&self, heard: &Heard, now: Time) -> bool {
        let body = &heard.body;
        let is = |name: &str, value: Value| body[name] == value;
        let is_state = |state: &KeyState| {
            is("status", status_name(state.status(now)))
                && is("attempt", state.attempt.into())
                && is("external_id", state.effect().0.cloned().into())
                && is("result", state.effect().1.cloned().unwrap_or_default())
                && is_at(&body["processed_at"], Some(state.processed_at))
                && is_at(&body["lease_expires_at"], state.lease_expires_at())
        };
        match self {
            Self::Verdict {
                claimed,
                replayed,
                state,
            } => {
                heard.status == 200
                    && is("claimed", (*claimed).into())
                    && is("replayed", (*replayed).into())
                    && is_state(state)
                    && (*claimed || is_at(&body["last_seen_at"], Some(now)))
            }
            Self::Entry {
                state,
                history,
                changed,
            } => {
                let written = read_history(body);
                let claimant = state.holder.as_ref().map(|holder| holder.claimant.clone());
                heard.status == 200
                    && changed.is_none_or(|changed| is("changed", changed.into()))
                    && is("conflict", state.conflict.into())
                    && is("claimant", claimant.into())
                    && is_state(state)
                    && written.len() == history.len()
                    && written
                        .iter()
                        .zip(history)
                        .all(|(written, event)| written.agrees(event))
            }
            Self::Refused(refusal) => {
                let problem = ProblemReply::from(&Problem::from(refusal.clone()));
                let problem = serde_json::to_value(problem).unwrap();
                ["status", "code", "external_id", "reported_external_id"]
                    .iter()
                    .all(|name| is(name, problem[name].clone()))
            }
            Self::KeyReused => is("code", "key_reused".into()),
            Self::UnknownKey => is("code", "unknown_key".into()),
        }
    }
}

fn status_name(status: Status) -> Value {
    serde_json::to_value(status).unwrap()
}

fn time(value: &Value) -> Option<Time> {
    value.as_str()?.parse().ok()
}

fn is_at(value: &Value, expected: Option<Time>) -> bool {
    match (time(value), expected) {
        (Some(time), Some(expected)) => (time - expected).abs() <= PRECISION,
        (heard, expected) => heard == expected,
    }
}

/// An event, as replies have it.
struct Written(Value);

impl Written {
    fn agrees(&self, event: &Event) -> bool {
        let mut happening = serde_json::to_value(&event.happening).unwrap();
        let claimant = event.holder.as_ref().map(|holder| holder.claimant.as_str());
        let (detail, own) = (&self.0["detail"], &mut happening["detail"]);
        let lease = time(&own["lease_expires_at"]);
        let is_lease = is_at(&detail["lease_expires_at"], lease);
        if lease.is_some() {
            own["lease_expires_at"] = detail["lease_expires_at"].clone();
        }
        is_lease
            && own == detail
            && self.0["event"] == happening["event"]
            && self.0["attempt"] == event.attempt
            && self.0["claimant"].as_str() == claimant
            && is_at(&self.0["at"], Some(event.at))
    }
}

fn read_history(body: &Value) -> Vec<Written> {
    let events = body["history"].as_array().into_iter().flatten();
    events.cloned().map(Written).collect()
}

/// What is written in the end; none where the call does not tell.
fn last_read(call: &Call) -> Option<Vec<Written>> {
    let (Request::Read(_), Ok(heard)) = (&call.request, &call.answer) else {
        return None;
    };
    let mut events = read_history(&heard.body);
    // That of a key at the gate alone is not written.
    if let [only] = events.as_slice()
        && only.0["event"] == "claimed"
    {
        events.clear();
    }
    Some(events)
}

/// The times at which something happened to the key, as far as replies tell.
fn instants(calls: &[Call]) -> Vec<Time> {
    let mut leases: Vec<u32> = calls
        .iter()
        .filter_map(|call| match &call.request {
            Request::Claim(claim, _) => claim.pending,
            Request::Act(Act::Renewal(renewal)) => Some(renewal.lease_seconds),
            _ => None,
        })
        .collect();
    leases.push(DEFAULT_LEASE_SECONDS);
    leases.sort_unstable();
    leases.dedup();
    let mut instants = Vec::new();
    for body in calls
        .iter()
        .filter_map(|call| call.answer.as_ref().ok())
        .map(|heard| &heard.body)
    {
        let names = ["processed_at", "updated_at", "last_seen_at"];
        instants.extend(names.iter().filter_map(|name| time(&body[name])));
        instants.extend(
            read_history(body)
                .iter()
                .filter_map(|event| time(&event.0["at"])),
        );
        if let Some(end) = time(&body["lease_expires_at"]) {
            let begun = leases.iter().map(|&lease| end - seconds(lease));
            instants.extend(begun);
        }
    }
    instants.sort();
    instants.dedup();
    instants
}

struct Search<'a> {
    calls: &'a [Call],
    /// Those whose answer is known, and has to be explained.
    answered: u128,
    written: Option<Vec<Written>>,
    instants: Vec<Time>,
    end: Option<Time>,
    /// Which calls were put in order, and where that led to, without explaining the rest.
    tried: HashSet<(u128, String)>,
    furthest: u128,
    steps: u64,
}

impl Search<'_> {
    /// Whether what is left can be explained after the calls in `done` have led to `model`; none
    /// where there are no steps left to say.
    fn explains(&mut self, mut done: u128, model: Model) -> Option<bool> {
        // What is answered and changes nothing may stand here as well as later: no need to try both.
        let free = loop {
            if (done & self.answered).count_ones() > self.furthest.count_ones() {
                self.furthest = done & self.answered;
            }
            if done & self.answered == self.answered {
                return Some(true);
            }
            let free = self.free(done);
            let mut passing = None;
            for &index in &free {
                if self.is_answered(index) && self.outcomes(index, &model)?.contains(&model) {
                    passing = Some(index);
                    break;
                }
            }
            match passing {
                Some(index) => done |= bit(index),
                None => break free,
            }
        };
        if !self.tried.insert((done, format!("{model:?}"))) {
            return Some(false);
        }
        for index in free {
            let done = done | bit(index);
            let attempt_ahead = self.attempt_ahead(done);
            for next in self.outcomes(index, &model)? {
                let attempt = next.state.as_ref().map_or(0, |state| state.attempt);
                if next != model
                    && u64::from(attempt) <= attempt_ahead
                    && self.explains(done, next)?
                {
                    return Some(true);
                }
            }
        }
        Some(false)
    }

    fn is_answered(&self, index: usize) -> bool {
        self.answered & bit(index) != 0
    }

    /// The calls that may come next: they had begun before any other one was over. Those that are
    /// answered first, by their ends; the others need never come. Where the same was sent again and
    /// again without an answer, the first of them may do whatever a later one may.
    fn free(&self, done: u128) -> Vec<usize> {
        let left = (0..self.calls.len()).filter(|&index| done & bit(index) == 0);
        let first_end = left
            .clone()
            .filter(|&index| self.is_answered(index))
            .map(|index| self.calls[index].returned.order)
            .min();
        let mut free: Vec<usize> = Vec::new();
        for index in left {
            let has_begun = first_end.is_none_or(|end| self.calls[index].invoked.order < end);
            let is_same = |&other: &usize| {
                !self.is_answered(other) && self.calls[other].request == self.calls[index].request
            };
            if has_begun && (self.is_answered(index) || !free.iter().any(is_same)) {
                free.push(index);
            }
        }
        free.sort_by_key(|&index| (!self.is_answered(index), self.calls[index].returned.order));
        free
    }

    /// The lowest attempt that an answer names which is still to be explained: attempts never go back.
    fn attempt_ahead(&self, done: u128) -> u64 {
        let left = (0..self.calls.len()).filter(|&index| done & bit(index) == 0);
        let answers = left.filter_map(|index| self.calls[index].answer.as_ref().ok());
        let attempts = answers.filter_map(|heard| heard.body["attempt"].as_u64());
        attempts.min().unwrap_or(u64::MAX)
    }

    /// What a call may have led to from here, at any time that it may have seen.
    fn outcomes(&mut self, index: usize, model: &Model) -> Option<Vec<Model>> {
        let call = &self.calls[index];
        let mut outcomes: Vec<Model> = Vec::new();
        for now in self.times(call, model) {
            self.steps += 1;
            if self.steps > STEPS {
                return None;
            }
            let (next, said) = model.answer(&call.request, now);
            let is_heard = match &call.answer {
                Ok(heard) => said.agrees(heard, now),
                Err(_) => true,
            };
            if is_heard && self.is_written(&next.history, model) && !outcomes.contains(&next) {
                outcomes.push(next);
            }
        }
        Some(outcomes)
    }

    /// Whether what the call adds to the history stands there in the end.
    fn is_written(&self, history: &[Event], before: &Model) -> bool {
        let Some(written) = &self.written else {
            return true;
        };
        let added = before.history.len()..history.len();
        added.into_iter().all(|seq| {
            written
                .get(seq)
                .is_some_and(|written| written.agrees(&history[seq]))
        })
    }

    /// The times that a call may have seen, as far as they differ in what they lead to: its beginning
    /// and its end, those that replies tell, and both sides of where an answer turns.
    fn times(&self, call: &Call, model: &Model) -> Vec<Time> {
        let first = call.invoked.at.trunc_subsecs(3) - PRECISION;
        let last = match call.answer {
            Ok(_) => call.returned.at + PRECISION,
            Err(_) => self.end.unwrap_or(call.returned.at),
        };
        let state = model.state.as_ref();
        let lease_ends = state.and_then(KeyState::lease_expires_at);
        let window_ends = state.and_then(|state| state.expires_at);
        // From then on, a renewal makes the lease longer.
        let renewable = match &call.request {
            Request::Act(Act::Renewal(renewal)) => {
                lease_ends.map(|end| end - seconds(renewal.lease_seconds) + PRECISION)
            }
            _ => None,
        };
        let turns = [lease_ends, window_ends, renewable].into_iter().flatten();
        let sides = turns.flat_map(|turn| [turn - PRECISION, turn]);
        let mut times: Vec<Time> = sides.chain(self.instants.iter().copied()).collect();
        times.retain(|time| (first..=last).contains(time));
        times.extend([first, last.trunc_subsecs(3)]);
        times
    }
}

/// The judge is judged: by histories of which the verdict is known.
mod tests {
    use dedup_gate::domain::claim::{Claim, Door, OnStale};
    use dedup_gate::domain::ledger::Holder;
    use dedup_gate::domain::rfc3339;
    use dedup_gate::domain::text::IdempotencyKey;
    use serde_json::json;

    use super::super::history::Stamp;
    use super::*;

    fn at(millis: i64) -> Time {
        Time::UNIX_EPOCH + TimeDelta::milliseconds(millis)
    }

    /// A claim by `claimant`, with a lease of a second, that takes over; and what was heard of it.
    fn claim(claimant: &str, [begun, over]: [i64; 2], answer: Result<Value, &str>) -> Call {
        let stamp = |millis: i64| Stamp {
            order: millis.unsigned_abs(),
            at: at(millis),
        };
        let claim = Claim {
            key: IdempotencyKey::from_store("key".to_owned()),
            order_id: None,
            holder: Some(Holder {
                claimant: claimant.to_owned(),
                api_key: None,
            }),
            ttl_seconds: None,
            payload_sha256: None,
            pending: Some(1),
            on_stale: OnStale::TakeOver,
            door: Door::Gate,
        };
        Call {
            process: claimant.to_owned(),
            request: Request::Claim(claim, None),
            invoked: stamp(begun),
            returned: stamp(over),
            answer: answer
                .map(|body| Heard { status: 200, body })
                .map_err(str::to_owned),
        }
    }

    /// A verdict on an attempt that was won at a time; `last_seen` is that of a duplicate.
    fn verdict(
        won: [bool; 2],
        attempt: u32,
        since: i64,
        last_seen: Option<i64>,
    ) -> Result<Value, &'static str> {
        let [claimed, replayed] = won;
        let time = |millis: i64| rfc3339::format(at(millis));
        Ok(
            json!({"claimed": claimed, "replayed": replayed, "status": "pending", "attempt": attempt,
            "external_id": null, "result": null, "processed_at": time(since),
            "lease_expires_at": time(since + 1000), "last_seen_at": last_seen.map(time)}),
        )
    }

    const WON: [bool; 2] = [true, false];
    const AGAIN: [bool; 2] = [true, true];
    const LOST: [bool; 2] = [false, false];

    fn passes(calls: &[Call]) -> bool {
        match check(calls) {
            Ok(_) => true,
            Err(Fault::NotLinearizable(_)) => false,
            Err(Fault::TooManySteps) => panic!("a short history takes few steps"),
        }
    }

    #[test]
    fn a_winner_and_a_duplicate_pass_in_either_order_while_they_overlap() {
        let duplicate = |times| claim("b", times, verdict(LOST, 1, 15, Some(25)));
        assert!(passes(&[
            claim("a", [10, 20], verdict(WON, 1, 15, None)),
            duplicate([21, 30])
        ]));
        assert!(passes(&[
            duplicate([5, 30]),
            claim("a", [10, 40], verdict(WON, 1, 15, None))
        ]));
        // It was over before anybody could have won.
        assert!(!passes(&[
            duplicate([5, 8]),
            claim("a", [10, 20], verdict(WON, 1, 15, None))
        ]));
    }

    #[test]
    fn a_lost_reply_may_have_won() {
        let lost = claim("a", [10, 20], Err("timed out"));
        assert!(passes(&[
            lost.clone(),
            claim("a", [30, 40], verdict(AGAIN, 1, 15, None))
        ]));
        // Long after its caller has gone.
        assert!(passes(&[
            lost.clone(),
            claim("b", [900, 920], verdict(LOST, 1, 910, Some(915)))
        ]));
        // Or it never came.
        assert!(passes(&[
            lost.clone(),
            claim("b", [30, 40], verdict(WON, 1, 35, None))
        ]));
        assert!(!passes(&[claim(
            "a",
            [30, 40],
            verdict(AGAIN, 1, 15, None)
        )]));
        assert!(!passes(&[
            lost,
            claim("a", [30, 40], verdict(LOST, 1, 15, Some(35)))
        ]));
    }

    #[test]
    fn an_attempt_has_one_winner() {
        let first = claim("a", [10, 20], verdict(WON, 1, 15, None));
        assert!(!passes(&[
            first.clone(),
            claim("b", [10, 20], verdict(WON, 1, 15, None))
        ]));
        assert!(passes(&[
            first,
            claim("b", [1100, 1120], verdict(WON, 2, 1110, None))
        ]));
    }

    #[test]
    fn a_lease_is_judged_by_the_time_of_the_call() {
        let first = claim("a", [10, 20], verdict(WON, 1, 15, None));
        let second = |times| claim("b", times, verdict(WON, 2, 1015, None));
        assert!(passes(&[first.clone(), second([1000, 1020])]));
        assert!(!passes(&[first.clone(), second([1000, 1010])]));
        // It says another time than it can have seen.
        assert!(!passes(&[
            first,
            claim("b", [1100, 1120], verdict(WON, 2, 5000, None))
        ]));
    }

    /// Each of them may have won, at any time since, or again once the window had passed.
    #[test]
    fn many_lost_replies_take_no_more_steps_than_there_are() {
        let windowed = |mut call: Call| {
            if let Request::Claim(claim, _) = &mut call.request {
                claim.ttl_seconds = Some(1);
                claim.pending = None;
            }
            call
        };
        let mut calls: Vec<Call> = (0..40)
            .map(|turn| {
                let begun = 100 * turn;
                let claimant = ["b", "c", "d", "e"][usize::try_from(turn % 4).unwrap()];
                windowed(claim(claimant, [begun, begun + 50], Err("timed out")))
            })
            .collect();
        let mut entry = |attempt: u32, since: i64, times| {
            let mut heard = verdict(AGAIN, attempt, since, None).unwrap();
            heard["status"] = "claimed".into();
            heard["lease_expires_at"] = Value::Null;
            calls.push(windowed(claim("a", times, Ok(heard))));
        };
        entry(2, 3900, [4000, 4010]);
        calls.push(windowed(claim("a", [3, 4], Err("timed out"))));
        calls.sort_by_key(|call| call.invoked.order);
        assert!(passes(&calls));
    }
}
