//! A capture that an agent takes for a program without rights, of the program's own container.
//!
//! The program asks once, and then gets frames until it, its container or the agent ends it.
//! `docs/agent.md` describes the messages. A slow program loses frames, which the kernel counts.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::RecvFlags;
use rustix::net::sockopt::set_socket_send_buffer_size_force;
use serde::{Deserialize, Serialize};

use super::message::{MESSAGE_BYTES_MAX, Refused, VERSION};
use super::transport::{connected, message};
use crate::frames::packet::{Captured, Run, Wanted};
use crate::kernel::descriptors::wait_readable;
use crate::kernel::rights;
use crate::tuning::handed::{CAPTURE_QUEUE_BYTES, CAPTURE_ROOM, WAIT_MAX};

/// Bytes of a frame's description: the time in nanoseconds since 1970, then the lengths of the
/// datagrams of a super-packet, of what was taken of each, and of the bytes that follow.
const HEADER: usize = 8 + 3 * 4;
/// The longest frame with its description.
const FRAME_MAX: usize = HEADER + (1 << 16) + 64;
/// The first bytes of a message: frames that the kernel dropped, up to now.
const LOST: usize = 8;

/// The socket for captures of an agent whose socket is at `socket`.
#[must_use]
pub fn path(socket: &Path) -> PathBuf {
    socket.with_extension("capture")
}

/// A program's request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ask {
    version: u32,
    /// The index of the interface in the program's network namespace; `None` for its first.
    #[serde(default)]
    pub interface: Option<u32>,
    /// The datagrams.
    pub wanted: Wanted,
    /// The bytes of each, or all.
    #[serde(default)]
    pub snap: Option<u32>,
}

/// A capture that has begun.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Begun {
    /// The interface's end on the host.
    pub host_end: String,
    /// The reason why the kernel copies whole frames though fewer bytes are wanted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whole_because: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct Answer {
    version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    granted: Option<Begun>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    refused: Option<Refused>,
}

/// A request, for an agent, without waiting. Error: as [`page::asked`](super::page::asked).
pub fn asked(from: impl AsFd) -> io::Result<Ask> {
    let ask: Ask = message::<Ask, MESSAGE_BYTES_MAX>(from)?;
    (ask.version == VERSION).then_some(ask).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Answers, without waiting, and has the kernel keep more of what follows. Error: the kernel's: the
/// program has gone.
pub fn answer(to: impl AsFd, outcome: Result<Begun, Refused>) -> io::Result<()> {
    // Needs CAP_NET_ADMIN. Without it there is less room.
    let _ = set_socket_send_buffer_size_force(&to, CAPTURE_QUEUE_BYTES);
    let (granted, refused) = match outcome {
        Ok(granted) => (Some(granted), None),
        Err(refused) => (None, Some(refused)),
    };
    let answer = Answer { version: VERSION, granted, refused };
    rights::send::<0>(to, &serde_json::to_vec(&answer)?, &[])
}

/// A message of frames.
#[derive(Debug)]
pub struct Frames {
    bytes: Vec<u8>,
    /// The lost frames that the last message had.
    said: u64,
}

impl Default for Frames {
    fn default() -> Self {
        Self { bytes: vec![0; LOST], said: 0 }
    }
}

impl Frames {
    /// Whether a frame more fits.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.bytes.len() < CAPTURE_ROOM
    }

    /// Adds a frame. One that is longer than any is not added.
    pub fn push(&mut self, it: &Captured<'_>) {
        if it.bytes.len() > FRAME_MAX - HEADER {
            return;
        }
        let time = u64::try_from(it.time.as_nanos()).unwrap_or(u64::MAX);
        let run = it.run.unwrap_or(Run { datagram: 0, apart: 0 });
        self.bytes.extend(time.to_ne_bytes());
        for word in [run.datagram, run.apart, it.bytes.len()] {
            self.bytes.extend((word as u32).to_ne_bytes());
        }
        self.bytes.extend(it.bytes);
    }

    /// Sends what there is, without waiting; `lost` frames found no room up to now. Then it is
    /// empty again. Error: `WouldBlock` if the program does not read: the message stays; the
    /// kernel's.
    pub fn send(&mut self, to: impl AsFd, lost: u64) -> io::Result<()> {
        if self.bytes.len() == LOST && self.said == lost {
            return Ok(());
        }
        self.bytes[..LOST].copy_from_slice(&lost.to_ne_bytes());
        rights::send::<0>(to, &self.bytes, &[])?;
        self.bytes.truncate(LOST);
        self.said = lost;
        Ok(())
    }
}

/// A capture of an agent's, as the program has it.
#[derive(Debug)]
pub(crate) struct Stream {
    connection: OwnedFd,
    message: Vec<u8>,
    /// The next frame, and the end of the message.
    at: usize,
    end: usize,
    pub(crate) lost: u64,
    pub(crate) has_ended: bool,
}

impl Stream {
    /// Asks the agent at this socket. Error: why there is no capture, in words.
    pub(crate) fn ask(
        socket: &Path,
        interface: Option<u32>,
        wanted: &Wanted,
        snap: Option<u32>,
    ) -> Result<(Self, Begun), String> {
        let place = path(socket);
        let connection = connected(&place).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                let place = place.display();
                match connected(socket) {
                    Ok(_) => format!("the agent takes no captures, it is an older one ({place})"),
                    Err(_) => format!("there is no agent at {}", socket.display()),
                }
            }
            _ => format!("{}: {error}", place.display()),
        })?;
        let in_words = |error: io::Error| match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => "it hung up".into(),
            _ => error.to_string(),
        };
        let of_agent = |why: String| format!("the agent at {}: {why}", socket.display());
        let exchange = || -> io::Result<Answer> {
            let ask = Ask { version: VERSION, interface, wanted: wanted.clone(), snap };
            rights::send::<0>(&connection, &serde_json::to_vec(&ask)?, &[])?;
            let end = Instant::now() + WAIT_MAX;
            loop {
                match message::<Answer, MESSAGE_BYTES_MAX>(&connection) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    received => return received,
                }
                let left = end.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(io::Error::other("it does not answer in time"));
                }
                wait_readable(&connection, left.as_millis().max(1) as i32)?;
            }
        };
        let answer = exchange().map_err(|error| of_agent(in_words(error)))?;
        match (answer.version, answer.granted, answer.refused) {
            (VERSION, Some(begun), None) => {
                let message = vec![0; LOST + CAPTURE_ROOM + FRAME_MAX];
                let it = Self { connection, message, at: 0, end: 0, lost: 0, has_ended: false };
                Ok((it, begun))
            }
            (VERSION, None, Some(refused)) => Err(of_agent(format!("it refuses: {refused}"))),
            _ => Err(of_agent("an answer that neither grants nor refuses".into())),
        }
    }

    /// Hands the next frame to `take`. `None` if there is none yet, or there will be none.
    pub(crate) fn next<R>(&mut self, take: impl FnOnce(Captured<'_>) -> R) -> Option<R> {
        while self.at == self.end && !self.has_ended {
            if !self.receive()? {
                self.has_ended = true;
            }
        }
        let frame = frame_at(&self.message[self.at..self.end]);
        let Some((frame, len)) = frame.filter(|_| !self.has_ended) else {
            // Nothing behind it is known.
            self.has_ended = true;
            return None;
        };
        self.at += len;
        Some(take(frame))
    }

    /// Receives a message. `None` if there is none yet; `false` if there will be none.
    fn receive(&mut self) -> Option<bool> {
        let received =
            rights::receive::<0>(&self.connection, &mut self.message, RecvFlags::DONTWAIT);
        let count = match received {
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return None,
            Err(_) => 0,
            Ok((count, ..)) => count,
        };
        let lost = self.message[..count].first_chunk();
        let Some(lost) = lost else { return Some(false) };
        self.lost = u64::from_ne_bytes(*lost);
        (self.at, self.end) = (LOST, count);
        Some(true)
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

/// The first frame of a message's rest, and the length of its part.
fn frame_at(bytes: &[u8]) -> Option<(Captured<'_>, usize)> {
    let (time, rest) = bytes.split_first_chunk()?;
    let (words, rest) = rest.split_at_checked(3 * 4)?;
    let word = |nth: usize| -> usize {
        let word = words[4 * nth..].first_chunk().expect("three words");
        u32::from_ne_bytes(*word) as usize
    };
    let bytes = rest.get(..word(2))?;
    let run = (word(0) > 0).then(|| Run { datagram: word(0), apart: word(1) });
    let time = Duration::from_nanos(u64::from_ne_bytes(*time));
    Some((Captured { time, bytes, run }, HEADER + bytes.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    fn pair() -> (OwnedFd, Stream) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let made = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let (ours, connection) = made.expect("sockets");
        let message = vec![0; LOST + CAPTURE_ROOM + FRAME_MAX];
        (ours, Stream { connection, message, at: 0, end: 0, lost: 0, has_ended: false })
    }

    fn frame(bytes: &[u8], run: Option<Run>) -> Captured<'_> {
        Captured { time: Duration::new(1_700_000_000, bytes.len() as u32), bytes, run }
    }

    #[test]
    fn frames_arrive_as_they_were_and_lost_ones_are_known() {
        let (ours, mut stream) = pair();
        let mut frames = Frames::default();
        frames.send(&ours, 0).expect("nothing to send");
        assert_eq!(stream.next(|_| ()), None);
        let run = Run { datagram: 1044, apart: 86 };
        for round in 1..39_u64 {
            let bytes = vec![round as u8; round as usize * 1700];
            frames.push(&frame(&bytes, Some(run)));
            frames.push(&frame(&bytes[..60], None));
            frames.send(&ours, round / 2).expect("there is room");
            for (len, run) in [(bytes.len(), Some(run)), (60, None)] {
                let is_same = |it: Captured<'_>| {
                    it.bytes == &bytes[..len]
                        && it.run == run
                        && it.time.subsec_nanos() == len as u32
                };
                assert_eq!(stream.next(is_same), Some(true), "round {round}");
            }
            assert_eq!((stream.next(|_| ()), stream.lost), (None, round / 2));
        }
        // Lost ones alone.
        frames.send(&ours, 1000).expect("there is room");
        assert_eq!((stream.next(|_| ()), stream.lost, stream.has_ended), (None, 1000, false));
        drop(ours);
        assert_eq!((stream.next(|_| ()), stream.has_ended), (None, true));
    }

    #[test]
    fn a_program_that_does_not_read_gets_the_rest_later() {
        let (ours, mut stream) = pair();
        let (mut frames, mut sent) = (Frames::default(), 0);
        let bytes = [7; 30_000];
        loop {
            frames.push(&frame(&bytes, None));
            match frames.send(&ours, 0) {
                Ok(()) => sent += 1,
                Err(error) => break assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
        }
        while frames.has_room() {
            frames.push(&frame(&bytes, None));
        }
        let mut count = 0;
        while stream.next(|it| assert_eq!(it.bytes.len(), 30_000)).is_some() {
            count += 1;
        }
        assert_eq!(count, sent);
        frames.send(&ours, 5).expect("there is room again");
        while stream.next(|it| assert_eq!(it.bytes.len(), 30_000)).is_some() {
            count += 1;
        }
        assert!(count >= sent + 3 && stream.lost == 5, "{count} of {sent}");
    }

    #[test]
    fn a_message_that_is_none_ends_the_capture() {
        for cut in [1, 7, 8 + 5, 8 + HEADER + 59] {
            let (ours, mut stream) = pair();
            let mut frames = Frames::default();
            frames.push(&frame(&[7; 60], None));
            rights::send::<0>(&ours, &frames.bytes[..cut], &[]).expect("sent");
            assert_eq!((stream.next(|_| ()), stream.has_ended), (None, true), "{cut}");
            frames.send(&ours, 0).expect("sent");
            assert_eq!(stream.next(|_| ()), None);
        }
    }
}
