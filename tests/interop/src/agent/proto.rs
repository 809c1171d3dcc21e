//! Requests of a scenario to a side, with a device of Rocinante or of the kernel. The requests are
//! the verbs as values: one scenario drives either side in either role, here or over TCP.

mod work;

use std::net::IpAddr;

pub use rocinante::verbs::{MwType, QpState};
use serde::{Deserialize, Serialize};

pub use self::work::*;
use super::machine::{Kind, Machine};
use crate::guest::Outcome;

/// A step of a side.
#[allow(missing_docs, reason = "the names of most fields say all")]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Request {
    /// Describe the machine and its device `name`: [`Reply::Machine`].
    Describe {
        /// As `ibv_devices` lists it. Without a port behind a colon, the first usable one counts.
        name: String,
        address: Option<IpAddr>,
    },
    /// Run one of the [checks](crate::hardware::checks) of the kernel's device.
    Check {
        check: String,
        /// The device.
        name: String,
        address: IpAddr,
    },
    /// Start one of the [programs of other projects](crate::matrix::programs), and kill the one
    /// started before.
    Start(Invocation),
    /// Wait until the program ends: [`Reply::Ended`].
    Ended {
        /// At most this long.
        timeout_ms: u64,
    },
    /// Open the device `name` and use its GID for `address`: [`Reply::Opened`]. All requests below
    /// need it.
    Open {
        /// As `ibv_devices` lists it. Rocinante ignores it: its device is the one with the address.
        name: String,
        address: IpAddr,
    },
    /// Register a zeroed region. Answered by [`Reply::Region`]; all regions are numbered from 0.
    Region {
        /// Bytes.
        len: usize,
        /// Bits of `IBV_ACCESS_*`.
        access: u32,
    },
    /// Register a region anew: [`Reply::Region`].
    Rereg {
        region: usize,
        /// The new bits of `IBV_ACCESS_*`, if they change.
        access: Option<u32>,
        /// The bytes of new, zeroed memory, if the memory changes.
        len: Option<usize>,
    },
    /// Allocate a memory window, not bound; windows are numbered from 0.
    Window {
        #[serde(with = "MwTypeWord")]
        mw_type: MwType,
    },
    /// Bind a window: of type 1 by `ibv_bind_mw`, of type 2 by a work request. Answered by
    /// [`Reply::Region`] as soon as it is posted: the address at which peers reach its first byte,
    /// and the new key.
    Bind {
        /// The queue pair that gets the request in its send queue.
        qp: usize,
        /// Returned in the completion.
        wr_id: u64,
        window: usize,
        /// The range to bind to, which need not be inside the region.
        range: Range,
        /// Rights of peers, as bits of `IBV_ACCESS_*`; and [`ZERO_BASED`].
        access: u32,
    },
    /// Deallocate a window.
    FreeWindow { window: usize },
    /// Register a zeroed region in a protection domain without queue pairs: requests that name it
    /// fail. Answered by [`Reply::Region`].
    ForeignRegion {
        /// Bytes.
        len: usize,
        /// Bits of `IBV_ACCESS_*`.
        access: u32,
    },
    /// Deregister a region; the others keep their numbers.
    Deregister { region: usize },
    /// Store bytes.
    Put {
        region: usize,
        /// The first byte.
        offset: usize,
        bytes: Vec<u8>,
    },
    /// Fill a range with [`pattern`](rocinante_tests::harness::pattern) of a seed.
    Fill {
        range: Range,
        /// The pattern's seed.
        seed: u64,
    },
    /// Compare a range with its expected bytes: [`Reply::Difference`].
    Compare {
        range: Range,
        /// [`pattern`](rocinante_tests::harness::pattern) of this seed, from this byte of it on;
        /// `None` means zeros.
        with: Option<(u64, usize)>,
    },
    /// Store eight bytes in the machine's order.
    Store {
        /// Region and byte.
        at: Range,
        value: u64,
    },
    /// Load eight bytes in the machine's order: [`Reply::Value`].
    Load(Range),
    /// Return the bytes of a range: [`Reply::Bytes`].
    Bytes(Range),
    /// Make a shared receive queue; they are numbered from 0.
    Srq {
        /// Receives that it holds.
        depth: u32,
    },
    /// Ask for one event of a shared receive queue, once fewer than `limit` receives are left.
    ArmSrq { srq: usize, limit: u32 },
    /// Make a queue pair in the INIT state. Answered by [`Reply::Qp`]; queue pairs are numbered
    /// from 0.
    Qp {
        /// The transport service of the queue pair.
        service: Service,
        /// Rights of the peer, as bits of `IBV_ACCESS_*`; without meaning for datagrams.
        access: u32,
        /// The shared receive queue for its receives; `None` gives it a queue of its own.
        srq: Option<usize>,
    },
    /// Make an address handle; they are numbered from 0.
    Handle { address: IpAddr },
    /// Make an address handle for the answer to the last datagram completed.
    HandleOfLast {
        /// The start of the receive that it completed.
        grh: Range,
    },
    /// Attach a queue pair for datagrams to a multicast group.
    Attach { qp: usize, group: IpAddr },
    /// Detach it again.
    Detach { qp: usize, group: IpAddr },
    /// Take a queue pair from RESET to INIT.
    Prepare {
        qp: usize,
        /// Rights of the peer.
        access: u32,
    },
    /// Take a queue pair to RTR and RTS.
    Connect {
        qp: usize,
        /// The peer; without meaning for datagrams.
        peer: Peer,
        /// The connection's options.
        how: Connection,
    },
    /// Change only the state of a queue pair.
    Modify {
        qp: usize,
        #[serde(with = "StateWord")]
        state: QpState,
    },
    /// Return the state of a queue pair: [`Reply::State`].
    Query { qp: usize },
    /// Destroy a queue pair.
    Destroy { qp: usize },
    /// Post send requests.
    Send {
        /// The queue pair.
        qp: usize,
        /// The requests.
        list: Vec<Send>,
    },
    /// Post receives, numbered from `first`, one per range.
    Recv {
        /// The queue pair.
        qp: usize,
        /// The number of the first.
        first: u64,
        /// The elements of each receive.
        list: Vec<Vec<Range>>,
    },
    /// Post receives to a shared receive queue, numbered from `first`.
    RecvShared {
        /// The shared receive queue.
        srq: usize,
        /// The number of the first.
        first: u64,
        /// The elements of each receive.
        list: Vec<Vec<Range>>,
    },
    /// Wait for `count` completions, at most for `timeout_ms`: [`Reply::Completions`].
    Poll {
        /// Number of completions.
        count: usize,
        /// At most this long.
        timeout_ms: u64,
    },
    /// Ask for an event of the completion queue.
    Arm {
        /// Only for a solicited completion.
        solicited: bool,
    },
    /// Wait for an event of the completion queue: [`Reply::Event`].
    Event {
        /// At most this long.
        timeout_ms: u64,
    },
    /// Wait for an asynchronous event: [`Reply::Async`].
    Async {
        /// At most this long.
        timeout_ms: u64,
    },
    /// Return the device's drops since it was opened: [`Reply::Drops`].
    Drops,
    /// Return the device's received packets since it was opened: [`Reply::Heard`].
    Heard,
    /// Return the device's counters, for an investigation: [`Reply::Counters`].
    Counters,
}

/// The answer of a side.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Reply {
    /// Done.
    Done,
    /// The step failed.
    Failed(String),
    /// Answers [`Request::Describe`].
    Machine(Box<Machine>),
    /// Answers [`Request::Ended`]: the program's outcome, if it has ended.
    Ended(Option<Outcome>),
    /// Answers [`Request::Open`].
    Opened(About),
    /// Answers [`Request::Region`], [`Request::ForeignRegion`], [`Request::Rereg`] and
    /// [`Request::Bind`].
    Region(Remote),
    /// Answers [`Request::Compare`], with the difference if there is one.
    Difference(Option<Difference>),
    /// Answers [`Request::Load`].
    Value(u64),
    /// Answers [`Request::Bytes`].
    Bytes(Vec<u8>),
    /// Answers [`Request::Qp`].
    Qp {
        /// Its number on the wire.
        qpn: u32,
    },
    /// Answers [`Request::Query`].
    State(#[serde(with = "StateWord")] QpState),
    /// Answers [`Request::Poll`], with the completions found.
    Completions(Vec<Completion>),
    /// Answers [`Request::Event`]: whether there was one.
    Event(bool),
    /// Answers [`Request::Async`]: the event's name in `verbs.h` without `IBV_EVENT_`, if there was
    /// one.
    Async(Option<String>),
    /// Answers [`Request::Drops`]: reasons and packet counts. Soft-RoCE reports none.
    Drops(Vec<(String, u64)>),
    /// Answers [`Request::Heard`].
    Heard(Heard),
    /// Answers [`Request::Counters`]: all counters that are not zero, by the device's names.
    Counters(String),
}

/// Packets that a device has received.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heard {
    /// All.
    pub packets: u64,
    /// Duplicate requests.
    pub duplicates: u64,
    /// Requests behind a gap.
    pub gaps: u64,
}

/// The transport service of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Service {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Datagrams.
    Ud {
        /// The queue pair takes datagrams with this key.
        qkey: u32,
    },
}

/// [`MwType`] as a word.
#[derive(Serialize, Deserialize)]
#[serde(remote = "MwType")]
enum MwTypeWord {
    Type1,
    Type2,
}

/// Properties of a device that a scenario needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// Its kind.
    pub kind: Kind,
    /// READs and atomics that a queue pair may have outstanding.
    pub max_rd_atomic: u8,
    /// Whether it has atomics.
    pub atomics: bool,
    /// Whether it answers ATOMIC WRITE.
    pub atomic_write: bool,
    /// Whether it answers FLUSH to global visibility.
    pub flush: bool,
    /// Whether it has memory windows of type 1, and of type 2.
    pub windows: [bool; 2],
    /// Whether requests may carry inline data.
    pub inline: bool,
    /// The largest path MTU that fits the link, in bytes.
    pub active_mtu: u32,
}

/// How to start a program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Invocation {
    /// The name of one of the [programs](crate::matrix::programs::PROGRAMS); the agent runs nothing
    /// else.
    pub program: String,
    /// The RDMA device.
    pub device: String,
    /// Its address, which determines the GID index.
    pub address: IpAddr,
    /// Path MTU in bytes.
    pub mtu: u32,
    /// TCP port on which the sides find each other.
    pub port: u16,
    /// The server's address; `None` if this program is the server.
    pub server: Option<IpAddr>,
}

/// The difference of a range from its expected bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// The first byte that differs.
    pub first: usize,
    /// Number of bytes that differ.
    pub count: usize,
    /// Eight bytes found from the first on; zeros beyond the end.
    pub found: [u8; 8],
}

/// Bytes of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    /// The region's number.
    pub region: usize,
    /// The first byte.
    pub offset: usize,
    /// Number of bytes.
    pub len: usize,
}

/// A region that the peer may address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remote {
    /// The address of its first byte.
    pub address: u64,
    /// The key.
    pub rkey: u32,
}

/// The other end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// Its address.
    pub address: IpAddr,
    /// Its queue pair.
    pub qpn: u32,
    /// The first PSN that it will send.
    pub psn: u32,
}

/// How a queue pair is connected (`struct ibv_qp_attr`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    /// Our first PSN.
    pub psn: u32,
    /// Path MTU in bytes.
    pub mtu: u32,
    /// ACK timeout: 4.096 µs · 2^timeout.
    pub timeout: u8,
    /// 0 to 7.
    pub retry_cnt: u8,
    /// 0 to 7.
    pub rnr_retry: u8,
    /// The code of the delay for RNR NAKs.
    pub min_rnr_timer: u8,
    /// READs and atomics outstanding in each direction.
    pub rd_atomic: u8,
}

/// [`QpState`] as a word.
#[derive(Serialize, Deserialize)]
#[serde(remote = "QpState")]
enum StateWord {
    Reset,
    Init,
    Rtr,
    Rts,
    Sqd,
    Sqe,
    Err,
}
