//! What a script is played to: a queue pair of some implementation, whose peer is the script.

use rocinante_stack::mem::Access;
use rocinante_stack::types::{Key, Mtu, Qpn};
use rocinante_stack::verbs::{QpState, SendOp, WcOpcode};

/// What steps return: the error says what was otherwise than it should be.
pub type Step<T = ()> = Result<T, String>;

/// An implementation with a reliable connection, and the way on which packets reach it and leave it.
///
/// An implementation in virtual time jumps to its next deadline when it is asked to wait; a real one is given seconds.
pub trait Subject {
    /// Whether it is Linux Soft-RoCE, whose [departures](crate::Departure) are known. Everybody else is held to the specification.
    fn is_soft_roce(&self) -> bool;

    /// Takes the queue pair to RTS: from RESET, into which it is taken if it was connected before. Completions that nobody took are forgotten, and
    /// packets of before are not heard any more.
    ///
    /// # Errors
    /// It cannot be done; likewise in all that follow.
    fn connect(&mut self, options: &Options) -> Step;

    /// The number of the queue pair.
    fn qpn(&self) -> Qpn;

    /// Changes the state and nothing else.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    fn modify(&mut self, state: QpState) -> Step;

    /// The state.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    fn state(&mut self) -> Step<QpState>;

    /// Registers zeroed memory, `foreign` in a protection domain in which the queue pair is not; regions are numbered from 0.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    fn register(&mut self, len: usize, access: Access, foreign: bool) -> Step<Remote>;

    /// Deregisters a region.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    fn deregister(&mut self, region: usize) -> Step;

    /// Changes bytes of a region, as its program would.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    fn store(&mut self, region: usize, offset: usize, bytes: &[u8]) -> Step;

    /// Bytes of a region.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    fn load(&mut self, range: Range) -> Step<Vec<u8>>;

    /// Posts a receive.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    fn post_recv(&mut self, wr_id: u64, ranges: &[Range]) -> Step;

    /// Posts a signaled request.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    fn post_send(&mut self, wr_id: u64, op: SendOp, ranges: &[Range], fence: bool) -> Step;

    /// The next completion: with `wait` it must come, else only if it is there.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    fn completion(&mut self, wait: bool) -> Step<Option<Completion>>;

    /// Delivers a packet, whose ICRC is yet to be computed if `seal`.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    fn hear(&mut self, packet: Vec<u8>, seal: bool) -> Step;

    /// The next packet of the queue pair: with `wait` it must come, else only if it comes within a moment. Its ICRC is right.
    ///
    /// # Errors
    /// As [`connect`](Self::connect); or the ICRC is wrong.
    fn say(&mut self, wait: bool) -> Step<Option<Vec<u8>>>;
}

/// How the queue pair is connected (`struct ibv_qp_attr`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Path MTU.
    pub mtu: Mtu,
    /// The first PSN of its requests, and of those of its peer.
    pub psn: [u32; 2],
    /// ACK timeout: 4.096 µs · 2^timeout; 0 means for ever.
    pub timeout: u8,
    /// Repetitions without an answer.
    pub retry_cnt: u8,
    /// Repetitions after RNR NAKs, of which 7 means for ever.
    pub rnr_retry: u8,
    /// READs and atomics that it asks for, and that it answers.
    pub rd_atomic: u8,
    /// What its peer may do.
    pub access: Access,
}

impl Default for Options {
    /// Short packets and simple PSNs; and nothing is repeated because of the time, so that a slow machine changes no packet.
    fn default() -> Self {
        Self {
            mtu: Mtu::Mtu256,
            psn: [0x10, 0x5000],
            timeout: 0,
            retry_cnt: 6,
            rnr_retry: 6,
            rd_atomic: 4,
            access: Access::ALL,
        }
    }
}

impl Options {
    /// The code of the delay that the queue pair asks for when it has no receive: 0.64 ms.
    pub const MIN_RNR_TIMER: u8 = 12;
}

/// A region that the peer may address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remote {
    /// The address of its first byte.
    pub address: u64,
    /// The key.
    pub rkey: Key,
}

/// Bytes of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// The region's number.
    pub region: usize,
    /// The first byte.
    pub offset: usize,
    /// How many.
    pub len: usize,
}

/// A completion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completion {
    /// From the work request.
    pub wr_id: u64,
    /// The name in `verbs.h`, without `IBV_WC_`.
    pub status: String,
    /// What it was; meaningless unless it succeeded.
    pub opcode: WcOpcode,
    /// Bytes received.
    pub byte_len: u32,
    /// Immediate data.
    pub imm: Option<[u8; 4]>,
}
