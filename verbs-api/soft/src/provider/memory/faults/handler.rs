//! The installed handlers, and those before them.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::mem::zeroed;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use libc::{c_int, sigaction, siginfo_t, sigset_t, ucontext_t};
use rocinante_netdev::OfProcess;

use super::super::guarded::resumes_at;
use crate::provider::sync::Mutex;

const SIGNALS: [c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];

/// A handler that was there before ours. It is never freed: a fault may be about to follow it.
struct Before {
    handler: usize,
    flags: c_int,
    /// The handler before that, if ours was between them.
    older: AtomicPtr<Before>,
}

impl Before {
    fn is(&self, action: &sigaction) -> bool {
        (self.handler, self.flags) == (action.sa_sigaction, action.sa_flags)
    }
}

/// The handlers before ours, the last one first, each once: for each signal.
static BEFORE: [AtomicPtr<Before>; 2] = [const { AtomicPtr::new(ptr::null_mut()) }; 2];
/// Held while an action is changed.
static CHANGE: OfProcess<Mutex<()>> = OfProcess::none();
/// The fault that a handler of the program was given last: by its context, where on the stack, and
/// which handler. A handler that passes on faults of others may know ours as the one before it.
static GIVEN: [AtomicUsize; 3] = [const { AtomicUsize::new(0) }; 3];

/// Makes sure that the faults of guarded accesses come here, also if the program has set a handler
/// of its own since the last call, and that this thread does not block them.
///
/// A thread that blocks a signal that an instruction of its own causes is ended by it.
pub(crate) fn watch() {
    for (signal, before) in SIGNALS.into_iter().zip(&BEFORE) {
        if !is_ours(&current(signal)) {
            install(signal, before);
        }
    }
    unblock();
}

/// Has this thread take SIGSEGV and SIGBUS.
pub(crate) fn unblock() {
    // SAFETY: the set is this function's own.
    unsafe {
        let mut set: sigset_t = zeroed();
        libc::sigemptyset(&raw mut set);
        SIGNALS.iter().for_each(|signal| {
            libc::sigaddset(&raw mut set, *signal);
        });
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, ptr::null_mut());
    }
}

fn current(signal: c_int) -> sigaction {
    // SAFETY: zeroes are a value of the structure, which the call fills in.
    unsafe {
        let mut action: sigaction = zeroed();
        libc::sigaction(signal, ptr::null(), &raw mut action);
        action
    }
}

fn is_ours(action: &sigaction) -> bool {
    action.sa_sigaction == on_fault as *const () as usize
}

#[cold]
fn install(signal: c_int, before: &AtomicPtr<Before>) {
    let _change = CHANGE.get().lock();
    let found = current(signal);
    if is_ours(&found) {
        return;
    }
    // A fault in this moment finds the action that is about to be replaced.
    put_first(before, &found);
    // SAFETY: the handler is a function of this library, which is never unloaded. It calls only
    // functions that a signal may interrupt.
    unsafe {
        let mut ours: sigaction = zeroed();
        ours.sa_sigaction = on_fault as *const () as usize;
        // The others' flags that change how the program is interrupted stay as they were.
        let kept = libc::SA_RESTART | libc::SA_NODEFER;
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | (found.sa_flags & kept);
        ours.sa_mask = found.sa_mask;
        libc::sigaction(signal, &raw const ours, ptr::null_mut());
    }
}

/// Puts an action before all others of a list. One that is in the list moves, so that a program
/// that changes between its handlers makes the list no longer. A fault of another thread in that
/// moment meets each at most twice, and may miss those between the places.
fn put_first(list: &AtomicPtr<Before>, action: &sigaction) {
    let mut link = list;
    // SAFETY: none is ever freed.
    while let Some(node) = unsafe { link.load(Ordering::Relaxed).as_ref() } {
        if node.is(action) {
            break;
        }
        link = &node.older;
    }
    let mut node = link.load(Ordering::Relaxed);
    if node.is_null() {
        let (handler, flags) = (action.sa_sigaction, action.sa_flags);
        node = Box::leak(Box::new(Before { handler, flags, older: AtomicPtr::default() }));
    } else if ptr::eq(link, list) {
        return;
    } else {
        // SAFETY: as above.
        link.store(unsafe { (*node).older.load(Ordering::Relaxed) }, Ordering::Release);
    }
    // SAFETY: as above.
    unsafe { (*node).older.store(list.load(Ordering::Relaxed), Ordering::Release) };
    list.store(node, Ordering::Release);
}

/// A fault, or a signal that a process sent.
extern "C" fn on_fault(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel, or a handler that passes it on, gives what `sigaction(2)` says.
    unsafe {
        let counter = program_counter(context.cast());
        if is_fault(signal, (*info).si_code)
            && let Some(end) = resumes_at(*counter as usize)
        {
            *counter = end as _;
            return;
        }
        pass_on(signal, info, context);
    }
}

/// Whether a signal is about the interrupted instruction. The kernel sends such a signal, but it
/// also sends others: of a page that broke down and that no instruction has touched, and on aarch64
/// of a wrong tag that some instruction before touched.
fn is_fault(signal: c_int, code: c_int) -> bool {
    /// `SEGV_MTEAERR` of sigaction(2).
    const TAG_BEFORE: c_int = 8;
    let is_later = match signal {
        libc::SIGBUS => code == libc::BUS_MCEERR_AO,
        _ => code == TAG_BEFORE,
    };
    code > 0 && !is_later
}

/// # Safety
/// The context of a signal.
#[cfg(target_arch = "x86_64")]
unsafe fn program_counter<'a>(context: *mut ucontext_t) -> &'a mut i64 {
    // SAFETY: the caller vouches for it.
    unsafe { &mut (*context).uc_mcontext.gregs[libc::REG_RIP as usize] }
}

/// # Safety
/// The context of a signal.
#[cfg(target_arch = "aarch64")]
unsafe fn program_counter<'a>(context: *mut ucontext_t) -> &'a mut u64 {
    // SAFETY: the caller vouches for it.
    unsafe { &mut (*context).uc_mcontext.pc }
}

/// Handles a fault as if this library were not there.
///
/// # Safety
/// As [`on_fault`].
unsafe fn pass_on(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let index = usize::from(signal != SIGNALS[0]);
    let here = (&raw const index) as usize;
    let [fault, place, handler] = &GIVEN;
    let mut before: *const Before = BEFORE[index].load(Ordering::Acquire);
    // The same fault, further up the stack: the handler that was given it passed it back.
    let given = handler.load(Ordering::Relaxed) as *const Before;
    if fault.load(Ordering::Relaxed) == context as usize
        && place.load(Ordering::Relaxed) > here
        && !given.is_null()
    {
        // SAFETY: none is ever freed.
        before = unsafe { (*given).older.load(Ordering::Acquire) };
    }
    if before.is_null() {
        return end(signal, info);
    }
    // SAFETY: none is ever freed.
    let &Before { handler: function, flags, .. } = unsafe { &*before };
    match function {
        libc::SIG_DFL => return end(signal, info),
        // SAFETY: as in `on_fault`.
        libc::SIG_IGN => match is_fault(signal, unsafe { (*info).si_code }) {
            true => return end(signal, info),
            false => return,
        },
        _ => {}
    }
    if flags & libc::SA_RESETHAND != 0 {
        reset(signal);
    }
    fault.store(context as usize, Ordering::Relaxed);
    place.store(here, Ordering::Relaxed);
    handler.store(before as usize, Ordering::Relaxed);
    // SAFETY: the program gave a function of this kind.
    unsafe {
        if flags & libc::SA_SIGINFO != 0 {
            let call: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                std::mem::transmute(function);
            call(signal, info, context);
        } else {
            let call: extern "C" fn(c_int) = std::mem::transmute(function);
            call(signal);
        }
    }
    fault.store(0, Ordering::Relaxed);
}

/// Has the signal end the process: by the instruction that had the fault, which is executed again,
/// or by sending it again.
fn end(signal: c_int, info: *mut siginfo_t) {
    reset(signal);
    // SAFETY: as in `on_fault`. The signal is blocked until the handler returns.
    unsafe {
        if !is_fault(signal, (*info).si_code) {
            libc::raise(signal);
        }
    }
}

fn reset(signal: c_int) {
    // SAFETY: zeroes are the default action.
    unsafe {
        let default: sigaction = zeroed();
        libc::sigaction(signal, &raw const default, ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use rocinante_stack::types::Time;

    use super::super::take_signals;
    use super::*;

    /// Whether this thread blocks the signals, after it has blocked all if `block`.
    fn blocks(block: bool) -> bool {
        // SAFETY: the sets are this function's own.
        unsafe {
            let (mut all, mut now): (sigset_t, sigset_t) = (zeroed(), zeroed());
            libc::sigfillset(&raw mut all);
            let set = if block { &raw const all } else { ptr::null() };
            libc::pthread_sigmask(libc::SIG_BLOCK, set, &raw mut now);
            if block {
                return blocks(false);
            }
            SIGNALS.iter().all(|signal| libc::sigismember(&raw const now, *signal) == 1)
        }
    }

    /// The handlers of a list, the first one first.
    fn listed(list: &AtomicPtr<Before>) -> Vec<(usize, c_int)> {
        let next = |link: &AtomicPtr<Before>| {
            // SAFETY: none is ever freed.
            unsafe { link.load(Ordering::Relaxed).as_ref() }
        };
        let all = std::iter::successors(next(list), |before| next(&before.older));
        all.take(100).map(|before| (before.handler, before.flags)).collect()
    }

    #[test]
    fn a_program_that_changes_between_handlers_makes_the_list_no_longer() {
        let list = AtomicPtr::default();
        let put = |handler, flags| {
            // SAFETY: zeroes are a value of the structure.
            let mut action: sigaction = unsafe { zeroed() };
            (action.sa_sigaction, action.sa_flags) = (handler, flags);
            put_first(&list, &action);
            listed(&list)
        };
        assert_eq!(put(libc::SIG_DFL, 0), [(0, 0)]);
        for _ in 0..40 {
            assert_eq!(put(77, 0)[0], (77, 0));
            assert_eq!(put(88, 0)[..2], [(88, 0), (77, 0)]);
            assert_eq!(put(77, 4)[..3], [(77, 4), (88, 0), (77, 0)]);
            assert_eq!(put(77, 4)[..3], [(77, 4), (88, 0), (77, 0)]);
        }
        assert_eq!(listed(&list), [(77, 4), (88, 0), (77, 0), (0, 0)]);
        assert_eq!(put(libc::SIG_DFL, 0), [(0, 0), (77, 4), (88, 0), (77, 0)]);
    }

    #[test]
    fn each_thread_takes_the_signals_before_its_first_packet_and_each_millisecond() {
        for at in [5_000_000, 5_000_001] {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    assert!(blocks(true));
                    take_signals(Time(at));
                    assert!(!blocks(false), "the first time");
                    assert!(blocks(true));
                    take_signals(Time(at + 1_000_001));
                    assert!(!blocks(false), "later");
                    assert!(blocks(true));
                    // A younger shard's clock.
                    take_signals(Time(7));
                    assert!(!blocks(false), "by another clock");
                });
            });
        }
    }
}
