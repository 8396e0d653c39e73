//! Whatever breaks, at random: processes, Postgres, the network, locks, connections, clocks.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::{Connection, PgConnection, SqliteConnection};

use super::effects::{Mood, Recipient};
use super::helpers::database::Database;
use super::helpers::postgres::Postgres;
use super::helpers::random::Random;
use super::proxy::{Proxy, Weather};
use super::stage::Replica;

/// How often each fault was injected.
pub(crate) type Injected = BTreeMap<String, usize>;

/// Waits, but not for longer than the run takes.
struct Pauses<'a> {
    random: Random,
    is_over: &'a AtomicBool,
}

impl Pauses<'_> {
    fn pause(&mut self, least: usize, most: usize) {
        let millis = least + self.random.below(most - least + 1);
        let end = Instant::now() + Duration::from_millis(millis as u64);
        while Instant::now() < end && !self.is_over.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Breaks the network between the parts until it is over, and leaves it whole.
pub(crate) fn break_network(proxies: &[Proxy], seed: u64, is_over: &AtomicBool) -> Injected {
    let mut injected = Injected::new();
    let mut pauses = Pauses {
        random: Random::of(seed ^ 0x6e65_7477),
        is_over,
    };
    while !is_over.load(Ordering::SeqCst) {
        let proxy = pauses.random.one_of(proxies);
        let name = match pauses.random.below(5) {
            0 => {
                proxy.cut();
                "connections cut"
            }
            1 => {
                let delay = 20 + pauses.random.below(400) as u64;
                proxy.set(Weather::Slow(Duration::from_millis(delay)));
                pauses.pause(200, 1000);
                "connections delayed"
            }
            2 => {
                proxy.set(Weather::Silent);
                pauses.pause(100, 2500);
                "connections stalled"
            }
            3 => {
                proxy.set(Weather::Silent);
                pauses.pause(100, 1000);
                proxy.cut();
                "connections stalled and cut"
            }
            _ => {
                proxy.set(Weather::Lossy);
                pauses.pause(50, 400);
                "replies lost"
            }
        };
        proxy.set(Weather::Fair);
        let name = format!("{name} between {}", proxy.between);
        *injected.entry(name).or_default() += 1;
        pauses.pause(100, 800);
    }
    injected
}

/// Lets the receiver of effects have its moods until it is over, and leaves it well.
pub(crate) fn spoil(recipient: &Recipient, seed: u64, is_over: &AtomicBool) -> Injected {
    let mut injected = Injected::new();
    let mut pauses = Pauses {
        random: Random::of(seed ^ 0x6d6f_6f64),
        is_over,
    };
    while !is_over.load(Ordering::SeqCst) {
        recipient.set(Mood::Normal);
        pauses.pause(300, 1500);
        let (mood, name) = match pauses.random.below(4) {
            0 => (Mood::Failing, "answers 500"),
            1 => (Mood::Hanging, "hangs"),
            2 => (Mood::Dropping, "ends connections"),
            _ => (Mood::Slow, "is slow"),
        };
        recipient.set(mood);
        *injected.entry(format!("the receiver {name}")).or_default() += 1;
        pauses.pause(300, 2500);
    }
    recipient.set(Mood::Well);
    injected
}

/// What can be broken beside the network.
#[derive(Debug, Clone, Copy)]
enum Fault {
    /// A replica is killed (-9), and started again.
    Kill,
    /// Postgres is shut down at once, without so much as a checkpoint, and started again.
    Restart,
    /// Somebody takes all connections that Postgres has left.
    Fill,
    /// Somebody locks some rows, so that calls pile up behind them.
    LockRows,
    /// Somebody locks a whole table; on SQLite, the file.
    LockTable,
    /// The clock of a replica jumps.
    Clock,
}

const ON_POSTGRES: [Fault; 7] = [
    Fault::Kill,
    Fault::Kill,
    Fault::Restart,
    Fault::Fill,
    Fault::LockRows,
    Fault::LockTable,
    Fault::Clock,
];
const ON_SQLITE: [Fault; 4] = [Fault::Kill, Fault::Kill, Fault::Kill, Fault::LockTable];

/// Breaks everything but the network until it is over, and leaves it whole. Replicas end with the
/// thread that starts them, so this is for the thread of the test.
pub(crate) fn break_parts(
    replicas: &mut [Replica],
    database: &Database,
    postgres: Option<&Postgres>,
    seed: u64,
    is_over: &AtomicBool,
) -> Injected {
    let mut injected = Injected::new();
    let mut pauses = Pauses {
        random: Random::of(seed ^ 0x7061_7274),
        is_over,
    };
    let faults = if postgres.is_some() {
        &ON_POSTGRES[..]
    } else {
        &ON_SQLITE
    };
    loop {
        pauses.pause(300, 1200);
        if is_over.load(Ordering::SeqCst) {
            return injected;
        }
        let fault = *pauses.random.one_of(faults);
        let (name, is_injected) = match (fault, postgres) {
            (Fault::Restart, Some(postgres)) => {
                postgres.end("QUIT");
                pauses.pause(0, 1000);
                postgres.start_again();
                ("Postgres restarted (immediate)", true)
            }
            (Fault::Fill, Some(_)) => {
                let taken: Vec<PgConnection> =
                    std::iter::from_fn(|| PgConnection::establish(&database.url).ok()).collect();
                pauses.pause(300, 2500);
                ("connections of Postgres used up", !taken.is_empty())
            }
            (Fault::LockRows, Some(_)) => {
                let rows = "SELECT idempotency_key FROM processed_orders \
                    ORDER BY processed_at DESC LIMIT 20 FOR UPDATE";
                let server = PgConnection::establish(&database.url);
                ("rows locked", hold(&mut pauses, server, "BEGIN", rows))
            }
            (Fault::LockTable, Some(_)) => {
                let tables = [
                    "processed_orders",
                    "run_ledger",
                    "run_history",
                    "run_outbox",
                ];
                let table = *pauses.random.one_of(&tables);
                let lock = format!("LOCK TABLE {table} IN EXCLUSIVE MODE");
                let server = PgConnection::establish(&database.url);
                ("a table locked", hold(&mut pauses, server, "BEGIN", &lock))
            }
            (Fault::LockTable, None) => {
                let patience = "PRAGMA busy_timeout = 1000";
                let file = SqliteConnection::establish(&database.path());
                let is_held = hold(&mut pauses, file, patience, "BEGIN IMMEDIATE");
                ("the file locked", is_held)
            }
            (Fault::Clock, Some(_)) => {
                let hours = i32::try_from(pauses.random.below(200)).unwrap() - 100;
                for replica in &*replicas {
                    replica.shift_clock(hours);
                }
                ("a replica's clock shifted", true)
            }
            _ => {
                let which = pauses.random.below(replicas.len());
                replicas[which].kill();
                pauses.pause(0, 500);
                replicas[which].start();
                ("a replica killed (-9)", true)
            }
        };
        if is_injected {
            *injected.entry(name.to_owned()).or_default() += 1;
        }
    }
}

/// Takes a lock, and holds it for a while; whether it could be had.
fn hold<C: SimpleConnection>(
    pauses: &mut Pauses<'_>,
    connection: Result<C, diesel::ConnectionError>,
    begin: &str,
    lock: &str,
) -> bool {
    let Ok(mut connection) = connection else {
        return false;
    };
    let locked = connection
        .batch_execute(begin)
        .and_then(|()| connection.batch_execute(lock));
    if locked.is_ok() {
        pauses.pause(100, 2500);
    }
    locked.is_ok()
}
