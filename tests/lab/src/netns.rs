//! Network namespaces without names.

use crate::child::ChildGuard;
use crate::error::LabError;
use crate::rules::{self, Counter};
use crate::shaper::{self, ShaperStats};
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
    /// Creates a namespace with only `lo` in it, which is up.
    ///
    /// # Errors
    /// The caller has no right to create namespaces, or there is no `ip`.
    pub fn new() -> Result<Self, LabError> {
        // Only the calling thread moves, and that thread ends here.
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
    /// There is no such file, or the caller has no right to open it.
    pub fn open(path: &Path) -> Result<Self, LabError> {
        File::open(path)
            .map(|file| Self(Arc::new(file.into())))
            .map_err(|source| LabError::Namespace { doing: "open a network namespace", source })
    }

    /// Moves the calling thread into this namespace for good. Threads and processes that it starts
    /// afterwards begin there.
    ///
    /// # Errors
    /// The caller has no right to enter.
    pub fn enter(&self) -> io::Result<()> {
        Ok(setns(self.0.as_fd(), CloneFlags::CLONE_NEWNET)?)
    }

    /// Runs `work` on a thread inside this namespace and returns its value. Sockets that it opens
    /// stay in the namespace, no matter where they are used later. A panic in `work` is passed on.
    ///
    /// # Errors
    /// The caller has no right to enter.
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

    /// Runs `command` inside this namespace to its end and returns its output.
    ///
    /// # Errors
    /// The program does not exist or cannot be started. A program that fails is no error here.
    pub fn output(&self, command: &mut Command) -> Result<Output, LabError> {
        self.run(|| tool::output(command))?
    }

    /// Runs `ip ARGS` inside this namespace.
    ///
    /// # Errors
    /// There is no `ip`, or it fails; the error has its message.
    pub fn ip(&self, args: &[&str]) -> Result<(), LabError> {
        tool::ip(self, args)
    }

    /// Runs `tc ARGS` inside this namespace.
    ///
    /// # Errors
    /// There is no `tc`, or it fails; the error has its message.
    pub fn tc(&self, args: &[&str]) -> Result<(), LabError> {
        tool::run(self, "tc", args).map(drop)
    }

    /// Feeds a script to `nft` inside this namespace. The whole script takes effect, or nothing.
    ///
    /// # Errors
    /// There is no `nft`, or it refuses the script; the error has its message.
    pub fn nft(&self, script: &str) -> Result<(), LabError> {
        tool::nft_script(self, script)
    }

    /// Lists the rules of this namespace, as `nft -j list ruleset` prints them.
    ///
    /// # Errors
    /// There is no `nft`, or it fails.
    pub fn ruleset(&self) -> Result<serde_json::Value, LabError> {
        tool::run_json(self, "nft", &["-j", "list", "ruleset"])
    }

    /// Lists one chain of nftables, as `nft list chain` prints it. Unlike the JSON of nft 1.0.6 it
    /// names the interface of a `netdev` chain.
    ///
    /// # Errors
    /// There is no such chain, or `nft` fails.
    pub fn chain(&self, family: &str, table: &str, name: &str) -> Result<String, LabError> {
        tool::run(self, "nft", &["list", "chain", family, table, name])
    }

    /// Lists queueing disciplines or filters, as `tc -j ARGS` prints them.
    ///
    /// # Errors
    /// There is no `tc`, or it fails.
    pub fn tc_json(&self, args: &[&str]) -> Result<serde_json::Value, LabError> {
        tool::run_json(self, "tc", &[&["-j"], args].concat())
    }

    /// Lists links, addresses or routes, as `ip -j ARGS` prints them.
    ///
    /// # Errors
    /// There is no `ip`, or it fails.
    pub fn ip_json(&self, args: &[&str]) -> Result<serde_json::Value, LabError> {
        tool::ip_json(self, args)
    }

    /// The values of a named counter of nftables.
    ///
    /// # Errors
    /// There is no such counter, or `nft` fails.
    pub fn counter(&self, family: &str, table: &str, name: &str) -> Result<Counter, LabError> {
        rules::counter(self, family, table, name)
    }

    /// Statistics of the first queueing discipline of this kind on `device`.
    ///
    /// # Errors
    /// There is none, or `tc` fails.
    pub fn qdisc(&self, device: &str, kind: &str) -> Result<ShaperStats, LabError> {
        shaper::stats(self, device, kind)
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
    std::thread::scope(|scope| {
        scope.spawn(work).join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}
