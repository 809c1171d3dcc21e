//! What a scenario asks of a side, be its device Rocinante's or the kernel's: the verbs as values, so that one scenario
//! drives either side in either role, here or over TCP.

mod work;

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

pub use self::work::*;
use super::machine::{Kind, Machine};
use crate::guest::Outcome;

/// A step that a side is asked to do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Request {
    /// Tell about the machine and the device `name` of it; with its address if it has several: [`Reply::Machine`].
    Describe {
        /// As `ibv_devices` lists it; with a port behind a colon if it is not the first that can be used.
        name: String,
        /// One of its addresses.
        address: Option<IpAddr>,
    },
    /// Run one of the [checks](crate::hardware::checks) of the kernel's device.
    Check {
        /// Which.
        check: String,
        /// The device.
        name: String,
        /// One of its addresses.
        address: IpAddr,
    },
    /// Start one of the [programs that nobody here wrote](crate::matrix::programs), and kill the one that was started before.
    Start(Invocation),
    /// Wait for the end of the program: [`Reply::Ended`].
    Ended {
        /// For how long.
        timeout_ms: u64,
    },
    /// Open the device `name` and use its GID for `address`: [`Reply::Opened`]. Must come before all that follow.
    Open {
        /// As `ibv_devices` lists it; ignored by Rocinante, whose device is the one with the address.
        name: String,
        /// One of its addresses.
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
        /// Which.
        region: usize,
        /// With these bits of `IBV_ACCESS_*`, if they shall change.
        access: Option<u32>,
        /// With so many bytes of other memory, if it shall change; they are zero.
        len: Option<usize>,
    },
    /// Allocate a memory window, which is bound to nothing; they are numbered from 0.
    Window {
        /// Its type.
        mw_type: MwType,
    },
    /// Bind a window: of type 1 by `ibv_bind_mw`, of type 2 by a work request. Answered by [`Reply::Region`], as soon as it is posted: the
    /// address by which peers name its first byte, and the new key.
    Bind {
        /// The queue pair to whose send queue the request goes.
        qp: usize,
        /// Returned in the completion.
        wr_id: u64,
        /// Which.
        window: usize,
        /// To this, which need not be inside the region.
        range: Range,
        /// What peers may do, as bits of `IBV_ACCESS_*`; and [`ZERO_BASED`].
        access: u32,
    },
    /// Deallocate a window.
    FreeWindow {
        /// Which.
        window: usize,
    },
    /// Register a zeroed region in a protection domain of which no queue pair is: requests may name it, and fail. Answered by [`Reply::Region`].
    ForeignRegion {
        /// Bytes.
        len: usize,
        /// Bits of `IBV_ACCESS_*`.
        access: u32,
    },
    /// Deregister a region; the others keep their numbers.
    Deregister {
        /// Which.
        region: usize,
    },
    /// Store bytes.
    Put {
        /// In which region.
        region: usize,
        /// From which byte on.
        offset: usize,
        /// What.
        bytes: Vec<u8>,
    },
    /// Fill a range with [`pattern`](rocinante_tests::harness::pattern) of a seed.
    Fill {
        /// Which region, from which byte, how many.
        range: Range,
        /// Of the pattern.
        seed: u64,
    },
    /// Compare a range with what it should have: [`Reply::Difference`].
    Compare {
        /// Which region, from which byte, how many.
        range: Range,
        /// [`pattern`](rocinante_tests::harness::pattern) of this seed, from this byte of it on; nothing means zeros.
        with: Option<(u64, usize)>,
    },
    /// Store eight bytes in the machine's order.
    Store {
        /// Which region and byte.
        at: Range,
        /// The value.
        value: u64,
    },
    /// Load eight bytes in the machine's order: [`Reply::Value`].
    Load(Range),
    /// What a range has: [`Reply::Bytes`].
    Bytes(Range),
    /// Make a shared receive queue; they are numbered from 0.
    Srq {
        /// Receives that it holds.
        depth: u32,
    },
    /// Ask for one event of a shared receive queue, once fewer than `limit` receives are left.
    ArmSrq {
        /// Which.
        srq: usize,
        /// The limit.
        limit: u32,
    },
    /// Make a queue pair in the INIT state. Answered by [`Reply::Qp`]; queue pairs are numbered from 0.
    Qp {
        /// Its transport service.
        service: Service,
        /// What the peer may do, as bits of `IBV_ACCESS_*`; of no meaning for datagrams.
        access: u32,
        /// The shared receive queue that it takes its receives from, if it has none of its own.
        srq: Option<usize>,
    },
    /// Make an address handle; they are numbered from 0.
    Handle {
        /// For this address.
        address: IpAddr,
    },
    /// Make an address handle for the answer to the datagram whose completion was taken last.
    HandleOfLast {
        /// Where the receive begins that it completed.
        grh: Range,
    },
    /// Attach a queue pair for datagrams to a multicast group.
    Attach {
        /// Which.
        qp: usize,
        /// The group.
        group: IpAddr,
    },
    /// Detach it again.
    Detach {
        /// Which.
        qp: usize,
        /// The group.
        group: IpAddr,
    },
    /// Take a queue pair from RESET to INIT.
    Prepare {
        /// Which.
        qp: usize,
        /// What the peer may do.
        access: u32,
    },
    /// Take a queue pair to RTR and RTS.
    Connect {
        /// Which.
        qp: usize,
        /// The peer; of no meaning for datagrams.
        peer: Peer,
        /// How.
        how: Connection,
    },
    /// Change the state of a queue pair and nothing else.
    Modify {
        /// Which.
        qp: usize,
        /// To this.
        state: State,
    },
    /// The state of a queue pair: [`Reply::State`].
    Query {
        /// Which.
        qp: usize,
    },
    /// Destroy a queue pair.
    Destroy {
        /// Which.
        qp: usize,
    },
    /// Post send requests.
    Send {
        /// Where.
        qp: usize,
        /// What.
        list: Vec<Send>,
    },
    /// Post receives, numbered from `first`, one per range.
    Recv {
        /// Where.
        qp: usize,
        /// The number of the first.
        first: u64,
        /// Their elements.
        list: Vec<Vec<Range>>,
    },
    /// Post receives to a shared receive queue, numbered from `first`.
    RecvShared {
        /// Where.
        srq: usize,
        /// The number of the first.
        first: u64,
        /// Their elements.
        list: Vec<Vec<Range>>,
    },
    /// Wait until there are `count` completions, or the time is over: [`Reply::Completions`].
    Poll {
        /// How many.
        count: usize,
        /// For how long.
        timeout_ms: u64,
    },
    /// Ask for an event of the completion queue.
    Arm {
        /// Only for a solicited one.
        solicited: bool,
    },
    /// Wait for an event of the completion queue: [`Reply::Event`].
    Event {
        /// For how long.
        timeout_ms: u64,
    },
    /// Wait for an asynchronous event: [`Reply::Async`].
    Async {
        /// For how long.
        timeout_ms: u64,
    },
    /// What the device has dropped since it was opened: [`Reply::Drops`].
    Drops,
    /// What the device has heard since it was opened: [`Reply::Heard`].
    Heard,
    /// What the device has counted, for whoever looks for what went wrong: [`Reply::Counters`].
    Counters,
}

/// What a side answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Reply {
    /// Done.
    Done,
    /// It could not be done.
    Failed(String),
    /// Of [`Request::Describe`].
    Machine(Box<Machine>),
    /// Of [`Request::Ended`]: what became of the program, if it has ended.
    Ended(Option<Outcome>),
    /// Of [`Request::Open`].
    Opened(About),
    /// Of [`Request::Region`], [`Request::ForeignRegion`], [`Request::Rereg`] and [`Request::Bind`].
    Region(Remote),
    /// Of [`Request::Compare`], if there is one.
    Difference(Option<Difference>),
    /// Of [`Request::Load`].
    Value(u64),
    /// Of [`Request::Bytes`].
    Bytes(Vec<u8>),
    /// Of [`Request::Qp`].
    Qp {
        /// Its number on the wire.
        qpn: u32,
    },
    /// Of [`Request::Query`].
    State(State),
    /// Of [`Request::Poll`]: those that there are.
    Completions(Vec<Completion>),
    /// Of [`Request::Event`]: whether there was one.
    Event(bool),
    /// Of [`Request::Async`]: its name in `verbs.h` without `IBV_EVENT_`, if there was one.
    Async(Option<String>),
    /// Of [`Request::Drops`]: reasons with how many packets. Soft-RoCE tells of none.
    Drops(Vec<(String, u64)>),
    /// Of [`Request::Heard`].
    Heard(Heard),
    /// Of [`Request::Counters`]: those that are not zero, as the device calls them.
    Counters(String),
}

/// Packets that a device has heard.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heard {
    /// All.
    pub packets: u64,
    /// Requests that had come before.
    pub duplicates: u64,
    /// Requests before which others were missing.
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
        /// Those that it takes have this key.
        qkey: u32,
    },
}

/// The type of a memory window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum MwType {
    /// Bound by `ibv_bind_mw`, for all queue pairs of its protection domain.
    Type1,
    /// Bound by a work request, for its queue pair.
    Type2,
}

/// What a scenario must know of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// Whose it is.
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
    /// Whether requests may carry their data with them.
    pub inline: bool,
    /// The largest path MTU that fits the link, in bytes.
    pub active_mtu: u32,
}

/// How a program is started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Invocation {
    /// The name of one of the [programs](crate::matrix::programs::PROGRAMS); nothing else is run.
    pub program: String,
    /// The RDMA device.
    pub device: String,
    /// Its address, which tells the index of the GID.
    pub address: IpAddr,
    /// Path MTU in bytes.
    pub mtu: u32,
    /// TCP port on which the sides find each other.
    pub port: u16,
    /// The server; nothing if this is it.
    pub server: Option<IpAddr>,
}

/// How a range is not what it should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// The first byte that differs.
    pub first: usize,
    /// How many do.
    pub count: usize,
    /// What there is from the first on: eight bytes, or zeros beyond the end.
    pub found: [u8; 8],
}

/// Bytes of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    /// The region's number.
    pub region: usize,
    /// The first byte.
    pub offset: usize,
    /// How many.
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
    /// Where.
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
    /// The code of the delay asked for when no receive is posted.
    pub min_rnr_timer: u8,
    /// READs and atomics outstanding in each direction.
    pub rd_atomic: u8,
}

/// The state of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum State {
    Reset,
    Init,
    Rtr,
    Rts,
    Sqd,
    Sqe,
    Err,
}
