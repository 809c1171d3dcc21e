//! Errors of the kernel in words of our own, which keep their errno.

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
