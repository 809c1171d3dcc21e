//! Multicast groups.

use std::net::IpAddr;

use rocinante_soft::model::error::VerbsError;
use rocinante_stack::verbs::QpType;

use super::{Qp, QpKind};

impl Qp {
    /// Attaches a queue pair of type UD to a multicast group (`ibv_attach_mcast(3)`). Until it is
    /// detached or destroyed, it receives the datagrams to the group that carry its Q_Key, from any
    /// sender. The interface joins the group (IGMP, MLD) while a queue pair is attached. An IPv4
    /// group may be written as its IPv4-mapped IPv6 address, as in its GID. Attaching twice does
    /// nothing.
    ///
    /// A sender uses an address handle of the group's address
    /// ([`Pd::create_ah`](crate::Pd::create_ah)) and the number
    /// [`Qpn::MULTICAST`](crate::verbs::Qpn::MULTICAST). It need not be attached. If it is attached
    /// it receives its own datagrams, as do all other members on the machine
    /// (`IBV_QP_CREATE_BLOCK_SELF_MCAST_LB` of verbs is missing here).
    ///
    /// The call makes the group's socket in the network namespace of the calling thread, and fails
    /// if the device was opened in another one.
    ///
    /// # Errors
    /// [`VerbsError::Invalid`] for another type of queue pair, or for an address that is no group;
    /// [`VerbsError::Io`] beyond 256 groups of a device or 1024 queue pairs of a group
    /// (`OutOfMemory`), or if the group cannot be joined; [`VerbsError::Hardware`].
    pub fn attach_mcast(&self, group: IpAddr) -> Result<(), VerbsError> {
        let group = self.check_group(group)?;
        on!(QpKind, &self.kind, qp => qp.attach_mcast(group))
    }

    /// Detaches the queue pair from the group (`ibv_detach_mcast(3)`).
    ///
    /// # Errors
    /// [`VerbsError::Invalid`] if it is not attached; [`VerbsError::Hardware`].
    pub fn detach_mcast(&self, group: IpAddr) -> Result<(), VerbsError> {
        let group = self.check_group(group)?;
        on!(QpKind, &self.kind, qp => qp.detach_mcast(group))
    }

    fn check_group(&self, group: IpAddr) -> Result<IpAddr, VerbsError> {
        let group = group.to_canonical();
        if self.qp_type != QpType::Ud {
            let why = "only a queue pair of type UD can be attached to a group";
            return Err(VerbsError::Invalid(why.into()));
        }
        if !group.is_multicast() {
            let why = format!("{group} is no multicast group: they are 224.0.0.0/4 and ff00::/8");
            return Err(VerbsError::Invalid(why));
        }
        Ok(group)
    }
}
