//! The rules, and nothing else: no I/O, no HTTP, no SQL.

pub mod act;
pub mod claim;
pub mod effect;
pub mod json;
pub mod key;
pub mod ledger;
#[cfg(feature = "planted-faults")]
pub mod planted;
pub mod retry;
pub mod rfc3339;
pub mod route;
pub mod text;
pub mod webhook;

/// A point in time, always in UTC; where the rules of keys are concerned, of the database's clock.
pub type Time = chrono::DateTime<chrono::Utc>;

/// A fault in a request: which member, and what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invalid {
    /// RFC 6901 pointer to the member; empty for the whole document.
    pub pointer: String,
    /// What is wrong, for a person to read.
    pub detail: String,
}

impl Invalid {
    /// A fault at `pointer`.
    pub fn new(pointer: impl Into<String>, detail: impl Into<String>) -> Self {
        Self {
            pointer: pointer.into(),
            detail: detail.into(),
        }
    }
}
