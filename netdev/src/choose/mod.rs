//! The choice of a backend: the best that the machine allows and that bypasses no rule silently.

pub(crate) mod any;
mod ask;
pub mod auto;
pub(crate) mod faulty;
pub(crate) mod give;
pub(crate) mod policy;
