//! The verbs of a side, with a device of Rocinante or of the kernel. They are values: one scenario
//! drives either side in either role, here or over TCP.

mod work;

use std::net::IpAddr;

pub use rocinante::verbs::{QpState, WcOpcode as Opcode};
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use self::work::*;
use super::Verbs;
use super::machine::{Kind, Machine};
use crate::guest::Outcome;
use crate::matrix::Node;

/// Declares the verbs: each is a request in JSON, a method of a [`Node`], and a method of [`Verbs`]
/// that carries it out and whose result is the answer.
macro_rules! verbs {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),*) -> $answer:ty;)*) => {
        /// A verb with its arguments.
        #[allow(missing_docs, non_camel_case_types, reason = "a variant is a verb")]
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        pub enum Request {
            $($name { $($arg: $type),* },)*
        }

        impl Node {
            $($(#[$doc])* pub fn $name(&mut self, $($arg: $type),*) -> Result<$answer, String> {
                self.call(&Request::$name { $($arg),* })
            })*
        }

        impl Verbs {
            pub(super) fn answer(&mut self, request: Request) -> Result<Value, String> {
                let answer = match request {
                    $(Request::$name { $($arg),* } => json(self.$name($($arg),*)?),)*
                };
                answer.map_err(|error| error.to_string())
            }
        }
    };
}

fn json(answer: impl Serialize) -> serde_json::Result<Value> {
    serde_json::to_value(answer)
}

verbs! {
    /// Describes the machine and its device `name`, as `ibv_devices` lists it. Without a port
    /// behind a colon, the first usable one counts.
    describe(name: String, address: Option<IpAddr>) -> Machine;
    /// Runs one of the [checks](crate::hardware::checks) of the kernel's device.
    check(check: String, name: String, address: IpAddr) -> ();
    /// Starts one of the [programs of other projects](crate::matrix::programs), and kills the one
    /// started before.
    start(invocation: Invocation) -> ();
    /// Waits until the program ends, at most this long.
    ended(timeout_ms: u64) -> Option<Outcome>;
    /// Opens the device `name` and uses its GID for `address`. All verbs below need it. Rocinante
    /// ignores the name: its device is the one with the address.
    open_device(name: String, address: IpAddr) -> About;
    /// Registers a zeroed region, with these bits of `IBV_ACCESS_*`. All regions are numbered from
    /// 0.
    region(len: usize, access: u32) -> Remote;
    /// Registers a zeroed region in a protection domain without queue pairs: requests that name it
    /// fail.
    foreign_region(len: usize, access: u32) -> Remote;
    /// Registers a region anew: with other bits of `IBV_ACCESS_*`, or with new, zeroed memory.
    rereg(region: usize, access: Option<u32>, len: Option<usize>) -> Remote;
    /// Deregisters a region; the others keep their numbers.
    deregister(region: usize) -> ();
    /// Allocates a memory window of type 1 or 2, not bound; windows are numbered from 0.
    window(mw_type: u8) -> ();
    /// Posts the request 90, which binds a window, to the send queue of a queue pair: of type 1 by
    /// `ibv_bind_mw`, of type 2 by a work request. The range need not be inside the region; the
    /// bits of `IBV_ACCESS_*` are the rights of peers, and [`ZERO_BASED`]. Returns where peers
    /// reach its first byte, with the new key.
    post_bind(qp: usize, window: usize, range: Range, access: u32) -> Remote;
    /// Deallocates a window.
    free_window(window: usize) -> ();
    /// Stores bytes in a region.
    put(region: usize, offset: usize, bytes: Vec<u8>) -> ();
    /// Fills a range with [`pattern`](rocinante_tests::harness::pattern) of a seed.
    fill(range: Range, seed: u64) -> ();
    /// The difference of a range from [`pattern`](rocinante_tests::harness::pattern) of a seed,
    /// from a byte of it on; `None` means zeros.
    compare(range: Range, with: Option<(u64, usize)>) -> Option<Difference>;
    /// Stores a number in region 0, in the machine's order.
    store(offset: usize, value: u64) -> ();
    /// The number at a place in region 0, in the machine's order.
    load(offset: usize) -> u64;
    /// The bytes of a range.
    bytes(range: Range) -> Vec<u8>;
    /// Makes a shared receive queue; they are numbered from 0.
    make_srq(depth: u32) -> ();
    /// Asks for one event of a shared receive queue, once fewer than `limit` receives are left.
    arm_srq(srq: usize, limit: u32) -> ();
    /// Makes a queue pair in INIT; they are numbered from 0. The bits of `IBV_ACCESS_*` are the
    /// peer's rights, without meaning for datagrams. `None` gives it a receive queue of its own.
    /// Returns its number on the wire.
    create_qp(service: Service, access: u32, srq: Option<usize>) -> u32;
    /// Makes an address handle; they are numbered from 0.
    handle(address: IpAddr) -> ();
    /// Makes an address handle for the answer to the last datagram completed, whose receive begins
    /// with `grh`.
    handle_of_last(grh: Range) -> ();
    /// Attaches a queue pair for datagrams to a multicast group.
    attach(qp: usize, group: IpAddr) -> ();
    /// Detaches it again.
    detach(qp: usize, group: IpAddr) -> ();
    /// Takes a queue pair from RESET to INIT, with these rights of the peer.
    prepare(qp: usize, access: u32) -> ();
    /// Connects a queue pair, or makes it ready if it is for datagrams, for which the peer has no
    /// meaning.
    connect(qp: usize, peer: Peer, how: Connection) -> ();
    /// Changes only the state of a queue pair, to the one with this number in `enum ibv_qp_state`.
    change_state(qp: usize, state: usize) -> ();
    /// The number of the state of a queue pair.
    query(qp: usize) -> usize;
    /// Destroys a queue pair.
    destroy(qp: usize) -> ();
    /// Posts send requests.
    send(qp: usize, list: Vec<Send>) -> ();
    /// Posts receives with these elements each, numbered from `first`.
    recv(qp: usize, first: u64, list: Vec<Vec<Range>>) -> ();
    /// Posts receives to a shared receive queue, likewise.
    recv_shared(srq: usize, first: u64, list: Vec<Vec<Range>>) -> ();
    /// The completions found within `timeout_ms`, at most `count`.
    poll(count: usize, timeout_ms: u64) -> Vec<Completion>;
    /// Asks for an event of the completion queue, or for one of a solicited completion only.
    arm(solicited: bool) -> ();
    /// Whether there is an event of the completion queue within `timeout_ms`.
    event(timeout_ms: u64) -> bool;
    /// The next asynchronous event within `timeout_ms`, as in `ibv_event_type_str(3)`.
    any_async_event(timeout_ms: u64) -> Option<String>;
    /// Reasons and numbers of the device's drops since it was opened. Soft-RoCE reports none.
    drops() -> Vec<(String, u64)>;
    /// The packets that the device has received since it was opened.
    heard() -> Heard;
    /// The device's counters that are not zero, by its names, for an investigation.
    counters() -> String;
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
