-- What a key weighs, in bytes: heap, indexes and write-ahead log. For an empty database after `dedup-gate migrate`:
--
--   psql -qAt -f benches/weight.sql URL
\set keys 1000000
SELECT pg_current_wal_lsn() AS before \gset
INSERT INTO processed_orders (idempotency_key, order_id, processed_at, claimant, api_key)
    SELECT encode(sha256(i::text::bytea), 'hex'), 'ORD-' || i, clock_timestamp(), i || '@9f2c41d07be3:0:0', 'n8n'
    FROM generate_series(1, :keys) AS i;
SELECT 'a key at the gate: write-ahead log', pg_wal_lsn_diff(pg_current_wal_lsn(), :'before') / :keys;
SELECT 'a key at the gate: ' || relname, pg_relation_size(oid) / :keys::numeric
    FROM pg_class WHERE relname ~ '^processed_orders' ORDER BY relname;
TRUNCATE processed_orders;
SELECT pg_current_wal_lsn() AS before \gset
INSERT INTO processed_orders (idempotency_key, order_id, processed_at, claimant, api_key, in_ledger)
    SELECT encode(sha256(i::text::bytea), 'hex'), 'ORD-' || i, clock_timestamp(), i || '@9f2c41d07be3:0:0', 'n8n', true
    FROM generate_series(1, :keys) AS i;
INSERT INTO run_ledger (idempotency_key, order_id, status, attempt, claimant, api_key, processed_at, recognised_from,
        external_id, updated_at)
    SELECT idempotency_key, order_id, 'done', 1, claimant, api_key, processed_at, processed_at, 'ch_3Nf8' || order_id,
        clock_timestamp()
    FROM processed_orders;
INSERT INTO run_history (idempotency_key, seq, at, event, attempt, claimant, api_key, detail)
    SELECT idempotency_key, seq, clock_timestamp(), 'pending', 1, claimant, api_key,
        '{"lease_expires_at":"2026-11-30T11:57:56.795Z","after":null}'
    FROM processed_orders, generate_series(1, 2) AS seq;
SELECT 'a key in the ledger: write-ahead log', pg_wal_lsn_diff(pg_current_wal_lsn(), :'before') / :keys;
SELECT 'a key in the ledger: ' || relname, pg_relation_size(oid) / :keys::numeric
    FROM pg_class WHERE relname ~ '^(processed_orders|run_)' ORDER BY relname;
