//! Where an agent is, and the ports that came from one.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::message::Granted;
use crate::port::contract::Backend;
use crate::port::error::OpenError;

/// The environment variable that says where the agent is: the path of its socket, or `off`.
pub const AGENT_VARIABLE: &str = "ROCINANTE_AGENT";

/// Where the agent is, unless the variable says otherwise.
pub const DEFAULT_PATH: &str = "/run/rocinante/agent.sock";

/// Where to ask for ports that this process may not open itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agent(Option<PathBuf>);

/// Ports as they came from an agent.
#[derive(Debug)]
pub(crate) struct Handed {
    /// The agent's description of them.
    pub(crate) granted: Granted,
    pub(crate) descriptors: Vec<OwnedFd>,
    /// The connection. Its end says to the agent that the ports are closed.
    pub(crate) lease: Arc<OwnedFd>,
}

impl Agent {
    /// No agent is asked.
    #[must_use]
    pub const fn off() -> Self {
        Self(None)
    }

    /// The agent with the socket at this path.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self(Some(path.into()))
    }

    /// The agent that [`AGENT_VARIABLE`] names. Error: it is a word that means nothing.
    pub fn from_environment() -> Result<Self, String> {
        Self::named(&std::env::var_os(AGENT_VARIABLE).unwrap_or_default())
    }

    fn named(value: &OsStr) -> Result<Self, String> {
        match value.as_bytes() {
            b"" => Ok(Self::at(DEFAULT_PATH)),
            b"off" => Ok(Self::off()),
            path if path.contains(&b'/') => Ok(Self::at(value)),
            _ => {
                let value = value.display();
                Err(format!("{AGENT_VARIABLE}={value}: give it the path of a socket, or `off`"))
            }
        }
    }

    /// The path of its socket, if one is asked.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.0.as_deref()
    }
}

/// The error for descriptors of an agent that are not as they should be.
pub(crate) fn unusable(backend: Backend, what: &str) -> OpenError {
    let what = format!("the agent's descriptors cannot be used: {what}");
    OpenError::plain(backend, what, "use a program and an agent of one release")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_names_a_path_or_no_agent() {
        let named = |value: &str| Agent::named(OsStr::new(value));
        for (value, path) in [
            ("", Some(DEFAULT_PATH)),
            ("off", None),
            ("/run/agent", Some("/run/agent")),
            ("./off", Some("./off")),
        ] {
            assert_eq!(named(value).unwrap().path(), path.map(Path::new), "{value}");
        }
        for value in ["OFF", "no", "0", "agent.sock"] {
            let error = named(value).unwrap_err();
            assert!(error.starts_with(&format!("ROCINANTE_AGENT={value}: ")), "{error}");
        }
    }
}
