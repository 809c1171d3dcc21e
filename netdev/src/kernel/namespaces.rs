//! Calls about other network namespaces that no library wraps.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use crate::kernel::call;

/// `_IO(0xb7, 1)` of `linux/nsfs.h`.
const NS_GET_USERNS: libc::c_ulong = 0xb701;
/// Of `linux/netlink.h`: the option, and the type of its control message.
const NETLINK_LISTEN_ALL_NSID: libc::c_int = 8;

/// The user namespace that owns a namespace (ioctl_ns(2)). Error: `EPERM` if it is neither the
/// caller's nor a descendant.
pub fn owning_user_namespace(namespace: impl AsFd) -> io::Result<OwnedFd> {
    // SAFETY: the call takes no pointer; a non-negative result is a descriptor without another
    // owner.
    unsafe {
        let fd = libc::ioctl(namespace.as_fd().as_raw_fd(), NS_GET_USERNS as _);
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd)) }
    }
}

/// A datagram of a netlink socket, and the number of the network namespace that it is about, if
/// that is not the socket's own. Error: as recvmsg(2): `ENOBUFS` if some were lost.
pub fn receive(socket: impl AsFd, buffer: &mut [u8]) -> io::Result<(usize, Option<i32>)> {
    #[repr(align(8))]
    struct Control([u8; 64]);
    let mut control = Control([0; 64]);
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: all zeroes is a value of this C structure.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control.0.len() as _;
    // SAFETY: the kernel writes at most the lengths given into two buffers that are borrowed
    // exclusively. The control messages are read within the length that it returned.
    unsafe {
        let flags = libc::MSG_DONTWAIT;
        let length = call::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, flags);
        if length < 0 {
            return Err(io::Error::last_os_error());
        }
        let mut namespace = None;
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while !header.is_null() {
            let is_it = (*header).cmsg_level == libc::SOL_NETLINK
                && (*header).cmsg_type == NETLINK_LISTEN_ALL_NSID;
            if is_it {
                namespace = Some(libc::CMSG_DATA(header).cast::<i32>().read_unaligned());
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
        Ok((length as usize, namespace))
    }
}
