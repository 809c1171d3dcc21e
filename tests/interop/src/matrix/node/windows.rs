//! A side's methods for memory windows.

use super::{Node, Step};
use crate::agent::proto::{MwType, Opcode, Range, Remote, Reply, Request};

impl Node {
    /// Allocates a window; windows are numbered from 0.
    pub fn window(&mut self, mw_type: MwType) -> Step {
        self.do_(&Request::Window { mw_type })
    }

    /// Posts the request 90, which binds a window, to the send queue of a queue pair.
    pub fn post_bind(
        &mut self,
        qp: usize,
        window: usize,
        range: Range,
        access: u32,
    ) -> Step<Remote> {
        self.remote_of(&Request::Bind { qp, wr_id: 90, window, range, access })
    }

    /// Binds a window by a queue pair, and waits for it. Returns where peers reach its first byte.
    /// Error: the bind fails.
    pub fn bind(&mut self, qp: usize, window: usize, range: Range, access: u32) -> Step<Remote> {
        let shown = self.post_bind(qp, window, range, access)?;
        self.succeeds(90, Opcode::BindMw)?;
        Ok(shown)
    }

    /// Does a step with an address and a key as its answer.
    pub fn remote_of(&mut self, request: &Request) -> Step<Remote> {
        match self.ask(request)? {
            Reply::Region(remote) => Ok(remote),
            other => Err(format!("{}: {request:?} was answered {other:?}", self.name())),
        }
    }
}
