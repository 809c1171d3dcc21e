//! Messages of known length over TCP or a queue pair, within a time limit. Errors name the peer and
//! the phase.

mod tcp;

use std::fmt;
use std::io::{ErrorKind, Read};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rocinante::cm::Connection;

use self::tcp::{notice_dead_machines, peek, reach, write_until};
use super::queue::Queue;
use crate::output::{Failure, Kind};

/// What a server of two sides of this program says to another program.
const NOT_UNDERSTOOD: &str = "!this is a rocinante server";
/// Time limit for one message of a peer that only has to answer.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// Time limit for all messages of one phase, in multiples of the limit for one. Otherwise many
/// messages, each just in time, would prolong a phase for ever.
const PHASE: u32 = 3;

/// A connection for messages.
#[derive(Debug)]
pub struct Wire {
    link: Link,
    peer: SocketAddr,
    phase: &'static str,
    patience: Duration,
    /// Time that this side has waited for messages in this phase.
    waited: Duration,
}

/// The transport of the messages.
#[derive(Debug)]
enum Link {
    Tcp(TcpStream),
    Queue(Box<Queue>),
}

impl Wire {
    /// Connects to a server. Tries its addresses in turn until one answers or the time is over.
    ///
    /// # Errors
    /// The name is unknown, or no server answers.
    pub fn connect(
        host: &str,
        port: u16,
        patience: Duration,
        program: &str,
    ) -> Result<Self, Failure> {
        let found = (host, port).to_socket_addrs().map_err(|error| {
            Failure::Failed(format!(
                "cannot find {host:?}: {error}: is the name right? An IP address will do as well"
            ))
        })?;
        let found: Vec<SocketAddr> = found.collect();
        match reach(&found, patience) {
            Ok((stream, address)) => Self::over(stream, address),
            Err(None) => Err(Failure::Failed(format!(
                "{host:?} has no address: give the server's IP address instead"
            ))),
            Err(Some((address, error))) => Err(Failure::Of(
                Kind::Connect,
                format!(
                    "cannot connect to {address}: {error}: start {program} there first, give both \
                 sides the same port, and let TCP port {port} through the firewall between"
                ),
            )),
        }
    }

    /// Waits for a client.
    ///
    /// # Errors
    /// The operating system refuses the connection.
    pub fn accept(listener: &TcpListener) -> Result<Self, Failure> {
        let accepted = listener.accept();
        let (stream, peer) =
            accepted.map_err(|error| Failure::Failed(format!("no client can come: {error}")))?;
        Self::over(stream, peer)
    }

    fn over(stream: TcpStream, peer: SocketAddr) -> Result<Self, Failure> {
        let set = stream.set_nodelay(true).and_then(|()| notice_dead_machines(&stream));
        let wire = Self::new(Link::Tcp(stream), peer);
        set.map_err(|error| wire.failed(error))?;
        Ok(wire)
    }

    /// Messages over a queue pair.
    #[must_use]
    pub fn over_queue(queue: Queue) -> Self {
        let peer = queue.connection().peer();
        Self::new(Link::Queue(Box::new(queue)), peer)
    }

    fn new(link: Link, peer: SocketAddr) -> Self {
        let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
        let (phase, waited) = ("connecting", Duration::ZERO);
        Self { link, peer, phase, patience: PATIENCE, waited }
    }

    /// Whether the connection manager made the connection. Each message is then a SEND.
    #[must_use]
    pub fn is_managed(&self) -> bool {
        matches!(self.link, Link::Queue(_))
    }

    /// The peer's address and port.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// The local address of the connection.
    ///
    /// # Errors
    /// The operating system does not know it.
    pub fn local(&self) -> Result<IpAddr, Failure> {
        match &self.link {
            Link::Tcp(stream) => {
                let local = stream.local_addr().map_err(|error| self.failed(error))?;
                Ok(local.ip().to_canonical())
            }
            Link::Queue(queue) => Ok(queue.local()),
        }
    }

    /// Names the phase that both sides enter, for errors.
    pub fn enter(&mut self, phase: &'static str) {
        crate::ending::enter(phase);
        self.phase = phase;
        self.waited = Duration::ZERO;
    }

    /// Sets the time limit of the messages that follow.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// An error that names the peer and the phase.
    pub fn failed(&self, what: impl fmt::Display) -> Failure {
        Failure::Of(Kind::Peer, format!("peer {}, {}: {what}", self.peer, self.phase))
    }

    /// Sends a message as one segment, because other programs take the result of one `read` for the
    /// whole.
    ///
    /// # Errors
    /// The peer is gone, or does not read.
    pub fn send(&mut self, message: &[u8]) -> Result<(), Failure> {
        let deadline = Instant::now() + self.patience;
        let sent = match &mut self.link {
            Link::Tcp(stream) => write_until(stream, message, deadline),
            Link::Queue(queue) => queue.send(message, deadline),
        };
        sent.map_err(|error| match error.kind() {
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => self.closed(),
            ErrorKind::WouldBlock | ErrorKind::TimedOut => self.failed(format_args!(
                "it does not read our messages: one did not leave within {} s",
                self.patience.as_secs_f32()
            )),
            _ => self.failed(error),
        })
    }

    /// Reads a message.
    ///
    /// # Errors
    /// The peer closes the connection, or the message is incomplete when its time is over.
    pub fn receive<const N: usize>(&mut self) -> Result<[u8; N], Failure> {
        let begin = Instant::now();
        let message = self.message(begin);
        self.waited += begin.elapsed();
        let message = message?;
        match own_words(&message) {
            Some(what) => Err(self.failed(what)),
            None => Ok(message),
        }
    }

    fn message<const N: usize>(&mut self, begin: Instant) -> Result<[u8; N], Failure> {
        let patience = self.patience.min((self.patience * PHASE).saturating_sub(self.waited));
        let mut message = [0; N];
        let received = match &mut self.link {
            Link::Tcp(_) => return self.pieces(message, begin, patience),
            Link::Queue(queue) => queue.receive(&mut message, begin + patience),
        };
        match received {
            Ok(Some(bytes)) if bytes == N => Ok(message),
            Ok(Some(bytes)) => Err(self.failed(format_args!(
                "it sent {bytes} bytes, not a message of {N}: were both sides given the same test and options?"
            ))),
            Ok(None) => Err(self.closed()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Err(self.late(0, N, patience)),
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Reads a message from a stream.
    fn pieces<const N: usize>(
        &self,
        mut message: [u8; N],
        begin: Instant,
        patience: Duration,
    ) -> Result<[u8; N], Failure> {
        let Link::Tcp(stream) = &self.link else { return Err(self.closed()) };
        let deadline = begin + patience;
        let mut filled = 0;
        while filled < N {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.late(filled, N, patience));
            }
            let set = stream.set_read_timeout(Some(left));
            set.map_err(|error| self.failed(error))?;
            match (&*stream).read(&mut message[filled..]) {
                Ok(0) if filled == 0 => return Err(self.closed()),
                Ok(0) => {
                    return Err(self.failed(format_args!(
                        "it closed the connection after {filled} bytes of a message of {N}"
                    )));
                }
                Ok(count) => filled += count,
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock | ErrorKind::Interrupted => {}
                    ErrorKind::TimedOut => {
                        return Err(self.failed("its machine does not answer any more"));
                    }
                    ErrorKind::ConnectionReset => return Err(self.closed()),
                    _ => return Err(self.failed(error)),
                },
            }
        }
        Ok(message)
    }

    fn late(&self, filled: usize, all: usize, patience: Duration) -> Failure {
        self.failed(format_args!(
            "it sent {filled} bytes of a message of {all} within {} s",
            patience.as_secs_f32()
        ))
    }

    /// Whether a message of the peer is unread, or the peer is gone. Reading would not wait then.
    #[must_use]
    pub fn is_ready(&mut self) -> bool {
        match &mut self.link {
            Link::Tcp(stream) => peek(stream).is_some(),
            // An error shows up on reading.
            Link::Queue(queue) => queue.is_ready().unwrap_or(true),
        }
    }

    /// A handle that tells, also to another thread, whether the peer is still there.
    ///
    /// # Errors
    /// The operating system has no descriptors left.
    pub fn watch(&self) -> Result<Watch, Failure> {
        match &self.link {
            Link::Tcp(stream) => {
                let stream = stream.try_clone().map_err(|error| self.failed(error))?;
                Ok(Watch::Tcp(stream))
            }
            Link::Queue(queue) => Ok(Watch::Connection(queue.connection().clone())),
        }
    }

    fn closed(&self) -> Failure {
        self.failed("it closed the connection: what does it say there?")
    }
}

/// What to do if these are words of this program, with which it does not speak to others.
fn own_words(message: &[u8]) -> Option<&'static str> {
    let begins_as = |words: &[u8]| {
        let shorter = words.len().min(message.len());
        shorter > 8 && message[..shorter] == words[..shorter]
    };
    if begins_as(NOT_UNDERSTOOD.as_bytes()) {
        return Some(
            "it is rocinante's own server: leave out --compat here, or start that with it, too",
        );
    }
    let of_client = begins_as(b"{\"rocinante\":");
    of_client.then_some(
        "it is rocinante's own client: start it with --compat, too, or leave that out here",
    )
}

/// Tells whether the peer of a [`Wire`] is gone, without reading its messages.
#[derive(Debug)]
pub enum Watch {
    /// Over TCP.
    Tcp(TcpStream),
    /// Over a queue pair.
    Connection(Arc<Connection>),
}

impl Watch {
    /// Whether the peer has closed the connection and all of its messages have been read.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        match self {
            Self::Tcp(stream) => peek(stream) == Some(false),
            Self::Connection(connection) => connection.is_disconnected(),
        }
    }

    /// Whether a message of the peer is unread. Visible over TCP only; `false` over a queue pair.
    #[must_use]
    pub fn has_message(&self) -> bool {
        match self {
            Self::Tcp(stream) => peek(stream) == Some(true),
            Self::Connection(_) => false,
        }
    }
}

/// A peer's bytes with every character that is unsafe for a terminal replaced by `?`, up to 120
/// bytes.
#[must_use]
pub fn printable(bytes: &[u8]) -> String {
    const BYTES_MAX: usize = 120;
    let shown = bytes.iter().take(BYTES_MAX);
    shown.map(|byte| if (b' '..=b'~').contains(byte) { char::from(*byte) } else { '?' }).collect()
}

/// Reads a hexadecimal number in the form of the other programs: digits only.
///
/// # Errors
/// The text is no such number, or the number is above `max`.
pub fn hex(text: &str, max: u64) -> Result<u64, String> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = if digits { u64::from_str_radix(text, 16).ok() } else { None };
    number
        .filter(|number| *number <= max)
        .ok_or_else(|| format!("{:?} is no number up to {max:#x}", printable(text.as_bytes())))
}

/// Two connected ends over loopback, for tests.
#[cfg(test)]
pub(crate) mod pair {
    use super::*;

    pub(crate) fn connected() -> (Wire, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Wire::accept(&listener).unwrap(), other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn messages_may_come_in_pieces() {
        let (mut wire, mut other) = pair::connected();
        let sender = std::thread::spawn(move || {
            for piece in ["ab", "c", "def"] {
                other.write_all(piece.as_bytes()).unwrap();
                std::thread::sleep(Duration::from_millis(20));
            }
            other
        });
        assert_eq!(wire.receive::<4>().unwrap(), *b"abcd");
        assert_eq!(wire.receive::<2>().unwrap(), *b"ef");
        drop(sender.join().unwrap());
    }

    #[test]
    fn a_peer_that_sends_half_a_message_is_named_in_time() {
        let (mut wire, mut other) = pair::connected();
        wire.enter("telling addresses");
        wire.set_patience(Duration::from_millis(200));
        other.write_all(b"xyz").unwrap();
        let start = Instant::now();
        let why = wire.receive::<53>().unwrap_err().to_string();
        assert!(start.elapsed() < Duration::from_secs(2));
        assert!(why.starts_with("peer 127.0.0.1:") && why.contains("telling addresses"), "{why}");
        assert!(why.contains("3 bytes of a message of 53"), "{why}");
        assert!(!wire.is_ready() && !wire.watch().unwrap().is_gone());
    }

    /// Messages that are each just in time do not prolong a phase for ever.
    #[test]
    fn a_slow_peer_does_not_prolong_a_phase() {
        let (mut wire, mut other) = pair::connected();
        wire.set_patience(Duration::from_millis(200));
        wire.enter("telling addresses");
        let dawdling = std::thread::spawn(move || {
            while other.write_all(b"x").is_ok() {
                std::thread::sleep(Duration::from_millis(40));
            }
        });
        let begin = Instant::now();
        let mut received = 0;
        while wire.receive::<2>().is_ok() {
            received += 1;
        }
        assert!(received > 1 && begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
        wire.enter("the next phase");
        assert!(wire.receive::<1>().is_ok());
        drop(wire);
        dawdling.join().unwrap();
    }

    /// Single bytes do not prolong the time limit of a message.
    #[test]
    fn single_bytes_do_not_prolong_a_message() {
        let (mut wire, mut other) = pair::connected();
        wire.set_patience(Duration::from_millis(300));
        let dripping = std::thread::spawn(move || {
            for _ in 0..20 {
                if other.write_all(b"x").is_err() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        let start = Instant::now();
        assert!(wire.receive::<1000>().is_err());
        assert!(start.elapsed() < Duration::from_millis(900), "{:?}", start.elapsed());
        drop(wire);
        dripping.join().unwrap();
    }

    #[test]
    fn a_peer_that_goes_is_named() {
        let (mut wire, mut other) = pair::connected();
        let watch = wire.watch().unwrap();
        other.write_all(b"xy").unwrap();
        drop(other);
        assert!(wire.is_ready());
        assert!(!watch.is_gone(), "its last words have not been read");
        assert!(wire.receive::<4>().unwrap_err().to_string().contains("after 2 bytes"));
        assert!(watch.is_gone());
        assert!(wire.receive::<4>().unwrap_err().to_string().contains("closed the connection"));
    }

    #[test]
    fn over_queue_pairs_messages_are_whole() {
        let [mut client, mut server] =
            crate::compat::queue::pair::connected().map(Wire::over_queue);
        assert!(client.is_managed() && client.peer().port() == 18515);
        assert_eq!(server.peer().ip(), client.local().unwrap());
        for number in 0..20u8 {
            client.send(&[number; 16]).unwrap();
            assert_eq!(server.receive::<16>().unwrap(), [number; 16]);
            server.send(&[number; 2]).unwrap();
            assert_eq!(client.receive::<2>().unwrap(), [number; 2]);
        }
        server.enter("telling versions");
        client.send(b"abcde").unwrap();
        let why = server.receive::<16>().unwrap_err().to_string();
        assert!(why.contains("telling versions: it sent 5 bytes, not a message of 16"), "{why}");
        // A silent peer is late. A peer that ends the connection has its messages read first.
        assert!(!server.is_ready() && !server.watch().unwrap().is_gone());
        server.set_patience(Duration::from_millis(50));
        let why = server.receive::<16>().unwrap_err().to_string();
        assert!(why.contains("0 bytes of a message of 16"), "{why}");
        client.send(b"bye").unwrap();
        drop(client);
        server.set_patience(PATIENCE);
        assert_eq!(server.receive::<3>().unwrap(), *b"bye");
        let why = server.receive::<3>().unwrap_err().to_string();
        assert!(why.contains("closed the connection"), "{why}");
        // The last work requests may be flushed before the connection manager reports the end.
        let Watch::Connection(connection) = server.watch().unwrap() else { panic!("it is none") };
        connection.wait_disconnected(PATIENCE).unwrap();
        assert!(server.is_ready() && server.watch().unwrap().is_gone());
        assert!(server.send(b"bye").unwrap_err().to_string().contains("closed the connection"));
    }

    /// A peer that reads now and then does not prolong the time limit of a message.
    #[test]
    fn a_peer_that_reads_too_slowly_is_named_in_time() {
        const PATIENCE: Duration = Duration::from_millis(500);
        let (mut wire, mut other) = pair::connected();
        wire.enter("telling addresses");
        wire.set_patience(PATIENCE);
        let reading = std::thread::spawn(move || {
            let mut some = vec![0; 1 << 18];
            // The reader drains the whole message, in some six seconds.
            while other.read(&mut some).is_ok_and(|count| count > 0) {
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        let begin = Instant::now();
        let why = wire.send(&vec![0; 32 << 20]).unwrap_err().to_string();
        assert!(why.contains("telling addresses: it does not read our messages"), "{why}");
        assert!(begin.elapsed() < 6 * PATIENCE, "{:?}", begin.elapsed());
        drop(wire);
        reading.join().unwrap();
    }

    #[test]
    fn numbers_are_digits_and_nothing_else() {
        assert_eq!(hex("00ff", 0xff), Ok(255));
        for text in ["", "+1", "-1", "0x1", " 1", "g", "100", "11111111111111111"] {
            assert!(hex(text, 0xff).is_err(), "{text}");
        }
    }
}
