//! A thread that wakes tasks: the kernel announces events by descriptors, and knows no tasks.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};

use super::ffi;
use crate::provider::listeners::Listeners;
use crate::provider::wake;
use crate::provider::wakers::{Wakers, Woken};

/// A descriptor, and the tasks that wait until it is readable.
#[derive(Debug, Clone)]
pub(super) enum Source {
    /// A channel of the program.
    Channel(Arc<ffi::Channel>, Arc<Wakers>),
    /// The channel of the queues that have none of the program's.
    Queues(Arc<ffi::Channel>, Arc<Listeners<Wakers>>),
    /// Asynchronous events.
    Events(Arc<ffi::Context>, Arc<Wakers>),
}

impl Source {
    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Channel(channel, _) | Self::Queues(channel, _) => channel.fd(),
            Self::Events(context, _) => context.async_fd(),
        }
    }

    /// The tasks to wake now that it is readable.
    fn take(&self) -> Woken {
        match self {
            Self::Channel(_, tasks) | Self::Events(_, tasks) => tasks.take(),
            Self::Queues(channel, queues) => {
                let mut woken = Woken::default();
                while let Some(number) = channel.next_event() {
                    if let Some(tasks) = queues.find(number) {
                        woken.append(tasks.take());
                    }
                }
                woken
            }
        }
    }

    fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Channel(_, tasks), Self::Channel(_, others))
            | (Self::Events(_, tasks), Self::Events(_, others)) => Arc::ptr_eq(tasks, others),
            (Self::Queues(..), Self::Queues(..)) => true,
            _ => false,
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
    /// Each is watched until it has been readable once.
    sources: Mutex<Vec<Source>>,
}

impl Watcher {
    /// Watches until the source is readable, and then wakes its tasks, which have registered.
    ///
    /// # Errors
    /// There are no descriptors or threads left.
    pub(super) fn watch(&self, source: Source) -> io::Result<()> {
        let mut thread = self.thread.lock();
        let shared = match &*thread {
            Some((shared, _)) => shared.clone(),
            None => {
                let (changed, sources) = (wake::eventfd()?, Mutex::default());
                let shared = Arc::new(Shared { changed, stop: AtomicBool::new(false), sources });
                let work = shared.clone();
                let builder = std::thread::Builder::new().name("rdma-tasks".to_owned());
                *thread = Some((shared.clone(), builder.spawn(move || work.serve())?));
                shared
            }
        };
        drop(thread);
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
    fn serve(&self) {
        while !self.stop.load(Ordering::SeqCst) {
            let sources = self.sources.lock().clone();
            let fds = std::iter::once(self.changed.as_fd()).chain(sources.iter().map(Source::fd));
            let mut fds: Vec<_> =
                fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            // An interrupted wait is a short one.
            let _ = poll(&mut fds, None);
            wake::clear(&self.changed);
            let ready = fds[1..].iter().map(|fd| !fd.revents().is_empty());
            let ready: Vec<_> = sources.iter().zip(ready).filter(|(_, ready)| *ready).collect();
            // Who registers from now on has them watched again.
            self.sources.lock().retain(|known| !ready.iter().any(|(source, _)| source.is(known)));
            for (source, _) in ready {
                drop(source.take());
            }
        }
    }
}
