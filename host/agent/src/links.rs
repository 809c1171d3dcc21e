//! The links of a container, and their ends on the host.

use std::io;

use rocinante_netdev::handed::{Code, Refused};

use crate::host::{ADDRESSES_MAX, HostLink, Namespaces, NsId, Peer, Sources};

/// The way of most containers to a veth.
const BRIDGE: &str = "give the container a bridge network, whose interface is a veth to the host";

/// Both ends of a container's veth. The kernel names the container's end, so a container cannot
/// forge it.
pub(crate) fn ends(
    namespaces: &mut Namespaces,
    id: NsId,
    interface: u32,
) -> Result<(HostLink, HostLink), Refused> {
    let own = namespaces.link(Some(id), interface).map_err(|e| {
        if is_gone(&e) {
            Refused::new(Code::Interface, format!("no interface {interface}"), "see `ip link`")
        } else {
            failed("find the interface of", &e)
        }
    })?;
    let host = match own.peer {
        Some(Peer { index, .. }) if own.kind == "veth" => namespaces.link(None, index).ok(),
        _ => None,
    };
    match host {
        Some(host) if peer_elsewhere(&host) == Some((id, own.index)) => Ok((own, host)),
        _ => {
            let (reason, hint) = no_host_end(namespaces, &own);
            Err(Refused::new(Code::Forbidden, format!("{} {reason}", own.name), hint))
        }
    }
}

/// The reason why an interface has no end in the agent's network namespace, to follow its name, and
/// a way to one that has.
pub(crate) fn no_host_end(
    namespaces: &mut Namespaces,
    own: &HostLink,
) -> (&'static str, &'static str) {
    let there = own.peer.and_then(|peer| peer.namespace);
    // The interface of a container on which this one stands.
    let is_anothers = |namespaces: &mut Namespaces| {
        let lower = own.peer.and_then(|peer| Some((peer.namespace?, peer.index)));
        let ends = namespaces.links(None).unwrap_or_default();
        lower.is_some() && ends.iter().any(|end| peer_elsewhere(end) == lower)
    };
    match own.kind.as_str() {
        "veth" => match there {
            Some(there) => other_end_in(namespaces, there),
            None => ("is one end of a veth, and the other is not in the host's network", BRIDGE),
        },
        "tun" => (
            "is a tun: a program like slirp4netns or pasta carries its packets, and it has no end \
             on the host",
            BRIDGE,
        ),
        "" => ("is no virtual interface, and has no end on the host", BRIDGE),
        "macvlan" | "macvtap" if is_anothers(namespaces) => (
            "is a macvlan on the interface of another container, by whose veth only that one's \
             addresses leave",
            BRIDGE,
        ),
        "ipvlan" | "ipvtap" if is_anothers(namespaces) => (
            "is an ipvlan on the interface of another container, by whose veth only that one's \
             addresses leave",
            BRIDGE,
        ),
        "macvlan" | "macvtap" => ("is a macvlan, which has no end on the host", BRIDGE),
        "ipvlan" | "ipvtap" => ("is an ipvlan, which has no end on the host", BRIDGE),
        _ => ("is no veth, and has no end on the host", BRIDGE),
    }
}

/// As [`no_host_end`], of a veth whose other end is in that network namespace.
fn other_end_in(namespaces: &mut Namespaces, there: NsId) -> (&'static str, &'static str) {
    let links = namespaces.links(Some(there)).unwrap_or_default();
    let has = |kind: &str| links.iter().any(|link| link.kind == kind);
    if has("vxlan") {
        return (
            "is of an overlay network, as Docker Swarm's: its other end is in a network namespace \
             of the overlay",
            "give the container a bridge network, and no overlay",
        );
    }
    let ends = namespaces.links(None).unwrap_or_default();
    if ends.iter().filter_map(peer_elsewhere).any(|(container, _)| container == there) {
        return (
            "is of a container in a container (docker in docker): its other end is in the outer \
             one",
            "run an agent in the outer container, or start this one on the host",
        );
    }
    if has("tun") {
        return (
            "is of a rootless engine, whose containers share a network namespace that slirp4netns \
             or pasta connects: its other end is in that",
            "start the container by an engine of root's",
        );
    }
    ("is one end of a veth, and the other is in a network namespace beside the host's", BRIDGE)
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

/// The refusal to a container with a way out that is not guarded.
pub(crate) fn not_guarded(namespaces: &mut Namespaces, link: &HostLink) -> Refused {
    let (name, (why, _)) = (&link.name, no_host_end(namespaces, link));
    let reason = format!("forged frames that leave by {name} cannot be kept back: it {why}");
    let hint = "give the container no other network, or see other_ways_out in agent.toml";
    Refused::new(Code::Forbidden, reason, hint)
}

/// The other end of a host's end.
pub(crate) fn peer_elsewhere(link: &HostLink) -> Option<(NsId, u32)> {
    let Peer { index, namespace } = link.peer?;
    (link.kind == "veth").then_some((namespace?, index))
}

/// The addresses of a container's link that may send: the first [`ADDRESSES_MAX`] of them.
pub(crate) fn sources_of(
    namespaces: &mut Namespaces,
    id: NsId,
    link: &HostLink,
) -> io::Result<Sources> {
    let mut addresses = namespaces.addresses(id, link.index)?;
    addresses.retain(|address| !address.is_unspecified() && !address.is_multicast());
    let addresses = addresses.into_iter().take(ADDRESSES_MAX).collect();
    Ok(Sources { mac: link.mac, addresses, is_closed: false })
}

pub(crate) fn is_gone(error: &io::Error) -> bool {
    const ENODEV: i32 = 19;
    error.raw_os_error() == Some(ENODEV)
}

pub(crate) fn failed(what: &str, error: &io::Error) -> Refused {
    let reason = format!("the agent cannot {what} your network namespace: {error}");
    Refused::new(Code::Failed, reason, "")
}
