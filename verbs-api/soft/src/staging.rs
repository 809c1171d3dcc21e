//! Requests posted while another thread drives the shard: a list of the queue pairs that have some,
//! and a bell; and the mail of other shards.

use std::sync::Arc;

use super::Engine;
use super::front::{Backlog, QpShared};
use super::host::Host;
use super::mail::Mail;
use crate::provider::sync::{AtomicBool, Mutex, Ordering, fence};
use crate::tuning::room::BACKLOGS;

/// Shared by the threads that post and the one that holds the shard's lock.
#[derive(Debug)]
pub(super) struct Staging {
    /// Something was left.
    bell: AtomicBool,
    left: Mutex<Left>,
    /// What other shards left.
    pub(super) mail: Mail,
}

#[derive(Debug)]
struct Left {
    /// Queue pairs with work requests that were posted while another thread held the lock.
    qps: Vec<Arc<QpShared>>,
    /// For the next that have some.
    #[allow(clippy::vec_box, reason = "they move to a queue pair and back as they are")]
    spare: Vec<Box<Backlog>>,
}

impl Default for Staging {
    fn default() -> Self {
        let left = Left { qps: Vec::with_capacity(16), spare: Vec::with_capacity(BACKLOGS + 1) };
        Self { bell: AtomicBool::new(false), left: Mutex::new(left), mail: Mail::default() }
    }
}

impl Staging {
    /// Of a shard among several.
    pub(super) fn with_mail() -> Self {
        Self { mail: Mail::new(), ..Self::default() }
    }

    /// There are `qps` queue pairs now, one more than before, which stages `requests` requests at
    /// most.
    pub(super) fn joined(&self, qps: usize, requests: usize) {
        let mut left = self.left.lock();
        // The thread that drives may hold one that it has emptied while the queue pair needs the
        // next.
        while left.spare.len() < qps.min(BACKLOGS) + 1 {
            left.spare.push(Box::default());
        }
        left.spare.iter_mut().for_each(|backlog| backlog.reserve(requests));
    }

    /// The place where a queue pair stages requests, with room for `requests` of them.
    pub(super) fn spare_backlog(&self, requests: usize) -> Box<Backlog> {
        let mut backlog = self.left.lock().spare.pop().unwrap_or_default();
        backlog.reserve(requests);
        backlog
    }

    /// Leaves posted work to the thread that holds the lock.
    pub(super) fn leave(&self, qp: &Arc<QpShared>) {
        self.left.lock().qps.push(qp.clone());
        self.bell.store(true, Ordering::Relaxed);
        // The thread that unlocks the shard has a fence, too, before it looks at the bell.
        fence(Ordering::SeqCst);
    }

    /// Whether something was left since it was taken last, mail included.
    pub(super) fn has_some(&self) -> bool {
        self.bell.load(Ordering::Relaxed) || self.mail.has_some()
    }

    /// Posts staged requests. Costs a load if there are none.
    #[inline]
    pub(super) fn take(&self, engine: &mut Engine, host: &mut Host) {
        if self.bell.load(Ordering::Relaxed) {
            self.take_all(engine, host);
        }
    }

    #[cold]
    fn take_all(&self, engine: &mut Engine, host: &mut Host) {
        self.bell.store(false, Ordering::Relaxed);
        let mut emptied = None;
        loop {
            let mut left = self.left.lock();
            left.spare.extend(emptied);
            let Some(qp) = left.qps.pop() else { return };
            drop(left);
            emptied = qp.post_staged(engine, host);
        }
    }
}
