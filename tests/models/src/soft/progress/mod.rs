//! Which thread drives: the real files, but for how long a thread spins and stands aside.

#[path = "../../../../../verbs-api/soft/src/progress/background.rs"]
mod background;
#[path = "../../../../../verbs-api/soft/src/progress/core.rs"]
mod core;
mod spin;
pub mod standby;
#[path = "../../../../../verbs-api/soft/src/progress/watch.rs"]
mod watch;

pub(super) use self::core::Core;

impl Core {
    pub(super) fn is_waited(&self) -> bool {
        self.watch.view().is_waited()
    }

    pub(super) fn is_asleep(&self) -> bool {
        self.watch.view().is_asleep()
    }
}
