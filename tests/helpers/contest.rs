//! Many callers who want the same keys at the same time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::Reply;
use super::service::{Client, Service};

/// How many callers there are, each with a connection of its own.
const CALLERS: usize = 64;
/// How many of them want the same key at the same time.
const RIVALS: usize = 8;

/// Two API keys, so that two callers whose claimants are equal are two claimants all the same.
pub(crate) const API_KEYS: &str = "n8n:secret-of-n8n,shop:secret-of-shop";
const SECRETS: [&str; 2] = ["secret-of-n8n", "secret-of-shop"];

/// One of the callers who want a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rival(usize);

impl Rival {
    /// Each claimant's text is used by two rivals, with an API key each.
    fn claimant(self) -> String {
        format!("execution-{}", self.0 / SECRETS.len())
    }

    fn secret(self) -> &'static str {
        SECRETS[self.0 % SECRETS.len()]
    }

    /// Posts as this rival, to one of the replicas, and asks again where there is no answer;
    /// none after a minute of that.
    fn post(self, services: &[Client], path: &str, body: &Value) -> Option<Reply> {
        let headers = [
            ("Content-Type", "application/json"),
            ("X-API-Key", self.secret()),
        ];
        let give_up = Instant::now() + Duration::from_secs(60);
        for turn in self.0.. {
            let service = &services[turn % services.len()];
            let sent = service.try_send("POST", path, &headers, body.to_string().as_bytes());
            match sent {
                Ok(reply) if reply.status != 503 => return Some(reply),
                _ if Instant::now() > give_up => return None,
                _ => {}
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        unreachable!("the turns do not end")
    }
}

/// Each key goes through three attempts, with one winner each: opened, taken over once stale, claimed
/// again once failed.
pub(crate) fn contest_of_three_attempts(services: &[Service], keys: usize) {
    let clients: Vec<Client> = services.iter().map(Service::client).collect();
    let database = &services[0].database;
    let progress = AtomicUsize::new(0);
    let opening = json!({"pending": true, "on_stale": "take_over"});
    let opened = contest(&clients, "key", keys, &opening, &progress);
    assert_one_winner_each(&opened, keys, 1);

    database.age_all(3600);
    let taken_over = contest(&clients, "key", keys, &opening, &progress);
    assert_one_winner_each(&taken_over, keys, 2);

    fail_all(&clients, &taken_over);
    database.age_all(3600);
    let again = contest(&clients, "key", keys, &json!({}), &progress);
    assert_one_winner_each(&again, keys, 3);
}

/// What was heard of one claim. Nothing is asserted before all rivals are through: one that
/// panicked would leave the others waiting for it.
#[derive(Debug)]
pub(crate) struct Heard {
    rival: Rival,
    reply: Option<Reply>,
}

impl Heard {
    fn verdict(&self) -> &Value {
        let reply = self.reply.as_ref().expect("an answer within a minute");
        assert_eq!(reply.status, 200, "{}", reply.body);
        &reply.body
    }

    fn is_claimed(&self) -> bool {
        self.verdict()["claimed"].as_bool().unwrap()
    }
}

/// Everything that was heard of each key.
pub(crate) type Record = BTreeMap<String, Vec<Heard>>;

/// Lets eight rivals at a time claim each of the keys `prefix-0`, `prefix-1`, … at once, on all
/// replicas in turn, with `options` in each claim; half of them ask again at once. `progress`
/// counts the keys that are through.
pub(crate) fn contest(
    services: &[Client],
    prefix: &str,
    keys: usize,
    options: &Value,
    progress: &AtomicUsize,
) -> Record {
    let record = Mutex::new(Record::new());
    let next = AtomicUsize::new(0);
    let groups: Vec<(Barrier, AtomicUsize)> = (0..CALLERS / RIVALS)
        .map(|_| (Barrier::new(RIVALS), AtomicUsize::new(0)))
        .collect();
    std::thread::scope(|scope| {
        for caller in 0..CALLERS {
            let (barrier, current) = &groups[caller / RIVALS];
            let rival = Rival(caller % RIVALS);
            let (record, next) = (&record, &next);
            scope.spawn(move || {
                loop {
                    if barrier.wait().is_leader() {
                        current.store(next.fetch_add(1, Ordering::SeqCst), Ordering::SeqCst);
                    }
                    barrier.wait();
                    let number = current.load(Ordering::SeqCst);
                    if number >= keys {
                        return;
                    }
                    let key = format!("{prefix}-{number}");
                    let mut claim = options.clone();
                    claim["idempotency_key"] = json!(key);
                    claim["claimant"] = json!(rival.claimant());
                    let asks = 1 + (number + rival.0) % 2;
                    for _ in 0..asks {
                        let reply = rival.post(services, "/claim", &claim);
                        let heard = Heard { rival, reply };
                        record
                            .lock()
                            .unwrap()
                            .entry(key.clone())
                            .or_default()
                            .push(heard);
                    }
                    progress.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
    });
    record.into_inner().unwrap()
}

/// Checks that each key was won by exactly one rival, in this attempt, and that the winner
/// heard it each time it asked.
pub(crate) fn assert_one_winner_each(record: &Record, keys: usize, attempt: u64) {
    assert_eq!(record.len(), keys);
    for (key, heard) in record {
        let winners: BTreeSet<Rival> = heard
            .iter()
            .filter(|heard| heard.is_claimed())
            .map(|heard| heard.rival)
            .collect();
        assert_eq!(winners.len(), 1, "{key}: {heard:?}");
        for heard in heard {
            assert_eq!(
                heard.is_claimed(),
                winners.contains(&heard.rival),
                "{key}: {heard:?}"
            );
            assert_eq!(heard.verdict()["attempt"], attempt, "{key}: {heard:?}");
        }
    }
}

/// The winner of each key reports that its attempt failed.
pub(crate) fn fail_all(services: &[Client], record: &Record) {
    for (key, heard) in record {
        let winner = heard.iter().find(|heard| heard.is_claimed()).unwrap();
        let report = json!({"idempotency_key": key, "attempt": winner.verdict()["attempt"], "reason": "declined",
            "claimant": winner.rival.claimant()});
        let reply = winner
            .rival
            .post(services, "/ledger/failed", &report)
            .unwrap()
            .ok();
        assert_eq!(reply["status"], "failed");
    }
}
