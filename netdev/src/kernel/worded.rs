//! Errors of the kernel: in words of our own, which keep their errno, and those that pass.

use std::fmt;
use std::io;

#[derive(Debug)]
struct Worded {
    text: String,
    errno: i32,
}

impl fmt::Display for Worded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Worded {}

/// The same error in these words.
pub fn worded(error: &io::Error, text: String) -> io::Error {
    match errno(error) {
        Some(errno) => io::Error::new(error.kind(), Worded { text, errno }),
        None => io::Error::new(error.kind(), text),
    }
}

/// The errno of an error, in words of our own or not. `None` if it is not the kernel's.
#[must_use]
pub fn errno(error: &io::Error) -> Option<i32> {
    let of_words = || error.get_ref()?.downcast_ref::<Worded>().map(|worded| worded.errno);
    error.raw_os_error().or_else(of_words)
}

/// Whether an error says nothing about an interface or the kernel. `ENODEV` also comes while a
/// driver resets the interface (`netif_device_present`); rtnetlink knows whether that is gone.
pub(crate) fn is_passing(error: &io::Error) -> bool {
    let errnos =
        [libc::ENODEV, libc::ENOMEM, libc::ENOBUFS, libc::EINTR, libc::EAGAIN, libc::EBUSY];
    error.kind() == io::ErrorKind::TimedOut
        || error.raw_os_error().is_some_and(|errno| errnos.contains(&errno))
}
