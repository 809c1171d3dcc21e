//! Resources of a device in use.

/// The objects of a device, counted as `rdma resource show` (rdma-resource(8)) counts those of the
/// kernel's. After a program has given everything back, any object that remains has leaked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Resources {
    /// Protection domains.
    pub pds: usize,
    /// Completion queues.
    pub cqs: usize,
    /// Shared receive queues.
    pub srqs: usize,
    /// Queue pairs.
    pub qps: usize,
    /// Reserved queue pair numbers, which no new queue pair gets yet: those of connections in
    /// setup, of live connections, and of connections that ended so recently that their packets may
    /// still be in flight.
    pub kept_qpns: usize,
    /// Memory regions and windows.
    pub mrs: usize,
    /// Connections that the connection manager knows, for as long as it keeps their numbers.
    pub connections: usize,
    /// Paths to peers, of queue pairs and of address handles. The connection manager's own paths,
    /// which it drops after 2 s without use, do not count.
    pub paths: usize,
    /// Places of the connection manager that are listened at.
    pub listeners: usize,
    /// Multicast groups that the interface is in for queue pairs.
    pub groups: usize,
}
