//! The XDP program: RoCEv2 frames that are ours go to the socket, everything else to the kernel.
//!
//! A frame is ours if all of this holds:
//! - its destination MAC is the interface's (a bridge floods unknown unicast to every port);
//! - it is IPv4 without options that is no fragment, or IPv6 without extension headers;
//! - it is UDP to port 4791;
//! - its destination address is one of the port's own;
//! - if other processes share the addresses, it is for a port of this one.
//!
//! The addresses are in a map that no process has. The MAC is in another, which the port has and
//! follows the interface with. A program that was given a port can have frames to other stations by
//! it, as a bridge floods them, but none to other addresses.
//!
//! Frames that are not ours get `XDP_PASS`, and so do ours on a queue without a socket.

use super::mapping::SharedWord;
use crate::ROCE_PORT;
use crate::kernel::bpf::asm::{Asm, Cond, Helper, Insn, Label, Reg, Size, net_u16};
use crate::kernel::bpf::{Map, is_shared_word};
use crate::port::config::Shards;
use std::io;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;

/// `enum xdp_action` of `bpf.h`.
pub(crate) const XDP_PASS: u32 = 2;

/// Bytes of a key of the address map: an IPv6 or IPv4-mapped address.
const KEY_LEN: usize = 16;

// `struct xdp_md` of `bpf.h`.
const CTX_DATA: i16 = 0;
const CTX_DATA_END: i16 = 4;
const CTX_RX_QUEUE: i16 = 16;

// Offsets from the start of the frame.
const ETH_DST: i16 = 0;
const ETH_TYPE: i16 = 12;
const IP: i16 = 14;
const V4_FRAGMENT: i16 = IP + 6;
const V4_PROTOCOL: i16 = IP + 9;
const V4_DST: i16 = IP + 16;
const V4_UDP_DPORT: i16 = IP + 20 + 2;
const V4_HEADERS: i32 = 14 + 20 + 8;
const V6_NEXT_HEADER: i16 = IP + 6;
const V6_DST: i16 = IP + 24;
const V6_UDP_DPORT: i16 = IP + 40 + 2;
const V6_HEADERS: i32 = 14 + 40 + 8;

const UDP: u32 = 17;
/// `MF` and the fragment offset.
const FRAGMENT_MASK: u16 = 0x3fff;

/// Where the program builds the key: the bytes below the frame pointer.
const KEY: i16 = -(KEY_LEN as i16);

/// The values that the program compares frames with.
#[derive(Debug)]
pub(crate) struct Own {
    addresses: Map,
    /// The map with the MAC, for [`OwnMac::of_map`].
    pub(super) mac: Map,
}

impl Own {
    /// The addresses of an interface with this MAC.
    pub(crate) fn new(addresses: &[IpAddr], mac: [u8; 6]) -> io::Result<Self> {
        let room = addresses.len().max(1) as u32;
        let own = Self {
            addresses: Map::hash("roce_addresses", KEY_LEN, room)?,
            mac: Map::shared_word("roce_mac")?,
        };
        addresses.iter().try_for_each(|address| own.addresses.set(&key(*address), 1))?;
        OwnMac::of_map(own.mac.as_fd())?.follow(mac);
        Ok(own)
    }
}

/// The MAC that the program compares. The ports of a device have the same one, each a mapping of
/// its own.
#[derive(Debug)]
pub(crate) struct OwnMac(SharedWord);

impl OwnMac {
    /// That of a map, which may be another process's. Error: `EINVAL` for another map, and for no
    /// map; no descriptor or memory is left.
    pub(crate) fn of_map(map: BorrowedFd<'_>) -> io::Result<Self> {
        if !is_shared_word(map)? {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        SharedWord::of_fd(map).map(Self)
    }

    /// Adopts a new MAC of the interface.
    pub(crate) fn follow(&self, mac: [u8; 6]) {
        let [a, b, c, d, e, f] = mac;
        self.0.store(u64::from_ne_bytes([a, b, c, d, e, f, 0, 0]));
    }
}

/// The map's key of an address.
fn key(address: IpAddr) -> [u8; KEY_LEN] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// Assembles the program for the addresses, or for those datagrams to them that `shards` says, and
/// an XSKMAP by receive queue.
pub(crate) fn program(own: &Own, shards: Shards, sockets: &Map) -> Vec<Insn> {
    use Reg::{R0, R1, R2, R3, R4, R5, R6, R10};
    let mut asm = Asm::default();
    let (pass, v4, lookup) = (asm.label(), asm.label(), asm.label());

    asm.mov(R6, R1);
    asm.load(Size::W, R2, R1, CTX_DATA);
    asm.load(Size::W, R3, R1, CTX_DATA_END);
    require_bytes(&mut asm, V4_HEADERS, pass);
    asm.load(Size::H, R5, R2, ETH_TYPE);
    asm.jump32_if_imm(Cond::Eq, R5, net_u16(0x0800), v4);
    asm.jump32_if_imm(Cond::Ne, R5, net_u16(0x86dd), pass);

    require_bytes(&mut asm, V6_HEADERS, pass);
    asm.load(Size::B, R5, R2, IP);
    asm.shift_right_imm(R5, 4);
    asm.jump32_if_imm(Cond::Ne, R5, 6, pass);
    require(&mut asm, Size::B, V6_NEXT_HEADER, UDP, pass);
    require(&mut asm, Size::H, V6_UDP_DPORT, net_u16(ROCE_PORT), pass);
    require_own(&mut asm, V6_HEADERS, shards, pass);
    for word in [0, 4, 8, 12] {
        asm.load(Size::W, R5, R2, V6_DST + word);
        asm.store(Size::W, R10, KEY + word, R5);
    }
    asm.jump(lookup);

    asm.bind(v4);
    require(&mut asm, Size::B, IP, 0x45, pass);
    require(&mut asm, Size::B, V4_PROTOCOL, UDP, pass);
    asm.load(Size::H, R5, R2, V4_FRAGMENT);
    asm.jump32_if_imm(Cond::Set, R5, net_u16(FRAGMENT_MASK), pass);
    require(&mut asm, Size::H, V4_UDP_DPORT, net_u16(ROCE_PORT), pass);
    require_own(&mut asm, V4_HEADERS, shards, pass);
    asm.store_imm(Size::W, R10, KEY, 0);
    asm.store_imm(Size::W, R10, KEY + 4, 0);
    asm.store_imm(Size::W, R10, KEY + 8, i32::from_ne_bytes([0, 0, 0xff, 0xff]));
    asm.load(Size::W, R5, R2, V4_DST);
    asm.store(Size::W, R10, KEY + 12, R5);

    asm.bind(lookup);
    asm.load_map_value(R4, own.mac.raw_fd());
    for (size, at) in [(Size::W, 0), (Size::H, 4)] {
        asm.load(size, R5, R2, ETH_DST + at);
        asm.load(size, R0, R4, at);
        asm.jump_if(Cond::Ne, R0, R5, pass);
    }
    asm.load_map(R1, own.addresses.raw_fd());
    asm.mov(R2, R10);
    asm.add_imm(R2, i32::from(KEY));
    asm.call(Helper::MapLookupElem);
    // Without CAP_PERFMON, the verifier lets a map's value be compared with an immediate 0 only.
    asm.jump_if_imm(Cond::Eq, R0, 0, pass);
    asm.load_map(R1, sockets.raw_fd());
    asm.load(Size::W, R2, R6, CTX_RX_QUEUE);
    asm.mov_imm(R3, XDP_PASS.cast_signed());
    asm.call(Helper::RedirectMap);
    asm.exit();

    asm.bind(pass);
    asm.mov_imm(R0, XDP_PASS.cast_signed());
    asm.exit();
    asm.assemble()
}

/// Jumps to `pass` unless the frame (R2 to R3) has `len` readable bytes.
fn require_bytes(asm: &mut Asm, len: i32, pass: Label) {
    asm.mov(Reg::R4, Reg::R2);
    asm.add_imm(Reg::R4, len);
    asm.jump_if(Cond::Gt, Reg::R4, Reg::R3, pass);
}

/// Jumps to `pass` unless the field at `off` of the frame (R2) has this value.
fn require(asm: &mut Asm, size: Size, off: i16, value: u32, pass: Label) {
    asm.load(size, Reg::R5, Reg::R2, off);
    asm.jump32_if_imm(Cond::Ne, Reg::R5, value, pass);
}

/// Jumps to `pass` unless the datagram at `payload` is for one of the ports, or these are alone.
fn require_own(asm: &mut Asm, payload: i32, shards: Shards, pass: Label) {
    let Shards { first, count, selector, shared } = shards;
    if shared {
        let (at, own) = (payload + i32::from(selector), asm.label());
        // A datagram too short for the byte is the first one's, which counts it.
        require_bytes(asm, at + 1, if first == 0 { own } else { pass });
        asm.load(Size::B, Reg::R5, Reg::R2, at as i16);
        // A smaller one becomes a great one.
        asm.add_imm(Reg::R5, -i32::from(first));
        asm.jump32_if_imm(Cond::Gt, Reg::R5, count as u32 - 1, pass);
        asm.bind(own);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::xdp::socket::XdpSocket;
    use crate::kernel::bpf::{Program, fd_value};
    use crate::testing::testns;
    use std::os::fd::AsFd as _;

    const XDP_REDIRECT: u32 = 4;
    const MAC: [u8; 6] = [0xfe, 0xdc, 0x02, 0x03, 0xf4, 0xf5];
    const V4: [u8; 4] = [192, 0, 2, 77];
    const V6: [u8; 16] = [0xfd, 9, 0, 0, 0, 0, 0, 0, 0xff, 0xee, 0, 0, 0, 0, 0, 1];

    /// The program with an address of each family and a socket on queue 0. The socket can stay
    /// unbound: a test run returns the verdict without acting on it.
    struct Loaded {
        program: Program,
        own: Own,
        sockets: Map,
        _socket: XdpSocket,
    }

    fn load() -> std::io::Result<Loaded> {
        load_for(Shards::ONE)
    }

    fn load_for(shards: Shards) -> std::io::Result<Loaded> {
        let socket = XdpSocket::new()?;
        let own = Own::new(&[IpAddr::from(V4), IpAddr::from(V6)], MAC)?;
        let sockets = Map::sockets("test", 1)?;
        sockets.set(&0u32.to_ne_bytes(), fd_value(socket.as_fd()))?;
        let program = Program::load("test", &program(&own, shards, &sockets))?;
        Ok(Loaded { program, own, sockets, _socket: socket })
    }

    impl Loaded {
        fn verdict(&self, frame: &[u8]) -> u32 {
            self.program.test_run(frame).expect("BPF_PROG_TEST_RUN")
        }
    }

    fn frame_v4() -> Vec<u8> {
        let mut frame = MAC.to_vec();
        frame.extend([2, 0, 0, 0, 0, 1, 0x08, 0x00]);
        frame.extend([0x45, 2, 0, 44, 0xbe, 0xef, 0x40, 0, 64, 17, 0, 0, 192, 0, 2, 1]);
        frame.extend(V4);
        frame.extend([0xc0, 0, 0x12, 0xb7, 0, 24, 0, 0]);
        frame.extend([0x55; 16]);
        frame
    }

    fn frame_v6() -> Vec<u8> {
        let mut frame = MAC.to_vec();
        frame.extend([2, 0, 0, 0, 0, 1, 0x86, 0xdd]);
        frame.extend([0x60, 0, 0, 0, 0, 24, 17, 64]);
        frame.extend([0xfd, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
        frame.extend(V6);
        frame.extend([0xc0, 0, 0x12, 0xb7, 0, 24, 0, 0]);
        frame.extend([0x55; 16]);
        frame
    }

    /// The module's definition of "ours", written out a second time.
    fn ours(frame: &[u8]) -> bool {
        let at = |range: std::ops::Range<usize>| frame.get(range).unwrap_or(&[]);
        let udp = |ip_len: usize| at(14 + ip_len + 2..14 + ip_len + 4) == [0x12, 0xb7];
        at(0..6) == MAC
            && match at(12..14) {
                [0x08, 0x00] => {
                    frame.len() >= 42
                        && frame[14] == 0x45
                        && (frame[20] & 0x3f, frame[21]) == (0, 0)
                        && frame[23] == 17
                        && at(30..34) == V4
                        && udp(20)
                }
                [0x86, 0xdd] => {
                    frame.len() >= 62
                        && frame[14] >> 4 == 6
                        && frame[20] == 17
                        && at(38..54) == V6
                        && udp(40)
                }
                _ => false,
            }
    }

    fn changed(frame: &[u8], at: usize, bytes: &[u8]) -> Vec<u8> {
        let mut frame = frame.to_vec();
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        frame
    }

    #[test]
    fn of_a_shared_address_the_own_datagrams_are_ours() {
        for (first, count) in [(0, 1), (3, 2), (255, 1)] {
            let shards = Shards { shared: true, first, count, selector: 5 };
            let loaded = testns::or_skip!(load_for(shards));
            for (frame, payload) in [(frame_v4(), 42), (frame_v6(), 62)] {
                for byte in 0..=u8::MAX {
                    let is_own = byte.checked_sub(first).is_some_and(|n| usize::from(n) < count);
                    let verdict = loaded.verdict(&changed(&frame, payload + 5, &[byte]));
                    let expected = if is_own { XDP_REDIRECT } else { XDP_PASS };
                    assert_eq!(verdict, expected, "{byte} of {count} from {first}");
                }
                let short = if first == 0 { XDP_REDIRECT } else { XDP_PASS };
                assert_eq!(loaded.verdict(&frame[..payload + 5]), short, "cut off");
            }
        }
    }

    #[test]
    fn named_frames_get_the_right_verdict() {
        let loaded = testns::or_skip!(load());
        let (v4, v6) = (frame_v4(), frame_v6());
        let cases: [(&str, Vec<u8>, u32); 17] = [
            ("RoCE to us, IPv4", v4.clone(), XDP_REDIRECT),
            ("RoCE to us, IPv6", v6.clone(), XDP_REDIRECT),
            ("DF cleared", changed(&v4, 20, &[0]), XDP_REDIRECT),
            ("any TOS", changed(&v4, 15, &[0xff]), XDP_REDIRECT),
            ("any traffic class and flow label", changed(&v6, 14, &[0x6f, 0xff]), XDP_REDIRECT),
            ("another IPv4 address", changed(&v4, 33, &[78]), XDP_PASS),
            ("another IPv6 address", changed(&v6, 38, &[0xfc]), XDP_PASS),
            ("another MAC", changed(&v4, 5, &[0xf6]), XDP_PASS),
            ("broadcast", changed(&v4, 0, &[0xff; 6]), XDP_PASS),
            ("another port", changed(&v4, 36, &[0x12, 0xb8]), XDP_PASS),
            ("from, not to, port 4791", changed(&v4, 34, &[0x12, 0xb7, 0xc0, 0]), XDP_PASS),
            ("first fragment", changed(&v4, 20, &[0x20, 0]), XDP_PASS),
            ("later fragment", changed(&v4, 20, &[0, 1]), XDP_PASS),
            ("IPv4 options", changed(&v4, 14, &[0x46]), XDP_PASS),
            ("TCP", changed(&v4, 23, &[6]), XDP_PASS),
            ("IPv6 fragment header", changed(&v6, 20, &[44]), XDP_PASS),
            ("ARP", changed(&v4, 12, &[0x08, 0x06]), XDP_PASS),
        ];
        for (name, frame, verdict) in cases {
            assert_eq!(loaded.verdict(&frame), verdict, "{name}");
        }
        let vlan: Vec<u8> =
            [&v4[..12], &[0x81, 0, 0, 5], &v4[12..]].into_iter().flatten().copied().collect();
        assert_eq!(loaded.verdict(&vlan), XDP_PASS, "VLAN tag");
    }

    #[test]
    fn every_truncation_and_every_changed_bit_agrees_with_the_definition() {
        let loaded = testns::or_skip!(load());
        for frame in [frame_v4(), frame_v6()] {
            for len in 14..=frame.len() {
                let cut = &frame[..len];
                assert_eq!(loaded.verdict(cut) == XDP_REDIRECT, ours(cut), "cut to {len}");
            }
            for bit in 0..frame.len() * 8 {
                let mut flipped = frame.clone();
                flipped[bit / 8] ^= 1 << (bit % 8);
                let verdict = loaded.verdict(&flipped);
                assert_eq!(verdict == XDP_REDIRECT, ours(&flipped), "bit {bit}");
                assert!(matches!(verdict, XDP_REDIRECT | XDP_PASS), "bit {bit}");
            }
        }
    }

    #[test]
    fn another_mac_takes_the_place_of_the_first() {
        let loaded = testns::or_skip!(load());
        let of_map = OwnMac::of_map(loaded.own.mac.as_fd()).expect("ours");
        let frames = [frame_v4(), frame_v6()];
        for last in [0xf6, 0xf7, MAC[5]] {
            let [a, b, c, d, e, _] = MAC;
            // Repeatedly: no old address stays.
            of_map.follow([a, b, c, d, e, last]);
            for mac in [0xf6, 0xf7, MAC[5]] {
                for frame in &frames {
                    let to_us = loaded.verdict(&changed(frame, 5, &[mac])) == XDP_REDIRECT;
                    assert_eq!(to_us, mac == last, "{mac:x} while it is {last:x}");
                }
            }
        }
    }

    #[test]
    fn another_map_is_not_taken_for_the_one_with_the_mac() {
        let loaded = testns::or_skip!(load());
        let counters = Map::counters("test", 1).expect("a map");
        for other in [&loaded.own.addresses, &loaded.sockets] {
            assert!(OwnMac::of_map(other.as_fd()).is_err());
        }
        // Alike, but not to be mapped.
        assert!(OwnMac::of_map(counters.as_fd()).is_err());
        let file = std::fs::File::open("/proc/self/exe").expect("a file");
        assert!(OwnMac::of_map(file.as_fd()).is_err());
    }

    #[test]
    fn a_queue_without_a_socket_passes() {
        let loaded = testns::or_skip!(load());
        assert_eq!(loaded.verdict(&frame_v4()), XDP_REDIRECT);
        let Loaded { program, sockets, _socket: socket, .. } = loaded;
        drop(socket);
        drop(sockets);
        // A closed socket leaves the map automatically.
        assert_eq!(program.test_run(&frame_v4()).unwrap(), XDP_PASS);
    }

    #[test]
    fn the_verifier_is_quoted_when_it_refuses() {
        testns::or_skip!(load());
        let mut asm = Asm::default();
        asm.load(Size::W, Reg::R0, Reg::R1, CTX_DATA);
        asm.load(Size::W, Reg::R0, Reg::R0, 0);
        asm.exit();
        let error = Program::load("bad", &asm.assemble()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("invalid access to packet"), "{text}");
        assert!(!text.contains('\n') && !text.contains("processed"), "{text}");
    }
}
