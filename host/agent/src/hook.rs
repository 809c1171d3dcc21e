//! The OCI hook: an engine runs it before a container's first process, and it introduces the
//! container to the agent.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;

use crate::control::{self, About, CALLED_MAX};
use crate::error::AgentError;

/// The longest state that is read.
const STATE_BYTES_MAX: u64 = 1 << 20;
/// The annotation in which podman and CRI-O name themselves.
const MANAGER: &str = "io.container.manager";
/// The annotation that names the container's class.
const CLASS: &str = "dev.rocinante.class";

/// The fields of a container's state (OCI runtime specification) that the hook needs.
#[derive(Debug, Deserialize)]
struct State {
    id: String,
    /// The container's first process, as the hook sees it.
    pid: u32,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

/// Introduces the container of `state` to the agent with this control socket. Error: the state is
/// none; or no agent runs, or it does not serve the container, or does not answer.
pub fn hook(control: &Path, state: impl Read) -> Result<(), AgentError> {
    match control::introduce(control, &about(state)?)? {
        Some(_) => Ok(()),
        None => Err(AgentError::new(format!("no agent runs at {}", control.display()), "")),
    }
}

/// The container of a state, for the agent.
pub(crate) fn about(state: impl Read) -> Result<About, AgentError> {
    let hint = "an engine runs it as a hook of createRuntime";
    let state: State = serde_json::from_reader(state.take(STATE_BYTES_MAX))
        .map_err(|e| AgentError::new(format!("the container's state: {e}"), hint))?;
    if state.pid == 0 {
        return Err(AgentError::new("the container's state names no process", hint));
    }
    let engine = state.annotations.get(MANAGER).map_or("oci", String::as_str).to_owned();
    let class = state.annotations.get(CLASS).cloned();
    let longest = class.as_ref().map_or(0, String::len).max(engine.len()).max(state.id.len());
    if longest > CALLED_MAX {
        return Err(AgentError::new("the container's state: its names are too long", hint));
    }
    let namespace = format!("/proc/{}/ns/net", state.pid).into();
    let (interface, id) = (None, state.id);
    Ok(About { namespace, interface, id, engine, class, pod: None, rates: None, mtu: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_state_is_refused() {
        let nowhere = Path::new("/nonexistent/control.sock");
        let of = |state: &str| hook(nowhere, state.as_bytes());
        let named = format!("{{\"id\": \"{}\", \"pid\": 1}}", "x".repeat(CALLED_MAX + 1));
        let long = format!("{{\"id\": \"{}\"", "x".repeat(2 << 20));
        let annotated = |key: &str| {
            let value = "x".repeat(CALLED_MAX + 1);
            format!("{{\"id\": \"a\", \"pid\": 1, \"annotations\": {{\"{key}\": \"{value}\"}}}}")
        };
        for (state, said) in [
            ("", "EOF"),
            ("[]", "expected"),
            (r#"{"id": "a"}"#, "pid"),
            (r#"{"pid": 1}"#, "id"),
            (r#"{"id": "a", "pid": 0}"#, "no process"),
            (r#"{"id": "a", "pid": -1}"#, "u32"),
            (r#"{"id": 7, "pid": 1}"#, "string"),
            (r#"{"id": "a", "pid": 1, "annotations": []}"#, "map"),
            (&long, "EOF"),
            (&named, "too long"),
            (&annotated(MANAGER), "too long"),
            (&annotated(CLASS), "too long"),
            (r#"{"ociVersion": "1.0.2", "id": "a", "pid": 1, "bundle": "/b"}"#, "no agent runs"),
        ] {
            let error = of(state).expect_err(state).to_string();
            assert!(error.contains(said), "{said}: {error}");
        }
    }
}
