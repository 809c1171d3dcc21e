//! The options of sockets with which legacy iptables are read.
#![allow(unsafe_code)]

use std::io;
use std::mem::size_of;
use std::os::fd::AsRawFd;

use crate::kernel::call;
use crate::tuning::reading::ENTRIES_MAX;

const SO_GET_INFO: i32 = 64; // IPT_SO_GET_INFO, IP6T_SO_GET_INFO
const SO_GET_ENTRIES: i32 = 65;
const NAME_LEN: usize = 32;
/// `struct ipt_get_entries`: name, size, and padding before the entries.
const GET_ENTRIES_LEN: usize = 40;

/// `struct ipt_getinfo` and `struct ip6t_getinfo`.
#[derive(Debug, Clone, Default)]
#[repr(C)]
pub(super) struct TableInfo {
    name: [u8; NAME_LEN],
    /// A bit for each of the five hooks that the table is on.
    pub(super) valid_hooks: u32,
    /// Offset of each hook's first rule, or its policy.
    pub(super) hook_entry: [u32; 5],
    /// Offset of each hook's policy among the entries.
    pub(super) underflow: [u32; 5],
    num_entries: u32,
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
        call::getsockopt(socket.as_raw_fd(), level, SO_GET_INFO, info, &raw mut len)
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
        call::getsockopt(socket.as_raw_fd(), level, SO_GET_ENTRIES, bytes, &raw mut len)
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
