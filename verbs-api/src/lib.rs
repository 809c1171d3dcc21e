//! RDMA verbs in user space, over any network interface.
//!
//! Rocinante is a RoCEv2 host channel adapter in software. Its queue pairs, memory regions and
//! completion queues work as those of `libibverbs`, and its packets are those of hardware. It needs
//! no RDMA card, no kernel module and no root.
//!
//! ```
//! use std::net::IpAddr;
//! use std::time::Duration;
//! use rocinante::{Access, ConnectOptions, Context, SendWr, VerbsError};
//!
//! fn main() -> Result<(), VerbsError> {
//!     // Two devices; usually they are in two containers, and `Exchange` carries the endpoints.
//!     let [here, there] = [1, 2].map(|host| IpAddr::from([127, 0, 0, host]));
//! #   let (here, there) = rocinante::doc::addresses();
//!     let (a, b) = (Context::open(here)?, Context::open(there)?);
//!     let (pd_a, pd_b) = (a.alloc_pd(), b.alloc_pd());
//!     let (cq_a, cq_b) = (a.create_cq(16)?, b.create_cq(16)?);
//!     let qp_a = pd_a.qp(&cq_a, &cq_a).build()?;
//!     let qp_b = pd_b.qp(&cq_b, &cq_b).access(Access::REMOTE_WRITE).build()?;
//!     let (to_b, to_a) = (qp_b.endpoint(), qp_a.endpoint());
//!     let options = ConnectOptions::default();
//!     let qp_a = qp_a.connect(&to_b, &options)?;
//!     let _qp_b = qp_b.connect(&to_a, &options)?;
//!
//!     // b offers memory, a writes into it.
//!     let target = pd_b.allocate(4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
//!     let source = pd_a.allocate(4096, Access::NONE)?;
//!     source.write(0, b"one-sided");
//!     qp_a.post(SendWr::write(&[source.sge(0, 9)], target.remote()))?;
//!     cq_a.wait_one(Duration::from_secs(5))?.ok()?;
//!     assert_eq!(target.to_vec(0, 9), b"one-sided");
//!     Ok(())
//! }
//! ```
//!
//! New here? The [`guide`] has a first program, and chapters about errors, memory, threads.
//!
//! - [`Context`], [`OpenOptions`]: a device, which is a network interface and the backend that
//!   carries its packets;
//! - [`Pd`], [`Mr`], [`Access`]: protection domains and memory regions; [`Mw`]: windows to parts of
//!   them;
//! - [`Cq`], [`CompChannel`]: completions, which a program polls or waits for;
//! - [`PreparedContext`]: a context that answers questions and has opened nothing yet;
//! - [`QpBuilder`], [`PreparedQp`], [`Qp`]: queue pairs; [`Ah`]: destinations of datagrams;
//!   [`Srq`]: receives that queue pairs share;
//! - [`cm`]: connections through the connection manager, as `librdmacm` makes them;
//! - [`asynchronous`]: operations that own their memory, for tasks; its
//!   [chapter](guide::asynchronous) has all that a task can wait for;
//! - `exchange` (a feature): a small exchange, over TCP or a queue pair, that connects two queue
//!   pairs;
//! - [`verbs`]: operations, states and attributes; [`device`]: the devices and their attributes;
//!   [`stats`]: counters; [`prelude`]: the usual names.
//!
//! The program needs no thread for the device: `post_send` and `poll` drive it on the spot. A
//! background thread drives it while the program does not.

// docs.rs shows which feature an item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

/// Evaluates an expression of an object, whichever provider's it is.
macro_rules! on {
    ($kind:ident, $object:expr, $it:ident => $call:expr) => {
        match $object {
            $kind::Soft($it) => $call,
            $kind::Kernel($it) => $call,
        }
    };
}

/// Methods of a builder, each of which sets a field or two.
macro_rules! setters {
    ($builder:ident: $(
        $(#[$doc:meta])*
        $name:ident($value:ident: $type:ty) { $($($field:ident).+ = $set:expr),+ }
    )*) => {
        impl $builder { $(
            $(#[$doc])*
            #[must_use]
            pub fn $name(mut self, $value: $type) -> Self {
                $(self.$($field).+ = $set;)+
                self
            }
        )* }
    };
}

mod ah;
pub mod asynchronous;
pub mod cm;
mod context;
mod cq;
pub mod device;
#[cfg(feature = "exchange")]
pub mod exchange;
#[cfg(feature = "exchange")]
#[doc(hidden)]
pub mod fuzzing;
pub mod guide;
mod mr;
mod mw;
mod open;
mod qp;
mod srq;
#[cfg(test)]
mod tests;
mod tuning;

pub use ah::Ah;
pub use context::{Context, Pd};
pub use cq::{CompChannel, Cq};
pub use mr::{BufferPool, Mr, MrSlice, PoolBuffer};
pub use mw::Mw;
pub use open::{OpenOptions, PreparedContext};
pub use qp::{PreparedQp, Qp, QpBuilder};
#[doc(inline)]
pub use rocinante_soft::model::endpoint::Endpoint;
#[doc(inline)]
pub use rocinante_soft::model::error::{Refused, VerbsError};
#[doc(inline)]
pub use rocinante_soft::model::qp::ConnectOptions;
/// ```
/// use rocinante::Turns;
///
/// fn main() -> Result<(), &'static str> {
///     const SILENT: &str = "the kernel does not say";
///     let before = Turns::of_thread().ok_or(SILENT)?;
///     // … the work to measure …
///     let turns = Turns::of_thread().ok_or(SILENT)?.since(before);
///     println!("waited {:?}, {:.0} % of the time", turns.waited, 100.0 * turns.share());
///     Ok(())
/// }
/// ```
#[doc(inline)]
pub use rocinante_soft::model::turns::Turns;
#[doc(inline)]
pub use rocinante_soft::model::wc::{Wc, WcError};
pub use rocinante_stack::mem::{Access, RemoteSlice};
pub use rocinante_stack::verbs::{RecvWr, SendWr, WcStatus};
pub use srq::Srq;

/// What `verbs.h` names: operations and their data, keys and numbers, states, attributes, events.
pub mod verbs {
    pub use crate::ah::GRH_LEN;
    pub use crate::mr::Rereg;
    pub use crate::mw::{BindMw, MwPart};
    #[doc(inline)]
    pub use rocinante_soft::model::event::AsyncEvent;
    #[doc(inline)]
    pub use rocinante_soft::model::qp::{ModifyAttr, PeerPath, PostListError, QpCaps};
    #[doc(inline)]
    pub use rocinante_soft::provider::advice::Advice;
    pub use rocinante_stack::mem::{AccessError, FlushLevel, MwType, Placement, Sge};
    pub use rocinante_stack::types::{Key, Mtu, Psn, Qpn, QueueKind};
    pub use rocinante_stack::verbs::{
        AhId, Destination, QpEvent, QpState, QpType, SendData, SendOp, WcOpcode,
    };
    pub use rocinante_stack::{
        AltPath, Budget, ModifyError, PathMigState, PeerKind, PostError, QpAttr, SrqAttr, SrqChange,
    };
}

/// Counters of devices and queue pairs, and the objects that a device holds.
pub mod stats {
    pub use rocinante_netdev::PortStats;
    #[doc(inline)]
    pub use rocinante_soft::model::device::DeviceCounters;
    #[doc(inline)]
    pub use rocinante_soft::model::qp::QpInfo;
    #[doc(inline)]
    pub use rocinante_soft::model::resources::Resources;
    pub use rocinante_stack::stats::{CmCounters, Counters, Drops, Limit, LimitsHit, QpCounters};
}

/// What almost every program names: `use rocinante::prelude::*`.
pub mod prelude {
    pub use crate::verbs::{QpState, QpType, WcOpcode};
    pub use crate::{
        Access, BufferPool, CompChannel, ConnectOptions, Context, Cq, Mr, MrSlice, OpenOptions, Pd,
        PreparedQp, Qp, RecvWr, RemoteSlice, SendWr, Srq, VerbsError, Wc, WcStatus, cm,
    };
}

/// Two addresses for the examples in the documentation, so that they can run at the same time.
#[doc(hidden)]
pub mod doc {
    use std::net::{IpAddr, Ipv4Addr};
    use std::sync::atomic::{AtomicU8, Ordering};

    /// Two loopback addresses that no other process on the machine is likely to use now.
    pub fn addresses() -> (IpAddr, IpAddr) {
        static NEXT: AtomicU8 = AtomicU8::new(1);
        let [_, _, high, low] = std::process::id().to_be_bytes();
        let address = || {
            let last = NEXT.fetch_add(1, Ordering::Relaxed).max(1);
            IpAddr::V4(Ipv4Addr::new(127, high | 128, low, last))
        };
        (address(), address())
    }
}
