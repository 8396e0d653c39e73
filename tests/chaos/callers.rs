//! Callers that do what n8n does: executions that fight for the same orders, ask again where a reply
//! is lost, work, report, hang, and come too late.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use dedup_gate::domain::act::{Act, Renewal, Reset, Review};
use dedup_gate::domain::claim::{Claim, Door, OnStale};
use dedup_gate::domain::effect::{Due, Effect};
use dedup_gate::domain::json::canonical;
use dedup_gate::domain::ledger::{Holder, Outcome, Report, ReviewDecision};
use dedup_gate::domain::text::IdempotencyKey;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::effects;
use super::helpers::random::Random;
use super::helpers::service::Client;
use super::history::{Heard, Record, Request};

/// How many callers there are at a time.
const CALLERS: usize = 80;

/// How many executions want each order, beside the one that looks after it.
const EXECUTIONS: usize = 4;

/// How many calls an execution may make, so that a key's history stays short enough to be checked.
const CALLS: usize = 14;

/// How long callers wait for an answer: some give up before the service does.
const PATIENCE: [Duration; 4] = [
    Duration::from_millis(150),
    Duration::from_millis(500),
    Duration::from_millis(1500),
    Duration::from_millis(3500),
];

/// How the executions of an order go about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Pending, held where stale, no window, and nobody looks after it: at most one effect.
    Hold,
    /// Pending, taken over where stale: whoever comes too late is superseded.
    TakeOver,
    /// At the gate alone, or opened afterwards.
    Gate,
    /// With a dedupe window that passes.
    Window,
    /// A person reviews and resets.
    Operated,
}

impl Kind {
    const ALL: [Self; 5] = [
        Self::Hold,
        Self::TakeOver,
        Self::Gate,
        Self::Window,
        Self::Operated,
    ];

    /// That of a key.
    pub(crate) fn of(key: &str) -> Self {
        let kind = Self::ALL
            .into_iter()
            .find(|kind| key.ends_with(&kind.name()));
        kind.expect("a key ends with its kind")
    }

    fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

/// Clients of the replicas as callers reach them, one for each patience.
pub(crate) struct Clients(Vec<[Client; PATIENCE.len()]>);

impl Clients {
    pub(crate) fn new(ports: impl Iterator<Item = u16>) -> Self {
        let of_port = |port: u16| {
            let base = format!("http://127.0.0.1:{port}");
            PATIENCE.map(|patience| Client::new(base.clone(), patience))
        };
        Self(ports.map(of_port).collect())
    }
}

/// Lets callers come until it is over. What they do is a matter of the seed; what comes of it is not.
pub(crate) fn run(clients: &Clients, record: &Record, seed: u64, is_over: &AtomicBool) {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..CALLERS {
            scope.spawn(|| {
                while !is_over.load(Ordering::SeqCst) {
                    let turn = next.fetch_add(1, Ordering::SeqCst);
                    let (order, number) = (turn / (EXECUTIONS + 1), turn % (EXECUTIONS + 1));
                    Execution::new(clients, record, seed, order, number).run();
                }
            });
        }
    });
}

/// One execution of a workflow, for one order.
struct Execution<'a> {
    clients: &'a Clients,
    record: &'a Record,
    random: Random,
    kind: Kind,
    key: IdempotencyKey,
    name: String,
    number: usize,
    /// How many calls it may still make.
    left: usize,
}

impl<'a> Execution<'a> {
    fn new(
        clients: &'a Clients,
        record: &'a Record,
        seed: u64,
        order: usize,
        number: usize,
    ) -> Self {
        let kind = *Random::of(seed ^ order as u64).one_of(&Kind::ALL);
        let key = format!("order-{seed}-{order}-{}", kind.name());
        let turn = (order * (EXECUTIONS + 1) + number) as u64;
        let mut random = Random::of(seed.rotate_left(32) ^ turn);
        random.bits();
        Self {
            clients,
            record,
            random,
            kind,
            key: IdempotencyKey::from_store(key),
            name: format!("{order}@{number}"),
            number,
            left: CALLS,
        }
    }

    fn run(&mut self) {
        match (self.number, self.kind) {
            (EXECUTIONS, Kind::Operated) => self.look_after(),
            (EXECUTIONS, _) => {}
            _ => self.work(),
        }
    }

    fn pause(&mut self, least: usize, most: usize) {
        let millis = least + self.random.below(most - least + 1);
        thread::sleep(Duration::from_millis(millis as u64));
    }

    /// Whether something happens that does so this often in a hundred.
    fn percent(&mut self, often: usize) -> bool {
        self.random.below(100) < often
    }

    /// Calls once, at any replica; none where there is no answer.
    fn call(&mut self, request: &Request) -> Option<Heard> {
        self.left = self.left.checked_sub(1)?;
        let replica = self.random.below(self.clients.0.len());
        let client = self.random.one_of(&self.clients.0[replica]);
        self.record.call(client, &self.name, request).ok()
    }

    /// Calls as *Retry On Fail* does: the same again where there was no answer, and where that was a
    /// refusal.
    fn ask(&mut self, request: &Request) -> Option<Heard> {
        let tries = 2 + self.random.below(3);
        let mut heard = None;
        for _ in 0..tries {
            heard = self.call(request);
            match &heard {
                Some(heard) if heard.status == 200 || self.percent(70) => break,
                _ => self.pause(10, 120),
            }
        }
        heard
    }

    fn holder(&self) -> Holder {
        Holder {
            claimant: self.name.clone(),
            api_key: None,
        }
    }

    fn work(&mut self) {
        // Some executions come when the first ones are through: the order is delivered again.
        match self.kind {
            Kind::Hold | Kind::Gate => self.pause(0, 200),
            _ if self.number == 0 => {}
            _ => self.pause(0, 1500),
        }
        let holder = (!self.percent(5)).then(|| self.holder());
        let claim = self.claim(holder.clone());
        let Some(mut verdict) = self.ask(&claim) else {
            // It may have won. Nobody knows, and it goes on like one that has not.
            return self.repeat(&claim, 30);
        };
        if verdict.status != 200 {
            return;
        }
        if verdict.body["claimed"] != true {
            if self.percent(20) {
                self.call(&Request::Read(self.key.clone()));
            }
            return self.repeat(&claim, 20);
        }
        if self.kind == Kind::Gate && self.percent(50) {
            let opening = self.opening(holder.clone());
            match self.ask(&opening) {
                Some(opened) if opened.body["claimed"] == true => verdict = opened,
                _ => return,
            }
        }
        let attempt = verdict.body["attempt"]
            .as_u64()
            .and_then(|attempt| attempt.try_into().ok());
        self.carry_out(&claim, holder, attempt);
    }

    /// Does the work of an attempt, and says so; or does not.
    fn carry_out(&mut self, claim: &Request, holder: Option<Holder>, attempt: Option<u32>) {
        match self.random.below(10) {
            0..6 => self.pause(0, 30),
            6..8 => self.pause(30, 400),
            _ => self.pause(900, 2200),
        }
        if self.percent(15) {
            let (attempt, holder) = self.named(attempt, &holder);
            let renewal = Request::Act(Act::Renewal(Renewal {
                key: self.key.clone(),
                attempt,
                holder,
                lease_seconds: self.lease(),
            }));
            self.ask(&renewal);
        }
        // It dies before it has done anything.
        if self.percent(5) {
            return;
        }
        let is_done = self.percent(70);
        if is_done {
            self.record.effect(self.key.as_str(), &self.name);
        }
        // It dies before it could say so.
        if self.percent(5) {
            return;
        }
        let (outcome, (attempt, holder)) = if is_done {
            (self.done(), self.named(attempt, &holder))
        } else {
            // Here the attempt is required.
            (self.failed(), (attempt, None))
        };
        let again = Report {
            key: self.key.clone(),
            attempt,
            holder,
            effects: self.effects(attempt, &outcome),
            outcome,
        };
        let mut first = again.clone();
        // Some learn the id only later, or what has to follow.
        if let Outcome::Done { external_id, .. } = &mut first.outcome
            && self.percent(10)
        {
            *external_id = None;
        }
        if self.percent(10) {
            first.effects.clear();
        }
        let [first, again] = [first, again].map(|report| Request::Act(Act::Report(report)));
        self.ask(&first);
        if self.percent(25) {
            self.pause(0, 500);
            self.call(&again);
        }
        self.repeat(claim, 15);
    }

    /// What a report names: mostly the attempt, as it should; sometimes the claimant.
    fn named(
        &mut self,
        attempt: Option<u32>,
        holder: &Option<Holder>,
    ) -> (Option<u32>, Option<Holder>) {
        match holder {
            Some(holder) if self.percent(15) => (None, Some(holder.clone())),
            _ => (attempt, None),
        }
    }

    fn done(&self) -> Outcome {
        Outcome::Done {
            external_id: Some(format!("charge-{}", self.name)),
            result: Some(json!({"by": self.name})),
        }
    }

    fn failed(&mut self) -> Outcome {
        Outcome::Failed {
            reason: Some("declined".to_owned()),
            retry: self.percent(85),
        }
    }

    /// What has to follow from a report; of some, nothing.
    fn effects(&mut self, attempt: Option<u32>, outcome: &Outcome) -> Vec<Effect> {
        let count = self.random.below(4);
        let effect = |index| {
            let payload = json!({"key": self.key.as_str(), "attempt": attempt, "by": self.name,
                "outcome": outcome.kind(), "index": index});
            let topic = self.random.one_of(&["mail", "stock"]);
            let due = match self.random.below(10) {
                0 => Due::In(1),
                _ => Due::Now,
            };
            effects::named(topic, &payload, due)
        };
        (0..count).map(effect).collect()
    }

    /// Sends a call once more, late: it was on its way for so long.
    fn repeat(&mut self, request: &Request, often: usize) {
        if self.percent(often) {
            self.pause(0, 1200);
            self.call(request);
        }
    }

    fn lease(&mut self) -> u32 {
        *self.random.one_of(&[1, 1, 2])
    }

    fn claim(&mut self, holder: Option<Holder>) -> Request {
        let payload = match self.random.below(20) {
            0 => Some(json!({"version": 2})),
            1..10 => Some(json!({"version": 1})),
            _ => None,
        };
        let lease = self.lease();
        let is_pending = match self.kind {
            Kind::Hold | Kind::TakeOver => true,
            Kind::Gate => false,
            Kind::Window | Kind::Operated => self.percent(60),
        };
        Request::Claim(
            Claim {
                key: self.key.clone(),
                order_id: None,
                holder,
                ttl_seconds: (self.kind == Kind::Window).then_some(1),
                payload_sha256: payload.as_ref().map(digest),
                pending: is_pending.then_some(lease),
                on_stale: if self.kind == Kind::TakeOver {
                    OnStale::TakeOver
                } else {
                    OnStale::Hold
                },
                door: Door::Gate,
            },
            payload,
        )
    }

    fn opening(&mut self, holder: Option<Holder>) -> Request {
        Request::Claim(
            Claim {
                key: self.key.clone(),
                order_id: None,
                holder,
                ttl_seconds: None,
                payload_sha256: None,
                pending: Some(self.lease()),
                on_stale: OnStale::Hold,
                door: Door::Ledger,
            },
            None,
        )
    }

    /// A person decides what hangs, and lets settled work be repeated.
    fn look_after(&mut self) {
        for turn in 0..3 {
            self.pause(200, 1200);
            let Some(entry) = self.call(&Request::Read(self.key.clone())) else {
                continue;
            };
            if entry.status != 200 {
                continue;
            }
            let attempt = entry.body["attempt"].as_u64().unwrap_or(1);
            let attempt = u32::try_from(attempt).unwrap();
            let hangs = matches!(entry.body["status"].as_str(), Some("pending" | "stale"));
            let act = if hangs || entry.body["conflict"] == true {
                let decision = match self.random.below(3) {
                    0 => ReviewDecision::Release,
                    1 => ReviewDecision::Fail,
                    _ => ReviewDecision::Done {
                        external_id: Some(format!("found-{}", self.name)),
                    },
                };
                Act::Review(Review {
                    key: self.key.clone(),
                    attempt,
                    decision,
                    reviewer: self.name.clone(),
                    reason: format!("review {turn}"),
                })
            } else {
                Act::Reset(Reset {
                    key: self.key.clone(),
                    attempt,
                    reviewer: self.name.clone(),
                    reason: format!("reset {turn}"),
                })
            };
            self.ask(&Request::Act(act));
        }
    }
}

fn digest(payload: &Value) -> Vec<u8> {
    Sha256::digest(canonical(payload)).to_vec()
}
