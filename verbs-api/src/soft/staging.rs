//! What is posted while another thread drives the shard: a list of the queue pairs that have some, and a bell; and what other shards leave.

use std::sync::Arc;

use super::Engine;
use super::front::QpShared;
use super::host::Host;
use super::mail::Mail;
use crate::sync::{AtomicBool, Mutex, Ordering, fence};

/// Shared by those who post and whoever holds the shard's lock.
#[derive(Debug)]
pub(super) struct Staging {
    /// Something was left.
    bell: AtomicBool,
    /// Queue pairs with work requests that were posted while somebody else held the lock.
    left: Mutex<Vec<Arc<QpShared>>>,
    /// What other shards left.
    pub(super) mail: Mail,
}

impl Default for Staging {
    fn default() -> Self {
        Self {
            bell: AtomicBool::new(false),
            left: Mutex::new(Vec::with_capacity(16)),
            mail: Mail::default(),
        }
    }
}

impl Staging {
    /// Of a shard among several.
    pub(super) fn with_mail() -> Self {
        Self { mail: Mail::new(), ..Self::default() }
    }

    /// Leaves posted work to whoever holds the lock.
    pub(super) fn leave(&self, qp: &Arc<QpShared>) {
        self.left.lock().push(qp.clone());
        self.bell.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// Whether something was left since it was taken last, mail included.
    pub(super) fn has_some(&self) -> bool {
        self.bell.load(Ordering::Relaxed) || self.mail.has_some()
    }

    /// Posts what was left. Costs a load if nothing was.
    #[inline]
    pub(super) fn take(&self, engine: &mut Engine, host: &mut Host) {
        if self.bell.load(Ordering::Acquire) {
            self.take_all(engine, host);
        }
    }

    #[cold]
    fn take_all(&self, engine: &mut Engine, host: &mut Host) {
        self.bell.store(false, Ordering::SeqCst);
        loop {
            let Some(qp) = self.left.lock().pop() else { return };
            qp.post_staged(engine, host);
        }
    }
}
