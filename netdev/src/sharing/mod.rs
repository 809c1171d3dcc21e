//! Several processes on one address.
//!
//! One byte of each datagram says which port it is for ([`Shards`](crate::Shards)). Processes that
//! share an address divide the values of that byte, the *slots*, among themselves. There is no
//! registry process: they share objects of the kernel, which stay as long as any of them lives.
//! When a process dies, in any way, they release its slots.
//!
//! For each address there are:
//! - a listening socket with an abstract name (unix(7)), which *all* of them listen on: one that
//!   comes later gets copies of the objects from whichever of them accepts ([`rendezvous`]);
//! - a file in memory, in which a *lock* on a byte says that a slot is taken, that a process
//!   listens for a service, that it has bound a port, or that it has `afxdp` ([`locks`]). The
//!   file's contents say how long slots rest, and the work to do for a process that has gone
//!   ([`last_will`]);
//! - a *socket table* ([`socket_table`]): a stream that is written and never read, only looked
//!   into. It has the UDP socket of each slot, all of one `SO_REUSEPORT` group. So a slot's socket
//!   stays in the group at its index when its process dies, and the next process on the slot takes
//!   it over;
//! - a *leader*, the process that has a second name. It reads the socket of slot 0: datagrams to
//!   the general services (QP1), and to no slot. The others are connected to it, learn of its end,
//!   and one of them follows ([`leader`]).
//!
//! Processes of one user share an address: the kernel lets only sockets of one user share a port.

mod address;
mod closing;
mod guardian;
mod helper;
mod host;
mod last_will;
mod layout;
mod leader;
mod lifeline;
mod locks;
mod rendezvous;
mod socket_table;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use self::address::{Shared, failed};
pub use self::closing::close_elsewhere;
pub use self::guardian::{Errand, GUARDIAN_VARIABLE, Guardian, Left};
use self::host::Host;
pub use self::layout::NOTE_BYTES;
use self::layout::SLOTS_MAX;
use self::leader::Leadership;
use self::lifeline::{AgentLink, PagePlace, Registration};
use self::locks::On;
pub use self::locks::PortClaim;

use crate::handed::page::{Account, Amounts, Page};
use crate::kernel::interface::Interface;
use crate::kernel::of_process::OfProcess;
use crate::port::config::{PacketConfig, PortConfig, Shards};
use crate::port::contract::{Backend, RxDatagram};
use crate::port::error::OpenError;
use crate::port::parts::SharedSockets;
use crate::tuning::shared::{ASK_EVERY, LEADER_RELEASE_MAX, REST, RING_FRAMES_MIN, ROOM_MIN};
use crate::udp::handoff::{Inbox, Outbox};
use crate::udp::{SharedAddresses, Socket};

/// A slot with notes of a process that has gone rests longest.
const OWED: u64 = u64::MAX;

/// The slots of a device: `count` in a row, the same on each of its addresses.
pub struct Slots {
    first: u8,
    count: usize,
    /// The number of others' slots when these were taken.
    neighbours: usize,
    shared: Vec<Shared>,
    /// Lets others join.
    host: Host,
    page: Arc<PagePlace>,
    /// The connection to the guardian of the program, if there is one.
    _guardian: Option<OwnedFd>,
}

/// The limits of this process's container, before it has a device. It waits as [`Slots::lease`]
/// does, and asks once in a second.
#[must_use]
pub fn container_limits() -> Amounts {
    static LAST: OfProcess<Mutex<Option<(Instant, Amounts)>>> = OfProcess::none();
    let last = || LAST.get().lock().unwrap_or_else(PoisonError::into_inner);
    let known = *last();
    if let Some((_, limits)) = known.filter(|(at, _)| at.elapsed() < Duration::from_secs(1)) {
        return limits;
    }
    let place = Arc::<PagePlace>::default();
    drop(AgentLink::for_page(&place));
    let limits = place.account.limits();
    *last() = Some((Instant::now(), limits));
    limits
}

/// The end of a datagram for a neighbour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// The neighbour has got it.
    Done,
    /// The neighbour lives, and its mailbox is full or not known yet. No other process may answer:
    /// its answer would end the neighbour's connection.
    Lost,
    /// No process has the slot.
    NoProcess,
}

impl std::fmt::Debug for Slots {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Slots({} from {})", self.count, self.first)
    }
}

impl Slots {
    /// Takes slots for the ports of a device with these addresses; `shards` has their number and
    /// the byte. Where an agent is, it waits for its page, a second at most. Error: another user's
    /// process, or one that does not share, has an address; all slots are taken; no descriptors or
    /// no memory left.
    pub fn lease(
        iface: &Interface,
        addresses: &[IpAddr],
        config: &PortConfig,
        Shards { count, selector, .. }: Shards,
    ) -> Result<Self, OpenError> {
        // First, since neighbours wait for one that has joined.
        let page = Arc::<PagePlace>::default();
        let publishes = AgentLink::for_page(&page);
        if publishes.is_none() {
            page.own();
        }
        // Every process joins in this order, and takes several locks in it.
        let mut sorted = addresses.to_vec();
        sorted.sort_unstable();
        let joined = sorted.into_iter().map(|address| Shared::join(iface, address));
        let joined = joined.collect::<Result<Vec<_>, _>>()?;
        let (shared, mut leaderships): (Vec<_>, Vec<_>) = joined.into_iter().unzip();
        let (first, neighbours) =
            take_slots(&shared, &mut leaderships, iface, config, (count, selector))?;
        let objects = shared.iter().map(|it| it.objects.clone());
        let follows = first > 0 && shared.iter().any(Shared::is_leader);
        let registration = Registration::of(&shared, first, count);
        let guardian = lifeline::register_with_guardian(&registration);
        let agents = AgentLink::new(registration).into_iter().chain(publishes);
        let host = Host::start(objects.zip(leaderships).collect(), follows, agents.collect())
            .map_err(|e| failed("start a thread", e, ""))?;
        Ok(Self { first, count, neighbours, shared, host, page, _guardian: guardian })
    }

    /// The first slot: the others follow.
    #[must_use]
    pub fn first(&self) -> u8 {
        self.first
    }

    /// The number of slots.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// The page in which this device publishes what it has counted: of an agent, once it has
    /// handed one over, and its own where none is.
    #[must_use]
    pub fn page(&self) -> Option<Arc<Page>> {
        self.page.get()
    }

    /// The holdings of this device, which count towards the limits of its container.
    #[must_use]
    pub fn account(&self) -> &Account {
        &self.page.account
    }

    /// The configuration of these ports: a ring of `packet` that the program left at its default
    /// has half the frames for each doubling of the ports on an address.
    pub(crate) fn fitted(&self, config: &PortConfig) -> PortConfig {
        let mut fitted = config.clone();
        let default = PacketConfig::default().ring_frames;
        if config.packet.ring_frames == default {
            let doublings = (self.neighbours + 1).ilog2();
            fitted.packet.ring_frames = (default >> doublings).max(RING_FRAMES_MIN);
        }
        fitted
    }

    fn at(&self, address: IpAddr) -> io::Result<&Shared> {
        let found = self.shared.iter().find(|it| it.address == address);
        found.ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
    }

    /// The UDP sockets of the own slots on these addresses. Error: no descriptor left, or a shared
    /// object that is none of ours.
    pub fn sockets(&self, addresses: &[IpAddr]) -> Result<SharedSockets, OpenError> {
        let here = |address: &IpAddr| {
            let it = self.at(*address)?;
            let _held = it.locks.hold()?;
            self.own().map(|slot| Ok(it.entry(slot)?.socket.into())).collect()
        };
        let all = addresses.iter().map(here).collect::<io::Result<_>>();
        all.map_err(|e| failed("take the sockets over", e, ""))
    }

    /// The own slots.
    fn own(&self) -> std::ops::Range<usize> {
        usize::from(self.first)..usize::from(self.first) + self.count
    }

    /// Whether this process is the leader on an address.
    #[must_use]
    pub fn is_leader(&self, address: IpAddr) -> bool {
        self.at(address).is_ok_and(Shared::is_leader)
    }

    /// Keeps a note for the neighbours, under a key: their work for this process once it has gone,
    /// in any way. They find the notes for which there is room, and [`noted`](Self::noted) finds it
    /// by its mark.
    pub fn note(&self, address: IpAddr, key: u32, note: (&[u8; NOTE_BYTES], u64)) {
        if let Ok(it) = self.at(address) {
            it.last_will.keep(&it.locks, self.first, key, note);
        }
    }

    /// [`noted`](Self::noted) finds no note of this process by a mark any more.
    pub fn unmark(&self, address: IpAddr, mark: u64) {
        if let Ok(it) = self.at(address) {
            last_will::unmark(&it.locks, self.first, mark);
        }
    }

    /// The slot of the process, this one or a neighbour that lives, with a note that `suits`. Of
    /// several notes with this mark the last is found.
    #[must_use]
    pub fn noted(
        &self,
        address: IpAddr,
        mark: u64,
        suits: impl Fn(&[u8; NOTE_BYTES]) -> bool,
    ) -> Option<u8> {
        let it = self.at(address).ok()?;
        last_will::marked(&it.locks, self.first, mark, suits).ok().flatten()
    }

    /// Drops the note with this key.
    pub fn drop_note(&self, address: IpAddr, key: u32) {
        if let Ok(it) = self.at(address) {
            it.last_will.drop(&it.locks, self.first, key);
        }
    }

    /// The notes of neighbours that have gone, if this process is the leader, each with the
    /// address. Any process of the user may have written them. They stay until
    /// [`forget_left`](Self::forget_left): this process may die before it has noted them itself.
    #[must_use]
    pub fn left(&self) -> Vec<(IpAddr, [u8; NOTE_BYTES])> {
        let mut all = Vec::new();
        if !self.host.has_to_look() {
            return all;
        }
        let own = self.own();
        for it in self.shared.iter().filter(|it| it.is_leader()) {
            let Ok(_held) = it.locks.hold_at_once() else {
                // Another process is just joining or leaving.
                self.host.look_again();
                continue;
            };
            let mut returned = it.returned.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = last_will::left(&it.locks, own.clone(), |slot, notes| {
                returned.insert(slot);
                all.extend(notes.into_iter().map(|note| (it.address, note)));
            });
        }
        all
    }

    /// Removes the notes that [`left`](Self::left) has returned.
    pub fn forget_left(&self) {
        for it in &self.shared {
            let mut returned = it.returned.lock().unwrap_or_else(PoisonError::into_inner);
            if returned.is_empty() {
                continue;
            }
            let Ok(_held) = it.locks.hold_at_once() else {
                // They are returned again.
                self.host.look_again();
                continue;
            };
            // The next process on a slot has removed them.
            let is_free = |slot: &usize| !it.locks.is_taken(*slot).unwrap_or(true);
            for slot in std::mem::take(&mut *returned).into_iter().filter(is_free) {
                let _ = last_will::clear(&it.locks, slot);
            }
        }
    }

    /// Whether another process has a slot of an address.
    #[must_use]
    pub fn is_taken(&self, slot: u8, address: IpAddr) -> bool {
        self.at(address).is_ok_and(|it| it.locks.is_taken(usize::from(slot)).unwrap_or(true))
    }

    /// Takes the right to open `afxdp`, which one process of an address has at a time: until
    /// [`leave_xdp`](Self::leave_xdp), or for as long as it has its slots. Error: the first address
    /// on which a neighbour has it. Then nothing is taken.
    pub(crate) fn take_xdp(&self) -> Result<(), IpAddr> {
        let Some(other) = self.shared.iter().find(|it| !it.locks.take_xdp()) else { return Ok(()) };
        self.leave_xdp();
        Err(other.address)
    }

    /// This process does not open `afxdp` after all.
    pub(crate) fn leave_xdp(&self) {
        self.shared.iter().for_each(|it| it.locks.leave_xdp());
    }

    /// The first address on which a neighbour has `afxdp`, or opens it.
    pub(crate) fn xdp_neighbour(&self) -> Option<IpAddr> {
        let found = self.shared.iter().find(|it| it.locks.is_xdp_taken().unwrap_or(false));
        found.map(|it| it.address)
    }

    /// Gives a datagram to the process that has a slot, if one lives.
    pub fn deliver(&self, slot: u8, datagram: &RxDatagram<'_>) -> Delivery {
        // A dead process's mailbox is there still, and has room.
        if !self.is_taken(slot, datagram.dst) {
            return Delivery::NoProcess;
        }
        if self.hand_over(slot, datagram) { Delivery::Done } else { Delivery::Lost }
    }

    /// Gives a datagram to the process that has a slot. Returns whether its mailbox has got it.
    pub fn hand_over(&self, slot: u8, datagram: &RxDatagram<'_>) -> bool {
        let Ok(it) = self.at(datagram.dst) else { return false };
        let mut writers = it.writers.lock().unwrap_or_else(PoisonError::into_inner);
        let known = writers.entry(slot).or_default();
        if known.writer.is_none() && known.asked.is_none_or(|at| at.elapsed() > ASK_EVERY) {
            known.asked = Some(Instant::now());
            let found =
                it.locks.hold_at_once().and_then(|_held| it.sockets().get(usize::from(slot)));
            known.writer = found.ok().map(|entry| Outbox::new(entry.outbox));
        }
        known.writer.as_ref().is_some_and(|writer| writer.write(datagram))
    }

    /// This process listens for a service from now on, on one address or on all of the device.
    /// Error: `EADDRINUSE`: a neighbour does already.
    pub fn listen(&self, service: u64, address: Option<IpAddr>) -> io::Result<()> {
        let here: Vec<&Shared> = self.places(address).collect();
        let place = locks::service(service, On::of(address));
        for (nth, it) in here.iter().enumerate() {
            if let Err(e) = it.locks.listen(place, self.first) {
                here[..nth].iter().for_each(|it| it.unlisten(place, self.first));
                return Err(e);
            }
            it.listens().insert(place);
        }
        Ok(())
    }

    /// It does not any more.
    pub fn unlisten(&self, service: u64, address: Option<IpAddr>) {
        let place = locks::service(service, On::of(address));
        self.places(address).for_each(|it| it.unlisten(place, self.first));
    }

    /// The slot of the neighbour that listens for a service on this address, or on all, unless this
    /// process does so more precisely.
    #[must_use]
    pub fn listener(&self, service: u64, address: IpAddr) -> Option<u8> {
        let it = self.at(address).ok()?;
        for on in On::EACH {
            let place = locks::service(service, on);
            if it.listens().contains(&place) {
                return None;
            }
            if let Ok(Some(slot)) = it.locks.listener(place) {
                return Some(slot);
            }
        }
        None
    }

    /// From now on this process has a request of a peer, which the peer may repeat, or has it no
    /// more. The key is the peer's number of it. `way`: the own address, and the peer's. It waits
    /// for no other process.
    pub fn hold_request(&self, (address, peer): (IpAddr, IpAddr), key: u64, is_held: bool) {
        let Ok(it) = self.at(address) else { return };
        let place = locks::request(peer, key);
        if is_held {
            it.locks.hold_place(place, self.first);
            it.listens().insert(place);
        } else {
            it.unlisten(place, self.first);
        }
    }

    /// The slot of the process that has a request of a peer. This process may have it itself.
    #[must_use]
    pub fn request_holder(&self, (address, peer): (IpAddr, IpAddr), key: u64) -> Option<u8> {
        let it = self.at(address).ok()?;
        let place = locks::request(peer, key);
        if it.listens().contains(&place) {
            return Some(self.first);
        }
        it.locks.listener(place).ok().flatten()
    }

    /// This process has a port on an address as `claim` says from now on. The meaning of the number
    /// is the callers'; to the kernel a port is one, however often this process has it. Error:
    /// `EADDRINUSE`: a neighbour has it in a way that does not go with that. Nothing has changed
    /// then.
    pub fn claim_port(&self, address: IpAddr, port: u32, claim: PortClaim) -> io::Result<()> {
        self.at(address)?.locks.claim_port(port, claim)
    }

    /// Whether a neighbour has a port on an address.
    #[cfg(test)]
    fn is_port_claimed(&self, address: IpAddr, port: u32) -> bool {
        self.at(address).is_ok_and(|it| it.locks.is_port_claimed(port).unwrap_or(false))
    }

    fn places(&self, address: Option<IpAddr>) -> impl Iterator<Item = &Shared> + use<'_> {
        let of_family = move |it: &&Shared| {
            address.is_none_or(|address| match On::of(Some(address)) {
                On::Family => it.address.is_ipv4() == address.is_ipv4(),
                _ => it.address == address,
            })
        };
        self.shared.iter().filter(of_family)
    }
}

impl SharedAddresses for Slots {
    fn inbox(&self, address: IpAddr, nth: usize) -> io::Result<Inbox> {
        let it = self.at(address)?;
        let _held = it.locks.hold()?;
        Ok(Inbox::new(address, it.entry(usize::from(self.first) + nth)?.inbox))
    }

    /// The socket of slot 0, if this process is the leader and the leader before it has
    /// ended.
    fn inherited(&self, address: IpAddr) -> io::Result<Option<Socket>> {
        let it = self.at(address)?;
        // The own slot is read anyway.
        if self.first == 0 || !it.is_leader() {
            return Ok(None);
        }
        let _held = it.locks.hold_at_once()?;
        Ok(Some(it.entry(0)?.socket))
    }

    /// Readable once this process has become a leader, or there may be something for
    /// [`left`](Self::left).
    fn news(&self) -> BorrowedFd<'_> {
        (*self.host.news).as_fd()
    }

    fn heard(&self) {
        self.host.news.clear();
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        // A child of fork(2) has descriptors of nothing.
        if !self.host.is_own() {
            return;
        }
        let mut owes = false;
        for it in &self.shared {
            // A copy of its descriptor in a child between fork and exec would keep it.
            it.locks.leave_xdp();
            // Without the lock the slots look like those of a process that died.
            let Ok(_held) = it.locks.hold() else { continue };
            for slot in self.own() {
                owes |= last_will::are_left(&it.locks, slot).unwrap_or(false);
                // The next leader reads datagrams that come to slot 0 meanwhile.
                if slot > 0
                    && let Ok(entry) = it.sockets().get(slot)
                {
                    let _ = entry.socket.drop_all_input();
                }
                it.locks.leave(slot, REST);
            }
        }
        // With it goes the lead. The process that follows takes slot 0 as it has been left.
        self.host.stop(owes);
    }
}

/// Takes slots on all addresses, and makes the sockets that they need. Returns the first slot, and
/// the number of others' slots.
fn take_slots(
    shared: &[Shared],
    leaderships: &mut [Leadership],
    iface: &Interface,
    config: &PortConfig,
    (count, selector): (usize, u16),
) -> Result<(u8, usize), OpenError> {
    let mut held = Vec::new();
    for it in shared {
        let hint = "a process on this address is stopped: let it go on, or end it";
        let lock = it.locks.hold();
        held.push(lock.map_err(|e| failed(&format!("take the lock of {}", it.name), e, hint))?);
    }
    let first = choose(shared, count).map_err(|e| failed("see which slots are free", e, ""))?;
    let Some((first, neighbours)) = first else {
        let text = format!("of {SLOTS_MAX} slots no {count} are free");
        let hint = "end a process on this address, or take fewer shards";
        return Err(OpenError::plain(Backend::Udp, text, hint));
    };
    for (it, leadership) in shared.iter().zip(leaderships) {
        let own = usize::from(first)..usize::from(first) + count;
        it.make_sockets(iface, config, own.end, selector)?;
        own.into_iter()
            .try_for_each(|slot| it.locks.take(slot))
            .map_err(|e| failed("take a slot", e, ""))?;
        // With a new group this process leads, before another one joins. It may still be
        // that of the last process of the group before.
        let end = Instant::now() + LEADER_RELEASE_MAX;
        loop {
            let looked = leadership.look();
            looked.map_err(|e| {
                failed("become the leader, or see which process is", e.error, &e.hint)
            })?;
            if first > 0 || it.is_leader() {
                break;
            }
            if Instant::now() > end {
                let e = io::Error::from_raw_os_error(libc::EADDRINUSE);
                return Err(failed("become the leader", e, &leadership.hint()));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    drop(held);
    Ok((first, neighbours))
}

/// The first of `count` slots in a row that are free on all addresses, and the number of those that
/// are taken. Where a group of sockets is new, that is slot 0; later slot 0 is the leader's.
fn choose(shared: &[Shared], count: usize) -> io::Result<Option<(u8, usize)>> {
    let mut is_new = true;
    // When each may be used: `None` while it is taken.
    let mut slots = [Some(0); SLOTS_MAX];
    for it in shared {
        is_new &= it.sockets().len()? == 0;
        for (slot, (both, seen)) in slots.iter_mut().zip(it.locks.look()?).enumerate() {
            let mut here = it.locks.rests_until(slot, &seen, REST)?;
            // The next process on the slot writes there: not before they are read, if it can be.
            let are_left = || last_will::are_among(&it.locks, slot, seen.notes);
            if here.is_some() && are_left().unwrap_or(false) {
                here = Some(OWED);
            }
            *both = both.zip(here).map(|(one, other)| one.max(other));
        }
    }
    let taken = slots.iter().filter(|slot| slot.is_none()).count();
    if is_new {
        return Ok(Some((0, taken)).filter(|_| slots[..count].iter().all(Option::is_some)));
    }
    let room = (2 * taken + ROOM_MIN + count).min(SLOTS_MAX);
    let until = |row: &[Option<u64>]| {
        row.iter().try_fold(0, |latest, slot| slot.map(|until| latest.max(until)))
    };
    // Those that rest longest if none has rested enough.
    let rows = |end: usize| {
        let rows = slots[..end].windows(count).enumerate().skip(1);
        rows.filter_map(|(first, row)| Some((until(row)?, first))).min()
    };
    let found = rows(room).filter(|(until, _)| *until < OWED).or_else(|| rows(SLOTS_MAX));
    Ok(found.map(|(_, first)| (u8::try_from(first).expect("below 256"), taken)))
}

#[cfg(test)]
mod squatter_tests;
#[cfg(test)]
mod tests;
