//! The receive ring: the places of its frames, and their owner.

use std::io;

use super::sys::{PacketSocket, RingMap};
use super::vnet::VNET_LEN;

/// Bytes of a slot: a super-packet of 64 KiB with its headers fits. A multiple of 4 KiB.
const FRAME_BYTES: u32 = 69_632;
/// Frames per block: just below 1 MiB, since the kernel allocates blocks in powers of two.
const FRAMES_PER_BLOCK: u32 = 15;

/// Geometry of a ring (`struct tpacket_req`): blocks, each of whole frames and perhaps unused
/// bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RingGeometry {
    pub(super) frame_bytes: u32,
    pub(super) block_bytes: u32,
    pub(super) blocks: u32,
    frames_per_block: u32,
}

impl RingGeometry {
    /// At least `frames` frames (and at least one), in pages of `page_bytes`.
    pub(super) fn new(frames: u32, page_bytes: u32) -> Self {
        let frames = frames.clamp(1, 1 << 14);
        let frames_per_block = frames.min(FRAMES_PER_BLOCK);
        Self {
            frame_bytes: FRAME_BYTES,
            block_bytes: (frames_per_block * FRAME_BYTES).next_multiple_of(page_bytes),
            blocks: frames.div_ceil(frames_per_block),
            frames_per_block,
        }
    }

    /// The number of frames. (The kernel would count one more per block if the unused bytes of a
    /// block had room for it. They do not: a page is smaller than a frame.)
    pub(super) fn frames(&self) -> u32 {
        self.blocks * self.frames_per_block
    }

    /// Length of the mapping.
    pub(super) fn bytes(&self) -> usize {
        self.blocks as usize * self.block_bytes as usize
    }

    /// Bytes of kernel memory: each block is a power of two of pages.
    pub(super) fn kernel_bytes(&self) -> usize {
        self.blocks as usize * self.block_bytes.next_power_of_two() as usize
    }

    /// Offset of a frame in the mapping; the index is taken modulo the number of frames.
    pub(super) fn offset(&self, index: u32) -> usize {
        let index = index % self.frames();
        let block = (index / self.frames_per_block) as usize * self.block_bytes as usize;
        block + (index % self.frames_per_block) as usize * self.frame_bytes as usize
    }
}

/// A frame that the kernel handed over.
#[derive(Debug, Clone, Copy)]
pub(super) struct RxFrame<'a> {
    /// The virtio header.
    pub(super) vnet: &'a [u8; VNET_LEN],
    /// The frame, from the Ethernet header on.
    pub(super) bytes: &'a [u8],
    /// Whether the frame was not truncated.
    pub(super) whole: bool,
    /// Seconds and nanoseconds since 1970, when the kernel took it.
    pub(super) time: (u32, u32),
}

/// The ring, read in order.
#[derive(Debug)]
pub(super) struct PacketRing {
    map: RingMap,
    next: u32,
}

impl PacketRing {
    /// Maps the ring of a socket, which has read nothing from it yet.
    pub(super) fn new(socket: &PacketSocket, layout: RingGeometry) -> io::Result<Self> {
        Ok(Self { map: socket.map_ring(layout)?, next: 0 })
    }

    /// The number of frames in the ring.
    pub(super) fn frames(&self) -> u32 {
        self.map.layout().frames()
    }

    /// Whether more than `eighths` of it wait to be read: frames come in order, so one frame shows
    /// it.
    pub(super) fn is_filled(&self, eighths: u32) -> bool {
        let frames = self.frames();
        self.map.is_ours((self.next + frames * eighths / 8) % frames)
    }

    /// Hands the next frame to `take` and then back to the kernel. `None` if there is no frame;
    /// `Some(None)` if the kernel's description of it is invalid.
    pub(super) fn take<R>(&mut self, take: impl FnOnce(RxFrame<'_>) -> R) -> Option<Option<R>> {
        if !self.map.is_ours(self.next) {
            return None;
        }
        let taken = self.map.frame(self.next).map(take);
        self.map.release(self.next);
        self.next = if self.next + 1 == self.frames() { 0 } else { self.next + 1 };
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_do_not_overlap_and_stay_within_their_block() {
        for (wanted, page) in [(1, 4096), (4, 4096), (15, 4096), (256, 4096), (31, 65536)] {
            let layout = RingGeometry::new(wanted, page);
            assert!(layout.frames() >= wanted && layout.frames() < wanted + FRAMES_PER_BLOCK);
            assert_eq!(layout.block_bytes % page, 0);
            assert_eq!(layout.block_bytes / layout.frame_bytes, layout.frames_per_block);
            let mut end = 0;
            for index in 0..layout.frames() {
                let start = layout.offset(index);
                assert!(start >= end && start.is_multiple_of(16));
                end = start + FRAME_BYTES as usize;
                let block = layout.block_bytes as usize;
                assert_eq!(start / block, (end - 1) / block, "within one block");
            }
            assert!(end <= layout.bytes());
        }
    }

    #[test]
    fn absurd_sizes_are_clamped() {
        assert_eq!(RingGeometry::new(0, 4096).frames(), 1);
        assert!(RingGeometry::new(u32::MAX, 4096).frames() < 20_000);
    }

    /// Offset of Ethernet headers in a slot.
    const MAC_AT: u16 = 104;

    fn ring(frames: u32) -> PacketRing {
        PacketRing { map: RingMap::plain(RingGeometry::new(frames, 4096)), next: 0 }
    }

    /// Hands the next frame over as the kernel does, then reads it; returns its bytes, and whether
    /// they are whole.
    fn read(
        ring: &mut PacketRing,
        said: (u16, u32, u32),
        bytes: &[u8],
    ) -> Option<Option<(Vec<u8>, bool)>> {
        let next = ring.next;
        ring.map.kernel_gives(next, said, usize::from(MAC_AT), bytes);
        let got = ring.take(|frame| (frame.bytes.to_vec(), frame.whole));
        assert!(!ring.map.is_ours(next), "the slot is the kernel's again");
        assert!(ring.take(|_| ()).is_none(), "there was one");
        got
    }

    #[test]
    fn it_is_filled_from_the_next_frame_on_and_around_its_end() {
        for frames in [4, 15, 60] {
            let mut ring = ring(frames);
            let frames = ring.frames();
            for begin in 0..frames {
                for wanted in 0..8 {
                    let enough = frames * wanted / 8 + 1;
                    for given in 0..enough {
                        assert!(!ring.is_filled(wanted), "{given} of {frames} from {begin}");
                        let place = (begin + given) % frames;
                        ring.map.kernel_gives(
                            place,
                            (MAC_AT, 60, 60),
                            usize::from(MAC_AT),
                            &[7; 60],
                        );
                    }
                    assert!(ring.is_filled(wanted), "{enough} of {frames}, {wanted} eighths");
                    while ring.take(|_| ()).is_some() {}
                    ring.next = begin;
                }
                ring.next = (begin + 1) % frames;
            }
        }
    }

    #[test]
    fn whatever_the_kernel_says_of_a_frame_it_stays_in_its_slot_and_the_slot_comes_back() {
        let room = FRAME_BYTES - u32::from(MAC_AT);
        let mut ring = ring(4);
        for round in 0..3 * ring.frames() {
            for (mac, snap_len, len) in [
                (0, 60, 60),
                (VNET_LEN as u16 - 1, 60, 60),
                (u16::MAX, FRAME_BYTES, FRAME_BYTES),
                (u16::MAX, u32::MAX, u32::MAX),
                (MAC_AT, room + 1, room + 1),
                (MAC_AT, u32::MAX, u32::MAX),
                (MAC_AT, u32::MAX - u32::from(MAC_AT), 0),
            ] {
                let got = read(&mut ring, (mac, snap_len, len), &[7; 60]);
                assert_eq!(got, Some(None), "round {round}: {snap_len} at {mac}");
            }
            for (mac, snap_len, len) in [
                (VNET_LEN as u16, 0, 0),
                (MAC_AT, 0, 0),
                (MAC_AT, 60, 60),
                (MAC_AT, 60, 61),
                (MAC_AT, 60, 0),
                (MAC_AT, room, room),
                (u16::MAX, FRAME_BYTES - u32::from(u16::MAX), u32::MAX),
            ] {
                let got = read(&mut ring, (mac, snap_len, len), &[7; 60]);
                let (bytes, whole) = got.expect("a frame").expect("within its slot");
                assert_eq!((bytes.len() as u32, whole), (snap_len, snap_len == len));
            }
            let got = read(&mut ring, (MAC_AT, 60, 60), &[round as u8; 60]);
            assert_eq!(got, Some(Some((vec![round as u8; 60], true))));
        }
    }
}
