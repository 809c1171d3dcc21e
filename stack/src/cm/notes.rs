//! Notes on connections, for the devices that share the address. With a note they can end a
//! connection whose device has gone without a word. A peer that sends nothing notices only when it
//! asks, and a standard one never asks.

use core::net::{IpAddr, Ipv6Addr};

use super::ConnectionManager;
use super::alive::Alive;
use super::conn::{Conn, State};
use crate::ids::slot_of;
use crate::types::{Qpn, Time};
use crate::wire::cm::CommId;

/// The contents of a DREQ to the peer of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Note {
    peer: IpAddr,
    local: CommId,
    remote: CommId,
    remote_qpn: Qpn,
}

/// The number that a peer gave its request. It repeats the request under that number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requested {
    /// The communication id of a REQ.
    Connection(CommId),
    /// The request id of a SIDR REQ.
    Service(u32),
}

impl Requested {
    /// The number and its kind.
    #[must_use]
    pub fn key(self) -> u64 {
        match self {
            Self::Connection(id) => u64::from(id.0),
            Self::Service(id) => 1 << 32 | u64::from(id),
        }
    }
}

/// A change that the devices on the address have to know of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Noted {
    /// A connection begins, or ends.
    Connection {
        /// Its own address.
        address: IpAddr,
        /// Its communication id.
        id: CommId,
        /// The note; `None` if the connection is over.
        note: Option<Note>,
    },
    /// A connection's end is asked for: messages of the peer's queue pair are of others now.
    Ending {
        /// Its own address.
        address: IpAddr,
        /// The note, which stays until the peer has answered.
        note: Note,
    },
    /// The peer may repeat a request that this device has taken, or no longer does.
    Request {
        /// The own address, and the peer's.
        addresses: (IpAddr, IpAddr),
        /// The peer's number.
        requested: Requested,
        /// Whether this device has it.
        is_held: bool,
    },
}

impl Note {
    /// The length of its bytes.
    pub const LEN: usize = 28;

    /// Its bytes. They are not all zero.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        let peer = match self.peer {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        bytes[..16].copy_from_slice(&peer.octets());
        let words = [self.local.0, self.remote.0, self.remote_qpn.value()];
        for (place, word) in bytes[16..].chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_be_bytes());
        }
        bytes
    }

    /// The note with these bytes, which any process of the user may have written.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; Self::LEN]) -> Option<Self> {
        let (octets, rest) = bytes.split_first_chunk::<16>()?;
        let word = |at: usize| {
            rest.get(at..)
                .and_then(|rest| rest.first_chunk())
                .map_or(0, |it| u32::from_be_bytes(*it))
        };
        let ip = Ipv6Addr::from(*octets);
        let peer = ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4);
        let (local, remote, number) = (CommId(word(0)), CommId(word(4)), word(8));
        let remote_qpn = Qpn::new(number);
        let is_host = match peer {
            IpAddr::V4(ip) => !ip.is_broadcast(),
            IpAddr::V6(_) => true,
        } && !peer.is_unspecified()
            && !peer.is_multicast();
        let is_queue_pair =
            remote_qpn.value() == number && remote_qpn > Qpn::GSI && remote_qpn != Qpn::MULTICAST;
        let has_ids = local != CommId(0) && remote != CommId(0);
        (is_host && is_queue_pair && has_ids).then_some(Self { peer, local, remote, remote_qpn })
    }

    /// Whether it is of a connection with this queue pair of a peer.
    #[must_use]
    pub fn is_with(&self, peer: IpAddr, qpn: Qpn) -> bool {
        (self.peer, self.remote_qpn) == (peer, qpn)
    }

    /// The mark of a note on a connection with this queue pair of a peer. Others may have the same.
    #[must_use]
    pub fn mark_of(peer: IpAddr, qpn: Qpn) -> u64 {
        let octets = match peer {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().to_bits(),
            IpAddr::V6(ip) => ip.to_bits(),
        };
        let halves = [(octets >> 64) as u64, octets as u64];
        let mixed = halves.into_iter().fold(u64::from(qpn.value()), |so_far, half| {
            (so_far ^ half).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
        });
        mixed >> 32
    }

    /// Its mark.
    #[must_use]
    pub fn mark(&self) -> u64 {
        Self::mark_of(self.peer, self.remote_qpn)
    }

    /// The slot of the device whose connection it is.
    #[must_use]
    pub fn slot(&self) -> u8 {
        slot_of(self.local.0)
    }
}

impl ConnectionManager {
    /// The next change of the notes that this device leaves. Call after every other call, before
    /// [`poll_transmit`](Self::poll_transmit): once the peer has a connection, there is a note.
    pub fn poll_note(&mut self) -> Option<Noted> {
        self.notes.pop_front()
    }

    /// Ends a connection of a device that had this address, too, and is gone: sends a DREQ until
    /// the peer answers. No event tells of it. Without room for it the peer finds out by itself.
    pub fn end_for(&mut self, now: Time, address: IpAddr, note: &Note) {
        let &Note { peer, local, remote, remote_qpn } = note;
        let is_own = self.config.slot.is_none_or(|slot| slot == note.slot());
        // The other half is for this device's own.
        let is_full = self.conns.len() >= self.config.max_connections / 2;
        if is_own || is_full || address.is_ipv4() != peer.is_ipv4() {
            return;
        }
        if self.conns.contains_key(&local) {
            return;
        }
        let conn = Conn {
            state: State::Established,
            mra: false,
            end_reported: true,
            active: true,
            addresses: (address, peer),
            local,
            remote,
            tid: 0,
            // No queue pair of this device: its release means nothing.
            qpn: Qpn::default(),
            remote_qpn,
            remote_guid: 0,
            listener: None,
            mad: None,
            retries: 0,
            deadline: None,
            ack_timeout: 0,
            announces: false,
            answers: false,
            alive: Alive::default(),
        };
        self.conns.insert(local, conn);
        self.counters.ended_for_others += 1;
        // For the one that follows if this device goes, too.
        self.note(local);
        self.begin_disconnect(now, local, &[]);
    }

    /// From now on the peer may have the connection.
    pub(super) fn note(&mut self, id: CommId) {
        if let Some((address, note)) = self.note_of(id) {
            self.notes.push_back(Noted::Connection { address, id, note: Some(note) });
        }
    }

    /// The peer is asked to end it.
    pub(super) fn note_ending(&mut self, id: CommId) {
        if let Some((address, note)) = self.note_of(id) {
            self.notes.push_back(Noted::Ending { address, note });
        }
    }

    fn note_of(&self, id: CommId) -> Option<(IpAddr, Note)> {
        let conn = self.conns.get(&id).filter(|_| self.config.slot.is_some())?;
        let (address, peer) = conn.addresses;
        let note = Note { peer, local: id, remote: conn.remote, remote_qpn: conn.remote_qpn };
        Some((address, note))
    }

    /// The peer has it no more.
    pub(super) fn forget_note(&mut self, id: CommId) {
        if let Some(conn) = self.conns.get(&id).filter(|_| self.config.slot.is_some()) {
            self.notes.push_back(Noted::Connection { address: conn.addresses.0, id, note: None });
        }
    }

    /// A repetition of a peer's request comes to this device from now on, or does not.
    pub(super) fn note_request(
        &mut self,
        addresses: (IpAddr, IpAddr),
        requested: Requested,
        is_held: bool,
    ) {
        if self.config.slot.is_some() {
            self.notes.push_back(Noted::Request { addresses, requested, is_held });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(peer: &str) -> Note {
        let peer = peer.parse().unwrap();
        Note { peer, local: CommId(0x0700_0001), remote: CommId(9), remote_qpn: Qpn::new(0x3_0004) }
    }

    #[test]
    fn a_note_is_its_bytes() {
        for peer in ["10.0.0.2", "fd00::2", "127.0.0.1", "::1"] {
            assert_eq!(Note::from_bytes(&note(peer).to_bytes()), Some(note(peer)));
        }
        assert_eq!(note("10.0.0.2").slot(), 7);
    }

    #[test]
    fn notes_that_no_device_leaves_are_refused() {
        let refused = |note: Note| assert_eq!(Note::from_bytes(&note.to_bytes()), None, "{note:?}");
        for peer in ["0.0.0.0", "255.255.255.255", "224.0.0.1", "::", "ff02::1"] {
            refused(note(peer));
        }
        let good = note("10.0.0.2");
        refused(Note { local: CommId(0), ..good });
        refused(Note { remote: CommId(0), ..good });
        for number in [0, 1, 0xff_ffff] {
            refused(Note { remote_qpn: Qpn::new(number), ..good });
        }
        let mut bytes = good.to_bytes();
        bytes[24] = 1;
        assert_eq!(Note::from_bytes(&bytes), None, "a number of more than 24 bits");
        assert_eq!(Note::from_bytes(&[0; Note::LEN]), None);
        assert_eq!(Note::from_bytes(&[0xff; Note::LEN]), None);
    }
}
