//! The page of a device: memory that an agent makes, in which a program publishes what its device
//! has counted. `docs/agent.md` describes how it is asked for and its layout, which this file has
//! for both sides.
//!
//! Words are numbers of eight bytes of the machine's order. Version, texts and sizes come first,
//! then a section for each shard, then the rows of queue pairs. A section and its rows are written
//! under its sequence number, which is odd meanwhile.

mod ledger;
mod read;
#[allow(unreachable_pub, reason = "tests/models uses it as a module of its own")]
mod sequence;
mod write;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic as atomics;

use rustix::net::{RecvFlags, ReturnFlags};
use serde::{Deserialize, Serialize};

pub use self::ledger::{Account, Amounts, Exceeded, Ledger, NO_LIMIT, RESOURCES, Seat, Usage};
pub use self::read::{Reading, is_begun, queue_pairs, read};
pub use self::write::{Page, Section};
use super::transport::message;
use crate::frames::xdp::memory_file;
use crate::kernel::rights;

/// The version of the layout.
pub const VERSION: u64 = 1;
/// Bytes of a page. Only those that are written take memory.
pub const BYTES: usize = HELD_AT + ROWS_MAX * 8;
/// The bytes of one of an agent of before, which has no requests of queue pairs.
const BYTES_MIN: usize = REQUESTS_AT;
/// The most queue pairs of all shards together.
pub const ROWS_MAX: usize = 4096;
/// The most shards.
pub const SHARDS_MAX: usize = super::message::SHARDS_MAX;

/// The most pages of a container, and slots of its ledger.
pub const PAGES_MAX: usize = 256;

const ROW_BYTES: usize = 64;
const SECTION_BYTES: usize = 512;
const SECTIONS_AT: usize = 1024;
const ROWS_AT: usize = SECTIONS_AT + SHARDS_MAX * SECTION_BYTES;
/// A word for each row: requests sent, and in the upper half requests received.
const REQUESTS_AT: usize = ROWS_AT + ROWS_MAX * ROW_BYTES;
/// Likewise, [`QueuePair::held`].
const HELD_AT: usize = REQUESTS_AT + ROWS_MAX * 8;

/// Words of the head.
mod head {
    pub(super) const VERSION: usize = 0;
    pub(super) const SEQUENCE: usize = 1;
    pub(super) const SHARDS: usize = 2;
    /// The number of counters. Another release has fewer, or more behind those of this one.
    pub(super) const COUNTERS: usize = 3;
    pub(super) const DEVICE: std::ops::Range<usize> = 8..16;
    pub(super) const BACKEND: std::ops::Range<usize> = 16..18;
    pub(super) const WHY: std::ops::Range<usize> = 24..88;
    pub(super) const END: usize = WHY.end;
}

/// Words of a section.
mod section {
    pub(super) const SEQUENCE: usize = 0;
    /// Rows that may have a queue pair.
    pub(super) const ROWS: usize = 1;
    pub(super) const OBJECTS: usize = 2;
    pub(super) const COUNTERS: usize = OBJECTS + super::OBJECTS.len();
    pub(super) const END: usize = super::SECTION_BYTES / 8;
}

const _: () = assert!(head::END * 8 <= SECTIONS_AT);
const _: () = assert!(section::COUNTERS + COUNTERS.len() <= section::END);

/// The counters, in the order of a page: the kernel's names for those of a port and of a driver,
/// then own ones, each with its meaning. New ones come last. Names of drops begin with [`DROP`].
pub const COUNTERS: [(&str, &str); 51] = [
    ("port_xmit_data", "Bytes sent, in words of four"),
    ("port_rcv_data", "Bytes received, in words of four"),
    ("port_xmit_packets", "Packets sent"),
    ("port_rcv_packets", "Packets received"),
    ("unicast_xmit_packets", "Packets sent to one receiver"),
    ("unicast_rcv_packets", "Packets received that were for one receiver"),
    ("multicast_xmit_packets", "Packets sent to a group"),
    ("multicast_rcv_packets", "Packets received that were for a group"),
    ("port_rcv_errors", "Malformed packets, and those with a wrong checksum"),
    ("port_xmit_discards", "Packets that the kernel refused"),
    ("excessive_buffer_overrun_errors", "Packets lost because a queue was full"),
    ("sent_pkts", "Packets sent by queue pairs"),
    ("rcvd_pkts", "Packets accepted by queue pairs"),
    ("duplicate_request", "Requests that arrived again"),
    ("out_of_seq_request", "Requests that arrived after a gap"),
    ("rcvd_rnr_err", "Receiver-not-ready NAKs received"),
    ("send_rnr_err", "Receiver-not-ready NAKs sent"),
    ("rcvd_seq_err", "Sequence NAKs received"),
    ("retry_exceeded_err", "Queue pairs that gave up on a peer that does not answer"),
    ("retry_rnr_exceeded_err", "Queue pairs that gave up on a peer without posted receives"),
    ("send_err", "Packets that could not be sent"),
    ("local_ack_timeout_err", "Acknowledgement timeouts"),
    ("implied_nak_seq_err", "Repetitions because a later response arrived first"),
    ("packet_seq_err", "Sequence NAKs received, by their name in mlx5"),
    ("np_cnp_sent", "Congestion notifications sent"),
    ("rp_cnp_handled", "Congestion notifications received"),
    ("np_ecn_marked_roce_packets", "Packets received with a congestion mark"),
    ("resp_remote_access_errors", "Requests refused for a key, range or permission"),
    ("rx_icrc_encapsulated", "Packets with a wrong checksum of the transport"),
    ("retrans_pkts", "Packets sent again"),
    ("sent_requests", "Send requests that succeeded"),
    ("rcvd_requests", "Messages of peers that were executed"),
    ("undriven_us", "Microseconds by which deadlines were met late: no processor drove the device"),
    ("drop_malformed", "Packets dropped: not RoCEv2"),
    ("drop_unknown_opcode", "Packets dropped: a reserved opcode"),
    ("drop_version", "Packets dropped: another version of the transport header"),
    ("drop_unknown_qpn", "Packets dropped: no such queue pair, or it does not receive"),
    ("drop_pkey", "Packets dropped: another partition key"),
    ("drop_wrong_source", "Packets dropped: not from the connected peer"),
    ("drop_wrong_service", "Packets dropped: of another service than the queue pair's"),
    ("drop_ghost_response", "Packets dropped: a response to nothing"),
    ("drop_bad_syndrome", "Packets dropped: a reserved syndrome"),
    ("drop_stale_duplicate", "Packets dropped: a duplicate that cannot be answered any more"),
    ("drop_out_of_sequence", "Packets dropped: a request behind a gap"),
    ("drop_incomplete", "Packets dropped: the rest of an unreliable message was lost"),
    ("drop_no_receive", "Packets dropped: no receive for an unreliable message"),
    ("drop_too_long", "Packets dropped: an unreliable message longer than its receive"),
    ("drop_unknown_group", "Packets dropped: to a group without a queue pair"),
    ("drop_qkey", "Packets dropped: another Q_Key"),
    ("drop_unasked_answer", "Packets dropped: an answer to no question of recognition"),
    ("drop_too_many_questions", "Packets dropped: too many questions of recognition"),
];

/// A value for each of [`COUNTERS`], in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts(pub [u64; COUNTERS.len()]);

impl Default for Counts {
    fn default() -> Self {
        Self([0; COUNTERS.len()])
    }
}

impl Counts {
    /// Adds others.
    pub fn add(&mut self, more: &Self) {
        let both = self.0.iter_mut().zip(more.0);
        both.for_each(|(sum, more)| *sum = sum.saturating_add(more));
    }

    /// The names with their values.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        COUNTERS.iter().map(|(name, _)| *name).zip(self.0)
    }
}

/// The beginning of the names of counters of dropped packets.
pub const DROP: &str = "drop_";

/// The objects of a device, in the order of a page, as rdma-resource(8) names them.
pub const OBJECTS: [&str; 5] = ["pd", "cq", "srq", "qp", "mr"];
/// The states of a queue pair, by their numbers in a page.
pub const STATES: [&str; 7] = ["RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"];
/// The services of a queue pair, by their numbers in a page.
pub const SERVICES: [&str; 3] = ["RC", "UC", "UD"];

/// The facts about a device that do not change.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Head {
    /// Its name; 64 bytes of it are published.
    pub device: String,
    /// Its backend's name.
    pub backend: String,
    /// The reason for this backend; 512 bytes of it are published.
    pub why: String,
    /// The number of shards.
    pub shards: usize,
}

/// A queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuePair {
    /// Its number, and that of its peer; 24 bits.
    pub numbers: [u32; 2],
    /// By its number in [`STATES`].
    pub state: u8,
    /// By its number in [`SERVICES`].
    pub service: u8,
    /// Its peer's address.
    pub peer: Option<IpAddr>,
    /// Packets and bytes sent.
    pub sent: [u64; 2],
    /// Packets and bytes received.
    pub received: [u64; 2],
    /// Packets sent again, modulo 2^32.
    pub repeated: u32,
    /// Receiver-not-ready NAKs received, modulo 2^32.
    pub not_ready: u32,
    /// Requests sent that succeeded, and messages received that were executed, modulo 2^32.
    pub requests: [u32; 2],
    /// Turns in which it sent nothing more for want of the peer's room, and for congestion or
    /// losses, modulo 2^32.
    pub held: [u32; 2],
}

/// The socket for pages of an agent whose socket is at `socket`.
#[must_use]
pub fn path(socket: &Path) -> PathBuf {
    socket.with_extension("page")
}

/// The longest message, in bytes.
const MESSAGE_BYTES_MAX: usize = 256;
const SPACE: usize = rustix::cmsg_space!(ScmRights(2));

/// A program's request for a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ask {
    version: u32,
    /// Any number that the program gives no other device.
    pub key: u64,
    /// Whether it keeps limits, and wants a seat. A program of before says nothing of it.
    #[serde(default)]
    pub ledger: bool,
}

/// An agent's answer, with the page's descriptor, and perhaps the ledger's.
#[derive(Serialize, Deserialize)]
struct Answer {
    version: u32,
    bytes: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ledger: Option<LedgerAnswer>,
}

#[derive(Serialize, Deserialize)]
struct LedgerAnswer {
    bytes: usize,
    slot: usize,
}

/// Asks for a page and a seat, without waiting. `key` is any number that this program gives no
/// other device. Error: the kernel's.
pub fn ask(to: impl AsFd, key: u64) -> io::Result<()> {
    let ask = Ask { version: super::VERSION, key, ledger: true };
    rights::send::<SPACE>(to, &bytes_of(&ask), &[])
}

/// The page that an agent hands over, if it has answered, and the seat, if it gives one. Error:
/// `WouldBlock` if there is no answer yet; `UnexpectedEof` if there will be none; `InvalidData` if
/// it is none; the kernel's.
pub fn receive(from: impl AsFd) -> io::Result<(Page, Option<Seat>)> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    let mut bytes = [0; MESSAGE_BYTES_MAX];
    let (count, flags, descriptors) =
        rights::receive::<SPACE>(from, &mut bytes, RecvFlags::DONTWAIT)?;
    match count {
        0 => return Err(io::ErrorKind::UnexpectedEof.into()),
        _ if flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) => return Err(invalid()),
        _ => {}
    }
    let answer: Answer = serde_json::from_slice(&bytes[..count])?;
    let mut descriptors = descriptors.into_iter().filter(|_| answer.version == super::VERSION);
    let page = descriptors.next().ok_or_else(invalid)?;
    let page = Page::of_fd(page, answer.bytes)?;
    let seat = |LedgerAnswer { bytes, slot }| {
        let ledger = descriptors.next().filter(|_| slot < PAGES_MAX).ok_or_else(invalid)?;
        Ok::<_, io::Error>(Seat {
            ledger: Ledger::of_fd(ledger.as_fd(), bytes)?,
            slot,
            _file: ledger,
        })
    };
    Ok((page, answer.ledger.map(seat).transpose()?))
}

/// A request, for an agent, without waiting. Error: `WouldBlock` if there is no message yet;
/// `UnexpectedEof` if there will be none; `InvalidData` if it is none, or of another version; the
/// kernel's.
pub fn asked(from: impl AsFd) -> io::Result<Ask> {
    let ask: Ask = message::<Ask, MESSAGE_BYTES_MAX>(from)?;
    (ask.version == super::VERSION).then_some(ask).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// A fresh page, whose size no process can change. Error: no descriptor left.
pub fn make() -> io::Result<OwnedFd> {
    memory_file(c"rocinante-page", BYTES)
}

/// The names of pages and ledgers below `/proc/PID/fd`: processes of the same user find them there.
pub const LINKS: [&str; 2] =
    ["/memfd:rocinante-page (deleted)", "/memfd:rocinante-ledger (deleted)"];

/// Hands a page over, and a ledger with the slot of the device if it asked for one, without
/// waiting. Error: the kernel's: the program has gone.
pub fn hand_over(
    to: impl AsFd,
    page: BorrowedFd<'_>,
    ledger: Option<(BorrowedFd<'_>, usize)>,
) -> io::Result<()> {
    let of_ledger = ledger.map(|(_, slot)| LedgerAnswer { bytes: ledger::BYTES, slot });
    let answer = Answer { version: super::VERSION, bytes: BYTES, ledger: of_ledger };
    let both: Vec<_> = [Some(page), ledger.map(|it| it.0)].into_iter().flatten().collect();
    rights::send::<SPACE>(to, &bytes_of(&answer), &both)
}

fn bytes_of(message: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(message).expect("plain values without maps")
}

/// The first row of a shard and the number of its rows.
fn rows_of(shard: usize, shards: usize) -> (usize, usize) {
    let each = ROWS_MAX / shards.max(1);
    (shard * each, each)
}

#[cfg(test)]
mod tests;
