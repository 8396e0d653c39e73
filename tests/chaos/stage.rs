//! The service as it is run: replicas on one database, with a network between all parts.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use tempfile::TempDir;

use super::effects::{Recipient, TIMEOUT};
use super::helpers::database::{Backend, Database};
use super::helpers::postgres::{Postgres, free_port};
use super::helpers::service::{BINARY, Client, Service};
use super::helpers::wait_until;
use super::proxy::{Proxy, Weather};

/// How many connections Postgres takes: little more than two replicas hold.
const MAX_CONNECTIONS: &str = "max_connections=48";

/// As many as there may be, so that no effect is given up because of what breaks here.
const RETRY_WAITS: &str = "0,0,1,1,1,1,1,1,1,1,2,2,2,2,2,2,2,2,2,2";

/// Which program is run, and with which fault planted.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    path: PathBuf,
    fault: Option<&'static str>,
}

impl Program {
    /// The service as it is.
    pub(crate) fn healthy() -> Self {
        Self {
            path: BINARY.into(),
            fault: None,
        }
    }

    /// The service with a fault planted in its rules. It is built here, so that it is never older than
    /// what it is compared with.
    pub(crate) fn faulty(fault: &'static str) -> Self {
        let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
        let healthy = Path::new(BINARY);
        let target = healthy.ancestors().nth(2).unwrap();
        let built = Command::new(cargo)
            .args([
                "build",
                "--quiet",
                "--locked",
                "--features",
                "planted-faults",
            ])
            .args(["--bin", "dedup-gate-faulty", "--target-dir"])
            .arg(target)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status();
        assert!(built.unwrap().success(), "the faulty service is built");
        Self {
            path: target.join("debug/dedup-gate-faulty"),
            fault: Some(fault),
        }
    }
}

/// A clock that a replica takes for its own.
struct Clock {
    folder: TempDir,
}

impl Clock {
    /// Hours ahead of the machine's.
    fn ahead(hours: i32) -> Self {
        let clock = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        clock.set(hours);
        clock
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("offset")
    }

    fn set(&self, hours: i32) {
        let next = self.folder.path().join("next");
        std::fs::write(&next, format!("{hours:+}h\n")).unwrap();
        // Never to be read half written.
        std::fs::rename(next, self.file()).unwrap();
    }

    /// Where Debian puts libfaketime, or `make install` does.
    fn library() -> PathBuf {
        let folders = ["/usr/lib", "/usr/local/lib"];
        let inner = folders
            .iter()
            .flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten().flatten())
            .map(|entry| entry.path());
        folders
            .iter()
            .map(PathBuf::from)
            .chain(inner)
            .map(|folder| folder.join("faketime/libfaketimeMT.so.1"))
            .find(|library| library.exists())
            .expect("libfaketime is needed: scripts/test installs it")
    }

    /// Only the time of day: what measures how long something takes is not for anybody to set.
    fn apply(&self, command: &mut Command) {
        command
            .env("LD_PRELOAD", Self::library())
            .env("FAKETIME_TIMESTAMP_FILE", self.file())
            .env("FAKETIME_CACHE_DURATION", "1")
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    }
}

/// One process of the service, on a port of its own for as long as the stage stands.
pub(crate) struct Replica {
    program: Program,
    port: u16,
    /// As the replica is told: on Postgres, through the network behind.
    database: Arc<Database>,
    clock: Option<Clock>,
    /// Where effects go: through the network as well.
    outbox: u16,
    service: Option<Service>,
}

impl Replica {
    fn new(program: &Program, database: Arc<Database>, outbox: u16) -> Self {
        Self {
            program: program.clone(),
            port: free_port(),
            database,
            clock: None,
            outbox,
            service: None,
        }
    }

    /// Starts the process, from the thread of the test: it ends with the thread that started it.
    pub(crate) fn start(&mut self) {
        let mut command = Command::new("setpriv");
        command
            .arg("--pdeathsig=KILL")
            .arg(&self.program.path)
            .env_clear()
            .env("DATABASE_URL", &self.database.url)
            .env("LISTEN", format!("127.0.0.1:{}", self.port))
            .env("DATABASE_WAIT", "60")
            .env("OUTBOX_ROUTES", self.routes())
            .env("OUTBOX_TIMEOUT", TIMEOUT.as_secs().to_string())
            .env("OUTBOX_RETRY_WAITS", RETRY_WAITS)
            .env("RUST_LOG", "info,actix_server=warn");
        if let Some(fault) = self.program.fault {
            command.env("PLANTED_FAULT", fault);
        }
        if let Some(clock) = &self.clock {
            clock.apply(&mut command);
        }
        self.service = Some(Service::spawn(Arc::clone(&self.database), command));
    }

    /// One topic has a route of its own.
    fn routes(&self) -> String {
        let receiver = format!("http://127.0.0.1:{}", self.outbox);
        format!("mail={receiver}/mail,*={receiver}/other")
    }

    /// Kills the process (-9).
    pub(crate) fn kill(&mut self) {
        let Some(service) = self.service.take() else {
            return;
        };
        let pid = service.pid();
        drop(service);
        // libfaketime has no time to tidy up.
        let _ = std::fs::remove_file(format!("/dev/shm/faketime_shm_{pid}"));
        let _ = std::fs::remove_file(format!("/dev/shm/sem.faketime_sem_{pid}"));
    }

    /// Moves the replica's clock, where it has one of its own.
    pub(crate) fn shift_clock(&self, hours: i32) {
        if let Some(clock) = &self.clock {
            clock.set(hours);
        }
    }

    /// What the process has logged since it was started.
    fn log(&self) -> String {
        self.service.as_ref().map(Service::log).unwrap_or_default()
    }

    /// How far the replica's clock is ahead of the machine's, by what it writes into its replies.
    fn is_ahead(&self) -> TimeDelta {
        let reply = self.direct().get("/health");
        let date = reply.headers["date"].to_str().unwrap();
        DateTime::parse_from_rfc2822(date).unwrap().to_utc() - Utc::now()
    }

    /// A client beside the network.
    fn direct(&self) -> Client {
        let base = format!("http://127.0.0.1:{}", self.port);
        Client::new(base, Duration::from_secs(10))
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.kill();
    }
}

/// All of it.
pub(crate) struct Stage {
    pub(crate) replicas: Vec<Replica>,
    /// Between callers and replicas, in the order of the replicas; then between these and Postgres; then between
    /// all replicas and the receiver of effects.
    pub(crate) network: Vec<Proxy>,
    pub(crate) recipient: Recipient,
    /// Beside the network.
    pub(crate) database: Arc<Database>,
    pub(crate) postgres: Option<Postgres>,
}

impl Stage {
    /// Two replicas on one Postgres, the second with a clock of its own; or one process on SQLite.
    pub(crate) fn new(backend: Backend, program: &Program) -> Self {
        let recipient = Recipient::start();
        let outbox = Proxy::start("replicas and receiver", recipient.port());
        let mut stage = match backend {
            Backend::Postgres => {
                let postgres = Postgres::start(&[MAX_CONNECTIONS]);
                let between = "replica and Postgres";
                let behind = [(); 2].map(|()| Proxy::start(between, postgres.port()));
                let mut replicas: Vec<Replica> = behind
                    .iter()
                    .map(|proxy| format!("postgres://postgres@127.0.0.1:{}/gate", proxy.port))
                    .map(|url| Replica::new(program, Arc::new(Database::at(url)), outbox.port))
                    .collect();
                replicas[1].clock = Some(Clock::ahead(5));
                Self {
                    replicas,
                    network: behind.into(),
                    recipient,
                    database: Arc::new(Database::at(postgres.create("gate"))),
                    postgres: Some(postgres),
                }
            }
            Backend::Sqlite => {
                let database = Arc::new(Database::new(backend));
                Self {
                    replicas: vec![Replica::new(program, Arc::clone(&database), outbox.port)],
                    network: Vec::new(),
                    recipient,
                    database,
                    postgres: None,
                }
            }
        };
        let fronts = stage
            .replicas
            .iter()
            .map(|replica| Proxy::start("callers and replica", replica.port));
        let fronts: Vec<Proxy> = fronts.collect();
        stage.network.splice(0..0, fronts);
        stage.network.push(outbox);
        stage.replicas.iter_mut().for_each(Replica::start);
        for replica in &stage.replicas {
            let is_shifted = replica.is_ahead() > TimeDelta::hours(1);
            assert_eq!(is_shifted, replica.clock.is_some(), "libfaketime works");
        }
        stage
    }

    /// Where callers reach the replicas.
    pub(crate) fn fronts(&self) -> impl Iterator<Item = u16> {
        self.network
            .iter()
            .take(self.replicas.len())
            .map(|proxy| proxy.port)
    }

    /// Ends whatever is still on its way, so that nothing happens any more; then starts the replicas
    /// again, and gives clients beside the network.
    pub(crate) fn settle(&mut self) -> Vec<Client> {
        self.replicas.iter_mut().for_each(Replica::kill);
        for proxy in &self.network {
            proxy.set(Weather::Fair);
            proxy.cut();
        }
        if self.postgres.is_some() {
            wait_until("nothing of the replicas is left in Postgres", || {
                self.database.try_sql(
                    "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'dedup-gate'",
                ) == Ok("0".to_owned())
            });
        }
        self.replicas.iter_mut().for_each(Replica::start);
        let clients: Vec<Client> = self.replicas.iter().map(Replica::direct).collect();
        for client in &clients {
            wait_until("a replica is ready", || {
                client
                    .try_send("GET", "/health/ready", &[], b"")
                    .is_ok_and(|reply| reply.status == 200)
            });
        }
        clients
    }

    /// What the replicas have logged since they were last started.
    pub(crate) fn log(&self) -> String {
        let logs: Vec<String> = self.replicas.iter().map(Replica::log).collect();
        logs.join("\n")
    }
}
