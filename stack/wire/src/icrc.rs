//! The invariant CRC (IBTA annex A17, RoCEv2 \[M\]; formula checked against captures of rxe and
//! scapy).
//!
//! CRC-32 (the Ethernet polynomial) over eight bytes of ones, the IP header, the UDP header, the
//! BTH and all that follows it. Fields that routers change count as ones: TOS, TTL and header
//! checksum (IPv6: traffic class, flow label, hop limit), the UDP checksum, and byte 4 of the BTH.
//! The result stands little-endian at the end of the packet.
//!
//! A CRC is linear, and this module uses that twice. The headers of a flow's packets differ only in
//! lengths and identification. So their CRC is computed once, and each packet adds the difference
//! of these fields ([`Template`]). And a receiver that cannot read the identification solves for it
//! ([`Solver`](super::Solver)).

mod linear;
pub(super) mod solver;

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rocinante_crc::{PACKET_MIN, Summer, update};

use self::linear::{Field, Moved};
use super::bth;

/// Length of the ICRC in bytes.
pub const ICRC_LEN: usize = 4;

/// The don't-fragment bit of the IPv4 flags-and-fragment-offset field.
pub const DF: u16 = 0x4000;

const UDP_LEN: usize = 8;
const ROCE_PORT: u16 = 4791;
const UDP_PROTOCOL: u8 = 17;
const LRH_ONES: usize = 8;
const IPV4_LEN: usize = 20;
const IPV6_LEN: usize = 40;

// The share of each field in the CRC of everything up to the BTH.
static UDP_LENGTH: Field = Field::new(2);
static IPV4_TOTAL_LENGTH: Field = Field::new(16 + UDP_LEN);
static IPV4_ID: Field = Field::new(14 + UDP_LEN);
static IPV4_FLAGS: Field = Field::new(12 + UDP_LEN);
static IPV6_PAYLOAD_LENGTH: Field = Field::new(34 + UDP_LEN);

/// The share of the lengths in the IP and UDP headers together, by the length of the packet from
/// BTH to ICRC.
static IPV4_LENGTHS: [u32; LENGTHS] = lengths(&IPV4_TOTAL_LENGTH, IPV4_LEN);
static IPV6_LENGTHS: [u32; LENGTHS] = lengths(&IPV6_PAYLOAD_LENGTH, 0);
/// Packets of the longest path MTU are shorter than this.
const LENGTHS: usize = 4096 + 64;

// The share of the bytes before a payload of this length in the CRC of both.
static BEFORE_1024: Moved = Moved::by(1024);
static BEFORE_2048: Moved = Moved::by(2048);
static BEFORE_4096: Moved = Moved::by(4096);

/// A part of a packet with a known CRC-32, which was computed when the bytes were copied there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Summed {
    /// Its first byte, counted from the BTH on.
    pub at: usize,
    /// Its length in bytes.
    pub len: usize,
    /// Its CRC-32, as that of Ethernet and zlib.
    pub crc: u32,
}

/// The fields of the IP header that the ICRC covers and that differ between packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IpFields {
    /// IPv4, without options.
    V4 {
        /// Source address.
        src: Ipv4Addr,
        /// Destination address.
        dst: Ipv4Addr,
        /// Identification.
        id: u16,
        /// Flags and fragment offset; [`DF`] in packets of this stack.
        flags: u16,
    },
    /// IPv6, without extension headers.
    V6 {
        /// Source address.
        src: Ipv6Addr,
        /// Destination address.
        dst: Ipv6Addr,
    },
}

impl IpFields {
    /// The header between two addresses, as packets of this stack have it: [`DF`], and no
    /// identification. `None` for addresses of two families.
    #[must_use]
    pub const fn between(src: IpAddr, dst: IpAddr) -> Option<Self> {
        match (src, dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => Some(Self::V4 { src, dst, id: 0, flags: DF }),
            (IpAddr::V6(src), IpAddr::V6(dst)) => Some(Self::V6 { src, dst }),
            _ => None,
        }
    }

    /// Source and destination address.
    #[must_use]
    pub const fn addresses(&self) -> (IpAddr, IpAddr) {
        match *self {
            Self::V4 { src, dst, .. } => (IpAddr::V4(src), IpAddr::V4(dst)),
            Self::V6 { src, dst } => (IpAddr::V6(src), IpAddr::V6(dst)),
        }
    }
}

/// The masked headers of a flow: everything that the ICRC covers before the BTH. Made once per
/// path, adapted per packet.
#[derive(Debug, Clone, Copy)]
pub struct Template {
    /// The CRC of ones, IP and UDP, with zeros for lengths, identification and flags.
    blank: u32,
    /// `blank` with flags.
    flagged: u32,
    /// `blank` with flags and identification.
    crc: u32,
    id: u16,
    flags: u16,
    v4: bool,
    summer: Summer,
}

impl Template {
    /// The template of a flow.
    #[must_use]
    pub fn new(ip: &IpFields, src_port: u16) -> Self {
        let mut bytes = [0; LRH_ONES + IPV6_LEN + UDP_LEN];
        bytes[..LRH_ONES].fill(0xff);
        let (v4, ip_len) = match ip {
            IpFields::V4 { .. } => (true, IPV4_LEN),
            IpFields::V6 { .. } => (false, IPV6_LEN),
        };
        let (ip_header, udp_header) = bytes[LRH_ONES..].split_at_mut(ip_len);
        write_masked_ip(ip, ip_header);
        udp_header[0..2].copy_from_slice(&src_port.to_be_bytes());
        udp_header[2..4].copy_from_slice(&ROCE_PORT.to_be_bytes());
        // The checksum. The length, before it, stays blank.
        udp_header[6..8].fill(0xff);
        let blank = update(0, &bytes[..LRH_ONES + ip_len + UDP_LEN]);
        let (flagged, crc, summer) = (blank, blank, Summer::detect());
        let mut template = Self { blank, flagged, crc, id: 0, flags: 0, v4, summer };
        if let IpFields::V4 { id, flags, .. } = *ip {
            template.set_id(id, flags);
        }
        template
    }

    /// Whether this is an IPv4 flow: its packets have an identification.
    #[must_use]
    #[inline]
    pub const fn is_v4(&self) -> bool {
        self.v4
    }

    /// Sets the IPv4 identification and flags of the next packets; does nothing on IPv6.
    #[inline]
    pub fn set_id(&mut self, id: u16, flags: u16) {
        if self.v4 {
            if flags != self.flags {
                self.flagged = self.blank ^ IPV4_FLAGS.of(flags);
            }
            (self.id, self.flags) = (id, flags);
            self.crc = self.flagged ^ IPV4_ID.of(id);
        }
    }

    /// Identification and flags.
    const fn id(&self) -> (u16, u16) {
        (self.id, self.flags)
    }

    /// Starts the ICRC of a packet of `packet_len` bytes (BTH to ICRC) that begins with `bth`; feed
    /// the bytes after the BTH to [`Icrc::update`].
    #[inline]
    #[must_use]
    pub fn start(&self, packet_len: usize, bth: &[u8; bth::LEN]) -> Icrc {
        let mut packet = [0; PACKET_MIN];
        packet[..bth::LEN].copy_from_slice(bth);
        Icrc(self.up_to(packet_len, &packet, bth))
    }

    /// The ICRC of a whole packet, computed without its last four bytes; 0 for fewer than 16 bytes.
    #[inline]
    #[must_use]
    pub fn of(&self, packet: &[u8]) -> u32 {
        match (packet.first_chunk(), packet.split_last_chunk::<ICRC_LEN>()) {
            (Some(head), Some((covered, _))) => self.up_to(packet.len(), head, covered),
            _ => 0,
        }
    }

    /// Computes and writes the ICRC of a packet that is complete except for the ICRC.
    ///
    /// # Panics
    /// If the packet is shorter than a BTH and an ICRC.
    #[inline]
    pub fn seal(&self, packet: &mut [u8]) {
        let icrc = self.of(packet);
        let at = packet.len() - ICRC_LEN;
        packet[at..].copy_from_slice(&icrc.to_le_bytes());
    }

    /// As [`seal`](Self::seal), but may use the known CRC of a part behind the BTH.
    ///
    /// # Panics
    /// If the packet is shorter than a BTH and an ICRC.
    #[inline]
    pub fn seal_around(&self, packet: &mut [u8], known: Option<Summed>) {
        let icrc = known.and_then(|known| self.around(packet, known));
        let icrc = icrc.unwrap_or_else(|| self.of(packet));
        let at = packet.len() - ICRC_LEN;
        packet[at..].copy_from_slice(&icrc.to_le_bytes());
    }

    /// The ICRC of a packet, computed around the known part, if the length of that part is a path
    /// MTU.
    #[inline]
    fn around(&self, packet: &[u8], known: Summed) -> Option<u32> {
        let moved = match known.len {
            1024 => &BEFORE_1024,
            2048 => &BEFORE_2048,
            4096 => &BEFORE_4096,
            _ => return None,
        };
        let behind = packet.get(known.at + known.len..packet.len().checked_sub(ICRC_LEN)?)?;
        if known.at < bth::LEN {
            return None;
        }
        let (head, covered) = (packet.first_chunk()?, packet.get(..known.at)?);
        let before = self.up_to(packet.len(), head, covered);
        let crc = moved.of(before) ^ known.crc;
        Some(if behind.is_empty() { crc } else { update(crc, behind) })
    }

    /// The CRC of everything up to the end of `covered`, of a packet of `packet_len` bytes that
    /// starts with `head`.
    #[inline]
    fn up_to(&self, packet_len: usize, head: &[u8; PACKET_MIN], covered: &[u8]) -> u32 {
        let known = if self.v4 { &IPV4_LENGTHS } else { &IPV6_LENGTHS };
        let lengths = known.get(packet_len).copied().unwrap_or_else(|| long(packet_len, self.v4));
        self.summer.packet(self.crc ^ lengths, head, covered)
    }
}

/// The share of the lengths of a longer packet.
#[cold]
fn long(packet_len: usize, v4: bool) -> u32 {
    if v4 {
        of_length(packet_len, &IPV4_TOTAL_LENGTH, IPV4_LEN)
    } else {
        of_length(packet_len, &IPV6_PAYLOAD_LENGTH, 0)
    }
}

/// The share of a packet's two lengths: that of the UDP header, and that of the IP header, which is
/// greater by `more`.
const fn of_length(packet_len: usize, ip_length: &Field, more: usize) -> u32 {
    let (udp, ip) = ((packet_len + UDP_LEN) as u16, (packet_len + UDP_LEN + more) as u16);
    ip_length.of(ip) ^ UDP_LENGTH.of(udp)
}

const fn lengths(ip_length: &Field, more: usize) -> [u32; LENGTHS] {
    let mut lengths = [0; LENGTHS];
    let mut packet_len = 0;
    while packet_len < LENGTHS {
        lengths[packet_len] = of_length(packet_len, ip_length, more);
        packet_len += 1;
    }
    lengths
}

/// An IP header as masked for the ICRC, with zeros for lengths, identification and flags.
fn write_masked_ip(ip: &IpFields, header: &mut [u8]) {
    match *ip {
        IpFields::V4 { src, dst, .. } => {
            header[0..2].copy_from_slice(&[0x45, 0xff]);
            header[8..12].copy_from_slice(&[0xff, UDP_PROTOCOL, 0xff, 0xff]);
            header[12..16].copy_from_slice(&src.octets());
            header[16..20].copy_from_slice(&dst.octets());
        }
        IpFields::V6 { src, dst } => {
            header[0..4].copy_from_slice(&[0x6f, 0xff, 0xff, 0xff]);
            header[6..8].copy_from_slice(&[UDP_PROTOCOL, 0xff]);
            header[8..24].copy_from_slice(&src.octets());
            header[24..40].copy_from_slice(&dst.octets());
        }
    }
}

/// An ICRC in progress.
#[derive(Debug, Clone)]
pub struct Icrc(u32);

impl Icrc {
    /// Adds more bytes.
    #[inline]
    pub fn update(&mut self, bytes: &[u8]) {
        self.0 = update(self.0, bytes);
    }

    /// The result; it is written little-endian.
    #[inline]
    #[must_use]
    pub fn finish(self) -> u32 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn flow(id: u16, flags: u16) -> Template {
        Template::new(&ipv4(id, flags), 0xc123)
    }

    fn ipv4(id: u16, flags: u16) -> IpFields {
        let (src, dst) = (Ipv4Addr::new(10, 77, 0, 2), Ipv4Addr::new(10, 77, 0, 3));
        IpFields::V4 { src, dst, id, flags }
    }

    fn ipv6() -> IpFields {
        let dst = Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 3);
        IpFields::V6 { src: Ipv6Addr::LOCALHOST, dst }
    }

    #[test]
    fn a_header_is_between_two_addresses_of_one_family() {
        let address = |text: &str| text.parse().unwrap();
        for [src, dst] in [["10.77.0.2", "10.77.0.3"], ["::1", "fd77::3"]].map(|of| of.map(address))
        {
            assert_eq!(IpFields::between(src, dst).unwrap().addresses(), (src, dst));
        }
        let [v4, v6] = ["10.77.0.2", "fd77::3"].map(address);
        let own = IpFields::between([10, 77, 0, 2].into(), [10, 77, 0, 3].into());
        assert_eq!(own, Some(ipv4(0, DF)));
        assert_eq!([IpFields::between(v4, v6), IpFields::between(v6, v4)], [None; 2]);
    }

    /// The formula of the specification, byte for byte.
    fn by_the_book(ip: &IpFields, src_port: u16, packet: &[u8]) -> u32 {
        let udp_len = u16::try_from(packet.len() + 8).unwrap();
        let mut covered = vec![0xff; 8];
        match *ip {
            IpFields::V4 { src, dst, id, flags } => {
                covered.extend([0x45, 0xff]);
                covered.extend((udp_len + 20).to_be_bytes());
                covered.extend(id.to_be_bytes());
                covered.extend(flags.to_be_bytes());
                covered.extend([0xff, 17, 0xff, 0xff]);
                covered.extend(src.octets());
                covered.extend(dst.octets());
            }
            IpFields::V6 { src, dst } => {
                covered.extend([0x6f, 0xff, 0xff, 0xff]);
                covered.extend(udp_len.to_be_bytes());
                covered.extend([17, 0xff]);
                covered.extend(src.octets());
                covered.extend(dst.octets());
            }
        }
        covered.extend(src_port.to_be_bytes());
        covered.extend(4791u16.to_be_bytes());
        covered.extend(udp_len.to_be_bytes());
        covered.extend([0xff, 0xff]);
        covered.extend(&packet[..4]);
        covered.push(0xff);
        covered.extend(&packet[5..packet.len() - 4]);
        crc32fast::hash(&covered)
    }

    #[test]
    fn the_shortcut_is_the_formula() {
        // A multiplicative generator: the bytes only need to differ.
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(0x0801_0161).wrapping_add(0x9e37_79b9);
            state.to_be_bytes()
        };
        let mut packet = vec![0; 65_507];
        for len in (16..300).chain([1040, 4116, 4136, 65_507]) {
            for byte in &mut packet[..len] {
                *byte = next()[0];
            }
            let [a, b, c, d] = next();
            let (id, port) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
            for ip in [ipv4(id, DF), ipv4(id, port), ipv4(u16::from(d), 0), ipv6()] {
                let packet = &packet[..len];
                let expected = by_the_book(&ip, port, packet);
                let template = Template::new(&ip, port);
                assert_eq!(template.of(packet), expected, "{ip:?}, {len} bytes");
                let mut pieces = template.start(len, packet.first_chunk().unwrap());
                pieces.update(&packet[12..len - 4]);
                assert_eq!(pieces.finish(), expected, "{ip:?}, {len} bytes");
            }
        }
    }

    #[test]
    fn what_is_known_of_a_part_makes_no_difference() {
        let packet: Vec<u8> =
            (0..4200u32).map(|i| (i.wrapping_mul(0x9e37_79b1) >> 24) as u8).collect();
        for payload in [256, 1000, 1024, 2048, 4096] {
            for (at, pad) in [(12, 0), (16, 0), (28, 0), (12, 1), (28, 3)] {
                for ip in [ipv4(7, DF), ipv6()] {
                    let template = Template::new(&ip, 0xc123);
                    let mut sealed = packet[..at + payload + pad + ICRC_LEN].to_vec();
                    let mut plainly = sealed.clone();
                    let crc = crc32fast::hash(&sealed[at..at + payload]);
                    template.seal_around(&mut sealed, Some(Summed { at, len: payload, crc }));
                    template.seal(&mut plainly);
                    assert_eq!(sealed, plainly, "{payload} bytes at {at}, {pad} behind");
                    template.seal_around(&mut sealed, None);
                    assert_eq!(sealed, plainly);
                }
            }
        }
    }

    #[test]
    fn what_is_known_is_used_and_must_be_in_the_packet() {
        let template = flow(9, DF);
        let mut packet = [7; 12 + 1024 + 4];
        let icrc = template.of(&packet);
        for (at, used) in [(12, true), (13, false), (11, false), (usize::MAX - 2000, false)] {
            template.seal_around(&mut packet, Some(Summed { at, len: 1024, crc: 0xdead_beef }));
            assert_eq!(packet[1036..] != icrc.to_le_bytes(), used, "{at}");
        }
    }

    #[test]
    fn too_short_is_no_packet() {
        let ones = [0xff; 15];
        for len in 0..16 {
            assert_eq!(flow(9, DF).of(&ones[..len]), 0);
        }
    }

    #[test]
    fn masked_fields_do_not_count() {
        let mut packet = [7u8; 64];
        let before = flow(9, DF).of(&packet);
        packet[4] = 0xc0;
        assert_eq!(flow(9, DF).of(&packet), before);
        packet[5] ^= 1;
        assert_ne!(flow(9, DF).of(&packet), before);
    }
}
