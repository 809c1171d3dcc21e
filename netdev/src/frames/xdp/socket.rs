//! The AF_XDP socket: the system calls, and no decisions (`if_xdp.h`,
//! `Documentation/networking/af_xdp.rst`).
#![allow(unsafe_code)]

use super::mapping::Mapping;
use super::ring::{CompletionRing, Desc, FillRing, Layout, RxRing, TxRing};
use super::umem::{CHUNK, Umem};
use crate::frames::packet::page_bytes;
use crate::kernel::call;
use crate::kernel::descriptors::owns_descriptor;
use crate::kernel::inherited;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// `XDP_MAX_TX_SKB_BUDGET` of `if_xdp.h` (Linux 6.18): the most descriptors that one `sendto`
/// sends.
const XDP_MAX_TX_SKB_BUDGET: i32 = 9;

/// An `AF_XDP` socket.
#[derive(Debug)]
pub(crate) struct XdpSocket(OwnedFd);

/// The rings of a socket.
#[derive(Debug)]
pub(crate) struct Rings {
    /// Chunks to receive into.
    pub(crate) fill: FillRing,
    /// Frames received.
    pub(crate) rx: RxRing,
    /// Frames to send.
    pub(crate) tx: TxRing,
    /// Chunks sent.
    pub(crate) completion: CompletionRing,
}

/// Where a ring is.
struct Placed {
    /// The offset at which it is mapped.
    page: u64,
    layout: Layout,
    /// Bytes of an entry.
    entry: usize,
}

impl XdpSocket {
    /// A fresh socket; needs `CAP_NET_RAW`.
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: no pointers.
        let fd = unsafe { call::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor without another owner.
        Ok(Self(inherited::noted(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    /// Registers the memory. `ENOBUFS` means that it exceeds `RLIMIT_MEMLOCK`.
    pub(crate) fn register(&self, umem: &Umem) -> io::Result<()> {
        let (addr, len) = umem.region();
        let region = libc::xdp_umem_reg {
            addr,
            len,
            chunk_size: CHUNK as u32,
            headroom: 0,
            flags: 0,
            tx_metadata_len: 0,
        };
        self.set(libc::SOL_XDP, libc::XDP_UMEM_REG, &region)
    }

    /// Makes the four rings, each of `size` entries.
    pub(crate) fn make_rings(&self, size: u32) -> io::Result<()> {
        self.make_ring(libc::XDP_UMEM_FILL_RING, size)?;
        self.make_ring(libc::XDP_UMEM_COMPLETION_RING, size)?;
        self.make_ring(libc::XDP_RX_RING, size)?;
        self.make_ring(libc::XDP_TX_RING, size)
    }

    pub(crate) fn make_ring(&self, option: i32, size: u32) -> io::Result<()> {
        self.set(libc::SOL_XDP, option, &size)
    }

    /// Maps the rings, which have `size` entries each. If the socket is bound, that needs Linux
    /// 6.4; before, it is `EBUSY`.
    pub(crate) fn map_rings(&self, size: u32) -> io::Result<Rings> {
        let [fill, done, rx, tx] = self.layouts(size)?.map(|Placed { page, layout, entry }| {
            let map = Mapping::of_fd(self.0.as_fd(), page, layout.bytes(entry));
            map.map(|map| (map, layout))
        });
        let ((fill, fill_at), (done, done_at)) = (fill?, done?);
        let ((rx, rx_at), (tx, tx_at)) = (rx?, tx?);
        Ok(Rings {
            fill: FillRing::new(fill, fill_at),
            rx: RxRing::new(rx, rx_at),
            tx: TxRing::new(tx, tx_at),
            completion: CompletionRing::new(done, done_at),
        })
    }

    /// Whether each ring has `size` entries: the kernel maps no more of it than there is, in pages.
    /// It may be that of a ring of few entries this tells not all.
    pub(crate) fn has_rings_of(&self, size: u32) -> io::Result<bool> {
        let maps = |page, len| match Mapping::of_fd(self.0.as_fd(), page, len) {
            Ok(_) => Ok(true),
            // There is no ring, or a shorter one.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => Ok(false),
            Err(e) => Err(e),
        };
        for Placed { page, layout, entry } in self.layouts(size)? {
            let pages = layout.bytes(entry).next_multiple_of(page_bytes() as usize);
            if !maps(page, pages)? || maps(page, pages + 1)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether the socket is bound to an interface that is there.
    pub(crate) fn is_bound(&self) -> bool {
        // Without a frame in the ring this sends nothing.
        !matches!(self.kick_send(), Err(e) if e.raw_os_error() == Some(libc::ENXIO))
    }

    /// Where the rings of `size` entries are: of chunks to receive into and sent, of frames
    /// received and to send.
    fn layouts(&self, size: u32) -> io::Result<[Placed; 4]> {
        let at: libc::xdp_mmap_offsets = self.get(libc::XDP_MMAP_OFFSETS)?;
        let placed = |offsets: &libc::xdp_ring_offset, entry: usize, page: u64| {
            let layout = Layout {
                producer: offsets.producer as usize,
                consumer: offsets.consumer as usize,
                flags: offsets.flags as usize,
                entries: offsets.desc as usize,
                size,
            };
            Placed { page, layout, entry }
        };
        let (addr, desc) = (size_of::<u64>(), size_of::<Desc>());
        Ok([
            placed(&at.fr, addr, libc::XDP_UMEM_PGOFF_FILL_RING),
            placed(&at.cr, addr, libc::XDP_UMEM_PGOFF_COMPLETION_RING),
            placed(&at.rx, desc, libc::XDP_PGOFF_RX_RING.cast_unsigned()),
            placed(&at.tx, desc, libc::XDP_PGOFF_TX_RING.cast_unsigned()),
        ])
    }

    /// Binds to a queue of an interface. The kernel takes zero-copy where the driver has it, and
    /// copies elsewhere.
    pub(crate) fn bind(&self, ifindex: u32, queue: u32, flags: u16) -> io::Result<()> {
        let address = libc::sockaddr_xdp {
            sxdp_family: libc::AF_XDP as u16,
            sxdp_flags: flags,
            sxdp_ifindex: ifindex,
            sxdp_queue_id: queue,
            sxdp_shared_umem_fd: 0,
        };
        // SAFETY: the address is initialised and its size is given.
        let result = unsafe {
            let len = size_of_val(&address) as libc::socklen_t;
            call::bind(self.0.as_raw_fd(), (&raw const address).cast(), len)
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Whether the kernel reads and writes the UMEM without copying.
    pub(crate) fn zero_copy(&self) -> io::Result<bool> {
        let options: libc::xdp_options = self.get(libc::XDP_OPTIONS)?;
        Ok(options.flags & libc::XDP_OPTIONS_ZEROCOPY != 0)
    }

    /// Lets one `sendto` send `budget` descriptors instead of 32. `false` on older kernels.
    pub(crate) fn set_tx_budget(&self, budget: u32) -> bool {
        self.set(libc::SOL_XDP, XDP_MAX_TX_SKB_BUDGET, &budget).is_ok()
    }

    /// Requests room for `bytes` of frames that are sent and not yet received. Exceeds
    /// `net.core.wmem_max` if `force` and the process is allowed to. Best effort.
    pub(crate) fn set_send_buffer(&self, bytes: u32, force: bool) {
        let forced = force && self.set(libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &bytes).is_ok();
        if !forced {
            let _ = self.set(libc::SOL_SOCKET, libc::SO_SNDBUF, &bytes);
        }
    }

    /// The kernel's counters since the socket was created.
    pub(crate) fn statistics(&self) -> io::Result<libc::xdp_statistics> {
        self.get(libc::XDP_STATISTICS)
    }

    /// Tells the kernel to send the contents of the TX ring.
    pub(crate) fn kick_send(&self) -> io::Result<()> {
        // SAFETY: no bytes are given, so the null pointers are not read.
        let result = unsafe {
            let (none, flags) = (std::ptr::null(), libc::MSG_DONTWAIT);
            call::sendto(self.0.as_raw_fd(), none, 0, flags, std::ptr::null(), 0)
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Tells a driver that the fill ring has chunks again.
    pub(crate) fn kick_receive(&self) -> io::Result<()> {
        // SAFETY: no buffer is given, so the null pointers are not written.
        let result = unsafe {
            let (none, flags) = (std::ptr::null_mut(), libc::MSG_DONTWAIT);
            call::recvfrom(
                self.0.as_raw_fd(),
                none,
                0,
                flags,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    fn set<T>(&self, level: i32, option: i32, value: &T) -> io::Result<()> {
        // SAFETY: the value is initialised plain data and its size is given.
        let result = unsafe {
            let len = size_of::<T>() as libc::socklen_t;
            let value = std::ptr::from_ref(value).cast();
            call::setsockopt(self.0.as_raw_fd(), level, option, value, len)
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Reads an option of level `SOL_XDP`; fields that an older kernel does not fill stay zero.
    fn get<T: Plain>(&self, option: i32) -> io::Result<T> {
        // SAFETY: `T` is plain data with all zeroes as a valid value.
        let mut value: T = unsafe { std::mem::zeroed() };
        let mut len = size_of::<T>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes, any of which are a `T`.
        let result = unsafe {
            let value = (&raw mut value).cast();
            call::getsockopt(self.0.as_raw_fd(), libc::SOL_XDP, option, value, &raw mut len)
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(value) }
    }
}

owns_descriptor!(XdpSocket);

/// Plain data: any bits are a value.
trait Plain {}
impl Plain for libc::xdp_mmap_offsets {}
impl Plain for libc::xdp_options {}
impl Plain for libc::xdp_statistics {}
