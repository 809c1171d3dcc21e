//! The classic BPF program that selects our frames: UDP/4791 in IPv4 without options and fragments,
//! or in IPv6, to one of our addresses, and to our Ethernet address or a group's.
//!
//! A bridge floods frames for unknown Ethernet addresses to every port: a test of the UDP port
//! alone would take a neighbour's frames. Sources: `Documentation/networking/filter.rst`, bpf(4).

use std::net::IpAddr;

use libc::sock_filter;
use serde::{Deserialize, Serialize};

use crate::ROCE_PORT;
use crate::port::config::Shards;

pub(super) const LD_WORD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
pub(super) const LD_HALF: u16 = 0x28; // BPF_LD | BPF_H | BPF_ABS
pub(super) const LD_BYTE: u16 = 0x30; // BPF_LD | BPF_B | BPF_ABS
const LD_LEN: u16 = 0x80; // BPF_LD | BPF_W | BPF_LEN
pub(super) const JEQ: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
const JGE: u16 = 0x35; // BPF_JMP | BPF_JGE | BPF_K
pub(super) const JSET: u16 = 0x45; // BPF_JMP | BPF_JSET | BPF_K
const SUBTRACT: u16 = 0x14; // BPF_ALU | BPF_SUB | BPF_K
pub(super) const AND: u16 = 0x54; // BPF_ALU | BPF_AND | BPF_K
pub(super) const JUMP: u16 = 0x05; // BPF_JMP | BPF_JA
pub(super) const RET: u16 = 0x06; // BPF_RET | BPF_K

const ALL: u32 = u32::MAX;
pub(super) const NOTHING: u32 = 0;
/// `SKF_AD_OFF + SKF_AD_VLAN_TAG_PRESENT`: a tag that was removed from the frame; such frames are
/// not ours.
const VLAN_TAG_PRESENT: u32 = (libc::SKF_AD_OFF + libc::SKF_AD_VLAN_TAG_PRESENT) as u32;

/// `SKF_AD_OFF + SKF_AD_PKTTYPE`: the kernel's class of the frame's Ethernet address.
const PACKET_TYPE: u32 = (libc::SKF_AD_OFF + libc::SKF_AD_PKTTYPE) as u32;
/// `PACKET_OTHERHOST` of packet(7).
const OTHERHOST: u32 = 3;

/// The program for frames to this station and to one of `addresses`, or for those of them that
/// `shards` says.
///
/// It holds for whatever Ethernet address the interface has: a frame to another one, which a
/// promiscuous interface receives, is of the type `PACKET_OTHERHOST`.
pub(super) fn program(addresses: &[IpAddr], shards: Shards) -> Vec<sock_filter> {
    let mut code = Program::default();
    code.untagged();
    code.load(LD_BYTE, PACKET_TYPE);
    code.push(JGE, OTHERHOST, 0, 1);
    code.push(RET, NOTHING, 0, 0);
    ipv4(&mut code, addresses, shards);
    ipv6(&mut code, addresses, shards);
    code.0
}

/// The datagrams of one queue pair in one direction, as a capture sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Direction {
    /// The address of the queue pair's peer.
    pub peer: IpAddr,
    /// Whether they come from the peer, and not go to it.
    pub from_peer: bool,
    /// The queue pair that they are for.
    pub to_qpn: u32,
}

/// The datagrams of a capture.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Wanted {
    /// All.
    All,
    /// Those of a connected queue pair.
    Directions([Direction; 2]),
    /// Those of UD that go to the queue pair of this number or come from it. Numbers are random, so
    /// that a peer of the same is improbable.
    Datagrams(u32),
}

/// The upper bits of UD's opcodes (IBTA volume 1, table 38), and all of the service's.
const UD: [u32; 2] = [0x60, 0xe0];
/// Where a UD packet has the number of its destination, and behind the Q_Key that of its source.
const UD_NUMBERS: [usize; 2] = [4, 16];

impl Wanted {
    /// Whether a datagram of a frame that was taken is wanted, by its bytes from the BTH on. A
    /// super-packet of UD has those of all queue pairs that send to one address.
    #[must_use]
    pub fn has(&self, datagram: &[u8]) -> bool {
        let Self::Datagrams(qpn) = self else { return true };
        UD_NUMBERS.iter().any(|at| {
            let number = datagram.get(*at..).and_then(<[u8]>::first_chunk);
            number.is_some_and(|it| u32::from_be_bytes(*it) & 0xff_ffff == *qpn)
        })
    }

    /// The bytes from the BTH on without which [`has`](Self::has) does not know.
    pub(super) fn judged_by(&self) -> u32 {
        match self {
            Self::Datagrams(_) => UD_NUMBERS[1] as u32 + 4,
            Self::All | Self::Directions(_) => 0,
        }
    }
}

/// The program for whole UDP datagrams to port 4791 that may be wanted. It sees the first packet of
/// a super-packet alone, so it takes UD's of all queue pairs.
pub(super) fn of_capture(wanted: &Wanted) -> Vec<sock_filter> {
    let mut code = Program::default();
    for (ether_type, is_v4) in [(0x0800, true), (0x86dd, false)] {
        let mut body = Program::default();
        // Where protocol, port, addresses and BTH are.
        let (protocol, port, [source, destination], bth) =
            if is_v4 { (23, 36, [26, 30], 42) } else { (20, 56, [22, 38], 62) };
        if is_v4 {
            body.load(LD_BYTE, 14);
            body.require(0x45);
            body.load(LD_HALF, 20);
            body.push(JSET, 0x3fff, 0, 1); // more fragments, or an offset
            body.push(RET, NOTHING, 0, 0);
        }
        body.load(LD_BYTE, protocol);
        body.require(libc::IPPROTO_UDP as u32);
        body.load(LD_HALF, port);
        body.require(u32::from(ROCE_PORT));
        let directions: &[Direction] = match wanted {
            Wanted::All => {
                body.push(RET, ALL, 0, 0);
                &[]
            }
            Wanted::Directions(both) => both,
            Wanted::Datagrams(_) => {
                body.load(LD_BYTE, bth);
                body.push(AND, UD[1], 0, 0);
                body.require(UD[0]);
                body.push(RET, ALL, 0, 0);
                &[]
            }
        };
        for direction in directions.iter().filter(|it| it.peer.is_ipv4() == is_v4) {
            let at = if direction.from_peer { source } else { destination };
            let words = words_of(direction.peer);
            let rest = words.len() as u8;
            for (nth, word) in words.into_iter().enumerate() {
                body.load(LD_WORD, at + 4 * nth as u32);
                // Past the loads and tests that follow, and the four of the number.
                body.push(JEQ, word, 0, 2 * (rest - 1 - nth as u8) + 4);
            }
            body.load(LD_WORD, bth + 4);
            body.push(AND, 0xff_ffff, 0, 0);
            body.push(JEQ, direction.to_qpn, 0, 1);
            body.push(RET, ALL, 0, 0);
        }
        // An eBPF program has no instruction that is never reached.
        if let Wanted::Directions(_) = wanted {
            body.push(RET, NOTHING, 0, 0);
        }
        code.branch(ether_type, body);
    }
    code.push(RET, NOTHING, 0, 0);
    code.0
}

/// The words of an address.
fn words_of(address: IpAddr) -> Vec<u32> {
    match address {
        IpAddr::V4(address) => vec![address.to_bits()],
        IpAddr::V6(address) => {
            (0..4).rev().map(|n| (address.to_bits() >> (32 * n)) as u32).collect()
        }
    }
}

fn ipv4(code: &mut Program, addresses: &[IpAddr], shards: Shards) {
    let mut body = Program::default();
    body.load(LD_BYTE, 14);
    body.require(0x45);
    body.load(LD_HALF, 20);
    body.push(JSET, 0x3fff, 0, 1); // more fragments, or an offset
    body.push(RET, NOTHING, 0, 0);
    body.load(LD_BYTE, 23);
    body.require(libc::IPPROTO_UDP as u32);
    body.load(LD_HALF, 36);
    body.require(u32::from(ROCE_PORT));
    body.load(LD_WORD, 30);
    for address in addresses {
        if let IpAddr::V4(a) = address {
            let taken = take(42, shards);
            body.push(JEQ, a.to_bits(), 0, taken.0.len() as u8);
            body.0.extend(taken.0);
        }
    }
    body.push(RET, NOTHING, 0, 0);
    code.branch(0x0800, body);
}

fn ipv6(code: &mut Program, addresses: &[IpAddr], shards: Shards) {
    let mut body = Program::default();
    body.load(LD_BYTE, 20);
    body.require(libc::IPPROTO_UDP as u32);
    body.load(LD_HALF, 56);
    body.require(u32::from(ROCE_PORT));
    for address in addresses {
        if let IpAddr::V6(a) = address {
            // Four words must match; otherwise continue with the next address.
            let taken = take(62, shards);
            for (i, word) in a.octets().chunks_exact(4).enumerate() {
                body.load(LD_WORD, 38 + 4 * i as u32);
                let to_next = (3 - i as u8) * 2 + taken.0.len() as u8;
                let word = u32::from_be_bytes([word[0], word[1], word[2], word[3]]);
                body.push(JEQ, word, 0, to_next);
            }
            body.0.extend(taken.0);
        }
    }
    body.push(RET, NOTHING, 0, 0);
    code.branch(0x86dd, body);
    code.push(RET, NOTHING, 0, 0);
}

/// Takes a datagram whose payload is at `payload`, if it is for one of the ports.
fn take(payload: u32, shards: Shards) -> Program {
    let mut code = Program::default();
    let Shards { first, count, selector, shared } = shards;
    if shared {
        if first == 0 {
            // A datagram too short for the byte is the first one's, which counts it.
            code.push(LD_LEN, 0, 0, 0);
            code.push(JGE, payload + u32::from(selector) + 1, 1, 0);
            code.push(RET, ALL, 0, 0);
        }
        code.load(LD_BYTE, payload + u32::from(selector));
        // A smaller one becomes a great one.
        code.push(SUBTRACT, u32::from(first), 0, 0);
        code.push(JGE, count as u32, 0, 1);
        code.push(RET, NOTHING, 0, 0);
    }
    code.push(RET, ALL, 0, 0);
    code
}

#[derive(Default)]
struct Program(Vec<sock_filter>);

impl Program {
    fn push(&mut self, code: u16, k: u32, jt: u8, jf: u8) {
        self.0.push(sock_filter { code, jt, jf, k });
    }

    fn load(&mut self, width: u16, offset: u32) {
        self.push(width, offset, 0, 0);
    }

    /// Continues if the frame had no tag of a VLAN.
    fn untagged(&mut self) {
        self.load(LD_WORD, VLAN_TAG_PRESENT);
        self.require(0);
    }

    /// Continues if the loaded value is `k`; otherwise takes nothing.
    fn require(&mut self, k: u32) {
        self.push(JEQ, k, 1, 0);
        self.push(RET, NOTHING, 0, 0);
    }

    /// Runs `body`, which returns on every path, if the Ethernet type is `ether_type`.
    fn branch(&mut self, ether_type: u32, body: Self) {
        self.load(LD_HALF, 12);
        self.push(JEQ, ether_type, 1, 0);
        // Conditional jumps reach 255 instructions only; this one reaches any number.
        self.push(JUMP, body.0.len() as u32, 0, 0);
        self.0.extend(body.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::contract::PathSpec;
    use crate::port::headers::FrameTemplate;

    const MAC: [u8; 6] = [2, 0, 0, 0, 9, 1];

    fn own() -> Vec<IpAddr> {
        // Many, so that jumps are long.
        (1..=90)
            .flat_map(|i| [format!("10.9.0.{i}"), format!("fd09::{i}")])
            .map(|a| a.parse().expect("address"))
            .collect()
    }

    /// Runs the program as the kernel would; returns the number of bytes of the frame that it
    /// takes.
    fn run(program: &[sock_filter], frame: &[u8], tagged: bool) -> u32 {
        let (mut pc, mut a) = (0, 0);
        loop {
            let f = program[pc];
            let k = f.k as usize;
            let byte = |i: usize| frame.get(k + i).map(|b| u32::from(*b));
            let (mut jump, mut loaded) = (0, Some(a));
            match f.code {
                LD_WORD if f.k == VLAN_TAG_PRESENT => loaded = Some(u32::from(tagged)),
                LD_WORD => loaded = (0..4).try_fold(0, |v, i| Some(v << 8 | byte(i)?)),
                LD_HALF => loaded = (0..2).try_fold(0, |v, i| Some(v << 8 | byte(i)?)),
                LD_BYTE if f.k == PACKET_TYPE => loaded = Some(kind(frame)),
                LD_BYTE => loaded = byte(0),
                LD_LEN => loaded = Some(frame.len() as u32),
                SUBTRACT => loaded = Some(a.wrapping_sub(f.k)),
                AND => loaded = Some(a & f.k),
                JGE => jump = usize::from(if a >= f.k { f.jt } else { f.jf }),
                JEQ => jump = usize::from(if a == f.k { f.jt } else { f.jf }),
                JSET => jump = usize::from(if a & f.k != 0 { f.jt } else { f.jf }),
                JUMP => jump = k,
                RET => return f.k,
                other => panic!("instruction {other:#x}"),
            }
            let Some(value) = loaded else { return 0 };
            a = value;
            pc += 1 + jump;
        }
    }

    /// The kernel's class of a frame's Ethernet address.
    fn kind(frame: &[u8]) -> u32 {
        match &frame[..6] {
            to if to == MAC => u32::from(libc::PACKET_HOST),
            to if to[0] & 1 != 0 => u32::from(libc::PACKET_MULTICAST),
            _ => OTHERHOST,
        }
    }

    fn frame(local: &str, remote: &str, mac: [u8; 6]) -> Vec<u8> {
        let spec = PathSpec {
            local: local.parse().expect("address"),
            remote: remote.parse().expect("address"),
            src_port: 0,
            tos: 0,
            ttl: 64,
            flow_label: 0,
        };
        let template = FrameTemplate::new([2, 9, 9, 9, 9, 9], mac, &spec, 0xc000).expect("family");
        let mut frame = vec![0; template.header_len() + 20];
        template.write(&mut frame, 20, 1);
        frame
    }

    #[test]
    fn our_frames_are_taken() {
        let program = program(&own(), Shards::ONE);
        for i in [1, 2, 77, 90] {
            for (peer, us) in [("10.9.0.99", "10.9.0."), ("fd09::99:1", "fd09::")] {
                let frame = frame(peer, &format!("{us}{i}"), MAC);
                assert_eq!(run(&program, &frame, false), ALL, "{us}{i}");
                assert_eq!(run(&program, &frame, true), 0, "of another VLAN");
            }
        }
        let group = frame("10.9.0.99", "10.9.0.1", [0x33, 0x33, 0, 0, 0, 1]);
        assert_eq!(run(&program, &group, false), ALL);
    }

    #[test]
    fn of_a_shared_address_the_own_datagrams_are_taken() {
        for (first, count) in [(0, 1), (3, 2), (255, 1)] {
            let shards = Shards { shared: true, first, count, selector: 5 };
            let program = program(&own()[..2], shards);
            for (peer, us, payload) in [("10.9.0.9", "10.9.0.1", 42), ("fd09::9", "fd09::1", 62)] {
                let mut frame = frame(peer, us, MAC);
                for byte in 0..=u8::MAX {
                    frame[payload + 5] = byte;
                    let is_own = byte.checked_sub(first).is_some_and(|n| usize::from(n) < count);
                    let taken = run(&program, &frame, false);
                    assert_eq!(taken, if is_own { ALL } else { 0 }, "{us}, {byte} from {first}");
                }
                // The first process counts short datagrams.
                let short = if first == 0 { ALL } else { 0 };
                assert_eq!(run(&program, &frame[..payload + 5], false), short, "cut off");
            }
        }
    }

    #[test]
    fn a_capture_takes_both_directions_of_a_queue_pair_alone() {
        for (us, peer, other) in
            [("10.9.0.1", "10.9.0.2", "10.9.0.3"), ("fd09::1", "fd09::2", "fd09::1:2")]
        {
            let at = if us.contains(':') { 62 } else { 42 };
            let taken = |program: &[sock_filter], from: &str, to: &str, qpn: u32| {
                let mut frame = frame(from, to, MAC);
                // The upper byte of the word is reserved.
                frame[at + 4..at + 8].copy_from_slice(&(qpn | 0xa5 << 24).to_be_bytes());
                run(program, &frame, false) == ALL
            };
            let of = |from_peer, to_qpn| Direction {
                peer: peer.parse().expect("an address"),
                from_peer,
                to_qpn,
            };
            let both = [of(true, 0x11), of(false, 0x123_456)];
            let one = of_capture(&Wanted::Directions(both));
            assert!(taken(&one, peer, us, 0x11) && taken(&one, us, peer, 0x123_456));
            for (from, to, qpn) in [
                (peer, us, 0x12),
                (peer, us, 0x123_456),
                (us, peer, 0x11),
                (other, us, 0x11),
                (us, other, 0x123_456),
            ] {
                assert!(!taken(&one, from, to, qpn), "{from} {to} {qpn:#x}");
            }
            let all = of_capture(&Wanted::All);
            assert!(taken(&all, other, us, 7));
            let datagrams = of_capture(&Wanted::Datagrams(0x23));
            let of_ud = |opcode: u8, to: u32, from: u32| {
                let mut frame = frame(us, peer, MAC);
                frame[at] = opcode;
                frame[at + 4..at + 8].copy_from_slice(&(to | 0xa5 << 24).to_be_bytes());
                frame[at + 16..at + 20].copy_from_slice(&(from | 0xa5 << 24).to_be_bytes());
                let wanted = Wanted::Datagrams(0x23);
                assert!(!wanted.has(&frame[at..at + 19]) || to == 0x23, "cut off");
                run(&datagrams, &frame, false) == ALL && wanted.has(&frame[at..at + 20])
            };
            for opcode in [0x64, 0x65] {
                assert!(of_ud(opcode, 0x23, 9) && of_ud(opcode, 9, 0x23));
                assert!(!of_ud(opcode, 0x24, 9) && !of_ud(opcode, 9, 0x22));
            }
            // Another service has other bytes there.
            assert!(!of_ud(0x04, 0x23, 9) && !of_ud(0x24, 9, 0x23));
            for program in [&one, &all, &datagrams] {
                let mut other_port = frame(peer, us, MAC);
                other_port[at - 5] ^= 1;
                assert_eq!(run(program, &other_port, false), 0);
                assert_eq!(run(program, &other_port[..30], false), 0, "cut off");
            }
        }
    }

    #[test]
    fn other_frames_are_not() {
        let program = program(&own(), Shards::ONE);
        let other_mac = [2, 0, 0, 0, 9, 2];
        assert_eq!(run(&program, &frame("10.9.0.99", "10.9.0.1", other_mac), false), 0);
        assert_eq!(run(&program, &frame("10.9.0.99", "10.9.0.1", [2, 0, 0, 1, 9, 1]), false), 0);
        assert_eq!(run(&program, &frame("10.9.0.99", "10.9.0.91", MAC), false), 0);
        assert_eq!(run(&program, &frame("fd09::99", "fd09::91", MAC), false), 0);
        assert_eq!(run(&program, &frame("fd09::99", "fd09:1::1", MAC), false), 0);
        let mut arp = frame("10.9.0.99", "10.9.0.1", MAC);
        arp[13] = 6;
        assert_eq!(run(&program, &arp, false), 0);
        for (at, bit, what) in
            [(14, 1, "options"), (20, 0x20, "fragment"), (21, 1, "offset"), (23, 1, "protocol")]
        {
            let mut damaged = frame("10.9.0.99", "10.9.0.1", MAC);
            damaged[at] ^= bit;
            assert_eq!(run(&program, &damaged, false), 0, "{what}");
        }
        for (v6, at) in [(false, 37), (true, 57)] {
            let (peer, us) = if v6 { ("fd09::99", "fd09::1") } else { ("10.9.0.9", "10.9.0.1") };
            let mut damaged = frame(peer, us, MAC);
            damaged[at] ^= 1;
            assert_eq!(run(&program, &damaged, false), 0, "port");
            assert_eq!(run(&program, &damaged[..at], false), 0, "cut off");
        }
    }
}
