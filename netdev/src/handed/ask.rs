//! The program's side: asks an agent for the parts of ports.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::WAIT_MAX;
use super::message::{Answer, Granted, Refused, Request, Ring};
use super::transport::{receive_answer, send_request};
use crate::config::{PortConfig, Shards};
use crate::error::OpenError;
use crate::fd::wait_readable;
use crate::iface::Interface;
use crate::inherited;
use crate::packet;
use crate::parts::Parts;
use crate::policy::Audit;
use crate::port::Backend;
use crate::shared::Slots;
use crate::udp;

/// The environment variable that says where the agent is: the path of its socket, or `off`.
pub const AGENT_VARIABLE: &str = "ROCINANTE_AGENT";

/// Where the agent is, unless the variable says otherwise.
pub const DEFAULT_PATH: &str = "/run/rocinante/agent.sock";

/// Where to ask for ports that this process may not open itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agent(Option<PathBuf>);

/// The connection to the agent. Its end tells the agent that the ports are closed.
#[derive(Debug, Clone)]
pub(crate) struct Lease(#[allow(dead_code)] Arc<OwnedFd>);

/// Packet sockets as they came from an agent.
#[derive(Debug)]
pub(crate) struct HandedSockets {
    /// What the agent says of their rings.
    pub(crate) ring: Ring,
    /// The descriptors.
    pub(crate) sockets: Vec<OwnedFd>,
    /// The connection.
    pub(crate) lease: Lease,
}

/// What an agent handed over.
#[derive(Debug)]
pub(crate) struct Asked {
    /// The parts of each port.
    pub(crate) parts: Vec<Parts>,
    /// The rules of this network namespace, as the agent sees them.
    pub(crate) audit: Audit,
}

/// Why an agent handed nothing over.
#[derive(Debug)]
pub(crate) enum AskError {
    /// This process asks none.
    Off,
    /// There is none.
    Absent(PathBuf),
    /// It was not asked: this process could not make use of the answer.
    Useless(OpenError),
    /// It refuses; it may have looked at the rules.
    Refused(PathBuf, Box<(Refused, Option<Audit>)>),
    /// It does not answer as it should, or what it sent cannot be used.
    Failed(PathBuf, String),
}

impl Agent {
    /// No agent is asked.
    #[must_use]
    pub const fn off() -> Self {
        Self(None)
    }

    /// The agent with the socket at this path.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self(Some(path.into()))
    }

    /// The agent that [`AGENT_VARIABLE`] names.
    #[must_use]
    pub fn from_environment() -> Self {
        match std::env::var_os(AGENT_VARIABLE) {
            Some(word) if word == "off" => Self::off(),
            Some(path) if !path.is_empty() => Self::at(path),
            _ => Self::at(DEFAULT_PATH),
        }
    }

    /// The path of its socket, if one is asked.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.0.as_deref()
    }

    /// The error of making ports of what it handed over.
    pub(crate) fn failed(&self, error: &OpenError) -> AskError {
        AskError::Failed(self.0.clone().unwrap_or_default(), error.to_string())
    }

    /// Asks for ports of `packet`. An answer or an error comes within [`WAIT_MAX`] each for the
    /// connection and the answer.
    pub(crate) fn ask(
        &self,
        iface: &Interface,
        addresses: &[IpAddr],
        config: &PortConfig,
        (shards, slots): (Shards, Option<&Arc<Slots>>),
        despite_rules: bool,
    ) -> Result<Asked, AskError> {
        let Some(path) = &self.0 else { return Err(AskError::Off) };
        let connection = connected(path)?;
        // Before the agent makes anything for nothing: the port may be in use.
        let guards = udp::acquire_guards(Backend::Packet, iface, addresses, config, shards, slots)
            .map_err(AskError::Useless)?;
        let defaults = PortConfig::default();
        let unless_default = |value, default| (value != default).then_some(value);
        let request = Request {
            backend: Backend::Packet,
            interface: iface.index,
            addresses: addresses.to_vec(),
            shards,
            ring_frames: unless_default(config.packet.ring_frames, defaults.packet.ring_frames),
            tx_buffer_bytes: unless_default(config.tx_buffer_bytes, defaults.tx_buffer_bytes),
            despite_rules,
        };
        let failed = |why: String| AskError::Failed(path.clone(), why);
        let (answer, sockets) = exchange(&connection, &request).map_err(failed)?;
        let audit = answer.report.map(Audit::from);
        let granted = match answer.outcome {
            Ok(granted) => granted,
            Err(refused) => {
                return Err(AskError::Refused(path.clone(), Box::new((refused, audit))));
            }
        };
        let audit = audit.ok_or_else(|| failed("it does not say which rules there are".into()))?;
        let lease = Lease(Arc::new(inherited::noted(connection)));
        let Granted::Packet { ring } = granted;
        let handed = HandedSockets { ring, sockets, lease };
        let parts = packet::assemble_from(iface, addresses, config, handed, guards)
            .map_err(|e| failed(e.to_string()))?;
        Ok(Asked { parts, audit })
    }
}

/// One request and one answer, with its descriptors.
///
/// # Errors
/// Why there is no answer, or a wrong one.
fn exchange(connection: &OwnedFd, request: &Request) -> Result<(Answer, Vec<OwnedFd>), String> {
    let broken = |e: io::Error| match e.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => "it hung up".into(),
        _ => e.to_string(),
    };
    match send_request(connection, request) {
        // It may have answered without reading.
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => {}
        sent => sent.map_err(broken)?,
    }
    let end = Instant::now() + WAIT_MAX;
    let received = loop {
        match receive_answer(connection) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            // It hung up without reading. What it said before comes next.
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => {}
            received => break received,
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err("it does not answer in time".into());
        }
        let ms = i32::try_from(left.as_millis()).unwrap_or(i32::MAX).max(1);
        wait_readable(connection, ms).map_err(|e| e.to_string())?;
    };
    let (answer, descriptors) = received.map_err(broken)??;
    let expected = answer.outcome.as_ref().map_or(0, |g| g.descriptors(request.shards.count));
    if descriptors.len() != expected {
        let (came, of) = (descriptors.len(), expected);
        return Err(format!("{came} descriptors came with its answer, not {of}"));
    }
    Ok((answer, descriptors))
}

fn connected(path: &Path) -> Result<OwnedFd, AskError> {
    let connected = || {
        let address = SocketAddrUnix::new(path)?;
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let connection = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
        // A full queue of connections is waited for as long.
        set_socket_timeout(&connection, Timeout::Send, Some(WAIT_MAX))?;
        connect(&connection, &address)?;
        io::Result::Ok(connection)
    };
    let failed = |why: String| AskError::Failed(path.to_owned(), why);
    connected().map_err(|e| match e.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            AskError::Absent(path.to_owned())
        }
        io::ErrorKind::WouldBlock => failed("it does not take the connection".into()),
        _ => failed(e.to_string()),
    })
}

impl fmt::Display for AskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => write!(f, "no agent is asked ({AGENT_VARIABLE} is off)"),
            Self::Absent(path) => write!(
                f,
                "there is no agent at {} to open it (rocinante-agent on the host is one)",
                path.display()
            ),
            Self::Useless(error) => error.fmt(f),
            Self::Refused(path, refused) => {
                write!(f, "the agent at {} refuses: {}", path.display(), refused.0)
            }
            Self::Failed(path, why) => write!(f, "asked the agent at {}: {why}", path.display()),
        }
    }
}
