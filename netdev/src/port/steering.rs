//! Classic BPF programs that select a port among several by a byte of the datagram, as [`Shards`]
//! says, and the one that selects a guard's datagrams.
//!
//! They only save work: the owner of a port hands datagrams for another one over. Sources:
//! `Documentation/networking/filter.rst`, socket(7) (`SO_ATTACH_REUSEPORT_CBPF`), packet(7)
//! (`PACKET_FANOUT`).

use libc::sock_filter;

use crate::port::config::Shards;

const LD_WORD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const LD_HALF: u16 = (libc::BPF_LD | libc::BPF_H | libc::BPF_ABS) as u16;
const LD_BYTE: u16 = (libc::BPF_LD | libc::BPF_B | libc::BPF_ABS) as u16;
const SHIFT_RIGHT: u16 = (libc::BPF_ALU | libc::BPF_RSH | libc::BPF_K) as u16;
const SUBTRACT: u16 = (libc::BPF_ALU | libc::BPF_SUB | libc::BPF_K) as u16;
const JEQ: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const JSET: u16 = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K) as u16;
const JGE: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const JUMP: u16 = (libc::BPF_JMP | libc::BPF_JA) as u16;
const RET: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
const RET_A: u16 = (libc::BPF_RET | libc::BPF_A) as u16;

/// The network header, for a program that may see the frame from another offset.
const NETWORK: u32 = libc::SKF_NET_OFF as u32;
/// From the network header to the UDP payload. IPv4 without options, IPv6 without extension
/// headers: the port accepts no others.
const V4_HEADERS: u32 = 20 + 8;
const V6_HEADERS: u32 = 40 + 8;

const fn op(code: u16, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

/// The number of a socket, for a program that sees the UDP payload: the byte itself. The first
/// socket gets datagrams for none of them (to a group, nonsense) and those that are too short: a
/// load beyond the end returns 0.
pub(crate) fn by_socket(Shards { count, selector, .. }: Shards) -> [sock_filter; 4] {
    [
        op(LD_BYTE, u32::from(selector), 0, 0),
        op(JGE, count as u32, 0, 1),
        op(RET, 0, 0, 0),
        op(RET_A, 0, 0, 0),
    ]
}

/// As [`by_socket`], for a program that sees a frame from any offset. The first socket is that of
/// the value `first`.
pub(crate) fn by_frame(Shards { first, count, selector, .. }: Shards) -> [sock_filter; 10] {
    [
        op(LD_BYTE, NETWORK, 0, 0),
        op(SHIFT_RIGHT, 4, 0, 0),
        op(JEQ, 4, 0, 2),
        op(LD_BYTE, NETWORK.wrapping_add(V4_HEADERS + u32::from(selector)), 0, 0),
        op(JUMP, 1, 0, 0), // over the other
        op(LD_BYTE, NETWORK.wrapping_add(V6_HEADERS + u32::from(selector)), 0, 0),
        // A smaller one becomes a great one.
        op(SUBTRACT, u32::from(first), 0, 0),
        op(JGE, count as u32, 0, 1),
        op(RET, 0, 0, 0),
        op(RET_A, 0, 0, 0),
    ]
}

/// The program of a guard's socket: it drops datagrams that arrive by the interface `iface`, which
/// is read elsewhere, but on a shared address takes those for none of these ports. It takes
/// datagrams over loopback, and those that arrive by another interface, which may answer ARP for
/// this one's addresses. In a VRF all datagrams seem to come by the VRF: there the frames to the
/// interface's Ethernet address, `mac_in_vrf`, and to groups are its own. Those that loop back
/// have the VRF's.
pub(crate) fn of_guard(
    iface: u32,
    mac_in_vrf: Option<[u8; 6]>,
    shards: Shards,
) -> Vec<sock_filter> {
    /// The program sees the UDP header first.
    const HEADER: u32 = 8;
    /// The Ethernet header.
    const LINK: u32 = libc::SKF_LL_OFF as u32;
    let Shards { first, count, selector, shared } = shards;
    // Of an address that is not shared nothing is for other ports.
    let own = if shared { count as u32 } else { u32::MAX };
    let mut program = match mac_in_vrf {
        None => vec![
            op(LD_WORD, (libc::SKF_AD_OFF + libc::SKF_AD_IFINDEX) as u32, 0, 0),
            op(JEQ, iface, 0, 3),
        ],
        Some([a, b, c, d, e, f]) => vec![
            // Of a group, and of all.
            op(LD_BYTE, LINK, 0, 0),
            op(JSET, 1, 4, 0),
            op(LD_WORD, LINK, 0, 0),
            op(JEQ, u32::from_be_bytes([a, b, c, d]), 0, 5),
            op(LD_HALF, LINK + 4, 0, 0),
            op(JEQ, u32::from(u16::from_be_bytes([e, f])), 0, 3),
        ],
    };
    program.extend([
        op(LD_BYTE, HEADER + u32::from(selector), 0, 0),
        // A smaller one becomes a great one.
        op(SUBTRACT, u32::from(first), 0, 0),
        op(JGE, own, 0, 1),
        op(RET, u32::MAX, 0, 0),
        op(RET, 0, 0, 0),
    ]);
    program
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::contract::PathSpec;
    use crate::port::headers::{ETH_LEN, FrameTemplate};

    /// Runs a program as the kernel would, on data that begins at `start`, with its network header
    /// at `network`. A load beyond the end returns 0.
    fn run(program: &[sock_filter], start: &[u8], network: &[u8]) -> u32 {
        let (mut pc, mut a) = (0, 0_u32);
        loop {
            let sock_filter { code, jt, jf, k } = program[pc];
            let jump = match code {
                LD_BYTE => {
                    let byte = match k.checked_sub(NETWORK) {
                        Some(at) => network.get(at as usize),
                        None => start.get(k as usize),
                    };
                    let Some(byte) = byte else { return 0 };
                    a = u32::from(*byte);
                    0
                }
                SHIFT_RIGHT => {
                    a >>= k;
                    0
                }
                SUBTRACT => {
                    a = a.wrapping_sub(k);
                    0
                }
                JEQ => usize::from(if a == k { jt } else { jf }),
                JGE => usize::from(if a >= k { jt } else { jf }),
                JUMP => k as usize,
                RET => return k,
                RET_A => return a,
                other => panic!("instruction {other:#x}"),
            };
            pc += 1 + jump;
        }
    }

    const SELECTORS: [u16; 4] = [0, 5, 11, 31];

    fn shards(count: usize, selector: u16) -> Shards {
        Shards { shared: false, first: 0, count, selector }
    }

    /// A payload with this byte at an offset. No other byte is below 16, and its neighbours differ.
    fn payload(selector: u16, byte: u8) -> Vec<u8> {
        let mut payload: Vec<u8> = (0..32).map(|at| 0x40 + 3 * at).collect();
        payload[usize::from(selector)] = byte;
        payload
    }

    fn frame(v6: bool, payload: &[u8]) -> Vec<u8> {
        let addresses = if v6 { ["fd99::99", "fd88::88"] } else { ["99.99.99.99", "88.88.88.88"] };
        let [local, remote] = addresses.map(|address| address.parse().unwrap());
        let spec =
            PathSpec { local, remote, src_port: 0, tos: 0xff, ttl: 0xff, flow_label: 0xf_ffff };
        let template = FrameTemplate::new([0x22; 6], [0x44; 6], &spec, 0xc7c7).unwrap();
        let mut frame = vec![0; template.header_len()];
        template.write(&mut frame, payload.len(), 0x7777);
        frame.extend_from_slice(payload);
        frame
    }

    #[test]
    fn the_byte_chooses_over_either_family() {
        for (count, selector) in
            [1, 2, 3, 16, 255, 256].into_iter().flat_map(|count| SELECTORS.map(|at| (count, at)))
        {
            for byte in 0..=u8::MAX {
                let payload = payload(selector, byte);
                let number = if usize::from(byte) < count { u32::from(byte) } else { 0 };
                let why = format!("{byte} at {selector} of {count}");
                let program = by_socket(shards(count, selector));
                assert_eq!(run(&program, &payload, &[]), number, "{why}");
                let program = by_frame(shards(count, selector));
                for v6 in [false, true] {
                    let frame = frame(v6, &payload);
                    let chosen = run(&program, &frame, &frame[ETH_LEN..]);
                    assert_eq!(chosen, number, "{why}, IPv6: {v6}");
                    // The offset from which the program sees the frame does not matter.
                    let chosen = run(&program, &payload, &frame[ETH_LEN..]);
                    assert_eq!(chosen, number, "{why}, IPv6: {v6}");
                }
            }
        }
    }

    #[test]
    fn the_first_value_is_the_first_ports() {
        for (first, count) in [(1, 1), (3, 2), (254, 2), (255, 1)] {
            let program = by_frame(Shards { shared: true, first, count, selector: 5 });
            for byte in 0..=u8::MAX {
                let number = byte.checked_sub(first).filter(|n| usize::from(*n) < count);
                let frame = frame(false, &payload(5, byte));
                let chosen = run(&program, &frame, &frame[ETH_LEN..]);
                assert_eq!(
                    chosen,
                    u32::from(number.unwrap_or(0)),
                    "{byte} of {count} from {first}"
                );
            }
        }
    }

    #[test]
    fn what_is_too_short_for_the_byte_is_the_firsts() {
        for selector in SELECTORS {
            let shards = shards(3, selector);
            let payload = payload(selector, 2);
            for len in 0..=usize::from(selector) {
                assert_eq!(run(&by_socket(shards), &payload[..len], &[]), 0, "{len}");
                for v6 in [false, true] {
                    let frame = frame(v6, &payload[..len]);
                    let chosen = run(&by_frame(shards), &frame, &frame[ETH_LEN..]);
                    assert_eq!(chosen, 0, "{len}, IPv6: {v6}");
                }
            }
        }
    }

    #[test]
    fn another_version_is_taken_for_ipv6_and_harms_nothing() {
        let program = by_frame(shards(3, 5));
        let mut frame = frame(true, &payload(5, 1));
        for version in [0, 1, 5, 15] {
            frame[ETH_LEN] = version << 4;
            assert!(run(&program, &frame, &frame[ETH_LEN..]) < 3);
            assert_eq!(run(&program, &frame, &frame[ETH_LEN..][..1]), 0);
        }
    }
}
