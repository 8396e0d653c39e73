ALTER TABLE run_ledger DROP COLUMN reset;
