//! The time of a shard.

use std::time::Instant;

use rocinante_stack::types::Time;

/// Time since the shard was made. It begins at one second, so that it can be subtracted from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock(Instant);

impl Clock {
    pub(super) fn start() -> Self {
        Self(Instant::now())
    }

    #[inline]
    pub(super) fn now(self) -> Time {
        let nanoseconds = self.0.elapsed().as_nanos();
        Time(1_000_000_000 + u64::try_from(nanoseconds).unwrap_or(u64::MAX / 2))
    }
}
