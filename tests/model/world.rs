//! Callers, a network and the service, as stateright explores them.
//!
//! - A **caller** is one execution: it claims, works, has its effect at the provider and reports that, or
//!   fails and reports that. It may crash at any step; it comes back as another caller, or, as long as
//!   it has had no effect, as the same claimant.
//! - The **network** is the set of all requests that were ever sent. Each may be delivered now, later,
//!   several times or never: delayed, repeated, lost. A reply arrives at once or is lost, since a client that
//!   has given up on a connection hears nothing from it any more.
//! - The **service** handles a request in one step, which is what its transaction makes of it. Where it
//!   crashes before the commit, nothing has happened: the request is lost. Where it crashes after it, the
//!   request was handled and its reply is lost.
//! - **Time**: a lease, a replay window and a dedupe window run out whenever they like, in any order.

use std::collections::BTreeMap;
use std::sync::Arc;

use stateright::{Model, Property};

use super::entry::{Attempt, Caller, Entry, Judgement, Standing, Window};
use super::promises::{self, Broken};
use super::rules::{Answer, Entrance, Reason, Request, Rules, Said, Wish};

/// What is checked: how many there are of everything, and what they do.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// How many keys there are.
    pub(crate) keys: usize,
    /// How many callers want to work on each.
    pub(crate) callers: Caller,
    /// How many attempts of a key are explored; what begins another one is still checked.
    pub(crate) attempts: Attempt,
    /// What a caller may want of its claim: each caller has its choice.
    pub(crate) wishes: &'static [Wish],
    /// How callers report.
    pub(crate) reports: Reports,
    /// Whether work may fail, and whether it may be tried again then.
    pub(crate) failures: &'static [bool],
    /// Whether callers renew their leases.
    pub(crate) renews: bool,
    /// How often a person reviews or resets each key.
    pub(crate) operations: usize,
    /// Whether a caller may crash after its effect and come back as the same claimant, as if there had
    /// been none: what a caller must not do.
    pub(crate) forgets_effects: bool,
    /// Whether states that differ in nothing but the names of callers and keys are one.
    pub(crate) is_symmetric: bool,
    /// Whether a state says by what it was reached.
    pub(crate) has_witnesses: bool,
    /// The service.
    pub(crate) rules: Rules,
}

/// How callers report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reports {
    /// With the attempt of the verdict, as the README says.
    ByAttempt,
    /// The same, and the provider's id follows in a second report.
    IdFollows,
    /// An effect with the claimant alone: `failed` always names its attempt.
    ByClaimant,
}

/// All there is.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct World {
    /// The keys, and what concerns them.
    pub(crate) keys: Vec<Arc<Key>>,
    /// By what this state was reached, where the configuration wants to know.
    pub(crate) witness: Option<Witness>,
}

/// A key, and all that concerns it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key {
    /// Its rows.
    pub(crate) entry: Option<Entry>,
    /// How far each caller is.
    pub(crate) runs: Vec<Run>,
    /// Every request that was sent; of the report of an effect, whether it was handled before: it may
    /// cause a conflict, and only once.
    pub(crate) sent: BTreeMap<Request, bool>,
    /// What the service cannot know: which caller was told first that it has the attempt, attempt by attempt.
    pub(crate) told: Vec<Caller>,
    /// Whether the replay window of the last of them is still open.
    pub(crate) is_fresh: bool,
    /// How many effects there were; two stands for more.
    pub(crate) effects: u8,
    /// The promises that were broken on the way here.
    pub(crate) broken: Broken,
}

/// How far a caller is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Run {
    /// It has not begun.
    Idle,
    /// It has sent a claim, and waits for the reply.
    Asking { wish: Wish, entrance: Entrance },
    /// It was told to do the work, and has had no effect yet.
    Working { wish: Wish, attempt: Attempt },
    /// It has reported, was turned away, or has crashed.
    Over,
}

/// What can happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Something to this key.
    At(usize, Step),
    /// A caller crashes before its effect, for good.
    Crash(Caller),
}

/// What can happen to a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// A caller sends its claim.
    Ask(Caller, Wish),
    /// A request is handled, and its reply arrives.
    Handle(Request),
    /// A request is handled, and nobody hears the reply.
    HandleUnheard(Request),
    /// A caller crashes before its effect, and comes back as the same claimant; or it opens its entry.
    AskAgain(Caller, Entrance),
    /// A caller's work has its effect, and it sends the report of that; should it crash before, then
    /// the report is one that is never delivered.
    Effect(Caller),
    /// The same, but the caller crashes, forgets it and asks again.
    ForgottenEffect(Caller),
    /// A caller's work fails without an effect, and it sends the report of that.
    Failure(Caller, bool),
    /// A caller wants more time.
    Renew(Caller),
    /// A person decides on what they see.
    Review(Judgement),
    /// A person wants the work repeated.
    Reset,
    /// The lease runs out.
    LeaseEnds,
    /// The replay window passes.
    ReplayWindowPasses,
    /// The dedupe window passes.
    WindowPasses,
}

/// What is worth seeing at least once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Witness {
    Crash,
    LostReplyRepeated,
    TurnedAway,
    Opened,
    TakenOver,
    Retried,
    WindowPassed,
    ClaimedAfterReset,
    RenewedByAskingAgain,
    Renewed,
    LateReportRefused,
    LateReportKept,
    ReportRepeated,
    FailureCorrected,
    IdFilledIn,
    Reviewed,
    LateReviewRefused,
    SecondEffect,
}

impl Model for Config {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        let key = Arc::new(Key {
            entry: None,
            runs: vec![Run::Idle; self.callers.into()],
            sent: BTreeMap::new(),
            told: Vec::new(),
            is_fresh: false,
            effects: 0,
            broken: Broken::default(),
        });
        vec![World {
            keys: vec![key; self.keys],
            witness: None,
        }]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        let busy: Vec<Caller> = (0..self.callers)
            .filter(|&caller| world.keys.iter().any(|key| key.is_busy(caller)))
            .collect();
        actions.extend(busy.iter().map(|&caller| Action::Crash(caller)));
        for (index, key) in world.keys.iter().enumerate() {
            let mut add = |step| actions.push(Action::At(index, step));
            self.steps_of_callers(key, &busy, &mut add);
            for request in key.sent.keys() {
                if key.hears_reply(request).is_some() {
                    add(Step::Handle(*request));
                }
                add(Step::HandleUnheard(*request));
            }
            if let Some(entry) = &key.entry {
                self.steps_of_operator(key, entry, &mut add);
                steps_of_time(entry, &mut add);
            }
        }
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        let mut next = world.clone();
        let witness = match action {
            Action::At(index, step) => {
                let mut key = Key::clone(&world.keys[index]);
                let witness = self.step(&mut key, step);
                let before = &*world.keys[index];
                if key == *before && !(self.has_witnesses && witness.is_some()) {
                    return None;
                }
                if key.entry != before.entry
                    && let Some(entry) = &key.entry
                {
                    key.broken |= promises::leads_on(&self.rules, entry);
                }
                next.keys[index] = Arc::new(key);
                witness
            }
            Action::Crash(caller) => {
                for key in &mut next.keys {
                    Arc::make_mut(key).end(caller);
                }
                Some(Witness::Crash)
            }
        };
        next.witness = witness.filter(|_| self.has_witnesses);
        Some(if self.is_symmetric {
            super::symmetry::representative(&next)
        } else {
            next
        })
    }

    fn within_boundary(&self, world: &World) -> bool {
        // A promise may be broken by beginning the attempt that is one too many.
        let last = self.attempts + Attempt::from(world.is_broken());
        world.keys.iter().all(|key| key.attempt() <= last)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = promises::promises();
        if self.has_witnesses {
            properties.extend(promises::witnesses());
        }
        properties
    }
}

impl Config {
    /// Whether nobody may do the work twice: no take-over, no window, and no person who sets a key free.
    pub(crate) fn allows_one_effect(&self) -> bool {
        let frees_nothing = |wish: &Wish| !wish.take_over && !wish.has_window;
        self.wishes.iter().all(frees_nothing) && self.operations == 0
    }

    fn steps_of_callers(&self, key: &Key, busy: &[Caller], add: &mut impl FnMut(Step)) {
        for (caller, run) in (0..).zip(&key.runs) {
            match *run {
                Run::Idle if !busy.contains(&caller) => {
                    for wish in self.wishes {
                        add(Step::Ask(caller, *wish));
                    }
                }
                Run::Working { wish, attempt } => {
                    add(Step::AskAgain(caller, Entrance::Gate));
                    if wish.opens {
                        add(Step::AskAgain(caller, Entrance::Ledger));
                    }
                    add(Step::Effect(caller));
                    if self.forgets_effects {
                        add(Step::ForgottenEffect(caller));
                    }
                    for retry in self.failures {
                        add(Step::Failure(caller, *retry));
                    }
                    if self.renews && !key.sent.contains_key(&Request::Renewal { attempt }) {
                        add(Step::Renew(caller));
                    }
                }
                Run::Idle | Run::Asking { .. } | Run::Over => {}
            }
        }
    }

    fn steps_of_operator(&self, key: &Key, entry: &Entry, add: &mut impl FnMut(Step)) {
        let is_operation =
            |request: &&Request| matches!(request, Request::Review { .. } | Request::Reset { .. });
        if key.sent.keys().filter(is_operation).count() >= self.operations {
            return;
        }
        let attempt = entry.attempt;
        let is_pending = matches!(entry.standing, Standing::Pending { .. });
        if is_pending || entry.conflict {
            for judgement in [Judgement::Done, Judgement::Release, Judgement::Fail] {
                if !key.sent.contains_key(&review(attempt, judgement)) {
                    add(Step::Review(judgement));
                }
            }
        } else if !key.sent.contains_key(&reset(attempt)) {
            add(Step::Reset);
        }
    }

    fn step(&self, key: &mut Key, step: Step) -> Option<Witness> {
        match step {
            Step::Ask(caller, wish) => key.ask(caller, wish, Entrance::Gate),
            Step::Handle(request) => return self.handle(key, request, true),
            Step::HandleUnheard(request) => return self.handle(key, request, false),
            Step::AskAgain(caller, entrance) => {
                let (wish, _) = key.working(caller);
                key.ask(caller, wish, entrance);
            }
            Step::Effect(caller) => {
                let (wish, attempt) = key.working(caller);
                key.effects = 2.min(key.effects + 1);
                key.end(caller);
                let done = |id| Request::Report {
                    caller: (wish.is_named && self.reports == Reports::ByClaimant)
                        .then_some(caller),
                    attempt: (!wish.is_named || self.reports != Reports::ByClaimant)
                        .then_some(attempt),
                    said: Said::Done { id },
                    of: attempt,
                };
                key.send(done(Some(caller)));
                if self.reports == Reports::IdFollows {
                    key.send(done(None));
                }
                if key.effects > 1 {
                    return Some(Witness::SecondEffect);
                }
            }
            Step::ForgottenEffect(caller) => {
                let (wish, _) = key.working(caller);
                key.effects = 2.min(key.effects + 1);
                key.ask(caller, wish, Entrance::Gate);
            }
            Step::Failure(caller, retry) => {
                let (_, attempt) = key.working(caller);
                key.end(caller);
                key.send(Request::Report {
                    caller: None,
                    attempt: Some(attempt),
                    said: Said::Failed { retry },
                    of: attempt,
                });
            }
            Step::Renew(caller) => {
                let (_, attempt) = key.working(caller);
                key.send(Request::Renewal { attempt });
            }
            Step::Review(judgement) => {
                let attempt = key.attempt();
                key.send(review(attempt, judgement));
            }
            Step::Reset => {
                let attempt = key.attempt();
                key.send(reset(attempt));
            }
            Step::LeaseEnds => key.known().standing = Standing::Pending { is_stale: true },
            Step::ReplayWindowPasses => {
                key.known().is_recognised = false;
                key.is_fresh = false;
            }
            Step::WindowPasses => key.known().window = Window::Passed,
        }
        None
    }

    fn handle(&self, key: &mut Key, request: Request, is_heard: bool) -> Option<Witness> {
        let (answer, entry) = self.rules.handle(key.entry.as_ref(), &request)?;
        let before = key.clone();
        key.entry = Some(entry);
        match (request, answer) {
            (Request::Claim { caller, wish, .. }, Answer::Verdict { claimed, .. }) => {
                if claimed {
                    key.tell(caller, wish, before.entry.as_ref());
                }
                if is_heard {
                    key.runs[usize::from(caller)] = if claimed {
                        let attempt = key.attempt();
                        Run::Working { wish, attempt }
                    } else {
                        Run::Over
                    };
                }
            }
            (
                Request::Report {
                    said: Said::Done { .. },
                    ..
                },
                _,
            ) => {
                key.sent.insert(request, true);
            }
            _ => {}
        }
        key.broken |= promises::judge(&before, request, answer, key);
        promises::witness(&before, request, answer, key)
    }
}

fn review(attempt: Attempt, judgement: Judgement) -> Request {
    Request::Review {
        attempt,
        judgement,
        reason: Reason::Usual,
    }
}

fn reset(attempt: Attempt) -> Request {
    Request::Reset {
        attempt,
        reason: Reason::Usual,
    }
}

fn steps_of_time(entry: &Entry, add: &mut impl FnMut(Step)) {
    if entry.standing == (Standing::Pending { is_stale: false }) {
        add(Step::LeaseEnds);
    }
    if entry.is_recognised {
        add(Step::ReplayWindowPasses);
    }
    if entry.window == Window::Open {
        add(Step::WindowPasses);
    }
}

impl Key {
    /// The current attempt; 0 before the first.
    pub(crate) fn attempt(&self) -> Attempt {
        self.entry.as_ref().map_or(0, |entry| entry.attempt)
    }

    fn is_busy(&self, caller: Caller) -> bool {
        matches!(
            self.runs[usize::from(caller)],
            Run::Asking { .. } | Run::Working { .. }
        )
    }

    /// Who was told first that it has this attempt.
    pub(crate) fn told(&self, attempt: Attempt) -> Option<Caller> {
        let index = usize::from(attempt).checked_sub(1)?;
        self.told.get(index).copied()
    }

    /// The caller that waits for the reply to this request.
    fn hears_reply(&self, request: &Request) -> Option<Caller> {
        match request {
            Request::Claim {
                caller,
                wish,
                entrance,
            } => {
                let (wish, entrance) = (*wish, *entrance);
                (self.runs[usize::from(*caller)] == Run::Asking { wish, entrance })
                    .then_some(*caller)
            }
            _ => None,
        }
    }

    fn known(&mut self) -> &mut Entry {
        self.entry.as_mut().expect("time passes for known keys")
    }

    fn working(&self, caller: Caller) -> (Wish, Attempt) {
        match self.runs[usize::from(caller)] {
            Run::Working { wish, attempt } => (wish, attempt),
            run => unreachable!("only who works does that, not who is {run:?}"),
        }
    }

    fn ask(&mut self, caller: Caller, wish: Wish, entrance: Entrance) {
        self.runs[usize::from(caller)] = Run::Asking { wish, entrance };
        self.send(Request::Claim {
            caller,
            wish,
            entrance,
        });
    }

    fn send(&mut self, request: Request) {
        self.sent.entry(request).or_insert(false);
    }

    fn end(&mut self, caller: Caller) {
        self.runs[usize::from(caller)] = Run::Over;
    }

    /// Keeps in mind that the caller was told that it has the current attempt.
    fn tell(&mut self, caller: Caller, wish: Wish, before: Option<&Entry>) {
        let attempt = self.attempt();
        let entry = self.entry.as_ref();
        let is_open = |entry: Option<&Entry>| {
            entry.is_some_and(|entry| matches!(entry.standing, Standing::Pending { .. }))
        };
        match self.told(attempt) {
            None => {
                self.told.push(caller);
                self.is_fresh = true;
            }
            Some(first) if first != caller || !wish.is_named => {
                self.broken |= Broken::ONE_HOLDER;
            }
            Some(_) if is_open(entry) && !is_open(before) => self.is_fresh = true,
            Some(_) => {}
        }
    }
}
