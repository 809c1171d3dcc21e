//! Which process has a socket, of the processes of a network namespace.
//!
//! A program may have given its sockets to another process. They are kept guarded as long as one is
//! found. A descriptor that is on its way in a message is not found.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::asker::lives;

/// The most descriptors of a process that are looked at.
const DESCRIPTORS_MAX: i32 = 1 << 16;

/// A process with one of the sockets.
#[derive(Debug)]
pub(crate) struct Holder {
    /// The process.
    pub(crate) pidfd: OwnedFd,
    /// The inodes of the sockets, with the number that the process has for each.
    pub(crate) sockets: Vec<(u64, i32)>,
}

pub(crate) fn inode(socket: impl AsFd) -> io::Result<u64> {
    Ok(rustix::fs::fstat(socket)?.st_ino)
}

/// A living process of the network namespace with this inode that has one of the sockets.
pub(crate) fn find(namespace: u64, sockets: &BTreeSet<u64>) -> Option<Holder> {
    processes().find_map(|pid| {
        // The pidfd is opened first: later reads are of its process while that lives.
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        let of = fs::metadata(format!("/proc/{pid}/ns/net")).ok()?.ino();
        if of != namespace {
            return None;
        }
        let sockets = sockets_of(pid, &pidfd, sockets);
        // One that cannot be looked at may have them.
        let holds = sockets.as_ref().is_none_or(|sockets| !sockets.is_empty());
        let sockets = sockets.unwrap_or_default();
        (holds && lives(&pidfd)).then_some(Holder { pidfd, sockets })
    })
}

impl Holder {
    /// Whether it still has one of them where it had it.
    pub(crate) fn still_holds(&self) -> bool {
        lives(&self.pidfd) && self.sockets.iter().any(|(inode, _)| self.copy_of(*inode).is_some())
    }

    /// A copy of one of its sockets, by the inode.
    pub(crate) fn copy_of(&self, socket: u64) -> Option<OwnedFd> {
        let (_, number) = self.sockets.iter().find(|(inode, _)| *inode == socket)?;
        let copy = pidfd_getfd(&self.pidfd, *number, PidfdGetfdFlags::empty()).ok()?;
        (inode(&copy).ok() == Some(socket)).then_some(copy)
    }
}

fn processes() -> impl Iterator<Item = Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?))
}

/// The wanted sockets among the descriptors of a process. `None` if it has too many to look at.
///
/// `/proc/PID/fd` is for those with the process's user id, or a right to read all files. Copies of
/// descriptors take no more than the right to trace it.
fn sockets_of(pid: Pid, pidfd: &OwnedFd, wanted: &BTreeSet<u64>) -> Option<Vec<(u64, i32)>> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let room = status.lines().find_map(|line| line.strip_prefix("FDSize:"));
    let room: i32 = room.and_then(|room| room.trim().parse().ok()).unwrap_or_default();
    if room > DESCRIPTORS_MAX {
        return None;
    }
    let socket = |number: i32| {
        let copy = pidfd_getfd(pidfd, number, PidfdGetfdFlags::empty()).ok()?;
        let inode = inode(&copy).ok()?;
        wanted.contains(&inode).then_some((inode, number))
    };
    Some((0..room).filter_map(socket).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;
    use std::os::fd::AsRawFd as _;

    #[test]
    fn a_process_is_found_by_its_socket() {
        let namespace = fs::metadata("/proc/self/ns/net").expect("the own one").ino();
        let [one, two] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").expect("a socket"));
        let inodes = [inode(&one).expect("an inode"), inode(&two).expect("an inode")];
        let holder = find(namespace, &inodes.into()).expect("this process");
        assert_eq!(holder.sockets.len(), 2);
        let copy = holder.copy_of(inodes[1]).expect("a copy");
        assert_eq!(inode(&copy).ok(), Some(inodes[1]));
        assert_ne!(copy.as_raw_fd(), two.as_raw_fd());
        assert!(holder.copy_of(4711).is_none() && holder.still_holds());
        drop(one);
        assert!(holder.still_holds(), "it has the other");
        drop((two, copy));
        assert!(!holder.still_holds());
        assert!(find(namespace, &inodes.into()).is_none(), "nobody has them");
        assert!(find(namespace + 1, &inodes.into()).is_none());
    }
}
