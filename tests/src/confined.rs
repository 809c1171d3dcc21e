//! Children as container runtimes start them: with few capabilities, or under a seccomp filter.
#![allow(unsafe_code)]

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

/// Capabilities of capabilities(7), by their number.
const CAPABILITIES: [(&str, u32); 6] = [
    ("NET_ADMIN", 12),
    ("NET_RAW", 13),
    ("IPC_LOCK", 14),
    ("SYS_ADMIN", 21),
    ("PERFMON", 38),
    ("BPF", 39),
];

/// Starts `command` with these capabilities alone, by their names without `CAP_`. Panics if a name
/// is none of those that the tests use.
pub fn capabilities(command: &mut Command, kept: &[&str]) {
    let number = |name: &&str| CAPABILITIES.iter().find(|known| known.0 == *name).unwrap().1;
    let kept = kept.iter().map(number).fold(0_u64, |bits, cap| bits | 1 << cap);
    let drop = move || {
        for cap in (0..64_u64).filter(|cap| kept >> cap & 1 == 0) {
            // SAFETY: takes numbers alone. The kernel refuses an unknown capability (EINVAL).
            if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, cap, 0, 0, 0) } < 0 {
                let error = io::Error::last_os_error();
                if error.raw_os_error() != Some(libc::EINVAL) {
                    return Err(error);
                }
            }
        }
        Ok(())
    };
    // SAFETY: the function allocates nothing and takes no lock: it is safe after a fork.
    unsafe { command.pre_exec(drop) };
}

/// Starts `command` under a seccomp filter that answers bpf(2) with `EPERM`, as podman's default
/// profile does. Call it before [`capabilities`]: a filter needs `CAP_SYS_ADMIN`.
pub fn without_bpf(command: &mut Command) {
    const fn step(code: u32, skip: u8, k: u32) -> libc::sock_filter {
        libc::sock_filter { code: code as u16, jt: 0, jf: skip, k }
    }
    /// seccomp(2): the number of the call is the first word of `struct seccomp_data`.
    static FILTER: [libc::sock_filter; 4] = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, libc::SYS_bpf as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW),
    ];
    filtered(command, &FILTER);
}

/// Starts `command` under a seccomp filter that refuses sockets of netlink, as systemd's
/// `RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX` does.
pub fn without_netlink(command: &mut Command) {
    const fn step(code: u32, skip: u8, k: u32) -> libc::sock_filter {
        libc::sock_filter { code: code as u16, jt: 0, jf: skip, k }
    }
    /// The lower half of the first argument.
    const FAMILY: u32 = std::mem::offset_of!(libc::seccomp_data, args) as u32
        + if cfg!(target_endian = "big") { 4 } else { 0 };
    static FILTER: [libc::sock_filter; 6] = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 3, libc::SYS_socket as u32),
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, FAMILY),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, libc::AF_NETLINK as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ERRNO | libc::EAFNOSUPPORT as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW),
    ];
    filtered(command, &FILTER);
}

fn filtered(command: &mut Command, filter: &'static [libc::sock_filter]) {
    let install = move || {
        let program =
            libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
        let mode = libc::SECCOMP_MODE_FILTER;
        // SAFETY: the kernel reads the program, which lives until the call returns, and the filter,
        // which is constant.
        match unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    // SAFETY: the function allocates nothing and takes no lock: it is safe after a fork.
    unsafe { command.pre_exec(install) };
}
