//! Multicast groups: a datagram to a group goes to every queue pair that is attached to it.
//!
//! Only the driver of the engine can join a group, so that its packets arrive; this module decides
//! which queue pairs get them. A group is named by its address: its GID, or the IPv4 address if the
//! GID maps one into IPv6.

use core::fmt;
use core::net::IpAddr;
use std::collections::BTreeMap;

use crate::tuning::engine::{GROUPS_MAX, MEMBERS_MAX};
use crate::types::Qpn;

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

impl Groups {
    /// Adds a queue pair to a group. Returns whether the group is new.
    pub(crate) fn attach(&mut self, qpn: Qpn, group: IpAddr) -> Result<bool, GroupError> {
        let group = group.to_canonical();
        if !group.is_multicast() {
            return Err(GroupError::NoGroup);
        }
        let is_new = !self.0.contains_key(&group);
        if is_new && self.0.len() >= GROUPS_MAX {
            return Err(GroupError::Full { max: GROUPS_MAX });
        }
        let members = self.0.entry(group).or_default();
        if !members.contains(&qpn) {
            if members.len() >= MEMBERS_MAX {
                return Err(GroupError::Full { max: MEMBERS_MAX });
            }
            members.push(qpn);
        }
        Ok(is_new)
    }

    /// Removes a queue pair from a group. Returns whether it was the last one.
    pub(crate) fn detach(&mut self, qpn: Qpn, group: IpAddr) -> Result<bool, GroupError> {
        let group = group.to_canonical();
        let members = self.0.get_mut(&group).ok_or(GroupError::NotAttached)?;
        let at = members.iter().position(|member| *member == qpn);
        members.remove(at.ok_or(GroupError::NotAttached)?);
        let is_last = members.is_empty();
        if is_last {
            self.0.remove(&group);
        }
        Ok(is_last)
    }

    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// The groups of a queue pair.
    pub(crate) fn of(&self, qpn: Qpn) -> Vec<IpAddr> {
        let with =
            |(group, members): (&IpAddr, &Vec<Qpn>)| members.contains(&qpn).then_some(*group);
        self.0.iter().filter_map(with).collect()
    }

    /// The queue pairs of a group, if it has any.
    pub(crate) fn members(&mut self, group: IpAddr) -> Option<&mut Vec<Qpn>> {
        self.0.get_mut(&group)
    }
}
