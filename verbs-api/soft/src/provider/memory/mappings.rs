//! The kernel's list of the mappings of a range.
#![allow(unsafe_code)]

use std::fs::File;

use rustix::io::Errno;
use rustix::ioctl::{self, opcode};

/// `struct procmap_query` of linux/fs.h, which comes back with the mapping.
#[repr(C)]
#[derive(Debug, Default)]
struct Query {
    size: u64,
    flags: u64,
    address: u64,
    start: u64,
    end: u64,
    /// [`READABLE`] and [`WRITABLE`].
    permits: u64,
    /// Of the page size, the file and the name.
    rest: [u64; 7],
}

const READABLE: u64 = 1;
const WRITABLE: u64 = 2;

/// `PROCMAP_QUERY` of linux/fs.h.
const PROCMAP_QUERY: ioctl::Opcode = opcode::read_write::<Query>(b'f', 17);

/// Whether the range, which does not wrap around, is mapped as a whole, and every mapping of it may
/// be read, and written if `writable`. A system call for each mapping. `None` where the kernel does
/// not say: Linux before 6.11, and a process without /proc.
pub(super) fn permit(start: u64, len: u64, writable: bool) -> Option<bool> {
    are_there(start, len, READABLE | if writable { WRITABLE } else { 0 })
}

/// The same for mappings of any permission.
pub(super) fn cover(start: u64, len: u64) -> Option<bool> {
    are_there(start, len, 0)
}

fn are_there(start: u64, len: u64, wanted: u64) -> Option<bool> {
    let maps = File::open("/proc/self/maps").ok()?;
    let mut at = start;
    while at < start + len {
        let mut query = Query { size: size_of::<Query>() as u64, address: at, ..Query::default() };
        // SAFETY: the kernel reads and writes the structure, as long as `size` says.
        let update = unsafe { ioctl::Updater::<PROCMAP_QUERY, Query>::new(&mut query) };
        // SAFETY: the opcode is of that structure, and files that do not know it refuse it.
        match unsafe { ioctl::ioctl(&maps, update) } {
            Ok(()) if query.permits & wanted == wanted && query.end > at => at = query.end,
            Ok(()) | Err(Errno::NOENT) => return Some(false),
            Err(_) => return None,
        }
    }
    Some(true)
}

/// Whether the kernel says it.
#[cfg(test)]
pub(super) fn are_known() -> bool {
    permit(0, 1, false).is_some()
}
