//! What each test plays on: one n8n with all workflows, the provider, and the service at the port
//! that the workflows call. The tests take turns.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};

use super::guard::Guard;
use super::helpers::lossy::Lossy;
use super::helpers::postgres::{SHARED, free_port};
use super::helpers::{Backend, Database, Reply, Service};
use super::instance::Instance;
use super::provider::Provider;

/// How long a sender waits for an answer: longer than any workflow takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// The service's API keys, each for one n8n.
pub(crate) const API_KEYS: &str = "n8n:secret-of-n8n,shop:secret-of-shop";
/// The API key of the first n8n.
pub(crate) const SECRET: &str = "secret-of-n8n";

/// What n8n checks webhooks' signatures with, as its credential has it.
pub(crate) const WEBHOOK_SECRET: &str = "a secret of n8n, in 33 characters";

/// The folder of the shipped workflows.
pub(crate) const SHIPPED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/n8n-workflows");
/// The folder of workflows that only tests need.
const OURS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/n8n/workflows");

/// The database of the workflow that uses raw SQL.
pub(crate) const RAW_SQL: &str = "raw_sql";

static STAGE: LazyLock<Mutex<Stage>> = LazyLock::new(|| Mutex::new(Stage::new()));

/// What a test plays on.
pub(crate) struct Stage {
    pub(crate) n8n: Instance,
    pub(crate) provider: Provider,
    pub(crate) gate: Gate,
}

/// The service, where the workflows call it.
pub(crate) struct Gate {
    pub(crate) port: u16,
    guard: Option<Guard>,
    /// None while it is down.
    service: Option<Service>,
}

/// Takes the stage, with the service on an empty Postgres database.
pub(crate) fn stage() -> MutexGuard<'static, Stage> {
    stage_on(Backend::Postgres)
}

/// Takes the stage, with the service on an empty database.
pub(crate) fn stage_on(backend: Backend) -> MutexGuard<'static, Stage> {
    let mut stage = STAGE.lock().unwrap_or_else(PoisonError::into_inner);
    if stage.gate.service.is_some() {
        stage.gate.kill();
    }
    stage.gate.open_on(Arc::new(Database::new(backend)));
    if !stage.provider.runs() {
        stage.provider.start();
    }
    if !stage.n8n.runs() {
        stage.n8n.start();
    }
    stage
}

/// Imports the credentials that the workflows name into an n8n.
pub(crate) fn import_credentials(n8n: &Instance, secret: &str) {
    let gate = json!({"id": "dedupGateHdrAuth", "name": "dedup-gate API key", "type": "httpHeaderAuth",
        "data": {"name": "X-API-Key", "value": secret}});
    let raw_sql = json!({"id": "rawSqlDatabase01", "name": "Raw SQL", "type": "postgres",
        "data": {"host": "127.0.0.1", "port": SHARED.port(), "database": RAW_SQL, "user": "postgres",
            "password": "none", "ssl": "disable"}});
    import_each(n8n, &[gate, raw_sql, webhook_secret(WEBHOOK_SECRET)]);
}

/// The credential with which signatures are checked.
pub(crate) fn webhook_secret(secret: &str) -> Value {
    json!({"id": "dedupGateWebhook", "name": "dedup-gate webhook secret", "type": "crypto",
        "data": {"hmacSecret": secret}})
}

/// Imports credentials into an n8n, in place of those that it has under their ids.
pub(crate) fn import_each(n8n: &Instance, credentials: &[Value]) {
    let folder = tempfile::tempdir().unwrap();
    for credential in credentials {
        let file = format!("{}.json", credential["id"].as_str().unwrap());
        std::fs::write(folder.path().join(file), credential.to_string()).unwrap();
    }
    n8n.import("credentials", folder.path());
}

/// Imports the credentials and all workflows into an n8n that does not run, and publishes those
/// that `are_used`.
pub(crate) fn furnish(
    n8n: &mut Instance,
    gate: &Gate,
    provider: &Provider,
    secret: &str,
    are_used: impl Fn(&Value) -> bool,
) {
    import_credentials(n8n, secret);
    let folder = tempfile::tempdir().unwrap();
    let mut workflows: Vec<Value> = Vec::new();
    for file in [SHIPPED, OURS].map(files_in).concat() {
        let text = localised(&file, gate.port, provider.port);
        std::fs::write(folder.path().join(file.file_name().unwrap()), &text).unwrap();
        workflows.push(serde_json::from_str(&text).unwrap());
    }
    n8n.import("workflow", folder.path());
    for workflow in workflows.iter().filter(|workflow| are_used(workflow)) {
        n8n.publish(workflow);
    }
}

/// A workflow's file, with the hosts and ports replaced.
pub(crate) fn localised(file: &Path, gate_port: u16, provider_port: u16) -> String {
    let [gate, provider] = [gate_port, provider_port].map(|port| format!("127.0.0.1:{port}"));
    std::fs::read_to_string(file)
        .unwrap()
        .replace("dedup-gate:8080", &gate)
        .replace("payments.example", &provider)
        .replace("alerts.example", &provider)
        .replace("mail.example", &provider)
        .replace("crm.example", &provider)
}

/// The files in a folder, in the order of their names.
pub(crate) fn files_in(folder: &str) -> Vec<PathBuf> {
    let files = std::fs::read_dir(folder).unwrap();
    let mut files: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
    files.sort();
    files
}

impl Stage {
    fn new() -> Self {
        let provider = Provider::new();
        let gate = Gate {
            port: free_port(),
            guard: None,
            service: None,
        };
        let mut n8n = Instance::new("n8n");
        furnish(&mut n8n, &gate, &provider, SECRET, |_| true);
        Self {
            n8n,
            provider,
            gate,
        }
    }
}

impl Gate {
    /// Starts the service on a database.
    pub(crate) fn open_on(&mut self, database: Arc<Database>) {
        self.open_with(database, &[]);
    }

    /// [`Self::open_on`], with settings besides.
    pub(crate) fn open_with(&mut self, database: Arc<Database>, more: &[(&str, &str)]) {
        let listen = format!("127.0.0.1:{}", self.port);
        let settings = [("LISTEN", listen.as_str()), ("API_KEYS", API_KEYS)];
        self.hold(Service::start_beside(
            database,
            &[&settings[..], more].concat(),
        ));
    }

    fn hold(&mut self, service: Service) {
        self.guard = Some(Guard::of(service.pid()));
        self.service = Some(service);
    }

    /// Moves the service to another port, and puts a proxy where it was.
    pub(crate) fn open_behind_proxy(&mut self) -> Lossy {
        let database = self.kill();
        let service = Service::start_beside(database, &[("API_KEYS", API_KEYS)]);
        let upstream = service.base.rsplit_once(':').unwrap().1.parse().unwrap();
        self.hold(service);
        Lossy::start(self.port, upstream)
    }

    /// Kills the service (-9), and gives the database that it leaves.
    pub(crate) fn kill(&mut self) -> Arc<Database> {
        self.guard = None;
        let service = self.service.take().expect("the gate is open");
        Arc::clone(&service.database)
    }

    /// Forgets all keys.
    pub(crate) fn forget_all(&self) {
        let tables = "TRUNCATE processed_orders, run_ledger, run_history";
        self.service().database.sql(tables);
    }

    fn service(&self) -> &Service {
        self.service.as_ref().expect("the gate is open")
    }

    /// Lets the leases of all that is pending run out.
    pub(crate) fn let_leases_run_out(&self) {
        self.service().database.age_all(1_000);
    }

    /// Posts to the service.
    pub(crate) fn post(&self, path: &str, body: &Value) -> Value {
        self.service().post_as(SECRET, path, body).ok()
    }

    /// Gets from the service.
    pub(crate) fn get(&self, path: &str) -> Value {
        let headers = [("X-API-Key", SECRET)];
        self.service().send("GET", path, &headers, b"").ok()
    }

    pub(crate) fn entries(&self, query: &str) -> Vec<Value> {
        let mut reply = self.get(&format!("/ledger?limit=500&{query}"));
        serde_json::from_value(reply["entries"].take()).unwrap()
    }

    /// The orders whose entries have this status.
    pub(crate) fn listed(&self, status: &str) -> BTreeSet<String> {
        let entries = self.entries(&format!("status={status}"));
        let order_id = |entry: &Value| entry["order_id"].as_str().unwrap().to_owned();
        entries.iter().map(order_id).collect()
    }

    /// The ledger's entry of an order; null where there is none.
    pub(crate) fn entry_of(&self, order_id: &str) -> Value {
        let mut entries = self.entries(&format!("order_id={order_id}"));
        assert!(entries.len() <= 1, "{entries:?}");
        entries.pop().unwrap_or_default()
    }
}

/// An order as a sender sends it.
pub(crate) fn order(order_id: &str) -> Value {
    json!({"order_id": order_id, "order_total": 129.9})
}

/// Fires many orders, `width` at a time, and gives the replies in the order of the orders.
pub(crate) fn fire_all(
    n8n: &Instance,
    webhook: &str,
    orders: &[Value],
    width: usize,
) -> Vec<Option<Reply>> {
    let next = Mutex::new(orders.iter().enumerate());
    let replies = Mutex::new(orders.iter().map(|_| None).collect::<Vec<_>>());
    std::thread::scope(|scope| {
        for _ in 0..width {
            scope.spawn(|| {
                loop {
                    let Some((index, order)) = next.lock().unwrap().next() else {
                        return;
                    };
                    let reply = n8n.try_fire(webhook, order);
                    replies.lock().unwrap()[index] = reply;
                }
            });
        }
    });
    replies.into_inner().unwrap()
}
