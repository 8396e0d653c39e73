DROP INDEX processed_orders_newest;
CREATE INDEX processed_orders_newest ON processed_orders (
    coalesce(strftime('%Y-%m-%dT%H:%M:%fZ', processed_at), '1970-01-01T00:00:00.000Z'),
    idempotency_key
) WHERE NOT in_ledger;
