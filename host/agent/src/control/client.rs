//! The operator's side of the commands.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with,
};

use super::{AgentStatus, ContainerStatus, MESSAGE_BYTES_MAX, Reply, Request, VERSION, Verb, text};
use super::{line, path};
use crate::config::Config;
use crate::error::AgentError;
use crate::offline;

/// The longest that the agent may take for a line: the kernel takes a program off in milliseconds.
const PATIENCE: Duration = Duration::from_secs(20);

/// Prints how the agent is and its containers, or one of them: in words, or as JSON.
///
/// # Errors
/// No agent runs with this configuration, or it does not answer; or it has no such container.
pub fn status(config: &Config, name: Option<&str>, as_json: bool) -> Result<(), AgentError> {
    let Some(connection) = connected(&config.state)? else {
        return Err(AgentError::new("no agent runs", "start it, or see state in agent.toml"));
    };
    let (mut agent, mut containers) = (None::<AgentStatus>, Vec::<ContainerStatus>::new());
    ask(&connection, Verb::Status, name, false, &mut |reply| match reply {
        Reply::Agent(it) => agent = Some(it),
        Reply::Container(it) => containers.push(it),
        _ => {}
    })?;
    let agent = agent.ok_or_else(|| AgentError::new("the agent does not say how it is", ""))?;
    let said = if as_json {
        let all = serde_json::json!({ "agent": agent, "containers": containers });
        format!("{all:#}\n")
    } else {
        text::status(&agent, &containers)
    };
    print(&said);
    Ok(())
}

/// Takes the programs off the hosts' ends of a container, or of all, and forgets them. It prints a
/// line for each. Works with and without an agent.
///
/// # Errors
/// Some stay, for they have ports and `force` is not set; or there is no such container.
pub fn release(config: &Config, name: Option<&str>, force: bool) -> Result<(), AgentError> {
    let mut kept = 0;
    let mut each = |reply| match reply {
        Reply::Released { name } => print(&format!("{name:?} released\n")),
        Reply::Kept { name, reason } => {
            kept += 1;
            print(&format!("{name:?} stays: {reason}\n"));
        }
        _ => {}
    };
    match connected(&config.state)? {
        Some(connection) => ask(&connection, Verb::Release, name, force, &mut each)?,
        None => offline::release(config, name, force, &mut each)?,
    }
    if kept == 0 {
        return Ok(());
    }
    Err(AgentError::new("not all are released", "close the ports, or use --force"))
}

/// A connection with the agent that has this state. `None` if none runs.
fn connected(state: &Path) -> Result<Option<OwnedFd>, AgentError> {
    let path = path(state);
    let failed = |e: Errno| AgentError::os(path.display(), &e.into(), "be root, as the agent is");
    let flags = SocketFlags::CLOEXEC;
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).map_err(failed)?;
    for direction in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(&socket, direction, Some(PATIENCE)).map_err(failed)?;
    }
    match connect(&socket, &SocketAddrUnix::new(&path).map_err(failed)?) {
        Ok(()) => Ok(Some(socket)),
        // None ever ran, or one that was killed left its socket.
        Err(Errno::NOENT | Errno::CONNREFUSED) => Ok(None),
        Err(error) => Err(failed(error)),
    }
}

/// Hands the lines of the agent's replies to `each`.
fn ask(
    connection: &OwnedFd,
    command: Verb,
    name: Option<&str>,
    force: bool,
    each: &mut dyn FnMut(Reply),
) -> Result<(), AgentError> {
    let failed = |e: io::Error| AgentError::os("the agent does not answer", &e, "see its log");
    let request = Request { version: VERSION, command, name: name.map(str::to_owned), force };
    send(connection, &line(&request), SendFlags::NOSIGNAL).map_err(|e| failed(e.into()))?;
    let mut bytes = vec![0; MESSAGE_BYTES_MAX];
    loop {
        let (length, _) =
            recv(connection, &mut bytes[..], RecvFlags::empty()).map_err(|e| failed(e.into()))?;
        if length == 0 {
            return Err(failed(io::ErrorKind::UnexpectedEof.into()));
        }
        match serde_json::from_slice(&bytes[..length]) {
            Ok(Reply::Done {}) => return Ok(()),
            Ok(Reply::Refused { reason }) => return Err(AgentError::new(reason, "")),
            Ok(reply) => each(reply),
            Err(error) => return Err(failed(error.into())),
        }
    }
}

fn print(text: &str) {
    // Whatever reads it may have ended.
    let _ = io::stdout().write_all(text.as_bytes());
}
