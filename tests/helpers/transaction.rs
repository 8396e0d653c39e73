//! Raw SQL beside the service.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

use super::Service;

/// A transaction of raw SQL's that has written the row of a key, and is not over.
pub(crate) struct OpenTransaction(Child);

impl OpenTransaction {
    /// Holds a key that is new.
    pub(crate) fn hold(service: &Service, key: &str) -> Self {
        let insert = format!(
            "INSERT INTO processed_orders (idempotency_key, order_id) VALUES ('{key}', 'x') \
             RETURNING idempotency_key"
        );
        Self::begin(service, &insert, key)
    }

    /// Holds a key that is known.
    pub(crate) fn lock(service: &Service, key: &str) -> Self {
        let lock = format!(
            "SELECT idempotency_key FROM processed_orders WHERE idempotency_key = '{key}' FOR UPDATE"
        );
        Self::begin(service, &lock, key)
    }

    /// Runs a statement that answers so.
    pub(crate) fn begin(service: &Service, statement: &str, answer: &str) -> Self {
        let mut process = Command::new("psql")
            .args(["-XqAt", &service.database.url])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        process
            .stdin
            .as_mut()
            .unwrap()
            .write_all(format!("BEGIN; {statement};\n").as_bytes())
            .unwrap();
        let mut line = String::new();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        output.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), answer);
        Self(process)
    }

    /// Rolls it back.
    pub(crate) fn release(mut self) {
        drop(self.0.stdin.take());
        self.0.wait().unwrap();
    }
}
