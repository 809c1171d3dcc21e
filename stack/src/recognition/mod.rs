//! Recognition: which peers are Rocinantes, although no program names their kind. A peer is probed
//! on QP1, and a Rocinante replies.
//!
//! - One event comes in: a first packet leaves for an unknown peer
//!   ([`first_packet_to`](Recognition::first_packet_to)). Nothing waits for the reply. The peer is
//!   probed again after ten minutes at the earliest.
//! - One event goes out: the engine learns the peer's [`PeerInfo`] (`calls.rs`).
//! - A user of a peer, which is a queue pair or the receiver of datagrams, looks at the table
//!   before its first packet, and again when a record has expired. It finds out by the generation
//!   number of [`Contacts`](crate::contacts::Contacts).
//! - A reply is believed if it comes from the address of the probe, and has its transaction id,
//!   which is unguessable. It holds for ten minutes for queue pairs that begin then; a connection
//!   that adopted it keeps it.
//! - Everything is bounded: the peers that are remembered, the datagrams that wait, and the probes
//!   that are answered in a second.

pub(crate) mod calls;
mod table;

use core::net::IpAddr;
use std::collections::VecDeque;

use self::table::{Probed, Table};
use crate::allowance::Allowance;
use crate::cm::Transmit;
use crate::ids::Ids;
use crate::shared::Shared;
use crate::stats::{Counters, Drops};
use crate::tuning::recognition::{ANSWER_NS, ANSWERS, PEERS_MAX, TX_MAX};
use crate::types::Time;
use crate::wire::{PeerInfo, RecognitionMad};

/// The peers that were probed, and the part that probes and replies.
#[derive(Debug, Default)]
pub(crate) struct Recognition {
    pub(crate) table: Table,
    /// It probes and replies itself: QP1 is here.
    prober: Option<Box<Prober>>,
    hand_offs: VecDeque<HandOff>,
    /// Whether there is something to poll. One load tells a burst that there is nothing.
    news: bool,
}

/// The report of an engine to others that share its addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandOff {
    /// A first packet left for an unknown peer. For the engine with QP1, which probes it.
    FirstPacket {
        /// Our address, from which it is probed.
        local: IpAddr,
        /// The peer's.
        remote: IpAddr,
    },
    /// The peer at this address replied. For all other engines.
    Learn(IpAddr, PeerInfo),
}

/// The part that probes and replies.
#[derive(Debug)]
struct Prober {
    own: PeerInfo,
    tids: Ids,
    tx: VecDeque<Transmit>,
    /// Probes that it still answers.
    replies: Allowance,
}

impl Prober {
    /// Whether one more probe is answered now.
    fn may_reply(&mut self, now: Time) -> bool {
        self.tx.len() < TX_MAX && self.replies.take(now)
    }
}

impl Recognition {
    /// Starts to probe and to reply: transaction ids are derived from `key` and name the slot, and
    /// peers are told of `own`.
    fn open(&mut self, key: [u64; 2], slot: Option<u8>, own: PeerInfo) {
        let (tids, tx) = (Ids::new(key, slot), VecDeque::new());
        let replies = Allowance::new(ANSWERS, ANSWER_NS);
        self.prober = Some(Box::new(Prober { own, tids, tx, replies }));
    }

    /// Whether it probes and replies itself.
    pub(crate) fn is_open(&self) -> bool {
        self.prober.is_some()
    }

    /// Whether there is room for peers whose addresses may be forged.
    pub(crate) fn has_room(&self) -> bool {
        self.table.len() < PEERS_MAX / 2
    }

    /// A first packet left for a peer: probes it, unless it was probed lately. `None` if it was
    /// not; else its reply, if there is one.
    pub(crate) fn first_packet_to(
        &mut self,
        now: Time,
        (local, remote): (IpAddr, IpAddr),
        shared: &mut Shared,
    ) -> Option<Option<PeerInfo>> {
        let known = self.table.known(now, remote);
        if known.is_none() && self.table.makes_room(now, remote) {
            let probed = self.probe((local, remote), &mut shared.counters);
            self.table.probed(now, local, remote, probed);
            shared.renew_at(self.table.expires());
        }
        known
    }

    /// Records have expired: the users of their peers look again.
    fn expire(&mut self, now: Time, shared: &mut Shared) {
        self.table.expire(now);
        shared.renew_at(self.table.expires());
    }

    /// Probes a peer, or has another engine probe it.
    fn probe(&mut self, (local, remote): (IpAddr, IpAddr), counters: &mut Counters) -> Probed {
        let Some(prober) = &mut self.prober else {
            return match self.hand_off(HandOff::FirstPacket { local, remote }) {
                true => Probed::Elsewhere,
                false => Probed::No,
            };
        };
        if prober.tx.len() >= TX_MAX {
            return Probed::No;
        }
        let tid = prober.tids.draw();
        let mad = RecognitionMad::Probe.emit(tid);
        prober.tx.push_back(Transmit { local, remote, via: None, mad });
        self.news = true;
        counters.sent_questions += 1;
        Probed::Here(tid)
    }

    /// Leaves a report for other engines, if there is room.
    fn hand_off(&mut self, report: HandOff) -> bool {
        let fits = self.hand_offs.len() < TX_MAX;
        if fits {
            self.hand_offs.push_back(report);
            self.news = true;
        }
        fits
    }

    /// Takes a datagram of recognition; returns the peer that it makes known.
    pub(crate) fn handle(
        &mut self,
        now: Time,
        (tid, mad): (u64, RecognitionMad),
        (src, dst): (IpAddr, IpAddr),
        (counters, drops): (&mut Counters, &mut Drops),
    ) -> Option<(IpAddr, PeerInfo)> {
        match mad {
            RecognitionMad::Probe => {
                counters.rcvd_questions += 1;
                let replies = self.prober.as_mut().is_some_and(|prober| {
                    prober.may_reply(now) && {
                        let mad = RecognitionMad::Reply(Some(prober.own)).emit(tid);
                        prober.tx.push_back(Transmit { local: dst, remote: src, via: None, mad });
                        true
                    }
                });
                self.news |= replies;
                counters.sent_answers += u64::from(replies);
                drops.too_many_questions += u64::from(!replies);
                None
            }
            RecognitionMad::Reply(info) if self.table.replied(now, (dst, src), tid, info) => {
                counters.rcvd_answers += 1;
                info.map(|info| (src, info))
            }
            RecognitionMad::Reply(_) | RecognitionMad::Unknown => {
                drops.unasked_answer += 1;
                None
            }
        }
    }

    fn poll_hand_off(&mut self) -> Option<HandOff> {
        let report = self.hand_offs.pop_front();
        self.look();
        report
    }

    fn poll_transmit(&mut self) -> Option<Transmit> {
        let transmit = self.prober.as_mut().and_then(|prober| prober.tx.pop_front());
        self.look();
        transmit
    }

    /// There was no room for it.
    fn put_back(&mut self, transmit: Transmit) {
        if let Some(prober) = &mut self.prober {
            prober.tx.push_front(transmit);
            self.news = true;
        }
    }

    fn look(&mut self) {
        let waits = self.prober.as_ref().is_some_and(|prober| !prober.tx.is_empty());
        self.news = waits || !self.hand_offs.is_empty();
    }
}
