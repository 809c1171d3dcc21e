//! The system calls of the UDP port, behind functions that cannot be misused.
//!
//! Sources: `udp(7)`, `ip(7)`, `ipv6(7)`, `socket(7)`, `cmsg(3)`, `sendmmsg(2)`, `recvmmsg(2)`,
//! `include/uapi/linux/udp.h`, `include/uapi/linux/filter.h`, `include/uapi/linux/sock_diag.h`.
#![allow(unsafe_code)]

use std::io;
use std::mem::{self, size_of};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::net::RecvFlags;

use crate::kernel::call;
use crate::kernel::descriptors::{
    Program, attach_filter, owns_descriptor, receive_messages, send_messages,
};
use crate::kernel::inherited;
use crate::port::config::Shards;
use crate::port::steering;

/// The most messages one [`send`] takes.
pub(crate) const SEND_MAX: usize = 64;
/// The most messages one [`RecvBatch::recv`] takes.
pub(crate) const RECV_MAX: usize = 32;
/// Bytes of one receive slot; a UDP payload is at most 65,507 (IPv4) or 65,527 (IPv6).
pub(crate) const SLOT_BYTES: usize = 65_536;
/// Room for the control messages that one datagram can carry in either direction: three ints and
/// `struct in6_pktinfo`.
const CONTROL_BYTES: usize = 112;
/// The longest data of a control message, `struct in6_pktinfo`, with its padding.
const DATA_BYTES: usize = 24;

/// A socket address of either family, as the kernel wants it.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) union SockAddr {
    v4: libc::sockaddr_in,
    v6: libc::sockaddr_in6,
}

impl SockAddr {
    pub(crate) fn new(address: &SocketAddr) -> Self {
        match address {
            SocketAddr::V4(a) => {
                // The larger member is zeroed first so that every byte of the union is defined.
                let mut out = Self::empty();
                out.v4 = libc::sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: a.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(a.ip().octets()) },
                    sin_zero: [0; 8],
                };
                out
            }
            SocketAddr::V6(a) => Self {
                v6: libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: a.port().to_be(),
                    sin6_flowinfo: a.flowinfo().to_be(),
                    sin6_addr: libc::in6_addr { s6_addr: a.ip().octets() },
                    sin6_scope_id: a.scope_id(),
                },
            },
        }
    }

    const fn empty() -> Self {
        // SAFETY: both members are plain C structs for which all zeroes is a value.
        unsafe { mem::zeroed() }
    }

    /// Leaves the IPv6 flow label to the kernel; returns whether there was one.
    pub(crate) fn clear_flow_label(&mut self) -> bool {
        if self.family() != libc::AF_INET6 {
            return false;
        }
        // SAFETY: every byte of the union is defined, and all bit patterns are values of both
        // members.
        let had = unsafe { self.v6.sin6_flowinfo } != 0;
        self.v6.sin6_flowinfo = 0;
        had
    }

    fn family(&self) -> i32 {
        // SAFETY: every byte of the union is defined, and the family is the first field of both
        // members.
        i32::from(unsafe { self.v4.sin_family })
    }

    fn len(&self) -> libc::socklen_t {
        let len = match self.family() {
            libc::AF_INET6 => size_of::<libc::sockaddr_in6>(),
            _ => size_of::<libc::sockaddr_in>(),
        };
        len as libc::socklen_t
    }

    /// Address and port.
    pub(super) fn decode(&self) -> (IpAddr, u16) {
        // SAFETY: every byte of the union is defined, and all bit patterns are values of both
        // members.
        unsafe {
            if self.family() == libc::AF_INET6 {
                let a = &self.v6;
                (IpAddr::V6(Ipv6Addr::from(a.sin6_addr.s6_addr)), u16::from_be(a.sin6_port))
            } else {
                let a = &self.v4;
                let ip = Ipv4Addr::from(a.sin_addr.s_addr.to_ne_bytes());
                (IpAddr::V4(ip), u16::from_be(a.sin_port))
            }
        }
    }
}

/// A non-blocking, close-on-exec UDP socket.
#[derive(Debug)]
pub(crate) struct Socket(OwnedFd);

impl Socket {
    pub(crate) fn new(v6: bool) -> io::Result<Self> {
        let family = if v6 { libc::AF_INET6 } else { libc::AF_INET };
        let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: no pointers; a non-negative result is a descriptor without another owner.
        let socket = unsafe {
            let fd = check(call::socket(family, kind, libc::IPPROTO_UDP))?;
            Self(inherited::noted(OwnedFd::from_raw_fd(fd)))
        };
        if v6 {
            // Only before it is bound.
            socket.set(libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1)?;
        }
        Ok(socket)
    }

    pub(crate) fn bind(&self, address: &SocketAddr) -> io::Result<()> {
        let name = SockAddr::new(address);
        // SAFETY: the pointer is valid for the length given with it during the call.
        unsafe { check(call::bind(self.0.as_raw_fd(), (&raw const name).cast(), name.len())) }?;
        Ok(())
    }

    /// The port it is bound to.
    pub(crate) fn local_port(&self) -> io::Result<u16> {
        let mut name = SockAddr::empty();
        let mut len = size_of::<SockAddr>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes, which is the size of `name`.
        unsafe {
            check(call::getsockname(self.0.as_raw_fd(), (&raw mut name).cast(), &raw mut len))
        }?;
        Ok(name.decode().1)
    }

    pub(crate) fn set(&self, level: i32, option: i32, value: i32) -> io::Result<()> {
        self.set_raw(level, option, &value)
    }

    fn set_raw<T>(&self, level: i32, option: i32, value: &T) -> io::Result<()> {
        let len = size_of::<T>() as libc::socklen_t;
        let value = std::ptr::from_ref(value).cast();
        // SAFETY: the kernel reads `len` bytes, which is the size of what `value` points to.
        unsafe { check(call::setsockopt(self.0.as_raw_fd(), level, option, value, len)) }?;
        Ok(())
    }

    /// Joins a group at the interface with this index, until the socket is closed.
    pub(crate) fn join(&self, group: IpAddr, interface: u32) -> io::Result<()> {
        match group {
            IpAddr::V4(group) => {
                let request = libc::ip_mreqn {
                    imr_multiaddr: libc::in_addr { s_addr: u32::from_ne_bytes(group.octets()) },
                    imr_address: libc::in_addr { s_addr: 0 },
                    imr_ifindex: interface.cast_signed(),
                };
                self.set_raw(libc::IPPROTO_IP, libc::IP_ADD_MEMBERSHIP, &request)
            }
            IpAddr::V6(group) => {
                let request = libc::ipv6_mreq {
                    ipv6mr_multiaddr: libc::in6_addr { s6_addr: group.octets() },
                    ipv6mr_interface: interface,
                };
                self.set_raw(libc::IPPROTO_IPV6, libc::IPV6_ADD_MEMBERSHIP, &request)
            }
        }
    }

    pub(crate) fn get(&self, level: i32, option: i32) -> io::Result<i32> {
        Ok(self.get_words::<1>(level, option)?[0])
    }

    fn get_words<const N: usize>(&self, level: i32, option: i32) -> io::Result<[i32; N]> {
        let mut words = [0_i32; N];
        let mut len = size_of::<[i32; N]>() as libc::socklen_t;
        let at = words.as_mut_ptr().cast();
        // SAFETY: the kernel writes at most `len` bytes, which is the size of `words`.
        unsafe { check(call::getsockopt(self.0.as_raw_fd(), level, option, at, &raw mut len)) }?;
        Ok(words)
    }

    /// The network namespace of the socket: a number unique to it (`SO_NETNS_COOKIE`). `None`
    /// before Linux 5.14.
    pub(crate) fn netns(&self) -> Option<u64> {
        let words = self.get_words::<2>(libc::SOL_SOCKET, libc::SO_NETNS_COOKIE).ok()?;
        let [low, high] = words.map(|word| u64::from(word.cast_unsigned()));
        Some(high << 32 | low)
    }

    /// Makes the kernel drop all input before it is queued.
    pub(crate) fn drop_all_input(&self) -> io::Result<()> {
        // One instruction, `ret #0`: keep 0 bytes of the packet.
        let code = (libc::BPF_RET | libc::BPF_K) as u16;
        attach_filter(&self.0, &[libc::sock_filter { code, jt: 0, jf: 0, k: 0 }])
    }

    /// Binds it to an interface or a VRF, or with 0 to none, for the routes of its datagrams in
    /// both directions (`SO_BINDTOIFINDEX`). Needs no privilege unless it is bound to another.
    pub(crate) fn bind_to_interface(&self, interface: u32) -> io::Result<()> {
        if self.interface().unwrap_or(0) == interface {
            return Ok(());
        }
        self.set(libc::SOL_SOCKET, libc::SO_BINDTOIFINDEX, interface.cast_signed())
    }

    /// The interface or VRF that it is bound to.
    pub(crate) fn interface(&self) -> Option<u32> {
        let index = self.get(libc::SOL_SOCKET, libc::SO_BINDTOIFINDEX).ok()?;
        (index != 0).then_some(index.cast_unsigned())
    }

    /// Makes the kernel drop datagrams that a guard does not take: see [`steering::of_guard`].
    pub(crate) fn take_other_input(
        &self,
        iface: u32,
        mac_in_vrf: Option<[u8; 6]>,
        shards: Shards,
    ) -> io::Result<()> {
        attach_filter(&self.0, &steering::of_guard(iface, mac_in_vrf, shards))
    }

    /// Takes all input, also after [`drop_all_input`](Self::drop_all_input).
    pub(crate) fn take_input(&self) -> io::Result<()> {
        match self.set(libc::SOL_SOCKET, libc::SO_DETACH_FILTER, 0) {
            // There is no filter.
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            result => result,
        }
    }

    /// Throws away all waiting datagrams.
    pub(crate) fn empty(&self) {
        while rustix::net::recv(&self.0, &mut [0; 1], RecvFlags::DONTWAIT).is_ok() {}
    }

    /// Allows other sockets of this user to bind the same address and port, if they do the same
    /// (`SO_REUSEPORT`).
    pub(crate) fn share_port(&self) -> io::Result<()> {
        self.set(libc::SOL_SOCKET, libc::SO_REUSEPORT, 1)
    }

    /// Lets `program` select the socket for a datagram among those that share this one's address
    /// and port, by its index in bind order (`SO_ATTACH_REUSEPORT_CBPF`). The program sees the UDP
    /// payload.
    pub(crate) fn steer(&self, program: &[libc::sock_filter]) -> io::Result<()> {
        let option = libc::SO_ATTACH_REUSEPORT_CBPF;
        self.set_raw(libc::SOL_SOCKET, option, &Program::new(program)?)
    }

    /// Whether waiting datagrams take more than `eighths` eighths of this socket's memory:
    /// `SO_MEMINFO`, the fields `SK_MEMINFO_RMEM_ALLOC` and `SK_MEMINFO_RCVBUF`.
    pub(super) fn is_filled(&self, eighths: u32) -> bool {
        self.get_words::<2>(libc::SOL_SOCKET, libc::SO_MEMINFO)
            .is_ok_and(|[used, room]| i64::from(used) * 8 > i64::from(room) * i64::from(eighths))
    }

    /// The number of datagrams that the kernel dropped because this socket's queue was full (or
    /// their checksum wrong), modulo 2³²: `SO_MEMINFO`, the field `SK_MEMINFO_DROPS`.
    pub(crate) fn input_drops(&self) -> u32 {
        const SK_MEMINFO_DROPS: usize = 8;
        const SK_MEMINFO_VARS: usize = 9;
        self.get_words::<SK_MEMINFO_VARS>(libc::SOL_SOCKET, libc::SO_MEMINFO)
            .map_or(0, |words| words[SK_MEMINFO_DROPS] as u32)
    }
}

owns_descriptor!(Socket);

/// A destination of datagrams, and the control messages that each of them carries.
#[derive(Clone, Copy)]
pub(crate) struct Dest {
    pub(crate) name: SockAddr,
    /// TOS or traffic class; `None` for the socket's own (0).
    pub(crate) tos: Option<u8>,
    /// TTL or hop limit; `None` for the socket's own.
    pub(crate) ttl: Option<u8>,
}

/// One message: `payload` is cut into datagrams of `segment` bytes unless that is 0.
pub(crate) struct Message<'a> {
    pub(crate) payload: &'a [u8],
    pub(crate) dest: &'a Dest,
    /// The interface that it leaves by, with the source address; `None` for the socket's or the
    /// route's.
    pub(crate) by: Option<(u32, IpAddr)>,
    pub(crate) segment: u16,
}

/// The arrays for `sendmmsg`; each [`send`] fills them anew.
pub(crate) struct SendScratch {
    headers: Vec<libc::mmsghdr>,
    vectors: Vec<libc::iovec>,
    controls: Vec<Control>,
}

// SAFETY: the raw pointers inside are written and read only within one call of `send`.
unsafe impl Send for SendScratch {}

impl SendScratch {
    pub(crate) fn new() -> Self {
        let null = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        Self {
            // SAFETY: all zeroes (null pointers, no lengths) is a value of this plain C struct.
            headers: vec![unsafe { mem::zeroed() }; SEND_MAX],
            vectors: vec![null; SEND_MAX],
            controls: vec![Control([0; CONTROL_BYTES / 8]); SEND_MAX],
        }
    }
}

/// Sends up to [`SEND_MAX`] messages with one system call. Returns the number that the kernel took,
/// from the first on. An error belongs to the first message.
pub(crate) fn send<'a>(
    socket: &Socket,
    scratch: &mut SendScratch,
    messages: impl Iterator<Item = Message<'a>>,
) -> io::Result<usize> {
    send_with(socket, scratch, messages, 0)
}

/// Begins a message with this payload, which goes on with the next that the socket is given
/// (`MSG_MORE` of udp(7)).
pub(super) fn begin_message(
    socket: &Socket,
    scratch: &mut SendScratch,
    message: Message<'_>,
) -> io::Result<()> {
    send_with(socket, scratch, std::iter::once(message), libc::MSG_MORE).map(drop)
}

fn send_with<'a>(
    socket: &Socket,
    scratch: &mut SendScratch,
    messages: impl Iterator<Item = Message<'a>>,
    flags: i32,
) -> io::Result<usize> {
    let mut count = 0;
    for message in messages.take(SEND_MAX) {
        let control = &mut scratch.controls[count];
        let control_len = control.fill(&message);
        let vector = &mut scratch.vectors[count];
        vector.iov_base = message.payload.as_ptr().cast_mut().cast();
        vector.iov_len = message.payload.len();
        let header = &mut scratch.headers[count].msg_hdr;
        header.msg_name = (&raw const message.dest.name).cast_mut().cast();
        header.msg_namelen = message.dest.name.len();
        header.msg_iov = &raw mut *vector;
        header.msg_iovlen = 1;
        header.msg_control =
            if control_len == 0 { std::ptr::null_mut() } else { (&raw mut *control).cast() };
        header.msg_controllen = control_len as _;
        count += 1;
    }
    // SAFETY: the first `count` headers point to names and payloads borrowed for 'a, which outlives
    // this call, and to vectors and controls in `scratch`, which is borrowed exclusively. The
    // kernel only reads through them; it writes `msg_len` in the headers.
    unsafe { send_messages(socket.0.as_fd(), scratch.headers.as_mut_ptr(), count as u32, flags) }
}

/// A control buffer, aligned for `cmsghdr`.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Control([u64; CONTROL_BYTES / 8]);

impl Control {
    /// Writes the control messages of `message` and returns their length.
    fn fill(&mut self, message: &Message<'_>) -> usize {
        let v6 = message.dest.name.family() == libc::AF_INET6;
        let mut at = 0;
        if message.segment != 0 {
            at = self.put(at, libc::SOL_UDP, libc::UDP_SEGMENT, &message.segment.to_ne_bytes());
        }
        let (level, tos, ttl) = if v6 {
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, libc::IPV6_HOPLIMIT)
        } else {
            (libc::IPPROTO_IP, libc::IP_TOS, libc::IP_TTL)
        };
        if let Some(value) = message.dest.tos {
            at = self.put(at, level, tos, &i32::from(value).to_ne_bytes());
        }
        if let Some(value) = message.dest.ttl {
            at = self.put(at, level, ttl, &i32::from(value).to_ne_bytes());
        }
        match message.by {
            // struct in_pktinfo: interface, source, and an address that only receivers are given.
            Some((interface, IpAddr::V4(source))) => {
                let mut info = [0; 12];
                info[..4].copy_from_slice(&interface.to_ne_bytes());
                info[4..8].copy_from_slice(&source.octets());
                self.put(at, level, libc::IP_PKTINFO, &info)
            }
            // struct in6_pktinfo: source and interface. The socket is bound to the source.
            Some((interface, IpAddr::V6(_))) => {
                let mut info = [0; 20];
                info[16..].copy_from_slice(&interface.to_ne_bytes());
                self.put(at, level, libc::IPV6_PKTINFO, &info)
            }
            None => at,
        }
    }

    /// Appends one control message of at most [`DATA_BYTES`] bytes at `at` (a multiple of 8).
    fn put(&mut self, at: usize, level: i32, kind: i32, data: &[u8]) -> usize {
        // cmsg(3): header { size_t len; int level; int type; }, data, padding to the alignment. On
        // every 64-bit Linux CMSG_LEN(n) = 16 + n and CMSG_SPACE(n) = 16 + n rounded up to 8.
        const HEADER: usize = size_of::<libc::cmsghdr>();
        let mut bytes = [0_u8; HEADER + DATA_BYTES];
        bytes[..8].copy_from_slice(&(HEADER + data.len()).to_ne_bytes());
        bytes[8..12].copy_from_slice(&level.to_ne_bytes());
        bytes[12..16].copy_from_slice(&kind.to_ne_bytes());
        bytes[HEADER..HEADER + data.len()].copy_from_slice(data);
        let end = at + HEADER + data.len().next_multiple_of(8);
        for (word, bytes) in self.0[at / 8..end / 8].iter_mut().zip(bytes.chunks_exact(8)) {
            let mut eight = [0; 8];
            eight.copy_from_slice(bytes);
            *word = u64::from_ne_bytes(eight);
        }
        end
    }
}

const _: () = assert!(
    size_of::<libc::cmsghdr>() == 16 && size_of::<usize>() == 8,
    "the control messages are laid out for 64-bit Linux"
);

/// Receive slots and the arrays for `recvmmsg`.
pub(crate) struct RecvBatch {
    /// `RECV_MAX` slots of `SLOT_BYTES`; never moved or resized, `vectors` points into it.
    slots: Vec<u8>,
    names: Vec<SockAddr>,
    controls: Vec<Control>,
    /// Never touched after `new`; the kernel reads it in every `recv`.
    _vectors: Vec<libc::iovec>,
    headers: Vec<libc::mmsghdr>,
    /// The number of headers that the last `recv` filled.
    filled: usize,
}

// SAFETY: the raw pointers inside point to heap memory that the same value owns.
unsafe impl Send for RecvBatch {}

/// One message of a [`RecvBatch`]: a datagram, or several of one flow that the kernel merged.
pub(crate) struct Received<'a> {
    pub(crate) payload: &'a [u8],
    pub(crate) src: IpAddr,
    pub(crate) src_port: u16,
    /// Size of each datagram but the last, if there are several.
    pub(crate) segment: Option<usize>,
    pub(crate) tos: Option<u8>,
    /// The slot was too small: the payload is not whole.
    pub(crate) truncated: bool,
}

impl RecvBatch {
    pub(crate) fn new() -> Self {
        let mut slots = vec![0_u8; RECV_MAX * SLOT_BYTES];
        let mut names = vec![SockAddr::empty(); RECV_MAX];
        let mut controls = vec![Control([0; CONTROL_BYTES / 8]); RECV_MAX];
        let mut vectors: Vec<libc::iovec> = slots
            .chunks_exact_mut(SLOT_BYTES)
            .map(|slot| libc::iovec { iov_base: slot.as_mut_ptr().cast(), iov_len: SLOT_BYTES })
            .collect();
        let mut headers = Vec::with_capacity(RECV_MAX);
        for i in 0..RECV_MAX {
            // SAFETY: all zeroes (null pointers, no lengths) is a value of this plain C struct.
            let mut header: libc::mmsghdr = unsafe { mem::zeroed() };
            header.msg_hdr.msg_name = (&raw mut names[i]).cast();
            header.msg_hdr.msg_iov = &raw mut vectors[i];
            header.msg_hdr.msg_iovlen = 1;
            header.msg_hdr.msg_control = (&raw mut controls[i]).cast();
            headers.push(header);
        }
        // `filled` counts all so that the first `recv` sets every length.
        Self { slots, names, controls, _vectors: vectors, headers, filled: RECV_MAX }
    }

    /// Reads up to `count` messages with one system call; 0 if there is none.
    pub(crate) fn recv(&mut self, socket: &Socket, count: usize) -> io::Result<usize> {
        for header in &mut self.headers[..self.filled] {
            header.msg_hdr.msg_namelen = size_of::<SockAddr>() as libc::socklen_t;
            header.msg_hdr.msg_controllen = CONTROL_BYTES as _;
        }
        self.filled = 0;
        let count = count.clamp(1, RECV_MAX);
        loop {
            // SAFETY: every header points to one slot, one name and one control buffer of `self`,
            // each with its true length; `self` is borrowed exclusively for the call.
            let got = unsafe {
                receive_messages(socket.0.as_fd(), self.headers.as_mut_ptr(), count as u32)
            };
            match got {
                Ok(got) => {
                    self.filled = got;
                    return Ok(self.filled);
                }
                Err(e) => match e.raw_os_error() {
                    Some(libc::EINTR) => {}
                    Some(libc::EAGAIN | libc::ENOMEM | libc::ENOBUFS) => return Ok(0),
                    _ => return Err(e),
                },
            }
        }
    }

    /// Message `i` of the last [`recv`](Self::recv).
    pub(crate) fn message(&self, i: usize) -> Received<'_> {
        assert!(i < self.filled, "message {i} of {}", self.filled);
        let header = &self.headers[i];
        let len = (header.msg_len as usize).min(SLOT_BYTES);
        let at = i * SLOT_BYTES;
        let (src, src_port) = self.names[i].decode();
        let mut received = Received {
            payload: &self.slots[at..at + len],
            src,
            src_port,
            segment: None,
            tos: None,
            truncated: header.msg_hdr.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0,
        };
        // An integer of another width in other C libraries.
        let control_len: usize = header.msg_hdr.msg_controllen as _;
        self.controls[i].parse(control_len, &mut received);
        received
    }
}

impl Control {
    /// Reads the control messages in the first `len` bytes.
    fn parse(&self, len: usize, into: &mut Received<'_>) {
        let words = &self.0[..(len / 8).min(self.0.len())];
        let mut at = 0;
        while let [size, kind, data, ..] = words[at..] {
            let kind = kind.to_ne_bytes();
            let level = i32::from_ne_bytes([kind[0], kind[1], kind[2], kind[3]]);
            let kind = i32::from_ne_bytes([kind[4], kind[5], kind[6], kind[7]]);
            let data = data.to_ne_bytes();
            let int = i32::from_ne_bytes([data[0], data[1], data[2], data[3]]);
            match (level, kind) {
                (libc::SOL_UDP, libc::UDP_GRO) => into.segment = usize::try_from(int).ok(),
                // A single byte, unlike the others.
                (libc::IPPROTO_IP, libc::IP_TOS) => into.tos = Some(data[0]),
                (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => into.tos = Some(int as u8),
                _ => {}
            }
            let Ok(size) = usize::try_from(size) else { return };
            at += size.div_ceil(8).max(2);
            if at > words.len() {
                return;
            }
        }
    }
}

/// Reads `bytes` as the control messages of a datagram.
#[cfg(feature = "fuzzing")]
pub(crate) fn try_control(bytes: &[u8]) {
    let mut control = Control([0; CONTROL_BYTES / 8]);
    for (word, bytes) in control.0.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_ne_bytes(bytes.try_into().unwrap_or_default());
    }
    let src = IpAddr::from([0; 4]);
    let payload = &[][..];
    let mut received =
        Received { payload, src, src_port: 0, segment: None, tos: None, truncated: false };
    control.parse(bytes.len(), &mut received);
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
mod tests;
