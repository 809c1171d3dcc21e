//! The integers of the wire and of the verbs, each with its own type.

use core::fmt;

/// Virtual or real time, in nanoseconds since an arbitrary origin of the caller's.
///
/// The engine has no clock: every entry point takes the time as an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time(pub u64);

impl Time {
    /// A time that never comes.
    pub const NEVER: Self = Self(u64::MAX);

    /// The time `nanoseconds` later, saturating.
    #[must_use]
    #[inline]
    pub const fn after(self, nanoseconds: u64) -> Self {
        Self(self.0.saturating_add(nanoseconds))
    }

    /// Nanoseconds from `earlier` to `self`; 0 if `earlier` is later.
    #[must_use]
    #[inline]
    pub const fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// The earlier of two optional times.
    #[must_use]
    #[inline]
    pub fn earlier(one: Option<Self>, other: Option<Self>) -> Option<Self> {
        match (one, other) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, None) => one,
            (None, other) => other,
        }
    }
}

/// The operators of a type that counts without end in a `u64`: a distance can be added to one and
/// subtracted from it, and two have a distance.
#[doc(hidden)]
#[macro_export]
macro_rules! counts {
    ($name:ident) => {
        impl core::ops::Add<u64> for $name {
            type Output = Self;

            #[inline]
            fn add(self, distance: u64) -> Self {
                Self(self.0 + distance)
            }
        }

        impl core::ops::AddAssign<u64> for $name {
            #[inline]
            fn add_assign(&mut self, distance: u64) {
                self.0 += distance;
            }
        }

        impl core::ops::Sub<u64> for $name {
            type Output = Self;

            #[inline]
            fn sub(self, distance: u64) -> Self {
                Self(self.0 - distance)
            }
        }

        impl core::ops::Sub for $name {
            type Output = u64;

            #[inline]
            fn sub(self, earlier: Self) -> u64 {
                self.0 - earlier.0
            }
        }
    };
}
/// A packet sequence number as it stands on the wire: 24 bits, no order of its own.
///
/// Order exists only relative to a window: [`Psn::expand`] maps a number to the [`Seq`] nearest to
/// a reference (IBTA volume 1, 9.7.1, packet sequence numbers \[M\]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Psn(u32);

impl Psn {
    /// The number of PSNs: 2^24.
    pub const SPACE: u64 = 1 << 24;

    /// The low 24 bits of `value`.
    #[must_use]
    #[inline]
    pub const fn new(value: u32) -> Self {
        Self(value & 0xff_ffff)
    }

    /// The wire form of an expanded number.
    #[must_use]
    #[inline]
    pub const fn truncate(expanded: Seq) -> Self {
        Self((expanded.0 & 0xff_ffff) as u32)
    }

    /// The number, below 2^24.
    #[must_use]
    #[inline]
    pub const fn value(self) -> u32 {
        self.0
    }

    /// The expanded number with these low 24 bits that is nearest to `reference`; at equal distance
    /// (2^23) the lower one. `reference` must be at least 2^24, as the numbers of a connection are:
    /// see [`Psn::first`].
    #[must_use]
    #[inline]
    pub const fn expand(self, reference: Seq) -> Seq {
        // The difference of the low 24 bits, with its sign.
        let ahead = (self.0.wrapping_sub(reference.0 as u32) << 8).cast_signed() >> 8;
        Seq(reference.0.wrapping_add_signed(ahead as i64))
    }

    /// The expanded form of a starting PSN: one epoch up, so that smaller numbers exist.
    #[must_use]
    #[inline]
    pub const fn first(self) -> Seq {
        Seq(Self::SPACE + self.0 as u64)
    }
}

impl fmt::Display for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0x{:06x}", self.0)
    }
}

/// An expanded PSN: a sequence number of 64 bits, which compares as an integer does and never
/// wraps. Its low 24 bits are the [`Psn`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Seq(pub u64);

counts!(Seq);

impl Seq {
    /// Beyond all that are ever sent.
    pub const MAX: Self = Self(u64::MAX);

    /// The distance from `earlier` to `self`; 0 if `earlier` is later.
    #[must_use]
    #[inline]
    pub const fn saturating_sub(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// All from `self` on and before `end`, ascending.
    #[inline]
    pub fn until(self, end: Self) -> impl Iterator<Item = Self> {
        (self.0..end.0).map(Self)
    }
}

/// The kind of a receive queue: the resource that its datagrams fill. Its owner announces it when
/// it connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QueueKind {
    /// Memory: the kernel charges a socket with the buffers of the datagrams that wait in it. A
    /// super-packet costs little more than its bytes, a single datagram at least a whole buffer.
    Memory,
    /// Places, of which each takes a frame or a super-packet of any length: an `AF_PACKET` ring.
    Places,
    /// Frames: each takes a place, and super-packets do not arrive: an `AF_XDP` ring.
    Frames,
}

impl QueueKind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Memory, Self::Places, Self::Frames];

    /// Its code in the messages of the connection manager, 1 to 3. 0 says nothing.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Memory => 1,
            Self::Places => 2,
            Self::Frames => 3,
        }
    }

    /// The kind of a code; `None` if no kind has it.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.code() == code)
    }

    /// Its name in an exchange: `memory`, `places` or `frames`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Places => "places",
            Self::Frames => "frames",
        }
    }

    /// The kind of a name; `None` if no kind has it.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// A queue pair number: 24 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct Qpn(u32);

impl Qpn {
    /// The general services interface, QP1.
    pub const GSI: Self = Self(1);
    /// The multicast QPN; never a queue pair.
    pub const MULTICAST: Self = Self(0xff_ffff);

    /// The low 24 bits of `value`.
    #[must_use]
    #[inline]
    pub const fn new(value: u32) -> Self {
        Self(value & 0xff_ffff)
    }

    /// The number, below 2^24.
    #[must_use]
    #[inline]
    pub const fn value(self) -> u32 {
        self.0
    }

    /// The slot that owns it: the upper 8 bits. A slot belongs to one process or shard of the
    /// network namespace. Peers need it, to build runs for one owner only.
    #[must_use]
    #[inline]
    pub const fn slot(self) -> u8 {
        (self.0 >> 16) as u8
    }
}

impl fmt::Display for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0x{:06x}", self.0)
    }
}

/// A partition key: 15 bits and, on top, full membership.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pkey(pub u16);

impl Pkey {
    /// The default partition, full member.
    pub const DEFAULT: Self = Self(0xffff);

    /// Whether a packet with `other` may reach a member with `self`: same partition, and at least
    /// one of the two is a full member (IBTA volume 1, 10.9.3 \[M\]; rxe accepts 0x7fff at a full
    /// member).
    #[must_use]
    #[inline]
    pub const fn admits(self, other: Self) -> bool {
        self.0 & 0x7fff == other.0 & 0x7fff && (self.0 | other.0) & 0x8000 != 0
    }
}

/// A local or remote key of a memory region: 24 bits of index and random tag, and the consumer's
/// low 8 bits.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Key(pub u32);

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0x{:08x}", self.0)
    }
}

/// The path MTU: the most payload bytes of one packet (`enum ibv_mtu`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Mtu {
    /// 256 bytes.
    Mtu256,
    /// 512 bytes.
    Mtu512,
    /// 1024 bytes.
    Mtu1024,
    /// 2048 bytes.
    Mtu2048,
    /// 4096 bytes.
    Mtu4096,
}

impl Mtu {
    /// All of them, ascending.
    pub const ALL: [Self; 5] =
        [Self::Mtu256, Self::Mtu512, Self::Mtu1024, Self::Mtu2048, Self::Mtu4096];

    /// In bytes.
    #[must_use]
    #[inline]
    pub const fn bytes(self) -> u32 {
        1 << self.shift()
    }

    /// The binary logarithm of the size in bytes.
    #[must_use]
    #[inline]
    pub const fn shift(self) -> u32 {
        8 + self as u32
    }

    /// From a size in bytes.
    #[must_use]
    pub fn from_bytes(bytes: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|mtu| mtu.bytes() == bytes)
    }

    /// The code of `enum ibv_mtu`: 1 for 256 to 5 for 4096.
    #[must_use]
    pub const fn code(self) -> u8 {
        self as u8 + 1
    }

    /// The largest that fits a link with an MTU of `link_mtu` bytes (IP header included) below the
    /// longest headers: 84 bytes, of a WRITE with immediate over IPv6 (40 IPv6, 8 UDP, 12 BTH, 16
    /// RETH, 4 immediate, 4 ICRC). 1500 gives 1024, 4180 and above give 4096. `None` below 340. rxe
    /// subtracts 80, so links of 4176 to 4179 bytes differ.
    #[must_use]
    pub fn for_link(link_mtu: u32) -> Option<Self> {
        let room = link_mtu.checked_sub(84)?;
        Self::ALL.into_iter().rev().find(|mtu| mtu.bytes() <= room)
    }
}

impl fmt::Display for Mtu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn psn_expands_to_the_nearest_number() {
        let near = Psn::new(0xff_fffe).first();
        assert_eq!(Psn::new(0xff_fffe).expand(near), near);
        assert_eq!(Psn::new(1).expand(near), near + 3);
        assert_eq!(Psn::new(0xff_fff0).expand(near), near - 14);
        assert_eq!(Psn::new(0x7f_fffd).expand(near), near + Psn::SPACE / 2 - 1);
        assert_eq!(Psn::new(0x7f_fffe).expand(near), near - Psn::SPACE / 2);
        assert_eq!(Psn::truncate(near + 3), Psn::new(1));
    }

    #[test]
    fn pkey_needs_one_full_member() {
        assert!(Pkey::DEFAULT.admits(Pkey(0x7fff)));
        assert!(!Pkey(0x7fff).admits(Pkey(0x7fff)));
        assert!(!Pkey::DEFAULT.admits(Pkey(0xfffe)));
    }

    #[test]
    fn an_mtu_leaves_room_for_the_longest_headers() {
        assert_eq!(Mtu::for_link(1500), Some(Mtu::Mtu1024));
        assert_eq!(Mtu::for_link(4180), Some(Mtu::Mtu4096));
        assert_eq!(Mtu::for_link(4179), Some(Mtu::Mtu2048));
        assert_eq!(Mtu::for_link(340), Some(Mtu::Mtu256));
        assert_eq!(Mtu::for_link(339), None);
        assert_eq!(Mtu::from_bytes(2048).map(Mtu::code), Some(4));
        assert_eq!(Mtu::Mtu4096.bytes(), 4096);
    }
}
