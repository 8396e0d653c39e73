//! What each way to fail means, one by one, and what holds for all of them.

use super::Decision::{Check, Fix, GiveUp, Retry};
use super::DuplicateRisk::{Controlled, High, None as NoRisk};
use super::*;

/// 1,250 ms past a whole second, as seen from [`at`] with 0.
fn now() -> Time {
    "2026-11-30T09:11:58.750Z".parse().expect("a time")
}

/// What `Retry-After` says as a date, so many seconds after 09:12.
fn at(seconds: i64) -> Option<RetryAfter> {
    let start: Time = "2026-11-30T09:12:00Z".parse().expect("a time");
    Some(RetryAfter::Date(
        start + chrono::TimeDelta::seconds(seconds),
    ))
}

fn told(seconds: u64) -> Option<RetryAfter> {
    Some(RetryAfter::Seconds(seconds))
}

fn policy() -> Policy {
    Policy {
        waits: vec![1, 2, 5],
        retry_after_limit: 300,
    }
}

fn call(cause: Cause, attempt: u32, idempotent: bool) -> FailedCall {
    FailedCall {
        cause,
        attempt,
        retry_after: None,
        idempotent,
        jitter: false,
    }
}

fn advice(call: &FailedCall) -> Advice {
    advise(call, &policy(), now(), |_| {
        panic!("nobody asked for jitter")
    })
}

/// Decision, seconds and risk.
fn brief(call: &FailedCall) -> (Decision, u64, DuplicateRisk) {
    let advice = advice(call);
    assert_eq!(advice.wait.subsec_nanos(), 0, "{advice:?}");
    (
        advice.decision,
        advice.wait.as_secs(),
        advice.duplicate_risk,
    )
}

fn every_cause() -> impl Iterator<Item = Cause> {
    let failures = Failure::ALL.into_iter().map(Cause::Failure);
    (400..=599).map(Cause::Status).chain(failures)
}

/// Those that may have had their effect.
fn is_uncertain(cause: Cause) -> bool {
    match cause {
        Cause::Status(code) => {
            [408, 409, 499].contains(&code)
                || (code >= 500 && ![501, 505, 507, 511].contains(&code))
        }
        Cause::Failure(failure) => matches!(
            failure,
            Failure::Timeout | Failure::ConnectionReset | Failure::Unknown
        ),
    }
}

#[test]
fn what_each_failure_means() {
    use Failure::{
        ConnectionRefused, ConnectionReset, Dns, NoEffect, Timeout, Tls, Unknown, Unreachable,
    };
    let status = Cause::Status;
    // Each at its first try: without a key, and with one.
    let uncertain = [(Check, 1, High), (Retry, 1, Controlled)];
    let turned_away = [(Retry, 1, NoRisk), (Retry, 1, NoRisk)];
    let refused = [(Fix, 0, NoRisk), (Fix, 0, NoRisk)];
    let table = [
        (status(400), refused),
        (status(401), refused),
        (status(402), refused),
        (status(403), refused),
        (status(404), refused),
        (status(405), refused),
        (status(406), refused),
        (status(407), refused),
        (status(408), uncertain),
        (status(409), uncertain),
        (status(410), refused),
        (status(411), refused),
        (status(412), refused),
        (status(413), refused),
        (status(414), refused),
        (status(415), refused),
        (status(416), refused),
        (status(417), refused),
        (status(418), refused),
        (status(421), refused),
        (status(422), refused),
        (status(423), turned_away),
        (status(424), refused),
        (status(425), turned_away),
        (status(426), refused),
        (status(428), refused),
        (status(429), turned_away),
        (status(431), refused),
        (status(451), refused),
        (status(498), refused),
        (status(499), uncertain),
        (status(500), uncertain),
        (status(501), refused),
        (status(502), uncertain),
        (status(503), uncertain),
        (status(504), uncertain),
        (status(505), refused),
        (status(507), refused),
        (status(511), refused),
        (status(520), uncertain),
        (status(529), uncertain),
        (status(599), uncertain),
        (Cause::Failure(Timeout), uncertain),
        (Cause::Failure(ConnectionReset), uncertain),
        (Cause::Failure(Unknown), uncertain),
        (Cause::Failure(ConnectionRefused), turned_away),
        (Cause::Failure(Dns), turned_away),
        (Cause::Failure(Unreachable), turned_away),
        (Cause::Failure(NoEffect), turned_away),
        (Cause::Failure(Tls), refused),
    ];
    for (cause, [without_key, with_key]) in table {
        assert_eq!(brief(&call(cause, 1, false)), without_key, "{cause}");
        assert_eq!(brief(&call(cause, 1, true)), with_key, "{cause} with a key");
    }
}

#[test]
fn the_tries_and_their_waits() {
    let [turned_away, uncertain, refused] = [429, 502, 400].map(Cause::Status);
    let no_effect = Cause::Failure(Failure::NoEffect);
    let table = [
        (turned_away, false, 1, (Retry, 1, NoRisk)),
        (turned_away, false, 2, (Retry, 2, NoRisk)),
        (turned_away, false, 3, (GiveUp, 0, NoRisk)),
        (turned_away, false, 4, (GiveUp, 0, NoRisk)),
        (turned_away, true, 1, (Retry, 1, NoRisk)),
        // A try before it may have had the effect.
        (turned_away, true, 2, (Retry, 2, Controlled)),
        (turned_away, true, 3, (GiveUp, 0, Controlled)),
        (uncertain, true, 1, (Retry, 1, Controlled)),
        (uncertain, true, 2, (Retry, 2, Controlled)),
        (uncertain, true, 3, (GiveUp, 0, Controlled)),
        (uncertain, false, 1, (Check, 1, High)),
        (uncertain, false, 2, (Check, 2, High)),
        // What became of the last try has to be found out too, and of none beyond.
        (uncertain, false, 3, (Check, 5, High)),
        (uncertain, false, 4, (GiveUp, 0, High)),
        (no_effect, false, 2, (Retry, 2, NoRisk)),
        (no_effect, true, 2, (Retry, 2, NoRisk)),
        (no_effect, false, 3, (GiveUp, 0, NoRisk)),
        (refused, false, 3, (Fix, 0, NoRisk)),
        (refused, true, 3, (Fix, 0, Controlled)),
    ];
    for (cause, idempotent, attempt, expected) in table {
        let call = call(cause, attempt, idempotent);
        assert_eq!(brief(&call), expected, "{call:?}");
    }
}

#[test]
fn the_provider_is_left_alone_for_as_long_as_it_asks() {
    let [turned_away, uncertain, refused] = [429, 503, 413].map(Cause::Status);
    let table = [
        // The longer of what it asks for and what we would wait.
        (turned_away, 1, told(2), (Retry, 2, NoRisk)),
        (turned_away, 1, told(0), (Retry, 1, NoRisk)),
        (turned_away, 2, told(1), (Retry, 2, NoRisk)),
        (uncertain, 1, told(120), (Check, 120, High)),
        // A part of a second counts as a whole.
        (turned_away, 1, at(0), (Retry, 2, NoRisk)),
        (turned_away, 1, at(28), (Retry, 30, NoRisk)),
        (turned_away, 1, at(-3600), (Retry, 1, NoRisk)),
        // Up to the limit, and beyond it: never shortened.
        (turned_away, 1, told(300), (Retry, 300, NoRisk)),
        (turned_away, 1, told(301), (GiveUp, 301, NoRisk)),
        (uncertain, 1, told(86_400), (GiveUp, 86_400, High)),
        (turned_away, 1, at(3600), (GiveUp, 3602, NoRisk)),
        (
            turned_away,
            1,
            told(MAX_RETRY_AFTER),
            (GiveUp, MAX_RETRY_AFTER, NoRisk),
        ),
        // Where there is nothing to wait for, it is told all the same.
        (turned_away, 3, told(7), (GiveUp, 7, NoRisk)),
        (refused, 1, told(7), (Fix, 7, NoRisk)),
        (refused, 1, told(7000), (Fix, 7000, NoRisk)),
    ];
    for (cause, attempt, retry_after, expected) in table {
        let call = FailedCall {
            retry_after,
            ..call(cause, attempt, false)
        };
        assert_eq!(brief(&call), expected, "{call:?}");
    }
}

#[test]
fn jitter_makes_a_wait_longer_by_up_to_half() {
    for (attempt, retry_after, least, most) in [
        (1, None, 1_000, 1_500),
        (2, None, 2_000, 3_000),
        (1, told(7), 7_000, 10_500),
        (1, told(300), 300_000, 450_000),
        // Nothing is to be done then.
        (1, told(301), 301_000, 301_000),
        (3, None, 0, 0),
    ] {
        let call = FailedCall {
            retry_after,
            jitter: true,
            ..call(Cause::Status(429), attempt, false)
        };
        let wait =
            |random: fn(u64) -> u64| advise(&call, &policy(), now(), random).wait.as_millis();
        assert_eq!((wait(|_| 0), wait(|most| most)), (least, most), "{call:?}");
    }
}

#[test]
fn the_tries_are_as_many_as_the_waits() {
    for waits in [vec![0], vec![4, 4], vec![1, 1, 1, 1, 60]] {
        let tries = waits.len();
        let policy = Policy { waits, ..policy() };
        for attempt in 1..=8 {
            let call = call(Cause::Status(429), attempt, false);
            let advice = advise(&call, &policy, now(), |_| 0);
            let (decision, wait) = match policy.waits.get(attempt as usize - 1) {
                Some(wait) if (attempt as usize) < tries => (Retry, *wait),
                _ => (GiveUp, 0),
            };
            assert_eq!(
                (advice.decision, advice.wait.as_secs()),
                (decision, wait.into()),
                "{policy:?} {attempt}"
            );
        }
    }
}

/// Whoever does what it says ends, whatever the provider answers, and never repeats a call that
/// may have had its effect and carries no key.
#[test]
fn what_holds_for_every_failure() {
    let no_effect = Cause::Failure(Failure::NoEffect);
    for cause in every_cause() {
        for attempt in 1..=6 {
            for idempotent in [false, true] {
                for retry_after in [None, told(0), told(9), told(300), told(301), at(7), at(-7)] {
                    let call = FailedCall {
                        retry_after,
                        ..call(cause, attempt, idempotent)
                    };
                    let advice = advice(&call);
                    let at = format!("{call:?}: {advice:?}");
                    match advice.decision {
                        Retry => assert!(attempt < 3, "{at}"),
                        Check => assert!(attempt <= 3 && !idempotent, "{at}"),
                        Fix | GiveUp => {}
                    }
                    if attempt > 3 {
                        assert!(matches!(advice.decision, Fix | GiveUp), "{at}");
                    }
                    if let Some(told) = retry_after {
                        assert!(advice.wait.as_secs() >= told.seconds(now()), "{at}");
                    }
                    if is_uncertain(cause) && !idempotent {
                        assert!(matches!(advice.decision, Check | GiveUp), "{at}");
                    }
                    let risk = match (is_uncertain(cause), idempotent) {
                        (true, false) => High,
                        (true, true) => Controlled,
                        (false, true) if attempt > 1 && cause != no_effect => Controlled,
                        (false, _) => NoRisk,
                    };
                    assert_eq!(advice.duplicate_risk, risk, "{at}");
                    assert!(advice.reason.starts_with(&format!("{cause}: ")), "{at}");
                    assert!(
                        advice.reason.is_ascii() && advice.reason.len() < 300,
                        "{at}"
                    );
                }
            }
        }
    }
}

#[test]
fn the_reason_says_what_to_do() {
    for (call, reason) in [
        (
            call(Cause::Status(429), 1, false),
            "429: the provider has too many requests, so it was not looked at; repeat it",
        ),
        (
            call(Cause::Status(502), 1, true),
            "502: the provider failed, before or after the effect; repeat it with the same key",
        ),
        (
            call(Cause::Failure(Failure::Timeout), 3, false),
            "timeout: the answer did not come in time; find out, and do not repeat it: no try is left of 3",
        ),
        (
            call(Cause::Status(401), 2, true),
            "401: the provider refuses it as it is, so it had no effect; as it is, it will be refused again; the effect may have happened, so whatever comes needs the same key",
        ),
        (
            FailedCall {
                retry_after: told(3600),
                ..call(Cause::Status(503), 1, false)
            },
            "503: the provider failed, before or after the effect; the provider wants to be left alone for 3600 s, and the limit is 300 s; the effect may have happened, so find out before anybody repeats it",
        ),
    ] {
        assert_eq!(advice(&call).reason, reason);
    }
}

#[test]
fn what_retry_after_may_say() {
    for (text, seconds) in [
        ("0", 0),
        ("2", 2),
        ("007", 7),
        ("9007199254740991", MAX_RETRY_AFTER),
        // The three forms of a date.
        ("Mon, 30 Nov 2026 09:12:30 GMT", 32),
        ("Monday, 30-Nov-26 09:12:30 GMT", 32),
        ("Mon Nov 30 09:12:30 2026", 32),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0),
    ] {
        let read = RetryAfter::parse(text).map(|wait| wait.seconds(now()));
        assert_eq!(read, Ok(seconds), "{text}");
    }
    for text in [
        "",
        " 2",
        "-1",
        "+1",
        "1.5",
        "1e3",
        "2s",
        "soon",
        "٣",
        "9007199254740992",
        "99999999999999999999999999",
        "2026-11-30T09:12:30Z",
        "Mon, 30 Nov 2026 09:12:30 CET",
        "Mon, 31 Feb 2026 09:12:30 GMT",
    ] {
        assert!(RetryAfter::parse(text).is_err(), "{text}");
    }
}

#[test]
fn a_failure_is_known_by_its_name() {
    for failure in Failure::ALL {
        assert_eq!(Failure::try_from(failure.name().to_owned()), Ok(failure));
    }
    let refused = Failure::try_from("Timeout".to_owned()).expect_err("it is none");
    for failure in Failure::ALL {
        assert!(refused.contains(failure.name()), "{refused}");
    }
}
