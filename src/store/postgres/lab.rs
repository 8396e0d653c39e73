//! The lab, in a schema beside the service's.

use chrono::TimeDelta;
use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::sql_query;
use diesel::sql_types::{BigInt, Bool, Nullable, Text};

use super::connect::Server;
use super::{MIGRATION_LOCK, PostgresStore, Undo, act_all};
use crate::domain::act::Act;
use crate::store::lab::{
    ACCOUNTS, Account, COUNT_CHARGE, COUNT_PREVENTED, EMPTIED, GENERATION, LabStore, OPENING_CENTS,
    Payment, SUMS, Sum, TAKE, Told, Totals, Variant, WRITE_CHARGE, overcharge,
};
use crate::store::{StartError, StoreError, one_line};

/// The schema of the lab. It is named wherever rows are removed, so that a search path that is lost removes none of
/// the gate's.
const SCHEMA: &str = "dedup_gate_lab";

const TABLES: &str = "\
    CREATE TABLE IF NOT EXISTS lab_generation (generation BIGINT NOT NULL);
    INSERT INTO lab_generation SELECT 0 WHERE NOT EXISTS (SELECT FROM lab_generation);
    CREATE TABLE IF NOT EXISTS lab_keys (
        variant TEXT NOT NULL, idempotency_key TEXT NOT NULL,
        charges BIGINT NOT NULL DEFAULT 0, prevented BIGINT NOT NULL DEFAULT 0,
        PRIMARY KEY (variant, idempotency_key)
    );
    CREATE TABLE IF NOT EXISTS lab_accounts (
        variant TEXT NOT NULL, account TEXT NOT NULL,
        balance_cents BIGINT NOT NULL, overcharged_cents BIGINT NOT NULL,
        PRIMARY KEY (variant, account)
    );
    CREATE TABLE IF NOT EXISTS lab_charges (
        id TEXT PRIMARY KEY, variant TEXT NOT NULL, account TEXT NOT NULL, idempotency_key TEXT NOT NULL,
        amount_cents BIGINT NOT NULL, charged_at TIMESTAMPTZ NOT NULL DEFAULT now()
    );";

impl PostgresStore {
    /// Opens the lab of a database, which is made where there is none; the rest is as with [`PostgresStore::open`].
    ///
    /// # Errors
    ///
    /// The database is out of reach, does not let the schema be made, or stands behind a pooler in transaction
    /// mode, where no search path stays.
    pub fn open_lab(
        url: &str,
        is_pooled: Option<bool>,
        connections: u32,
        replay_window: TimeDelta,
    ) -> Result<Self, StartError> {
        let server = Server::new(url, is_pooled)?;
        if server.is_pooled() {
            return Err(StartError::Unusable(
                "LAB: the lab needs sessions of its own, and a pooler in transaction mode stands before the database: name the server itself in DATABASE_URL, or leave LAB out".into(),
            ));
        }
        make_schema(&server)?;
        let url = with_search_path(url);
        let in_schema = Server::new(&url, Some(false))?;
        in_transaction(&in_schema, |connection| {
            let schema: Option<String> = diesel::select(sql::<Nullable<Text>>("current_schema()::text"))
                .get_result(connection)?;
            if schema.as_deref() == Some(SCHEMA) {
                connection.batch_execute(TABLES)?;
            }
            Ok(schema)
        })
        .and_then(|schema| match schema.as_deref() {
            Some(SCHEMA) => Ok(()),
            _ => Err(StartError::Unusable(
                "LAB: what stands before the database does not pass on `options`, by which the lab finds its schema: name the server itself in DATABASE_URL, or leave LAB out".into(),
            )),
        })?;
        Self::open(&url, Some(false), connections, replay_window)
    }
}

fn make_schema(server: &Server) -> Result<(), StartError> {
    let (is_gate_in_it, is_others) = in_transaction(server, |connection| {
        // Making it asks for more rights than using it.
        connection.batch_execute(&format!(
            "DO $$ BEGIN IF to_regnamespace('{SCHEMA}') IS NULL THEN CREATE SCHEMA {SCHEMA}; END IF; END $$"
        ))?;
        // A gate without the lab's tables is somebody's, whose keys a reset would forget.
        diesel::select((
            sql::<Bool>(&format!("coalesce(current_schema() = '{SCHEMA}', false)")),
            sql::<Bool>(&format!(
                "to_regclass('{SCHEMA}.processed_orders') IS NOT NULL AND to_regclass('{SCHEMA}.lab_generation') IS NULL"
            )),
        ))
        .get_result(connection)
    })?;
    if is_gate_in_it || is_others {
        return Err(StartError::Unusable(format!(
            "LAB: the schema {SCHEMA} is the lab's, and holds the tables of a gate: name another for that in DATABASE_URL, or leave LAB out"
        )));
    }
    Ok(())
}

/// Runs `work` while no other replica starts.
fn in_transaction<T>(
    server: &Server,
    work: impl FnOnce(&mut PgConnection) -> QueryResult<T>,
) -> Result<T, StartError> {
    let mut connection = server
        .connect()
        .map_err(|error| StartError::Unavailable(one_line(&error.to_string())))?;
    connection
        .transaction(|connection| {
            connection.batch_execute("SET LOCAL lock_timeout = '20s'")?;
            sql_query("SELECT pg_advisory_xact_lock($1)")
                .bind::<BigInt, _>(MIGRATION_LOCK)
                .execute(connection)?;
            work(connection)
        })
        .map_err(|error| {
            StartError::Unusable(format!(
                "LAB: cannot make the schema {SCHEMA} and its tables: {}",
                one_line(&error.to_string())
            ))
        })
}

/// The URL with the lab's schema as its search path. Of a setting that is named twice the last one counts.
fn with_search_path(url: &str) -> String {
    let option = format!("-csearch_path%3D{SCHEMA}");
    let Some((base, query)) = url.split_once('?') else {
        return format!("{url}?options={option}");
    };
    let mut is_merged = false;
    let mut pairs: Vec<String> = query
        .split('&')
        .map(|pair| {
            let is_options = pair.starts_with("options=");
            is_merged |= is_options;
            match is_options {
                true => format!("{pair}%20{option}"),
                false => pair.to_owned(),
            }
        })
        .collect();
    if !is_merged {
        pairs.push(format!("options={option}"));
    }
    format!("{base}?{}", pairs.join("&"))
}

fn take(
    connection: &mut PgConnection,
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

impl LabStore for PostgresStore {
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
            // In one statement, which lets nobody come between: a key is in all of them or in none.
            let tables = EMPTIED.map(|table| format!("{SCHEMA}.{table}")).join(", ");
            connection.batch_execute(&format!("TRUNCATE {tables}"))?;
            Ok(connection.batch_execute(&format!(
                "UPDATE {SCHEMA}.lab_generation SET generation = generation + 1"
            ))?)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_are_there_already_are_kept() {
        let path = "-csearch_path%3Ddedup_gate_lab";
        for (url, expected) in [
            ("postgres://h/d", format!("postgres://h/d?options={path}")),
            (
                "postgres://h/d?sslmode=require",
                format!("postgres://h/d?sslmode=require&options={path}"),
            ),
            (
                "postgres://h/d?options=-csearch_path%3Dgate&sslmode=require",
                format!("postgres://h/d?options=-csearch_path%3Dgate%20{path}&sslmode=require"),
            ),
        ] {
            assert_eq!(with_search_path(url), expected);
        }
    }
}
