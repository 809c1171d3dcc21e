//! The commands of an operator, and the agent's replies: lines of JSON on a socket beside the
//! state. `docs/agent.md` describes them.

mod client;
pub(crate) mod serve;
mod text;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::claims::Claim;
use crate::class::Bounds;
use crate::host::{InForce, Rates};
use crate::quota::Uses;
use crate::rate::Rate;

pub use self::client::{introduce, is_introduced, release, runs, status};

/// The version of these messages.
pub(crate) const VERSION: u32 = 1;
/// The longest message, with its end of line.
pub(crate) const MESSAGE_BYTES_MAX: usize = 16 << 10;
/// The longest name of an engine's, in bytes: a status has to fit into a message.
pub(crate) const CALLED_MAX: usize = 1024;
/// The name of the socket, in the directory of the state.
pub(crate) const SOCKET: &str = "control.sock";

/// The MTUs that an interface may be given: with less it loses its IPv6 addresses (RFC 8200,
/// section 5), and a veth has no more.
pub const MTU: RangeInclusive<u32> = 1280..=65_535;

/// The path of root's socket for metrics and facts over HTTP, of an agent with this state.
#[must_use]
pub fn stat_path(state: &Path) -> PathBuf {
    state.with_file_name("stat.sock")
}

/// The path of the socket, of an agent with the default configuration.
pub const DEFAULT: &str = "/run/rocinante-agent/control.sock";

/// The path of the socket, of an agent with this state.
#[must_use]
pub fn path(state: &Path) -> PathBuf {
    state.with_file_name(SOCKET)
}

/// A command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Request {
    pub(crate) version: u32,
    pub(crate) command: Verb,
    /// The host's end of a container; without it, all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<String>,
    /// Whether containers with ports are released, too.
    #[serde(default)]
    pub(crate) force: bool,
    /// The container of an engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) about: Option<About>,
    /// A driver's claims of pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) claim: Option<Claim>,
}

/// An engine's word about a container before it runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// The file of its network namespace, as the process that says so sees it.
    pub namespace: PathBuf,
    /// Its interface, with the addresses that the engine has just given it. Without it, each that
    /// leaves the container; those that are known keep their addresses, and their class if none is
    /// named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    /// The engine's name for it.
    pub id: String,
    /// The engine, or the way by which it says so.
    pub engine: String,
    /// The UID of its pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// The class that it is to have, of those that are configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
    /// Rates of its own: of each way the lesser one of these and its class's binds. Without them
    /// those of an earlier word stay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rates: Option<Rates>,
    /// The MTU of both ends of its interface, in bytes, of [`MTU`]; without it they stay as they
    /// are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verb {
    /// Say how it is.
    Status,
    /// Take the program off, and forget.
    Release,
    /// Make a container known before it runs.
    Introduce,
    /// Say whether it is known.
    Check,
    /// Reserve parts of uplinks for pods.
    Claim,
    /// Give back the claim of this name, its UID.
    Unclaim,
    /// List the claims.
    Claims,
    /// Say how the agent is, and again whenever a driver has something to do.
    Watch,
}

/// A line of the agent's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reply {
    Agent(AgentStatus),
    Container(Box<ContainerStatus>),
    /// The host's end of a container that is known now.
    Introduced {
        name: String,
    },
    /// A claim, and a container of its pods: a line for each that is known, or one without.
    Claimed {
        uid: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pod: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mac: Option<String>,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        addresses: Vec<IpAddr>,
    },
    /// A host's end that was released.
    Released {
        name: String,
    },
    /// A host's end that stays as it is.
    Kept {
        name: String,
        reason: String,
    },
    /// Nothing was done.
    Refused {
        reason: String,
    },
    /// The last line.
    Done {},
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AgentStatus {
    pub(crate) version: String,
    pub(crate) uptime_s: u64,
    pub(crate) containers: usize,
    pub(crate) ports: usize,
    /// Kernel memory of the ports.
    pub(crate) bytes: usize,
    pub(crate) requests: Requests,
    /// The links that containers share.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) uplinks: Vec<UplinkStatus>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct UplinkStatus {
    pub(crate) interface: String,
    /// The rate of all frames that leave by it.
    pub(crate) rate: Rate,
    /// Why it is not shared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) fault: Option<String>,
}

/// A container, by its host's end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(Default))]
pub(crate) struct ContainerStatus {
    pub(crate) name: String,
    /// The engine's name for it, and the engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) engine: Option<String>,
    /// Its class with the limits; the name alone of one that is not configured any more.
    pub(crate) class: ClassStatus,
    /// The inode of its network namespace; 0 until it asks an agent that did not find it.
    pub(crate) namespace: u64,
    /// The index of its interface there.
    pub(crate) interface: u32,
    pub(crate) mac: String,
    /// The addresses that may leave.
    pub(crate) addresses: Vec<IpAddr>,
    /// Whether it gets no further addresses.
    pub(crate) fixed: bool,
    /// Interfaces by which its frames leave unguarded.
    #[serde(default)]
    pub(crate) other_ways_out: Vec<String>,
    pub(crate) ports: Vec<PortStatus>,
    /// The rates in force into it and out of it, or why those of its class are not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ingress: Option<InForce>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) egress: Option<InForce>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rate_fault: Option<String>,
    /// What its programs hold, by the names of the kernel's controller.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) rdma: Uses,
    /// Whether nothing leaves it, because they hold more than they may.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) cut_off: bool,
    /// Whether no RoCEv2 leaves it, as no claim opens it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) closed: bool,
    /// Frames that were dropped, by reason, since the program is there.
    pub(crate) dropped: BTreeMap<String, u64>,
    /// Those of its network namespace.
    pub(crate) requests: Requests,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum ClassStatus {
    /// With the limits.
    Of(Bounds),
    /// One that an engine named, and that has gone from the configuration.
    Gone { name: String },
}

#[cfg(test)]
impl Default for ClassStatus {
    fn default() -> Self {
        Self::Gone { name: "default".into() }
    }
}

/// The ports of a backend.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PortStatus {
    pub(crate) backend: String,
    pub(crate) ports: usize,
    /// Of all their receive rings.
    pub(crate) slots: u64,
    /// Kernel memory.
    pub(crate) bytes: usize,
}

/// Requests since the agent started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Requests {
    pub(crate) granted: u64,
    /// Programs that hung up before their answer.
    pub(crate) lost: u64,
    /// By the code of the refusal.
    pub(crate) refused: BTreeMap<String, u64>,
    pub(crate) waited: Waited,
}

/// How long those waited that were granted or lost, in microseconds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Waited {
    pub(crate) p50_us: u64,
    pub(crate) p99_us: u64,
    pub(crate) max_us: u64,
    pub(crate) mean_us: u64,
}

impl Request {
    /// The request in a message. Error: what to answer if it is none.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let request: Self = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        if request.version != VERSION {
            return Err(format!("the agent speaks version {VERSION}, not {}", request.version));
        }
        let names = request.about.iter().flat_map(|about| {
            [&about.id, &about.engine].into_iter().chain(&about.class).chain(&about.pod)
        });
        if names.into_iter().any(|name| name.len() > CALLED_MAX) {
            return Err("the container's name is too long".to_owned());
        }
        match request.about.as_ref().and_then(|about| about.mtu) {
            Some(mtu) if !MTU.contains(&mtu) => {
                let (least, most) = MTU.into_inner();
                return Err(format!("an MTU is {least} to {most}, and not {mtu}"));
            }
            _ => {}
        }
        Ok(request)
    }

    /// That about a container before it runs.
    pub(crate) fn introducing(about: About) -> Self {
        Self { about: Some(about), ..Verb::Introduce.into() }
    }
}

pub(crate) fn line(message: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(message).unwrap_or_default();
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_request_is_one_or_says_why_not() {
        let request = |name: Option<&str>, force| Request {
            version: VERSION,
            command: Verb::Release,
            name: name.map(str::to_owned),
            force,
            about: None,
            claim: None,
        };
        for one in [request(Some("veth0"), false), request(None, true)] {
            assert_eq!(Request::decode(&line(&one)), Ok(one));
        }
        let short = br#"{"version":1,"command":"release"}"#;
        assert_eq!(Request::decode(short), Ok(request(None, false)));
        for (text, said) in [
            ("", "EOF"),
            ("{}", "version"),
            ("[]", "invalid"),
            (r#"{"version":2,"command":"status"}"#, "version 1"),
            (r#"{"version":1,"command":"halt"}"#, "halt"),
            (r#"{"version":1,"command":"status","name":7}"#, "integer"),
            (r#"{"version":1,"command":"status"} {}"#, "trailing"),
        ] {
            let why = Request::decode(text.as_bytes()).expect_err(text);
            assert!(why.contains(said), "{text}: {why}");
        }
        let about = |id: usize| {
            let id = "x".repeat(id);
            let about = json!({ "namespace": "/n", "id": id, "engine": "e" });
            let request = json!({ "version": 1, "command": "introduce", "about": about });
            Request::decode(request.to_string().as_bytes())
        };
        assert!(about(CALLED_MAX).is_ok());
        assert!(about(CALLED_MAX + 1).expect_err("longer").contains("too long"));
        let deep = "[".repeat(MESSAGE_BYTES_MAX);
        Request::decode(deep.as_bytes()).expect_err("too deep");
    }

    #[test]
    fn a_line_is_a_line_whatever_it_says() {
        let reply = Reply::Kept { name: "a\n\"b\u{1b}".into(), reason: String::new() };
        let line = line(&reply);
        assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
        assert_eq!(serde_json::from_slice::<Reply>(&line).expect("it is read"), reply);
        assert_eq!(super::line(&Reply::Done {}), b"{\"done\":{}}\n");
    }
}
