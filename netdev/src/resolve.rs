//! From a [`PathSpec`] to the headers on the wire, for the backends that write whole frames.
//!
//! Routing and neighbour resolution stay the kernel's. A path whose next hop is in the neighbour
//! cache is [`Hop::Direct`]: frames leave with the Ethernet address read from the cache. Nobody would
//! resolve or refresh an entry for raw frames, so a path without a usable entry is [`Hop::Guard`]:
//! its datagrams leave through an ordinary UDP socket (the *guard*), and the kernel resolves the
//! neighbour for them. Now and then, when an entry has gone stale or a path was idle, one burst of a
//! path that could leave directly takes the guard too, so that the kernel checks the entry.
//!
//! A path whose frames still wait for the kernel changes its way only when those are gone, and takes no others until then: they would be overtaken. What
//! waits on other paths does not matter, so a port that always has something to send looks at its neighbours like any other.
//!
//! Looking a path up costs no system call; [`PathTable::maintain`] makes those.

use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::headers::FrameTemplate;
use crate::iface::Interface;
use crate::port::{Path, PathId, PathSpec, Port};
use crate::recent::Recent;
use crate::rtnl::{Neighbour, NeighbourStatus, Route, RouteKind, RouteQuery, Rtnl};

/// How often entries in use are read again.
const REFRESH: Duration = Duration::from_secs(1);
/// How soon a neighbour being resolved is asked for again; doubles up to [`REFRESH`].
const RESOLVE_FIRST: Duration = Duration::from_millis(1);
/// After so many refreshes without a datagram, the next burst of a path takes the guard.
const IDLE_REFRESHES: u32 = 5;
/// After so many refreshes in use, a path's route is looked up again.
const ROUTE_REFRESHES: u32 = 10;
/// IPv4 identifications stay below this. Linux numbers the segments of a UDP super-packet from 0, so
/// a receiver that cannot read the identification must accept these anyway.
pub(crate) const IP_ID_END: u16 = 128;

/// How the next datagram of a path leaves. Constant for a path from one
/// [`flushed`](PathTable::flushed) to the next, unless [`maintain`](PathTable::maintain) ran between.
#[derive(Debug)]
pub enum Hop<'a> {
    /// As a frame with these headers.
    Direct(&'a FrameTemplate),
    /// To one of the port's own addresses: it does not leave.
    Loopback,
    /// Through the guard, whose path this is.
    Guard(PathId),
}

/// The paths of a port that writes whole frames.
#[derive(Debug)]
pub struct PathTable {
    iface: Interface,
    addresses: Vec<IpAddr>,
    rtnl: Rtnl,
    entries: Vec<Option<Entry>>,
    /// Indices of entries that are `None`.
    free: Vec<usize>,
    /// Ways that have just been asked for: from, to, TOS.
    recent: Recent<(IpAddr, IpAddr, u8), (Target, Option<Neighbour>)>,
    /// Paths whose current burst takes the guard only to have the neighbour checked.
    checking: Vec<PathId>,
    /// Paths that will leave another way when what they sent is gone.
    turning: Vec<PathId>,
    due: Instant,
    /// What this round of refreshing has asked for; kept for its room.
    known: Vec<(IpAddr, Option<Neighbour>)>,
    /// The wait before the next look at an unresolved neighbour.
    backoff: Duration,
}

#[derive(Debug)]
struct Entry {
    spec: PathSpec,
    src_port: u16,
    target: Target,
    /// `None` on loopback, which needs none.
    guard: Option<PathId>,
    /// Headers towards the Ethernet address last known.
    template: Option<FrameTemplate>,
    /// The next burst takes the guard although there is a template.
    check: bool,
    /// The neighbour answered, and the kernel may still be sending what waited for that.
    answered: bool,
    /// What the port calls the last frame that left directly.
    last: u64,
    /// What the neighbour cache says, which is to be taken over when nothing waits any more.
    turn: Option<Turn>,
    /// Whether a datagram was sent since the last refresh.
    used: bool,
    idle_refreshes: u32,
    route_refreshes: u32,
    ip_id: u16,
}

/// A change of way that waits.
#[derive(Debug, Clone, Copy)]
struct Turn {
    neighbour: Option<Neighbour>,
}

/// By what a port finds the frames of a path among those that wait for the kernel.
#[derive(Debug, Clone, Copy)]
pub struct Sent {
    /// The path.
    pub path: PathId,
    /// That of the guard; `None` on loopback.
    pub guard: Option<PathId>,
    /// What [`PathTable::sent`] was told last; 0 if it never was.
    pub last: u64,
}

/// What a path leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    /// One of the port's own addresses.
    Own,
    /// A multicast group: the guard sends, so that those on this machine who have joined get a copy.
    Group,
    /// An Ethernet address that needs no resolution: anyone on the loopback interface.
    Fixed([u8; 6]),
    /// A neighbour: the destination itself, or a gateway.
    Neighbour(IpAddr),
    /// The route went away; the guard gets the kernel's error for every datagram.
    Nowhere,
}

impl PathTable {
    /// An empty table for a port with these own `addresses` on `iface`, in the calling thread's
    /// network namespace.
    ///
    /// # Errors
    /// No netlink socket can be had.
    pub fn open(iface: &Interface, addresses: &[IpAddr]) -> io::Result<Self> {
        Ok(Self {
            iface: iface.clone(),
            addresses: addresses.to_vec(),
            rtnl: Rtnl::open()?,
            entries: Vec::new(),
            free: Vec::new(),
            recent: Recent::default(),
            checking: Vec::new(),
            turning: Vec::new(),
            due: Instant::now(),
            known: Vec::new(),
            backoff: RESOLVE_FIRST,
        })
    }

    /// Adds a path. Its source port is the one that `guard` gives it, because the ICRC covers it and
    /// a datagram may take either way.
    ///
    /// # Errors
    /// A local address that is not the port's, mixed families, no route, a route that leaves through
    /// another interface, a broadcast address, or what the guard answers.
    pub fn add(&mut self, spec: &PathSpec, guard: &mut impl Port) -> io::Result<Path> {
        let (target, neighbour) = self.way(spec)?;
        let (guard, src_port) = if target == Target::Own {
            (None, spec.src_port)
        } else {
            let path = guard.add_path(spec)?;
            (Some(path.id), path.src_port)
        };
        let mut entry = Entry {
            spec: *spec,
            src_port,
            target,
            guard,
            template: None,
            check: false,
            answered: false,
            last: 0,
            turn: None,
            used: false,
            idle_refreshes: 0,
            route_refreshes: 0,
            ip_id: 0,
        };
        entry.settle(&self.iface, neighbour);
        let now = Instant::now();
        if entry.template.is_none() {
            self.backoff = RESOLVE_FIRST;
            self.due = now;
        } else {
            self.due = self.due.min(now + REFRESH);
        }
        let free = self.free.pop();
        let index = free.unwrap_or(self.entries.len());
        if free.is_none() {
            self.entries.push(None);
            self.free.reserve(self.entries.len());
            // Room for every path, so that nothing is allocated while sending.
            self.checking.reserve(self.entries.len());
            self.turning.reserve(self.entries.len());
            self.known.reserve(self.entries.len());
        }
        self.entries[index] = Some(entry);
        Ok(Path { id: PathId(index as u32), src_port })
    }

    /// Removes a path; unknown ids are ignored.
    pub fn remove(&mut self, path: PathId, guard: &mut impl Port) {
        let Some(entry) = self.entries.get_mut(path.0 as usize).and_then(Option::take) else {
            return;
        };
        self.free.push(path.0 as usize);
        if let Some(id) = entry.guard {
            guard.remove_path(id);
        }
    }

    /// How the next datagram of a path leaves; `None` for an unknown path, and for one whose earlier datagrams must be gone before.
    pub fn hop(&mut self, path: PathId) -> Option<Hop<'_>> {
        let entry = self.entries.get_mut(path.0 as usize)?.as_mut()?;
        entry.used = true;
        if entry.turn.is_some() {
            return None;
        }
        match (&entry.template, entry.guard) {
            (_, None) => Some(Hop::Loopback),
            (None, Some(guard)) => Some(Hop::Guard(guard)),
            (Some(_), Some(guard)) if entry.check => {
                if !self.checking.contains(&path) {
                    self.checking.push(path);
                }
                Some(Hop::Guard(guard))
            }
            (Some(template), Some(_)) => Some(Hop::Direct(template)),
        }
    }

    /// A frame of a path was committed, which the port calls so.
    pub fn sent(&mut self, path: PathId, last: u64) {
        if let Some(Some(entry)) = self.entries.get_mut(path.0 as usize) {
            entry.last = last;
        }
    }

    /// Call when the kernel was given what it takes: paths that took the guard only to have their neighbour checked leave directly again, and those that were
    /// to change their way do so, unless something of theirs still `waits`.
    pub fn flushed(&mut self, waits: impl Fn(&Sent) -> bool) {
        let Self { entries, checking, turning, iface, .. } = self;
        let mut gone = |path: &PathId, act: &mut dyn FnMut(&mut Entry)| {
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

    /// Whether paths wait for a [`flushed`](Self::flushed) to change their way.
    #[must_use]
    pub fn is_turning(&self) -> bool {
        !self.turning.is_empty()
    }

    /// The spec of a path, with the source port that is really used.
    #[must_use]
    pub fn spec(&self, path: PathId) -> Option<(&PathSpec, u16)> {
        let entry = self.entries.get(path.0 as usize)?.as_ref()?;
        Some((&entry.spec, entry.src_port))
    }

    /// The IPv4 identification that the next frame of a path will carry, such that `room` frames can
    /// be numbered upwards from it. Identifications go round below 128.
    pub fn peek_ip_id(&mut self, path: PathId, room: u16) -> u16 {
        let Some(Some(entry)) = self.entries.get_mut(path.0 as usize) else { return 0 };
        if u32::from(entry.ip_id) + u32::from(room) > u32::from(IP_ID_END) {
            entry.ip_id = 0;
        }
        entry.ip_id
    }

    /// As [`peek_ip_id`](Self::peek_ip_id) for `count` frames, and takes these identifications.
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
        let has = |entry: &Option<Entry>| entry.as_ref().is_some_and(|e| e.guard == Some(guard));
        self.entries.iter().position(has).map(|index| PathId(index as u32))
    }

    /// Reads the neighbour cache, and now and then the routes, for the paths in use. Returns when to
    /// call again, or `None` if no path needs it before the next is added; a call before that time
    /// costs no system call. `waits` says whether frames of a path have not been taken by the kernel.
    pub fn maintain(&mut self, waits: impl Fn(&Sent) -> bool) -> Option<Duration> {
        let now = Instant::now();
        if now < self.due {
            return Some(self.due - now);
        }
        let mut known = std::mem::take(&mut self.known);
        known.clear();
        let (mut resolving, mut neighbours) = (false, false);
        for index in 0..self.entries.len() {
            let Some(mut entry) = self.entries[index].take() else { continue };
            if matches!(entry.target, Target::Neighbour(_) | Target::Nowhere) {
                neighbours = true;
                // A failure to ask leaves the path as it is; the next call asks again.
                let (path, waits) = (PathId(index as u32), &waits);
                let asked = self.neighbour_for(&mut entry, path, waits, &mut known);
                if let Ok(Some(turn)) = asked {
                    self.turn(&mut entry, path, turn, waits);
                }
                resolving |= entry.template.is_none();
            }
            self.entries[index] = Some(entry);
        }
        self.known = known;
        if !neighbours {
            return None;
        }
        let wait = if resolving { self.backoff } else { REFRESH };
        self.backoff = if resolving { (self.backoff * 2).min(REFRESH) } else { RESOLVE_FIRST };
        self.due = now + wait;
        Some(wait)
    }

    /// Looks at the interface, and takes over a new Ethernet address of its own. Returns that address.
    ///
    /// # Errors
    /// `ENODEV` if the interface is gone; or whatever the kernel answers.
    pub fn check_interface(&mut self) -> io::Result<[u8; 6]> {
        let mac = self.rtnl.link_mac(self.iface.index)?;
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

    /// Takes over what the neighbour cache says, now or when nothing waits any more.
    fn turn(&mut self, entry: &mut Entry, path: PathId, turn: Turn, waits: impl Fn(&Sent) -> bool) {
        if entry.turn.is_none() && !(entry.turns(turn) && waits(&entry.sent(path))) {
            return entry.settle(&self.iface, turn.neighbour);
        }
        if entry.turn.replace(turn).is_none() {
            self.turning.push(path);
        }
    }

    /// What the neighbour cache says of a path's next hop, if that is to be taken over.
    fn neighbour_for(
        &mut self,
        entry: &mut Entry,
        path: PathId,
        waits: impl Fn(&Sent) -> bool,
        known: &mut Vec<(IpAddr, Option<Neighbour>)>,
    ) -> io::Result<Option<Turn>> {
        if !std::mem::take(&mut entry.used) && entry.template.is_some() {
            entry.idle_refreshes += 1;
            let idle = entry.idle_refreshes >= IDLE_REFRESHES && !waits(&entry.sent(path));
            entry.check |= idle;
            return Ok(None);
        }
        entry.idle_refreshes = 0;
        entry.route_refreshes += 1;
        if entry.route_refreshes >= ROUTE_REFRESHES || entry.target == Target::Nowhere {
            entry.route_refreshes = 0;
            entry.target = match self.target(&entry.spec) {
                Ok(target) if target != Target::Own => target,
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
                known.push((address, neighbour));
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

    /// Where the kernel would send a datagram of this path, and what it knows of the neighbour. Without an answer to the second the path begins at the
    /// guard, and `maintain` asks again.
    fn way(&mut self, spec: &PathSpec) -> io::Result<(Target, Option<Neighbour>)> {
        let (now, question) = (Instant::now(), (spec.local, spec.remote, spec.tos));
        if let Some(known) = self.recent.get(now, &question) {
            return Ok(*known);
        }
        let target = self.target(spec)?;
        let mut neighbour = self.neighbour_of(target).unwrap_or(None);
        if let (Target::Neighbour(address), false) = (target, is_usable(neighbour)) {
            // What waits for an answer at the kernel is overtaken by what is sent when the answer has
            // come: it is asked for before there is anything to send. On one machine it is there at once.
            let solicited = self.rtnl.solicit(self.iface.index, address);
            neighbour = solicited.and_then(|()| self.neighbour_of(target)).unwrap_or(None);
        }
        if is_usable(neighbour) {
            self.recent.put(now, question, (target, neighbour));
        }
        Ok((target, neighbour))
    }

    /// Where the kernel would send a datagram of this path.
    fn target(&mut self, spec: &PathSpec) -> io::Result<Target> {
        if !self.addresses.contains(&spec.local) {
            let message = format!("{} is not an address of this port", spec.local);
            return Err(io::Error::new(io::ErrorKind::AddrNotAvailable, message));
        }
        if spec.local.is_ipv4() != spec.remote.is_ipv4() {
            let message = format!("{} and {} are of different families", spec.local, spec.remote);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        if self.addresses.contains(&spec.remote) {
            return Ok(Target::Own);
        }
        if spec.remote.is_multicast() {
            return Ok(Target::Group);
        }
        let route = self.rtnl.route(&RouteQuery {
            destination: spec.remote,
            source: Some(spec.local),
            interface: needs_interface(spec.remote).then_some(self.iface.index),
            tos: spec.tos,
            src_port: spec.src_port,
        })?;
        self.target_of(spec.remote, &route)
    }

    fn target_of(&self, remote: IpAddr, route: &Route) -> io::Result<Target> {
        let unreachable = |what: String| Err(io::Error::new(io::ErrorKind::HostUnreachable, what));
        if route.interface != self.iface.index {
            return unreachable(format!(
                "{remote} is not reached through {} but through interface {}: open that one, or \
                 use --netdev udp",
                self.iface.name, route.interface
            ));
        }
        match route.kind {
            RouteKind::Multicast | RouteKind::Broadcast => {
                unreachable(format!("{remote} is a broadcast address"))
            }
            _ if self.iface.loopback => Ok(Target::Fixed([0; 6])),
            RouteKind::Local => unreachable(format!(
                "{remote} is another address of this machine: open the port with it, or use \
                 --netdev udp"
            )),
            RouteKind::Unicast => Ok(Target::Neighbour(route.gateway.unwrap_or(remote))),
        }
    }
}

impl Entry {
    fn sent(&self, path: PathId) -> Sent {
        Sent { path, guard: self.guard, last: self.last }
    }

    /// The Ethernet address of the next hop, and whether the kernel is to check it.
    fn next_hop(&self, neighbour: Option<Neighbour>) -> Option<([u8; 6], bool)> {
        match self.target {
            Target::Own | Target::Group | Target::Nowhere => None,
            Target::Fixed(mac) => Some((mac, self.check)),
            Target::Neighbour(_) => {
                let Neighbour { mac, status } = neighbour.filter(|_| is_usable(neighbour))?;
                Some((mac?, status == NeighbourStatus::Stale))
            }
        }
    }

    /// Whether a change is one between frames and the guard.
    fn turns(&self, to: Turn) -> bool {
        let direct = self.template.is_some() && !self.check;
        direct != matches!(self.next_hop(to.neighbour), Some((_, false)))
    }

    /// Takes over what the neighbour cache says.
    fn settle(&mut self, iface: &Interface, neighbour: Option<Neighbour>) {
        if self.target == Target::Own {
            return;
        }
        let Some((mac, check)) = self.next_hop(neighbour) else {
            self.template = None;
            (self.check, self.answered) = (false, false);
            return;
        };
        self.check = check;
        if self.template.as_ref().is_none_or(|template| template.dst_mac() != mac) {
            self.template = FrameTemplate::new(iface.mac, mac, &self.spec, self.src_port);
        }
    }
}

/// Whether frames may be sent to this entry of the neighbour cache.
fn is_usable(neighbour: Option<Neighbour>) -> bool {
    neighbour.is_some_and(|known| known.status != NeighbourStatus::Unresolved)
}

/// Whether a destination means nothing without an interface.
fn needs_interface(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(_) => false,
        IpAddr::V6(a) => a.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests;
