//! The values of the API: errors, limits, attributes, counters and events. It knows the types of
//! `rocinante-stack` and `rocinante-netdev`, and nothing else of this crate.

pub(crate) mod cm;
pub(crate) mod device;
pub(crate) mod endpoint;
pub(crate) mod error;
pub(crate) mod event;
pub(crate) mod qp;
pub(crate) mod resources;
pub(crate) mod wc;
