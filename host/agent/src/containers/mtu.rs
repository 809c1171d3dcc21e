//! The MTU that an engine wants a container's interface to have.

use rocinante_netdev::handed::{Code, Refused};

use super::Containers;
use crate::asker::Namespace;
use crate::host::{HostLink, Namespaces};
use crate::links::{ends, failed};

/// Kinds of a bridge's ports that lead to containers and virtual machines of this host.
const INWARD: [&str; 2] = ["veth", "tun"];

/// The ends of a container's veth, in its namespace and on the host, with their MTUs of before.
pub(super) struct Before<'a> {
    namespace: &'a Namespace,
    own: HostLink,
    host: HostLink,
}

impl Before<'_> {
    fn set(&self, own: u32, host: u32) -> Result<(), Refused> {
        let index = self.own.index;
        let there = self.namespace.run(|| Namespaces::open()?.set_mtu(index, own))?;
        let here = Namespaces::open().and_then(|mut all| all.set_mtu(self.host.index, host));
        there.and(here).map_err(|e| failed("set the MTU of", &e))
    }

    /// Gives both ends the MTUs that they had.
    pub(super) fn restore(&self) {
        if let Err(refused) = self.set(self.own.mtu, self.host.mtu) {
            tracing::warn!(end = self.host.name, "its MTU stays: {}", refused.reason);
        }
    }
}

impl Containers {
    /// Gives both ends of a container's veth this MTU. Error: the refusal to send: the bridge of
    /// the host's end or an uplink has less, or the kernel's. Then both ends are as before.
    pub(super) fn set_mtu<'a>(
        &self,
        namespace: &'a Namespace,
        interface: u32,
        mtu: u32,
    ) -> Result<Before<'a>, Refused> {
        let mut inner = self.lock();
        let id = inner.namespaces.id(namespace.file()).map_err(|e| failed("number", &e))?;
        let (own, host) = ends(&mut inner.namespaces, id, interface)?;
        drop(inner);
        let before = Before { namespace, own, host };
        // The MTU of a bridge follows those of its ports, unless it was set: it shows afterwards
        // whether this end bound it.
        match before.set(mtu, mtu).and_then(|()| self.carries(&before.host, mtu)) {
            Ok(()) => Ok(before),
            Err(refused) => {
                before.restore();
                Err(refused)
            }
        }
    }

    /// Whether packets of this length go on from a host's end.
    fn carries(&self, host: &HostLink, mtu: u32) -> Result<(), Refused> {
        let config = self.config();
        let links = self.lock().namespaces.links(None).map_err(|e| failed("list", &e))?;
        let is_bridge = |link: &&HostLink| host.master == Some(link.index) && link.kind == "bridge";
        let bridge = links.iter().find(is_bridge);
        let is_uplink = |link: &HostLink| {
            let leaves = !INWARD.contains(&link.kind.as_str());
            let is_port = bridge.is_some_and(|bridge| link.master == Some(bridge.index));
            is_port && leaves || config.uplinks.iter().any(|it| it.interface == link.name)
        };
        let uplinks = links.iter().filter(|link| is_uplink(link)).map(|link| ("uplink", link));
        let mut all = bridge.map(|link| ("bridge", link)).into_iter().chain(uplinks);
        let Some((what, link)) = all.find(|(_, link)| link.mtu < mtu) else { return Ok(()) };
        let HostLink { name, mtu: has, .. } = link;
        let reason = format!("the MTU of the {what} {name} is {has}, and the container's is {mtu}");
        let hint = "give the interface less, or the links of the host more";
        Err(Refused::new(Code::Interface, reason, hint))
    }
}
