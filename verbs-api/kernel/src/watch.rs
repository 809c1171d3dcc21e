//! A thread that wakes tasks: the kernel announces events by descriptors, and knows no tasks.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use parking_lot::Mutex;
use rocinante_soft::provider::listeners::Listeners;
use rocinante_soft::provider::wake;
use rocinante_soft::provider::wakers::{Wakers, Woken};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::ffi;

/// A descriptor, and the tasks that wait until it is readable.
#[derive(Debug, Clone)]
pub(super) enum Source {
    /// A channel of the program.
    Channel(Arc<ffi::Channel>, Arc<Wakers>),
    /// The channel of the queues that have none of the program's.
    Queues(Arc<ffi::Channel>, Arc<Listeners<Wakers>>),
    /// Asynchronous events.
    Events(Arc<ffi::Context>, Arc<Wakers>),
    #[cfg(test)]
    Any(Arc<OwnedFd>, Arc<Wakers>),
}

impl Source {
    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Channel(channel, _) | Self::Queues(channel, _) => channel.fd(),
            Self::Events(context, _) => context.async_fd(),
            #[cfg(test)]
            Self::Any(fd, _) => fd.as_fd(),
        }
    }

    /// Its tasks, unless they are those of queues.
    fn tasks(&self) -> Option<&Arc<Wakers>> {
        match self {
            Self::Channel(_, tasks) | Self::Events(_, tasks) => Some(tasks),
            Self::Queues(..) => None,
            #[cfg(test)]
            Self::Any(_, tasks) => Some(tasks),
        }
    }

    /// The tasks to wake now that it is readable, or that the device has been removed.
    fn take(&self, is_removed: bool) -> Woken {
        let Self::Queues(channel, queues) = self else {
            return self.tasks().map(|tasks| tasks.take()).unwrap_or_default();
        };
        let mut woken = Woken::default();
        while let Some(number) = channel.next_event() {
            if let Some(tasks) = queues.find(number) {
                woken.append(tasks.take());
            }
        }
        if is_removed {
            queues.all().iter().for_each(|tasks| woken.append(tasks.take()));
        }
        woken
    }

    fn is(&self, other: &Self) -> bool {
        match (self.tasks(), other.tasks()) {
            (Some(tasks), Some(others)) => Arc::ptr_eq(tasks, others),
            (tasks, others) => tasks.is_none() && others.is_none(),
        }
    }
}

/// The thread of a device, which starts when the first task waits.
#[derive(Debug, Default)]
pub(super) struct Watcher {
    thread: Mutex<Option<(Arc<Shared>, JoinHandle<()>)>>,
}

#[derive(Debug)]
struct Shared {
    /// Readable when the sources have changed.
    changed: OwnedFd,
    stop: AtomicBool,
    /// The kernel has removed the device.
    removed: AtomicBool,
    /// Each is watched until it has been readable once; queues always are.
    sources: Mutex<Vec<Source>>,
}

impl Watcher {
    /// Watches until the source is readable, and then wakes its tasks, which have registered.
    /// Error: there are no descriptors or threads left, or the device has been removed.
    pub(super) fn watch(&self, source: Source) -> io::Result<()> {
        let mut thread = self.thread.lock();
        let shared = match &*thread {
            Some((shared, _)) => shared.clone(),
            None => {
                let shared = Arc::new(Shared::new()?);
                let work = shared.clone();
                let builder = std::thread::Builder::new().name("rdma-tasks".to_owned());
                *thread = Some((shared.clone(), builder.spawn(move || work.serve())?));
                shared
            }
        };
        drop(thread);
        if shared.removed.load(Ordering::SeqCst) {
            return Err(Errno::NODEV.into());
        }
        let mut sources = shared.sources.lock();
        if !sources.iter().any(|known| known.is(&source)) {
            sources.push(source);
            wake::notify(&shared.changed);
        }
        Ok(())
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        if let Some((shared, thread)) = self.thread.get_mut().take() {
            shared.stop.store(true, Ordering::SeqCst);
            wake::notify(&shared.changed);
            // A task that is woken may drop the device on that thread.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

impl Shared {
    fn new() -> io::Result<Self> {
        let [stop, removed] = [false; 2].map(AtomicBool::new);
        Ok(Self { changed: wake::eventfd()?, stop, removed, sources: Mutex::default() })
    }

    fn serve(&self) {
        while !self.stop.load(Ordering::SeqCst) {
            let sources = self.sources.lock().clone();
            let fds = std::iter::once(self.changed.as_fd()).chain(sources.iter().map(Source::fd));
            let mut fds: Vec<_> =
                fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            // An interrupted wait is a short one.
            let _ = poll(&mut fds, None);
            wake::clear(&self.changed);
            let ready = sources.iter().zip(fds[1..].iter().map(PollFd::revents));
            let ready: Vec<_> = ready.filter(|(_, ready)| !ready.is_empty()).collect();
            if ready.iter().any(|(_, flags)| is_removed(*flags)) {
                self.removed.store(true, Ordering::SeqCst);
            }
            // A task that registers from now on has them watched again. The events of queues are
            // read here, so these stay.
            let is_over = |(source, flags): &(&Source, PollFlags)| {
                is_removed(*flags) || !matches!(source, Source::Queues(..))
            };
            let over: Vec<_> = ready.iter().filter(|source| is_over(source)).collect();
            self.sources.lock().retain(|known| !over.iter().any(|(source, _)| source.is(known)));
            for (source, flags) in ready {
                drop(source.take(is_removed(flags)));
            }
        }
    }
}

/// Whether these are the flags of a descriptor whose device has been removed: it has them for ever,
/// once its last event was read.
fn is_removed(flags: PollFlags) -> bool {
    flags.contains(PollFlags::ERR)
}

/// Sleeps until the descriptor is readable, or until `until`. Error: its device has been removed.
pub(super) fn wait(fd: BorrowedFd<'_>, until: Option<Instant>) -> io::Result<()> {
    let left = until.map(|until| until.saturating_duration_since(Instant::now()));
    let left = left.and_then(|left| Timespec::try_from(left).ok());
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    // An interrupted wait is a short one.
    let _ = poll(&mut fds, left.as_ref());
    if is_removed(fds[0].revents()) { Err(Errno::NODEV.into()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::{Sender, channel};
    use std::task::{Wake, Waker};
    use std::time::Duration;

    use super::*;

    struct Task(Sender<()>);

    impl Wake for Task {
        fn wake(self: Arc<Self>) {
            let _ = self.0.send(());
        }
    }

    /// A peer that closes without reading leaves an error.
    fn break_off(mut own: &UnixStream, far: UnixStream) {
        own.write_all(b"x").unwrap();
        drop(far);
    }

    #[test]
    fn a_wait_fails_on_the_channel_of_a_device_that_is_removed() {
        let [(own, far), (other, mut other_far)] = [(); 2].map(|()| UnixStream::pair().unwrap());
        break_off(&own, far);
        let errno = |fd: &UnixStream, until| {
            wait(fd.as_fd(), until).err().map(|error| error.raw_os_error().unwrap())
        };
        let removed = Some(Errno::NODEV.raw_os_error());
        for _ in 0..2 {
            assert_eq!(errno(&own, None), removed);
            assert_eq!(errno(&other, Some(Instant::now())), None);
        }
        other_far.write_all(b"x").unwrap();
        assert_eq!(errno(&other, None), None, "there is an event");
    }

    /// Each of two channels of a device.
    #[test]
    fn each_of_two_sources_wakes_its_own_tasks() {
        let watcher = Watcher::default();
        let both = [(); 2].map(|()| {
            let (own, far) = UnixStream::pair().unwrap();
            let (woken, wakes) = channel();
            let (tasks, waker) = (Arc::new(Wakers::default()), Arc::new(Task(woken)).into());
            tasks.set(1, &waker);
            watcher.watch(Source::Any(Arc::new(own.into()), tasks)).unwrap();
            (far, wakes)
        });
        for (far, wakes) in both.iter().rev() {
            wakes.try_recv().expect_err("it is not readable");
            (&*far).write_all(b"x").unwrap();
            wakes.recv_timeout(Duration::from_secs(30)).expect("woken");
        }
    }

    #[test]
    fn tasks_of_a_device_that_is_removed_are_woken_and_do_not_wait_again() {
        let (watcher, tasks) = (Watcher::default(), Arc::new(Wakers::default()));
        let (own, mut far) = UnixStream::pair().unwrap();
        let fd = Arc::new(OwnedFd::from(own.try_clone().unwrap()));
        let (woken, wakes) = channel();
        let waker = Waker::from(Arc::new(Task(woken)));
        let wait = || {
            tasks.set(1, &waker);
            watcher.watch(Source::Any(fd.clone(), tasks.clone()))
        };
        let is_woken = || wakes.recv_timeout(Duration::from_secs(30)).is_ok();
        wait().unwrap();
        far.write_all(b"x").unwrap();
        assert!(is_woken());
        wait().unwrap();
        assert!(is_woken(), "it is still unread");
        break_off(&own, far);
        wait().unwrap();
        assert!(is_woken());
        assert_eq!(wait().unwrap_err().raw_os_error(), Some(Errno::NODEV.raw_os_error()));
    }
}
