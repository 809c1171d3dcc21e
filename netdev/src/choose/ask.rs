//! The program's side: asks an agent for the parts of ports.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use super::policy::Audit;
use crate::frames::packet;
use crate::frames::xdp;
use crate::handed::{
    self, AGENT_VARIABLE, Agent, Answer, Code, Handed, Refused, Request, WAIT_MAX, XDP_WAIT_MAX,
    receive_answer, send_request,
};
use crate::kernel::descriptors::wait_readable;
use crate::kernel::inherited;
use crate::kernel::interface::Interface;
use crate::port::config::{PortConfig, Shards, XdpConfig};
use crate::port::contract::Backend;
use crate::port::error::OpenError;
use crate::port::parts::{Parts, SharedSockets};
use crate::sharing::Slots;
use crate::tuning::handed::{IN_USE_MAX, IN_USE_PAUSE, TURN_MAX};
use crate::udp;

/// Ports that an agent handed over.
#[derive(Debug)]
pub(super) struct Asked {
    /// The parts of each port.
    pub(super) parts: Vec<Parts>,
    /// The rules of this network namespace, as the agent sees them.
    pub(super) audit: Audit,
}

/// Why an agent handed nothing over.
#[derive(Debug)]
pub(super) enum AskError {
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

/// The error of making ports of the descriptors of an agent.
pub(super) fn failed(agent: &Agent, error: &OpenError) -> AskError {
    AskError::Failed(agent.path().unwrap_or(Path::new("")).to_owned(), error.to_string())
}

/// Asks for ports of `packet` or `afxdp`. An answer or an error comes within [`WAIT_MAX`] each
/// for the connection and the answer, for that of `afxdp` [`XDP_WAIT_MAX`]; within [`TURN_MAX`] if
/// the agent says that the request waits for its turn; and within [`IN_USE_MAX`] more if the
/// interface is in use.
pub(super) fn ask(
    agent: &Agent,
    backend: Backend,
    iface: &Interface,
    addresses: &[IpAddr],
    config: &PortConfig,
    (shards, slots): (Shards, Option<&Arc<Slots>>),
    despite_rules: bool,
) -> Result<Asked, AskError> {
    let Some(path) = agent.path() else { return Err(AskError::Off) };
    let ring_frames = frames_to_ask_for(backend, config).map_err(AskError::Useless)?;
    let mut connection = connected(path)?;
    // Before the agent makes anything for nothing: the port may be in use.
    let shared = shared_sockets(backend, addresses, slots).map_err(AskError::Useless)?;
    let guards = udp::acquire_guards(backend, iface, addresses, config, shards, shared)
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
        wait_ms: u32::try_from(TURN_MAX.as_millis()).ok(),
    };
    let failed = |why: String| AskError::Failed(path.to_owned(), why);
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
            return Err(AskError::Refused(path.to_owned(), Box::new((refused, audit))));
        }
    };
    let audit = audit.ok_or_else(|| failed("it does not say which rules there are".into()))?;
    let lease = Arc::new(inherited::noted(connection));
    let handed = Handed { granted, descriptors, lease };
    let parts = match backend {
        Backend::Xdp => xdp::assemble_from(iface, addresses, config, handed, guards),
        _ => packet::assemble_from(iface, addresses, config, handed, guards),
    };
    Ok(Asked { parts: parts.map_err(|e| failed(e.to_string()))?, audit })
}

/// The frames to ask for, if they are not left to the agent. Error: the configuration has an option
/// that an agent does not set.
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

/// One request and one answer, with its descriptors. Error: why there is no answer, or a wrong one.
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
    let asked = Instant::now();
    let mut end = asked + wait;
    let received = loop {
        match receive_answer(connection) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            // However often it says so, the program waits no longer.
            Ok(Ok((answer, _))) if answer.is_queued() => end = asked + TURN_MAX,
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
    let failed = |why: String| AskError::Failed(path.to_owned(), why);
    handed::connected(path).map_err(|e| match e.kind() {
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

/// The sockets of this process's slots on these addresses, if it shares them.
pub(super) fn shared_sockets(
    backend: Backend,
    addresses: &[IpAddr],
    slots: Option<&Arc<Slots>>,
) -> Result<Option<SharedSockets>, OpenError> {
    let sockets = slots.map(|slots| slots.sockets(addresses)).transpose();
    sockets.map_err(|e| OpenError { backend, ..e })
}
