//! The lab: several attempts at one payment at once, as retries make them, with and without a key.
//!
//! It has a gate of its own, of the same code, before a store of its own: nothing that it does is seen by
//! those who claim at the service's gate, nor counted in its metrics.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::join_all;
use serde_json::json;
use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::domain::act::Act;
use crate::domain::claim::{Claim, Door, KeyReused, OnStale};
use crate::domain::effect::{Due, Effect};
use crate::domain::ledger::{Holder, Outcome, Report};
use crate::domain::text::IdempotencyKey;
use crate::gate::{Gate, GateError};
use crate::store::lab::{Account, LabStore, Payment, Sum, Totals, Variant};
use crate::store::{Filter, Page};

/// For how long a payment that is sent again counts as a repeat, in seconds.
pub const WINDOW_SECONDS: u32 = 86_400;

/// How long a charge may take, in seconds. It may be taken over then, since it is made with its report or not at
/// all: what has no report was not charged.
const LEASE_SECONDS: u32 = 30;

/// The topic of the effect that follows from a charge.
pub const RECEIPT: &str = "lab.receipt";

/// How many of the keys that are held are listed.
const LISTED: u32 = 100;

/// Charges accounts that nobody has, once or more often.
pub struct Lab {
    gate: Arc<Gate>,
    store: Arc<dyn LabStore>,
    seen: Mutex<Seen>,
    /// What its own deliveries know, and nobody else.
    token: String,
}

/// The keys that this process has seen, and in which generation of the lab.
#[derive(Default)]
struct Seen {
    generation: i64,
    keys: HashSet<IdempotencyKey>,
}

/// What the attempts of a call came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Charged {
    /// How many of them charged.
    pub charges: i64,
    /// How many did not.
    pub prevented: i64,
    /// How many of the charges were not the first one of their key.
    pub overcharges: i64,
    /// What it comes to with all calls before.
    pub totals: Totals,
}

/// What the lab holds.
#[derive(Debug)]
pub struct Held {
    /// The keys that its gate holds, newest change first.
    pub keys: Page,
    /// How many keys are in the memory of this process.
    pub in_memory: usize,
    /// Its accounts.
    pub accounts: Vec<Account>,
}

/// Why a payment was not tried.
#[derive(Debug, Clone, thiserror::Error)]
pub enum LabError {
    /// The key belongs to another payment: of another account, or another amount.
    #[error("the key was charged with another account or amount")]
    KeyReused,
    /// There is no answer.
    #[error(transparent)]
    Gate(#[from] GateError),
}

impl Lab {
    /// A lab with this gate, which stands before `store`.
    pub fn new(gate: Arc<Gate>, store: Arc<dyn LabStore>) -> Self {
        Self {
            gate,
            store,
            seen: Mutex::default(),
            token: Uuid::new_v4().simple().to_string(),
        }
    }

    /// What stands in the path of its receiver, so that none but this process can deliver there.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// The gate of the lab, which nobody else claims at.
    pub fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    /// Tries a payment so many times, at once. `api_key` is the name of the caller's.
    ///
    /// # Errors
    ///
    /// The key is reused, or an attempt has no answer; the others may have charged then.
    pub async fn charge(
        &self,
        variant: Variant,
        payment: Payment,
        attempts: u32,
        api_key: Option<String>,
    ) -> Result<Charged, LabError> {
        let call = fastrand::u128(..);
        let claimant = |attempt| Holder {
            claimant: format!("{call:032x}:{attempt}"),
            api_key: api_key.clone(),
        };
        let charged = match variant {
            Variant::Unsafe => {
                let attempt = |_| self.apply(variant, charge_id(), &payment, None);
                join_all((0..attempts).map(attempt)).await
            }
            Variant::InMemory => {
                let generation = self.generation().await?;
                let attempt = |_| self.charge_unless_seen(generation, &payment);
                join_all((0..attempts).map(attempt)).await
            }
            Variant::Idempotent => {
                let attempt = |attempt| self.charge_if_claimed(&payment, claimant(attempt));
                join_all((0..attempts).map(attempt)).await
            }
        };
        let charged: Vec<Option<i64>> = charged.into_iter().collect::<Result<_, _>>()?;
        let numbers = || charged.iter().flatten();
        let charges = count(numbers());
        let prevented = count(&charged) - charges;
        let store = Arc::clone(&self.store);
        let conclude = move || store.conclude(variant, &payment, prevented);
        Ok(Charged {
            charges,
            prevented,
            overcharges: count(numbers().filter(|number| **number > 1)),
            totals: self.gate.beside("lab_conclude", conclude).await?,
        })
    }

    /// As naive services do: what another process has seen, this one has not. A key stays seen even where its
    /// charge fails.
    async fn charge_unless_seen(
        &self,
        generation: i64,
        payment: &Payment,
    ) -> Result<Option<i64>, LabError> {
        let is_first = {
            let mut seen = self.seen(generation);
            seen.keys.insert(payment.key.clone())
        };
        if !is_first {
            return Ok(None);
        }
        self.apply(Variant::InMemory, charge_id(), payment, None)
            .await
    }

    /// Claims the payment as any caller of the gate would. Who wins charges, reports it and stores the receipt
    /// that is to be sent, in one transaction.
    async fn charge_if_claimed(
        &self,
        payment: &Payment,
        holder: Holder,
    ) -> Result<Option<i64>, LabError> {
        let what = format!("{} {}", payment.amount_cents, payment.account);
        let claim = Claim {
            key: payment.key.clone(),
            order_id: None,
            holder: Some(holder.clone()),
            ttl_seconds: Some(WINDOW_SECONDS),
            payload_sha256: Some(Sha256::digest(what).to_vec()),
            pending: Some(LEASE_SECONDS),
            on_stale: OnStale::TakeOver,
            door: Door::Gate,
        };
        let verdict = self.gate.claim(claim).await?;
        let verdict = verdict.map_err(|KeyReused| LabError::KeyReused)?;
        if !verdict.claimed {
            return Ok(None);
        }
        let id = charge_id();
        let charge = json!({
            "charge_id": id, "account": payment.account, "amount_cents": payment.amount_cents
        });
        let receipt = Effect {
            id: format!("msg_{}", Uuid::now_v7().simple()),
            topic: RECEIPT.to_owned(),
            payload: charge.to_string(),
            due: Due::Now,
        };
        let report = Act::Report(Report {
            key: payment.key.clone(),
            attempt: Some(verdict.state.attempt),
            holder: Some(holder),
            outcome: Outcome::Done {
                external_id: Some(id.clone()),
                result: Some(charge),
            },
            effects: vec![receipt],
        });
        let applied = self
            .apply(Variant::Idempotent, id, payment, Some(report))
            .await?;
        self.gate.note_effects();
        Ok(applied)
    }

    /// Takes the effect of this name, and says whether it is the first time: by claiming it, at least one delivery
    /// becomes one.
    ///
    /// # Errors
    ///
    /// There is no answer; it is delivered again then.
    pub async fn receive(&self, id: IdempotencyKey) -> Result<bool, GateError> {
        let claim = Claim {
            key: id,
            order_id: None,
            holder: None,
            ttl_seconds: Some(WINDOW_SECONDS),
            payload_sha256: None,
            pending: None,
            on_stale: OnStale::Hold,
            door: Door::Gate,
        };
        Ok(self
            .gate
            .claim(claim)
            .await?
            .is_ok_and(|verdict| verdict.claimed))
    }

    /// Charges; with a report of it, both in one transaction.
    async fn apply(
        &self,
        variant: Variant,
        id: String,
        payment: &Payment,
        report: Option<Act>,
    ) -> Result<Option<i64>, LabError> {
        let (store, payment) = (Arc::clone(&self.store), payment.clone());
        let charge = move || store.charge(variant, &id, &payment, report.as_ref());
        Ok(self.gate.beside("lab_charge", charge).await?)
    }

    /// What the lab holds: all accounts, or those of one name.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn held(&self, account: Option<String>) -> Result<Held, GateError> {
        let generation = self.generation().await?;
        let in_memory = self.seen(generation).keys.len();
        let store = Arc::clone(&self.store);
        let filter = Filter {
            limit: LISTED,
            ..Filter::default()
        };
        Ok(Held {
            keys: self.gate.list(filter).await?,
            in_memory,
            accounts: self
                .gate
                .beside("lab_accounts", move || store.accounts(account.as_deref()))
                .await?,
        })
    }

    /// The sums by variant; none of those that did nothing.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn sums(&self) -> Result<Vec<Sum>, GateError> {
        let store = Arc::clone(&self.store);
        self.gate.beside("lab_sums", move || store.sums()).await
    }

    /// Empties the lab, on all replicas.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn reset(&self) -> Result<(), GateError> {
        let store = Arc::clone(&self.store);
        self.gate.beside("lab_reset", move || store.reset()).await
    }

    async fn generation(&self) -> Result<i64, GateError> {
        let store = Arc::clone(&self.store);
        self.gate
            .beside("lab_generation", move || store.generation())
            .await
    }

    /// What this process has seen: nothing yet, where the lab was emptied since.
    fn seen(&self, generation: i64) -> std::sync::MutexGuard<'_, Seen> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.generation < generation {
            *seen = Seen {
                generation,
                keys: HashSet::new(),
            };
        }
        seen
    }
}

fn charge_id() -> String {
    format!("ch_{:032x}", fastrand::u128(..))
}

fn count<T>(items: impl IntoIterator<Item = T>) -> i64 {
    i64::try_from(items.into_iter().count()).unwrap_or(i64::MAX)
}
