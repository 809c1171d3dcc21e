//! Multicast groups of a device of the kernel.
//!
//! The device receives datagrams to a group if a queue pair is attached to it. A socket that joins
//! the group makes them arrive: it tells routers, switches and the interface (for `librdmacm` the
//! kernel does that itself, over IPv4). Soft-RoCE gets its packets from the kernel's UDP, which
//! drops datagrams to groups that no socket has joined.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};

use rocinante_netdev::{Interface, worded};
use rocinante_soft::model::error::VerbsError;

use super::{Qp, convert, error};

/// A group to which a queue pair is attached, and the socket that has joined it.
#[derive(Debug)]
pub(super) struct Membership {
    group: IpAddr,
    _socket: UdpSocket,
}

impl Qp {
    pub fn attach_mcast(&self, group: IpAddr) -> Result<(), VerbsError> {
        let mut groups = self.groups.lock();
        if groups.iter().any(|member| member.group == group) {
            return Ok(());
        }
        let socket = join(group, self.local).map_err(VerbsError::Io)?;
        self.raw
            .attach_mcast(&convert::gid(group))
            .map_err(|why| error::failed("ibv_attach_mcast", why))?;
        groups.push(Membership { group, _socket: socket });
        Ok(())
    }

    pub fn detach_mcast(&self, group: IpAddr) -> Result<(), VerbsError> {
        let mut groups = self.groups.lock();
        let Some(at) = groups.iter().position(|member| member.group == group) else {
            let why = "the queue pair is not attached to the group";
            return Err(VerbsError::Invalid(why.into()));
        };
        self.raw
            .detach_mcast(&convert::gid(group))
            .map_err(|why| error::failed("ibv_detach_mcast", why))?;
        groups.remove(at);
        Ok(())
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // The kernel does not destroy an attached queue pair.
        for member in self.groups.get_mut().drain(..) {
            let _ = self.raw.detach_mcast(&convert::gid(member.group));
        }
        self.device.known.remove(self.qpn());
    }
}

/// A socket that has joined a group at the interface with address `local`.
fn join(group: IpAddr, local: IpAddr) -> io::Result<UdpSocket> {
    let index = || Interface::by_address(local).map(|interface| interface.index);
    let joined = match (group, local) {
        (IpAddr::V4(group), IpAddr::V4(local)) => UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))
            .and_then(|socket| socket.join_multicast_v4(&group, &local).map(|()| socket)),
        (IpAddr::V6(group), _) => UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0))
            .and_then(|socket| socket.join_multicast_v6(&group, index()?).map(|()| socket)),
        (IpAddr::V4(_), IpAddr::V6(_)) => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the queue pair has an IPv6 address: give it the index of an IPv4 one",
        )),
    };
    joined.map_err(|why| worded(&why, format!("cannot join {group}: {why}")))
}
