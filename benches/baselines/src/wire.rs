//! The packets of the baselines: of the same sizes as those of a WRITE.

use std::io::IoSlice;

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
    #[allow(clippy::len_without_is_empty)]
    #[must_use]
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

/// The kernel gathers payloads of at least this many bytes; smaller ones are cheaper to copy.
const GATHER_MIN: usize = 4096;
/// The most packets with a payload gathered by the kernel: three pieces each.
const GATHER_PACKETS: usize = 16;

/// Whether the kernel shall gather the payloads of a run.
pub(crate) fn is_gathered(run: &[Packet<'_>]) -> bool {
    run[0].payload.len() >= GATHER_MIN && run.len() <= GATHER_PACKETS
}

/// Calls `send` with the pieces of a run that [`is_gathered`], behind `headers`.
pub(crate) fn gather<T>(
    run: &[Packet<'_>],
    template: &mut Template,
    headers: &[u8],
    send: impl FnOnce(&[IoSlice<'_>]) -> T,
) -> T {
    let mut icrcs = [[0; ICRC]; GATHER_PACKETS];
    for (id, (icrc, packet)) in icrcs.iter_mut().zip(run).enumerate() {
        *icrc = packet.icrc(template, id as u16);
    }
    let mut pieces = [IoSlice::new(&[]); 3 * GATHER_PACKETS + 1];
    pieces[0] = IoSlice::new(headers);
    for ((pieces, packet), icrc) in pieces[1..].chunks_exact_mut(3).zip(run).zip(&icrcs) {
        pieces[0] = IoSlice::new(packet.head());
        pieces[1] = IoSlice::new(packet.payload);
        pieces[2] = IoSlice::new(icrc);
    }
    send(&pieces[usize::from(headers.is_empty())..=3 * run.len()])
}

/// Writes a run to `buf`, one packet behind the other; its length.
pub(crate) fn write_run(run: &[Packet<'_>], buf: &mut [u8], template: &mut Template) -> usize {
    let mut end = 0;
    for (id, packet) in run.iter().enumerate() {
        packet.write(&mut buf[end..end + packet.len()], template, id as u16);
        end += packet.len();
    }
    end
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

    fn flow() -> Template {
        let ip = IpFields::between([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        Template::new(&ip.unwrap(), 50_000)
    }

    #[test]
    fn what_is_written_is_read() {
        let mut template = flow();
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
    fn a_run_that_is_gathered_is_the_run_that_is_copied() {
        let mut template = flow();
        let payload = vec![7; GATHER_MIN];
        let run = [true, false].map(|first| Packet::new(0, 1, first, &payload));
        assert!(is_gathered(&run) && !is_gathered(&[run[0]; GATHER_PACKETS + 1]));
        let mut copied = vec![0; run.iter().map(Packet::len).sum()];
        assert_eq!(write_run(&run, &mut copied, &mut template), copied.len());
        for headers in [&[][..], b"head"] {
            let bytes = |pieces: &[IoSlice<'_>]| {
                assert!(pieces.iter().all(|piece| !piece.is_empty()));
                pieces.iter().flat_map(|piece| piece.to_vec()).collect::<Vec<u8>>()
            };
            let gathered = gather(&run, &mut template, headers, bytes);
            assert_eq!(gathered, [headers, &copied].concat());
        }
    }

    #[test]
    fn datagrams_of_a_split_super_packet_are_read() {
        let mut template = flow();
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
