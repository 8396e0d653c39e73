//! What is counted and measured, as Prometheus reads it.
//!
//! What happens is counted where it happens, by atomics that are looked up beforehand: nothing is
//! allocated or locked for a claim. What merely is (queues, the pool, the backlog) is asked for when
//! somebody reads. No label holds what a caller sent.

use std::time::Duration;

use prometheus::core::Collector;
use prometheus::{
    Gauge, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry, TextEncoder, exponential_buckets,
};

use crate::domain::claim::{Decided, KeyReused};
use crate::domain::effect::Delivery;
use crate::domain::ledger::Status;
use crate::store::Backlog;
use crate::store::outbox::Undelivered;

/// From a commit on a fast disk to the time in which every caller is answered, in seconds.
const STORE_SECONDS: [f64; 12] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
];

/// From at once to the day that a receiver was away, in seconds.
const DELIVERY_SECONDS: [f64; 13] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 60.0, 600.0, 3600.0, 86_400.0,
];

/// Everything that is counted from the start of the process.
pub struct Metrics {
    registry: Registry,
    claims: Claims,
    duplicates: Duplicates,
    problems: IntCounterVec,
    batch_sizes: HistogramVec,
    store_seconds: HistogramVec,
    tries: Tries,
    lost_leases: IntCounter,
    delivery_seconds: Histogram,
}

/// Tries to deliver an effect, by what came of them.
struct Tries {
    delivered: IntCounter,
    failed: IntCounter,
    dead: IntCounter,
}

/// Claims, by what was said to them.
struct Claims {
    claimed: IntCounter,
    replayed: IntCounter,
    duplicate: IntCounter,
    key_reused: IntCounter,
}

/// Claims that were turned away, by the state of the work.
struct Duplicates {
    claimed: IntCounter,
    pending: IntCounter,
    stale: IntCounter,
    done: IntCounter,
    failed: IntCounter,
}

/// How busy the gate is at a moment.
#[derive(Debug, Clone)]
pub struct Load {
    /// How many questions wait in each lane.
    pub queued: [(&'static str, usize); 3],
    /// How many calls wait for a connection of the pool.
    pub waiting: usize,
    /// How many connections of the pool are in use.
    pub in_use: usize,
    /// How many connections the pool may have.
    pub connections: usize,
}

impl Metrics {
    /// Everything at zero. `problem_codes` are the codes that replies can have: each is there from
    /// the start, so that its first one shows as an increase.
    pub fn new(problem_codes: &[String]) -> Self {
        let registry = Registry::new();
        let claims = counters(
            &registry,
            "dedup_gate_claims_total",
            "Claims that were decided, by verdict: claimed, replayed (said again to the same claimant), duplicate (turned away), key_reused (refused).",
            "verdict",
        );
        let duplicates = counters(
            &registry,
            "dedup_gate_duplicates_prevented_total",
            "Claims that were turned away instead of doing the work once more, by the status of the work.",
            "status",
        );
        let problems = counters(
            &registry,
            "dedup_gate_problems_total",
            "Replies that are problems, by code.",
            "code",
        );
        let tries = counters(
            &registry,
            "dedup_gate_outbox_tries_total",
            "Tries to deliver an effect, by outcome: delivered, failed (tried again later), dead (given up).",
            "outcome",
        );
        for code in problem_codes {
            problems.with_label_values(&[code]);
        }
        Self {
            claims: Claims {
                claimed: claims.with_label_values(&["claimed"]),
                replayed: claims.with_label_values(&["replayed"]),
                duplicate: claims.with_label_values(&["duplicate"]),
                key_reused: claims.with_label_values(&["key_reused"]),
            },
            duplicates: Duplicates {
                claimed: duplicates.with_label_values(&["claimed"]),
                pending: duplicates.with_label_values(&["pending"]),
                stale: duplicates.with_label_values(&["stale"]),
                done: duplicates.with_label_values(&["done"]),
                failed: duplicates.with_label_values(&["failed"]),
            },
            problems,
            batch_sizes: histograms(
                &registry,
                "dedup_gate_batch_size",
                "How many claims, or acts on claimed keys, a lane decided as one batch.",
                "lane",
                exponential_buckets(1.0, 2.0, 10).unwrap_or_default(),
            ),
            store_seconds: histograms(
                &registry,
                "dedup_gate_store_duration_seconds",
                "How long the store took for a call, also where it failed; a lane's calls are of a batch each.",
                "operation",
                STORE_SECONDS.to_vec(),
            ),
            tries: Tries {
                delivered: tries.with_label_values(&["delivered"]),
                failed: tries.with_label_values(&["failed"]),
                dead: tries.with_label_values(&["dead"]),
            },
            lost_leases: registered(
                &registry,
                IntCounter::new(
                    "dedup_gate_outbox_lost_leases_total",
                    "Tries that were settled after their lease had run out: a receiver may get these effects again.",
                ),
            ),
            delivery_seconds: registered(
                &registry,
                Histogram::with_opts(
                    HistogramOpts::new(
                        "dedup_gate_outbox_delivery_seconds",
                        "How long after an effect was due a receiver had taken it.",
                    )
                    .buckets(DELIVERY_SECONDS.to_vec()),
                ),
            ),
            registry,
        }
    }

    /// Counts claims that were decided.
    pub fn count_claims<'a>(&self, decided: impl IntoIterator<Item = &'a Decided>) {
        for claim in decided {
            match claim {
                Ok(verdict) if verdict.claimed && verdict.replayed => self.claims.replayed.inc(),
                Ok(verdict) if verdict.claimed => self.claims.claimed.inc(),
                Ok(verdict) => {
                    self.claims.duplicate.inc();
                    self.duplicates.of(verdict.status).inc();
                }
                Err(KeyReused) => self.claims.key_reused.inc(),
            }
        }
    }

    /// Counts a reply that is a problem, by its code.
    pub fn count_problem(&self, code: &str) {
        self.problems.with_label_values(&[code]).inc();
    }

    /// Counts a try to deliver an effect, by where the effect stands after it.
    pub fn count_try(&self, after: Delivery) {
        match after {
            Delivery::Delivered => self.tries.delivered.inc(),
            Delivery::Pending => self.tries.failed.inc(),
            Delivery::Dead => self.tries.dead.inc(),
        }
    }

    /// Counts tries whose lease did not hold.
    pub fn count_lost_leases(&self, count: u64) {
        self.lost_leases.inc_by(count);
    }

    /// Notes how long after an effect was due it was delivered.
    pub fn observe_delivery(&self, time: Duration) {
        self.delivery_seconds.observe(time.as_secs_f64());
    }

    /// The sizes of a lane's batches.
    pub fn batch_sizes(&self, lane: &'static str) -> Histogram {
        self.batch_sizes.with_label_values(&[lane])
    }

    /// How long the store takes for an operation, in seconds.
    pub fn store_seconds(&self, operation: &'static str) -> Histogram {
        self.store_seconds.with_label_values(&[operation])
    }

    /// All of it in Prometheus' text format, with what is true at the moment. Without what is read from the
    /// store, its metrics are left out: an old number would look like a new one.
    pub fn text(&self, load: &Load, read: Option<&(Backlog, Undelivered)>) -> String {
        let now = Registry::new();
        show_load(&now, load);
        gauge(
            &now,
            "dedup_gate_store_up",
            "Whether the store could be asked when this was read: 1, or 0. Where it is 0, the metrics that come from it are absent.",
            read.is_some().into(),
        );
        if let Some((backlog, undelivered)) = read {
            show_backlog(&now, backlog);
            show_undelivered(&now, undelivered);
        }
        let families = [self.registry.gather(), now.gather()].concat();
        TextEncoder::new()
            .encode_to_string(&families)
            .unwrap_or_default()
    }
}

impl Duplicates {
    fn of(&self, status: Status) -> &IntCounter {
        match status {
            Status::Claimed => &self.claimed,
            Status::Pending => &self.pending,
            Status::Stale => &self.stale,
            Status::Done => &self.done,
            Status::Failed => &self.failed,
        }
    }
}

fn show_load(registry: &Registry, load: &Load) {
    let queued = registered(
        registry,
        IntGaugeVec::new(
            Opts::new(
                "dedup_gate_queue_depth",
                "How many claims, or acts on claimed keys, wait in a lane.",
            ),
            &["lane"],
        ),
    );
    for (lane, depth) in load.queued {
        queued.with_label_values(&[lane]).set(signed(depth));
    }
    gauge(
        registry,
        "dedup_gate_pool_queue_depth",
        "How many calls wait for a connection of the pool.",
        signed(load.waiting),
    );
    gauge(
        registry,
        "dedup_gate_pool_connections_in_use",
        "How many connections of the pool are in use.",
        signed(load.in_use),
    );
    gauge(
        registry,
        "dedup_gate_pool_connections_max",
        "How many connections the pool may have; the lanes have their own.",
        signed(load.connections),
    );
}

fn show_backlog(registry: &Registry, backlog: &Backlog) {
    let bound = Backlog::BOUND;
    gauge(
        registry,
        "dedup_gate_pending_entries",
        &format!(
            "Entries of the ledger that are pending, stale ones included; {bound} also where there are more."
        ),
        signed(backlog.pending),
    );
    gauge(
        registry,
        "dedup_gate_stale_entries",
        &format!(
            "Pending entries whose lease has run out, of the {bound} that have not changed for longest. The same on every replica."
        ),
        signed(backlog.stale),
    );
    let age = registered(
        registry,
        Gauge::new(
            "dedup_gate_oldest_pending_age_seconds",
            format!(
                "How long ago the oldest pending attempt was claimed, of the {bound} that have not changed for longest; 0 where nothing is pending. The same on every replica."
            ),
        ),
    );
    age.set(backlog.oldest.as_seconds_f64());
}

fn show_undelivered(registry: &Registry, undelivered: &Undelivered) {
    let bound = Undelivered::BOUND;
    gauge(
        registry,
        "dedup_gate_outbox_waiting",
        &format!(
            "Effects that are not delivered yet; {bound} also where there are more. The same on every replica."
        ),
        signed(undelivered.waiting),
    );
    gauge(
        registry,
        "dedup_gate_outbox_dead",
        &format!(
            "Effects that were given up; {bound} also where there are more. The same on every replica."
        ),
        signed(undelivered.dead),
    );
    let age = registered(
        registry,
        Gauge::new(
            "dedup_gate_outbox_oldest_waiting_age_seconds",
            format!(
                "How long ago the oldest effect was due that is not delivered yet, of the {bound} that are tried next; 0 where none is. The same on every replica."
            ),
        ),
    );
    age.set(undelivered.oldest.as_seconds_f64());
}

fn gauge(registry: &Registry, name: &str, help: &str, value: i64) {
    registered(registry, IntGauge::new(name, help)).set(value);
}

fn counters(registry: &Registry, name: &str, help: &str, label: &str) -> IntCounterVec {
    registered(
        registry,
        IntCounterVec::new(Opts::new(name, help), &[label]),
    )
}

fn histograms(
    registry: &Registry,
    name: &str,
    help: &str,
    label: &str,
    buckets: Vec<f64>,
) -> HistogramVec {
    let options = HistogramOpts::new(name, help).buckets(buckets);
    registered(registry, HistogramVec::new(options, &[label]))
}

/// All names are written in this file, so that a fault in one of them shows in every test.
fn registered<C: Collector + Clone + 'static>(
    registry: &Registry,
    collector: prometheus::Result<C>,
) -> C {
    collector
        .and_then(|collector| {
            registry.register(Box::new(collector.clone()))?;
            Ok(collector)
        })
        .expect("a metric has a valid name of its own")
}

fn signed(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
