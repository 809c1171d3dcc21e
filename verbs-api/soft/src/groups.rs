//! Multicast groups: the engine knows the attached queue pairs, the port joins the groups.

use std::io;
use std::net::IpAddr;

use rocinante_netdev::Port as _;
use rocinante_stack::GroupError;

use super::Qp;
use super::shard::Shard;
use crate::model::error::VerbsError;

impl Qp {
    pub fn attach_mcast(&self, group: IpAddr) -> Result<(), VerbsError> {
        let mut guard = self.core.hold();
        let shard = &mut *guard;
        if shard.engine.attach_multicast(self.qpn, group).map_err(refused)?
            && let Err(error) = shard.io.port.join(group)
        {
            let _ = shard.engine.detach_multicast(self.qpn, group);
            return Err(VerbsError::Io(error));
        }
        Ok(())
    }

    pub fn detach_mcast(&self, group: IpAddr) -> Result<(), VerbsError> {
        let mut shard = self.core.hold();
        self.detach_from(&mut shard, group).map_err(refused)
    }

    /// Whether it is attached to a group.
    pub fn is_in_group(&self) -> bool {
        !self.core.hold().engine.groups_of(self.qpn).is_empty()
    }

    /// Detaches from all groups, before destruction.
    pub(super) fn detach_all(&self, shard: &mut Shard) {
        for group in shard.engine.groups_of(self.qpn) {
            let _ = self.detach_from(shard, group);
        }
    }

    fn detach_from(&self, shard: &mut Shard, group: IpAddr) -> Result<(), GroupError> {
        if shard.engine.detach_multicast(self.qpn, group)? {
            shard.io.port.leave(group);
        }
        Ok(())
    }
}

fn refused(error: GroupError) -> VerbsError {
    match error {
        GroupError::Full { max } => {
            let what =
                format!("{max} multicast groups of a device, or queue pairs in one, at most");
            VerbsError::Io(io::Error::new(io::ErrorKind::OutOfMemory, what))
        }
        other => VerbsError::Invalid(other.to_string()),
    }
}
