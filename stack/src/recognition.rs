//! Which peers are Rocinantes, although no program names their kind: the questions on QP1, and the
//! answers.
//!
//! - A peer is asked once, after the first packet of a program to it, and again after ten minutes
//!   at the earliest. Nothing waits for the answer.
//! - An answer is believed if it comes from the address of the question, and has its transaction
//!   id, which is unguessable. It holds for ten minutes for queue pairs that begin then; a
//!   connection that adopted it keeps it.
//! - Everything is bounded: the peers that are remembered, the datagrams that wait, and the
//!   questions that are answered in a second.

use core::net::IpAddr;
use std::collections::{BTreeMap, VecDeque};

use crate::allowance::Allowance;
use crate::cm::Transmit;
use crate::ids::Ids;
use crate::stats::{Counters, Drops};
use crate::tuning::recognition::{ANSWER_NS, ANSWERS, PAUSE, PEERS_MAX, SOON, TX_MAX};
use crate::types::Time;
use crate::wire::{Introduction, RecognitionMad};

/// The known peers.
#[derive(Debug, Default)]
pub(crate) struct Recognition {
    peers: BTreeMap<IpAddr, Acquaintance>,
    /// It asks and answers itself: QP1 is here.
    desk: Option<Box<Desk>>,
    /// Peers to ask, for the shard that has QP1.
    strangers: VecDeque<Stranger>,
    /// Peers that were recognised, for the shards that do not have QP1.
    recognised: VecDeque<Recognised>,
    /// Whether there is something to poll. One load tells a burst that there is nothing.
    news: bool,
}

/// A peer that was asked.
#[derive(Debug)]
struct Acquaintance {
    local: IpAddr,
    at: Time,
    /// Of the question that is not answered.
    tid: Option<u64>,
    told: Option<Introduction>,
}

/// A peer of which nothing is known yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stranger {
    /// Our address, from which it is asked.
    pub local: IpAddr,
    /// The peer's.
    pub remote: IpAddr,
}

/// A peer that is a Rocinante.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recognised {
    /// Its address.
    pub remote: IpAddr,
    /// Its introduction, which describes its receive queues.
    pub told: Introduction,
}

/// The result of a meeting with a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Met {
    pub(crate) told: Option<Introduction>,
    /// When to ask again.
    pub(crate) again: Time,
}

/// The part that asks and answers.
#[derive(Debug)]
struct Desk {
    own: Introduction,
    tids: Ids,
    tx: VecDeque<Transmit>,
    /// Questions that it still answers.
    answers: Allowance,
}

impl Recognition {
    /// Opens it: transaction ids are derived from `key` and name the slot, and `own` is the
    /// introduction that peers get.
    pub(crate) fn open(&mut self, key: [u64; 2], slot: Option<u8>, own: Introduction) {
        let (tids, tx) = (Ids::new(key, slot), VecDeque::new());
        let answers = Allowance::new(ANSWERS, ANSWER_NS);
        self.desk = Some(Box::new(Desk { own, tids, tx, answers }));
    }

    /// Whether it asks and answers itself.
    pub(crate) fn is_open(&self) -> bool {
        self.desk.is_some()
    }

    /// Whether there is room for peers whose addresses may be forged.
    pub(crate) fn has_room(&self) -> bool {
        self.peers.len() < PEERS_MAX / 2
    }

    /// Peers that are remembered.
    pub(crate) fn count(&self) -> usize {
        self.peers.len()
    }

    /// The peer's introduction, if it still holds.
    pub(crate) fn known(&self, now: Time, remote: IpAddr) -> Option<Met> {
        let known = self.peers.get(&remote)?;
        let again = known.at.after(PAUSE);
        (now < again).then_some(Met { told: known.told, again })
    }

    /// The peer's last introduction, of any age.
    pub(crate) fn told_last(&self, remote: IpAddr) -> Option<Introduction> {
        self.peers.get(&remote)?.told
    }

    /// A first packet left for a peer: asks it, unless it was asked lately.
    pub(crate) fn meet(&mut self, now: Time, to: Stranger, counters: &mut Counters) -> Met {
        if let Some(known) = self.known(now, to.remote) {
            return known;
        }
        let full = self.peers.len() >= PEERS_MAX && !self.peers.contains_key(&to.remote);
        if full {
            self.peers.retain(|_, known| now < known.at.after(PAUSE));
            if self.peers.len() >= PEERS_MAX {
                return Met { told: None, again: now.after(PAUSE) };
            }
        }
        let Some(tid) = self.ask(to, counters) else {
            return Met { told: None, again: now.after(SOON) };
        };
        let asked = Acquaintance { local: to.local, at: now, tid, told: None };
        self.peers.insert(to.remote, asked);
        Met { told: None, again: now.after(PAUSE) }
    }

    /// Asks, or has another shard ask. Returns the transaction id if there is one; `None` if there
    /// is no room.
    fn ask(&mut self, to: Stranger, counters: &mut Counters) -> Option<Option<u64>> {
        let Some(desk) = &mut self.desk else {
            let room = self.strangers.len() < TX_MAX;
            return room.then(|| {
                self.strangers.push_back(to);
                self.news = true;
                None
            });
        };
        if desk.tx.len() >= TX_MAX {
            return None;
        }
        let tid = desk.tids.draw();
        let mad = RecognitionMad::Question.emit(tid);
        desk.tx.push_back(Transmit { local: to.local, remote: to.remote, via: None, mad });
        self.news = true;
        counters.sent_questions += 1;
        Some(Some(tid))
    }

    /// Takes a datagram of recognition; returns the peer that it makes known.
    pub(crate) fn handle(
        &mut self,
        now: Time,
        (tid, mad): (u64, RecognitionMad),
        (src, dst): (IpAddr, IpAddr),
        (counters, drops): (&mut Counters, &mut Drops),
    ) -> Option<Recognised> {
        match mad {
            RecognitionMad::Question => {
                counters.rcvd_questions += 1;
                let answers = self.desk.as_mut().is_some_and(|desk| {
                    desk.may_answer(now) && {
                        let mad = RecognitionMad::Answer(Some(desk.own)).emit(tid);
                        desk.tx.push_back(Transmit { local: dst, remote: src, via: None, mad });
                        true
                    }
                });
                self.news |= answers;
                counters.sent_answers += u64::from(answers);
                drops.too_many_questions += u64::from(!answers);
                None
            }
            RecognitionMad::Answer(told) => {
                let asked = self.peers.get_mut(&src).filter(|asked| {
                    asked.local == dst && asked.tid == Some(tid) && now < asked.at.after(PAUSE)
                });
                let Some(asked) = asked else {
                    drops.unasked_answer += 1;
                    return None;
                };
                counters.rcvd_answers += 1;
                (asked.tid, asked.told) = (None, told);
                told.map(|told| Recognised { remote: src, told })
            }
            RecognitionMad::Unknown => {
                drops.unasked_answer += 1;
                None
            }
        }
    }

    /// Another shard found that a peer is a Rocinante.
    pub(crate) fn learn(&mut self, peer: &Recognised) {
        if let Some(known) = self.peers.get_mut(&peer.remote) {
            known.told = Some(peer.told);
        }
    }

    /// Leaves it for the shards that do not have QP1.
    pub(crate) fn tell(&mut self, peer: Recognised) {
        if self.recognised.len() < TX_MAX {
            self.recognised.push_back(peer);
            self.news = true;
        }
    }

    /// A peer does not answer any more: its introduction may not hold for a successor at its
    /// address.
    #[cold]
    pub(crate) fn forget(&mut self, remote: IpAddr) {
        if let Some(known) = self.peers.get_mut(&remote) {
            known.told = None;
        }
    }

    pub(crate) fn poll_stranger(&mut self) -> Option<Stranger> {
        let stranger = self.strangers.pop_front();
        self.look();
        stranger
    }

    pub(crate) fn poll_recognised(&mut self) -> Option<Recognised> {
        let peer = self.recognised.pop_front();
        self.look();
        peer
    }

    /// Whether there are datagrams to send, or something for other shards.
    #[inline]
    pub(crate) fn has_news(&self) -> bool {
        self.news
    }

    fn look(&mut self) {
        let waits = self.desk.as_ref().is_some_and(|desk| !desk.tx.is_empty());
        self.news = waits || !self.strangers.is_empty() || !self.recognised.is_empty();
    }

    pub(crate) fn poll_transmit(&mut self) -> Option<Transmit> {
        let transmit = self.desk.as_mut().and_then(|desk| desk.tx.pop_front());
        self.look();
        transmit
    }

    /// There was no room for it.
    pub(crate) fn put_back(&mut self, transmit: Transmit) {
        if let Some(desk) = &mut self.desk {
            desk.tx.push_front(transmit);
            self.news = true;
        }
    }
}

impl Desk {
    /// Whether one more question is answered now.
    fn may_answer(&mut self, now: Time) -> bool {
        self.tx.len() < TX_MAX && self.answers.take(now)
    }
}
