//! Packets, frames and files made for the tests. Files are made byte by byte, so that no library
//! reads its own mistakes.

use std::net::{Ipv4Addr, Ipv6Addr};

use rocinante_stack::types::{Key, Pkey, Psn, Qpn};
use rocinante_stack::wire::icrc::{DF, Template};
use rocinante_stack::wire::{Bth, ICRC_LEN, IpFields, Opcode, Reth};

pub(crate) const SRC_PORT: u16 = 0xc123;

pub(crate) fn ipv4(id: u16) -> IpFields {
    let (src, dst) = (Ipv4Addr::new(10, 77, 0, 2), Ipv4Addr::new(10, 77, 0, 3));
    IpFields::V4 { src, dst, id, flags: DF }
}

pub(crate) fn ipv6() -> IpFields {
    let host = |last| Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, last);
    IpFields::V6 { src: host(2), dst: host(3) }
}

/// A WRITE, sealed for its IP header.
pub(crate) fn write_packet(ip: &IpFields, psn: u32, payload: usize) -> Vec<u8> {
    let pad = payload.wrapping_neg() & 3;
    let bth = Bth {
        pad: pad as u8,
        ack_req: true,
        ..Bth::new(Opcode::RC_RDMA_WRITE_ONLY, Pkey::DEFAULT, Qpn::new(0x12), Psn::new(psn))
    };
    let mut packet = bth.bytes().to_vec();
    packet.resize(28, 0);
    let len = payload as u32;
    Reth { va: 0xabc0_0000, rkey: Key(0x77), len }.write(&mut packet[12..]);
    packet.extend((0..payload).map(|i| (i * 31 + psn as usize) as u8));
    packet.resize(packet.len() + pad + ICRC_LEN, 0);
    Template::new(ip, SRC_PORT).seal(&mut packet);
    packet
}

/// The IP packet that carries UDP data to port 4791.
pub(crate) fn ip_packet(ip: &IpFields, data: &[u8]) -> Vec<u8> {
    ip_packet_to(ip, 4791, data)
}

pub(crate) fn ip_packet_to(ip: &IpFields, port: u16, data: &[u8]) -> Vec<u8> {
    let udp_len = (data.len() + 8) as u16;
    let mut packet = Vec::new();
    match *ip {
        IpFields::V4 { src, dst, id, flags } => {
            packet.extend([0x45, 0xa2]);
            packet.extend((udp_len + 20).to_be_bytes());
            packet.extend(id.to_be_bytes());
            packet.extend(flags.to_be_bytes());
            packet.extend([63, 17, 0x12, 0x34]);
            packet.extend(src.octets());
            packet.extend(dst.octets());
        }
        IpFields::V6 { src, dst } => {
            packet.extend([0x6a, 0x21, 0x23, 0x45]);
            packet.extend(udp_len.to_be_bytes());
            packet.extend([17, 63]);
            packet.extend(src.octets());
            packet.extend(dst.octets());
        }
    }
    packet.extend(SRC_PORT.to_be_bytes());
    packet.extend(port.to_be_bytes());
    packet.extend(udp_len.to_be_bytes());
    packet.extend([0xbe, 0xef]);
    packet.extend(data);
    packet
}

/// An Ethernet frame around an IP packet.
pub(crate) fn ethernet(packet: &[u8]) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    frame.extend(ethertype(packet));
    frame.extend(packet);
    frame
}

pub(crate) fn ethertype(packet: &[u8]) -> [u8; 2] {
    if packet[0] >> 4 == 4 { [0x08, 0x00] } else { [0x86, 0xdd] }
}

/// An Ethernet frame with a right WRITE of `payload` bytes over IPv4.
pub(crate) fn good_frame(psn: u32, payload: usize) -> Vec<u8> {
    let ip = ipv4(psn as u16);
    ethernet(&ip_packet(&ip, &write_packet(&ip, psn, payload)))
}

/// How a file is written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Style {
    pub(crate) big_endian: bool,
    pub(crate) nanoseconds: bool,
}

impl Style {
    pub(crate) const USUAL: Self = Self { big_endian: false, nanoseconds: false };

    fn u32(self, value: u32) -> [u8; 4] {
        if self.big_endian { value.to_be_bytes() } else { value.to_le_bytes() }
    }

    fn u16(self, value: u16) -> [u8; 2] {
        if self.big_endian { value.to_be_bytes() } else { value.to_le_bytes() }
    }
}

/// A pcap file. Each frame comes a millisecond after the one before, and is captured whole.
pub(crate) fn pcap(style: Style, link: u32, frames: &[Vec<u8>]) -> Vec<u8> {
    let mut file = pcap_header(style, link);
    for (i, frame) in frames.iter().enumerate() {
        file.extend(pcap_record(style, i as u32, frame, frame.len()));
    }
    file
}

pub(crate) fn pcap_header(style: Style, link: u32) -> Vec<u8> {
    let magic = if style.nanoseconds { 0xa1b2_3c4d } else { 0xa1b2_c3d4 };
    let mut file = style.u32(magic).to_vec();
    file.extend(style.u16(2));
    file.extend(style.u16(4));
    for field in [0, 0, 96, link] {
        file.extend(style.u32(field));
    }
    file
}

pub(crate) fn pcap_record(style: Style, ms: u32, captured: &[u8], len: usize) -> Vec<u8> {
    let fraction = ms % 1000 * if style.nanoseconds { 1_000_000 } else { 1000 };
    let mut record = Vec::new();
    for field in [1_700_000_000 + ms / 1000, fraction, captured.len() as u32, len as u32] {
        record.extend(style.u32(field));
    }
    record.extend(captured);
    record
}

/// A block of pcapng.
pub(crate) fn block(style: Style, kind: u32, body: &[u8]) -> Vec<u8> {
    let mut padded = body.to_vec();
    padded.resize(body.len().next_multiple_of(4), 0);
    let len = style.u32(padded.len() as u32 + 12);
    let mut block = style.u32(kind).to_vec();
    block.extend(len);
    block.extend(padded);
    block.extend(len);
    block
}

pub(crate) fn section(style: Style) -> Vec<u8> {
    let mut body = style.u32(0x1a2b_3c4d).to_vec();
    body.extend(style.u16(1));
    body.extend(style.u16(0));
    body.extend([0xff; 8]);
    block(style, 0x0a0d_0d0a, &body)
}

/// An interface, with its time resolution if that is not a microsecond.
pub(crate) fn interface(style: Style, link: u16, snaplen: u32, resolution: Option<u8>) -> Vec<u8> {
    let mut body = style.u16(link).to_vec();
    body.extend(style.u16(0));
    body.extend(style.u32(snaplen));
    if let Some(resolution) = resolution {
        body.extend(style.u16(9));
        body.extend(style.u16(1));
        body.extend([resolution, 0, 0, 0]);
        body.extend([0; 4]);
    }
    block(style, 1, &body)
}

/// An enhanced packet block, with a comment that is not terminated as the format wants it.
pub(crate) fn enhanced(style: Style, interface: u32, ticks: u64, frame: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    let len = frame.len() as u32;
    for field in [interface, (ticks >> 32) as u32, ticks as u32, len, len] {
        body.extend(style.u32(field));
    }
    body.extend(frame);
    body.resize(body.len().next_multiple_of(4), 0);
    body.extend(style.u16(1));
    body.extend(style.u16(4));
    body.extend(b"note");
    block(style, 6, &body)
}

/// The obsolete packet block: a 16-bit interface and a count of drops.
pub(crate) fn obsolete(style: Style, interface: u16, ticks: u64, frame: &[u8]) -> Vec<u8> {
    let mut body = style.u16(interface).to_vec();
    body.extend(style.u16(0xffff));
    let len = frame.len() as u32;
    for field in [(ticks >> 32) as u32, ticks as u32, len, len] {
        body.extend(style.u32(field));
    }
    body.extend(frame);
    block(style, 2, &body)
}

/// A simple packet block: on interface 0, without a timestamp.
pub(crate) fn simple(style: Style, len: usize, captured: &[u8]) -> Vec<u8> {
    let mut body = style.u32(len as u32).to_vec();
    body.extend(captured);
    block(style, 3, &body)
}

/// A pcapng file with interfaces of these link types and resolutions of time, and packets with
/// interface and ticks.
pub(crate) fn pcapng_of(links: &[(u16, Option<u8>)], packets: &[(u32, u64, &[u8])]) -> Vec<u8> {
    let style = Style::USUAL;
    let mut file = section(style);
    for (link, resolution) in links {
        file.extend(interface(style, *link, 0, *resolution));
    }
    for (interface, ticks, frame) in packets {
        file.extend(enhanced(style, *interface, *ticks, frame));
    }
    file
}
