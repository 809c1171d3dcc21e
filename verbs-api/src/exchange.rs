//! A small exchange, over TCP or a queue pair, that connects queue pairs and lets two programs
//! talk.
//!
//! Each side sends and reads one line of JSON. It holds address, QPN, starting PSN, path MTU,
//! receive budget, and data of the program, such as the address and key of a region.
//!
//! ```
//! use std::net::{IpAddr, Ipv4Addr, TcpListener};
//! use std::thread;
//! use std::time::Duration;
//! use rocinante::exchange::{Exchange, Hello};
//! use rocinante::{ConnectOptions, Context, VerbsError};
//!
//! fn main() -> Result<(), VerbsError> {
//!     let [here, there] = [1, 2].map(|host| IpAddr::from([127, 0, 0, host]));
//! #   let (here, there) = rocinante::doc::addresses();
//!     // The server; usually it is another program, on another machine.
//!     let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
//!     let address = listener.local_addr()?;
//!     let server = thread::spawn(move || connect(there, Exchange::accept_from(&listener)?));
//!     connect(here, Exchange::connect(address, Duration::from_secs(10))?)?;
//!     server.join().unwrap()
//! }
//!
//! /// Both sides do the same.
//! fn connect(own: IpAddr, mut exchange: Exchange) -> Result<(), VerbsError> {
//!     let ctx = Context::open(own)?;
//!     let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(16)?);
//!     let qp = pd.qp(&cq, &cq).build()?;
//!     let hello = Hello { endpoints: vec![qp.endpoint()], ..Hello::default() };
//!     let theirs = exchange.swap(&hello)?;
//!     let Some(peer) = theirs.endpoints.first() else {
//!         return Err(exchange.error("it offers no queue pair"));
//!     };
//!     let _qp = qp.connect(peer, &ConnectOptions::default())?;
//!     // From here on the peer's queue pair receives, too.
//!     exchange.barrier("connected")?;
//!     // Neither side destroys its queue pair while the other still uses it.
//!     exchange.barrier("done")
//! }
//! ```

mod link;
mod queue;
#[cfg(test)]
mod tests;
mod wire;

use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rocinante_soft::model::endpoint::Endpoint;
use rocinante_soft::model::error::VerbsError;
use rocinante_stack::mem::RemoteSlice;
use rocinante_stack::types::Mtu;

use self::link::{Link, Watch};
use crate::cm;
use crate::context::Context;
use crate::tuning::exchange::{ASKED, CHARS_MAX, LINE_MAX, PATIENCE};

/// The data that one side sends by [`Exchange::swap`]: its queue pairs, its regions, and a note of
/// the program.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hello {
    /// Its queue pairs, in the order in which to connect them.
    pub endpoints: Vec<Endpoint>,
    /// Regions that the peer may address.
    pub regions: Vec<RemoteSlice>,
    /// Any text of the program.
    pub note: String,
}

/// A connection over which two programs exchange the data of their queue pairs, and wait for each
/// other.
///
/// Both programs make the same calls in the same order. Each call sends or reads *lines*: text of
/// one program for the other, in UTF-8, ended by a line feed, at most 4 MiB. The line of one side's
/// [`say`](Self::say) is what the other side's [`hear`](Self::hear) returns.
///
/// A wait for the peer ends after 60 s, or the time of [`set_patience`](Self::set_patience).
/// Without a limit it still ends when the peer's machine is gone. Errors name the peer and the
/// *phase*: the step of the program in which this side waits, such as `exchange of endpoints`.
#[derive(Debug)]
pub struct Exchange {
    link: Link,
    peer: SocketAddr,
    phase: String,
    patience: Option<Duration>,
}

impl Exchange {
    /// Listens on a TCP address, and waits without limit for one peer to connect.
    ///
    /// # Errors
    /// [`VerbsError::Io`] if the address cannot be bound.
    pub fn accept(address: SocketAddr) -> Result<Self, VerbsError> {
        Self::accept_from(&TcpListener::bind(address)?)
    }

    /// Waits for the next peer of a listener, without limit unless the listener is non-blocking.
    ///
    /// # Errors
    /// [`VerbsError::Io`].
    pub fn accept_from(listener: &TcpListener) -> Result<Self, VerbsError> {
        let (stream, peer) = listener.accept()?;
        Self::over(stream, peer)
    }

    /// Connects to a peer that listens on `address`. While no program listens there, it retries
    /// until `patience` is over.
    ///
    /// # Errors
    /// [`VerbsError::Exchange`] names the peer, its answer, and the remedy.
    pub fn connect(address: SocketAddr, patience: Duration) -> Result<Self, VerbsError> {
        let begin = Instant::now();
        loop {
            let left = patience.saturating_sub(begin.elapsed());
            match TcpStream::connect_timeout(&address, left.max(Duration::from_millis(10))) {
                Ok(stream) => return Self::over(stream, address),
                Err(error) if begin.elapsed() >= patience => {
                    return Err(VerbsError::Exchange(cannot_connect(address, &error)));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    fn over(stream: TcpStream, peer: SocketAddr) -> Result<Self, VerbsError> {
        Ok(Self::new(Link::tcp(stream)?, peer))
    }

    fn new(link: Link, peer: SocketAddr) -> Self {
        Self { link, peer, phase: "exchange".to_owned(), patience: Some(PATIENCE) }
    }

    /// Connects through the connection manager to a peer that listens on `address`
    /// ([`cm::Listener`]) and accepts with [`accept_cm`](Self::accept_cm). While no program listens
    /// there, it retries until `patience` is over. The lines then go over a queue pair of `ctx`,
    /// not over TCP.
    ///
    /// # Errors
    /// [`VerbsError::Exchange`] names the peer, its answer, and the remedy.
    pub fn connect_cm(
        ctx: &Context,
        address: SocketAddr,
        patience: Duration,
    ) -> Result<Self, VerbsError> {
        let queue = queue::connect(ctx, address, patience)?;
        Ok(Self::new(Link::Queue(Box::new(queue)), address))
    }

    /// Accepts a peer that calls [`connect_cm`](Self::connect_cm). Rejects any other, and tells it
    /// the reason.
    ///
    /// # Errors
    /// [`VerbsError::Exchange`] if the peer requests something else, or goes away.
    pub fn accept_cm(ctx: &Context, request: cm::Request) -> Result<Self, VerbsError> {
        let peer = request.peer();
        let queue = queue::accept(ctx, request)?;
        Ok(Self::new(Link::Queue(Box::new(queue)), peer))
    }

    /// Whether a request comes from a peer that calls [`connect_cm`](Self::connect_cm), so that
    /// [`accept_cm`](Self::accept_cm) can accept it. Its private data say that.
    #[must_use]
    pub fn is_asked_for_by(request: &cm::Request) -> bool {
        queue::is_asked_for_by(request)
    }

    /// The largest path MTU that both sides' links take, if the exchange goes over a queue pair;
    /// `None` over TCP.
    #[must_use]
    pub fn path_mtu(&self) -> Option<Mtu> {
        match &self.link {
            Link::Tcp(_) => None,
            Link::Queue(queue) => Some(queue.path_mtu()),
        }
    }

    /// The peer's address and port.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// This side's address and port of the connection; the port is 0 if it goes over a queue pair.
    ///
    /// # Errors
    /// [`VerbsError::Io`].
    pub fn local(&self) -> Result<SocketAddr, VerbsError> {
        Ok(self.link.local()?)
    }

    /// Sets the timeout of all further waits for a line of the peer, from the start of the wait to
    /// the line's end; `None` waits without limit. The default is 60 s.
    pub fn set_patience(&mut self, patience: Option<Duration>) {
        self.patience = patience;
    }

    /// Sets the phase that errors name from now on, for instance `"transfer"`. It is `"exchange"`
    /// at first. [`swap`](Self::swap) and [`barrier`](Self::barrier) have their own while they
    /// last.
    pub fn enter(&mut self, phase: &str) {
        phase.clone_into(&mut self.phase);
    }

    /// An error of the program's own, `what`, which names the peer and the phase as others do.
    #[must_use]
    pub fn error(&self, what: impl fmt::Display) -> VerbsError {
        VerbsError::Exchange(format!("peer {}, {}: {what}", self.peer, self.phase))
    }

    /// Sends this side's data, and waits for the peer's, which calls it as well.
    ///
    /// # Errors
    /// [`VerbsError::Exchange`] if the peer is silent, closes, or sends an invalid line. A hello is
    /// also invalid if no queue pair can be connected to its endpoints, or if their addresses are
    /// of another family than those of `hello`.
    pub fn swap(&mut self, hello: &Hello) -> Result<Hello, VerbsError> {
        self.during("exchange of endpoints", |exchange| {
            exchange.say(&wire::line(hello))?;
            let heard = exchange.hear()?;
            let own = hello.endpoints.first().map(|endpoint| endpoint.address);
            wire::parse(&heard, own).map_err(|what| exchange.error(printable(&what)))
        })
    }

    /// Waits until the peer has called `barrier` with the same `name`.
    ///
    /// # Errors
    /// [`VerbsError::Exchange`] if the peer is silent, closes, calls [`give_up`](Self::give_up), or
    /// sends another name or line.
    pub fn barrier(&mut self, name: &str) -> Result<(), VerbsError> {
        self.barrier_by(name, None)
    }

    /// As [`barrier`](Self::barrier), but without its timeout: it waits as long as `goes_on`, which
    /// it calls several times a second, returns true. For a peer that may be busy without limit,
    /// as long as the caller sees by other means that it works.
    ///
    /// # Errors
    /// As [`barrier`](Self::barrier).
    pub fn barrier_while(
        &mut self,
        name: &str,
        mut goes_on: impl FnMut() -> bool,
    ) -> Result<(), VerbsError> {
        self.barrier_by(name, Some(&mut goes_on))
    }

    fn barrier_by(
        &mut self,
        name: &str,
        goes_on: Option<&mut dyn FnMut() -> bool>,
    ) -> Result<(), VerbsError> {
        self.during(&format!("meeting at {name:?}"), |exchange| {
            match exchange.put(name) {
                // A peer that has met this side may hang up before its device has acknowledged this
                // line; its own lines stay readable.
                Err(error) if !is_hang_up(&error) => return Err(exchange.unsaid(&error)),
                _ => {}
            }
            let heard = exchange.line(goes_on)?;
            if heard != name {
                let heard = printable(&heard);
                return Err(exchange.error(format_args!("it is at {heard:?}, not at {name:?}")));
            }
            Ok(())
        })
    }

    /// Sends one line of text, which the peer's next [`hear`](Self::hear) returns. It does not wait
    /// for that call. The line must not contain a line feed, and not begin with `!`, which starts
    /// the line of [`give_up`](Self::give_up).
    ///
    /// # Errors
    /// [`VerbsError::Exchange`] if the peer has closed the connection, or takes no bytes for 60 s.
    pub fn say(&mut self, line: &str) -> Result<(), VerbsError> {
        self.put(line).map_err(|error| self.unsaid(&error))
    }

    fn put(&mut self, line: &str) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(line.len() + 1);
        bytes.extend_from_slice(line.as_bytes());
        bytes.push(b'\n');
        self.link.write(&bytes)
    }

    fn unsaid(&self, error: &io::Error) -> VerbsError {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                self.error("it does not read this side's lines")
            }
            _ => self.lost(error),
        }
    }

    /// Sends the peer the reason why this side ends early. The peer's [`hear`](Self::hear),
    /// [`swap`](Self::swap) or [`barrier`](Self::barrier) that reads it fails with
    /// [`VerbsError::Exchange`], which has the reason. It does not close the connection, and
    /// ignores that the peer may have gone.
    pub fn give_up(&mut self, why: &str) {
        let why = why.replace('\n', " ");
        // A peer that does not read it any more has ended as well.
        let _ = self.say(&format!("{GAVE_UP}{why}"));
    }

    /// Waits for the peer's next line, and returns it without its line feed.
    ///
    /// # Errors
    /// [`VerbsError::Exchange`] if the peer is silent, closes, calls [`give_up`](Self::give_up), or
    /// sends a line that is too long or is not UTF-8.
    pub fn hear(&mut self) -> Result<String, VerbsError> {
        self.line(None)
    }

    /// Returns `None` at once if nothing of the peer is there, else as [`hear`](Self::hear): once
    /// the first bytes of a line are there, it waits for the others. So a program that is busy with
    /// its queue pairs notices that the peer has gone or given up.
    ///
    /// # Errors
    /// As [`hear`](Self::hear).
    pub fn try_hear(&mut self) -> Result<Option<String>, VerbsError> {
        if !self.link.buffer().is_empty() {
            return self.hear().map(Some);
        }
        match self.link.fill(Some(Duration::ZERO)) {
            Ok(_) => self.hear().map(Some),
            Err(error) if is_not_yet(&error) => Ok(None),
            Err(error) => Err(self.lost(&error)),
        }
    }

    /// A handle that shows, also to another thread, whether the peer is still there.
    ///
    /// # Errors
    /// [`VerbsError::Io`].
    pub fn watch(&self) -> Result<PeerWatch, VerbsError> {
        Ok(PeerWatch { watch: self.link.watch()? })
    }

    fn during<T>(
        &mut self,
        phase: &str,
        work: impl FnOnce(&mut Self) -> Result<T, VerbsError>,
    ) -> Result<T, VerbsError> {
        let before = std::mem::replace(&mut self.phase, phase.to_owned());
        let done = work(self);
        self.phase = before;
        done
    }

    /// The next line. All of it must arrive in time: a byte now and then does not extend the wait.
    fn line(
        &mut self,
        mut goes_on: Option<&mut dyn FnMut() -> bool>,
    ) -> Result<String, VerbsError> {
        let begin = Instant::now();
        // If there is a `goes_on`, only it decides.
        let patience = if goes_on.is_some() { None } else { self.patience };
        let mut line = Vec::new();
        while !self.take(&mut line)? {
            if line.len() > LINE_MAX {
                return Err(self.error(format_args!("its line is longer than {LINE_MAX} bytes")));
            }
            let left = patience.map(|patience| patience.saturating_sub(begin.elapsed()));
            let given_up = goes_on.as_mut().is_some_and(|goes_on| !goes_on());
            if given_up || left == Some(Duration::ZERO) {
                let (said, waited) = (line.len(), begin.elapsed().as_secs_f32());
                return Err(self.error(match said {
                    0 => format!("it said nothing within {waited:.0} s: does its program hang?"),
                    _ => format!("it said {said} bytes of a line within {waited:.0} s"),
                }));
            }
            let wait = if goes_on.is_some() { Some(ASKED) } else { left };
            match self.link.fill(wait) {
                Ok(false) if line.is_empty() => return Err(self.error("it closed the connection")),
                Ok(false) => {
                    let said = line.len();
                    return Err(self.error(format_args!(
                        "it closed the connection after {said} bytes of a line"
                    )));
                }
                Ok(true) => {}
                Err(error) if is_not_yet(&error) => {}
                Err(error) => return Err(self.lost(&error)),
            }
        }
        let line = String::from_utf8(line).map_err(|_| self.error("its line is no text"))?;
        match line.strip_prefix(GAVE_UP) {
            Some(why) => Err(self.error(format_args!("it gave up: {}", printable(why)))),
            None => Ok(line),
        }
    }

    /// Moves the bytes read so far into `line`, up to the line's end. Returns whether the end was
    /// there.
    fn take(&mut self, line: &mut Vec<u8>) -> Result<bool, VerbsError> {
        let read = self.link.buffer();
        let end = read.iter().position(|byte| *byte == b'\n');
        let count = end.unwrap_or(read.len());
        line.extend_from_slice(&read[..count]);
        self.link.consume(count + usize::from(end.is_some()));
        Ok(end.is_some())
    }

    fn lost(&self, error: &io::Error) -> VerbsError {
        match error.kind() {
            _ if is_hang_up(error) => {
                self.error(format_args!("it closed the connection ({error})"))
            }
            ErrorKind::TimedOut => {
                self.error(format_args!("its machine does not answer any more ({error})"))
            }
            _ => self.error(error),
        }
    }
}

/// Whether there is nothing to read yet. A connection that the kernel gave up is `TimedOut`.
fn is_not_yet(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

fn is_hang_up(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset)
}

/// Detects that the peer of an [`Exchange`] has gone, without reading its lines: see
/// [`Exchange::watch`].
#[derive(Debug)]
pub struct PeerWatch {
    watch: Watch,
}

impl PeerWatch {
    /// Whether the peer has closed the connection or called [`Exchange::give_up`].
    /// [`Exchange::hear`] then fails as well, after it has returned the lines that came before.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.watch.is_gone()
    }
}

/// Starts a line that says why the peer cannot go on.
const GAVE_UP: char = '!';

/// The peer's words, made safe for a terminal.
fn printable(words: &str) -> String {
    words.chars().take(CHARS_MAX).map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// The message for a failed connection to `address`.
fn cannot_connect(address: SocketAddr, error: &io::Error) -> String {
    let (host, port) = (address.ip(), address.port());
    let advice = match error.kind() {
        ErrorKind::ConnectionRefused => format!(
            "nobody listens on TCP port {port} there: start the server first, and give both the same port"
        ),
        ErrorKind::TimedOut | ErrorKind::WouldBlock => format!(
            "no answer: is {host} the right address, and does the firewall between let TCP port {port} through?"
        ),
        ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => {
            format!("there is no way to {host}: check the address, and `ip route get {host}`")
        }
        _ => format!("is {host} the right address, and is the server running there?"),
    };
    format!("cannot connect to {address}: {error}: {advice}")
}

/// Parses a line as a peer's hello; a valid one means the same after it is written again.
pub(crate) fn try_parse(text: &str) {
    use std::net::IpAddr;

    for own in [None, Some(IpAddr::from([10, 0, 0, 1])), Some(IpAddr::from([0; 16]))] {
        if let Ok(hello) = wire::parse(text, own) {
            assert_eq!(wire::parse(&wire::line(&hello), own), Ok(hello));
        }
    }
}
