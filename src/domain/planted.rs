//! Faults that are planted in the rules on purpose, for tests to find. Not in the service as it is
//! built and released: only with the feature `planted-faults`.

use std::sync::OnceLock;

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A report settles the key whatever its attempt: one that comes too late is taken for the
    /// current attempt's.
    AttemptNotCompared,
    /// A claimant that asks again is taken for somebody else.
    RepeatNotRecognised,
    /// Whoever takes over a stale key gets the attempt that somebody else has already.
    AttemptNotRaised,
    /// A report that is repeated has its effects once more.
    EffectsStoredAgain,
    /// A delivery that has failed counts as taken.
    FailureTaken,
}

static PLANTED: OnceLock<Fault> = OnceLock::new();

/// Plants the fault of this name, for as long as the process lives.
///
/// # Errors
///
/// There is none of this name, or one is planted already.
pub fn plant(name: &str) -> Result<(), String> {
    let fault = match name {
        "attempt-not-compared" => Fault::AttemptNotCompared,
        "repeat-not-recognised" => Fault::RepeatNotRecognised,
        "attempt-not-raised" => Fault::AttemptNotRaised,
        "effects-stored-again" => Fault::EffectsStoredAgain,
        "failure-taken" => Fault::FailureTaken,
        _ => return Err(format!("no fault is named {name:?}")),
    };
    PLANTED
        .set(fault)
        .map_err(|fault| format!("{fault:?} is planted already"))
}

/// Whether this fault is planted.
pub(super) fn is(fault: Fault) -> bool {
    PLANTED.get() == Some(&fault)
}
