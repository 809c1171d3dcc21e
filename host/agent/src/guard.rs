//! Guardians: they end the connections of programs that have died.
//!
//! A program leaves parcels with the agent (`netdev/src/handed/guard.rs`). When it dies the agent
//! starts `rocinante guardian` in the program's network namespace and hands them on. The guardian
//! takes the program's user and drops every right before it looks at them. So a hostile
//! program packs its parcels for a process of its own user.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rocinante_netdev::handed::AGENT_VARIABLE;
use rocinante_netdev::handed::guard::{
    PARCEL_DESCRIPTORS, PARCELS_MAX, Parcel, Word, handed_on, receive,
};
use rustix::process::{Pid, PidfdFlags, Resource, getrlimit, pidfd_open};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::io::Interest;
use tokio::sync::Semaphore;

use crate::asker::{Asker, Namespace, Own};
use crate::limits::Limits;
use crate::ready::readable;
use crate::rights;

/// Descriptors that are kept for the programs of a container: enough for all 256 that an address
/// can have, with three addresses.
const DESCRIPTORS_MAX: usize = 4096;
/// Beside its parcels a program has a connection, a pidfd and its network namespace.
const EACH: usize = 3;
/// Guardians of a container at a time. One takes all programs of a user that have died.
const AT_ONCE_MAX: usize = 4;
/// Guardians of all containers at a time.
const ALL_AT_ONCE_MAX: usize = 64;
/// How long a guardian may take: it gives up earlier.
const PATIENCE: Duration = Duration::from_secs(10);

/// The parcels kept for programs, and the guardians at work.
#[derive(Debug)]
pub(crate) struct Guards {
    program: PathBuf,
    limits: Arc<Limits>,
    descriptors_max: usize,
    turns: Semaphore,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    containers: HashMap<u64, Container>,
    descriptors: usize,
}

#[derive(Debug, Default)]
struct Container {
    descriptors: usize,
    guardians: usize,
    dead: Vec<Ward>,
}

/// A program, as long as it lives, and its parcels.
#[derive(Debug)]
struct Ward {
    namespace: Namespace,
    /// Its user and group.
    user: (u32, u32),
    parcels: Vec<Parcel>,
    room: Room,
}

/// Descriptors that are counted for a container until this is dropped.
#[derive(Debug)]
struct Room {
    guards: Arc<Guards>,
    container: u64,
    descriptors: usize,
}

impl Guards {
    /// Starts `program` as the guardian; `per_second` programs of a container are listened to.
    pub(crate) fn new(program: PathBuf, per_second: u32) -> Self {
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        Self {
            program,
            limits: Arc::new(Limits::new(per_second)),
            descriptors_max: usize::try_from(files / 2).unwrap_or(usize::MAX),
            turns: Semaphore::new(ALL_AT_ONCE_MAX),
            inner: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the parcels of the program at the other end, and has its connections ended if it dies.
    pub(crate) async fn watch(self: Arc<Self>, own: &Own, connection: OwnedFd) {
        let Ok(asker) = Asker::anywhere(&connection, own) else { return };
        let container = asker.namespace().inode();
        // The limit is of connections in a time; a program may stay for as long as it lives.
        if self.limits.enter(container, Instant::now()).is_none() {
            return;
        }
        let mut room = Room { guards: Arc::clone(&self), container, descriptors: 0 };
        let (pidfd, namespace, user) = asker.into_parts();
        let (Ok(connection), Ok(process)) = (readable(connection), readable(pidfd)) else { return };
        let mut parcels = Vec::new();
        if !room.grow(EACH) {
            return;
        }
        loop {
            let word = tokio::select! {
                biased;
                word = connection.async_io(Interest::READABLE, |from| receive(from)) => word,
                // It may have given the connection away.
                _ = process.readable() => Ok(Word::End),
            };
            match word {
                Ok(Word::Parcel(parcel))
                    if parcels.len() < PARCELS_MAX && room.grow(PARCEL_DESCRIPTORS) =>
                {
                    parcels.push(parcel);
                }
                Ok(Word::End) if !parcels.is_empty() => break,
                // It tells too much, nonsense, or that nothing is to be done.
                _ => return,
            }
        }
        drop((connection, process));
        self.end(container, Ward { namespace, user, parcels, room }).await;
    }

    /// Has the connections of a program ended that has died, by a guardian that is to start or by
    /// one that this or another call starts next.
    async fn end(&self, container: u64, ward: Ward) {
        {
            let mut inner = self.lock();
            let of = inner.containers.entry(container).or_default();
            of.dead.push(ward);
            if of.guardians >= AT_ONCE_MAX {
                return;
            }
            of.guardians += 1;
        }
        loop {
            let turn = self.turns.acquire().await;
            let wards = self.next(container);
            if wards.is_empty() {
                return;
            }
            if let Err(error) = self.settle(wards).await {
                eprintln!("rocinante-agent: cannot end the connections of the dead: {error}");
            }
            drop(turn);
        }
    }

    /// The dead of a container for one guardian, up to its limit. With none left one guardian
    /// less is at work.
    fn next(&self, container: u64) -> Vec<Ward> {
        let mut inner = self.lock();
        let Some(of) = inner.containers.get_mut(&container) else { return Vec::new() };
        let (mut user, mut parcels) = (None, 0);
        let fits = |ward: &mut Ward| {
            let fits = *user.get_or_insert(ward.user) == ward.user
                && parcels + ward.parcels.len() <= PARCELS_MAX;
            parcels += if fits { ward.parcels.len() } else { 0 };
            fits
        };
        let wards: Vec<Ward> = of.dead.extract_if(.., fits).collect();
        if wards.is_empty() {
            of.guardians -= 1;
            inner.forget_if_idle(container);
        }
        wards
    }

    /// Starts a guardian for programs of one user and container, and waits for its end.
    async fn settle(&self, wards: Vec<Ward>) -> io::Result<()> {
        let program = self.program.clone();
        let started = tokio::task::spawn_blocking(move || {
            let child = start(&program, &wards)?;
            // Their parcels are the guardian's now, and count until it ends.
            Ok((child, wards.into_iter().map(|ward| ward.room).collect::<Vec<_>>()))
        });
        let (mut child, _rooms) = started.await.map_err(io::Error::other).flatten()?;
        let ended = async {
            let process = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
            readable(process)?.readable().await.map(drop)
        };
        if !matches!(tokio::time::timeout(PATIENCE, ended).await, Ok(Ok(()))) {
            child.kill()?;
        }
        let waited = tokio::task::spawn_blocking(move || child.wait());
        waited.await.map_err(io::Error::other).flatten().map(drop)
    }
}

impl Inner {
    fn forget_if_idle(&mut self, container: u64) {
        let is_idle = |of: &Container| of.descriptors == 0 && of.guardians == 0;
        if self.containers.get(&container).is_some_and(is_idle) {
            self.containers.remove(&container);
        }
    }
}

impl Room {
    /// Counts more descriptors, unless there is no room for them.
    fn grow(&mut self, by: usize) -> bool {
        let mut inner = self.guards.lock();
        let Inner { containers, descriptors } = &mut *inner;
        let of = containers.entry(self.container).or_default();
        let fits = of.descriptors + by <= DESCRIPTORS_MAX
            && *descriptors + by <= self.guards.descriptors_max;
        if fits {
            of.descriptors += by;
            *descriptors += by;
            self.descriptors += by;
        }
        fits
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let mut inner = self.guards.lock();
        inner.descriptors -= self.descriptors;
        if let Some(of) = inner.containers.get_mut(&self.container) {
            of.descriptors -= self.descriptors;
        }
        inner.forget_if_idle(self.container);
    }
}

/// Starts the guardian of programs of one user, in the network namespace of the first.
fn start(program: &Path, wards: &[Ward]) -> io::Result<Child> {
    let Some(Ward { namespace, user: (uid, gid), .. }) = wards.first() else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let connection = handed_on(wards.iter().flat_map(|ward| &ward.parcels))?;
    let mut command = Command::new(program);
    command.args(["guardian", "--part", "be-for-one"]);
    command.args(["--user", &uid.to_string(), "--group", &gid.to_string()]);
    command.current_dir("/").env_clear().env(AGENT_VARIABLE, "off");
    command.stdin(connection).stdout(Stdio::null()).stderr(Stdio::null());
    // A child is where the thread is that starts it, and has its rights.
    let start = || {
        move_into_link_name_space(namespace.file().as_fd(), Some(LinkNameSpaceType::Network))?;
        rights::keep_users_alone()?;
        command.spawn()
    };
    let started = std::thread::scope(|scope| scope.spawn(start).join());
    started.unwrap_or_else(|_| Err(io::Error::other("the thread there ended")))
}
