//! The messages of a process to those that outlive it, and the connections that show its end.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher as _, Hasher as _};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, SocketAddrUnix, SocketFlags, connect, send};
use rustix::process::geteuid;
use rustix::time::Timespec;

use super::Shared;
use super::guardian::GUARDIAN_VARIABLE;
use super::rendezvous::{Objects, SPACE, seqpacket};
use crate::handed::page::{self, Account, Page};
use crate::handed::{Agent, WAIT_MAX, guard};
use crate::kernel::descriptors;
use crate::kernel::rights;

/// The first and the longest pause before an agent that has ended is looked for.
const PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(30)];

/// A process's message: its slots, and for each address copies of the shared objects.
#[derive(Debug, Clone)]
pub(super) struct Registration(Vec<(Vec<u8>, Arc<Objects>)>);

impl Registration {
    pub(super) fn of(shared: &[Shared], first: u8, count: usize) -> Self {
        let more = u8::try_from(count - 1).expect("no more than there are slots");
        let message = |it: &Shared| [&[first, more], it.name.as_bytes()].concat();
        Self(shared.iter().map(|it| (message(it), it.objects.clone())).collect())
    }

    fn send(&self, connection: &OwnedFd, addresses_max: usize) -> io::Result<()> {
        self.0.iter().take(addresses_max).try_for_each(|(message, objects)| {
            rights::send::<SPACE>(connection, message, &objects.descriptors())
        })
    }
}

/// Tells the guardian that the environment names, until the result is dropped.
pub(super) fn register_with_guardian(registration: &Registration) -> Option<OwnedFd> {
    register_with_guardian_at(&std::env::var(GUARDIAN_VARIABLE).ok()?, registration)
}

pub(super) fn register_with_guardian_at(
    name: &str,
    registration: &Registration,
) -> Option<OwnedFd> {
    let name = SocketAddrUnix::new_abstract_name(name.as_bytes()).ok()?;
    let connection = connected(&name).ok()?;
    // It gets the sockets of the address.
    let uid = descriptors::peer(&connection).ok()?.uid;
    if uid != geteuid().as_raw() && uid != 0 {
        return None;
    }
    registration.send(&connection, usize::MAX).ok()?;
    Some(connection)
}

fn connected(to: &SocketAddrUnix) -> io::Result<OwnedFd> {
    let connection = seqpacket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    connect(&connection, to)?;
    Ok(connection)
}

/// The page that the agent of now has handed over, once it has, and what the device holds.
#[derive(Debug, Default)]
pub(super) struct PagePlace {
    page: Mutex<Option<Arc<Page>>>,
    pub(super) account: Account,
}

impl PagePlace {
    /// With a page of its own, where no agent is.
    pub(super) fn own(&self) {
        let page = Page::own().ok().map(Arc::new);
        *self.page.lock().unwrap_or_else(PoisonError::into_inner) = page;
    }

    /// The page, unless it is just being changed.
    pub(super) fn get(&self) -> Option<Arc<Page>> {
        self.page.try_lock().ok()?.clone()
    }
}

/// The purpose of a connection to an agent.
#[derive(Debug)]
enum Errand {
    /// Guardians.
    Register(Registration),
    /// A page. The key is the same after a restart of the agent.
    Publish { key: u64, place: Arc<PagePlace> },
}

/// A connection to the agent, for its guardians or a page. An agent that was there once is looked
/// for when it ends.
#[derive(Debug)]
pub(super) struct AgentLink {
    address: SocketAddrUnix,
    errand: Errand,
    connection: Result<OwnedFd, Instant>,
    since: Instant,
    /// Before the next time that it is looked for.
    pause: Duration,
}

impl AgentLink {
    /// Tells the agent that this process asks for ports. `None` if there is none.
    pub(super) fn new(registration: Registration) -> Option<Self> {
        let path = guard::path(Agent::from_environment().ok()?.path()?);
        Self::at(&path, Errand::Register(registration))
    }

    /// Asks the agent for a page, which comes to `place`: now, so that limits bind from the first
    /// object on, or later if the agent is slow. `None` if there is no agent.
    pub(super) fn for_page(place: &Arc<PagePlace>) -> Option<Self> {
        let key = RandomState::new().build_hasher().finish();
        let path = page::path(Agent::from_environment().ok()?.path()?);
        let mut it = Self::at(&path, Errand::Publish { key, place: place.clone() })?;
        it.wait(WAIT_MAX);
        Some(it)
    }

    fn wait(&mut self, limit: Duration) {
        let Ok(connection) = &self.connection else { return };
        let end = Instant::now() + limit;
        let is_readable = loop {
            let left = end.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).unwrap_or_default();
            match poll(&mut [PollFd::new(connection, PollFlags::IN)], Some(&left)) {
                Err(Errno::INTR) => {}
                other => break other.is_ok_and(|count| count > 0),
            }
        };
        self.attend(is_readable);
    }

    fn at(path: &Path, errand: Errand) -> Option<Self> {
        let now = Instant::now();
        let address = SocketAddrUnix::new(path).ok()?;
        let mut it = Self { address, errand, connection: Err(now), since: now, pause: PAUSES[0] };
        match it.connect() {
            // Too many wait there at this moment.
            Err(e) if e.kind() != io::ErrorKind::WouldBlock => None,
            _ => Some(it),
        }
    }

    fn connect(&mut self) -> io::Result<()> {
        self.since = Instant::now();
        let told = connected(&self.address).and_then(|connection| {
            match &self.errand {
                // An agent hangs up on a program that sends more.
                Errand::Register(it) => it.send(&connection, guard::PARCELS_MAX + 1)?,
                Errand::Publish { key, .. } => page::ask(&connection, *key)?,
            }
            Ok(connection)
        });
        match told {
            Ok(connection) => {
                self.connection = Ok(connection);
                Ok(())
            }
            Err(e) => {
                self.connection = Err(self.since + self.pause);
                self.pause = (self.pause * 2).min(PAUSES[1]);
                Err(e)
            }
        }
    }

    /// The descriptor that becomes readable when the agent ends, or hands a page over.
    pub(super) fn waits_for(&self) -> Option<BorrowedFd<'_>> {
        self.connection.as_ref().ok().map(OwnedFd::as_fd)
    }

    /// When to call [`attend`](Self::attend) even if nothing is readable.
    pub(super) fn due(&self) -> Option<Instant> {
        self.connection.as_ref().err().copied()
    }

    /// Takes a page that has come, and looks for an agent if it is time. `is_readable` is of the
    /// connection.
    pub(super) fn attend(&mut self, is_readable: bool) {
        let now = Instant::now();
        if is_readable && self.connection.is_ok() && !self.has_page() {
            if self.since.elapsed() > PAUSES[1] {
                self.pause = PAUSES[0];
            }
            self.connection = Err(now + self.pause);
            self.pause = (self.pause * 2).min(PAUSES[1]);
        }
        if self.due().is_some_and(|at| at <= now) {
            let _ = self.connect();
        }
    }

    /// Whether a page has come.
    fn has_page(&self) -> bool {
        let (Ok(connection), Errand::Publish { place, .. }) = (&self.connection, &self.errand)
        else {
            return false;
        };
        let Ok((page, seat)) = page::receive(connection) else { return false };
        let mut shared = place.page.lock().unwrap_or_else(PoisonError::into_inner);
        let old = shared.replace(Arc::new(page));
        drop((shared, old));
        if let Some(seat) = seat {
            place.account.sit(seat);
        }
        true
    }

    /// Says that there is nothing to end for this process.
    pub(super) fn farewell(self) {
        if let (Ok(connection), Errand::Register(_)) = (self.connection, self.errand) {
            let _ = send(&connection, guard::FAREWELL, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{accept_with, bind, listen};

    use super::*;
    use crate::handed::guard::{PARCELS_MAX, Word, receive};
    use crate::handed::page::{Ledger, Usage};
    use crate::sharing::rendezvous::join;

    /// The first agent ends, and the next one gets the same key, and hands out another page.
    #[test]
    fn a_page_comes_when_the_agent_answers_and_again_from_the_next_agent() {
        let folder = tempfile::TempDir::new().expect("a folder");
        let place = folder.path().join("agent");
        let page = Arc::<PagePlace>::default();
        let errand = || Errand::Publish { key: 7, place: page.clone() };
        assert!(AgentLink::at(&place, errand()).is_none(), "there is no agent");
        let listens = || {
            let _ = std::fs::remove_file(&place);
            let listener = seqpacket(SocketFlags::CLOEXEC).expect("a socket");
            bind(&listener, &SocketAddrUnix::new(&*place).expect("a name")).expect("bound");
            listen(&listener, 1).expect("it listens");
            listener
        };
        let mut listener = listens();
        let mut link = AgentLink::at(&place, errand()).expect("an agent");
        let mut pages = Vec::new();
        for _ in 0..3 {
            let agent = accept_with(&listener, SocketFlags::CLOEXEC).expect("connected");
            assert_eq!(page::asked(&agent).expect("a request").key, 7);
            let before = page.get();
            link.attend(false);
            assert_eq!(before.is_none(), pages.is_empty(), "the last one is used until then");
            let made = page::make().expect("a page");
            let (file, ledger) = Ledger::make(&Usage::default()).expect("a ledger");
            page::hand_over(&agent, made.as_fd(), Some((file.as_fd(), 9))).expect("sent");
            link.wait(Duration::from_secs(30));
            assert_eq!(ledger.usage().current, [0, 0, 8 * pages.len() as u64]);
            page.account.charge(&[0, 0, 8]).expect("no limit");
            let now = page.get().expect("it came");
            assert!(pages.iter().all(|other| !Arc::ptr_eq(other, &now)));
            pages.push(now);
            drop((agent, std::mem::replace(&mut listener, listens())));
            link.attend(true);
            crate::testing::testns::wait_until("it comes back", || {
                link.attend(false);
                link.due().is_none()
            });
        }
        // Nonsense in the place of a page ends the connection, and the last page stays.
        let agent = accept_with(&listener, SocketFlags::CLOEXEC).expect("connected");
        send(&agent, b"{}", SendFlags::empty()).expect("sent");
        link.attend(true);
        assert!(link.due().is_some());
        assert!(Arc::ptr_eq(&page.get().expect("the last"), &pages[2]));
    }

    #[test]
    fn an_agent_gets_the_parcels_that_it_keeps_and_one_if_there_are_more() {
        let name = format!("test-of-parcels-{}", std::process::id());
        let folder = tempfile::TempDir::new().expect("a folder");
        let place = folder.path().join("agent");
        let objects = Arc::new(join(&name).expect("the first"));
        let listener = seqpacket(SocketFlags::CLOEXEC).expect("a socket");
        bind(&listener, &SocketAddrUnix::new(&*place).expect("a name")).expect("bound");
        listen(&listener, 1).expect("it listens");
        let sent = |addresses| {
            let registration = Registration(vec![(vec![1], objects.clone()); addresses]);
            drop(AgentLink::at(&place, Errand::Register(registration)).expect("an agent"));
            let connection = accept_with(&listener, SocketFlags::CLOEXEC).expect("connected");
            std::iter::repeat_with(|| receive(&connection).expect("no error"))
                .take_while(|word| matches!(word, Word::Parcel(_)))
                .count()
        };
        let counts = [1, PARCELS_MAX, PARCELS_MAX + 1, PARCELS_MAX + 9].map(sent);
        assert_eq!(counts, [1, PARCELS_MAX, PARCELS_MAX + 1, PARCELS_MAX + 1]);
    }
}
