//! temporary
pub mod domain;
pub mod store;
