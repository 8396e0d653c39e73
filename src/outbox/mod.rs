//! How effects leave: what was recorded with an outcome is delivered by webhooks afterwards.

pub mod send;
