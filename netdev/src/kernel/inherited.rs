//! The descriptors of ports that a child of `fork(2)` inherits, and does not keep.
//!
//! A child that lives on would keep the parent's UDP port, sockets, locks of files and XDP program
//! alive after the parent has closed them or ended. So each such descriptor is noted here, and a
//! handler in the child puts a descriptor of nothing in its place. The number stays in use: the
//! child has copies of the values that own it, and may drop them. A program that is executed gets
//! none of them anyway.
//!
//! The handler runs between `fork` and its return, where other threads are gone and any lock may be
//! held for ever. It makes system calls, and touches nothing but the numbers below.

#![allow(unsafe_code)]

use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use crate::kernel::descriptors::apart;

/// Descriptors with greater numbers are not noted.
const NUMBERS: usize = 1 << 16;

/// The file behind each noted descriptor, 0 for none: a number may have been closed and be another
/// descriptor by now. Pages that no number is in take no memory.
static IDENTITIES: [AtomicU32; NUMBERS] = [const { AtomicU32::new(0) }; NUMBERS];
/// Behind the greatest number.
static END: AtomicUsize = AtomicUsize::new(0);
/// Forks until now. The number of a process may be that of its parent, in another namespace.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Notes a descriptor, and moves it [`apart`].
pub(crate) fn noted(fd: OwnedFd) -> OwnedFd {
    let fd = apart(fd);
    // Files without an inode of their own share one.
    let is_own = |kind| kind == libc::S_IFSOCK || !is_bpf(fd.as_raw_fd());
    let file = file_of(fd.as_raw_fd()).filter(|(kind, _)| is_own(*kind));
    note(&fd, file.map(|(_, inode)| inode));
    fd
}

/// Notes an object of bpf(2), and moves it [`apart`]. These share an inode with event descriptors
/// and others.
pub(crate) fn noted_bpf(fd: OwnedFd) -> OwnedFd {
    let fd = apart(fd);
    note(&fd, Some(BPF));
    fd
}

fn note(fd: &OwnedFd, identity: Option<u32>) {
    let number = usize::try_from(fd.as_raw_fd()).unwrap_or(usize::MAX);
    if let (Some(place), Some(identity)) = (IDENTITIES.get(number), identity) {
        register();
        place.store(identity, Ordering::Relaxed);
        END.fetch_max(number + 1, Ordering::Relaxed);
    }
}

/// An object of bpf(2), in the place of an inode.
const BPF: u32 = 1;

/// The number of forks from the process that loaded this to the calling one, and its own number.
pub(crate) fn process() -> u64 {
    register();
    u64::from(FORKS.load(Ordering::Relaxed)) << 32 | u64::from(std::process::id())
}

/// Registers the handler, once. Miri knows no `pthread_atfork(3)`.
fn register() {
    static ONCE: Once = Once::new();
    if cfg!(miri) {
        return;
    }
    // SAFETY: the handler does only things allowed in a child of a process with threads. It is part
    // of a program, or of a library that is never unloaded or that `dlclose` takes it from.
    ONCE.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(in_child));
    });
}

/// Without a descriptor left the child keeps the inherited ones.
extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    let end = END.load(Ordering::Relaxed);
    // A pipe without a writer: reading it finds the end, and nothing else can be done with it.
    let mut ends = [-1; 2];
    // SAFETY: the kernel writes two descriptors.
    let made = unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) };
    if made != 0 {
        return;
    }
    // SAFETY: they have no other owner.
    let [nothing, writer] = ends.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
    drop(writer);
    for (number, place) in IDENTITIES.iter().enumerate().take(end) {
        let number = number as RawFd;
        let is_still = match place.swap(0, Ordering::Relaxed) {
            0 => false,
            BPF => is_bpf(number),
            inode => file_of(number).is_some_and(|(_, now)| now == inode),
        };
        if is_still {
            // SAFETY: the descriptor is a port's. It has no use here, and its number stays open.
            unsafe { libc::dup3(nothing.as_raw_fd(), number, libc::O_CLOEXEC) };
        }
    }
}

/// Whether a number is an object of bpf(2), as `/proc` tells.
fn is_bpf(number: RawFd) -> bool {
    const KIND: &[u8] = b"anon_inode:bpf";
    let (mut path, mut target) = (*b"/proc/self/fd/..........\0", [0_u8; KIND.len()]);
    let (mut at, mut rest) = (path.len() - 1, number.max(0));
    // From the last digit on; the rest of the room repeats the slash.
    while at > b"/proc/self/fd/".len() {
        at -= 1;
        path[at] = if rest > 0 || at == path.len() - 2 { b'0' + (rest % 10) as u8 } else { b'/' };
        rest /= 10;
    }
    // SAFETY: the path ends with a zero, and the kernel writes no more than the length given.
    let len =
        unsafe { libc::readlink(path.as_ptr().cast(), target.as_mut_ptr().cast(), target.len()) };
    len == KIND.len() as isize && target == KIND
}

/// The kind of file behind a number, if it is open, and its inode: never 0, nor [`BPF`].
fn file_of(number: RawFd) -> Option<(libc::mode_t, u32)> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the kernel writes the structure if it succeeds, and only then it is read.
    let stat = unsafe { (libc::fstat(number, stat.as_mut_ptr()) == 0).then(|| stat.assume_init()) };
    let inode = |inode: u64| (inode as u32) ^ ((inode >> 32) as u32) | 1 << 31;
    stat.map(|stat| (stat.st_mode & libc::S_IFMT, inode(stat.st_ino)))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::UdpSocket;
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::kernel::descriptors::{Epoll, EventFd};

    /// Runs `look` in a child, and returns its answer.
    pub(crate) fn in_a_child(look: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child ends, without a lock that a thread of its parent may have: only the
        // allocator's, which glibc gives it free. It ends if it waits for ever, too.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::alarm(60);
                libc::_exit(look().into());
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 1
        }
    }

    /// Works while there is a child, forked before.
    pub(crate) fn beside_a_child<T>(work: impl FnOnce() -> T) -> T {
        let (mut own, childs) = UnixStream::pair().expect("a socket");
        std::thread::scope(|scope| {
            let lives = || {
                let mut pipe = &childs;
                pipe.write_all(b".").is_ok() && pipe.read_exact(&mut [0]).is_ok()
            };
            let child = scope.spawn(move || in_a_child(lives));
            own.read_exact(&mut [0]).expect("it lives");
            let done = work();
            own.write_all(b".").expect("it still lives");
            assert!(child.join().expect("it ends"));
            done
        })
    }

    #[test]
    fn a_child_has_nothing_in_their_place_and_keeps_what_is_the_programs() {
        let own = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let [one, two] = [(), ()].map(|()| {
            let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
            noted(OwnedFd::from(socket))
        });
        // A number that was noted, closed, and is another's by now.
        let closed = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let number = closed.as_raw_fd();
        drop(noted(OwnedFd::from(closed)));
        let other = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        // SAFETY: the number is free or `other` itself; the new owner closes it once.
        let reused = unsafe {
            libc::dup2(other.as_raw_fd(), number);
            (other.as_raw_fd() != number).then(|| OwnedFd::from_raw_fd(number))
        };
        let programs = file_of(number);
        let before = [&one, &two].map(|fd| file_of(fd.as_raw_fd()));
        let events = EventFd::new().expect("a descriptor");
        assert!(in_a_child(|| {
            let now = [&one, &two].map(|fd| file_of(fd.as_raw_fd()));
            now[0].is_some()
                && now[0] == now[1]
                && !before.contains(&now[0])
                && file_of(own.as_raw_fd()).is_some()
                && file_of(number) == programs
                && file_of(events.as_fd().as_raw_fd()) != now[0]
        }));
        assert_eq!(before, [&one, &two].map(|fd| file_of(fd.as_raw_fd())));
        drop(reused);
    }

    #[test]
    fn what_shares_its_inode_is_told_by_its_kind() {
        let (events, epoll) = (EventFd::new().expect("one"), Epoll::new().expect("one"));
        let numbers = [events.as_fd(), epoll.as_fd()].map(|fd| fd.as_raw_fd());
        assert_eq!(file_of(numbers[0]), file_of(numbers[1]));
        assert_eq!(numbers.map(is_bpf), [false; 2]);
        assert!(!is_bpf(-1) && !is_bpf(RawFd::MAX) && !is_bpf(0));
        let map = crate::frames::xdp::test_map().map(|map| is_bpf(map.as_raw_fd()));
        assert!(map.unwrap_or(true), "without the privilege there is none");
    }
}
