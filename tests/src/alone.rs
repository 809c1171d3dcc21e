//! Tests that count the objects that their process holds. Each runs in a process of its own.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rocinante::Context;
use rocinante::stats::Resources;

use crate::harness::wait_until;
use rocinante_lab::{ChildGuard, exit_with_parent};

/// Set in a process that runs one test only.
const ALONE: &str = "ROCINANTE_TEST_ALONE";

/// Runs `work` in a process of its own: this program again, with only the test `test`. Returns once
/// that process has ended, and checks that `work` leaks no descriptors. Panics if `work` fails in
/// that process, or the process does not end within `limit`.
pub fn alone(test: &str, limit: Duration, work: impl FnOnce() + Send) {
    if std::env::var_os(ALONE).is_some() {
        exit_with_parent();
        let before = descriptors();
        // A thread that polls has descriptors of its own, which it closes at its end.
        std::thread::scope(|scope| {
            if let Err(panic) = scope.spawn(work).join() {
                std::panic::resume_unwind(panic);
            }
        });
        // A thread that has ended closes its descriptors a moment later.
        return wait_until("the same number of descriptors as before", || descriptors() == before);
    }
    let mut command = myself(test);
    // mallopt(3): freed memory goes back to the kernel at once, so resident memory is held memory.
    command.env("MALLOC_ARENA_MAX", "1").env("MALLOC_MMAP_THRESHOLD_", "65536");
    command.env("MALLOC_TRIM_THRESHOLD_", "65536");
    // Both processes count the tests that they run: keep the child's count off our standard output.
    command.stdout(std::io::stderr());
    let mut child = ChildGuard::spawn(command.env(ALONE, "1")).unwrap();
    let status = child.wait(limit).unwrap();
    assert!(status.success(), "{test}, alone: {status}");
}

/// Tests of a backend, each in a process of its own with a time limit in seconds. Each test is
/// `name: Backend work`; `work` gets the backend.
#[macro_export]
macro_rules! alone_on_each_backend {
    ($seconds:literal: $( $name:ident: $backend:ident $work:expr; )*) => {$(
        #[test]
        fn $name() {
            $crate::require!($crate::need::backend($crate::harness::Backend::$backend));
            let limit = std::time::Duration::from_secs($seconds);
            $crate::alone::alone($crate::test_name!(), limit, || $work($crate::harness::Backend::$backend));
        }
    )*};
}

/// The command that runs one test of this program, named as [`test_name!`](crate::test_name) does.
#[must_use]
pub fn myself(test: &str) -> Command {
    let (_program, test) = test.split_once("::").expect("the program, and the path in it");
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).stdin(Stdio::null());
    command
}

/// The kernel's objects that a process holds, and those that its devices hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// Open file descriptors.
    pub descriptors: usize,
    /// The resources of each device.
    pub resources: Vec<Resources>,
}

impl Held {
    /// The objects that the whole process and these software devices hold now. Panics if one of
    /// `devices` is a device of the kernel.
    #[must_use]
    pub fn now(devices: &[&Context]) -> Self {
        let resources = devices.iter().map(|ctx| ctx.resources().expect("in software"));
        Self { descriptors: descriptors(), resources: resources.collect() }
    }

    /// Waits until the process and `devices` hold this again. Panics if they do not `within`.
    pub fn is_again(&self, devices: &[&Context], within: Duration) {
        let deadline = Instant::now() + within;
        while Self::now(devices) != *self {
            let now = Self::now(devices);
            assert!(Instant::now() < deadline, "left behind: {now:?}, {self:?} before");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The resources of a device of which only its [`Side`](crate::harness::Side) has objects: a
/// protection domain and a completion queue.
#[must_use]
pub fn at_rest() -> Resources {
    let mut resources = Resources::default();
    (resources.pds, resources.cqs) = (1, 1);
    resources
}

/// Open file descriptors of this process. The count always includes that of `/proc/self/fd` itself.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Resident memory of this process, bytes. Panics if `/proc` does not report it.
#[must_use]
pub fn resident_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    1024 * line.trim().trim_end_matches("kB").trim().parse::<usize>().unwrap()
}
