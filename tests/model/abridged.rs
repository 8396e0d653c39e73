//! What the model leaves out of a key's rows makes no difference: from every state, the rules come to
//! the same from what is kept of it as from the whole of it.

use chrono::TimeDelta;
use dedup_gate::domain::Time;
use dedup_gate::domain::act::act;
use dedup_gate::domain::claim::{Change, decide};
use dedup_gate::domain::ledger::{Event, KeyState, seconds};
use proptest::prelude::*;

use super::entry::{Entry, Judgement, LEASE, NOW, REPLAY_WINDOW, WINDOW};
use super::rules::{Answer, Entrance, Reason, Request, Rules, Said, Wish, claim, wanted};

/// A key's rows, in full.
#[derive(Debug, Default)]
struct Rows {
    state: Option<KeyState>,
    history: Vec<Event>,
}

impl Rows {
    /// The answer to a request, and the events that it adds.
    fn handle(&mut self, request: &Request, now: Time) -> Option<(Answer, Vec<Event>)> {
        let (answer, state, events) = match *request {
            Request::Claim {
                caller,
                wish,
                entrance,
            } => {
                let claim = claim(caller, wish, entrance);
                let decision = decide(self.state.as_ref(), &claim, now, REPLAY_WINDOW)
                    .expect("no payload, so no mismatch");
                let events = match decision.change {
                    Change::State(events) => events,
                    Change::None | Change::Seen => Vec::new(),
                };
                let answer = Answer::Verdict {
                    claimed: decision.claimed,
                    replayed: decision.replayed,
                };
                (answer, decision.state, events)
            }
            _ => {
                let settlement = act(self.state.as_ref()?, &self.history, &wanted(request), now);
                let answer = Answer::Acted(settlement.answer.ok());
                (answer, settlement.state, settlement.events)
            }
        };
        self.state = Some(state);
        self.history.extend(events.iter().cloned());
        Some((answer, events))
    }
}

/// A request, or time.
#[derive(Debug, Clone)]
enum Next {
    Request(Request),
    Time(TimeDelta),
}

fn a_request() -> impl Strategy<Value = Request> {
    let caller = 0..3_u8;
    let attempt = 1..4_u8;
    let said = prop_oneof![
        proptest::option::of(caller.clone()).prop_map(|id| Said::Done { id }),
        any::<bool>().prop_map(|retry| Said::Failed { retry }),
    ];
    let judgement = prop_oneof![
        Just(Judgement::Done),
        Just(Judgement::Release),
        Just(Judgement::Fail)
    ];
    let entrance = prop_oneof![Just(Entrance::Gate), Just(Entrance::Ledger)];
    let wish = any::<[bool; 4]>().prop_map(|[is_named, pending, take_over, has_window]| Wish {
        is_named,
        pending,
        take_over,
        has_window,
        opens: false,
    });
    let reason = Reason::Usual;
    prop_oneof![
        4 => (caller.clone(), wish, entrance).prop_map(|(caller, wish, entrance)| {
            Request::Claim { caller, wish, entrance }
        }),
        4 => (proptest::option::of(caller), proptest::option::of(attempt.clone()), said).prop_map(
            |(caller, attempt, said)| Request::Report { caller, attempt, said, of: 0 }
        ),
        1 => attempt.clone().prop_map(|attempt| Request::Renewal { attempt }),
        1 => (attempt.clone(), judgement).prop_map(move |(attempt, judgement)| {
            Request::Review { attempt, judgement, reason }
        }),
        1 => attempt.prop_map(move |attempt| Request::Reset { attempt, reason }),
    ]
}

fn whatever_comes() -> impl Strategy<Value = Next> {
    let half_the_lease = seconds(LEASE / 2);
    prop_oneof![
        5 => a_request().prop_map(Next::Request),
        1 => Just(Next::Time(half_the_lease)),
        1 => Just(Next::Time(REPLAY_WINDOW)),
        1 => Just(Next::Time(seconds(WINDOW))),
    ]
}

/// An answer, as far as the model looks at it: a renewal in time does not make a lease any longer that
/// has no length.
fn as_heard(request: &Request, answer: Answer) -> Answer {
    match (request, answer) {
        (Request::Renewal { .. }, Answer::Acted(Some(_))) => Answer::Acted(Some(true)),
        _ => answer,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn rules_come_to_the_same_from_what_is_kept(steps in prop::collection::vec(whatever_comes(), 1..40)) {
        let rules = Rules { mutation: None };
        let mut rows = Rows::default();
        let mut kept: Option<Entry> = None;
        let mut now = NOW;
        for step in steps {
            match step {
                Next::Time(passed) => {
                    now += passed;
                    let history = kept.map(|entry| entry.history).unwrap_or_default();
                    kept = rows.state.as_ref().map(|state| Entry::save(state, history, &[], now));
                }
                Next::Request(request) => {
                    let history = kept.as_ref().map(|entry| entry.history.clone()).unwrap_or_default();
                    let abridged = rules.handle(kept.as_ref(), &request);
                    let whole = rows.handle(&request, now).map(|(answer, events)| {
                        let state = rows.state.as_ref().expect("it was handled");
                        (answer, Entry::save(state, history, &events, now))
                    });
                    let heard = |handled: &Option<(Answer, Entry)>| {
                        handled.as_ref().map(|(answer, _)| as_heard(&request, *answer))
                    };
                    prop_assert_eq!(heard(&abridged), heard(&whole), "{:?}", request);
                    let (abridged, whole) = (abridged.map(|(_, entry)| entry), whole.map(|(_, entry)| entry));
                    prop_assert_eq!(&abridged, &whole, "{:?}", request);
                    kept = whole.or(kept);
                }
            }
        }
    }
}
