//! The scripts of `tests/scripts/`, played to Soft-RoCE. The agent in the guest has the queue pair.
//! We are its peer, packet by packet, with sockets in the container. They use IPv6: its header has
//! no field that the ICRC covers and a socket does not know.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketType, ipproto};

use rocinante_scripts::{Completion, Options, Range, Remote, SCRIPTS, Script, Subject, Talk};
use rocinante_stack::mem::Access;
use rocinante_stack::types::{Key, Qpn};
use rocinante_stack::verbs::{QpState, SendOp};
use rocinante_stack::wire::Packet;
use rocinante_stack::wire::icrc::{IpFields, Template};

use super::Bench;
use super::node::{Node, PATIENCE_MS, Step, signaled};
use crate::agent::machine::Kind;
use crate::agent::proto::{self, Connection, Op, Peer, Send, Service};
use crate::guest::Link;

/// The port of RoCE v2.
const ROCE: u16 = 4791;

const UDP_LEN: usize = 8;

/// How long to wait for a packet that must not come. A later one disturbs the script's next
/// expectation.
const MOMENT: Duration = Duration::from_millis(10);

/// A script, played to Soft-RoCE.
#[derive(Clone, Copy)]
pub struct ScriptCell(&'static Script);

impl ScriptCell {
    /// Its name: `script::ghost_ack::rxe`.
    #[must_use]
    pub fn name(&self) -> String {
        format!("script::{}::rxe", self.0.name)
    }
}

/// The scripts of each test run: one or two of each kind, for a dozen seconds.
const SUBSET: [&str; 20] = [
    "duplicate_send",
    "duplicate_write",
    "part_of_a_read",
    "duplicate_atomic",
    "records_wrap",
    "sequence_error_in_mid_message",
    "reset_and_reuse_while_old_requests_fly",
    "opcode_without_a_beginning",
    "length_of_a_write",
    "zero_length_everywhere",
    "key_of_a_foreign_region",
    "immediate_without_a_receive",
    "receive_too_small",
    "ghost_ack",
    "invalid_aeth",
    "implied_nak_of_a_read",
    "partial_read_retried",
    "retries_exhausted",
    "rnr_then_success",
    "drained",
];

/// Every script.
#[must_use]
pub fn all() -> Vec<ScriptCell> {
    SCRIPTS.iter().map(ScriptCell).collect()
}

/// The scripts of each test run.
#[must_use]
pub fn subset() -> Vec<ScriptCell> {
    SCRIPTS.iter().filter(|script| SUBSET.contains(&script.name)).map(ScriptCell).collect()
}

impl Bench {
    /// Plays a script to the guest's device. Error: a deviation from the script, or from the known
    /// behaviour of Soft-RoCE.
    pub fn run_script(&self, cell: &ScriptCell) -> Step {
        let link = Link::Veth;
        let container = self.guest.network().container(&self.lab, link);
        let node = self.kernel_node(container, link, true)?;
        let (own, theirs) = (container.ipv6().ok_or("the container has no IPv6")?, node.address());
        let IpAddr::V6(theirs) = theirs else { return Err("the guest has no IPv6".into()) };
        let bound = container.run(|| Sockets::bind(own)).map_err(|error| error.to_string())?;
        let sockets = bound.map_err(|error| format!("UDP/{ROCE} in the container: {error}"))?;
        let (peer, connected) = (Qpn::new(0), false);
        let mut subject = GuestSubject { node, sockets, own, theirs, peer, connected };
        let mut talk = Talk::new(&mut subject)?;
        let done = (cell.0.run)(&mut talk);
        done.map_err(|why| format!("{why}; {}", subject.node.standing()))
    }
}

/// The sockets of the script's side.
struct Sockets {
    /// Sends. It also owns the port, so the kernel does not answer "port unreachable".
    udp: UdpSocket,
    /// Receives all of UDP, with its header: Soft-RoCE's datagrams have no checksum, and a UDP
    /// socket drops those over IPv6.
    raw: UdpSocket,
}

impl Sockets {
    fn bind(own: Ipv6Addr) -> std::io::Result<Self> {
        let udp = UdpSocket::bind((own, ROCE))?;
        let raw = rustix::net::socket(AddressFamily::INET6, SocketType::RAW, Some(ipproto::UDP))?;
        Ok(Self { udp, raw: raw.into() })
    }
}

/// Soft-RoCE, and the sockets of its peer.
struct GuestSubject {
    node: Node,
    sockets: Sockets,
    own: Ipv6Addr,
    theirs: Ipv6Addr,
    /// The number of the queue pair's peer, as the queue pair knows it. Each connection has another
    /// one, so packets of earlier connections are recognised.
    peer: Qpn,
    connected: bool,
}

/// The number of the last peer, over all guests.
static PEERS: AtomicU32 = AtomicU32::new(0x10_0000);

impl GuestSubject {
    /// The guest's next datagram, if one comes before the deadline.
    fn datagram(&self, deadline: Instant) -> Step<Option<(Vec<u8>, u16)>> {
        let mut bytes = [0; 8192];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            // A timeout of zero would mean for ever.
            let left = left.max(Duration::from_micros(1));
            self.sockets.raw.set_read_timeout(Some(left)).map_err(|error| error.to_string())?;
            match self.sockets.raw.recv_from(&mut bytes) {
                Ok((len, from)) => {
                    let Some((udp, packet)) = bytes[..len].split_first_chunk::<UDP_LEN>() else {
                        continue;
                    };
                    let [src, dst] = [[udp[0], udp[1]], [udp[2], udp[3]]].map(u16::from_be_bytes);
                    if from.ip() == self.theirs && dst == ROCE {
                        return Ok(Some((packet.to_vec(), src)));
                    }
                }
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) =>
                {
                    return Ok(None);
                }
                Err(error) => return Err(error.to_string()),
            }
        }
    }
}

impl Subject for GuestSubject {
    fn is_soft_roce(&self) -> bool {
        self.node.kind() == Kind::SoftRoce
    }

    fn connect(&mut self, options: &Options) -> Step {
        let access = options.access.bits();
        if self.connected {
            self.node.modify(QpState::Reset)?;
            self.node.prepare(0, access)?;
        } else {
            self.node.make_qp(Service::Rc, access, None)?;
            self.connected = true;
        }
        while self.completion(false)?.is_some() {}
        self.peer = Qpn::new(PEERS.fetch_add(1, Ordering::Relaxed));
        let [psn, theirs] = options.psn;
        let peer = Peer { address: self.own.into(), qpn: self.peer.value(), psn: theirs };
        let how = Connection {
            psn,
            mtu: options.mtu.bytes(),
            timeout: options.timeout,
            retry_cnt: options.retry_cnt,
            rnr_retry: options.rnr_retry,
            min_rnr_timer: Options::MIN_RNR_TIMER,
            rd_atomic: options.rd_atomic,
        };
        self.node.connect(0, peer, how)
    }

    fn qpn(&self) -> Qpn {
        Qpn::new(self.node.qpn())
    }

    fn modify(&mut self, state: QpState) -> Step {
        self.node.modify(state)
    }

    fn state(&mut self) -> Step<QpState> {
        self.node.state()
    }

    fn register(&mut self, len: usize, access: Access, foreign: bool) -> Step<Remote> {
        let access = access.bits();
        let proto::Remote { address, rkey } = match foreign {
            false => self.node.region(len, access)?,
            true => self.node.foreign_region(len, access)?,
        };
        Ok(Remote { address, rkey: Key(rkey) })
    }

    fn deregister(&mut self, region: usize) -> Step {
        self.node.deregister(number(region))
    }

    fn store(&mut self, region: usize, offset: usize, bytes: &[u8]) -> Step {
        self.node.put(number(region), offset, bytes.to_vec())
    }

    fn load(&mut self, range: Range) -> Step<Vec<u8>> {
        self.node.bytes(place(&range))
    }

    fn post_recv(&mut self, wr_id: u64, ranges: &[Range]) -> Step {
        let ranges: Vec<proto::Range> = ranges.iter().map(place).collect();
        self.node.receive_scattered(wr_id, &ranges)
    }

    fn post_send(&mut self, wr_id: u64, op: SendOp, ranges: &[Range], fence: bool) -> Step {
        let ranges: Vec<proto::Range> = ranges.iter().map(place).collect();
        self.node.post(&[Send { fence, ..signaled(wr_id, operation(op)?, &ranges) }])
    }

    fn completion(&mut self, wait: bool) -> Step<Option<Completion>> {
        let found = self.node.poll(1, if wait { PATIENCE_MS } else { 0 })?;
        Ok(found.into_iter().next().map(completion))
    }

    fn receive(&mut self, mut packet: Vec<u8>, seal: bool) -> Step {
        if seal {
            let ip = IpFields::V6 { src: self.own, dst: self.theirs };
            Template::new(&ip, ROCE).seal(&mut packet);
        }
        let to = SocketAddr::from((self.theirs, ROCE));
        self.sockets.udp.send_to(&packet, to).map(drop).map_err(|error| error.to_string())
    }

    fn say(&mut self, wait: bool) -> Step<Option<Vec<u8>>> {
        let time = if wait { Duration::from_millis(PATIENCE_MS) } else { MOMENT };
        let deadline = Instant::now() + time;
        while let Some((bytes, port)) = self.datagram(deadline)? {
            let packet = Packet::parse(&bytes).map_err(|error| format!("{bytes:x?}: {error:?}"))?;
            if packet.bth().dest_qpn != self.peer {
                continue;
            }
            let ip = IpFields::V6 { src: self.theirs, dst: self.own };
            if Template::new(&ip, port).of(&bytes) != packet.icrc() {
                return Err(format!("the ICRC is wrong: {packet:?}"));
            }
            return Ok(Some(bytes));
        }
        Ok(None)
    }
}

/// The number of a script's region: region 0 belongs to the node itself.
fn number(region: usize) -> usize {
    region + 1
}

fn place(range: &Range) -> proto::Range {
    proto::Range { region: number(range.region), offset: range.offset, len: range.len }
}

fn operation(op: SendOp) -> Step<Op> {
    let imm_of = |imm: Option<[u8; 4]>| imm.map(u32::from_be_bytes);
    Ok(match op {
        SendOp::Send { imm } => Op::Send { imm: imm_of(imm) },
        SendOp::Write { remote, rkey, imm } => Op::Write { remote, rkey: rkey.0, imm: imm_of(imm) },
        SendOp::Read { remote, rkey } => Op::Read { remote, rkey: rkey.0 },
        SendOp::CompareSwap { remote, rkey, compare, swap } => {
            Op::CompareSwap { remote, rkey: rkey.0, compare, swap }
        }
        SendOp::FetchAdd { remote, rkey, add } => Op::FetchAdd { remote, rkey: rkey.0, add },
        other => return Err(format!("no script posts {other:?}")),
    })
}

fn completion(wc: proto::Completion) -> Completion {
    let proto::Completion { wr_id, status, opcode, byte_len, imm, .. } = wc;
    Completion { wr_id, status, opcode, byte_len, imm: imm.map(u32::to_be_bytes) }
}

#[cfg(test)]
mod tests {
    use rocinante_scripts::DEPARTURES;

    use super::{SUBSET, all, subset};

    #[test]
    fn the_subset_is_of_scripts_and_names_differ() {
        assert_eq!(subset().len(), SUBSET.len());
        let names: std::collections::BTreeSet<String> = all().iter().map(|c| c.name()).collect();
        assert_eq!(names.len(), all().len());
    }

    /// The table lists each departure that a script tolerates.
    #[test]
    fn the_table_has_every_departure_that_a_script_knows() {
        let table = include_str!("../../README.md");
        for departure in DEPARTURES {
            let row = format!("| {} | ", departure.what);
            let does: Vec<&str> =
                table.lines().filter_map(|line| line.strip_prefix(&row)).collect();
            assert!(matches!(does[..], [does] if does.contains(" | ")), "{row}: {does:?}");
        }
    }
}
