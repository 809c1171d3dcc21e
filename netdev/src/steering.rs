//! Classic BPF programs that choose among the ports of several shards: by the upper byte of the queue pair number in the transport
//! header, which is the number of the shard.
//!
//! They only spare work: a datagram that comes to another shard's port is handed over. Sources: `Documentation/networking/filter.rst`,
//! socket(7) (`SO_ATTACH_REUSEPORT_CBPF`), packet(7) (`PACKET_FANOUT`).

use libc::sock_filter;

const LD_BYTE: u16 = (libc::BPF_LD | libc::BPF_B | libc::BPF_ABS) as u16;
const SHIFT_RIGHT: u16 = (libc::BPF_ALU | libc::BPF_RSH | libc::BPF_K) as u16;
const JEQ: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const JGE: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const JUMP: u16 = (libc::BPF_JMP | libc::BPF_JA) as u16;
const RET: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
const RET_A: u16 = (libc::BPF_RET | libc::BPF_A) as u16;

/// Where the destination queue pair number begins in the BTH.
const QPN: u32 = 5;
/// The network header, for a program that may see the frame from elsewhere.
const NETWORK: u32 = libc::SKF_NET_OFF as u32;
/// From the network header to the BTH: IPv4 without options, IPv6 without extension headers; no others are ours.
const V4_HEADERS: u32 = 20 + 8;
const V6_HEADERS: u32 = 40 + 8;

const fn op(code: u16, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

/// The number of a socket among `count`, for a program that sees the UDP payload. What is for no shard (a group, nonsense) is the first's, and so is
/// what is too short: loading beyond the end returns 0.
pub(crate) fn by_socket(count: usize) -> [sock_filter; 4] {
    [op(LD_BYTE, QPN, 0, 0), op(JGE, count as u32, 0, 1), op(RET, 0, 0, 0), op(RET_A, 0, 0, 0)]
}

/// The same for a program that sees a frame somewhere.
pub(crate) fn by_frame(count: usize) -> [sock_filter; 9] {
    [
        op(LD_BYTE, NETWORK, 0, 0),
        op(SHIFT_RIGHT, 4, 0, 0),
        op(JEQ, 4, 0, 2),
        op(LD_BYTE, NETWORK.wrapping_add(V4_HEADERS + QPN), 0, 0),
        op(JUMP, 1, 0, 0), // over the other
        op(LD_BYTE, NETWORK.wrapping_add(V6_HEADERS + QPN), 0, 0),
        op(JGE, count as u32, 0, 1),
        op(RET, 0, 0, 0),
        op(RET_A, 0, 0, 0),
    ]
}
