//! The state that threads share in `verbs-api`, compiled from its own files, with loom's atomics in
//! place of the machine's. A test tries every order of the steps of a few threads with few
//! preemptions, and every value that the memory model permits an atomic to be seen with.
//!
//! [`sync`] and [`wake`] replace the modules of those names: locks with the orderings of
//! `parking_lot`, and descriptors that behave as the kernel's do. [`soft`] has the real `core.rs`,
//! `background.rs`, `posting.rs`, `front.rs`, `staging.rs` and `announce.rs`, around a minimal
//! engine and a minimal shard.
//!
//! Loom treats `SeqCst` of a load or a store as acquire and release. Where the order of two
//! variables counts, the code needs a fence.
#![forbid(unsafe_code)]
#![allow(dead_code, unreachable_pub, missing_docs)]

#[path = "../../../verbs-api/src/cm/mailbox.rs"]
mod mailbox;
pub mod qp;
pub mod soft;
pub mod sync;
pub mod wake;

use rocinante_stack::cm::{CmEvent, ConnId};
use rocinante_stack::wire::cm::CommId;

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

/// The errors, as far as the files use them.
pub mod error {
    /// Why a call failed.
    #[derive(Debug)]
    pub enum VerbsError {
        /// The operating system refused.
        Io(std::io::Error),
    }

    impl VerbsError {
        pub(crate) fn errno(&self) -> i32 {
            let Self::Io(why) = self;
            why.raw_os_error().unwrap_or(0)
        }
    }
}

pub mod event {
    /// Something that happened.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum AsyncEvent {
        /// A deadline passed.
        Expired,
    }
}

pub mod listeners {
    use std::sync::atomic::{AtomicU64, Ordering};

    /// Not one of loom's atomics: nothing depends on the number.
    pub(crate) fn fresh_number() -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }
}
