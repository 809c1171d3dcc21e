//! Datagrams that one process on an address hands over to another: the stream between them, and a
//! message's form.

use std::io::{self, IoSlice};
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};

use crate::port::contract::{PortStats, RxDatagram, RxIpId};

/// The longest payload that is handed over: more than any packet has.
const PAYLOAD_MAX: usize = 8192;
/// The bytes of one read.
const READ_BYTES: usize = 64 * 1024;
/// Bytes before the payload: its length, port and family; TOS; identification; two addresses.
const HEADER: usize = 2 + 2 + 1 + 2 + 5 + 2 * 16;

/// Where a process writes to a neighbour.
#[derive(Debug)]
pub(super) struct Writer(OwnedFd);

impl Writer {
    pub(super) fn new(outbox: OwnedFd) -> Self {
        Self(outbox)
    }

    /// Whether there was room.
    pub(super) fn write(&self, datagram: &RxDatagram<'_>) -> bool {
        let Some(header) = header(datagram) else { return false };
        let parts = [IoSlice::new(&header), IoSlice::new(datagram.payload)];
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        // A message that is shorter than half of the buffer is taken whole or not at all.
        sendmsg(&self.0, &parts, &mut SendAncillaryBuffer::default(), flags).is_ok()
    }
}

fn header(datagram: &RxDatagram<'_>) -> Option<[u8; HEADER]> {
    let len = u16::try_from(datagram.payload.len()).ok()?;
    if usize::from(len) > PAYLOAD_MAX {
        return None;
    }
    let mut header = [0; HEADER];
    header[..2].copy_from_slice(&len.to_ne_bytes());
    header[2..4].copy_from_slice(&datagram.src_port.to_ne_bytes());
    header[4] = u8::from(datagram.src.is_ipv6());
    (header[5], header[6]) = datagram.tos.map_or((0, 0), |tos| (1, tos));
    let (kind, id, flags) = match datagram.ip_id {
        RxIpId::None => (0, 0, 0),
        RxIpId::Hint(id) => (1, id, 0),
        RxIpId::Exact { id, flags } => (2, id, flags),
    };
    header[7] = kind;
    header[8..10].copy_from_slice(&id.to_ne_bytes());
    header[10..12].copy_from_slice(&flags.to_ne_bytes());
    for (at, address) in [(12, datagram.src), (28, datagram.dst)] {
        let octets = match address {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            IpAddr::V6(ip) => ip.octets(),
        };
        header[at..at + 16].copy_from_slice(&octets);
    }
    Some(header)
}

/// The header's datagram and the length of its payload. Neighbours are other processes: all that
/// they write may be wrong.
fn parse(header: &[u8; HEADER]) -> Option<(RxDatagram<'static>, usize)> {
    let word = |at: usize| u16::from_ne_bytes([header[at], header[at + 1]]);
    let address = |at: usize| {
        let octets: [u8; 16] = header[at..at + 16].try_into().expect("16 bytes");
        match header[4] {
            0 => Ipv6Addr::from(octets).to_ipv4_mapped().map(IpAddr::V4),
            1 => Some(IpAddr::V6(octets.into())),
            _ => None,
        }
    };
    let ip_id = match header[7] {
        0 => RxIpId::None,
        1 => RxIpId::Hint(word(8)),
        2 => RxIpId::Exact { id: word(8), flags: word(10) },
        _ => return None,
    };
    let datagram = RxDatagram {
        payload: &[],
        src: address(12)?,
        dst: address(28)?,
        src_port: word(2),
        ip_id,
        tos: (header[5] != 0).then_some(header[6]),
    };
    let len = usize::from(word(0));
    (len <= PAYLOAD_MAX).then_some((datagram, len))
}

/// The place where a process reads datagrams from neighbours, for one of its addresses.
#[derive(Debug)]
pub(crate) struct Mail {
    local: IpAddr,
    inbox: OwnedFd,
    /// Bytes read. They may end with the beginning of a message.
    buffer: Vec<u8>,
    /// The stream has bytes that are no message: the rest means nothing.
    is_broken: bool,
}

impl Mail {
    /// Throws away the mail of a former process on the slot.
    pub(super) fn new(local: IpAddr, inbox: OwnedFd) -> Self {
        let mut mail = Self::unread(local, inbox);
        // More than the stream holds. A neighbour that writes without end does not keep us here.
        for _ in 0..64 {
            match mail.read() {
                Ok(bytes) if bytes > 0 => mail.buffer.clear(),
                _ => break,
            }
        }
        mail
    }

    pub(super) fn unread(local: IpAddr, inbox: OwnedFd) -> Self {
        Self { local, inbox, buffer: Vec::new(), is_broken: false }
    }

    pub(crate) fn local(&self) -> IpAddr {
        self.local
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.inbox.as_fd()
    }

    /// Hands up the mail. Returns the number of datagrams.
    pub(crate) fn receive(
        &mut self,
        stats: &mut PortStats,
        sink: &mut impl FnMut(RxDatagram<'_>),
    ) -> usize {
        if !matches!(self.read(), Ok(bytes) if bytes > 0) {
            return 0;
        }
        let (mut count, mut rest) = (0, self.buffer.as_slice());
        while let Some((header, behind)) = rest.split_first_chunk::<HEADER>() {
            let Some((datagram, len)) = parse(header).filter(|(it, _)| it.dst == self.local) else {
                self.is_broken = true;
                stats.rx_malformed += 1;
                break;
            };
            let Some((payload, behind)) = behind.split_at_checked(len) else { break };
            stats.rx_datagrams += 1;
            stats.rx_runs += 1;
            stats.rx_bytes += len as u64;
            sink(RxDatagram { payload, ..datagram });
            count += 1;
            rest = behind;
        }
        let read = self.buffer.len() - rest.len();
        self.buffer.drain(..read);
        count
    }

    fn read(&mut self) -> io::Result<usize> {
        let waiting = rustix::io::ioctl_fionread(&self.inbox)?;
        if waiting == 0 {
            return Ok(0);
        }
        if self.is_broken {
            self.buffer.clear();
        }
        let before = self.buffer.len();
        self.buffer.resize(before + READ_BYTES.min(waiting as usize), 0);
        let got = recv(&self.inbox, &mut self.buffer[before..], RecvFlags::DONTWAIT);
        let bytes = got.as_ref().map_or(0, |(bytes, _)| *bytes);
        self.buffer.truncate(before + bytes);
        if self.is_broken {
            self.buffer.clear();
        }
        Ok(got.map(|_| bytes)?)
    }
}
