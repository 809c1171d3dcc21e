//! The program on a host's end, with the addresses that it lets through: attached, found again,
//! changed.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::OnceLock;
use std::thread;

use nix::sched::{CloneFlags, unshare};
use rocinante_netdev::for_agent::bpf::{Described, Map, Program};

use super::gate::{described, or_gone};
use super::program::{self, KEY_LEN};

/// Names of the program and of its maps: by these an agent knows its own.
pub(super) const PROGRAM: &str = "roce_sources";
const OWN: &str = "roce_own";
const DROPPED: &str = "roce_dropped";

/// The most addresses of a container that may send.
pub const ADDRESSES_MAX: usize = 100;
/// Room for them and the Ethernet address alone, twice: during a change both are there.
const KEYS_MAX: u32 = 2 * (ADDRESSES_MAX as u32 + 1);

/// Why a frame was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum Reason {
    /// The Ethernet source is not the container's.
    EthernetSource = 0,
    /// Neither IPv4, IPv6 nor ARP, or with a VLAN tag.
    EtherType = 1,
    /// The IPv4 source is not the container's.
    Ipv4 = 2,
    /// The IPv6 source is not the container's.
    Ipv6 = 3,
    /// The sender in an ARP message is not the container.
    Arp = 4,
    /// A message of neighbour discovery is about another's address, or a router's.
    NeighbourDiscovery = 5,
    /// Cut short, of a wrong version, or with more headers than are followed.
    Malformed = 6,
    /// RoCEv2 of a container that is closed to it.
    Unclaimed = 7,
}

impl Reason {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::EthernetSource,
        Self::EtherType,
        Self::Ipv4,
        Self::Ipv6,
        Self::Arp,
        Self::NeighbourDiscovery,
        Self::Malformed,
        Self::Unclaimed,
    ];
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::EthernetSource => "ethernet_source",
            Self::EtherType => "ether_type",
            Self::Ipv4 => "ipv4",
            Self::Ipv6 => "ipv6",
            Self::Arp => "arp",
            Self::NeighbourDiscovery => "neighbour_discovery",
            Self::Malformed => "malformed",
            Self::Unclaimed => "unclaimed",
        })
    }
}

/// The addresses that a container may send from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sources {
    /// Its Ethernet address.
    pub mac: [u8; 6],
    /// Its IP addresses. Those beyond [`ADDRESSES_MAX`] cannot send.
    pub addresses: BTreeSet<IpAddr>,
    /// Whether none of them sends RoCEv2.
    pub is_closed: bool,
}

impl Sources {
    /// The keys of the map. Addresses of no host are left out.
    fn keys(&self) -> BTreeSet<Vec<u8>> {
        let is_source = |a: &&IpAddr| !a.is_unspecified() && !a.is_multicast();
        let addresses = self.addresses.iter().filter(is_source).take(ADDRESSES_MAX);
        let keys = addresses.map(|address| program::key(*address, self.mac).to_vec());
        keys.chain([program::mac_key(self.mac).to_vec()]).collect()
    }
}

/// What [`SourceFilter::attach`] found at the interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attached {
    /// Nothing of ours: it is new.
    New,
    /// Our program, which stays.
    Found,
    /// Our program, but another version, broken, twice, or not the first: put in order.
    Mended,
}

/// The program on a host's end. It stays there when this is dropped and when the process ends,
/// until it is detached or the interface goes.
#[derive(Debug)]
pub struct SourceFilter {
    ifindex: u32,
    pub(super) program: Program,
    own: Map,
    dropped: Map,
}

impl SourceFilter {
    /// Makes the program the first at the tcx ingress of the interface with this index, in the
    /// calling thread's network namespace, and lets `sources` through. A program of ours that is
    /// there already stays, with its counters. At no moment is there none. Error: `EINVAL` without
    /// tcx; `EPERM` without `CAP_BPF`, `CAP_NET_ADMIN` and `CAP_SYS_ADMIN`; `ENODEV` without such
    /// an interface.
    pub fn attach(ifindex: u32, sources: &Sources) -> io::Result<(Self, Attached)> {
        let tag = Self::tag()?;
        let mut ours = Vec::new();
        for (place, program) in Program::at_ingress(ifindex)?.into_iter().enumerate() {
            let described = program.described()?;
            if described.name == PROGRAM {
                let is_sound = place == 0 && described.tag == tag;
                ours.push((is_sound, Self::of(ifindex, program, described)));
            }
        }
        let is_alone = ours.len() == 1;
        let mut old = Vec::new();
        for (is_sound, filter) in ours {
            match filter {
                Ok(filter) if is_alone && is_sound => {
                    filter.allow(sources)?;
                    return Ok((filter, Attached::Found));
                }
                Ok(filter) => old.push(filter.program),
                Err(program) => old.push(program),
            }
        }
        let fresh = Self::load(ifindex)?;
        fresh.allow(sources)?;
        // The new one is there before the old ones go.
        fresh.program.attach_first(ifindex, None)?;
        let mended = !old.is_empty();
        for program in old {
            or_gone(program.detach(ifindex))?;
        }
        Ok((fresh, if mended { Attached::Mended } else { Attached::New }))
    }

    /// Attaches the program to loopback in a network namespace of its own, which ends with the
    /// call. Where no namespace can be made, nothing is tried. Error: as [`attach`](Self::attach).
    pub fn try_apart() -> io::Result<()> {
        const LOOPBACK: u32 = 1;
        let attach = || {
            if unshare(CloneFlags::CLONE_NEWNET).is_err() {
                return Ok(());
            }
            Self::attach(LOOPBACK, &Sources::default()).map(drop)
        };
        let tried = thread::scope(|scope| scope.spawn(attach).join());
        tried.unwrap_or_else(|_| Err(io::Error::other("the thread ended")))
    }

    /// The program of ours on this interface, if there is one: none where the kernel has no tcx, or
    /// if the interface has gone. Error: as [`attach`](Self::attach).
    pub fn find(ifindex: u32) -> io::Result<Option<Self>> {
        let programs = described(Program::at_ingress(ifindex))?.into_iter();
        let named = programs.filter(|(_, described)| described.name == PROGRAM);
        let mut ours = named.filter_map(|(it, described)| Self::of(ifindex, it, described).ok());
        Ok(ours.next())
    }

    /// Lets these and no others through. Error: the error of bpf(2).
    pub fn allow(&self, sources: &Sources) -> io::Result<()> {
        let (wanted, present) = (sources.keys(), self.present()?);
        let surplus: Vec<_> = present.difference(&wanted).cloned().collect();
        let value = if sources.is_closed { program::CLOSED } else { program::OPEN };
        for key in wanted {
            // It may have gone since: another thread follows the same container.
            if !present.contains(&key) || self.own.value(&key).ok() != Some(value) {
                self.own.set(&key, value)?;
            }
        }
        for key in surplus {
            or_gone(self.own.remove(&key))?;
        }
        Ok(())
    }

    /// The addresses that it lets through; `None` if others changed its map so that it holds no
    /// [`Sources`]. Error: the error of bpf(2).
    pub fn sources(&self) -> io::Result<Option<Sources>> {
        let mut macs = BTreeSet::new();
        let mut addresses = BTreeSet::new();
        let mut is_closed = false;
        for key in self.present()? {
            let Some((address, mac)) = program::parse_key(&key) else { return Ok(None) };
            is_closed |= self.own.value(&key).is_ok_and(|value| value == program::CLOSED);
            macs.insert(mac);
            addresses.extend(address);
        }
        let mut macs = macs.into_iter();
        let (first, second) = (macs.next(), macs.next());
        Ok(first.filter(|_| second.is_none()).map(|mac| Sources { mac, addresses, is_closed }))
    }

    /// The frames dropped so far for this reason. Error: the error of bpf(2).
    pub fn dropped(&self, reason: Reason) -> io::Result<u64> {
        match self.dropped.count(reason as u32) {
            // An older agent's program, which has fewer reasons.
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(0),
            count => count,
        }
    }

    /// The frames dropped so far for each reason, in the order of [`Reason::ALL`]. Error: the error
    /// of bpf(2).
    pub fn all_dropped(&self) -> io::Result<[u64; Reason::ALL.len()]> {
        let mut all = [0; Reason::ALL.len()];
        for (count, reason) in all.iter_mut().zip(Reason::ALL) {
            *count = self.dropped(reason)?;
        }
        Ok(all)
    }

    /// The program's id. Error: the error of bpf(2).
    pub fn id(&self) -> io::Result<u32> {
        Ok(self.program.described()?.id)
    }

    /// Takes the program off the interface. Error: `ENOENT` if it is not there any more.
    pub fn detach(self) -> io::Result<()> {
        self.program.detach(self.ifindex)
    }

    /// Takes each program of ours off an interface: those of the name that have the same
    /// instructions, or maps of the same kinds. None are there if the interface has gone. Error: as
    /// [`attach`](Self::attach).
    pub fn detach_all(ifindex: u32) -> io::Result<()> {
        let tag = Self::tag()?;
        for (program, described) in described(Program::at_ingress(ifindex))? {
            let (is_named, is_same) = (described.name == PROGRAM, described.tag == tag);
            match Self::of(ifindex, program, described) {
                Ok(filter) if is_named => or_gone(filter.program.detach(ifindex))?,
                Err(program) if is_named && is_same => or_gone(program.detach(ifindex))?,
                _ => {}
            }
        }
        Ok(())
    }

    /// A program that is attached nowhere, and lets `sources` through.
    #[cfg(test)]
    pub(super) fn loose(sources: &Sources) -> io::Result<Self> {
        let filter = Self::load(0)?;
        filter.allow(sources)?;
        Ok(filter)
    }

    /// The hash of the program's instructions, which is the same for each.
    fn tag() -> io::Result<[u8; 8]> {
        static TAG: OnceLock<[u8; 8]> = OnceLock::new();
        match TAG.get() {
            Some(tag) => Ok(*tag),
            None => {
                let tag = Self::load(0)?.program.described()?.tag;
                Ok(*TAG.get_or_init(|| tag))
            }
        }
    }

    fn load(ifindex: u32) -> io::Result<Self> {
        let own = Map::hash(OWN, KEY_LEN, KEYS_MAX)?;
        let dropped = Map::counters(DROPPED, Reason::ALL.len() as u32)?;
        let code = program::program(&own, &dropped);
        let program = Program::load_classifier(PROGRAM, &code)?;
        Ok(Self { ifindex, program, own, dropped })
    }

    /// The program with its maps, or the program if its maps are not of our kind.
    fn of(ifindex: u32, program: Program, described: Described) -> Result<Self, Program> {
        let (mut own, mut dropped) = (None, None);
        for (name, map) in described.maps {
            match name.as_str() {
                OWN if map.has_sizes(KEY_LEN, size_of::<u32>()) => own = Some(map),
                DROPPED if map.has_sizes(size_of::<u32>(), size_of::<u64>()) => {
                    dropped = Some(map);
                }
                _ => {}
            }
        }
        match (own, dropped) {
            (Some(own), Some(dropped)) => Ok(Self { ifindex, program, own, dropped }),
            _ => Err(program),
        }
    }

    fn present(&self) -> io::Result<BTreeSet<Vec<u8>>> {
        Ok(self.own.keys()?.into_iter().collect())
    }
}
