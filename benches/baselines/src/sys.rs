//! The system calls of the baselines, and the mapped ring.
//!
//! Sources: `udp(7)`, `packet(7)`, `cmsg(3)`, `sendmsg(2)`, `recvmmsg(2)`,
//! `include/uapi/linux/if_packet.h`, `Documentation/networking/packet_mmap.rst`.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, IoSlice};
use std::mem::{self, size_of};
use std::net::SocketAddrV4;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A non-blocking socket.
#[derive(Debug)]
pub(crate) struct Socket(OwnedFd);

/// The destination of a datagram; opaque.
pub(crate) struct Name(libc::sockaddr_in);

impl Name {
    pub(crate) fn new(address: SocketAddrV4) -> Self {
        Self(libc::sockaddr_in {
            sin_family: libc::AF_INET as u16,
            sin_port: address.port().to_be(),
            sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) },
            sin_zero: [0; 8],
        })
    }
}

/// A control message of one `u16`: header (length, level, type), data, padding.
#[repr(C, align(8))]
struct Control {
    len: usize,
    level: i32,
    kind: i32,
    data: [u8; 8],
}

impl Socket {
    pub(crate) fn udp() -> io::Result<Self> {
        Self::new(libc::AF_INET, libc::SOCK_DGRAM, libc::IPPROTO_UDP)
    }

    /// A packet socket that receives nothing until it is bound.
    pub(crate) fn packet() -> io::Result<Self> {
        Self::new(libc::AF_PACKET, libc::SOCK_RAW, 0)
    }

    fn new(family: i32, kind: i32, protocol: i32) -> io::Result<Self> {
        let kind = kind | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: no pointers; a non-negative result is a descriptor without another owner.
        unsafe { Ok(Self(OwnedFd::from_raw_fd(check(libc::socket(family, kind, protocol))?))) }
    }

    pub(crate) fn set(&self, level: i32, option: i32, value: i32) -> io::Result<()> {
        self.set_raw(level, option, &value)
    }

    fn set_raw<T>(&self, level: i32, option: i32, value: &T) -> io::Result<()> {
        let len = size_of::<T>() as libc::socklen_t;
        let value = ptr::from_ref(value).cast();
        // SAFETY: the kernel reads `len` bytes, the size of what `value` points to.
        unsafe { check(libc::setsockopt(self.raw(), level, option, value, len)) }.map(drop)
    }

    /// Attaches a classic BPF program that returns the number of bytes to take of each packet.
    pub(crate) fn filter(&self, program: &mut [libc::sock_filter]) -> io::Result<()> {
        let len = program.len() as u16;
        let program = libc::sock_fprog { len, filter: program.as_mut_ptr() };
        self.set_raw(libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)
    }

    pub(crate) fn bind(&self, address: SocketAddrV4) -> io::Result<()> {
        self.bind_raw(&Name::new(address).0)
    }

    /// Receives all frames of one interface, before the kernel's own protocols get them, and sends
    /// through it.
    pub(crate) fn bind_interface(&self, index: u32) -> io::Result<()> {
        self.bind_raw(&libc::sockaddr_ll {
            sll_family: libc::AF_PACKET as u16,
            sll_protocol: (libc::ETH_P_ALL as u16).to_be(),
            sll_ifindex: index as i32,
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        })
    }

    fn bind_raw<T>(&self, name: &T) -> io::Result<()> {
        let len = size_of::<T>() as libc::socklen_t;
        // SAFETY: the pointer is valid for the length given with it during the call.
        unsafe { check(libc::bind(self.raw(), ptr::from_ref(name).cast(), len)) }.map(drop)
    }

    /// Sends one message made of `pieces`; with a `segment`, the kernel splits it into datagrams of
    /// that size. `false` if there is no room for it now.
    pub(crate) fn send(
        &self,
        pieces: &[IoSlice<'_>],
        to: Option<&Name>,
        segment: Option<u16>,
    ) -> io::Result<bool> {
        // SAFETY: all zeroes (null pointers, no lengths) is a value of this plain C struct.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_iov = pieces.as_ptr().cast_mut().cast();
        message.msg_iovlen = pieces.len() as _;
        if let Some(name) = to {
            message.msg_name = ptr::from_ref(&name.0).cast_mut().cast();
            message.msg_namelen = size_of::<libc::sockaddr_in>() as libc::socklen_t;
        }
        let mut control = Control {
            len: size_of::<libc::cmsghdr>() + 2,
            level: libc::SOL_UDP,
            kind: libc::UDP_SEGMENT,
            data: [0; 8],
        };
        if let Some(segment) = segment {
            control.data[..2].copy_from_slice(&segment.to_ne_bytes());
            message.msg_control = (&raw mut control).cast();
            message.msg_controllen = size_of::<Control>() as _;
        }
        // SAFETY: `IoSlice` has the layout of `iovec`; everything that the message points to
        // outlives the call, and the kernel only reads it.
        let sent = unsafe { libc::sendmsg(self.raw(), &raw const message, libc::MSG_DONTWAIT) };
        was_taken(sent)
    }

    /// Sends one contiguous message, without a header or vectors for the kernel to fetch. `false`
    /// if there is no room for it now.
    pub(crate) fn send_piece(&self, message: &[u8]) -> io::Result<bool> {
        let (at, len) = (message.as_ptr().cast(), message.len());
        // SAFETY: the kernel only reads `len` bytes, which are the message's, during the call.
        was_taken(unsafe { libc::send(self.raw(), at, len, libc::MSG_DONTWAIT) })
    }

    /// Makes and maps a receive ring (`TPACKET_V2`).
    pub(crate) fn ring(&self, blocks: usize) -> io::Result<Ring> {
        let request = libc::tpacket_req {
            tp_block_size: BLOCK_BYTES as u32,
            tp_block_nr: blocks as u32,
            tp_frame_size: FRAME_BYTES as u32,
            tp_frame_nr: (blocks * FRAMES_PER_BLOCK) as u32,
        };
        self.set_raw(libc::SOL_PACKET, libc::PACKET_RX_RING, &request)?;
        let (len, protection) = (blocks * BLOCK_BYTES, libc::PROT_READ | libc::PROT_WRITE);
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        // SAFETY: a new mapping, at an address of the kernel's choice, of a ring with exactly this
        // length.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, self.raw(), 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Ring { base: base.cast(), blocks, next: 0 })
    }

    fn raw(&self) -> i32 {
        self.0.as_raw_fd()
    }
}

/// Bytes of a slot of the ring: a super-packet of 64 KiB with its headers fits.
const FRAME_BYTES: usize = 69_632;
/// Just below 1 MiB, since the kernel allocates blocks in powers of two.
const FRAMES_PER_BLOCK: usize = 15;
const BLOCK_BYTES: usize = FRAME_BYTES * FRAMES_PER_BLOCK;
/// Length of `struct virtio_net_hdr`.
pub(crate) const VNET_LEN: usize = 10;

/// A mapped receive ring, read in order. It lives as long as the process.
pub(crate) struct Ring {
    base: *mut u8,
    blocks: usize,
    next: usize,
}

impl Ring {
    /// Hands the next frame (virtio header, and the bytes from the Ethernet header on) to `take`,
    /// and then back to the kernel. `false` if there is no frame.
    pub(crate) fn take(&mut self, take: impl FnOnce(&[u8; VNET_LEN], &[u8])) -> bool {
        let (block, slot) = (self.next / FRAMES_PER_BLOCK, self.next % FRAMES_PER_BLOCK);
        let offset = block * BLOCK_BYTES + slot * FRAME_BYTES;
        // SAFETY: the slot is within the mapping; its first word is the status, which both sides
        // access atomically.
        let slot = unsafe { self.base.add(offset) };
        // SAFETY: as above; slots are aligned to 16.
        let status = unsafe { AtomicU32::from_ptr(slot.cast()) };
        if status.load(Ordering::Acquire) & libc::TP_STATUS_USER == 0 {
            return false;
        }
        // SAFETY: the kernel has handed the slot over and does not touch it until the status says
        // so. It put the header, and a frame of `tp_snaplen` bytes, into the slot.
        let (vnet, frame) = unsafe {
            let header = &*slot.cast::<libc::tpacket2_hdr>();
            let mac = slot.add(usize::from(header.tp_mac));
            let len = header.tp_snaplen as usize;
            assert!(usize::from(header.tp_mac) + len <= FRAME_BYTES);
            (&*mac.sub(VNET_LEN).cast::<[u8; VNET_LEN]>(), std::slice::from_raw_parts(mac, len))
        };
        take(vnet, frame);
        status.store(libc::TP_STATUS_KERNEL, Ordering::Release);
        self.next = (self.next + 1) % (self.blocks * FRAMES_PER_BLOCK);
        true
    }
}

/// A number in memory shared by two processes: the receiver's count of packets. It replaces
/// acknowledgements, and costs nothing.
pub struct Tally(&'static AtomicU64);

impl Tally {
    const BYTES: usize = 4096;

    /// Creates the memory. Error: no descriptors or memory are left.
    pub fn file() -> io::Result<File> {
        let flags = libc::MFD_CLOEXEC;
        // SAFETY: the name is a C string; a non-negative result is a descriptor without another
        // owner.
        let file =
            unsafe { File::from_raw_fd(check(libc::memfd_create(c"tally".as_ptr(), flags))?) };
        file.set_len(Self::BYTES as u64)?;
        Ok(file)
    }

    /// Maps the memory of `file`, until the process ends. Error: `file` was not created by
    /// [`file`](Self::file).
    pub fn map(file: &File) -> io::Result<Self> {
        if file.metadata()?.len() != Self::BYTES as u64 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (protection, fd) = (libc::PROT_READ | libc::PROT_WRITE, file.as_raw_fd());
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(ptr::null_mut(), Self::BYTES, protection, libc::MAP_SHARED, fd, 0)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the page is mapped until the process ends, aligned, and only accessed atomically.
        Ok(Self(unsafe { AtomicU64::from_ptr(base.cast()) }))
    }

    pub(crate) fn set(&self, value: u64) {
        self.0.store(value, Ordering::Release);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

/// Bytes of a receive slot.
const SLOT_BYTES: usize = 65_536;

/// Slots for received messages.
pub(crate) struct Slots {
    /// Never moved or resized: the vectors point into it.
    bytes: Vec<u8>,
    _vectors: Vec<libc::iovec>,
    controls: Vec<Control>,
    headers: Vec<libc::mmsghdr>,
}

impl Slots {
    pub(crate) fn new(count: usize) -> Self {
        let mut bytes = vec![0; count * SLOT_BYTES];
        let vector = |slot: &mut [u8]| libc::iovec {
            iov_base: slot.as_mut_ptr().cast(),
            iov_len: slot.len(),
        };
        let mut vectors: Vec<_> = bytes.chunks_exact_mut(SLOT_BYTES).map(vector).collect();
        let control = || Control { len: 0, level: 0, kind: 0, data: [0; 8] };
        let mut controls: Vec<_> = std::iter::repeat_with(control).take(count).collect();
        let header = |(vector, control): (&mut libc::iovec, &mut Control)| {
            // SAFETY: all zeroes (null pointers, no lengths) is a value of this plain C struct.
            let mut header: libc::mmsghdr = unsafe { mem::zeroed() };
            header.msg_hdr.msg_iov = vector;
            header.msg_hdr.msg_iovlen = 1;
            header.msg_hdr.msg_control = ptr::from_mut(control).cast();
            header
        };
        let headers = vectors.iter_mut().zip(controls.iter_mut()).map(header).collect();
        Self { bytes, _vectors: vectors, controls, headers }
    }

    /// Reads received messages, as far as there are slots; returns their number.
    pub(crate) fn receive(&mut self, socket: &Socket) -> io::Result<usize> {
        for (header, control) in self.headers.iter_mut().zip(&mut self.controls) {
            header.msg_hdr.msg_controllen = size_of::<Control>() as _;
            control.kind = 0;
        }
        let (slots, none) = (self.headers.len() as u32, ptr::null_mut());
        let headers = self.headers.as_mut_ptr();
        // SAFETY: every header points to one slot and one control buffer of `self`, with their
        // lengths.
        let got = unsafe { libc::recvmmsg(socket.raw(), headers, slots, libc::MSG_DONTWAIT, none) };
        match check(got) {
            Ok(count) => Ok(count as usize),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
            Err(error) => Err(error),
        }
    }

    /// Message `i` of the last [`receive`](Self::receive), and the size of its datagrams.
    pub(crate) fn message(&self, i: usize) -> (&[u8], usize) {
        let len = self.headers[i].msg_len as usize;
        let (control, at) = (&self.controls[i], i * SLOT_BYTES);
        let [a, b, c, d, ..] = control.data;
        let is_run = control.level == libc::SOL_UDP && control.kind == libc::UDP_GRO;
        let segment = if is_run { i32::from_ne_bytes([a, b, c, d]) as usize } else { len };
        (&self.bytes[at..at + len], segment.max(1))
    }
}

/// Converts the result of a send: whether there was room.
fn was_taken(sent: isize) -> io::Result<bool> {
    if sent >= 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::ENOBUFS | libc::EINTR) => Ok(false),
        _ => Err(error),
    }
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
