DROP FUNCTION dedup_gate_won(TEXT[]);
DROP INDEX processed_orders_newest;
CREATE INDEX processed_orders_newest
    ON processed_orders (processed_at, idempotency_key COLLATE "C") WHERE NOT in_ledger;
