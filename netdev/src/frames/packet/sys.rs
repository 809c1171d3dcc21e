//! The system calls and the mapped ring of the `AF_PACKET` port, behind functions that cannot be
//! misused.
//!
//! Sources: packet(7), `include/uapi/linux/if_packet.h`,
//! `Documentation/networking/packet_mmap.rst`.
#![allow(unsafe_code)]

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use super::ring::{RingGeometry, RxFrame};
use super::tx::FrameSink;
use super::vnet::VNET_LEN;
use crate::kernel::call;
use crate::kernel::descriptors::{Program, owns_descriptor, send_messages};
use crate::kernel::inherited;

/// The most frames of one [`SendScratch::send`].
pub(super) const SEND_MAX: usize = 64;

/// Of `linux/if_packet.h`: moves the socket's own `PACKET_IGNORE_OUTGOING` to the fanout group.
const PACKET_FANOUT_FLAG_IGNORE_OUTGOING: u32 = 0x4000;

/// A raw, non-blocking, close-on-exec packet socket.
#[derive(Debug)]
pub(super) struct PacketSocket(OwnedFd);

impl PacketSocket {
    /// A socket that receives nothing until it is bound.
    pub(super) fn new() -> io::Result<Self> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: no pointers; a non-negative result is a descriptor without another owner.
        unsafe {
            let fd = check(call::socket(libc::AF_PACKET, kind, 0))?;
            Ok(Self(inherited::noted(OwnedFd::from_raw_fd(fd))))
        }
    }

    /// Sets an option of type int.
    pub(super) fn set(&self, level: i32, option: i32, value: i32) -> io::Result<()> {
        self.set_raw(level, option, &value)
    }

    /// Takes frames from all protocols of one interface.
    pub(super) fn bind(&self, interface: u32) -> io::Result<()> {
        let address = all_of(interface)?;
        let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: the pointer is valid for the length given with it during the call.
        unsafe { check(call::bind(self.raw(), (&raw const address).cast(), len)) }?;
        Ok(())
    }

    /// Sends a frame by an interface, whichever the socket is bound to.
    pub(super) fn send_by(&self, interface: u32, frame: &[u8]) -> io::Result<()> {
        let address = all_of(interface)?;
        let (at, len) = (frame.as_ptr().cast(), size_of::<libc::sockaddr_ll>() as libc::socklen_t);
        let to = (&raw const address).cast();
        // SAFETY: both pointers are valid for the lengths given with them during the call.
        let sent = unsafe { call::sendto(self.raw(), at, frame.len(), 0, to, len) };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Joins the sockets of `group`, or starts a new group. `program` selects the socket that gets
    /// a frame, by its index in join order. Returns the group. The socket must be bound.
    pub(super) fn join_fanout(
        &self,
        group: Option<u16>,
        program: &[libc::sock_filter],
    ) -> io::Result<u16> {
        // fanout_args of packet(7): the group in the lower half, mode and flags in the upper one.
        let mode = libc::PACKET_FANOUT_CBPF | PACKET_FANOUT_FLAG_IGNORE_OUTGOING;
        if let Some(group) = group {
            let word = mode << 16 | u32::from(group);
            self.set(libc::SOL_PACKET, libc::PACKET_FANOUT, word.cast_signed())?;
            return Ok(group);
        }
        let word = (mode | libc::PACKET_FANOUT_FLAG_UNIQUEID) << 16;
        self.set(libc::SOL_PACKET, libc::PACKET_FANOUT, word.cast_signed())?;
        self.set_fanout_program(program)?;
        Ok((self.word(libc::SOL_PACKET, libc::PACKET_FANOUT)? & 0xffff) as u16)
    }

    /// Sets the program of the socket's fan-out group.
    pub(super) fn set_fanout_program(&self, program: &[libc::sock_filter]) -> io::Result<()> {
        self.set_raw(libc::SOL_PACKET, libc::PACKET_FANOUT_DATA, &Program::new(program)?)
    }

    /// The number of an option of packet(7).
    pub(super) fn packet_option(&self, option: i32) -> io::Result<u32> {
        self.word(libc::SOL_PACKET, option)
    }

    /// The index of the interface that it is bound to, and the protocol.
    pub(super) fn bound_to(&self) -> io::Result<(u32, u16)> {
        // SAFETY: a plain C struct for which all zeroes is a value.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        let mut len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        let at = (&raw mut address).cast();
        // SAFETY: the kernel writes at most `len` bytes, which is the size of `address`.
        unsafe { check(call::getsockname(self.raw(), at, &raw mut len)) }?;
        Ok((address.sll_ifindex.cast_unsigned(), u16::from_be(address.sll_protocol)))
    }

    /// The network namespace: a number unique to it (`SO_NETNS_COOKIE`).
    pub(super) fn namespace(&self) -> io::Result<u64> {
        let mut cookie = 0_u64;
        let mut len = size_of::<u64>() as libc::socklen_t;
        let (option, at) = (libc::SO_NETNS_COOKIE, (&raw mut cookie).cast());
        // SAFETY: the kernel writes at most `len` bytes, which is the size of `cookie`.
        unsafe { check(call::getsockopt(self.raw(), libc::SOL_SOCKET, option, at, &raw mut len)) }?;
        Ok(cookie)
    }

    /// An option of type int.
    pub(super) fn word(&self, level: i32, option: i32) -> io::Result<u32> {
        let mut word = 0_u32;
        let mut len = size_of::<u32>() as libc::socklen_t;
        let at = (&raw mut word).cast();
        // SAFETY: the kernel writes at most `len` bytes, which is the size of `word`.
        unsafe { check(call::getsockopt(self.raw(), level, option, at, &raw mut len)) }?;
        Ok(word)
    }

    /// Frames dropped because the ring was full, since the last call.
    pub(super) fn take_drops(&self) -> io::Result<u32> {
        let mut stats = libc::tpacket_stats { tp_packets: 0, tp_drops: 0 };
        let mut len = size_of::<libc::tpacket_stats>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes to `stats`, which is a plain C struct.
        unsafe {
            check(call::getsockopt(
                self.raw(),
                libc::SOL_PACKET,
                libc::PACKET_STATISTICS,
                (&raw mut stats).cast(),
                &raw mut len,
            ))
        }?;
        Ok(stats.tp_drops)
    }

    /// Makes the receive ring. The version of the headers must be set before.
    pub(super) fn make_ring(&self, layout: RingGeometry) -> io::Result<()> {
        let request = libc::tpacket_req {
            tp_block_size: layout.block_bytes,
            tp_block_nr: layout.blocks,
            tp_frame_size: layout.frame_bytes,
            tp_frame_nr: layout.frames(),
        };
        self.set_ring(libc::PACKET_RX_RING, &request)
    }

    /// Makes the ring of a direction in place of what there was; none without a block.
    pub(super) fn set_ring(&self, option: i32, request: &libc::tpacket_req) -> io::Result<()> {
        self.set_raw(libc::SOL_PACKET, option, request)
    }

    /// Makes the interface promiscuous as long as the socket is open.
    #[cfg(test)]
    pub(super) fn see_all(&self, interface: u32) -> io::Result<()> {
        let request = libc::packet_mreq {
            mr_ifindex: interface.cast_signed(),
            mr_type: libc::PACKET_MR_PROMISC as u16,
            mr_alen: 0,
            mr_address: [0; 8],
        };
        self.set_raw(libc::SOL_PACKET, libc::PACKET_ADD_MEMBERSHIP, &request)
    }

    /// Maps the ring that was made with this layout. The kernel refuses another length.
    pub(super) fn map_ring(&self, layout: RingGeometry) -> io::Result<RingMap> {
        let base = self.map(layout.bytes(), libc::PROT_READ | libc::PROT_WRITE)?;
        let map = RingMap { base, layout };
        // A child of fork must not take frames from its parent's ring.
        advise(base, layout.bytes(), libc::MADV_DONTFORK)?;
        Ok(map)
    }

    /// Keeps the ring that was made with this layout as it is.
    pub(super) fn keep_ring(&self, layout: RingGeometry) -> io::Result<Kept> {
        let (len, page) = (layout.bytes(), page_bytes() as usize);
        let base = self.map(len, libc::PROT_NONE)?;
        let kept = Kept { base, len, ring_bytes: layout.kernel_bytes() };
        advise(kept.base, kept.len, libc::MADV_DONTFORK)?;
        kept.but(page)
    }

    /// Maps the ring, which has exactly `len` bytes.
    fn map(&self, len: usize, protection: i32) -> io::Result<NonNull<u8>> {
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, self.raw(), 0)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(base.cast::<u8>()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    fn set_raw<T>(&self, level: i32, option: i32, value: &T) -> io::Result<()> {
        let len = size_of::<T>() as libc::socklen_t;
        // SAFETY: the kernel reads `len` bytes of `value`, and the memory that it points to, during
        // the call.
        unsafe {
            check(call::setsockopt(self.raw(), level, option, (&raw const *value).cast(), len))
        }?;
        Ok(())
    }

    fn raw(&self) -> i32 {
        self.0.as_raw_fd()
    }
}

owns_descriptor!(PacketSocket);

/// Size of a page of memory, in bytes.
pub(crate) fn page_bytes() -> u32 {
    // SAFETY: no pointers.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u32::try_from(bytes).ok().filter(|bytes| bytes.is_power_of_two()).unwrap_or(4096)
}

/// The address of all protocols of an interface.
fn all_of(interface: u32) -> io::Result<libc::sockaddr_ll> {
    Ok(libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: (libc::ETH_P_ALL as u16).to_be(),
        sll_ifindex: i32::try_from(interface).map_err(io::Error::other)?,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    })
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Advises the kernel about a whole mapping of this process.
fn advise(base: NonNull<u8>, len: usize, advice: i32) -> io::Result<()> {
    // SAFETY: the advice given here (`MADV_DONTFORK`) changes no byte of the mapping.
    unsafe { check(libc::madvise(base.as_ptr().cast(), len, advice)) }?;
    Ok(())
}

/// Keeps the receive ring of a socket that another process has: as long as this value lives, the
/// kernel refuses to resize or to remove the ring and to add one for sending (`EBUSY`). Otherwise
/// the other process could take any amount of kernel memory, without a privilege.
///
/// It also keeps the socket open. It maps one page of the ring, without access: it can neither read
/// nor write the frames of the other process and the kernel.
#[derive(Debug)]
pub struct Kept {
    base: NonNull<u8>,
    len: usize,
    ring_bytes: usize,
}

// SAFETY: the mapping is the process's, not a thread's, and no thread has access to its bytes.
unsafe impl Send for Kept {}
// SAFETY: as above.
unsafe impl Sync for Kept {}

impl Kept {
    /// Bytes of kernel memory of the ring.
    #[must_use]
    pub fn ring_bytes(&self) -> usize {
        self.ring_bytes
    }

    /// Unmaps all but the first `len` bytes: one page does, and counts as little memory of this
    /// process.
    fn but(mut self, len: usize) -> io::Result<Self> {
        if len < self.len {
            // SAFETY: the end of the mapping, which is ours alone, and which nothing points into.
            unsafe { check(libc::munmap(self.base.add(len).as_ptr().cast(), self.len - len)) }?;
            self.len = len;
        }
        Ok(self)
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours alone, and nothing points into it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// The mapped receive ring: `TPACKET_V2` frames that the kernel and we own in turn.
///
/// No other process reads or writes it. If an agent opened the socket, it has the ring mapped too,
/// but without access ([`Kept`]). It closes its descriptor when it has sent it, so that it maps no
/// more.
#[derive(Debug)]
pub(super) struct RingMap {
    base: NonNull<u8>,
    layout: RingGeometry,
}

// SAFETY: the mapping is the process's, not a thread's; a frame's content is touched only through
// `&self`/`&mut self` of its one owner, and its status word is atomic.
unsafe impl Send for RingMap {}

impl RingMap {
    pub(super) fn layout(&self) -> RingGeometry {
        self.layout
    }

    /// The frame with this index (below `layout().frames()`) if the kernel has handed it over.
    ///
    /// It stays ours, and unchanged, until [`release`](Self::release), which needs `&mut self`.
    pub(super) fn frame(&self, index: u32) -> Option<RxFrame<'_>> {
        // SAFETY: the status word is within the mapping and aligned; both sides access it
        // atomically.
        let status = unsafe { (*self.status(index)).load(Ordering::Acquire) };
        if status & libc::TP_STATUS_USER == 0 {
            return None;
        }
        // SAFETY: the slot lies within the mapping, and having seen USER with acquire ordering, the
        // kernel does not write to it until we hand it back. No other process writes to it at all:
        // an agent that opened the socket has no access to its own mapping.
        let slot = unsafe {
            std::slice::from_raw_parts(self.slot(index).as_ptr(), self.layout.frame_bytes as usize)
        };
        // SAFETY: `tpacket2_hdr` is a plain C struct at the aligned start of the slot.
        let header = unsafe { self.slot(index).cast::<libc::tpacket2_hdr>().as_ref() };
        let mac = usize::from(header.tp_mac);
        Some(RxFrame {
            vnet: slot.get(mac.wrapping_sub(VNET_LEN)..mac)?.first_chunk()?,
            bytes: slot.get(mac..mac.checked_add(header.tp_snaplen as usize)?)?,
            whole: header.tp_snaplen == header.tp_len,
            time: (header.tp_sec, header.tp_nsec),
        })
    }

    /// Whether the kernel has handed the frame over, valid or not.
    pub(super) fn is_ours(&self, index: u32) -> bool {
        // SAFETY: as in `frame`.
        unsafe { (*self.status(index)).load(Ordering::Acquire) & libc::TP_STATUS_USER != 0 }
    }

    /// Hands a frame back to the kernel.
    pub(super) fn release(&mut self, index: u32) {
        // SAFETY: as in `frame`; no borrow of the slot is alive, because we hold `&mut self`.
        unsafe { (*self.status(index)).store(libc::TP_STATUS_KERNEL, Ordering::Release) }
    }

    /// A ring in plain memory, owned by the kernel.
    #[cfg(test)]
    pub(super) fn plain(layout: RingGeometry) -> Self {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let base =
            unsafe { libc::mmap(std::ptr::null_mut(), layout.bytes(), protection, flags, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        Self { base: NonNull::new(base.cast()).expect("not at 0"), layout }
    }

    /// Hands a frame over as the kernel does: `bytes` at `at` in its slot, with this description.
    #[cfg(test)]
    pub(super) fn kernel_gives(
        &mut self,
        index: u32,
        (mac, snap_len, len): (u16, u32, u32),
        at: usize,
        bytes: &[u8],
    ) {
        assert!(!self.is_ours(index) && at + bytes.len() <= self.layout.frame_bytes as usize);
        // SAFETY: the header and the bytes are in the slot, which is aligned. The slot is the
        // kernel's, and this function plays the kernel; `self` is borrowed exclusively.
        unsafe {
            let slot = self.slot(index);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), slot.as_ptr().add(at), bytes.len());
            let header = slot.cast::<libc::tpacket2_hdr>().as_mut();
            (header.tp_mac, header.tp_snaplen, header.tp_len) = (mac, snap_len, len);
            let status = libc::TP_STATUS_USER | libc::TP_STATUS_LOSING;
            (*self.status(index)).store(status, Ordering::Release);
        }
    }

    /// Start of a frame's slot.
    fn slot(&self, index: u32) -> NonNull<u8> {
        // SAFETY: `offset` is below the length of the mapping for every index.
        unsafe { self.base.add(self.layout.offset(index)) }
    }

    fn status(&self, index: u32) -> *const AtomicU32 {
        // `tp_status` is the first field, and slots are aligned to TPACKET_ALIGNMENT (16).
        self.slot(index).as_ptr().cast::<AtomicU32>()
    }
}

impl Drop for RingMap {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours alone, and no borrow of it outlives `self`.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.layout.bytes()) };
    }
}

/// Message headers, allocated once.
pub(super) struct SendScratch {
    messages: Box<[libc::mmsghdr; SEND_MAX]>,
    vectors: Box<[[libc::iovec; 2]; SEND_MAX]>,
}

// SAFETY: the pointers inside are set and used only within one call of `Transmit::send`.
unsafe impl Send for SendScratch {}

impl SendScratch {
    pub(super) fn new() -> Self {
        // SAFETY: both are plain C structs for which all zeroes is a value.
        unsafe {
            Self { messages: Box::new(std::mem::zeroed()), vectors: Box::new(std::mem::zeroed()) }
        }
    }
}

/// A socket with the arrays for a call of `sendmmsg(2)`.
pub(super) struct Transmit<'a> {
    pub(super) socket: &'a PacketSocket,
    pub(super) scratch: &'a mut SendScratch,
}

impl FrameSink for Transmit<'_> {
    /// Sends up to [`SEND_MAX`] frames, each from two pieces (virtio header and Ethernet … UDP
    /// headers first), in one system call.
    fn send<'a>(&mut self, frames: impl Iterator<Item = [&'a [u8]; 2]>) -> io::Result<usize> {
        let SendScratch { messages, vectors } = &mut *self.scratch;
        let mut count = 0;
        for ((message, vectors), pieces) in messages.iter_mut().zip(vectors.iter_mut()).zip(frames)
        {
            for (vector, piece) in vectors.iter_mut().zip(pieces) {
                vector.iov_base = piece.as_ptr().cast_mut().cast();
                vector.iov_len = piece.len();
            }
            message.msg_hdr.msg_iov = vectors.as_mut_ptr();
            message.msg_hdr.msg_iovlen = 2;
            count += 1;
        }
        // SAFETY: the first `count` messages point to vectors of live slices ('a outlives the
        // call), which the kernel only reads; it writes `msg_len` of the messages.
        unsafe { send_messages(self.socket.as_fd(), messages.as_mut_ptr(), count, 0) }
    }

    /// Uses `send(2)`: unlike `sendmmsg(2)`, it has neither message headers nor vectors for the
    /// kernel to fetch.
    fn send_one(&mut self, frame: &[u8]) -> io::Result<()> {
        let (at, len) = (frame.as_ptr().cast(), frame.len());
        // SAFETY: the kernel only reads `len` bytes, which are the frame's, during the call.
        let sent = unsafe {
            call::sendto(self.socket.raw(), at, len, libc::MSG_DONTWAIT, std::ptr::null(), 0)
        };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}
