//! Everything at once: callers that do what n8n does, and faults at random. What was answered is
//! checked against the rules afterwards, and what is stored against what was answered.
//!
//! `SEED` repeats a run: what is asked, and which faults come in which order. How they interleave is
//! up to the machine. `CHAOS_SECONDS` says how long it takes; `scripts/chaos` sets both.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../helpers/mod.rs"]
#[expect(dead_code, reason = "what the tests of the service need besides")]
mod helpers;

mod callers;
mod effects;
mod history;
mod linearize;
mod nemesis;
mod proxy;
mod stage;
mod verify;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use callers::Clients;
use helpers::database::Backend;
use history::Record;
use nemesis::Injected;
use stage::{Program, Stage};
use verify::{Findings, verify};

/// One run at a time: each needs the machine to itself.
static TURN: Mutex<()> = Mutex::new(());

/// How long a run takes where nobody says.
const SECONDS: u64 = 8;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Lets callers and faults loose for a while, heals everything, and judges what has come of it.
fn run(stage: &mut Stage, seed: u64, duration: Duration) -> (Findings, Injected) {
    let record = Record::default();
    let clients = Clients::new(stage.fronts());
    let is_over = AtomicBool::new(false);
    let Stage {
        replicas,
        network,
        recipient,
        database,
        postgres,
    } = stage;
    let injected = thread::scope(|scope| {
        let (clients, record, is_over) = (&clients, &record, &is_over);
        let recipient = &*recipient;
        scope.spawn(move || callers::run(clients, record, seed, is_over));
        let network = scope.spawn(move || nemesis::break_network(network, seed, is_over));
        let moods = scope.spawn(move || nemesis::spoil(recipient, seed, is_over));
        scope.spawn(move || {
            thread::sleep(duration);
            is_over.store(true, Ordering::SeqCst);
        });
        let mut injected =
            nemesis::break_parts(replicas, database, postgres.as_ref(), seed, is_over);
        injected.extend(network.join().unwrap());
        injected.extend(moods.join().unwrap());
        injected
    });
    let clients = stage.settle();
    let found = verify(&record, &clients, &stage.database, &stage.recipient);
    (found, injected)
}

fn print(findings: &Findings, injected: &Injected) {
    let calls: usize = findings.calls.values().sum();
    println!("{calls} calls for {} keys", findings.keys);
    for (outcome, count) in &findings.calls {
        println!("  {count:>7} {outcome}");
    }
    let faults: usize = injected.values().sum();
    println!("{faults} faults");
    for (fault, count) in injected {
        println!("  {count:>7} {fault}");
    }
    println!(
        "{} effects; {} hang and are listed; {} steps for one key at most",
        findings.effects, findings.stale, findings.steps
    );
    let delivered = &findings.delivered;
    println!(
        "{} effects were stored for the outbox; {} webhooks were seen, {} of them again, {} were taken again",
        delivered.stored, delivered.seen, delivered.again, delivered.taken_again
    );
}

fn is_healthy(backend: Backend) {
    let _turn = TURN.lock();
    let seed = setting("SEED", 2041);
    let duration = Duration::from_secs(setting("CHAOS_SECONDS", SECONDS));
    println!("{backend:?}, SEED={seed}, {} s", duration.as_secs());
    let mut stage = Stage::new(backend, &Program::healthy());
    let (findings, injected) = run(&mut stage, seed, duration);
    print(&findings, &injected);
    let wrong = &findings.wrong;
    assert!(
        wrong.is_empty(),
        "SEED={seed} on {backend:?} finds {} faults, of which the first are:\n{}\nthe replicas said:\n{}",
        wrong.len(),
        wrong[..wrong.len().min(3)].join("\n"),
        stage.log()
    );
}

#[test]
fn a_history_on_postgres_is_linearizable() {
    is_healthy(Backend::Postgres);
}

#[test]
fn a_history_on_sqlite_is_linearizable() {
    is_healthy(Backend::Sqlite);
}

/// How long a run takes in which a planted fault is to be found, and how many of them it may take.
const ROUND: Duration = Duration::from_secs(3);
const ROUNDS: u64 = 10;

/// Runs the service with a planted fault until that is found, on both stores side by side: most of
/// a round is waiting.
fn is_found(fault: &'static str) {
    let _turn = TURN.lock();
    let program = Program::faulty(fault);
    let first = setting("SEED", 2041);
    let find = |backend: Backend| {
        let mut stage = Stage::new(backend, &program);
        let begun = Instant::now();
        let found = (first..first + ROUNDS).find_map(|seed| {
            let (findings, _) = run(&mut stage, seed, ROUND);
            let first = findings.wrong.into_iter().next();
            first.map(|found| (seed, found))
        });
        let (seed, found) = found.unwrap_or_else(|| panic!("{fault} is not found on {backend:?}"));
        let seconds = begun.elapsed().as_secs_f32();
        println!("{fault} on {backend:?}: found after {seconds:.1} s, SEED={seed}\n{found}");
    };
    thread::scope(|scope| {
        for backend in Backend::ALL {
            scope.spawn(move || find(backend));
        }
    });
}

#[test]
fn a_report_that_settles_whatever_its_attempt_is_found() {
    is_found("attempt-not-compared");
}

#[test]
fn a_repeat_that_is_not_recognised_is_found() {
    is_found("repeat-not-recognised");
}

#[test]
fn effects_that_are_stored_again_by_a_repeat_are_found() {
    is_found("effects-stored-again");
}

#[test]
fn a_failed_delivery_that_counts_as_taken_is_found() {
    is_found("failure-taken");
}

#[test]
fn a_take_over_that_does_not_raise_the_attempt_is_found() {
    is_found("attempt-not-raised");
}
