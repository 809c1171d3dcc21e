//! Interfaces as programs see RDMA devices: by their names, and as files.

pub(crate) mod interfaces;
pub(crate) mod names;
pub mod sysfs;
