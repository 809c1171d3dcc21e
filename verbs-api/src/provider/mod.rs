//! The parts that the providers share, which are the device in software and the kernel's devices:
//! user memory, locks, descriptors to sleep on, and the interface of their connection managers.

pub(crate) mod listeners;
pub(crate) mod mailbox;
#[cfg(test)]
mod mailbox_tests;
pub(crate) mod manager;
pub(crate) mod memory;
pub(crate) mod random;
pub(crate) mod state;
pub(crate) mod sync;
pub(crate) mod trace;
pub(crate) mod wake;
pub(crate) mod wakers;
#[cfg(test)]
mod wakers_tests;
