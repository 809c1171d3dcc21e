//! The packets of the baselines: of the same sizes as those of a WRITE.

use rocinante_wire::icrc::{DF, Template};

/// Bytes before the payload of a message's first packet: BTH and RETH.
pub(crate) const FIRST_HEAD: usize = 28;
/// Bytes before the payload of every other packet: the BTH.
pub(crate) const HEAD: usize = 12;
/// Bytes behind the payload.
pub(crate) const ICRC: usize = 4;

const FIRST: u8 = 0x06;
const MIDDLE: u8 = 0x07;

/// A packet to send, without its ICRC.
#[derive(Debug, Clone, Copy)]
pub struct Packet<'a> {
    head: [u8; FIRST_HEAD],
    head_len: usize,
    /// The payload.
    pub payload: &'a [u8],
}

impl<'a> Packet<'a> {
    /// Packet number `number` of phase `phase`; `first` if it starts a message.
    #[must_use]
    pub fn new(phase: u8, number: u32, first: bool, payload: &'a [u8]) -> Self {
        let mut head = [0; FIRST_HEAD];
        let [_, psn @ ..] = number.to_be_bytes();
        head[..5].copy_from_slice(&[if first { FIRST } else { MIDDLE }, 0x40, 0xff, 0xff, 0]);
        head[7] = phase;
        head[9..12].copy_from_slice(&psn);
        Self { head, head_len: if first { FIRST_HEAD } else { HEAD }, payload }
    }

    /// Length from the BTH to the ICRC.
    #[must_use]
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.head_len + self.payload.len() + ICRC
    }

    /// The bytes before the payload.
    #[must_use]
    pub fn head(&self) -> &[u8] {
        &self.head[..self.head_len]
    }

    /// The ICRC, for the IPv4 identification `id`.
    #[must_use]
    pub fn icrc(&self, template: &mut Template, id: u16) -> [u8; ICRC] {
        template.set_id(id, DF);
        let (bth, rest) = self.head().split_first_chunk().expect("a BTH");
        let mut icrc = template.start(self.len(), bth);
        icrc.update(rest);
        icrc.update(self.payload);
        icrc.finish().to_le_bytes()
    }

    /// Writes the whole packet to `buf`, which must have exactly its length.
    pub fn write(&self, buf: &mut [u8], template: &mut Template, id: u16) {
        let (head, payload) = buf.split_at_mut(self.head_len);
        head.copy_from_slice(self.head());
        payload[..self.payload.len()].copy_from_slice(self.payload);
        template.set_id(id, DF);
        template.seal(buf);
    }
}

/// A received packet.
#[derive(Debug, Clone, Copy)]
pub struct Arrived<'a> {
    /// Its phase.
    pub phase: u8,
    /// Its number, modulo 2²⁴.
    pub number: u32,
    /// The payload.
    pub payload: &'a [u8],
}

impl<'a> Arrived<'a> {
    /// Reads a datagram, from the BTH to the ICRC; `None` unless it is one of ours with a correct
    /// ICRC.
    #[must_use]
    pub fn parse(datagram: &'a [u8], template: &mut Template, id: u16) -> Option<Self> {
        template.set_id(id, DF);
        let (before, icrc) = datagram.split_last_chunk::<ICRC>()?;
        if before.len() < HEAD || template.of(datagram).to_le_bytes() != *icrc {
            return None;
        }
        let head = if before[0] == FIRST { FIRST_HEAD } else { HEAD };
        let number = u32::from_be_bytes([0, before[9], before[10], before[11]]);
        Some(Self { phase: before[7], number, payload: before.get(head..)? })
    }
}

/// Guesses the IPv4 identifications of datagrams, which a UDP socket does not tell: *i* for
/// datagram *i* of a super-packet, also if it was split on its way and its datagrams come alone.
#[derive(Debug, Default)]
pub(crate) struct Guess {
    /// The identification of the datagram before.
    last: u16,
}

impl Guess {
    /// Reads datagram number `index` of a message, as [`Arrived::parse`] does.
    pub(crate) fn parse<'a>(
        &mut self,
        datagram: &'a [u8],
        template: &mut Template,
        index: usize,
    ) -> Option<Arrived<'a>> {
        let likely = match (index, self.last) {
            (0, 0) => [0, 1],
            (0, last) => [last.wrapping_add(1), 0],
            _ => [index as u16; 2],
        };
        let mut of = |id| Some((id, Arrived::parse(datagram, template, id)?));
        let (id, arrived) = of(likely[0]).or_else(|| of(likely[1]))?;
        self.last = if index == 0 { id } else { 0 };
        Some(arrived)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rocinante_wire::icrc::IpFields;

    #[test]
    fn what_is_written_is_read() {
        let ip =
            IpFields::V4 { src: [10, 0, 0, 1].into(), dst: [10, 0, 0, 2].into(), id: 0, flags: DF };
        let mut template = Template::new(&ip, 50_000);
        let payload: Vec<u8> = (0..200).collect();
        for first in [true, false] {
            let packet = Packet::new(3, 0x123_4567, first, &payload);
            let mut buf = vec![0; packet.len()];
            packet.write(&mut buf, &mut template, 9);
            assert_eq!(buf.last_chunk(), Some(&packet.icrc(&mut template, 9)));
            let arrived = Arrived::parse(&buf, &mut template, 9).expect("sealed");
            assert_eq!((arrived.phase, arrived.number), (3, 0x23_4567));
            assert_eq!(arrived.payload, payload);
            assert!(Arrived::parse(&buf, &mut template, 8).is_none());
            buf[40] ^= 1;
            assert!(Arrived::parse(&buf, &mut template, 9).is_none());
        }
    }

    #[test]
    fn datagrams_of_a_split_super_packet_are_read() {
        let ip =
            IpFields::V4 { src: [10, 0, 0, 1].into(), dst: [10, 0, 0, 2].into(), id: 0, flags: DF };
        let mut template = Template::new(&ip, 50_000);
        let payload = [7; 64];
        let packet = Packet::new(0, 1, true, &payload);
        let mut of = |guess: &mut Guess, id, index| {
            let mut buf = vec![0; packet.len()];
            packet.write(&mut buf, &mut template, id);
            guess.parse(&buf, &mut template, index).is_some()
        };
        let mut guess = Guess::default();
        for id in (0..15).chain(0..3).chain([0, 0, 0]) {
            assert!(of(&mut guess, id, 0), "{id}");
        }
        assert!((0..15).all(|id| of(&mut guess, id, usize::from(id))), "whole");
        assert!(of(&mut guess, 0, 0) && !of(&mut guess, 9, 0), "one of which others were lost");
        assert!(of(&mut guess, 0, 0));
    }
}
