//! Connections, and whether a session of the server belongs to them.

use std::hash::{BuildHasher, Hasher, RandomState};

use diesel::connection::{CacheSize, SimpleConnection};
use diesel::dsl::sql;
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, ManageConnection};
use diesel::sql_types::{Nullable, Text};

use super::one_line;
use crate::store::StartError;

/// A database, and how to connect to it.
#[derive(Debug, Clone)]
pub(super) struct Server {
    url: String,
    /// Whether a pooler in transaction mode stands before it, such as `PgBouncer`. Each transaction
    /// may be another session's then: what is set, or prepared, for a session would be found by
    /// others, and missed by us. So there, every statement stands in a transaction, what is set is set in
    /// it, and nothing is kept prepared.
    pub(super) is_pooled: bool,
}

impl Server {
    /// The database at `url`. Where it is not said whether there is a pooler, it is found out.
    pub(super) fn new(url: &str, is_pooled: Option<bool>) -> Result<Self, StartError> {
        let url = with_defaults(url);
        let unavailable =
            |error: &dyn std::fmt::Display| StartError::Unavailable(one_line(&error.to_string()));
        let is_pooled = match is_pooled {
            Some(is_pooled) => is_pooled,
            None => {
                let connect = || PgConnection::establish(&url).map_err(|error| unavailable(&error));
                share_sessions(&mut connect()?, &mut connect()?)
                    .map_err(|error| unavailable(&error))?
            }
        };
        Ok(Self { url, is_pooled })
    }

    pub(super) fn connect(&self) -> ConnectionResult<PgConnection> {
        let mut connection = PgConnection::establish(&self.url)?;
        if self.is_pooled {
            connection.set_prepared_statement_cache_size(CacheSize::Disabled);
        }
        Ok(connection)
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
        connection
            .batch_execute("SELECT")
            .map_err(diesel::r2d2::Error::QueryError)
    }

    fn has_broken(&self, connection: &mut PgConnection) -> bool {
        ConnectionManager::<PgConnection>::new("").has_broken(connection)
    }
}

/// Whether what one connection sets for its session is seen by the other, or lost: while the other
/// holds a session of the server with a transaction, the first one is given another.
fn share_sessions(one: &mut PgConnection, other: &mut PgConnection) -> QueryResult<bool> {
    let mark = format!("{:x}", RandomState::new().build_hasher().finish());
    let has_mark = |connection: &mut PgConnection| -> QueryResult<bool> {
        let found: Option<String> = diesel::select(sql::<Nullable<Text>>(
            "current_setting('dedup_gate.session', true)",
        ))
        .get_result(connection)?;
        Ok(found.as_ref() == Some(&mark))
    };
    one.batch_execute(&format!("SET dedup_gate.session = '{mark}'"))?;
    other.transaction(|other| Ok(has_mark(other)? || !one.transaction(|one| has_mark(one))?))
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
