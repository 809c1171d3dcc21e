//! What the agent of the node says at its control socket, which `docs/agent.md` describes.

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with,
};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;

use crate::said::Said;
use crate::sysfs::MEGA;

/// The agent looks at no container for this answer: none is called so, and it says that.
const ARE_YOU_THERE: &str = r#"{"version":1,"command":"status","name":""}"#;
/// Its answer begins with the uplinks, and costs the agent a look at each container.
const STATUS: &str = r#"{"version":1,"command":"status"}"#;
/// The longest message.
const BYTES_MAX: usize = 16 << 10;
/// The longest that an agent may take for a line. One that takes longer serves no container either.
const PATIENCE: Duration = Duration::from_secs(2);
/// How old the uplinks may be, in times of the health's period, and at most: an operator changes
/// them seldom.
const UPLINKS_AGE: (u32, Duration) = (15, Duration::from_secs(30));

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Reply {
    Agent(Status),
    Refused(serde::de::IgnoredAny),
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

/// A claim that the agent has, and a container of its pods if it knows one.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct Claimed {
    pub(crate) uid: String,
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
        match received(&connection).await.map_err(away)? {
            Answer::Claimed(claim) => claims.push(claim),
            Answer::Refused { reason } => return Err(format!("the agent refuses: {reason}")),
            Answer::Done {} => return Ok(claims),
        }
    }
}

/// Asks every `period`, for ever: whether the agent answers, and its uplinks, which stay as they
/// were while it does not.
pub(crate) async fn follow(
    socket: PathBuf,
    period: Duration,
    healthy: &watch::Sender<bool>,
    has: impl Fn(&Status),
) {
    let mut said = Said::default();
    let mut read = None::<Instant>;
    let age = (period * UPLINKS_AGE.0).min(UPLINKS_AGE.1);
    loop {
        let was_there = *healthy.borrow();
        let is_due = read.is_none_or(|at| at.elapsed() >= age);
        let is_status = is_due || !was_there;
        let answer = asked(&socket, if is_status { STATUS } else { ARE_YOU_THERE }).await;
        if is_status && answer.is_ok() {
            read = Some(Instant::now());
        }
        match &answer {
            Ok(Reply::Agent(status)) => has(status),
            Ok(Reply::Refused(_)) => {}
            Err(error) => said.warn(format!("no agent at {}: {error}", socket.display())),
        }
        let is_there = answer.is_ok();
        if is_there {
            said.info(format!("the agent at {} answers", socket.display()));
        }
        healthy.send_if_modified(|it| std::mem::replace(it, is_there) != is_there);
        tokio::time::sleep(period).await;
    }
}

/// Mb/s, rounded down.
pub(crate) fn reservable(status: &Status) -> u64 {
    let shared = status.uplinks.iter().filter(|uplink| uplink.fault.is_none());
    shared.fold(0_u64, |sum, uplink| sum.saturating_add(uplink.rate)) / MEGA
}

async fn asked(socket: &Path, question: &str) -> io::Result<Reply> {
    received(&sent(socket, question)?).await
}

fn sent(socket: &Path, question: &str) -> io::Result<AsyncFd<OwnedFd>> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connection = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    // An agent that accepts nothing has a full queue: EAGAIN.
    connect(&connection, &SocketAddrUnix::new(socket)?)?;
    send(&connection, question.as_bytes(), SendFlags::NOSIGNAL)?;
    ready(connection)
}

/// The next line of a reply.
async fn received<T: DeserializeOwned>(connection: &AsyncFd<OwnedFd>) -> io::Result<T> {
    let mut bytes = vec![0; BYTES_MAX];
    let read = connection
        .async_io(Interest::READABLE, |it| Ok(recv(it, &mut bytes[..], RecvFlags::empty())?.0));
    let length =
        tokio::time::timeout(PATIENCE, read).await.map_err(|_| io::ErrorKind::TimedOut)??;
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
        assert!(matches!(serde_json::from_str(text), Ok(Reply::Refused(_))));
        for text in [r#"{"done":{}}"#, r#"{"container":{}}"#, "{}", "[]", "7", "\"agent\""] {
            assert!(serde_json::from_str::<Reply>(text).is_err(), "{text}");
        }
    }
}
