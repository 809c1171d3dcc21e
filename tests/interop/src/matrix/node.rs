//! One side of a scenario: an agent, with methods in the words of scenarios.

mod services;

use std::net::IpAddr;

use serde::de::DeserializeOwned;

pub(super) use self::services::GRH;
use super::verdict::cannot;
use crate::agent::machine::Kind;
use crate::agent::proto::{
    ALL, About, Completion, FLUSH_GLOBAL, Op, Opcode, Peer, QpState, REMOTE_ATOMIC, Range, Remote,
    Request, Send, Service,
};
use crate::agent::{self, Agent};

/// The result of a scenario's step: the error names the side and has its text.
pub type Step<T = ()> = Result<T, String>;

/// How long an expected event may take, in milliseconds.
pub(super) const PATIENCE_MS: u64 = 20_000;

/// Bytes of region 0, which each side has.
pub(super) const BUFFER: usize = 64 << 10;

/// One side, with a device, a region 0 of `BUFFER` bytes and full rights, and a queue pair 0.
pub struct Node {
    agent: Box<dyn Agent>,
    name: String,
    about: About,
    address: IpAddr,
    buffer: Remote,
    qpns: Vec<u32>,
}

/// `len` bytes of region 0 from `offset`.
#[must_use]
pub(super) fn at(offset: usize, len: usize) -> Range {
    Range { region: 0, offset, len }
}

/// A signaled request.
#[must_use]
pub(super) fn signaled(wr_id: u64, op: Op, ranges: &[Range]) -> Send {
    let ranges = ranges.to_vec();
    Send { wr_id, op, ranges, inline: false, signaled: true, solicited: false, fence: false }
}

pub(super) const SEND: Op = Op::Send { imm: None };

impl Node {
    /// Opens the device `device` with `address` on a side called `name`, with its region. Error:
    /// the error of the side.
    pub fn open(
        mut agent: Box<dyn Agent>,
        name: &str,
        device: &str,
        address: IpAddr,
    ) -> Step<Self> {
        let open = Request::open_device { name: device.to_owned(), address };
        let about = agent::call(&mut *agent, open).map_err(|why| format!("{name}: {why}"))?;
        let buffer = Remote { address: 0, rkey: 0 };
        let mut node = Self { agent, name: name.to_owned(), about, address, buffer, qpns: vec![] };
        node.buffer = node.region(BUFFER, node.full())?;
        Ok(node)
    }

    /// The side's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Properties of its device.
    #[must_use]
    pub fn about(&self) -> &About {
        &self.about
    }

    /// The kind of its device, as far as it matters for what to expect.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.about.kind
    }

    /// Expects the behaviour of the specification of its device.
    pub fn hold_to_the_specification(&mut self) {
        if self.about.kind == Kind::SoftRoce {
            self.about.kind = Kind::Device;
        }
    }

    /// All rights that the device can grant.
    #[must_use]
    pub fn full(&self) -> u32 {
        let flush = if self.about.flush { FLUSH_GLOBAL } else { 0 };
        let atomic = if self.about.atomics { ALL } else { ALL & !REMOTE_ATOMIC };
        atomic | flush
    }

    /// Puts its send queue into SQD. Error: the side's; or the device does not support
    /// this state.
    pub fn stop_sending(&mut self) -> Step {
        let stopped = self.modify(QpState::Sqd);
        match self.kind() {
            Kind::Device => stopped.map_err(|why| {
                cannot(format!("the device refuses to drain its send queue (SQD): {why}"))
            }),
            Kind::Rocinante | Kind::SoftRoce => stopped,
        }
    }

    /// Its address.
    #[must_use]
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// The number of its queue pair 0.
    #[must_use]
    pub fn qpn(&self) -> u32 {
        self.qpn_of(0)
    }

    /// Does a step. Error: the error of the side.
    pub(crate) fn call<T: DeserializeOwned>(&mut self, request: &Request) -> Step<T> {
        agent::call(&mut *self.agent, request.clone())
            .map_err(|why| format!("{}: {why} ({request:?})", self.name))
    }

    /// Makes a queue pair. It takes receives from the shared queue `srq` if that is given. The
    /// first one is the queue pair 0 of all other methods.
    pub fn make_qp(&mut self, service: Service, access: u32, srq: Option<usize>) -> Step {
        let qpn = self.create_qp(service, access, srq)?;
        self.qpns.push(qpn);
        Ok(())
    }

    /// The number of a queue pair; 0 if there is none.
    #[must_use]
    pub fn qpn_of(&self, qp: usize) -> u32 {
        self.qpns.get(qp).copied().unwrap_or(0)
    }

    /// The data with which a peer connects to a queue pair with the starting PSN `psn`.
    #[must_use]
    pub fn endpoint(&self, qp: usize, psn: u32) -> Peer {
        Peer { address: self.address, qpn: self.qpn_of(qp), psn }
    }

    /// Fails unless a range holds the pattern of `seed`, beginning with byte `skip` of the pattern.
    /// Error: it has other bytes, or the side's.
    pub fn holds_part(&mut self, range: Range, seed: u64, skip: usize) -> Step {
        self.is_as(range, Some((seed, skip)))
    }

    fn is_as(&mut self, range: Range, with: Option<(u64, usize)>) -> Step {
        let Some(how) = self.compare(range, with)? else { return Ok(()) };
        let wanted = if with.is_some() { "what was sent" } else { "zeros" };
        Err(format!("{}: {range:?} has not {wanted}: {how:02x?}", self.name))
    }

    /// Fails unless a range has the pattern of `seed`.
    pub fn holds(&mut self, range: Range, seed: u64) -> Step {
        self.holds_part(range, seed, 0)
    }

    /// Fails unless a range is zero. Error: it is not, or the side's.
    pub fn untouched(&mut self, range: Range) -> Step {
        self.is_as(range, None)
    }

    /// Address of a byte of region 0, and its key.
    #[must_use]
    pub fn remote(&self, offset: usize) -> (u64, u32) {
        (self.buffer.address + offset as u64, self.buffer.rkey)
    }

    /// WRITE to a byte of this side's region 0.
    #[must_use]
    pub fn write_to(&self, offset: usize, imm: Option<u32>) -> Op {
        let (remote, rkey) = self.remote(offset);
        Op::Write { remote, rkey, imm }
    }

    /// READ from a byte of this side's region 0.
    #[must_use]
    pub fn read_from(&self, offset: usize) -> Op {
        let (remote, rkey) = self.remote(offset);
        Op::Read { remote, rkey }
    }

    /// Posts send requests to queue pair 0.
    pub fn post(&mut self, list: &[Send]) -> Step {
        self.post_on(0, list)
    }

    /// Posts receives of one element each to queue pair 0, numbered from `first`.
    pub fn receive(&mut self, first: u64, ranges: &[Range]) -> Step {
        self.receive_on(0, first, ranges)
    }

    /// Posts one receive of several elements.
    pub fn receive_scattered(&mut self, wr_id: u64, ranges: &[Range]) -> Step {
        self.recv(0, wr_id, vec![ranges.to_vec()])
    }

    /// Waits for `count` completions. Error: there are fewer in that time.
    pub fn completions(&mut self, count: usize) -> Step<Vec<Completion>> {
        let found = self.poll(count, PATIENCE_MS)?;
        if found.len() < count {
            let state = self.state();
            return Err(format!("{}: only {found:?} of {count}, in {state:?}", self.name));
        }
        Ok(found)
    }

    /// Takes the next completion, which must be that of `wr_id` with this status. Error: it is
    /// another.
    pub fn ends(&mut self, wr_id: u64, status: &str) -> Step<Completion> {
        let wc = self.completions(1)?.remove(0);
        self.is_end(&wc, wr_id, status)?;
        Ok(wc)
    }

    fn is_end(&self, wc: &Completion, wr_id: u64, status: &str) -> Step {
        if (wc.wr_id, wc.status.as_str()) == (wr_id, status) {
            return Ok(());
        }
        Err(format!("{}: request {wr_id} should end in {status}, but: {wc:?}", self.name))
    }

    /// Takes the next completion, which must be the success of `wr_id`. Error: it is another.
    pub fn succeeds(&mut self, wr_id: u64, opcode: Opcode) -> Step {
        let wc = self.completions(1)?.remove(0);
        self.is_success(&wc, wr_id, opcode)
    }

    /// Fails unless a completion is the success of `wr_id`. Error: it is another.
    pub fn is_success(&self, wc: &Completion, wr_id: u64, opcode: Opcode) -> Step {
        self.is_end(wc, wr_id, "SUCCESS")?;
        self.expect(&wc.opcode, &opcode, "the opcode")
    }

    /// Takes the next completion, which must be that of the receive `wr_id` with this length and
    /// immediate. Error: it is another.
    pub fn received(&mut self, wr_id: u64, len: usize, imm: Option<u32>) -> Step {
        let wc = self.ends(wr_id, "SUCCESS")?;
        self.expect(&wc.opcode, &Opcode::Recv, "the opcode")?;
        self.expect(&(wc.byte_len as usize), &len, "the length")?;
        self.expect(&wc.invalidated, &None, "the invalidated key")?;
        self.expect(&wc.imm, &imm, "the immediate")
    }

    /// Posts one request and waits for its success. Error: it fails.
    pub fn perform(&mut self, wr_id: u64, op: Op, ranges: &[Range]) -> Step {
        self.post(&[signaled(wr_id, op, ranges)])?;
        self.succeeds(wr_id, opcode_of(op))
    }

    /// Fails unless the two values are equal. Error: they differ.
    pub fn expect<T: PartialEq + std::fmt::Debug>(
        &self,
        found: &T,
        wanted: &T,
        what: &str,
    ) -> Step {
        if found == wanted {
            return Ok(());
        }
        Err(format!("{}: {what} is {found:?} instead of {wanted:?}", self.name))
    }

    /// The state of queue pair 0.
    pub fn state(&mut self) -> Step<QpState> {
        self.state_of(0)
    }

    /// The state of queue pair 0, the completions not taken yet, and the device's counters.
    pub(super) fn standing(&mut self) -> String {
        const MANY: usize = 64;
        let state = self.state();
        let left = self.poll(MANY, 0).map(|left| {
            let brief = |wc: &Completion| format!("{} {}", wc.wr_id, wc.status);
            left.iter().map(brief).collect::<Vec<_>>().join(", ")
        });
        let counters = self.counters();
        format!(
            "{} is in {state:?}, with completions {left:?}, and counted {counters:?}",
            self.name
        )
    }

    /// Changes the state of queue pair 0.
    pub fn modify(&mut self, state: QpState) -> Step {
        self.change_state(0, state as usize)
    }
}

/// The opcode in the completion of a request.
#[must_use]
pub(super) fn opcode_of(op: Op) -> Opcode {
    match op {
        Op::Send { .. } | Op::SendTo { .. } | Op::SendInv { .. } => Opcode::Send,
        Op::LocalInv { .. } => Opcode::LocalInv,
        Op::Write { .. } => Opcode::RdmaWrite,
        Op::Read { .. } => Opcode::RdmaRead,
        Op::CompareSwap { .. } => Opcode::CompSwap,
        Op::FetchAdd { .. } => Opcode::FetchAdd,
        Op::Flush { .. } => Opcode::Flush,
        Op::AtomicWrite { .. } => Opcode::AtomicWrite,
    }
}
