//! The state that threads share in `verbs-api`, compiled from its own files, with loom's atomics in
//! place of the machine's. A test tries every order of the steps of a few threads with few
//! preemptions, and every value that the memory model permits an atomic to be seen with.
//!
//! [`provider::sync`] and [`provider::wake`] replace the modules of those names: locks with the
//! orderings of `parking_lot`, and descriptors that behave as the kernel's do. [`soft`] has the
//! real `core.rs`, `background.rs`, `posting.rs`, `front.rs`, `staging.rs` and `announce.rs`,
//! around a minimal engine and a minimal shard. [`sequence`] is of a page of counters, whose
//! two sides are processes.
//!
//! Loom treats `SeqCst` of a load or a store as acquire and release. Where the order of two
//! variables counts, the code needs a fence.
#![forbid(unsafe_code)]
#![allow(dead_code, unreachable_pub, missing_docs)]

pub mod model;
pub mod provider;
#[path = "../../../netdev/src/handed/page/sequence.rs"]
pub mod sequence;
pub mod soft;
#[path = "../../../verbs-api/soft/src/tuning.rs"]
mod tuning;

use loom::sync::atomic as atomics;
use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use rocinante_stack::cm::{CmEvent, ConnId};
use rocinante_stack::wire::cm::CommId;

use crate::provider::wakers::poll_until;
use crate::provider::{mailbox, wake};

/// A mailbox of the connection manager.
#[derive(Debug, Default)]
pub struct Letters(mailbox::Mailbox);

impl Letters {
    pub fn put(&self) {
        drop(self.0.push(CmEvent::Established { conn: ConnId(CommId(1)) }));
    }

    pub fn take(&self) -> bool {
        self.0.pop().is_ok_and(|event| event.is_some())
    }

    /// The steps of `Listener::poll_accept` and others.
    pub fn poll(&self, cx: &Context<'_>) -> Poll<()> {
        let register = || {
            self.0.tasks.register(cx);
            Ok::<_, Infallible>(())
        };
        poll_until(register, |_| Ok(self.take().then_some(()))).map(|found| found.unwrap())
    }

    pub fn fd(&self) -> wake::BorrowedFd<'_> {
        self.0.fd().expect("there are descriptors enough")
    }
}

/// Polls until there is a result, and sleeps between as a runtime does.
pub fn block_on<T>(mut poll: impl FnMut(&Context<'_>) -> Poll<T>) -> T {
    struct Task(wake::OwnedFd);
    impl Wake for Task {
        fn wake(self: Arc<Self>) {
            wake::notify(&self.0);
        }
    }
    let woken = wake::OwnedFd::default();
    let waker = Waker::from(Arc::new(Task(woken.clone())));
    loop {
        if let Poll::Ready(result) = poll(&Context::from_waker(&waker)) {
            return result;
        }
        wake::wait(None, &woken, None);
        woken.drain();
    }
}
