//! The steps of the agent's work that are not one system call, by name: a test ends the agent at
//! each of them, as `kill -9` does, and starts it again.

use std::env;
use std::sync::OnceLock;

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

/// The environment variable that names the step at which the process kills itself. For tests.
const VARIABLE: &str = "ROCINANTE_AGENT_KILL_AT";

/// Notes that a step is reached.
pub(crate) fn reached(step: &'static str) {
    debug_assert!(STEPS.contains(&step), "{step} is not in the list");
    static LAST: OnceLock<Option<String>> = OnceLock::new();
    if LAST.get_or_init(|| env::var(VARIABLE).ok()).as_deref() == Some(step) {
        let _ =
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}
