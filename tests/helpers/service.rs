//! The service as a process, and a client for it.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use serde_json::{Value, json};

use super::{Backend, Database, wait_until};

/// The binary under test.
pub(crate) const BINARY: &str = env!("CARGO_BIN_EXE_dedup-gate");

/// A running service. It is killed when the test lets go of it.
pub(crate) struct Service {
    pub(crate) database: Arc<Database>,
    client: Client,
    process: Child,
    log: Arc<Mutex<String>>,
}

/// A client of whatever serves at an address.
#[derive(Clone)]
pub(crate) struct Client {
    pub(crate) base: String,
    agent: ureq::Agent,
}

impl std::ops::Deref for Service {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

/// What the service answered.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: ureq::http::HeaderMap,
    /// The body, where it is JSON; else null.
    pub(crate) body: Value,
    /// The body as it came.
    pub(crate) text: String,
}

impl Reply {
    /// The body of a success.
    pub(crate) fn ok(self) -> Value {
        assert_eq!(self.status, 200, "{}", self.body);
        self.body
    }

    /// The `code` of a problem with this status, which must look as all problems do.
    pub(crate) fn problem(&self, status: u16) -> String {
        assert_eq!(self.status, status, "{}", self.body);
        assert_eq!(self.headers["content-type"], "application/problem+json");
        assert_eq!(self.body["status"], status);
        for member in ["type", "title", "detail", "code"] {
            assert!(self.body[member].is_string(), "{member}: {}", self.body);
        }
        self.body["code"].as_str().unwrap().to_owned()
    }

    /// The pointers of a problem.
    pub(crate) fn pointers(&self) -> Vec<String> {
        let errors = self.body["errors"].as_array().unwrap();
        errors
            .iter()
            .map(|error| error["pointer"].as_str().unwrap().to_owned())
            .collect()
    }
}

/// The binary with these arguments and settings, on this database; nothing is inherited.
pub(crate) fn command(
    database: &Database,
    arguments: &[&str],
    settings: &[(&str, &str)],
) -> Command {
    let mut command = Command::new(BINARY);
    command
        .args(arguments)
        .env_clear()
        .env("DATABASE_URL", &database.url)
        .env("LISTEN", "127.0.0.1:0")
        .env("DATABASE_WAIT", "0");
    for (name, value) in settings {
        command.env(name, value);
    }
    command
}

/// Runs the binary until it ends by itself.
pub(crate) fn run(database: &Database, arguments: &[&str], settings: &[(&str, &str)]) -> Output {
    finish(&mut command(database, arguments, settings))
}

/// Runs a command that has to end by itself.
pub(crate) fn finish(command: &mut Command) -> Output {
    let process = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = process.id().to_string();
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(process.wait_with_output()));
    match receiver.recv_timeout(Duration::from_secs(30)) {
        Ok(output) => output.unwrap(),
        Err(_) => {
            let _ = Command::new("kill").args(["-KILL", &pid]).status();
            panic!("{command:?} does not end");
        }
    }
}

/// The one line that the binary leaves where it refuses to start.
pub(crate) fn refusal(output: &Output) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    text.trim_end().to_owned()
}

impl Service {
    /// Starts the service on an empty database.
    pub(crate) fn start(backend: Backend) -> Self {
        Self::start_on(Database::new(backend), &[])
    }

    /// Starts the service on a database, with settings.
    pub(crate) fn start_on(database: Database, settings: &[(&str, &str)]) -> Self {
        Self::start_beside(Arc::new(database), settings)
    }

    /// Starts one more replica on a database.
    pub(crate) fn start_beside(database: Arc<Database>, settings: &[(&str, &str)]) -> Self {
        let command = command(&database, &[], settings);
        Self::spawn(database, command)
    }

    /// Starts the service by a command of the caller's.
    pub(crate) fn spawn(database: Arc<Database>, mut command: Command) -> Self {
        let mut process = command.stderr(Stdio::piped()).spawn().unwrap();
        let log = Arc::new(Mutex::new(String::new()));
        let lines = BufReader::new(process.stderr.take().unwrap()).lines();
        let writer = Arc::clone(&log);
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let mut log = writer.lock().unwrap();
                log.push_str(&line);
                log.push('\n');
            }
        });
        let mut address = None;
        wait_until("the service listens", || {
            let log = log.lock().unwrap();
            address = log
                .split_once("listening on ")
                .and_then(|(_, rest)| rest.split_once('\n'))
                .map(|(address, _)| address.to_owned());
            let ended = process.try_wait().unwrap();
            assert!(ended.is_none(), "the service ended: {log}");
            address.is_some()
        });
        Self {
            database,
            client: Client::new(
                format!("http://{}", address.unwrap()),
                Duration::from_secs(20),
            ),
            process,
            log,
        }
    }

    /// A client of the service's address, which may outlive the process.
    pub(crate) fn client(&self) -> Client {
        self.client.clone()
    }

    /// What the service has logged.
    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    /// The service's process.
    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Sends the process a signal.
    pub(crate) fn signal(&self, name: &str) {
        let pid = self.pid().to_string();
        let sent = Command::new("kill")
            .args([&format!("-{name}"), &pid])
            .status();
        assert!(sent.unwrap().success());
    }

    /// Waits for the process to end by itself.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        wait_until("the service ends", || {
            status = self.process.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }
}

impl Client {
    /// A client of what serves at `base`, which waits for answers no longer than this.
    pub(crate) fn new(base: String, timeout: Duration) -> Self {
        let agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(timeout))
            .max_idle_connections_per_host(64)
            .proxy(None)
            .build()
            .into();
        Self { base, agent }
    }

    /// A client that waits for answers no longer than this.
    pub(crate) fn with_timeout(&self, timeout: Duration) -> Self {
        Self::new(self.base.clone(), timeout)
    }

    /// Sends a body as it is; fails where the connection does.
    pub(crate) fn try_send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Result<Reply, ureq::Error> {
        let mut request = ureq::http::Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let reply = self.agent.run(request.body(body).unwrap())?;
        let (parts, mut body) = reply.into_parts();
        let text = body.with_config().limit(64 << 20).read_to_string()?;
        Ok(Reply {
            status: parts.status.as_u16(),
            headers: parts.headers,
            body: parsed(text.as_bytes()),
            text,
        })
    }

    /// Sends a body as it is.
    pub(crate) fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Reply {
        self.try_send(method, path, headers, body).unwrap()
    }

    /// Posts JSON.
    pub(crate) fn post(&self, path: &str, body: &Value) -> Reply {
        let json = [("Content-Type", "application/json")];
        self.send("POST", path, &json, body.to_string().as_bytes())
    }

    /// Posts JSON with an API key.
    pub(crate) fn post_as(&self, secret: &str, path: &str, body: &Value) -> Reply {
        let headers = [("Content-Type", "application/json"), ("X-API-Key", secret)];
        self.send("POST", path, &headers, body.to_string().as_bytes())
    }

    /// Gets.
    pub(crate) fn get(&self, path: &str) -> Reply {
        self.send("GET", path, &[], b"")
    }

    /// `POST /claim`, which must succeed.
    pub(crate) fn claim(&self, body: Value) -> Value {
        self.post("/claim", &body).ok()
    }

    /// `POST /ledger/pending`, which must succeed.
    pub(crate) fn pending(&self, body: Value) -> Value {
        self.post("/ledger/pending", &body).ok()
    }

    /// `POST /ledger/done`.
    pub(crate) fn done(&self, body: Value) -> Reply {
        self.post("/ledger/done", &body)
    }

    /// `POST /ledger/failed`.
    pub(crate) fn failed(&self, body: Value) -> Reply {
        self.post("/ledger/failed", &body)
    }

    /// `GET /ledger/{key}`, which must succeed.
    pub(crate) fn entry(&self, key: &str) -> Value {
        self.get(&format!("/ledger/{}", encoded(key))).ok()
    }

    /// A key that `claimant` has pending, with this lease.
    pub(crate) fn pending_key(&self, key: &str, claimant: &str, lease_seconds: u32) -> Value {
        let verdict = self.claim(json!({
            "idempotency_key": key, "claimant": claimant, "pending": true, "lease_seconds": lease_seconds
        }));
        assert_eq!(verdict["claimed"], true, "{verdict}");
        verdict
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The JSON in a body, however deep; null where it is none.
pub(crate) fn parsed(body: &[u8]) -> Value {
    let mut reader = serde_json::Deserializer::from_slice(body);
    reader.disable_recursion_limit();
    let value = serde::Deserialize::deserialize(&mut reader);
    value
        .and_then(|value| reader.end().map(|()| value))
        .unwrap_or(Value::Null)
}

/// A key as a segment of a path.
pub(crate) fn encoded(key: &str) -> String {
    percent_encoding::utf8_percent_encode(key, percent_encoding::NON_ALPHANUMERIC).to_string()
}
