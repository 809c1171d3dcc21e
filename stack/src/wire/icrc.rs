//! The invariant CRC (IBTA annex A17, RoCEv2 [M]; formula checked against captures of rxe and scapy).
//!
//! CRC-32 (the Ethernet polynomial) over eight bytes of ones, the IP header, the UDP header, the BTH, all
//! that follows it, with the fields that routers change set to ones: TOS, TTL and header
//! checksum (IPv6: traffic class, flow label, hop limit), the UDP checksum, and byte 4 of the BTH. The result stands
//! little-endian at the end of the packet.
//!
//! A CRC is linear: a difference in the data at a known distance from the end maps to one
//! difference of the CRC, and back. A receiver that cannot read the IP identification uses that to
//! solve for it: see [`Solver`].

use core::net::{Ipv4Addr, Ipv6Addr};

use crc32fast::Hasher;

use super::bth;

/// Length of the ICRC in bytes.
pub const ICRC_LEN: usize = 4;

/// The don't-fragment bit of the IPv4 flags-and-fragment-offset field.
pub const DF: u16 = 0x4000;

const UDP_LEN: usize = 8;
const ROCE_PORT: u16 = 4791;
const UDP_PROTOCOL: u8 = 17;
const LRH_ONES: usize = 8;

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
        /// Flags and fragment offset; [`DF`] in what this stack sends.
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

/// The masked headers of a flow: everything the ICRC covers before the BTH. Made once per path, patched per packet.
#[derive(Debug, Clone, Copy)]
pub struct Template {
    /// Ones, IP, UDP and room for a BTH; `len` of them count.
    bytes: [u8; LRH_ONES + 40 + UDP_LEN + bth::LEN],
    /// Bytes before the BTH.
    len: usize,
}

impl Template {
    /// The template of a flow.
    #[must_use]
    pub fn new(ip: &IpFields, src_port: u16) -> Self {
        let mut bytes = [0xff; LRH_ONES + 40 + UDP_LEN + bth::LEN];
        let header = &mut bytes[LRH_ONES..];
        let ip_len = match *ip {
            IpFields::V4 { src, dst, id, flags } => {
                header[0] = 0x45;
                header[4..6].copy_from_slice(&id.to_be_bytes());
                header[6..8].copy_from_slice(&flags.to_be_bytes());
                header[9] = UDP_PROTOCOL;
                header[12..16].copy_from_slice(&src.octets());
                header[16..20].copy_from_slice(&dst.octets());
                20
            }
            IpFields::V6 { src, dst } => {
                header[0] = 0x6f;
                header[6] = UDP_PROTOCOL;
                header[8..24].copy_from_slice(&src.octets());
                header[24..40].copy_from_slice(&dst.octets());
                40
            }
        };
        header[ip_len..ip_len + 2].copy_from_slice(&src_port.to_be_bytes());
        header[ip_len + 2..ip_len + 4].copy_from_slice(&ROCE_PORT.to_be_bytes());
        Self { bytes, len: LRH_ONES + ip_len + UDP_LEN }
    }

    /// Whether this is an IPv4 flow, whose packets have an identification.
    #[must_use]
    pub const fn is_v4(&self) -> bool {
        self.len == LRH_ONES + 20 + UDP_LEN
    }

    /// Sets the IPv4 identification and flags of the next packets; nothing on IPv6.
    #[inline]
    pub fn set_id(&mut self, id: u16, flags: u16) {
        if self.is_v4() {
            self.bytes[LRH_ONES + 4..LRH_ONES + 6].copy_from_slice(&id.to_be_bytes());
            self.bytes[LRH_ONES + 6..LRH_ONES + 8].copy_from_slice(&flags.to_be_bytes());
        }
    }

    /// Starts the ICRC of a packet of `packet_len` bytes (BTH to ICRC) that begins with `bth`; feed
    /// what follows the BTH to [`Icrc::update`].
    #[must_use]
    #[inline]
    pub fn start(&self, packet_len: usize, bth: &[u8; bth::LEN]) -> Icrc {
        let mut bytes = self.bytes;
        let udp_len = packet_len + UDP_LEN;
        #[allow(clippy::cast_possible_truncation)]
        let udp = (udp_len as u16).to_be_bytes();
        if self.is_v4() {
            #[allow(clippy::cast_possible_truncation)]
            let total = ((udp_len + 20) as u16).to_be_bytes();
            bytes[LRH_ONES + 2..LRH_ONES + 4].copy_from_slice(&total);
        } else {
            bytes[LRH_ONES + 4..LRH_ONES + 6].copy_from_slice(&udp);
        }
        bytes[self.len - 4..self.len - 2].copy_from_slice(&udp);
        bytes[self.len..self.len + bth::LEN].copy_from_slice(bth);
        bytes[self.len + 4] = 0xff;
        let mut hasher = Hasher::new();
        hasher.update(&bytes[..self.len + bth::LEN]);
        Icrc(hasher)
    }

    /// The ICRC of a whole packet, its own last four bytes left out; 0 for fewer than 16 bytes.
    #[must_use]
    #[inline]
    pub fn of(&self, packet: &[u8]) -> u32 {
        let (Some(bth), Some(end)) = (packet.first_chunk(), packet.len().checked_sub(ICRC_LEN))
        else {
            return 0;
        };
        let Some(rest) = packet.get(bth::LEN..end) else { return 0 };
        let mut icrc = self.start(packet.len(), bth);
        icrc.update(rest);
        icrc.finish()
    }

    /// Computes and writes the ICRC of a packet that is complete but for it.
    ///
    /// # Panics
    /// If the packet is shorter than a BTH and an ICRC.
    #[inline]
    pub fn seal(&self, packet: &mut [u8]) {
        let icrc = self.of(packet);
        let at = packet.len() - ICRC_LEN;
        packet[at..].copy_from_slice(&icrc.to_le_bytes());
    }
}

/// An ICRC under way.
#[derive(Debug, Clone)]
pub struct Icrc(Hasher);

impl Icrc {
    /// Takes in more bytes.
    #[inline]
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The result; written little-endian.
    #[must_use]
    #[inline]
    pub fn finish(self) -> u32 {
        self.0.finalize()
    }
}

/// Solves a wrong ICRC for the one thing that a UDP receiver does not know: identification and flags of
/// the IPv4 header.
///
/// Every other bit of the packet must be right, because the caller accepts only a few of the 2^32 solutions: see
/// [`Solver::solve`]. Keeps the powers it needs for the lengths last seen.
#[derive(Debug, Clone)]
pub struct Solver {
    cache: [(u32, u32); 64],
}

impl Default for Solver {
    fn default() -> Self {
        Self { cache: [(u32::MAX, 0); 64] }
    }
}

impl Solver {
    /// What identification and flags make `packet_icrc` right, given that the template's gave `computed` for
    /// a packet of `packet_len` bytes (BTH to ICRC).
    #[must_use]
    pub fn solve(
        &mut self,
        template: &Template,
        packet_len: usize,
        computed: u32,
        packet_icrc: u32,
    ) -> Option<(u16, u16)> {
        if !template.is_v4() || packet_len < ICRC_LEN {
            return None;
        }
        // Bytes between the end of the flags field and the end of the covered data.
        let behind = template.len - (LRH_ONES + 8) + packet_len - ICRC_LEN;
        #[allow(clippy::cast_possible_truncation)]
        let inverse = self.inverse(behind as u32);
        let difference = multiply(computed ^ packet_icrc, inverse).to_le_bytes();
        let field = &template.bytes[LRH_ONES + 4..LRH_ONES + 8];
        Some((
            u16::from_be_bytes([field[0] ^ difference[0], field[1] ^ difference[1]]),
            u16::from_be_bytes([field[2] ^ difference[2], field[3] ^ difference[3]]),
        ))
    }

    /// x^-(8·(behind + 4)) modulo the polynomial: takes a CRC difference back to the four bytes
    /// that stand `behind` bytes before the end.
    fn inverse(&mut self, behind: u32) -> u32 {
        let slot = &mut self.cache[behind as usize % 64];
        if slot.0 != behind {
            // The polynomial is primitive: x has order 2^32 - 1.
            let order = u64::from(u32::MAX);
            *slot = (behind, power(order - (u64::from(behind) + 4) * 8 % order));
        }
        slot.1
    }
}

/// The polynomial of CRC-32, bit-reversed: bit 31 is x^0.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// a·b modulo the polynomial.
fn multiply(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    for bit in (0..32).rev() {
        product ^= b & 0u32.wrapping_sub((a >> bit) & 1);
        b = (b >> 1) ^ (POLYNOMIAL & 0u32.wrapping_sub(b & 1));
    }
    product
}

/// x^exponent modulo the polynomial.
fn power(mut exponent: u64) -> u32 {
    let (mut result, mut square) = (1 << 31, 1 << 30);
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = multiply(square, result);
        }
        square = multiply(square, square);
        exponent >>= 1;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(id: u16, flags: u16) -> Template {
        let ip = IpFields::V4 {
            src: Ipv4Addr::new(10, 77, 0, 2),
            dst: Ipv4Addr::new(10, 77, 0, 3),
            id,
            flags,
        };
        Template::new(&ip, 0xc123)
    }

    #[test]
    fn powers_invert() {
        for n in [1u64, 8, 544, 33_000] {
            let inverse = power(u64::from(u32::MAX) - n);
            assert_eq!(multiply(power(n), inverse), 1 << 31);
        }
    }

    #[test]
    fn the_identification_is_solved_at_every_length() {
        let mut solver = Solver::default();
        let mut packet = vec![0x5a; 4200];
        for len in (16..4200).step_by(97) {
            for (id, flags) in [(0, DF), (1, DF), (127, DF), (0xfffe, 0), (0x1234, DF)] {
                let packet = &mut packet[..len];
                flow(id, flags).seal(packet);
                let icrc = u32::from_le_bytes(*packet.last_chunk().unwrap());
                let guess = flow(3, DF);
                let computed = guess.of(packet);
                assert_eq!(solver.solve(&guess, len, computed, icrc), Some((id, flags)));
            }
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
