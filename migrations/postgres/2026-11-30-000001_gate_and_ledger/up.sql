-- The gate: has this key been seen? The first three columns may exist already, made by hand
-- for a workflow with raw SQL, so every other column is nullable or has a default.
CREATE TABLE IF NOT EXISTS processed_orders (
    idempotency_key TEXT PRIMARY KEY,
    order_id TEXT NOT NULL,
    processed_at TIMESTAMPTZ NOT NULL DEFAULT now()
);
ALTER TABLE processed_orders
    ADD COLUMN IF NOT EXISTS attempt INTEGER NOT NULL DEFAULT 1,
    ADD COLUMN IF NOT EXISTS claimant TEXT,
    ADD COLUMN IF NOT EXISTS api_key TEXT,
    ADD COLUMN IF NOT EXISTS payload_sha256 BYTEA,
    ADD COLUMN IF NOT EXISTS ttl_seconds INTEGER,
    ADD COLUMN IF NOT EXISTS expires_at TIMESTAMPTZ,
    ADD COLUMN IF NOT EXISTS in_ledger BOOLEAN NOT NULL DEFAULT false,
    ADD COLUMN IF NOT EXISTS seen_again BIGINT NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS last_seen_at TIMESTAMPTZ;
CREATE INDEX IF NOT EXISTS processed_orders_newest
    ON processed_orders (processed_at, idempotency_key COLLATE "C") WHERE NOT in_ledger;

-- The ledger: what became of the work? Where it has a row it is the truth, and the gate's row
-- only says that there is a key.
CREATE TABLE IF NOT EXISTS run_ledger (
    idempotency_key TEXT PRIMARY KEY,
    order_id TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('claimed', 'pending', 'done', 'failed')),
    attempt INTEGER NOT NULL CHECK (attempt >= 1),
    claimant TEXT,
    api_key TEXT,
    processed_at TIMESTAMPTZ NOT NULL,
    recognised_from TIMESTAMPTZ NOT NULL,
    payload_sha256 BYTEA,
    ttl_seconds INTEGER,
    expires_at TIMESTAMPTZ,
    lease_expires_at TIMESTAMPTZ,
    external_id TEXT,
    result TEXT,
    reason TEXT,
    retry BOOLEAN,
    conflict BOOLEAN NOT NULL DEFAULT false,
    updated_at TIMESTAMPTZ NOT NULL,
    CHECK ((status = 'pending') = (lease_expires_at IS NOT NULL)),
    CHECK ((status = 'failed') = (retry IS NOT NULL)),
    CHECK (status = 'done' OR (external_id IS NULL AND result IS NULL)),
    CHECK (status = 'failed' OR reason IS NULL)
);
CREATE INDEX IF NOT EXISTS run_ledger_newest
    ON run_ledger (updated_at, idempotency_key COLLATE "C");
CREATE INDEX IF NOT EXISTS run_ledger_open
    ON run_ledger (status, updated_at, idempotency_key COLLATE "C") WHERE status <> 'done';
CREATE INDEX IF NOT EXISTS run_ledger_conflict
    ON run_ledger (updated_at, idempotency_key COLLATE "C") WHERE conflict;
CREATE INDEX IF NOT EXISTS run_ledger_order ON run_ledger (order_id);

-- What happened to the work, in order. Rows are only ever added.
CREATE TABLE IF NOT EXISTS run_history (
    idempotency_key TEXT NOT NULL,
    seq INTEGER NOT NULL,
    at TIMESTAMPTZ NOT NULL,
    event TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    claimant TEXT,
    api_key TEXT,
    detail TEXT,
    PRIMARY KEY (idempotency_key, seq)
);
