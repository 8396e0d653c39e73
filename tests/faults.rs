//! What happens when something breaks: an honest answer, and recovery without help.

use std::collections::HashSet;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::json;

use super::helpers::contest::{API_KEYS, assert_one_winner_each, contest};
use super::helpers::postgres::Postgres;
use super::helpers::service::{BINARY, Client, command};
use super::helpers::{Backend, Database, Service, wait_until};

/// The contract: no answer takes longer than this, be it that there is none.
const PROMISE: Duration = Duration::from_secs(3);

fn assert_unavailable(service: &Client, key: &str) {
    let service = service.with_timeout(PROMISE);
    let claim = json!({"idempotency_key": key, "claimant": "a"});
    let reply = service.post("/claim", &claim);
    assert_eq!(reply.problem(503), "store_unavailable");
    assert_eq!(reply.headers["retry-after"], "1");
    assert_eq!(
        service.get("/health/ready").problem(503),
        "store_unavailable"
    );
    assert_eq!(service.get("/health").status, 200);
}

fn assert_recovers(service: &Client, key: &str) {
    wait_until("the service is ready", || {
        service.get("/health/ready").status == 200
    });
    let claim = json!({"idempotency_key": key, "claimant": "a"});
    assert_eq!(service.claim(claim)["claimed"], true);
}

#[test]
fn postgres_is_shut_down_and_started_again() {
    let postgres = Postgres::start(&[]);
    let service = Service::start_on(Database::at(postgres.create("gate")), &[]);
    assert_recovers(&service, "before");
    postgres.end("INT");
    assert_unavailable(&service, "meanwhile");
    postgres.start_again();
    assert_recovers(&service, "meanwhile");
    let duplicate = service.claim(json!({"idempotency_key": "before", "claimant": "b"}));
    assert_eq!(duplicate["claimed"], false);
}

/// A halted server takes connections and never answers: only a deadline of one's own helps.
#[test]
fn postgres_is_halted() {
    let postgres = Postgres::start(&[]);
    let service = Service::start_on(Database::at(postgres.create("gate")), &[]);
    assert_recovers(&service, "before");
    postgres.signal_all("STOP");
    assert_unavailable(&service, "meanwhile");
    postgres.signal_all("CONT");
    assert_recovers(&service, "meanwhile");
}

/// A transaction of somebody else's that is left open on one key does not stop the others.
/// One session of the server hangs, which the network does not show: whoever goes by readiness is told.
#[test]
fn a_session_that_hangs_is_shown() {
    let service = Service::start(Backend::Postgres);
    service.claim(json!({"idempotency_key": "before", "claimant": "a"}));
    let lane = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() \
        AND query LIKE 'INSERT INTO processed_orders%'";
    let session = service.database.sql(lane);
    let signal = |name: &str| {
        let status = Command::new("kill").args([name, &session]).status();
        assert!(status.unwrap().success());
    };
    signal("-STOP");
    let client = service.with_timeout(PROMISE);
    let claim = json!({"idempotency_key": "k", "claimant": "a"});
    assert_eq!(
        client.post("/claim", &claim).problem(503),
        "store_unavailable"
    );
    wait_until("it is not ready", || {
        client.get("/health/ready").status == 503
    });
    // Other calls are answered.
    assert_eq!(client.get("/ledger/before").status, 200);
    signal("-CONT");
    assert_recovers(&service, "k");
}

#[test]
fn a_key_that_somebody_holds_locked_is_answered_in_time() {
    let service = Service::start(Backend::Postgres);
    let lock = "BEGIN; INSERT INTO processed_orders (idempotency_key, order_id) VALUES ('held', 'x'); \
        SELECT pg_sleep(30)";
    let mut holder = Command::new("psql")
        .args(["-Xq", &service.database.url, "-c", lock])
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    wait_until("the key is locked", || {
        service.database.sql(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%pg_sleep%' AND state = 'active' AND pid <> pg_backend_pid()",
        ) == "1"
    });
    let hurried = service.with_timeout(PROMISE);
    let reply = hurried.post(
        "/claim",
        &json!({"idempotency_key": "held", "claimant": "a"}),
    );
    assert_eq!(reply.problem(503), "store_unavailable");
    let free = hurried.claim(json!({"idempotency_key": "free", "claimant": "a"}));
    assert_eq!(free["claimed"], true);
    holder.kill().unwrap();
    holder.wait().unwrap();
    wait_until("the lock is gone", || {
        let claim = json!({"idempotency_key": "held", "claimant": "a"});
        let reply = service.post("/claim", &claim);
        reply.status == 200 && reply.body["claimed"] == true
    });
}

/// Runs the contest, and lets a fault happen `times` times on the way: all the same, each key
/// is won once, and nothing but the keys is there.
fn contest_with_faults(
    clients: &[Client],
    database: &Database,
    keys: usize,
    times: usize,
    mut fault: impl FnMut(),
) {
    let progress = AtomicUsize::new(0);
    let record = std::thread::scope(|scope| {
        let contest = scope.spawn(|| contest(clients, "key", keys, &json!({}), &progress));
        for time in 1..=times {
            wait_until("a part is through", || {
                progress.load(Ordering::SeqCst) > keys * 8 * time / (times + 1)
            });
            fault();
        }
        contest.join().unwrap()
    });
    assert_one_winner_each(&record, keys, 1);
    assert_eq!(
        database.sql("SELECT count(*) FROM processed_orders WHERE idempotency_key LIKE 'key-%'"),
        keys.to_string()
    );
}

/// Two replicas; Postgres is ended in the middle, twice.
fn contest_while_postgres_dies(signal: &str) {
    let postgres = Postgres::start(&[]);
    let database = Arc::new(Database::at(postgres.create("gate")));
    let services: Vec<Service> = (0..2)
        .map(|_| Service::start_beside(Arc::clone(&database), &[("API_KEYS", API_KEYS)]))
        .collect();
    let clients: Vec<Client> = services.iter().map(Service::client).collect();
    contest_with_faults(&clients, &database, 1000, 2, || {
        postgres.end(signal);
        postgres.start_again();
    });
}

#[test]
fn postgres_is_shut_down_at_once_under_load() {
    contest_while_postgres_dies("QUIT");
}

#[test]
fn postgres_is_killed_under_load() {
    contest_while_postgres_dies("KILL");
}

/// The service itself is killed under load, again and again, on a SQLite file.
#[test]
fn the_service_is_killed_under_load_on_sqlite() {
    let port = super::helpers::postgres::free_port();
    let listen = format!("127.0.0.1:{port}");
    let settings = [("API_KEYS", API_KEYS), ("LISTEN", listen.as_str())];
    let database = Arc::new(Database::new(Backend::Sqlite));
    let mut running = Service::start_beside(Arc::clone(&database), &settings);
    // The contest's client is of the service's address, whichever process serves it.
    let clients = [running.client()];
    contest_with_faults(&clients, &database, 600, 3, || {
        running.signal("KILL");
        running.wait();
        running = Service::start_beside(Arc::clone(&database), &settings);
    });
}

/// Claims beside a contest, on 64 connections: each has a key of its own. They end with it.
struct Crowd {
    is_over: Arc<AtomicBool>,
    members: Vec<std::thread::JoinHandle<Vec<String>>>,
}

impl Crowd {
    fn gather(clients: &[Client]) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let members = (0..64)
            .map(|member| {
                let client = clients[member % clients.len()].clone();
                let is_over = Arc::clone(&is_over);
                std::thread::spawn(move || {
                    let mut told = Vec::new();
                    for number in 0.. {
                        if is_over.load(Ordering::SeqCst) {
                            break;
                        }
                        let key = format!("crowd-{member}-{number}");
                        let claim = json!({"idempotency_key": key, "claimant": "a"});
                        let headers = [
                            ("Content-Type", "application/json"),
                            ("X-API-Key", "secret-of-n8n"),
                        ];
                        let body = claim.to_string();
                        let sent = client.try_send("POST", "/claim", &headers, body.as_bytes());
                        // Whatever is not answered is not counted on.
                        if sent
                            .is_ok_and(|reply| reply.status == 200 && reply.body["claimed"] == true)
                        {
                            told.push(key);
                        }
                    }
                    told
                })
            })
            .collect();
        Self { is_over, members }
    }

    /// The keys of which somebody was told that they are claimed.
    fn dismiss(mut self) -> Vec<String> {
        self.is_over.store(true, Ordering::SeqCst);
        let told = self.members.drain(..).map(|member| member.join().unwrap());
        told.flatten().collect()
    }
}

/// They end where the contest fails, too.
impl Drop for Crowd {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
    }
}

/// A replica on Postgres is killed, again and again, while its lanes are full: each key has one
/// winner, and what anybody was told is there.
#[test]
fn a_replica_is_killed_under_load_on_postgres() {
    let port = super::helpers::postgres::free_port();
    let listen = format!("127.0.0.1:{port}");
    let settings = [("API_KEYS", API_KEYS), ("LISTEN", listen.as_str())];
    let database = Arc::new(Database::new(Backend::Postgres));
    let stays = Service::start_beside(Arc::clone(&database), &[("API_KEYS", API_KEYS)]);
    let mut dies = Service::start_beside(Arc::clone(&database), &settings);
    let clients = [stays.client(), dies.client()];
    let crowd = Crowd::gather(&clients);
    contest_with_faults(&clients, &database, 400, 3, || {
        dies.signal("KILL");
        dies.wait();
        dies = Service::start_beside(Arc::clone(&database), &settings);
    });
    let told = crowd.dismiss();
    assert!(told.len() > 1000, "{}", told.len());
    let there = database.sql("SELECT idempotency_key FROM processed_orders");
    let there: HashSet<&str> = there.lines().collect();
    let lost: Vec<&String> = told
        .iter()
        .filter(|key| !there.contains(key.as_str()))
        .collect();
    assert!(lost.is_empty(), "{lost:?}");
}

/// The file cannot grow any more: what is not stored is not claimed, what was claimed stays.
#[test]
fn the_disk_is_full() {
    let database = Arc::new(Database::new(Backend::Sqlite));
    // A limit on the size of files acts as a full disk does, and needs no file system of its own.
    let mut limited = Command::new("sh");
    let plain = command(&database, &[], &[]);
    limited
        .arg("-c")
        .arg("trap '' XFSZ; ulimit -f 1024; exec \"$0\"")
        .arg(BINARY)
        .env_clear()
        .envs(
            plain
                .get_envs()
                .filter_map(|(name, value)| Some((name, value?))),
        );
    let service = Service::spawn(Arc::clone(&database), limited);

    let claim = |service: &Client, key: &str, claimant: &str| {
        service.post(
            "/claim",
            &json!({"idempotency_key": key, "claimant": claimant, "pending": true}),
        )
    };
    let mut stored = Vec::new();
    let refused = (0..10_000)
        .map(|number| format!("key-{number}"))
        .find(|key| {
            let reply = claim(&service, key, "first");
            if reply.status == 200 {
                assert_eq!(reply.body["claimed"], true);
                stored.push(key.clone());
                return false;
            }
            assert_eq!(reply.problem(503), "store_unavailable");
            assert_eq!(reply.headers["retry-after"], "1");
            true
        })
        .expect("the disk fills up");
    assert!(stored.len() > 10, "{}", stored.len());
    assert_eq!(service.get("/health").status, 200);
    drop(service);

    // With room again, the file tells the same story.
    let service = Service::start_beside(Arc::clone(&database), &[]);
    for key in &stored {
        assert_eq!(
            claim(&service, key, "second").ok()["claimed"],
            false,
            "{key}"
        );
    }
    assert_eq!(claim(&service, &refused, "first").ok()["claimed"], true);
    assert_eq!(claim(&service, &refused, "second").ok()["claimed"], false);
    assert_eq!(database.sql("PRAGMA integrity_check"), "ok");
}

/// A claim whose caller has gone is settled all the same, and known to whoever asks again.
#[test]
fn a_caller_goes_away() {
    use std::io::Write;
    for backend in Backend::ALL {
        let service = Service::start(backend);
        let body = json!({"idempotency_key": "left", "claimant": "a"}).to_string();
        let address = service.base.trim_start_matches("http://");
        let mut connection = std::net::TcpStream::connect(address).unwrap();
        write!(
            connection,
            "POST /claim HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        drop(connection);
        wait_until("the claim is settled", || {
            service.get("/ledger/left").status == 200
        });
        let again = service.claim(json!({"idempotency_key": "left", "claimant": "a"}));
        assert_eq!(
            (&again["claimed"], &again["replayed"]),
            (&json!(true), &json!(true))
        );
        let other = service.claim(json!({"idempotency_key": "left", "claimant": "b"}));
        assert_eq!(other["claimed"], false);
    }
}

/// A service that cannot write is not ready, whatever it can read.
#[test]
fn a_database_that_became_read_only_is_not_ready() {
    let service = Service::start(Backend::Postgres);
    assert_recovers(&service, "before");
    let opened = json!({"idempotency_key": "opened", "claimant": "a", "pending": true});
    service.claim(opened.clone());
    let name = service.database.sql("SELECT current_database()");
    let turn = |value: &str| {
        service.database.sql(&format!(
            "ALTER DATABASE {name} SET default_transaction_read_only = {value}"
        ));
        service.database.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
             WHERE datname = current_database() AND pid <> pg_backend_pid()",
        );
    };
    turn("on");
    wait_until("the service is not ready", || {
        service.get("/health/ready").status == 503
    });
    assert_unavailable(&service, "meanwhile");
    // Nothing is to be written for it, but a standby may lag behind the truth.
    assert_eq!(
        service.post("/claim", &opened).problem(503),
        "store_unavailable"
    );
    // psql connects read-only too by now.
    super::helpers::postgres::SHARED
        .try_sql(
            "postgres",
            &format!("ALTER DATABASE {name} SET default_transaction_read_only = off"),
        )
        .unwrap();
    super::helpers::postgres::SHARED
        .try_sql(
            "postgres",
            &format!(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
            ),
        )
        .unwrap();
    assert_recovers(&service, "meanwhile");
}

/// SQLite would go on writing into a file that nobody will find again.
#[test]
fn the_file_is_deleted_or_replaced() {
    let service = Service::start(Backend::Sqlite);
    assert_recovers(&service, "before");
    let path = service.database.path();
    let aside = format!("{path}.aside");
    std::fs::rename(&path, &aside).unwrap();
    assert_unavailable(&service, "meanwhile");
    std::fs::copy(&aside, &path).unwrap();
    assert_unavailable(&service, "meanwhile");
    std::fs::rename(&aside, &path).unwrap();
    assert_recovers(&service, "meanwhile");
    let duplicate = service.claim(json!({"idempotency_key": "before", "claimant": "b"}));
    assert_eq!(duplicate["claimed"], false);
}

#[test]
fn the_file_may_have_any_name() {
    let database = Arc::new(Database::new(Backend::Sqlite));
    let url = format!("{} %3F#ñ?mode=memory&.db", database.url);
    let start = || {
        let command = command(&database, &[], &[("DATABASE_URL", &url)]);
        Service::spawn(Arc::clone(&database), command)
    };
    let claim = json!({"idempotency_key": "key"});
    assert_eq!(start().claim(claim.clone())["claimed"], true);
    assert_eq!(start().claim(claim)["claimed"], false);
    let path = url.strip_prefix("sqlite:").unwrap();
    assert!(std::fs::metadata(path).unwrap().len() > 0);
}
