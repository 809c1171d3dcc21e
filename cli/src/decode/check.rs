//! The verdict on a datagram's ICRC, and the packets in a super-packet.
//!
//! Where the device does the segmentation, a capture on the sender's side holds super-packets. So
//! does a capture behind a veth or a receiver's GRO on the other side. A super-packet is one IP
//! packet of up to 64 KiB. Several RoCEv2 packets follow each other in it, all of one length except
//! the last. The file does not say that length, but the ICRC does: it is right only at the end of
//! the first packet, for the length that this packet will have on the wire.

use rocinante_wire::bth;
use rocinante_wire::icrc::{ICRC_LEN, IpFields, Template};

use super::frame::{Datagram, Obstacle};

/// The shortest packet: a BTH and an ICRC.
const SHORTEST: usize = bth::LEN + ICRC_LEN;

/// The longest packet in a super-packet: 4096 bytes of payload with the longest headers.
const LONGEST: usize = bth::LEN + 32 + 4096 + ICRC_LEN;

/// The verdict on a packet's ICRC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is right.
    Ok,
    /// It is wrong.
    Bad {
        /// The right ICRC.
        computed: u32,
        /// The ICRC in the packet.
        found: u32,
    },
    /// It cannot be computed.
    Unknown(Obstacle),
}

/// One RoCEv2 packet.
#[derive(Debug, Clone, Copy)]
pub struct Piece<'a> {
    /// Its number in the super-packet, from 1; `None` for a datagram of its own.
    pub index: Option<usize>,
    /// The bytes from the BTH on, as far as they are in the file.
    pub captured: &'a [u8],
    /// Its length, ICRC included; at least that of `captured`.
    pub len: usize,
    /// The verdict on its ICRC.
    pub verdict: Verdict,
    /// In a super-packet over IPv4, the IP identification that the packet has on the wire.
    pub ip_id: Option<u16>,
}

/// The packets of a datagram: one, unless it is a super-packet.
#[must_use]
pub fn pieces<'a>(datagram: &Datagram<'a>) -> Vec<Piece<'a>> {
    let template = Template::new(&datagram.ip, datagram.src_port);
    let whole = Piece {
        index: None,
        captured: datagram.captured,
        len: datagram.len,
        verdict: match datagram.obstacle {
            Some(obstacle) => Verdict::Unknown(obstacle),
            None => verdict(&template, datagram.captured),
        },
        ip_id: None,
    };
    let Verdict::Bad { .. } = whole.verdict else { return vec![whole] };
    let Some(size) = segment_size(&template, datagram.captured) else { return vec![whole] };
    let segments = datagram.captured.chunks(size).enumerate();
    segments
        .map(|(i, bytes)| {
            let (verdict, ip_id) = segment_verdict(&template, &datagram.ip, i, bytes);
            Piece { index: Some(i + 1), captured: bytes, len: bytes.len(), verdict, ip_id }
        })
        .collect()
}

/// Whether the datagrams of a super-packet over IPv4, of which `second` is the second, have
/// identifications that follow each other. Its ICRC says it; the kernel numbers them so, if it is
/// cut off.
#[must_use]
pub fn is_numbered(datagram: &Datagram<'_>, second: &[u8]) -> bool {
    let &IpFields::V4 { id, flags, .. } = &datagram.ip else { return false };
    let template = Template::new(&datagram.ip, datagram.src_port);
    let mut numbered = template;
    numbered.set_id(id.wrapping_add(1), flags);
    verdict(&numbered, second) == Verdict::Ok || verdict(&template, second) != Verdict::Ok
}

fn verdict(template: &Template, packet: &[u8]) -> Verdict {
    match packet.last_chunk() {
        Some(found) if packet.len() >= SHORTEST => {
            let (computed, found) = (template.of(packet), u32::from_le_bytes(*found));
            if computed == found { Verdict::Ok } else { Verdict::Bad { computed, found } }
        }
        _ => Verdict::Unknown(Obstacle::TooShort),
    }
}

/// The length of the first packet, if the datagram has more than one. Lengths are multiples of
/// four, because payload is padded.
fn segment_size(template: &Template, datagram: &[u8]) -> Option<usize> {
    let longest = LONGEST.min(datagram.len().checked_sub(SHORTEST)?);
    (SHORTEST..=longest)
        .step_by(4)
        .find(|&size| verdict(template, &datagram[..size]) == Verdict::Ok)
}

/// The verdict on the `i`-th packet, and its IP identification. Segmentation either adds `i` to the
/// first packet's, or leaves that as it is.
fn segment_verdict(
    template: &Template,
    ip: &IpFields,
    i: usize,
    segment: &[u8],
) -> (Verdict, Option<u16>) {
    let unchanged = verdict(template, segment);
    let &IpFields::V4 { id, flags, .. } = ip else { return (unchanged, None) };
    if unchanged == Verdict::Ok {
        return (unchanged, Some(id));
    }
    let id = id.wrapping_add(i as u16);
    let mut numbered = *template;
    numbered.set_id(id, flags);
    (verdict(&numbered, segment), Some(id))
}
