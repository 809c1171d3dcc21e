//! Memory regions and windows: keys, permissions, and the proof that an access was checked.
//!
//! The engine never touches user memory. It asks the [`RegionTable`] whether a key admits an
//! access, gets a [`Checked`] that nothing else can make, and hands that to its caller's
//! [`Memory`].

mod access;
mod entry;
mod flush;
mod region;
mod table;
mod window;

pub use self::access::{Access, AccessError, Accessor, PdId};
pub use self::entry::MwType;
pub use self::flush::{FlushLevel, Placement};
pub use self::region::{Atomic, AtomicOp, Checked, Read, Region, RemoteSlice, Sge, Write};
pub use self::table::RegionTable;
pub use self::window::{Bind, WindowError};

/// User memory, provided by the engine's caller: a vector in the simulator, the process itself in
/// the verbs API.
///
/// A range that was checked may still be no memory: a program may have unmapped or protected it.
/// Such an access fails with [`AccessError::Memory`], and may have moved a part of the bytes.
pub trait Memory {
    /// The registered regions and windows.
    fn regions(&self) -> &RegionTable;

    /// The same, for work requests that bind and invalidate windows.
    fn regions_mut(&mut self) -> &mut RegionTable;

    /// Copies `src` to `dst` (as long as `src`), in ascending order of addresses. An aligned word
    /// is written whole. A thread that sees the last byte sees all bytes.
    ///
    /// # Errors
    /// [`AccessError::Memory`]: it cannot be written.
    fn place(&mut self, dst: Checked<Write>, src: &[u8]) -> Result<(), AccessError>;

    /// Copies `src` to `dst` (as long as `src`).
    ///
    /// # Errors
    /// [`AccessError::Memory`]: it cannot be read.
    fn fetch(&self, src: Checked<Read>, dst: &mut [u8]) -> Result<(), AccessError>;

    /// Copies like [`fetch`](Self::fetch), and returns the CRC-32 of the copied bytes (that of
    /// Ethernet and zlib) if it was nearly free: if the processor copies and sums in one pass.
    ///
    /// # Errors
    /// As [`fetch`](Self::fetch).
    #[inline]
    fn fetch_summed(&self, src: Checked<Read>, dst: &mut [u8]) -> Result<Option<u32>, AccessError> {
        self.fetch(src, dst).map(|()| None)
    }

    /// Performs an atomic, against local threads too, and returns the value found.
    ///
    /// # Errors
    /// [`AccessError::Memory`]: it cannot be read and written.
    fn atomic(&mut self, at: Checked<Atomic>, op: AtomicOp) -> Result<u64, AccessError>;
}
