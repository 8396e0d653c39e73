//! The rules for renewals, reviews and resets, one by one. Every key is claimed by `a()` first, with
//! a lease and a dedupe window; time passes only where a test says so.

use chrono::TimeDelta;

use super::*;
use crate::domain::claim::{Claim, Decision, Door, KeyReused, OnStale, decide};
use crate::domain::ledger::{After, Outcome, RefusalKind, Status};

const LEASE: u32 = 600;

fn start() -> Time {
    "2026-12-01T12:00:00Z".parse().expect("a time")
}

fn key() -> IdempotencyKey {
    IdempotencyKey::try_from("k".to_owned()).expect("a key")
}

fn holder(claimant: &str) -> Option<Holder> {
    Some(Holder {
        claimant: claimant.to_owned(),
        api_key: Some("n8n".to_owned()),
    })
}

fn a() -> Option<Holder> {
    holder("231@a:0:0")
}

fn b() -> Option<Holder> {
    holder("232@a:0:0")
}

/// A key, its history and the time.
struct World {
    state: Option<KeyState>,
    history: Vec<Event>,
    now: Time,
}

impl World {
    /// Claimed by `who`: with this lease, or at the gate alone.
    fn claimed(who: Option<Holder>, lease: Option<u32>) -> Self {
        let mut world = Self {
            state: None,
            history: Vec::new(),
            now: start(),
        };
        assert!(world.claim(who, lease).expect("no payload").claimed);
        world
    }

    fn pending() -> Self {
        Self::claimed(a(), Some(LEASE))
    }

    fn state(&self) -> &KeyState {
        self.state.as_ref().expect("claimed")
    }

    fn status(&self) -> Status {
        self.state().status(self.now)
    }

    fn happenings(&self) -> Vec<&Happening> {
        self.history.iter().map(|event| &event.happening).collect()
    }

    fn pass(&mut self, by: u32) {
        self.now += seconds(by);
    }

    fn claim_as(&mut self, claim: &Claim) -> Result<Decision, KeyReused> {
        let decision = decide(self.state.as_ref(), claim, self.now, TimeDelta::minutes(30))?;
        if let crate::domain::claim::Change::State(events) = &decision.change {
            self.history.extend(events.iter().cloned());
        }
        self.state = Some(decision.state.clone());
        Ok(decision)
    }

    fn claim(&mut self, who: Option<Holder>, lease: Option<u32>) -> Result<Decision, KeyReused> {
        self.claim_as(&Claim {
            key: key(),
            order_id: None,
            holder: who,
            ttl_seconds: None,
            payload_sha256: None,
            pending: lease,
            on_stale: OnStale::TakeOver,
            door: Door::Gate,
        })
    }

    fn act(&mut self, wanted: &Act) -> Result<bool, Refusal> {
        let before = self.state().clone();
        let settlement = act(&before, &self.history, wanted, self.now);
        if !settlement.is_change() {
            assert_eq!(settlement.state, before, "it says that nothing changes");
        }
        self.state = Some(settlement.state);
        self.history.extend(settlement.events);
        settlement.answer
    }

    fn renew(
        &mut self,
        who: Option<Holder>,
        attempt: Option<u32>,
        lease: u32,
    ) -> Result<bool, Refusal> {
        self.act(&Act::Renewal(Renewal {
            key: key(),
            attempt,
            holder: who,
            lease_seconds: lease,
        }))
    }

    fn review(&mut self, attempt: u32, decision: ReviewDecision) -> Result<bool, Refusal> {
        self.act(&Act::Review(Review {
            key: key(),
            attempt,
            decision,
            reviewer: "ana".into(),
            reason: "seen".into(),
        }))
    }

    fn reset(&mut self, attempt: u32) -> Result<bool, Refusal> {
        self.act(&Act::Reset(Reset {
            key: key(),
            attempt,
            reviewer: "ana".into(),
            reason: "again".into(),
        }))
    }

    fn report(&mut self, attempt: u32, outcome: Outcome) -> Result<bool, Refusal> {
        self.act(&Act::Report(Report {
            key: key(),
            attempt: Some(attempt),
            holder: None,
            outcome,
            effects: Vec::new(),
        }))
    }
}

fn id(external_id: &str) -> Option<String> {
    Some(external_id.to_owned())
}

fn done(external_id: Option<String>) -> Outcome {
    Outcome::Done {
        external_id,
        result: None,
    }
}

fn failed(retry: bool) -> Outcome {
    Outcome::Failed {
        reason: None,
        retry,
    }
}

fn is_unfit(answer: &Result<bool, Refusal>) -> bool {
    matches!(answer, Err(Refusal::Unfit(_)))
}

mod renewal {
    use super::*;

    #[test]
    fn the_holder_renews_and_a_lease_is_never_shortened() {
        let mut world = World::pending();
        world.pass(500);
        assert_eq!(world.renew(a(), None, LEASE), Ok(true));
        let lease = Some(world.now + seconds(LEASE));
        assert_eq!(world.state().lease_expires_at(), lease);
        assert_eq!(world.state().updated_at, world.now);
        assert_eq!(world.renew(a(), Some(1), 10), Ok(false));
        assert_eq!(world.state().lease_expires_at(), lease);
        // In time: no trace.
        assert_eq!(world.history.len(), 1);
    }

    #[test]
    fn the_attempt_speaks_for_its_holder() {
        for who in [a(), None] {
            let mut world = World::claimed(who, Some(LEASE));
            assert_eq!(world.renew(None, Some(1), 900), Ok(true));
        }
    }

    #[test]
    fn nobody_else_renews() {
        let mut world = World::pending();
        assert_eq!(world.renew(b(), None, 900), Err(Refusal::NotHolder));
        assert_eq!(world.renew(b(), Some(1), 900), Err(Refusal::NotHolder));
        let mut nobodys = World::claimed(None, Some(LEASE));
        assert_eq!(nobodys.renew(b(), None, 900), Err(Refusal::NotHolder));
        assert_eq!(nobodys.renew(None, None, 900), Err(Refusal::NotHolder));
    }

    #[test]
    fn a_stale_lease_is_its_holders_until_it_is_taken_over() {
        let mut world = World::pending();
        world.pass(10_000);
        assert_eq!(world.status(), Status::Stale);
        assert_eq!(world.renew(a(), None, LEASE), Ok(true));
        assert_eq!(world.status(), Status::Pending);
        assert!(matches!(world.happenings()[1], Happening::Renewed { .. }));

        world.pass(LEASE);
        assert!(world.claim(b(), Some(LEASE)).expect("no payload").claimed);
        let current = 2;
        assert_eq!(world.renew(a(), None, 900), Err(Refusal::NotHolder));
        assert_eq!(
            world.renew(a(), Some(1), 900),
            Err(Refusal::Superseded { current })
        );
        assert_eq!(
            world.renew(b(), Some(3), 900),
            Err(Refusal::AttemptAhead { current })
        );
    }

    #[test]
    fn only_what_is_under_way_has_a_lease() {
        let mut gate = World::claimed(a(), None);
        assert!(is_unfit(&gate.renew(a(), Some(1), 900)));
        let mut over = World::pending();
        over.report(1, done(id("x"))).expect("the first report");
        let already = Refusal::AlreadyDone {
            external_id: id("x"),
            reported_external_id: None,
        };
        assert_eq!(over.renew(a(), Some(1), 900), Err(already));
        let mut failure = World::pending();
        failure.report(1, failed(true)).expect("the first report");
        assert!(is_unfit(&failure.renew(a(), Some(1), 900)));
        failure.reset(1).expect("it is settled");
        assert_eq!(failure.renew(a(), Some(1), 900), Err(Refusal::Ended));
    }
}

mod review {
    use super::*;

    #[test]
    fn what_is_pending_or_stale_is_decided() {
        for passed in [0, 10_000] {
            for (decision, status, claimed) in [
                (
                    ReviewDecision::Done {
                        external_id: id("x"),
                    },
                    Status::Done,
                    false,
                ),
                (ReviewDecision::Release, Status::Failed, true),
                (ReviewDecision::Fail, Status::Failed, false),
            ] {
                let mut world = World::pending();
                world.pass(passed);
                assert_eq!(world.review(1, decision.clone()), Ok(true));
                assert_eq!(world.status(), status);
                assert_eq!(world.review(1, decision), Ok(false));
                assert_eq!(world.history.len(), 3, "claimed, reviewed, the outcome");
                assert!(matches!(world.happenings()[1], Happening::Reviewed { .. }));
                let next = world.claim(b(), None).expect("no payload");
                assert_eq!(next.claimed, claimed);
            }
        }
    }

    #[test]
    fn a_late_run_is_judged_by_what_the_reviewer_has_decided() {
        let mut world = World::pending();
        world
            .review(
                1,
                ReviewDecision::Done {
                    external_id: id("x"),
                },
            )
            .expect("it is pending");
        assert_eq!(world.report(1, done(id("x"))), Ok(false));
        assert!(matches!(
            world.report(1, done(id("y"))),
            Err(Refusal::AlreadyDone { .. })
        ));
        assert!(world.state().conflict);

        let mut released = World::pending();
        released
            .review(1, ReviewDecision::Release)
            .expect("it is pending");
        assert_eq!(
            released.report(1, failed(false)),
            Ok(false),
            "it has failed already"
        );
        assert_eq!(
            released.report(1, done(id("x"))),
            Ok(true),
            "the effect did happen"
        );
    }

    #[test]
    fn the_id_of_a_late_effect_is_filled_in_whatever_was_reviewed_before() {
        let mut world = World::pending();
        world.pass(LEASE);
        world.claim(b(), Some(LEASE)).expect("no payload");
        let nameless = ReviewDecision::Done { external_id: None };
        assert_eq!(world.review(2, nameless), Ok(true));
        assert!(world.report(1, done(id("x"))).is_err(), "superseded");
        assert_eq!(world.review(2, ReviewDecision::Fail), Ok(true));
        assert_eq!(
            world.report(1, done(None)),
            Ok(true),
            "the effect did happen"
        );
        assert_eq!(world.report(1, done(id("x"))), Ok(true), "its id");
        assert_eq!(world.state().effect().0, id("x").as_ref());
    }

    #[test]
    fn an_id_is_filled_in_where_it_is_missing_and_nowhere_else() {
        let mut world = World::pending();
        world.pass(LEASE);
        world.claim(b(), Some(LEASE)).expect("no payload");
        assert_eq!(world.report(2, done(None)), Ok(true));
        assert!(world.report(1, done(id("x"))).is_err(), "superseded");
        assert_eq!(world.review(2, ReviewDecision::Fail), Ok(true));
        // The history has it, but the entry is not done by it any more.
        assert_eq!(world.report(2, done(id("y"))), Ok(true));
        assert_eq!(world.status(), Status::Failed);
        assert_eq!(world.report(1, done(None)), Ok(true));
        assert_eq!(world.state().effect().0, None);
        assert_eq!(world.report(1, done(id("x"))), Ok(true));
        assert_eq!(world.state().effect().0, id("x").as_ref());
    }

    #[test]
    fn a_review_of_another_attempt_is_refused() {
        let mut world = World::pending();
        world.pass(LEASE);
        world.claim(b(), Some(LEASE)).expect("no payload");
        let current = 2;
        assert_eq!(
            world.review(1, ReviewDecision::Release),
            Err(Refusal::Superseded { current })
        );
        assert_eq!(
            world.review(3, ReviewDecision::Release),
            Err(Refusal::AttemptAhead { current })
        );
        assert_eq!(world.status(), Status::Pending);
    }

    #[test]
    fn a_conflict_is_cleared_once_and_not_by_a_delayed_repeat() {
        let mut world = World::pending();
        world.report(1, done(id("x"))).expect("the first report");
        world.report(1, done(id("y"))).expect_err("two effects");
        let refunded = ReviewDecision::Done {
            external_id: id("x"),
        };
        assert_eq!(world.review(1, refunded.clone()), Ok(true));
        assert!(!world.state().conflict);
        assert_eq!(world.status(), Status::Done);
        // The delayed report is known, and no news.
        world.report(1, done(id("y"))).expect_err("two effects");
        assert!(!world.state().conflict);
        // Another one is, and the delayed review has not seen it.
        world.report(1, done(id("z"))).expect_err("three effects");
        assert_eq!(world.review(1, refunded), Ok(false));
        assert!(world.state().conflict);
    }

    #[test]
    fn a_conflict_may_be_decided_for_the_other_effect() {
        let mut world = World::pending();
        world.report(1, done(id("x"))).expect("the first report");
        world.report(1, done(id("y"))).expect_err("two effects");
        assert_eq!(
            world.review(
                1,
                ReviewDecision::Done {
                    external_id: id("y")
                }
            ),
            Ok(true)
        );
        assert_eq!(world.state().effect().0, id("y").as_ref());
        // Both stand in the history, and a repeat of either is known.
        assert_eq!(world.report(1, done(id("x"))), Ok(false));
        assert_eq!(world.report(1, done(id("y"))), Ok(false));
    }

    #[test]
    fn without_an_id_what_is_known_stays() {
        let mut world = World::pending();
        world.report(1, done(id("x"))).expect("the first report");
        world.report(1, failed(true)).expect_err("it is done");
        assert!(
            is_unfit(&world.review(1, ReviewDecision::Release)),
            "failed is no conflict"
        );
        world.report(1, done(id("y"))).expect_err("two effects");
        assert_eq!(
            world.review(1, ReviewDecision::Done { external_id: None }),
            Ok(true)
        );
        assert_eq!(world.state().effect().0, id("x").as_ref());
    }

    #[test]
    fn there_is_nothing_to_review_of_what_is_settled() {
        let mut gate = World::claimed(a(), None);
        assert!(is_unfit(&gate.review(1, ReviewDecision::Fail)));
        for outcome in [done(None), failed(true), failed(false)] {
            let mut world = World::pending();
            world.report(1, outcome).expect("the first report");
            assert!(is_unfit(&world.review(1, ReviewDecision::Release)));
        }
        let mut free = World::claimed(a(), None);
        free.reset(1).expect("it is claimed at the gate alone");
        assert!(is_unfit(&free.review(1, ReviewDecision::Fail)));
    }
}

mod reset {
    use super::*;

    #[test]
    fn what_is_over_is_free_again() {
        let settled = [done(id("x")), failed(true), failed(false)].map(|outcome| {
            let mut world = World::pending();
            world.report(1, outcome).expect("the first report");
            world
        });
        for mut world in settled.into_iter().chain([World::claimed(a(), None)]) {
            assert_eq!(world.reset(1), Ok(true));
            assert_eq!(world.status(), Status::Failed);
            assert_eq!(world.reset(1), Ok(false), "a repeat");
            let length = world.history.len();
            assert!(
                !world.claim(a(), None).expect("no payload").claimed,
                "its attempt is ended"
            );
            let next = world.claim(b(), None).expect("no payload");
            assert!(next.claimed);
            assert_eq!(next.state.attempt, 2);
            let Happening::Claimed { after } = world.happenings()[length] else {
                panic!("not claimed: {:?}", world.history);
            };
            assert_eq!(*after, Some(After::Reset));
            assert_eq!(
                world.reset(1),
                Ok(false),
                "a delayed repeat ends no later attempt"
            );
            assert_eq!(world.state().phase, Phase::Claimed);
        }
    }

    #[test]
    fn its_attempt_is_ended() {
        let mut world = World::claimed(a(), None);
        world.reset(1).expect("it is claimed at the gate alone");
        assert_eq!(world.report(1, failed(true)), Err(Refusal::Ended));
        assert_eq!(world.report(1, done(id("x"))), Err(Refusal::Ended));
        let Some(Happening::Conflict { refused, .. }) = world.happenings().last().copied() else {
            panic!("an effect is never lost: {:?}", world.history);
        };
        assert_eq!(*refused, RefusalKind::Superseded);
        // Somebody has to look at it before the work is done again.
        assert!(!world.claim(b(), None).expect("no payload").claimed);
        assert_eq!(world.review(1, ReviewDecision::Release), Ok(true));
        assert!(world.claim(b(), None).expect("no payload").claimed);
    }

    #[test]
    fn a_repeat_of_what_was_known_before_it_is_no_news() {
        let mut world = World::pending();
        world.report(1, done(id("x"))).expect("the first report");
        world.reset(1).expect("it is done");
        assert_eq!(world.report(1, done(id("x"))), Ok(false));
        assert!(!world.state().conflict);
    }

    #[test]
    fn what_hangs_is_to_be_reviewed_first() {
        let mut world = World::pending();
        assert!(is_unfit(&world.reset(1)));
        world.pass(10_000);
        assert!(is_unfit(&world.reset(1)));
        world.report(1, done(id("x"))).expect("the first report");
        world.report(1, done(id("y"))).expect_err("two effects");
        assert!(is_unfit(&world.reset(1)), "a conflict");
    }

    #[test]
    fn another_attempt_is_not_reset() {
        let mut world = World::pending();
        world.report(1, failed(true)).expect("the first report");
        world.claim(b(), None).expect("no payload");
        let current = 2;
        assert_eq!(world.reset(1), Err(Refusal::Superseded { current }));
        assert_eq!(world.reset(3), Err(Refusal::AttemptAhead { current }));
    }

    #[test]
    fn the_next_claim_may_bring_another_payload() {
        let claim = |payload: u8, who| Claim {
            key: key(),
            order_id: None,
            holder: who,
            ttl_seconds: None,
            payload_sha256: Some(vec![payload]),
            pending: None,
            on_stale: OnStale::Hold,
            door: Door::Gate,
        };
        let mut world = World {
            state: None,
            history: Vec::new(),
            now: start(),
        };
        world.claim_as(&claim(1, a())).expect("the first payload");
        assert_eq!(world.claim_as(&claim(2, b())), Err(KeyReused));
        world.reset(1).expect("it is claimed at the gate alone");
        assert!(world.claim_as(&claim(2, b())).expect("it is free").claimed);
        assert_eq!(world.claim_as(&claim(1, a())), Err(KeyReused));
    }
}
