//! Finds RoCEv2 inside of tunnels, to say that it is there: networks of containers and of virtual
//! machines carry it so between hosts.

use etherparse::{LaxNetSlice, ip_number};

use super::frame::{LinkType, network, roce_datagram};

/// The tunnel of RFC 7348.
pub(super) const VXLAN: &str = "VXLAN";
/// Ethernet, and IP without a header before it (tcpdump.org/linktypes.html).
const ETHERNET: LinkType = LinkType(1);
const IP: LinkType = LinkType(101);
/// EtherTypes of the inner packet.
const BRIDGED: u16 = 0x6558;
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
/// Tunnels within tunnels that are looked into.
const DEPTH: u32 = 2;

/// The tunnel, the outermost one, that a frame carries RoCEv2 in.
pub(super) fn around_roce(link: LinkType, frame: &[u8]) -> Option<&'static str> {
    within(link, frame, DEPTH)
}

fn within(link: LinkType, frame: &[u8], depth: u32) -> Option<&'static str> {
    let (tunnel, link, inner) = opened(link, frame)?;
    let found = matches!(roce_datagram(link, inner), Ok(Some(_)))
        || depth > 1 && within(link, inner, depth - 1).is_some();
    found.then_some(tunnel)
}

/// The kind of the tunnel, and the inner packet with its link type.
fn opened(link: LinkType, frame: &[u8]) -> Option<(&'static str, LinkType, &[u8])> {
    let payload = match network(link, frame).ok()?? {
        LaxNetSlice::Ipv4(ip) => (!ip.payload().fragmented).then(|| ip.payload().clone()),
        LaxNetSlice::Ipv6(ip) => (!ip.payload().fragmented).then(|| ip.payload().clone()),
        _ => None,
    }?;
    match payload.ip_number {
        ip_number::UDP => of_udp(payload.payload),
        ip_number::GRE => of_gre(payload.payload),
        ip_number::IPV4 | ip_number::IPV6 => Some(("IP", IP, payload.payload)),
        _ => None,
    }
}

fn of_udp(datagram: &[u8]) -> Option<(&'static str, LinkType, &[u8])> {
    let (header, payload) = datagram.split_first_chunk::<8>()?;
    match u16::from_be_bytes([header[2], header[3]]) {
        // The number of IANA, and that of Linux.
        4789 | 8472 => Some((VXLAN, ETHERNET, payload.get(8..)?)),
        // RFC 8926: the length of the options is in words.
        6081 => {
            let header = payload.first_chunk::<4>()?;
            let inner = payload.get(8 + usize::from(header[0] & 0x3f) * 4..)?;
            Some(("Geneve", by_type([header[2], header[3]])?, inner))
        }
        _ => None,
    }
}

/// RFC 2784 and RFC 2890: a checksum, a key and a number may follow the header.
fn of_gre(packet: &[u8]) -> Option<(&'static str, LinkType, &[u8])> {
    let header = packet.first_chunk::<4>()?;
    let words = [0x80, 0x20, 0x10].iter().filter(|flag| header[0] & **flag != 0).count();
    Some(("GRE", by_type([header[2], header[3]])?, packet.get(4 + 4 * words..)?))
}

fn by_type(ether_type: [u8; 2]) -> Option<LinkType> {
    match u16::from_be_bytes(ether_type) {
        BRIDGED => Some(ETHERNET),
        IPV4 | IPV6 => Some(IP),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use etherparse::PacketBuilder;

    use super::*;

    const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];

    fn udp(port: u16, v6: bool, payload: &[u8]) -> Vec<u8> {
        let ethernet = PacketBuilder::ethernet2(MACS[0], MACS[1]);
        let ip = match v6 {
            true => ethernet.ipv6([1; 16], [2; 16], 64),
            false => ethernet.ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64),
        };
        let mut frame = Vec::new();
        ip.udp(49152, port).write(&mut frame, payload).unwrap();
        frame
    }

    fn in_ip(number: etherparse::IpNumber, payload: &[u8]) -> Vec<u8> {
        let mut frame = Vec::new();
        PacketBuilder::ethernet2(MACS[0], MACS[1])
            .ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
            .write(&mut frame, number, payload)
            .unwrap();
        frame
    }

    #[test]
    fn roce_is_found_in_each_tunnel_and_nothing_else_is() {
        for v6 in [false, true] {
            for (port, is_roce) in [(4791, true), (53, false)] {
                let inner = udp(port, v6, &[0; 24]);
                let ip_type = if v6 { IPV6 } else { IPV4 }.to_be_bytes();
                let vxlan = [&[8, 0, 0, 0, 0, 0, 7, 0][..], &inner].concat();
                let geneve = [&[1, 0, 0x65, 0x58, 0, 0, 7, 0, 1, 2, 3, 4][..], &inner].concat();
                let gretap = [&[0x30, 0, 0x65, 0x58, 0, 0, 0, 7, 0, 0, 0, 1][..], &inner].concat();
                let gre = [&[0, 0, ip_type[0], ip_type[1]][..], &inner[14..]].concat();
                let number = if v6 { ip_number::IPV6 } else { ip_number::IPV4 };
                for (tunnel, frame) in [
                    (VXLAN, udp(4789, false, &vxlan)),
                    (VXLAN, udp(8472, true, &vxlan)),
                    ("Geneve", udp(6081, v6, &geneve)),
                    ("GRE", in_ip(ip_number::GRE, &gretap)),
                    ("GRE", in_ip(ip_number::GRE, &gre)),
                    ("IP", in_ip(number, &inner[14..])),
                    (VXLAN, udp(4789, false, &[&[8; 8][..], &udp(4789, v6, &vxlan)].concat())),
                ] {
                    let found = around_roce(ETHERNET, &frame);
                    assert_eq!(found, is_roce.then_some(tunnel), "{tunnel} {v6} {port}");
                    // At each length that the frame may be cut to.
                    for len in 0..frame.len() {
                        let _ = around_roce(ETHERNET, &frame[..len]);
                    }
                }
                assert_eq!(around_roce(ETHERNET, &inner), None, "it is in no tunnel");
            }
        }
    }
}
