//! The tables, as both databases have them.

/// A point in time: `timestamptz` on Postgres, RFC 3339 text in UTC on SQLite.
#[derive(
    Debug, Clone, Copy, Default, diesel::sql_types::SqlType, diesel::query_builder::QueryId,
)]
#[diesel(
    postgres_type(oid = 1184, array_oid = 1185),
    sqlite_type(name = "Text")
)]
pub struct Instant;

diesel::table! {
    use diesel::sql_types::*;
    use super::Instant;

    /// The gate: has this key been seen?
    processed_orders (idempotency_key) {
        idempotency_key -> Text,
        order_id -> Text,
        processed_at -> Instant,
        attempt -> Integer,
        claimant -> Nullable<Text>,
        api_key -> Nullable<Text>,
        payload_sha256 -> Nullable<Binary>,
        ttl_seconds -> Nullable<Integer>,
        expires_at -> Nullable<Instant>,
        in_ledger -> Bool,
        seen_again -> BigInt,
        last_seen_at -> Nullable<Instant>,
    }
}

diesel::table! {
    use diesel::sql_types::*;
    use super::Instant;

    /// The ledger: what became of the work?
    run_ledger (idempotency_key) {
        idempotency_key -> Text,
        order_id -> Text,
        status -> Text,
        attempt -> Integer,
        claimant -> Nullable<Text>,
        api_key -> Nullable<Text>,
        processed_at -> Instant,
        recognised_from -> Instant,
        payload_sha256 -> Nullable<Binary>,
        ttl_seconds -> Nullable<Integer>,
        expires_at -> Nullable<Instant>,
        lease_expires_at -> Nullable<Instant>,
        external_id -> Nullable<Text>,
        result -> Nullable<Text>,
        reason -> Nullable<Text>,
        retry -> Nullable<Bool>,
        reset -> Bool,
        conflict -> Bool,
        updated_at -> Instant,
    }
}

diesel::table! {
    use diesel::sql_types::*;
    use super::Instant;

    /// What happened to the work, in order. Rows are only ever added.
    run_history (idempotency_key, seq) {
        idempotency_key -> Text,
        seq -> Integer,
        at -> Instant,
        event -> Text,
        attempt -> Integer,
        claimant -> Nullable<Text>,
        api_key -> Nullable<Text>,
        detail -> Nullable<Text>,
    }
}

diesel::table! {
    use diesel::sql_types::*;
    use super::Instant;

    /// Effects that follow from outcomes, and how their delivery goes.
    run_outbox (idempotency_key, seq) {
        idempotency_key -> Text,
        seq -> Integer,
        id -> Text,
        topic -> Text,
        payload -> Text,
        status -> Text,
        created_at -> Instant,
        due_at -> Instant,
        next_at -> Instant,
        is_leased -> Bool,
        tries -> Integer,
        failures -> Integer,
        settled_at -> Nullable<Instant>,
        log -> Text,
    }
}

diesel::allow_tables_to_appear_in_same_query!(
    processed_orders,
    run_ledger,
    run_history,
    run_outbox
);
