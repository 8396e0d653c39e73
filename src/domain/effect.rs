//! What must happen after the work: effects, which are written together with its outcome and
//! delivered afterwards, at least once.

use chrono::TimeDelta;

use super::Time;
use super::ledger::seconds;
#[cfg(feature = "planted-faults")]
use super::planted;

/// How long a receiver is left alone at most because it asked for it.
const RETRY_AFTER_LIMIT: u32 = 86_400;

/// By how much of itself a wait is spread, so that what failed together does not return together.
const JITTER: f64 = 0.2;

/// Something that must happen after the work, as a report asks for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Effect {
    /// Its name for ever: the `webhook-id` of every try. Each effect has one of its own.
    pub id: String,
    /// What it is about; decides where it goes.
    pub topic: String,
    /// JSON, which is sent byte for byte.
    pub payload: String,
    /// When it may happen at the earliest.
    pub due: Due,
}

/// When an effect may happen at the earliest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// At once.
    Now,
    /// So many seconds after it is stored.
    In(u32),
    /// Then.
    At(Time),
}

impl Due {
    /// The time, for what is stored at `now`.
    pub fn at(self, now: Time) -> Time {
        match self {
            Self::Now => now,
            Self::In(count) => now + seconds(count),
            Self::At(time) => time.max(now),
        }
    }
}

/// Where an effect stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// It waits for its first try, or for another one.
    Pending,
    /// A receiver has taken it.
    Delivered,
    /// It is not tried any more, unless a person wants it.
    Dead,
}

impl Delivery {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Pending, Self::Delivered, Self::Dead];

    /// Its name, for programs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Delivered => "delivered",
            Self::Dead => "dead",
        }
    }

    /// That of this name.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.name() == name)
    }
}

/// Which topics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Topics {
    /// These.
    These(Vec<String>),
    /// All but these.
    AllBut(Vec<String>),
}

impl Topics {
    /// Whether `topic` is one of them.
    pub fn contains(&self, topic: &str) -> bool {
        let (topics, are_these) = self.named();
        topics.iter().any(|known| known == topic) == are_these
    }

    /// The topics that it names, and whether it means these rather than all others.
    pub fn named(&self) -> (&[String], bool) {
        match self {
            Self::These(topics) => (topics, true),
            Self::AllBut(topics) => (topics, false),
        }
    }
}

/// How a try ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The receiver has taken it.
    Taken,
    /// The receiver wants no more of it: HTTP 410, as Standard Webhooks has it.
    Gone,
    /// Anything else.
    Failed {
        /// How long the receiver asks to be left alone, in seconds.
        retry_after: Option<u64>,
    },
}

/// What a try means for the effect.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Next {
    /// It is delivered.
    Delivered,
    /// It is tried again after this time.
    Again(TimeDelta),
    /// It is dead.
    Dead,
}

/// How often a delivery is tried, and how long it waits between tries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Patience {
    /// How long to wait after each failed try, in seconds; it is dead after one more.
    pub waits: Vec<u32>,
}

impl Patience {
    /// What an answer means after `failures` tries that failed. `random` is from 0 to 1. A wait is never
    /// shorter than the receiver asks, up to a day.
    pub fn next(&self, failures: u32, answer: Answer, random: f64) -> Next {
        #[cfg(feature = "planted-faults")]
        if planted::is(planted::Fault::FailureTaken) {
            return Next::Delivered;
        }
        let retry_after = match answer {
            Answer::Taken => return Next::Delivered,
            Answer::Gone => return Next::Dead,
            Answer::Failed { retry_after } => retry_after,
        };
        let Some(&wait) = self.waits.get(failures as usize) else {
            return Next::Dead;
        };
        let spread = 1.0 + JITTER * (random - 0.5);
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a wait is far below 2^53 milliseconds"
        )]
        let wait = TimeDelta::milliseconds((f64::from(wait) * 1000.0 * spread) as i64);
        let asked = retry_after.map_or(0, |asked| asked.min(RETRY_AFTER_LIMIT.into()));
        let asked = seconds(u32::try_from(asked).unwrap_or(RETRY_AFTER_LIMIT));
        Next::Again(wait.max(asked))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAILED: Answer = Answer::Failed { retry_after: None };

    fn patience(waits: &[u32]) -> Patience {
        Patience {
            waits: waits.to_vec(),
        }
    }

    #[test]
    fn there_is_one_try_more_than_there_are_waits() {
        let patience = patience(&[5, 30]);
        assert_eq!(patience.next(0, FAILED, 0.5), Next::Again(seconds(5)));
        assert_eq!(patience.next(1, FAILED, 0.5), Next::Again(seconds(30)));
        assert_eq!(patience.next(2, FAILED, 0.5), Next::Dead);
        assert_eq!(patience.next(7, FAILED, 0.5), Next::Dead);
    }

    #[test]
    fn what_is_taken_or_gone_is_settled_whatever_was_before() {
        for failures in [0, 1, 2, 7] {
            let next = |answer| patience(&[5]).next(failures, answer, 0.1);
            assert_eq!(next(Answer::Taken), Next::Delivered);
            assert_eq!(next(Answer::Gone), Next::Dead);
        }
    }

    #[test]
    fn waits_are_spread_by_a_tenth_to_either_side() {
        let next = |random| patience(&[100]).next(0, FAILED, random);
        assert_eq!(next(0.0), Next::Again(seconds(90)));
        assert_eq!(next(1.0), Next::Again(seconds(110)));
    }

    #[test]
    fn a_receiver_is_left_alone_for_as_long_as_it_asks_up_to_a_day() {
        let next = |asked| {
            let answer = Answer::Failed {
                retry_after: Some(asked),
            };
            patience(&[100]).next(0, answer, 0.0)
        };
        assert_eq!(next(0), Next::Again(seconds(90)));
        assert_eq!(next(91), Next::Again(seconds(91)));
        assert_eq!(next(3600), Next::Again(seconds(3600)));
        assert_eq!(next(u64::MAX), Next::Again(seconds(86_400)));
    }

    #[test]
    fn nothing_is_due_before_it_is_stored() {
        let now = Time::UNIX_EPOCH + seconds(1000);
        assert_eq!(Due::Now.at(now), now);
        assert_eq!(Due::In(5).at(now), now + seconds(5));
        assert_eq!(Due::At(now + seconds(7)).at(now), now + seconds(7));
        assert_eq!(Due::At(now - seconds(7)).at(now), now);
    }
}
