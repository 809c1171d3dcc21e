//! The paths of a port and the sockets that they send from.

use std::io;
use std::net::IpAddr;
use std::time::Instant;

use super::rings::{RingId, Rings};
use super::sockets::{self, Home, Leaving, Options};
use super::sys::{Dest, Socket};
use crate::ROCE_PORT;
use crate::kernel::interface::Interface;
use crate::kernel::recent::Recent;
use crate::kernel::worded::worded;
use crate::port::contract::{Path, PathId, PathSpec};
use crate::port::error::{not_an_address_of_the_port, two_families};
use crate::tuning::udp::{BULK_RUNS, IDLE_MAX, SENDERS_MAX};

/// The port's data of a path.
pub(super) struct UdpPath {
    pub(super) dest: Dest,
    /// Index of the socket that sends for it.
    pub(super) socket: usize,
    pub(super) v6: bool,
    /// The most datagrams per message; 1 once the kernel refused to segment here.
    pub(super) segments_max: u16,
    /// The ring that the next runs are in, and how many.
    pub(super) ring: Option<(RingId, u8)>,
    /// Whether each datagram names the port's interface, because the socket is not bound to it.
    names_interface: bool,
    /// Whether its peer is an address of this machine.
    loops: bool,
    live: bool,
}

impl UdpPath {
    /// Whether it has no ring, or soon has none any more.
    pub(super) fn wants_ring(&self, rings: &Rings) -> bool {
        !self.ring.is_some_and(|(ring, runs)| runs > BULK_RUNS / 2 && rings.has(ring))
    }

    /// The ring that the next run is in.
    pub(super) fn ring(&self) -> Option<RingId> {
        self.ring.map(|(ring, _)| ring)
    }

    /// A run of its ring left.
    pub(super) fn bulk_run_left(&mut self) {
        self.ring = self.ring.filter(|(_, runs)| *runs > 1).map(|(ring, runs)| (ring, runs - 1));
    }
}

/// A socket to send from.
struct SenderSocket {
    socket: Socket,
    local: IpAddr,
    /// Whether its paths leave by the port's interface, and whether it is bound to that.
    by_port: bool,
    is_bound: bool,
    /// The port that paths asked for; differs from `port` if that was taken.
    wanted: u16,
    port: u16,
    /// Paths that use it. The sockets of the own addresses stay open without any.
    paths: usize,
}

/// All paths and all sockets.
pub(super) struct Paths {
    iface: Interface,
    home: Home,
    segments_max: u16,
    /// Sockets of the own addresses first, in their order; these are never `None`.
    senders: Vec<Option<SenderSocket>>,
    own: usize,
    entries: Vec<UdpPath>,
    /// Removed paths that may still have datagrams waiting.
    retired: Vec<PathId>,
    free: Vec<PathId>,
    ttl_default: [u8; 2],
    /// Recent route checks: from, to, TOS.
    checked: Recent<(IpAddr, IpAddr, u8), Leaving>,
}

impl Paths {
    pub(super) fn new(
        iface: &Interface,
        home: Home,
        addresses: &[IpAddr],
        own: Vec<Socket>,
        segments_max: u16,
    ) -> Self {
        let mut ttl_default = [0; 2];
        for (local, socket) in addresses.iter().zip(&own) {
            let v6 = local.is_ipv6();
            ttl_default[usize::from(v6)] = sockets::ttl_default(socket, v6);
        }
        let sender = |(socket, &local)| {
            let (wanted, port) = (ROCE_PORT, ROCE_PORT);
            Some(SenderSocket {
                socket,
                local,
                by_port: false,
                is_bound: false,
                wanted,
                port,
                paths: 0,
            })
        };
        Self {
            iface: iface.clone(),
            home,
            segments_max,
            own: own.len(),
            senders: own.into_iter().zip(addresses).map(sender).collect(),
            entries: Vec::new(),
            retired: Vec::new(),
            free: Vec::new(),
            ttl_default,
            checked: Recent::default(),
        }
    }

    pub(super) fn add(&mut self, spec: &PathSpec, options: Options) -> io::Result<Path> {
        let v6 = spec.local.is_ipv6();
        if !self.own_senders().any(|s| s.local == spec.local) {
            return Err(not_an_address_of_the_port(spec));
        }
        if v6 != spec.remote.is_ipv6() {
            return Err(two_families(spec));
        }
        let leaving = self.leaving(spec)?;
        let by_port = leaving == Leaving::ByPort;
        let socket = self.sender_for(spec, by_port, options)?;
        let sender = self.senders[socket].as_mut().expect("just found or made");
        sender.paths += 1;
        let (src_port, names_interface) = (sender.port, by_port && !sender.is_bound);
        let ttl_default = self.ttl_default[usize::from(v6)];
        let entry = UdpPath {
            dest: sockets::destination(&self.iface, spec, ttl_default),
            socket,
            v6,
            segments_max: self.segments_max,
            ring: None,
            names_interface,
            loops: leaving == Leaving::Looped,
            live: true,
        };
        let id = if let Some(id) = self.free.pop() {
            self.entries[id.0 as usize] = entry;
            id
        } else {
            self.entries.push(entry);
            PathId(self.entries.len() as u32 - 1)
        };
        Ok(Path { id, src_port })
    }

    /// How datagrams of a path leave.
    fn leaving(&mut self, spec: &PathSpec) -> io::Result<Leaving> {
        if self.own_senders().any(|s| s.local == spec.remote) {
            return Ok(Leaving::Looped);
        }
        if spec.remote.is_multicast() {
            return Ok(Leaving::ByPort);
        }
        let (now, way) = (Instant::now(), (spec.local, spec.remote, spec.tos));
        if let Some(known) = self.checked.get(now, &way) {
            return Ok(*known);
        }
        let found = sockets::way(&self.iface, self.home, spec).map_err(|e| {
            worded(&e, format!("cannot send from {} to {}: {e}", spec.local, spec.remote))
        })?;
        let Some(found) = found else { return Ok(Leaving::Anyhow) };
        self.checked.put(now, way, found);
        Ok(found)
    }

    /// The socket for a path: one with the wanted port, a new one, another path's if there are
    /// many, or the own address's.
    fn sender_for(
        &mut self,
        spec: &PathSpec,
        by_port: bool,
        options: Options,
    ) -> io::Result<usize> {
        let (local, wanted) = (spec.local, spec.src_port);
        if wanted == ROCE_PORT {
            return Ok(self.own_of(local));
        }
        let same = |s: &Option<SenderSocket>| {
            s.as_ref().is_some_and(|s| (s.local, s.wanted, s.by_port) == (local, wanted, by_port))
        };
        if let Some(found) = self.senders.iter().position(same) {
            return Ok(found);
        }
        if let Some(shared) = self.shared(spec, by_port) {
            return Ok(shared);
        }
        let (iface, home) = (&self.iface, self.home);
        let opened = sockets::open_sender(iface, home, local, wanted, by_port, options);
        let (socket, port) = match opened {
            Ok(Some(opened)) => opened,
            // No port or no descriptor available: UDP/4791 works as well.
            Ok(None) => return Ok(self.own_of(local)),
            Err(e) if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                return Ok(self.own_of(local));
            }
            Err(e) => return Err(e),
        };
        let is_bound = socket.interface() == Some(iface.index);
        let sender = SenderSocket { socket, local, by_port, is_bound, wanted, port, paths: 0 };
        if let Some(hole) = self.senders.iter().position(Option::is_none) {
            self.senders[hole] = Some(sender);
            return Ok(hole);
        }
        self.senders.push(Some(sender));
        Ok(self.senders.len() - 1)
    }

    /// An open socket that works as well: one without a path, or any if there are many.
    fn shared(&self, spec: &PathSpec, by_port: bool) -> Option<usize> {
        let serves = |s: &&SenderSocket| s.local == spec.local && s.by_port == by_port;
        let (mut count, mut nth) = (0, None);
        let turn = usize::from(spec.src_port) % SENDERS_MAX;
        for (index, sender) in self.senders.iter().enumerate().skip(self.own) {
            let Some(sender) = sender.as_ref().filter(serves) else { continue };
            if sender.paths == 0 {
                return Some(index);
            }
            if count == turn {
                nth = Some(index);
            }
            count += 1;
        }
        nth.filter(|_| count >= SENDERS_MAX)
    }

    fn own_of(&self, local: IpAddr) -> usize {
        self.own_senders().position(|s| s.local == local).expect("checked by add")
    }

    fn own_senders(&self) -> impl Iterator<Item = &SenderSocket> {
        self.senders[..self.own].iter().flatten()
    }

    /// Removes a path; returns its own address, if the path was in use.
    pub(super) fn remove(&mut self, path: PathId) -> Option<(IpAddr, bool)> {
        let entry = self.entries.get_mut(path.0 as usize).filter(|e| e.live)?;
        entry.live = false;
        self.retired.push(path);
        let loops = entry.loops;
        self.senders[entry.socket].as_ref().map(|sender| (sender.local, loops))
    }

    /// Takes the rings from all paths.
    pub(super) fn forget_rings(&mut self) {
        self.entries.iter_mut().for_each(|entry| entry.ring = None);
    }

    /// Whether a path is to one of the port's own addresses.
    pub(super) fn loops(&self, path: PathId) -> bool {
        self.entries[path.0 as usize].loops
    }

    /// Gives up removed paths of which no datagram waits for the kernel, and closes the sockets
    /// without a path.
    pub(super) fn reclaim(&mut self, waits: impl Fn(PathId) -> bool) {
        let Self { entries, senders, retired, free, .. } = self;
        retired.retain(|id| {
            let waits = waits(*id);
            if !waits {
                if let Some(sender) = &mut senders[entries[id.0 as usize].socket] {
                    sender.paths -= 1;
                }
                free.push(*id);
            }
            waits
        });
        let kept = if self.free.len() == self.entries.len() { 0 } else { IDLE_MAX };
        let idle =
            |sender: &&mut Option<SenderSocket>| sender.as_ref().is_some_and(|s| s.paths == 0);
        for surplus in self.senders[self.own..].iter_mut().filter(idle).skip(kept) {
            *surplus = None;
        }
    }

    /// A path that datagrams may be reserved for.
    pub(super) fn get(&self, path: PathId) -> Option<&UdpPath> {
        self.entries.get(path.0 as usize).filter(|e| e.live)
    }

    /// A path with committed datagrams; it may have been removed since.
    pub(super) fn entry(&self, path: PathId) -> &UdpPath {
        &self.entries[path.0 as usize]
    }

    pub(super) fn entry_mut(&mut self, path: PathId) -> &mut UdpPath {
        &mut self.entries[path.0 as usize]
    }

    pub(super) fn socket(&self, index: usize) -> &Socket {
        &self.senders[index].as_ref().expect("open while a path uses it").socket
    }

    /// The interface that a path's datagrams name, with their source address.
    pub(super) fn by(&self, entry: &UdpPath) -> Option<(u32, IpAddr)> {
        let sender = self.senders[entry.socket].as_ref()?;
        entry.names_interface.then_some((self.iface.index, sender.local))
    }

    /// The socket of the own address with this index.
    pub(super) fn own_sockets<'a>(&'a self) -> impl Fn(usize) -> &'a Socket {
        |i| self.socket(i)
    }

    /// The number of open sockets besides those of the own addresses.
    #[cfg(test)]
    pub(super) fn open_senders(&self) -> usize {
        self.senders[self.own..].iter().flatten().count()
    }

    /// Whether the socket belongs to an own address; such a socket also receives.
    pub(super) fn is_own(&self, index: usize) -> bool {
        index < self.own
    }
}
