//! When to look: at events, and again soon while the state is not yet the wanted one.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;

/// How soon to look again.
pub(crate) const SOON: Duration = Duration::from_secs(2);

/// The source of events. Clones share it.
#[derive(Clone)]
pub(crate) struct Look {
    events: watch::Sender<()>,
    soon: Duration,
}

/// A receiver of the events.
pub(crate) struct Looks {
    events: watch::Receiver<()>,
    soon: Duration,
}

impl Look {
    /// `soon` is never longer than `period`.
    pub(crate) fn new(period: Duration) -> Self {
        Self { events: watch::Sender::new(()), soon: period.min(SOON) }
    }

    pub(crate) fn now(&self) {
        self.events.send_replace(());
    }

    pub(crate) fn looks(&self) -> Looks {
        Looks { events: self.events.subscribe(), soon: self.soon }
    }

    /// Makes events of files that appear in these folders or vanish, for ever. A folder that is
    /// missing, or that cannot be watched, makes an event every `soon`.
    pub(crate) async fn at_files(&self, folders: &[PathBuf]) {
        let watched = watcher();
        let mut bytes = [0; 4096];
        loop {
            let is_missing = |it: &&PathBuf| !watched.as_ref().is_ok_and(|to| add(to, it).is_ok());
            let is_blind = folders.iter().filter(is_missing).count() > 0;
            // Files may have changed before the watch began.
            self.now();
            let event = async {
                let Ok(watched) = &watched else { return std::future::pending().await };
                let read = |it: &OwnedFd| Ok(rustix::io::read(it, &mut bytes[..])?);
                if watched.async_io(Interest::READABLE, read).await.is_err() {
                    tokio::time::sleep(self.soon).await;
                }
            };
            tokio::select! {
                () = event => {}
                () = tokio::time::sleep(self.soon), if is_blind => {}
            }
        }
    }
}

impl Looks {
    /// Waits for an event; unless all is settled, for `soon` at most.
    pub(crate) async fn again(&mut self, is_settled: bool) {
        tokio::select! {
            Ok(()) = self.events.changed() => {}
            () = tokio::time::sleep(self.soon), if !is_settled => {}
        }
    }
}

#[allow(deprecated, reason = "the other way is unsafe, for types that may close their descriptor")]
fn watcher() -> io::Result<AsyncFd<OwnedFd>> {
    let flags = CreateFlags::CLOEXEC | CreateFlags::NONBLOCK;
    AsyncFd::new(inotify::init(flags)?)
}

/// The same folder may be added again.
fn add(to: &AsyncFd<OwnedFd>, folder: &PathBuf) -> io::Result<()> {
    let flags = WatchFlags::CREATE
        | WatchFlags::MOVED_TO
        | WatchFlags::MOVED_FROM
        | WatchFlags::DELETE
        | WatchFlags::DELETE_SELF
        | WatchFlags::MOVE_SELF
        | WatchFlags::ONLYDIR;
    inotify::add_watch(to.get_ref(), folder, flags)?;
    Ok(())
}
