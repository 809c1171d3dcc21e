//! The links of a container, and their ends on the host.

use std::io;

use rocinante_netdev::handed::{Code, Refused};

use crate::host::{HostLink, Namespaces, NsId, Peer, Sources};

/// Both ends of a container's veth. The kernel names the container's end, so a container cannot
/// forge it.
pub(crate) fn ends(
    namespaces: &mut Namespaces,
    id: NsId,
    interface: u32,
) -> Result<(HostLink, HostLink), Refused> {
    let no_host_end = |what: String| {
        let hint = "the agent serves interfaces that are one end of a veth, with the other end in \
                    the agent's network namespace";
        Refused::new(Code::Forbidden, what, hint)
    };
    let own = namespaces.link(Some(id), interface).map_err(|e| {
        if is_gone(&e) {
            Refused::new(Code::Interface, format!("no interface {interface}"), "see `ip link`")
        } else {
            failed("find the interface of", &e)
        }
    })?;
    if own.kind != "veth" {
        let kind = if own.kind.is_empty() { "no virtual interface" } else { &own.kind };
        return Err(no_host_end(format!("{} is {kind}, which has no end on the host", own.name)));
    }
    let elsewhere = || no_host_end(format!("the other end of {} is not on this host", own.name));
    let Some(Peer { index, .. }) = own.peer else { return Err(elsewhere()) };
    let host = namespaces.link(None, index).map_err(|_| elsewhere())?;
    if host.kind != "veth" || peer_elsewhere(&host) != Some((id, own.index)) {
        return Err(elsewhere());
    }
    Ok((own, host))
}

/// The way of frames out of a container.
pub(crate) enum WayOut {
    /// By other interfaces of the container, or none.
    None,
    /// By this host's end of a veth.
    HostEnd(HostLink),
    /// By one that is not guarded here.
    Unguarded,
}

pub(crate) fn way_out(namespaces: &mut Namespaces, id: NsId, link: &HostLink) -> WayOut {
    if link.is_loopback {
        return WayOut::None;
    }
    if link.kind == "veth" {
        return match ends(namespaces, id, link.index) {
            Ok((_, host)) => WayOut::HostEnd(host),
            Err(_) if !link.is_of_another_namespace => WayOut::None,
            Err(_) => WayOut::Unguarded,
        };
    }
    let is_inner = INNER.contains(&link.kind.as_str()) && !link.is_of_another_namespace;
    if is_inner { WayOut::None } else { WayOut::Unguarded }
}

/// Kinds of links that send by other links of their namespace, or not at all.
const INNER: [&str; 23] = [
    "bond",
    "bridge",
    "dummy",
    "erspan",
    "geneve",
    "gre",
    "gretap",
    "ifb",
    "ip6erspan",
    "ip6gre",
    "ip6gretap",
    "ip6tnl",
    "ipip",
    "ipvlan",
    "macvlan",
    "macvtap",
    "sit",
    "team",
    "vlan",
    "vrf",
    "vti",
    "vti6",
    "vxlan",
];

/// The other end of a host's end.
pub(crate) fn peer_elsewhere(link: &HostLink) -> Option<(NsId, u32)> {
    let Peer { index, namespace } = link.peer?;
    (link.kind == "veth").then_some((namespace?, index))
}

pub(crate) fn sources_of(
    namespaces: &mut Namespaces,
    id: NsId,
    link: &HostLink,
) -> io::Result<Sources> {
    Ok(Sources { mac: link.mac, addresses: namespaces.addresses(id, link.index)? })
}

pub(crate) fn is_gone(error: &io::Error) -> bool {
    const ENODEV: i32 = 19;
    error.raw_os_error() == Some(ENODEV)
}

pub(crate) fn failed(what: &str, error: &io::Error) -> Refused {
    let reason = format!("the agent cannot {what} your network namespace: {error}");
    Refused::new(Code::Failed, reason, "")
}
