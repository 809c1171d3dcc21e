//! First and last contacts with peers, and the generation number of all that is known of them: a
//! user of a peer that has seen another number looks up its peer again.

use core::net::IpAddr;
use std::collections::VecDeque;

use crate::peer::{PeerId, Peers};
use crate::types::Time;

/// The contacts that wait to be taken, and the generation.
#[derive(Debug)]
pub(crate) struct Contacts {
    waiting: VecDeque<Contact>,
    /// While it is 0, no peer is unknown.
    generation: u32,
    /// When the generation ends.
    ends: Time,
}

/// The first or the last contact with a peer, or a new generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Contact {
    /// A first packet left for a peer of which nothing is known.
    First { local: IpAddr, remote: IpAddr },
    /// The peer did not answer any more, and was given up.
    GivenUp(IpAddr),
    /// A generation ended.
    Renewed,
}

impl Default for Contacts {
    fn default() -> Self {
        let waiting = VecDeque::new();
        Self { waiting, generation: 0, ends: Time::NEVER }
    }
}

impl Contacts {
    /// Users that have seen another generation look up their peer.
    #[inline]
    pub(crate) fn generation(&self) -> u32 {
        self.generation
    }

    /// A first packet left for an unknown peer.
    #[cold]
    pub(crate) fn first_packet_to(&mut self, local: IpAddr, remote: IpAddr) {
        self.waiting.push_back(Contact::First { local, remote });
    }

    /// A packet left for the receiver `id` that no peer acknowledges.
    #[inline]
    pub(crate) fn packet_left(&mut self, id: PeerId, peers: &mut Peers) {
        if let Some((local, remote)) = peers.first_in(id, self.generation) {
            self.first_packet_to(local, remote);
        }
    }

    /// The peer did not answer any more.
    #[cold]
    pub(crate) fn gave_up(&mut self, remote: IpAddr) {
        self.waiting.push_back(Contact::GivenUp(remote));
    }

    #[inline]
    pub(crate) fn has_some(&self) -> bool {
        !self.waiting.is_empty()
    }

    pub(crate) fn next(&mut self) -> Option<Contact> {
        self.waiting.pop_front()
    }

    /// A new generation begins: all users look again.
    pub(crate) fn renew(&mut self) {
        self.generation = self.generation.wrapping_add(1).max(1);
    }

    /// The generation ends at `then`.
    pub(crate) fn end_at(&mut self, then: Time) {
        self.ends = then;
    }

    /// Time passes: the generation may end. Returns when it ends.
    pub(crate) fn age(&mut self, now: Time) -> Time {
        if now >= self.ends {
            self.ends = Time::NEVER;
            self.waiting.push_back(Contact::Renewed);
            if self.generation > 0 {
                self.renew();
            }
        }
        self.ends
    }
}
