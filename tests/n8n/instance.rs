//! A real n8n.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::guard::Guard;
use super::helpers::Reply;
use super::helpers::postgres::{SHARED, free_port, said_by};
use super::helpers::service::Client;
use super::helpers::{wait_until, wait_within};
use super::stage::PATIENCE;

/// The e-mail address and the password of the owner.
pub(crate) const OWNER: (&str, &str) = ("owner@example.com", "Passw0rd-of-tests");

/// Which executions count: the schedule of *Stale review* starts some whenever it is its time.
const FIRED: &str = "mode <> 'trigger'";

/// The statuses of executions that have not ended.
const UNFINISHED: [&str; 4] = ["", "new", "running", "waiting"];

/// An n8n with a database of its own.
pub(crate) struct Instance {
    database: String,
    port: u16,
    folder: TempDir,
    /// The webhooks of the published workflows.
    published: Vec<String>,
    client: Client,
    /// While n8n runs.
    process: Option<(Guard, Child)>,
}

impl Instance {
    /// An n8n that was never started, with an empty database.
    pub(crate) fn new(name: &str) -> Self {
        SHARED.create(name);
        let port = free_port();
        Self {
            database: name.to_owned(),
            port,
            folder: tempfile::tempdir().unwrap(),
            published: Vec::new(),
            client: Client::new(format!("http://127.0.0.1:{port}"), PATIENCE),
            process: None,
        }
    }

    /// A program in the environment of this n8n.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .env_clear()
            .envs(
                ["PATH", "NODE_PATH", "HOME"]
                    .into_iter()
                    .filter_map(|name| Some((name, std::env::var_os(name)?))),
            )
            .env("DB_TYPE", "postgresdb")
            .env("DB_POSTGRESDB_HOST", "127.0.0.1")
            .env("DB_POSTGRESDB_PORT", SHARED.port().to_string())
            .env("DB_POSTGRESDB_DATABASE", &self.database)
            .env("DB_POSTGRESDB_USER", "postgres")
            .env("DB_POSTGRESDB_PASSWORD", "none")
            .env("N8N_USER_FOLDER", self.folder.path())
            .env(
                "N8N_ENCRYPTION_KEY",
                format!("the key of {}", self.database),
            )
            .env("N8N_LISTEN_ADDRESS", "127.0.0.1")
            .env("N8N_PORT", self.port.to_string())
            .env("N8N_RUNNERS_BROKER_PORT", free_port().to_string());
        for feature in [
            "DIAGNOSTICS",
            "VERSION_NOTIFICATIONS",
            "TEMPLATES",
            "PERSONALIZATION",
            "DYNAMIC_BANNERS",
        ] {
            command.env(format!("N8N_{feature}_ENABLED"), "false");
        }
        command
    }

    /// Runs one of n8n's commands, which must succeed, and gives what it writes.
    pub(crate) fn run(&self, arguments: &[&str]) -> String {
        said_by(self.command("n8n").args(arguments)).unwrap()
    }

    /// Imports what is in a folder, one object a file.
    pub(crate) fn import(&self, what: &str, folder: &Path) {
        let input = format!("--input={}", folder.display());
        self.run(&[&format!("import:{what}"), "--separate", &input]);
    }

    /// Publishes a workflow, from the next start on.
    pub(crate) fn publish(&mut self, workflow: &Value) {
        let id = workflow["id"].as_str().unwrap();
        self.run(&["publish:workflow", &format!("--id={id}")]);
        let nodes = workflow["nodes"].as_array().unwrap();
        let webhooks = nodes
            .iter()
            .filter(|node| node["type"] == "n8n-nodes-base.webhook");
        self.published
            .extend(webhooks.map(|node| node["parameters"]["path"].as_str().unwrap().to_owned()));
    }

    /// Starts n8n, and waits until it serves all that is published.
    pub(crate) fn start(&mut self) {
        assert!(!self.runs(), "n8n runs already");
        let log = File::create(self.folder.path().join("log")).unwrap();
        let mut process = self
            .command("n8n")
            .arg("start")
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let guard = Guard::of(process.id());
        wait_within(PATIENCE, "n8n has started", || {
            let log = self.log();
            let ended = process.try_wait().unwrap();
            assert!(ended.is_none(), "n8n has ended: {log}");
            // It listens before its webhooks are there.
            log.contains("Editor is now accessible")
                && self.published.iter().all(|webhook| self.serves(webhook))
        });
        self.process = Some((guard, process));
    }

    /// Whether a webhook is there. Asked by a method that it does not take, it says so.
    fn serves(&self, webhook: &str) -> bool {
        let reply = self.client.get(&format!("/webhook/{webhook}"));
        reply.body["message"].to_string().contains("POST request")
    }

    /// Whether it was started, and not ended.
    pub(crate) fn runs(&self) -> bool {
        self.process.is_some()
    }

    /// Kills n8n (-9).
    pub(crate) fn kill(&mut self) {
        let (guard, mut process) = self.process.take().expect("n8n runs");
        drop(guard);
        process.kill().unwrap();
        process.wait().unwrap();
    }

    /// Posts JSON to a webhook, as the sender of an order does.
    pub(crate) fn fire(&self, webhook: &str, body: &Value) -> Reply {
        self.client.post(&format!("/webhook/{webhook}"), body)
    }

    /// [`Self::fire`], where n8n may end meanwhile.
    pub(crate) fn try_fire(&self, webhook: &str, body: &Value) -> Option<Reply> {
        try_fire(&self.client, webhook, body)
    }

    /// Runs SQL on n8n's own database.
    pub(crate) fn sql(&self, sql: &str) -> String {
        SHARED.try_sql(&self.database, sql).unwrap()
    }

    /// The newest execution of all; 0 before the first.
    pub(crate) fn last_execution(&self) -> u64 {
        self.sql(&format!(
            "SELECT coalesce(max(id), 0) FROM execution_entity WHERE {FIRED}"
        ))
        .parse()
        .unwrap()
    }

    /// Where it serves.
    pub(crate) fn url(&self) -> String {
        self.client.base.clone()
    }

    /// A client of this n8n.
    pub(crate) fn client(&self) -> Client {
        self.client.clone()
    }

    /// The executions that have this status.
    pub(crate) fn executions_with(&self, status: &str) -> Vec<u64> {
        let rows = self.sql(&format!(
            "SELECT id FROM execution_entity WHERE status = '{status}' AND {FIRED} ORDER BY id"
        ));
        rows.lines().map(|id| id.parse().unwrap()).collect()
    }

    /// The status of each execution since one, in their order, once all have ended.
    pub(crate) fn executions_since(&self, id: u64) -> Vec<String> {
        let mut statuses = Vec::new();
        wait_until("all executions have ended", || {
            let rows = self.sql(&format!(
                "SELECT status FROM execution_entity WHERE id > {id} AND {FIRED} ORDER BY id"
            ));
            statuses = rows.lines().map(str::to_owned).collect();
            !statuses
                .iter()
                .any(|status| UNFINISHED.contains(&status.as_str()))
        });
        statuses
    }

    /// How an execution ended.
    pub(crate) fn outcome(&self, execution: u64) -> String {
        let mut status = String::new();
        wait_until("the execution has ended", || {
            status = self.sql(&format!(
                "SELECT status FROM execution_entity WHERE id = {execution}"
            ));
            !UNFINISHED.contains(&status.as_str())
        });
        status
    }

    /// Makes the account of the owner, unless it is there.
    pub(crate) fn set_up_owner(&self) {
        let owner =
            json!({"email": OWNER.0, "password": OWNER.1, "firstName": "An", "lastName": "Owner"});
        let reply = self.client.post("/rest/owner/setup", &owner);
        assert!(matches!(reply.status, 200 | 400), "{}", reply.body);
    }

    /// Posts as the editor does, which its owner has opened.
    fn post_as_owner(&self, path: &str, body: &Value) -> Value {
        self.set_up_owner();
        let owner = json!({"emailOrLdapLoginId": OWNER.0, "password": OWNER.1});
        let session = self.client.post("/rest/login", &owner);
        assert_eq!(session.status, 200, "{}", session.body);
        let cookie = session.headers["set-cookie"].to_str().unwrap();
        let headers = [
            ("Content-Type", "application/json"),
            ("Cookie", cookie.split(';').next().unwrap()),
        ];
        let body = body.to_string();
        self.client
            .send("POST", path, &headers, body.as_bytes())
            .ok()["data"]
            .take()
    }

    /// Retries an execution: the editor's *Retry with original workflow*. What ran well is kept, and
    /// it goes on at the node that failed, under an id of its own.
    pub(crate) fn retry(&self, execution: u64) -> Value {
        let path = format!("/rest/executions/{execution}/retry");
        self.post_as_owner(&path, &json!({"loadWorkflow": false}))
    }

    /// Runs a workflow by hand, from a trigger: the editor's *Execute workflow*. Gives the execution.
    pub(crate) fn execute(&self, workflow: &str, trigger: &str) -> u64 {
        let path = format!("/rest/workflows/{workflow}/run");
        let started = self.post_as_owner(&path, &json!({"triggerToStartFrom": {"name": trigger}}));
        started["executionId"].as_str().unwrap().parse().unwrap()
    }

    /// What n8n has logged.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }
}

/// [`Instance::try_fire`] by a client of its own: for senders who do not hold the instance.
pub(crate) fn try_fire(client: &Client, webhook: &str, body: &Value) -> Option<Reply> {
    let json_type = [("Content-Type", "application/json")];
    let path = format!("/webhook/{webhook}");
    let body = body.to_string();
    client
        .try_send("POST", &path, &json_type, body.as_bytes())
        .ok()
}

impl Drop for Instance {
    fn drop(&mut self) {
        if self.runs() {
            self.kill();
        }
    }
}
