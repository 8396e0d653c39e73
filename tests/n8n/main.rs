//! The workflows of `n8n-workflows/`, imported as they are shipped and run in a real n8n, against
//! the real service and a provider that charges and counts.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../helpers/mod.rs"]
#[expect(dead_code, reason = "what the tests of the service need besides")]
mod helpers;

mod guard;
mod instance;
mod provider;
mod stage;

mod comparison;
mod editor;
mod effects;
mod faults;
mod kit;
mod orders;
mod replicas;
mod review;
mod shipped;
