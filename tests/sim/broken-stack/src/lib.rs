//! The engine, compiled from its own source, with planted bugs: `bugs.rs` lists them. One bug at a
//! time can be switched on; without one, this engine behaves like the original.
//!
//! So the engine's source knows nothing of planted bugs, and the shipped engine has none. This is
//! another crate, which `build.rs` makes from the same files, for `rocinante-sim --break` only.

#![forbid(unsafe_code)]
#![allow(clippy::all, clippy::pedantic, unused, unreachable_pub, missing_docs)]

include!(concat!(env!("OUT_DIR"), "/engine/lib.rs"));

/// The planted bugs, and which one is on.
pub mod broken {
    use std::cell::Cell;

    include!("../bugs.rs");

    /// Bugs without their place in the source.
    pub const LOST: &[&str] = include!(concat!(env!("OUT_DIR"), "/lost.rs"));

    thread_local! {
        static ON: Cell<usize> = const { Cell::new(usize::MAX) };
    }

    /// Switches the bug with this name on for this thread, and all others off; with `None`, all
    /// off. Returns whether there is such a bug.
    pub fn plant(name: Option<&str>) -> bool {
        let at = name.map(|name| BUGS.iter().position(|bug| bug.name == name));
        ON.set(at.flatten().unwrap_or(usize::MAX));
        at.is_none_or(|at| at.is_some())
    }

    /// Whether this bug is on.
    pub(crate) fn on(bug: usize) -> bool {
        ON.get() == bug
    }
}
