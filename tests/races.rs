//! One winner a key and attempt, however many ask at once: the reason why the service exists.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use serde_json::json;

use super::helpers::contest::{
    API_KEYS, assert_one_winner_each, contest, contest_of_three_attempts,
};
use super::helpers::pgbouncer::PgBouncer;
use super::helpers::postgres::{Postgres, SHARED};
use super::helpers::service::Client;
use super::helpers::{Backend, Database, Service};

const SETTINGS: [(&str, &str); 1] = [("API_KEYS", API_KEYS)];

/// Two replicas on one Postgres, and one process on a SQLite file.
fn replicas() -> [Vec<Service>; 2] {
    let postgres = Arc::new(Database::new(Backend::Postgres));
    let two = (0..2)
        .map(|_| Service::start_beside(Arc::clone(&postgres), &SETTINGS))
        .collect();
    let sqlite = Database::new(Backend::Sqlite);
    [two, vec![Service::start_on(sqlite, &SETTINGS)]]
}

fn clients(services: &[Service]) -> Vec<Client> {
    services.iter().map(Service::client).collect()
}

#[test]
fn a_new_key_has_one_winner() {
    for services in replicas() {
        let clients = clients(&services);
        let record = contest(&clients, "new", 2000, &json!({}), &AtomicUsize::new(0));
        assert_one_winner_each(&record, 2000, 1);
    }
}

#[test]
fn every_attempt_has_one_winner() {
    for services in replicas() {
        contest_of_three_attempts(&services, 300);
    }
}

#[test]
fn every_attempt_has_one_winner_on_the_newest_postgres() {
    let Some(postgres) = Postgres::start_newest() else {
        return;
    };
    let database = Arc::new(Database::at(postgres.create("gate")));
    let services = [(); 2].map(|()| Service::start_beside(Arc::clone(&database), &SETTINGS));
    contest_of_three_attempts(&services, 100);
    // It is the one that was meant.
    let version = database.sql("SHOW server_version_num");
    assert!(version.parse::<u32>().unwrap() >= 180_000, "{version}");
}

/// Two replicas that share two sessions.
#[test]
fn every_attempt_has_one_winner_behind_a_pooler() {
    let pooler = PgBouncer::start(&SHARED, "transaction", 2, "");
    SHARED.create("pooler_races");
    let database = Arc::new(Database::at(pooler.url("pooler_races")));
    let services = [(); 2].map(|()| Service::start_beside(Arc::clone(&database), &SETTINGS));
    contest_of_three_attempts(&services, 100);
}

/// Each rival claims a batch that holds the same keys, in an order of its own: no batch is
/// split, none waits for another for good, and each key is won once.
#[test]
fn batches_that_overlap_neither_deadlock_nor_share_a_key() {
    const KEYS: usize = 40;
    for services in replicas() {
        for round in 0..20 {
            let won: Vec<Vec<String>> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..8)
                    .map(|rival| {
                        let services = &services;
                        scope.spawn(move || {
                            let claims: Vec<_> = (0..KEYS)
                                .map(|number| {
                                    let key = (number * 7 + rival * 3) % KEYS;
                                    json!({"idempotency_key": format!("{round}-{key}"),
                                        "claimant": format!("rival-{rival}"), "pending": true})
                                })
                                .collect();
                            let service = &services[rival % services.len()];
                            let verdicts = service
                                .post_as("secret-of-n8n", "/claim", &json!(claims))
                                .ok();
                            let verdicts = verdicts.as_array().unwrap().clone();
                            verdicts
                                .into_iter()
                                .filter(|verdict| verdict["claimed"] == true)
                                .map(|verdict| verdict["idempotency_key"].to_string())
                                .collect()
                        })
                    })
                    .collect();
                threads
                    .into_iter()
                    .map(|thread| thread.join().unwrap())
                    .collect()
            });
            let mut keys: Vec<String> = won.concat();
            keys.sort();
            assert_eq!(keys.len(), KEYS, "each key is won, and once: {won:?}");
            keys.dedup();
            assert_eq!(keys.len(), KEYS, "no key is won twice: {won:?}");
        }
    }
}
