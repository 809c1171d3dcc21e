//! The subject of a script: a queue pair of some implementation. The script is its peer.

use rocinante_stack::mem::Access;
use rocinante_stack::types::{Key, Mtu, Qpn};
use rocinante_stack::verbs::{QpState, SendOp, WcOpcode};

/// The result of a step; the error names the difference from the expectation.
pub type Step<T = ()> = Result<T, String>;

/// An implementation with a reliable connection, and the path of its packets.
///
/// An implementation in virtual time jumps to its next deadline when it has to wait; a real one
/// gets some seconds.
pub trait Subject {
    /// Whether it is Linux Soft-RoCE, with its known [departures](crate::Departure). Any other
    /// implementation must follow the specification.
    fn is_soft_roce(&self) -> bool;

    /// Takes the queue pair to RTS, starting from RESET; if it was connected before, it goes to
    /// RESET first. Old completions that were not polled are discarded, and old packets are
    /// ignored. Error: the subject cannot do it; the same in all methods that follow.
    fn connect(&mut self, options: &Options) -> Step;

    /// The number of the queue pair.
    fn qpn(&self) -> Qpn;

    /// Changes the state and no other attribute.
    fn modify(&mut self, state: QpState) -> Step;

    /// The state.
    fn state(&mut self) -> Step<QpState>;

    /// Registers zeroed memory; `foreign` means in another protection domain than the queue pair's.
    /// Regions are numbered from 0.
    fn register(&mut self, len: usize, access: Access, foreign: bool) -> Step<Remote>;

    /// Deregisters a region.
    fn deregister(&mut self, region: usize) -> Step;

    /// Changes bytes of a region, as the program would.
    fn store(&mut self, region: usize, offset: usize, bytes: &[u8]) -> Step;

    /// Reads bytes of a region.
    fn load(&mut self, range: Range) -> Step<Vec<u8>>;

    /// Posts a receive.
    fn post_recv(&mut self, wr_id: u64, ranges: &[Range]) -> Step;

    /// Posts a signaled request.
    fn post_send(&mut self, wr_id: u64, op: SendOp, ranges: &[Range], fence: bool) -> Step;

    /// The next completion. With `wait` it must come; otherwise only a completion that is already
    /// there is returned.
    fn completion(&mut self, wait: bool) -> Step<Option<Completion>>;

    /// Delivers a packet. With `seal`, its ICRC is computed first.
    fn receive(&mut self, packet: Vec<u8>, seal: bool) -> Step;

    /// The next packet from the queue pair. With `wait` it must come; otherwise only one that comes
    /// within a moment is returned. Its ICRC is right. Error: as [`connect`](Self::connect); also
    /// if the ICRC is wrong.
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
    /// Retries without a response.
    pub retry_cnt: u8,
    /// RNR retries; 7 means for ever.
    pub rnr_retry: u8,
    /// READs and atomics that it may have outstanding, and that it serves at a time.
    pub rd_atomic: u8,
    /// Operations that the peer may use.
    pub access: Access,
}

impl Default for Options {
    /// Short packets and simple PSNs. No timeout, so that a slow machine changes no packet.
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
    /// Length in bytes.
    pub len: usize,
}

/// A completion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completion {
    /// From the work request.
    pub wr_id: u64,
    /// The name in `verbs.h`, without `IBV_WC_`.
    pub status: String,
    /// The operation; meaningless unless the status is success.
    pub opcode: WcOpcode,
    /// Bytes received.
    pub byte_len: u32,
    /// Immediate data.
    pub imm: Option<[u8; 4]>,
}
