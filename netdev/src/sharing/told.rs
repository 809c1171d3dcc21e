//! The messages of a process to those that outlive it, and the connections that show its end.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::{SendFlags, SocketAddrUnix, SocketFlags, connect, send};
use rustix::process::geteuid;

use super::Shared;
use super::guardian::GUARDIAN_VARIABLE;
use super::meeting::{Objects, SPACE, seqpacket};
use crate::handed::{Agent, guard};
use crate::kernel::descriptors;
use crate::kernel::rights;

/// The first and the longest pause before an agent that has ended is looked for.
const PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(30)];

/// A process's message: its slots, and for each address copies of the shared objects.
#[derive(Debug, Clone)]
pub(super) struct Words(Vec<(Vec<u8>, Arc<Objects>)>);

impl Words {
    pub(super) fn of(shared: &[Shared], first: u8, count: usize) -> Self {
        let more = u8::try_from(count - 1).expect("no more than there are slots");
        let message = |it: &Shared| [&[first, more], it.name.as_bytes()].concat();
        Self(shared.iter().map(|it| (message(it), it.objects.clone())).collect())
    }

    fn tell(&self, connection: &OwnedFd) -> io::Result<()> {
        self.0.iter().try_for_each(|(message, objects)| {
            rights::send::<SPACE>(connection, message, &objects.descriptors())
        })
    }
}

/// Tells the guardian that the environment names, until the result is dropped.
pub(super) fn tell_guardian(words: &Words) -> Option<OwnedFd> {
    tell_guardian_at(&std::env::var(GUARDIAN_VARIABLE).ok()?, words)
}

pub(super) fn tell_guardian_at(name: &str, words: &Words) -> Option<OwnedFd> {
    let name = SocketAddrUnix::new_abstract_name(name.as_bytes()).ok()?;
    let connection = connected(&name).ok()?;
    // It gets the sockets of the address.
    let uid = descriptors::peer(&connection).ok()?.uid;
    if uid != geteuid().as_raw() && uid != 0 {
        return None;
    }
    words.tell(&connection).ok()?;
    Some(connection)
}

fn connected(to: &SocketAddrUnix) -> io::Result<OwnedFd> {
    let connection = seqpacket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    connect(&connection, to)?;
    Ok(connection)
}

/// The connection to the agent's guardians. An agent that was there once is looked for when it
/// ends.
#[derive(Debug)]
pub(super) struct AgentLink {
    address: SocketAddrUnix,
    words: Words,
    connection: Result<OwnedFd, Instant>,
    since: Instant,
    /// Before the next time that it is looked for.
    pause: Duration,
}

impl AgentLink {
    /// Tells the agent that this process asks for ports. `None` if there is none.
    pub(super) fn new(words: Words) -> Option<Self> {
        Self::at(&guard::path(Agent::from_environment().path()?), words)
    }

    pub(super) fn at(path: &Path, words: Words) -> Option<Self> {
        let now = Instant::now();
        let address = SocketAddrUnix::new(path).ok()?;
        let mut it = Self { address, words, connection: Err(now), since: now, pause: PAUSES[0] };
        match it.connect() {
            // Too many wait there at this moment.
            Err(e) if e.kind() != io::ErrorKind::WouldBlock => None,
            _ => Some(it),
        }
    }

    fn connect(&mut self) -> io::Result<()> {
        self.since = Instant::now();
        let told = connected(&self.address).and_then(|connection| {
            self.words.tell(&connection)?;
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

    /// The descriptor that becomes readable when the agent ends. It carries no data.
    pub(super) fn waits_for(&self) -> Option<BorrowedFd<'_>> {
        self.connection.as_ref().ok().map(OwnedFd::as_fd)
    }

    /// When to call [`attend`](Self::attend) even if nothing is readable.
    pub(super) fn due(&self) -> Option<Instant> {
        self.connection.as_ref().err().copied()
    }

    /// Looks for an agent if it is time; `has_ended` says that the connection is readable.
    pub(super) fn attend(&mut self, has_ended: bool) {
        let now = Instant::now();
        if has_ended && self.connection.is_ok() {
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

    /// Says that there is nothing to end for this process.
    pub(super) fn farewell(self) {
        if let Ok(connection) = self.connection {
            let _ = send(&connection, guard::FAREWELL, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        }
    }
}
