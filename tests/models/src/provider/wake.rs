//! Replaces `verbs-api/soft/src/provider/wake.rs`: descriptors with a lock each, as in the kernel,
//! and sleeps that end at once if they have a timeout.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use loom::sync::Mutex;
use loom::thread::{self, Thread};

/// An event descriptor, or the descriptor of a port.
#[derive(Debug, Clone, Default)]
pub struct OwnedFd(Arc<Inner>);

pub type BorrowedFd<'a> = &'a OwnedFd;

#[derive(Debug)]
struct Inner(Mutex<State>);

impl Default for Inner {
    fn default() -> Self {
        Self(Mutex::new(State::default()))
    }
}

#[derive(Debug, Default)]
struct State {
    /// The counter of an event descriptor, or the number of datagrams waiting at a port.
    count: u64,
    /// A port with notification turned off.
    is_mute: bool,
    sleepers: Vec<Thread>,
}

/// Numbers do not matter here.
pub fn apart(fd: OwnedFd) -> OwnedFd {
    fd
}

impl OwnedFd {
    pub fn try_clone_to_owned(&self) -> io::Result<Self> {
        Ok(self.clone())
    }

    /// Takes all that is there, and returns the count.
    pub fn drain(&self) -> u64 {
        std::mem::take(&mut self.0.0.lock().unwrap().count)
    }

    /// Turns notification of arrivals on or off. Turning it on reports earlier arrivals.
    pub fn watch(&self, wished: bool) {
        let mut state = self.0.0.lock().unwrap();
        state.is_mute = !wished;
        if state.is_ready() {
            state.wake();
        }
    }

    pub fn is_ready(&self) -> bool {
        self.0.0.lock().unwrap().count > 0
    }
}

impl State {
    fn is_ready(&self) -> bool {
        self.count > 0 && !self.is_mute
    }

    fn wake(&mut self) {
        for sleeper in self.sleepers.drain(..) {
            sleeper.unpark();
        }
    }
}

pub trait AsFd {
    fn as_fd(&self) -> BorrowedFd<'_>;
}

impl AsFd for OwnedFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self
    }
}

pub fn eventfd() -> io::Result<OwnedFd> {
    Ok(OwnedFd::default())
}

pub fn notify(fd: &OwnedFd) {
    let mut state = fd.0.0.lock().unwrap();
    state.count += 1;
    if !state.is_mute {
        state.wake();
    }
}

pub fn clear(fd: &OwnedFd) {
    take(fd);
}

pub fn take(fd: &OwnedFd) -> bool {
    fd.drain() > 0
}

/// As `poll(2)`. With a timeout it ends at once, and the clock of the shard advances by the
/// timeout. So no test may use a timeout to wait for another thread.
pub fn wait(
    port: Option<(BorrowedFd<'_>, bool)>,
    other: BorrowedFd<'_>,
    timeout: Option<Duration>,
) -> bool {
    let port = port.map(|(fd, _)| fd);
    loop {
        let (here, there) = look(other, port, timeout.is_none());
        if here || there {
            return there || !here;
        }
        let Some(timeout) = timeout else {
            thread::park();
            continue;
        };
        clock::advance(timeout);
        if clock::is_others_turn() {
            thread::yield_now();
        }
        return true;
    }
}

/// Wake-ups of a sleeping thread. A delayed wake-up takes effect at once, as a sleep with a timeout
/// ends at once.
#[derive(Debug)]
pub struct Calls {
    fd: OwnedFd,
    /// The advance of the clock with a wake-up. Not one of loom's types.
    later: std::sync::Mutex<Option<Duration>>,
}

impl Calls {
    pub fn new() -> io::Result<Self> {
        Ok(Self { fd: eventfd()?, later: None.into() })
    }

    pub fn wake(&self) {
        notify(&self.fd);
    }

    pub fn wake_in(&self, time: Duration) {
        *self.later.lock().unwrap() = Some(time);
        notify(&self.fd);
    }

    pub fn wait(&self, port: Option<(BorrowedFd<'_>, bool)>, timeout: Option<Duration>) -> bool {
        let timeout = timeout.filter(|timeout| !clock::lasts_for_ever(*timeout));
        let is_more = wait(port, &self.fd, timeout);
        if take(&self.fd)
            && let Some(time) = self.later.lock().unwrap().take()
        {
            clock::advance(time);
        }
        is_more
    }
}

/// Which of the two are ready. If none is and `sleeps` is set, this thread is woken when one
/// becomes ready.
///
/// Both are looked at under both locks. Loom forgets a wake-up of a thread that waits for a lock
/// before it sleeps.
fn look(other: BorrowedFd<'_>, port: Option<BorrowedFd<'_>>, sleeps: bool) -> (bool, bool) {
    let mut other = other.0.0.lock().unwrap();
    let mut port = port.map(|port| port.0.0.lock().unwrap());
    let ready = (other.is_ready(), port.as_ref().is_some_and(|port| port.is_ready()));
    if ready == (false, false) && sleeps {
        other.sleepers.push(thread::current());
        if let Some(port) = &mut port {
            port.sleepers.push(thread::current());
        }
    }
    ready
}

/// The clock of the shard. It moves when a thread sleeps.
pub mod clock {
    use std::time::Duration;

    use loom::sync::atomic::{AtomicU64, Ordering};

    loom::lazy_static! {
        static ref NANOSECONDS: AtomicU64 = AtomicU64::new(1_000_000_000);
        /// Not one of loom's types.
        static ref IN_A_ROW: std::sync::atomic::AtomicUsize = 0.into();
        /// Not one of loom's types.
        static ref SPIN: std::sync::Mutex<Duration> = std::sync::Mutex::new(Duration::ZERO);
        /// Not one of loom's types.
        static ref LONGEST: std::sync::Mutex<Duration> = std::sync::Mutex::new(Duration::MAX);
    }

    /// As a real clock: all threads see the same time, and the clock synchronises nothing else.
    pub fn now() -> u64 {
        NANOSECONDS.fetch_add(0, Ordering::Relaxed)
    }

    /// The next `count` sleeps end without a yield to other threads. Loom takes a thread that
    /// yields for one that cannot go on.
    pub fn sleep_in_a_row(count: usize) {
        IN_A_ROW.store(count, std::sync::atomic::Ordering::Relaxed);
    }

    /// From now on the background thread spins after activity, until a clock that each look
    /// advances by a nanosecond has gone so far.
    pub fn spin(time: Duration) {
        *SPIN.lock().unwrap() = time;
    }

    pub(crate) fn spins() -> Duration {
        *SPIN.lock().unwrap()
    }

    /// From now on no timeout ends a sleep of the background thread of at least `time`: work that
    /// is left to a thread that sleeps for so long is left for ever.
    pub fn stop(time: Duration) {
        *LONGEST.lock().unwrap() = time;
    }

    pub(super) fn lasts_for_ever(sleep: Duration) -> bool {
        sleep >= *LONGEST.lock().unwrap()
    }

    pub(super) fn is_others_turn() -> bool {
        let left = IN_A_ROW.load(std::sync::atomic::Ordering::Relaxed);
        IN_A_ROW.store(left.saturating_sub(1), std::sync::atomic::Ordering::Relaxed);
        left == 0
    }

    pub fn advance(by: Duration) {
        NANOSECONDS.fetch_add(by.as_nanos() as u64, Ordering::Relaxed);
    }
}
