//! Which process has a socket.
//!
//! A program may have given its sockets to another process, and any process may leave for a network
//! namespace of its own making. They are kept guarded as long as one is found. A descriptor that is
//! on its way in a message is not found.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::asker::{Namespace, Own, lives};
use crate::called::Called;
use crate::ends::Ends;

/// The most descriptors of a thread that are looked at.
const DESCRIPTORS_MAX: i32 = 1 << 16;
/// The longest that they are looked at: a file of epoll may have a long text.
const LOOK_MAX: Duration = Duration::from_secs(2);

/// Of `linux/pidfd.h`: the descriptor names a thread.
const PIDFD_THREAD: PidfdFlags = PidfdFlags::from_bits_retain(rustix::fs::OFlags::EXCL.bits());

/// The sockets of a port, and the container that it was handed to.
#[derive(Debug)]
pub(crate) struct Sought {
    pub(crate) sockets: BTreeSet<u64>,
    /// The inode of its network namespace.
    pub(crate) namespace: u64,
    /// Its name by the control group of a process that asked.
    pub(crate) called: Option<Called>,
    /// The same of the other containers that are known, by their network namespaces.
    pub(crate) others: BTreeMap<u64, Option<Called>>,
}

impl Sought {
    /// The sockets of a port of a container, which is one of `all`: each by its network namespace
    /// and its name.
    pub(crate) fn of<'a>(
        sockets: BTreeSet<u64>,
        (namespace, called): (u64, &Option<Called>),
        all: impl Iterator<Item = (u64, &'a Option<Called>)>,
    ) -> Self {
        let others = all.filter(|(other, _)| *other != namespace);
        let others = others.map(|(other, called)| (other, called.clone())).collect();
        Self { sockets, namespace, called: called.clone(), others }
    }
}

/// A process with one of the sockets.
#[derive(Debug)]
pub(crate) struct Holder {
    /// The process.
    pub(crate) pidfd: OwnedFd,
    /// The thread that has them; `None` for the first one, and where the kernel names no threads
    /// (before Linux 6.9): then the first one's descriptors are looked at.
    thread: Option<OwnedFd>,
    /// The inodes of the sockets, with the number that the thread has for each.
    pub(crate) sockets: Vec<(u64, i32)>,
}

/// A thread: each may have descriptors and a network namespace of its own, and may outlive the
/// first of its process.
#[derive(Debug, Clone, Copy)]
struct Thread {
    process: Pid,
    id: i32,
}

pub(crate) fn inode(socket: impl AsFd) -> io::Result<u64> {
    Ok(rustix::fs::fstat(socket)?.st_ino)
}

/// A living process that has one of the sockets: in the network namespace of the container, or in
/// one that a program without rights over the host has made and that has no host's end.
///
/// There a name by the control group decides. A thread with that of another container is passed
/// over. One without that of this container holds only sockets that are found, in bounded time:
/// no program makes the ports of another container count.
pub(crate) fn find(sought: &Sought, own: &Own, ends: &Ends) -> Option<Holder> {
    let mount = sockets_mount().ok()?;
    let look = |thread: &Thread| thread.holder(&sought.sockets, mount);
    let mut strangers = BTreeMap::<u64, Vec<Thread>>::new();
    for thread in threads() {
        let Some(of) = thread.namespace() else { continue };
        if of == sought.namespace {
            if let Some(holder) = look(&thread) {
                return Some(holder);
            }
        } else if of != own.network().inode() && !sought.others.contains_key(&of) {
            strangers.entry(of).or_default().push(thread);
        }
    }
    let called = |thread: &Thread| Called::of(thread.id);
    let mut anothers: BTreeSet<Called> = sought.others.values().flatten().cloned().collect();
    strangers.retain(|_, threads| {
        let open = |thread: &Thread| Namespace::open(thread.path("ns/net").into()).ok();
        let Some(namespace) = threads.iter().find_map(open) else { return false };
        let has_end = ends.end_of(&namespace).is_some();
        anothers.extend(threads.first().filter(|_| has_end).and_then(called));
        !has_end && !namespace.is_of_host(own)
    });
    anothers.retain(|called| Some(called) != sought.called.as_ref());
    let (mut alike, mut unlike) = (Vec::new(), Vec::new());
    for thread in strangers.into_values().flatten() {
        match called(&thread) {
            called if called == sought.called => alike.push(thread),
            Some(called) if anothers.contains(&called) => {}
            _ => unlike.push(thread),
        }
    }
    alike.iter().find_map(look).or_else(|| {
        let begun = Instant::now();
        let in_time = unlike.iter().take_while(|_| begun.elapsed() < LOOK_MAX);
        in_time.filter_map(look).find(|holder| !holder.sockets.is_empty())
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
        let of = self.thread.as_ref().unwrap_or(&self.pidfd);
        let copy = pidfd_getfd(of, *number, PidfdGetfdFlags::empty()).ok()?;
        (inode(&copy).ok() == Some(socket)).then_some(copy)
    }
}

fn threads() -> impl Iterator<Item = Thread> {
    let ids = |of: &str| {
        let entries = fs::read_dir(of).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
    };
    // Threads of the agent's enter network namespaces for a while.
    let own = rustix::process::getpid();
    let processes = ids("/proc").filter_map(Pid::from_raw).filter(move |it| *it != own);
    processes.flat_map(move |process| {
        ids(&format!("/proc/{process}/task")).map(move |id| Thread { process, id })
    })
}

impl Thread {
    fn path(self, file: &str) -> String {
        format!("/proc/{}/task/{}/{file}", self.process, self.id)
    }

    /// The inode of its network namespace; `None` if it has ended.
    fn namespace(self) -> Option<u64> {
        Some(fs::metadata(self.path("ns/net")).ok()?.ino())
    }

    /// Its process, if that lives and has one of the sockets. One that cannot be looked at may have
    /// them.
    fn holder(self, wanted: &BTreeSet<u64>, mount: u64) -> Option<Holder> {
        // The pidfds are opened first: later reads are of its process while that lives.
        let pidfd = pidfd_open(self.process, PidfdFlags::empty()).ok()?;
        let id = Pid::from_raw(self.id).filter(|id| *id != self.process);
        let thread = id.and_then(|id| pidfd_open(id, PIDFD_THREAD).ok());
        let sockets = self.sockets(wanted, mount);
        let holds = sockets.as_ref().is_none_or(|sockets| !sockets.is_empty());
        let sockets = sockets.unwrap_or_default();
        (holds && lives(&pidfd)).then_some(Holder { pidfd, thread, sockets })
    }

    /// The wanted sockets among its descriptors. `None` if it has too many to look at.
    ///
    /// `/proc/PID/fd` is for those with the process's user id, or a right to read all files. The
    /// texts beside it take no more than the right to trace it. No descriptor is copied: the close
    /// of a copy may take any time.
    fn sockets(self, wanted: &BTreeSet<u64>, mount: u64) -> Option<Vec<(u64, i32)>> {
        let status = fs::read_to_string(self.path("status")).unwrap_or_default();
        let room = status.lines().find_map(|line| line.strip_prefix("FDSize:"));
        let room: i32 = room.and_then(|room| room.trim().parse().ok()).unwrap_or_default();
        if room > DESCRIPTORS_MAX {
            return None;
        }
        let begun = Instant::now();
        let mut found = Vec::new();
        for entry in fs::read_dir(self.path("fdinfo")).into_iter().flatten().flatten() {
            if begun.elapsed() > LOOK_MAX {
                return None;
            }
            let number = entry.file_name().to_str().and_then(|number| number.parse().ok());
            let (Some(number), Ok([at, inode])) = (number, place(&entry.path())) else { continue };
            if at == mount && wanted.contains(&inode) {
                found.push((inode, number));
            }
        }
        Some(found)
    }
}

/// The mount and the inode of an open file, by its text in `fdinfo` of proc(5).
fn place(text: &std::path::Path) -> io::Result<[u64; 2]> {
    let mut bytes = [0; 256];
    let length = File::open(text)?.read(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes[..length]);
    let value = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|value| value.trim().parse().ok()).ok_or(io::ErrorKind::InvalidData)
    };
    Ok([value("mnt_id")?, value("ino")?])
}

/// The mount that has all sockets, and nothing else.
fn sockets_mount() -> io::Result<u64> {
    let socket = UnixDatagram::unbound()?;
    let text = format!("/proc/self/fdinfo/{}", socket.as_raw_fd());
    Ok(place(text.as_ref())?[0])
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::process::{Command, Stdio};

    use super::*;

    fn sockets() -> [UdpSocket; 2] {
        [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").expect("a socket"))
    }

    #[test]
    fn a_process_is_found_by_its_socket() {
        let (own, ends) = (Own::new().expect("/proc"), Ends::new().expect("rtnetlink"));
        let namespace = own.network().inode();
        let inodes = sockets().map(|socket| {
            let inode = inode(&socket).expect("an inode");
            (OwnedFd::from(socket), inode)
        });
        let [(one, first), (two, second)] = inodes;
        let mut sleep = Command::new("sleep");
        let mut child =
            sleep.arg("60").stdin(one).stdout(two).stderr(Stdio::null()).spawn().expect("sleep");
        drop(sleep);
        let find = |namespace: u64, sockets: &[u64]| {
            let sockets = sockets.iter().copied().collect();
            find(&Sought { sockets, namespace, called: None, others: BTreeMap::new() }, &own, &ends)
        };
        let holder = find(namespace, &[first, second]).expect("the child");
        assert_eq!(holder.sockets, [(first, 0), (second, 1)]);
        let copy = holder.copy_of(second).expect("a copy");
        assert_eq!(inode(&copy).ok(), Some(second));
        assert!(holder.copy_of(4711).is_none() && holder.still_holds());
        // A file that is no socket, and the agent's own network namespace for another container.
        assert!(find(namespace, &[copied_inode()]).is_none());
        assert!(find(namespace + 1, &[first]).is_none());
        child.kill().and_then(|()| child.wait()).expect("killed");
        assert!(!holder.still_holds() && find(namespace, &[first, second]).is_none());
    }

    /// The inode of the device that such a child has as its standard error.
    fn copied_inode() -> u64 {
        fs::metadata("/dev/null").expect("a device").ino()
    }

    #[test]
    fn a_process_holds_as_long_as_it_has_one() {
        let [one, two] = sockets();
        let inodes: BTreeSet<u64> =
            [&one, &two].map(|socket| inode(socket).expect("an inode")).into();
        let id = rustix::thread::gettid().as_raw_pid();
        let thread = Thread { process: rustix::process::getpid(), id };
        let mount = sockets_mount().expect("/proc");
        let holder = thread.holder(&inodes, mount).expect("this process");
        assert_eq!(holder.sockets.len(), 2);
        drop(one);
        assert!(holder.still_holds(), "it has the other");
        drop(two);
        assert!(!holder.still_holds() && thread.holder(&inodes, mount).is_none());
    }
}
