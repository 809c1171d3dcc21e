//! Ranges of memory: registered ones, those that a request names, and those that were checked.

use core::marker::PhantomData;

use super::access::{Access, PdId};
use crate::types::Key;

/// A registered range of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Its protection domain.
    pub pd: PdId,
    /// The address by which work requests and peers name its first byte: 0 if it is zero-based.
    pub start: u64,
    /// Its length in bytes.
    pub len: u64,
    /// Where its first byte is for [`Memory`](super::Memory): an address in the process, an offset
    /// in an arena.
    pub host: u64,
    /// The permitted accesses.
    pub access: Access,
}

/// Right to write: see [`Checked`].
#[derive(Debug, Clone, Copy)]
pub enum Write {}

/// Right to read: see [`Checked`].
#[derive(Debug, Clone, Copy)]
pub enum Read {}

/// Right to a read-modify-write of eight aligned bytes: see [`Checked`].
#[derive(Debug, Clone, Copy)]
pub enum Atomic {}

/// A range of memory that the region table admitted, for one kind of access. Only the
/// region table makes one.
#[derive(Debug, Clone, Copy)]
pub struct Checked<Right> {
    pub(super) host: u64,
    pub(super) len: u32,
    pub(super) right: PhantomData<Right>,
}

impl<Right> Checked<Right> {
    /// Where it begins, in the coordinates of [`Region::host`].
    #[must_use]
    pub const fn host(&self) -> u64 {
        self.host
    }

    /// Its length in bytes.
    #[must_use]
    pub const fn len(&self) -> u32 {
        self.len
    }

    /// Whether it is empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) const fn with<Other>(self) -> Checked<Other> {
        Checked { host: self.host, len: self.len, right: PhantomData }
    }
}

/// A scatter-gather element: a range of a registered region (`struct ibv_sge`, with the same
/// layout).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sge {
    /// Address of the first byte.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// Key of the region.
    pub lkey: Key,
}

/// A read-modify-write of eight bytes in the byte order of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AtomicOp {
    /// Store `swap` if the value equals `compare`.
    CompareSwap {
        /// The value to compare with.
        compare: u64,
        /// The value to store.
        swap: u64,
    },
    /// Add, wrapping.
    FetchAdd {
        /// The value to add.
        add: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_empty_if_it_has_no_bytes() {
        let checked = |len| Checked::<Read> { host: 1, len, right: PhantomData };
        assert_eq!([0, 1].map(|len| checked(len).is_empty()), [true, false]);
    }
}
