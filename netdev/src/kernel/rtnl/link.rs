//! Links and addresses: `RTM_GETLINK`, `RTM_GETADDR`.

use std::cmp::Reverse;
use std::io;
use std::net::IpAddr;

use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkInfo, LinkMessage, LinkXdp};

use super::Rtnl;
use super::query::Query;
use super::socket::Attributes;
use crate::kernel::interface::{Interface, Unusable, WhyUnusable};

const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
const MAC_LEN: usize = 6;
/// Length of `struct ifinfomsg` (linux/rtnetlink.h).
const HEADER_LEN: usize = 16;
/// `RTEXT_FILTER_SKIP_STATS`: the kernel does not have to sum up the counters of every core.
const SKIP_STATS: u32 = 1 << 3;

/// The properties of a link without its addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Link {
    /// Interface index.
    pub index: u32,
    /// Name, as in `ip link`.
    pub name: String,
    /// MTU in bytes, IP header included.
    pub mtu: u32,
    /// Ethernet address; zero if the link has no address of six bytes.
    pub mac: [u8; 6],
    /// Administratively up, and with carrier.
    pub up: bool,
    /// The loopback interface.
    pub loopback: bool,
    /// Whether peers on the link have addresses of its own that the kernel asks for.
    pub has_neighbours: bool,
    /// Whether frames carry Ethernet headers (`ARPHRD_ETHER`, `ARPHRD_LOOPBACK`).
    pub ethernet: bool,
    /// Kind of a virtual link (`veth`, `bridge`, `tun`, …); `None` for hardware and loopback.
    pub kind: Option<String>,
    /// Index of the bridge, bond or VRF that the link belongs to.
    pub master: Option<u32>,
    /// The most segments that the link accepts in one super-packet (`IFLA_GSO_MAX_SEGS`).
    pub gso_segs_max: u32,
    /// The longest super-packet in bytes (`IFLA_GSO_MAX_SIZE`).
    pub gso_bytes_max: u32,
    /// Receive queues.
    pub rx_queues: u32,
    /// Transmit queues.
    pub tx_queues: u32,
    /// Whether an XDP program is attached, in any mode.
    pub xdp_attached: bool,
}

impl Rtnl {
    /// All links of the namespace, in index order. Error: the kernel's error.
    pub(crate) fn links(&mut self) -> io::Result<Vec<Link>> {
        let found: Vec<LinkMessage> =
            self.ask(RTM_GETLINK, RTM_NEWLINK, true, &LinkMessage::default())?;
        let mut links: Vec<Link> = found.iter().map(link_from).collect();
        links.sort_by_key(|link| link.index);
        links.dedup_by_key(|link| link.index);
        Ok(links)
    }

    /// One link. Error: `ENODEV` if there is no such link.
    pub(crate) fn link(&mut self, index: u32) -> io::Result<Link> {
        let mut query = LinkMessage::default();
        query.header.index = index;
        let found: Vec<LinkMessage> = self.ask(RTM_GETLINK, RTM_NEWLINK, false, &query)?;
        found.first().map(link_from).ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV))
    }

    /// The current Ethernet address of a link; zero if it has no address of six bytes. Does not
    /// allocate. Error: `ENODEV` if there is no such link.
    pub(crate) fn link_mac(&mut self, index: u32) -> io::Result<[u8; MAC_LEN]> {
        let mut header = [0; HEADER_LEN];
        header[4..8].copy_from_slice(&index.to_ne_bytes());
        let query = Query::new(&header).attribute(libc::IFLA_EXT_MASK, &SKIP_STATS.to_ne_bytes());
        self.ask_one(RTM_GETLINK, RTM_NEWLINK, &query, |message| {
            let mac =
                Attributes(message.get(HEADER_LEN..)?).find(|(k, _)| *k == libc::IFLA_ADDRESS);
            Some(mac.and_then(|(_, bytes)| bytes.try_into().ok()).unwrap_or_default())
        })
    }

    /// All interfaces with their addresses, in index order.
    ///
    /// An IPv6 address is left out while duplicate address detection runs (unless optimistic) and
    /// after it failed: such an address cannot send. Error: the kernel's error.
    pub(crate) fn interfaces(&mut self) -> io::Result<Vec<Interface>> {
        let links = self.links()?;
        let addresses = self.addresses()?;
        Ok(links.into_iter().map(|link| with_addresses(link, &addresses)).collect())
    }

    /// The addresses that [`interfaces`](Self::interfaces) leaves out. Error: the kernel's error.
    pub(crate) fn unusable(&mut self) -> io::Result<Vec<Unusable>> {
        let links = self.links()?;
        let found = self.addresses()?;
        let unusable = |message: &AddressMessage| {
            let (address, _, state) = address_from(message)?;
            let link = links.iter().find(|link| link.index == message.header.index)?;
            let why = match state {
                State::Usable => return None,
                State::Duplicate => WhyUnusable::Duplicate,
                State::Tentative if link.up => WhyUnusable::Tentative,
                State::Tentative => WhyUnusable::LinkDown,
            };
            Some(Unusable { address, interface: link.name.clone(), why })
        };
        Ok(found.iter().filter_map(unusable).collect())
    }

    fn addresses(&mut self) -> io::Result<Vec<AddressMessage>> {
        self.ask(RTM_GETADDR, RTM_NEWADDR, true, &AddressMessage::default())
    }
}

/// The flags of a link whose packets have no Ethernet address to ask for.
const WITHOUT_NEIGHBOURS: LinkFlags =
    LinkFlags::Loopback.union(LinkFlags::Noarp).union(LinkFlags::Pointopoint);

fn link_from(message: &LinkMessage) -> Link {
    let flags = message.header.flags;
    let link_type = u16::from(message.header.link_layer_type);
    let mut link = Link {
        index: message.header.index,
        name: String::new(),
        mtu: 0,
        mac: [0; 6],
        up: flags.contains(LinkFlags::Up | LinkFlags::LowerUp),
        loopback: flags.contains(LinkFlags::Loopback),
        has_neighbours: !flags.intersects(WITHOUT_NEIGHBOURS),
        ethernet: matches!(link_type, libc::ARPHRD_ETHER | libc::ARPHRD_LOOPBACK),
        kind: None,
        master: None,
        gso_segs_max: 0xffff,
        gso_bytes_max: 0x1_0000,
        rx_queues: 1,
        tx_queues: 1,
        xdp_attached: false,
    };
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name.clone_from(name),
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            LinkAttribute::Address(bytes) if bytes.len() == MAC_LEN => {
                link.mac.copy_from_slice(bytes);
            }
            LinkAttribute::Controller(master) => link.master = Some(*master).filter(|it| *it != 0),
            LinkAttribute::GsoMaxSegs(n) => link.gso_segs_max = *n,
            LinkAttribute::GsoMaxSize(n) => link.gso_bytes_max = *n,
            LinkAttribute::NumRxQueues(n) => link.rx_queues = *n,
            LinkAttribute::NumTxQueues(n) => link.tx_queues = *n,
            LinkAttribute::LinkInfo(infos) => link.kind = kind_of(infos),
            LinkAttribute::Xdp(xdp) => link.xdp_attached = xdp.iter().any(is_attached),
            _ => {}
        }
    }
    link
}

fn kind_of(infos: &[LinkInfo]) -> Option<String> {
    infos.iter().find_map(|info| match info {
        LinkInfo::Kind(kind) => Some(kind.to_string()),
        _ => None,
    })
}

fn is_attached(xdp: &LinkXdp) -> bool {
    use netlink_packet_route::link::XdpAttached;
    matches!(xdp, LinkXdp::Attached(mode) if *mode != XdpAttached::None)
}

fn with_addresses(link: Link, all: &[AddressMessage]) -> Interface {
    let mut addresses: Vec<(IpAddr, u8)> =
        all.iter().filter(|a| a.header.index == link.index).filter_map(usable_from).collect();
    // Stable: within a class the kernel's order, which is the order of creation for IPv4.
    addresses.sort_by_key(|(address, _)| gid_class(address));
    let mut seen = Vec::with_capacity(addresses.len());
    addresses.retain(|(address, _)| {
        let new = !seen.contains(address);
        seen.push(*address);
        new
    });
    Interface {
        name: link.name,
        index: link.index,
        mtu: link.mtu,
        mac: link.mac,
        up: link.up,
        loopback: link.loopback,
        addresses,
    }
}

/// IPv4 sorts first, link-local IPv6 last.
fn gid_class(address: &IpAddr) -> Reverse<u8> {
    Reverse(match address {
        IpAddr::V4(_) => 2,
        IpAddr::V6(a) if a.is_unicast_link_local() => 0,
        IpAddr::V6(_) => 1,
    })
}

/// What duplicate address detection says of an address (RFC 4862).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Usable,
    Tentative,
    Duplicate,
}

fn usable_from(message: &AddressMessage) -> Option<(IpAddr, u8)> {
    let (address, prefix_len, state) = address_from(message)?;
    (state == State::Usable).then_some((address, prefix_len))
}

fn address_from(message: &AddressMessage) -> Option<(IpAddr, u8, State)> {
    let mut flags = u32::from(message.header.flags.bits());
    let (mut local, mut address) = (None, None);
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Local(a) => local = Some(*a),
            // On a point-to-point link this is the peer's address; then IFA_LOCAL exists too.
            AddressAttribute::Address(a) => address = Some(*a),
            AddressAttribute::Flags(f) => flags = f.bits(),
            _ => {}
        }
    }
    let flags = AddressFlags::from_bits_retain(flags);
    // An address whose detection failed stays tentative.
    let state = if flags.contains(AddressFlags::Dadfailed) {
        State::Duplicate
    } else if flags.contains(AddressFlags::Tentative) && !flags.contains(AddressFlags::Optimistic) {
        State::Tentative
    } else {
        State::Usable
    };
    Some((local.or(address)?, message.header.prefix_len, state))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_what_its_attributes_say() {
        let mut message = LinkMessage::default();
        message.header.index = 7;
        message.attributes = vec![
            LinkAttribute::IfName("v7".into()),
            LinkAttribute::Mtu(4200),
            LinkAttribute::Address(vec![1, 2, 3, 4, 5, 6]),
            LinkAttribute::GsoMaxSegs(11),
            LinkAttribute::GsoMaxSize(12),
            LinkAttribute::NumRxQueues(13),
            LinkAttribute::NumTxQueues(14),
        ];
        let link = link_from(&message);
        assert_eq!((link.index, link.name.as_str(), link.mtu), (7, "v7", 4200));
        assert_eq!(link.mac, [1, 2, 3, 4, 5, 6]);
        assert_eq!((link.gso_segs_max, link.gso_bytes_max), (11, 12));
        assert_eq!((link.rx_queues, link.tx_queues), (13, 14));
        // An address of another kind of link is none of ours.
        message.attributes = vec![LinkAttribute::Address(vec![1; 20])];
        assert_eq!(link_from(&message).mac, [0; 6]);
    }

    #[test]
    fn gid_order_is_ipv4_then_global_then_link_local() {
        let mut all: Vec<IpAddr> = ["fe80::1", "2001:db8::1", "10.0.0.1", "fd00::1", "10.0.0.2"]
            .iter()
            .map(|a| a.parse().expect("an address"))
            .collect();
        all.sort_by_key(gid_class);
        let names: Vec<String> = all.iter().map(ToString::to_string).collect();
        assert_eq!(names, ["10.0.0.1", "10.0.0.2", "2001:db8::1", "fd00::1", "fe80::1"]);
    }

    #[test]
    fn tentative_and_failed_addresses_are_no_gids() {
        let message = |flags: AddressFlags| {
            let mut m = AddressMessage::default();
            m.header.prefix_len = 64;
            m.attributes.push(AddressAttribute::Address("fd00::1".parse().expect("address")));
            m.attributes.push(AddressAttribute::Flags(flags));
            m
        };
        let state = |flags| address_from(&message(flags)).expect("an address").2;
        assert_eq!(state(AddressFlags::Permanent), State::Usable);
        assert_eq!(state(AddressFlags::Tentative), State::Tentative);
        assert_eq!(state(AddressFlags::Tentative | AddressFlags::Optimistic), State::Usable);
        assert_eq!(state(AddressFlags::Dadfailed), State::Duplicate);
        assert_eq!(state(AddressFlags::Tentative | AddressFlags::Dadfailed), State::Duplicate);
        let usable = |flags| usable_from(&message(flags)).is_some();
        assert!(usable(AddressFlags::Permanent) && !usable(AddressFlags::Tentative));
        assert!(!usable(AddressFlags::Dadfailed));
    }
}
