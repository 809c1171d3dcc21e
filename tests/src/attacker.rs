//! An attacker in a container: it sends arbitrary packets with arbitrary source addresses.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use etherparse::PacketBuilder;
use rocinante_stack::wire::Bth;
use rocinante_stack::wire::icrc::{DF, IpFields, Template};
use rustix::net::{AddressFamily, SendFlags, SocketType, ipproto, sendto, socket};

use rocinante_lab::Container;

const SRC_PORT: u16 = 0xc123;
/// Below the segment limit, so that a receiver that cannot read the IP identification can solve for
/// it.
const IP_ID: u16 = 5;

/// Sends whole IP packets to UDP/4791 of its target.
#[derive(Debug)]
pub struct Attacker {
    socket: OwnedFd,
    target: IpAddr,
}

impl Attacker {
    /// An attacker in this container. Panics if the process may not open raw sockets.
    #[must_use]
    pub fn new(container: &Container, target: IpAddr) -> Self {
        let family = if target.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let open = || socket(family, SocketType::RAW, Some(ipproto::RAW));
        Self { socket: container.run(open).unwrap().unwrap(), target }
    }

    /// Sends a UDP datagram from `src`. Panics if the kernel does not accept it.
    pub fn send(&self, src: IpAddr, payload: &[u8]) {
        self.send_whole(&self.whole(src, payload));
    }

    /// Sends a packet with its IP header, as [`whole`](Self::whole) makes it. Panics if the kernel
    /// does not accept it.
    pub fn send_whole(&self, packet: &[u8]) {
        // A raw socket has no port.
        let to = SocketAddr::new(self.target, 0);
        assert_eq!(sendto(&self.socket, packet, SendFlags::empty(), &to).unwrap(), packet.len());
    }

    /// A UDP datagram from `src`, with its IP header. Panics if `src` is of the other family.
    #[must_use]
    pub fn whole(&self, src: IpAddr, payload: &[u8]) -> Vec<u8> {
        let mut packet = Vec::new();
        match (src, self.target) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                let mut header = etherparse::Ipv4Header::new(
                    0,
                    64,
                    etherparse::IpNumber::UDP,
                    src.octets(),
                    dst.octets(),
                )
                .unwrap();
                header.identification = IP_ID;
                header.dont_fragment = true;
                PacketBuilder::ip(etherparse::IpHeaders::Ipv4(header, Default::default()))
                    .udp(SRC_PORT, 4791)
                    .write(&mut packet, payload)
                    .unwrap();
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                PacketBuilder::ipv6(src.octets(), dst.octets(), 64)
                    .udp(SRC_PORT, 4791)
                    .write(&mut packet, payload)
                    .unwrap();
            }
            _ => panic!("two families"),
        }
        packet
    }

    /// The packet with the ICRC that is right for this source. Panics if `src` is of the other
    /// family.
    #[must_use]
    pub fn sealed(&self, src: IpAddr, mut packet: Vec<u8>) -> Vec<u8> {
        let ip = IpFields::between(src, self.target).expect("one family");
        let mut template = Template::new(&ip, SRC_PORT);
        template.set_id(IP_ID, DF);
        template.seal(&mut packet);
        packet
    }

    /// The packet as if damaged on its way from `src`: its ICRC is right for no IP identification.
    #[must_use]
    pub fn damaged(&self, src: IpAddr, packet: Vec<u8>) -> Vec<u8> {
        let mut bytes = self.sealed(src, packet);
        bytes[40] ^= 0x10;
        bytes
    }
}

/// A packet with this BTH: other headers are zero, the payload has `len` bytes, and 4 bytes are
/// left for the ICRC.
#[must_use]
pub fn packet(bth: &Bth, len: usize) -> Vec<u8> {
    let header = bth.opcode.info().map_or(12, |info| info.header_len);
    let mut bytes = vec![0x5a; header + len + 4];
    bytes[..header].fill(0);
    bytes[..12].copy_from_slice(&bth.bytes());
    bytes
}
