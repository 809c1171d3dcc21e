//! Keeps a tree up to date for those that no library reaches: programs in Go, and static ones.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify;

use super::devices::Devices;
use super::tree;
use crate::kernel::watch::InterfacesWatch;
use crate::tuning::sysfs::{EVERY, LATELY};

/// Follows the interfaces of the calling thread's network namespace, and the devices' counters as
/// long as they are read, in the tree of this directory and list, until `stop` is readable. It
/// sleeps while nothing changes and no program reads counters. The first to read them after a while
/// finds those that were counted before, and a second later those of by now. Error: no descriptor
/// is left, or none for inotify(7).
pub fn keep(root: &Path, list: &str, stop: BorrowedFd<'_>) -> io::Result<()> {
    let mut watch = InterfacesWatch::open()?;
    let readers = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
    let mut devices = Devices::shared(root);
    let mut read: Option<Instant> = None;
    loop {
        watch.look();
        let found = devices.list(Some(list)).unwrap_or_default();
        if read.is_some_and(|read| read.elapsed() < LATELY) {
            let _ = devices.count(Some(list));
        } else {
            read = None;
        }
        for directory in found.iter().flat_map(tree::counters_of) {
            // As often as one likes.
            let opened = inotify::WatchFlags::OPEN;
            let _ = inotify::add_watch(&readers, root.join(directory), opened);
        }
        // These were our own.
        let _ = take(readers.as_fd());

        let mut fds = [stop, watch.as_fd(), readers.as_fd()]
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let limit = read.map(|_| Timespec { tv_sec: EVERY.as_secs().cast_signed(), tv_nsec: 0 });
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let [stopped, _, opened] = fds.map(|fd| !fd.revents().is_empty());
        if stopped {
            return Ok(());
        }
        if opened && take(readers.as_fd()) {
            read = Some(Instant::now());
        }
    }
}

/// Whether files were opened since the last look.
fn take(readers: BorrowedFd<'_>) -> bool {
    let mut room = [0; 4096];
    let mut some = false;
    while rustix::io::read(readers, &mut room).is_ok_and(|len| len > 0) {
        some = true;
    }
    some
}
