//! Looks at tables that exist before the migration that makes them.

use diesel::dsl::sql;
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::sql_types::{Nullable, Text};

use super::super::adopt::{
    Column, Constraint, Dialect, Existing, Kind, Table, fault as fault_of, tables_to_come,
};

const DIALECT: Dialect = Dialect {
    fits,
    adds_if_missing: true,
    keys_look_nullable: false,
};

fn fits(type_name: &str, kind: Kind) -> bool {
    match kind {
        Kind::Text => matches!(type_name, "text" | "character varying"),
        Kind::Time => type_name == "timestamp with time zone",
        Kind::Integer => type_name == "integer",
        Kind::BigInt => type_name == "bigint",
        Kind::Bool => type_name == "boolean",
        Kind::Bytes => type_name == "bytea",
    }
}

#[derive(QueryableByName)]
struct Schema {
    #[diesel(sql_type = Nullable<Text>)]
    name: Option<String>,
}

/// What keeps the tables of the current schema from being adopted, as far as these migrations leave it open;
/// none: nothing does.
pub(super) fn fault(
    connection: &mut PgConnection,
    applied: &[String],
) -> QueryResult<Option<String>> {
    let schema: Schema =
        diesel::sql_query("SELECT current_schema()::text AS name").get_result(connection)?;
    let Some(schema) = schema.name else {
        return Ok(Some(
            "no schema of the search path exists: create it (CREATE SCHEMA …) or correct search_path in DATABASE_URL".into(),
        ));
    };
    let encoding: String =
        diesel::select(sql::<Text>("current_setting('server_encoding')")).get_result(connection)?;
    if !matches!(encoding.as_str(), "UTF8" | "SQL_ASCII") {
        return Ok(Some(format!(
            "the database's encoding is {encoding}, which cannot hold every text: make one with CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0; nothing was changed"
        )));
    }
    for table in tables_to_come(applied) {
        let resolved: Option<String> = diesel::select(
            sql::<Nullable<Text>>(
                "(SELECT nspname::text FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace \
                 WHERE pg_class.oid = to_regclass(",
            )
            .bind::<Text, _>(table.name)
            .sql("))"),
        )
        .get_result(connection)?;
        if let Some(resolved) = resolved.filter(|resolved| *resolved != schema) {
            return Ok(Some(format!(
                "the table {} is in schema {resolved}, but new tables would be made in schema {schema}, which comes first in the search path, and hide it; nothing was changed. Name the schema to use, such as ?options=-csearch_path%3D{resolved}, in DATABASE_URL",
                table.name
            )));
        }
        let existing = existing(connection, &schema, table)?;
        if let Some(fault) = existing.and_then(|existing| fault_of(table, &existing, &DIALECT)) {
            return Ok(Some(format!(
                "schema {schema}: {fault}. To use another schema, create one (CREATE SCHEMA dedup_gate) and add ?options=-csearch_path%3Ddedup_gate to DATABASE_URL"
            )));
        }
    }
    Ok(None)
}

fn existing(
    connection: &mut PgConnection,
    schema: &str,
    table: &Table,
) -> QueryResult<Option<Existing>> {
    let columns: Vec<Column> = diesel::sql_query(
        "SELECT attname::text AS name, format_type(atttypid, atttypmod) AS type_name, \
             attnotnull AS not_null, \
             atthasdef OR attidentity <> '' OR attgenerated <> '' AS has_default \
         FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid \
         JOIN pg_namespace ON pg_namespace.oid = relnamespace \
         WHERE nspname = $1 AND relname = $2 AND attnum > 0 AND NOT attisdropped \
         ORDER BY attnum",
    )
    .bind::<Text, _>(schema)
    .bind::<Text, _>(table.name)
    .load(connection)?;
    if columns.is_empty() {
        return Ok(None);
    }
    // The key must be one that ON CONFLICT can use, and its texts equal only byte by byte.
    let constraints: Vec<Constraint> = diesel::sql_query(
        "SELECT index_class.relname::text AS name, \
             indimmediate AND indisvalid AND indpred IS NULL AND indexprs IS NULL \
             AND (SELECT array_agg(attname::text ORDER BY place) \
                  FROM unnest(indkey::int2[]) WITH ORDINALITY AS key (attnum, place) \
                  JOIN pg_attribute USING (attnum) \
                  WHERE attrelid = indrelid AND place <= indnkeyatts) = string_to_array($3, ',') \
             AND NOT EXISTS (SELECT FROM pg_collation \
                  WHERE oid = ANY (indcollation::oid[]) AND NOT collisdeterministic) AS is_key \
         FROM pg_index JOIN pg_class AS table_class ON table_class.oid = indrelid \
         JOIN pg_class AS index_class ON index_class.oid = indexrelid \
         JOIN pg_namespace ON pg_namespace.oid = table_class.relnamespace \
         WHERE nspname = $1 AND table_class.relname = $2 AND indisunique \
         UNION ALL \
         SELECT conname::text, false \
         FROM pg_constraint JOIN pg_class ON pg_class.oid = conrelid \
         JOIN pg_namespace ON pg_namespace.oid = relnamespace \
         WHERE nspname = $1 AND relname = $2 AND contype IN ('f', 'x') \
         UNION ALL \
         SELECT conname::text, false \
         FROM pg_constraint JOIN pg_class ON pg_class.oid = conrelid \
         JOIN pg_namespace ON pg_namespace.oid = relnamespace \
         WHERE nspname = $1 AND relname = $2 AND contype = 'c' AND $2 = 'processed_orders'",
    )
    .bind::<Text, _>(schema)
    .bind::<Text, _>(table.name)
    .bind::<Text, _>(table.key.join(","))
    .load(connection)?;
    Ok(Some(Existing {
        columns,
        constraints,
    }))
}
