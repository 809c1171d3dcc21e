//! Parts of regions, and values in them.

use bytemuck::Pod;
use rocinante_stack::mem::{RemoteSlice, Sge};

use super::Mr;

/// A part of a region. It borrows the region, and its bounds have been checked.
#[derive(Debug, Clone, Copy)]
pub struct MrSlice<'a> {
    mr: &'a Mr,
    offset: usize,
    len: usize,
}

impl Mr {
    /// `len` bytes from `offset` on.
    ///
    /// # Panics
    /// If they are not inside the region.
    #[must_use]
    #[track_caller]
    pub fn slice(&self, offset: usize, len: usize) -> MrSlice<'_> {
        let inside = self.get(offset, len);
        inside.unwrap_or_else(|| panic!("{}", outside(offset, len, self.len())))
    }

    /// `len` bytes from `offset` on, or `None` if they are not inside the region.
    #[must_use]
    pub fn get(&self, offset: usize, len: usize) -> Option<MrSlice<'_>> {
        let end = offset.checked_add(len)?;
        (end <= self.len()).then_some(MrSlice { mr: self, offset, len })
    }

    /// The address and key with which a peer accesses it; send them, for instance in the private
    /// data of a connection ([`RemoteSlice::to_bytes`]).
    #[must_use]
    pub fn remote(&self) -> RemoteSlice {
        RemoteSlice { address: self.address(), len: self.len() as u64, rkey: self.rkey() }
    }

    /// A copy of the value whose bytes begin at `offset`, in the byte order of the host. As with
    /// [`read`](Self::read), it is a mix if a peer writes there at the same time;
    /// [`load_u64`](Self::load_u64) never is.
    ///
    /// # Panics
    /// If that is not inside the region.
    #[must_use]
    pub fn load<T: Pod>(&self, offset: usize) -> T {
        let mut value = T::zeroed();
        self.read(offset, bytemuck::bytes_of_mut(&mut value));
        value
    }

    /// Copies the bytes of `value` to `offset`, as [`write`](Self::write).
    ///
    /// # Panics
    /// If that is not inside the region.
    pub fn store<T: Pod>(&self, offset: usize, value: &T) {
        self.write(offset, bytemuck::bytes_of(value));
    }
}

impl<'a> MrSlice<'a> {
    /// The region.
    #[must_use]
    pub fn mr(&self) -> &'a Mr {
        self.mr
    }

    /// Where it begins in the region.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// `len` of its bytes from `offset` on.
    ///
    /// # Panics
    /// If they are not inside.
    #[must_use]
    #[track_caller]
    pub fn slice(&self, offset: usize, len: usize) -> Self {
        let inside = self.get(offset, len);
        inside.unwrap_or_else(|| panic!("{}", outside(offset, len, self.len)))
    }

    /// `len` of its bytes from `offset` on, or `None` if they are not inside.
    #[must_use]
    pub fn get(&self, offset: usize, len: usize) -> Option<Self> {
        let end = offset.checked_add(len)?;
        (end <= self.len).then(|| Self { mr: self.mr, offset: self.offset + offset, len })
    }

    /// The scatter-gather element for work requests.
    ///
    /// # Panics
    /// If it has 4 GiB or more.
    #[must_use]
    pub fn sge(&self) -> Sge {
        self.mr.sge(self.offset, self.len)
    }

    /// The address and key with which a peer accesses it, if the region permits that. The key opens
    /// the whole region: a memory window ([`Mw`](crate::Mw)) opens a part only.
    #[must_use]
    pub fn remote(&self) -> RemoteSlice {
        self.mr.remote().slice(self.offset as u64, self.len as u64)
    }

    /// Copies its first bytes into `out`: see [`Mr::read`].
    ///
    /// # Panics
    /// If `out` is longer.
    pub fn read(&self, out: &mut [u8]) {
        let part = self.slice(0, out.len());
        self.mr.read(part.offset, out);
    }

    /// Copies `data` to its beginning: see [`Mr::write`].
    ///
    /// # Panics
    /// If `data` is longer.
    pub fn write(&self, data: &[u8]) {
        let part = self.slice(0, data.len());
        self.mr.write(part.offset, data);
    }

    /// A copy of its bytes.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        self.mr.to_vec(self.offset, self.len)
    }

    /// A copy of the value at `offset`: see [`Mr::load`].
    ///
    /// # Panics
    /// If that is not inside.
    #[must_use]
    pub fn load<T: Pod>(&self, offset: usize) -> T {
        self.mr.load(self.slice(offset, size_of::<T>()).offset)
    }

    /// Copies `value` to `offset`: see [`Mr::store`].
    ///
    /// # Panics
    /// If that is not inside.
    pub fn store<T: Pod>(&self, offset: usize, value: &T) {
        self.mr.store(self.slice(offset, size_of::<T>()).offset, value);
    }
}

fn outside(offset: usize, len: usize, all: usize) -> String {
    format!("{len} bytes at {offset} are not inside {all}")
}
