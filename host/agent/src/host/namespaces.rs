//! Links and addresses of other network namespaces, by the numbers that the own one has for them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd as _};

use rocinante_netdev::for_agent::rtnl::query::{Query, ip, text, word};
use rocinante_netdev::for_agent::rtnl::socket::{Attributes, NetlinkSocket};

const RTM_NEWNSID: u16 = 88;
const RTM_GETNSID: u16 = 90;
// Of `linux/net_namespace.h`.
const NETNSA_NSID: u16 = 1;
const NETNSA_FD: u16 = 3;
// Of `linux/if_link.h` and `linux/if_addr.h`.
const IFLA_IFNAME: u16 = 3;
const IFLA_TARGET_NETNSID: u16 = 46;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_TARGET_NETNSID: u16 = 10;
const IFLA_INFO_KIND: u16 = 1;
/// Lengths of `struct ifinfomsg` and of `struct ifaddrmsg`.
const LINK_HEADER: usize = 16;
const ADDRESS_HEADER: usize = 8;

/// The number that the own network namespace has for another. It may be another's when that one
/// has gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct NsId(pub i32);

/// The other end of a veth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Its index.
    pub index: u32,
    /// The namespace it is in; `None` for the one that the link itself is in.
    pub namespace: Option<NsId>,
}

/// A link, as far as an agent cares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostLink {
    /// Its index.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Its kind (`veth`, `macvlan`, …); empty for hardware.
    pub kind: String,
    /// Its Ethernet address; zero if it has none.
    pub mac: [u8; 6],
    /// Whether it is a loopback interface.
    pub is_loopback: bool,
    /// The link of which it is an end, or on which it stands.
    pub peer: Option<Peer>,
    /// The longest packet that it takes, in bytes.
    pub mtu: u32,
    /// The index of the bridge of which it is a port, or of another such link.
    pub master: Option<u32>,
    /// Whether it sends by a namespace that is not the one it is in.
    pub is_of_another_namespace: bool,
}

/// Asks the kernel about other namespaces.
#[derive(Debug)]
pub struct Namespaces {
    socket: NetlinkSocket,
}

impl Namespaces {
    /// Asks in the calling thread's network namespace.
    ///
    /// # Errors
    /// No descriptor left, or Linux before 4.20.
    pub fn open() -> io::Result<Self> {
        Ok(Self { socket: NetlinkSocket::open_strict(netlink_sys::protocols::NETLINK_ROUTE)? })
    }

    /// The number for the namespace that a descriptor of nsfs names. The kernel chooses one if it
    /// has none yet. Error: `EINVAL` for another descriptor, `EPERM` without `CAP_NET_ADMIN`.
    pub fn id(&mut self, namespace: impl AsFd) -> io::Result<NsId> {
        if let Some(id) = self.known_id(&namespace)? {
            return Ok(id);
        }
        let choose = ask_for(&namespace).attribute(NETNSA_NSID, &(-1_i32).to_ne_bytes());
        match self.socket.request(RTM_NEWNSID, false, choose.bytes(), &mut |_, _| {}) {
            // Chosen meanwhile.
            Err(e) if e.raw_os_error() == Some(libc::EEXIST) => {}
            chosen => chosen?,
        }
        self.known_id(&namespace)?.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
    }

    /// The number for that namespace, if there is one yet. The kernel chooses one for the other end
    /// of a veth. Error: as [`id`](Self::id).
    pub fn known_id(&mut self, namespace: impl AsFd) -> io::Result<Option<NsId>> {
        self.ask_id(&ask_for(namespace))
    }

    /// A link of a namespace (`None`: the own) by its index. Error: `ENODEV` if there is none;
    /// `EINVAL` if no namespace has the number.
    pub fn link(&mut self, namespace: Option<NsId>, index: u32) -> io::Result<HostLink> {
        let mut header = [0; LINK_HEADER];
        header[4..8].copy_from_slice(&index.to_ne_bytes());
        let mut found = None;
        self.ask_links(namespace, &header, false, &mut |link| found = Some(link))?;
        found.ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV))
    }

    /// All links of a namespace (`None`: the own). Error: `EINVAL` if no namespace has the number.
    pub fn links(&mut self, namespace: Option<NsId>) -> io::Result<Vec<HostLink>> {
        // The kernel is asked again if they changed meanwhile.
        let mut links = BTreeMap::new();
        let mut each = |link: HostLink| drop(links.insert(link.index, link));
        self.ask_links(namespace, &[0; LINK_HEADER], true, &mut each)?;
        Ok(links.into_values().collect())
    }

    /// The addresses of a link of a namespace, also those that are being checked for duplicates.
    /// Error: as [`link`](Self::link).
    pub fn addresses(&mut self, namespace: NsId, index: u32) -> io::Result<BTreeSet<IpAddr>> {
        let mut addresses = BTreeSet::new();
        for family in [libc::AF_INET, libc::AF_INET6] {
            let mut header = [0; ADDRESS_HEADER];
            header[0] = family as u8;
            header[4..].copy_from_slice(&index.to_ne_bytes());
            let id = namespace.0.to_ne_bytes();
            let ask = Query::new(&header).attribute(IFA_TARGET_NETNSID, &id);
            let asked =
                self.socket.request(libc::RTM_GETADDR, true, ask.bytes(), &mut |kind, body| {
                    let of_it = body.get(4..8) == Some(&index.to_ne_bytes());
                    if kind == libc::RTM_NEWADDR && of_it {
                        addresses.extend(address_from(body));
                    }
                });
            match asked {
                // The kernel has no IPv6.
                Err(e)
                    if family == libc::AF_INET6 && e.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
                asked => asked?,
            }
        }
        Ok(addresses)
    }

    /// Gives a link of the own namespace this MTU. Error: `ENODEV` if there is none; `EINVAL` if it
    /// cannot have that.
    pub fn set_mtu(&mut self, index: u32, mtu: u32) -> io::Result<()> {
        let mut header = [0; LINK_HEADER];
        header[4..8].copy_from_slice(&index.to_ne_bytes());
        let ask = Query::new(&header).attribute(libc::IFLA_MTU, &mtu.to_ne_bytes());
        self.socket.request_one(libc::RTM_NEWLINK, 0, ask.bytes(), &mut |_, _| {})
    }

    fn ask_links(
        &mut self,
        namespace: Option<NsId>,
        header: &[u8],
        all: bool,
        each: &mut dyn FnMut(HostLink),
    ) -> io::Result<()> {
        let mut ask = Query::new(header);
        if let Some(NsId(id)) = namespace {
            ask = ask.attribute(IFLA_TARGET_NETNSID, &id.to_ne_bytes());
        }
        self.socket.request(libc::RTM_GETLINK, all, ask.bytes(), &mut |kind, body| {
            if kind == libc::RTM_NEWLINK
                && let Some(link) = link_from(body)
            {
                each(link);
            }
        })
    }

    fn ask_id(&mut self, ask: &Query) -> io::Result<Option<NsId>> {
        let mut id = None;
        self.socket.request(RTM_GETNSID, false, ask.bytes(), &mut |_, body| {
            let attributes = Attributes(body.get(4..).unwrap_or(&[]));
            id = attributes.filter(|(kind, _)| *kind == NETNSA_NSID).find_map(|(_, v)| word(v));
        })?;
        Ok(id.map(u32::cast_signed).filter(|id| *id >= 0).map(NsId))
    }
}

fn ask_for(namespace: impl AsFd) -> Query {
    let fd = namespace.as_fd().as_raw_fd().cast_unsigned();
    Query::new(&[0; 4]).attribute(NETNSA_FD, &fd.to_ne_bytes())
}

fn link_from(message: &[u8]) -> Option<HostLink> {
    let mut link = HostLink {
        index: word(message.get(4..8)?)?,
        name: String::new(),
        kind: String::new(),
        mac: [0; 6],
        is_loopback: word(message.get(8..12)?)? & libc::IFF_LOOPBACK as u32 != 0,
        peer: None,
        mtu: 0,
        master: None,
        is_of_another_namespace: false,
    };
    let (mut peer, mut namespace) = (None, None);
    for (kind, value) in Attributes(message.get(LINK_HEADER..)?) {
        match kind {
            IFLA_IFNAME => link.name = text(value),
            libc::IFLA_ADDRESS => link.mac = value.try_into().unwrap_or_default(),
            libc::IFLA_MTU => link.mtu = word(value).unwrap_or_default(),
            libc::IFLA_MASTER => link.master = word(value),
            libc::IFLA_LINK => peer = word(value),
            libc::IFLA_LINK_NETNSID => namespace = word(value).map(u32::cast_signed),
            libc::IFLA_LINKINFO => {
                let kind = Attributes(value).find(|(kind, _)| *kind == IFLA_INFO_KIND);
                link.kind = kind.map(|(_, kind)| text(kind)).unwrap_or_default();
            }
            _ => {}
        }
    }
    link.is_of_another_namespace = namespace.is_some();
    link.peer = peer
        .filter(|index| *index != 0)
        .map(|index| Peer { index, namespace: namespace.map(NsId) });
    Some(link)
}

fn address_from(message: &[u8]) -> Option<IpAddr> {
    let (mut local, mut address) = (None, None);
    for (kind, value) in Attributes(message.get(ADDRESS_HEADER..)?) {
        match kind {
            IFA_LOCAL => local = ip(value),
            // On a point-to-point link this is the peer's; then there is a local one too.
            IFA_ADDRESS => address = ip(value),
            _ => {}
        }
    }
    local.or(address)
}
