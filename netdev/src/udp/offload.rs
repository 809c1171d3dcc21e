//! Whether the interface takes runs whole: asked when the port is opened, and again when the kernel
//! announces a change.
//!
//! For each request the kernel takes the lock of its whole network configuration (RTNL). Others may
//! hold it for long, while the port's user waits.

use std::io;
use std::os::fd::AsFd as _;
use std::time::Instant;

use super::staging::{HEADERS_MAX, Run};
use super::sys::Socket;
use crate::kernel::ethtool::Segmentation;
use crate::tuning::udp::LOOK_AGAIN;

/// The state of the interface that has the port's addresses. Runs that leave by another interface
/// are treated alike, until they are lost.
pub(super) struct Offload {
    pub(super) segmentation: Segmentation,
    /// The interface has changed since it was asked about.
    is_stale: bool,
    looked: Instant,
}

impl Offload {
    /// Asks through `socket` about an interface of the calling thread's network namespace, which
    /// must be the socket's.
    ///
    /// # Errors
    /// The kernel's answer to `socket(AF_NETLINK)`: no descriptors left, or a seccomp filter.
    pub(super) fn open(socket: &Socket, interface: u32) -> io::Result<Self> {
        let segmentation = Segmentation::new(socket.as_fd(), interface)?;
        Ok(Self { segmentation, is_stale: false, looked: Instant::now() })
    }

    /// Asks again if the interface `has_changed`, now or soon.
    pub(super) fn maintain(&mut self, socket: &Socket, has_changed: bool) {
        self.is_stale |= has_changed;
        if self.looked.elapsed() < LOOK_AGAIN {
            return;
        }
        self.looked = Instant::now();
        if std::mem::take(&mut self.is_stale) | self.segmentation.is_unanswered() {
            self.segmentation.refresh(socket.as_fd());
        }
    }

    /// Whether a run leaves the interface as it is.
    #[inline]
    pub(super) fn takes(&self, run: &Run) -> bool {
        self.segmentation.takes(usize::from(run.segments), run.bytes() + HEADERS_MAX)
    }

    /// Makes the next [`maintain`](Self::maintain) ask, if there is a reason.
    #[cfg(test)]
    pub(super) fn make_due(&mut self) {
        self.looked = self.looked.checked_sub(LOOK_AGAIN).expect("not so early");
    }
}
