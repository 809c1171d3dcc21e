//! An agent's work on the host for containers: it limits the frames that may leave one, knows the
//! host's end of its veth, and follows changes.
//!
//! Everything is asked from the agent's network namespace, by the number that it has for the
//! container's (`ip netns list-id`). So nothing here holds a container's namespace open, which
//! would keep it and its veth alive.

mod announce;
mod counts;
mod filter;
mod gate;
mod namespaces;
mod program;
mod shaper;
mod uplink;
mod watch;

pub(crate) use announce::announce;
pub use counts::{LinkCounts, link_counts};
pub use filter::{ADDRESSES_MAX, Attached, Reason, SourceFilter, Sources};
pub use namespaces::{HostLink, Namespaces, NsId, Peer};
pub use shaper::{InForce, Means, Rates, Shaper, ShaperError};
pub use uplink::Portion;
pub use watch::{Heard, Watch};

/// Whether a link is the host's end of a container that an agent knew: the program that judges
/// senders is there, or a rate. A link that has gone is none. Error: the kernel's.
pub fn is_ours(link: &HostLink) -> std::io::Result<bool> {
    if Shaper::end_of(&link.name, &link.kind).is_some() {
        return Ok(false);
    }
    if SourceFilter::find(link.index)?.is_some() {
        return Ok(true);
    }
    Ok(Shaper::open()?.in_force(link.index)?.iter().any(Option::is_some))
}

#[cfg(test)]
mod tests;
