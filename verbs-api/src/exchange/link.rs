//! The carrier of an exchange's lines: TCP, or a queue pair.

use std::io::{self, BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv, sockopt};

use super::queue::{QueueLink, QueueWatch};
use super::{GAVE_UP, PATIENCE};
use crate::tuning::exchange::TCP_PROBE;

/// The carrier of the lines.
#[derive(Debug)]
pub(super) enum Link {
    Tcp(BufReader<TcpStream>),
    Queue(Box<QueueLink>),
}

impl Link {
    pub(super) fn tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(PATIENCE))?;
        notice_dead_machines(&stream)?;
        Ok(Self::Tcp(BufReader::new(stream)))
    }

    pub(super) fn local(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Tcp(stream) => stream.get_ref().local_addr(),
            Self::Queue(queue) => Ok(queue.local()),
        }
    }

    /// Sends all bytes, or fails after a timeout.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.get_mut().write_all(bytes),
            Self::Queue(queue) => queue.write(bytes),
        }
    }

    /// Received bytes that are not consumed yet.
    pub(super) fn buffer(&self) -> &[u8] {
        match self {
            Self::Tcp(stream) => stream.buffer(),
            Self::Queue(queue) => queue.buffer(),
        }
    }

    pub(super) fn consume(&mut self, count: usize) {
        match self {
            Self::Tcp(stream) => stream.consume(count),
            Self::Queue(queue) => queue.consume(count),
        }
    }

    /// Waits for bytes in an empty buffer: without limit if `wait` is `None`, not at all if it is
    /// zero. Returns false if the peer has closed the connection. Fails with the kind `WouldBlock`
    /// if there is nothing yet.
    pub(super) fn fill(&mut self, wait: Option<Duration>) -> io::Result<bool> {
        match self {
            Self::Tcp(stream) if wait == Some(Duration::ZERO) => {
                stream.get_ref().set_nonblocking(true)?;
                let filled = stream.fill_buf().map(|bytes| !bytes.is_empty());
                stream.get_ref().set_nonblocking(false)?;
                filled
            }
            Self::Tcp(stream) => {
                stream.get_ref().set_read_timeout(wait)?;
                stream.fill_buf().map(|bytes| !bytes.is_empty())
            }
            Self::Queue(queue) => queue.fill(wait),
        }
    }

    pub(super) fn watch(&self) -> io::Result<Watch> {
        Ok(match self {
            Self::Tcp(stream) => Watch::Tcp(stream.get_ref().try_clone()?),
            Self::Queue(queue) => Watch::Queue(queue.watch()),
        })
    }
}

/// Makes the kernel probe a silent peer's kernel, and end the connection after half a minute
/// without an answer. A machine that loses power closes nothing.
fn notice_dead_machines(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, 2 * TCP_PROBE)?;
    sockopt::set_tcp_keepintvl(stream, TCP_PROBE)?;
    sockopt::set_tcp_keepcnt(stream, 4)?;
    Ok(())
}

/// Detects that the peer has gone, without reading.
#[derive(Debug)]
pub(super) enum Watch {
    Tcp(TcpStream),
    Queue(QueueWatch),
}

impl Watch {
    pub(super) fn is_gone(&self) -> bool {
        match self {
            Self::Tcp(stream) => {
                let mut unread = [0; 1024];
                match recv(stream, &mut unread, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
                    Ok((0, _)) => true,
                    Ok((count, _)) => {
                        says_why_it_gave_up(&unread[..count.min(unread.len())]) || is_closed(stream)
                    }
                    Err(error) => error != Errno::WOULDBLOCK && error != Errno::INTR,
                }
            }
            Self::Queue(queue) => queue.is_gone(),
        }
    }
}

/// Whether one of these lines is that of a peer that gave up. The others, which come before it, may
/// be of a point of the work that it has reached.
pub(super) fn says_why_it_gave_up(lines: &[u8]) -> bool {
    lines.split(|byte| *byte == b'\n').any(|line| line.starts_with(&[GAVE_UP as u8]))
}

/// Whether the peer has closed the connection. Lines may be unread.
fn is_closed(stream: &TcpStream) -> bool {
    let mut asked = [PollFd::new(stream, PollFlags::RDHUP)];
    poll(&mut asked, Some(&Timespec::default())) == Ok(1)
}
