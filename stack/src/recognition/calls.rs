//! The engine's part of recognition: its calls, and its queue pairs that look up their peers.
//!
//! The engine with QP1 probes and replies. Where queue pairs are spread over several engines, the
//! others report new peers to it, and get the replies from it ([`Engine::poll_hand_off`]).

use core::net::IpAddr;

use super::{HandOff, Recognition};
use crate::any::AnyQp;
use crate::budget::Budget;
use crate::cm::Transmit;
use crate::contacts::Contact;
use crate::engine::Engine;
use crate::pacing::Pacing;
use crate::peer::PeerKind;
use crate::rc;
use crate::shared::{EngineConfig, Shared};
use crate::types::{Qpn, Time};
use crate::wire::PeerInfo;

impl Engine {
    /// Peers whose kind no program gives are probed on QP1 from now on, so that two Rocinantes
    /// recognise each other. Call it before there are queue pairs.
    pub fn probe_unknown_peers(&mut self) {
        self.shared.contacts.renew();
    }

    /// Sends probes, and replies to those of peers with `own`. Transaction ids are derived from
    /// `key`, which must be random; `slot` is as in [`CmConfig`]. QP1 has to be open
    /// ([`start_cm`](Self::start_cm)).
    ///
    /// [`CmConfig`]: crate::cm::CmConfig
    pub fn start_recognition(&mut self, key: [u64; 2], slot: Option<u8>, own: PeerInfo) {
        self.gsi.recognition.open(key, slot, own);
    }

    /// Whether there is something to poll of [`poll_probe`](Self::poll_probe) or
    /// [`poll_hand_off`](Self::poll_hand_off). Look after each call of
    /// [`poll_transmit`](Self::poll_transmit) and of [`handle_datagram`](Self::handle_datagram).
    #[must_use]
    #[inline]
    pub fn has_probes(&self) -> bool {
        self.gsi.recognition.news
    }

    /// The next probe or reply to send with [`send_mad`](Self::send_mad).
    pub fn poll_probe(&mut self) -> Option<Transmit> {
        self.gsi.recognition.poll_transmit()
    }

    /// Takes back a datagram of [`poll_probe`](Self::poll_probe), for want of room.
    pub fn put_back_probe(&mut self, transmit: Transmit) {
        self.gsi.recognition.put_back(transmit);
    }

    /// The next report for other engines that share the addresses of this one: pass it to
    /// [`take_hand_off`](Self::take_hand_off) of that with QP1, or of all.
    pub fn poll_hand_off(&mut self) -> Option<HandOff> {
        self.gsi.recognition.poll_hand_off()
    }

    /// Takes the report of another engine.
    pub fn take_hand_off(&mut self, now: Time, report: &HandOff) {
        let recognition = &mut self.gsi.recognition;
        match *report {
            HandOff::FirstPacket { local, remote } => {
                let known = recognition.first_packet_to(now, (local, remote), &mut self.shared);
                if let Some(Some(info)) = known {
                    recognition.hand_off(HandOff::Learn(remote, info));
                }
            }
            HandOff::Learn(remote, info) => {
                recognition.table.set(remote, Some(info));
                self.learn(remote, &info);
            }
        }
    }

    /// The kind of a queue pair's peer, from the program or from the peer's reply. `None` if the
    /// queue pair has no peer.
    #[must_use]
    pub fn peer_kind(&self, qpn: Qpn) -> Option<PeerKind> {
        let (_, attr, _) = self.query_qp(qpn)?;
        let peer = attr.peer?;
        let slot = attr.dest_qpn.map_or(0, Qpn::slot);
        let info = || self.peer_info(peer.remote).filter(|info| slot < info.slots);
        Some(match peer.kind {
            // A reliable connection takes it over when it is safe.
            PeerKind::Standard if !matches!(self.qps[self.slot(qpn)?], Some(AnyQp::Rc(_))) => {
                info().map_or(PeerKind::Standard, |info| PeerKind::Rocinante(info.queue))
            }
            kind => kind,
        })
    }

    /// The last reply of the peer at an address, if it is a Rocinante.
    #[must_use]
    pub fn peer_info(&self, remote: IpAddr) -> Option<PeerInfo> {
        self.gsi.recognition.table.last(remote)
    }

    #[cold]
    pub(crate) fn replied(&mut self, remote: IpAddr, info: &PeerInfo) {
        if self.shared.config.sharers > 1 {
            self.gsi.recognition.hand_off(HandOff::Learn(remote, *info));
        }
        self.learn(remote, info);
    }

    /// All users of a peer learn its kind.
    fn learn(&mut self, remote: IpAddr, info: &PeerInfo) {
        self.shared.peers.learn(remote, Some((info.slots, pace_of(&self.shared.config, info))));
        for qp in self.qps.iter_mut().flatten() {
            if let AnyQp::Rc(qp) = qp
                && qp.core.peer().is_some_and(|peer| peer.remote == remote)
            {
                adopt(qp, info, &mut self.shared);
            }
        }
    }

    /// First packets left for unknown peers, peers were given up, or records expired.
    #[cold]
    #[inline(never)]
    pub(crate) fn take_contacts(&mut self, now: Time) {
        let Self { gsi, shared, .. } = self;
        let recognition = &mut gsi.recognition;
        while let Some(contact) = shared.contacts.next() {
            let (local, remote) = match contact {
                Contact::First { local, remote } => (local, remote),
                Contact::GivenUp(remote) => {
                    // Another peer may come to its address.
                    recognition.table.set(remote, None);
                    continue;
                }
                Contact::Renewed => {
                    recognition.expire(now, shared);
                    continue;
                }
            };
            match recognition.first_packet_to(now, (local, remote), shared) {
                Some(None) => {}
                Some(Some(info)) => {
                    let pace = pace_of(&shared.config, &info);
                    shared.peers.learn(remote, Some((info.slots, pace)));
                }
                None => shared.peers.learn(remote, None),
            }
        }
    }
}

/// Before the turn of a queue pair that has not looked for its peer in this generation. Returns how
/// many packets it has sent, if the peer is unknown.
#[cold]
#[inline(never)]
pub(crate) fn look_up(
    recognition: &Recognition,
    now: Time,
    qp: &mut AnyQp,
    shared: &mut Shared,
) -> Option<u64> {
    let generation = shared.contacts.generation();
    let remote = match qp {
        AnyQp::Rc(qp) => qp.core.peer().filter(|peer| peer.kind == PeerKind::Standard),
        // The receivers of datagrams look for themselves.
        _ => None,
    };
    let known = remote.map(|peer| recognition.table.known(now, peer.remote));
    if known == Some(None) {
        return Some(qp.core().tally.get().sent_pkts);
    }
    qp.core_mut().peers_seen = generation;
    if let (AnyQp::Rc(qp), Some(Some(Some(info)))) = (qp, known) {
        adopt(qp, &info, shared);
    }
    None
}

/// After the turn of a queue pair with an unknown peer, if it has sent more packets than `before`.
#[cold]
#[inline(never)]
pub(crate) fn sent(before: u64, qp: &mut AnyQp, shared: &mut Shared) {
    let core = qp.core_mut();
    if let Some(peer) = core.peer().filter(|_| core.tally.get().sent_pkts != before) {
        let (local, remote) = (peer.local, peer.remote);
        shared.contacts.first_packet_to(local, remote);
        core.peers_seen = shared.contacts.generation();
    }
}

/// A reliable connection adopts the reply of its peer, if that describes the peer's queue.
fn adopt(qp: &mut rc::Qp, info: &PeerInfo, shared: &mut Shared) {
    let dest = qp.core.attr.dest_qpn;
    if dest.is_some_and(|dest| dest.slot() < info.slots) {
        let (budget, kind) = share_of(&shared.config, info);
        qp.upgrade(budget, kind, shared);
    }
}

/// This engine's share of the capacity of a peer, and the kind of the peer.
fn share_of(config: &EngineConfig, info: &PeerInfo) -> (Budget, PeerKind) {
    let all = Budget { bytes: info.bytes, datagrams: info.datagrams };
    (all.part(1, config.sharers.max(1)), PeerKind::Rocinante(info.queue))
}

/// This engine's share of the pace of a peer.
fn pace_of(config: &EngineConfig, info: &PeerInfo) -> Pacing {
    let (queue_min, _) = share_of(config, info);
    let sharers = config.sharers.max(1);
    Pacing {
        packet_ns: info.packet_ns.saturating_mul(sharers),
        kib_ns: info.kib_ns.saturating_mul(sharers),
        queue_min,
    }
}
