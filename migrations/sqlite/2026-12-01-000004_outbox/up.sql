-- Effects that follow from outcomes: written together with them, delivered afterwards. `seq` is their order
-- within a key. While one is leased, `next_at` is when the lease runs out, and `tries` tells whose it is.
CREATE TABLE IF NOT EXISTS run_outbox (
    idempotency_key TEXT NOT NULL,
    seq INTEGER NOT NULL,
    id TEXT NOT NULL,
    topic TEXT NOT NULL,
    payload TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('pending', 'delivered', 'dead')),
    created_at TEXT NOT NULL,
    due_at TEXT NOT NULL,
    next_at TEXT NOT NULL,
    is_leased BOOLEAN NOT NULL DEFAULT false,
    tries INTEGER NOT NULL DEFAULT 0,
    failures INTEGER NOT NULL DEFAULT 0,
    settled_at TEXT,
    -- JSON, a line a try.
    log TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (idempotency_key, seq),
    CHECK ((status = 'pending') = (settled_at IS NULL)),
    CHECK (status = 'pending' OR NOT is_leased)
);
-- What of a key is not settled yet, since an effect waits for those before it: a key may have many that are.
CREATE INDEX run_outbox_order ON run_outbox (idempotency_key, seq) WHERE settled_at IS NULL;
CREATE INDEX run_outbox_due ON run_outbox (next_at) WHERE status = 'pending';
CREATE INDEX run_outbox_newest ON run_outbox (id);
CREATE INDEX run_outbox_open ON run_outbox (status, id) WHERE status <> 'delivered';
CREATE INDEX run_outbox_delivered ON run_outbox (settled_at) WHERE status = 'delivered';
