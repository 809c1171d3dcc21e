//! Network namespaces without names.

use super::child::ChildGuard;
use super::error::LabError;
use super::tool;
use nix::sched::{CloneFlags, setns, unshare};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::panic::resume_unwind;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

/// A network namespace, held open by a descriptor. Clones name the same namespace; it ends with the
/// last clone and the last process in it.
#[derive(Debug, Clone)]
pub struct Netns(Arc<OwnedFd>);

impl Netns {
    /// Makes a new namespace with nothing in it but `lo`, which is up.
    ///
    /// # Errors
    /// No right to make namespaces, or no `ip`.
    pub fn new() -> Result<Self, LabError> {
        // Only the calling thread moves, and this thread ends here.
        let fd = on_a_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET)?;
            File::open("/proc/thread-self/ns/net").map(OwnedFd::from)
        })
        .map_err(|source| LabError::Namespace { doing: "make a network namespace", source })?;
        let netns = Self(Arc::new(fd));
        tool::ip(&netns, &["link", "set", "lo", "up"])?;
        Ok(netns)
    }

    /// The namespace behind a file: `/run/netns/NAME` (`ip netns`), `/proc/PID/ns/net`.
    ///
    /// # Errors
    /// There is no such file, or no right to open it.
    pub fn open(path: &Path) -> Result<Self, LabError> {
        File::open(path)
            .map(|file| Self(Arc::new(file.into())))
            .map_err(|source| LabError::Namespace { doing: "open a network namespace", source })
    }

    /// Moves the calling thread into this namespace for good. Threads and processes that it starts
    /// from then on are born there.
    ///
    /// # Errors
    /// No right to enter.
    pub fn enter(&self) -> io::Result<()> {
        Ok(setns(self.0.as_fd(), CloneFlags::CLONE_NEWNET)?)
    }

    /// Runs `work` on a thread inside this namespace and returns its value. Sockets that it opens stay
    /// in the namespace wherever they are used later. A panic in `work` is passed on.
    ///
    /// # Errors
    /// No right to enter.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, LabError> {
        on_a_thread(|| self.enter().map(|()| work()))
            .map_err(|source| LabError::Namespace { doing: "enter a network namespace", source })
    }

    /// Starts `command` inside this namespace. The child is killed when the guard is dropped.
    ///
    /// # Errors
    /// The program does not exist or cannot be started.
    pub fn spawn(&self, command: &mut Command) -> Result<ChildGuard, LabError> {
        self.run(|| ChildGuard::spawn(command))?
    }

    /// Runs `command` inside this namespace to its end and returns what it wrote.
    ///
    /// # Errors
    /// The program does not exist or cannot be started; not a failure of the program.
    pub fn output(&self, command: &mut Command) -> Result<Output, LabError> {
        self.run(|| tool::output(command))?
    }

    /// A path that names this namespace as long as this process lives, for programs that take one
    /// (`ip link set … netns PATH`).
    #[must_use]
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Runs `work` on a fresh thread, so that what it does to its thread ends with it.
fn on_a_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        scope.spawn(work).join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}
