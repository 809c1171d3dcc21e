//! Rights to access memory.

use core::fmt;

use crate::types::Qpn;

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

/// Permissions of a region, a window or a queue pair (`enum ibv_access_flags`).
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
    pub(super) const LOCAL: Self = Self(1 << 15);

    /// The bits, as in `enum ibv_access_flags`.
    #[must_use]
    pub const fn bits(self) -> u32 {
        (self.0 & Self::KNOWN.0) as u32
    }

    /// From the bits of `enum ibv_access_flags`; `None` if an unknown bit is set.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Option<Self> {
        if bits & !Self::KNOWN.bits() == 0 { Some(Self(bits as u16)) } else { None }
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
            (Self::FLUSH_GLOBAL, "FLUSH_GLOBAL"),
            (Self::FLUSH_PERSISTENT, "FLUSH_PERSISTENT"),
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
    /// The memory is not there, or does not permit it: the program unmapped or protected it while
    /// it was registered, it is behind the end of its file, or the system has none left.
    Memory,
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
    fn each_flag_has_a_name_of_its_own() {
        let flags = (0..32).filter_map(|bit| Access::from_bits(1 << bit));
        let names: Vec<String> = flags.map(|flag| format!("{flag:?}")).collect();
        assert_eq!(names.len(), Access::KNOWN.bits().count_ones() as usize);
        assert!(!names.contains(&format!("{:?}", Access::NONE)), "{names:?}");
        assert_eq!(format!("{:?}", Access::KNOWN), names.join(" | "));
    }
}
