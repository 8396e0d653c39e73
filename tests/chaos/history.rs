//! What was asked and answered, and when: all that a run is judged by.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use chrono::Utc;
use dedup_gate::domain::Time;
use dedup_gate::domain::act::{Act, Renewal, Reset, Review};
use dedup_gate::domain::claim::{Claim, Door, OnStale};
use dedup_gate::domain::ledger::{Outcome, Report, ReviewDecision};
use dedup_gate::domain::text::IdempotencyKey;
use serde_json::{Value, json};

use super::effects;
use super::helpers::service::{Client, encoded};

/// What is asked of the service, in the words of its own rules.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Request {
    /// A claim, and the payload of which it holds the digest.
    Claim(Claim, Option<Value>),
    /// A report, a renewal, a review or a reset.
    Act(Act),
    /// What is known of the key?
    Read(IdempotencyKey),
}

impl Request {
    pub(crate) fn key(&self) -> &str {
        match self {
            Self::Claim(claim, _) => claim.key.as_str(),
            Self::Act(act) => act.key().as_str(),
            Self::Read(key) => key.as_str(),
        }
    }

    /// As HTTP has it: method, path and body. What is absent is null, which means the same.
    fn http(&self) -> (&'static str, String, Value) {
        let post = |path: &str, mut body: Value| {
            body["idempotency_key"] = json!(self.key());
            ("POST", path.to_owned(), body)
        };
        match self {
            Self::Read(key) => (
                "GET",
                format!("/ledger/{}", encoded(key.as_str())),
                Value::Null,
            ),
            Self::Claim(claim, payload) => {
                let mut body = json!({
                    "claimant": claim.holder.as_ref().map(|holder| &holder.claimant),
                    "lease_seconds": claim.pending,
                    "on_stale": match claim.on_stale {
                        OnStale::Hold => "hold",
                        OnStale::TakeOver => "take_over",
                    },
                });
                if let Some(payload) = payload {
                    body["payload"] = payload.clone();
                }
                if claim.door == Door::Ledger {
                    return post("/ledger/pending", body);
                }
                body["ttl_seconds"] = json!(claim.ttl_seconds);
                body["pending"] = json!(claim.pending.is_some());
                post("/claim", body)
            }
            Self::Act(Act::Report(Report {
                attempt,
                holder,
                outcome,
                effects,
                ..
            })) => {
                let effects = (!effects.is_empty()).then(|| effects::written(effects));
                let claimant = holder.as_ref().map(|holder| &holder.claimant);
                match outcome {
                    Outcome::Done {
                        external_id,
                        result,
                    } => {
                        let mut body = json!({"attempt": attempt, "claimant": claimant,
                            "external_id": external_id, "effects": effects});
                        if let Some(result) = result {
                            body["result"] = result.clone();
                        }
                        post("/ledger/done", body)
                    }
                    Outcome::Failed { reason, retry } => post(
                        "/ledger/failed",
                        json!({"attempt": attempt, "claimant": claimant, "reason": reason, "retry": retry,
                            "effects": effects}),
                    ),
                }
            }
            Self::Act(Act::Renewal(Renewal {
                attempt,
                holder,
                lease_seconds,
                ..
            })) => post(
                "/ledger/renew",
                json!({"attempt": attempt, "lease_seconds": lease_seconds,
                    "claimant": holder.as_ref().map(|holder| &holder.claimant)}),
            ),
            Self::Act(Act::Review(Review {
                attempt,
                decision,
                reviewer,
                reason,
                ..
            })) => {
                let name = match decision {
                    ReviewDecision::Done { .. } => "done",
                    ReviewDecision::Release => "release",
                    ReviewDecision::Fail => "fail",
                };
                post(
                    "/ledger/review",
                    json!({"attempt": attempt, "decision": name, "external_id": decision.external_id(),
                        "reviewer": reviewer, "reason": reason}),
                )
            }
            Self::Act(Act::Reset(Reset {
                attempt,
                reviewer,
                reason,
                ..
            })) => post(
                "/ledger/reset",
                json!({"attempt": attempt, "reviewer": reviewer, "reason": reason}),
            ),
        }
    }
}

impl fmt::Display for Request {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (method, path, body) = self.http();
        write!(formatter, "{method} {path}")?;
        let members = body.as_object().into_iter().flatten();
        for (name, value) in
            members.filter(|(name, value)| !value.is_null() && *name != "idempotency_key")
        {
            write!(formatter, " {name}={value}")?;
        }
        Ok(())
    }
}

/// When something happened: its place in the order of all that did, and the time by the clock that
/// the database goes by as well.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stamp {
    pub(crate) order: u64,
    pub(crate) at: Time,
}

/// A reply that decides something.
#[derive(Debug, Clone)]
pub(crate) struct Heard {
    pub(crate) status: u16,
    pub(crate) body: Value,
}

/// One call.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) process: String,
    pub(crate) request: Request,
    pub(crate) invoked: Stamp,
    /// When it was over for its caller.
    pub(crate) returned: Stamp,
    /// The reply; or why there is none: what was asked may have happened, may happen yet, or never.
    pub(crate) answer: Result<Heard, String>,
}

impl fmt::Display for Call {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        const TOLD: [&str; 9] = [
            "claimed",
            "replayed",
            "changed",
            "status",
            "attempt",
            "external_id",
            "code",
            "processed_at",
            "lease_expires_at",
        ];
        write!(
            formatter,
            "{} to {}  {:<14} {}  ->",
            self.invoked.at.format("%H:%M:%S%.3f"),
            self.returned.at.format("%H:%M:%S%.3f"),
            self.process,
            self.request
        )?;
        match &self.answer {
            Err(why) => write!(formatter, " {why}"),
            Ok(heard) => {
                write!(formatter, " {}", heard.status)?;
                for name in TOLD {
                    if !heard.body[name].is_null() {
                        write!(formatter, " {name}={}", heard.body[name])?;
                    }
                }
                for event in heard.body["history"].as_array().into_iter().flatten() {
                    let text = |name: &str| event[name].as_str().unwrap_or("nobody");
                    let (happened, by) = (text("event"), text("claimant"));
                    write!(formatter, " [{} {happened} by {by}]", event["attempt"])?;
                }
                Ok(())
            }
        }
    }
}

/// Something that cannot be taken back was done for a key, such as a charge.
#[derive(Debug, Clone)]
pub(crate) struct Effect {
    pub(crate) key: String,
    pub(crate) process: String,
}

/// Everything that was asked and answered in a run.
#[derive(Default)]
pub(crate) struct Record {
    order: AtomicU64,
    calls: Mutex<BTreeMap<String, Vec<Call>>>,
    effects: Mutex<Vec<Effect>>,
}

impl Record {
    fn stamp(&self) -> Stamp {
        Stamp {
            order: self.order.fetch_add(1, Ordering::SeqCst),
            at: Utc::now(),
        }
    }

    /// Calls, on a connection of its own as n8n does, and records what came of it.
    pub(crate) fn call(
        &self,
        client: &Client,
        process: &str,
        request: &Request,
    ) -> Result<Heard, String> {
        let (method, path, body) = request.http();
        let headers = [
            ("Content-Type", "application/json"),
            ("Connection", "close"),
        ];
        let (headers, body) = match method {
            "GET" => (&headers[1..], String::new()),
            _ => (&headers[..], body.to_string()),
        };
        let invoked = self.stamp();
        let sent = client.try_send(method, &path, headers, body.as_bytes());
        let returned = self.stamp();
        let answer = match sent {
            Ok(reply) if reply.status < 500 => Ok(Heard {
                status: reply.status,
                body: reply.body,
            }),
            Ok(reply) => Err(format!(
                "{} {}",
                reply.status,
                reply.body["code"].as_str().unwrap_or("without a code")
            )),
            Err(ureq::Error::Timeout(_)) => Err("timed out".to_owned()),
            Err(_) => Err("connection broken".to_owned()),
        };
        let call = Call {
            process: process.to_owned(),
            request: request.clone(),
            invoked,
            returned,
            answer: answer.clone(),
        };
        let mut calls = self.calls.lock().unwrap();
        calls
            .entry(request.key().to_owned())
            .or_default()
            .push(call);
        answer
    }

    /// Records what cannot be taken back.
    pub(crate) fn effect(&self, key: &str, process: &str) {
        self.effects.lock().unwrap().push(Effect {
            key: key.to_owned(),
            process: process.to_owned(),
        });
    }

    /// The calls of each key, in the order in which they were made, and the effects.
    pub(crate) fn take(&self) -> (BTreeMap<String, Vec<Call>>, Vec<Effect>) {
        let mut calls = std::mem::take(&mut *self.calls.lock().unwrap());
        for calls in calls.values_mut() {
            calls.sort_by_key(|call| call.invoked.order);
        }
        (calls, std::mem::take(&mut *self.effects.lock().unwrap()))
    }
}
