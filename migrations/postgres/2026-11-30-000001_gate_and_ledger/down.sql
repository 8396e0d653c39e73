-- The gate's three columns stay: they may have been there before.
DROP TABLE run_history;
DROP TABLE run_ledger;
DROP INDEX processed_orders_newest;
ALTER TABLE processed_orders
    DROP COLUMN attempt,
    DROP COLUMN claimant,
    DROP COLUMN api_key,
    DROP COLUMN payload_sha256,
    DROP COLUMN ttl_seconds,
    DROP COLUMN expires_at,
    DROP COLUMN in_ledger,
    DROP COLUMN seen_again,
    DROP COLUMN last_seen_at;
