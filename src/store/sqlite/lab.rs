//! The lab, in a file beside the service's.

use chrono::TimeDelta;
use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_query;
use diesel::sql_types::{BigInt, Bool, Text};
use diesel::sqlite::SqliteConnection;

use super::{SqliteStore, Undo, act_all, busy_timeout};
use crate::domain::act::Act;
use crate::store::lab::{
    ACCOUNTS, Account, COUNT_CHARGE, COUNT_PREVENTED, EMPTIED, GENERATION, LabStore, OPENING_CENTS,
    Payment, SUMS, Sum, TAKE, Told, Totals, Variant, WRITE_CHARGE, overcharge,
};
use crate::store::{StartError, StoreError};

const TABLES: &str = "\
    CREATE TABLE IF NOT EXISTS lab_generation (generation INTEGER NOT NULL);
    INSERT INTO lab_generation SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM lab_generation);
    CREATE TABLE IF NOT EXISTS lab_keys (
        variant TEXT NOT NULL, idempotency_key TEXT NOT NULL,
        charges INTEGER NOT NULL DEFAULT 0, prevented INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (variant, idempotency_key)
    );
    CREATE TABLE IF NOT EXISTS lab_accounts (
        variant TEXT NOT NULL, account TEXT NOT NULL,
        balance_cents INTEGER NOT NULL, overcharged_cents INTEGER NOT NULL,
        PRIMARY KEY (variant, account)
    );
    CREATE TABLE IF NOT EXISTS lab_charges (
        id TEXT PRIMARY KEY, variant TEXT NOT NULL, account TEXT NOT NULL, idempotency_key TEXT NOT NULL,
        amount_cents INTEGER NOT NULL, charged_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))
    );";

impl SqliteStore {
    /// Opens the lab of the file at `path`: a file of its own, named like it with `-lab` behind.
    ///
    /// # Errors
    ///
    /// See [`SqliteStore::open`].
    pub fn open_lab(path: &str, replay_window: TimeDelta) -> Result<Self, StartError> {
        let path = format!("{path}-lab");
        let unusable = |error: &dyn std::fmt::Display| {
            StartError::Unusable(format!("cannot use the SQLite file {path}: {error}"))
        };
        if !make_tables(&path).map_err(|error| unusable(&error))? {
            return Err(StartError::Unusable(format!(
                "LAB: the SQLite file {path} is the lab's, and holds a gate: name another in DATABASE_URL, or leave LAB out"
            )));
        }
        Self::open(&path, replay_window)
    }
}

/// Makes the lab's tables, unless the file holds a gate without them: that is somebody's, whose keys a reset would
/// forget.
fn make_tables(path: &str) -> Result<bool, Box<dyn std::error::Error>> {
    let mut connection = SqliteConnection::establish(path)?;
    connection.batch_execute(&busy_timeout())?;
    let is_ours = connection.immediate_transaction(|connection| {
        let has = |table: &str| {
            sql::<Bool>(&format!(
                "EXISTS (SELECT 1 FROM sqlite_master WHERE name = '{table}')"
            ))
        };
        let (has_gate, has_lab): (bool, bool) =
            diesel::select((has("processed_orders"), has("lab_generation")))
                .get_result(connection)?;
        if has_lab || !has_gate {
            connection.batch_execute(TABLES)?;
        }
        QueryResult::Ok(has_lab || !has_gate)
    })?;
    Ok(is_ours)
}

fn take(
    connection: &mut SqliteConnection,
    variant: Variant,
    account: &str,
    cents: i64,
    overcharged: i64,
) -> QueryResult<i64> {
    let told: Told = sql_query(TAKE)
        .bind::<Text, _>(variant.name())
        .bind::<Text, _>(account)
        .bind::<BigInt, _>(OPENING_CENTS)
        .bind::<BigInt, _>(cents)
        .bind::<BigInt, _>(overcharged)
        .get_result(connection)?;
    Ok(told.number)
}

impl LabStore for SqliteStore {
    fn generation(&self) -> Result<i64, StoreError> {
        self.read(|connection| {
            let told: Told = sql_query(GENERATION).get_result(connection)?;
            Ok(told.number)
        })
    }

    fn charge(
        &self,
        variant: Variant,
        id: &str,
        payment: &Payment,
        report: Option<&Act>,
    ) -> Result<Option<i64>, StoreError> {
        self.transact(|connection| {
            if let Some(report) = report {
                let acted = act_all(connection, std::slice::from_ref(report))?.remove(0);
                if acted.is_none_or(|acted| acted.answer != Ok(true)) {
                    return Err(Undo::Answer(Box::new(None)));
                }
            }
            let told: Told = sql_query(COUNT_CHARGE)
                .bind::<Text, _>(variant.name())
                .bind::<Text, _>(payment.key.as_str())
                .get_result(connection)?;
            let overcharged = overcharge(payment, told.number);
            take(
                connection,
                variant,
                &payment.account,
                payment.amount_cents,
                overcharged,
            )?;
            sql_query(WRITE_CHARGE)
                .bind::<Text, _>(id)
                .bind::<Text, _>(variant.name())
                .bind::<Text, _>(&payment.account)
                .bind::<Text, _>(payment.key.as_str())
                .bind::<BigInt, _>(payment.amount_cents)
                .execute(connection)?;
            Ok(Some(told.number))
        })
    }

    fn conclude(
        &self,
        variant: Variant,
        payment: &Payment,
        prevented: i64,
    ) -> Result<Totals, StoreError> {
        self.transact(|connection| {
            let told: Told = sql_query(COUNT_PREVENTED)
                .bind::<Text, _>(variant.name())
                .bind::<Text, _>(payment.key.as_str())
                .bind::<BigInt, _>(prevented)
                .get_result(connection)?;
            Ok(Totals {
                charges: told.number,
                balance_cents: take(connection, variant, &payment.account, 0, 0)?,
            })
        })
    }

    fn accounts(&self, account: Option<&str>) -> Result<Vec<Account>, StoreError> {
        self.read(|connection| {
            Ok(sql_query(ACCOUNTS)
                .bind::<Text, _>(account.unwrap_or_default())
                .load(connection)?)
        })
    }

    fn sums(&self) -> Result<Vec<Sum>, StoreError> {
        self.read(|connection| Ok(sql_query(SUMS).load(connection)?))
    }

    fn reset(&self) -> Result<(), StoreError> {
        self.transact(|connection| {
            for table in EMPTIED {
                connection.batch_execute(&format!("DELETE FROM {table}"))?;
            }
            Ok(
                connection
                    .batch_execute("UPDATE lab_generation SET generation = generation + 1")?,
            )
        })
    }
}
