//! The program's own SIGSEGV stays the program's. Each case is a process of its own, which this
//! program starts as a child.
#![allow(unsafe_code, reason = "it sets handlers of signals")]

mod sim;

use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::time::Duration;
use std::{mem, ptr};

use libc::{c_int, c_void, siginfo_t};
use rocinante::verbs::{SendData, SendOp};
use rocinante::{Access, WcStatus};
use sim::{Side, connect, done, request, undriven};

/// Which case the child runs.
const CASE: &str = "ROCINANTE_TEST_FAULT";
/// How a child ends whose handler was called as it should be.
const HANDLED: i32 = 42;

/// Runs the case in a child.
fn child(case: &str) -> ExitStatus {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "runs_as_a_child", "--nocapture"]).env(CASE, case);
    let mut child = command.stdout(std::process::Stdio::null()).spawn().unwrap();
    let begin = std::time::Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if begin.elapsed() > sim::PATIENCE {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{case}: it does not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_fault_of_the_program_is_given_to_its_handler() {
    for case in ["before", "after", "plain", "again", "blocked"] {
        assert_eq!(child(case).code(), Some(HANDLED), "{case}");
    }
}

#[test]
fn a_fault_that_no_handler_wants_ends_the_process_as_before() {
    for case in ["none", "ignored", "sent", "passes back"] {
        let status = child(case);
        assert_eq!(status.signal(), Some(libc::SIGSEGV), "{case}: {status}");
    }
}

#[test]
fn a_signal_that_is_sent_and_ignored_changes_nothing() {
    assert_eq!(child("sent and ignored").code(), Some(HANDLED));
}

#[test]
fn a_child_of_fork_has_the_handler_too() {
    assert_eq!(child("forked").code(), Some(HANDLED));
}

/// The kernel sends it of a page that has broken down and that no instruction touched. An access
/// of the device's that it interrupts has no fault.
#[test]
fn a_signal_of_a_page_that_nothing_touched_is_given_to_the_programs_handler() {
    assert_eq!(child("not touched").code(), Some(HANDLED));
    // Without a handler it ends the process, and ignored it does not.
    assert_eq!(child("not touched, none").code(), Some(128 + libc::SIGBUS));
    assert_eq!(child("not touched, ignored").code(), Some(HANDLED));
}

/// Not a test of its own: the program that the others start.
#[test]
fn runs_as_a_child() {
    let Ok(case) = std::env::var(CASE) else { return };
    // No core dump, and no help of the test harness.
    // SAFETY: the structure is one of the call's.
    unsafe {
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        libc::setrlimit(libc::RLIMIT_CORE, &raw const none);
        libc::signal(libc::SIGSEGV, libc::SIG_DFL);
    }
    run(&case);
    // A case that gets here has failed.
    std::process::exit(1);
}

fn run(case: &str) {
    match case {
        "before" => set(handle as *const () as usize, libc::SA_SIGINFO),
        "plain" => set(handle_plainly as *const () as usize, 0),
        "again" => {
            NOWHERE.store(ptr::without_provenance_mut(RESERVED), Ordering::Relaxed);
            set(recover as *const () as usize, libc::SA_SIGINFO | libc::SA_NODEFER);
        }
        "ignored" | "sent and ignored" => set(libc::SIG_IGN, 0),
        "not touched" => set_for(libc::SIGBUS, count as *const () as usize, libc::SA_SIGINFO),
        "not touched, none" => set_for(libc::SIGBUS, libc::SIG_DFL, 0),
        "not touched, ignored" => set_for(libc::SIGBUS, libc::SIG_IGN, 0),
        _ => {}
    }
    let sides = undriven();
    refuses(&sides);
    match case {
        "after" => set(handle as *const () as usize, libc::SA_SIGINFO),
        "passes back" => pass_back(),
        "blocked" => block(),
        _ => {}
    }
    refuses(&sides);
    match case {
        "blocked" => std::process::exit(HANDLED),
        "again" => {
            (0..5).for_each(|_| fault());
            std::process::exit(if RECOVERED.load(Ordering::Relaxed) == 5 { HANDLED } else { 1 });
        }
        "forked" => forked(&sides),
        "not touched" => interrupted(),
        "not touched, none" | "not touched, ignored" => twice_untouched(),
        // SAFETY: a signal to this thread.
        "sent" | "sent and ignored" => unsafe {
            // To this thread: the main thread's stack for signals goes when this one exits.
            libc::raise(libc::SIGSEGV);
            libc::_exit(HANDLED);
        },
        _ => fault(),
    }
}

/// A peer writes to memory that is gone: the WRITE fails, and this process lives.
fn refuses(sides: &[Side; 2]) {
    let page = rustix::param::page_size();
    // SAFETY: new memory, which Rust does not refer to.
    unsafe {
        let all = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let at = libc::mmap(ptr::null_mut(), page, all, flags, -1, 0);
        let region = sides[1].pd.register(at.cast(), page, Access::ALL).unwrap();
        assert_eq!(libc::mprotect(at, page, libc::PROT_NONE), 0);
        // A program that changes handlers is found out after a moment without packets.
        std::thread::sleep(Duration::from_millis(2));
        let qp = connect(sides, 20);
        let op = SendOp::Write { remote: region.address(), rkey: region.rkey(), imm: None };
        let status = done(sides, &qp[0], request(1, op, SendData::Inline(&[7; 8])));
        assert_eq!(status, WcStatus::RemAccessErr);
    }
}

/// Where nothing is mapped.
static NOWHERE: AtomicPtr<u32> = AtomicPtr::new(ptr::without_provenance_mut(4096));

fn fault() {
    // SAFETY: none: the test wants the fault.
    unsafe { NOWHERE.load(Ordering::Relaxed).write_volatile(1) };
}

fn set(handler: usize, flags: c_int) {
    set_for(libc::SIGSEGV, handler, flags);
}

fn set_for(signal: c_int, handler: usize, flags: c_int) {
    // SAFETY: the handlers of this file call only functions that a signal may interrupt.
    unsafe {
        let mut action: libc::sigaction = mem::zeroed();
        (action.sa_sigaction, action.sa_flags) = (handler, flags);
        assert_eq!(libc::sigaction(signal, &raw const action, ptr::null_mut()), 0);
    }
}

/// Sends this process the signal of a page that has broken down, as the kernel does: "action
/// optional".
fn not_touched() {
    // SAFETY: the kernel reads the structure during the call.
    unsafe {
        let mut info: siginfo_t = mem::zeroed();
        (info.si_signo, info.si_code) = (libc::SIGBUS, libc::BUS_MCEERR_AO);
        let (process, call) = (libc::getpid(), libc::SYS_rt_sigqueueinfo);
        assert_eq!(libc::syscall(call, process, libc::SIGBUS, &raw const info), 0);
    }
}

/// The same twice, without a handler of the program's.
fn twice_untouched() {
    // SAFETY: as in `interrupted`.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        not_touched();
        not_touched();
        // SAFETY: it only ends the child.
        unsafe { libc::_exit(HANDLED) };
    }
    std::process::exit(status_of(pid));
}

static COUNTED: AtomicU32 = AtomicU32::new(0);

extern "C" fn count(_: c_int, info: *mut siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel gives it.
    let code = unsafe { (*info).si_code };
    if code != libc::BUS_MCEERR_AO {
        // SAFETY: it only ends the process.
        unsafe { libc::_exit(2) };
    }
    COUNTED.fetch_add(1, Ordering::Relaxed);
}

/// A thread copies to registered memory and is interrupted: each signal is the program's. Linux
/// lets only a process's first thread send such a signal, so this is a child's.
fn interrupted() {
    const BYTES: usize = 1 << 20;
    // SAFETY: the child makes its objects anew.
    let pid = unsafe { libc::fork() };
    if pid > 0 {
        std::process::exit(status_of(pid));
    }
    let sides = undriven();
    let region = sides[0].pd.allocate(BYTES, Access::ALL).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let bytes = vec![7; BYTES];
            loop {
                region.write(0, &bytes);
            }
        });
        // The other thread gets them.
        block();
        for nth in 1..=200 {
            not_touched();
            let begin = std::time::Instant::now();
            while COUNTED.load(Ordering::Relaxed) != nth {
                if begin.elapsed() > sim::PATIENCE / 2 {
                    // SAFETY: it only ends the child.
                    unsafe { libc::_exit(3) };
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        // SAFETY: it only ends the child.
        unsafe { libc::_exit(HANDLED) };
    });
}

extern "C" fn handle(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel gives it.
    let at = unsafe { (*info).si_addr() } as usize;
    let good = signal == libc::SIGSEGV && at == 4096 && !context.is_null();
    // SAFETY: it only ends the process.
    unsafe { libc::_exit(if good { HANDLED } else { 1 }) };
}

extern "C" fn handle_plainly(signal: c_int) {
    // SAFETY: it only ends the process.
    unsafe { libc::_exit(if signal == libc::SIGSEGV { HANDLED } else { 1 }) };
}

/// Nothing is mapped there and behind it.
const RESERVED: usize = 0x40_0000_0000;

static RECOVERED: AtomicU32 = AtomicU32::new(0);

/// Lets the program go on: the page that it wanted to touch is there from now on.
extern "C" fn recover(_: c_int, _: *mut siginfo_t, _: *mut c_void) {
    let page = rustix::param::page_size();
    let (all, fixed) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_FIXED_NOREPLACE);
    RECOVERED.fetch_add(1, Ordering::Relaxed);
    // The instruction is executed again and finds memory; the next one is to be at another place.
    let at = NOWHERE.load(Ordering::Relaxed);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | fixed;
    // SAFETY: nothing else is mapped there.
    let done = unsafe { libc::mmap(at.cast(), page, all, flags, -1, 0) };
    if done == libc::MAP_FAILED {
        // SAFETY: it only ends the process.
        unsafe { libc::_exit(2) };
    }
    NOWHERE.store(at.wrapping_byte_add(page), Ordering::Relaxed);
}

static OLD: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

/// Sets a handler that passes faults to the one before it, as some libraries do.
fn pass_back() {
    // SAFETY: as in `set`; the old action is never freed.
    unsafe {
        let old: &mut libc::sigaction = Box::leak(Box::new(mem::zeroed()));
        libc::sigaction(libc::SIGSEGV, ptr::null(), &raw mut *old);
        assert_ne!(old.sa_flags & libc::SA_SIGINFO, 0, "the device's");
        OLD.store(old, Ordering::Relaxed);
    }
    set(pass as *const () as usize, libc::SA_SIGINFO);
}

extern "C" fn pass(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: it is the device's handler.
    unsafe {
        let old = (*OLD.load(Ordering::Relaxed)).sa_sigaction;
        let old: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = mem::transmute(old);
        old(signal, info, context);
    }
}

/// Blocks all signals, as threads do for which another one waits.
fn block() {
    // SAFETY: the set is this function's own.
    unsafe {
        let mut all: libc::sigset_t = mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, ptr::null_mut());
    }
}

/// The child of fork(2) has a device of its own.
fn forked(_: &[Side; 2]) {
    // SAFETY: the child makes its objects anew.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        refuses(&undriven());
        // SAFETY: it only ends the child.
        unsafe { libc::_exit(HANDLED) };
    }
    std::process::exit(status_of(pid));
}

/// Waits for a child: its status, or 128 and the signal that ended it.
fn status_of(pid: c_int) -> i32 {
    let mut status = 0;
    // SAFETY: it is this process's child.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    match libc::WIFSIGNALED(status) {
        true => 128 + libc::WTERMSIG(status),
        false => libc::WEXITSTATUS(status),
    }
}
