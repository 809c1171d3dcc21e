//! A timer as a descriptor: `timerfd_create(2)`.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::time::Duration;

use crate::kernel::descriptors::apart;

/// Readable after it has expired, until it is set again.
#[derive(Debug)]
pub(crate) struct TimerFd(OwnedFd);

impl TimerFd {
    /// A timer that is not running.
    pub(crate) fn new() -> io::Result<Self> {
        let flags = libc::TFD_CLOEXEC | libc::TFD_NONBLOCK;
        // SAFETY: no pointers; a non-negative result is a descriptor without another owner.
        unsafe {
            let fd = libc::timerfd_create(libc::CLOCK_MONOTONIC, flags);
            if fd < 0 {
                Err(io::Error::last_os_error())
            } else {
                Ok(Self(apart(OwnedFd::from_raw_fd(fd))))
            }
        }
    }

    /// Starts it; a time of zero stops it. Either way it becomes unreadable.
    pub(crate) fn set(&self, time: Duration) {
        let zero = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let value = libc::timespec {
            tv_sec: time.as_secs().cast_signed(),
            tv_nsec: libc::c_long::from(time.subsec_nanos().cast_signed()),
        };
        let setting = libc::itimerspec { it_interval: zero, it_value: value };
        // SAFETY: the kernel reads the setting, and no old setting is requested. It cannot fail:
        // the descriptor is a timer and the nanoseconds are below a second.
        unsafe {
            libc::timerfd_settime(self.0.as_raw_fd(), 0, &raw const setting, std::ptr::null_mut());
        }
    }
}

impl AsFd for TimerFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::descriptors::wait_readable;

    #[test]
    fn it_is_readable_when_its_time_is_over_until_it_is_set_again() {
        let timer = TimerFd::new().unwrap();
        assert!(!wait_readable(&timer, 0).unwrap());
        timer.set(Duration::from_micros(100));
        assert!(wait_readable(&timer, 1000).unwrap());
        assert!(wait_readable(&timer, 0).unwrap());
        timer.set(Duration::from_secs(60));
        assert!(!wait_readable(&timer, 0).unwrap());
        timer.set(Duration::from_micros(100));
        assert!(wait_readable(&timer, 1000).unwrap());
        timer.set(Duration::ZERO);
        assert!(!wait_readable(&timer, 0).unwrap());
    }
}
