-- Whether a person has set a failed key free, and ended its attempt.
ALTER TABLE run_ledger ADD COLUMN IF NOT EXISTS reset BOOLEAN NOT NULL DEFAULT false;
