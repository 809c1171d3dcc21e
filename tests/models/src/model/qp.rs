//! The parts of a queue pair that the posting side uses.

use rocinante_stack::PostError;
use rocinante_stack::verbs::{RecvWr, SendWr};

/// Depths of the queues.
#[derive(Debug, Clone, Copy)]
pub struct QpCaps {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
}

impl QpCaps {
    pub(crate) fn check_recv(&self, _: &RecvWr<'_>) -> Result<(), PostError> {
        Ok(())
    }
}

#[derive(Debug, Clone, Copy)]
pub struct SendRules {
    pub caps: QpCaps,
}

impl SendRules {
    pub(crate) fn check(&self, _: &SendWr<'_>) -> Result<(), PostError> {
        Ok(())
    }
}

/// The request that was not posted, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PostListError {
    pub index: usize,
    pub error: PostError,
}
