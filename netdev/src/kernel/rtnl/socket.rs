//! Requests and answers over a netlink socket of any protocol.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NetlinkBuffer,
    NlasIterator,
};
use netlink_sys::{Socket, SocketAddr};
use rustix::net::sockopt::{Timeout, set_socket_timeout};

use crate::kernel::descriptors::netlink;
use crate::tuning::routes::{ANSWER_TIMEOUT, DUMP_ATTEMPTS};

const HEADER_LEN: usize = 16;
/// The longest answer to a request for one object that is parsed.
const ANSWER_MAX: usize = 16 * 1024;
/// The longest request for one object, with its header.
const REQUEST_MAX: usize = 160;

/// A netlink socket connected to the kernel.
pub struct NetlinkSocket {
    socket: Socket,
    sequence: u32,
    /// Buffer for answers that are read without allocating.
    answer: Box<[u8]>,
}

impl std::fmt::Debug for NetlinkSocket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NetlinkSocket").field("sequence", &self.sequence).finish_non_exhaustive()
    }
}

impl NetlinkSocket {
    /// Opens a socket of the given `NETLINK_*` protocol, connected to the kernel.
    pub fn open(protocol: isize) -> io::Result<Self> {
        let mut socket = netlink(protocol)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        set_socket_timeout(&socket, Timeout::Recv, Some(ANSWER_TIMEOUT))?;
        Ok(Self { socket, sequence: 0, answer: vec![0; ANSWER_MAX].into() })
    }

    /// As [`open`](Self::open); the kernel reads all of a request, and refuses unknown parts.
    pub fn open_strict(protocol: isize) -> io::Result<Self> {
        let this = Self::open(protocol)?;
        this.socket.set_netlink_get_strict_chk(true)?;
        Ok(this)
    }

    /// A socket connected to an unused port.
    #[cfg(test)]
    pub fn to_nobody() -> io::Result<Self> {
        let this = Self::open(netlink_sys::protocols::NETLINK_ROUTE)?;
        this.socket.connect(&SocketAddr::new(u32::MAX, 0))?;
        Ok(this)
    }

    /// Sends one request and hands every answer (type, body) to `each`. With `dump`, requests all
    /// objects, and again if the kernel says that they changed meanwhile: `each` may then see an
    /// object twice. Error: the errno with which the kernel refused the request, or `TimedOut`.
    pub fn request(
        &mut self,
        message_type: u16,
        dump: bool,
        body: &[u8],
        each: &mut dyn FnMut(u16, &[u8]),
    ) -> io::Result<()> {
        let is_whole = self.request_loosely(message_type, dump, body, each)?;
        if is_whole { Ok(()) } else { Err(keeps_changing()) }
    }

    /// As [`request`](Self::request). Returns whether the list is whole: the objects may have
    /// changed during each of several attempts.
    pub fn request_loosely(
        &mut self,
        message_type: u16,
        dump: bool,
        body: &[u8],
        each: &mut dyn FnMut(u16, &[u8]),
    ) -> io::Result<bool> {
        for _ in 0..DUMP_ATTEMPTS {
            let flags = NLM_F_REQUEST | if dump { NLM_F_DUMP } else { NLM_F_ACK };
            self.send(message_type, flags, body)?;
            if !self.read_answers(each)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Sends one short request for one object, with `flags` in addition to the usual ones, and
    /// hands the answer (type, body) to `each`, without allocating. Error: as
    /// [`request`](Self::request).
    pub fn request_one(
        &mut self,
        message_type: u16,
        flags: u16,
        body: &[u8],
        each: &mut dyn FnMut(u16, &[u8]),
    ) -> io::Result<()> {
        let mut message = [0; REQUEST_MAX];
        let Some(message) = message.get_mut(..HEADER_LEN + body.len()) else {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        };
        self.send_in(message, message_type, NLM_F_REQUEST | NLM_F_ACK | flags, body)?;
        loop {
            let mut room = &mut self.answer[..];
            let length = self.socket.recv(&mut room, 0).map_err(name_timeout)?;
            let read = hand_out(&self.answer[..length.min(ANSWER_MAX)], self.sequence, each)?;
            if read.complete {
                return Ok(());
            }
        }
    }

    fn send(&mut self, message_type: u16, flags: u16, body: &[u8]) -> io::Result<()> {
        let mut message = vec![0; HEADER_LEN + body.len()];
        self.send_in(&mut message, message_type, flags, body)
    }

    /// Sends a request that is assembled in `message`, which is just long enough.
    fn send_in(
        &mut self,
        message: &mut [u8],
        message_type: u16,
        flags: u16,
        body: &[u8],
    ) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let length = u32::try_from(message.len()).map_err(io::Error::other)?;
        let mut header = NetlinkBuffer::new(&mut *message);
        header.set_length(length);
        header.set_message_type(message_type);
        header.set_flags(flags);
        header.set_sequence_number(self.sequence);
        header.set_port_number(0);
        message[HEADER_LEN..].copy_from_slice(body);
        self.socket.send(message, 0)?;
        Ok(())
    }

    /// Reads to the end of the answer to the last request; true if a dump was interrupted.
    fn read_answers(&mut self, each: &mut dyn FnMut(u16, &[u8])) -> io::Result<bool> {
        let mut interrupted = false;
        loop {
            let (datagram, _) = self.socket.recv_from_full().map_err(name_timeout)?;
            let read = hand_out(&datagram, self.sequence, each)?;
            interrupted |= read.interrupted;
            if read.complete {
                return Ok(interrupted);
            }
        }
    }
}

impl AsFd for NetlinkSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The end of an answer, as a datagram shows it.
pub struct Read {
    /// It was the last datagram.
    complete: bool,
    /// The listed objects changed meanwhile.
    interrupted: bool,
}

/// Hands the answers to the request `sequence` to `each`.
pub fn hand_out(
    datagram: &[u8],
    sequence: u32,
    each: &mut dyn FnMut(u16, &[u8]),
) -> io::Result<Read> {
    let mut read = Read { complete: false, interrupted: false };
    for (header, payload) in Messages(datagram) {
        if header.sequence != sequence {
            continue; // the tail of an answer that an earlier request gave up on
        }
        read.interrupted |= header.flags & NLM_F_DUMP_INTR != 0;
        match header.kind {
            NLMSG_ERROR | NLMSG_DONE => {
                return match error_code(payload) {
                    0 => Ok(Read { complete: true, ..read }),
                    errno => Err(io::Error::from_raw_os_error(errno)),
                };
            }
            kind => each(kind, payload),
        }
    }
    Ok(read)
}

pub(crate) fn keeps_changing() -> io::Error {
    io::Error::new(io::ErrorKind::Interrupted, "the kernel's tables keep changing")
}

fn name_timeout(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock {
        return io::Error::new(io::ErrorKind::TimedOut, "the kernel did not answer over netlink");
    }
    error
}

/// The errno at the start of an `NLMSG_ERROR` or `NLMSG_DONE` (negated there); 0 is success.
fn error_code(payload: &[u8]) -> i32 {
    payload.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code).saturating_neg())
}

/// The parts of `struct nlmsghdr` that matter here.
pub struct Header {
    /// `nlmsg_type`.
    pub kind: u16,
    flags: u16,
    sequence: u32,
}

/// The messages of one datagram; ends at the first one with an invalid length.
pub struct Messages<'a>(pub &'a [u8]);

impl<'a> Iterator for Messages<'a> {
    type Item = (Header, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        // Checked here first: the library's error is an allocated text, made at the end of every
        // datagram.
        if self.0.len() < HEADER_LEN {
            return None;
        }
        let buffer = NetlinkBuffer::new_checked(self.0).ok()?;
        let length = buffer.length() as usize;
        let header = Header {
            kind: buffer.message_type(),
            flags: buffer.flags(),
            sequence: buffer.sequence_number(),
        };
        let payload = self.0.get(HEADER_LEN..length)?;
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        Some((header, payload))
    }
}

/// Type and value of each attribute; ends at the first invalid one.
pub struct Attributes<'a>(pub &'a [u8]);

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let attribute = NlasIterator::new(self.0).next()?.ok()?;
        let length = usize::from(attribute.length());
        let value = self.0.get(4..length)?;
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        Some((attribute.kind(), value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(length: u32, kind: u16, body: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&length.to_ne_bytes());
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(&[0; 10]);
        bytes.extend_from_slice(body);
        bytes
    }

    #[test]
    fn messages_are_cut_at_four_bytes() {
        let mut datagram = message(17, 20, &[1, 0, 0, 0]);
        datagram.extend(message(16, 21, &[]));
        let got: Vec<_> = Messages(&datagram).map(|(h, p)| (h.kind, p.to_vec())).collect();
        assert_eq!(got, [(20, vec![1]), (21, vec![])]);
    }

    #[test]
    fn a_wrong_length_ends_the_datagram() {
        assert_eq!(Messages(&message(400, 20, &[0; 4])).count(), 0);
        assert_eq!(Messages(&message(3, 20, &[0; 4])).count(), 0);
        assert_eq!(Messages(&[0; 7]).count(), 0);
    }

    #[test]
    fn an_error_is_a_negated_errno() {
        assert_eq!(error_code(&(-19i32).to_ne_bytes()), 19);
        assert_eq!(error_code(&[]), 0);
    }

    #[test]
    fn attributes_end_at_the_first_broken_one() {
        let bytes = [5, 0, 1, 0, 9, 0, 0, 0, 4, 0, 2, 0, 200, 0, 3, 0, 1];
        let got: Vec<_> = Attributes(&bytes).map(|(kind, v)| (kind, v.to_vec())).collect();
        assert_eq!(got, [(1, vec![9]), (2, vec![])]);
        assert_eq!(Attributes(&[3, 0, 1, 0]).count(), 0);
        assert_eq!(Attributes(&[4, 0]).count(), 0);
    }

    /// An answer to the request `sequence`.
    fn answer(sequence: u32, kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
        let mut bytes = message(16 + body.len() as u32, kind, body);
        bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
        bytes[8..12].copy_from_slice(&sequence.to_ne_bytes());
        bytes
    }

    #[test]
    fn answers_to_another_request_are_not_taken_for_this_ones() {
        let error = (-libc::ENODEV).to_ne_bytes();
        let (mine, other) = (u32::MAX, 0);
        let datagram = [
            answer(other, 20, NLM_F_DUMP_INTR, &[1; 4]),
            answer(other, NLMSG_ERROR, 0, &error),
            answer(other, NLMSG_DONE, 0, &[0; 4]),
            answer(mine, 20, 0, &[2; 4]),
        ]
        .concat();
        let mut got = Vec::new();
        let mut each = |kind: u16, payload: &[u8]| got.push((kind, payload.to_vec()));
        let read = hand_out(&datagram, mine, &mut each).expect("no error of this one");
        assert!(!read.complete && !read.interrupted);
        let end = answer(mine, NLMSG_DONE, NLM_F_DUMP_INTR, &[0; 4]);
        let read = hand_out(&end, mine, &mut each).expect("no error");
        assert!(read.complete && read.interrupted, "it is to be asked again");
        let failed = hand_out(&answer(mine, NLMSG_ERROR, 0, &error), mine, &mut each);
        assert_eq!(failed.err().and_then(|e| e.raw_os_error()), Some(libc::ENODEV));
        assert_eq!(got, [(20, vec![2; 4])]);
    }

    #[test]
    fn error_codes_are_read_at_their_least_and_greatest() {
        for (code, errno) in
            [(0, 0), (-1, 1), (-4095, 4095), (i32::MIN, i32::MAX), (i32::MAX, -i32::MAX)]
        {
            assert_eq!(error_code(&code.to_ne_bytes()), errno, "{code}");
        }
        assert_eq!(error_code(&[1, 2, 3]), 0, "success without a code");
    }

    #[test]
    fn lengths_that_make_no_sense_end_what_they_are_in() {
        for length in [0, 1, 15, 21, 24, u32::MAX - 3, u32::MAX] {
            let bytes = [message(length, 20, &[0; 4]), message(16, 21, &[])].concat();
            let kinds: Vec<u16> = Messages(&bytes).map(|(header, _)| header.kind).collect();
            let reached = match length {
                21 | 24 => vec![20],
                _ => vec![],
            };
            assert!(kinds.starts_with(&reached) && kinds.len() < 3, "{length}: {kinds:?}");
        }
        for length in [0, 1, 2, 3, 9, 255, u16::MAX] {
            let [low, high] = length.to_ne_bytes();
            let bytes = [4, 0, 1, 0, low, high, 2, 0, 0, 0, 0, 0];
            assert_eq!(Attributes(&bytes).count(), 1, "{length}");
        }
    }
}
