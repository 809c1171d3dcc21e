//! Calls of an engine for multicast groups, and the datagrams to them.

use core::net::IpAddr;

use super::Engine;
use crate::any::AnyQp;
use crate::groups::GroupError;
use crate::ingress::{Datagram, Integrity};
use crate::mem::Memory;
use crate::types::{Pkey, Qpn, Time};
use crate::verbs::{Completions, QpType};
use crate::wire::{Packet, Service};

impl Engine {
    /// Attaches a queue pair to a group (`ibv_attach_mcast(3)`). It then gets the datagrams to the
    /// group that carry its Q_Key, its own included. Attaching it again does nothing. Returns
    /// whether the group is new, so that the caller must join it. Error: [`GroupError`]; nothing
    /// has changed then.
    pub fn attach_multicast(&mut self, qpn: Qpn, group: IpAddr) -> Result<bool, GroupError> {
        let slot = self.slot(qpn).ok_or(GroupError::UnknownQp)?;
        let of_datagrams = |qp: &AnyQp| qp.core().init.qp_type == QpType::Ud;
        if !self.qps[slot].as_ref().is_some_and(of_datagrams) {
            return Err(GroupError::Service);
        }
        self.groups.attach(qpn, group)
    }

    /// Detaches a queue pair from a group (`ibv_detach_mcast(3)`). Returns whether it was the last
    /// one, so that the caller should leave the group. Error: [`GroupError::NotAttached`].
    pub fn detach_multicast(&mut self, qpn: Qpn, group: IpAddr) -> Result<bool, GroupError> {
        self.groups.detach(qpn, group)
    }

    /// The groups that a queue pair is attached to.
    #[must_use]
    pub fn groups_of(&self, qpn: Qpn) -> Vec<IpAddr> {
        self.groups.of(qpn)
    }

    /// The number of groups with queue pairs.
    #[must_use]
    pub fn group_count(&self) -> usize {
        self.groups.count()
    }

    /// Takes a packet for the queue pairs of a group.
    #[cold]
    pub(super) fn handle_multicast<H: Memory + Completions>(
        &mut self,
        now: Time,
        packet: &Packet<'_>,
        datagram: &Datagram<'_>,
        host: &mut H,
    ) {
        let drops = &mut self.shared.drops;
        if !datagram.dst.is_multicast() {
            return drops.unknown_qpn += 1;
        }
        let Some(members) = self.groups.members(datagram.dst) else {
            return drops.unknown_group += 1;
        };
        if !Pkey::DEFAULT.admits(packet.bth().pkey) {
            return drops.pkey += 1;
        }
        match self.sources.integrity(now, datagram) {
            Integrity::Right => {}
            Integrity::Solved => self.shared.counters.icrc_id_solved += 1,
            Integrity::Wrong => return drops.icrc += 1,
        }
        if packet.info.service != Service::Ud {
            return drops.wrong_service += 1;
        }
        self.shared.counters.rcvd_pkts += 1;
        self.shared.counters.rcvd_multicast_pkts += 1;
        self.shared.counters.rcvd_ecn_ce += u64::from(datagram.is_congested());
        let members = core::mem::take(members);
        for qpn in &members {
            let Some(slot) = self.slot(*qpn) else { continue };
            let ready = self.qps[slot].as_mut().filter(|qp| qp.core().state.receives());
            if let Some(qp) = ready {
                qp.core().tally.received();
                qp.handle(now, packet, datagram, &mut self.shared, host);
            }
        }
        if let Some(list) = self.groups.members(datagram.dst) {
            *list = members;
        }
    }
}
