//! Descriptors that the runtime waits for.

use std::io;
use std::os::fd::AsRawFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Waits for `fd` to be readable. Each type here owns or borrows the descriptor that it names until
/// it is dropped.
#[allow(
    deprecated,
    reason = "the other way is unsafe, for types that may close their descriptor early"
)]
pub(crate) fn readable<T: AsRawFd>(fd: T) -> io::Result<AsyncFd<T>> {
    AsyncFd::with_interest(fd, Interest::READABLE)
}
