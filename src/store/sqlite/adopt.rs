//! Looks at tables that exist before the first migration.

use diesel::prelude::*;
use diesel::sql_types::{Bool, Text};
use diesel::sqlite::SqliteConnection;

use super::super::adopt::{Column, Dialect, Existing, Kind, TABLES, Table, fault as fault_of};

const DIALECT: Dialect = Dialect {
    fits,
    adds_if_missing: false,
    keys_look_nullable: true,
};

/// Texts must have the affinity TEXT, else SQLite takes "007" and "7" for one number. It reads
/// the other kinds from a column of any declaration.
fn fits(type_name: &str, kind: Kind) -> bool {
    let declared = type_name.to_ascii_uppercase();
    kind != Kind::Text
        || ["CHAR", "CLOB", "TEXT"]
            .iter()
            .any(|text| declared.contains(text))
            && !declared.contains("INT")
}

#[derive(QueryableByName)]
struct ColumnRow {
    #[diesel(sql_type = Text)]
    name: String,
    #[diesel(sql_type = Text)]
    type_name: String,
    #[diesel(sql_type = Bool)]
    not_null: bool,
    #[diesel(sql_type = Bool)]
    has_default: bool,
}

#[derive(QueryableByName)]
struct ConstraintRow {
    #[diesel(sql_type = Text)]
    name: String,
    #[diesel(sql_type = Bool)]
    is_key: bool,
}

/// What keeps the tables of the file from being adopted; none: nothing does.
pub(super) fn fault(connection: &mut SqliteConnection) -> QueryResult<Option<String>> {
    for table in &TABLES {
        let existing = existing(connection, table)?;
        if let Some(fault) = existing.and_then(|existing| fault_of(table, &existing, &DIALECT)) {
            return Ok(Some(format!(
                "{fault}. To use another file, set DATABASE_URL=sqlite:PATH"
            )));
        }
    }
    Ok(None)
}

fn existing(connection: &mut SqliteConnection, table: &Table) -> QueryResult<Option<Existing>> {
    let columns: Vec<ColumnRow> = diesel::sql_query(
        "SELECT name, type AS type_name, \"notnull\" AS not_null, \
             dflt_value IS NOT NULL AS has_default \
         FROM pragma_table_info(?)",
    )
    .bind::<Text, _>(table.name)
    .load(connection)?;
    if columns.is_empty() {
        return Ok(None);
    }
    let constraints: Vec<ConstraintRow> = diesel::sql_query(
        "SELECT list.name AS name, \
             NOT list.partial AND (SELECT group_concat(info.name) || '' \
                 FROM pragma_index_xinfo(list.name) AS info WHERE info.key) = ? \
             AND NOT EXISTS (SELECT 1 FROM pragma_index_xinfo(list.name) AS info \
                 WHERE info.key AND info.coll <> 'BINARY') AS is_key \
         FROM pragma_index_list(?) AS list WHERE list.\"unique\"",
    )
    .bind::<Text, _>(table.key.join(","))
    .bind::<Text, _>(table.name)
    .load(connection)?;
    Ok(Some(Existing {
        columns: columns
            .into_iter()
            .map(|column| Column {
                name: column.name,
                type_name: column.type_name,
                not_null: column.not_null,
                has_default: column.has_default,
            })
            .collect(),
        has_key: constraints.iter().any(|constraint| constraint.is_key),
        constraints: constraints
            .into_iter()
            .filter(|constraint| !constraint.is_key)
            .map(|constraint| constraint.name)
            .collect(),
    }))
}
