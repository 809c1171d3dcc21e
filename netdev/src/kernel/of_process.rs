//! Values that a process shares among its threads, and with no child of `fork(2)`.

#![allow(unsafe_code)]

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::thread::yield_now;

use crate::kernel::inherited::process;

/// A value of a process. A child of `fork(2)` begins with one of its own: threads of its parent,
/// which it does not have, may hold locks of the inherited one. That one is never freed.
#[derive(Debug)]
pub struct OfProcess<T: Send + Sync + 'static> {
    /// The process of which a thread has begun to make one.
    of: AtomicU64,
    now: AtomicPtr<(u64, T)>,
}

impl<T: Send + Sync + 'static> OfProcess<T> {
    /// A place for it.
    #[must_use]
    pub const fn none() -> Self {
        Self { of: AtomicU64::new(0), now: AtomicPtr::new(ptr::null_mut()) }
    }

    /// The value of this process, if there is one. A signal handler may ask.
    #[must_use]
    pub fn own(&self) -> Option<&'static T> {
        self.now().filter(|(of, _)| *of == process()).map(|(_, value)| value)
    }

    /// As [`own`](Self::own). The first call makes it.
    #[must_use]
    pub fn get(&self) -> &'static T
    where
        T: Default,
    {
        self.get_or(|_| T::default())
    }

    /// As [`own`](Self::own). The first call makes it; `begin` gets the parent's, of which it may
    /// take what needs no waiting. Another thread of this process waits for it.
    #[must_use]
    pub fn get_or(&self, begin: impl FnOnce(Option<&'static T>) -> T) -> &'static T {
        let process = process();
        loop {
            if let Some(own) = self.own() {
                return own;
            }
            let of = self.of.load(Ordering::Acquire);
            let begun =
                |of| self.of.compare_exchange(of, process, Ordering::AcqRel, Ordering::Acquire);
            if of != process && begun(of).is_ok() {
                let value = begin(self.now().map(|(_, value)| value));
                self.now.store(Box::into_raw(Box::new((process, value))), Ordering::Release);
                break;
            }
            yield_now();
        }
        self.own().expect("it was just made")
    }

    fn now(&self) -> Option<&'static (u64, T)> {
        // SAFETY: null, or a box that was leaked above.
        unsafe { self.now.load(Ordering::Acquire).as_ref() }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::{Barrier, Mutex};

    use super::*;
    use crate::kernel::inherited::tests::in_a_child;

    type Value = Mutex<u32>;

    #[test]
    fn a_child_of_fork_begins_with_a_value_of_its_own() {
        static PLACE: OfProcess<Value> = OfProcess::none();
        assert!(PLACE.own().is_none());
        let value = PLACE.get();
        let mut held = value.lock().unwrap();
        *held = 1;
        assert!(in_a_child(|| {
            let is_none = PLACE.own().is_none();
            let own = PLACE.get_or(|before| {
                let is_held = |it: &Value| ptr::eq(it, value) && it.try_lock().is_err();
                Mutex::new(if before.is_some_and(is_held) { 2 } else { 3 })
            });
            is_none
                && *own.lock().unwrap() == 2
                && ptr::eq(PLACE.get(), own)
                // So does its child.
                && in_a_child(|| *PLACE.get().lock().unwrap() == 0)
        }));
        drop(held);
        assert!(ptr::eq(PLACE.get(), value) && PLACE.own().is_some());
        assert_eq!(*value.lock().unwrap(), 1);
    }

    #[test]
    fn threads_that_come_first_get_the_same_value() {
        for _ in 0..100 {
            let place = Box::leak(Box::new(OfProcess::<Value>::none()));
            let barrier = Barrier::new(3);
            let values: HashSet<usize> = std::thread::scope(|scope| {
                let get = || {
                    barrier.wait();
                    ptr::from_ref(place.get()).addr()
                };
                let threads = [(); 3].map(|()| scope.spawn(get));
                threads.map(|it| it.join().unwrap()).into()
            });
            assert_eq!(values.len(), 1);
        }
    }
}
