-- The gate's three columns stay: they may have been there before.
DROP TABLE run_history;
DROP TABLE run_ledger;
DROP INDEX processed_orders_newest;
ALTER TABLE processed_orders DROP COLUMN attempt;
ALTER TABLE processed_orders DROP COLUMN claimant;
ALTER TABLE processed_orders DROP COLUMN api_key;
ALTER TABLE processed_orders DROP COLUMN payload_sha256;
ALTER TABLE processed_orders DROP COLUMN ttl_seconds;
ALTER TABLE processed_orders DROP COLUMN expires_at;
ALTER TABLE processed_orders DROP COLUMN in_ledger;
ALTER TABLE processed_orders DROP COLUMN seen_again;
ALTER TABLE processed_orders DROP COLUMN last_seen_at;
