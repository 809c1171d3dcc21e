//! Asynchronous events.

use rocinante_stack::types::Qpn;
use rocinante_stack::verbs::QpEvent;

/// Something that happened to a queue pair outside its completions (`struct ibv_async_event`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AsyncEvent {
    /// The queue pair.
    pub qpn: Qpn,
    /// What happened.
    pub event: QpEvent,
}
