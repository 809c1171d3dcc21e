//! What of a device is in use.

/// How many objects of a device there are, as `rdma resource show` (rdma-resource(8)) counts those of the kernel's: what a program that has given
/// everything back still holds has leaked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Resources {
    /// Queue pairs.
    pub qps: usize,
    /// Numbers of queue pairs that no other may have yet: those of connections that are being made, that last, or that have ended so recently that their
    /// packets may still be under way.
    pub kept_qpns: usize,
    /// Memory regions and windows.
    pub mrs: usize,
    /// Connections that the connection manager knows, as long as it keeps their numbers.
    pub connections: usize,
    /// Ways to peers, of queue pairs and of address handles. Those of the connection manager, which
    /// it gives up after 2 s without use, do not count.
    pub paths: usize,
}
