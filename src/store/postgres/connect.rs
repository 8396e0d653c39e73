//! Connections, and whether a session of the server belongs to them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use diesel::connection::{CacheSize, SimpleConnection};
use diesel::dsl::sql;
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, ManageConnection};
use diesel::sql_types::Integer;

use crate::store::{StartError, StoreError, one_line};

/// How often two connections are asked whose sessions they have.
const ROUNDS: u32 = 8;

/// A database, and how to connect to it.
#[derive(Debug, Clone)]
pub(super) struct Server {
    url: String,
    /// Whether a pooler in transaction mode stands before it, such as `PgBouncer`. Each transaction
    /// may be another session's then: what is set, or prepared, for a session would be found by
    /// others, and missed by us. So there, every statement stands in a transaction, what is set is set in
    /// it, and nothing is kept prepared.
    is_pooled: Arc<AtomicBool>,
    /// Whether somebody has said so, or the contrary.
    is_said: bool,
}

impl Server {
    /// The database at `url`. Where it is not said whether there is a pooler, it is found out.
    pub(super) fn new(url: &str, said: Option<bool>) -> Result<Self, StartError> {
        let url = with_defaults(url);
        let unavailable =
            |error: &dyn std::fmt::Display| StartError::Unavailable(one_line(&error.to_string()));
        let is_pooled = match said {
            Some(is_pooled) => is_pooled,
            None => {
                let connect = || PgConnection::establish(&url).map_err(|error| unavailable(&error));
                share_sessions(&mut connect()?, &mut connect()?)
                    .map_err(|error| unavailable(&error))?
            }
        };
        Ok(Self {
            url,
            is_pooled: Arc::new(is_pooled.into()),
            is_said: said.is_some(),
        })
    }

    /// Whether there is a pooler.
    pub(super) fn is_pooled(&self) -> bool {
        self.is_pooled.load(Ordering::Relaxed)
    }

    /// What is prepared for a session is not missing from it, nor there already, but behind a pooler that
    /// was not found out, or that has come since.
    pub(super) fn learned<T>(&self, done: Result<T, StoreError>) -> Result<T, StoreError> {
        let Err(error) = &done else {
            return done;
        };
        let text = error.to_string();
        let is_another_session = text.contains("prepared statement")
            && ["does not exist", "already exists", "bind message"]
                .iter()
                .any(|fault| text.contains(fault));
        if is_another_session && !self.is_said && !self.is_pooled.swap(true, Ordering::Relaxed) {
            log::warn!("a pooler in transaction mode stands before the database: {text}");
        }
        done
    }

    pub(super) fn connect(&self) -> ConnectionResult<PgConnection> {
        let mut connection = PgConnection::establish(&self.url)?;
        self.keep_nothing_if_pooled(&mut connection);
        Ok(connection)
    }

    /// Forgets what is prepared, which it may not be in the next session.
    pub(super) fn keep_nothing_if_pooled(&self, connection: &mut PgConnection) {
        if self.is_pooled() {
            connection.set_prepared_statement_cache_size(CacheSize::Disabled);
        }
    }
}

impl ManageConnection for Server {
    type Connection = PgConnection;
    type Error = diesel::r2d2::Error;

    fn connect(&self) -> Result<PgConnection, Self::Error> {
        Self::connect(self).map_err(diesel::r2d2::Error::ConnectionError)
    }

    /// In one message, and not prepared: see [`Server::is_pooled`].
    fn is_valid(&self, connection: &mut PgConnection) -> Result<(), Self::Error> {
        self.keep_nothing_if_pooled(connection);
        connection
            .batch_execute("SELECT")
            .map_err(diesel::r2d2::Error::QueryError)
    }

    fn has_broken(&self, connection: &mut PgConnection) -> bool {
        ConnectionManager::<PgConnection>::new("").has_broken(connection)
    }
}

/// Whether two connections share sessions of the server. Two that have one each keep it; those of a
/// pooler get, for one transaction after the other, whichever is free just then, which may look the same
/// once or twice where others use it too.
fn share_sessions(one: &mut PgConnection, other: &mut PgConnection) -> QueryResult<bool> {
    let session = |connection: &mut PgConnection| -> QueryResult<i32> {
        connection.transaction(|connection| {
            diesel::select(sql::<Integer>("pg_backend_pid()")).get_result(connection)
        })
    };
    let (first, second) = (session(one)?, session(other)?);
    for _ in 0..ROUNDS {
        // Twice in a row, for where they take turns at two.
        let again = [session(one)?, session(one)?, session(other)?];
        if first == second || again != [first, first, second] {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Adds limits on how long the network may be silent, where the URL does not set them.
fn with_defaults(url: &str) -> String {
    let mut url = url.to_owned();
    for (name, value) in [
        ("connect_timeout", "2"),
        ("tcp_user_timeout", "3000"),
        ("keepalives_idle", "10"),
        ("keepalives_interval", "5"),
        ("keepalives_count", "2"),
        ("fallback_application_name", "dedup-gate"),
    ] {
        let query = url.split_once('?').map(|(_, query)| query);
        let is_set = query.is_some_and(|query| {
            query
                .split('&')
                .any(|pair| pair.split('=').next() == Some(name))
        });
        if !is_set {
            url.push(if query.is_none() { '?' } else { '&' });
            url.push_str(&format!("{name}={value}"));
        }
    }
    url
}
