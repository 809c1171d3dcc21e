//! The thread of a device that shares its addresses. It sleeps until another process joins, or one
//! that has a duty ends.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::time::Timespec;

use super::duty::Duty;
use super::meeting::{Objects, welcome};
use crate::fd::EventFd;

/// How long the thread waits where no descriptor was left.
const PAUSE: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// The thread.
#[derive(Debug)]
pub(super) struct Host {
    stop: Arc<EventFd>,
    news: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
    process: u32,
}

impl Host {
    /// Starts it for the addresses of a device: what processes that join are given, and the duty.
    ///
    /// # Errors
    /// No thread or no descriptor left.
    pub(super) fn start(places: Vec<(Arc<Objects>, Duty)>) -> io::Result<Self> {
        let (stop, news) = (Arc::new(EventFd::new()?), Arc::new(EventFd::new()?));
        let mut work = Work { stop: stop.clone(), news: news.clone(), places };
        let thread = std::thread::Builder::new().name("roce-meet".into());
        let thread = thread.spawn(move || while work.step() {})?;
        Ok(Self { stop, news, thread: Some(thread), process: std::process::id() })
    }

    /// Whether this is the process that started it, and no child of fork(2): that has not got the
    /// thread.
    pub(super) fn is_own(&self) -> bool {
        self.process == std::process::id()
    }

    /// Readable once this process has got a duty, until [`heard`](Self::heard).
    pub(super) fn news(&self) -> BorrowedFd<'_> {
        self.news.as_fd()
    }

    pub(super) fn heard(&self) {
        self.news.clear();
    }

    pub(super) fn stop(&mut self) {
        self.stop.signal();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Work {
    stop: Arc<EventFd>,
    news: Arc<EventFd>,
    places: Vec<(Arc<Objects>, Duty)>,
}

impl Work {
    /// Waits, and does what there is to do. Returns whether to go on.
    fn step(&mut self) -> bool {
        // What has not been done is tried again.
        let again = self.places.iter().any(|(_, duty)| duty.is_nobodys());
        let Some(ready) = self.wait(again.then_some(PAUSE), true) else { return true };
        let (stop, mut rest) = ready.split_first().expect("the first one");
        if *stop {
            return false;
        }
        let mut all_done = true;
        for (objects, duty) in &mut self.places {
            // Without memory for more, only the stop was looked at.
            let Some((join, behind)) = rest.split_first() else { break };
            let (of_duty, behind) = behind.split_at(duty.waits_for().count());
            rest = behind;
            all_done &= !join || welcome(objects);
            let had = duty.is_ours.load(Ordering::Relaxed);
            all_done &= duty.attend(of_duty).is_ok();
            if duty.is_ours.load(Ordering::Relaxed) && !had {
                self.news.signal();
            }
        }
        // What is still there would be told at once.
        all_done || self.wait(Some(PAUSE), false).is_none_or(|ready| !ready[0])
    }

    /// Waits for the stop, and for `everything` besides; says what is ready.
    fn wait(&self, limit: Option<Timespec>, everything: bool) -> Option<Vec<bool>> {
        let stop = std::iter::once((*self.stop).as_fd());
        let places = self.places.iter().filter(|_| everything).flat_map(|(objects, duty)| {
            std::iter::once(objects.listener.as_fd()).chain(duty.waits_for())
        });
        let mut all: Vec<PollFd<'_>> =
            stop.chain(places).map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        match poll(&mut all, limit.as_ref()) {
            Ok(_) => Some(all.iter().map(|fd| !fd.revents().is_empty()).collect()),
            Err(Errno::INTR) => None,
            // There is no memory for it, or there are more descriptors than there may be now.
            Err(_) => {
                std::thread::sleep(Duration::from_secs(1));
                everything.then(|| self.wait(Some(AT_ONCE), false)).flatten()
            }
        }
    }
}
