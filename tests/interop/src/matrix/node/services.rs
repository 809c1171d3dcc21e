//! A side's methods for datagrams, several queue pairs and shared receive queues.

use super::{Node, Step};
use crate::agent::proto::{Completion, Heard, Op, Opcode, QpState, Range, Reply, Request, Send};

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
        self.do_(&Request::Send { qp, list: list.to_vec() })
    }

    /// Posts receives of one element each to a queue pair, numbered from `first`.
    pub fn receive_on(&mut self, qp: usize, first: u64, ranges: &[Range]) -> Step {
        let list = ranges.iter().map(|range| vec![*range]).collect();
        self.do_(&Request::Recv { qp, first, list })
    }

    /// The state of a queue pair.
    pub fn state_of(&mut self, qp: usize) -> Step<QpState> {
        match self.ask(&Request::Query { qp })? {
            Reply::State(state) => Ok(state),
            other => Err(format!("{}: the state is {other:?}", self.name())),
        }
    }

    /// Posts receives of one element each to the shared receive queue 0, numbered from `first`.
    pub fn receive_shared(&mut self, first: u64, ranges: &[Range]) -> Step {
        let list = ranges.iter().map(|range| vec![*range]).collect();
        self.do_(&Request::RecvShared { srq: 0, first, list })
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

    /// The bytes of a range.
    pub fn bytes(&mut self, range: Range) -> Step<Vec<u8>> {
        match self.ask(&Request::Bytes(range))? {
            Reply::Bytes(bytes) => Ok(bytes),
            other => Err(format!("{}: bytes are {other:?}", self.name())),
        }
    }

    /// Number of packets that the device has dropped for a reason; 0 if it does not report drops.
    pub fn dropped(&mut self, reason: &str) -> Step<u64> {
        match self.ask(&Request::Drops)? {
            Reply::Drops(all) => {
                let found = all.iter().find(|(name, _)| name == reason);
                found.map(|(_, count)| *count).ok_or_else(|| format!("no counter {reason:?}"))
            }
            other => Err(format!("{}: drops are {other:?}", self.name())),
        }
    }

    /// The packets that the device has received.
    pub fn heard(&mut self) -> Step<Heard> {
        match self.ask(&Request::Heard)? {
            Reply::Heard(heard) => Ok(heard),
            other => Err(format!("{}: its received packets are {other:?}", self.name())),
        }
    }

    /// The next asynchronous event within `timeout_ms`, other than "communication established".
    pub fn async_event(&mut self, timeout_ms: u64) -> Step<Option<String>> {
        loop {
            match self.ask(&Request::Async { timeout_ms })? {
                Reply::Async(Some(event)) if event == "communication established" => {}
                Reply::Async(event) => return Ok(event),
                other => return Err(format!("{}: the event is {other:?}", self.name())),
            }
        }
    }
}
