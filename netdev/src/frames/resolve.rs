//! From a [`PathSpec`] to the headers on the wire, for the backends that write whole frames.
//!
//! Routing and neighbour resolution stay in the kernel. A path with a next hop in the neighbour
//! cache is [`Hop::Direct`]: frames leave with the Ethernet address read from the cache. The kernel
//! resolves and refreshes no entry for raw frames, so a path without a usable entry is
//! [`Hop::Guard`]: its datagrams leave through an ordinary UDP socket (the *guard*), and the kernel
//! resolves the neighbour for them. When an entry has become stale, one burst of a path that could
//! leave directly also takes the guard, so that the kernel checks the entry.
//!
//! The kernel announces changes of neighbours, routes and the interface ([`Monitor`]), so an idle
//! table needs no polling. While the port is driven without pause, its driver may not read the
//! announcements, so the table also polls the entries in use once a second.
//!
//! A path changes its way only when the kernel has taken all its earlier frames, and accepts no new
//! ones until then: new ones would overtake them. Frames of other paths do not matter, so a port
//! that always has something to send still follows its neighbours.
//!
//! A path lookup costs no system call; [`PathTable::maintain`] makes them.

mod entry;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::{Duration, Instant};

use crate::kernel::interface::Interface;
use crate::kernel::recent::Recent;
use crate::kernel::rtnl::{Change, Monitor, Neighbour, RouteKind, RouteQuery, Rtnl, Way};
use crate::port::contract::{Path, PathId, PathSpec, Port};
use crate::port::error::{a_broadcast_address, not_an_address_of_the_port, two_families};
use crate::port::headers::FrameTemplate;
use crate::tuning::routes::{
    KNOWN_MAX, REFRESH, RESOLVE_FIRST, REST_MIN, REST_TIMES, ROUTE_REFRESHES,
};
pub(crate) use entry::Sent;
use entry::{PathEntry, Target, Turn, is_usable};

/// IPv4 identifications stay below this. Linux numbers the segments of a UDP super-packet from 0,
/// so a receiver that cannot read the identification must accept these anyway.
pub(crate) const IP_ID_END: u16 = 128;

/// How the next datagram of a path leaves. Constant for a path from one
/// [`flushed`](PathTable::flushed) to the next, unless [`maintain`](PathTable::maintain) ran
/// between.
#[derive(Debug)]
pub enum Hop<'a> {
    /// As a frame with these headers.
    Direct(&'a FrameTemplate),
    /// Through the guard, on this path of the guard.
    Guard(PathId),
}

/// The way to an address: the next hop, its entry in the neighbour cache, and the TTL or hop limit.
type Resolved = (Target, Option<Neighbour>, u8);

/// The paths of a port that writes whole frames.
#[derive(Debug)]
pub struct PathTable {
    iface: Interface,
    /// Its VRF.
    domain: Option<u32>,
    addresses: Vec<IpAddr>,
    rtnl: Rtnl,
    monitor: Monitor,
    /// The interface changed; and its check is due now.
    interface_changed: bool,
    interface_due: bool,
    /// Entries have to be refreshed because of announcements.
    changes: bool,
    entries: Vec<Option<PathEntry>>,
    /// Unused ids: their entries are `None`.
    free: Vec<PathId>,
    /// Recent route lookups: from, to, TOS.
    recent: Recent<(IpAddr, IpAddr, u8), Resolved>,
    /// TTL and hop limit of routes that have none.
    hop_limits: HopLimits,
    /// Paths with a burst in the guard only to have the neighbour checked.
    checking: Vec<PathId>,
    /// Paths that change their way when the kernel has taken their earlier frames.
    turning: Vec<PathId>,
    /// When entries in use are refreshed again, and whether a thread must wake for that.
    due: Instant,
    waits: bool,
    /// Until then, announcements are only noted.
    rests_until: Instant,
    /// Neighbours looked up in this round of refreshing; kept for its capacity.
    known: Vec<(IpAddr, Option<Neighbour>)>,
    /// The interval before the next request for an unresolved neighbour.
    backoff: Duration,
}

impl PathTable {
    /// An empty table for a port with these own `addresses` on `iface`, in the calling thread's
    /// network namespace. Error: no netlink socket is available.
    pub fn open(iface: &Interface, addresses: &[IpAddr]) -> io::Result<Self> {
        let mut rtnl = Rtnl::open()?;
        Ok(Self {
            iface: iface.clone(),
            // Without an answer it has none: the interface may be gone already.
            domain: rtnl.domain(iface.index).unwrap_or(None),
            addresses: addresses.to_vec(),
            monitor: Monitor::open(iface.index)?,
            interface_changed: false,
            // Announcements from before the monitor was opened are missing.
            interface_due: true,
            changes: false,
            rtnl,
            hop_limits: HopLimits::of(&iface.name),
            entries: Vec::new(),
            free: Vec::new(),
            recent: Recent::default(),
            checking: Vec::new(),
            turning: Vec::new(),
            due: Instant::now(),
            waits: false,
            rests_until: Instant::now(),
            known: Vec::with_capacity(KNOWN_MAX),
            backoff: RESOLVE_FIRST,
        })
    }

    /// Adds a path. Its source port is the one that `guard` gives it: the ICRC covers the port, and
    /// a datagram may take either way. Error: a local address that is not the port's, mixed
    /// families, no route, a route through another interface, a broadcast address, or an error of
    /// the guard.
    pub fn add(&mut self, spec: &PathSpec, guard: &mut impl Port) -> io::Result<Path> {
        let (target, neighbour, hop_limit) = self.way(spec)?;
        let mut spec = *spec;
        if spec.ttl == 0 && target != Target::Group {
            spec.ttl = hop_limit;
        }
        let spec = &spec;
        let Path { id, src_port } = guard.add_path(spec)?;
        let mut entry = PathEntry::new(*spec, src_port, target, id);
        entry.settle(&self.iface, neighbour);
        if entry.template.is_none() && entry.is_resolved_by_kernel() {
            self.backoff = RESOLVE_FIRST;
            // The lookup above already includes earlier announcements.
            (entry.changed, self.changes) = (true, true);
        }
        let free = self.free.pop();
        let index = free.map_or(self.entries.len(), |path| path.0 as usize);
        if free.is_none() {
            self.entries.push(None);
            self.free.reserve(self.entries.len());
            // Room for every path, so that sending never allocates.
            self.checking.reserve(self.entries.len());
            self.turning.reserve(self.entries.len());
        }
        self.entries[index] = Some(entry);
        Ok(Path { id: PathId(index as u32), src_port })
    }

    /// Removes a path; unknown ids are ignored.
    pub fn remove(&mut self, path: PathId, guard: &mut impl Port) {
        let Some(entry) = self.entries.get_mut(path.0 as usize).and_then(Option::take) else {
            return;
        };
        self.free.push(path);
        // The id may be given to another path, which starts anew.
        self.checking.retain(|other| *other != path);
        self.turning.retain(|other| *other != path);
        guard.remove_path(entry.guard);
    }

    /// How the next datagram of a path leaves. `None` for an unknown path, and while the kernel has
    /// to take earlier datagrams of the path first.
    pub fn hop(&mut self, path: PathId) -> Option<Hop<'_>> {
        let entry = self.entries.get_mut(path.0 as usize)?.as_mut()?;
        entry.used = true;
        if entry.turn.is_some() {
            return None;
        }
        match (&entry.template, entry.guard) {
            (None, guard) => Some(Hop::Guard(guard)),
            (Some(_), guard) if entry.check => {
                if !self.checking.contains(&path) {
                    self.checking.push(path);
                }
                Some(Hop::Guard(guard))
            }
            (Some(template), _) => Some(Hop::Direct(template)),
        }
    }

    /// Records a committed frame of a path; `last` is the port's number for it.
    pub fn sent(&mut self, path: PathId, last: u64) {
        if let Some(Some(entry)) = self.entries.get_mut(path.0 as usize) {
            entry.last = last;
        }
    }

    /// Call this after a flush to the kernel. Paths that took the guard only for a neighbour check
    /// leave directly again, and turning paths change their way, unless datagrams of theirs still
    /// wait according to `waits`.
    pub fn flushed(&mut self, waits: impl Fn(&Sent) -> bool) {
        let Self { entries, checking, turning, iface, .. } = self;
        let mut gone = |path: &PathId, act: &mut dyn FnMut(&mut PathEntry)| {
            let Some(Some(entry)) = entries.get_mut(path.0 as usize) else { return true };
            let gone = !waits(&entry.sent(*path));
            if gone {
                act(entry);
            }
            gone
        };
        checking.retain(|path| !gone(path, &mut |entry| entry.check = false));
        turning.retain(|path| {
            !gone(path, &mut |entry| {
                if let Some(turn) = entry.turn.take() {
                    entry.settle(iface, turn.neighbour);
                }
            })
        });
    }

    /// Whether paths need a [`flushed`](Self::flushed) to change their way.
    #[must_use]
    pub fn is_turning(&self) -> bool {
        !self.turning.is_empty()
    }

    /// The IPv4 identification of the path's next frame, chosen such that `room` frames can be
    /// numbered upwards from it. Identifications wrap below 128.
    pub fn peek_ip_id(&mut self, path: PathId, room: u16) -> u16 {
        let Some(Some(entry)) = self.entries.get_mut(path.0 as usize) else { return 0 };
        if u32::from(entry.ip_id) + u32::from(room) > u32::from(IP_ID_END) {
            entry.ip_id = 0;
        }
        entry.ip_id
    }

    /// As [`peek_ip_id`](Self::peek_ip_id) for `count` frames, and consumes these identifications.
    pub fn take_ip_ids(&mut self, path: PathId, count: u16) -> u16 {
        let first = self.peek_ip_id(path, count);
        if let Some(Some(entry)) = self.entries.get_mut(path.0 as usize) {
            entry.ip_id = first.saturating_add(count);
        }
        first
    }

    /// The path of this table that has the given path of the guard.
    #[must_use]
    pub fn of_guard(&self, guard: PathId) -> Option<PathId> {
        let has = |entry: &Option<PathEntry>| entry.as_ref().is_some_and(|e| e.guard == guard);
        self.entries.iter().position(has).map(|index| PathId(index as u32))
    }

    /// Readable while [`maintain`](Self::maintain) has announcements to read.
    #[must_use]
    pub fn wait_fd(&self) -> BorrowedFd<'_> {
        self.monitor.as_fd()
    }

    /// Whether the interface changed since the last call. If so, call
    /// [`check_interface`](Self::check_interface).
    pub fn take_interface_change(&mut self) -> bool {
        std::mem::take(&mut self.interface_due)
    }

    /// Reads the kernel's announcements and refreshes the paths that they concern, unless it rests
    /// from the last refresh. Also refreshes paths in use about once a second. Returns when to call
    /// again even without announcements and sending, or `None` if not needed. `waits` says whether
    /// frames of a path still wait for the kernel.
    pub fn maintain(&mut self, waits: impl Fn(&Sent) -> bool) -> Option<Duration> {
        let now = Instant::now();
        self.read_changes();
        let look = if self.changes { self.rests_until.min(self.due) } else { self.due };
        if now < look {
            return (self.changes || self.waits).then(|| look - now);
        }
        let announced = std::mem::take(&mut self.changes);
        let of_interface = std::mem::take(&mut self.interface_changed);
        self.interface_due |= of_interface;
        let mut known = std::mem::take(&mut self.known);
        known.clear();
        let (mut resolving, mut failed) = (false, false);
        for index in 0..self.entries.len() {
            let Some(mut entry) = self.entries[index].take() else { continue };
            if entry.is_resolved_by_kernel() && entry.is_to_be_looked_at() {
                let (path, waits, used) = (PathId(index as u32), &waits, entry.used);
                match self.neighbour_for(&mut entry, &mut known) {
                    Ok(Some(turn)) => self.turn(&mut entry, path, turn, waits),
                    Ok(None) => {}
                    // A failed request leaves the path as it is; the next call asks again.
                    Err(_) => (entry.changed, failed) = (true, true),
                }
                let awaited = used || entry.answered || self.backoff < REFRESH;
                resolving |= entry.template.is_none() && awaited;
            }
            self.entries[index] = Some(entry);
        }
        self.known = known;
        let wait = if resolving { self.backoff } else { REFRESH };
        self.backoff = if resolving { (self.backoff * 2).min(REFRESH) } else { RESOLVE_FIRST };
        self.due = now + wait;
        self.waits = resolving || failed;
        self.changes = failed;
        if announced {
            let least = if of_interface { REST_MIN } else { Duration::ZERO };
            let looked = Instant::now();
            self.rests_until = looked + (REST_TIMES * (looked - now)).max(least);
        }
        self.waits.then_some(wait)
    }

    /// Notes the kernel's announcements.
    fn read_changes(&mut self) {
        let Self { monitor, entries, changes, interface_changed, recent, .. } = self;
        monitor.read(|change| {
            *recent = Recent::default();
            let of_interface = matches!(change, Change::Interface | Change::Anything);
            *interface_changed |= of_interface;
            *changes |= of_interface;
            for entry in entries.iter_mut().flatten() {
                let rerouted = change.is_of_way_to(entry.spec.remote);
                let changed = match change {
                    Change::Neighbour(address) => entry.target == Target::Neighbour(address),
                    _ => rerouted,
                };
                entry.rerouted |= rerouted;
                entry.changed |= changed;
                *changes |= changed;
            }
        });
    }

    /// Checks the interface and adopts a new Ethernet address of its own. Returns that address.
    /// Error: `ENODEV` if the interface is gone; or any other error of the kernel.
    pub fn check_interface(&mut self) -> io::Result<[u8; 6]> {
        let asked = self.rtnl.link_mac(self.iface.index);
        if asked.as_ref().is_err_and(|e| e.raw_os_error() != Some(libc::ENODEV)) {
            // Without an answer the next `maintain` makes the check due again.
            (self.interface_changed, self.changes) = (true, true);
        }
        let mac = asked?;
        if mac != self.iface.mac {
            self.iface.mac = mac;
            for entry in self.entries.iter_mut().flatten() {
                if let Some(dst) = entry.template.as_ref().map(FrameTemplate::dst_mac) {
                    entry.template = FrameTemplate::new(mac, dst, &entry.spec, entry.src_port);
                }
            }
        }
        Ok(mac)
    }

    /// Adopts the state of the neighbour cache, now or when no datagram of the path waits any more.
    fn turn(
        &mut self,
        entry: &mut PathEntry,
        path: PathId,
        turn: Turn,
        waits: impl Fn(&Sent) -> bool,
    ) {
        if entry.turn.is_none() && !(entry.turns(turn) && waits(&entry.sent(path))) {
            return entry.settle(&self.iface, turn.neighbour);
        }
        if entry.turn.replace(turn).is_none() {
            self.turning.push(path);
        }
    }

    /// The state of the neighbour cache for a path's next hop, if the path has to adopt it.
    fn neighbour_for(
        &mut self,
        entry: &mut PathEntry,
        known: &mut Vec<(IpAddr, Option<Neighbour>)>,
    ) -> io::Result<Option<Turn>> {
        entry.changed = false;
        entry.route_refreshes += u32::from(std::mem::take(&mut entry.used));
        let rerouted = std::mem::take(&mut entry.rerouted);
        if rerouted || entry.route_refreshes >= ROUTE_REFRESHES || entry.target == Target::Nowhere {
            entry.route_refreshes = 0;
            entry.target = match self.target(&entry.spec) {
                Ok((target, _)) if target != Target::Own => target,
                _ => Target::Nowhere,
            };
        }
        let Target::Neighbour(address) = entry.target else {
            return Ok(Some(Turn { neighbour: None }));
        };
        let neighbour = match known.iter().find(|(a, _)| *a == address) {
            Some((_, neighbour)) => *neighbour,
            None => {
                let neighbour = self.rtnl.neighbour(self.iface.index, address)?;
                if known.len() < KNOWN_MAX {
                    known.push((address, neighbour));
                }
                neighbour
            }
        };
        let usable = is_usable(neighbour);
        if entry.template.is_none() && usable && !std::mem::replace(&mut entry.answered, true) {
            self.backoff = RESOLVE_FIRST;
            return Ok(None);
        }
        Ok(Some(Turn { neighbour }))
    }

    fn neighbour_of(&mut self, target: Target) -> io::Result<Option<Neighbour>> {
        match target {
            Target::Neighbour(address) => self.rtnl.neighbour(self.iface.index, address),
            _ => Ok(None),
        }
    }

    /// Where the kernel would send a datagram of this path, and its neighbour entry. If the second
    /// lookup fails, the path starts with the guard, and `maintain` asks again.
    fn way(&mut self, spec: &PathSpec) -> io::Result<Resolved> {
        let (now, question) = (Instant::now(), (spec.local, spec.remote, spec.tos));
        if let Some(known) = self.recent.get(now, &question) {
            return Ok(*known);
        }
        let (target, hop_limit) = self.target(spec)?;
        let mut neighbour = self.neighbour_of(target).unwrap_or(None);
        if let (Target::Neighbour(address), false) = (target, is_usable(neighbour)) {
            // Datagrams that wait in the kernel for resolution are overtaken by those sent after
            // it. So resolution starts before there is anything to send. On one machine the answer
            // is there at once.
            let solicited = self.rtnl.solicit(self.iface.index, address);
            neighbour = solicited.and_then(|()| self.neighbour_of(target)).unwrap_or(None);
        }
        if is_usable(neighbour) {
            self.recent.put(now, question, (target, neighbour, hop_limit));
        }
        Ok((target, neighbour, hop_limit))
    }

    /// Where the kernel would send a datagram of this path, and with which TTL or hop limit.
    fn target(&mut self, spec: &PathSpec) -> io::Result<(Target, u8)> {
        let HopLimits { v4, v6 } = self.hop_limits;
        let default = if spec.remote.is_ipv4() { v4 } else { v6 };
        if !self.addresses.contains(&spec.local) {
            return Err(not_an_address_of_the_port(spec));
        }
        if spec.local.is_ipv4() != spec.remote.is_ipv4() {
            return Err(two_families(spec));
        }
        if self.addresses.contains(&spec.remote) {
            return Ok((Target::Own, default));
        }
        if spec.remote.is_multicast() {
            return Ok((Target::Group, default));
        }
        let query = RouteQuery {
            destination: spec.remote,
            source: Some(spec.local),
            interface: None,
            tos: spec.tos,
            src_port: spec.src_port,
        };
        let (target, route) = match self.rtnl.way(&self.iface, self.domain, query)? {
            Way::Own => return Ok((Target::Own, default)),
            Way::Port(route) => (Target::Neighbour(route.gateway.unwrap_or(spec.remote)), route),
            Way::Any(route) if self.iface.loopback && route.interface == self.iface.index => {
                (Target::Fixed([0; 6]), route)
            }
            Way::Any(_) => return Err(elsewhere(spec.remote, &self.iface)),
        };
        if matches!(route.kind, RouteKind::Multicast | RouteKind::Broadcast) {
            return Err(a_broadcast_address(spec.remote));
        }
        Ok((target, route.hop_limit.unwrap_or(default)))
    }
}

fn elsewhere(remote: IpAddr, iface: &Interface) -> io::Error {
    let what = format!(
        "{remote} is not reached through {}, which carries nothing by itself: use --netdev udp",
        iface.name
    );
    io::Error::new(io::ErrorKind::HostUnreachable, what)
}

/// TTL and hop limit of datagrams whose route has none, as they were when the port was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HopLimits {
    v4: u8,
    v6: u8,
}

impl HopLimits {
    /// Those of an interface of the calling thread's network namespace; 64, as Linux begins with,
    /// where `/proc` does not say.
    fn of(name: &str) -> Self {
        let read = |path: String| {
            let text = std::fs::read_to_string(path).ok()?;
            text.trim().parse().ok().filter(|limit| *limit > 0)
        };
        Self {
            v4: read("/proc/sys/net/ipv4/ip_default_ttl".into()).unwrap_or(64),
            v6: read(format!("/proc/sys/net/ipv6/conf/{name}/hop_limit")).unwrap_or(64),
        }
    }
}

#[cfg(test)]
mod tests;
