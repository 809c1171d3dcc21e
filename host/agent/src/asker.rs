//! The asker: the process that connected, and its network namespace. No message says either.
//!
//! A process is held by a pidfd, so that its number cannot become another's unnoticed: facts read
//! by the number are true if the pidfd shows afterwards that the process lives.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::PathBuf;

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::{PeerCredentials, PeerPidfd};
use rocinante_netdev::for_agent::namespaces::owning_user_namespace;
use rocinante_netdev::handed::{Code, Refused};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::called::Called;

/// Of `linux/magic.h`.
const NSFS_MAGIC: rustix::fs::FsWord = 0x6e73_6673;
/// The bit of `CAP_NET_ADMIN`.
const NET_ADMIN: u64 = 1 << 12;

/// A network namespace, held open.
#[derive(Debug)]
pub(crate) struct Namespace {
    file: File,
    inode: u64,
}

/// The process that asks.
#[derive(Debug)]
pub(crate) struct Asker {
    /// The process, readable when it has ended.
    pub(crate) pidfd: OwnedFd,
    pid: Pid,
    /// Its user and group.
    pub(crate) user: (u32, u32),
    /// The network namespace.
    pub(crate) namespace: Namespace,
    /// Whether processes of the container may change its addresses: its user namespace owns the
    /// network, or its bounding set of capabilities has `CAP_NET_ADMIN`.
    pub(crate) is_administered_by_itself: bool,
}

/// The namespaces of the agent itself.
#[derive(Debug)]
pub(crate) struct Own {
    network: Namespace,
    user: u64,
}

impl Own {
    /// Those of the calling thread.
    pub(crate) fn new() -> io::Result<Self> {
        let network = Namespace::open("/proc/thread-self/ns/net".into())?;
        let user = fs::metadata("/proc/thread-self/ns/user")?.ino();
        Ok(Self { network, user })
    }

    pub(crate) fn network(&self) -> &Namespace {
        &self.network
    }
}

impl Namespace {
    pub(crate) fn open(path: PathBuf) -> io::Result<Self> {
        // Another file might be one that waits for a writer.
        let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
        if rustix::fs::fstatfs(&file)?.f_type != NSFS_MAGIC {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no namespace"));
        }
        let inode = file.metadata()?.ino();
        Ok(Self { file, inode })
    }

    /// Its number, which is another's when it has gone.
    pub(crate) fn inode(&self) -> u64 {
        self.inode
    }

    /// The descriptor.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Does something on a thread in the namespace: a thread of the agent's never goes there.
    /// Error: the refusal to send if the agent cannot enter it.
    pub(crate) fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, Refused> {
        let failed = |why: &str| {
            let reason = format!("the agent cannot enter your network namespace: {why}");
            Refused::new(Code::Failed, reason, "start the agent with CAP_SYS_ADMIN")
        };
        let there = || {
            move_into_link_name_space(self.file.as_fd(), Some(LinkNameSpaceType::Network))
                .map_err(|e| failed(&e.to_string()))?;
            Ok(work())
        };
        std::thread::scope(|scope| scope.spawn(there).join())
            .unwrap_or_else(|_| Err(failed("the thread there ended")))
    }
}

impl Asker {
    /// The process at the other end of a connection, which is in a container. Error: the refusal to
    /// send: the process has gone, is in no container, or cannot be identified.
    pub(crate) fn of(connection: impl AsFd, own: &Own) -> Result<Self, Refused> {
        let asker = Self::anywhere(connection, own)?;
        if asker.namespace.inode == own.network.inode {
            let reason = "you are in the network namespace of the host, or of the agent, as \
                          containers with `--network host` are";
            let hint = "give the container a network of its own, or CAP_NET_RAW";
            return Err(Refused::new(Code::Forbidden, reason, hint));
        }
        Ok(asker)
    }

    /// The process at the other end of a connection, in a container or on the host. Error: the
    /// refusal to send: it has gone, is nested in a container, or cannot be identified.
    pub(crate) fn anywhere(connection: impl AsFd, own: &Own) -> Result<Self, Refused> {
        let (pidfd, pid, user) = process(connection.as_fd())?;
        let unreadable = |e: io::Error| {
            // A process that has ended is in no namespace.
            if !lives(&pidfd) {
                return gone();
            }
            let reason = format!("the agent cannot tell in which network namespace you are: {e}");
            let hint = "start the agent with CAP_SYS_PTRACE, and with the host's /proc";
            Refused::new(Code::Failed, reason, hint)
        };
        let namespace = namespace_of(pid).map_err(unreadable)?;
        let status = fs::read_to_string(format!("/proc/{pid}/status")).map_err(unreadable)?;
        // The values just read belong to this process and no later one.
        if !lives(&pidfd) {
            return Err(gone());
        }
        let owner = owner_of(&namespace, own)?;
        let is_administered_by_itself = owner == Owner::Container || may_administer(&status);
        Ok(Self { pidfd, pid, user, namespace, is_administered_by_itself })
    }

    /// The process id, for people.
    pub(crate) fn pid(&self) -> i32 {
        self.pid.as_raw_pid()
    }

    /// The name of its container by the control group where its engine put it.
    pub(crate) fn called(&self) -> Option<Called> {
        Called::of(self.pid()).filter(|_| lives(&self.pidfd))
    }

    /// The process. The network namespace is held no more.
    pub(crate) fn into_pidfd(self) -> OwnedFd {
        self.pidfd
    }

    /// Whether the process is still there, and where it was. Error: what to answer if not.
    pub(crate) fn check_again(&self) -> Result<(), Refused> {
        let now = namespace_of(self.pid).map(|namespace| namespace.inode);
        if !lives(&self.pidfd) {
            return Err(gone());
        }
        match now {
            Ok(inode) if inode == self.namespace.inode => Ok(()),
            _ => Err(Refused::new(Code::Forbidden, "you moved to another network namespace", "")),
        }
    }
}

impl Namespace {
    /// Whether processes of a container may administer this namespace of its own, as far as its
    /// owner decides. Error: what to answer if the agent does not serve it: it is the host's, or
    /// nested in a container.
    pub(crate) fn is_of_its_container(&self, own: &Own) -> Result<bool, Refused> {
        if self.inode == own.network.inode {
            let reason = "it is the network namespace of the host, or of the agent";
            return Err(Refused::new(Code::Forbidden, reason, ""));
        }
        Ok(owner_of(self, own)? == Owner::Container)
    }
}

impl Namespace {
    /// Whether the agent's user namespace owns it, or one that is not below that: to make it took a
    /// right over the host.
    pub(crate) fn is_of_host(&self, own: &Own) -> bool {
        match owning_user_namespace(&self.file) {
            Ok(owner) => File::from(owner).metadata().is_ok_and(|it| it.ino() == own.user),
            Err(error) => error.kind() == io::ErrorKind::PermissionDenied,
        }
    }
}

/// The user namespace that owns a network namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// The agent's: to administer the network takes a right over the host.
    Host,
    /// A container's: its root administers the network.
    Container,
}

fn owner_of(namespace: &Namespace, own: &Own) -> Result<Owner, Refused> {
    let nested = || {
        let reason = "your network namespace is nested in a container";
        let hint = "the agent serves containers of its own host alone: run one in that container";
        Refused::new(Code::Forbidden, reason, hint)
    };
    let inode = |fd: &OwnedFd| {
        fd.try_clone()
            .and_then(|fd| File::from(fd).metadata())
            .map(|m| m.ino())
            .map_err(|e| failed(&e))
    };
    // The kernel shows only descendants of the agent's user namespace.
    let owner = owning_user_namespace(&namespace.file).map_err(|_| nested())?;
    if inode(&owner)? == own.user {
        return Ok(Owner::Host);
    }
    let parent = owning_user_namespace(&owner).map_err(|_| nested())?;
    if inode(&parent)? == own.user { Ok(Owner::Container) } else { Err(nested()) }
}

/// The process at the other end, its user and group. All were taken when it connected.
fn process(connection: impl AsFd) -> Result<(OwnedFd, Pid, (u32, u32)), Refused> {
    let credentials = getsockopt(&connection, PeerCredentials).map_err(|e| failed(&e.into()))?;
    let owner = (credentials.uid(), credentials.gid());
    let Some(pid) = Pid::from_raw(credentials.pid()) else {
        let reason = "the agent cannot see your process";
        return Err(Refused::new(
            Code::Forbidden,
            reason,
            "start the agent in the host's pid namespace",
        ));
    };
    match getsockopt(&connection, PeerPidfd) {
        Ok(pidfd) => Ok((pidfd, pid, owner)),
        // Linux before 6.5. The number may have become another's since it connected.
        Err(nix::errno::Errno::ENOPROTOOPT) => {
            let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|_| gone())?;
            let again = getsockopt(&connection, PeerCredentials).map_err(|e| failed(&e.into()))?;
            let user = fs::metadata(format!("/proc/{pid}")).map_err(|_| gone())?.uid();
            let is_same = user == again.uid() && lives(&pidfd);
            if is_same { Ok((pidfd, pid, owner)) } else { Err(gone()) }
        }
        Err(_) => Err(gone()),
    }
}

fn namespace_of(pid: Pid) -> io::Result<Namespace> {
    Namespace::open(format!("/proc/{pid}/ns/net").into())
}

/// Whether the process has not ended.
pub(crate) fn lives(pidfd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(poll(&mut fds, Some(&at_once)), Ok(0))
}

/// Whether a `status` file of proc(5) has `CAP_NET_ADMIN` in the bounding set, which holds for all
/// that the process starts.
fn may_administer(status: &str) -> bool {
    let bounding = status.lines().find_map(|line| line.strip_prefix("CapBnd:"));
    let bounding = bounding.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    bounding.is_none_or(|set| set & NET_ADMIN != 0)
}

fn gone() -> Refused {
    Refused::new(Code::Forbidden, "the process that connected has gone", "")
}

fn failed(error: &io::Error) -> Refused {
    Refused::new(Code::Failed, format!("the agent cannot tell who you are: {error}"), "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bounding_set_tells_what_a_container_may_become() {
        assert!(may_administer("CapEff:\t0000000000000000\nCapBnd:\t000001ffffffffff\n"));
        assert!(may_administer("CapBnd:\t0000000000001000\n"));
        assert!(!may_administer("CapEff:\t0000000000001000\nCapBnd:\t00000000a80425fb\n"));
        // What cannot be read is taken for the worse.
        assert!(may_administer("") && may_administer("CapBnd:\tx\n"));
    }

    #[test]
    fn a_process_that_ended_does_not_live() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep");
        let pid = Pid::from_child(&child);
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).expect("a pidfd");
        assert!(lives(&pidfd));
        child.kill().expect("killed");
        child.wait().expect("waited for");
        assert!(!lives(&pidfd));
    }

    #[test]
    fn the_own_namespace_is_refused() {
        let (one, _two) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let own = Own::new().expect("namespaces");
        let refused = Asker::of(&one, &own).expect_err("it is the agent's own");
        assert_eq!(refused.code, Code::Forbidden);
        assert!(refused.reason.contains("host"), "{refused}");
    }
}
