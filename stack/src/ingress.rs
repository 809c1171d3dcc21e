//! Incoming datagrams: whether one is from the expected source, and undamaged.

use core::net::IpAddr;

use crate::tuning::engine::SOURCES_MAX;
use crate::types::Time;
use crate::wire::Solver;
use crate::wire::icrc::{DF, IpFields, Template};

/// A received datagram: the payload of a UDP datagram to port 4791, with the relevant fields of its
/// headers.
#[derive(Debug, Clone, Copy)]
pub struct Datagram<'a> {
    /// From the BTH to the ICRC.
    pub bytes: &'a [u8],
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// UDP source port, which the ICRC covers.
    pub src_port: u16,
    /// The IPv4 identification, as far as it is known.
    pub ip_id: IpId,
    /// The TOS or traffic class byte; 0 if it is not known.
    pub tos: u8,
    /// The TTL or hop limit, if it is known.
    pub hop_limit: Option<u8>,
}

impl Datagram<'_> {
    /// Whether the IP header had the ECN mark "congestion experienced".
    #[must_use]
    #[inline]
    pub const fn is_congested(&self) -> bool {
        self.tos & 3 == 3
    }
}

/// The IPv4 identification and flags, which the ICRC covers, as far as they are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IpId {
    /// Read from the header.
    Exact {
        /// Identification.
        id: u16,
        /// Flags and fragment offset.
        flags: u16,
    },
    /// Probably this value, with DF set; otherwise the ICRC is solved for it.
    Hint(u16),
    /// IPv6 has none.
    None,
}

/// State of one sender's packets: their headers, and how their identifications advance.
#[derive(Debug, Default)]
pub(crate) struct SourceCheck {
    template: Option<(u16, Template)>,
    /// The identification last accepted, its time, and the identification last refused. If a peer's
    /// counter has left the window, two packets that agree establish it again. One damaged packet
    /// alone does not discard it.
    accepted_id: Option<u16>,
    accepted_at: Time,
    refused_id: Option<u16>,
}

/// Identifications below this are those of a segmented run. A kernel makes at most this many
/// segments of one super-packet.
const SEGMENTS: u16 = 128;

/// How far the identification of a peer with a counter may move between two packets. The distance
/// grows with time: Linux adds up to one for each tick since the last packet, at most a thousand a
/// second (`ip_idents_reserve`, net/ipv4/route.c).
const NEAR: u64 = 1024;
const TICK_NS: u64 = 1_000_000;

/// The verdict on an ICRC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Integrity {
    Right,
    /// Right for another identification than the hint.
    Solved,
    Wrong,
}

impl SourceCheck {
    /// Checks the ICRC of a datagram from this source.
    #[inline]
    pub(crate) fn integrity(
        &mut self,
        now: Time,
        datagram: &Datagram<'_>,
        solver: &mut Solver,
    ) -> Integrity {
        if self.template.is_none_or(|(port, _)| port != datagram.src_port) {
            self.learn(datagram);
        }
        // A copy: fields that change with each packet need not be stored.
        let Some((_, mut template)) = self.template else { return Integrity::Wrong };
        match datagram.ip_id {
            IpId::Exact { id, flags } => template.set_id(id, flags),
            IpId::Hint(id) => template.set_id(id, DF),
            IpId::None => {}
        }
        let bytes = datagram.bytes;
        let computed = template.of(bytes);
        let Some(tail) = bytes.last_chunk::<4>() else { return Integrity::Wrong };
        let found = u32::from_le_bytes(*tail);
        match datagram.ip_id {
            IpId::Hint(hint) if computed != found => {
                self.solve(now, (hint, computed), (bytes.len(), found), solver)
            }
            IpId::Hint(hint) if self.accepted_id.is_none() => {
                self.accept(now, hint);
                Integrity::Right
            }
            _ if computed == found => Integrity::Right,
            _ => Integrity::Wrong,
        }
    }

    /// Builds the template for a new peer, or for a new source port of the peer.
    #[cold]
    #[inline(never)]
    fn learn(&mut self, datagram: &Datagram<'_>) {
        self.template = template_of(datagram).map(|template| (datagram.src_port, template));
    }

    /// The hint was wrong, and gave another ICRC than the one found in a packet of `len` bytes:
    /// looks for the identification that makes it right.
    #[inline(never)]
    fn solve(
        &mut self,
        now: Time,
        (hint, computed): (u16, u32),
        (len, found): (usize, u32),
        solver: &mut Solver,
    ) -> Integrity {
        let Some((_, mut template)) = self.template else { return Integrity::Wrong };
        template.set_id(hint, DF);
        match solver.solve(&template, len, computed, found) {
            Some((id, flags)) if flags == DF || flags == 0 => self.judge(now, id),
            _ => Integrity::Wrong,
        }
    }

    /// Whether an identification that would make the ICRC right is the peer's. Every damaged packet
    /// has one such identification, so only a few are plausible. The first is accepted without a
    /// check: a NAK that is lost is never repeated.
    fn judge(&mut self, now: Time, id: u16) -> Integrity {
        let follows = self.accepted_id.is_none_or(|last| {
            let moved = NEAR + now.since(self.accepted_at) / TICK_NS;
            u64::from(id.wrapping_sub(last)) <= moved || u64::from(last.wrapping_sub(id)) <= NEAR
        });
        // A counter moves. So the same identification again is the same damage again.
        let agrees = |last: u16| {
            let apart = id.wrapping_sub(last).min(last.wrapping_sub(id));
            apart > 0 && u64::from(apart) <= NEAR
        };
        if id < SEGMENTS || follows || self.refused_id.is_some_and(agrees) {
            self.accept(now, id);
            Integrity::Solved
        } else {
            self.refused_id = Some(id);
            Integrity::Wrong
        }
    }

    fn accept(&mut self, now: Time, id: u16) {
        (self.accepted_id, self.accepted_at) = (Some(id), now);
    }
}

/// Senders of datagrams without a connection. Any host may send; the state of one is kept until
/// another takes its slot.
#[derive(Debug)]
pub(crate) struct Sources {
    /// For those with a connection, too.
    pub(crate) solver: Solver,
    checks: Box<[UnconnectedSource]>,
}

/// A source and a destination address, and the state of the packets between them.
#[derive(Debug, Default)]
struct UnconnectedSource {
    way: Option<(IpAddr, IpAddr)>,
    check: SourceCheck,
}

impl Default for Sources {
    fn default() -> Self {
        let checks = (0..SOURCES_MAX).map(|_| UnconnectedSource::default()).collect();
        Self { solver: Solver::default(), checks }
    }
}

impl Sources {
    /// Checks the ICRC of a datagram.
    pub(crate) fn integrity(&mut self, now: Time, datagram: &Datagram<'_>) -> Integrity {
        let source = &mut self.checks[place(datagram)];
        let way = Some((datagram.src, datagram.dst));
        if source.way != way {
            *source = UnconnectedSource { way, check: SourceCheck::default() };
        }
        source.check.integrity(now, datagram, &mut self.solver)
    }
}

/// The slot of a datagram's sender. One sender to two of our addresses takes two slots, because
/// each destination has its own counter.
fn place(datagram: &Datagram<'_>) -> usize {
    let hash = spread(folded(datagram.dst)) ^ folded(datagram.src) << 16;
    (spread(hash ^ u64::from(datagram.src_port)) >> 57) as usize % SOURCES_MAX
}

fn folded(address: IpAddr) -> u64 {
    match address {
        IpAddr::V4(v4) => u64::from(v4.to_bits()),
        IpAddr::V6(v6) => {
            let [high, low] = [v6.to_bits() >> 64, v6.to_bits()];
            (high ^ low) as u64
        }
    }
}

/// Mixes a word: the high bits of the result depend on all its bits.
const fn spread(word: u64) -> u64 {
    word.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn template_of(datagram: &Datagram<'_>) -> Option<Template> {
    let ip = IpFields::between(datagram.src, datagram.dst)?;
    Some(Template::new(&ip, datagram.src_port))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A packet with a right ICRC for this identification, which the receiver cannot read.
    fn sealed(id: u16, dst: &str) -> (Vec<u8>, [IpAddr; 2]) {
        let [src, dst] = ["10.0.0.9", dst].map(|address| address.parse().unwrap());
        let (IpAddr::V4(from), IpAddr::V4(to)) = (src, dst) else { panic!("IPv4") };
        let mut bytes = vec![0x5a; 64];
        let ip = IpFields::V4 { src: from, dst: to, id, flags: DF };
        Template::new(&ip, 4000).seal(&mut bytes);
        (bytes, [src, dst])
    }

    #[test]
    fn who_sends_to_two_of_our_addresses_is_remembered_for_each() {
        let mut sources = Sources::default();
        let mut check = |id, dst| {
            let (bytes, [src, dst]) = sealed(id, dst);
            let ip_id = IpId::Hint(0);
            let (tos, hop_limit) = (0, None);
            let datagram =
                Datagram { bytes: &bytes, src, dst, src_port: 4000, ip_id, tos, hop_limit };
            sources.integrity(Time(1), &datagram)
        };
        // The first identification of each is accepted as it is; after that, only those that follow
        // it.
        assert_eq!(check(20_000, "10.0.0.1"), Integrity::Solved);
        assert_eq!(check(40_000, "10.0.0.2"), Integrity::Solved);
        for _ in 0..3 {
            assert_eq!(check(50_000, "10.0.0.1"), Integrity::Wrong, "it was forgotten");
            assert_eq!(check(60_000, "10.0.0.2"), Integrity::Wrong, "it was forgotten");
        }
        assert_eq!(check(20_001, "10.0.0.1"), Integrity::Solved);
        assert_eq!(check(40_001, "10.0.0.2"), Integrity::Solved);
    }

    /// 128 slots: by chance, each gets 64 of 8,192 senders.
    #[test]
    fn senders_are_spread() {
        let mut taken = [0; SOURCES_MAX];
        let pairs = (0..64u8).flat_map(|src| (0..8u8).map(move |dst| (src, dst)));
        for (src, dst) in pairs {
            for src_port in 0xc000..0xc010 {
                let (src, dst) = (IpAddr::from([10, 0, 0, src]), IpAddr::from([10, 0, 1, dst]));
                let (ip_id, tos, hop_limit) = (IpId::None, 0, None);
                let datagram = Datagram { bytes: &[], src, dst, src_port, ip_id, tos, hop_limit };
                taken[place(&datagram)] += 1;
            }
        }
        assert!(taken.iter().all(|count| (20..160).contains(count)), "{taken:?}");
    }
}
