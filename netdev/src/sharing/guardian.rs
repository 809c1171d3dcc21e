//! A guardian outlives the processes on an address, and looks after their leftovers where no other
//! process has the address any more. `rocinante run` starts one for its program.
//!
//! A process that takes slots connects to the guardian that its environment names, and sends copies
//! of each address's objects. It keeps the connection and says nothing more, so the guardian sleeps
//! until the process leaves its slots or dies. A child of fork(2) does not keep it
//! ([`inherited`](crate::kernel::inherited)).

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, ioctl_fionread};
use rustix::net::{RecvFlags, SocketAddrUnix, SocketFlags, accept_with, bind, getsockname, listen};
use rustix::process::geteuid;
use rustix::time::Timespec;

use super::closing;
use super::helper::Helper;
use super::last_will;
use super::layout::SLOTS_MAX;
use super::locks::Locks;
use super::rendezvous::{DESCRIPTORS, Objects, SPACE, address_of, seqpacket, welcome};
use crate::kernel::descriptors::{self, EventFd};
use crate::kernel::rights;
use crate::tuning::shared::{JOINS_MAX, LOOK_EVERY, PLACES_MAX, SETTLES, WARDS_MAX};

/// Names the environment variable with the name of the guardian's socket, an abstract one of
/// unix(7).
pub const GUARDIAN_VARIABLE: &str = "ROCINANTE_GUARDIAN";

const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
/// A message: the first slot, the number of those behind it, and the address.
const HEAD: usize = 2;
const MESSAGE_MAX: usize = HEAD + 64;
/// The descriptors that a message takes: those with it, and while they are looked at two more.
const ROOM: usize = DESCRIPTORS + 2;

/// The guardian of a program, or of one process.
#[derive(Debug)]
pub struct Guardian {
    listener: Option<OwnedFd>,
    /// The program, until it has ended.
    program: Option<OwnedFd>,
    wards: Vec<Ward>,
}

/// A guardian's next work.
#[derive(Debug)]
pub enum Errand {
    /// A process has left its slots.
    Settle(Vec<Left>),
    /// A process of another user has come. It needs a guardian of that user, from
    /// [`Guardian::of`].
    OtherUser {
        /// The connection.
        connection: OwnedFd,
        /// The user.
        uid: u32,
        /// The group.
        gid: u32,
    },
    /// A process more than there is room for has come, or an address more of one. No guardian
    /// looks after it.
    TooMany,
}

/// A process that has slots.
#[derive(Debug)]
struct Ward {
    connection: OwnedFd,
    places: Vec<Left>,
}

/// An address on which a process had slots that it has left, by its end or by closing its device.
#[derive(Debug)]
pub struct Left {
    /// The address.
    pub address: IpAddr,
    /// Its interface, if the address is of the link alone.
    pub interface: Option<u32>,
    first: u8,
    count: usize,
    objects: Arc<Objects>,
    locks: Locks,
}

impl Guardian {
    /// A socket for [`new`](Self::new), and its name for [`GUARDIAN_VARIABLE`]. Error: no
    /// descriptor left.
    pub fn socket() -> io::Result<(OwnedFd, String)> {
        let listener = seqpacket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
        // The kernel chooses a free name.
        bind(&listener, &SocketAddrUnix::new_unnamed())?;
        listen(&listener, i32::MAX)?;
        let own = SocketAddrUnix::try_from(getsockname(&listener)?)?;
        let name = own.abstract_name().and_then(|name| str::from_utf8(name).ok());
        let name = name.ok_or(io::ErrorKind::AddrNotAvailable)?.to_owned();
        Ok((listener, name))
    }

    /// The guardian that listens there, of a program that a descriptor names (pidfd_open(2)). The
    /// limit of this process's descriptors becomes its maximum.
    #[must_use]
    pub fn new(listener: OwnedFd, program: OwnedFd) -> Self {
        descriptors::raise_limit();
        Self { listener: Some(listener), program: Some(program), wards: Vec::new() }
    }

    /// The guardian of one process, which has connected. The limit of descriptors is raised, too.
    #[must_use]
    pub fn of(connection: OwnedFd) -> Self {
        descriptors::raise_limit();
        let ward = Ward { connection, places: Vec::new() };
        Self { listener: None, program: None, wards: vec![ward] }
    }

    /// Sleeps until there is something to do; `None` if the program has ended and no process is
    /// left to look after. Error: poll(2) has no memory.
    pub fn errand(&mut self) -> io::Result<Option<Errand>> {
        loop {
            // The messages of the program from before its end come first.
            let Self { listener, program, wards } = &*self;
            let is_over = program.is_none() && wards.is_empty();
            let others = listener.iter().chain(program);
            let all = wards.iter().map(|ward| &ward.connection).chain(others);
            let mut all: Vec<PollFd<'_>> =
                all.map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)).collect();
            match poll(&mut all, is_over.then_some(&AT_ONCE)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            let ready: Vec<bool> = all.iter().map(|fd| !fd.revents().is_empty()).collect();
            let (of_wards, others) = ready.split_at(wards.len());
            match self.hear(of_wards) {
                Some((at, Heard::End)) => {
                    return Ok(Some(Errand::Settle(self.wards.swap_remove(at).places)));
                }
                Some((_, Heard::Message)) => {}
                Some((_, Heard::TooMany)) => return Ok(Some(Errand::TooMany)),
                // A ward that ends makes some.
                Some((_, Heard::NoRoom)) => std::thread::sleep(LOOK_EVERY),
                None if self.listener.is_some() && others[0] => {
                    if let Some(errand) = self.accept() {
                        return Ok(Some(errand));
                    }
                }
                None if others.iter().any(|ready| *ready) => self.program = None,
                None if is_over => return Ok(None),
                None => {}
            }
        }
    }

    /// Reads a message of one of the ready wards: of the first for which there is room.
    fn hear(&mut self, ready: &[bool]) -> Option<(usize, Heard)> {
        let mut without_room = None;
        for (at, ward) in self.wards.iter_mut().enumerate().filter(|(at, _)| ready[*at]) {
            match ward.hear() {
                Heard::NoRoom => without_room = Some((at, Heard::NoRoom)),
                heard => return Some((at, heard)),
            }
        }
        without_room
    }

    /// Accepts those that have come, up to the first of another user or without room.
    fn accept(&mut self) -> Option<Errand> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        for _ in 0..JOINS_MAX {
            let accepted = match closing::has_room() {
                true => accept_with(self.listener.as_ref()?, flags),
                false => Err(Errno::MFILE),
            };
            let connection = match accepted {
                Ok(connection) => connection,
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return None,
                Err(_) => {
                    // Without a descriptor it would be reported again at once.
                    std::thread::sleep(LOOK_EVERY);
                    return None;
                }
            };
            let own = geteuid();
            match descriptors::peer(&connection) {
                Ok(descriptors::Peer { uid, .. }) if uid == own.as_raw() => {
                    if self.wards.len() == WARDS_MAX {
                        closing::close_elsewhere(connection);
                        return Some(Errand::TooMany);
                    }
                    self.wards.push(Ward { connection, places: Vec::new() });
                }
                Ok(descriptors::Peer { uid, gid, .. }) if own.is_root() => {
                    return Some(Errand::OtherUser { connection, uid, gid });
                }
                _ => closing::close_elsewhere(connection),
            }
        }
        None
    }
}

/// The state of a ward that is ready.
#[derive(Debug)]
enum Heard {
    /// It has sent a message.
    Message,
    /// It has sent one more than is kept.
    TooMany,
    /// It has sent one that stays where it is: the kernel would close descriptors for which there
    /// is no room.
    NoRoom,
    /// It has left its slots.
    End,
}

impl Ward {
    /// Reads a message, if there is room for its descriptors.
    fn hear(&mut self) -> Heard {
        let has_more = ioctl_fionread(&self.connection).is_ok_and(|bytes| bytes > 0);
        if has_more && !descriptors::has_room(&self.connection, ROOM) {
            return Heard::NoRoom;
        }
        let mut message = [0; MESSAGE_MAX];
        let flags = RecvFlags::DONTWAIT;
        match rights::receive::<SPACE>(&self.connection, &mut message, flags) {
            Err(Errno::AGAIN | Errno::INTR) => Heard::Message,
            Ok((bytes, _, descriptors)) if bytes > 0 => {
                if self.places.len() == PLACES_MAX {
                    return Heard::TooMany;
                }
                self.places.extend(Left::read(&message[..bytes], descriptors));
                Heard::Message
            }
            _ => Heard::End,
        }
    }
}

impl Left {
    /// A process's message; `None` if it makes no sense. Any process of the user may have sent it.
    fn read(message: &[u8], descriptors: Vec<OwnedFd>) -> Option<Self> {
        let (&[first, more], name) = message.split_first_chunk::<HEAD>()?;
        let (address, interface) = address_of(str::from_utf8(name).ok()?)?;
        let objects = Arc::new(Objects::from_descriptors(descriptors)?);
        let locks = Locks::open(&objects.memory).ok()?;
        let count = usize::from(more) + 1;
        let fits = usize::from(first) + count <= SLOTS_MAX;
        fits.then_some(Self { address, interface, first, count, objects, locks })
    }

    /// Has `act` end the connections that the process left: `act` opens the address as any process
    /// does, so it becomes the leader and gets the notes, and waits as long as
    /// [`is_owed`](Self::is_owed). Returns when there is nothing left to do, or at `deadline`.
    /// While another process has the address it is that one's to do.
    pub fn settle(&self, deadline: Instant, act: impl Fn()) {
        let settled = deadline.min(Instant::now() + SETTLES);
        while self.has_slot() && Instant::now() < settled {
            std::thread::sleep(Duration::from_millis(1));
        }
        let is_over = || !self.is_owed() || Instant::now() >= deadline;
        while !is_over() {
            // Of the guardians of an address one is enough.
            if self.locks.is_deserted() && self.locks.take_guard() {
                self.answering(&act);
                self.locks.leave_guard();
                if is_over() {
                    return;
                }
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Whether notes of the process are left.
    #[must_use]
    pub fn is_owed(&self) -> bool {
        self.slots().any(|slot| last_will::are_left(&self.locks, slot).unwrap_or(false))
    }

    fn slots(&self) -> std::ops::Range<usize> {
        usize::from(self.first)..usize::from(self.first) + self.count
    }

    fn has_slot(&self) -> bool {
        self.slots().any(|slot| self.locks.is_taken(slot).unwrap_or(false))
    }

    /// Lets processes join meanwhile: no other has the objects.
    fn answering(&self, act: impl FnOnce()) {
        let Ok(stop) = EventFd::new().map(Arc::new) else { return };
        let (stopped, objects) = (stop.clone(), self.objects.clone());
        let helper = Helper::start("roce-meet", move || {
            loop {
                let fds = [(*stopped).as_fd(), objects.listener.as_fd()];
                let mut all = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
                let has_come = poll(&mut all, None).is_ok() && !all[1].revents().is_empty();
                if !all[0].revents().is_empty() {
                    break;
                }
                if !has_come || !welcome(&objects) {
                    std::thread::sleep(LOOK_EVERY);
                }
            }
            drop(objects);
        });
        let Ok(helper) = helper else { return };
        act();
        stop.signal();
        helper.end();
    }
}
