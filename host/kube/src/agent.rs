//! What the agent of the node says at its control socket, which `docs/agent.md` describes.

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with,
};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};

use crate::look::{Look, SOON};
use crate::said::Said;
use crate::sysfs::MEGA;

/// The longest message.
const BYTES_MAX: usize = 16 << 10;
/// The longest that an agent may take for a line. One that takes longer serves no container either.
const PATIENCE: Duration = Duration::from_secs(2);

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Reply {
    Agent(Status),
    Refused { reason: String },
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct Status {
    pub(crate) version: String,
    pub(crate) uplinks: Vec<Uplink>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct Uplink {
    pub(crate) interface: String,
    /// Bits per second.
    pub(crate) rate: u64,
    /// Why it is not shared: then nothing of it can be reserved.
    pub(crate) fault: Option<String>,
}

/// A reply to a command about claims.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Claimed(Claimed),
    Refused { reason: String },
    Done {},
}

/// A claim that the agent has, and a container of its pods: a line for each that it knows.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct Claimed {
    pub(crate) uid: String,
    pub(crate) pod: Option<String>,
    pub(crate) mac: Option<String>,
    #[serde(default)]
    pub(crate) addresses: Vec<IpAddr>,
}

/// Has the agent do a command about claims. Error: it did not, in words for a pod's events.
pub(crate) async fn commanded(socket: &Path, command: &Value) -> Result<Vec<Claimed>, String> {
    let away = |error| format!("no agent at {}: {error}", socket.display());
    let connection = sent(socket, &command.to_string()).map_err(away)?;
    let mut claims = Vec::new();
    loop {
        match answered(&connection).await.map_err(away)? {
            Answer::Claimed(claim) => claims.push(claim),
            Answer::Refused { reason } => return Err(format!("the agent refuses: {reason}")),
            Answer::Done {} => return Ok(claims),
        }
    }
}

/// Watches the agent for ever: whether it answers, and its uplinks, which stay as they were while
/// it does not. It asks anew every `period`: an agent that hangs has no news. It calls `another` if
/// the agent hung up and the next attempt is answered: that agent may have forgotten all.
pub(crate) async fn follow(
    socket: PathBuf,
    period: Duration,
    healthy: &watch::Sender<bool>,
    look: &Look,
    has: impl Fn(&Status),
    another: impl Fn(),
) {
    let (mut said, mut hung_up) = (Said::default(), false);
    let tell = |is_there| {
        healthy.send_if_modified(|it| std::mem::replace(it, is_there) != is_there);
        look.now();
    };
    loop {
        let until = Instant::now() + period;
        match watched(&socket).await {
            Ok((connection, status)) => {
                said.info(format!("the agent at {} answers", socket.display()));
                if hung_up {
                    another();
                }
                has(&status);
                tell(true);
                hung_up = loop {
                    match timeout_at(until, news(connection.as_ref())).await {
                        Ok(Ok(Reply::Agent(status))) => {
                            has(&status);
                            look.now();
                        }
                        Err(_) => break false,
                        Ok(_) => break true,
                    }
                };
            }
            Err(error) => {
                hung_up = false;
                said.warn(format!("no agent at {}: {error}", socket.display()));
                tell(false);
            }
        }
        // One that restarts is away for a moment.
        tokio::time::sleep_until(until.min(Instant::now() + SOON)).await;
    }
}

/// The agent's word of now, and the connection that has its news. An older agent has no `watch`.
async fn watched(socket: &Path) -> io::Result<(Option<AsyncFd<OwnedFd>>, Status)> {
    let mut refused = String::new();
    for (command, has_news) in [("watch", true), ("status", false)] {
        let connection = sent(socket, &json!({"version": 1, "command": command}).to_string())?;
        match answered(&connection).await? {
            Reply::Agent(status) => return Ok((has_news.then_some(connection), status)),
            Reply::Refused { reason } => refused = reason,
        }
    }
    Err(io::Error::other(refused))
}

async fn news(connection: Option<&AsyncFd<OwnedFd>>) -> io::Result<Reply> {
    match connection {
        Some(connection) => received(connection).await,
        None => std::future::pending().await,
    }
}

/// Mb/s, rounded down.
pub(crate) fn reservable(status: &Status) -> u64 {
    let shared = status.uplinks.iter().filter(|uplink| uplink.fault.is_none());
    shared.fold(0_u64, |sum, uplink| sum.saturating_add(uplink.rate)) / MEGA
}

fn sent(socket: &Path, question: &str) -> io::Result<AsyncFd<OwnedFd>> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connection = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    // An agent that accepts nothing has a full queue: EAGAIN.
    connect(&connection, &SocketAddrUnix::new(socket)?)?;
    send(&connection, question.as_bytes(), SendFlags::NOSIGNAL)?;
    ready(connection)
}

/// The next line of a reply, of an agent that is about to send it.
async fn answered<T: DeserializeOwned>(connection: &AsyncFd<OwnedFd>) -> io::Result<T> {
    timeout(PATIENCE, received(connection)).await?
}

/// The next line.
async fn received<T: DeserializeOwned>(connection: &AsyncFd<OwnedFd>) -> io::Result<T> {
    let mut bytes = vec![0; BYTES_MAX];
    let read = |it: &OwnedFd| Ok(recv(it, &mut bytes[..], RecvFlags::empty())?.0);
    let length = connection.async_io(Interest::READABLE, read).await?;
    if length == 0 {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it hung up: is this its user?"));
    }
    serde_json::from_slice(&bytes[..length]).map_err(io::Error::from)
}

#[allow(deprecated, reason = "the other way is unsafe, for types that may close their descriptor")]
fn ready(connection: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(connection)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservable_is_the_sum_of_the_uplinks_that_are_shared() {
        for (text, sum) in [
            (r#"{"agent":{}}"#, 0),
            (r#"{"agent":{"uplinks":[{"interface":"a","rate":10000000000}]}}"#, 10_000),
            (
                r#"{"agent":{"uplinks":[{"rate":1999999},{"rate":1},{"rate":5000000,"fault":"x"}]}}"#,
                2,
            ),
            (
                r#"{"agent":{"uplinks":[{"rate":18446744073709551615},{"rate":9}]}}"#,
                18_446_744_073_709,
            ),
        ] {
            let Ok(Reply::Agent(status)) = serde_json::from_str(text) else { panic!("{text}") };
            assert_eq!(reservable(&status), sum, "{text}");
        }
        let text = r#"{"refused":{"reason":"no container is called \"\""}}"#;
        assert!(matches!(serde_json::from_str(text), Ok(Reply::Refused { .. })));
        for text in [r#"{"done":{}}"#, r#"{"container":{}}"#, "{}", "[]", "7", "\"agent\""] {
            assert!(serde_json::from_str::<Reply>(text).is_err(), "{text}");
        }
    }
}
