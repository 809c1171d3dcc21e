//! The UMEM: one block of memory, divided into chunks, that is shared with the kernel.
//!
//! At any time a chunk is either ours or the kernel's. [`Umem`] keeps track: it gives slices of our
//! chunks only. A chunk enters a ring only as a [`Lent`], which marks it as the kernel's. It
//! becomes ours again only through a [`Returned`], which only a ring can make. So neither a mistake
//! in the callers nor an invalid address from a driver makes two owners of one chunk. The memory is
//! this port's alone: this process made it. An agent that made
//! the memory for this process wrote nothing into it, has unmapped it before it sends the
//! descriptor (`xdp/handing.rs`), and closes its own.
#![allow(unsafe_code)]

use super::mapping::Mapping;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

/// Bytes of a chunk: the most that the kernel allows without huge pages.
pub(crate) const CHUNK: usize = 4096;

/// A chunk about to be handed to the kernel: the proof that it was marked as the kernel's.
#[derive(Debug)]
pub(crate) struct Lent(u64);

impl Lent {
    /// Offset into the UMEM.
    pub(crate) const fn into_addr(self) -> u64 {
        self.0
    }
}

/// An address that the kernel gave back in a ring.
#[derive(Debug)]
pub(crate) struct Returned(u64);

impl Returned {
    /// For the rings only.
    pub(super) const fn new(addr: u64) -> Self {
        Self(addr)
    }
}

/// The memory and the owner of each chunk.
#[derive(Debug)]
pub(crate) struct Umem {
    map: Mapping,
    lent: Box<[bool]>,
}

impl Umem {
    /// Bytes of a memory file for `chunks` chunks.
    pub(crate) const fn bytes(chunks: u32) -> usize {
        chunks as usize * CHUNK
    }

    /// Maps a memory file of `chunks` chunks, all ours.
    pub(crate) fn of_file(file: BorrowedFd<'_>, chunks: u32) -> io::Result<Self> {
        Ok(Self::over(Mapping::of_fd(file, 0, Self::bytes(chunks))?, chunks))
    }

    /// Memory of no file.
    #[cfg(test)]
    pub(crate) fn new(chunks: u32) -> io::Result<Self> {
        Ok(Self::over(Mapping::anonymous(Self::bytes(chunks))?, chunks))
    }

    fn over(map: Mapping, chunks: u32) -> Self {
        Self { map, lent: vec![false; chunks as usize].into() }
    }

    /// Address and length, for the kernel.
    pub(crate) fn region(&self) -> (u64, u64) {
        (self.map.base().as_ptr() as u64, self.map.len() as u64)
    }

    /// Gives a chunk to the kernel, or `None` if it is not ours.
    pub(crate) fn lend(&mut self, chunk: u32) -> Option<Lent> {
        let lent = self.lent.get_mut(chunk as usize)?;
        (!std::mem::replace(lent, true)).then(|| Lent(u64::from(chunk) * CHUNK as u64))
    }

    /// Takes a chunk of `those` back; the address may point anywhere into it. `None` if it is not
    /// one of them, or was not lent.
    pub(crate) fn reclaim(&mut self, returned: &Returned, those: Range<u32>) -> Option<u32> {
        let chunk = u32::try_from(returned.0 / CHUNK as u64).ok()?;
        if !those.contains(&chunk) {
            return None;
        }
        let lent = self.lent.get_mut(chunk as usize)?;
        std::mem::replace(lent, false).then_some(chunk)
    }

    /// Bytes in chunks that are all ours.
    pub(crate) fn get(&self, range: Range<usize>) -> Option<&[u8]> {
        self.check(&range)?;
        // SAFETY: the range lies in the mapping, which lives as long as `self` and is used by no
        // other port, and in chunks that the kernel does not own and so does not write; no `&mut`
        // to them exists while `self` is borrowed. No other process writes them: an agent that made
        // the memory has it mapped no more.
        Some(unsafe {
            std::slice::from_raw_parts(self.map.base().as_ptr().add(range.start), range.len())
        })
    }

    /// Bytes in chunks that are all ours, to write.
    pub(crate) fn get_mut(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
        self.check(&range)?;
        // SAFETY: as in `get`, and `self` is borrowed exclusively.
        Some(unsafe {
            std::slice::from_raw_parts_mut(self.map.base().as_ptr().add(range.start), range.len())
        })
    }

    /// Writes to a chunk that the kernel has, as the kernel does.
    #[cfg(test)]
    pub(super) fn kernel_writes(&mut self, addr: u64, bytes: &[u8]) {
        let at = addr as usize;
        assert!(at + bytes.len() <= self.map.len() && self.check(&(at..at + 1)).is_none());
        // SAFETY: the range lies in the mapping, and `self` is borrowed exclusively.
        unsafe {
            let to = self.map.base().as_ptr().add(at);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
    }

    fn check(&self, range: &Range<usize>) -> Option<()> {
        if range.start >= range.end || range.end > self.map.len() {
            return None;
        }
        let chunks = range.start / CHUNK..(range.end - 1) / CHUNK + 1;
        self.lent[chunks].iter().all(|lent| !lent).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lent_chunk_cannot_be_seen_or_lent_again_until_it_returns() {
        let mut umem = Umem::new(3).unwrap();
        umem.get_mut(0..3 * CHUNK).unwrap().fill(7);
        let lent = umem.lend(1).unwrap();
        assert_eq!(lent.into_addr(), 4096);
        assert!(umem.lend(1).is_none() && umem.lend(3).is_none());
        assert!(umem.get(CHUNK..CHUNK + 1).is_none());
        assert!(umem.get(CHUNK - 1..CHUNK + 1).is_none());
        assert!(umem.get(0..3 * CHUNK).is_none());
        assert_eq!(umem.get(CHUNK - 1..CHUNK), Some(&[7u8][..]));
        assert_eq!(umem.reclaim(&Returned::new(4096 + 300), 2..3), None, "another's");
        assert_eq!(umem.reclaim(&Returned::new(4096 + 300), 0..2), Some(1));
        assert!(umem.reclaim(&Returned::new(4096), 0..2).is_none());
        assert!(umem.get(0..3 * CHUNK).is_some());
    }

    #[test]
    fn nonsense_addresses_are_refused() {
        let mut umem = Umem::new(2).unwrap();
        assert!(umem.reclaim(&Returned::new(u64::MAX), 0..u32::MAX).is_none());
        assert!(umem.reclaim(&Returned::new(2 * CHUNK as u64), 0..u32::MAX).is_none());
        assert!(umem.get(0..2 * CHUNK + 1).is_none());
        assert!(umem.get(5..5).is_none());
    }
}
