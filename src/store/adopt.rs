//! Whether tables that exist before the migration that makes them can be adopted.

use diesel::prelude::*;
use diesel::sql_types::{Bool, Text};

/// What a column holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Text,
    Time,
    Integer,
    BigInt,
    Bool,
    Bytes,
}

/// A column that the service uses.
pub(super) struct Expected {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    nullable: bool,
    /// Whether the migration adds it to a table that lacks it.
    added: bool,
}

/// A table that the service uses.
pub(super) struct Table {
    pub(super) name: &'static str,
    /// The version of the migration that makes it.
    migration: &'static str,
    pub(super) columns: &'static [Expected],
    /// The columns of its primary key.
    pub(super) key: &'static [&'static str],
}

/// A column that is there.
#[derive(QueryableByName)]
pub(super) struct Column {
    #[diesel(sql_type = Text)]
    name: String,
    #[diesel(sql_type = Text)]
    type_name: String,
    #[diesel(sql_type = Bool)]
    not_null: bool,
    #[diesel(sql_type = Bool)]
    has_default: bool,
}

/// A constraint or unique index that is there, and could refuse a row.
#[derive(QueryableByName)]
pub(super) struct Constraint {
    #[diesel(sql_type = Text)]
    name: String,
    /// Whether it makes the columns of the key unique, compared byte by byte.
    #[diesel(sql_type = Bool)]
    is_key: bool,
}

/// A table that is there.
pub(super) struct Existing {
    pub(super) columns: Vec<Column>,
    pub(super) constraints: Vec<Constraint>,
}

/// How a database names and changes things.
pub(super) struct Dialect {
    /// Whether a column declared so holds that kind.
    pub(super) fits: fn(&str, Kind) -> bool,
    /// Whether a column that the migration adds may be there already.
    pub(super) adds_if_missing: bool,
    /// Whether the columns of a primary key are not said to be NOT NULL by themselves.
    pub(super) keys_look_nullable: bool,
}

const fn column(name: &'static str, kind: Kind, nullable: bool) -> Expected {
    Expected {
        name,
        kind,
        nullable,
        added: false,
    }
}

const fn added(name: &'static str, kind: Kind, nullable: bool) -> Expected {
    Expected {
        name,
        kind,
        nullable,
        added: true,
    }
}

/// The version of the first migration.
const FIRST: &str = "20261130000001";

/// All tables.
const TABLES: [Table; 4] = [
    Table {
        name: "processed_orders",
        migration: FIRST,
        columns: &[
            column("idempotency_key", Kind::Text, false),
            column("order_id", Kind::Text, false),
            column("processed_at", Kind::Time, false),
            added("attempt", Kind::Integer, false),
            added("claimant", Kind::Text, true),
            added("api_key", Kind::Text, true),
            added("payload_sha256", Kind::Bytes, true),
            added("ttl_seconds", Kind::Integer, true),
            added("expires_at", Kind::Time, true),
            added("in_ledger", Kind::Bool, false),
            added("seen_again", Kind::BigInt, false),
            added("last_seen_at", Kind::Time, true),
        ],
        key: &["idempotency_key"],
    },
    Table {
        name: "run_ledger",
        migration: FIRST,
        columns: &[
            column("idempotency_key", Kind::Text, false),
            column("order_id", Kind::Text, false),
            column("status", Kind::Text, false),
            column("attempt", Kind::Integer, false),
            column("claimant", Kind::Text, true),
            column("api_key", Kind::Text, true),
            column("processed_at", Kind::Time, false),
            column("recognised_from", Kind::Time, false),
            column("payload_sha256", Kind::Bytes, true),
            column("ttl_seconds", Kind::Integer, true),
            column("expires_at", Kind::Time, true),
            column("lease_expires_at", Kind::Time, true),
            column("external_id", Kind::Text, true),
            column("result", Kind::Text, true),
            column("reason", Kind::Text, true),
            column("retry", Kind::Bool, true),
            column("conflict", Kind::Bool, false),
            column("updated_at", Kind::Time, false),
        ],
        key: &["idempotency_key"],
    },
    Table {
        name: "run_history",
        migration: FIRST,
        columns: &[
            column("idempotency_key", Kind::Text, false),
            column("seq", Kind::Integer, false),
            column("at", Kind::Time, false),
            column("event", Kind::Text, false),
            column("attempt", Kind::Integer, false),
            column("claimant", Kind::Text, true),
            column("api_key", Kind::Text, true),
            column("detail", Kind::Text, true),
        ],
        key: &["idempotency_key", "seq"],
    },
    Table {
        name: "run_outbox",
        migration: "20261201000004",
        columns: &[
            column("idempotency_key", Kind::Text, false),
            column("seq", Kind::Integer, false),
            column("id", Kind::Text, false),
            column("topic", Kind::Text, false),
            column("payload", Kind::Text, false),
            column("status", Kind::Text, false),
            column("created_at", Kind::Time, false),
            column("due_at", Kind::Time, false),
            column("next_at", Kind::Time, false),
            column("is_leased", Kind::Bool, false),
            column("tries", Kind::Integer, false),
            column("failures", Kind::Integer, false),
            column("settled_at", Kind::Time, true),
            column("log", Kind::Text, false),
        ],
        key: &["idempotency_key", "seq"],
    },
];

/// Those that are still to be made.
pub(super) fn tables_to_come(applied: &[String]) -> impl Iterator<Item = &'static Table> {
    TABLES
        .iter()
        .filter(|table| !applied.iter().any(|version| version == table.migration))
}

/// What keeps a table from being adopted; none: nothing does.
pub(super) fn fault(table: &Table, existing: &Existing, dialect: &Dialect) -> Option<String> {
    let find = |name: &str| existing.columns.iter().find(|column| column.name == name);
    let mut faults = Vec::new();
    for expected in table.columns {
        let name = expected.name;
        match find(name) {
            None if expected.added => {}
            None => faults.push(format!("it lacks the column {name} ({:?})", expected.kind)),
            Some(_) if expected.added && !dialect.adds_if_missing => {
                faults.push(format!("it has a column {name} already"));
            }
            Some(column) => {
                if !(dialect.fits)(&column.type_name, expected.kind) {
                    faults.push(format!(
                        "its column {name} is {}, not {:?}",
                        column.type_name, expected.kind
                    ));
                }
                if expected.nullable && column.not_null {
                    faults.push(format!("its column {name} is NOT NULL"));
                }
                let looks_nullable = dialect.keys_look_nullable && table.key.contains(&name);
                if !expected.nullable && !column.not_null && !looks_nullable {
                    faults.push(format!("its column {name} may be NULL"));
                }
                if expected.added && column.not_null && !column.has_default {
                    faults.push(format!("its column {name} has no default"));
                }
            }
        }
    }
    for column in &existing.columns {
        let is_ours = table.columns.iter().any(|ours| ours.name == column.name);
        if !is_ours && column.not_null && !column.has_default {
            faults.push(format!(
                "its column {} is NOT NULL without a default",
                column.name
            ));
        }
    }
    if !existing.constraints.iter().any(|found| found.is_key) {
        faults.push(format!(
            "it lacks a primary key on ({}), compared byte by byte",
            table.key.join(", ")
        ));
    }
    let constraints: Vec<&str> = existing
        .constraints
        .iter()
        .filter(|found| !found.is_key)
        .map(|found| found.name.as_str())
        .collect();
    if !constraints.is_empty() {
        faults.push(format!(
            "it has constraints of its own: {}",
            constraints.join(", ")
        ));
    }
    (!faults.is_empty()).then(|| {
        format!(
            "the table {} that exists already cannot be adopted: {}; nothing was changed",
            table.name,
            faults.join("; ")
        )
    })
}
