//! A small exchange over TCP that connects two queue pairs.
//!
//! Each side sends one line of JSON and reads one: address, QPN, starting PSN, path MTU, what its receive
//! queue holds, and whatever the program adds, such as the address and key of a region.

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rocinante_stack::Budget;
use rocinante_stack::types::{Key, Mtu, Psn, Qpn};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use serde::{Deserialize, Serialize};

use crate::error::VerbsError;
use crate::mr::Mr;

/// What a peer needs to know of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Endpoint {
    /// Its address.
    pub address: IpAddr,
    /// Its number.
    pub qpn: Qpn,
    /// The first PSN that it will send.
    pub psn: Psn,
    /// The largest path MTU that its link takes.
    pub mtu: Mtu,
    /// What its receive queue holds.
    pub budget: Budget,
}

/// A region that a peer may address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteRegion {
    /// Address of its first byte.
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
    /// The key.
    pub rkey: u32,
}

impl RemoteRegion {
    /// The key as work requests have it.
    #[must_use]
    pub fn key(&self) -> Key {
        Key(self.rkey)
    }
}

impl From<&Mr> for RemoteRegion {
    fn from(mr: &Mr) -> Self {
        Self { address: mr.address(), len: mr.len() as u64, rkey: mr.rkey().0 }
    }
}

/// What one side tells the other: its queue pairs, its regions, and a note of the program's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hello {
    /// Its queue pairs, in the order in which they are to be connected.
    pub endpoints: Vec<Endpoint>,
    /// Regions that the peer may address.
    pub regions: Vec<RemoteRegion>,
    /// Whatever the program wants to say.
    pub note: String,
}

#[derive(Serialize, Deserialize)]
struct WireHello {
    rocinante: u32,
    endpoints: Vec<WireEndpoint>,
    regions: Vec<RemoteRegion>,
    note: String,
}

#[derive(Serialize, Deserialize)]
struct WireEndpoint {
    address: IpAddr,
    qpn: u32,
    psn: u32,
    mtu: u32,
    budget_bytes: u32,
    budget_datagrams: u32,
}

const VERSION: u32 = 1;
/// The longest line that is read.
const LINE_MAX: u64 = 4 << 20;

/// A connection over which two programs tell each other of their queue pairs, and wait for each other.
#[derive(Debug)]
pub struct Exchange {
    stream: BufReader<TcpStream>,
    peer: SocketAddr,
}

impl Exchange {
    /// Waits for a peer on `address`.
    ///
    /// # Errors
    /// [`VerbsError::Io`] if the address cannot be bound.
    pub fn accept(address: SocketAddr) -> Result<Self, VerbsError> {
        Self::accept_from(&TcpListener::bind(address)?)
    }

    /// Waits for a peer on a listener.
    ///
    /// # Errors
    /// [`VerbsError::Io`].
    pub fn accept_from(listener: &TcpListener) -> Result<Self, VerbsError> {
        let (stream, peer) = listener.accept()?;
        Self::over(stream, peer)
    }

    /// Connects to a peer that listens on `address`, and tries again until `patience` is over while nobody does.
    ///
    /// # Errors
    /// [`VerbsError::Exchange`] names the peer, what it answered, and what to do.
    pub fn connect(address: SocketAddr, patience: Duration) -> Result<Self, VerbsError> {
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match TcpStream::connect_timeout(&address, left.max(Duration::from_millis(10))) {
                Ok(stream) => return Self::over(stream, address),
                Err(error) if Instant::now() >= deadline => {
                    return Err(VerbsError::Exchange(cannot_connect(address, &error)));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    fn over(stream: TcpStream, peer: SocketAddr) -> Result<Self, VerbsError> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        Ok(Self { stream: BufReader::new(stream), peer })
    }

    /// The peer's TCP address.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// The address by which the peer reached us, or from which we reached it.
    ///
    /// # Errors
    /// [`VerbsError::Io`].
    pub fn local(&self) -> Result<SocketAddr, VerbsError> {
        Ok(self.stream.get_ref().local_addr()?)
    }

    /// How long to wait for the peer's next line; `None` for ever.
    ///
    /// # Errors
    /// [`VerbsError::Io`].
    pub fn set_patience(&self, patience: Option<Duration>) -> Result<(), VerbsError> {
        Ok(self.stream.get_ref().set_read_timeout(patience)?)
    }

    /// Says hello and hears the peer's.
    ///
    /// # Errors
    /// [`VerbsError::Exchange`] if the peer is silent, closes, or says something else.
    pub fn swap(&mut self, hello: &Hello) -> Result<Hello, VerbsError> {
        let line = serde_json::to_string(&WireHello::from(hello)).map_err(|e| self.bad(&e))?;
        self.say(&line)?;
        let heard = self.hear()?;
        let wire: WireHello = serde_json::from_str(&heard).map_err(|e| self.bad(&e))?;
        if wire.rocinante != VERSION {
            return Err(self.bad(&format!("it speaks version {}, not {VERSION}", wire.rocinante)));
        }
        wire.hello().map_err(|what| self.bad(&what))
    }

    /// Waits until the peer has come to the same point.
    ///
    /// # Errors
    /// As [`swap`](Self::swap).
    pub fn barrier(&mut self, name: &str) -> Result<(), VerbsError> {
        self.say(name)?;
        let heard = self.hear()?;
        if heard != name {
            return Err(self.bad(&format!("it is at {heard:?}, not at {name:?}")));
        }
        Ok(())
    }

    /// Sends one line.
    ///
    /// # Errors
    /// [`VerbsError::Exchange`] if the peer has closed.
    pub fn say(&mut self, line: &str) -> Result<(), VerbsError> {
        let stream = self.stream.get_mut();
        let sent = stream.write_all(line.as_bytes()).and_then(|()| stream.write_all(b"\n"));
        sent.map_err(|error| self.bad(&error))
    }

    /// Tells the peer that this side cannot go on, and why. Whatever the peer waits for then, it gets this as an error.
    pub fn give_up(&mut self, why: &str) {
        let why = why.replace('\n', " ");
        // Whoever does not hear it any more has ended, too.
        let _ = self.say(&format!("{GAVE_UP}{why}"));
    }

    /// Reads one line.
    ///
    /// # Errors
    /// As [`swap`](Self::swap).
    pub fn hear(&mut self) -> Result<String, VerbsError> {
        let mut line = String::new();
        let read = (&mut self.stream).take(LINE_MAX).read_line(&mut line);
        match read {
            Ok(_) if line.ends_with('\n') => {
                line.pop();
                match line.strip_prefix(GAVE_UP) {
                    Some(why) => Err(self.bad(&format!("it gave up: {}", printable(why)))),
                    None => Ok(line),
                }
            }
            Ok(_) => Err(self.bad(&"it closed the connection")),
            Err(error) => Err(self.bad(&error)),
        }
    }

    /// Reads one line if the peer has sent something, and does not wait for it otherwise. So a program that is busy
    /// with its queue pairs notices that the peer has gone.
    ///
    /// # Errors
    /// As [`swap`](Self::swap).
    pub fn try_hear(&mut self) -> Result<Option<String>, VerbsError> {
        let stream = self.stream.get_ref();
        stream.set_nonblocking(true)?;
        let ready = self.stream.fill_buf().map(|_| ());
        self.stream.get_ref().set_nonblocking(false)?;
        match ready {
            Ok(()) => self.hear().map(Some),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(self.bad(&error)),
        }
    }

    /// Something to ask, also from another thread, whether the peer is still there.
    ///
    /// # Errors
    /// [`VerbsError::Io`].
    pub fn watch(&self) -> Result<PeerWatch, VerbsError> {
        Ok(PeerWatch { stream: self.stream.get_ref().try_clone()? })
    }

    fn bad(&self, what: &dyn std::fmt::Display) -> VerbsError {
        VerbsError::Exchange(format!("peer {}: {what}", self.peer))
    }
}

/// Knows whether the peer of an [`Exchange`] has gone, without reading what it says.
#[derive(Debug)]
pub struct PeerWatch {
    stream: TcpStream,
}

impl PeerWatch {
    /// Whether the peer has closed the connection or given up: [`Exchange::hear`] then says so, too.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        let mut next = [0; 1];
        match recv(&self.stream, &mut next, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((0, _)) => true,
            Ok(_) => char::from(next[0]) == GAVE_UP,
            Err(error) => error != Errno::WOULDBLOCK && error != Errno::INTR,
        }
    }
}

/// Begins a line that says why the peer cannot go on.
const GAVE_UP: char = '!';

/// A peer's words, as far as they may go to a terminal.
fn printable(words: &str) -> String {
    const CHARS_MAX: usize = 500;
    words.chars().take(CHARS_MAX).map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// What to say when there is no connection to `address`.
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

impl From<&Hello> for WireHello {
    fn from(hello: &Hello) -> Self {
        let endpoints = hello.endpoints.iter().map(|endpoint| WireEndpoint {
            address: endpoint.address,
            qpn: endpoint.qpn.value(),
            psn: endpoint.psn.value(),
            mtu: endpoint.mtu.bytes(),
            budget_bytes: endpoint.budget.bytes,
            budget_datagrams: endpoint.budget.datagrams,
        });
        Self {
            rocinante: VERSION,
            endpoints: endpoints.collect(),
            regions: hello.regions.clone(),
            note: hello.note.clone(),
        }
    }
}

impl WireHello {
    fn hello(self) -> Result<Hello, String> {
        let endpoints = self.endpoints.into_iter().map(|wire| {
            let mtu = Mtu::from_bytes(wire.mtu).ok_or(format!("no such path MTU: {}", wire.mtu))?;
            let budget = Budget { bytes: wire.budget_bytes, datagrams: wire.budget_datagrams };
            let (qpn, psn) = (Qpn::new(wire.qpn), Psn::new(wire.psn));
            Ok(Endpoint { address: wire.address, qpn, psn, mtu, budget })
        });
        let endpoints = endpoints.collect::<Result<_, String>>()?;
        Ok(Hello { endpoints, regions: self.regions, note: self.note })
    }
}
