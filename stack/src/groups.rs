//! Multicast groups: a datagram to a group goes to every queue pair that is attached to it.
//!
//! Only the driver of the engine can join a group, so that its packets arrive; this module decides
//! which queue pairs get them. A group is named by its address: its GID, or the IPv4 address if the
//! GID maps one into IPv6.

use core::fmt;
use core::net::IpAddr;
use std::collections::BTreeMap;

use crate::any::AnyQp;
use crate::engine::Engine;
use crate::ingress::{Datagram, Integrity};
use crate::mem::Memory;
use crate::types::{Pkey, Qpn, Time};
use crate::verbs::{Completions, QpType};
use crate::wire::{Packet, Service};

/// Most groups.
const GROUPS_MAX: usize = 256;
/// Most queue pairs of a group: a datagram costs as many copies.
const MEMBERS_MAX: usize = 1024;

/// The groups with their queue pairs. A group without queue pairs has no entry.
#[derive(Debug, Default)]
pub(crate) struct Groups(BTreeMap<IpAddr, Vec<Qpn>>);

/// Why a queue pair cannot be attached or detached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupError {
    /// No such queue pair.
    UnknownQp,
    /// Only queue pairs of type UD receive datagrams to groups.
    Service,
    /// The address is not a multicast address.
    NoGroup,
    /// The limit of groups, or of queue pairs in this group, is reached.
    Full {
        /// The limit.
        max: usize,
    },
    /// The queue pair is not attached.
    NotAttached,
}

impl fmt::Display for GroupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownQp => f.write_str("no such queue pair"),
            Self::Service => f.write_str("only a queue pair of type UD can be attached to a group"),
            Self::NoGroup => f.write_str(
                "not the address of a multicast group: they are 224.0.0.0/4 and ff00::/8",
            ),
            Self::Full { max } => write!(f, "{max} groups, or queue pairs in one, at most"),
            Self::NotAttached => f.write_str("the queue pair is not attached to the group"),
        }
    }
}

impl core::error::Error for GroupError {}

impl Engine {
    /// Attaches a queue pair to a group (`ibv_attach_mcast(3)`). It then gets the datagrams to the
    /// group that carry its Q_Key, its own included. Attaching it again does nothing. Returns
    /// whether the group is new, so that the caller must join it.
    ///
    /// # Errors
    /// [`GroupError`]; nothing has changed then.
    pub fn attach_multicast(&mut self, qpn: Qpn, group: IpAddr) -> Result<bool, GroupError> {
        let group = group.to_canonical();
        let slot = self.slot(qpn).ok_or(GroupError::UnknownQp)?;
        let of_datagrams = |qp: &AnyQp| qp.core().init.qp_type == QpType::Ud;
        if !self.qps[slot].as_ref().is_some_and(of_datagrams) {
            return Err(GroupError::Service);
        }
        if !group.is_multicast() {
            return Err(GroupError::NoGroup);
        }
        let groups = &mut self.groups.0;
        let is_new = !groups.contains_key(&group);
        if is_new && groups.len() >= GROUPS_MAX {
            return Err(GroupError::Full { max: GROUPS_MAX });
        }
        let members = groups.entry(group).or_default();
        if !members.contains(&qpn) {
            if members.len() >= MEMBERS_MAX {
                return Err(GroupError::Full { max: MEMBERS_MAX });
            }
            members.push(qpn);
        }
        Ok(is_new)
    }

    /// Detaches a queue pair from a group (`ibv_detach_mcast(3)`). Returns whether it was the last
    /// one, so that the caller should leave the group.
    ///
    /// # Errors
    /// [`GroupError::NotAttached`].
    pub fn detach_multicast(&mut self, qpn: Qpn, group: IpAddr) -> Result<bool, GroupError> {
        let group = group.to_canonical();
        let groups = &mut self.groups.0;
        let members = groups.get_mut(&group).ok_or(GroupError::NotAttached)?;
        let at = members.iter().position(|member| *member == qpn);
        members.remove(at.ok_or(GroupError::NotAttached)?);
        let is_last = members.is_empty();
        if is_last {
            groups.remove(&group);
        }
        Ok(is_last)
    }

    /// The groups that a queue pair is attached to.
    #[must_use]
    pub fn groups_of(&self, qpn: Qpn) -> Vec<IpAddr> {
        let with =
            |(group, members): (&IpAddr, &Vec<Qpn>)| members.contains(&qpn).then_some(*group);
        self.groups.0.iter().filter_map(with).collect()
    }

    /// Takes a packet for the queue pairs of a group.
    #[cold]
    pub(crate) fn handle_multicast<H: Memory + Completions>(
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
        let Some(members) = self.groups.0.get_mut(&datagram.dst) else {
            return drops.unknown_group += 1;
        };
        if !Pkey::DEFAULT.admits(packet.bth().pkey) {
            return drops.pkey += 1;
        }
        match self.strangers.integrity(now, datagram, &mut self.solver) {
            Integrity::Right => {}
            Integrity::Solved => self.shared.counters.icrc_id_solved += 1,
            Integrity::Wrong => return drops.icrc += 1,
        }
        if packet.info.service != Service::Ud {
            return drops.wrong_service += 1;
        }
        self.shared.counters.rcvd_pkts += 1;
        self.shared.counters.rcvd_ecn_ce += u64::from(datagram.is_congested());
        let members = core::mem::take(members);
        for qpn in &members {
            let Some(slot) = self.slot(*qpn) else { continue };
            let ready = self.qps[slot].as_mut().filter(|qp| qp.core().state.receives());
            if let Some(qp) = ready {
                qp.handle(now, packet, datagram, &mut self.shared, host);
            }
        }
        if let Some(list) = self.groups.0.get_mut(&datagram.dst) {
            *list = members;
        }
    }
}
