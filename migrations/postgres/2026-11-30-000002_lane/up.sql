-- What the statement that wins keys calls before it ends, with the keys that it has won; it says
-- which of them the ledger knows all the same, since a row of the gate may be deleted by hand.
-- Only a function that is VOLATILE looks anew: the statement itself sees the ledger as it was when
-- it began, and misses what was written since. So it needs READ COMMITTED, and its transaction,
-- which is often that statement alone, is flushed before anybody is told.
CREATE OR REPLACE FUNCTION dedup_gate_won(keys TEXT[]) RETURNS TEXT[] LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'dedup-gate wins keys in READ COMMITTED only';
    END IF;
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    RETURN ARRAY(SELECT idempotency_key FROM run_ledger WHERE idempotency_key = ANY (keys));
END
$$;

-- The key in it weighed as much again. Lists sort by it what was claimed at the same time.
DROP INDEX IF EXISTS processed_orders_newest;
CREATE INDEX processed_orders_newest ON processed_orders (processed_at) WHERE NOT in_ledger;
