//! Network namespaces for tests: nameless, so that nothing is left behind even by a kill -9.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::kernel::rtnl::{RouteKind, RouteQuery, Rtnl};

/// A network namespace; it ends with the last descriptor, socket or process in it.
#[derive(Debug)]
pub(crate) struct NetNs {
    file: File,
}

impl NetNs {
    /// A fresh namespace with loopback up.
    pub(crate) fn new() -> io::Result<Self> {
        needs(&["ip"])?;
        let file = std::thread::spawn(|| {
            // SAFETY: takes no pointer; only this thread, which ends here, changes its namespace.
            if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
                return Err(io::Error::last_os_error());
            }
            File::open("/proc/thread-self/ns/net")
        })
        .join()
        .expect("the thread does not panic")?;
        let ns = Self { file };
        ns.sh("ip link set lo up");
        Ok(ns)
    }

    /// The namespace at a [`path`](Self::path).
    pub(crate) fn at(path: &str) -> io::Result<Self> {
        Ok(Self { file: File::open(path)? })
    }

    /// Runs `f` on a thread of its own inside the namespace; a panic is passed on.
    pub(crate) fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        let work = || {
            // SAFETY: takes no pointer; only this thread, which ends with `f`, changes its
            // namespace.
            let entered = unsafe { libc::setns(self.file.as_fd().as_raw_fd(), libc::CLONE_NEWNET) };
            assert_eq!(entered, 0, "setns: {}", io::Error::last_os_error());
            f()
        };
        on_a_thread(work)
    }

    /// Runs a shell command inside the namespace and returns its output; panics if it fails.
    pub(crate) fn sh(&self, command: &str) -> String {
        let out =
            self.run(|| Command::new("sh").args(["-ec", command]).stdin(Stdio::null()).output());
        let out = out.expect("sh starts");
        let (stdout, stderr) =
            (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        assert!(out.status.success(), "`{command}`: {}: {stdout}{stderr}", out.status);
        stdout.into_owned()
    }

    /// A path that names the namespace to `ip link … netns PATH`, as long as `self` lives.
    pub(crate) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    /// The namespace's inode.
    pub(crate) fn inode(&self) -> u64 {
        self.file.metadata().expect("an open file has metadata").ino()
    }
}

/// Two namespaces joined by a veth pair, `v0` at both ends with 10.9.0.1/24, fd09::1/64 and
/// 10.9.0.2/24, fd09::2/64; their MACs are 02:00:00:00:09:01 and :02.
pub(crate) struct Pair {
    /// 10.9.0.1
    pub(crate) a: NetNs,
    /// 10.9.0.2
    pub(crate) b: NetNs,
}

impl Pair {
    /// Makes the pair, with an MTU of 4200 bytes (path MTU 4096), or says why it cannot.
    pub(crate) fn new() -> io::Result<Self> {
        let (a, b) = (NetNs::new()?, NetNs::new()?);
        a.sh(&format!("ip link add v0 type veth peer name v0 netns {}", b.path()));
        for (ns, host) in [(&a, 1), (&b, 2)] {
            ns.sh(&format!(
                "ip link set v0 address 02:00:00:00:09:0{host} mtu 4200
                 ip address add 10.9.0.{host}/24 dev v0
                 ip address add fd09::{host}/64 dev v0 nodad
                 ip link set v0 up"
            ));
        }
        for (ns, host) in [(&a, 1), (&b, 2)] {
            ns.run(|| has_address(&format!("fd09::{host}")))?;
        }
        Ok(Self { a, b })
    }
}

/// Waits until `done`. Panics if that takes a minute.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < end, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until the kernel accepts packets to an IPv6 address: it adds the local route a moment
/// after the address.
pub(crate) fn has_address(address: &str) -> io::Result<()> {
    let query = RouteQuery {
        destination: address.parse().map_err(io::Error::other)?,
        source: None,
        interface: None,
        tos: 0,
        src_port: 0,
    };
    let mut rtnl = Rtnl::open()?;
    wait_until(address, || rtnl.route(&query).is_ok_and(|route| route.kind == RouteKind::Local));
    Ok(())
}

impl Pair {
    /// As [`new`](Self::new), after the kernel has announced everything about the new link: it
    /// notes a carrier up to a second later.
    pub(crate) fn new_in_calm() -> io::Result<Self> {
        let pair = Self::new()?;
        for ns in [&pair.a, &pair.b] {
            wait_until("the link is up", || ns.sh("ip -o link show v0").contains("state UP"));
        }
        Ok(pair)
    }

    /// As [`new`](Self::new), or an error if some of a namespace's rules cannot be read: in a user
    /// namespace of its own, a process sees nft's but not tcx's.
    pub(crate) fn new_seeing() -> io::Result<Self> {
        needs(&["nft", "tc"])?;
        let pair = Self::new()?;
        let iface = pair.a.run(|| crate::Interface::by_name("v0"))?;
        let unseen = pair.a.run(|| crate::choose::policy::audit(&iface)).unseen;
        if unseen.is_empty() { Ok(pair) } else { Err(io::Error::other(unseen.join("; "))) }
    }
}

/// The descriptors and events of an epoll set, without errors (proc_pid_fdinfo(5)).
pub(crate) fn watched(set: impl AsFd) -> Vec<(i32, i32)> {
    let info = format!("/proc/self/fdinfo/{}", set.as_fd().as_raw_fd());
    let info = std::fs::read_to_string(info).expect("an open descriptor");
    let entry = |line: &str| {
        let mut words = line.strip_prefix("tfd:")?.split_whitespace();
        let fd = words.next()?.parse().ok()?;
        let events = i32::from_str_radix(words.nth(1)?, 16).ok()?;
        Some((fd, events & (libc::EPOLLIN | libc::EPOLLOUT)))
    };
    let mut entries: Vec<_> = info.lines().filter_map(entry).collect();
    entries.sort_unstable();
    entries
}

/// An error if one of these programs is missing.
pub(crate) fn needs(programs: &[&str]) -> io::Result<()> {
    let dirs = ["/usr/sbin", "/usr/bin", "/sbin", "/bin", "/usr/local/sbin", "/usr/local/bin"];
    let found = |program: &str| dirs.iter().any(|d| Path::new(d).join(program).exists());
    match programs.iter().find(|program| !found(program)) {
        None => Ok(()),
        Some(missing) => Err(io::Error::other(format!("needs the program {missing}"))),
    }
}

/// Runs `f` on a thread of its own; a panic is passed on.
fn on_a_thread<R: Send>(f: impl FnOnce() -> R + Send) -> R {
    let mut value = None;
    spawn_and_join(Box::new(|| value = Some(f())));
    value.expect("it has returned")
}

/// Of one type: a copy of the standard library's code for each test takes a minute to compile.
fn spawn_and_join(work: Box<dyn FnOnce() + Send + '_>) {
    std::thread::scope(|scope| match scope.spawn(work).join() {
        Ok(()) => {}
        Err(panic) => std::panic::resume_unwind(panic),
    });
}

/// Runs `f` on a thread that lacks a capability (of capabilities(7)).
pub(crate) fn without_capability<R: Send>(capability: u32, f: impl FnOnce() -> R + Send) -> R {
    without_capabilities(&[capability], f)
}

/// The same with several.
pub(crate) fn without_capabilities<R: Send>(
    capabilities: &[u32],
    f: impl FnOnce() -> R + Send,
) -> R {
    const VERSION_3: u32 = 0x2008_0522;
    let work = || {
        let header = [VERSION_3, 0];
        // Two sets (low and high word) of effective, permitted and inheritable.
        let mut sets = [0_u32; 6];
        // SAFETY: the two arrays have the layout of __user_cap_header_struct and two
        // __user_cap_data_struct, as version 3 wants them; only this thread is changed.
        let changed = unsafe {
            let got = libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr());
            for capability in capabilities {
                sets[(capability / 32 * 3) as usize] &= !(1 << (capability % 32));
            }
            got | libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr())
        };
        assert_eq!(changed, 0, "capset: {}", io::Error::last_os_error());
        f()
    };
    on_a_thread(work)
}

/// Runs `f` on a thread of another user, which has no capability then. Error: this one may not
/// become another user.
pub(crate) fn as_user<R: Send>(uid: u32, f: impl FnOnce() -> R + Send) -> io::Result<R> {
    let work = || {
        // SAFETY: a system call of numbers alone. Unlike the library's function it changes this
        // thread only.
        let changed = unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) };
        // The process would be one of which others may not read /proc.
        // SAFETY: numbers alone.
        unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0) };
        if changed == 0 { Ok(f()) } else { Err(io::Error::other("needs root")) }
    };
    on_a_thread(work)
}

/// Makes the process that `command` starts one of the user and group 65534, without capabilities,
/// which can get none.
pub(crate) fn drop_privileges(command: &mut Command) {
    use std::os::unix::process::CommandExt as _;
    /// The user and the group `nobody` of most systems.
    const NOBODY: u32 = 65534;
    let act = || {
        let checked = |result: libc::c_long| {
            if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
        };
        // SAFETY: system calls of numbers alone. The kernel refuses capabilities that it does not
        // have with EINVAL.
        unsafe {
            let drop = |cap: u64| libc::prctl(libc::PR_CAPBSET_DROP, cap, 0, 0, 0);
            for capability in (0..64_u64).take_while(|cap| drop(*cap) == 0) {
                let _ = capability;
            }
            checked(libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<u32>()))?;
            checked(libc::syscall(libc::SYS_setresgid, NOBODY, NOBODY, NOBODY))?;
            checked(libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY))?;
            checked(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0).into())
        }
    };
    // SAFETY: the function allocates nothing and takes no lock: it is safe after a fork.
    unsafe { command.pre_exec(act) };
}

/// Lets this process open `room` more descriptors, until the result is dropped.
pub(crate) fn limit_descriptors(room: usize) -> impl Drop {
    /// The previous limit.
    struct Limit(libc::rlimit);
    impl Drop for Limit {
        fn drop(&mut self) {
            // SAFETY: setrlimit reads one `rlimit`.
            let set = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const self.0) };
            assert_eq!(set, 0, "setrlimit: {}", io::Error::last_os_error());
        }
    }
    let mut limit = Limit(libc::rlimit { rlim_cur: 0, rlim_max: 0 });
    // SAFETY: getrlimit writes one `rlimit`.
    let got = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit.0) };
    assert_eq!(got, 0, "getrlimit: {}", io::Error::last_os_error());
    // Descriptors below the limit are available; the kernel takes the lowest free one.
    let is_free = |fd: &i32| !Path::new(&format!("/proc/self/fd/{fd}")).exists();
    let end = (0..).filter(is_free).nth(room).expect("there are many");
    let less = libc::rlimit { rlim_cur: end as libc::rlim_t, ..limit.0 };
    // SAFETY: setrlimit reads one `rlimit`.
    let set = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const less) };
    assert_eq!(set, 0, "setrlimit: {}", io::Error::last_os_error());
    limit
}

/// From now on the kernel knows a socket option no longer when this thread sets it.
pub(crate) fn forget_option(level: i32, option: i32) {
    refuse(libc::SYS_setsockopt, &[(1, level), (2, option)], libc::ENOPROTOOPT);
}

/// From now on this thread makes no socket of an address family, as under systemd's
/// `RestrictAddressFamilies`.
pub(crate) fn forbid_family(family: i32) {
    refuse(libc::SYS_socket, &[(0, family)], libc::EAFNOSUPPORT);
}

/// From now on this thread's calls of this number fail, as under a runtime's seccomp profile.
pub(crate) fn forbid_call(number: libc::c_long) {
    refuse(number, &[], libc::EPERM);
}

/// From now on this thread's calls `number` fail where the arguments of these numbers have these
/// values in their lower halves.
fn refuse(number: libc::c_long, arguments: &[(u32, i32)], errno: i32) {
    const NUMBER: u32 = std::mem::offset_of!(libc::seccomp_data, nr) as u32;
    const ARGUMENTS: u32 = std::mem::offset_of!(libc::seccomp_data, args) as u32
        + if cfg!(target_endian = "big") { 4 } else { 0 };
    let act = |code: u32, jf, k| libc::sock_filter { code: code as u16, jt: 0, jf, k };
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let ret = libc::BPF_RET | libc::BPF_K;
    let values = arguments.iter().map(|(at, value)| (ARGUMENTS + 8 * at, *value as u32));
    let checks: Vec<_> = [(NUMBER, number as u32)].into_iter().chain(values).collect();
    let mut filter = Vec::new();
    for (index, (at, value)) in checks.iter().enumerate() {
        // Another value goes on at the last line.
        let behind = 2 * (checks.len() - index) - 1;
        filter.extend([act(load, 0, *at), act(equal, behind as u8, *value)]);
    }
    filter.push(act(ret, 0, libc::SECCOMP_RET_ERRNO | errno as u32));
    filter.push(act(ret, 0, libc::SECCOMP_RET_ALLOW));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the kernel reads the program and its filter, which are there until the call returns.
    let set = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            | libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
    };
    assert_eq!(set, 0, "prctl: {}", io::Error::last_os_error());
}

/// Runs a port's chores, then waits until they are due again, at most `ms_max` milliseconds.
pub(crate) fn look_after(port: &mut impl crate::port::contract::Port, ms_max: u64) {
    let again = port.maintain().unwrap_or(Duration::MAX);
    std::thread::sleep(again.min(Duration::from_millis(ms_max)));
}

/// Whether the port's descriptor is readable now for another reason than announcements, which it
/// reads.
pub(crate) fn has_arrivals(port: &mut impl crate::port::contract::Port) -> bool {
    (0..3).all(|_| {
        port.maintain();
        crate::kernel::descriptors::wait_readable(port.wait_fd(), 0).expect("poll")
    })
}

/// Waits until [`has_arrivals`]; `false` if nothing arrives.
pub(crate) fn arrives(port: &mut impl crate::port::contract::Port) -> bool {
    let end = Instant::now() + Duration::from_secs(20);
    while !has_arrivals(port) {
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Reports on the real stderr that a test did not run.
pub(crate) fn skip(name: &str, reason: &dyn std::fmt::Display) {
    use std::io::Write;
    let name = name.trim_start_matches("rocinante_netdev::").trim_start_matches("testing::");
    let name = name.trim_end_matches("::{{closure}}");
    let line = format!("SKIPPED {name}: {reason}\n");
    // The test harness captures the print macros, not a write to descriptor 2.
    if let Ok(fd) = io::stderr().as_fd().try_clone_to_owned() {
        let _ = File::from(fd).write_all(line.as_bytes());
    }
}

/// The value, or a `SKIPPED` line and a return from the calling test. It has the name of the test,
/// or another one.
macro_rules! or_skip {
    ($made:expr) => {
        $crate::testing::testns::or_skip!(std::any::type_name_of_val(&|| ()), $made)
    };
    ($name:expr, $made:expr) => {
        match $made {
            Ok(made) => made,
            Err(e) => return $crate::testing::testns::skip($name, &e),
        }
    };
}
pub(crate) use or_skip;

#[test]
fn namespaces_are_separate() {
    let pair = or_skip!(Pair::new());
    assert_ne!(pair.a.inode(), pair.b.inode());
    assert!(pair.a.sh("ip -br address show v0").contains("10.9.0.1/24"));
    assert!(pair.b.sh("ip -br address show v0").contains("10.9.0.2/24"));
}
