//! Memory regions.
#![allow(unsafe_code)]

mod pool;
mod slice;

use std::sync::atomic::{AtomicU64, Ordering};

use rocinante_kernel as kernel;
use rocinante_soft as soft;
use rocinante_soft::model::error::{Refused, VerbsError};
use rocinante_soft::provider::advice::Advice;
use rocinante_soft::provider::memory::{Buffer, Range};
use rocinante_stack::mem::{Access, AccessError, Sge};
use rocinante_stack::types::Key;

pub use self::pool::{BufferPool, PoolBuffer};
pub use self::slice::MrSlice;
use crate::context::{Pd, PdKind};

impl Pd {
    /// Allocates `len` zero bytes and registers them. The region owns them.
    ///
    /// # Errors
    /// [`VerbsError::Invalid`] for contradictory flags or too much memory; [`VerbsError::Limit`] if
    /// there are too many regions.
    pub fn allocate(&self, len: usize, access: Access) -> Result<Mr, VerbsError> {
        Mr::allocate(self, len, access)
    }

    /// Registers memory of the caller (`ibv_reg_mr(3)`): `len` bytes from `start` on, of any
    /// alignment. Work requests and peers name them by their addresses in this process, or from 0
    /// on with [`Access::ZERO_BASED`].
    ///
    /// # Safety
    /// From now until the region is dropped or deregistered, `start` must point to `len` bytes that
    /// are valid for reads and, with any write or atomic flag, for writes. The program must access
    /// them only as memory that others change at any time: through raw pointers, atomics or the
    /// region's own methods, never through references that a concurrent writer would invalidate.
    ///
    /// The pages need not be in memory: they come in when they are used, and nothing pins them. So
    /// every region is one of explicit on-demand paging (`IBV_ACCESS_ON_DEMAND`).
    ///
    /// A program in another language may break the promise: unmap or protect memory that is
    /// registered, or shorten its file. An access of the device in software then fails as if the
    /// region did not permit it: the request completes with an error, its queue pair goes to ERR,
    /// and the process lives. A handler of SIGSEGV and SIGBUS (on x86-64 and AArch64) sees to that;
    /// it passes all other faults to the handler that the program has.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate); [`VerbsError::Fault`] if the process has no such memory:
    /// something is not mapped, or the first or last page cannot be read, or cannot be written
    /// although `access` has [`Access::LOCAL_WRITE`].
    pub unsafe fn register(
        &self,
        start: *mut u8,
        len: usize,
        access: Access,
    ) -> Result<Mr, VerbsError> {
        let range = Range { address: start as u64, len };
        // SAFETY: the caller's promise is passed on.
        unsafe { Mr::insert(self, range, range.start(access), access, None) }
    }

    /// The same for memory that work requests and peers name by the addresses from `iova` on
    /// (`ibv_reg_mr_iova(3)`).
    ///
    /// # Safety
    /// As [`register`](Self::register).
    ///
    /// # Errors
    /// As [`register`](Self::register); [`VerbsError::Invalid`] also with [`Access::ZERO_BASED`],
    /// which chooses an address, too.
    pub unsafe fn register_iova(
        &self,
        start: *mut u8,
        len: usize,
        iova: u64,
        access: Access,
    ) -> Result<Mr, VerbsError> {
        if access.admits(Access::ZERO_BASED) {
            let why = "ZERO_BASED is a region at the address 0: leave it out, or the address";
            return Err(VerbsError::Invalid(why.into()));
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { Mr::insert(self, Range { address: start as u64, len }, iova, access, None) }
    }
}

/// A registered memory region (`struct ibv_mr`).
///
/// While it is registered, peers that know its key may read or change it at any time, as its flags
/// permit. So it never lends slices of its memory: use [`read`](Self::read), [`write`](Self::write)
/// and the atomics.
///
/// # The end of a region
///
/// Three ways end a registration (`ibv_dereg_mr(3)`). They differ while the region is in use:
///
/// | | a posted request names it | a window is bound to it |
/// |---|---|---|
/// | [`deregister`](Self::deregister) | fails; with a device of the kernel: ends | fails |
/// | [`revoke`](Self::revoke) | ends | fails |
/// | dropping it | ends | ends |
///
/// A call that fails returns [`VerbsError::Busy`], and the region, still registered. When a region
/// ends, posted requests that name it fail with `LOC_PROT_ERR` unless they are done. Requests of
/// peers with its key, or with that of a window to it, fail with a remote access error
/// (`REM_ACCESS_ERR` at the peer). Memory that the region owns is freed.
///
/// A device of the kernel may refuse to deregister a region that is dropped, for instance because
/// of a window. Then peers may still reach its memory. If the region owns that, it is never freed.
/// If the caller does, use [`deregister`](Self::deregister), which reports the refusal.
#[derive(Debug)]
pub struct Mr {
    kind: MrKind,
    range: Range,
    /// By which address its first byte is named.
    start: u64,
    access: Access,
    /// Freed after deregistration, because fields drop in this order.
    buffer: Option<Buffer>,
    /// Memory that the device refused but may still use.
    spare: Vec<Buffer>,
    _pd: Pd,
}

/// The changes of [`Mr::rereg`].
#[derive(Debug, Clone, Copy, Default)]
pub struct Rereg<'a> {
    /// The protection domain (`IBV_REREG_MR_CHANGE_PD`).
    pub pd: Option<&'a Pd>,
    /// The permissions (`IBV_REREG_MR_CHANGE_ACCESS`).
    pub access: Option<Access>,
    /// The memory (`IBV_REREG_MR_CHANGE_TRANSLATION`): this many new bytes, owned by the region,
    /// all zero.
    pub len: Option<usize>,
}

fn check(access: Access) -> Result<(), VerbsError> {
    if access.is_contradictory() {
        return Err(VerbsError::Invalid(
            "REMOTE_WRITE and REMOTE_ATOMIC need LOCAL_WRITE too (ibv_reg_mr(3))".into(),
        ));
    }
    Ok(())
}

#[derive(Debug)]
enum MrKind {
    Soft(soft::Registration),
    Kernel(kernel::Registration),
}

impl Mr {
    pub(crate) fn allocate(pd: &Pd, len: usize, access: Access) -> Result<Self, VerbsError> {
        let Some(buffer) = Buffer::zeroed(len) else {
            return Err(VerbsError::Invalid(format!("there are no {len} bytes of memory")));
        };
        let range = Range { address: buffer.address(), len };
        // SAFETY: the buffer lives as long as the region, and all access to it is by the region's
        // methods.
        unsafe { Self::insert(pd, range, range.start(access), access, Some(buffer)) }
    }

    /// # Safety
    /// As [`Pd::register`].
    unsafe fn insert(
        pd: &Pd,
        range: Range,
        start: u64,
        access: Access,
        buffer: Option<Buffer>,
    ) -> Result<Self, VerbsError> {
        check(access)?;
        let kind = match &pd.inner.kind {
            PdKind::Soft(pd) => MrKind::Soft(soft::Registration::insert(pd, range, start, access)?),
            PdKind::Kernel(pd) => {
                // SAFETY: the caller's promise is passed on.
                MrKind::Kernel(unsafe { kernel::Registration::insert(pd, range, start, access) }?)
            }
        };
        Ok(Self { kind, range, start, access, buffer, spare: Vec::new(), _pd: pd.clone() })
    }

    /// The key for scatter-gather elements of this device's requests (`ibv_mr::lkey`).
    #[must_use]
    #[inline]
    pub fn lkey(&self) -> Key {
        match &self.kind {
            MrKind::Soft(registration) => registration.key(),
            MrKind::Kernel(registration) => registration.lkey(),
        }
    }

    /// The key for requests of peers (`ibv_mr::rkey`). The device in software has one key for both
    /// uses.
    #[must_use]
    #[inline]
    pub fn rkey(&self) -> Key {
        match &self.kind {
            MrKind::Soft(registration) => registration.key(),
            MrKind::Kernel(registration) => registration.rkey(),
        }
    }

    /// The address by which work requests and peers name its first byte: 0 if it is
    /// [`Access::ZERO_BASED`], another than its own if [`Pd::register_iova`] registered it.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.start
    }

    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.range.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.range.len == 0
    }

    /// Its permissions.
    #[must_use]
    pub fn access(&self) -> Access {
        self.access
    }

    /// A scatter-gather element (`struct ibv_sge`) of `len` bytes from `offset` on.
    ///
    /// # Panics
    /// If that is not inside the region, or `len` is 4 GiB or more.
    #[must_use]
    pub fn sge(&self, offset: usize, len: usize) -> Sge {
        self.part(offset, len);
        let len = u32::try_from(len).expect("an element is shorter than 4 GiB");
        Sge { addr: self.address() + offset as u64, len, lkey: self.lkey() }
    }

    /// Copies `out.len()` bytes from `offset` on into `out`. While a peer or another thread writes
    /// there, the result is a mix of old and new bytes.
    ///
    /// # Panics
    /// If that is not inside the region, or the program took its memory away.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        let part = self.part(offset, out.len());
        // SAFETY: `part` checked the bounds, and the memory is valid while the region lives.
        unsafe { part.load(out) }.expect(GONE);
    }

    /// A copy of `len` bytes from `offset` on, as [`read`](Self::read).
    ///
    /// # Panics
    /// As [`read`](Self::read).
    #[must_use]
    pub fn to_vec(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.read(offset, &mut out);
        out
    }

    /// Copies `data` to `offset`. A thread that sees the last byte sees all bytes.
    ///
    /// # Panics
    /// As [`read`](Self::read).
    pub fn write(&self, offset: usize, data: &[u8]) {
        let part = self.part(offset, data.len());
        // SAFETY: as for `read`; owned memory is writable, and the caller that registered raw
        // memory vouched for it.
        unsafe { part.store(data) }.expect(GONE);
    }

    /// The byte at `offset`, loaded with acquire. The device in software stores the last byte of a
    /// WRITE last, with release: a thread that loads it by this call sees all bytes of the WRITE,
    /// and those of earlier WRITEs of the queue pair. So a program can wait for a WRITE without a
    /// completion. [`load_u64`](Self::load_u64) suits a counter of eight bytes better; the
    /// [memory model](crate::guide::memory) has all guarantees.
    ///
    /// ```
    /// use std::net::IpAddr;
    /// use rocinante::{Access, Context, VerbsError};
    ///
    /// fn main() -> Result<(), VerbsError> {
    ///     let here = IpAddr::from([127, 0, 0, 1]);
    /// #   let (here, _) = rocinante::doc::addresses();
    ///     let ctx = Context::open(here)?;
    ///     // A record of 63 bytes and a mark, which is 0 until a peer's WRITE of all 64 is there.
    ///     let inbox = ctx.alloc_pd().allocate(64, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    ///     inbox.write(63, &[1]); // In the place of the peer.
    ///     while inbox.load_byte(63) == 0 {
    ///         ctx.progress();
    ///     }
    ///     let _record = inbox.to_vec(0, 63);
    ///     Ok(())
    /// }
    /// ```
    ///
    /// A WRITE that ends with an aligned word of eight bytes should cover all of that word. One
    /// that covers only its end, such as four bytes to an address of 4 modulo 8, is stored byte by
    /// byte, while this call loads the last byte of a word together with its word. Processors
    /// handle that correctly; Rust's memory model does not cover such a pair.
    ///
    /// # Panics
    /// As [`read`](Self::read).
    #[must_use]
    pub fn load_byte(&self, offset: usize) -> u8 {
        self.part(offset, 1);
        // SAFETY: as for `read`.
        unsafe { self.range.load_byte(offset) }.expect(GONE)
    }

    /// The aligned word at `offset`, in the byte order of the host: the atomic that peers' atomics
    /// work on.
    ///
    /// # Panics
    /// If that is not inside the region or its address is not a multiple of 8.
    #[must_use]
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        let part = self.part(offset, 8);
        assert!(part.address.is_multiple_of(8), "the word at {offset} is not aligned");
        // SAFETY: as for `read`; the reference lives no longer than the region.
        unsafe { part.word() }
    }

    /// The aligned word at `offset`, with acquire.
    ///
    /// # Panics
    /// As [`word`](Self::word).
    #[must_use]
    pub fn load_u64(&self, offset: usize) -> u64 {
        self.word(offset).load(Ordering::Acquire)
    }

    /// Ends the registration if nothing uses the region: see [the table](Self#the-end-of-a-region).
    ///
    /// # Errors
    /// [`VerbsError::Busy`], with the region, while a posted request names it (not on a device of
    /// the kernel) or a window is bound to it; [`VerbsError::Hardware`] if the kernel's device
    /// refuses.
    pub fn deregister(mut self) -> Result<(), Refused<Self>> {
        let removed = match &mut self.kind {
            MrKind::Soft(registration) => registration.remove(false),
            MrKind::Kernel(registration) => registration.remove(),
        };
        removed.map_err(|why| Refused::new(self, why))
    }

    /// Ends the registration as hardware does, also while posted requests name the region: see
    /// [the table](Self#the-end-of-a-region).
    ///
    /// # Errors
    /// [`VerbsError::Busy`], with the region, while a window is bound to it;
    /// [`VerbsError::Hardware`] if the kernel's device refuses.
    pub fn revoke(mut self) -> Result<(), Refused<Self>> {
        let removed = match &mut self.kind {
            MrKind::Soft(registration) => registration.remove(true),
            MrKind::Kernel(registration) => registration.remove(),
        };
        removed.map_err(|why| Refused::new(self, why))
    }

    /// Has the pages of `len` bytes from `offset` on brought in (`ibv_advise_mr(3)`), so that the
    /// first access finds them. It returns when they are there. A device of the kernel keeps its
    /// tables as they are.
    ///
    /// # Errors
    /// [`VerbsError::Fault`] if the program unmapped them; [`VerbsError::Invalid`] if they are not
    /// inside the region, or if [`Advice::PrefetchWrite`] meets a region without
    /// [`Access::LOCAL_WRITE`].
    pub fn advise(&self, advice: Advice, offset: usize, len: usize) -> Result<(), VerbsError> {
        if offset.checked_add(len).is_none_or(|end| end > self.range.len) {
            let all = self.range.len;
            let why = format!("{len} bytes at {offset} are not inside a region of {all}");
            return Err(VerbsError::Invalid(why));
        }
        let writable = advice == Advice::PrefetchWrite;
        if writable && !self.access.admits(Access::LOCAL_WRITE) {
            let why = "the region cannot be written: advise it to be read";
            return Err(VerbsError::Invalid(why.into()));
        }
        advice.follow(self.range.address + offset as u64, len)
    }

    /// Whether a peer may access `len` bytes from `address` on with this region's key, for
    /// diagnosis. `need` is the permission that the operation needs, such as
    /// [`Access::REMOTE_WRITE`]. For a device of the kernel, only range and flags are checked.
    ///
    /// # Errors
    /// [`AccessError`]: why the access would be refused.
    pub fn check(&self, address: u64, len: u32, need: Access) -> Result<(), AccessError> {
        on!(MrKind, &self.kind, registration => registration.check(address, len, need))
    }

    /// Changes its protection domain, its permissions or its memory (`ibv_rereg_mr(3)`). With
    /// [`Rereg::len`] it gets new memory of its own, all zero, and frees the old memory.
    ///
    /// Its keys may change: ask [`lkey`](Self::lkey) and [`rkey`](Self::rkey) again. The device in
    /// software changes them with the memory, and only then. It refuses the old keys once this call
    /// returns: posted requests that name them fail with `LOC_PROT_ERR`.
    ///
    /// # Errors
    /// [`VerbsError::Busy`] while a window is bound to it; [`VerbsError::Invalid`] and
    /// [`VerbsError::Fault`] for a change that registration would refuse, too. In these cases
    /// nothing has changed. [`VerbsError::Hardware`] if the kernel's device refuses or does not
    /// support the change; the error says whether the region may still be used.
    pub fn rereg(&mut self, change: &Rereg<'_>) -> Result<(), VerbsError> {
        let buffer = change.len.map(|len| {
            let none = || VerbsError::Invalid(format!("there are no {len} bytes of memory"));
            Buffer::zeroed(len).map(|buffer| (buffer, len)).ok_or_else(none)
        });
        let buffer = buffer.transpose()?;
        let range =
            buffer.as_ref().map(|(buffer, len)| Range { address: buffer.address(), len: *len });
        // SAFETY: as in `allocate`.
        unsafe { self.change(change, range, buffer.map(|(buffer, _)| buffer)) }
    }

    /// As [`rereg`](Self::rereg), to other memory of the caller; ignores [`Rereg::len`].
    ///
    /// # Safety
    /// As [`Pd::register`], for the new memory. After success the old memory is the caller's own.
    ///
    /// # Errors
    /// As [`rereg`](Self::rereg).
    pub unsafe fn rereg_at(
        &mut self,
        start: *mut u8,
        len: usize,
        change: &Rereg<'_>,
    ) -> Result<(), VerbsError> {
        // SAFETY: the caller's promise is passed on.
        unsafe { self.change(change, Some(Range { address: start as u64, len }), None) }
    }

    /// # Safety
    /// As [`Pd::register`], for `range`.
    unsafe fn change(
        &mut self,
        change: &Rereg<'_>,
        range: Option<Range>,
        buffer: Option<Buffer>,
    ) -> Result<(), VerbsError> {
        let access = change.access.unwrap_or(self.access);
        check(access)?;
        let zero_based = |access: Access| access.admits(Access::ZERO_BASED);
        if range.is_none() && zero_based(access) != zero_based(self.access) {
            let why = "with ZERO_BASED the region's addresses change: give it its memory anew";
            return Err(VerbsError::Invalid(why.into()));
        }
        let kinds = (&mut self.kind, change.pd.map(|pd| &pd.inner.kind));
        let changed = match kinds {
            (MrKind::Soft(registration), pd @ (None | Some(PdKind::Soft(_)))) => {
                let pd = pd.and_then(|pd| if let PdKind::Soft(pd) = pd { Some(pd) } else { None });
                registration.change(&soft::Change { pd, range, access })
            }
            (MrKind::Kernel(registration), pd @ (None | Some(PdKind::Kernel(_)))) => {
                let pd =
                    pd.and_then(|pd| if let PdKind::Kernel(pd) = pd { Some(pd) } else { None });
                // SAFETY: the caller's promise is passed on.
                unsafe { registration.change(&kernel::Change { pd, range, access: change.access }) }
            }
            _ => Err(VerbsError::Invalid("the domain belongs to another device".into())),
        };
        if let Err(error) = changed {
            if matches!(self.kind, MrKind::Kernel(_)) {
                // The device may or may not use the new memory.
                self.spare.extend(buffer);
            }
            return Err(error);
        }
        self.access = access;
        if let Some(range) = range {
            self.range = range;
            self.start = range.start(access);
            self.buffer = buffer;
        }
        if let Some(pd) = change.pd {
            self._pd = pd.clone();
        }
        Ok(())
    }

    fn part(&self, offset: usize, len: usize) -> Range {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.range.len);
        assert!(inside, "{len} bytes at {offset} are not inside a region of {}", self.range.len);
        Range { address: self.range.address + offset as u64, len }
    }
}

/// A [registered](Pd::register) region whose memory the program took away.
const GONE: &str = "the memory of the region is there";

impl Drop for Mr {
    fn drop(&mut self) {
        if let MrKind::Kernel(registration) = &mut self.kind
            && registration.remove().is_err()
        {
            // The device may still use the memory: leak it rather than reuse it.
            std::mem::forget((self.buffer.take(), std::mem::take(&mut self.spare)));
        }
    }
}
