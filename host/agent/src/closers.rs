//! Threads that receive from programs of containers, and close descriptors that came from there.
//!
//! A program may send any descriptor, and closing it may take any time: a TCP socket with
//! `SO_LINGER` waits until its peer has read, a file of FUSE until its server answers. The
//! kernel closes the descriptors in the queue of a connection with it, and those for which a
//! message's receiver has no room. So the thread that serves all containers does none of it.

use std::collections::{HashMap, VecDeque};
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::thread::JoinHandleExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use nix::sys::pthread::pthread_kill;
use nix::sys::signal::Signal;
use tokio::sync::oneshot;

use crate::limits::Share;

/// Threads of a share: its other jobs wait while these are in the kernel. With one, only one
/// program's messages at a time occupy the share's descriptors.
const EACH_MAX: usize = 1;
/// Threads of all shares.
const ALL_MAX: usize = 256;
/// How long a thread may be in the kernel before a signal ends its wait, and the longest pause
/// between two signals.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(20)];
/// A thread's stack, which holds a message.
const STACK_BYTES: usize = 128 << 10;
/// The signal that ends a wait. The agent has a handler for it that does nothing.
pub(crate) const INTERRUPT: Signal = Signal::SIGURG;

type Job = Box<dyn FnOnce() + Send>;

/// The threads.
#[derive(Debug, Default)]
pub(crate) struct Closers {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    lanes: HashMap<Share, Lane>,
    /// The threads, each by its number.
    threads: HashMap<u64, Thread>,
    next: u64,
    is_watched: bool,
}

#[derive(Default)]
struct Lane {
    jobs: VecDeque<Job>,
    threads: usize,
}

struct Thread {
    /// It lives as long as it is in the table.
    handle: JoinHandle<()>,
    /// When to send it the next signal, and the pause after that.
    due: Instant,
    pause: Duration,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner").field("threads", &self.threads.len()).finish_non_exhaustive()
    }
}

impl Closers {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does `job` on a thread of the share.
    pub(crate) fn run(self: &Arc<Self>, share: Share, job: impl FnOnce() + Send + 'static) {
        let mut inner = self.lock();
        let lane = inner.lanes.entry(share).or_default();
        lane.jobs.push_back(Box::new(job));
        if lane.threads >= EACH_MAX || inner.threads.len() >= ALL_MAX {
            return;
        }
        self.start(&mut inner, share);
    }

    /// The result of `job`, which a thread of the share does. `None` if it panics.
    pub(crate) async fn result<T: Send + 'static>(
        self: &Arc<Self>,
        share: Share,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let (to, from) = oneshot::channel();
        self.run(share, move || drop(to.send(job())));
        from.await.ok()
    }

    /// Starts a thread. Without one the next job starts it.
    fn start(self: &Arc<Self>, inner: &mut Inner, share: Share) {
        let (it, number) = (Arc::clone(self), inner.next);
        let work = move || it.work(number, share);
        let Ok(handle) = Builder::new().stack_size(STACK_BYTES).spawn(work) else { return };
        inner.next += 1;
        let thread = Thread { handle, due: Instant::now() + PAUSES[0], pause: PAUSES[0] };
        inner.threads.insert(number, thread);
        inner.lanes.entry(share).or_default().threads += 1;
        if !inner.is_watched {
            let it = Arc::clone(self);
            let watch = Builder::new().stack_size(STACK_BYTES).spawn(move || it.interrupt());
            inner.is_watched = watch.is_ok();
        }
    }

    fn work(&self, number: u64, mut share: Share) {
        loop {
            let next = self.lock().next(number, &mut share);
            let Some(job) = next else { return };
            // The thread is counted until it finds no job.
            let _ = catch_unwind(AssertUnwindSafe(job));
        }
    }

    /// Ends long waits by signals, as long as there are threads. A close that a signal interrupts
    /// is one all the same. FUSE does not let a signal end the wait.
    fn interrupt(&self) {
        loop {
            let due = {
                let mut inner = self.lock();
                let now = Instant::now();
                for thread in inner.threads.values_mut().filter(|thread| thread.due <= now) {
                    // A number by std, of musl's headers a pointer.
                    let _ = pthread_kill(thread.handle.as_pthread_t() as _, INTERRUPT);
                    thread.due = now + thread.pause;
                    thread.pause = (thread.pause * 2).min(PAUSES[1]);
                }
                let Some(due) = inner.threads.values().map(|thread| thread.due).min() else {
                    inner.is_watched = false;
                    return;
                };
                due
            };
            std::thread::sleep(due.saturating_duration_since(Instant::now()).max(PAUSES[0]));
        }
    }
}

impl Inner {
    /// The next job of a thread: of its share, or of one that has no thread. Without any the thread
    /// ends.
    fn next(&mut self, number: u64, share: &mut Share) -> Option<Job> {
        loop {
            let lane = self.lanes.entry(*share).or_default();
            if let Some(job) = lane.jobs.pop_front() {
                if let Some(thread) = self.threads.get_mut(&number) {
                    thread.due = Instant::now() + PAUSES[0];
                    thread.pause = PAUSES[0];
                }
                return Some(job);
            }
            lane.threads -= 1;
            if lane.threads == 0 {
                self.lanes.remove(share);
            }
            let Some((other, lane)) = self.lanes.iter_mut().find(|(_, lane)| lane.threads == 0)
            else {
                self.threads.remove(&number);
                return None;
            };
            lane.threads += 1;
            *share = *other;
        }
    }
}

/// A value with descriptors that a program chose. A thread of its share drops it.
#[derive(Debug)]
pub(crate) struct Foreign<T: Send + 'static> {
    value: Option<T>,
    share: Share,
    closers: Arc<Closers>,
}

impl<T: Send> Foreign<T> {
    pub(crate) fn new(value: T, share: Share, closers: &Arc<Closers>) -> Self {
        Self { value: Some(value), share, closers: Arc::clone(closers) }
    }

    /// The same of another share.
    pub(crate) fn of(mut self, share: Share) -> Self {
        self.share = share;
        self
    }
}

impl<T: Send> Deref for Foreign<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("it is there until it is dropped")
    }
}

impl<T: Send> DerefMut for Foreign<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("it is there until it is dropped")
    }
}

impl AsFd for Foreign<OwnedFd> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        (**self).as_fd()
    }
}

impl AsRawFd for Foreign<OwnedFd> {
    fn as_raw_fd(&self) -> RawFd {
        (**self).as_raw_fd()
    }
}

impl<T: Send> Drop for Foreign<T> {
    fn drop(&mut self) {
        if let Some(value) = self.value.take() {
            self.closers.run(self.share, move || drop(value));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::os::unix::net::UnixDatagram;
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    /// A descriptor whose close does not return, until the other end is dropped.
    struct Hanging(Receiver<()>);

    impl Drop for Hanging {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    fn handled() -> tokio::runtime::Runtime {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("a runtime");
        runtime.block_on(async {
            let kind = tokio::signal::unix::SignalKind::from_raw(INTERRUPT as i32);
            drop(tokio::signal::unix::signal(kind).expect("a handler"));
        });
        runtime
    }

    #[test]
    fn a_share_that_hangs_holds_up_no_other() {
        let _handler = handled();
        let closers = Arc::<Closers>::default();
        let mut ends = Vec::new();
        for _ in 0..10 * EACH_MAX {
            let (to, from) = channel();
            ends.push(to);
            drop(Foreign::new(Hanging(from), Share::Container(1), &closers));
        }
        let (to, from) = channel();
        closers.run(Share::Container(2), move || to.send(()).expect("it waits"));
        from.recv_timeout(SOON).expect("the other one is served");
        let threads = closers.lock().threads.len();
        assert!((EACH_MAX..=EACH_MAX + 1).contains(&threads), "{threads}");
        drop(ends);
        let start = Instant::now();
        while !closers.lock().lanes.is_empty() || !closers.lock().threads.is_empty() {
            assert!(start.elapsed() < SOON, "all of it is done, and no thread stays");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_job_that_panics_holds_up_none_of_its_share() {
        let runtime = handled();
        let (closers, share) = (Arc::<Closers>::default(), Share::Container(1));
        let job = || panic!("on purpose");
        let done = async { tokio::time::timeout(SOON, closers.result::<()>(share, job)).await };
        assert_eq!(runtime.block_on(done), Ok(None));
        let (to, from) = channel();
        closers.run(share, move || to.send(()).expect("it waits"));
        from.recv_timeout(SOON).expect("the next one is done");
    }

    /// The first job of a thread, a later one after a long one, and those of later threads.
    #[test]
    fn each_wait_is_ended_as_soon_as_the_first_of_its_thread() {
        let runtime = handled();
        let (closers, share) = (Arc::<Closers>::default(), Share::Container(1));
        let is_interrupted = || {
            let (silent, _other) = UnixDatagram::pair().expect("sockets");
            // With a limit the kernel does not begin the wait anew.
            silent.set_read_timeout(Some(3 * SOON)).expect("a limit");
            silent.recv(&mut [0]).is_err_and(|e| e.kind() == io::ErrorKind::Interrupted)
        };
        let pause = |closers: &Closers| closers.lock().threads.values().next().map(|it| it.pause);
        for round in 0..3 {
            let (to, from) = channel::<()>();
            drop(Foreign::new(Hanging(from), share, &closers));
            let start = Instant::now();
            while pause(&closers) != Some(PAUSES[1]) {
                assert!(start.elapsed() < SOON, "round {round}");
                std::thread::sleep(Duration::from_millis(1));
            }
            let (began, begins) = channel();
            // One of them has its processor at once.
            for _ in 0..5 {
                let (it, began) = (Arc::clone(&closers), began.clone());
                closers.run(share, move || began.send(pause(&it)).expect("it is waited for"));
            }
            drop(to);
            let pauses = [(); 5].map(|()| begins.recv_timeout(SOON).expect("a job"));
            assert!(pauses.iter().min() < Some(&Some(PAUSES[1])), "round {round}: {pauses:?}");
            let job = closers.result(share, is_interrupted);
            let job = async { tokio::time::timeout(SOON, job).await };
            assert_eq!(runtime.block_on(job), Ok(Some(true)), "round {round}");
            while closers.lock().is_watched {
                assert!(start.elapsed() < SOON, "nothing is left to watch");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    #[test]
    fn a_thread_takes_over_the_jobs_of_shares_that_found_none() {
        let _handler = handled();
        let closers = Arc::<Closers>::default();
        let mut ends = Vec::new();
        let (done, is_done) = channel();
        for share in 0..2 * ALL_MAX as u64 {
            let (to, from) = channel::<()>();
            ends.push(to);
            let done = done.clone();
            closers.run(Share::Container(share), move || {
                let _ = from.recv();
                let _ = done.send(());
            });
        }
        assert_eq!(closers.lock().threads.len(), ALL_MAX);
        drop(ends);
        for _ in 0..2 * ALL_MAX {
            is_done.recv_timeout(SOON).expect("each is done");
        }
    }
}
