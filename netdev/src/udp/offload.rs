//! Whether the interface takes runs whole: asked when the port is opened, and again when the kernel tells of a change.
//!
//! To ask, the kernel takes the lock of all of its network configuration (RTNL), which others may hold for long, while the port's user waits. To read what it
//! told takes none.

use std::io;
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use super::staging::{HEADERS_MAX, Run};
use super::sys::Socket;
use crate::ethtool::Segmentation;
use crate::rtnl::Monitor;

/// How often it is looked at most what the kernel told.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// What is known of the interface whose addresses the port has: what leaves by another is taken for the same, until it is lost.
pub(super) struct Offload {
    monitor: Monitor,
    segmentation: Segmentation,
    looked: Instant,
}

impl Offload {
    /// Asks by `socket`, of an interface of the calling thread's network namespace, which is the socket's.
    ///
    /// # Errors
    /// The kernel's answer to `socket(AF_NETLINK)`: no descriptors left, or a seccomp filter.
    pub(super) fn open(socket: &Socket, interface: u32) -> io::Result<Self> {
        // What changes while it is asked is told.
        let monitor = Monitor::of_link(interface)?;
        let segmentation = Segmentation::new(socket.as_fd(), interface)?;
        Ok(Self { monitor, segmentation, looked: Instant::now() })
    }

    /// Reads what the kernel told since, and asks if there was something.
    pub(super) fn maintain(&mut self, socket: &Socket) {
        if self.looked.elapsed() < LOOK_AGAIN {
            return;
        }
        self.looked = Instant::now();
        let mut is_stale = self.segmentation.is_unanswered();
        self.monitor.read(|_| is_stale = true);
        if is_stale {
            self.segmentation.refresh(socket.as_fd());
        }
    }

    /// Whether a run leaves the interface as it is.
    #[inline]
    pub(super) fn takes(&self, run: &Run) -> bool {
        self.segmentation.takes(usize::from(run.segments), run.bytes() + HEADERS_MAX)
    }

    /// Has the next [`maintain`](Self::maintain) look.
    #[cfg(test)]
    pub(super) fn make_due(&mut self) {
        self.looked = self.looked.checked_sub(LOOK_AGAIN).expect("not so early");
    }

    /// As after a question in vain.
    #[cfg(test)]
    pub(super) fn was_not_answered(&mut self) {
        self.segmentation.was_not_answered();
    }

    /// How often was asked.
    #[cfg(test)]
    pub(super) fn questions(&self) -> u32 {
        self.segmentation.questions
    }
}
