//! What a failed call means: whether to repeat it, when, and what that risks.
//!
//! Three things can be true of a call that failed, and everything follows from which it is. It
//! was turned away, and may go better later; it was refused, and will be again; or nobody knows
//! whether it had its effect. Status codes are judged by the RFC that defines them, and one that
//! none defines as `x00` of its class (RFC 9110, section 15).

use std::fmt;
use std::time::Duration;

use serde::Deserialize;

use super::Time;

/// The largest number of seconds that `Retry-After` may say: what JSON surely holds exactly.
pub const MAX_RETRY_AFTER: u64 = 9_007_199_254_740_991;

/// A call that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FailedCall {
    /// Why it counts as failed.
    pub cause: Cause,
    /// Which of the calls for one effect it was, from 1.
    pub attempt: u32,
    /// How long the provider asks to be left alone.
    pub retry_after: Option<RetryAfter>,
    /// Whether it carries a key by which the provider recognises a repeat.
    pub idempotent: bool,
    /// Whether to spread the wait, so that callers who failed together do not return together.
    pub jitter: bool,
}

/// Why a call counts as failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// It was answered with this status code, from 400 to 599.
    Status(u16),
    /// It was not answered.
    Failure(Failure),
}

/// How a call ended that was not answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Failure {
    /// The answer did not come in time.
    Timeout,
    /// The connection was made, and ended before the answer was there.
    ConnectionReset,
    /// Nobody listens at the address.
    ConnectionRefused,
    /// The host's name has no address, or nobody could be asked for it.
    Dns,
    /// No way leads to the address.
    Unreachable,
    /// No secure connection came about: the handshake failed, or the certificate is not trusted.
    Tls,
    /// Anything else.
    Unknown,
    /// It was checked, and neither this call nor one before has had an effect: what is to be said
    /// after [`Decision::Check`].
    NoEffect,
}

impl Failure {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Timeout,
        Self::ConnectionReset,
        Self::ConnectionRefused,
        Self::Dns,
        Self::Unreachable,
        Self::Tls,
        Self::Unknown,
        Self::NoEffect,
    ];

    /// Its name, for programs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::ConnectionReset => "connection_reset",
            Self::ConnectionRefused => "connection_refused",
            Self::Dns => "dns",
            Self::Unreachable => "unreachable",
            Self::Tls => "tls",
            Self::Unknown => "unknown",
            Self::NoEffect => "no_effect",
        }
    }
}

impl TryFrom<String> for Failure {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|failure| failure.name() == name);
        known.ok_or_else(|| {
            let names = Self::ALL.map(|failure| format!("{:?}", failure.name()));
            format!("must be one of {}", names.join(", "))
        })
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(code) => write!(formatter, "{code}"),
            Self::Failure(failure) => formatter.write_str(failure.name()),
        }
    }
}

/// What the header `Retry-After` says (RFC 9110, section 10.2.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetryAfter {
    /// This many seconds, at most [`MAX_RETRY_AFTER`].
    Seconds(u64),
    /// Until then.
    Date(Time),
}

impl RetryAfter {
    /// Reads the header's value: `delay-seconds`, or an `HTTP-date` in any of its three forms
    /// (RFC 9110, section 5.6.7).
    ///
    /// # Errors
    ///
    /// It is neither, or more than [`MAX_RETRY_AFTER`].
    pub fn parse(text: &str) -> Result<Self, String> {
        if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
            return text
                .parse()
                .ok()
                .filter(|seconds| *seconds <= MAX_RETRY_AFTER)
                .map(Self::Seconds)
                .ok_or_else(|| format!("must be at most {MAX_RETRY_AFTER} seconds"));
        }
        httpdate::parse_http_date(text)
            .map(|date| Self::Date(date.into()))
            .map_err(|_| {
                "must be seconds, or a date as in \"Mon, 30 Nov 2026 09:12:00 GMT\"".to_owned()
            })
    }

    /// How many seconds are left at `now`: a part of one counts as a whole, since a wait is never
    /// shortened; none where the date has passed.
    pub fn seconds(self, now: Time) -> u64 {
        match self {
            Self::Seconds(seconds) => seconds,
            Self::Date(date) => {
                let left = u64::try_from((date - now).num_milliseconds()).unwrap_or(0);
                left.div_ceil(1000)
            }
        }
    }
}

/// How much patience there is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// How long to wait after each try, in seconds: there are as many tries as waits. Nothing is
    /// repeated after the last try; its wait is that before the outcome is checked.
    pub waits: Vec<u32>,
    /// How long a provider may ask to be left alone, in seconds; whoever asks for more is given
    /// up.
    pub retry_after_limit: u32,
}

impl Policy {
    /// How long to wait after a try, in seconds; nothing after those that there are not.
    fn wait_after(&self, attempt: u32) -> u64 {
        let index = attempt.saturating_sub(1) as usize;
        self.waits.get(index).copied().unwrap_or(0).into()
    }
}

/// What to do after a failed call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Wait, and call again; where the call carries a key, with the same.
    Retry,
    /// Wait, and find out whether the effect happened: ask the provider, or the ledger. Where it
    /// did not, that is [`Failure::NoEffect`].
    Check,
    /// Somebody has to change something first: the request, the credential, the set-up.
    Fix,
    /// Do not call again.
    GiveUp,
}

/// Whether one more call could make a second effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DuplicateRisk {
    /// No: none of the calls can have had one.
    None,
    /// There may be a first, but the key keeps the provider from making a second.
    Controlled,
    /// Yes: there may be a first, and nothing keeps the provider from making a second.
    High,
}

/// What a failed call means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advice {
    /// What to do.
    pub decision: Decision,
    /// How long to wait before it; where there is nothing to do, how long the provider asks to be
    /// left alone. Never less than that.
    pub wait: Duration,
    /// What a further call risks.
    pub duplicate_risk: DuplicateRisk,
    /// Why, for a person to read; begins with the cause.
    pub reason: String,
}

/// What a cause says of the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meaning {
    /// It had no effect, and may go better later.
    TurnedAway,
    /// It had no effect, and will have none as it is.
    Refused,
    /// It may have had its effect.
    Uncertain,
}

impl Cause {
    /// What it says of the call, and why.
    fn meaning(self) -> (Meaning, &'static str) {
        use Meaning::{Refused, TurnedAway, Uncertain};
        match self {
            // RFC 9110, section 15.5.9: the request did not arrive whole, and may be repeated. But
            // many send it when their own work took too long, so it is taken for a timeout.
            Self::Status(408) => (
                Uncertain,
                "the provider ran out of time, be it for the request or for the work",
            ),
            // RFC 9110, section 15.5.10: to be resolved, and submitted anew. With a key, the
            // conflict is usually with a call of the same key that is still under way.
            Self::Status(409) => (
                Uncertain,
                "the provider has something that is in conflict with it, which may be an earlier call's effect",
            ),
            // RFC 4918, section 11.3.
            Self::Status(423) => (
                TurnedAway,
                "what it is about is locked, so it had no effect",
            ),
            // RFC 8470, section 5.2: to be repeated, outside of early data.
            Self::Status(425) => (
                TurnedAway,
                "it came too early to be told from a replay, so it was not looked at",
            ),
            // RFC 6585, section 4.
            Self::Status(429) => (
                TurnedAway,
                "the provider has too many requests, so it was not looked at",
            ),
            // Of no RFC: a proxy of nginx's kind whose caller, another proxy, did not wait.
            Self::Status(499) => (
                Uncertain,
                "something on the way did not wait for the answer",
            ),
            Self::Status(400..=499) => (
                Refused,
                "the provider refuses it as it is, so it had no effect",
            ),
            // RFC 9110, sections 15.6.2 and 15.6.6.
            Self::Status(501 | 505) => (
                Refused,
                "the provider does not know how to serve it, so it had no effect",
            ),
            // RFC 4918, section 11.5: not to be repeated unless somebody asks for it.
            Self::Status(507) => (
                Refused,
                "the provider has no room for it, so it had no effect",
            ),
            // RFC 6585, section 6: the answer of a network on the way, which wants a login.
            Self::Status(511) => (
                Refused,
                "a network on the way wants a login, so it never arrived",
            ),
            // RFC 9110, sections 15.6.1 and 15.6.3 to 15.6.5: 500, 502, 503, 504.
            Self::Status(_) => (Uncertain, "the provider failed, before or after the effect"),
            Self::Failure(Failure::Timeout) => (Uncertain, "the answer did not come in time"),
            Self::Failure(Failure::ConnectionReset) => (
                Uncertain,
                "the connection ended before the answer was there",
            ),
            Self::Failure(Failure::ConnectionRefused) => (
                TurnedAway,
                "nobody listens at the address, so it never arrived",
            ),
            Self::Failure(Failure::Dns) => (
                TurnedAway,
                "the host's name has no address, so it was never sent",
            ),
            Self::Failure(Failure::Unreachable) => (
                TurnedAway,
                "no way leads to the address, so it was never sent",
            ),
            Self::Failure(Failure::Tls) => (
                Refused,
                "no secure connection came about, so it was never sent",
            ),
            Self::Failure(Failure::Unknown) => (Uncertain, "nobody knows how it ended"),
            Self::Failure(Failure::NoEffect) => (TurnedAway, "it was checked, and had no effect"),
        }
    }
}

/// What a failed call means. `now` is what a date of `Retry-After` is measured by; `random` gives
/// a number from 0 to the one that it is given, and is asked only where the call wants jitter.
///
/// Jitter makes a wait longer by up to half of it, and never shorter.
pub fn advise(
    call: &FailedCall,
    policy: &Policy,
    now: Time,
    random: impl FnOnce(u64) -> u64,
) -> Advice {
    let (meaning, explanation) = call.cause.meaning();
    let duplicate_risk = duplicate_risk(call, meaning);
    let told = call.retry_after.map_or(0, |wait| wait.seconds(now));
    let (decision, consequence) = decide(call, meaning, told, policy);
    let wait = match decision {
        Decision::Fix | Decision::GiveUp => Duration::from_secs(told),
        Decision::Retry | Decision::Check => {
            let wait = Duration::from_secs(told.max(policy.wait_after(call.attempt)));
            if call.jitter {
                lengthened(wait, random)
            } else {
                wait
            }
        }
    };
    let caution = match (decision, duplicate_risk) {
        (Decision::Retry | Decision::Check, _) | (_, DuplicateRisk::None) => "",
        (_, DuplicateRisk::Controlled) => {
            "; the effect may have happened, so whatever comes needs the same key"
        }
        (_, DuplicateRisk::High) => {
            "; the effect may have happened, so find out before anybody repeats it"
        }
    };
    Advice {
        decision,
        wait,
        duplicate_risk,
        reason: format!("{}: {explanation}; {consequence}{caution}", call.cause),
    }
}

/// What to do, and the reason's part about that.
fn decide(call: &FailedCall, meaning: Meaning, told: u64, policy: &Policy) -> (Decision, String) {
    let tries = policy.waits.len();
    let attempt = call.attempt as usize;
    let limit = policy.retry_after_limit;
    // To find out what became of a try is not to try again: the last one is checked too.
    let is_checked = meaning == Meaning::Uncertain && !call.idempotent;
    if meaning == Meaning::Refused {
        (Decision::Fix, "as it is, it will be refused again".into())
    } else if told > limit.into() {
        let wish =
            format!("the provider wants to be left alone for {told} s, and the limit is {limit} s");
        (Decision::GiveUp, wish)
    } else if attempt > tries || (attempt == tries && !is_checked) {
        (Decision::GiveUp, format!("no try is left of {tries}"))
    } else if attempt == tries {
        let end = format!("find out, and do not repeat it: no try is left of {tries}");
        (Decision::Check, end)
    } else if is_checked {
        (Decision::Check, "find out before it is repeated".into())
    } else if call.idempotent {
        (Decision::Retry, "repeat it with the same key".into())
    } else {
        (Decision::Retry, "repeat it".into())
    }
}

fn duplicate_risk(call: &FailedCall, meaning: Meaning) -> DuplicateRisk {
    // With a key, a call is repeated whose outcome is uncertain, so that the refusal of the last
    // says nothing of those before, unless somebody has checked. Without, that is so of none.
    let is_known = call.attempt == 1 || call.cause == Cause::Failure(Failure::NoEffect);
    match meaning {
        Meaning::Uncertain if !call.idempotent => DuplicateRisk::High,
        Meaning::Uncertain => DuplicateRisk::Controlled,
        _ if call.idempotent && !is_known => DuplicateRisk::Controlled,
        _ => DuplicateRisk::None,
    }
}

/// `wait`, and up to half of it besides, in milliseconds.
fn lengthened(wait: Duration, random: impl FnOnce(u64) -> u64) -> Duration {
    let half = u64::try_from(wait.as_millis() / 2).unwrap_or(u64::MAX);
    wait + Duration::from_millis(random(half))
}

#[cfg(test)]
mod tests;
