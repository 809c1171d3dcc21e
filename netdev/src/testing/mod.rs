//! Tests of all backends alike, and the network namespaces that tests run in.

mod groups;
pub(crate) mod parts;
mod paths;
mod rails;
mod scarcity;
pub(crate) mod sides;
pub(crate) mod testns;
