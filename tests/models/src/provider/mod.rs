//! Replaces `verbs-api/src/provider`.

#[path = "../../../../verbs-api/src/provider/mailbox.rs"]
pub(crate) mod mailbox;
#[path = "../../../../verbs-api/src/provider/state.rs"]
pub(crate) mod state;
pub mod sync;
pub mod wake;

pub mod listeners {
    use std::sync::atomic::{AtomicU64, Ordering};

    /// Not one of loom's atomics: nothing depends on the number.
    pub(crate) fn fresh_number() -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }
}
