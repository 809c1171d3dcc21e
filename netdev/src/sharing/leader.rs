//! The leader of the processes on an address works for all: its socket has a second name. The
//! others are connected to it, and learn of its end.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, SocketFlags, accept_with, bind, connect, listen};

use super::closing;
use super::layout::SLOTS_MAX;
use super::rendezvous::{Refused, check_user, holders, name, seqpacket};
use crate::kernel::descriptors;
use crate::kernel::inherited;
use crate::tuning::shared::{ANSWER, LEADER_AT_ONCE};

/// The most processes that wait for the end of a leader: there are no more slots.
const WATCHERS_MAX: usize = SLOTS_MAX;

#[derive(Debug)]
pub(super) struct Leadership {
    name: SocketAddrUnix,
    state: State,
    /// Whether this process has it, for all threads.
    pub(super) is_ours: Arc<AtomicBool>,
}

#[derive(Debug)]
enum State {
    /// No process has it, or another user's.
    None,
    /// With the connections of the processes that wait for the end. They say nothing.
    Ours { listener: OwnedFd, watchers: Vec<OwnedFd> },
    /// Connected to the process that has it.
    Theirs(OwnedFd),
}

impl Leadership {
    pub(super) fn new(address: &str) -> io::Result<Self> {
        let name = name(&format!("{address}/duty"))?;
        Ok(Self { name, state: State::None, is_ours: Arc::default() })
    }

    /// Becomes the leader, or connects to the process that is. Error: no descriptor left; another
    /// user has the name, or a program that does not listen.
    pub(super) fn look(&mut self) -> Result<(), Refused> {
        self.state = State::None;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let end = Instant::now() + ANSWER;
        loop {
            let listener = seqpacket(flags)?;
            // The others say nothing.
            descriptors::refuse_rights(&listener);
            match bind(&listener, &self.name).and_then(|()| listen(&listener, i32::MAX)) {
                Ok(()) => {
                    self.state = State::Ours { listener, watchers: Vec::new() };
                    self.is_ours.store(true, Ordering::Relaxed);
                    return Ok(());
                }
                Err(Errno::ADDRINUSE) => {}
                Err(error) => return Err(error.into()),
            }
            let connection = seqpacket(flags)?;
            match connect(&connection, &self.name) {
                Ok(()) => {
                    check_user(&connection)?;
                    self.state = State::Theirs(connection);
                    return Ok(());
                }
                // It has the name and does not listen yet, has just ended, or is stopped and many
                // wait.
                Err(Errno::CONNREFUSED | Errno::AGAIN) if Instant::now() < end => {}
                Err(error) => {
                    let hint = self.hint();
                    return Err(Refused { error: error.into(), hint });
                }
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The user's remedy where a process is the leader and should not be.
    pub(super) fn hint(&self) -> String {
        let peer = match &self.state {
            State::Theirs(connection) => descriptors::peer(connection).ok(),
            State::Ours { .. } | State::None => None,
        };
        let holders = holders(&self.name, peer);
        format!("a process that is ending is it ({holders}): try again, or end it yourself")
    }

    /// Whether no process is known to have it.
    pub(super) fn is_vacant(&self) -> bool {
        matches!(self.state, State::None)
    }

    /// The descriptors that become readable when there is something for [`attend`](Self::attend).
    pub(super) fn waits_for(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let (own, watchers) = match &self.state {
            State::None => (None, &[][..]),
            State::Ours { listener, watchers } => (Some(listener.as_fd()), watchers.as_slice()),
            State::Theirs(connection) => (Some(connection.as_fd()), &[][..]),
        };
        own.into_iter().chain(watchers.iter().map(OwnedFd::as_fd))
    }

    /// Does what there is to do: `ready` says of each descriptor of
    /// [`waits_for`](Self::waits_for) whether it is readable. Returns whether a process has gone
    /// that this one has to do something for. Error: no descriptor left.
    pub(super) fn attend(&mut self, ready: &[bool]) -> io::Result<bool> {
        let follow = |leadership: &mut Self| {
            leadership.look().map_err(|refused| refused.error)?;
            Ok(leadership.is_ours.load(Ordering::Relaxed))
        };
        let Some((own, others)) = ready.split_first() else { return follow(self) };
        match &mut self.state {
            State::Ours { listener, watchers } => {
                let mut is_over = others.iter();
                let before = watchers.len();
                watchers.retain(|_| !is_over.next().copied().unwrap_or(false));
                let has_gone = watchers.len() < before;
                // A connection that cannot be accepted now is reported again; an end is not.
                let failed = |e: io::Error| if has_gone { Ok(true) } else { Err(e) };
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                for _ in 0..if *own { LEADER_AT_ONCE } else { 0 } {
                    if !closing::has_room() {
                        return failed(io::ErrorKind::WouldBlock.into());
                    }
                    let watcher = match accept_with(&*listener, flags) {
                        Ok(watcher) => inherited::noted(watcher),
                        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => break,
                        Err(error) => return failed(error.into()),
                    };
                    // Others hear that it is over at once.
                    if watchers.len() < WATCHERS_MAX && check_user(&watcher).is_ok() {
                        watchers.push(watcher);
                    } else {
                        closing::close_elsewhere(watcher);
                    }
                }
                Ok(has_gone)
            }
            State::Theirs(_) if *own => follow(self),
            State::Theirs(_) | State::None => Ok(false),
        }
    }
}
