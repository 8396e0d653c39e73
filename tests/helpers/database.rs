//! An empty database for each test.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use tempfile::TempDir;

use super::postgres::{SHARED, psql, said_by};

/// Which store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backend {
    Sqlite,
    Postgres,
}

impl Backend {
    pub(crate) const ALL: [Self; 2] = [Self::Sqlite, Self::Postgres];
}

/// A database that nobody else uses.
pub(crate) struct Database {
    pub(crate) backend: Backend,
    pub(crate) url: String,
    /// The folder of a SQLite file, which goes with the test.
    folder: Option<TempDir>,
}

static COUNT: AtomicU32 = AtomicU32::new(0);

impl Database {
    /// An empty database.
    pub(crate) fn new(backend: Backend) -> Self {
        match backend {
            Backend::Sqlite => {
                let folder = tempfile::tempdir().unwrap();
                let url = format!("sqlite:{}/gate.db", folder.path().display());
                Self {
                    backend,
                    url,
                    folder: Some(folder),
                }
            }
            Backend::Postgres => {
                let number = COUNT.fetch_add(1, Ordering::Relaxed);
                Self::at(SHARED.create(&format!("test_{number}")))
            }
        }
    }

    /// A Postgres database that is there.
    pub(crate) fn at(url: String) -> Self {
        Self {
            backend: Backend::Postgres,
            url,
            folder: None,
        }
    }

    /// The path of a SQLite file.
    pub(crate) fn path(&self) -> String {
        assert!(self.folder.is_some(), "only SQLite has a file");
        self.url.trim_start_matches("sqlite:").to_owned()
    }

    /// Runs SQL beside the service, in psql or in sqlite3. Rows are lines, and columns are
    /// separated by `|`.
    pub(crate) fn sql(&self, sql: &str) -> String {
        self.try_sql(sql).unwrap()
    }

    /// [`Self::sql`] that may fail.
    pub(crate) fn try_sql(&self, sql: &str) -> Result<String, String> {
        match self.backend {
            Backend::Postgres => psql(&self.url, sql),
            Backend::Sqlite => said_by(Command::new("sqlite3").args([
                "-bail",
                "-cmd",
                ".timeout 5000",
                &self.path(),
                sql,
            ])),
        }
    }

    /// Every row of every table.
    pub(crate) fn dump(&self) -> String {
        self.sql(match self.backend {
            Backend::Postgres => {
                "SELECT table_name, query_to_xml(format('SELECT * FROM %I ORDER BY 1, 2', table_name), true, false, '')
                 FROM information_schema.tables WHERE table_schema = 'public' ORDER BY table_name"
            }
            Backend::Sqlite => ".dump",
        })
    }

    /// Moves all times of a key into the past, as if so many seconds had gone by since.
    pub(crate) fn age(&self, key: &str, seconds: u32) {
        let quoted = key.replace('\'', "''");
        self.age_where(&format!("idempotency_key = '{quoted}'"), seconds);
    }

    /// [`Self::age`] for all keys.
    pub(crate) fn age_all(&self, seconds: u32) {
        self.age_where("true", seconds);
    }

    fn age_where(&self, condition: &str, seconds: u32) {
        let moved = |table: &str, columns: &[&str]| {
            let assignments: Vec<String> = columns
                .iter()
                .map(|column| match self.backend {
                    Backend::Postgres => {
                        format!("{column} = {column} - interval '{seconds} seconds'")
                    }
                    Backend::Sqlite => format!(
                        "{column} = strftime('%Y-%m-%dT%H:%M:%fZ', {column}, '-{seconds} seconds')"
                    ),
                })
                .collect();
            self.sql(&format!(
                "UPDATE {table} SET {} WHERE {condition}",
                assignments.join(", ")
            ));
        };
        moved(
            "processed_orders",
            &["processed_at", "expires_at", "last_seen_at"],
        );
        moved(
            "run_ledger",
            &[
                "processed_at",
                "recognised_from",
                "expires_at",
                "lease_expires_at",
                "updated_at",
            ],
        );
        moved("run_history", &["at"]);
    }
}
