-- The gate: has this key been seen? The first three columns may exist already, made by hand
-- for a workflow with raw SQL, so every other column is nullable or has a default.
-- Times are RFC 3339 in UTC with milliseconds, so that they sort as text.
CREATE TABLE IF NOT EXISTS processed_orders (
    idempotency_key TEXT NOT NULL PRIMARY KEY,
    order_id TEXT NOT NULL,
    processed_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))
);
ALTER TABLE processed_orders ADD COLUMN attempt INTEGER NOT NULL DEFAULT 1;
ALTER TABLE processed_orders ADD COLUMN claimant TEXT;
ALTER TABLE processed_orders ADD COLUMN api_key TEXT;
ALTER TABLE processed_orders ADD COLUMN payload_sha256 BLOB;
ALTER TABLE processed_orders ADD COLUMN ttl_seconds INTEGER;
ALTER TABLE processed_orders ADD COLUMN expires_at TEXT;
ALTER TABLE processed_orders ADD COLUMN in_ledger BOOLEAN NOT NULL DEFAULT false;
ALTER TABLE processed_orders ADD COLUMN seen_again INTEGER NOT NULL DEFAULT 0;
ALTER TABLE processed_orders ADD COLUMN last_seen_at TEXT;
-- Rows of raw SQL may hold the time in another form, so lists are read by this expression.
CREATE INDEX processed_orders_newest ON processed_orders (
    coalesce(strftime('%Y-%m-%dT%H:%M:%fZ', processed_at), '1970-01-01T00:00:00.000Z'),
    idempotency_key
) WHERE NOT in_ledger;

-- The ledger: what became of the work? Where it has a row it is the truth, and the gate's row
-- only says that there is a key.
CREATE TABLE IF NOT EXISTS run_ledger (
    idempotency_key TEXT NOT NULL PRIMARY KEY,
    order_id TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('claimed', 'pending', 'done', 'failed')),
    attempt INTEGER NOT NULL CHECK (attempt >= 1),
    claimant TEXT,
    api_key TEXT,
    processed_at TEXT NOT NULL,
    recognised_from TEXT NOT NULL,
    payload_sha256 BLOB,
    ttl_seconds INTEGER,
    expires_at TEXT,
    lease_expires_at TEXT,
    external_id TEXT,
    result TEXT,
    reason TEXT,
    retry BOOLEAN,
    conflict BOOLEAN NOT NULL DEFAULT false,
    updated_at TEXT NOT NULL,
    CHECK ((status = 'pending') = (lease_expires_at IS NOT NULL)),
    CHECK ((status = 'failed') = (retry IS NOT NULL)),
    CHECK (status = 'done' OR (external_id IS NULL AND result IS NULL)),
    CHECK (status = 'failed' OR reason IS NULL)
);
CREATE INDEX run_ledger_newest ON run_ledger (updated_at, idempotency_key);
CREATE INDEX run_ledger_open ON run_ledger (status, updated_at, idempotency_key)
    WHERE status <> 'done';
CREATE INDEX run_ledger_conflict ON run_ledger (updated_at, idempotency_key) WHERE conflict;
CREATE INDEX run_ledger_order ON run_ledger (order_id);

-- What happened to the work, in order. Rows are only ever added.
CREATE TABLE IF NOT EXISTS run_history (
    idempotency_key TEXT NOT NULL,
    seq INTEGER NOT NULL,
    at TEXT NOT NULL,
    event TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    claimant TEXT,
    api_key TEXT,
    detail TEXT,
    PRIMARY KEY (idempotency_key, seq)
) WITHOUT ROWID;
