//! Finds the RoCEv2 datagram in a captured frame.

use std::fmt;

use etherparse::{
    EtherType, Ipv6ExtensionSlice, LaxIpv4Slice, LaxIpv6Slice, LaxNetSlice, LaxSlicedPacket,
    UdpHeaderSlice, ip_number,
};
use rocinante_wire::IpFields;

/// The UDP destination port of RoCEv2.
pub(super) const ROCE_PORT: u16 = 4791;

/// Length of a UDP header.
pub(super) const UDP_LEN: usize = 8;

/// The type of a frame's first header (see tcpdump.org/linktypes.html).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct LinkType(pub u32);

/// A link type that this command does not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unsupported(pub LinkType);

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "link type {} is not supported; Ethernet (1), Linux cooked (113, 276), raw IP (101, 228, 229) \
             and BSD loopback (0, 108) are: capture on an Ethernet interface, or with `tcpdump -i any`",
            self.0.0
        )
    }
}

/// The reason why the ICRC of a datagram cannot be computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// Only a part of the datagram is in the file.
    Cut,
    /// The first fragment of an IP datagram; the rest is in other packets.
    Fragment,
    /// IPv4 options, which the formula does not mention.
    IpOptions,
    /// IPv6 extension headers or an authentication header, which the formula does not mention
    /// either.
    IpExtensions,
    /// The IP and UDP headers do not agree on the length.
    Lengths,
    /// There is no room for a BTH and an ICRC.
    TooShort,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cut => "cut off by the capture's snapshot length",
            Self::Fragment => "IP fragment",
            Self::IpOptions => "IP options",
            Self::IpExtensions => "IP extension headers",
            Self::Lengths => "IP and UDP lengths differ",
            Self::TooShort => "too short",
        })
    }
}

/// A UDP datagram to port 4791.
#[derive(Debug, Clone, Copy)]
pub struct Datagram<'a> {
    /// The fields of the IP header that the ICRC covers.
    pub ip: IpFields,
    /// UDP source port.
    pub src_port: u16,
    /// The part of the UDP payload that is in the file.
    pub captured: &'a [u8],
    /// Length of the UDP payload on the wire, at least that of `captured`.
    pub len: usize,
    /// The reason why its ICRC cannot be computed, if there is one.
    pub obstacle: Option<Obstacle>,
    /// Where the IP header begins in the frame.
    pub ip_at: usize,
    /// Where the UDP header begins in the frame.
    pub udp_at: usize,
}

/// The RoCEv2 datagram in a frame, if there is one. Error: [`Unsupported`], if the frame cannot be
/// read at all.
pub fn roce_datagram(link: LinkType, frame: &[u8]) -> Result<Option<Datagram<'_>>, Unsupported> {
    let net = network(link, frame)?;
    let datagram = match net {
        Some(LaxNetSlice::Ipv4(ip)) => {
            from_ipv4(&ip).map(|datagram| (datagram, ip.header().slice().as_ptr().addr()))
        }
        Some(LaxNetSlice::Ipv6(ip)) => {
            from_ipv6(&ip).map(|datagram| (datagram, ip.header().slice().as_ptr().addr()))
        }
        _ => None,
    };
    Ok(datagram.map(|(datagram, ip)| {
        let start = frame.as_ptr().addr();
        let udp_at = datagram.captured.as_ptr().addr() - UDP_LEN - start;
        Datagram { ip_at: ip - start, udp_at, ..datagram }
    }))
}

/// The IP packet of a frame, or another of the network layer.
pub(super) fn network(
    link: LinkType,
    frame: &[u8],
) -> Result<Option<LaxNetSlice<'_>>, Unsupported> {
    Ok(match link.0 {
        1 => LaxSlicedPacket::from_ethernet(frame).ok().and_then(|packet| packet.net),
        // Linux cooked: of 16 or 20 bytes, an Ethernet protocol number at 14 or 0.
        113 => cooked(frame, 16, 14),
        276 => cooked(frame, 20, 0),
        // Raw IP. Some systems write their DLT_RAW as 12 or 14.
        101 | 228 | 229 | 12 | 14 => raw_ip(frame),
        // BSD loopback: a four-byte address family in either byte order. The IP version has the
        // same information.
        0 | 108 => frame.get(4..).and_then(raw_ip),
        _ => return Err(Unsupported(link)),
    })
}

fn cooked(frame: &[u8], header: usize, protocol: usize) -> Option<LaxNetSlice<'_>> {
    let (header, rest) = frame.split_at_checked(header)?;
    let protocol = u16::from_be_bytes([header[protocol], header[protocol + 1]]);
    LaxSlicedPacket::from_ether_type(EtherType(protocol), rest).net
}

fn raw_ip(packet: &[u8]) -> Option<LaxNetSlice<'_>> {
    LaxSlicedPacket::from_ip(packet).ok()?.net
}

fn from_ipv4<'a>(ip: &LaxIpv4Slice<'a>) -> Option<Datagram<'a>> {
    let header = ip.header();
    if header.fragments_offset().value() != 0 {
        return None;
    }
    let flags = &header.slice()[6..8];
    let fields = IpFields::V4 {
        src: header.source_addr(),
        dst: header.destination_addr(),
        id: header.identification(),
        flags: u16::from_be_bytes([flags[0], flags[1]]),
    };
    let authentication = ip.extensions().auth.map(|header| header.slice().len());
    let obstacle = if header.more_fragments() {
        Some(Obstacle::Fragment)
    } else if !header.options().is_empty() {
        Some(Obstacle::IpOptions)
    } else {
        authentication.map(|_| Obstacle::IpExtensions)
    };
    let headers = header.slice().len() + authentication.unwrap_or(0);
    let payload_len = usize::from(header.total_len()).checked_sub(headers);
    from_udp(fields, ip.payload().ip_number, ip.payload().payload, payload_len, obstacle)
}

fn from_ipv6<'a>(ip: &LaxIpv6Slice<'a>) -> Option<Datagram<'a>> {
    let header = ip.header();
    let fields = IpFields::V6 { src: header.source_addr(), dst: header.destination_addr() };
    let mut obstacle = None;
    for extension in ip.extensions().clone() {
        obstacle = obstacle.or(Some(Obstacle::IpExtensions));
        if let Ipv6ExtensionSlice::Fragment(fragment) = extension {
            if fragment.fragment_offset().value() != 0 {
                return None;
            }
            if fragment.more_fragments() {
                obstacle = Some(Obstacle::Fragment);
            }
        }
    }
    let payload_len =
        usize::from(header.payload_length()).checked_sub(ip.extensions().slice().len());
    from_udp(fields, ip.payload().ip_number, ip.payload().payload, payload_len, obstacle)
}

/// The UDP datagram to port 4791 in an IP payload. `payload_len` is the payload length in the IP
/// header. The caller fills in the places in the frame.
fn from_udp(
    ip: IpFields,
    protocol: etherparse::IpNumber,
    payload: &[u8],
    payload_len: Option<usize>,
    obstacle: Option<Obstacle>,
) -> Option<Datagram<'_>> {
    if protocol != ip_number::UDP {
        return None;
    }
    let udp = UdpHeaderSlice::from_slice(payload).ok()?;
    if udp.destination_port() != ROCE_PORT {
        return None;
    }
    let captured = &payload[udp.slice().len()..];
    let udp_len = usize::from(udp.length());
    let obstacle = obstacle.or((payload_len != Some(udp_len)).then_some(Obstacle::Lengths));
    let Some(len) = udp_len.checked_sub(udp.slice().len()) else {
        // A length that does not even cover the UDP header is useless: take all captured bytes.
        return Some(Datagram {
            ip,
            src_port: udp.source_port(),
            captured,
            len: captured.len(),
            obstacle,
            ip_at: 0,
            udp_at: 0,
        });
    };
    let cut = (captured.len() < len).then_some(Obstacle::Cut);
    Some(Datagram {
        ip,
        src_port: udp.source_port(),
        captured: &captured[..captured.len().min(len)],
        len,
        obstacle: obstacle.or(cut),
        ip_at: 0,
        udp_at: 0,
    })
}
