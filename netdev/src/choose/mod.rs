//! The choice of a backend: the best that the machine allows and that bypasses no rule silently.

pub(crate) mod any;
pub mod auto;
pub(crate) mod policy;
