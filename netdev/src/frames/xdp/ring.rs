//! The four rings that an AF_XDP socket shares with the kernel (`if_xdp.h`,
//! `Documentation/networking/af_xdp.rst`). We produce into fill and TX, and consume from RX and
//! completion. Entries carry ownership of UMEM chunks: [`Lent`] goes in, and the addresses that
//! come out are [`Returned`].
#![allow(unsafe_code)]

use super::cursor::Cursor;
use super::mapping::Mapping;
use super::umem::{Lent, Returned};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

/// The address and length of (a part of) a frame: `struct xdp_desc` of `if_xdp.h`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Desc {
    /// Offset into the UMEM.
    pub(crate) addr: u64,
    /// Bytes.
    pub(crate) len: u32,
    /// `XDP_PKT_CONTD` or 0.
    pub(crate) options: u32,
}

impl Desc {
    /// Whether the frame continues in the next descriptor.
    pub(crate) const fn continues(&self) -> bool {
        self.options & libc::XDP_PKT_CONTD != 0
    }
}

/// An entry of a ring: plain data with any bit pattern valid.
pub(crate) trait RingEntry: Copy {}
impl RingEntry for u64 {}
impl RingEntry for Desc {}

/// Offsets of the parts of a ring in its mapping.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    /// Offset of the producer's index.
    pub(crate) producer: usize,
    /// Offset of the consumer's index.
    pub(crate) consumer: usize,
    /// Offset of the flags.
    pub(crate) flags: usize,
    /// Offset of the entries.
    pub(crate) entries: usize,
    /// Number of entries, a power of two.
    pub(crate) size: u32,
}

impl Layout {
    /// Bytes to map for a ring with entries of `entry` bytes.
    pub(crate) fn bytes(&self, entry: usize) -> usize {
        self.entries + self.size as usize * entry
    }
}

/// A mapped ring. `T` is the type of its entries.
#[derive(Debug)]
struct Ring<T> {
    map: Mapping,
    layout: Layout,
    cursor: Cursor,
    entry: std::marker::PhantomData<T>,
}

impl<T: RingEntry> Ring<T> {
    /// # Panics
    /// If the layout does not fit the mapping or is misaligned: then the kernel's answer is
    /// invalid.
    fn new(map: Mapping, layout: Layout) -> Self {
        let index = |at: usize| at.is_multiple_of(4) && at + 4 <= map.len();
        assert!(index(layout.producer) && index(layout.consumer) && index(layout.flags));
        assert!(layout.entries.is_multiple_of(align_of::<T>()));
        assert!(layout.bytes(size_of::<T>()) <= map.len());
        let mut ring = Self {
            map,
            layout,
            cursor: Cursor::new(layout.size, 0, 0),
            entry: std::marker::PhantomData,
        };
        let (produced, consumed) = (
            ring.index(layout.producer).load(Ordering::Acquire),
            ring.index(layout.consumer).load(Ordering::Acquire),
        );
        ring.cursor = Cursor::new(layout.size, produced, consumed);
        ring
    }

    fn index(&self, at: usize) -> &AtomicU32 {
        // SAFETY: `new` checked that the aligned word lies in the mapping, which lives as long as
        // `self`; both sides access it only atomically.
        unsafe { AtomicU32::from_ptr(self.map.base().add(at).cast().as_ptr()) }
    }

    fn place(&self, place: usize) -> NonNull<T> {
        debug_assert!(place < self.layout.size as usize);
        // SAFETY: `new` checked that `size` entries lie in the mapping, aligned; `place` is below
        // `size` because it comes from the cursor, which masks it.
        unsafe { self.map.base().add(self.layout.entries).cast::<T>().add(place) }
    }

    fn read(&self, ahead: u32) -> T {
        self.at(self.cursor.read_place(ahead))
    }

    fn at(&self, place: usize) -> T {
        // SAFETY: the place is valid (see `place`) and any bits are a `T`. The kernel does not
        // write entries between its index and ours. In rings that we produce into, it writes none.
        unsafe { self.place(place).read() }
    }

    fn write(&mut self, entry: T) {
        // SAFETY: the place is valid (see `place`), and the kernel does not touch entries that are
        // not yet published.
        unsafe { self.place(self.cursor.write_place()).write(entry) };
        self.cursor.produce();
    }

    fn needs_wakeup(&self) -> bool {
        // Our index must be visible before the flag is read, or both sides may wait for each other.
        std::sync::atomic::fence(Ordering::SeqCst);
        let flags = self.index(self.layout.flags).load(Ordering::Relaxed);
        flags & libc::XDP_RING_NEED_WAKEUP != 0
    }

    /// Entries that can be produced; reads the kernel's index if fewer than `want` are known.
    fn free(&mut self, want: u32) -> u32 {
        if self.cursor.free() < want {
            let consumed = self.index(self.layout.consumer).load(Ordering::Acquire);
            self.cursor.see_consumed(consumed);
        }
        self.cursor.free()
    }

    fn publish(&self) {
        self.index(self.layout.producer).store(self.cursor.produced(), Ordering::Release);
    }

    fn filled(&mut self) -> u32 {
        let produced = self.index(self.layout.producer).load(Ordering::Acquire);
        self.cursor.see_produced(produced);
        self.cursor.filled()
    }

    fn release(&mut self, n: u32) {
        self.cursor.consume(n);
        self.index(self.layout.consumer).store(self.cursor.consumed(), Ordering::Release);
    }
}

/// The fill ring: chunks for the kernel to receive into.
#[derive(Debug)]
pub(crate) struct FillRing(Ring<u64>);

impl FillRing {
    /// Takes over a mapped fill ring.
    pub(crate) fn new(map: Mapping, layout: Layout) -> Self {
        Self(Ring::new(map, layout))
    }

    /// Whether another chunk can be pushed.
    pub(crate) fn has_room(&mut self) -> bool {
        self.0.free(1) > 0
    }

    /// Hands a chunk over; the kernel sees it after [`publish`](Self::publish). Panics if the ring
    /// is full: check [`has_room`](Self::has_room) first.
    pub(crate) fn push(&mut self, chunk: Lent) {
        assert!(self.0.cursor.free() > 0, "fill ring overrun");
        self.0.write(chunk.into_addr());
    }

    /// Shows the pushed chunks to the kernel.
    pub(crate) fn publish(&self) {
        self.0.publish();
    }

    /// Whether the kernel needs a wake-up for new chunks.
    pub(crate) fn needs_wakeup(&self) -> bool {
        self.0.needs_wakeup()
    }
}

/// The TX ring: frames for the kernel to send.
#[derive(Debug)]
pub(crate) struct TxRing(Ring<Desc>);

impl TxRing {
    /// Takes over a mapped TX ring.
    pub(crate) fn new(map: Mapping, layout: Layout) -> Self {
        Self(Ring::new(map, layout))
    }

    /// Entries that can be pushed; reads the kernel's index if fewer than `want` are known.
    pub(crate) fn free(&mut self, want: u32) -> u32 {
        self.0.free(want)
    }

    /// Queues a part of a frame; the kernel sees it after [`publish`](Self::publish). Panics if the
    /// ring is full: check [`free`](Self::free) first.
    pub(crate) fn push(&mut self, chunk: Lent, len: u32, continues: bool) {
        assert!(self.0.cursor.free() > 0, "TX ring overrun");
        let options = if continues { libc::XDP_PKT_CONTD } else { 0 };
        self.0.write(Desc { addr: chunk.into_addr(), len, options });
    }

    /// Shows the pushed descriptors to the kernel.
    pub(crate) fn publish(&self) {
        self.0.publish();
    }

    /// Whether the kernel sends only after a wake-up.
    pub(crate) fn needs_wakeup(&self) -> bool {
        self.0.needs_wakeup()
    }

    /// The index of the next descriptor to push; indices run through all 2³² values.
    pub(crate) fn pushed(&self) -> u32 {
        self.0.cursor.produced()
    }

    /// The index up to which the kernel has taken descriptors, as far as it shows.
    pub(crate) fn taken(&mut self) -> u32 {
        self.pending();
        self.0.cursor.consumed()
    }

    /// The descriptor with this index, one of the last that were pushed.
    pub(crate) fn pushed_at(&self, index: u32) -> Desc {
        self.0.at(self.0.cursor.place_of(index))
    }

    /// Descriptors that the kernel has not yet taken, as far as it shows.
    pub(crate) fn pending(&mut self) -> u32 {
        let size = self.0.cursor.size();
        size - self.0.free(size)
    }
}

/// The RX ring: received frames.
#[derive(Debug)]
pub(crate) struct RxRing(Ring<Desc>);

impl RxRing {
    /// Takes over a mapped RX ring.
    pub(crate) fn new(map: Mapping, layout: Layout) -> Self {
        Self(Ring::new(map, layout))
    }

    /// Descriptors that have arrived.
    pub(crate) fn filled(&mut self) -> u32 {
        self.0.filled()
    }

    /// The same, but they cannot be read yet.
    pub(crate) fn waiting(&self) -> u32 {
        let produced = self.0.index(self.0.layout.producer).load(Ordering::Acquire);
        produced.wrapping_sub(self.0.cursor.consumed())
    }

    /// The descriptor `ahead` places after the oldest, if it has arrived (as of the last
    /// [`filled`](Self::filled)).
    pub(crate) fn peek(&self, ahead: u32) -> Option<Desc> {
        (ahead < self.0.cursor.filled()).then(|| self.0.read(ahead))
    }

    /// Takes the descriptor `ahead` places after the oldest, and with it its chunk. The kernel may
    /// reuse the entry after the next [`release`](Self::release).
    pub(crate) fn take(&self, ahead: u32) -> Option<(Desc, Returned)> {
        self.peek(ahead).map(|desc| (desc, Returned::new(desc.addr)))
    }

    /// Gives the `n` oldest entries back to the kernel.
    pub(crate) fn release(&mut self, n: u32) {
        self.0.release(n);
    }
}

/// The completion ring: chunks of sent frames.
#[derive(Debug)]
pub(crate) struct CompletionRing(Ring<u64>);

impl CompletionRing {
    /// Takes over a mapped completion ring.
    pub(crate) fn new(map: Mapping, layout: Layout) -> Self {
        Self(Ring::new(map, layout))
    }

    /// Takes all completed chunks.
    pub(crate) fn drain(&mut self, mut each: impl FnMut(Returned)) {
        let n = self.0.filled();
        for ahead in 0..n {
            each(Returned::new(self.0.read(ahead)));
        }
        if n > 0 {
            self.0.release(n);
        }
    }
}

/// Rings in plain memory, and the kernel's side of each.
#[cfg(test)]
pub(crate) mod plain {
    use super::*;

    /// The first value of the indices, so that they soon wrap.
    const START: u32 = u32::MAX - 2;

    /// The kernel's side of a ring: valid as long as the ring.
    pub(crate) struct Kernel<T> {
        base: NonNull<u8>,
        layout: Layout,
        entry: std::marker::PhantomData<T>,
    }

    /// A ring of `size` entries.
    fn ring<T: RingEntry>(size: u32) -> (Ring<T>, Kernel<T>) {
        let layout = Layout { producer: 0, consumer: 64, flags: 128, entries: 192, size };
        let map = Mapping::anonymous(layout.bytes(size_of::<T>())).unwrap();
        let kernel = Kernel { base: map.base(), layout, entry: std::marker::PhantomData };
        for at in [layout.producer, layout.consumer] {
            kernel.store(at, START);
        }
        (Ring::new(map, layout), kernel)
    }

    pub(crate) fn rx(size: u32) -> (RxRing, Kernel<Desc>) {
        let (ring, kernel) = ring(size);
        (RxRing(ring), kernel)
    }

    pub(crate) fn tx(size: u32) -> (TxRing, Kernel<Desc>) {
        let (ring, kernel) = ring(size);
        (TxRing(ring), kernel)
    }

    pub(crate) fn fill(size: u32) -> (FillRing, Kernel<u64>) {
        let (ring, kernel) = ring(size);
        (FillRing(ring), kernel)
    }

    pub(crate) fn completion(size: u32) -> (CompletionRing, Kernel<u64>) {
        let (ring, kernel) = ring(size);
        (CompletionRing(ring), kernel)
    }

    impl<T: RingEntry> Kernel<T> {
        /// Entries that are published and not consumed.
        pub(crate) fn filled(&self) -> u32 {
            self.load(self.layout.producer).wrapping_sub(self.load(self.layout.consumer))
        }

        /// Publishes an entry.
        pub(crate) fn put(&self, entry: T) {
            assert!(self.filled() < self.layout.size, "the ring is full");
            let produced = self.load(self.layout.producer);
            // SAFETY: see `place`; no other side reads the entry before it is published.
            unsafe { self.place(produced).write(entry) };
            self.store(self.layout.producer, produced.wrapping_add(1));
        }

        /// The entry `ahead` places after the oldest, if it is published.
        pub(crate) fn peek(&self, ahead: u32) -> Option<T> {
            let at = self.load(self.layout.consumer).wrapping_add(ahead);
            // SAFETY: see `place`; it was published, and no other side writes it before it is
            // consumed.
            (ahead < self.filled()).then(|| unsafe { self.place(at).read() })
        }

        /// Consumes the `n` oldest entries.
        pub(crate) fn consume(&self, n: u32) {
            assert!(n <= self.filled(), "the ring has fewer");
            self.store(self.layout.consumer, self.load(self.layout.consumer).wrapping_add(n));
        }

        /// Takes the oldest entry.
        pub(crate) fn take(&self) -> Option<T> {
            let entry = self.peek(0)?;
            self.consume(1);
            Some(entry)
        }

        /// Requests a wake-up for new entries.
        pub(crate) fn sleep(&self) {
            self.store(self.layout.flags, libc::XDP_RING_NEED_WAKEUP);
        }

        fn place(&self, index: u32) -> NonNull<T> {
            let place = (index & (self.layout.size - 1)) as usize;
            // SAFETY: a test's ring outlives its kernel, and has `size` entries there.
            unsafe { self.base.add(self.layout.entries).cast::<T>().add(place) }
        }

        fn load(&self, at: usize) -> u32 {
            self.word(at).load(Ordering::Acquire)
        }

        fn store(&self, at: usize, value: u32) {
            self.word(at).store(value, Ordering::Release);
        }

        fn word(&self, at: usize) -> &AtomicU32 {
            // SAFETY: as for `place`: an aligned word that both sides access atomically.
            unsafe { AtomicU32::from_ptr(self.base.add(at).cast().as_ptr()) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::xdp::umem::Umem;

    const LAYOUT: Layout = Layout { producer: 0, consumer: 64, flags: 128, entries: 192, size: 4 };

    /// Plays the kernel on a ring in plain memory.
    fn word(ring: &Ring<Desc>, at: usize) -> &AtomicU32 {
        ring.index(at)
    }

    fn memory() -> Mapping {
        Mapping::anonymous(LAYOUT.bytes(size_of::<Desc>())).unwrap()
    }

    #[test]
    fn tx_is_full_until_the_kernel_consumes_and_shows_nothing_before_publish() {
        let mut umem = Umem::new(4).unwrap();
        let mut tx = TxRing::new(memory(), LAYOUT);
        for chunk in 0..4 {
            assert!(tx.free(1) > 0);
            tx.push(umem.lend(chunk).unwrap(), 60, chunk % 2 == 0);
        }
        assert_eq!(tx.free(1), 0);
        assert_eq!(word(&tx.0, LAYOUT.producer).load(Ordering::Relaxed), 0);
        tx.publish();
        assert_eq!(word(&tx.0, LAYOUT.producer).load(Ordering::Relaxed), 4);
        assert_eq!(tx.pending(), 4);
        let first = tx.0.read(0);
        assert!(first.continues() && first.len == 60 && first.addr == 0);
        word(&tx.0, LAYOUT.consumer).store(3, Ordering::Relaxed);
        assert_eq!((tx.free(2), tx.pending()), (3, 1));
        assert!(!tx.needs_wakeup());
        word(&tx.0, LAYOUT.flags).store(1, Ordering::Relaxed);
        assert!(tx.needs_wakeup());
    }

    #[test]
    fn rx_shows_what_the_kernel_published_and_nothing_else() {
        let mut rx = RxRing::new(memory(), LAYOUT);
        assert_eq!((rx.filled(), rx.peek(0)), (0, None));
        let desc = Desc { addr: 4096 + 256, len: 99, options: 1 };
        rx.0.write(desc);
        rx.0.write(Desc { options: 0, ..desc });
        rx.0.cursor = Cursor::new(4, 0, 0);
        word(&rx.0, LAYOUT.producer).store(2, Ordering::Release);
        assert_eq!(rx.filled(), 2);
        assert!(rx.peek(0).unwrap().continues());
        assert!(!rx.peek(1).unwrap().continues());
        assert!(rx.peek(2).is_none());
        rx.release(2);
        assert_eq!(word(&rx.0, LAYOUT.consumer).load(Ordering::Relaxed), 2);
        assert_eq!(rx.filled(), 0);
    }
}
