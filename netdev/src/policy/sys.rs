//! The two system calls of the audit that no library wraps.
#![allow(unsafe_code)]

use std::io;
use std::mem::size_of;
use std::os::fd::AsRawFd;

const SO_GET_INFO: i32 = 64; // IPT_SO_GET_INFO, IP6T_SO_GET_INFO
const SO_GET_ENTRIES: i32 = 65;
const NAME_LEN: usize = 32;
/// `struct ipt_get_entries`: name, size, and padding before the entries.
const GET_ENTRIES_LEN: usize = 40;
/// The largest table that is read, in bytes.
const ENTRIES_MAX: u32 = 1 << 20;

/// `struct ipt_getinfo` and `struct ip6t_getinfo`.
#[derive(Debug, Clone, Default)]
#[repr(C)]
pub(super) struct TableInfo {
    name: [u8; NAME_LEN],
    /// A bit for each of the five hooks that the table is on.
    pub(super) valid_hooks: u32,
    hook_entry: [u32; 5],
    /// Offset of each hook's policy among the entries.
    pub(super) underflow: [u32; 5],
    /// Rules, policies, heads of chains and the end mark.
    pub(super) num_entries: u32,
    /// Bytes of all entries.
    pub(super) size: u32,
}

/// The layout of a legacy table.
pub(super) fn table_info(socket: &impl AsRawFd, level: i32, table: &str) -> io::Result<TableInfo> {
    let mut info = TableInfo { name: name(table)?, ..TableInfo::default() };
    let mut len = size_of::<TableInfo>() as libc::socklen_t;
    // SAFETY: the kernel reads and writes at most `len` bytes of `info`, which is made of integers.
    let result = unsafe {
        let info = (&raw mut info).cast();
        libc::getsockopt(socket.as_raw_fd(), level, SO_GET_INFO, info, &raw mut len)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(info) }
}

/// The entries of a legacy table, `size` bytes.
pub(super) fn table_entries(
    socket: &impl AsRawFd,
    level: i32,
    table: &str,
    size: u32,
) -> io::Result<Vec<u8>> {
    if size > ENTRIES_MAX {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    let mut bytes = vec![0; GET_ENTRIES_LEN + size as usize];
    bytes[..NAME_LEN].copy_from_slice(&name(table)?);
    bytes[NAME_LEN..NAME_LEN + 4].copy_from_slice(&size.to_ne_bytes());
    let mut len = bytes.len() as libc::socklen_t;
    // SAFETY: the kernel reads and writes at most `len` bytes of `bytes`.
    let result = unsafe {
        let bytes = bytes.as_mut_ptr().cast();
        libc::getsockopt(socket.as_raw_fd(), level, SO_GET_ENTRIES, bytes, &raw mut len)
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    bytes.drain(..GET_ENTRIES_LEN);
    Ok(bytes)
}

fn name(table: &str) -> io::Result<[u8; NAME_LEN]> {
    let mut name = [0; NAME_LEN];
    match name.get_mut(..table.len()) {
        Some(start) if table.len() < NAME_LEN => start.copy_from_slice(table.as_bytes()),
        _ => return Err(io::ErrorKind::InvalidInput.into()),
    }
    Ok(name)
}

const BPF_PROG_QUERY: libc::c_long = 16;
const BPF_TCX_INGRESS: u32 = 46;
const BPF_TCX_EGRESS: u32 = 47;

/// The `query` member of `union bpf_attr`.
#[derive(Default)]
#[repr(C)]
struct ProgramQuery {
    target_ifindex: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    prog_ids: u64,
    prog_cnt: u32,
    pad: u32,
    prog_attach_flags: u64,
    link_ids: u64,
    link_attach_flags: u64,
    revision: u64,
}

/// The number of BPF programs on an interface's tcx hook; also 0 if the kernel has no tcx (before
/// 6.6).
pub(super) fn tcx_programs(interface: u32, ingress: bool) -> io::Result<u32> {
    let attach_type = if ingress { BPF_TCX_INGRESS } else { BPF_TCX_EGRESS };
    let mut query =
        ProgramQuery { target_ifindex: interface, attach_type, ..ProgramQuery::default() };
    // SAFETY: the kernel reads and writes at most the given number of bytes of `query`; the
    // pointers in it are null, with a count of 0.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, BPF_PROG_QUERY, &raw mut query, size_of::<ProgramQuery>())
    };
    if result == 0 {
        return Ok(query.prog_cnt);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EINVAL | libc::ENOSYS) => Ok(0),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{FromRawFd, OwnedFd};
    use std::time::{Duration, Instant};

    use super::*;
    use crate::iface::Interface;
    use crate::testns::{Pair, or_skip};

    /// Calls bpf(2) with the given words (of 4 bytes) as attributes, for a descriptor.
    fn bpf(command: libc::c_long, words: &[u32]) -> io::Result<OwnedFd> {
        // SAFETY: the kernel reads the given number of bytes; the addresses among them are those of
        // constants. A non-negative result is a descriptor without another owner.
        unsafe {
            let fd = libc::syscall(libc::SYS_bpf, command, words.as_ptr(), size_of_val(words));
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(OwnedFd::from_raw_fd(fd as i32))
        }
    }

    /// A classifier that passes everything (`TCX_NEXT`), attached while the descriptors live.
    fn attach_tcx(interface: u32, attach_type: u32) -> io::Result<(OwnedFd, OwnedFd)> {
        const PROG_LOAD: libc::c_long = 5;
        const LINK_CREATE: libc::c_long = 28;
        const SCHED_CLS: u32 = 3;
        // r0 = -1; exit
        static CODE: [u64; 2] = [0xffff_ffff_0000_00b7, 0x95];
        static LICENSE: &[u8] = b"GPL\0";
        let split = |address: u64| [address as u32, (address >> 32) as u32];
        let [code, code_high] = split(CODE.as_ptr() as u64);
        let [license, license_high] = split(LICENSE.as_ptr() as u64);
        let words = [SCHED_CLS, CODE.len() as u32, code, code_high, license, license_high];
        let program = bpf(PROG_LOAD, &words)?;
        let link = bpf(LINK_CREATE, &[program.as_raw_fd() as u32, interface, attach_type, 0])?;
        Ok((program, link))
    }

    #[test]
    fn programs_on_tcx_are_counted() {
        let pair = or_skip!("policy::programs_on_tcx_are_counted", Pair::new_seeing());
        pair.a.run(|| {
            let iface = Interface::by_name("v0").expect("v0");
            for (ingress, attach_type) in [(true, BPF_TCX_INGRESS), (false, BPF_TCX_EGRESS)] {
                let count = || tcx_programs(iface.index, ingress).expect("readable");
                assert_eq!(count(), 0);
                let attached = attach_tcx(iface.index, attach_type);
                let attached = or_skip!("policy::programs_on_tcx_are_counted", attached);
                assert_eq!(count(), 1);
                let rules = crate::policy::audit(&iface).rules;
                assert_eq!(rules.len(), 1, "{rules:?}");
                assert_eq!(rules[0].packet_bypasses, ingress, "egress binds a packet socket");
                drop(attached);
                // A child that another thread is just forking holds the descriptors too, until it
                // executes a program.
                let deadline = Instant::now() + Duration::from_secs(10);
                while count() > 0 {
                    assert!(Instant::now() < deadline, "it stays attached");
                    std::thread::yield_now();
                }
            }
        });
    }
}
