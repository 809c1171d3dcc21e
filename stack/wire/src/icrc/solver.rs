//! Solves a wrong ICRC for the IP identification.

use rocinante_crc::multiply;

use super::linear::back;
use super::{ICRC_LEN, Template};

/// Bytes of an IPv4 and UDP header behind the flags-and-fragment-offset field.
const BEHIND_FLAGS: usize = 12 + super::UDP_LEN;

/// Solves a wrong ICRC for the only unknown of a UDP receiver: identification and flags of the IPv4
/// header.
///
/// Every other bit of the packet must be right, because the caller accepts only a few of the 2^32
/// solutions: see [`Solver::solve`]. The solver keeps the factors of the lengths last seen.
#[derive(Debug, Clone)]
pub struct Solver {
    /// Packet length and its factor; the slot is derived from the length.
    factors: [(usize, u32); 64],
}

impl Default for Solver {
    fn default() -> Self {
        Self { factors: [(usize::MAX, 0); 64] }
    }
}

impl Solver {
    /// The identification and flags that make `packet_icrc` right, if the template's own gave
    /// `computed` for a packet of `packet_len` bytes (BTH to ICRC). Exactly one such pair always
    /// exists, so its existence proves nothing: a caller that accepts n pairs lets n of 2^32
    /// damaged packets through.
    ///
    /// `None` for IPv6, which has no identification, and for a length that is impossible in a UDP
    /// datagram.
    #[must_use]
    pub fn solve(
        &mut self,
        template: &Template,
        packet_len: usize,
        computed: u32,
        packet_icrc: u32,
    ) -> Option<(u16, u16)> {
        if !template.is_v4() || !(ICRC_LEN..=usize::from(u16::MAX)).contains(&packet_len) {
            return None;
        }
        let [id_high, id_low, flags_high, flags_low] =
            multiply(computed ^ packet_icrc, self.factor(packet_len)).to_le_bytes();
        let (id, flags) = template.id();
        Some((
            id ^ u16::from_be_bytes([id_high, id_low]),
            flags ^ u16::from_be_bytes([flags_high, flags_low]),
        ))
    }

    /// The factor that takes a CRC difference back to the four bytes of identification and flags.
    fn factor(&mut self, packet_len: usize) -> u32 {
        // Lengths are multiples of four.
        let slot = &mut self.factors[packet_len / 4 % 64];
        if slot.0 != packet_len {
            *slot = (packet_len, back(4 + BEHIND_FLAGS + packet_len - ICRC_LEN));
        }
        slot.1
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::flow;
    use super::super::{DF, IpFields};
    use super::*;
    use core::net::Ipv6Addr;

    #[test]
    fn the_identification_is_solved_at_every_length() {
        let mut solver = Solver::default();
        let mut packet = vec![0x5a; 65_507];
        for len in (16..4200).step_by(97).chain([65_500, 65_507]) {
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
    fn nothing_to_solve() {
        let mut solver = Solver::default();
        let ip = IpFields::V6 { src: Ipv6Addr::LOCALHOST, dst: Ipv6Addr::LOCALHOST };
        assert_eq!(solver.solve(&Template::new(&ip, 1), 64, 1, 2), None);
        for len in [0, 3, 65_536, usize::MAX] {
            assert_eq!(solver.solve(&flow(0, DF), len, 1, 2), None);
        }
    }
}
