//! The steps of the agent's work that are not one system call, by name: a test ends the agent at
//! each of them, as `kill -9` does, and starts it again; or stops it there, and ends the program
//! that asks.

use std::env;
use std::sync::{Once, OnceLock};

use nix::sys::signal::{Signal, raise};

/// Where an agent can be interrupted, in the order in which it gets there.
pub const STEPS: [&str; 8] = [
    "asked",
    "identified",
    "filter attached",
    "filter recorded",
    "port opened",
    "port recorded",
    "state written",
    "answered",
];

/// The environment variables that name a step, and the signal that the process sends itself when it
/// first gets there. Only builds with debug assertions, as those of tests are, read them.
const VARIABLES: [(&str, Signal); 2] =
    [("ROCINANTE_AGENT_KILL_AT", Signal::SIGKILL), ("ROCINANTE_AGENT_STOP_AT", Signal::SIGSTOP)];

/// Notes that a step is reached.
pub(crate) fn reached(step: &'static str) {
    if !cfg!(debug_assertions) {
        return;
    }
    assert!(STEPS.contains(&step), "{step} is not in the list");
    static INTERRUPTION: OnceLock<Option<(String, Signal)>> = OnceLock::new();
    static FIRST: Once = Once::new();
    let named =
        || VARIABLES.iter().find_map(|(name, signal)| Some((env::var(name).ok()?, *signal)));
    if let Some((at, signal)) = INTERRUPTION.get_or_init(named)
        && at == step
    {
        // To this thread, so that it does not go on until the signal has reached another.
        FIRST.call_once(|| {
            let _ = raise(*signal);
        });
    }
}
