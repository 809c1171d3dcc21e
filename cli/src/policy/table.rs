//! The controls and the effect that each must have on each backend: one table, written from the
//! kernel's order of hooks.
//!
//! A frame that leaves a container passes, in this order, the hooks of its own namespace, then
//! those of the host. Each backend enters this path at another place:
//!
//! - own namespace, sending: `output`, `postrouting` (`udp` enters before them), `netdev` egress,
//!   tcx egress, queueing discipline (`packet` enters before these three), driver (`afxdp` enters
//!   here);
//! - own namespace, receiving: XDP (`afxdp` leaves here), taps (`packet` leaves here), tcx ingress,
//!   `netdev` ingress, `prerouting`, `input` (`udp` leaves after them);
//! - host: tcx ingress, `netdev` ingress, then `prerouting`, `forward`, `postrouting` of the bridge
//!   or of the router, then `netdev` egress, tcx egress, queueing discipline of the other
//!   interface.
//!
//! With VXLAN the bridge has the VXLAN device as its other interface. Behind it the host
//! encapsulates. The outer packet passes `output` and `postrouting` of the host, and `netdev`
//! egress, tcx egress and the discipline of the uplink; on the peer's host the ingress of the
//! uplink, `prerouting` and `input`, then the ingress of the VXLAN device, and the bridge.
//!
//! So no backend bypasses a hook of the host. An action of tc that redirects to an ifb runs at tcx
//! ingress, and its packets do not come back to `netdev` ingress.

use std::fmt;

use serde::Serialize;

/// The ways to send and receive, in the order of [`Control::expected`].
pub const BACKENDS: [&str; 3] = ["udp", "packet", "afxdp"];

/// The kind of a control.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Group {
    /// It drops packets.
    Drop,
    /// It limits a rate.
    Rate,
    /// It changes a field of a header, or limits the size of packets.
    Mark,
    /// Two controls of which one may shadow the other.
    Pair,
    /// It lies in a container's own namespace.
    Own,
}

/// The network between the containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Topology {
    /// The containers are on a bridge of the host's.
    Bridged,
    /// The host forwards between the containers' networks.
    Routed,
    /// The containers are on the bridges of two hosts. Each uplink is a port of its bridge.
    Switched,
    /// The containers are behind two hosts that route, with a router between.
    RoutedHosts,
    /// The containers are on the bridges of two hosts with VXLAN between, over IPv4.
    Vxlan,
    /// The same over IPv6.
    VxlanIpv6,
}

impl Topology {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Bridged,
        Self::Routed,
        Self::Switched,
        Self::RoutedHosts,
        Self::Vxlan,
        Self::VxlanIpv6,
    ];
}

/// The effect of a control on the traffic of a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Effect {
    /// It acts on this traffic.
    Binds,
    /// The traffic does not pass it.
    Bypassed,
}

impl fmt::Display for Effect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Binds => "binds",
            Self::Bypassed => "bypassed",
        })
    }
}

/// The namespace in which a control lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The host's; of two hosts, that of the sender's.
    Host,
    /// That of the receiver's host.
    PeerHost,
    /// That of the container that sends requests.
    Sender,
    /// That of the container that receives them.
    Receiver,
}

/// The interface on which a control lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The host's end of the sender's veth.
    Sender,
    /// The host's end of the receiver's veth; in the routed network, the host's uplink.
    Receiver,
    /// The container's own `eth0`.
    Own,
    /// The uplink of one of two hosts.
    Uplink,
    /// The VXLAN device of one of two hosts.
    Vxlan,
}

/// The packets that a rule of nftables takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// Requests of the sender, and its probe.
    Requests,
    /// The packets of VXLAN that carry them: UDP 4789.
    Encapsulating,
    /// Datagrams to the ports of RoCEv2 and of the probe, by the outer header of a packet.
    Outer,
}

/// A rule that drops requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// A chain of nftables.
    Nft {
        /// Where.
        place: Place,
        /// Its family, and its hook with its priority, as in nft(8).
        chain: (&'static str, &'static str),
        /// The interface of a `netdev` chain.
        device: Option<End>,
        /// Which packets.
        taken: Taken,
        /// The addition to the rule.
        beside: Beside,
    },
    /// A program on tcx.
    Tcx {
        /// Where.
        place: Place,
        /// On which interface.
        end: End,
        /// Whether on frames that enter it, else on frames that leave it.
        ingress: bool,
    },
    /// "New from one side, established from the other": the answers are dropped.
    NewFromThePeer,
}

/// An addition to a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beside {
    /// Nothing.
    Nothing,
    /// `bridge-nf-call-iptables` and `bridge-nf-call-ip6tables` are 1 or 0.
    BridgeNfCall(bool),
    /// The traffic from the sender's veth is redirected to an ifb with a tbf.
    Ifb,
}

/// A limit of a rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shaper {
    /// A tbf towards the receiver.
    Tbf,
    /// A tbf towards the receiver with a queue too short for one burst.
    ShortTbf,
    /// An htb class towards the receiver.
    Htb,
    /// The sender's traffic goes through an ifb with a tbf.
    Ifb,
    /// Two containers behind an htb on the uplink, a class each.
    Uplink,
    /// The same with VXLAN: the bridge sets the class, before the uplink.
    Tunnel,
    /// A tbf on the uplink or the VXLAN device of the sender's host.
    On(End),
    /// A rule that drops packets above the rate.
    Policer,
    /// A tbf on the sender's own `eth0`.
    Own,
}

/// A change of packets on their way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// Another DSCP.
    Dscp,
    /// "Congestion experienced".
    Ce,
    /// The same on the packets of VXLAN, by a switch between the hosts.
    OuterCe,
    /// Another TTL or hop limit.
    Ttl,
    /// A link with an MTU of 1500 on a path of 9000.
    Mtu,
}

/// The action of a control.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Drops.
    Drop(Rule),
    /// Limits.
    Limit(Shaper),
    /// Marks.
    Mark(Mark),
}

/// One thing that an operator does to a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Control {
    /// Its name, in `--json` and in the document.
    pub name: &'static str,
    /// Its kind.
    pub group: Group,
    /// The network that it needs.
    pub topology: Topology,
    /// Its action.
    pub action: Action,
    /// Its effect on `udp`, `packet` and `afxdp`, the same with IPv4 and IPv6.
    pub expected: [Effect; 3],
}

use Effect::{Binds, Bypassed};
use Topology::{Bridged, Routed, RoutedHosts, Switched, Vxlan, VxlanIpv6};

pub(super) const ALL: [Effect; 3] = [Binds; 3];
pub(super) const NONE: [Effect; 3] = [Bypassed; 3];
/// `packet` and `afxdp` enter the kernel behind it, or leave it before.
pub(super) const UDP_ONLY: [Effect; 3] = [Binds, Bypassed, Bypassed];
/// Frames of `packet` pass it on their way to the driver, those of `afxdp` begin at the driver.
pub(super) const NOT_AFXDP: [Effect; 3] = [Binds, Binds, Bypassed];

const fn nft(place: Place, chain: (&'static str, &'static str), device: Option<End>) -> Action {
    taking(Taken::Requests, place, chain, device)
}

const fn taking(
    taken: Taken,
    place: Place,
    chain: (&'static str, &'static str),
    device: Option<End>,
) -> Action {
    Action::Drop(Rule::Nft { place, chain, device, taken, beside: Beside::Nothing })
}

const fn nft_beside(
    chain: (&'static str, &'static str),
    device: Option<End>,
    beside: Beside,
) -> Action {
    let (place, taken) = (Place::Host, Taken::Requests);
    Action::Drop(Rule::Nft { place, chain, device, taken, beside })
}

const fn tcx(place: Place, end: End, ingress: bool) -> Action {
    Action::Drop(Rule::Tcx { place, end, ingress })
}

const fn control(
    name: &'static str,
    group: Group,
    topology: Topology,
    action: Action,
    expected: [Effect; 3],
) -> Control {
    Control { name, group, topology, action, expected }
}

const INGRESS: (&str, &str) = ("netdev", "ingress");
const EGRESS: (&str, &str) = ("netdev", "egress");
const INET_FORWARD: (&str, &str) = ("inet", "forward");

/// All controls.
#[rustfmt::skip]
pub const CONTROLS: [Control; 46] = [
    control("nft bridge prerouting", Group::Drop, Bridged, nft(Place::Host, ("bridge", "prerouting"), None), ALL),
    control("nft bridge forward", Group::Drop, Bridged, nft(Place::Host, ("bridge", "forward"), None), ALL),
    control("nft bridge postrouting", Group::Drop, Bridged, nft(Place::Host, ("bridge", "postrouting"), None), ALL),
    control("nft netdev ingress", Group::Drop, Bridged, nft(Place::Host, INGRESS, Some(End::Sender)), ALL),
    control("nft netdev egress", Group::Drop, Bridged, nft(Place::Host, EGRESS, Some(End::Receiver)), ALL),
    control("nft inet forward, bridge-nf-call 1", Group::Drop, Bridged, nft_beside(INET_FORWARD, None, Beside::BridgeNfCall(true)), ALL),
    control("nft inet forward, bridge-nf-call 0", Group::Drop, Bridged, nft_beside(INET_FORWARD, None, Beside::BridgeNfCall(false)), NONE),
    control("nft inet prerouting, routed", Group::Drop, Routed, nft(Place::Host, ("inet", "prerouting"), None), ALL),
    control("nft inet forward, routed", Group::Drop, Routed, nft(Place::Host, INET_FORWARD, None), ALL),
    control("nft inet postrouting, routed", Group::Drop, Routed, nft(Place::Host, ("inet", "postrouting"), None), ALL),
    control("conntrack: new from the peer is dropped", Group::Drop, Routed, Action::Drop(Rule::NewFromThePeer), ALL),
    control("tcx ingress", Group::Drop, Bridged, tcx(Place::Host, End::Sender, true), ALL),
    control("tcx egress", Group::Drop, Bridged, tcx(Place::Host, End::Receiver, false), ALL),
    control("nft netdev egress on the uplink", Group::Drop, Routed, nft(Place::Host, EGRESS, Some(End::Receiver)), ALL),

    control("nft netdev egress on the uplink, a port", Group::Drop, Switched, nft(Place::Host, EGRESS, Some(End::Uplink)), ALL),
    control("nft inet forward on the peer's host", Group::Drop, RoutedHosts, nft(Place::PeerHost, INET_FORWARD, None), ALL),
    control("nft netdev egress on the VXLAN device", Group::Drop, Vxlan, nft(Place::Host, EGRESS, Some(End::Vxlan)), ALL),
    control("tcx ingress on the peer's VXLAN device", Group::Drop, Vxlan, tcx(Place::PeerHost, End::Vxlan, true), ALL),
    control("nft inet output, UDP 4789", Group::Drop, Vxlan, taking(Taken::Encapsulating, Place::Host, ("inet", "output"), None), ALL),
    control("nft inet input, UDP 4789", Group::Drop, Vxlan, taking(Taken::Encapsulating, Place::PeerHost, ("inet", "input"), None), ALL),
    control("nft netdev egress on the uplink, UDP 4789", Group::Drop, VxlanIpv6, taking(Taken::Encapsulating, Place::Host, EGRESS, Some(End::Uplink)), ALL),
    control("nft netdev egress on the uplink, UDP 4791", Group::Drop, Vxlan, taking(Taken::Outer, Place::Host, EGRESS, Some(End::Uplink)), NONE),

    control("tbf towards the container", Group::Rate, Bridged, Action::Limit(Shaper::Tbf), ALL),
    control("htb towards the container", Group::Rate, Bridged, Action::Limit(Shaper::Htb), ALL),
    control("ingress redirected to an ifb with tbf", Group::Rate, Bridged, Action::Limit(Shaper::Ifb), ALL),
    control("htb on the uplink, two containers", Group::Rate, Routed, Action::Limit(Shaper::Uplink), ALL),
    control("nft limit rate over, drop", Group::Rate, Bridged, Action::Limit(Shaper::Policer), ALL),
    control("tbf with a queue shorter than a burst", Group::Rate, Bridged, Action::Limit(Shaper::ShortTbf), ALL),
    control("tbf on the uplink, a port", Group::Rate, Switched, Action::Limit(Shaper::On(End::Uplink)), ALL),
    control("tbf on the VXLAN device", Group::Rate, Vxlan, Action::Limit(Shaper::On(End::Vxlan)), ALL),
    control("htb on VXLAN's uplink, two containers", Group::Rate, Vxlan, Action::Limit(Shaper::Tunnel), ALL),

    control("DSCP set on the bridge", Group::Mark, Bridged, Action::Mark(Mark::Dscp), ALL),
    control("ECN CE set on the bridge", Group::Mark, Bridged, Action::Mark(Mark::Ce), ALL),
    control("ECN CE set between the hosts of VXLAN", Group::Mark, Vxlan, Action::Mark(Mark::OuterCe), ALL),
    control("TTL set on the router", Group::Mark, Routed, Action::Mark(Mark::Ttl), ALL),
    control("MTU of 1500 on a path of 9000", Group::Mark, Routed, Action::Mark(Mark::Mtu), ALL),

    control("ifb with nft netdev ingress", Group::Pair, Bridged, nft_beside(INGRESS, Some(End::Sender), Beside::Ifb), NONE),
    control("ifb with nft bridge forward", Group::Pair, Bridged, nft_beside(("bridge", "forward"), None, Beside::Ifb), ALL),

    control("own nft output", Group::Own, Bridged, nft(Place::Sender, ("inet", "output"), None), UDP_ONLY),
    control("own nft postrouting", Group::Own, Bridged, nft(Place::Sender, ("inet", "postrouting"), None), UDP_ONLY),
    control("own nft netdev egress", Group::Own, Bridged, nft(Place::Sender, EGRESS, Some(End::Own)), NOT_AFXDP),
    control("own tcx egress", Group::Own, Bridged, tcx(Place::Sender, End::Own, false), NOT_AFXDP),
    control("own tbf", Group::Own, Bridged, Action::Limit(Shaper::Own), NOT_AFXDP),
    control("own nft netdev ingress", Group::Own, Bridged, nft(Place::Receiver, INGRESS, Some(End::Own)), UDP_ONLY),
    control("own nft prerouting and input", Group::Own, Bridged, nft(Place::Receiver, ("inet", "input"), None), UDP_ONLY),
    control("own tcx ingress", Group::Own, Bridged, tcx(Place::Receiver, End::Own, true), UDP_ONLY),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_46_controls_with_a_name_each() {
        let of = |group| CONTROLS.iter().filter(|control| control.group == group).count();
        let groups = [Group::Drop, Group::Rate, Group::Mark, Group::Pair, Group::Own];
        assert_eq!(groups.map(of), [22, 9, 5, 2, 8]);
        let mut names = CONTROLS.map(|control| control.name);
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]));
    }

    /// Four kinds of controls may be bypassed, and `udp` only by two of them.
    #[test]
    fn only_these_controls_may_be_bypassed() {
        for control in CONTROLS {
            let idle = matches!(
                control.action,
                Action::Drop(Rule::Nft { beside: Beside::BridgeNfCall(false), .. })
            );
            let shadowed = matches!(
                control.action,
                Action::Drop(Rule::Nft { beside: Beside::Ifb, chain: INGRESS, .. })
            );
            let inside =
                matches!(control.action, Action::Drop(Rule::Nft { taken: Taken::Outer, .. }));
            let name = control.name;
            if idle || shadowed || inside {
                assert_eq!(control.expected, NONE, "{name}");
            } else if control.group == Group::Own {
                assert_eq!((control.expected[0], control.expected[2]), (Binds, Bypassed), "{name}");
            } else {
                assert_eq!(control.expected, ALL, "{name}");
            }
        }
    }
}
