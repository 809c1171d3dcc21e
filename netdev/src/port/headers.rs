//! Ethernet, IP and UDP headers for the backends that write and read whole frames.
//!
//! [`FrameTemplate`] holds the headers of a path; per frame only lengths, identification and
//! checksums are patched in. [`parse_frame`] finds the payload of a UDP datagram to port 4791.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use etherparse::{
    EtherType, Ethernet2Header, IpDscp, IpEcn, IpNumber, Ipv4Header, Ipv6FlowLabel, Ipv6Header,
    UdpHeader,
};

use crate::ROCE_PORT;
use crate::port::contract::PathSpec;

/// Length of an Ethernet header.
pub(crate) const ETH_LEN: usize = 14;
const IPV4_LEN: usize = 20;
const IPV6_LEN: usize = 40;
/// Length of a UDP header.
pub(crate) const UDP_LEN: usize = 8;
/// The most bytes of UDP payload that the length fields of either IP version can express.
pub(crate) const PAYLOAD_MAX: usize = 65_535 - IPV4_LEN - UDP_LEN;
const _: () = assert!(PAYLOAD_MAX == 65_507);
/// Length of the headers before an IPv6 datagram's UDP payload.
pub(crate) const HEADERS_V6: usize = ETH_LEN + IPV6_LEN + UDP_LEN;
/// The longest headers of a template.
pub(crate) const HEADERS_MAX: usize = HEADERS_V6;

/// Room for the headers that hosts on the way put before a super-packet (VXLAN over IPv6: 70
/// bytes). Linux segments it in software, which is slow, where it is not shorter with these than
/// the device's `gso_max_size`: 65,536 bytes by default.
pub(crate) const TUNNELS_MAX: usize = 256;

const UDP_PROTOCOL: u8 = 17;
const UDP_CHECKSUM: usize = 6;
const IPV4_DF: u16 = 0x4000;

/// The headers of one path, ready to be written before a payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrameTemplate {
    bytes: [u8; HEADERS_MAX],
    len: usize,
    /// Sum of the IPv4 header's words without total length, identification and checksum.
    ip_sum: u32,
    /// Sum of addresses and protocol of the pseudo-header, without the length.
    pseudo_sum: u32,
}

impl FrameTemplate {
    /// The headers of a path, with `src_port` instead of the port in the spec. DF is set; there are
    /// no options. `None` if the two addresses are of different families.
    #[must_use]
    pub fn new(src_mac: [u8; 6], dst_mac: [u8; 6], spec: &PathSpec, src_port: u16) -> Option<Self> {
        let mut template = Self { bytes: [0; HEADERS_MAX], len: 0, ip_sum: 0, pseudo_sum: 0 };
        let ether_type = match spec.remote {
            IpAddr::V4(_) => EtherType::IPV4,
            IpAddr::V6(_) => EtherType::IPV6,
        };
        template.push(
            &Ethernet2Header { source: src_mac, destination: dst_mac, ether_type }.to_bytes(),
        );
        match (spec.local, spec.remote) {
            (IpAddr::V4(local), IpAddr::V4(remote)) => template.push_ipv4(local, remote, spec),
            (IpAddr::V6(local), IpAddr::V6(remote)) => template.push_ipv6(local, remote, spec),
            _ => return None,
        }
        let udp = UdpHeader {
            source_port: src_port,
            destination_port: ROCE_PORT,
            length: 0,
            checksum: 0,
        };
        template.push(&udp.to_bytes());
        Some(template)
    }

    fn push(&mut self, header: &[u8]) {
        self.bytes[self.len..self.len + header.len()].copy_from_slice(header);
        self.len += header.len();
    }

    fn push_ipv4(&mut self, local: Ipv4Addr, remote: Ipv4Addr, spec: &PathSpec) {
        let header = Ipv4Header {
            dscp: IpDscp::try_new(spec.tos >> 2).unwrap_or_default(),
            ecn: IpEcn::try_new(spec.tos & 3).unwrap_or_default(),
            dont_fragment: true,
            time_to_live: spec.ttl,
            protocol: IpNumber::UDP,
            source: local.octets(),
            destination: remote.octets(),
            ..Ipv4Header::default()
        };
        let mut bytes = header.to_bytes();
        // Total length, identification and checksum are patched in per frame.
        bytes[2..6].fill(0);
        bytes[10..12].fill(0);
        self.ip_sum = fold(sum(&bytes));
        self.pseudo_sum =
            fold(sum(&local.octets()) + sum(&remote.octets()) + u64::from(UDP_PROTOCOL));
        self.push(&bytes);
    }

    fn push_ipv6(&mut self, local: Ipv6Addr, remote: Ipv6Addr, spec: &PathSpec) {
        let header = Ipv6Header {
            traffic_class: spec.tos,
            flow_label: Ipv6FlowLabel::try_new(spec.flow_label & 0xf_ffff).unwrap_or_default(),
            payload_length: 0,
            next_header: IpNumber::UDP,
            hop_limit: spec.ttl,
            source: local.octets(),
            destination: remote.octets(),
        };
        self.pseudo_sum =
            fold(sum(&local.octets()) + sum(&remote.octets()) + u64::from(UDP_PROTOCOL));
        self.push(&header.to_bytes());
    }

    /// Length of the headers: where the payload begins.
    #[must_use]
    pub fn header_len(&self) -> usize {
        self.len
    }

    /// Offset of the UDP header, where a checksum offload starts to sum.
    #[must_use]
    pub fn udp_offset(&self) -> usize {
        self.len - UDP_LEN
    }

    /// Whether the path is IPv6.
    #[must_use]
    pub fn is_ipv6(&self) -> bool {
        self.len == HEADERS_V6
    }

    /// The destination's Ethernet address.
    #[must_use]
    pub fn dst_mac(&self) -> [u8; 6] {
        self.bytes[..6].try_into().unwrap_or_default()
    }

    /// The most UDP payload bytes that the length fields can express.
    #[must_use]
    pub fn payload_max(&self) -> usize {
        let ip = if self.is_ipv6() { 0 } else { IPV4_LEN };
        usize::from(u16::MAX) - ip - UDP_LEN
    }

    /// Writes the headers of a datagram of `payload_len` bytes to the start of `out`. The UDP
    /// checksum is 0: valid for IPv4; for IPv6 call [`complete_checksum`](Self::complete_checksum)
    /// once the payload is in place. Panics if `out` is shorter than
    /// [`header_len`](Self::header_len).
    pub fn write(&self, out: &mut [u8], payload_len: usize, ip_id: u16) {
        debug_assert!(payload_len <= self.payload_max());
        let udp_len = (payload_len + UDP_LEN) as u16;
        let out = &mut out[..self.len];
        out.copy_from_slice(&self.bytes[..self.len]);
        if self.is_ipv6() {
            put(out, ETH_LEN + 4, udp_len);
        } else {
            let total = udp_len + IPV4_LEN as u16;
            put(out, ETH_LEN + 2, total);
            put(out, ETH_LEN + 4, ip_id);
            let sum = fold(u64::from(self.ip_sum) + u64::from(total) + u64::from(ip_id));
            put(out, ETH_LEN + 10, !(sum as u16));
        }
        put(out, self.udp_offset() + 4, udp_len);
    }

    /// As [`write`](Self::write), but puts the sum of the pseudo-header into the UDP checksum
    /// field, as checksum and segmentation offloads require (`CHECKSUM_PARTIAL`,
    /// `VIRTIO_NET_HDR_F_NEEDS_CSUM`). Panics if `out` is shorter than
    /// [`header_len`](Self::header_len).
    pub fn write_partial(&self, out: &mut [u8], payload_len: usize, ip_id: u16) {
        self.write(out, payload_len, ip_id);
        let sum = fold(u64::from(self.pseudo_sum) + (payload_len + UDP_LEN) as u64);
        put(out, self.udp_offset() + UDP_CHECKSUM, sum as u16);
    }

    /// Computes the UDP checksum of a frame that [`write`](Self::write) began: headers and payload,
    /// and nothing after it. Panics if `frame` is shorter than the headers.
    pub fn complete_checksum(&self, frame: &mut [u8]) {
        let udp = self.udp_offset();
        put(frame, udp + UDP_CHECKSUM, 0);
        let datagram = &frame[udp..];
        let whole = u64::from(self.pseudo_sum) + datagram.len() as u64 + sum(datagram);
        let checksum = match !(fold(whole) as u16) {
            0 => 0xffff, // RFC 768: 0 would mean that there is none
            checksum => checksum,
        };
        put(frame, udp + UDP_CHECKSUM, checksum);
    }
}

fn put(out: &mut [u8], at: usize, value: u16) {
    out[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

/// One's complement sum of big-endian words (RFC 1071), not folded; an odd last byte is padded.
fn sum(bytes: &[u8]) -> u64 {
    let mut words = bytes.chunks_exact(4);
    let mut total: u64 =
        words.by_ref().map(|w| u64::from(u32::from_be_bytes([w[0], w[1], w[2], w[3]]))).sum();
    for (i, byte) in words.remainder().iter().enumerate() {
        total += u64::from(*byte) << (24 - 8 * i);
    }
    // Once folded, 32-bit words sum to the same as 16-bit words.
    u64::from(fold(total))
}

/// Folds a sum to 16 bits.
fn fold(mut sum: u64) -> u32 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u32
}

/// The headers of a received frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Headers {
    /// Destination Ethernet address.
    pub dst_mac: [u8; 6],
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// UDP source port.
    pub src_port: u16,
    /// TOS or traffic class byte.
    pub tos: u8,
    /// IPv4 identification, and the 16 bits of flags and fragment offset; `None` for IPv6.
    pub ip_id: Option<(u16, u16)>,
    /// Offset of the UDP payload in the frame.
    pub payload_offset: usize,
    /// Length of the UDP payload in bytes.
    pub payload_len: usize,
}

/// A received frame: its headers, and the UDP payload from the BTH to the ICRC. A super-packet
/// holds several datagrams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Frame<'a> {
    /// The headers.
    pub headers: Headers,
    /// The payload.
    pub payload: &'a [u8],
}

/// Finds the payload of a UDP datagram to port 4791 in an Ethernet frame.
///
/// `None` for anything else: other protocols and ports, VLAN tags, IPv4 options, fragments, IPv6
/// extension headers, and lengths that do not fit the frame (padding after the datagram is
/// allowed). The IPv4 header checksum and the UDP checksum are not verified: the kernel leaves both
/// to offloads, and on a veth the latter may be partial.
#[must_use]
pub(crate) fn parse_frame(frame: &[u8]) -> Option<Frame<'_>> {
    let headers = parse_headers(frame, frame.len())?;
    let end = headers.payload_offset + headers.payload_len;
    Some(Frame { headers, payload: frame.get(headers.payload_offset..end)? })
}

/// As [`parse_frame`], for a frame of `frame_len` bytes of which only `start` is contiguous.
#[must_use]
pub(crate) fn parse_headers(start: &[u8], frame_len: usize) -> Option<Headers> {
    let dst_mac = *start.first_chunk()?;
    let ip = start.get(ETH_LEN..)?;
    let mut headers = match word(start, 12)? {
        0x0800 => parse_ipv4(ip)?,
        0x86dd => parse_ipv6(ip)?,
        _ => return None,
    };
    headers.dst_mac = dst_mac;
    // Up to here, offset and length are those of the UDP datagram within the IP packet.
    if ETH_LEN + headers.payload_offset + headers.payload_len > frame_len {
        return None;
    }
    let udp = ip.get(headers.payload_offset..headers.payload_offset + UDP_LEN)?;
    let udp_len = usize::from(word(udp, 4)?);
    if word(udp, 2)? != ROCE_PORT || udp_len < UDP_LEN || udp_len > headers.payload_len {
        return None;
    }
    headers.src_port = word(udp, 0)?;
    headers.payload_offset += ETH_LEN + UDP_LEN;
    headers.payload_len = udp_len - UDP_LEN;
    Some(headers)
}

fn parse_ipv4(ip: &[u8]) -> Option<Headers> {
    let header: &[u8; IPV4_LEN] = ip.first_chunk()?;
    let flags = word(header, 6)?;
    let total = usize::from(word(header, 2)?);
    let fragment = flags & !IPV4_DF != 0;
    if header[0] != 0x45 || header[9] != UDP_PROTOCOL || fragment || total < IPV4_LEN {
        return None;
    }
    let address = |at: usize| header[at..].first_chunk::<4>().map(|a| Ipv4Addr::from(*a).into());
    Some(Headers {
        dst_mac: [0; 6],
        src: address(12)?,
        dst: address(16)?,
        src_port: 0,
        tos: header[1],
        ip_id: Some((word(header, 4)?, flags)),
        payload_offset: IPV4_LEN,
        payload_len: total - IPV4_LEN,
    })
}

fn parse_ipv6(ip: &[u8]) -> Option<Headers> {
    let header: &[u8; IPV6_LEN] = ip.first_chunk()?;
    if header[0] >> 4 != 6 || header[6] != UDP_PROTOCOL {
        return None;
    }
    let address = |at: usize| header[at..].first_chunk::<16>().map(|a| Ipv6Addr::from(*a).into());
    Some(Headers {
        dst_mac: [0; 6],
        src: address(8)?,
        dst: address(24)?,
        src_port: 0,
        tos: (word(header, 0)? >> 4) as u8,
        ip_id: None,
        payload_offset: IPV6_LEN,
        payload_len: usize::from(word(header, 4)?),
    })
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use etherparse::{NetHeaders, PacketHeaders, TransportHeader};

    use super::*;

    fn spec(v6: bool) -> PathSpec {
        let (local, remote) =
            if v6 { ("fd00::1", "fd00:1::ffff:2") } else { ("10.0.0.1", "10.255.3.2") };
        PathSpec {
            local: local.parse().expect("address"),
            remote: remote.parse().expect("address"),
            src_port: 0,
            tos: 0xba,
            ttl: 63,
            flow_label: 0xa_bcde,
        }
    }

    fn template(v6: bool) -> FrameTemplate {
        FrameTemplate::new([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2], &spec(v6), 0xc123)
            .expect("one family")
    }

    fn frame(v6: bool, payload: &[u8], ip_id: u16) -> Vec<u8> {
        let template = template(v6);
        let mut frame = vec![0xee; template.header_len() + payload.len()];
        frame[template.header_len()..].copy_from_slice(payload);
        template.write(&mut frame, payload.len(), ip_id);
        if v6 {
            template.complete_checksum(&mut frame);
        }
        frame
    }

    #[test]
    fn ipv4_headers_are_what_a_library_reads() {
        for (len, id) in [(16, 0), (1040, 0xffff), (4113, 0x1234), (65507, 7)] {
            let payload: Vec<u8> = (0..len).map(|i| i as u8).collect();
            let bytes = frame(false, &payload, id);
            let parsed = PacketHeaders::from_ethernet_slice(&bytes).expect("valid");
            let Some(NetHeaders::Ipv4(ip, _)) = parsed.net else { panic!("IPv4") };
            assert_eq!(ip.header_checksum, ip.calc_header_checksum());
            assert_eq!((ip.identification, ip.dont_fragment, ip.time_to_live), (id, true, 63));
            assert_eq!((ip.dscp.value() << 2) | ip.ecn.value(), 0xba);
            assert_eq!(usize::from(ip.total_len), 28 + len);
            let Some(TransportHeader::Udp(udp)) = parsed.transport else { panic!("UDP") };
            assert_eq!((udp.source_port, udp.destination_port, udp.checksum), (0xc123, 4791, 0));
            assert_eq!(usize::from(udp.length), 8 + len);
            assert_eq!(parsed.payload.slice(), payload);
        }
    }

    #[test]
    fn ipv6_checksums_are_what_a_library_computes() {
        for len in [0usize, 1, 2, 3, 17, 4113, 65527] {
            let payload: Vec<u8> = (0..len).map(|i| (i * 7) as u8).collect();
            let bytes = frame(true, &payload, 9);
            let parsed = PacketHeaders::from_ethernet_slice(&bytes).expect("valid");
            let Some(NetHeaders::Ipv6(ip, _)) = parsed.net else { panic!("IPv6") };
            assert_eq!((ip.traffic_class, ip.hop_limit), (0xba, 63));
            assert_eq!(ip.flow_label.value(), 0xa_bcde);
            let Some(TransportHeader::Udp(udp)) = parsed.transport else { panic!("UDP") };
            assert_eq!(Ok(udp.checksum), udp.calc_checksum_ipv6(&ip, &payload));
            assert_ne!(udp.checksum, 0);
        }
    }

    #[test]
    fn a_partial_checksum_completes_to_the_full_one() {
        for v6 in [false, true] {
            let template = template(v6);
            let payload = [0x5a; 333];
            let mut bytes = vec![0; template.header_len() + payload.len()];
            bytes[template.header_len()..].copy_from_slice(&payload);
            template.write_partial(&mut bytes, payload.len(), 1);
            // As the kernel does: the sum from csum_start to the end, pseudo-header sum included.
            let offloaded = !(fold(sum(&bytes[template.udp_offset()..])) as u16);
            template.complete_checksum(&mut bytes);
            let udp = &bytes[template.udp_offset()..];
            assert_eq!(offloaded, word(udp, UDP_CHECKSUM).expect("there"));
        }
    }

    #[test]
    fn parse_reads_what_write_wrote() {
        for v6 in [false, true] {
            let mut bytes = frame(v6, &[7; 100], 0xbeef);
            bytes.extend_from_slice(&[0; 6]); // Ethernet padding
            let got = parse_frame(&bytes).expect("a RoCE frame");
            assert_eq!(got.payload, [7; 100]);
            assert_eq!((got.headers.src, got.headers.dst), (spec(v6).local, spec(v6).remote));
            assert_eq!((got.headers.src_port, got.headers.tos), (0xc123, 0xba));
            assert_eq!(got.headers.dst_mac, [2, 0, 0, 0, 0, 2]);
            assert_eq!(got.headers.ip_id, (!v6).then_some((0xbeef, 0x4000)));
        }
    }

    #[test]
    fn foreign_and_broken_frames_are_refused() {
        type Damage = fn(&mut Vec<u8>);
        let v4: [(&str, Damage); 10] = [
            ("options", |f| f[14] = 0x46),
            ("version", |f| f[14] = 0x65),
            ("more fragments", |f| f[20] |= 0x20),
            ("fragment offset", |f| f[21] = 1),
            ("TCP", |f| f[23] = 6),
            ("port", |f| f[37] ^= 1),
            ("ether type", |f| f[13] = 6),
            ("total length over frame", |f| f[16] = 0xff),
            ("UDP length over IP length", |f| f[39] += 1),
            ("UDP length below 8", |f| f[38..40].fill(0)),
        ];
        for (name, damage) in v4 {
            let mut bytes = frame(false, &[1; 64], 5);
            damage(&mut bytes);
            assert!(parse_frame(&bytes).is_none(), "{name}");
        }
        let mut bytes = frame(true, &[1; 64], 5);
        bytes[20] = 44;
        assert!(parse_frame(&bytes).is_none(), "fragment header");
    }

    #[test]
    fn no_bytes_make_it_panic() {
        for v6 in [false, true] {
            let bytes = frame(v6, &[3; 40], 5);
            for len in 0..bytes.len() {
                assert!(parse_frame(&bytes[..len]).is_none(), "{len}");
            }
            for at in 0..bytes.len() {
                for bit in 0..8 {
                    let mut damaged = bytes.clone();
                    damaged[at] ^= 1 << bit;
                    if let Some(got) = parse_frame(&damaged) {
                        assert!(got.payload.len() <= bytes.len());
                    }
                }
            }
        }
    }

    #[test]
    fn families_do_not_mix() {
        let mixed = PathSpec { local: spec(true).local, ..spec(false) };
        assert!(FrameTemplate::new([0; 6], [0; 6], &mixed, 1).is_none());
    }
}
