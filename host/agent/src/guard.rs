//! Guardians: they end the connections of programs that have died.
//!
//! A program leaves parcels with the agent (`netdev/src/handed/guard.rs`). When it dies the agent
//! starts `rocinante guardian` in the program's network namespace and hands them on. The guardian
//! takes the program's user and drops every right before it looks at them. So a hostile
//! program packs its parcels for a process of its own user.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rocinante_netdev::handed::AGENT_VARIABLE;
use rocinante_netdev::handed::guard::{
    PARCEL_DESCRIPTORS, PARCELS_MAX, Parcel, Word, handed_on, receive,
};
use rustix::process::{Pid, PidfdFlags, Resource, getrlimit, pidfd_open};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::sync::Semaphore;
use tracing::Level;

use crate::asker::{Asker, Namespace, Own};
use crate::closers::{Closers, Foreign};
use crate::ends::Ends;
use crate::journal::Journal;
use crate::limits::{Limits, Permit, Share};
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
/// How long a guardian may take before it is killed. It gives up earlier, and its own clock ends
/// it earlier, too.
const PATIENCE: Duration = Duration::from_secs(10);
const OWN_CLOCK_SECONDS: &str = "8";
/// How long the parcels of a dead program wait for a guardian. Then its peers have to ask, because
/// with the parcels the agent has the sockets of the address, where no process answers meanwhile.
const TURN_MAX: Duration = Duration::from_secs(3);

/// The parcels kept for programs, and the guardians at work.
#[derive(Debug)]
pub(crate) struct Guards {
    program: PathBuf,
    limits: Arc<Limits>,
    descriptors_max: usize,
    turns: Semaphore,
    closers: Arc<Closers>,
    journal: Arc<Journal>,
    inner: Mutex<Inner>,
    /// Programs with more parcels than are kept.
    too_many: AtomicU64,
    /// Programs beyond the descriptors of a container, or of all.
    no_room: AtomicU64,
}

#[derive(Debug, Default)]
struct Inner {
    containers: HashMap<Share, Container>,
    descriptors: usize,
    next_ward: u64,
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
    number: u64,
    namespace: Namespace,
    /// Its user and group.
    user: (u32, u32),
    kept: Foreign<Kept>,
}

/// The parcels of a program. Their room is given back when they have been closed.
#[derive(Debug)]
struct Kept {
    parcels: Vec<Parcel>,
    /// It has sent one parcel more than are kept.
    has_more: bool,
    room: Arc<Room>,
}

/// How the messages end that have come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Heard {
    /// More may come.
    All,
    /// With the connection.
    End,
    /// The program tells too much, nonsense, or that nothing is to be done.
    Nothing,
}

/// Descriptors that are counted for a share until this is dropped.
#[derive(Debug)]
struct Room {
    guards: Arc<Guards>,
    share: Share,
    descriptors: Mutex<usize>,
}

impl Guards {
    /// Starts `program` as the guardian; `limits` say how many programs of a share are listened to.
    pub(crate) fn new(
        program: PathBuf,
        limits: Limits,
        closers: &Arc<Closers>,
        journal: &Arc<Journal>,
    ) -> Self {
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        Self {
            program,
            limits: Arc::new(limits),
            descriptors_max: usize::try_from(files / 2).unwrap_or(usize::MAX),
            turns: Semaphore::new(ALL_AT_ONCE_MAX),
            closers: Arc::clone(closers),
            journal: Arc::clone(journal),
            inner: Mutex::default(),
            too_many: AtomicU64::new(0),
            no_room: AtomicU64::new(0),
        }
    }

    /// Counts a program of which not all is kept. The log has the count when it is a power of two:
    /// containers start such programs without end.
    fn refuse(&self, counter: &AtomicU64, why: &str) {
        let count = counter.fetch_add(1, Ordering::Relaxed) + 1;
        if count.is_power_of_two() {
            tracing::warn!(count, "{why}: if it is killed, peers have to ask");
        }
    }

    fn refuse_for_room(&self) {
        self.refuse(&self.no_room, "no descriptors are left for a program");
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the parcels of the program at the other end, and has its connections ended if it dies.
    pub(crate) async fn watch(
        self: Arc<Self>,
        own: &Own,
        ends: &Ends,
        connection: Foreign<OwnedFd>,
    ) {
        let Ok(asker) = Asker::anywhere(&connection, own) else { return };
        let share = ends.share_of(&asker, own);
        let connection = connection.of(share);
        // The limit is of connections in a time; a program may stay for as long as it lives.
        let now = Instant::now();
        let may = |permit: Permit| permit.counts(now);
        if share == Share::Stranger || !self.limits.enter(share, now).is_some_and(may) {
            return;
        }
        let room = Arc::new(Room::new(&self, share));
        let Asker { pidfd, namespace, user, .. } = asker;
        let (Ok(connection), Ok(process)) = (readable(connection), readable(pidfd)) else { return };
        if !room.grow(EACH) {
            return self.refuse_for_room();
        }
        let kept = Kept { parcels: Vec::new(), has_more: false, room };
        let mut kept = Foreign::new(kept, share, &self.closers);
        let connection = Arc::new(connection);
        loop {
            let mut ready = tokio::select! {
                biased;
                ready = connection.readable() => ready.ok(),
                // It may have given the connection away. Its earlier messages are there.
                _ = process.readable() => None,
            };
            let (from, closers) = (Arc::clone(&connection), Arc::clone(&self.closers));
            let job = move || {
                let heard = kept.hear(from.get_ref());
                (heard, kept)
            };
            let Some((heard, back)) = closers.result(share, job).await else { return };
            kept = back;
            match (heard, &mut ready) {
                (Heard::All, Some(ready)) => ready.clear_ready(),
                (Heard::All | Heard::End, _) if !kept.parcels.is_empty() => break,
                _ => return,
            }
        }
        drop((connection, process));
        self.end(share, Ward { number: 0, namespace, user, kept }).await;
    }

    /// Has the connections of a program ended that has died, by a guardian that is to start or by
    /// one that this or another call starts next.
    async fn end(self: Arc<Self>, share: Share, mut ward: Ward) {
        {
            let mut inner = self.lock();
            let number = inner.next_ward;
            inner.next_ward += 1;
            ward.number = number;
            let of = inner.containers.entry(share).or_default();
            of.dead.push(ward);
            let is_late = of.guardians >= AT_ONCE_MAX;
            of.guardians += usize::from(!is_late);
            drop(inner);
            let it = Arc::clone(&self);
            tokio::spawn(async move {
                tokio::time::sleep(TURN_MAX).await;
                it.give_up(share, number);
            });
            if is_late {
                return;
            }
        }
        loop {
            let turn = self.turns.acquire().await;
            let wards = self.next(share);
            if wards.is_empty() {
                return;
            }
            if let Err(error) = self.settle(wards).await
                && self.journal.permits(share, Level::ERROR, Instant::now())
            {
                let container = self.journal.name(share);
                tracing::error!(container, "cannot end the connections of the dead: {error}");
            }
            drop(turn);
        }
    }

    /// Lets go of the parcels of a program that has got no guardian.
    fn give_up(&self, share: Share, number: u64) {
        let mut inner = self.lock();
        let Some(of) = inner.containers.get_mut(&share) else { return };
        let late: Vec<Ward> = of.dead.extract_if(.., |ward| ward.number == number).collect();
        drop(inner);
        drop(late);
    }

    /// The dead of a share for one guardian, up to its limit. With none left one guardian less is
    /// at work.
    fn next(&self, share: Share) -> Vec<Ward> {
        let mut inner = self.lock();
        let Some(of) = inner.containers.get_mut(&share) else { return Vec::new() };
        let (mut user, mut parcels) = (None, 0);
        let fits = |ward: &mut Ward| {
            let more = ward.kept.parcels.len();
            let fits = *user.get_or_insert(ward.user) == ward.user && parcels + more <= PARCELS_MAX;
            parcels += if fits { more } else { 0 };
            fits
        };
        let wards: Vec<Ward> = of.dead.extract_if(.., fits).collect();
        if wards.is_empty() {
            of.guardians -= 1;
            inner.forget_if_idle(share);
        }
        wards
    }

    /// Starts a guardian for programs of one user and share, and waits for its end.
    async fn settle(&self, wards: Vec<Ward>) -> io::Result<()> {
        let program = self.program.clone();
        // Their parcels are the guardian's then, and count until it ends.
        let _rooms: Vec<_> = wards.iter().map(|ward| Arc::clone(&ward.kept.room)).collect();
        let started = tokio::task::spawn_blocking(move || start(&program, &wards));
        let mut child = started.await.map_err(io::Error::other).flatten()?;
        let process = pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
        let process = process.map_err(io::Error::from).and_then(readable);
        let is_over = match &process {
            Ok(process) => tokio::time::timeout(PATIENCE, process.readable()).await.is_ok(),
            Err(_) => false,
        };
        let killed = if is_over { Ok(()) } else { child.kill() };
        // Its place and its room are free when it has gone, and no earlier.
        if let Ok(process) = &process {
            let _ = process.readable().await;
        }
        let waited = tokio::task::spawn_blocking(move || child.wait());
        waited.await.map_err(io::Error::other).flatten()?;
        killed
    }
}

impl Inner {
    fn forget_if_idle(&mut self, share: Share) {
        let is_idle = |of: &Container| of.descriptors == 0 && of.guardians == 0;
        if self.containers.get(&share).is_some_and(is_idle) {
            self.containers.remove(&share);
        }
    }
}

impl Kept {
    /// Takes the parcels that have come. Not on the thread that serves all: the kernel closes the
    /// descriptors for which there is no room.
    fn hear(&mut self, from: impl AsFd) -> Heard {
        loop {
            match receive(&from) {
                Ok(Word::Parcel(_)) if self.parcels.len() == PARCELS_MAX && !self.has_more => {
                    self.has_more = true;
                    let guards = &self.room.guards;
                    guards.refuse(&guards.too_many, "a program has more than 64 addresses");
                }
                Ok(Word::Parcel(parcel)) if self.parcels.len() < PARCELS_MAX => {
                    if !self.room.grow(PARCEL_DESCRIPTORS) {
                        self.room.guards.refuse_for_room();
                        return Heard::Nothing;
                    }
                    self.parcels.push(parcel);
                }
                Ok(Word::End) => return Heard::End,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Heard::All,
                _ => return Heard::Nothing,
            }
        }
    }
}

impl Room {
    fn new(guards: &Arc<Guards>, share: Share) -> Self {
        Self { guards: Arc::clone(guards), share, descriptors: Mutex::new(0) }
    }

    /// Counts more descriptors, unless there is no room for them.
    fn grow(&self, by: usize) -> bool {
        let mut inner = self.guards.lock();
        let Inner { containers, descriptors, .. } = &mut *inner;
        let of = containers.entry(self.share).or_default();
        let fits = of.descriptors + by <= DESCRIPTORS_MAX
            && *descriptors + by <= self.guards.descriptors_max;
        if fits {
            of.descriptors += by;
            *descriptors += by;
            *self.descriptors.lock().unwrap_or_else(PoisonError::into_inner) += by;
        }
        fits
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let own = *self.descriptors.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut inner = self.guards.lock();
        inner.descriptors -= own;
        if let Some(of) = inner.containers.get_mut(&self.share) {
            of.descriptors -= own;
        }
        inner.forget_if_idle(self.share);
    }
}

/// Starts the guardian of programs of one user, in the network namespace of the first.
fn start(program: &Path, wards: &[Ward]) -> io::Result<Child> {
    let Some(Ward { namespace, user: (uid, gid), .. }) = wards.first() else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let connection = handed_on(wards.iter().flat_map(|ward| &ward.kept.parcels))?;
    let mut command = Command::new(program);
    command.args(["guardian", "--part", "be-for-one"]);
    command.args(["--user", &uid.to_string(), "--group", &gid.to_string()]);
    command.args(["--seconds", OWN_CLOCK_SECONDS]);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_that_are_refused_are_not_counted() {
        let (closers, journal) = (Arc::default(), Arc::default());
        let mut guards = Guards::new(PathBuf::new(), Limits::new(1), &closers, &journal);
        guards.descriptors_max = DESCRIPTORS_MAX + 10;
        let guards = Arc::new(guards);
        let [one, again, other] = [1, 1, 2].map(|n| Room::new(&guards, Share::Container(n)));
        assert!(one.grow(DESCRIPTORS_MAX - 1));
        for _ in 0..2 {
            assert!(!again.grow(2), "beyond those of its container");
            assert!(!other.grow(12), "beyond those of all");
        }
        assert!(again.grow(1) && other.grow(10));
        drop((one, again));
        assert_eq!(guards.lock().descriptors, 10);
        assert_eq!(guards.lock().containers.len(), 1);
        drop(other);
        assert_eq!(guards.lock().descriptors, 0);
        assert!(guards.lock().containers.is_empty());
    }

    /// Programs of two users that died by turns, and one of the first that comes late.
    #[test]
    fn a_guardian_is_for_programs_of_one_user() {
        let (closers, journal) = (Arc::default(), Arc::default());
        let guards = Guards::new(PathBuf::new(), Limits::new(1), &closers, &journal);
        let (guards, share) = (Arc::new(guards), Share::Container(1));
        let ward = |number, uid| {
            let room = Arc::new(Room::new(&guards, share));
            let kept = Kept { parcels: Vec::new(), has_more: false, room };
            let kept = Foreign::new(kept, share, &guards.closers);
            let namespace = Namespace::open("/proc/self/ns/net".into()).expect("a namespace");
            Ward { number, namespace, user: (uid, 100), kept }
        };
        let wards = [(1, 7), (2, 8), (3, 7), (4, 8)].map(|(number, uid)| ward(number, uid));
        guards.lock().containers.insert(share, Container { guardians: 2, ..Container::default() });
        let dies =
            |ward| guards.lock().containers.get_mut(&share).expect("it asks").dead.push(ward);
        wards.into_iter().for_each(dies);
        let next = || {
            let wards = guards.next(share);
            wards.iter().map(|it| (it.number, it.user.0)).collect::<Vec<_>>()
        };
        assert_eq!(next(), [(1, 7), (3, 7)]);
        dies(ward(5, 7));
        assert_eq!(next(), [(2, 8), (4, 8)]);
        assert_eq!(next(), [(5, 7)]);
        // One guardian after the other finds none, and the share is forgotten with the last.
        assert!(next().is_empty());
        assert_eq!(guards.lock().containers[&share].guardians, 1);
        assert!(next().is_empty() && !guards.lock().containers.contains_key(&share));
        assert!(next().is_empty(), "a share that is not known");
    }
}
