//! An agent's work on the host for containers: it limits the frames that may leave one, knows the
//! host's end of its veth, and follows changes.
//!
//! Everything is asked from the agent's network namespace, by the number that it has for the
//! container's (`ip netns list-id`). So nothing here holds a container's namespace open, which
//! would keep it and its veth alive.

mod filter;
mod namespaces;
mod program;
mod sys;
mod watch;

pub use filter::{ADDRESSES_MAX, Attached, Reason, SourceFilter, Sources};
pub use namespaces::{HostLink, Namespaces, NsId, Peer};
pub use sys::{owning_user_namespace, refuse_descriptors};
pub use watch::{Heard, Watch};

pub use crate::packet::keep_again;

#[cfg(test)]
mod tests;
