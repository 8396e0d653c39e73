//! What is promised, each with the sentence it stands for; and what must happen at least once, lest a
//! promise is kept because nothing ever happens.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::BitOrAssign;

use stateright::Property;

use super::entry::{Attempt, Caller, Entry, Judgement, Mark, Standing, What, Window};
use super::rules::{Answer, Entrance, Reason, Request, Rules, Said, Wish};
use super::world::{Config, Key, Witness, World};

pub(crate) const ONE_HOLDER: &str = "at any time at most one claimant holds a key in one attempt";
pub(crate) const OUTCOME_STAYS: &str = "a recorded outcome never changes or disappears but by the caller's own choice or by filling in a missing id";
pub(crate) const HEARS_THE_SAME: &str = "whoever was told claimed: true and asks again within the replay window, before it is settled or superseded, hears the same";
pub(crate) const DUPLICATE_IS_HARMLESS: &str =
    "a delayed duplicate of any request changes nothing of a newer attempt";
pub(crate) const ONE_EFFECT: &str =
    "with hold, no window and no operator, and honest reports, at most one effect";
pub(crate) const NEVER_LOST_UNSEEN: &str = "work claimed with pending is never lost unseen";
pub(crate) const EFFECT_IS_KEPT: &str = "an effect that was reported stands in the history";
pub(crate) const NOT_STUCK: &str =
    "no key is stuck for good: from every state some allowed call leads on";

/// Promises about steps that were broken, one bit each: a step leaves its mark in the state behind it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Broken(u8);

impl Broken {
    pub(crate) const ONE_HOLDER: Self = Self(1);
    pub(crate) const OUTCOME_STAYS: Self = Self(2);
    pub(crate) const HEARS_THE_SAME: Self = Self(4);
    pub(crate) const DUPLICATE_IS_HARMLESS: Self = Self(8);
    pub(crate) const NEVER_LOST_UNSEEN: Self = Self(16);
    pub(crate) const EFFECT_IS_KEPT: Self = Self(32);
    pub(crate) const NOT_STUCK: Self = Self(64);

    fn unless(self, is_kept: bool) -> Self {
        if is_kept { Self::default() } else { self }
    }
}

impl BitOrAssign for Broken {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

/// The promises, as stateright checks them in every state.
pub(crate) fn promises() -> Vec<Property<Config>> {
    vec![
        Property::always(ONE_HOLDER, |_, world: &World| {
            world.keeps(Broken::ONE_HOLDER)
        }),
        Property::always(OUTCOME_STAYS, |_, world: &World| {
            world.keeps(Broken::OUTCOME_STAYS)
        }),
        Property::always(HEARS_THE_SAME, |_, world: &World| {
            world.keeps(Broken::HEARS_THE_SAME)
        }),
        Property::always(DUPLICATE_IS_HARMLESS, |_, world: &World| {
            world.keeps(Broken::DUPLICATE_IS_HARMLESS)
        }),
        Property::always(ONE_EFFECT, |config: &Config, world: &World| {
            !config.allows_one_effect() || world.keys.iter().all(|key| key.effects <= 1)
        }),
        Property::always(NEVER_LOST_UNSEEN, |_, world: &World| {
            world.keeps(Broken::NEVER_LOST_UNSEEN) && world.keys.iter().all(|key| is_seen(key))
        }),
        Property::always(EFFECT_IS_KEPT, |_, world: &World| {
            world.keeps(Broken::EFFECT_IS_KEPT)
        }),
        Property::always(NOT_STUCK, |_, world: &World| world.keeps(Broken::NOT_STUCK)),
    ]
}

impl World {
    /// Whether a step has broken a promise.
    pub(crate) fn is_broken(&self) -> bool {
        self.keys.iter().any(|key| key.broken != Broken::default())
    }

    fn keeps(&self, promise: Broken) -> bool {
        self.keys.iter().all(|key| key.broken.0 & promise.0 == 0)
    }
}

/// The promises about steps that handling this request has broken.
pub(crate) fn judge(before: &Key, request: Request, answer: Answer, after: &Key) -> Broken {
    let mut broken = Broken::default();
    let (Some(old), Some(new)) = (&before.entry, &after.entry) else {
        return broken;
    };
    if let Request::Claim { caller, wish, .. } = request {
        broken |=
            Broken::HEARS_THE_SAME.unless(hears_the_same(before, old, caller, wish, answer, new));
    }
    broken |= Broken::OUTCOME_STAYS.unless(outcome_stays(old, request, new));
    broken |= Broken::DUPLICATE_IS_HARMLESS.unless(is_harmless(before, old, request, new));
    broken |= Broken::NEVER_LOST_UNSEEN.unless(ends_seen(old, request, new));
    broken |= Broken::EFFECT_IS_KEPT.unless(is_kept(request, new));
    broken
}

/// [`HEARS_THE_SAME`].
fn hears_the_same(
    before: &Key,
    old: &Entry,
    caller: Caller,
    wish: Wish,
    answer: Answer,
    new: &Entry,
) -> bool {
    let was_told = before.told(old.attempt) == Some(caller) && wish.is_named;
    let is_unsettled = matches!(old.standing, Standing::Claimed | Standing::Pending { .. });
    let is_asked = was_told && before.is_fresh && is_unsettled;
    let is_the_same = matches!(answer, Answer::Verdict { claimed: true, .. })
        && new.attempt == old.attempt
        && new.holder == old.holder;
    !is_asked || is_the_same
}

/// [`OUTCOME_STAYS`]. The caller's own choice is a window (`ttl_seconds`), `retry`, a reset, and
/// a review. That the effect did happen after all corrects a failure, whoever says so.
fn outcome_stays(old: &Entry, request: Request, new: &Entry) -> bool {
    let is_claimed_anew =
        matches!(request, Request::Claim { .. }) && new.attempt == old.attempt + 1;
    let is_chosen = match request {
        Request::Review { .. } => new.attempt == old.attempt,
        Request::Reset { .. } => new.standing == Standing::Reset && new.attempt == old.attempt,
        Request::Claim { .. } => is_claimed_anew && old.window == Window::Passed,
        Request::Report { .. } | Request::Renewal { .. } => false,
    };
    let says_done = matches!(
        request,
        Request::Report {
            said: Said::Done { .. },
            ..
        }
    );
    let is_same = new.standing == old.standing && new.attempt == old.attempt;
    let stays = match old.standing {
        Standing::Claimed | Standing::Pending { .. } | Standing::Reset => true,
        Standing::Done { id } => {
            let is_filled_in = id.is_none()
                && says_done
                && matches!(new.standing, Standing::Done { .. })
                && new.attempt == old.attempt;
            is_same || is_filled_in || is_chosen
        }
        Standing::Failed { retry } => {
            let is_corrected = says_done
                && matches!(new.standing, Standing::Done { .. })
                && new.attempt == old.attempt;
            is_same || is_corrected || is_chosen || (retry && is_claimed_anew)
        }
    };
    stays && new.history.starts_with(&old.history)
}

/// [`DUPLICATE_IS_HARMLESS`], for every request of an older attempt, delayed for the first time or
/// again. All that a newer attempt learns is that there is a conflict, and that only once; and, where it
/// has failed and nobody has claimed the key since, that an effect did happen, and with which id (rule 4
/// of the contract). A report without an attempt is of its claimant's last one, so this holds of it only
/// where that claimant has had no other.
///
/// A claim does not say of which attempt it is, and is any claimant's: it changes no attempt but its own,
/// and begins another one only where the last one is over, or hangs and may be taken over.
fn is_harmless(before: &Key, old: &Entry, request: Request, new: &Entry) -> bool {
    let of = match request {
        Request::Report { of, .. } => of,
        Request::Renewal { attempt }
        | Request::Review { attempt, .. }
        | Request::Reset { attempt, .. } => attempt,
        Request::Claim { caller, wish, .. } => {
            let is_own = before.told(old.attempt) == Some(caller) && wish.is_named;
            return is_own || new == old || (new.attempt == old.attempt + 1 && is_free(old, wish));
        }
    };
    if of >= old.attempt || is_ambiguous(before, request) {
        return true;
    }
    let says_done = matches!(
        request,
        Request::Report {
            said: Said::Done { .. },
            ..
        }
    );
    let is_correction = matches!(old.standing, Standing::Failed { .. });
    let is_its_id = nameless(old) == Some(of);
    if says_done && (is_correction || is_its_id) {
        return new.attempt == old.attempt && new.holder == old.holder;
    }
    // Where the entry was done by another attempt, a report without an id was taken for a repeat at
    // first, and is news still.
    let is_first = before.sent.get(&request) == Some(&false) || !is_in_history(old, of);
    // The claim of an attempt that had no history yet is no news of it.
    let is_old =
        |mark: &Mark| mark.attempt < old.attempt || matches!(mark.what, What::Claimed { .. });
    let added = new.history.strip_prefix(&old.history[..]);
    let only_learns = Entry {
        conflict: old.conflict || (is_first && new.conflict),
        in_ledger: new.in_ledger,
        history: new.history.clone(),
        ..old.clone()
    };
    added.is_some_and(|marks| marks.iter().all(is_old)) && *new == only_learns
}

/// Whether the history has an effect of this attempt, as an outcome or as a conflict.
fn is_in_history(entry: &Entry, of: Attempt) -> bool {
    entry.history.iter().any(|mark| {
        mark.attempt == of && matches!(mark.what, What::Done { .. } | What::Conflict { .. })
    })
}

/// The attempt that has made the entry done without an id, where it is.
fn nameless(entry: &Entry) -> Option<Attempt> {
    let nameless = |mark: &&Mark| mark.what == What::Done { id: None };
    let is_nameless = entry.standing == Standing::Done { id: None };
    let said = entry.history.iter().rfind(nameless).filter(|_| is_nameless);
    said.map(|mark| mark.attempt)
}

/// Whether a report names no attempt, and its claimant has had several.
fn is_ambiguous(key: &Key, request: Request) -> bool {
    let Request::Report {
        caller: Some(caller),
        attempt: None,
        ..
    } = request
    else {
        return false;
    };
    key.told.iter().filter(|&&told| told == caller).count() > 1
}

/// Whether a claim may begin another attempt.
fn is_free(entry: &Entry, wish: Wish) -> bool {
    match entry.standing {
        Standing::Pending { is_stale } => is_stale && wish.take_over,
        Standing::Failed { retry: true } | Standing::Reset => true,
        Standing::Claimed | Standing::Done { .. } | Standing::Failed { retry: false } => {
            entry.window == Window::Passed
        }
    }
}

/// [`NEVER_LOST_UNSEEN`], of steps: what is pending stays so, and is listed, until its outcome is
/// recorded, or somebody takes it over and is pending in its place.
fn ends_seen(old: &Entry, request: Request, new: &Entry) -> bool {
    let Standing::Pending { is_stale } = old.standing else {
        return true;
    };
    let has_outcome = matches!(
        new.standing,
        Standing::Done { .. } | Standing::Failed { .. }
    ) && new.attempt == old.attempt
        && matches!(request, Request::Report { .. } | Request::Review { .. })
        && new.history.iter().any(|mark| {
            mark.attempt == new.attempt && matches!(mark.what, What::Done { .. } | What::Failed)
        });
    let is_pending = matches!(new.standing, Standing::Pending { .. });
    let stays = is_pending && new.attempt == old.attempt;
    let is_taken_over = is_pending && new.attempt == old.attempt + 1 && is_stale;
    has_outcome || stays || is_taken_over
}

/// [`NEVER_LOST_UNSEEN`], of states: what is pending is in the ledger, where lists show it, with the
/// claim in its history; and nothing is done that did not happen, unless a person says so.
fn is_seen(key: &Key) -> bool {
    let Some(entry) = &key.entry else {
        return true;
    };
    let is_claim =
        |mark: &Mark| mark.attempt == entry.attempt && matches!(mark.what, What::Claimed { .. });
    let is_listed = entry.in_ledger && entry.history.iter().any(is_claim);
    let says_so = |mark: &Mark| mark.what == What::Reviewed(Judgement::Done);
    match entry.standing {
        Standing::Pending { .. } => is_listed,
        Standing::Done { .. } => key.effects > 0 || entry.history.iter().any(says_so),
        Standing::Claimed | Standing::Failed { .. } | Standing::Reset => true,
    }
}

/// [`EFFECT_IS_KEPT`]: as an outcome, or as a conflict.
fn is_kept(request: Request, new: &Entry) -> bool {
    let Request::Report {
        said: Said::Done { id },
        ..
    } = request
    else {
        return true;
    };
    new.history.iter().any(|mark| match mark.what {
        What::Done { id: kept } | What::Conflict { id: kept, .. } => id.is_none() || kept == id,
        _ => false,
    })
}

/// [`NOT_STUCK`]: work that is open can be settled, either way, by whoever knows its attempt; and
/// some calls, of a person where nobody else may, bring every key to where a stranger's claim is won.
pub(crate) fn leads_on(rules: &Rules, entry: &Entry) -> Broken {
    thread_local! {
        static JUDGED: RefCell<HashMap<(Rules, Entry), Broken>> = RefCell::default();
    }
    let question = (*rules, entry.clone());
    if let Some(broken) = JUDGED.with_borrow(|known| known.get(&question).copied()) {
        return broken;
    }
    let attempt = entry.attempt;
    let report = |said| Request::Report {
        caller: None,
        attempt: Some(attempt),
        said,
        of: attempt,
    };
    let is_open = matches!(entry.standing, Standing::Claimed | Standing::Pending { .. });
    let can_be_settled = |said| settles(rules.handle(Some(entry), &report(said)));
    let outcomes = [Said::Done { id: None }, Said::Failed { retry: true }];
    let is_kept =
        (!is_open || outcomes.into_iter().all(can_be_settled)) && can_be_claimed(rules, entry, 2);
    let broken = Broken::NOT_STUCK.unless(is_kept);
    JUDGED.with_borrow_mut(|known| known.insert(question, broken));
    broken
}

fn settles(handled: Option<(Answer, Entry)>) -> bool {
    handled.is_some_and(|(answer, entry)| {
        answer == Answer::Acted(Some(true))
            && matches!(
                entry.standing,
                Standing::Done { .. } | Standing::Failed { .. }
            )
    })
}

/// Whether a stranger wins the key after at most so many other calls.
fn can_be_claimed(rules: &Rules, entry: &Entry, calls: u8) -> bool {
    const STRANGER: Caller = 25;
    let wish = Wish {
        is_named: true,
        pending: true,
        take_over: false,
        has_window: false,
        opens: false,
    };
    let claim = Request::Claim {
        caller: STRANGER,
        wish,
        entrance: Entrance::Gate,
    };
    let is_won = matches!(
        rules.handle(Some(entry), &claim),
        Some((Answer::Verdict { claimed: true, .. }, _))
    );
    let attempt = entry.attempt;
    let judgement = Judgement::Release;
    // A repeat of what was decided before decides nothing, so the reason has to be another one.
    let reason = Reason::Another;
    let leads_there = |request| match rules.handle(Some(entry), &request) {
        Some((Answer::Acted(Some(true)), next)) => can_be_claimed(rules, &next, calls - 1),
        _ => false,
    };
    is_won
        || (calls > 0
            && [
                Request::Review {
                    attempt,
                    judgement,
                    reason,
                },
                Request::Reset { attempt, reason },
            ]
            .into_iter()
            .any(leads_there))
}

/// What must happen at least once, in a configuration whose states say by what they were reached.
pub(crate) fn witnesses() -> Vec<Property<Config>> {
    macro_rules! sometimes {
        ($($witness:ident: $sentence:literal,)*) => {
            vec![$(Property::sometimes($sentence, |_, world: &World| {
                world.witness == Some(Witness::$witness)
            })),*]
        };
    }
    sometimes! {
        Crash: "a caller crashes",
        LostReplyRepeated: "a lost reply is repeated",
        TurnedAway: "a caller is turned away",
        Opened: "a key claimed at the gate is opened",
        TakenOver: "a take-over happens",
        Retried: "a failed key is claimed anew",
        WindowPassed: "a window passes, and the key is claimed anew",
        ClaimedAfterReset: "an operator resets a key, and it is claimed anew",
        RenewedByAskingAgain: "asking again renews a lease that has run out",
        Renewed: "a lease that has run out is renewed",
        LateReportRefused: "a late report is refused",
        LateReportKept: "a late report of an effect is kept as a conflict",
        ReportRepeated: "a repeated report changes nothing",
        FailureCorrected: "the report of an effect corrects a failure",
        IdFilledIn: "a missing id is filled in",
        Reviewed: "an operator reviews what hangs",
        LateReviewRefused: "a late review is refused",
        SecondEffect: "there is a second effect, where nobody promises that there is none",
    }
}

/// What is worth seeing of a request that was handled.
pub(crate) fn witness(
    before: &Key,
    request: Request,
    answer: Answer,
    after: &Key,
) -> Option<Witness> {
    let (old, new) = (before.entry.as_ref()?, after.entry.as_ref()?);
    let is_late = |attempt| attempt < old.attempt;
    match (request, answer) {
        (Request::Claim { .. }, Answer::Verdict { claimed: false, .. }) => {
            Some(Witness::TurnedAway)
        }
        (Request::Claim { .. }, _) if new.attempt > old.attempt => Some(match old.standing {
            Standing::Pending { .. } => Witness::TakenOver,
            _ if old.window == Window::Passed => Witness::WindowPassed,
            Standing::Reset => Witness::ClaimedAfterReset,
            _ => Witness::Retried,
        }),
        (Request::Claim { .. }, _) => Some(match old.standing {
            Standing::Claimed if new.standing != old.standing => Witness::Opened,
            Standing::Pending { is_stale: true } => Witness::RenewedByAskingAgain,
            _ => Witness::LostReplyRepeated,
        }),
        (Request::Report { of, .. }, Answer::Acted(None)) if is_late(of) => {
            Some(if new.history == old.history {
                Witness::LateReportRefused
            } else {
                Witness::LateReportKept
            })
        }
        (Request::Report { .. }, Answer::Acted(Some(false))) => Some(Witness::ReportRepeated),
        (Request::Report { .. }, Answer::Acted(Some(true))) => match old.standing {
            Standing::Failed { .. } => Some(Witness::FailureCorrected),
            Standing::Done { .. } => Some(Witness::IdFilledIn),
            _ => None,
        },
        (Request::Renewal { .. }, Answer::Acted(Some(true))) => Some(Witness::Renewed),
        (Request::Review { .. }, Answer::Acted(Some(true))) => Some(Witness::Reviewed),
        (Request::Review { attempt, .. }, Answer::Acted(None)) if is_late(attempt) => {
            Some(Witness::LateReviewRefused)
        }
        _ => None,
    }
}
