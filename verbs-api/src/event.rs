//! Asynchronous events.

use rocinante_stack::types::Qpn;
use rocinante_stack::verbs::QpEvent;

/// Something that happened outside the completions (`struct ibv_async_event`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// To a queue pair.
    Qp {
        /// Which one.
        qpn: Qpn,
        /// What.
        event: QpEvent,
    },
    /// A completion queue overflowed (`IBV_EVENT_CQ_ERR`): completions were lost, and every queue pair that completes to it
    /// is in the error state.
    CqOverflow {
        /// Its [`Cq::number`](crate::Cq::number).
        cq: u32,
    },
    /// Fewer receives are left in a shared receive queue than its limit (`IBV_EVENT_SRQ_LIMIT_REACHED`), which is 0 again.
    SrqLimitReached {
        /// Its [`Srq::number`](crate::Srq::number).
        srq: u32,
    },
    /// A shared receive queue broke (`IBV_EVENT_SRQ_ERR`); of hardware only.
    SrqErr {
        /// Its [`Srq::number`](crate::Srq::number).
        srq: u32,
    },
    /// The interface is gone (`IBV_EVENT_DEVICE_FATAL`): every queue pair is in the error state, and the device is good for
    /// nothing but being closed.
    DeviceFatal,
    /// The port came up (`IBV_EVENT_PORT_ACTIVE`); of hardware only, as are the next.
    PortActive,
    /// The port went down (`IBV_EVENT_PORT_ERR`).
    PortErr,
    /// The addresses of the port changed (`IBV_EVENT_GID_CHANGE`): open the device again to see them.
    GidChange,
    /// Another one.
    Other {
        /// Its number in `enum ibv_event_type`.
        kind: i32,
        /// Of the queue pair or completion queue that it is about, if it is about one.
        number: Option<u32>,
    },
}
