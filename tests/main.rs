//! Everything that is shown of the running service: the binary itself, on a real Postgres and
//! on a real SQLite file.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod helpers;

mod adoption;
mod auth;
mod bad_input;
mod conformance;
mod faults;
mod keys;
mod lab;
mod lane;
mod listing;
mod logs;
mod metrics;
mod openapi;
mod outbox;
mod pooler;
mod races;
mod readme;
mod retention;
mod retry;
mod review;
mod start;
mod webhook_signature;
