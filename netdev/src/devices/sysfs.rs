//! The devices of a program as files, as sysfs and /dev have them for those of the kernel.
//!
//! All processes that one `rocinante run` begins share a directory. It has the names that were
//! given, and a tree of files as the kernel has them below /sys and /dev. Each process that looks
//! for devices, or reads in the tree, brings both up to date first: so the verbs and the files
//! agree.

pub mod counts;
mod devices;
mod files;
mod keep;
mod nodes;
mod tree;

pub use counts::{Counts, PortKey, Published};
pub use devices::{Devices, PATHS_VARIABLE};
pub use keep::keep;
