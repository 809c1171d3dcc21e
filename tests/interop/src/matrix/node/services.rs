//! A side's methods for datagrams, several queue pairs, shared receive queues and memory windows.

use super::{Node, Step};
use crate::agent::proto::{Completion, Op, Opcode, QpState, Range, Remote, Send};

/// Bytes before a datagram in its receive.
pub(in crate::matrix) const GRH: usize = 40;

impl Node {
    /// SEND of a datagram along an address handle of this side to queue pair 0 of `peer`.
    #[must_use]
    pub fn send_to(&self, handle: usize, peer: &Self, qkey: u32, imm: Option<u32>) -> Op {
        Op::SendTo { handle, qpn: peer.qpn(), qkey, imm }
    }

    /// Posts send requests to a queue pair.
    pub fn post_on(&mut self, qp: usize, list: &[Send]) -> Step {
        self.send(qp, list.to_vec())
    }

    /// Posts receives of one element each to a queue pair, numbered from `first`.
    pub fn receive_on(&mut self, qp: usize, first: u64, ranges: &[Range]) -> Step {
        let list = ranges.iter().map(|range| vec![*range]).collect();
        self.recv(qp, first, list)
    }

    /// The state of a queue pair.
    pub fn state_of(&mut self, qp: usize) -> Step<QpState> {
        let state = self.query(qp)?;
        QpState::ALL.get(state).copied().ok_or_else(|| format!("there is no state {state}"))
    }

    /// Posts receives of one element each to the shared receive queue 0, numbered from `first`.
    pub fn receive_shared(&mut self, first: u64, ranges: &[Range]) -> Step {
        let list = ranges.iter().map(|range| vec![*range]).collect();
        self.recv_shared(0, first, list)
    }

    /// Takes the next completion, which must be that of the receive `wr_id` on this queue pair,
    /// with this length. Error: it is another.
    pub fn received_on(&mut self, qp: usize, wr_id: u64, len: usize) -> Step<Completion> {
        let wc = self.ends(wr_id, "SUCCESS")?;
        self.expect(&wc.qpn, &self.qpn_of(qp), "the queue pair")?;
        self.expect(&(wc.byte_len as usize), &len, "the length")?;
        Ok(wc)
    }

    /// Takes the next completion, which must be that of the receive `wr_id`, with a datagram of
    /// this length and immediate from the queue pair `peer`. Error: it is another.
    pub fn received_from(&mut self, peer: u32, wr_id: u64, len: usize, imm: Option<u32>) -> Step {
        let wc = self.ends(wr_id, "SUCCESS")?;
        self.expect(&wc.opcode, &Opcode::Recv, "the opcode")?;
        self.expect(&wc.source, &Some(peer), "the sender")?;
        self.expect(&(wc.byte_len as usize), &(GRH + len), "the length")?;
        self.expect(&wc.imm, &imm, "the immediate")
    }

    /// Fails if there is a completion within `timeout_ms`. Error: there is one.
    pub fn quiet(&mut self, timeout_ms: u64) -> Step {
        let found = self.poll(1, timeout_ms)?;
        self.expect(&found, &vec![], "the list of completions")
    }

    /// Number of packets that the device has dropped for a reason; 0 if it does not report drops.
    pub fn dropped(&mut self, reason: &str) -> Step<u64> {
        let all = self.drops()?;
        let found = all.iter().find(|(name, _)| name == reason);
        found.map(|(_, count)| *count).ok_or_else(|| format!("no counter {reason:?}"))
    }

    /// The next asynchronous event within `timeout_ms`, other than "communication established".
    pub fn async_event(&mut self, timeout_ms: u64) -> Step<Option<String>> {
        loop {
            let event = self.any_async_event(timeout_ms)?;
            if event.as_deref() != Some("communication established") {
                return Ok(event);
            }
        }
    }

    /// Binds a window by a queue pair, and waits for it. Returns where peers reach its first byte.
    /// Error: the bind fails.
    pub fn bind(&mut self, qp: usize, window: usize, range: Range, access: u32) -> Step<Remote> {
        let shown = self.post_bind(qp, window, range, access)?;
        self.succeeds(90, Opcode::BindMw)?;
        Ok(shown)
    }
}
