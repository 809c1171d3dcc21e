//! The parts that the providers share, which are the device in software and the kernel's devices:
//! user memory, locks, descriptors to sleep on, and the interface of their connection managers.

#[warn(missing_docs)]
pub mod advice;
pub mod listeners;
pub mod mailbox;
#[cfg(test)]
mod mailbox_tests;
pub mod manager;
pub mod memory;
pub mod random;
pub mod state;
pub mod sync;
pub mod trace;
pub mod wake;
pub mod wakers;
#[cfg(test)]
mod wakers_tests;
pub mod worker;
