//! Calls of an engine by which it recognises other Rocinantes (`recognition.rs`).
//!
//! The engine with QP1 asks and answers. Where queue pairs are spread over several engines, the
//! others report new peers to it ([`Engine::poll_stranger`]), and get the answers from it
//! ([`Engine::learn`]).

use core::net::IpAddr;

use super::Engine;
use crate::any::AnyQp;
use crate::cm::Transmit;
use crate::peer::{Meeting, PeerKind};
use crate::recognition::{Recognised, Stranger};
use crate::types::{Qpn, Time};
use crate::wire::Introduction;

impl Engine {
    /// Questions of peers are answered from now on with `own`; with [`EngineConfig::recognises`],
    /// peers are asked. Transaction ids are derived from `key`, which must be random; `slot` is as
    /// in [`CmConfig`]. QP1 has to be open ([`start_cm`](Self::start_cm)).
    ///
    /// [`EngineConfig::recognises`]: crate::EngineConfig::recognises
    /// [`CmConfig`]: crate::cm::CmConfig
    pub fn start_recognition(&mut self, key: [u64; 2], slot: Option<u8>, own: Introduction) {
        self.shared.recognition.open(key, slot, own);
    }

    /// Whether there is something to poll of [`poll_introduction`](Self::poll_introduction),
    /// [`poll_stranger`](Self::poll_stranger) or [`poll_recognised`](Self::poll_recognised). Look
    /// after each call of [`poll_transmit`](Self::poll_transmit) and of
    /// [`handle_datagram`](Self::handle_datagram).
    #[must_use]
    #[inline]
    pub fn has_introductions(&self) -> bool {
        self.shared.recognition.has_news()
    }

    /// The next question or answer to send with [`send_mad`](Self::send_mad).
    pub fn poll_introduction(&mut self) -> Option<Transmit> {
        self.shared.recognition.poll_transmit()
    }

    /// Takes back a datagram of [`poll_introduction`](Self::poll_introduction), for want of room.
    pub fn put_back_introduction(&mut self, transmit: Transmit) {
        self.shared.recognition.put_back(transmit);
    }

    /// A peer that another engine, which has QP1, is to ask: pass it to [`ask`](Self::ask) there.
    pub fn poll_stranger(&mut self) -> Option<Stranger> {
        self.shared.recognition.poll_stranger()
    }

    /// Asks a peer that another engine met, unless it was asked lately. Returns the peer's last
    /// introduction, for that engine to [`learn`](Self::learn).
    pub fn ask(&mut self, now: Time, to: Stranger) -> Option<Recognised> {
        let met = self.shared.recognition.meet(now, to, &mut self.shared.counters);
        met.told.map(|told| Recognised { remote: to.remote, told })
    }

    /// A peer that was recognised here, for all other engines to [`learn`](Self::learn); only if
    /// [`EngineConfig::sharers`](crate::EngineConfig::sharers) says that there are others.
    pub fn poll_recognised(&mut self) -> Option<Recognised> {
        self.shared.recognition.poll_recognised()
    }

    /// Another engine recognised a peer as a Rocinante.
    pub fn learn(&mut self, peer: &Recognised) {
        self.shared.recognition.learn(peer);
        self.apply(peer);
    }

    /// The kind of a queue pair's peer, from the program or from the peer's introduction. `None` if
    /// the queue pair has no peer.
    #[must_use]
    pub fn peer_kind(&self, qpn: Qpn) -> Option<PeerKind> {
        let (_, attr, _) = self.query_qp(qpn)?;
        let peer = attr.peer?;
        let slot = attr.dest_qpn.map_or(0, Qpn::slot);
        let told = || self.shared.recognition.told_last(peer.remote);
        Some(match peer.kind {
            // A reliable connection takes it over when it is safe.
            PeerKind::Standard if !matches!(self.qps[self.slot(qpn)?], Some(AnyQp::Rc(_))) => {
                let told = told().filter(|told| slot < told.slots);
                told.map_or(PeerKind::Standard, |told| PeerKind::Rocinante(told.queue))
            }
            kind => kind,
        })
    }

    /// The last introduction of the peer at an address, if it is a Rocinante.
    #[must_use]
    pub fn introduction_of(&self, remote: IpAddr) -> Option<Introduction> {
        self.shared.recognition.told_last(remote)
    }

    /// A peer answered.
    #[cold]
    pub(super) fn recognised(&mut self, peer: Recognised) {
        if self.shared.config.sharers > 1 {
            self.shared.recognition.tell(peer);
        }
        self.apply(&peer);
    }

    fn apply(&mut self, peer: &Recognised) {
        let Recognised { remote, told } = peer;
        let takes = self.shared.config.takes(told);
        self.shared.peers.recognised(*remote, told.slots, takes);
        for qp in self.qps.iter_mut().flatten() {
            if let AnyQp::Rc(qp) = qp
                && qp.core.peer().is_some_and(|peer| peer.remote == *remote)
            {
                qp.recognise(told, &mut self.shared);
            }
        }
    }

    /// Packets left for peers that were not asked yet.
    #[cold]
    #[inline(never)]
    pub(super) fn ask_strangers(&mut self, now: Time) {
        while let Some(meeting) = self.shared.peers.next_met() {
            let id = match meeting {
                Meeting::Receiver(id) => id,
                Meeting::QueuePair { slot, sent } => {
                    if let Some(Some(AnyQp::Rc(qp))) = self.qps.get_mut(slot as usize) {
                        qp.met(sent, now, &mut self.shared);
                    }
                    continue;
                }
            };
            let Some((local, remote, slot)) = self.shared.peers.way_to(id) else { continue };
            let to = Stranger { local, remote };
            let met = self.shared.recognition.meet(now, to, &mut self.shared.counters);
            let told = met.told.filter(|told| slot.is_none_or(|slot| slot < told.slots));
            let takes = told.map(|told| self.shared.config.takes(&told));
            self.shared.peers.heard(id, takes, met.again);
        }
    }
}
