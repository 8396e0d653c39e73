//! Looks at tables that exist before the migration that makes them.

use diesel::prelude::*;
use diesel::sql_types::Text;
use diesel::sqlite::SqliteConnection;

use super::super::adopt::{
    Column, Constraint, Dialect, Existing, Kind, Table, fault as fault_of, tables_to_come,
};

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

/// What keeps the tables of the file from being adopted, as far as these migrations leave it open; none:
/// nothing does.
pub(super) fn fault(
    connection: &mut SqliteConnection,
    applied: &[String],
) -> QueryResult<Option<String>> {
    for table in tables_to_come(applied) {
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
    let columns: Vec<Column> = diesel::sql_query(
        "SELECT name, type AS type_name, \"notnull\" AS not_null, \
             dflt_value IS NOT NULL AS has_default \
         FROM pragma_table_info(?)",
    )
    .bind::<Text, _>(table.name)
    .load(connection)?;
    if columns.is_empty() {
        return Ok(None);
    }
    let constraints: Vec<Constraint> = diesel::sql_query(
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
        columns,
        constraints,
    }))
}
