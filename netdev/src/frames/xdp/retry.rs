//! When a blocked port checks again whether it can send.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use crate::kernel::timer::TimerFd;
use crate::tuning::xdp::{RETRY_FIRST, RETRY_LAST};

/// Readable when it is time to check whether the kernel takes more.
#[derive(Debug)]
pub(super) struct Retry {
    timer: TimerFd,
    /// When that is, if frames wait, and the interval before it.
    due: Option<(Instant, Duration)>,
}

impl Retry {
    /// A timer that is not set.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { timer: TimerFd::new()?, due: None })
    }

    /// Sets the timer while `blocked`; each check that is still blocked doubles the interval.
    pub(super) fn schedule(&mut self, blocked: bool) {
        match (blocked, self.due) {
            (false, None) => {}
            (false, Some(_)) => {
                self.timer.set(Duration::ZERO);
                self.due = None;
            }
            (true, last) => {
                let now = Instant::now();
                let wait = match last {
                    None => RETRY_FIRST,
                    Some((due, _)) if due > now => return,
                    Some((_, wait)) => RETRY_LAST.min(2 * wait),
                };
                self.timer.set(wait);
                self.due = Some((now + wait, wait));
            }
        }
    }
}

impl AsFd for Retry {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::descriptors::wait_readable;

    #[test]
    fn what_goes_on_waiting_is_looked_at_less_and_less_often() {
        let mut retry = Retry::new().unwrap();
        let mut waits = Vec::new();
        for _ in 0..8 {
            retry.schedule(true);
            waits.push(retry.due.unwrap().1.as_micros());
            assert!(wait_readable(&retry, 10_000).unwrap());
        }
        assert_eq!(waits, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        retry.schedule(false);
        assert!(!wait_readable(&retry, 0).unwrap() && retry.due.is_none());
    }

    #[test]
    fn before_its_time_nothing_changes() {
        let mut retry = Retry::new().unwrap();
        let due = Some((Instant::now() + Duration::from_secs(600), RETRY_FIRST));
        retry.due = due;
        retry.schedule(true);
        assert_eq!(retry.due, due);
    }
}
