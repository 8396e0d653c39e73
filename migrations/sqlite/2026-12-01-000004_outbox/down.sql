DROP TABLE run_outbox;
