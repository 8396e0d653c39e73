//! What the tests stand on: databases of their own, the service as a process, and its client.

pub(crate) mod contest;
pub(crate) mod database;
pub(crate) mod lossy;
pub(crate) mod node;
pub(crate) mod pgbouncer;
pub(crate) mod postgres;
pub(crate) mod random;
pub(crate) mod raw;
pub(crate) mod receiver;
pub(crate) mod samples;
pub(crate) mod service;
pub(crate) mod transaction;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

pub(crate) use database::{Backend, Database};
pub(crate) use service::{Reply, Service};

/// Runs a check against both stores, each time with a database of its own.
pub(crate) fn on_both(check: impl Fn(&Service)) {
    on_both_with(&[], check);
}

/// [`on_both`], with settings.
pub(crate) fn on_both_with(settings: &[(&str, &str)], check: impl Fn(&Service)) {
    for backend in Backend::ALL {
        let service = Service::start_on(Database::new(backend), settings);
        let checked = catch_unwind(AssertUnwindSafe(|| check(&service)));
        if let Err(panic) = checked {
            eprintln!("on {backend:?}; the service said:\n{}", service.log());
            resume_unwind(panic);
        }
    }
}

/// Waits until something holds, and fails when it does not within 30 seconds.
pub(crate) fn wait_until(what: &str, holds: impl FnMut() -> bool) {
    wait_within(Duration::from_secs(30), what, holds);
}

/// [`wait_until`], with another limit.
pub(crate) fn wait_within(limit: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let give_up = Instant::now() + limit;
    while !holds() {
        assert!(Instant::now() < give_up, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
