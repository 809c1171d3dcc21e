//! Which thread drives a shard, and when: the threads of the program that call, or the background
//! thread, which sleeps on the port.

mod background;
mod core;
mod spin;
mod standby;
#[cfg(test)]
mod tests;
mod watch;

pub(super) use self::core::{Core, Held};
