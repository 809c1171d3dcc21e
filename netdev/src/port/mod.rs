//! The contract of a port, and the values that all backends share.

pub(crate) mod config;
pub(crate) mod contract;
pub(crate) mod error;
pub(crate) mod headers;
pub(crate) mod parts;
pub(crate) mod steering;
