//! Writing to a descriptor without a signal: a pipe whose reader is gone would end the program.
#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::ptr;

use rustix::io::Errno;

/// As `write(2)`. An error of `EPIPE` leaves no SIGPIPE behind.
pub fn write(fd: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    // Miri knows no signals.
    let blocked = (!cfg!(miri)).then(Blocked::new);
    let written = rustix::io::write(fd, bytes);
    if let Some(blocked) = blocked {
        blocked.end(written == Err(Errno::PIPE));
    }
    Ok(written?)
}

/// SIGPIPE is blocked in this thread.
struct Blocked {
    pipe: libc::sigset_t,
    before: libc::sigset_t,
    /// One was pending already.
    is_pending: bool,
}

impl Blocked {
    fn new() -> Self {
        let mut sets = [MaybeUninit::<libc::sigset_t>::uninit(); 3];
        let [pipe, before, pending] = &mut sets;
        // SAFETY: the sets are this function's own, and `sigemptyset` initialises the first before
        // it is read. The calls write the other two whole. None can fail with these arguments.
        unsafe {
            libc::sigemptyset(pipe.as_mut_ptr());
            libc::sigaddset(pipe.as_mut_ptr(), libc::SIGPIPE);
            libc::pthread_sigmask(libc::SIG_BLOCK, pipe.as_ptr(), before.as_mut_ptr());
            libc::sigpending(pending.as_mut_ptr());
            let is_pending = libc::sigismember(pending.as_ptr(), libc::SIGPIPE) == 1;
            Self { pipe: pipe.assume_init(), before: before.assume_init(), is_pending }
        }
    }

    /// Takes the signal that a write raised, and ends the block.
    fn end(self, is_raised: bool) {
        let none = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the sets and the time are this function's own, and nothing is written.
        unsafe {
            if is_raised && !self.is_pending {
                // It is this thread's own, so it is there; an ignored one is not.
                libc::sigtimedwait(&raw const self.pipe, ptr::null_mut(), &raw const none);
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::Command;

    use super::*;

    /// In a process of its own, because Rust's programs ignore the signal.
    #[test]
    fn a_closed_pipe_raises_no_signal() {
        const MARKER: &str = "ROCINANTE_TEST_SILENT";
        let name = "kernel::silent::tests::a_closed_pipe_raises_no_signal";
        let Some(is_silent) = std::env::var_os(MARKER) else {
            for (silent, ends) in [("1", (Some(0), None)), ("0", (None, Some(libc::SIGPIPE)))] {
                let program = std::env::current_exe().unwrap();
                let mut command = Command::new(program);
                let done = command.args(["--exact", name]).env(MARKER, silent).output().unwrap();
                let (status, output) = (done.status, String::from_utf8_lossy(&done.stdout));
                assert_eq!((status.code(), status.signal()), ends, "{silent}: {output}");
            }
            return;
        };
        // SAFETY: it is the default action of a C program, and no other thread is here.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        drop(reader);
        for _ in 0..2 {
            let written = match is_silent == "1" {
                true => write(writer.as_fd(), b"x"),
                false => rustix::io::write(&writer, b"x").map_err(io::Error::from),
            };
            assert_eq!(written.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        }
        // The block is over, too.
        assert!(!Blocked::new().is_pending);
    }
}
