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

/// A range of a peer's memory, with the key that a program needs to write to it and to read it.
///
/// A peer announces a whole region by it; [`slice`](Self::slice) and [`get`](Self::get) name parts.
/// The peer's device checks each access again, against the region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RemoteSlice {
    /// Address of its first byte.
    pub address: u64,
    /// Its length in bytes.
    pub len: u64,
    /// The peer's key.
    pub rkey: Key,
}

impl RemoteSlice {
    /// `len` bytes from `offset` on, or `None` if they are not inside.
    #[must_use]
    #[inline]
    pub const fn get(&self, offset: u64, len: u64) -> Option<Self> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => {
                Some(Self { address: self.address.wrapping_add(offset), len, rkey: self.rkey })
            }
            _ => None,
        }
    }

    /// `len` bytes from `offset` on. For offsets that a peer sent, take [`get`](Self::get).
    ///
    /// # Panics
    /// If they are not inside.
    #[must_use]
    #[inline]
    #[track_caller]
    pub const fn slice(&self, offset: u64, len: u64) -> Self {
        self.get(offset, len).expect("the part is inside the peer's range")
    }

    /// Its first eight bytes.
    #[inline]
    pub(crate) const fn word(&self) -> Self {
        self.slice(0, 8)
    }

    /// The form for the private data of a connection: address, length and key, in network byte
    /// order.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; 20] {
        let mut bytes = [0; 20];
        bytes[..8].copy_from_slice(&self.address.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.len.to_be_bytes());
        bytes[16..].copy_from_slice(&self.rkey.0.to_be_bytes());
        bytes
    }

    /// Parses the output of [`to_bytes`](Self::to_bytes) at the beginning of a peer's private data;
    /// `None` if that is shorter.
    #[must_use]
    pub fn from_bytes(private: &[u8]) -> Option<Self> {
        let (address, rest) = private.split_first_chunk()?;
        let (len, rest) = rest.split_first_chunk()?;
        Some(Self {
            address: u64::from_be_bytes(*address),
            len: u64::from_be_bytes(*len),
            rkey: Key(u32::from_be_bytes(*rest.first_chunk()?)),
        })
    }
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
    fn a_part_of_a_peers_range_is_inside() {
        let whole = RemoteSlice { address: u64::MAX - 99, len: 100, rkey: Key(5) };
        let part = |offset, len| whole.get(offset, len).map(|part| (part.address, part.len));
        assert_eq!(part(0, 100), Some((whole.address, 100)));
        assert_eq!(part(10, 90), Some((whole.address + 10, 90)));
        assert_eq!(part(99, 1), Some((u64::MAX, 1)));
        for (offset, len) in [(0, 101), (1, 100), (101, 0), (u64::MAX, 1), (1, u64::MAX)] {
            assert_eq!(part(offset, len), None, "{len} at {offset}");
        }
        assert_eq!(whole.slice(10, 20).slice(5, 15), whole.slice(15, 15));
        assert_eq!(whole.slice(10, 20).get(5, 16), None);
        assert_eq!(RemoteSlice::from_bytes(&whole.to_bytes()), Some(whole));
        assert_eq!(RemoteSlice::from_bytes(&whole.to_bytes()[..19]), None);
    }

    #[test]
    fn a_range_is_empty_if_it_has_no_bytes() {
        let checked = |len| Checked::<Read> { host: 1, len, right: PhantomData };
        assert_eq!([0, 1].map(|len| checked(len).is_empty()), [true, false]);
    }
}
