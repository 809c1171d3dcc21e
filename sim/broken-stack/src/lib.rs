//! The engine, from its own source, with bugs planted in it: `bugs.rs` has the list. One at a time can be switched on; without, it does what the engine does.
//!
//! So the engine's source knows nothing of planted bugs, and the engine that is shipped has none: this is another crate, made by `build.rs` out of the
//! same files, for `rocinante sim --break` alone.

#![forbid(unsafe_code)]
#![allow(clippy::all, clippy::pedantic, unused, unreachable_pub, missing_docs)]

include!(concat!(env!("OUT_DIR"), "/engine/lib.rs"));

/// What was planted, and which of it is switched on.
pub mod broken {
    use std::cell::Cell;

    include!("../bugs.rs");

    /// Bugs whose place in the source was not found.
    pub const LOST: &[&str] = include!(concat!(env!("OUT_DIR"), "/lost.rs"));

    thread_local! {
        static ON: Cell<usize> = const { Cell::new(usize::MAX) };
    }

    /// Switches the bug of this name on for this thread, and every other off; off too for `None`. Returns whether there is such a bug.
    pub fn plant(name: Option<&str>) -> bool {
        let at = name.map(|name| BUGS.iter().position(|bug| bug.name == name));
        ON.set(at.flatten().unwrap_or(usize::MAX));
        at.is_none_or(|at| at.is_some())
    }

    /// Whether this one is on.
    pub(crate) fn on(bug: usize) -> bool {
        ON.get() == bug
    }
}
