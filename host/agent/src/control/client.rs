//! The operator's side of the commands.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with,
};

use super::{About, AgentStatus, ContainerStatus, MESSAGE_BYTES_MAX, Reply, Request};
use super::{VERSION, Verb, text};
use super::{line, path};
use crate::config::Config;
use crate::error::AgentError;
use crate::offline;

/// The longest that the agent may take for a line: the kernel takes a program off in milliseconds.
const PATIENCE: Duration = Duration::from_secs(20);

/// Prints how the agent is and its containers, or one of them: in words, or as JSON. Error: no
/// agent runs with this configuration, or it does not answer; or it has no such container.
pub fn status(config: &Config, name: Option<&str>, as_json: bool) -> Result<(), AgentError> {
    let Some(connection) = connected(&path(&config.state))? else {
        return Err(AgentError::new("no agent runs", "start it, or see state in agent.toml"));
    };
    let (mut agent, mut containers) = (None::<AgentStatus>, Vec::<ContainerStatus>::new());
    let name = name.map(str::to_owned);
    ask(&connection, &Request { name, ..Verb::Status.into() }, &mut |reply| match reply {
        Reply::Agent(it) => agent = Some(it),
        Reply::Container(it) => containers.push(*it),
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
/// line for each. Works with and without an agent. Error: some stay, for they have ports and
/// `force` is not set; or there is no such container.
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
    match connected(&path(&config.state))? {
        Some(connection) => {
            let name = name.map(str::to_owned);
            ask(&connection, &Request { name, force, ..Verb::Release.into() }, &mut each)?;
        }
        None => offline::release(config, name, force, &mut each)?,
    }
    if kept == 0 {
        return Ok(());
    }
    Err(AgentError::new("not all are released", "close the ports, or use --force"))
}

/// Has the agent with this control socket know a container before it runs: from then on only the
/// addresses that it has now leave it. Returns the name of the host's end; `None` if no agent runs.
/// Error: the agent does not serve it, or does not answer.
pub fn introduce(control: &Path, about: &About) -> Result<Option<String>, AgentError> {
    of_container(control, Verb::Introduce, about)
}

/// The host's end of a container that the agent knows and guards; `None` if no agent runs. Error:
/// the agent does not know it, does not serve it, or does not answer.
pub fn is_introduced(control: &Path, about: &About) -> Result<Option<String>, AgentError> {
    of_container(control, Verb::Check, about)
}

/// Whether an agent answers at this control socket. Error: it does not answer, or is another
/// user's.
pub fn runs(control: &Path) -> Result<bool, AgentError> {
    let Some(connection) = connected(control)? else { return Ok(false) };
    ask(&connection, &Verb::Status.into(), &mut drop).map(|()| true)
}

fn of_container(control: &Path, verb: Verb, about: &About) -> Result<Option<String>, AgentError> {
    let Some(connection) = connected(control)? else { return Ok(None) };
    let mut end = None;
    let namespace = without_links(&about.namespace)
        .map_err(|e| AgentError::os(about.namespace.display(), &e, "is it a network namespace?"))?;
    let request = Request { about: Some(About { namespace, ..about.clone() }), ..verb.into() };
    ask(&connection, &request, &mut |reply| {
        if let Reply::Introduced { name } = reply {
            end = Some(name);
        }
    })?;
    end.map(Some).ok_or_else(|| AgentError::new("the agent is too old for it", ""))
}

/// A path whose directories are no symbolic links: an absolute one below the root of this process
/// would lead the agent below its own.
fn without_links(path: &Path) -> io::Result<PathBuf> {
    match (path.parent(), path.file_name()) {
        // The file itself may be a link of proc(5), which stands for no path.
        (Some(directory), Some(name)) => Ok(directory.canonicalize()?.join(name)),
        _ => Ok(path.to_owned()),
    }
}

/// A connection with the agent that has this control socket. `None` if none runs.
fn connected(path: &Path) -> Result<Option<OwnedFd>, AgentError> {
    let failed = |e: Errno| AgentError::os(path.display(), &e.into(), "be root, as the agent is");
    let flags = SocketFlags::CLOEXEC;
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).map_err(failed)?;
    for direction in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(&socket, direction, Some(PATIENCE)).map_err(failed)?;
    }
    match connect(&socket, &SocketAddrUnix::new(path).map_err(failed)?) {
        Ok(()) => Ok(Some(socket)),
        // None ever ran, or one that was killed left its socket.
        Err(Errno::NOENT | Errno::CONNREFUSED) => Ok(None),
        Err(error) => Err(failed(error)),
    }
}

/// Hands the lines of the agent's replies to `each`.
fn ask(
    connection: &OwnedFd,
    request: &Request,
    each: &mut dyn FnMut(Reply),
) -> Result<(), AgentError> {
    let failed = |e: io::Error| AgentError::os("the agent does not answer", &e, "see its log");
    send(connection, &line(request), SendFlags::NOSIGNAL).map_err(|e| failed(e.into()))?;
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

impl From<Verb> for Request {
    fn from(command: Verb) -> Self {
        Self { version: VERSION, command, name: None, force: false, about: None, claim: None }
    }
}

fn print(text: &str) {
    // Whatever reads it may have ended.
    let _ = io::stdout().write_all(text.as_bytes());
}
