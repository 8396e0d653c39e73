//! The delivery loop: lease, send, settle.
//!
//! Each of the three is by itself: no transaction is open while somebody else's server is asked. Whoever leases an
//! effect has it alone until the lease runs out, and settles by naming the lease; so a replica that dies is
//! taken over, and one that comes late changes nothing. Effects are delivered at least once: a receiver that has
//! taken one whose lease ran out gets it again, under the same `webhook-id`.
//!
//! Each route has a loop of its own, so that a receiver that hangs holds up nothing but its own topic; and all of them
//! have threads of their own, so that what receivers send keeps nobody else busy.

pub mod send;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use chrono::{TimeDelta, Utc};
use tokio::runtime::Builder;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::sleep;

use self::send::{Message, Sender, Sent};
use crate::domain::effect::{Answer, Delivery, Next, Patience, Topics};
use crate::domain::route::{Route, Routes};
use crate::gate::{Gate, GateError};
use crate::metrics::Metrics;
use crate::store::outbox::{Lease, LeasedEffect, ParcelFilter, Settled, Try};

/// How many effects of a route are on their way at a time.
const SLOTS: usize = 32;

/// How much longer a lease lasts than a try may take, in seconds: for what comes before and after it.
const SPARE: u32 = 15;

/// How long it goes without looking, where the store tells what others have stored.
const QUIET: Duration = Duration::from_secs(30);

/// The same where it does not.
const DEAF: Duration = Duration::from_secs(1);

/// How many threads deliver.
const THREADS: usize = 2;

/// How many waiting effects are looked at when it starts.
const LOOKED_AT: u32 = 500;

/// How long to wait where the store fails.
const REST: Duration = Duration::from_secs(1);

/// Delivers effects.
pub struct Outbox {
    gate: Arc<Gate>,
    metrics: Arc<Metrics>,
    sender: Sender,
    patience: Patience,
    lease_seconds: u32,
}

impl Outbox {
    /// What delivers the effects of this gate, and takes `timeout` for a try at most.
    pub fn new(
        gate: Arc<Gate>,
        metrics: Arc<Metrics>,
        sender: Sender,
        patience: Patience,
        timeout: Duration,
    ) -> Self {
        let timeout = u32::try_from(timeout.as_secs()).unwrap_or(u32::MAX);
        Self {
            gate,
            metrics,
            sender,
            patience,
            lease_seconds: timeout.saturating_add(SPARE),
        }
    }

    /// Delivers what these routes take, until it is to stop; then what is on its way is settled.
    async fn run(self, routes: &Routes, stop: watch::Receiver<bool>) {
        self.warn_of_stranded(routes).await;
        if routes.iter().next().is_none() {
            return;
        }
        let outbox = Arc::new(self);
        let is_told = outbox.gate.listen();
        let mut loops = JoinSet::new();
        for route in routes.iter() {
            let of_route = Loop {
                outbox: Arc::clone(&outbox),
                route: route.clone(),
                routed: routes.topics(),
                is_told: Arc::clone(&is_told),
                under_way: JoinSet::new(),
                tried: Vec::new(),
                is_unsure: false,
                is_cut_off: false,
            };
            loops.spawn(of_route.run(stop.clone()));
        }
        while let Some(ended) = loops.join_next().await {
            if let Err(panicked) = ended {
                log::error!("a route is not delivered any more, until a restart: {panicked}");
            }
        }
    }

    /// Effects of topics that have lost their route wait for ever, and nobody would know. The newest are looked at.
    async fn warn_of_stranded(&self, routes: &Routes) {
        let filter = ParcelFilter {
            delivery: Some(Delivery::Pending),
            limit: LOOKED_AT,
            ..ParcelFilter::default()
        };
        let Ok(page) = self.gate.list_effects(filter).await else {
            return;
        };
        let topics = page.parcels.iter().map(|parcel| parcel.topic.as_str());
        let stranded: BTreeSet<&str> = topics
            .filter(|topic| routes.find(topic).is_none())
            .collect();
        if !stranded.is_empty() {
            let topics = stranded.into_iter().collect::<Vec<_>>().join(", ");
            log::warn!("effects wait for topics that OUTBOX_ROUTES names no route for: {topics}");
        }
    }

    /// One try.
    async fn deliver(&self, route: &Route, effect: LeasedEffect) -> Settled {
        let message = Message {
            url: &route.url,
            id: &effect.lease.id,
            topic: &effect.topic,
            idempotency_key: effect.lease.key.as_str(),
            timestamp: Utc::now().timestamp(),
            body: Bytes::from(effect.payload),
        };
        let sent = self.sender.send(&message).await;
        let next = self
            .patience
            .next(effect.failures, answer(&sent), fastrand::f64());
        let (delivery, wait) = match next {
            Next::Delivered => (Delivery::Delivered, TimeDelta::zero()),
            Next::Again(wait) => (Delivery::Pending, wait),
            Next::Dead => (Delivery::Dead, TimeDelta::zero()),
        };
        if delivery == Delivery::Delivered {
            let waited = effect.leased_at - effect.due_at;
            let waited = waited.to_std().unwrap_or_default();
            self.metrics.observe_delivery(waited + sent.took);
        }
        let failures = effect.failures + u32::from(delivery != Delivery::Delivered);
        Settled {
            attempt: Try {
                number: effect.lease.tries,
                at: effect.leased_at,
                status_code: sent.status,
                error: sent.fault,
                milliseconds: u64::try_from(sent.took.as_millis()).unwrap_or(u64::MAX),
            },
            lease: effect.lease,
            delivery,
            wait,
            failures,
        }
    }
}

/// Delivers, each of these by its routes, on threads of their own, until they are to stop. What is returned resolves
/// once all is settled.
///
/// # Errors
///
/// There are no threads.
pub fn start(
    deliveries: Vec<(Outbox, Arc<Routes>)>,
    stop: watch::Receiver<bool>,
) -> std::io::Result<oneshot::Receiver<()>> {
    let runtime = Builder::new_multi_thread()
        .worker_threads(THREADS)
        .thread_name("outbox")
        .enable_all()
        .build()?;
    let (settled, all_settled) = oneshot::channel();
    thread::spawn(move || {
        runtime.block_on(async {
            let mut running = JoinSet::new();
            for (outbox, routes) in deliveries {
                let stop = stop.clone();
                running.spawn(async move { outbox.run(&routes, stop).await });
            }
            while running.join_next().await.is_some() {}
        });
        // Nobody listens where the process does not wait for it.
        let _ = settled.send(());
        runtime.shutdown_background();
    });
    Ok(all_settled)
}

/// What a try means.
fn answer(sent: &Sent) -> Answer {
    if sent.is_delivered() {
        Answer::Taken
    } else if sent.is_gone() {
        Answer::Gone
    } else {
        Answer::Failed {
            retry_after: sent.retry_after.map(|asked| asked.as_secs()),
        }
    }
}

/// The loop of a route.
struct Loop {
    outbox: Arc<Outbox>,
    route: Route,
    /// What all routes take together.
    routed: Topics,
    /// Whether the store tells what others have stored.
    is_told: Arc<AtomicBool>,
    under_way: JoinSet<Settled>,
    /// What has been tried, and is not settled yet.
    tried: Vec<Settled>,
    /// Whether some of it may be settled: the store was asked, and gave no answer.
    is_unsure: bool,
    /// Whether the store has failed, and nobody has to be told again.
    is_cut_off: bool,
}

impl Loop {
    async fn run(mut self, mut stop: watch::Receiver<bool>) {
        let mut changed = self.outbox.gate.effects_changed();
        while !*stop.borrow() {
            let rest = match self.turn(&mut changed).await {
                Ok(rest) => rest,
                Err(fault) => {
                    if !self.is_cut_off {
                        log::warn!("effects wait for the store: {fault}");
                    }
                    self.is_cut_off = true;
                    sleep(REST).await;
                    continue;
                }
            };
            self.is_cut_off = false;
            let is_full = self.under_way.len() >= SLOTS;
            tokio::select! {
                Some(settled) = self.under_way.join_next() => self.keep(settled),
                _ = changed.changed(), if !is_full => {}
                () = sleep(rest), if !is_full => {}
                _ = stop.changed() => {}
            }
        }
        // Each as soon as it has ended: there may not be time for the last of them.
        while let Some(settled) = self.under_way.join_next().await {
            self.keep(settled);
            self.keep_what_has_ended();
            let _ = self.settle().await;
        }
        while self.settle().await.is_err() {
            sleep(REST).await;
        }
    }

    /// Settles what was tried, takes what is due, and says how long it may go without looking again.
    async fn turn(&mut self, changed: &mut watch::Receiver<u64>) -> Result<Duration, GateError> {
        self.keep_what_has_ended();
        self.settle().await?;
        // What is stored, or settled by others, from here on is for the next turn.
        changed.borrow_and_update();
        let free = SLOTS - self.under_way.len();
        let longest = match self.is_told.load(Ordering::Relaxed) {
            true => QUIET,
            false => DEAF,
        };
        if free == 0 {
            return Ok(longest);
        }
        let lease = Lease {
            topics: self.route.topics.clone(),
            routed: self.routed.clone(),
            limit: u32::try_from(free).unwrap_or(u32::MAX),
            seconds: self.outbox.lease_seconds,
        };
        let leased = self.outbox.gate.lease_effects(lease).await?;
        for effect in leased.effects {
            let (outbox, route) = (Arc::clone(&self.outbox), self.route.clone());
            self.under_way
                .spawn(async move { outbox.deliver(&route, effect).await });
        }
        let next = leased.next.and_then(|next| next.to_std().ok());
        Ok(next.map_or(longest, |next| next.min(longest)))
    }

    fn keep_what_has_ended(&mut self) {
        while let Some(settled) = self.under_way.try_join_next() {
            self.keep(settled);
        }
    }

    /// Keeps what was tried until it is settled. A try that panicked is taken over when its lease runs out.
    fn keep(&mut self, settled: Result<Settled, tokio::task::JoinError>) {
        match settled {
            Ok(settled) => self.tried.push(settled),
            Err(panicked) => log::error!("a delivery ended without an answer: {panicked}"),
        }
    }

    /// Notes how tries ended. Where the store fails they are kept: it may yet be in time.
    async fn settle(&mut self) -> Result<(), GateError> {
        if self.tried.is_empty() {
            return Ok(());
        }
        let was_unsure = std::mem::replace(&mut self.is_unsure, true);
        let noted = self.outbox.gate.settle_effects(self.tried.clone()).await?;
        self.is_unsure = false;
        // What was settled before without an answer looks as if it were lost.
        let held = if was_unsure {
            self.tried.len()
        } else {
            noted.held
        };
        self.report(&self.tried, held);
        self.tried.clear();
        Ok(())
    }

    fn report(&self, settled: &[Settled], held: usize) {
        let metrics = &self.outbox.metrics;
        for settled in settled {
            let lease = &settled.lease;
            let error = settled.attempt.error.as_deref().unwrap_or("none");
            metrics.count_try(settled.delivery);
            match settled.delivery {
                Delivery::Delivered => {}
                Delivery::Pending => {
                    log::debug!(
                        "effect {} was not delivered (try {}): {error}",
                        lease.id,
                        lease.tries
                    );
                }
                Delivery::Dead => {
                    log::warn!(
                        "effect {} is dead after {} tries: {error}",
                        lease.id,
                        lease.tries
                    );
                }
            }
        }
        let lost = settled.len().saturating_sub(held);
        if lost > 0 {
            metrics.count_lost_leases(lost as u64);
            log::warn!(
                "{lost} deliveries were settled after their lease: a receiver may get them again"
            );
        }
    }
}
