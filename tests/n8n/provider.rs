//! The provider: `provider.mjs` as a process.

use std::collections::BTreeMap;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use super::helpers::postgres::free_port;
use super::helpers::service::Client;
use super::helpers::wait_until;
use super::stage::PATIENCE;

/// A provider.
pub(crate) struct Provider {
    pub(crate) port: u16,
    client: Client,
    /// While it runs. It ends with the test's process, since it waits for its input to close.
    process: Option<Child>,
}

impl Provider {
    /// A provider that was not started yet.
    pub(crate) fn new() -> Self {
        let port = free_port();
        Self {
            port,
            client: Client::new(format!("http://127.0.0.1:{port}"), PATIENCE),
            process: None,
        }
    }

    /// Starts it; it knows of nothing that was before.
    pub(crate) fn start(&mut self) {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/n8n/provider.mjs");
        let process = Command::new("node")
            .args([script, &self.port.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("Node.js is needed: scripts/test installs it");
        self.process = Some(process);
        wait_until("the provider listens", || {
            self.client.try_send("GET", "/requests", &[], b"").is_ok()
        });
    }

    /// Whether it was started, and not stopped.
    pub(crate) fn runs(&self) -> bool {
        self.process.is_some()
    }

    /// Stops it.
    pub(crate) fn stop(&mut self) {
        let mut process = self.process.take().expect("the provider runs");
        process.kill().unwrap();
        process.wait().unwrap();
    }

    /// What the next requests for an order, the next searches for a reference, or the next messages
    /// to the paths under one will meet: objects of `charge`, `status`, `retry_after`, `delay`, `drop`
    /// and `raw`, of which messages know `charge`, `status` and `delay`.
    pub(crate) fn behave(&self, of: &str, answers: &Value) {
        let json_type = [("Content-Type", "application/json")];
        let body = json!({"of": of, "answers": answers}).to_string();
        self.client
            .send("PUT", "/behaviour", &json_type, body.as_bytes())
            .ok();
    }

    /// All charges that were made, in their order.
    pub(crate) fn charges(&self) -> Vec<Value> {
        let mut reply = self.client.get("/charges").ok();
        serde_json::from_value(reply["data"].take()).unwrap()
    }

    /// The charges of an order.
    pub(crate) fn charges_of(&self, order_id: &str) -> Vec<Value> {
        let mut charges = self.charges();
        charges.retain(|charge| charge["order_id"] == order_id);
        charges
    }

    /// How often each order whose id begins with `prefix` was charged.
    pub(crate) fn counts(&self, prefix: &str) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for charge in self.charges() {
            let order_id = charge["order_id"].as_str().unwrap();
            if order_id.starts_with(prefix) {
                *counts.entry(order_id.to_owned()).or_default() += 1;
            }
        }
        counts
    }

    /// The requests to charge an order, those that charged nothing included.
    pub(crate) fn requests_for(&self, order_id: &str) -> Vec<Value> {
        let requests = self.client.get("/requests").ok();
        let mut requests: Vec<Value> = serde_json::from_value(requests).unwrap();
        requests.retain(|request| request["order_id"] == order_id);
        requests
    }

    /// The messages that are kept and have this in a member.
    pub(crate) fn messages_with(&self, member: &str, value: &str) -> Vec<Value> {
        let messages = self.client.get("/messages").ok();
        let mut messages: Vec<Value> = serde_json::from_value(messages).unwrap();
        messages.retain(|message| message[member] == value);
        messages
    }

    /// The messages that were sent to a path since they were last taken. What was sent to other
    /// paths is forgotten.
    pub(crate) fn take_messages(&self, path: &str) -> Vec<Value> {
        let messages = self.client.send("DELETE", "/messages", &[], b"").ok();
        let mut messages: Vec<Value> = serde_json::from_value(messages).unwrap();
        messages.retain(|message| message["path"] == path);
        messages
    }
}
