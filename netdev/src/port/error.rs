//! Why a port could not be opened, or a path not made, and what to do about it.

use std::io;
use std::net::IpAddr;

use crate::port::contract::{Backend, PathSpec};

/// Why a port could not be opened.
#[derive(Debug)]
#[non_exhaustive]
pub struct OpenError {
    /// The backend that was tried.
    pub backend: Backend,
    /// The failure, in words: `cannot bind 10.0.0.1:4791`.
    pub what: String,
    /// The kernel's answer, where there is one.
    pub source: Option<std::io::Error>,
    /// The user's remedy: `run with --cap-add NET_RAW, or --netdev udp`.
    pub hint: String,
}

impl OpenError {
    /// An error with the kernel's answer. A limit of descriptors has a hint of its own: any system
    /// call may be the one that meets it.
    pub fn os(
        backend: Backend,
        what: impl Into<String>,
        source: std::io::Error,
        hint: impl Into<String>,
    ) -> Self {
        let mut hint = hint.into();
        let is_limit =
            matches!(source.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ETOOMANYREFS));
        if is_limit {
            hint = "raise the limit of open files (`ulimit -n`)".into();
        }
        Self { backend, what: what.into(), source: Some(source), hint }
    }

    /// An error without an answer from the kernel.
    pub fn plain(backend: Backend, what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { backend, what: what.into(), source: None, hint: hint.into() }
    }

    /// The errno, or 0.
    #[must_use]
    pub fn errno(&self) -> i32 {
        self.source.as_ref().and_then(std::io::Error::raw_os_error).unwrap_or(0)
    }
}

impl std::fmt::Display for OpenError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.backend, self.what)?;
        if let Some(source) = &self.source {
            write!(f, ": {source}")?;
        }
        if !self.hint.is_empty() {
            write!(f, ": {}", self.hint)?;
        }
        Ok(())
    }
}

/// Its own text has the kernel's answer, so it has no source.
impl std::error::Error for OpenError {}

pub(crate) fn not_an_address_of_the_port(spec: &PathSpec) -> io::Error {
    let message = format!("{} is not an address of this port", spec.local);
    io::Error::new(io::ErrorKind::AddrNotAvailable, message)
}

/// The error for a path between addresses of different families.
pub(crate) fn two_families(spec: &PathSpec) -> io::Error {
    let message = format!("{} and {} are of different families", spec.local, spec.remote);
    io::Error::new(io::ErrorKind::InvalidInput, message)
}

/// The error for a path to a broadcast address.
pub(crate) fn a_broadcast_address(remote: IpAddr) -> io::Error {
    io::Error::new(io::ErrorKind::HostUnreachable, format!("{remote} is a broadcast address"))
}
