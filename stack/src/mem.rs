//! Memory regions and windows: keys, permissions, and the proof that an access was checked.
//!
//! The engine never touches user memory. It asks the [`RegionTable`] whether a key admits an
//! access, gets a [`Checked`] that nothing else can make, and hands that to its caller's
//! [`Memory`].

mod flush;
mod table;
mod window;

use core::fmt;
use core::marker::PhantomData;

pub use self::flush::{FlushLevel, Placement};
pub use self::table::RegionTable;
pub use self::window::{Bind, MwType, WindowError};
use crate::types::{Key, Qpn};

/// A protection domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct PdId(pub u32);

/// The queue pair for which a peer accesses memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Accessor {
    /// The protection domain of the queue pair.
    pub pd: PdId,
    /// Its number: a window of type 2 admits one queue pair only.
    pub qpn: Qpn,
}

/// What a region, a window or a queue pair permits (`enum ibv_access_flags`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Access(u16);

impl Access {
    /// Only local reads.
    pub const NONE: Self = Self(0);
    /// `IBV_ACCESS_LOCAL_WRITE`: receives, READ responses and atomic results may be placed.
    pub const LOCAL_WRITE: Self = Self(1);
    /// `IBV_ACCESS_REMOTE_WRITE`.
    pub const REMOTE_WRITE: Self = Self(2);
    /// `IBV_ACCESS_REMOTE_READ`.
    pub const REMOTE_READ: Self = Self(4);
    /// `IBV_ACCESS_REMOTE_ATOMIC`.
    pub const REMOTE_ATOMIC: Self = Self(8);
    /// `IBV_ACCESS_MW_BIND`: windows may be bound to the region.
    pub const MW_BIND: Self = Self(16);
    /// `IBV_ACCESS_ZERO_BASED`: work requests and peers address the region or window by offsets
    /// from its first byte.
    pub const ZERO_BASED: Self = Self(32);
    /// `IBV_ACCESS_FLUSH_GLOBAL`: a peer may ask that the bytes it wrote become visible to all.
    pub const FLUSH_GLOBAL: Self = Self(1 << 8);
    /// `IBV_ACCESS_FLUSH_PERSISTENT`: a peer may ask that the bytes it wrote survive a loss of
    /// power. Queue pairs may permit it. A region may only if its memory is persistent; the
    /// software device knows of no such memory.
    pub const FLUSH_PERSISTENT: Self = Self(1 << 9);
    /// All that READ, WRITE and atomics need; FLUSH is permitted by its own flags.
    pub const ALL: Self = Self(15);
    /// All flags that this crate knows.
    pub const KNOWN: Self = Self(0b11_0011_1111);
    /// Use by a local key: a region permits it, a window does not. The consumer cannot set this
    /// flag.
    const LOCAL: Self = Self(1 << 15);

    /// The bits, as in `enum ibv_access_flags`.
    #[must_use]
    pub const fn bits(self) -> u32 {
        (self.0 & Self::KNOWN.0) as u32
    }

    /// From the bits of `enum ibv_access_flags`; `None` if an unknown bit is set.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Option<Self> {
        if bits & !Self::KNOWN.bits() == 0 {
            #[allow(clippy::cast_possible_truncation)]
            Some(Self(bits as u16))
        } else {
            None
        }
    }

    /// Both together.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether everything in `other` is permitted.
    #[must_use]
    pub const fn admits(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// These flags without those in `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether remote writing or atomics are permitted without local writing, which verbs forbid
    /// (`ibv_reg_mr(3)`).
    #[must_use]
    pub const fn is_contradictory(self) -> bool {
        self.0 & (Self::REMOTE_WRITE.0 | Self::REMOTE_ATOMIC.0) != 0
            && self.0 & Self::LOCAL_WRITE.0 == 0
    }
}

impl core::ops::BitOr for Access {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        self.with(other)
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [
            (Self::LOCAL_WRITE, "LOCAL_WRITE"),
            (Self::REMOTE_WRITE, "REMOTE_WRITE"),
            (Self::REMOTE_READ, "REMOTE_READ"),
            (Self::REMOTE_ATOMIC, "REMOTE_ATOMIC"),
            (Self::MW_BIND, "MW_BIND"),
            (Self::ZERO_BASED, "ZERO_BASED"),
        ];
        let mut any = false;
        for (flag, name) in names {
            if self.admits(flag) {
                write!(f, "{}{name}", if any { " | " } else { "" })?;
                any = true;
            }
        }
        if any { Ok(()) } else { f.write_str("NONE") }
    }
}

/// A registered range of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Its protection domain.
    pub pd: PdId,
    /// The address by which work requests and peers name its first byte: 0 if it is zero-based.
    pub start: u64,
    /// Its length in bytes.
    pub len: u64,
    /// Where its first byte is for [`Memory`]: an address in the process, an offset in an arena.
    pub host: u64,
    /// The permitted accesses.
    pub access: Access,
}

/// Why an access was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AccessError {
    /// No region or window has this key (any more).
    Key,
    /// The region belongs to another protection domain.
    Pd,
    /// The window is bound for another queue pair.
    Qp,
    /// The range is not inside the region, or wraps around.
    Range,
    /// The region does not permit it.
    Permission,
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

/// A range of memory that the region table admitted, for one kind of access. Only this module makes
/// one.
#[derive(Debug, Clone, Copy)]
pub struct Checked<Right> {
    host: u64,
    len: u32,
    right: PhantomData<Right>,
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

    const fn with<Other>(self) -> Checked<Other> {
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

/// User memory, provided by the engine's caller: a vector in the simulator, the process itself in
/// the verbs API.
pub trait Memory {
    /// The registered regions and windows.
    fn regions(&self) -> &RegionTable;

    /// The same, for work requests that bind and invalidate windows.
    fn regions_mut(&mut self) -> &mut RegionTable;

    /// Copies `src` to `dst` (as long as `src`), in ascending order of addresses. An aligned word
    /// is written whole. A thread that sees the last byte sees all bytes.
    fn place(&mut self, dst: Checked<Write>, src: &[u8]);

    /// Copies `src` to `dst` (as long as `src`).
    fn fetch(&self, src: Checked<Read>, dst: &mut [u8]);

    /// Copies like [`fetch`](Self::fetch), and returns the CRC-32 of the copied bytes (that of
    /// Ethernet and zlib) if it was nearly free: if the processor copies and sums in one pass.
    #[inline]
    fn fetch_summed(&self, src: Checked<Read>, dst: &mut [u8]) -> Option<u32> {
        self.fetch(src, dst);
        None
    }

    /// Performs an atomic, against local threads too, and returns the value found.
    fn atomic(&mut self, at: Checked<Atomic>, op: AtomicOp) -> u64;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_that_are_known_are_taken_and_others_refused() {
        for bit in 0..32 {
            let known = Access::KNOWN.bits() & 1 << bit != 0;
            let access = Access::from_bits(1 << bit);
            assert_eq!(access.map(Access::bits), known.then_some(1 << bit), "bit {bit}");
            assert_eq!(Access::from_bits(1 << bit | 1).is_some(), known, "bit {bit} and another");
        }
        assert_eq!(Access::from_bits(0).map(Access::bits), Some(0));
    }

    #[test]
    fn a_range_is_empty_if_it_has_no_bytes() {
        let checked = |len| Checked::<Read> { host: 1, len, right: PhantomData };
        assert_eq!([0, 1].map(|len| checked(len).is_empty()), [true, false]);
    }
}
