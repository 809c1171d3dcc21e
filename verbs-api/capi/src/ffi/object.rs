//! Objects that C programs hold: the public structure, and behind it a private part.
#![allow(unsafe_code)]

use std::alloc::{Layout, dealloc};
use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::{Condvar, Mutex};

use super::border::Outcome;
use super::fork;

/// The private part of an object.
pub(super) trait Private {
    /// The public structure.
    type Public;
    /// Tells the kinds apart: below [`fork::KINDS`].
    const KIND: usize;
}

#[repr(C)]
pub(super) struct Object<P: Private> {
    /// The program may change it at any time.
    public: UnsafeCell<P::Public>,
    magic: AtomicU64,
    pub(super) private: P,
}

impl<P: Private> Object<P> {
    /// A new object, as the pointer that the program gets.
    pub(super) fn make(public: P::Public, private: P) -> *mut P::Public {
        let magic = AtomicU64::new(fork::number(P::KIND));
        let object = Self { public: UnsafeCell::new(public), magic, private };
        Box::into_raw(Box::new(object)).cast()
    }

    /// The object behind a pointer. Error: `EINVAL` for NULL and for a pointer to anything but an
    /// object of this kind; `EIO` for the copy of one of a parent process.
    ///
    /// # Safety
    /// The pointer is NULL, or that of an object that nothing destroys meanwhile.
    #[inline]
    pub(super) unsafe fn of<'a>(public: *mut P::Public) -> Outcome<&'a Self> {
        // SAFETY: the caller's promise.
        unsafe { Self::marked(public, |magic| magic == fork::number(P::KIND)) }
    }

    /// As [`of`](Self::of), for calls that a child of fork(2) may make, too.
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn own_or_inherited<'a>(public: *mut P::Public) -> Outcome<&'a Self> {
        // SAFETY: the caller's promise.
        unsafe { Self::marked(public, |magic| (magic ^ fork::number(P::KIND)) & !fork::MARKS == 0) }
    }

    #[inline(always)]
    unsafe fn marked<'a>(
        public: *mut P::Public,
        is_it: impl FnOnce(u64) -> bool,
    ) -> Outcome<&'a Self> {
        if public.is_null() || !public.cast::<Self>().is_aligned() {
            return Err(libc::EINVAL);
        }
        let object = public.cast::<Self>();
        // SAFETY: the caller vouches for it. Of any other object only the number is read.
        unsafe {
            let magic = (*object).magic.load(Ordering::Relaxed);
            if is_it(magic) { Ok(&*object) } else { Err(refusal(magic, fork::number(P::KIND))) }
        }
    }

    /// Destroys the object, and keeps its empty [shell](Shell).
    ///
    /// # Safety
    /// It came from [`make`](Self::make), and nothing uses it any more.
    pub(super) unsafe fn unmake(&self) -> P {
        self.magic.store(0, Ordering::Relaxed);
        let memory = std::ptr::from_ref(self).cast_mut();
        // SAFETY: nothing uses the object, so its part is taken out once. The shell is memory of
        // this type that `make` boxed.
        let private = unsafe { std::ptr::read(&raw const (*memory).private) };
        Shell { memory: memory.expose_provenance(), layout: Layout::new::<Self>() }.keep();
        private
    }
}

#[cold]
fn refusal(magic: u64, wanted: u64) -> c_int {
    if (magic ^ wanted) & !fork::MARKS == 0 { libc::EIO } else { libc::EINVAL }
}

/// The memory of a destroyed object. Programs that destroy something twice, or go on with it,
/// mostly do so soon: until [`SHELLS`] more objects are destroyed, its number is there to be
/// compared.
struct Shell {
    memory: usize,
    layout: Layout,
}

/// The number of shells kept.
const SHELLS: usize = 256;

impl Shell {
    fn keep(self) {
        static KEPT: Mutex<VecDeque<Shell>> = Mutex::new(VecDeque::new());
        // In a child of fork(2) a thread that is not there may hold it.
        let oldest = match KEPT.try_lock() {
            Some(mut kept) => {
                let oldest = if kept.len() == SHELLS { kept.pop_front() } else { None };
                kept.push_back(self);
                oldest
            }
            None => Some(self),
        };
        if let Some(Self { memory, layout }) = oldest {
            // SAFETY: a box of this layout was made there, and its parts are gone or plain data.
            unsafe { dealloc(std::ptr::with_exposed_provenance_mut(memory), layout) };
        }
    }
}

/// The number of objects that use one. With users it cannot be destroyed.
#[derive(Debug, Default)]
pub(super) struct Users(AtomicU32);

impl Users {
    pub(super) fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn remove(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    /// # Errors
    /// `EBUSY` if there are some.
    pub(super) fn none(&self) -> Outcome<()> {
        if self.0.load(Ordering::Relaxed) == 0 { Ok(()) } else { Err(libc::EBUSY) }
    }
}

/// Events of an object that the program took and has not acknowledged. Its destruction waits for
/// them (`ibv_ack_cq_events(3)`).
#[derive(Debug, Default)]
pub(super) struct Unacknowledged {
    count: Mutex<u32>,
    none: Condvar,
}

impl Unacknowledged {
    pub(super) fn took(&self) {
        *self.count.lock() += 1;
    }

    pub(super) fn acknowledged(&self, events: u32) {
        let mut count = self.count.lock();
        *count = count.saturating_sub(events);
        if *count == 0 {
            self.none.notify_all();
        }
    }

    pub(super) fn wait(&self) {
        let mut count = self.count.lock();
        self.none.wait_while(&mut count, |count| *count > 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_user_frees_an_object() {
        let users = Users::default();
        assert_eq!(users.none(), Ok(()));
        users.add();
        users.add();
        users.add();
        for left in [2, 1, 0] {
            users.remove();
            let free = if left == 0 { Ok(()) } else { Err(libc::EBUSY) };
            assert_eq!([users.none(), users.none()], [free; 2]);
        }
    }

    /// Programs acknowledge more than they took: `ibv_ack_cq_events(3)` has no way to refuse.
    #[test]
    fn acknowledgements_beyond_what_was_taken_hold_up_nothing() {
        let events = Unacknowledged::default();
        for acknowledged in [2, 1, 3] {
            events.took();
            assert_eq!(*events.count.lock(), 1);
            events.acknowledged(acknowledged);
            assert_eq!(*events.count.lock(), 0);
            events.wait();
        }
    }
}
