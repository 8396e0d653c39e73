//! What the lab keeps: accounts that are charged, with a key and without one.
//!
//! It stands beside tables of the gate and the ledger that are the lab's own, in a schema
//! or a file of its own, so that nothing here can touch what callers claim.

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Text};

use super::StoreError;
use crate::domain::act::Act;
use crate::domain::text::IdempotencyKey;

/// What every account holds before its first charge, in cents.
pub const OPENING_CENTS: i64 = 20_000;

/// How an attempt decides whether to charge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Variant {
    /// It just does.
    Unsafe,
    /// A map in the memory of the process has not seen the key.
    InMemory,
    /// The gate says so.
    Idempotent,
}

impl Variant {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Unsafe, Self::InMemory, Self::Idempotent];

    /// Its name in rows and replies.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unsafe => "unsafe",
            Self::InMemory => "in_memory",
            Self::Idempotent => "idempotent",
        }
    }
}

/// A payment that is wanted once.
#[derive(Debug, Clone, PartialEq)]
pub struct Payment {
    /// Names it.
    pub key: IdempotencyKey,
    /// Who pays. An account of each variant has this name.
    pub account: String,
    /// How much, in cents.
    pub amount_cents: i64,
}

/// What was taken for one key, by one variant, since the lab was emptied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Totals {
    /// How often it was charged.
    pub charges: i64,
    /// What the account holds now, in cents; below zero where more was taken than there was.
    pub balance_cents: i64,
}

/// An account of a variant.
#[derive(Debug, Clone, PartialEq, Eq, QueryableByName)]
pub struct Account {
    /// [`Variant::name`].
    #[diesel(sql_type = Text)]
    pub variant: String,
    /// Who pays.
    #[diesel(sql_type = Text)]
    pub account: String,
    /// What it holds, in cents.
    #[diesel(sql_type = BigInt)]
    pub balance_cents: i64,
    /// How much was taken by charges after the first one of their key, in cents.
    #[diesel(sql_type = BigInt)]
    pub overcharged_cents: i64,
}

/// All that was done by one variant, where it did anything.
#[derive(Debug, Clone, PartialEq, Eq, QueryableByName)]
pub struct Sum {
    /// [`Variant::name`].
    #[diesel(sql_type = Text)]
    pub variant: String,
    /// How many keys.
    #[diesel(sql_type = BigInt)]
    pub keys: i64,
    /// How many charges.
    #[diesel(sql_type = BigInt)]
    pub charges: i64,
    /// How many attempts did not charge.
    #[diesel(sql_type = BigInt)]
    pub prevented: i64,
    /// What was taken, in cents.
    #[diesel(sql_type = BigInt)]
    pub charged_cents: i64,
    /// How much of it by charges after the first one of their key, in cents.
    #[diesel(sql_type = BigInt)]
    pub overcharged_cents: i64,
}

/// The lab's part of a database. Every call is one transaction, as those of [`super::Store`] are.
pub trait LabStore: Send + Sync {
    /// How often the lab was emptied.
    ///
    /// # Errors
    ///
    /// The database could not do it.
    fn generation(&self) -> Result<i64, StoreError>;

    /// Takes the amount from the variant's account and writes down the charge `id`; says which of its key's
    /// charges it is, from 1. With `report`, which tells the lab's ledger, both happen or neither: none where
    /// the report is refused.
    ///
    /// # Errors
    ///
    /// The database could not do it.
    fn charge(
        &self,
        variant: Variant,
        id: &str,
        payment: &Payment,
        report: Option<&Act>,
    ) -> Result<Option<i64>, StoreError>;

    /// Counts attempts that did not charge, and says what was taken by now.
    ///
    /// # Errors
    ///
    /// The database could not do it.
    fn conclude(
        &self,
        variant: Variant,
        payment: &Payment,
        prevented: i64,
    ) -> Result<Totals, StoreError>;

    /// The accounts of this name, or all of them by their names, a hundred at most.
    ///
    /// # Errors
    ///
    /// The database could not do it.
    fn accounts(&self, account: Option<&str>) -> Result<Vec<Account>, StoreError>;

    /// The sums by variant.
    ///
    /// # Errors
    ///
    /// The database could not do it.
    fn sums(&self) -> Result<Vec<Sum>, StoreError>;

    /// Empties the lab, and begins its next generation.
    ///
    /// # Errors
    ///
    /// The database could not do it.
    fn reset(&self) -> Result<(), StoreError>;
}

// Both databases read these. SQLite numbers what is named `$1` by where it stands first, so they stand in order.

pub(super) const GENERATION: &str = "SELECT generation AS number FROM lab_generation";

/// Counts a charge of a key. The row is locked by it, so that charges are counted one after the other.
pub(super) const COUNT_CHARGE: &str = "\
    INSERT INTO lab_keys (variant, idempotency_key, charges) VALUES ($1, $2, 1) \
    ON CONFLICT (variant, idempotency_key) DO UPDATE SET charges = lab_keys.charges + 1 \
    RETURNING charges AS number";

pub(super) const COUNT_PREVENTED: &str = "\
    INSERT INTO lab_keys (variant, idempotency_key, prevented) VALUES ($1, $2, $3) \
    ON CONFLICT (variant, idempotency_key) DO UPDATE SET prevented = lab_keys.prevented + excluded.prevented \
    RETURNING charges AS number";

/// Opens the account or takes from it: variant, account, what it holds if it is opened now, what is taken, and how
/// much of that is too much.
pub(super) const TAKE: &str = "\
    INSERT INTO lab_accounts (variant, account, balance_cents, overcharged_cents) VALUES ($1, $2, $3 - $4, $5) \
    ON CONFLICT (variant, account) DO UPDATE SET \
        balance_cents = lab_accounts.balance_cents - $4, \
        overcharged_cents = lab_accounts.overcharged_cents + $5 \
    RETURNING balance_cents AS number";

pub(super) const WRITE_CHARGE: &str = "\
    INSERT INTO lab_charges (id, variant, account, idempotency_key, amount_cents) VALUES ($1, $2, $3, $4, $5)";

/// Of one account, or of all where it is empty, which no name is.
pub(super) const ACCOUNTS: &str = "\
    SELECT variant, account, balance_cents, overcharged_cents FROM lab_accounts \
    WHERE $1 = '' OR account = $1 ORDER BY account, variant LIMIT 100";

// `sum` of Postgres is numeric.
pub(super) const SUMS: &str = "\
    SELECT variant, count(*) AS keys, CAST(sum(charges) AS BIGINT) AS charges, \
        CAST(sum(prevented) AS BIGINT) AS prevented, \
        CAST(coalesce((SELECT sum(amount_cents) FROM lab_charges \
            WHERE lab_charges.variant = lab_keys.variant), 0) AS BIGINT) AS charged_cents, \
        CAST(coalesce((SELECT sum(overcharged_cents) FROM lab_accounts \
            WHERE lab_accounts.variant = lab_keys.variant), 0) AS BIGINT) AS overcharged_cents \
    FROM lab_keys GROUP BY variant ORDER BY variant";

/// Every table with rows that come and go.
pub(super) const EMPTIED: [&str; 7] = [
    "processed_orders",
    "run_ledger",
    "run_history",
    "run_outbox",
    "lab_keys",
    "lab_accounts",
    "lab_charges",
];

/// A number that a statement tells.
#[derive(QueryableByName)]
pub(super) struct Told {
    #[diesel(sql_type = BigInt)]
    pub(super) number: i64,
}

/// How much of the charge that is this one of its key is too much.
pub(super) fn overcharge(payment: &Payment, number: i64) -> i64 {
    if number > 1 { payment.amount_cents } else { 0 }
}
