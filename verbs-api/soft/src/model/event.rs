//! Asynchronous events.

use rocinante_stack::types::Qpn;
use rocinante_stack::verbs::QpEvent;

/// An event other than a completion (`struct ibv_async_event`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// An event of a queue pair.
    Qp {
        /// The number of the queue pair.
        qpn: Qpn,
        /// The event.
        event: QpEvent,
    },
    /// A completion queue overflowed (`IBV_EVENT_CQ_ERR`). Completions were lost, and every queue
    /// pair that completes to it is in the error state.
    CqOverflow {
        /// Its `Cq::number`.
        cq: u32,
    },
    /// A shared receive queue has fewer receives left than its limit
    /// (`IBV_EVENT_SRQ_LIMIT_REACHED`). The limit is 0 again.
    SrqLimitReached {
        /// Its `Srq::number`.
        srq: u32,
    },
    /// A shared receive queue broke (`IBV_EVENT_SRQ_ERR`). Only devices of the kernel report it.
    SrqErr {
        /// Its `Srq::number`.
        srq: u32,
    },
    /// The interface is gone (`IBV_EVENT_DEVICE_FATAL`). Every queue pair is in the error state,
    /// calls that wait for completions or connections end with an error, and the device can only be
    /// closed.
    DeviceFatal,
    /// The port came up (`IBV_EVENT_PORT_ACTIVE`).
    PortActive,
    /// The port went down (`IBV_EVENT_PORT_ERR`): its interface was switched off, or lost its
    /// carrier.
    PortErr,
    /// The addresses of the port changed (`IBV_EVENT_GID_CHANGE`): see
    /// `Context::gid_table`. A device of the kernel must be opened
    /// again to see them.
    GidChange,
    /// Another event.
    Other {
        /// Its number in `enum ibv_event_type`.
        kind: i32,
        /// The number of its queue pair or completion queue, if it concerns one.
        number: Option<u32>,
    },
}
