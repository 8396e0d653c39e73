//! The service: the real `decide()` and `act()`, and the faults that the model has to find.

use std::fmt;

use dedup_gate::domain::act::{Act, Renewal, Reset, Review, act};
use dedup_gate::domain::claim::{Change, Claim, Door, OnStale, decide};
use dedup_gate::domain::ledger::{KeyState, Outcome, Phase, Report};

use super::entry::{
    Attempt, Caller, Entry, Judgement, KEY, LEASE, NOW, REASON, REPLAY_WINDOW, REVIEWER, WINDOW,
    holder, text,
};

/// A fault that is put in on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Mutation {
    /// A report is settled without comparing its attempt with the current one.
    AttemptNotCompared,
    /// Whoever asks again is not recognised.
    RepeatNotRecognised,
    /// A take-over does not raise the attempt.
    AttemptNotRaised,
}

/// What a caller wants of its claim.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Wish {
    /// Whether it says who it is.
    pub(crate) is_named: bool,
    /// Whether the ledger entry is to be opened.
    pub(crate) pending: bool,
    /// Whether what is stale is to be taken over.
    pub(crate) take_over: bool,
    /// Whether there is a dedupe window.
    pub(crate) has_window: bool,
    /// Whether it may open the entry by a second call, as long as it has not begun its work.
    pub(crate) opens: bool,
}

impl fmt::Debug for Wish {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let options = [
            (self.is_named, "claimant"),
            (self.pending, "pending"),
            (self.take_over, "take_over"),
            (self.has_window, "ttl_seconds"),
            (self.opens, "opened later"),
        ];
        let wanted = options.iter().filter(|(is_wanted, _)| *is_wanted);
        let names: Vec<&str> = wanted.map(|(_, name)| *name).collect();
        write!(f, "{{{}}}", names.join(", "))
    }
}

/// Where a claim comes in: [`Door`], which cannot be ordered or hashed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Entrance {
    Gate,
    Ledger,
}

/// What a caller says became of its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Said {
    /// Its effect happened, and the provider gave it this id.
    Done { id: Option<Caller> },
    /// Its effect did not happen.
    Failed { retry: bool },
}

/// What a person goes by: the same request with another reason is no repeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Reason {
    /// What everybody in the model goes by.
    Usual,
    /// What nobody has gone by yet.
    Another,
}

/// A request on the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Request {
    Claim {
        caller: Caller,
        wish: Wish,
        entrance: Entrance,
    },
    Report {
        /// Who says so: none where the attempt speaks for it.
        caller: Option<Caller>,
        attempt: Option<Attempt>,
        said: Said,
        /// Of which attempt it is, said or not.
        of: Attempt,
    },
    Renewal {
        attempt: Attempt,
    },
    Review {
        attempt: Attempt,
        judgement: Judgement,
        reason: Reason,
    },
    Reset {
        attempt: Attempt,
        reason: Reason,
    },
}

/// What the service answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// To a claim.
    Verdict { claimed: bool, replayed: bool },
    /// To anything else: whether it changed something; none where it is refused.
    Acted(Option<bool>),
}

/// The rules of the service, with a fault or without.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Rules {
    /// The fault.
    pub(crate) mutation: Option<Mutation>,
}

impl Rules {
    /// The answer to a request, and what is kept of the key; nobody else reads or writes it meanwhile.
    /// None where an act meets an unknown key.
    pub(crate) fn handle(
        &self,
        entry: Option<&Entry>,
        request: &Request,
    ) -> Option<(Answer, Entry)> {
        match *request {
            Request::Claim {
                caller,
                wish,
                entrance,
            } => Some(self.claim(entry, &claim(caller, wish, entrance))),
            _ => {
                let (changed, entry) = self.act(entry?, wanted(request));
                Some((Answer::Acted(changed), entry))
            }
        }
    }

    /// The verdict on a claim, and what is kept of the key.
    fn claim(&self, entry: Option<&Entry>, claim: &Claim) -> (Answer, Entry) {
        let loaded = entry.map(Entry::load);
        let state = loaded.as_ref().map(|(state, _)| state);
        let replay_window = match self.mutation {
            Some(Mutation::RepeatNotRecognised) => chrono::TimeDelta::zero(),
            _ => REPLAY_WINDOW,
        };
        let mut decision =
            decide(state, claim, NOW, replay_window).expect("no payload, so no mismatch");
        let mut events = match decision.change {
            Change::State(events) => events,
            Change::None | Change::Seen => Vec::new(),
        };
        if self.mutation == Some(Mutation::AttemptNotRaised)
            && let Some(before) = state.filter(|before| hangs(before))
        {
            decision.state.attempt = before.attempt;
            for event in &mut events {
                event.attempt = before.attempt;
            }
        }
        let history = entry.map(|entry| entry.history.clone()).unwrap_or_default();
        let answer = Answer::Verdict {
            claimed: decision.claimed,
            replayed: decision.replayed,
        };
        (answer, Entry::save(&decision.state, history, &events, NOW))
    }

    /// Whether the act changed anything, where it was not refused; and what is kept of the key.
    fn act(&self, entry: &Entry, mut wanted: Act) -> (Option<bool>, Entry) {
        let (state, history) = entry.load();
        if self.mutation == Some(Mutation::AttemptNotCompared)
            && let Act::Report(report) = &mut wanted
        {
            report.attempt = Some(state.attempt);
        }
        let settlement = act(&state, &history, &wanted, NOW);
        let saved = Entry::save(
            &settlement.state,
            entry.history.clone(),
            &settlement.events,
            NOW,
        );
        (settlement.answer.ok(), saved)
    }
}

/// Whether it is pending.
fn hangs(state: &KeyState) -> bool {
    matches!(state.phase, Phase::Pending { .. })
}

/// The claim that a caller sends.
pub(crate) fn claim(caller: Caller, wish: Wish, entrance: Entrance) -> Claim {
    let opens = wish.pending || entrance == Entrance::Ledger;
    Claim {
        key: KEY.clone(),
        order_id: None,
        holder: wish.is_named.then(|| holder(caller)),
        ttl_seconds: (wish.has_window && entrance == Entrance::Gate).then_some(WINDOW),
        payload_sha256: None,
        pending: opens.then_some(LEASE),
        on_stale: if wish.take_over {
            OnStale::TakeOver
        } else {
            OnStale::Hold
        },
        door: match entrance {
            Entrance::Gate => Door::Gate,
            Entrance::Ledger => Door::Ledger,
        },
    }
}

/// What a request that is no claim asks for.
pub(crate) fn wanted(request: &Request) -> Act {
    let key = KEY.clone();
    let reviewer = REVIEWER.to_owned();
    let text_of = |reason| match reason {
        Reason::Usual => REASON.to_owned(),
        Reason::Another => format!("another {REASON}"),
    };
    match *request {
        Request::Claim { .. } => unreachable!("a claim is decided, not done"),
        Request::Report {
            caller,
            attempt,
            said,
            ..
        } => Act::Report(Report {
            key,
            attempt: attempt.map(u32::from),
            holder: caller.map(holder),
            effects: Vec::new(),
            outcome: match said {
                Said::Done { id } => Outcome::Done {
                    external_id: id.map(text),
                    result: None,
                },
                Said::Failed { retry } => Outcome::Failed {
                    reason: None,
                    retry,
                },
            },
        }),
        Request::Renewal { attempt } => Act::Renewal(Renewal {
            key,
            attempt: Some(attempt.into()),
            holder: None,
            lease_seconds: LEASE,
        }),
        Request::Review {
            attempt,
            judgement,
            reason,
        } => Act::Review(Review {
            key,
            attempt: attempt.into(),
            decision: judgement.into(),
            reviewer,
            reason: text_of(reason),
        }),
        Request::Reset { attempt, reason } => Act::Reset(Reset {
            key,
            attempt: attempt.into(),
            reviewer,
            reason: text_of(reason),
        }),
    }
}
