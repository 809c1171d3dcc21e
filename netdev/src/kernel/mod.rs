//! The kernel's objects, behind functions that cannot be misused: netlink, eBPF, `ethtool`,
//! descriptors, interfaces. Nothing here knows a port.

pub mod bpf;
pub(crate) mod call;
pub(crate) mod denied;
pub mod descriptors;
pub(crate) mod ethtool;
pub(crate) mod inherited;
pub(crate) mod interface;
pub mod namespaces;
pub(crate) mod of_process;
pub(crate) mod recent;
pub(crate) mod rights;
pub mod rtnl;
pub(crate) mod silent;
pub(crate) mod tcx;
pub(crate) mod timer;
pub(crate) mod watch;
pub(crate) mod worded;
