//! Other processes on this device's addresses, seen from a shard: what came here and is theirs.

use std::net::IpAddr;
use std::ops::Range;
use std::sync::Arc;

use rocinante_netdev::{RxDatagram, Slots};
use rocinante_stack::types::Qpn;
use rocinante_stack::{Addressee, addressee};

use super::others::dest_qpn;

/// The neighbours of a shard.
#[derive(Debug)]
pub(super) struct Neighbours {
    slots: Arc<Slots>,
    own: Range<usize>,
    /// Datagrams handed over to them.
    pub(super) handed_over: u64,
}

impl Neighbours {
    pub(super) fn new(slots: &Arc<Slots>) -> Self {
        let first = usize::from(slots.first());
        Self { slots: slots.clone(), own: first..first + slots.count(), handed_over: 0 }
    }

    /// Hands a datagram over if it is another process's. One that nobody takes stays here.
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
            Some(Addressee::Slot(slot)) if !self.own.contains(&usize::from(slot)) => Some(slot),
            Some(Addressee::Service(service)) => self
                .listener(service.0, datagram.dst)
                .or_else(|| self.listener(service.listened().0, datagram.dst)),
            _ => None,
        };
        slot.is_some_and(|slot| self.hand_over_to(slot, datagram))
    }

    /// The slot of the process that listens for a service, if that is not this one. Only the
    /// process that has the duty asks: what it hands over stays where it is.
    fn listener(&self, service: u64, address: IpAddr) -> Option<u8> {
        if !self.slots.has_duty(address) {
            return None;
        }
        self.slots.listener(service, address)
    }

    #[cold]
    fn hand_over_to(&mut self, slot: u8, datagram: &RxDatagram<'_>) -> bool {
        let taken = self.slots.hand_over(slot, datagram);
        self.handed_over += u64::from(taken);
        taken
    }
}
