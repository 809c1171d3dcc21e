//! Connections of other users. Any user of the network namespace can connect to an abstract name,
//! and send descriptors with a message. To close the connection is then to close these, too, which
//! may take as long as that user likes: a TCP socket that lingers (`SO_LINGER` of socket(7)).

use crate::tuning::shared::CLOSING_MAX;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Of a thread that makes one system call.
const STACK_BYTES: usize = 64 << 10;

static CLOSING: AtomicUsize = AtomicUsize::new(0);

/// Whether a connection can be accepted: one more could be closed.
pub(super) fn has_room() -> bool {
    CLOSING.load(Ordering::Relaxed) < CLOSING_MAX
}

/// Closes a connection of another user in a thread of its own, as that may take long.
pub fn close_elsewhere(connection: OwnedFd) {
    CLOSING.fetch_add(1, Ordering::Relaxed);
    let closing = Closing(Some(connection));
    let thread = std::thread::Builder::new().name("roce-close".into()).stack_size(STACK_BYTES);
    // Without a thread it is closed here.
    let _ = thread.spawn(move || drop(closing));
}

struct Closing(Option<OwnedFd>);

impl Drop for Closing {
    fn drop(&mut self) {
        drop(self.0.take());
        CLOSING.fetch_sub(1, Ordering::Relaxed);
    }
}
