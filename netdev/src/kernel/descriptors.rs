//! Descriptors to wait on: `eventfd(2)` and `epoll(7)`, close-on-exec and non-blocking. Also the
//! operations that all sockets share.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::kernel::call;

/// Makes the type a socket around its descriptor: of one that its `new` made, perhaps in another
/// process, and back.
macro_rules! owns_descriptor {
    ($socket:ident) => {
        impl From<OwnedFd> for $socket {
            fn from(fd: OwnedFd) -> Self {
                Self(fd)
            }
        }

        impl From<$socket> for OwnedFd {
            fn from(socket: $socket) -> Self {
                socket.0
            }
        }

        impl AsFd for $socket {
            fn as_fd(&self) -> BorrowedFd<'_> {
                self.0.as_fd()
            }
        }
    };
}
pub(crate) use owns_descriptor;

/// The least number of our own descriptors, if the limit permits such numbers.
const APART: libc::c_int = 512;

/// The same file under a number that a program's next file does not get. A program may close
/// descriptors that it did not open, and new files get the lowest free numbers: a write of ours to
/// one of those would go to the program's file. `select(2)` still takes these numbers.
///
/// Without room up there the descriptor keeps its number.
#[must_use]
pub fn apart(fd: OwnedFd) -> OwnedFd {
    if cfg!(miri) {
        return fd;
    }
    let from = |least: libc::c_int| -> Option<OwnedFd> {
        // SAFETY: it takes no pointer, and a result that is not negative is a descriptor without
        // another owner.
        unsafe {
            let copy = check(libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, least)).ok()?;
            Some(OwnedFd::from_raw_fd(copy))
        }
    };
    if fd.as_raw_fd() >= APART {
        return fd;
    }
    if let Some(copy) = from(APART) {
        return copy;
    }
    let half = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) / 2;
    let least = libc::c_int::try_from(half).unwrap_or(APART).min(APART);
    if fd.as_raw_fd() >= least {
        return fd;
    }
    from(least).unwrap_or(fd)
}

/// Has a program that this process becomes or starts get no descriptor but the first three. Error:
/// there is no `/proc`.
pub fn keep_from_children() -> io::Result<()> {
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let number = entry?.file_name().to_str().and_then(|name| name.parse().ok()).unwrap_or(0);
        if number > libc::STDERR_FILENO {
            // SAFETY: it takes no pointer, and closes nothing in this process.
            unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
        }
    }
    Ok(())
}

/// A netlink socket, [`apart`]. Error: no descriptor or no memory left.
pub(crate) fn netlink(protocol: isize) -> io::Result<netlink_sys::Socket> {
    let socket = netlink_sys::Socket::new(protocol)?.into_raw_fd();
    // SAFETY: each step gives the descriptor to the next as its only owner.
    unsafe {
        let socket = apart(OwnedFd::from_raw_fd(socket));
        Ok(netlink_sys::Socket::from_raw_fd(socket.into_raw_fd()))
    }
}

/// A counter that is readable while it is not zero (`eventfd(2)`).
#[derive(Debug)]
pub(crate) struct EventFd(File);

impl EventFd {
    /// A new one, not readable. Error: no descriptor or no memory left.
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: no pointers; a non-negative result is a descriptor without another owner.
        unsafe {
            let fd = check(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK))?;
            Ok(Self(File::from(apart(OwnedFd::from_raw_fd(fd)))))
        }
    }

    /// Makes it readable.
    pub(crate) fn signal(&self) {
        // The only error is EAGAIN at 2⁶⁴ − 1: then it is readable already.
        let _ = (&self.0).write(&1_u64.to_ne_bytes());
    }

    /// Makes it not readable.
    pub(crate) fn clear(&self) {
        // The only error is EAGAIN: then it is not readable.
        let _ = (&self.0).read(&mut [0; 8]);
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A set of descriptors that is itself a descriptor: readable while one of them is ready
/// (`epoll(7)`, level-triggered).
#[derive(Debug)]
pub(crate) struct Epoll(OwnedFd);

/// What to wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Interest {
    /// `EPOLLIN`.
    Read,
    /// `EPOLLOUT`.
    Write,
    /// Both.
    ReadWrite,
}

impl Epoll {
    /// An empty set. Error: no descriptor or no memory left.
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: no pointers; a non-negative result is a descriptor without another owner.
        unsafe {
            let fd = check(libc::epoll_create1(libc::EPOLL_CLOEXEC))?;
            Ok(Self(apart(OwnedFd::from_raw_fd(fd))))
        }
    }

    /// Adds `fd`. Closing it removes it. Error: it is in the set already, cannot be waited on, or
    /// no memory is left.
    pub(crate) fn add(&self, fd: impl AsFd, interest: Interest) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd.as_fd(), Some(interest))
    }

    /// Changes what to wait for. Error: it is not in the set.
    pub(crate) fn modify(&self, fd: impl AsFd, interest: Interest) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd.as_fd(), Some(interest))
    }

    /// Removes `fd`. Error: it is not in the set.
    pub(crate) fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_DEL, fd.as_fd(), None)
    }

    /// Adds `fd` with this interest, or removes it for `None`. Error: as [`add`](Self::add) and
    /// [`remove`](Self::remove).
    pub(crate) fn set(&self, fd: impl AsFd, interest: Option<Interest>) -> io::Result<()> {
        match interest {
            Some(interest) => self.add(fd, interest),
            None => self.remove(fd),
        }
    }

    fn control(&self, op: i32, fd: BorrowedFd<'_>, interest: Option<Interest>) -> io::Result<()> {
        let events = match interest {
            None => 0,
            Some(Interest::Read) => libc::EPOLLIN,
            Some(Interest::Write) => libc::EPOLLOUT,
            Some(Interest::ReadWrite) => libc::EPOLLIN | libc::EPOLLOUT,
        };
        let fd = fd.as_raw_fd();
        let mut event = libc::epoll_event { events: events as u32, u64: fd as u64 };
        // SAFETY: both descriptors are open, and the kernel only reads the event during the call.
        unsafe { check(libc::epoll_ctl(self.0.as_raw_fd(), op, fd, &raw mut event)) }?;
        Ok(())
    }
}

impl AsFd for Epoll {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Waits until `fd` is readable or `timeout_ms` (−1 = for ever) have passed. Returns whether `fd`
/// is readable. Error: as `poll(2)`, except `EINTR`, which counts as not readable.
pub fn wait_readable(fd: impl AsFd, timeout_ms: i32) -> io::Result<bool> {
    let mut poll = libc::pollfd { fd: fd.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, borrowed exclusively for the call.
    match unsafe { check(libc::poll(&raw mut poll, 1, timeout_ms)) } {
        Ok(ready) => Ok(ready > 0),
        Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(false),
        Err(e) => Err(e),
    }
}

/// A socket that is bound to nothing, for questions about the network namespace. Error: the
/// kernel's: no descriptors left, or not this family.
pub(crate) fn datagram_socket(family: AddressFamily) -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?)
}

/// The address family of a socket (`SO_DOMAIN`). Error: it is no socket.
pub(crate) fn socket_family(fd: impl AsFd) -> io::Result<i32> {
    let (mut family, mut len) = (0_i32, size_of::<i32>() as libc::socklen_t);
    let fd = fd.as_fd().as_raw_fd();
    let at = (&raw mut family).cast();
    // SAFETY: the kernel writes at most `len` bytes, which is the size of `family`.
    unsafe { check(call::getsockopt(fd, libc::SOL_SOCKET, libc::SO_DOMAIN, at, &raw mut len)) }?;
    Ok(family)
}

/// The calling thread's network namespace: a number that no other one gets until the next boot
/// (`SO_NETNS_COOKIE` of socket(7)), or before Linux 5.14 while this one exists. Error: no
/// descriptor is left, or the kernel does not tell.
pub(crate) fn network_namespace() -> io::Result<u64> {
    /// Of `asm-generic/socket.h`; the crate `libc` lacks it.
    const SO_NETNS_COOKIE: libc::c_int = 71;
    let socket = datagram_socket(AddressFamily::INET)?;
    let (mut cookie, mut len) = (0_u64, size_of::<u64>() as libc::socklen_t);
    let (fd, at) = (socket.as_raw_fd(), (&raw mut cookie).cast());
    // SAFETY: the kernel writes at most `len` bytes, which is the size of `cookie`.
    let got = unsafe { call::getsockopt(fd, libc::SOL_SOCKET, SO_NETNS_COOKIE, at, &raw mut len) };
    match check(got) {
        Ok(_) => Ok(cookie),
        Err(_) => Ok(std::fs::metadata("/proc/thread-self/ns/net")?.ino()),
    }
}

/// A classic BPF program for an option of a socket (`struct sock_fprog`). The bytes between its
/// fields are zero: the kernel reads them, too.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Program {
    len: u16,
    between: [u8; size_of::<*const ()>() - 2],
    instructions: *const libc::sock_filter,
}

const _: () = assert!(size_of::<Program>() == size_of::<libc::sock_fprog>());

impl Program {
    /// It must not be used after `instructions`. Error: there are more than 65,535.
    pub(crate) fn new(instructions: &[libc::sock_filter]) -> io::Result<Self> {
        let len = u16::try_from(instructions.len()).map_err(io::Error::other)?;
        Ok(Self { len, between: Default::default(), instructions: instructions.as_ptr() })
    }
}

/// Attaches a classic BPF program that returns the number of bytes to take of each packet
/// (`SO_ATTACH_FILTER`). It replaces the previous one. Error: the kernel rejects the program, or no
/// memory is left.
pub(crate) fn attach_filter(socket: impl AsFd, program: &[libc::sock_filter]) -> io::Result<()> {
    let filter = Program::new(program)?;
    let (fd, option) = (socket.as_fd().as_raw_fd(), libc::SO_ATTACH_FILTER);
    let (at, len) = ((&raw const filter).cast(), size_of::<Program>() as libc::socklen_t);
    // SAFETY: during the call the kernel copies `len` bytes and the program they point to; it
    // writes to neither.
    unsafe { check(call::setsockopt(fd, libc::SOL_SOCKET, option, at, len)) }?;
    Ok(())
}

/// Has the kernel refuse messages with descriptors to a Unix socket, and to those that it accepts
/// (Linux 6.16). The receiver of descriptors closes them, which may take as long as the sender
/// likes.
pub fn refuse_rights(socket: impl AsFd) {
    /// Of socket(7), on all processors that this crate is for.
    const SO_PASSRIGHTS: libc::c_int = 83;
    let (fd, none) = (socket.as_fd().as_raw_fd(), 0_i32);
    let (at, len) = ((&raw const none).cast(), size_of::<i32>() as libc::socklen_t);
    // SAFETY: the kernel reads `len` bytes, which is the size of `none`. Earlier kernels do not
    // know the option.
    unsafe { call::setsockopt(fd, libc::SOL_SOCKET, SO_PASSRIGHTS, at, len) };
}

/// Raises the limit of open descriptors to its maximum, as far as the kernel permits.
pub fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Whether this process may have that many descriptors more. It makes copies of `fd`.
pub(crate) fn has_room(fd: impl AsFd, count: usize) -> bool {
    (0..count).map(|_| fd.as_fd().try_clone_to_owned()).collect::<Result<Vec<_>, _>>().is_ok()
}

/// How an open file description has a byte of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lock {
    None,
    /// As others that share it.
    Shared,
    /// No other description has it.
    Alone,
}

/// Takes, changes or leaves the lock on the byte `at` of a file, for its open file description
/// (`F_OFD_SETLK` of fcntl(2)). Error: `EAGAIN`: another description has one that is in the way.
/// Then nothing has changed.
pub(crate) fn lock(file: impl AsFd, at: u64, how: Lock) -> io::Result<()> {
    let kind = match how {
        Lock::None => libc::F_UNLCK,
        Lock::Shared => libc::F_RDLCK,
        Lock::Alone => libc::F_WRLCK,
    };
    let lock = byte_range(kind, at, 1)?;
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: the kernel only reads the structure, during the call.
    unsafe { check(libc::fcntl(fd, libc::F_OFD_SETLK, &raw const lock)) }?;
    Ok(())
}

#[cfg(test)]
thread_local! {
    /// How often this thread has called [`find_lock`].
    pub(crate) static SEARCHES: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// A lock of another description on any of these bytes, and which of them it has (`F_OFD_GETLK` of
/// fcntl(2)). Error: it is no file.
pub(crate) fn find_lock(file: impl AsFd, bytes: Range<u64>) -> io::Result<Option<Range<u64>>> {
    #[cfg(test)]
    SEARCHES.set(SEARCHES.get() + 1);
    let mut lock = byte_range(libc::F_WRLCK, bytes.start, bytes.end - bytes.start)?;
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: the kernel reads and writes the structure during the call.
    unsafe { check(libc::fcntl(fd, libc::F_OFD_GETLK, &raw mut lock)) }?;
    if lock.l_type == libc::F_UNLCK as libc::c_short {
        return Ok(None);
    }
    let start = lock.l_start.cast_unsigned();
    // The length of one that has no end is 0.
    let end = if lock.l_len == 0 { u64::MAX } else { start + lock.l_len.cast_unsigned() };
    Ok(Some(start.max(bytes.start)..end.min(bytes.end)))
}

fn byte_range(kind: libc::c_int, at: u64, bytes: u64) -> io::Result<libc::flock> {
    let too_far = |_| io::ErrorKind::InvalidInput;
    // SAFETY: all zeroes is a value of this plain C structure.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = i64::try_from(at).map_err(too_far)?;
    lock.l_len = i64::try_from(bytes).map_err(too_far)?;
    Ok(lock)
}

/// A process, as the kernel names it of the other end of a Unix socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Peer {
    /// Its user.
    pub(crate) uid: u32,
    /// Its group.
    pub(crate) gid: u32,
    /// The process; 0 if it is not visible from this one.
    pub(crate) pid: u32,
}

/// The process that made the other end of a connected Unix socket, or listened there
/// (`SO_PEERCRED`). Error: it is no such socket.
pub(crate) fn peer(socket: impl AsFd) -> io::Result<Peer> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of_val(&peer) as libc::socklen_t;
    let (fd, level, option) = (socket.as_fd().as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED);
    // SAFETY: the kernel writes the structure, whose length it is given.
    unsafe { check(call::getsockopt(fd, level, option, (&raw mut peer).cast(), &raw mut len)) }?;
    Ok(Peer { uid: peer.uid, gid: peer.gid, pid: peer.pid.cast_unsigned() })
}

/// Has the next look into a stream socket's queue (`MSG_PEEK`) begin there (`SO_PEEK_OFF` of
/// socket(7)). Error: it is no such socket.
pub(crate) fn look_from(socket: impl AsFd, offset: usize) -> io::Result<()> {
    let offset = i32::try_from(offset).map_err(io::Error::other)?;
    let (fd, option) = (socket.as_fd().as_raw_fd(), libc::SO_PEEK_OFF);
    let (at, len) = ((&raw const offset).cast(), size_of::<i32>() as libc::socklen_t);
    // SAFETY: the kernel reads `len` bytes, which is the size of `offset`.
    unsafe { check(call::setsockopt(fd, libc::SOL_SOCKET, option, at, len)) }?;
    Ok(())
}

/// Tries again while the answer is `errno`, for up to `limit`: the kernel may free a closed
/// resource late. Error: any other error at once, and `errno` when the time is over.
pub(crate) fn patiently<T>(
    errno: i32,
    limit: Duration,
    mut attempt: impl FnMut() -> io::Result<T>,
) -> io::Result<T> {
    const WAIT_MAX: Duration = Duration::from_millis(50);
    let end = Instant::now() + limit;
    let mut wait = Duration::from_millis(1);
    loop {
        let now = Instant::now();
        match attempt() {
            Err(e) if e.raw_os_error() == Some(errno) && now < end => {
                std::thread::sleep(wait.min(end - now));
                wait = WAIT_MAX.min(2 * wait);
            }
            result => return result,
        }
    }
}

/// `sendmmsg(2)` by its number: on 64-bit machines musl's function of that name makes one call of
/// `sendmsg(2)` per message. Returns the number of messages that the kernel took.
///
/// # Safety
/// `messages` points to `count` headers that are valid for sending, with zeroed padding.
pub(crate) unsafe fn send_messages(
    socket: BorrowedFd<'_>,
    messages: *mut libc::mmsghdr,
    count: u32,
    flags: i32,
) -> io::Result<usize> {
    let flags = flags | libc::MSG_DONTWAIT;
    // SAFETY: the caller's promise.
    let sent =
        unsafe { libc::syscall(libc::SYS_sendmmsg, socket.as_raw_fd(), messages, count, flags) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// `recvmmsg(2)`, as [`send_messages`] makes its call: the flags have another type in musl. Returns
/// the number of messages.
///
/// # Safety
/// `messages` points to `count` headers that are valid for receiving, with zeroed padding.
pub(crate) unsafe fn receive_messages(
    socket: BorrowedFd<'_>,
    messages: *mut libc::mmsghdr,
    count: u32,
) -> io::Result<usize> {
    let (flags, no_limit) = (libc::MSG_DONTWAIT, std::ptr::null_mut::<libc::timespec>());
    let number = libc::SYS_recvmmsg;
    // SAFETY: the caller's promise; the kernel takes a null pointer for no time limit.
    let got =
        unsafe { libc::syscall(number, socket.as_raw_fd(), messages, count, flags, no_limit) };
    usize::try_from(got).map_err(|_| io::Error::last_os_error())
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_eventfd_in_an_epoll_set_is_readable_between_signal_and_clear() {
        let event = EventFd::new().unwrap();
        let set = Epoll::new().unwrap();
        set.add(&event, Interest::Read).unwrap();
        assert!(!wait_readable(&set, 0).unwrap());
        event.signal();
        event.signal();
        assert!(wait_readable(&set, 0).unwrap());
        event.clear();
        assert!(!wait_readable(&set, 0).unwrap());
        event.clear();
        event.signal();
        set.remove(&event).unwrap();
        assert!(!wait_readable(&set, 0).unwrap());
        assert!(set.remove(&event).is_err());
    }

    #[test]
    fn our_descriptors_are_apart_and_each_has_its_own_number() {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the kernel writes the limit.
        unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
        let least = i32::try_from(limit.rlim_cur / 2).unwrap_or(APART).min(APART);
        let sockets = [(); 2].map(|()| std::net::UdpSocket::bind("127.0.0.1:0").unwrap());
        let addresses = sockets.each_ref().map(|socket| socket.local_addr().unwrap());
        let moved = sockets.map(|socket| apart(socket.into()));
        let numbers = moved.each_ref().map(|fd| fd.as_raw_fd());
        assert!(numbers[0] != numbers[1] && numbers.iter().all(|number| *number >= least));
        for (fd, address) in moved.into_iter().zip(addresses) {
            // SAFETY: it asks for the flags, with no pointer.
            let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) };
            assert_eq!(flags, libc::FD_CLOEXEC);
            let number = fd.as_raw_fd();
            let again = apart(fd);
            assert_eq!(again.as_raw_fd(), number, "it is there already");
            assert_eq!(std::net::UdpSocket::from(again).local_addr().unwrap(), address);
        }
    }

    #[test]
    fn what_is_freed_in_time_is_waited_for_and_what_is_not_is_an_error() {
        let busy = || Err::<(), _>(io::Error::from_raw_os_error(libc::EBUSY));
        let (start, limit) = (Instant::now(), Duration::from_millis(300));
        let mut attempts = 0;
        let freed = patiently(libc::EBUSY, Duration::from_secs(60), || {
            attempts += 1;
            if attempts < 5 { busy() } else { Ok(()) }
        });
        assert!(freed.is_ok() && attempts == 5);
        attempts = 0;
        let error = patiently(libc::EBUSY, limit, || {
            attempts += 1;
            busy()
        });
        assert_eq!(error.expect_err("never freed").raw_os_error(), Some(libc::EBUSY));
        assert!(start.elapsed() >= limit && (3..20).contains(&attempts), "{attempts} attempts");
        attempts = 0;
        let other = patiently(libc::EADDRINUSE, Duration::from_secs(60), || {
            attempts += 1;
            busy()
        });
        assert!(other.is_err() && attempts == 1, "another error is not waited out");
    }
}
