//! One request, one answer.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use netlink_packet_core::{Emitable, Parseable};

use super::socket::{NetlinkSocket, keeps_changing};

/// A socket to the kernel's rtnetlink.
#[derive(Debug)]
pub(crate) struct Rtnl {
    pub(super) socket: NetlinkSocket,
}

impl Rtnl {
    /// Opens a socket in the calling thread's network namespace. Error: the kernel's answer to
    /// `socket(AF_NETLINK)`: no descriptors left, or a seccomp filter.
    pub(crate) fn open() -> io::Result<Self> {
        Ok(Self { socket: NetlinkSocket::open(netlink_sys::protocols::NETLINK_ROUTE)? })
    }

    /// A socket without a peer: every request fails.
    #[cfg(test)]
    pub(crate) fn to_nobody() -> io::Result<Self> {
        Ok(Self { socket: NetlinkSocket::to_nobody()? })
    }

    /// Sends one request and decodes every answer of type `answer`.
    pub(super) fn ask<Q, A>(
        &mut self,
        request: u16,
        answer: u16,
        dump: bool,
        body: &Q,
    ) -> io::Result<Vec<A>>
    where
        Q: Emitable,
        A: Parseable<[u8]>,
    {
        let mut bytes = vec![0; body.buffer_len()];
        body.emit(&mut bytes);
        let mut answers = Vec::new();
        let mut undecodable = None;
        let is_whole =
            self.socket.request_loosely(request, dump, &bytes, &mut |kind, payload| {
                if kind == answer {
                    match A::parse(payload) {
                        Ok(message) => answers.push(message),
                        Err(e) => undecodable = Some(e),
                    }
                }
            })?;
        // On a machine where interfaces come and go all the time, a partial list is good enough.
        // Rules are another matter.
        if !is_whole && !matches!(answer, libc::RTM_NEWLINK | libc::RTM_NEWADDR) {
            return Err(keeps_changing());
        }
        // One odd object (a tunnel type that the library does not know) must not hide the others.
        match undecodable {
            Some(e) if answers.is_empty() => {
                Err(io::Error::new(io::ErrorKind::InvalidData, e.to_string()))
            }
            _ => Ok(answers),
        }
    }
}

impl AsFd for Rtnl {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
