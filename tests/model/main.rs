//! The protocol as a model, checked exhaustively; [docs/proof.md](../../docs/proof.md) says what of it is in the
//! model, and what is not.

mod abridged;
mod entry;
mod promises;
mod rules;
mod symmetry;
mod world;

use std::collections::BTreeSet;
use std::time::Instant;

use stateright::{Checker, Model};

use promises::{DUPLICATE_IS_HARMLESS, HEARS_THE_SAME, ONE_EFFECT, ONE_HOLDER};
use rules::{Mutation, Rules, Wish};
use world::{Action, Config, Reports};

const HOLD: Wish = Wish {
    is_named: true,
    pending: true,
    take_over: false,
    has_window: false,
    opens: false,
};

const TAKE_OVER: Wish = Wish {
    take_over: true,
    ..HOLD
};

const WINDOW: Wish = Wish {
    has_window: true,
    ..HOLD
};

const WINDOW_AND_TAKE_OVER: Wish = Wish {
    has_window: true,
    ..TAKE_OVER
};

/// Claimed at the gate alone, and opened later, or never.
const OPENS: Wish = Wish {
    pending: false,
    opens: true,
    ..HOLD
};

const NAMELESS: Wish = Wish {
    is_named: false,
    ..WINDOW_AND_TAKE_OVER
};

const PLAIN: Config = Config {
    keys: 1,
    callers: 3,
    attempts: 2,
    wishes: &[HOLD],
    reports: Reports::ByAttempt,
    failures: &[true],
    renews: false,
    operations: 0,
    forgets_effects: false,
    is_symmetric: true,
    has_witnesses: false,
    rules: Rules { mutation: None },
};

/// Explores all of it, prints how much that is, and gives the names of what was seen.
#[track_caller]
fn check(name: &str, config: Config) -> BTreeSet<&'static str> {
    let start = Instant::now();
    let checker = config.clone().checker().spawn_bfs().join();
    println!(
        "{name}: {} states, depth {}, {:.1} s",
        checker.unique_state_count(),
        checker.max_depth(),
        start.elapsed().as_secs_f64()
    );
    let seen: BTreeSet<&str> = checker.discoveries().into_keys().collect();
    for promise in promises::promises() {
        if seen.contains(promise.name) {
            let path = shortest_path(&config, promise.name).expect("it was found");
            panic!("not so: {}\n{}", promise.name, lines(&path));
        }
    }
    seen
}

/// The shortest way to break a promise, where there is one. A checker keeps the last way it has come
/// upon, so the shortest is the one that it finds when it may go no deeper than it must.
fn shortest_path(config: &Config, promise: &'static str) -> Option<Vec<Action>> {
    for depth in 1.. {
        let checker = config.clone().checker().target_max_depth(depth);
        let checker = checker.spawn_bfs().join();
        if let Some(path) = checker.discovery(promise) {
            return Some(path.into_actions());
        }
        if checker.max_depth() < depth {
            break;
        }
    }
    None
}

fn lines(path: &[Action]) -> String {
    path.iter()
        .map(|action| format!("  {action:?}\n"))
        .collect()
}

#[test]
fn two_keys_hold() {
    check("two keys, hold", Config { keys: 2, ..PLAIN });
}

#[test]
fn two_keys_take_over() {
    let config = Config {
        keys: 2,
        wishes: &[TAKE_OVER],
        failures: &[],
        ..PLAIN
    };
    check("two keys, take_over", config);
}

#[test]
fn two_keys_window() {
    let config = Config {
        keys: 2,
        wishes: &[WINDOW],
        failures: &[],
        ..PLAIN
    };
    check("two keys, window", config);
}

#[test]
fn hold() {
    let config = Config {
        callers: 4,
        attempts: 3,
        wishes: &[HOLD, OPENS],
        reports: Reports::IdFollows,
        failures: &[true, false],
        renews: true,
        ..PLAIN
    };
    check("hold", config);
}

#[test]
fn take_over_and_window() {
    let config = Config {
        callers: 4,
        attempts: 3,
        wishes: &[WINDOW_AND_TAKE_OVER],
        failures: &[true, false],
        ..PLAIN
    };
    check("take_over, window", config);
}

#[test]
fn everybody_as_they_like() {
    let config = Config {
        attempts: 3,
        wishes: &[HOLD, WINDOW_AND_TAKE_OVER],
        failures: &[true, false],
        renews: true,
        ..PLAIN
    };
    check("hold beside take_over, window", config);
}

#[test]
fn reports_by_claimant() {
    let config = Config {
        callers: 4,
        attempts: 3,
        wishes: &[WINDOW_AND_TAKE_OVER],
        reports: Reports::ByClaimant,
        ..PLAIN
    };
    check("reports by claimant", config);
}

#[test]
fn nameless_callers() {
    let config = Config {
        attempts: 3,
        wishes: &[HOLD, NAMELESS],
        ..PLAIN
    };
    check("claims without a claimant", config);
}

#[test]
fn operator() {
    let config = Config {
        wishes: &[WINDOW_AND_TAKE_OVER],
        operations: 2,
        ..PLAIN
    };
    check("operator, take_over, window", config);
}

#[test]
fn operator_and_missing_ids() {
    let config = Config {
        callers: 2,
        wishes: &[TAKE_OVER],
        reports: Reports::IdFollows,
        operations: 2,
        ..PLAIN
    };
    check("operator, take_over, ids that follow", config);
}

/// The promises are not kept because nothing happens.
#[test]
fn everything_happens() {
    let callers = Config {
        callers: 2,
        wishes: &[Wish {
            pending: false,
            opens: true,
            ..WINDOW_AND_TAKE_OVER
        }],
        reports: Reports::IdFollows,
        renews: true,
        has_witnesses: true,
        ..PLAIN
    };
    let operator = Config {
        callers: 2,
        wishes: &[TAKE_OVER],
        operations: 1,
        has_witnesses: true,
        ..PLAIN
    };
    let mut seen = BTreeSet::new();
    seen.extend(check("callers, with witnesses", callers));
    seen.extend(check("operator, with witnesses", operator));
    for witness in promises::witnesses() {
        assert!(
            seen.contains(witness.name),
            "it never happens that {}",
            witness.name
        );
    }
}

/// Asserts that the model finds a promise broken, and prints the shortest way to it.
#[track_caller]
fn assert_breaks(config: &Config, promise: &'static str) {
    let config = Config {
        // Every caller keeps its name on the way.
        is_symmetric: false,
        ..config.clone()
    };
    let path = shortest_path(&config, promise).expect("it is broken");
    println!("{:?} breaks: {promise}\n{}", config.rules, lines(&path));
}

fn with(mutation: Mutation) -> Rules {
    Rules {
        mutation: Some(mutation),
    }
}

#[test]
fn a_report_settled_without_comparing_the_attempt_is_found() {
    let config = Config {
        rules: with(Mutation::AttemptNotCompared),
        ..PLAIN
    };
    assert_breaks(&config, DUPLICATE_IS_HARMLESS);
    assert_breaks(&config, ONE_EFFECT);
}

#[test]
fn a_repeat_that_is_not_recognised_is_found() {
    let config = Config {
        rules: with(Mutation::RepeatNotRecognised),
        ..PLAIN
    };
    assert_breaks(&config, HEARS_THE_SAME);
}

#[test]
fn a_take_over_without_raising_the_attempt_is_found() {
    let config = Config {
        wishes: &[TAKE_OVER],
        rules: with(Mutation::AttemptNotRaised),
        ..PLAIN
    };
    assert_breaks(&config, ONE_HOLDER);
}

/// What no gate can promise: a claimant that has had its effect and asks again as if it had not is told
/// what it was told before.
#[test]
fn a_claimant_that_forgets_its_effect_has_two() {
    let config = Config {
        forgets_effects: true,
        ..PLAIN
    };
    assert_breaks(&config, ONE_EFFECT);
}
