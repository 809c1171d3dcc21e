//! Other processes on this device's addresses, seen from a shard: datagrams that arrived here and
//! are theirs.

use std::net::IpAddr;
use std::ops::Range;
use std::sync::Arc;

use rocinante_netdev::{Delivery, NOTE_BYTES, RxDatagram, Slots};
use rocinante_stack::cm::{ConnectionManager, Note, Noted, Requested};
use rocinante_stack::types::{Qpn, Time};
use rocinante_stack::wire::cm::ServiceId;
use rocinante_stack::{Addressee, addressee};

use super::others::dest_qpn;

/// The neighbours of a shard.
#[derive(Debug)]
pub(super) struct Neighbours {
    slots: Arc<Slots>,
    own: Range<usize>,
    /// Datagrams handed over to them.
    pub(super) handed_over: u64,
    /// Datagrams of theirs for which their mailboxes had no room.
    pub(super) lost: u64,
}

impl Neighbours {
    pub(super) fn new(slots: &Arc<Slots>) -> Self {
        let first = usize::from(slots.first());
        Self { slots: slots.clone(), own: first..first + slots.count(), handed_over: 0, lost: 0 }
    }

    /// Hands a datagram over if it is another process's. One without a taker stays here.
    #[inline]
    pub(super) fn hand_over(&mut self, datagram: &RxDatagram<'_>) -> bool {
        match dest_qpn(datagram.payload) {
            Some(Qpn::GSI) => self.hand_over_mad(datagram),
            Some(dest) if !self.own.contains(&usize::from(dest.slot())) => {
                self.hand_over_to(dest.slot(), datagram)
            }
            _ => false,
        }
    }

    #[cold]
    fn hand_over_mad(&mut self, datagram: &RxDatagram<'_>) -> bool {
        let slot = match addressee(datagram.payload) {
            Some(Addressee::Slot(slot)) => Some(slot),
            // Each process finds the same one, so that it stays there.
            Some(Addressee::Reply(slot, qpn)) => self.connected(datagram, qpn).or(Some(slot)),
            Some(Addressee::Request(requested, service, qpn)) => {
                self.taker(datagram, requested, service, qpn)
            }
            Some(Addressee::Any) | None => None,
        };
        let other = slot.filter(|slot| !self.own.contains(&usize::from(*slot)));
        let Some(slot) = other else { return false };
        match self.slots.deliver(slot, datagram) {
            Delivery::Done => self.handed_over += 1,
            // An answer of this shard would deny the neighbour's connection. All senders repeat.
            Delivery::Lost => self.lost += 1,
            // This shard answers in place of a process that has gone.
            Delivery::NoProcess => return false,
        }
        true
    }

    /// The slot of the process that has a peer's request. If none has: of the one that has a
    /// connection to the queue pair that asks, which ends it and refuses the request; else of the
    /// neighbour that listens for the service.
    fn taker(
        &self,
        datagram: &RxDatagram<'_>,
        requested: Requested,
        service: Option<ServiceId>,
        qpn: Option<Qpn>,
    ) -> Option<u8> {
        if !self.slots.is_leader(datagram.dst) {
            return None;
        }
        let way = (datagram.dst, datagram.src);
        let holder = self.slots.request_holder(way, requested.key());
        let stale = || self.connected(datagram, qpn?);
        if let Some(slot) = holder.or_else(stale) {
            return Some(slot);
        }
        let service = service?;
        let other = Some(service.listened()).filter(|other| *other != service);
        let find = |service: ServiceId| self.slots.listener(service.0, datagram.dst);
        find(service).or_else(|| find(other?))
    }

    /// The slot of the process that has a connection to a queue pair of a datagram's sender.
    fn connected(&self, datagram: &RxDatagram<'_>, qpn: Qpn) -> Option<u8> {
        let peer = datagram.src;
        let is_it = |note: &[u8; NOTE_BYTES]| {
            Note::from_bytes(note).is_some_and(|note| note.is_with(peer, qpn))
        };
        self.slots.noted(datagram.dst, Note::mark_of(peer, qpn), is_it)
    }

    /// Leaves requests that came before their listener to the processes that have it. Only the
    /// leader does: its neighbours do not hand such a datagram on.
    pub(super) fn leave_requests(&self, now: Time, cm: &mut ConnectionManager) {
        let listens = |service: u64, address| self.slots.listener(service, address).is_some();
        cm.leave_to_others(now, |service, address| {
            self.slots.is_leader(address) && listens(service.0, address)
        });
    }

    #[cold]
    fn hand_over_to(&mut self, slot: u8, datagram: &RxDatagram<'_>) -> bool {
        let taken = self.slots.hand_over(slot, datagram);
        self.handed_over += u64::from(taken);
        taken
    }

    /// Writes down the connections that begin and end, for the neighbours of a process that has
    /// gone; and the requests whose repetitions come here.
    pub(super) fn note_connections(&self, cm: &mut ConnectionManager) {
        while let Some(noted) = cm.poll_note() {
            match noted {
                Noted::Connection { address, id, note: Some(note) } => {
                    self.slots.note(address, id.0, (&note.to_bytes(), note.mark()));
                }
                Noted::Ending { address, note } => self.slots.unmark(address, note.mark()),
                Noted::Connection { address, id, note: None } => {
                    self.slots.drop_note(address, id.0);
                }
                Noted::Request { addresses, requested, is_held } => {
                    self.slots.hold_request(addresses, requested.key(), is_held);
                }
            }
        }
    }

    /// The connections of neighbours that have gone. No process lives on the slot of any: the notes
    /// may be forged.
    fn of_the_dead(&self, left: Vec<(IpAddr, [u8; NOTE_BYTES])>) -> Vec<(IpAddr, Note)> {
        let read = |(address, bytes): (IpAddr, [u8; NOTE_BYTES])| {
            let note = Note::from_bytes(&bytes)?;
            let (slot, is_own) = (note.slot(), self.own.contains(&usize::from(note.slot())));
            (!is_own && !self.slots.is_taken(slot, address)).then_some((address, note))
        };
        left.into_iter().filter_map(read).collect()
    }

    /// Ends the connections of neighbours that have gone. Returns whether there were some.
    pub(super) fn end_for_the_dead(&self, now: Time, cm: &mut ConnectionManager) -> bool {
        let left = self.slots.left();
        if left.is_empty() {
            return false;
        }
        for (address, note) in self.of_the_dead(left) {
            cm.end_for(now, address, &note);
        }
        // If this process is killed here, the next one finds their notes, or this one's.
        self.note_connections(cm);
        self.slots.forget_left();
        true
    }
}

const _: () = assert!(NOTE_BYTES == Note::LEN, "a note has a place in the shared file");
