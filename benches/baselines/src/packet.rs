//! The baseline of `AF_PACKET`: super-packets with a virtio header out, a mapped ring in.

use std::io;
use std::net::{IpAddr, SocketAddrV4};

use rocinante_netdev::Interface;
use rocinante_wire::icrc::{DF, Template};

use crate::sys::{Ring, Socket, VNET_LEN};
use crate::wire::{gather, is_gathered, write_run};
use crate::{Arrived, Flow, Link, Packet, ROCE_PORT, RunLimits, SRC_PORT};

const ETHERNET: usize = 14;
const IPV4: usize = 20;
const UDP: usize = 8;
const HEADERS: usize = ETHERNET + IPV4 + UDP;

const NEEDS_CSUM: u8 = 1;
const GSO_UDP_L4: u8 = 5;

/// 120 slots: a spinning reader is never that far behind, unless another program runs on its core
/// for long.
const RING_BLOCKS: usize = 8;
/// Puts UDP payloads at multiples of 64 bytes in the ring, which makes the kernel's copy faster.
const RING_RESERVE: i32 = 10;
/// Frames per call.
const BURST: usize = 4;

/// A packet socket on one interface, and a UDP socket that stops the kernel from answering for the
/// port.
pub struct PacketLink {
    socket: Socket,
    ring: Ring,
    _guard: Socket,
    /// Virtio, Ethernet, IPv4 and UDP headers.
    headers: [u8; VNET_LEN + HEADERS],
    outgoing: Template,
    incoming: Template,
    /// Headers and payload, contiguous.
    staging: Vec<u8>,
    limits: RunLimits,
}

impl PacketLink {
    /// Opens the sockets on the interface that has the local address; the peer's Ethernet address
    /// is `mac`. Error: no `CAP_NET_RAW`, or UDP/4791 is taken.
    pub fn open(flow: Flow, mac: [u8; 6]) -> io::Result<Self> {
        let interface = Interface::by_address(IpAddr::V4(flow.local))?;
        let guard = guard(flow)?;
        let socket = Socket::packet()?;
        for (option, value) in [
            (libc::PACKET_VERSION, libc::tpacket_versions::TPACKET_V2 as i32),
            (libc::PACKET_VNET_HDR, 1),
            (libc::PACKET_RESERVE, RING_RESERVE),
            (libc::PACKET_IGNORE_OUTGOING, 1),
        ] {
            socket.set(libc::SOL_PACKET, option, value)?;
        }
        socket.set(libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, 8 << 20)?;
        socket.filter(&mut roce())?;
        let ring = socket.ring(RING_BLOCKS)?;
        socket.bind_interface(interface.index)?;
        let limits = RunLimits::super_packet();
        Ok(Self {
            socket,
            ring,
            _guard: guard,
            headers: headers(flow, interface.mac, mac),
            outgoing: flow.outgoing(SRC_PORT),
            incoming: flow.incoming(SRC_PORT),
            staging: vec![0; VNET_LEN + HEADERS + limits.bytes],
            limits,
        })
    }

    /// Fills in the headers for `len` bytes in datagrams of `segment` bytes, or in a single one.
    fn address(&mut self, len: usize, segment: Option<u16>) {
        let (vnet, rest) = self.headers.split_at_mut(VNET_LEN);
        let (ip, udp) = rest[ETHERNET..].split_at_mut(IPV4);
        let (ip_len, udp_len) = ((len + UDP + IPV4) as u16, (len + UDP) as u16);
        ip[2..4].copy_from_slice(&ip_len.to_be_bytes());
        ip[10..12].fill(0);
        let sum = !fold(sum(ip));
        ip[10..12].copy_from_slice(&sum.to_be_bytes());
        udp[4..6].copy_from_slice(&udp_len.to_be_bytes());
        udp[6..8].fill(0);
        vnet.fill(0);
        let mut put =
            |at: usize, value: u16| vnet[at..at + 2].copy_from_slice(&value.to_ne_bytes());
        put(2, HEADERS as u16);
        if let Some(segment) = segment {
            put(4, segment);
            put(6, (ETHERNET + IPV4) as u16);
            put(8, 6);
            vnet[..2].copy_from_slice(&[NEEDS_CSUM, GSO_UDP_L4]);
            let pseudo = sum_of_pseudo_header(ip, udp_len);
            udp[6..8].copy_from_slice(&pseudo.to_be_bytes());
        }
    }
}

fn sum_of_pseudo_header(ip: &[u8], udp_len: u16) -> u16 {
    fold(sum(&ip[12..20]) + libc::IPPROTO_UDP as u32 + u32::from(udp_len))
}

fn sum(bytes: &[u8]) -> u32 {
    bytes.chunks_exact(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum()
}

fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

fn headers(flow: Flow, local: [u8; 6], remote: [u8; 6]) -> [u8; VNET_LEN + HEADERS] {
    let mut out = [0; VNET_LEN + HEADERS];
    let (ethernet, rest) = out[VNET_LEN..].split_at_mut(ETHERNET);
    ethernet[..6].copy_from_slice(&remote);
    ethernet[6..12].copy_from_slice(&local);
    ethernet[12..].copy_from_slice(&[0x08, 0x00]);
    let (ip, udp) = rest.split_at_mut(IPV4);
    ip[0] = 0x45;
    ip[6..8].copy_from_slice(&DF.to_be_bytes());
    ip[8..10].copy_from_slice(&[64, libc::IPPROTO_UDP as u8]);
    ip[12..16].copy_from_slice(&flow.local.octets());
    ip[16..20].copy_from_slice(&flow.remote.octets());
    udp[0..2].copy_from_slice(&SRC_PORT.to_be_bytes());
    udp[2..4].copy_from_slice(&ROCE_PORT.to_be_bytes());
    out
}

/// A UDP socket that owns the port and drops all input, before the kernel would segment it.
fn guard(flow: Flow) -> io::Result<Socket> {
    let socket = Socket::udp()?;
    socket.filter(&mut [instruction(libc::BPF_RET | libc::BPF_K, 0, 0, 0)])?;
    socket.set(libc::SOL_UDP, libc::UDP_GRO, 1)?;
    socket.bind(SocketAddrV4::new(flow.local, ROCE_PORT))?;
    Ok(socket)
}

fn instruction(code: u32, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt, jf, k }
}

/// Takes UDP datagrams to the port, without IPv4 options.
fn roce() -> [libc::sock_filter; 8] {
    let load = |width: u32, at| instruction(libc::BPF_LD | libc::BPF_ABS | width, at, 0, 0);
    let equal =
        |k, otherwise| instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, k, 0, otherwise);
    let take = |bytes| instruction(libc::BPF_RET | libc::BPF_K, bytes, 0, 0);
    [
        load(libc::BPF_H, 12),
        equal(libc::ETH_P_IP as u32, 5),
        load(libc::BPF_B, 23),
        equal(libc::IPPROTO_UDP as u32, 3),
        load(libc::BPF_H, 36),
        equal(u32::from(ROCE_PORT), 1),
        take(u32::MAX),
        take(0),
    ]
}

impl Link for PacketLink {
    fn limits(&self) -> RunLimits {
        self.limits
    }

    fn send(&mut self, run: &[Packet<'_>]) -> io::Result<bool> {
        let segment = (run.len() > 1).then(|| run[0].len() as u16);
        self.address(run.iter().map(Packet::len).sum(), segment);
        let Self { socket, headers, outgoing, staging, .. } = self;
        if is_gathered(run) {
            return gather(run, outgoing, headers, |pieces| socket.send(pieces, None, None));
        }
        let (before, packets) = staging.split_at_mut(headers.len());
        before.copy_from_slice(headers);
        let end = headers.len() + write_run(run, packets, outgoing);
        socket.send_piece(&staging[..end])
    }

    fn receive(&mut self, mut take: impl FnMut(Arrived<'_>)) -> io::Result<u64> {
        let mut bad = 0;
        for _ in 0..BURST {
            let (incoming, take) = (&mut self.incoming, &mut take);
            let frame = self.ring.take(|vnet, frame| bad += deliver(vnet, frame, incoming, take));
            if !frame {
                break;
            }
        }
        Ok(bad)
    }
}

/// Splits a frame into its datagrams; returns the number of those that were not ours.
fn deliver(
    vnet: &[u8; VNET_LEN],
    frame: &[u8],
    template: &mut Template,
    mut take: impl FnMut(Arrived<'_>),
) -> u64 {
    let Some(payload) = frame.get(HEADERS..) else { return 1 };
    let segment = usize::from(u16::from_ne_bytes([vnet[4], vnet[5]]));
    let segment = if vnet[1] == GSO_UDP_L4 { segment } else { payload.len() };
    let id = u16::from_be_bytes([frame[ETHERNET + 4], frame[ETHERNET + 5]]);
    let mut bad = 0;
    for (datagram, id) in payload.chunks(segment.max(1)).zip(id..) {
        match Arrived::parse(datagram, template, id) {
            Some(arrived) => take(arrived),
            None => bad += 1,
        }
    }
    bad
}
