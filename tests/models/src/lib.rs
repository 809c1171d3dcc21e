//! The state that threads share in `verbs-api`, compiled from its own files, with loom's atomics in
//! place of the machine's. A test tries every order of the steps of a few threads with few
//! preemptions, and every value that the memory model permits an atomic to be seen with.
//!
//! [`provider::sync`] and [`provider::wake`] replace the modules of those names: locks with the
//! orderings of `parking_lot`, and descriptors that behave as the kernel's do. [`soft`] has the
//! real `core.rs`, `background.rs`, `posting.rs`, `front.rs`, `staging.rs` and `announce.rs`,
//! around a minimal engine and a minimal shard.
//!
//! Loom treats `SeqCst` of a load or a store as acquire and release. Where the order of two
//! variables counts, the code needs a fence.
#![forbid(unsafe_code)]
#![allow(dead_code, unreachable_pub, missing_docs)]

pub mod model;
pub mod provider;
pub mod soft;

use rocinante_stack::cm::{CmEvent, ConnId};
use rocinante_stack::wire::cm::CommId;

use crate::provider::{mailbox, wake};

/// A mailbox of the connection manager.
#[derive(Debug, Default)]
pub struct Letters(mailbox::Mailbox);

impl Letters {
    pub fn put(&self) {
        self.0.push(CmEvent::Established { conn: ConnId(CommId(1)) });
    }

    pub fn take(&self) -> bool {
        self.0.pop().is_ok_and(|event| event.is_some())
    }

    pub fn fd(&self) -> wake::BorrowedFd<'_> {
        self.0.fd().expect("there are descriptors enough")
    }
}
