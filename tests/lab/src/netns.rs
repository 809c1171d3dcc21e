//! Network namespaces without names.

use crate::child::ChildGuard;
use crate::container;
use crate::error::{LabError, Result};
use crate::tool;
use nix::sched::{CloneFlags, setns, unshare};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::panic::resume_unwind;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

/// A network namespace, held open by a descriptor. Clones name the same namespace. It ends with the
/// last clone and the last process in it.
#[derive(Debug, Clone)]
pub struct Netns(Arc<OwnedFd>);

impl Netns {
    /// Creates a namespace with only `lo` in it, which is up. Error: the caller has no right to
    /// create namespaces, or there is no `ip`.
    pub fn new() -> Result<Self> {
        // Only the calling thread moves, and that thread ends here.
        let fd = on_a_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET)?;
            File::open("/proc/thread-self/ns/net").map(OwnedFd::from)
        })
        .map_err(|source| LabError::Namespace { doing: "make a network namespace", source })?;
        let netns = Self(Arc::new(fd));
        tool::run(&netns, "ip link set lo up")?;
        Ok(netns)
    }

    /// The namespace behind a file: `/run/netns/NAME` (`ip netns`), `/proc/PID/ns/net`. Error:
    /// there is no such file, or the caller has no right to open it.
    pub fn open(path: &Path) -> Result<Self> {
        File::open(path)
            .map(|file| Self(Arc::new(file.into())))
            .map_err(|source| LabError::Namespace { doing: "open a network namespace", source })
    }

    /// Moves the calling thread into this namespace for good. Threads and processes that it starts
    /// afterwards begin there. Error: the caller has no right to enter.
    pub fn enter(&self) -> io::Result<()> {
        Ok(setns(self.0.as_fd(), CloneFlags::CLONE_NEWNET)?)
    }

    /// Runs `work` on a thread inside this namespace and returns its value. Sockets that it opens
    /// stay in the namespace, no matter where they are used later. A panic in `work` is passed on.
    /// Error: the caller has no right to enter.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        on_a_thread(|| self.enter().map(|()| work()))
            .map_err(|source| LabError::Namespace { doing: "enter a network namespace", source })
    }

    /// Starts `command` inside this namespace. The child is killed when the guard is dropped.
    /// Error: the program does not exist or cannot be started.
    pub fn spawn(&self, command: &mut Command) -> Result<ChildGuard> {
        self.run(|| ChildGuard::spawn(command))?
    }

    /// Runs `command` inside this namespace to its end and returns its output. Error: the program
    /// does not exist or cannot be started. A program that fails is no error here.
    pub fn output(&self, command: &mut Command) -> Result<Output> {
        self.run(|| tool::output(command))?
    }

    /// Runs a command line inside this namespace and returns its output. Its words have no spaces.
    /// Error: there is no such program, or it fails; the error has its message.
    pub fn command(&self, line: &str) -> Result<String> {
        tool::run(self, line)
    }

    /// The same for a command that prints JSON, or nothing. Error: as [`command`](Self::command);
    /// also if the output is no JSON.
    pub fn json(&self, line: &str) -> Result<serde_json::Value> {
        tool::json(self, line)
    }

    /// Runs `ip ARGS` inside this namespace. Error: there is no `ip`, or it fails; the error has
    /// its message.
    pub fn ip(&self, args: &[&str]) -> Result {
        tool::run_words(self, &[&["ip"], args].concat()).map(drop)
    }

    /// Runs `tc ARGS` inside this namespace. Error: there is no `tc`, or it fails; the error has
    /// its message.
    pub fn tc(&self, args: &[&str]) -> Result {
        tool::run_words(self, &[&["tc"], args].concat()).map(drop)
    }

    /// Feeds a script to `nft` inside this namespace. The whole script takes effect, or nothing.
    /// Error: there is no `nft`, or it refuses the script; the error has its message.
    pub fn nft(&self, script: &str) -> Result {
        tool::nft_script(self, script)
    }

    /// Switches an offload of a device on or off, by its name for `ethtool -K`. Error: there is no
    /// `ethtool`, or the device cannot change it.
    pub fn set_feature(&self, device: &str, name: &str, on: bool) -> Result {
        container::set_feature(self, device, (name, name), on)
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

/// Runs `work` on a new thread, so that changes to the thread's state end with it.
fn on_a_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let mut value = None;
    spawn_and_join(Box::new(|| value = Some(work())));
    value.expect("it has returned")
}

/// Of one type: a copy of the standard library's code for each use takes long to compile.
fn spawn_and_join(work: Box<dyn FnOnce() + Send + '_>) {
    std::thread::scope(|scope| {
        scope.spawn(work).join().unwrap_or_else(|panic| resume_unwind(panic));
    });
}
