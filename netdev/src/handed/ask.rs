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

use super::message::{Answer, Code, Granted, Refused, Request};
use super::transport::{receive_answer, send_request};
use super::{WAIT_MAX, XDP_WAIT_MAX};
use crate::choose::policy::Audit;
use crate::frames::packet;
use crate::frames::xdp;
use crate::kernel::descriptors::wait_readable;
use crate::kernel::inherited;
use crate::kernel::interface::Interface;
use crate::port::config::{PortConfig, Shards, XdpConfig};
use crate::port::contract::Backend;
use crate::port::error::OpenError;
use crate::port::parts::Parts;
use crate::sharing::Slots;
use crate::tuning::handed::{IN_USE_MAX, IN_USE_PAUSE};
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

/// Ports as they came from an agent.
#[derive(Debug)]
pub(crate) struct Handed {
    /// The agent's description of them.
    pub(crate) granted: Granted,
    /// The descriptors.
    pub(crate) descriptors: Vec<OwnedFd>,
    /// The connection.
    pub(crate) lease: Lease,
}

/// Ports that an agent handed over.
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
    /// Its answer is wrong, or its descriptors cannot be used.
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

    /// The error of making ports of the descriptors.
    pub(crate) fn failed(&self, error: &OpenError) -> AskError {
        AskError::Failed(self.0.clone().unwrap_or_default(), error.to_string())
    }

    /// Asks for ports of `packet` or `afxdp`. An answer or an error comes within [`WAIT_MAX`] each
    /// for the connection and the answer, for that of `afxdp` [`XDP_WAIT_MAX`], and within
    /// [`IN_USE_MAX`] more if the interface is in use.
    pub(crate) fn ask(
        &self,
        backend: Backend,
        iface: &Interface,
        addresses: &[IpAddr],
        config: &PortConfig,
        (shards, slots): (Shards, Option<&Arc<Slots>>),
        despite_rules: bool,
    ) -> Result<Asked, AskError> {
        let Some(path) = &self.0 else { return Err(AskError::Off) };
        let ring_frames = frames_to_ask_for(backend, config).map_err(AskError::Useless)?;
        let mut connection = connected(path)?;
        // Before the agent makes anything for nothing: the port may be in use.
        let guards = udp::acquire_guards(backend, iface, addresses, config, shards, slots)
            .map_err(AskError::Useless)?;
        let tx_buffer_bytes = Some(config.tx_buffer_bytes)
            .filter(|bytes| *bytes != PortConfig::default().tx_buffer_bytes);
        let request = Request {
            backend,
            interface: iface.index,
            addresses: addresses.to_vec(),
            shards,
            ring_frames,
            tx_buffer_bytes,
            despite_rules,
        };
        let failed = |why: String| AskError::Failed(path.clone(), why);
        let end = Instant::now() + IN_USE_MAX;
        let (answer, descriptors) = loop {
            let answered = exchange(&connection, &request).map_err(failed)?;
            match &answered.0.outcome {
                // By a socket that was just closed: the agent does not wait.
                Err(refused) if refused.code == Code::InUse && Instant::now() < end => {
                    std::thread::sleep(IN_USE_PAUSE);
                    connection = connected(path)?;
                }
                _ => break answered,
            }
        };
        let audit = answer.report.map(Audit::from);
        let granted = match answer.outcome {
            Ok(granted) => granted,
            Err(refused) => {
                return Err(AskError::Refused(path.clone(), Box::new((refused, audit))));
            }
        };
        let audit = audit.ok_or_else(|| failed("it does not say which rules there are".into()))?;
        let lease = Lease(Arc::new(inherited::noted(connection)));
        let handed = Handed { granted, descriptors, lease };
        let parts = match backend {
            Backend::Xdp => xdp::assemble_from(iface, addresses, config, handed, guards),
            _ => packet::assemble_from(iface, addresses, config, handed, guards),
        };
        Ok(Asked { parts: parts.map_err(|e| failed(e.to_string()))?, audit })
    }
}

/// The frames to ask for, if they are not left to the agent.
///
/// # Errors
/// The configuration has an option that an agent does not set.
fn frames_to_ask_for(backend: Backend, config: &PortConfig) -> Result<Option<u32>, OpenError> {
    let defaults = PortConfig::default();
    let unless_default = |value, default| (value != default).then_some(value);
    if backend != Backend::Xdp {
        return Ok(unless_default(config.packet.ring_frames, defaults.packet.ring_frames));
    }
    let ring_frames = config.xdp.ring_frames;
    if config.xdp != (XdpConfig { ring_frames, ..defaults.xdp }) {
        let what = "an agent opens the first queues alone, in native mode, and polls none";
        let hint = "leave out the other options of xdp, or run with the capabilities of afxdp";
        return Err(OpenError::plain(backend, what, hint));
    }
    Ok(unless_default(ring_frames, defaults.xdp.ring_frames))
}

/// The error for descriptors of an agent that are not as they should be.
pub(crate) fn unusable(backend: Backend, what: &str) -> OpenError {
    let what = format!("the agent's descriptors cannot be used: {what}");
    OpenError::plain(backend, what, "use a program and an agent of one release")
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
    let wait = if request.backend == Backend::Xdp { XDP_WAIT_MAX } else { WAIT_MAX };
    let end = Instant::now() + wait;
    let received = loop {
        match receive_answer(connection) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            // It hung up without reading. Its earlier answer comes next.
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
    if let Ok(granted) = &answer.outcome
        && granted.backend() != request.backend
    {
        return Err(format!("it hands over {}, not {}", granted.backend(), request.backend));
    }
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
