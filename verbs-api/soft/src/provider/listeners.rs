//! The completion queues that a channel announces, by numbers that are never reused.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

/// The queues of a channel. It does not keep them alive.
#[derive(Debug)]
pub struct Listeners<Q> {
    queues: Mutex<HashMap<u64, Weak<Q>>>,
}

/// A number for a queue, never reused: an event of a destroyed queue must not reach another.
pub fn fresh_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl<Q> Listeners<Q> {
    pub fn new() -> Self {
        Self { queues: Mutex::new(HashMap::new()) }
    }

    pub fn add(&self, number: u64, queue: &Arc<Q>) {
        let mut queues = self.queues.lock();
        if queues.len() == queues.capacity() {
            // Drops destroyed queues. Capacity grows with the live ones, so each entry is visited
            // only a few times in all.
            queues.retain(|_, queue| queue.strong_count() > 0);
            let live = queues.len();
            queues.reserve(live.max(4));
        }
        queues.insert(number, Arc::downgrade(queue));
    }

    /// All queues.
    pub fn all(&self) -> Vec<Arc<Q>> {
        self.queues.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// The queue of an event, unless it is gone.
    pub fn find(&self, number: u64) -> Option<Arc<Q>> {
        self.queues.lock().get(&number)?.upgrade()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_that_are_gone_take_no_room_and_get_no_events() {
        let listeners = Listeners::new();
        let kept: Vec<_> = (0..3)
            .map(|n| {
                let (number, queue) = (fresh_number(), Arc::new(n));
                listeners.add(number, &queue);
                (number, queue)
            })
            .collect();
        let mut gone = 0;
        for n in 0..1000 {
            gone = fresh_number();
            listeners.add(gone, &Arc::new(n));
        }
        assert!(listeners.queues.lock().capacity() <= 32);
        assert_eq!(listeners.find(gone), None);
        for (number, queue) in &kept {
            assert_eq!(listeners.find(*number).as_ref(), Some(queue));
        }
        assert_eq!(listeners.all().len(), 3);
    }
}
