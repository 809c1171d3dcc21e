//! An agent's work on the host for containers: it limits the frames that may leave one, knows the
//! host's end of its veth, and follows changes.
//!
//! Everything is asked from the agent's network namespace, by the number that it has for the
//! container's (`ip netns list-id`). So nothing here holds a container's namespace open, which
//! would keep it and its veth alive.

mod counts;
mod filter;
mod namespaces;
mod program;
mod watch;

pub use counts::{LinkCounts, link_counts};
pub use filter::{ADDRESSES_MAX, Attached, Reason, SourceFilter, Sources};
pub use namespaces::{HostLink, Namespaces, NsId, Peer};
pub use watch::{Heard, Watch};

#[cfg(test)]
mod tests;
