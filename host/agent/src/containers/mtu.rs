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
        let mut inner = self.lock();
        let links = inner.namespaces.links(None).map_err(|e| failed("list", &e))?;
        let is_bridge = |link: &&HostLink| host.master == Some(link.index) && link.kind == "bridge";
        let bridge = links.iter().find(is_bridge);
        let is_port = |link: &&HostLink| bridge.is_some_and(|it| link.master == Some(it.index));
        let is_inward = |link: &HostLink| INWARD.contains(&link.kind.as_str());
        let is_uplink = |link: &HostLink| {
            let is_configured = config.uplinks.iter().any(|it| it.interface == link.name);
            is_port(&link) && !is_inward(link) || is_configured
        };
        // The MTU of a bridge without one of its own is that of a container that is about to be
        // introduced, perhaps with an MTU as well.
        let inward = links.iter().filter(is_port).filter(|link| is_inward(link));
        let (known, new): (Vec<_>, Vec<_>) =
            inward.partition(|link| inner.containers.contains_key(&link.index));
        let follows_new = |bridge: &&HostLink| {
            let has_its = |link: &&HostLink| link.mtu == bridge.mtu;
            new.iter().any(has_its) && known.iter().all(|link| link.mtu >= mtu)
        };
        let uplinks = links.iter().filter(|link| is_uplink(link)).map(|link| ("uplink", link));
        let bridge = bridge.filter(|it| !follows_new(it)).map(|link| ("bridge", link));
        let mut all = bridge.into_iter().chain(uplinks);
        let Some((what, link)) = all.find(|(_, link)| link.mtu < mtu) else { return Ok(()) };
        let HostLink { name, mtu: has, .. } = link;
        let reason = format!("the MTU of the {what} {name} is {has}, and the container's is {mtu}");
        let hint = "give the interface less, or the links of the host more";
        Err(Refused::new(Code::Interface, reason, hint))
    }
}
