//! dedup-gate makes n8n workflows safe to run twice: a gate that tells whether this is the
//! first time, and a ledger of what became of the work.
//!
//! Imports run downward only: [`app`] puts the parts together; [`api`] speaks HTTP and nothing
//! else; [`retention`] removes what is over; [`lab`] shows to whoever wants to see it what a gate is good for;
//! [`gate`] holds the use cases; [`metrics`] counts what
//! they come to; [`store`] holds the SQL; [`domain`] holds the rules and knows none of the others.
//! Only `main` and [`app`] see [`config`].

pub mod api;
pub mod app;
pub mod config;
pub mod domain;
pub mod gate;
pub mod lab;
pub mod metrics;
pub mod outbox;
pub mod retention;
pub mod store;
