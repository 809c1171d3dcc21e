//! Why the agent cannot run.

use std::fmt;
use std::io;

/// The reason why the agent does not start, or ends.
#[derive(Debug)]
pub struct AgentError {
    what: String,
    hint: &'static str,
}

impl AgentError {
    pub(crate) fn new(what: impl Into<String>, hint: &'static str) -> Self {
        Self { what: what.into(), hint }
    }

    pub(crate) fn os(what: impl fmt::Display, error: &io::Error, hint: &'static str) -> Self {
        Self::new(format!("{what}: {error}"), hint)
    }
}

impl fmt::Display for AgentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        if self.hint.is_empty() { Ok(()) } else { write!(f, "; {}", self.hint) }
    }
}

impl std::error::Error for AgentError {}
