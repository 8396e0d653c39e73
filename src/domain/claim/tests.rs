//! The contract's table, cell by cell, and the paragraphs around it.
//!
//! Unless a test says otherwise, its key was claimed at `at(0)` by `a()`, who is recognised for
//! `REPLAY` seconds; a lease runs out after `LEASE` seconds and a dedupe window after `TTL`.

use serde_json::json;

use super::*;

const LEASE: u32 = 600;
const TTL: u32 = 300;
const REPLAY: u32 = 1800;
const TICK: TimeDelta = TimeDelta::milliseconds(1);

fn at(second: u32) -> Time {
    let start: Time = "2026-11-30T12:00:00Z".parse().expect("a time");
    start + seconds(second)
}

/// Everything is alive.
fn soon() -> Time {
    at(60)
}

/// The dedupe window has passed; the lease and the replay window have not.
fn after_window() -> Time {
    at(400)
}

/// The lease has run out, and the dedupe window too; the replay window has not.
fn after_lease() -> Time {
    at(700)
}

/// The replay window has passed, and everything else too.
fn after_replay() -> Time {
    at(2000)
}

fn key(text: &str) -> IdempotencyKey {
    IdempotencyKey::try_from(text.to_owned()).expect("a key")
}

fn holder(claimant: &str, api_key: Option<&str>) -> Option<Holder> {
    Some(Holder {
        claimant: claimant.to_owned(),
        api_key: api_key.map(str::to_owned),
    })
}

fn a() -> Option<Holder> {
    holder("231@a:0:0", Some("n8n"))
}

fn b() -> Option<Holder> {
    holder("232@a:0:0", Some("n8n"))
}

/// The text of `a()` under the name of another API key.
fn a_elsewhere() -> Option<Holder> {
    holder("231@a:0:0", Some("shop"))
}

/// Another claimant than `a()`, or none.
fn others() -> [Option<Holder>; 4] {
    [b(), a_elsewhere(), holder("231@a:0:0", None), None]
}

fn everybody() -> Vec<Option<Holder>> {
    others().into_iter().chain([a()]).collect()
}

/// `POST /claim`.
fn gate(who: Option<Holder>) -> Claim {
    Claim {
        key: key("k"),
        order_id: None,
        holder: who,
        ttl_seconds: None,
        payload_sha256: None,
        pending: None,
        on_stale: OnStale::Hold,
        door: Door::Gate,
    }
}

/// `POST /claim` with `pending: true`.
fn gate_pending(who: Option<Holder>) -> Claim {
    Claim {
        pending: Some(LEASE),
        ..gate(who)
    }
}

/// `POST /ledger/pending`.
fn ledger(who: Option<Holder>) -> Claim {
    Claim {
        door: Door::Ledger,
        ..gate_pending(who)
    }
}

fn take_over(claim: Claim) -> Claim {
    Claim {
        on_stale: OnStale::TakeOver,
        ..claim
    }
}

fn with_payload(payload: &str, claim: Claim) -> Claim {
    Claim {
        payload_sha256: Some(payload.into()),
        ..claim
    }
}

/// `/claim` in all its ways.
fn at_the_gate(who: &Option<Holder>) -> [Claim; 4] {
    [
        gate(who.clone()),
        gate_pending(who.clone()),
        take_over(gate(who.clone())),
        take_over(gate_pending(who.clone())),
    ]
}

/// Both doors in all their ways.
fn in_every_way(who: &Option<Holder>) -> Vec<Claim> {
    let through_ledger = [ledger(who.clone()), take_over(ledger(who.clone()))];
    at_the_gate(who).into_iter().chain(through_ledger).collect()
}

fn state(who: Option<Holder>, phase: Phase) -> KeyState {
    KeyState {
        order_id: "ORD-1".to_owned(),
        attempt: 1,
        holder: who,
        processed_at: at(0),
        recognised_from: at(0),
        payload_sha256: None,
        ttl_seconds: None,
        expires_at: None,
        seen_again: 2,
        last_seen_at: Some(at(1)),
        updated_at: at(2),
        phase,
        conflict: false,
        in_ledger: true,
    }
}

fn claimed(who: Option<Holder>) -> KeyState {
    KeyState {
        in_ledger: false,
        ..state(who, Phase::Claimed)
    }
}

fn pending(who: Option<Holder>) -> KeyState {
    let lease_expires_at = at(LEASE);
    state(who, Phase::Pending { lease_expires_at })
}

fn done(who: Option<Holder>) -> KeyState {
    let phase = Phase::Done {
        external_id: Some("ch_1".to_owned()),
        result: Some(json!({"paid": true})),
    };
    state(who, phase)
}

fn failed(who: Option<Holder>) -> KeyState {
    let phase = Phase::Failed {
        reason: Some("declined".to_owned()),
        retry: true,
    };
    state(who, phase)
}

fn failed_for_good(who: Option<Holder>) -> KeyState {
    let phase = Phase::Failed {
        reason: None,
        retry: false,
    };
    state(who, phase)
}

fn with_ttl(state: KeyState) -> KeyState {
    KeyState {
        ttl_seconds: Some(TTL),
        expires_at: Some(at(TTL)),
        ..state
    }
}

fn with_conflict(state: KeyState) -> KeyState {
    KeyState {
        conflict: true,
        ..state
    }
}

fn first_claimed_with(payload: &str, state: KeyState) -> KeyState {
    KeyState {
        payload_sha256: Some(payload.into()),
        ..state
    }
}

fn try_ask(before: &KeyState, claim: &Claim, now: Time) -> Result<Decision, KeyReused> {
    decide(Some(before), claim, now, seconds(REPLAY))
}

#[track_caller]
fn ask(before: &KeyState, claim: &Claim, now: Time) -> Decision {
    try_ask(before, claim, now).expect("the payload matches")
}

fn ask_first(claim: &Claim, now: Time) -> Decision {
    decide(None, claim, now, seconds(REPLAY)).expect("an unknown key never mismatches")
}

/// The events to be written with the state.
#[track_caller]
fn events(decision: &Decision) -> Vec<Event> {
    match &decision.change {
        Change::State(events) => events.clone(),
        other => panic!("expected a new state, not {other:?}"),
    }
}

fn happenings(decision: &Decision) -> Vec<Happening> {
    let events = events(decision).into_iter();
    events.map(|event| event.happening).collect()
}

fn opened(lease_expires_at: Time, after: Option<After>) -> Happening {
    Happening::Pending {
        lease_expires_at,
        after,
    }
}

/// `claimed: false`, one more duplicate counted, and nothing else.
#[track_caller]
fn assert_turned_away(before: &KeyState, claim: &Claim, now: Time, status: Status) {
    let expected = Decision {
        claimed: false,
        replayed: false,
        state: KeyState {
            seen_again: before.seen_again + 1,
            last_seen_at: Some(now),
            ..before.clone()
        },
        change: Change::Seen,
    };
    assert_eq!(ask(before, claim, now), expected, "{claim:?}");
    assert_eq!(expected.state.status(now), status);
}

/// `claimed: true, replayed: true`, and nothing to be written.
#[track_caller]
fn assert_repeated(before: &KeyState, claim: &Claim, now: Time, status: Status) {
    let expected = Decision {
        claimed: true,
        replayed: true,
        state: before.clone(),
        change: Change::None,
    };
    assert_eq!(ask(before, claim, now), expected, "{claim:?}");
    assert_eq!(expected.state.status(now), status);
}

/// `claimed: true, replayed: false, attempt + 1`: the attempt is the asker's.
#[track_caller]
fn assert_claimed_anew(before: &KeyState, claim: &Claim, now: Time, status: Status) -> Decision {
    let decision = ask(before, claim, now);
    assert!(decision.claimed && !decision.replayed, "{claim:?}");
    let after = &decision.state;
    assert_eq!(after.attempt, before.attempt + 1, "{claim:?}");
    assert_eq!(after.status(now), status, "{claim:?}");
    assert_eq!(after.holder, claim.holder);
    assert_eq!(after.seen_again, before.seen_again);
    assert_eq!(after.last_seen_at, before.last_seen_at);
    assert_eq!(after.processed_at, now);
    assert_eq!(after.recognised_from, now);
    assert_eq!(after.updated_at, now);
    assert_eq!(after.effect(), (None, None));
    assert!(!after.conflict);
    decision
}

/// What a claim that wins makes of a key that is not pending.
fn status_won_by(claim: &Claim) -> Status {
    match claim.pending {
        Some(_) => Status::Pending,
        None => Status::Claimed,
    }
}

mod unknown {
    use super::*;

    #[test]
    fn whoever_asks_first_has_attempt_1() {
        for claim in everybody().iter().flat_map(in_every_way) {
            let first = ask_first(&claim, soon());
            assert!(first.claimed && !first.replayed, "{claim:?}");
            assert_eq!(first.state.attempt, 1);
            assert_eq!(first.state.holder, claim.holder);
            assert_eq!(first.state.status(soon()), status_won_by(&claim));
        }
    }

    #[test]
    fn nobody_has_been_turned_away_yet() {
        let first = ask_first(&gate(a()), soon());
        assert_eq!(first.state.seen_again, 0);
        assert_eq!(first.state.last_seen_at, None);
    }

    #[test]
    fn the_claim_is_when_everything_begins() {
        let first = ask_first(&gate(a()), soon());
        assert_eq!(first.state.processed_at, soon());
        assert_eq!(first.state.recognised_from, soon());
        assert_eq!(first.state.updated_at, soon());
        assert!(!first.state.conflict);
    }

    #[test]
    fn without_pending_there_is_no_lease_and_no_ledger_entry() {
        let first = ask_first(&gate(a()), soon());
        assert_eq!(first.state.lease_expires_at(), None);
        assert!(!first.state.in_ledger);
        assert_eq!(events(&first), []);
    }

    #[test]
    fn with_pending_the_ledger_entry_is_opened_through_either_door() {
        for claim in [gate_pending(a()), ledger(a())] {
            let first = ask_first(&claim, soon());
            let lease_expires_at = soon() + seconds(LEASE);
            assert_eq!(first.state.lease_expires_at(), Some(lease_expires_at));
            assert!(first.state.in_ledger);
            let expected = Event {
                at: soon(),
                attempt: 1,
                holder: a(),
                happening: opened(lease_expires_at, None),
            };
            assert_eq!(events(&first), [expected]);
        }
    }

    #[test]
    fn order_id_is_the_key_where_absent() {
        assert_eq!(ask_first(&gate(a()), soon()).state.order_id, "k");
    }

    #[test]
    fn order_id_is_kept() {
        let claim = Claim {
            order_id: Some("ORD-7".to_owned()),
            ..gate(a())
        };
        assert_eq!(ask_first(&claim, soon()).state.order_id, "ORD-7");
    }

    #[test]
    fn the_window_runs_from_the_claim() {
        let claim = Claim {
            ttl_seconds: Some(TTL),
            ..gate(a())
        };
        let first = ask_first(&claim, soon());
        assert_eq!(first.state.expires_at, Some(soon() + seconds(TTL)));
    }

    #[test]
    fn without_ttl_the_key_is_claimed_for_ever() {
        assert_eq!(ask_first(&gate(a()), soon()).state.expires_at, None);
    }

    #[test]
    fn the_payload_is_kept() {
        let first = ask_first(&with_payload("P", gate(a())), soon());
        assert_eq!(first.state.payload_sha256, Some(b"P".to_vec()));
    }
}

mod claimed_at_the_gate_alone {
    use super::*;

    #[test]
    fn its_claimant_hears_the_same_again() {
        for claim in [gate(a()), take_over(gate(a()))] {
            assert_repeated(&claimed(a()), &claim, soon(), Status::Claimed);
        }
    }

    #[test]
    fn its_claimant_opens_it_with_pending() {
        for claim in [gate_pending(a()), take_over(gate_pending(a()))] {
            let decision = ask(&claimed(a()), &claim, soon());
            assert!(decision.claimed && decision.replayed);
            let expected = KeyState {
                phase: Phase::Pending {
                    lease_expires_at: soon() + seconds(LEASE),
                },
                recognised_from: soon(),
                updated_at: soon(),
                in_ledger: true,
                ..claimed(a())
            };
            assert_eq!(decision.state, expected);
        }
    }

    #[test]
    fn opening_writes_the_claim_into_the_history_first() {
        let decision = ask(&claimed(a()), &gate_pending(a()), soon());
        let claim = Event {
            at: at(0),
            attempt: 1,
            holder: a(),
            happening: Happening::Claimed { after: None },
        };
        let opening = Event {
            at: soon(),
            attempt: 1,
            holder: a(),
            happening: opened(soon() + seconds(LEASE), None),
        };
        assert_eq!(events(&decision), [claim, opening]);
    }

    #[test]
    fn opening_does_not_repeat_what_the_history_has() {
        let before = KeyState {
            attempt: 2,
            in_ledger: true,
            ..claimed(a())
        };
        let decision = ask(&before, &gate_pending(a()), soon());
        let lease_expires_at = soon() + seconds(LEASE);
        assert_eq!(happenings(&decision), [opened(lease_expires_at, None)]);
        assert_eq!(decision.state.attempt, 2);
    }

    #[test]
    fn its_window_is_that_of_the_claim_that_won() {
        let before = with_ttl(claimed(a()));
        for claim in [gate(a()), gate_pending(a())] {
            let claim = Claim {
                ttl_seconds: Some(9999),
                ..claim
            };
            let after = ask(&before, &claim, soon()).state;
            assert_eq!(after.expires_at, before.expires_at);
            assert_eq!(after.ttl_seconds, before.ttl_seconds);
        }
    }

    #[test]
    fn anybody_else_is_turned_away() {
        for claim in others().iter().flat_map(at_the_gate) {
            assert_turned_away(&claimed(a()), &claim, soon(), Status::Claimed);
        }
    }

    #[test]
    fn without_a_claimant_it_is_nobodys() {
        for claim in everybody().iter().flat_map(at_the_gate) {
            assert_turned_away(&claimed(None), &claim, soon(), Status::Claimed);
        }
    }

    #[test]
    fn the_first_duplicate_is_counted_as_one() {
        let before = KeyState {
            seen_again: 0,
            last_seen_at: None,
            ..claimed(a())
        };
        let after = ask(&before, &gate(b()), soon()).state;
        assert_eq!(after.seen_again, 1);
        assert_eq!(after.last_seen_at, Some(soon()));
    }
}

mod pending_with_its_lease_alive {
    use super::*;

    #[test]
    fn its_claimant_hears_the_same_again_and_the_lease_stays() {
        for claim in in_every_way(&a()) {
            assert_repeated(&pending(a()), &claim, soon(), Status::Pending);
        }
    }

    #[test]
    fn anybody_else_is_turned_away_even_with_take_over() {
        for claim in others().iter().flat_map(in_every_way) {
            assert_turned_away(&pending(a()), &claim, soon(), Status::Pending);
        }
    }

    #[test]
    fn without_a_claimant_it_is_nobodys() {
        for claim in everybody().iter().flat_map(in_every_way) {
            assert_turned_away(&pending(None), &claim, soon(), Status::Pending);
        }
    }

    #[test]
    fn it_is_alive_until_just_before_its_end() {
        let claim = take_over(gate_pending(b()));
        assert_turned_away(&pending(a()), &claim, at(LEASE) - TICK, Status::Pending);
    }
}

mod pending_with_its_lease_run_out {
    use super::*;

    fn renewed(lease_expires_at: Time) -> Vec<Happening> {
        vec![Happening::Renewed { lease_expires_at }]
    }

    #[test]
    fn its_claimant_hears_the_same_again_and_the_lease_is_renewed() {
        let lease_expires_at = after_lease() + seconds(LEASE);
        for claim in [gate_pending(a()), ledger(a())] {
            let decision = ask(&pending(a()), &claim, after_lease());
            assert!(decision.claimed && decision.replayed);
            let expected = KeyState {
                phase: Phase::Pending { lease_expires_at },
                updated_at: after_lease(),
                ..pending(a())
            };
            assert_eq!(decision.state, expected);
            assert_eq!(happenings(&decision), renewed(lease_expires_at));
        }
    }

    #[test]
    fn a_renewal_that_names_no_lease_is_of_the_default() {
        let decision = ask(&pending(a()), &gate(a()), after_lease());
        assert!(decision.claimed && decision.replayed);
        let lease_expires_at = after_lease() + seconds(900);
        assert_eq!(decision.state.lease_expires_at(), Some(lease_expires_at));
        assert_eq!(happenings(&decision), renewed(lease_expires_at));
    }

    #[test]
    fn its_claimant_never_takes_over_from_itself() {
        for claim in in_every_way(&a()) {
            let decision = ask(&pending(a()), &claim, after_lease());
            assert!(decision.claimed && decision.replayed, "{claim:?}");
            assert_eq!(decision.state.attempt, 1);
            assert_eq!(decision.state.status(after_lease()), Status::Pending);
        }
    }

    #[test]
    fn anybody_else_is_held_off_where_on_stale_is_hold() {
        for who in others() {
            for claim in [gate(who.clone()), gate_pending(who.clone()), ledger(who)] {
                assert_turned_away(&pending(a()), &claim, after_lease(), Status::Stale);
            }
        }
    }

    #[test]
    fn anybody_else_takes_over_where_on_stale_is_take_over() {
        for who in others() {
            for claim in [gate_pending(who.clone()), ledger(who)] {
                let claim = take_over(claim);
                let decision =
                    assert_claimed_anew(&pending(a()), &claim, after_lease(), Status::Pending);
                let lease_expires_at = after_lease() + seconds(LEASE);
                assert_eq!(decision.state.lease_expires_at(), Some(lease_expires_at));
                let expected = Event {
                    at: after_lease(),
                    attempt: 2,
                    holder: claim.holder,
                    happening: opened(lease_expires_at, Some(After::Stale)),
                };
                assert_eq!(events(&decision), [expected]);
            }
        }
    }

    #[test]
    fn a_take_over_without_pending_is_pending_all_the_same() {
        let claim = take_over(gate(b()));
        let decision = assert_claimed_anew(&pending(a()), &claim, after_lease(), Status::Pending);
        let lease_expires_at = after_lease() + seconds(900);
        assert_eq!(decision.state.lease_expires_at(), Some(lease_expires_at));
    }

    #[test]
    fn without_a_claimant_anybody_takes_over() {
        for who in everybody() {
            let claim = take_over(gate_pending(who));
            assert_claimed_anew(&pending(None), &claim, after_lease(), Status::Pending);
        }
    }

    #[test]
    fn it_has_run_out_just_past_its_end() {
        let claim = take_over(gate_pending(b()));
        assert_claimed_anew(&pending(a()), &claim, at(LEASE) + TICK, Status::Pending);
    }

    #[test]
    fn the_claimant_of_an_earlier_attempt_is_another_claimant() {
        let taken = ask(&pending(a()), &take_over(ledger(b())), after_lease()).state;
        let now = after_lease() + seconds(1);
        assert_turned_away(&taken, &ledger(a()), now, Status::Pending);
        assert_repeated(&taken, &ledger(b()), now, Status::Pending);
    }

    #[test]
    fn the_window_is_that_of_the_claim_that_took_over() {
        let claim = Claim {
            ttl_seconds: Some(5000),
            ..take_over(gate_pending(b()))
        };
        let after = ask(&with_ttl(pending(a())), &claim, after_lease()).state;
        assert_eq!(after.ttl_seconds, Some(5000));
        let for_ever = take_over(gate_pending(b()));
        let after = ask(&with_ttl(pending(a())), &for_ever, after_lease()).state;
        assert_eq!(after.ttl_seconds, None);
    }
}

mod settled_as_done {
    use super::*;

    #[test]
    fn everybody_is_turned_away() {
        for claim in everybody().iter().flat_map(in_every_way) {
            assert_turned_away(&done(a()), &claim, soon(), Status::Done);
            assert_turned_away(&done(None), &claim, soon(), Status::Done);
        }
    }

    #[test]
    fn everybody_is_told_its_external_id_and_result() {
        for claim in everybody().iter().flat_map(in_every_way) {
            let after = ask(&done(a()), &claim, soon()).state;
            let external_id = "ch_1".to_owned();
            let result = json!({"paid": true});
            assert_eq!(after.effect(), (Some(&external_id), Some(&result)));
        }
    }

    #[test]
    fn without_ttl_that_is_for_ever() {
        for who in everybody() {
            let decades = at(0) + TimeDelta::days(20_000);
            assert_turned_away(&done(a()), &gate_pending(who), decades, Status::Done);
        }
    }
}

mod settled_as_failed {
    use super::*;

    #[test]
    fn its_claimant_is_turned_away_even_where_it_may_be_tried_again() {
        for claim in in_every_way(&a()) {
            assert_turned_away(&failed(a()), &claim, soon(), Status::Failed);
        }
    }

    #[test]
    fn anybody_else_claims_it_anew() {
        for claim in others().iter().flat_map(in_every_way) {
            assert_claimed_anew(&failed(a()), &claim, soon(), status_won_by(&claim));
        }
    }

    #[test]
    fn without_a_claimant_anybody_claims_it_anew() {
        for claim in everybody().iter().flat_map(in_every_way) {
            assert_claimed_anew(&failed(None), &claim, soon(), status_won_by(&claim));
        }
    }

    #[test]
    fn claimed_anew_without_pending_it_has_no_lease_and_its_history_goes_on() {
        let decision = ask(&failed(a()), &gate(b()), soon());
        assert_eq!(decision.state.lease_expires_at(), None);
        assert!(decision.state.in_ledger);
        let expected = Event {
            at: soon(),
            attempt: 2,
            holder: b(),
            happening: Happening::Claimed {
                after: Some(After::Failed),
            },
        };
        assert_eq!(events(&decision), [expected]);
    }

    #[test]
    fn claimed_anew_with_pending_it_has_a_lease_through_either_door() {
        for claim in [gate_pending(b()), ledger(b())] {
            let decision = ask(&failed(a()), &claim, soon());
            let lease_expires_at = soon() + seconds(LEASE);
            assert_eq!(decision.state.lease_expires_at(), Some(lease_expires_at));
            let expected = [opened(lease_expires_at, Some(After::Failed))];
            assert_eq!(happenings(&decision), expected);
        }
    }

    #[test]
    fn the_window_runs_anew_with_the_ttl_of_the_claim_that_won() {
        let claim = Claim {
            ttl_seconds: Some(5000),
            ..gate(b())
        };
        let after = ask(&with_ttl(failed(a())), &claim, soon()).state;
        assert_eq!(after.expires_at, Some(soon() + seconds(5000)));
        let after = ask(&with_ttl(failed(a())), &gate(b()), soon()).state;
        assert_eq!(after.expires_at, None);
    }

    #[test]
    fn for_good_everybody_is_turned_away() {
        for claim in everybody().iter().flat_map(in_every_way) {
            assert_turned_away(&failed_for_good(a()), &claim, soon(), Status::Failed);
            assert_turned_away(&failed_for_good(None), &claim, soon(), Status::Failed);
        }
    }
}

mod conflict {
    use super::*;

    #[test]
    fn failed_counts_as_for_good() {
        for claim in everybody().iter().flat_map(in_every_way) {
            let before = with_conflict(failed(a()));
            assert_turned_away(&before, &claim, soon(), Status::Failed);
        }
    }

    #[test]
    fn take_over_counts_as_hold() {
        for claim in others().iter().flat_map(in_every_way) {
            let before = with_conflict(pending(a()));
            assert_turned_away(&before, &claim, after_lease(), Status::Stale);
        }
    }

    #[test]
    fn the_claimant_still_renews_its_lease() {
        let before = with_conflict(pending(a()));
        let decision = ask(&before, &gate_pending(a()), after_lease());
        assert!(decision.claimed && decision.replayed);
        assert_eq!(decision.state.status(after_lease()), Status::Pending);
        assert!(decision.state.conflict);
    }

    #[test]
    fn the_claimant_still_hears_the_same_again() {
        let before = with_conflict(claimed(a()));
        assert_repeated(&before, &gate(a()), soon(), Status::Claimed);
        let before = with_conflict(pending(a()));
        assert_repeated(&before, &ledger(a()), soon(), Status::Pending);
    }

    #[test]
    fn a_new_window_ends_it() {
        for before in [claimed(a()), done(a()), failed(a()), failed_for_good(a())] {
            let before = with_conflict(with_ttl(before));
            let claim = gate_pending(b());
            assert_claimed_anew(&before, &claim, after_window(), Status::Pending);
        }
    }
}

mod window_passed {
    use super::*;

    fn settled_or_claimed(who: &Option<Holder>) -> [KeyState; 4] {
        [
            with_ttl(claimed(who.clone())),
            with_ttl(done(who.clone())),
            with_ttl(failed(who.clone())),
            with_ttl(failed_for_good(who.clone())),
        ]
    }

    #[test]
    fn anybody_else_claims_the_key_anew() {
        for before in settled_or_claimed(&a()) {
            for claim in others().iter().flat_map(in_every_way) {
                assert_claimed_anew(&before, &claim, after_window(), status_won_by(&claim));
            }
        }
    }

    #[test]
    fn without_a_claimant_anybody_claims_the_key_anew() {
        for before in settled_or_claimed(&None) {
            for claim in everybody().iter().flat_map(in_every_way) {
                assert_claimed_anew(&before, &claim, after_window(), status_won_by(&claim));
            }
        }
    }

    #[test]
    fn it_has_not_passed_just_before_its_end() {
        let before = with_ttl(done(a()));
        assert_turned_away(&before, &gate(b()), at(TTL) - TICK, Status::Done);
    }

    #[test]
    fn it_has_passed_just_past_its_end() {
        let before = with_ttl(done(a()));
        assert_claimed_anew(&before, &gate(b()), at(TTL) + TICK, Status::Claimed);
    }

    #[test]
    fn its_claimant_hears_what_it_would_have_heard_inside_it() {
        let now = after_window();
        assert_repeated(&with_ttl(claimed(a())), &gate(a()), now, Status::Claimed);
        for claim in in_every_way(&a()) {
            assert_turned_away(&with_ttl(done(a())), &claim, now, Status::Done);
            assert_turned_away(&with_ttl(failed(a())), &claim, now, Status::Failed);
            let for_good = with_ttl(failed_for_good(a()));
            assert_turned_away(&for_good, &claim, now, Status::Failed);
        }
    }

    #[test]
    fn its_claimant_opens_what_it_claimed_at_the_gate() {
        for claim in [gate_pending(a()), ledger(a())] {
            let decision = ask(&with_ttl(claimed(a())), &claim, after_window());
            assert!(decision.claimed);
            assert_eq!(decision.state.attempt, 1);
            assert_eq!(decision.state.status(after_window()), Status::Pending);
        }
    }

    #[test]
    fn a_pending_key_never_runs_out() {
        let before = with_ttl(pending(a()));
        for claim in others().iter().flat_map(in_every_way) {
            assert_turned_away(&before, &claim, after_window(), Status::Pending);
        }
        for who in others() {
            assert_turned_away(&before, &ledger(who), after_lease(), Status::Stale);
        }
    }

    #[test]
    fn a_pending_key_is_taken_over_as_stale() {
        let before = with_ttl(pending(a()));
        let claim = take_over(gate_pending(b()));
        let decision = assert_claimed_anew(&before, &claim, after_lease(), Status::Pending);
        let lease_expires_at = after_lease() + seconds(LEASE);
        let expected = [opened(lease_expires_at, Some(After::Stale))];
        assert_eq!(happenings(&decision), expected);
    }

    #[test]
    fn the_new_window_is_that_of_the_claim_that_won() {
        let claim = Claim {
            ttl_seconds: Some(5000),
            ..gate(b())
        };
        let after = ask(&with_ttl(done(a())), &claim, after_window()).state;
        assert_eq!(after.expires_at, Some(after_window() + seconds(5000)));
        let after = ask(&with_ttl(done(a())), &gate(b()), after_window()).state;
        assert_eq!(after.expires_at, None);
    }

    #[test]
    fn the_history_of_a_ledger_entry_says_why() {
        let before = with_ttl(done(a()));
        let decision = ask(&before, &gate(b()), after_window());
        let after = Some(After::Window);
        assert_eq!(happenings(&decision), [Happening::Claimed { after }]);
        let decision = ask(&before, &gate_pending(b()), after_window());
        let lease_expires_at = after_window() + seconds(LEASE);
        assert_eq!(happenings(&decision), [opened(lease_expires_at, after)]);
    }

    #[test]
    fn at_the_gate_alone_there_is_no_history_to_write() {
        let decision = ask(&with_ttl(claimed(a())), &gate(b()), after_window());
        assert_eq!(events(&decision), []);
        assert!(!decision.state.in_ledger);
    }
}

mod replay_window {
    use super::*;

    const INSIDE: TimeDelta = TimeDelta::milliseconds(REPLAY as i64 * 1000 - 1);
    const PAST: TimeDelta = TimeDelta::milliseconds(REPLAY as i64 * 1000 + 1);

    fn long_pending() -> KeyState {
        let lease_expires_at = at(10 * REPLAY);
        state(a(), Phase::Pending { lease_expires_at })
    }

    #[test]
    fn just_inside_it_the_claimant_is_recognised() {
        let now = at(0) + INSIDE;
        assert_repeated(&claimed(a()), &gate(a()), now, Status::Claimed);
        for claim in in_every_way(&a()) {
            assert_repeated(&long_pending(), &claim, now, Status::Pending);
            assert_turned_away(&failed(a()), &claim, now, Status::Failed);
        }
    }

    #[test]
    fn just_past_it_the_claimant_is_turned_away_like_anybody_else() {
        let now = at(0) + PAST;
        for claim in at_the_gate(&a()) {
            assert_turned_away(&claimed(a()), &claim, now, Status::Claimed);
        }
        for claim in in_every_way(&a()) {
            assert_turned_away(&long_pending(), &claim, now, Status::Pending);
        }
        assert_turned_away(&pending(a()), &gate_pending(a()), now, Status::Stale);
        assert_turned_away(&pending(a()), &ledger(a()), now, Status::Stale);
    }

    #[test]
    fn just_past_it_the_claimant_claims_anew_like_anybody_else() {
        let now = at(0) + PAST;
        let claim = take_over(gate_pending(a()));
        assert_claimed_anew(&pending(a()), &claim, now, Status::Pending);
        assert_claimed_anew(&failed(a()), &gate(a()), now, Status::Claimed);
        let passed = with_ttl(claimed(a()));
        assert_claimed_anew(&passed, &gate(a()), now, Status::Claimed);
        let passed = with_ttl(done(a()));
        assert_claimed_anew(&passed, &ledger(a()), now, Status::Pending);
    }

    #[test]
    fn a_delayed_first_try_after_failed_wins_nothing() {
        let now = at(0) + INSIDE;
        assert_turned_away(&failed(a()), &gate_pending(a()), now, Status::Failed);
        assert_turned_away(&with_ttl(failed(a())), &gate(a()), now, Status::Failed);
    }

    #[test]
    fn the_first_opening_through_the_ledger_is_not_bound_by_it() {
        for before in [claimed(a()), with_ttl(claimed(a()))] {
            let decision = ask(&before, &ledger(a()), after_replay());
            assert!(decision.claimed && !decision.replayed);
            assert_eq!(decision.state.attempt, 1);
            assert_eq!(decision.state.status(after_replay()), Status::Pending);
        }
    }

    #[test]
    fn an_opening_through_the_gate_is_bound_by_it() {
        let claim = gate_pending(a());
        assert_turned_away(&claimed(a()), &claim, after_replay(), Status::Claimed);
    }

    #[test]
    fn an_opening_through_either_door_restarts_it() {
        let opening = at(0) + INSIDE;
        for claim in [gate_pending(a()), ledger(a())] {
            let open = ask(&claimed(a()), &claim, opening).state;
            let inside = ask(&open, &claim, opening + INSIDE);
            assert!(inside.claimed && inside.replayed);
            assert_turned_away(&open, &claim, opening + PAST, Status::Stale);
        }
    }

    #[test]
    fn a_renewed_lease_does_not_restart_it() {
        let renewed = ask(&pending(a()), &ledger(a()), after_lease()).state;
        let now = at(0) + PAST;
        assert_turned_away(&renewed, &ledger(a()), now, Status::Stale);
    }

    #[test]
    fn asking_again_does_not_restart_it() {
        let asked = ask(&claimed(a()), &gate(a()), at(0) + INSIDE).state;
        assert_turned_away(&asked, &gate(a()), at(0) + PAST, Status::Claimed);
    }

    #[test]
    fn a_claim_anew_starts_its_own() {
        let anew = ask(&failed(a()), &gate(b()), after_replay()).state;
        let inside = after_replay() + INSIDE;
        assert_repeated(&anew, &gate(b()), inside, Status::Claimed);
        let past = after_replay() + PAST;
        assert_turned_away(&anew, &gate(b()), past, Status::Claimed);
    }
}

mod ledger_door {
    use super::*;

    #[test]
    fn the_claimant_opens_its_key_and_that_is_no_repetition() {
        let decision = ask(&claimed(a()), &ledger(a()), soon());
        assert!(decision.claimed && !decision.replayed);
        let expected = KeyState {
            phase: Phase::Pending {
                lease_expires_at: soon() + seconds(LEASE),
            },
            recognised_from: soon(),
            updated_at: soon(),
            in_ledger: true,
            ..claimed(a())
        };
        assert_eq!(decision.state, expected);
    }

    #[test]
    fn the_second_time_is_a_repetition() {
        let open = ask(&claimed(a()), &ledger(a()), soon()).state;
        assert_repeated(&open, &ledger(a()), soon(), Status::Pending);
        assert_repeated(&open, &gate_pending(a()), soon(), Status::Pending);
    }

    #[test]
    fn opening_writes_the_claim_into_the_history_first() {
        let decision = ask(&claimed(a()), &ledger(a()), soon());
        let lease_expires_at = soon() + seconds(LEASE);
        let expected = [
            Happening::Claimed { after: None },
            opened(lease_expires_at, None),
        ];
        assert_eq!(happenings(&decision), expected);
        assert_eq!(events(&decision)[0].at, at(0));
    }

    #[test]
    fn nobody_else_opens_it() {
        for who in others() {
            for claim in [ledger(who.clone()), take_over(ledger(who))] {
                assert_turned_away(&claimed(a()), &claim, soon(), Status::Claimed);
            }
        }
    }

    #[test]
    fn nobody_opens_what_has_no_claimant() {
        for who in everybody() {
            let claim = ledger(who);
            assert_turned_away(&claimed(None), &claim, soon(), Status::Claimed);
        }
    }
}

mod payload {
    use super::*;

    fn in_every_phase() -> [KeyState; 5] {
        [
            claimed(a()),
            pending(a()),
            done(a()),
            failed(a()),
            failed_for_good(a()),
        ]
    }

    #[test]
    fn another_one_is_refused_before_any_other_rule() {
        for before in in_every_phase() {
            let before = first_claimed_with("P", before);
            for claim in everybody().iter().flat_map(in_every_way) {
                let claim = with_payload("Q", claim);
                for now in [soon(), after_lease(), after_replay()] {
                    assert_eq!(try_ask(&before, &claim, now), Err(KeyReused));
                }
            }
        }
    }

    #[test]
    fn the_same_one_or_none_is_not_refused() {
        for before in in_every_phase() {
            let first = first_claimed_with("P", before);
            for claim in everybody().iter().flat_map(in_every_way) {
                let same = with_payload("P", claim.clone());
                assert!(try_ask(&first, &same, soon()).is_ok());
                assert!(try_ask(&first, &claim, soon()).is_ok());
            }
        }
    }

    #[test]
    fn a_key_first_claimed_without_one_never_mismatches() {
        for before in in_every_phase() {
            for claim in everybody().iter().flat_map(in_every_way) {
                let claim = with_payload("Q", claim);
                assert!(try_ask(&before, &claim, soon()).is_ok());
            }
        }
    }

    #[test]
    fn nor_does_it_in_later_attempts_inside_its_window() {
        let retried = ask(&failed(a()), &with_payload("P", ledger(b())), soon()).state;
        assert!(try_ask(&retried, &with_payload("Q", ledger(b())), soon()).is_ok());
        let claim = with_payload("P", take_over(ledger(b())));
        let taken_over = ask(&pending(a()), &claim, after_lease()).state;
        let claim = with_payload("Q", ledger(b()));
        assert!(try_ask(&taken_over, &claim, after_lease()).is_ok());
    }

    #[test]
    fn a_later_attempt_without_one_does_not_free_the_key() {
        let before = first_claimed_with("P", failed(a()));
        let retried = ask(&before, &gate(b()), soon()).state;
        let claim = with_payload("Q", gate(b()));
        assert_eq!(try_ask(&retried, &claim, soon()), Err(KeyReused));
    }

    #[test]
    fn it_is_refused_until_just_before_the_end_of_the_window() {
        let before = first_claimed_with("P", with_ttl(done(a())));
        let claim = with_payload("Q", gate(b()));
        assert_eq!(
            try_ask(&before, &claim, at(TTL) - TICK),
            Err(KeyReused),
            "inside"
        );
        assert_claimed_anew(&before, &claim, at(TTL) + TICK, Status::Claimed);
    }

    #[test]
    fn the_claimant_is_not_refused_after_the_window_either() {
        let before = first_claimed_with("P", with_ttl(done(a())));
        let claim = with_payload("Q", gate(a()));
        assert_turned_away(&before, &claim, after_window(), Status::Done);
    }

    #[test]
    fn a_claimant_that_opens_its_key_after_the_window_hears_the_same_again() {
        let before = first_claimed_with("P", with_ttl(claimed(a())));
        for claim in [gate_pending(a()), ledger(a())] {
            let claim = with_payload("Q", claim);
            let opened = ask(&before, &claim, after_window());
            assert!(opened.claimed);
            assert_repeated(&opened.state, &claim, after_window(), Status::Pending);
        }
    }

    #[test]
    fn a_new_window_has_the_payload_of_the_claim_that_began_it() {
        let before = first_claimed_with("P", with_ttl(done(a())));
        let claim = with_payload("Q", gate(b()));
        let anew = ask(&before, &claim, after_window()).state;
        assert!(try_ask(&anew, &claim, after_window()).is_ok());
        let claim = with_payload("P", gate(b()));
        assert_eq!(try_ask(&anew, &claim, after_window()), Err(KeyReused));
    }

    #[test]
    fn a_new_window_begun_without_one_never_mismatches() {
        for before in [done(a()), failed(a())] {
            let before = first_claimed_with("P", with_ttl(before));
            let anew = ask(&before, &gate(b()), after_window()).state;
            for payload in ["P", "Q"] {
                let claim = with_payload(payload, gate(b()));
                assert!(try_ask(&anew, &claim, after_window()).is_ok());
            }
        }
    }

    #[test]
    fn a_pending_key_is_always_inside_its_window() {
        let before = first_claimed_with("P", with_ttl(pending(a())));
        for who in everybody() {
            let claim = with_payload("Q", take_over(ledger(who)));
            for now in [after_window(), after_lease(), after_replay()] {
                assert_eq!(try_ask(&before, &claim, now), Err(KeyReused));
            }
        }
    }
}

mod batch {
    use super::*;

    fn known(states: &[(&str, KeyState)]) -> BTreeMap<IdempotencyKey, Found> {
        let found = states.iter().cloned();
        found
            .map(|(text, state)| (key(text), Found::Known(state)))
            .collect()
    }

    fn new(texts: &[&str], at: Time) -> BTreeMap<IdempotencyKey, Found> {
        texts
            .iter()
            .map(|text| (key(text), Found::New(at)))
            .collect()
    }

    fn on(text: &str, claim: Claim) -> Claim {
        Claim {
            key: key(text),
            ..claim
        }
    }

    fn ask_all(
        claims: &[Claim],
        found: &BTreeMap<IdempotencyKey, Found>,
        now: Time,
    ) -> (Vec<Result<Verdict, KeyReused>>, Vec<Write>) {
        decide_all(claims, Batch::Array, found, now, seconds(REPLAY))
    }

    /// The verdicts of a batch without a mismatch, and the one write it asks for.
    #[track_caller]
    fn ask_on_one_key(
        claims: &[Claim],
        found: &BTreeMap<IdempotencyKey, Found>,
        now: Time,
    ) -> (Vec<Verdict>, Write) {
        let (verdicts, mut writes) = ask_all(claims, found, now);
        let verdicts = verdicts
            .into_iter()
            .map(|verdict| verdict.expect("the payload matches"))
            .collect();
        assert_eq!(writes.len(), 1);
        (verdicts, writes.remove(0))
    }

    fn said(verdicts: &[Verdict]) -> Vec<(bool, bool)> {
        verdicts
            .iter()
            .map(|verdict| (verdict.claimed, verdict.replayed))
            .collect()
    }

    /// The verdicts of claims that come one after the other, each with the state that the one
    /// before it left.
    fn ask_in_turn(claims: &[Claim], found: &Found) -> Vec<Result<Verdict, KeyReused>> {
        let mut found = found.clone();
        claims
            .iter()
            .map(|claim| {
                let alone = BTreeMap::from([(key("k"), found.clone())]);
                let (mut verdicts, writes) = ask_all(std::slice::from_ref(claim), &alone, soon());
                if let Some(write) = writes.into_iter().next() {
                    found = Found::Known(write.state);
                }
                verdicts.remove(0)
            })
            .collect()
    }

    #[test]
    fn a_key_that_was_made_early_is_told_of_as_it_was_then() {
        let claims = [on("new", gate_pending(a())), on("old", gate(b()))];
        let mut found = new(&["new"], soon());
        found.extend(known(&[("old", claimed(a()))]));
        let late = soon() + seconds(LEASE);
        let (verdicts, _) = decide_all(&claims, Batch::Lane, &found, late, seconds(REPLAY));
        let won = verdicts[0].as_ref().unwrap();
        assert!(won.claimed);
        assert_eq!(won.status, Status::Pending);
        assert_eq!(won.state.processed_at, soon());
    }

    #[test]
    fn in_the_lane_each_has_the_answer_of_its_turn() {
        let asked = [
            gate(a()),
            gate(b()),
            gate(None),
            gate_pending(a()),
            gate_pending(b()),
            take_over(gate_pending(b())),
            with_payload("P", gate(a())),
            with_payload("Q", gate(b())),
        ];
        let states = [
            Found::New(soon()),
            Found::Known(claimed(a())),
            Found::Known(pending(a())),
            Found::Known(failed(a())),
            Found::Known(first_claimed_with("P", done(a()))),
        ];
        for found in &states {
            for first in &asked {
                for second in &asked {
                    for third in &asked {
                        let claims = [first.clone(), second.clone(), third.clone()];
                        let all = BTreeMap::from([(key("k"), found.clone())]);
                        let (verdicts, writes) =
                            decide_all(&claims, Batch::Lane, &all, soon(), seconds(REPLAY));
                        assert_eq!(verdicts, ask_in_turn(&claims, found), "{claims:?}");
                        let last = verdicts
                            .iter()
                            .rev()
                            .find_map(|verdict| verdict.as_ref().ok());
                        let left = writes.first().map(|write| &write.state);
                        assert_eq!(left, last.map(|verdict| &verdict.state));
                    }
                }
            }
        }
    }

    #[test]
    fn what_the_lane_changes_after_it_made_the_row_is_told() {
        let ask = |claims: &[Claim]| {
            let found = new(&["k"], soon());
            let (_, mut writes) = decide_all(claims, Batch::Lane, &found, soon(), seconds(REPLAY));
            let write = writes.remove(0);
            (write.changed_again, write.state.in_ledger)
        };
        assert_eq!(ask(&[gate(a())]), (false, false));
        assert_eq!(ask(&[gate_pending(a())]), (false, true));
        assert_eq!(ask(&[gate(a()), gate(b()), gate(a())]), (false, false));
        assert_eq!(ask(&[gate(a()), gate_pending(a())]), (true, true));
        assert_eq!(
            ask(&[gate(a()), gate_pending(a()), gate(b())]),
            (true, true)
        );
    }

    #[test]
    fn verdicts_come_in_the_order_of_the_claims() {
        let claims = [on("z", gate(a())), on("m", gate(a())), on("q", gate(a()))];
        let found = new(&["m", "q", "z"], soon());
        let (verdicts, writes) = ask_all(&claims, &found, soon());
        let keys: Vec<_> = verdicts
            .into_iter()
            .map(|verdict| verdict.expect("nothing mismatches").key)
            .collect();
        assert_eq!(keys, [key("z"), key("m"), key("q")]);
        assert_eq!(writes.len(), 3);
    }

    #[test]
    fn keys_do_not_bear_on_each_other() {
        let claims = [on("new", gate(b())), on("done", gate(b()))];
        let mut found = known(&[("done", done(a()))]);
        found.extend(new(&["new"], soon()));
        let (verdicts, _) = ask_all(&claims, &found, soon());
        let claimed: Vec<_> = verdicts
            .iter()
            .map(|verdict| verdict.as_ref().is_ok_and(|verdict| verdict.claimed))
            .collect();
        assert_eq!(claimed, [true, false]);
    }

    #[test]
    fn a_new_key_is_claimed_when_its_row_was_made() {
        let found = new(&["k"], at(7));
        let (verdicts, write) = ask_on_one_key(&[gate(a())], &found, soon());
        assert_eq!(verdicts[0].state.processed_at, at(7));
        assert_eq!(write.state, verdicts[0].state);
    }

    #[test]
    fn of_one_new_key_the_first_has_the_answer_whatever_the_claimants() {
        let claims = [gate(a()), gate(a()), gate(b()), gate(None)];
        let (verdicts, _) = ask_on_one_key(&claims, &new(&["k"], soon()), soon());
        let no = (false, false);
        assert_eq!(said(&verdicts), [(true, false), no, no, no]);
        assert!(
            verdicts
                .iter()
                .all(|verdict| verdict.status == Status::Claimed)
        );
    }

    #[test]
    fn a_later_one_of_the_same_claimant_opens_nothing() {
        let claims = [gate(a()), gate_pending(a())];
        let (verdicts, write) = ask_on_one_key(&claims, &new(&["k"], soon()), soon());
        assert_eq!(said(&verdicts), [(true, false), (false, false)]);
        assert_eq!(write.state.status(soon()), Status::Claimed);
    }

    #[test]
    fn a_later_take_over_of_a_stale_key_is_turned_away() {
        let claims = [gate(b()), take_over(gate_pending(b())), gate_pending(a())];
        let found = known(&[("k", pending(a()))]);
        let (verdicts, write) = ask_on_one_key(&claims, &found, after_lease());
        assert_eq!(said(&verdicts), [(false, false); 3]);
        assert_eq!(verdicts[1].status, Status::Stale);
        assert_eq!(write.state.attempt, 1);
    }

    #[test]
    fn behind_a_take_over_everybody_sees_the_new_attempt() {
        let claims = [take_over(gate_pending(b())), take_over(gate_pending(a()))];
        let found = known(&[("k", pending(a()))]);
        let (verdicts, _) = ask_on_one_key(&claims, &found, after_lease());
        assert_eq!(said(&verdicts), [(true, false), (false, false)]);
        assert_eq!(verdicts[1].status, Status::Pending);
        assert_eq!(verdicts[1].state.attempt, 2);
    }

    #[test]
    fn behind_a_repetition_the_same_claimant_is_turned_away() {
        let claims = [gate(a()), gate(a())];
        let found = known(&[("k", claimed(a()))]);
        let (verdicts, write) = ask_on_one_key(&claims, &found, soon());
        assert_eq!(said(&verdicts), [(true, true), (false, false)]);
        assert!(!write.changed);
        assert_eq!(write.seen, 1);
    }

    #[test]
    fn a_later_one_does_not_claim_a_passed_window() {
        let claims = [gate(a()), gate(b())];
        let found = known(&[("k", with_ttl(done(a())))]);
        let (verdicts, _) = ask_on_one_key(&claims, &found, after_window());
        assert_eq!(said(&verdicts), [(false, false); 2]);
    }

    #[test]
    fn the_duplicates_are_added_up() {
        let claims = [gate(b()), gate(a()), gate(None)];
        let found = known(&[("k", done(a()))]);
        let (verdicts, write) = ask_on_one_key(&claims, &found, soon());
        let seen: Vec<_> = verdicts.iter().map(|v| v.state.seen_again).collect();
        assert_eq!(seen, [3, 4, 5]);
        let expected = Write {
            changed_again: false,
            key: key("k"),
            state: KeyState {
                seen_again: 5,
                last_seen_at: Some(soon()),
                ..done(a())
            },
            changed: false,
            seen: 3,
            events: Vec::new(),
        };
        assert_eq!(write, expected);
    }

    #[test]
    fn the_first_is_no_duplicate_where_it_wins() {
        let claims = [gate(b()), gate(b()), gate(a())];
        let found = known(&[("k", failed(a()))]);
        let (_, write) = ask_on_one_key(&claims, &found, soon());
        assert!(write.changed);
        assert_eq!(write.seen, 2);
        assert_eq!(write.state.seen_again, 4);
        assert_eq!(write.state.attempt, 2);
        assert_eq!(write.events.len(), 1);
    }

    #[test]
    fn a_repetition_alone_leaves_nothing_to_write() {
        let found = known(&[("k", pending(a()))]);
        let (_, write) = ask_on_one_key(&[gate(a())], &found, soon());
        assert_eq!((write.changed, write.seen), (false, 0));
        assert_eq!(write.state, pending(a()));
    }

    #[test]
    fn a_mismatch_with_what_is_stored_is_told_to_its_element_alone() {
        let claims = [
            on("x", gate(a())),
            on("y", with_payload("Q", gate(b()))),
            on("z", gate(a())),
        ];
        let mut found = known(&[("y", first_claimed_with("P", done(a())))]);
        found.extend(new(&["x", "z"], soon()));
        let (verdicts, writes) = ask_all(&claims, &found, soon());
        let refused: Vec<_> = verdicts.iter().map(Result::is_err).collect();
        assert_eq!(refused, [false, true, false]);
        assert!(writes.iter().all(|write| write.key != key("y")));
    }

    #[test]
    fn a_mismatch_inside_the_batch_is_refused_and_not_counted() {
        let claims = [
            with_payload("P", gate(a())),
            with_payload("Q", gate(a())),
            with_payload("P", gate(a())),
        ];
        let (verdicts, writes) = ask_all(&claims, &new(&["k"], soon()), soon());
        let refused: Vec<_> = verdicts.iter().map(Result::is_err).collect();
        assert_eq!(refused, [false, true, false]);
        assert_eq!(writes[0].seen, 1);
    }

    #[test]
    fn behind_a_first_claim_without_a_payload_nothing_mismatches() {
        let claims = [
            gate(a()),
            with_payload("P", gate(a())),
            with_payload("Q", gate(a())),
        ];
        let (verdicts, _) = ask_on_one_key(&claims, &new(&["k"], soon()), soon());
        assert_eq!(verdicts.len(), 3);
    }

    #[test]
    fn behind_a_claim_that_begins_a_new_window_its_payload_counts() {
        let claims = [with_payload("Q", gate(b())), with_payload("P", gate(b()))];
        let found = known(&[("k", first_claimed_with("P", with_ttl(done(a()))))]);
        let (verdicts, _) = ask_all(&claims, &found, after_window());
        assert!(verdicts[0].as_ref().is_ok_and(|verdict| verdict.claimed));
        assert_eq!(verdicts[1], Err(KeyReused));
    }

    #[test]
    fn after_the_window_a_later_one_does_not_mismatch_either() {
        let claims = [with_payload("P", gate(a())), with_payload("Q", gate(b()))];
        let found = known(&[("k", first_claimed_with("P", with_ttl(done(a()))))]);
        let (verdicts, _) = ask_all(&claims, &found, after_window());
        let later = verdicts[1].as_ref().expect("its window has passed");
        assert!(!later.claimed);
    }

    #[test]
    #[should_panic(expected = "no row of a key")]
    fn a_key_that_the_store_did_not_look_for_is_never_guessed() {
        ask_all(&[gate(a())], &BTreeMap::new(), soon());
    }

    fn warnings(state: KeyState, claim: Claim, now: Time) -> Vec<String> {
        let (mut verdicts, _) = ask_on_one_key(&[claim], &known(&[("k", state)]), now);
        verdicts.remove(0).warnings
    }

    #[test]
    fn a_claim_without_a_claimant_is_warned_of() {
        for claim in [gate(None), gate_pending(None), ledger(None)] {
            let (verdicts, _) = ask_on_one_key(&[claim], &new(&["k"], soon()), soon());
            assert_eq!(verdicts[0].warnings.len(), 1);
            assert!(verdicts[0].warnings[0].contains("claimant"));
        }
    }

    #[test]
    fn a_claim_with_a_claimant_is_not_warned_of() {
        for claim in in_every_way(&a()) {
            let (verdicts, _) = ask_on_one_key(&[claim], &new(&["k"], soon()), soon());
            assert_eq!(verdicts[0].warnings, [""; 0]);
        }
    }

    #[test]
    fn who_cannot_open_a_key_of_the_gate_is_told_how_it_is_done() {
        for (before, who) in [
            (claimed(a()), b()),
            (claimed(a()), a_elsewhere()),
            (claimed(None), a()),
        ] {
            let warnings = warnings(before, ledger(who), soon());
            assert_eq!(warnings.len(), 1);
            assert!(warnings[0].contains("same claimant in both calls"));
            assert!(warnings[0].contains("\"pending\": true"));
        }
    }

    #[test]
    fn who_cannot_open_a_key_for_want_of_a_claimant_has_both_warnings() {
        assert_eq!(warnings(claimed(a()), ledger(None), soon()).len(), 2);
    }

    #[test]
    fn who_is_merely_a_duplicate_is_not_told_how_to_open_the_key() {
        assert_eq!(warnings(claimed(a()), gate(b()), soon()), [""; 0]);
        assert_eq!(warnings(claimed(a()), gate_pending(b()), soon()), [""; 0]);
        assert_eq!(warnings(pending(a()), ledger(b()), soon()), [""; 0]);
        assert_eq!(warnings(done(a()), ledger(b()), soon()), [""; 0]);
    }

    #[test]
    fn who_opens_a_key_is_not_told_how_it_is_done() {
        assert_eq!(warnings(claimed(a()), ledger(a()), soon()), [""; 0]);
        let passed = with_ttl(claimed(a()));
        assert_eq!(warnings(passed, ledger(b()), after_window()), [""; 0]);
    }

    #[test]
    fn a_verdict_of_what_is_done_has_its_external_id_and_result() {
        for who in everybody() {
            let found = known(&[("k", done(a()))]);
            let (verdicts, _) = ask_on_one_key(&[ledger(who)], &found, soon());
            assert_eq!(verdicts[0].status, Status::Done);
            assert_eq!(verdicts[0].external_id().map(String::as_str), Some("ch_1"));
            assert_eq!(verdicts[0].result(), Some(&json!({"paid": true})));
        }
    }

    #[test]
    fn a_verdict_of_what_is_not_done_has_neither() {
        for before in [claimed(a()), pending(a()), failed_for_good(a())] {
            let found = known(&[("k", before)]);
            let (verdicts, _) = ask_on_one_key(&[gate(b())], &found, soon());
            assert_eq!(verdicts[0].external_id(), None);
            assert_eq!(verdicts[0].result(), None);
        }
    }

    mod properties {
        use proptest::prelude::*;
        use proptest::sample::select;

        use super::*;

        fn states() -> impl Strategy<Value = Option<KeyState>> {
            let known = [
                claimed(a()),
                claimed(None),
                pending(a()),
                pending(None),
                done(a()),
                failed(a()),
                failed_for_good(a()),
            ];
            let known = known
                .into_iter()
                .flat_map(|state| [with_ttl(state.clone()), state])
                .map(|state| first_claimed_with("P", state))
                .map(Some);
            select(known.chain([None]).collect::<Vec<_>>())
        }

        fn claims() -> impl Strategy<Value = Vec<Claim>> {
            let who = select(everybody());
            let text = select(vec!["x", "y"]);
            let payload = select(vec![None, None, Some("P"), Some("Q")]);
            let claim = (who, 0..4_usize, text, payload).prop_map(|(who, way, text, payload)| {
                let claim = on(text, at_the_gate(&who)[way].clone());
                match payload {
                    Some(payload) => with_payload(payload, claim),
                    None => claim,
                }
            });
            proptest::collection::vec(claim, 1..12)
        }

        fn settings() -> ProptestConfig {
            ProptestConfig {
                failure_persistence: None,
                ..ProptestConfig::default()
            }
        }

        proptest! {
            #![proptest_config(settings())]

            #[test]
            fn the_first_has_the_answer_and_the_others_are_counted(
                states in [states(), states()],
                claims in claims(),
                now in select(vec![soon(), after_window(), after_lease(), after_replay()]),
            ) {
                for (text, state) in ["x", "y"].into_iter().zip(states) {
                    let claims: Vec<_> = claims
                        .iter()
                        .filter(|claim| claim.key == key(text))
                        .cloned()
                        .collect();
                    let found = match &state {
                        Some(state) => known(&[(text, state.clone())]),
                        None => new(&[text], now),
                    };
                    let (verdicts, writes) = ask_all(&claims, &found, now);
                    prop_assert_eq!(verdicts.len(), claims.len());
                    let mut heard = claims
                        .iter()
                        .zip(&verdicts)
                        .filter_map(|(claim, verdict)| Some((claim, verdict.as_ref().ok()?)));
                    let Some((claim, first)) = heard.next() else {
                        prop_assert_eq!(writes, []);
                        continue;
                    };
                    let alone = decide(state.as_ref(), claim, now, seconds(REPLAY));
                    let alone = alone.expect("it was heard in the batch");
                    prop_assert_eq!(first.claimed, alone.claimed);
                    prop_assert_eq!(first.replayed, alone.replayed);
                    prop_assert_eq!(&first.state, &alone.state);
                    let later: Vec<_> = heard.map(|(_, verdict)| verdict).collect();
                    prop_assert!(later.iter().all(|verdict| !verdict.claimed));

                    let turned_away = later.len() as u64 + u64::from(!first.claimed);
                    let before = state.map_or(0, |state| state.seen_again);
                    prop_assert_eq!(writes.len(), 1);
                    prop_assert_eq!(writes[0].seen, turned_away);
                    prop_assert_eq!(writes[0].state.seen_again, before + turned_away);
                    prop_assert_eq!(writes[0].state.attempt, alone.state.attempt);
                }
            }
        }
    }
}
