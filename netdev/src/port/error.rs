//! Why a port could not be opened, and what to do about it.

use crate::port::contract::Backend;

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
    /// An error with the kernel's answer.
    pub fn os(
        backend: Backend,
        what: impl Into<String>,
        source: std::io::Error,
        hint: impl Into<String>,
    ) -> Self {
        Self { backend, what: what.into(), source: Some(source), hint: hint.into() }
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
