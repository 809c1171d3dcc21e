//! The state of a queue pair, as post calls read it.

use rocinante_stack::verbs::QpState;

use crate::provider::sync::{AtomicU8, Ordering};

/// The state after the last change; RESET at first. If the queue pair broke since then it is in
/// ERR, where posting is allowed as in RTS. A call that RTR refuses looks again.
#[derive(Debug, Default)]
pub struct StateCell(AtomicU8);

impl StateCell {
    #[inline]
    pub fn get(&self) -> QpState {
        QpState::ALL[usize::from(self.0.load(Ordering::Relaxed))]
    }

    pub fn set(&self, state: QpState) {
        let index = QpState::ALL.iter().position(|s| *s == state).unwrap_or(0);
        self.0.store(u8::try_from(index).unwrap_or(0), Ordering::Relaxed);
    }
}
