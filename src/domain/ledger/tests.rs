//! The numbered rules for reports, one by one, and what holds whatever happens.
//!
//! Every key is claimed by `a()` first, with a dedupe window of `TTL` seconds. Time passes only
//! where a test says so.

use serde_json::json;

use super::*;
use crate::domain::claim::{Change, Claim, Decision, Door, OnStale, decide};

const LEASE: u32 = 600;
const TTL: u32 = 3600;
const REPLAY: u32 = 1800;

fn start() -> Time {
    "2026-11-30T12:00:00Z".parse().expect("a time")
}

fn key() -> IdempotencyKey {
    IdempotencyKey::try_from("k".to_owned()).expect("a key")
}

fn holder(claimant: &str, api_key: &str) -> Option<Holder> {
    Some(Holder {
        claimant: claimant.to_owned(),
        api_key: Some(api_key.to_owned()),
    })
}

fn a() -> Option<Holder> {
    holder("231@a:0:0", "n8n")
}

fn b() -> Option<Holder> {
    holder("232@a:0:0", "n8n")
}

fn c() -> Option<Holder> {
    holder("233@a:0:0", "n8n")
}

/// The text of `a()` under the name of another API key.
fn a_elsewhere() -> Option<Holder> {
    holder("231@a:0:0", "shop")
}

fn gate(who: Option<Holder>) -> Claim {
    Claim {
        key: key(),
        order_id: None,
        holder: who,
        ttl_seconds: Some(TTL),
        payload_sha256: None,
        pending: None,
        on_stale: OnStale::TakeOver,
        door: Door::Gate,
    }
}

fn pending(who: Option<Holder>) -> Claim {
    Claim {
        pending: Some(LEASE),
        ..gate(who)
    }
}

fn outcome(attempt: Option<u32>, outcome: Outcome) -> Report {
    Report {
        key: key(),
        attempt,
        holder: None,
        outcome,
        effects: Vec::new(),
    }
}

/// A report of `done` that names neither attempt nor claimant.
fn done(id: &str) -> Report {
    let done = Outcome::Done {
        external_id: Some(id.to_owned()),
        result: None,
    };
    outcome(None, done)
}

fn done_without_id() -> Report {
    let done = Outcome::Done {
        external_id: None,
        result: None,
    };
    outcome(None, done)
}

/// A report of `failed`, which names its attempt always.
fn failed(attempt: u32) -> Report {
    let failed = Outcome::Failed {
        reason: Some("declined".to_owned()),
        retry: true,
    };
    outcome(Some(attempt), failed)
}

fn failed_for_good(attempt: u32) -> Report {
    let failed = Outcome::Failed {
        reason: None,
        retry: false,
    };
    outcome(Some(attempt), failed)
}

fn of(attempt: u32, report: Report) -> Report {
    Report {
        attempt: Some(attempt),
        ..report
    }
}

fn by(who: Option<Holder>, report: Report) -> Report {
    Report {
        holder: who,
        ..report
    }
}

/// A key, its history, and the time.
#[derive(Debug, Clone, PartialEq)]
struct Work {
    state: KeyState,
    history: Vec<Event>,
    now: Time,
}

impl Work {
    fn claimed(claim: &Claim) -> Self {
        let first = decide(None, claim, start(), seconds(REPLAY)).expect("an unknown key");
        let mut work = Self {
            state: first.state.clone(),
            history: Vec::new(),
            now: start(),
        };
        work.write(&first);
        work
    }

    fn write(&mut self, decision: &Decision) {
        self.state = decision.state.clone();
        if let Change::State(events) = &decision.change {
            self.history.extend_from_slice(events);
        }
    }

    fn wait(&mut self, count: u32) {
        self.now += seconds(count);
    }

    fn ask(&mut self, claim: &Claim) -> Decision {
        let decision =
            decide(Some(&self.state), claim, self.now, seconds(REPLAY)).expect("no payload");
        self.write(&decision);
        decision
    }

    /// A claim that makes another attempt.
    #[track_caller]
    fn claim_anew(&mut self, claim: &Claim) {
        let before = self.state.attempt;
        assert!(self.ask(claim).claimed);
        assert_eq!(self.state.attempt, before + 1);
    }

    fn report(&mut self, report: &Report) -> Result<bool, Refusal> {
        let settlement = settle(&self.state, &self.history, report, self.now);
        self.state = settlement.state;
        self.history.extend(settlement.events);
        settlement.answer
    }

    /// A report that changes something.
    #[track_caller]
    fn tell(&mut self, report: &Report) {
        assert_eq!(self.report(report), Ok(true));
    }

    fn happenings(&self) -> Vec<(u32, &Happening)> {
        let events = self.history.iter();
        events
            .map(|event| (event.attempt, &event.happening))
            .collect()
    }

    fn conflicts(&self) -> usize {
        let events = self.history.iter();
        events
            .filter(|event| matches!(event.happening, Happening::Conflict { .. }))
            .count()
    }

    #[track_caller]
    fn last_event(&self) -> &Event {
        self.history.last().expect("a history")
    }

    fn external_id(&self) -> Option<&str> {
        self.state.effect().0.map(String::as_str)
    }

    fn status(&self) -> Status {
        self.state.status(self.now)
    }
}

/// Attempt 1 is pending.
fn under_way() -> Work {
    Work::claimed(&pending(a()))
}

/// Claimed at the gate alone.
fn at_the_gate() -> Work {
    Work::claimed(&gate(a()))
}

/// Attempt 1 is pending, without a claimant.
fn anonymous() -> Work {
    Work::claimed(&pending(None))
}

/// `b()` has taken attempt 2 over; nobody has reported of attempt 1.
fn taken_over() -> Work {
    let mut work = under_way();
    work.wait(LEASE + 1);
    work.claim_anew(&pending(b()));
    work
}

/// Attempt 1 failed, and `b()` has claimed attempt 2.
fn retried() -> Work {
    let mut work = under_way();
    work.tell(&failed(1));
    work.claim_anew(&pending(b()));
    work
}

/// Attempt 1 came to what is reported, its window passed, and `b()` has claimed attempt 2.
fn in_a_new_window(report: &Report) -> Work {
    let mut work = under_way();
    work.tell(report);
    work.wait(TTL + 1);
    work.claim_anew(&pending(b()));
    work
}

/// Attempt 1 has been taken over, and attempt 2 failed.
fn failed_after_take_over() -> Work {
    let mut work = taken_over();
    work.tell(&failed(2));
    work
}

fn done_event(id: &str) -> Happening {
    Happening::Done {
        external_id: Some(id.to_owned()),
    }
}

fn failed_event() -> Happening {
    Happening::Failed {
        reason: Some("declined".to_owned()),
        retry: true,
    }
}

fn conflict_event(refused: RefusalKind, id: &str) -> Happening {
    Happening::Conflict {
        refused,
        external_id: Some(id.to_owned()),
        result: None,
    }
}

fn already_done(external_id: &str, reported: Option<&str>) -> Refusal {
    Refusal::AlreadyDone {
        external_id: Some(external_id.to_owned()),
        reported_external_id: reported.map(str::to_owned),
    }
}

/// The report is answered so, and nothing at all is written.
#[track_caller]
fn assert_nothing_changes(work: &mut Work, report: &Report, answer: Result<bool, Refusal>) {
    work.wait(1);
    let before = work.clone();
    assert_eq!(work.report(report), answer, "{report:?}");
    assert_eq!(*work, before, "{report:?}");
}

/// The report is a repeat.
#[track_caller]
fn assert_held(work: &mut Work, report: &Report) {
    assert_nothing_changes(work, report, Ok(false));
}

/// The report of an effect is refused and stands in the history; of the entry, nothing but
/// the flag changes.
#[track_caller]
fn assert_conflict(work: &mut Work, report: &Report, refusal: Refusal) {
    work.wait(1);
    let before = work.state.clone();
    let conflicts = work.conflicts();
    let kind = refusal.kind();
    assert_eq!(work.report(report), Err(refusal), "{report:?}");
    let expected = KeyState {
        conflict: true,
        in_ledger: true,
        updated_at: work.now,
        ..before
    };
    assert_eq!(work.state, expected);
    assert_eq!(work.conflicts(), conflicts + 1);
    let Outcome::Done {
        external_id,
        result,
    } = report.outcome.clone()
    else {
        panic!("no effect");
    };
    let happening = Happening::Conflict {
        refused: kind,
        external_id,
        result,
    };
    assert_eq!(work.last_event().happening, happening);
    assert_eq!(work.last_event().at, work.now);
}

mod rule_1_a_known_key_has_an_entry {
    use super::*;

    #[test]
    fn done_makes_the_entry_of_a_key_at_the_gate() {
        let mut work = at_the_gate();
        work.wait(5);
        work.tell(&done("ch_1"));
        assert!(work.state.in_ledger);
        assert_eq!(work.status(), Status::Done);
        assert_eq!(work.external_id(), Some("ch_1"));
        let claimed = Happening::Claimed { after: None };
        let expected = [(1, &claimed), (1, &done_event("ch_1"))];
        assert_eq!(work.happenings(), expected);
    }

    #[test]
    fn failed_makes_the_entry_of_a_key_at_the_gate() {
        let mut work = at_the_gate();
        work.tell(&failed(1));
        assert!(work.state.in_ledger);
        assert_eq!(work.status(), Status::Failed);
        let claimed = Happening::Claimed { after: None };
        let expected = [(1, &claimed), (1, &failed_event())];
        assert_eq!(work.happenings(), expected);
    }

    #[test]
    fn the_history_then_begins_with_the_claim() {
        let mut work = at_the_gate();
        work.wait(5);
        work.tell(&done("ch_1"));
        assert_eq!(work.history[0].at, start());
        assert_eq!(work.history[0].holder, a());
        assert_eq!(work.history[1].at, work.now);
    }

    #[test]
    fn an_entry_that_is_there_is_not_made_again() {
        let mut work = under_way();
        let before = work.history.len();
        work.tell(&done("ch_1"));
        assert_eq!(work.history.len(), before + 1);
    }

    #[test]
    fn a_key_of_raw_sql_takes_any_claimant() {
        for report in [by(a(), done("ch_1")), by(b(), failed(1)), done("ch_1")] {
            let mut work = Work::claimed(&gate(None));
            work.tell(&report);
        }
    }

    #[test]
    fn a_passed_window_does_not_matter() {
        let mut work = at_the_gate();
        work.wait(TTL + 1);
        work.tell(&by(a(), done("ch_1")));
        assert_eq!(work.status(), Status::Done);
    }

    #[test]
    fn a_passed_window_does_not_free_what_is_settled() {
        let mut work = under_way();
        work.tell(&done("ch_1"));
        work.wait(TTL + 1);
        assert_held(&mut work, &done("ch_1"));
        let refusal = already_done("ch_1", Some("ch_2"));
        assert_conflict(&mut work, &done("ch_2"), refusal);
    }

    #[test]
    fn what_is_reported_is_what_the_entry_says() {
        let mut work = under_way();
        let result = json!({"paid": true});
        let outcome = Outcome::Done {
            external_id: Some("ch_1".to_owned()),
            result: Some(result.clone()),
        };
        work.tell(&Report {
            outcome,
            ..done_without_id()
        });
        let external_id = "ch_1".to_owned();
        assert_eq!(work.state.effect(), (Some(&external_id), Some(&result)));

        let mut work = under_way();
        work.tell(&failed_for_good(1));
        let phase = Phase::Failed {
            reason: None,
            retry: false,
        };
        assert_eq!(work.state.phase, phase);
    }

    #[test]
    fn a_report_touches_neither_attempt_nor_claimant_nor_counters() {
        let mut work = under_way();
        work.ask(&gate(b()));
        let before = work.state.clone();
        work.wait(5);
        work.tell(&by(a(), done("ch_1")));
        let expected = KeyState {
            phase: work.state.phase.clone(),
            expires_at: work.state.expires_at,
            updated_at: work.now,
            ..before
        };
        assert_eq!(work.state, expected);
    }

    #[test]
    fn the_history_says_who_reported() {
        let mut work = anonymous();
        work.tell(&by(b(), done("ch_1")));
        assert_eq!(work.last_event().holder, b());
    }

    #[test]
    fn the_history_does_not_say_it_was_somebody_else() {
        let mut work = failed_after_take_over();
        work.tell(&of(1, done("ch_1")));
        assert_ne!(work.last_event().holder, b(), "who never held attempt 1");
    }
}

mod rule_2_a_repeat_changes_nothing {
    use super::*;

    #[test]
    fn done_again_with_the_same_external_id() {
        let mut work = under_way();
        work.tell(&done("ch_1"));
        for report in [
            done("ch_1"),
            of(1, done("ch_1")),
            by(a(), done("ch_1")),
            by(a(), of(1, done("ch_1"))),
        ] {
            assert_held(&mut work, &report);
        }
    }

    #[test]
    fn done_again_without_an_external_id() {
        let mut work = under_way();
        work.tell(&done("ch_1"));
        assert_held(&mut work, &done_without_id());
        assert_held(&mut work, &of(1, done_without_id()));
    }

    #[test]
    fn done_without_an_external_id_twice() {
        let mut work = under_way();
        work.tell(&done_without_id());
        assert_held(&mut work, &done_without_id());
    }

    #[test]
    fn done_again_by_somebody_else() {
        let mut work = under_way();
        work.tell(&done("ch_1"));
        assert_held(&mut work, &by(b(), done("ch_1")));
        assert_held(&mut work, &by(b(), of(1, done("ch_1"))));
    }

    #[test]
    fn done_again_without_attempt_or_claimant_even_above_attempt_1() {
        let mut work = taken_over();
        work.tell(&of(2, done("ch_1")));
        assert_held(&mut work, &done("ch_1"));
    }

    #[test]
    fn failed_again() {
        let mut work = under_way();
        work.tell(&failed(1));
        assert_held(&mut work, &failed(1));
        assert_held(&mut work, &by(b(), failed(1)));
    }

    #[test]
    fn done_after_a_new_window_has_begun() {
        let mut work = in_a_new_window(&done("ch_1"));
        assert_held(&mut work, &of(1, done("ch_1")));
        assert_held(&mut work, &of(1, done_without_id()));
        assert_held(&mut work, &by(a(), of(1, done("ch_1"))));
    }

    #[test]
    fn done_after_the_new_attempt_is_settled_too() {
        let mut work = in_a_new_window(&done("ch_1"));
        work.tell(&of(2, done("ch_2")));
        assert_held(&mut work, &of(1, done("ch_1")));
        assert_held(&mut work, &of(2, done("ch_2")));
    }

    #[test]
    fn done_after_the_new_attempt_has_been_taken_over() {
        let mut work = in_a_new_window(&done("ch_1"));
        work.wait(LEASE + 1);
        work.claim_anew(&pending(c()));
        assert_held(&mut work, &of(1, done("ch_1")));
    }

    #[test]
    fn done_of_a_claimant_that_names_no_attempt_after_a_new_window_has_begun() {
        let report = by(a(), done("ch_1"));
        let mut work = in_a_new_window(&report);
        assert_held(&mut work, &report);
    }

    #[test]
    fn done_of_a_past_attempt_does_not_settle_the_failed_one() {
        let mut work = in_a_new_window(&done("ch_1"));
        work.tell(&failed(2));
        assert_held(&mut work, &of(1, done("ch_1")));
        assert_eq!(work.status(), Status::Failed);
    }

    #[test]
    fn failed_after_the_key_has_been_claimed_again() {
        let mut work = retried();
        assert_held(&mut work, &failed(1));
        assert_held(&mut work, &by(a(), failed(1)));
    }

    #[test]
    fn failed_after_the_new_attempt_has_been_taken_over() {
        let mut work = retried();
        work.wait(LEASE + 1);
        work.claim_anew(&pending(c()));
        assert_held(&mut work, &failed(1));
    }

    #[test]
    fn failed_after_the_new_attempt_is_done() {
        let mut work = retried();
        work.tell(&of(2, done("ch_2")));
        assert_held(&mut work, &failed(1));
    }

    #[test]
    fn failed_after_the_effect_turned_out_to_have_happened() {
        let mut work = under_way();
        work.tell(&failed(1));
        work.tell(&done("ch_1"));
        assert_held(&mut work, &failed(1));
        assert_eq!(work.status(), Status::Done);
    }

    #[test]
    fn what_the_entry_holds_though_it_has_no_history() {
        for report in [done("ch_1"), done_without_id(), failed(1)] {
            let mut work = under_way();
            work.tell(&report);
            work.history.clear();
            assert_held(&mut work, &report);
            assert_held(&mut work, &of(1, report));
        }
    }

    #[test]
    fn another_external_id_is_no_repeat() {
        let mut work = in_a_new_window(&done("ch_1"));
        let refusal = Refusal::Superseded { current: 2 };
        assert_conflict(&mut work, &of(1, done("ch_2")), refusal);
    }

    #[test]
    fn the_same_report_of_another_attempt_is_no_repeat() {
        for report in [done("ch_1"), done_without_id()] {
            let mut work = in_a_new_window(&done("ch_1"));
            work.tell(&of(2, report));
            assert_eq!(work.status(), Status::Done);
        }
        let mut work = retried();
        work.tell(&failed(2));
        assert_eq!(work.status(), Status::Failed);
    }

    #[test]
    fn another_outcome_is_no_repeat() {
        let mut work = under_way();
        work.tell(&failed(1));
        work.tell(&of(1, done_without_id()));
    }

    #[test]
    fn an_effect_of_a_later_attempt_of_the_same_claimant_is_no_repeat() {
        let mut work = in_a_new_window(&by(a(), done("ch_1")));
        work.wait(LEASE + 1);
        work.claim_anew(&pending(a()));
        work.wait(LEASE + 1);
        work.claim_anew(&pending(c()));
        // `a()` means attempt 3, of which nobody has said anything.
        let report = by(a(), done_without_id());
        assert_conflict(&mut work, &report, Refusal::NotHolder);
    }

    #[test]
    fn an_effect_is_no_repeat_of_what_somebody_said_of_an_earlier_attempt() {
        let mut work = failed_after_take_over();
        work.tell(&of(1, done("ch_1")));
        work.wait(TTL + 1);
        work.claim_anew(&pending(c()));
        // `b()` means attempt 2, which failed.
        let report = by(b(), done_without_id());
        assert_conflict(&mut work, &report, Refusal::NotHolder);
    }
}

mod rule_2_a_first_external_id_is_filled_in {
    use super::*;

    #[test]
    fn it_is_filled_in() {
        for report in [done("ch_1"), of(1, done("ch_1")), by(a(), done("ch_1"))] {
            let mut work = under_way();
            work.tell(&done_without_id());
            work.wait(5);
            work.tell(&report);
            assert_eq!(work.external_id(), Some("ch_1"));
            assert_eq!(work.last_event().attempt, 1);
            assert_eq!(work.last_event().happening, done_event("ch_1"));
            assert_eq!(work.state.updated_at, work.now);
        }
    }

    #[test]
    fn the_result_stays() {
        let mut work = under_way();
        let outcome = Outcome::Done {
            external_id: None,
            result: Some(json!(7)),
        };
        work.tell(&Report {
            outcome,
            ..done_without_id()
        });
        work.tell(&done("ch_1"));
        assert_eq!(work.state.effect().1, Some(&json!(7)));
    }

    /// Whoever never held an attempt may have made an effect of their own.
    #[test]
    fn that_of_a_claimant_who_never_held_it_is_not() {
        let mut work = under_way();
        work.tell(&done_without_id());
        assert_conflict(&mut work, &by(b(), done("ch_1")), Refusal::NotHolder);
        assert_eq!(work.external_id(), None);
    }

    #[test]
    fn once_filled_in_it_is_repeated() {
        let mut work = under_way();
        work.tell(&done_without_id());
        work.tell(&done("ch_1"));
        assert_held(&mut work, &done("ch_1"));
        assert_held(&mut work, &done_without_id());
    }

    #[test]
    fn once_filled_in_another_one_is_refused() {
        let mut work = under_way();
        work.tell(&done_without_id());
        work.tell(&done("ch_1"));
        let refusal = already_done("ch_1", Some("ch_2"));
        assert_conflict(&mut work, &done("ch_2"), refusal);
    }

    #[test]
    fn that_of_a_past_attempt_is_filled_in_its_history() {
        let mut work = in_a_new_window(&done_without_id());
        let before = work.state.clone();
        work.wait(5);
        work.tell(&of(1, done("ch_1")));
        assert_eq!(work.last_event().attempt, 1);
        assert_eq!(work.last_event().happening, done_event("ch_1"));
        assert_eq!(work.state.phase, before.phase);
        assert_eq!(work.state.attempt, 2);
        assert!(!work.state.conflict);
    }

    #[test]
    fn that_of_a_past_attempt_is_repeated_once_filled_in() {
        let mut work = in_a_new_window(&done_without_id());
        work.tell(&of(1, done("ch_1")));
        assert_held(&mut work, &of(1, done("ch_1")));
        assert_held(&mut work, &of(1, done_without_id()));
        let refusal = Refusal::Superseded { current: 2 };
        assert_conflict(&mut work, &of(1, done("ch_2")), refusal);
    }

    #[test]
    fn that_of_a_past_attempt_does_not_touch_the_settled_one() {
        let mut work = in_a_new_window(&done_without_id());
        work.tell(&of(2, done_without_id()));
        work.tell(&of(1, done("ch_1")));
        assert_eq!(work.external_id(), None);
    }

    #[test]
    fn that_of_a_past_attempt_does_not_settle_the_failed_one() {
        let mut work = in_a_new_window(&done_without_id());
        work.tell(&failed(2));
        work.tell(&of(1, done("ch_1")));
        assert_eq!(work.status(), Status::Failed);
    }

    #[test]
    fn that_of_a_past_attempt_which_the_entry_says_is_done_is_filled_in_there() {
        let mut work = failed_after_take_over();
        work.tell(&of(1, done_without_id()));
        work.tell(&of(1, done("ch_1")));
        assert_eq!(work.external_id(), Some("ch_1"));
    }

    #[test]
    fn a_past_claimant_that_names_no_attempt_does_not_speak_for_the_current_one() {
        for own in [done_without_id(), done("ch_1"), done("ch_2")] {
            let mut work = in_a_new_window(&by(a(), done_without_id()));
            // Filled in or refused: attempt 2 is still under way, and `b()` has its say.
            let _ = work.report(&by(a(), done("ch_1")));
            assert_eq!(work.status(), Status::Pending);
            work.tell(&by(b(), of(2, own)));
            assert_eq!(work.status(), Status::Done);
        }
    }
}

mod rule_3_the_attempt_is_known {
    use super::*;

    #[test]
    fn an_attempt_above_the_current_is_refused() {
        let mut work = under_way();
        let refusal = Refusal::AttemptAhead { current: 1 };
        assert_nothing_changes(&mut work, &failed(2), Err(refusal.clone()));
        assert_conflict(&mut work, &of(2, done("ch_1")), refusal);
        assert_eq!(work.last_event().attempt, 2);
    }

    #[test]
    fn an_attempt_above_the_current_is_refused_even_to_the_holder() {
        let mut work = under_way();
        let report = by(a(), of(7, done("ch_1")));
        assert_conflict(&mut work, &report, Refusal::AttemptAhead { current: 1 });
    }

    #[test]
    fn an_attempt_above_the_current_is_refused_even_after_failed() {
        let mut work = under_way();
        work.tell(&failed(1));
        let refusal = Refusal::AttemptAhead { current: 1 };
        assert_conflict(&mut work, &of(2, done("ch_1")), refusal);
        assert_eq!(work.status(), Status::Failed);
    }

    #[test]
    fn the_current_attempt_is_accepted() {
        let mut work = taken_over();
        work.tell(&of(2, done("ch_1")));
        assert_eq!(work.external_id(), Some("ch_1"));
    }

    #[test]
    fn attempt_or_claimant_is_required_above_attempt_1() {
        let mut work = taken_over();
        let refusal = Refusal::AttemptRequired { current: 2 };
        assert_conflict(&mut work, &done("ch_1"), refusal);
        assert_eq!(work.status(), Status::Pending);
    }

    #[test]
    fn attempt_or_claimant_is_required_even_after_failed() {
        let mut work = failed_after_take_over();
        let refusal = Refusal::AttemptRequired { current: 2 };
        assert_conflict(&mut work, &done("ch_1"), refusal);
        assert_eq!(work.status(), Status::Failed);
    }

    #[test]
    fn neither_is_required_of_attempt_1() {
        let mut work = under_way();
        work.tell(&done("ch_1"));
        assert_eq!(work.status(), Status::Done);
    }

    #[test]
    fn either_is_enough_above_attempt_1() {
        for report in [of(2, done("ch_1")), by(b(), done("ch_1"))] {
            let mut work = taken_over();
            work.tell(&report);
            assert_eq!(work.status(), Status::Done);
            assert_eq!(work.last_event().attempt, 2);
        }
    }
}

mod rule_4_done_after_failed {
    use super::*;

    #[test]
    fn it_is_accepted() {
        for report in [done("ch_1"), of(1, done("ch_1")), by(a(), done("ch_1"))] {
            let mut work = under_way();
            work.tell(&failed(1));
            work.tell(&report);
            assert_eq!(work.status(), Status::Done);
            assert_eq!(work.external_id(), Some("ch_1"));
        }
    }

    #[test]
    fn it_is_accepted_after_failed_for_good() {
        let mut work = under_way();
        work.tell(&failed_for_good(1));
        work.tell(&done("ch_1"));
        assert_eq!(work.status(), Status::Done);
    }

    #[test]
    fn it_is_accepted_whatever_the_claimant() {
        for who in [b(), a_elsewhere()] {
            let mut work = under_way();
            work.tell(&failed(1));
            work.tell(&by(who, done("ch_1")));
            assert_eq!(work.status(), Status::Done);
        }
    }

    #[test]
    fn it_is_accepted_of_an_attempt_below() {
        let mut work = failed_after_take_over();
        work.tell(&of(1, done("ch_1")));
        assert_eq!(work.status(), Status::Done);
        assert_eq!(work.external_id(), Some("ch_1"));
        assert_eq!(work.state.attempt, 2);
        assert_eq!(work.last_event().attempt, 1);
        assert!(!work.state.conflict);
    }

    #[test]
    fn it_is_accepted_after_the_window_where_nobody_has_claimed_since() {
        let mut work = under_way();
        work.tell(&failed(1));
        work.wait(TTL + 1);
        work.tell(&of(1, done("ch_1")));
        assert_eq!(work.status(), Status::Done);
    }

    #[test]
    fn it_is_then_repeated() {
        let mut work = failed_after_take_over();
        work.tell(&of(1, done("ch_1")));
        assert_held(&mut work, &of(1, done("ch_1")));
        assert_held(&mut work, &of(2, done("ch_1")));
        let refusal = already_done("ch_1", Some("ch_2"));
        assert_conflict(&mut work, &of(2, done("ch_2")), refusal);
    }

    #[test]
    fn it_is_refused_where_somebody_has_claimed_since() {
        let mut work = retried();
        let refusal = Refusal::Superseded { current: 2 };
        assert_conflict(&mut work, &of(1, done("ch_1")), refusal);
        assert_eq!(work.status(), Status::Pending);
        let report = by(a(), done("ch_2"));
        assert_conflict(&mut work, &report, Refusal::NotHolder);
    }

    #[test]
    fn failed_of_an_attempt_below_is_refused_all_the_same() {
        let mut work = failed_after_take_over();
        let refusal = Refusal::Superseded { current: 2 };
        assert_nothing_changes(&mut work, &failed(1), Err(refusal));
    }
}

mod rule_5_only_the_holder_of_the_attempt {
    use super::*;

    #[test]
    fn an_attempt_below_is_superseded() {
        let mut work = taken_over();
        let refusal = Refusal::Superseded { current: 2 };
        assert_nothing_changes(&mut work, &failed(1), Err(refusal.clone()));
        assert_conflict(&mut work, &of(1, done("ch_1")), refusal);
        assert_eq!(work.last_event().attempt, 1);
        assert_eq!(work.status(), Status::Pending);
    }

    #[test]
    fn an_attempt_below_is_superseded_even_of_its_own_claimant() {
        let mut work = taken_over();
        let refusal = Refusal::Superseded { current: 2 };
        assert_nothing_changes(&mut work, &by(a(), failed(1)), Err(refusal.clone()));
        assert_conflict(&mut work, &by(a(), of(1, done("ch_1"))), refusal);
    }

    #[test]
    fn an_attempt_below_is_superseded_even_where_the_current_is_done() {
        let mut work = taken_over();
        work.tell(&of(2, done("ch_2")));
        let refusal = Refusal::Superseded { current: 2 };
        assert_nothing_changes(&mut work, &failed(1), Err(refusal.clone()));
        assert_conflict(&mut work, &of(1, done("ch_1")), refusal);
        assert_eq!(work.external_id(), Some("ch_2"));
    }

    #[test]
    fn a_claimant_that_is_not_the_holder_is_refused() {
        let mut work = under_way();
        assert_nothing_changes(&mut work, &by(b(), failed(1)), Err(Refusal::NotHolder));
        assert_conflict(&mut work, &by(b(), done("ch_1")), Refusal::NotHolder);
    }

    #[test]
    fn the_right_attempt_does_not_help_a_wrong_claimant() {
        let mut work = under_way();
        let report = by(b(), of(1, done("ch_1")));
        assert_conflict(&mut work, &report, Refusal::NotHolder);
    }

    #[test]
    fn the_holder_of_an_earlier_attempt_is_not_the_holder() {
        let mut work = taken_over();
        let report = by(a(), done("ch_1"));
        assert_conflict(&mut work, &report, Refusal::NotHolder);
    }

    #[test]
    fn the_same_text_under_the_name_of_another_api_key_is_not_the_holder() {
        let mut work = under_way();
        let report = by(a_elsewhere(), failed(1));
        assert_nothing_changes(&mut work, &report, Err(Refusal::NotHolder));
        let report = by(a_elsewhere(), done("ch_1"));
        assert_conflict(&mut work, &report, Refusal::NotHolder);
    }

    #[test]
    fn the_holder_is_not_refused() {
        let mut work = under_way();
        work.tell(&by(a(), done("ch_1")));
        let mut work = under_way();
        work.tell(&by(a(), failed(1)));
    }

    #[test]
    fn where_the_holder_has_no_claimant_anybody_may_report() {
        for who in [a(), b(), None] {
            let mut work = anonymous();
            work.tell(&by(who, of(1, done("ch_1"))));
            assert_eq!(work.status(), Status::Done);
        }
    }

    #[test]
    fn who_names_the_attempt_need_not_be_the_claimant() {
        let mut work = under_way();
        work.tell(&of(1, done("ch_1")));
    }

    #[test]
    fn a_pending_key_is_its_holders_until_it_is_taken_over() {
        let mut work = under_way();
        work.wait(LEASE + REPLAY + TTL);
        assert_eq!(work.status(), Status::Stale);
        work.tell(&by(a(), done("ch_1")));
        assert_eq!(work.status(), Status::Done);
    }

    #[test]
    fn superseded_comes_before_not_holder() {
        let mut work = taken_over();
        let refusal = Refusal::Superseded { current: 2 };
        assert_conflict(&mut work, &by(c(), of(1, done("ch_1"))), refusal);
    }

    #[test]
    fn not_holder_comes_before_already_done() {
        let mut work = under_way();
        work.tell(&done("ch_1"));
        let report = by(b(), done("ch_2"));
        assert_conflict(&mut work, &report, Refusal::NotHolder);
    }
}

mod rule_6_done_is_done {
    use super::*;

    #[test]
    fn another_external_id_is_refused_with_both() {
        let mut work = under_way();
        work.tell(&done("ch_1"));
        let refusal = already_done("ch_1", Some("ch_2"));
        assert_conflict(&mut work, &of(1, done("ch_2")), refusal);
        assert_eq!(work.external_id(), Some("ch_1"));
    }

    #[test]
    fn failed_is_refused_and_changes_nothing() {
        let mut work = under_way();
        work.tell(&done("ch_1"));
        let refusal = already_done("ch_1", None);
        assert_nothing_changes(&mut work, &failed(1), Err(refusal.clone()));
        assert_nothing_changes(&mut work, &by(a(), failed_for_good(1)), Err(refusal));
    }

    #[test]
    fn failed_is_refused_where_no_external_id_is_known_either() {
        let mut work = under_way();
        work.tell(&done_without_id());
        let refusal = Refusal::AlreadyDone {
            external_id: None,
            reported_external_id: None,
        };
        assert_nothing_changes(&mut work, &failed(1), Err(refusal));
    }

    #[test]
    fn an_attempt_begun_since_may_come_to_another_end() {
        for report in [of(2, done("ch_2")), failed(2)] {
            let mut work = in_a_new_window(&done("ch_1"));
            work.tell(&report);
        }
    }
}

mod refused_effects {
    use super::*;

    #[test]
    fn each_refusal_stands_in_the_history_under_its_name() {
        let mut settled = under_way();
        settled.tell(&done("ch_1"));
        for (mut work, report, refused) in [
            (under_way(), of(2, done("ch_9")), RefusalKind::AttemptAhead),
            (taken_over(), done("ch_9"), RefusalKind::AttemptRequired),
            (taken_over(), of(1, done("ch_9")), RefusalKind::Superseded),
            (under_way(), by(b(), done("ch_9")), RefusalKind::NotHolder),
            (settled, done("ch_9"), RefusalKind::AlreadyDone),
        ] {
            let answer = work.report(&report);
            assert_eq!(answer.map_err(|refusal| refusal.kind()), Err(refused));
            assert!(work.state.conflict);
            let expected = conflict_event(refused, "ch_9");
            assert_eq!(work.last_event().happening, expected);
        }
    }

    #[test]
    fn the_result_is_not_lost_either() {
        let mut work = taken_over();
        let outcome = Outcome::Done {
            external_id: None,
            result: Some(json!({"paid": true})),
        };
        let report = Report {
            outcome,
            ..of(1, done_without_id())
        };
        assert_conflict(&mut work, &report, Refusal::Superseded { current: 2 });
    }

    #[test]
    fn who_reported_is_not_lost_either() {
        let mut work = under_way();
        let report = by(b(), done("ch_1"));
        assert_conflict(&mut work, &report, Refusal::NotHolder);
        assert_eq!(work.last_event().holder, b());
    }

    #[test]
    fn at_the_gate_alone_the_entry_is_made_and_the_key_stays_claimed() {
        let mut work = at_the_gate();
        let report = by(b(), done("ch_1"));
        assert_conflict(&mut work, &report, Refusal::NotHolder);
        assert_eq!(work.status(), Status::Claimed);
        let claimed = Happening::Claimed { after: None };
        assert_eq!(work.happenings()[0], (1, &claimed));
        assert_eq!(work.history.len(), 2);
    }

    #[test]
    fn a_refused_failed_makes_no_entry_at_the_gate() {
        let mut work = at_the_gate();
        let report = by(b(), failed(1));
        assert_nothing_changes(&mut work, &report, Err(Refusal::NotHolder));
        let refusal = Refusal::AttemptAhead { current: 1 };
        assert_nothing_changes(&mut work, &failed(2), Err(refusal));
    }

    #[test]
    fn a_repeat_is_refused_again_and_recorded_once() {
        for report in [of(1, done("ch_1")), by(a(), of(1, done("ch_2")))] {
            let mut work = taken_over();
            let refusal = Refusal::Superseded { current: 2 };
            assert_conflict(&mut work, &report, refusal.clone());
            assert_nothing_changes(&mut work, &report, Err(refusal));
        }
        for report in [by(a(), done("ch_1")), by(c(), of(2, done("ch_1")))] {
            let mut work = taken_over();
            assert_conflict(&mut work, &report, Refusal::NotHolder);
            assert_nothing_changes(&mut work, &report, Err(Refusal::NotHolder));
        }
    }

    #[test]
    fn another_effect_is_recorded_too() {
        let mut work = taken_over();
        let refusal = Refusal::Superseded { current: 2 };
        assert_conflict(&mut work, &of(1, done("ch_1")), refusal.clone());
        assert_conflict(&mut work, &of(1, done("ch_2")), refusal);
    }

    #[test]
    fn an_effect_without_an_external_id_is_another_one_in_another_attempt() {
        let mut work = taken_over();
        let refusal = Refusal::Superseded { current: 2 };
        assert_conflict(&mut work, &of(1, done_without_id()), refusal);
        work.tell(&of(2, done("ch_2")));
        work.wait(TTL + 1);
        work.claim_anew(&pending(c()));
        work.wait(LEASE + 1);
        work.claim_anew(&pending(b()));
        let refusal = Refusal::Superseded { current: 4 };
        assert_conflict(&mut work, &of(3, done_without_id()), refusal);
    }

    #[test]
    fn the_current_attempt_may_still_be_settled_and_the_conflict_stays() {
        for report in [of(2, done("ch_2")), failed(2)] {
            let mut work = taken_over();
            let _ = work.report(&of(1, done("ch_1")));
            work.tell(&report);
            assert!(work.state.conflict);
        }
    }

    #[test]
    fn failed_then_counts_as_for_good() {
        let mut work = taken_over();
        let _ = work.report(&of(1, done("ch_1")));
        work.tell(&failed(2));
        assert!(!work.ask(&pending(c())).claimed);
    }

    #[test]
    fn take_over_then_counts_as_hold() {
        let mut work = taken_over();
        let _ = work.report(&of(1, done("ch_1")));
        work.wait(LEASE + 1);
        assert!(!work.ask(&pending(c())).claimed);
        assert_eq!(work.status(), Status::Stale);
    }

    #[test]
    fn a_new_window_ends_the_conflict() {
        let mut work = taken_over();
        let _ = work.report(&of(1, done("ch_1")));
        work.tell(&failed(2));
        work.wait(TTL + 1);
        work.claim_anew(&pending(c()));
        assert!(!work.state.conflict);
    }

    /// The report is refused, the key is settled, and `c()` begins a new window.
    fn refused_in_an_earlier_window(report: &Report) -> Work {
        let mut work = taken_over();
        assert!(work.report(report).is_err());
        work.tell(&of(2, done("ch_2")));
        work.wait(TTL + 1);
        work.claim_anew(&pending(c()));
        work
    }

    #[test]
    fn a_delayed_repeat_does_not_bring_the_conflict_back() {
        for report in [of(1, done("ch_1")), by(a(), of(1, done("ch_1")))] {
            let mut work = refused_in_an_earlier_window(&report);
            let refusal = Refusal::Superseded { current: 3 };
            assert_nothing_changes(&mut work, &report, Err(refusal));
        }
    }

    #[test]
    fn a_delayed_repeat_that_names_no_attempt_does_not_bring_the_conflict_back() {
        let report = by(a(), done("ch_1"));
        let mut work = refused_in_an_earlier_window(&report);
        assert_nothing_changes(&mut work, &report, Err(Refusal::NotHolder));
    }

    /// Somebody named an attempt wrongly, or none; when that attempt reports itself, it is news.
    #[test]
    fn a_report_of_no_attempt_or_of_a_later_one_hides_no_effect_of_that_attempt() {
        let vague = [
            (retried(), done("ch_1")),
            (under_way(), of(2, done("ch_1"))),
        ];
        for (mut work, report) in vague {
            assert!(work.report(&report).is_err());
            assert_ne!(work.last_event().holder, b(), "nobody said so");
            work.state.conflict = false;
            while work.state.attempt < 3 {
                work.wait(LEASE + 1);
                let next = if work.state.attempt == 1 { b() } else { c() };
                work.claim_anew(&pending(next));
            }
            let refusal = Refusal::Superseded { current: 3 };
            assert_conflict(&mut work, &of(2, done("ch_1")), refusal);
        }
    }

    #[test]
    fn another_effect_in_the_new_window_is_a_new_conflict() {
        let mut work = refused_in_an_earlier_window(&of(1, done("ch_1")));
        let refusal = Refusal::Superseded { current: 3 };
        assert_conflict(&mut work, &of(1, done("ch_9")), refusal);
    }
}

mod effects {
    use super::*;
    use crate::domain::effect::{Due, Effect};

    fn with(names: &[&str], report: Report) -> Report {
        let effect = |name: &&str| Effect {
            id: (*name).to_owned(),
            topic: "mail".to_owned(),
            payload: "{}".to_owned(),
            due: Due::Now,
        };
        Report {
            effects: names.iter().map(effect).collect(),
            ..report
        }
    }

    /// The ids that are stored by a report.
    fn stored(work: &mut Work, report: &Report) -> Vec<String> {
        let settlement = settle(&work.state, &work.history, report, work.now);
        let changed = settlement.answer == Ok(true);
        assert!(changed || settlement.effects.is_empty());
        work.state = settlement.state;
        work.history.extend(settlement.events);
        settlement
            .effects
            .into_iter()
            .map(|effect| effect.id)
            .collect()
    }

    #[test]
    fn they_are_stored_with_the_outcome_and_noted_behind_it() {
        let mut work = under_way();
        assert_eq!(
            stored(&mut work, &with(&["a", "b"], done("ch_1"))),
            ["a", "b"]
        );
        let last = work.history.last().unwrap();
        let ids = vec!["a".to_owned(), "b".to_owned()];
        let outcome = OutcomeKind::Done;
        assert_eq!(last.happening, Happening::Effects { outcome, ids });
        assert_eq!((last.attempt, last.at), (1, work.now));
        let before = &work.history[work.history.len() - 2];
        assert_eq!(last.holder, before.holder);
    }

    #[test]
    fn a_repeat_stores_nothing_whatever_it_is_changed_by() {
        let mut work = under_way();
        stored(&mut work, &with(&["a"], done_without_id()));
        let before = work.clone();
        for repeat in [done_without_id(), of(1, done_without_id())] {
            assert!(stored(&mut work, &with(&["b", "c"], repeat)).is_empty());
            assert_eq!(work, before);
        }
        // It fills in the id, and no more.
        assert!(stored(&mut work, &with(&["d"], done("ch_1"))).is_empty());
        assert_eq!(work.state.effect().0, Some(&"ch_1".to_owned()));
    }

    #[test]
    fn the_first_ones_of_a_known_outcome_are_stored() {
        let mut work = under_way();
        assert!(stored(&mut work, &done("ch_1")).is_empty());
        assert_eq!(stored(&mut work, &with(&["a"], done("ch_1"))), ["a"]);
        assert!(stored(&mut work, &with(&["b"], done("ch_1"))).is_empty());
    }

    #[test]
    fn each_outcome_of_each_attempt_has_its_own() {
        let mut work = under_way();
        assert_eq!(stored(&mut work, &with(&["a"], failed(1))), ["a"]);
        assert!(stored(&mut work, &with(&["b"], failed(1))).is_empty());
        assert_eq!(stored(&mut work, &with(&["c"], of(1, done("ch_1")))), ["c"]);
        let mut work = under_way();
        stored(&mut work, &with(&["a"], failed(1)));
        work.claim_anew(&pending(b()));
        assert_eq!(stored(&mut work, &with(&["b"], failed(2))), ["b"]);
        // A delayed repeat of the first one's report.
        assert!(stored(&mut work, &with(&["c"], failed(1))).is_empty());
    }

    #[test]
    fn what_is_refused_stores_nothing() {
        let mut work = under_way();
        work.tell(&done("ch_1"));
        let before = work.history.len();
        for refused in [
            with(&["a"], done("ch_2")),
            with(&["b"], failed(1)),
            with(&["c"], of(2, done("ch_3"))),
        ] {
            assert!(stored(&mut work, &refused).is_empty());
        }
        let happenings = work.history[before..].iter().map(|event| &event.happening);
        assert!(
            !happenings
                .clone()
                .any(|happening| matches!(happening, Happening::Effects { .. }))
        );
    }
}

mod window {
    use super::*;

    fn from_now(work: &Work) -> Option<Time> {
        Some(work.now + seconds(TTL))
    }

    #[test]
    fn it_runs_anew_from_the_report_that_settles() {
        for report in [done("ch_1"), failed(1), failed_for_good(1)] {
            for mut work in [under_way(), at_the_gate()] {
                work.wait(100);
                work.tell(&report);
                assert_eq!(work.state.expires_at, from_now(&work));
            }
        }
    }

    #[test]
    fn it_runs_anew_even_where_it_had_passed() {
        let mut work = under_way();
        work.wait(TTL + 100);
        work.tell(&done("ch_1"));
        assert_eq!(work.state.expires_at, from_now(&work));
        assert!(!work.ask(&pending(b())).claimed);
    }

    #[test]
    fn it_runs_anew_from_done_after_failed() {
        let mut work = under_way();
        work.tell(&failed(1));
        work.wait(100);
        work.tell(&done("ch_1"));
        assert_eq!(work.state.expires_at, from_now(&work));
    }

    #[test]
    fn it_is_that_of_the_claim_that_won_the_attempt() {
        let mut work = under_way();
        work.wait(LEASE + 1);
        work.claim_anew(&Claim {
            ttl_seconds: Some(77),
            ..pending(b())
        });
        work.tell(&of(2, done("ch_1")));
        assert_eq!(work.state.expires_at, Some(work.now + seconds(77)));
    }

    #[test]
    fn without_ttl_there_is_none() {
        let claim = Claim {
            ttl_seconds: None,
            ..pending(a())
        };
        let mut work = Work::claimed(&claim);
        work.tell(&done("ch_1"));
        assert_eq!(work.state.expires_at, None);
    }

    #[test]
    fn a_repeat_does_not_restart_it() {
        let mut work = under_way();
        work.tell(&done("ch_1"));
        let end = work.state.expires_at;
        work.wait(100);
        let _ = work.report(&done("ch_1"));
        assert_eq!(work.state.expires_at, end);
    }

    #[test]
    fn a_refused_report_does_not_restart_it() {
        let mut work = under_way();
        work.tell(&done("ch_1"));
        let end = work.state.expires_at;
        work.wait(100);
        let _ = work.report(&done("ch_2"));
        assert_eq!(work.state.expires_at, end);
    }
}

mod properties {
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;

    /// Something that happens to one key.
    #[derive(Debug, Clone)]
    enum Step {
        Wait(u32),
        Claim(Claim),
        Report {
            /// Which attempt is named, counted from the current one.
            offset: Option<i64>,
            who: Option<Holder>,
            outcome: Outcome,
        },
    }

    fn anybody() -> impl Strategy<Value = Option<Holder>> {
        select(vec![a(), b(), a_elsewhere(), None])
    }

    /// Past nothing, past a short window, past a lease, past the replay window, past all.
    fn waits() -> impl Strategy<Value = Step> {
        select(vec![1, 70, LEASE + 1, REPLAY + 1, TTL + 1]).prop_map(Step::Wait)
    }

    fn claims() -> impl Strategy<Value = Step> {
        (
            anybody(),
            any::<bool>(),
            select(vec![None, Some(1), Some(LEASE), Some(10 * TTL)]),
            select(vec![None, Some(60), Some(TTL)]),
            select(vec![None, None, Some(b"P".to_vec()), Some(b"Q".to_vec())]),
            select(vec![OnStale::Hold, OnStale::TakeOver]),
        )
            .prop_map(
                |(who, at_gate, lease, ttl_seconds, payload_sha256, on_stale)| {
                    let claim = Claim {
                        payload_sha256,
                        on_stale,
                        ..gate(who)
                    };
                    Step::Claim(if at_gate {
                        Claim {
                            pending: lease,
                            ttl_seconds,
                            ..claim
                        }
                    } else {
                        Claim {
                            pending: lease.or(Some(LEASE)),
                            ttl_seconds: None,
                            door: Door::Ledger,
                            ..claim
                        }
                    })
                },
            )
    }

    fn effects() -> impl Strategy<Value = Step> {
        let offsets = select(vec![None, Some(-1), Some(0), Some(0), Some(1)]);
        let ids = select(vec![None, Some("ch_1"), Some("ch_2")]);
        (offsets, anybody(), ids).prop_map(|(offset, who, id)| Step::Report {
            offset,
            who,
            outcome: Outcome::Done {
                external_id: id.map(str::to_owned),
                result: None,
            },
        })
    }

    fn failures() -> impl Strategy<Value = Step> {
        let offsets = select(vec![-1, 0, 0, 0, 1]);
        (offsets, anybody(), any::<bool>()).prop_map(|(offset, who, retry)| Step::Report {
            offset: Some(offset),
            who,
            outcome: Outcome::Failed {
                reason: None,
                retry,
            },
        })
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            3 => waits(),
            4 => claims(),
            2 => effects(),
            1 => failures(),
        ];
        proptest::collection::vec(step, 1..40)
    }

    /// What was said so far of one key.
    #[derive(Debug, Default)]
    struct World {
        now: Time,
        state: Option<KeyState>,
        history: Vec<Event>,
        /// For each attempt, who heard `claimed: true`; `None` for a claim without claimant.
        winners: Vec<(u32, Option<Holder>)>,
        /// The reports that changed something and named their attempt.
        accepted: Vec<Report>,
    }

    impl World {
        fn decide(&self, claim: &Claim) -> Option<Decision> {
            decide(self.state.as_ref(), claim, self.now, seconds(REPLAY)).ok()
        }

        fn claim(&mut self, claim: &Claim) -> Result<(), TestCaseError> {
            let Some(decision) = self.decide(claim) else {
                return self.refused_for_its_payload(claim);
            };
            if let Some(before) = &self.state {
                self.of_a_known_key(before, claim, &decision)?;
            } else {
                prop_assert!(decision.claimed && !decision.replayed);
                prop_assert_eq!(decision.state.attempt, 1);
            }
            if let Change::State(events) = &decision.change {
                self.history.extend_from_slice(events);
            }
            self.state = Some(decision.state.clone());
            if decision.claimed {
                self.one_winner_an_attempt(claim, &decision)?;
                self.asking_again_repeats(claim)?;
            }
            Ok(())
        }

        /// A mismatch is one of two known payloads, inside the window.
        fn refused_for_its_payload(&self, claim: &Claim) -> Result<(), TestCaseError> {
            let state = self.state.as_ref();
            let state = state.ok_or_else(|| TestCaseError::fail("an unknown key"))?;
            prop_assert!(state.payload_sha256.is_some());
            prop_assert!(claim.payload_sha256.is_some());
            prop_assert_ne!(&state.payload_sha256, &claim.payload_sha256);
            prop_assert!(!state.window_passed(self.now));
            Ok(())
        }

        fn of_a_known_key(
            &self,
            before: &KeyState,
            claim: &Claim,
            decision: &Decision,
        ) -> Result<(), TestCaseError> {
            let after = &decision.state;
            let is_first_opening = claim.door == Door::Ledger
                && before.phase == Phase::Claimed
                && claim.holder.is_some()
                && claim.holder == before.holder;
            let is_new = decision.claimed && !decision.replayed && !is_first_opening;
            prop_assert_eq!(after.attempt, before.attempt + u32::from(is_new));
            if decision.claimed {
                prop_assert!(matches!(
                    after.status(self.now),
                    Status::Claimed | Status::Pending
                ));
                prop_assert_eq!(after.seen_again, before.seen_again);
                prop_assert_eq!(after.last_seen_at, before.last_seen_at);
            } else {
                let expected = KeyState {
                    seen_again: before.seen_again + 1,
                    last_seen_at: Some(self.now),
                    ..before.clone()
                };
                prop_assert_eq!(after, &expected);
                prop_assert!(!decision.replayed);
            }
            if is_new && matches!(before.phase, Phase::Done { .. }) {
                prop_assert!(before.window_passed(self.now));
            }
            if before.conflict && is_new {
                prop_assert!(before.window_passed(self.now));
            }
            Ok(())
        }

        fn one_winner_an_attempt(
            &mut self,
            claim: &Claim,
            decision: &Decision,
        ) -> Result<(), TestCaseError> {
            let attempt = decision.state.attempt;
            let mut of_it = self.winners.iter().filter(|(won, _)| *won == attempt);
            let known = of_it.next().map(|(_, who)| who.clone());
            match known {
                Some(known) => {
                    prop_assert!(claim.holder.is_some(), "a second anonymous winner");
                    prop_assert_eq!(&known, &claim.holder);
                }
                None => self.winners.push((attempt, claim.holder.clone())),
            }
            Ok(())
        }

        fn asking_again_repeats(&self, claim: &Claim) -> Result<(), TestCaseError> {
            let again = self.decide(claim);
            let again = again.ok_or_else(|| TestCaseError::fail("its own payload mismatches"))?;
            let is_known = claim.holder.is_some();
            prop_assert_eq!((again.claimed, again.replayed), (is_known, is_known));
            if is_known {
                prop_assert_eq!(again.change, Change::None);
            }
            Ok(())
        }

        fn report(&mut self, report: &Report) -> Result<(), TestCaseError> {
            let Some(before) = self.state.clone() else {
                return Ok(());
            };
            let settlement = settle(&before, &self.history, report, self.now);
            let after = settlement.state.clone();
            self.history.extend(settlement.events.iter().cloned());
            self.state = Some(after.clone());

            prop_assert_eq!(after.attempt, before.attempt);
            prop_assert_eq!(&after.holder, &before.holder);
            prop_assert_eq!(after.seen_again, before.seen_again);
            prop_assert!(after.conflict >= before.conflict);
            if before.effect().0.is_some() {
                prop_assert_eq!(&after.phase, &before.phase);
            }
            if settlement.events.is_empty() {
                prop_assert_eq!(&after, &before);
            }
            match (&settlement.answer, &report.outcome) {
                (Ok(changed), outcome) => {
                    prop_assert_eq!(*changed, !settlement.events.is_empty());
                    let is_done = matches!(after.phase, Phase::Done { .. });
                    if report.attempt == Some(after.attempt)
                        && matches!(outcome, Outcome::Done { .. })
                    {
                        prop_assert!(is_done, "its own effect was accepted");
                    }
                    if *changed && report.attempt.is_some() {
                        self.accepted.push(report.clone());
                    }
                }
                (Err(_), Outcome::Done { external_id, .. }) => {
                    prop_assert!(self.has_conflict(external_id.as_ref()));
                    prop_assert_eq!(&after.phase, &before.phase);
                }
                (Err(_), Outcome::Failed { .. }) => prop_assert_eq!(&after, &before),
            }

            let again = settle(&after, &self.history, report, self.now);
            prop_assert_eq!(again.answer, settlement.answer.map(|_| false));
            prop_assert_eq!(again.events, []);
            prop_assert_eq!(again.state, after);
            Ok(())
        }

        fn has_conflict(&self, id: Option<&String>) -> bool {
            self.history.iter().any(|event| {
                matches!(&event.happening, Happening::Conflict { external_id, .. } if external_id.as_ref() == id)
            })
        }

        fn step(&mut self, step: &Step) -> Result<(), TestCaseError> {
            let before = self.state.clone();
            match step {
                Step::Wait(count) => self.now += seconds(*count),
                Step::Claim(claim) => self.claim(claim)?,
                Step::Report {
                    offset,
                    who,
                    outcome,
                } => {
                    let current = before.as_ref().map_or(1, |state| state.attempt);
                    let attempt = offset.map(|offset| i64::from(current) + offset);
                    let report = Report {
                        key: key(),
                        attempt: attempt.map(|n| u32::try_from(n.max(1)).unwrap_or(1)),
                        holder: who.clone(),
                        outcome: outcome.clone(),
                        effects: Vec::new(),
                    };
                    self.report(&report)?;
                }
            }
            self.time_goes_forward(before.as_ref())?;
            self.history_is_of_attempts_begun()
        }

        fn time_goes_forward(&self, before: Option<&KeyState>) -> Result<(), TestCaseError> {
            let (Some(before), Some(after)) = (before, &self.state) else {
                return Ok(());
            };
            prop_assert!(after.attempt >= before.attempt);
            prop_assert!(after.updated_at >= before.updated_at);
            let but_for_counters = KeyState {
                seen_again: after.seen_again,
                last_seen_at: after.last_seen_at,
                updated_at: after.updated_at,
                ..before.clone()
            };
            if but_for_counters != *after {
                prop_assert_eq!(after.updated_at, self.now);
            }
            Ok(())
        }

        fn history_is_of_attempts_begun(&self) -> Result<(), TestCaseError> {
            let Some(state) = &self.state else {
                return Ok(());
            };
            for event in &self.history {
                match &event.happening {
                    Happening::Conflict {
                        refused: RefusalKind::AttemptAhead,
                        ..
                    } => {}
                    Happening::Done { .. } if event.attempt == state.attempt => {
                        let is_done = matches!(state.phase, Phase::Done { .. });
                        prop_assert!(is_done, "attempt {} is not done", event.attempt);
                    }
                    _ => prop_assert!(event.attempt <= state.attempt),
                }
            }
            Ok(())
        }

        /// "Whatever has happened since."
        fn accepted_reports_are_repeats(&self) -> Result<(), TestCaseError> {
            let Some(state) = &self.state else {
                return Ok(());
            };
            for report in &self.accepted {
                let again = settle(state, &self.history, report, self.now);
                prop_assert_eq!(again.answer, Ok(false), "{:?}", report);
                prop_assert_eq!(&again.state, state);
            }
            Ok(())
        }
    }

    fn settings() -> ProptestConfig {
        ProptestConfig {
            cases: 1000,
            failure_persistence: None,
            ..ProptestConfig::default()
        }
    }

    proptest! {
        #![proptest_config(settings())]

        #[test]
        fn whatever_happens_the_promises_hold(steps in steps()) {
            let mut world = World { now: start(), ..World::default() };
            for step in &steps {
                world.step(step)?;
            }
            world.accepted_reports_are_repeats()?;
        }
    }
}
