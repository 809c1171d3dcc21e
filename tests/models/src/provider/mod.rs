//! Replaces `verbs-api/soft/src/provider`.

#[path = "../../../../verbs-api/soft/src/provider/mailbox.rs"]
pub(crate) mod mailbox;
#[path = "../../../../verbs-api/soft/src/provider/state.rs"]
pub(crate) mod state;
pub mod sync;
/// Nothing is traced.
pub mod trace {
    pub(crate) fn event<T>(_: &T) {}
}
pub mod wake;
#[path = "../../../../verbs-api/soft/src/provider/wakers.rs"]
pub mod wakers;

pub mod listeners {
    use std::sync::atomic::{AtomicU64, Ordering};

    /// Not one of loom's atomics: nothing depends on the number.
    pub(crate) fn fresh_number() -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }
}
