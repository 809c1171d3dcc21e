//! The messages between a program and an agent, as values: docs/agent.md describes their bytes.
//!
//! They are JSON: each language can read and write it, unknown fields are passed over, and a
//! message is exchanged once per port, so that its size and speed do not matter.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::port::config::Shards;
use crate::port::contract::Backend;
use crate::tuning::handed::{LISTED_MAX, TEXT_MAX};

/// The version of the messages that this code speaks.
pub const VERSION: u32 = 1;
/// The most bytes of a message.
pub const MESSAGE_BYTES_MAX: usize = 16 << 10;
/// The most addresses of a port.
pub const ADDRESSES_MAX: usize = 64;
/// The most ports that share addresses.
pub const SHARDS_MAX: usize = 64;
/// The most descriptors of an answer.
pub const DESCRIPTORS_MAX: usize = 2 * SHARDS_MAX + 2;

/// A program's request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The backend of the ports.
    pub backend: Backend,
    /// The index of the interface in the program's network namespace.
    pub interface: u32,
    /// The ports' own addresses, which are addresses of that interface.
    pub addresses: Vec<IpAddr>,
    /// The number of ports, and how they share received datagrams.
    pub shards: Shards,
    /// The frames of each receive ring, of `afxdp` for each direction; `None` leaves it to the
    /// agent.
    pub ring_frames: Option<u32>,
    /// The send buffer of each socket in bytes; `None` leaves it to the agent.
    pub tx_buffer_bytes: Option<u32>,
    /// Whether to hand over ports that bypass rules of the program's own network namespace, or that
    /// might because rules cannot be read.
    pub despite_rules: bool,
    /// How long the program waits for its turn, in milliseconds. `None` takes a refusal rather
    /// than wait.
    pub wait_ms: Option<u32>,
}

/// An agent's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The ports handed over, with the descriptors that come with the answer; or the reason of the
    /// refusal.
    pub outcome: Result<Granted, Refused>,
    /// The rules of the program's network namespace, if the agent looked at them.
    pub report: Option<Report>,
}

/// The ports that an agent hands over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "backend")]
#[non_exhaustive]
pub enum Granted {
    /// A bound packet socket for each port, in the order of the ports.
    #[serde(rename = "packet")]
    Packet {
        /// The receive ring that each socket has.
        ring: Ring,
    },
    /// For each port a bound AF_XDP socket and its memory, then the link of the program and the map
    /// with the interface's Ethernet address, which all ports share.
    #[serde(rename = "afxdp")]
    Xdp {
        /// Chunks of 4096 bytes of each port's memory for each direction. Each ring has twice that
        /// number of entries.
        chunks: u32,
    },
}

/// The geometry of a receive ring (`struct tpacket_req` of packet(7)), of version `TPACKET_V2`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ring {
    /// Bytes of a block.
    pub block_bytes: u32,
    /// The number of blocks.
    pub blocks: u32,
    /// Bytes of a frame's slot.
    pub frame_bytes: u32,
    /// The number of frames in all blocks.
    pub frames: u32,
}

/// Why an agent hands nothing over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// The kind of reason.
    pub code: Code,
    /// The reason, in words for the user.
    pub reason: String,
    /// The user's remedy; may be empty.
    #[serde(default)]
    pub hint: String,
}

/// The kind of reason of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Code {
    /// The agent does not speak the request's version.
    Version,
    /// The request is no request.
    Malformed,
    /// The agent cannot hand over such ports: an unknown backend, or a kernel without the features
    /// for it.
    Unsupported,
    /// The agent refuses every request of this program.
    Forbidden,
    /// No such interface, an address that it has not, or an interface that is down.
    Interface,
    /// The ports would bypass the rules that the report lists.
    Bypasses,
    /// Not even the agent can read all rules; the report lists the unread ones.
    Unseen,
    /// The program has the most ports that it may have, or asks too often.
    Busy,
    /// The interface's queue is another AF_XDP socket's, or its program another's. The kernel takes
    /// its time to let go of a socket that was closed.
    InUse,
    /// No refusal: the request waits for its turn, and its answer follows. Only a request with
    /// [`Request::wait_ms`] gets it.
    Queued,
    /// The kernel refused.
    Failed,
    /// A kind that this code does not know.
    #[serde(other)]
    Other,
}

/// The rules of a network namespace that could concern RoCEv2 on an interface.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The rules.
    #[serde(default)]
    pub rules: Vec<ReportedRule>,
    /// Unread rules, and why.
    #[serde(default)]
    pub unseen: Vec<String>,
}

/// A rule that could concern RoCEv2.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedRule {
    /// What and where it is, in words for the user.
    pub what: String,
    /// Whether the backend `packet` bypasses it. `afxdp` bypasses each.
    pub packet_bypasses: bool,
}

/// The first field of each message.
#[derive(Deserialize)]
struct Head {
    version: u32,
}

#[derive(Serialize, Deserialize)]
struct RequestOnWire {
    version: u32,
    backend: String,
    interface: u32,
    addresses: Vec<IpAddr>,
    #[serde(default)]
    shards: ShardsOnWire,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ring_frames: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tx_buffer_bytes: Option<u32>,
    #[serde(default)]
    despite_rules: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    wait_ms: Option<u32>,
}

#[derive(Serialize, Deserialize)]
struct ShardsOnWire {
    #[serde(default)]
    first: u8,
    count: usize,
    selector: u16,
    #[serde(default)]
    shared: bool,
}

impl From<Shards> for ShardsOnWire {
    fn from(Shards { first, count, selector, shared }: Shards) -> Self {
        Self { first, count, selector, shared }
    }
}

impl From<ShardsOnWire> for Shards {
    fn from(ShardsOnWire { first, count, selector, shared }: ShardsOnWire) -> Self {
        Self { first, count, selector, shared }
    }
}

impl Default for ShardsOnWire {
    fn default() -> Self {
        Self::from(Shards::ONE)
    }
}

#[derive(Serialize, Deserialize)]
struct AnswerOnWire {
    version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    granted: Option<Granted>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    refused: Option<Refused>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    report: Option<Report>,
}

impl Request {
    /// The bytes of the request. Error: it asks for more than a request can: no addresses or too
    /// many, too many shards.
    pub fn encode(&self) -> Result<Vec<u8>, Refused> {
        self.check()?;
        let on_wire = RequestOnWire {
            version: VERSION,
            backend: self.backend.name().to_owned(),
            interface: self.interface,
            addresses: self.addresses.clone(),
            shards: self.shards.into(),
            ring_frames: self.ring_frames,
            tx_buffer_bytes: self.tx_buffer_bytes,
            despite_rules: self.despite_rules,
            wait_ms: self.wait_ms,
        };
        Ok(bytes_of(&on_wire))
    }

    /// Reads a request. Its fields are within their bounds, and nothing else about them is known.
    /// Error: why it is none, as the agent may answer it.
    pub fn decode(bytes: &[u8]) -> Result<Self, Refused> {
        let malformed = |what: String| Refused::new(Code::Malformed, what, "");
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(malformed(format!("a request of more than {MESSAGE_BYTES_MAX} bytes")));
        }
        let unreadable = |e: serde_json::Error| malformed(format!("no request: {e}"));
        let Head { version } = serde_json::from_slice(bytes).map_err(unreadable)?;
        if version != VERSION {
            let what =
                format!("this agent speaks version {VERSION} of the messages, not {version}");
            return Err(Refused::new(
                Code::Version,
                what,
                "use programs and an agent of one release",
            ));
        }
        let read: RequestOnWire = serde_json::from_slice(bytes).map_err(unreadable)?;
        let backend = match read.backend.as_str() {
            "packet" => Backend::Packet,
            "afxdp" => Backend::Xdp,
            _ => {
                let what = "this agent hands over ports of `packet` and `afxdp`";
                return Err(Refused::new(Code::Unsupported, what, ""));
            }
        };
        let request = Self {
            backend,
            interface: read.interface,
            addresses: read.addresses,
            shards: read.shards.into(),
            ring_frames: read.ring_frames,
            tx_buffer_bytes: read.tx_buffer_bytes,
            despite_rules: read.despite_rules,
            wait_ms: read.wait_ms,
        };
        request.check()?;
        Ok(request)
    }

    fn check(&self) -> Result<(), Refused> {
        let refused = |what| Err(Refused::new(Code::Malformed, what, ""));
        if !(1..=ADDRESSES_MAX).contains(&self.addresses.len()) {
            return refused(format!("a port has 1 to {ADDRESSES_MAX} addresses"));
        }
        if !(1..=SHARDS_MAX).contains(&self.shards.count) {
            return refused(format!("an agent hands over 1 to {SHARDS_MAX} shards at a time"));
        }
        if usize::from(self.shards.first) + self.shards.count > 256 {
            return refused("the values of a byte are below 256".to_owned());
        }
        Ok(())
    }
}

impl Answer {
    /// An answer that hands nothing over.
    #[must_use]
    pub fn refusal(refused: Refused) -> Self {
        Self { outcome: Err(refused), report: None }
    }

    /// Whether it only says that the request waits for its turn.
    #[must_use]
    pub fn is_queued(&self) -> bool {
        self.outcome.as_ref().is_err_and(|refused| refused.code == Code::Queued)
    }

    /// The bytes of the answer, which are never more than a message can have: long lists and texts
    /// are cut.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let (granted, refused) = match self.outcome.clone() {
            Ok(granted) => (Some(granted), None),
            Err(refused) => (None, Some(refused.cut())),
        };
        let report = self.report.clone().map(Report::cut);
        bytes_of(&AnswerOnWire { version: VERSION, granted, refused, report })
    }

    /// Reads an answer. Error: why it is none, in words.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(format!("an answer of more than {MESSAGE_BYTES_MAX} bytes"));
        }
        let unreadable = |e: serde_json::Error| format!("no answer: {e}");
        let Head { version } = serde_json::from_slice(bytes).map_err(unreadable)?;
        if version != VERSION {
            return Err(format!(
                "it speaks version {version} of the messages, not {VERSION}: use programs and an \
                 agent of one release"
            ));
        }
        let read: AnswerOnWire = serde_json::from_slice(bytes).map_err(unreadable)?;
        let outcome = match (read.granted, read.refused) {
            (Some(granted), None) => Ok(granted),
            (None, Some(refused)) => Err(refused.cut()),
            _ => return Err("an answer that neither grants nor refuses, or does both".into()),
        };
        Ok(Self { outcome, report: read.report.map(Report::cut) })
    }
}

impl Granted {
    /// The backend.
    #[must_use]
    pub fn backend(&self) -> Backend {
        match self {
            Self::Packet { .. } => Backend::Packet,
            Self::Xdp { .. } => Backend::Xdp,
        }
    }

    /// The number of descriptors that come with it, for this number of ports.
    #[must_use]
    pub fn descriptors(&self, shards: usize) -> usize {
        match self {
            Self::Packet { .. } => shards,
            Self::Xdp { .. } => 2 * shards + 2,
        }
    }
}

impl Refused {
    /// A refusal.
    pub fn new(code: Code, reason: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { code, reason: reason.into(), hint: hint.into() }
    }

    fn cut(self) -> Self {
        Self { code: self.code, reason: cut(&self.reason), hint: cut(&self.hint) }
    }
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.reason)?;
        if self.hint.is_empty() { Ok(()) } else { write!(f, ": {}", self.hint) }
    }
}

impl std::error::Error for Refused {}

impl Report {
    /// Cuts texts that are too long for a message.
    fn cut(mut self) -> Self {
        let more = self.rules.len().saturating_sub(LISTED_MAX);
        if more > 0 {
            // One that is bypassed decides: none of them may be lost.
            self.rules.sort_by_key(|rule| !rule.packet_bypasses);
            let packet_bypasses = self.rules[LISTED_MAX - 1..].iter().any(|r| r.packet_bypasses);
            self.rules.truncate(LISTED_MAX - 1);
            let what = format!("{} more rules", more + 1);
            self.rules.push(ReportedRule { what, packet_bypasses });
        }
        for rule in &mut self.rules {
            rule.what = cut(&rule.what);
        }
        self.unseen.truncate(LISTED_MAX);
        for unseen in &mut self.unseen {
            *unseen = cut(unseen);
        }
        self
    }
}

/// A text without control characters, cut where it is too long. Names in it may be any other
/// program's text.
fn cut(text: &str) -> String {
    let plain = |c: char| if c.is_control() { '?' } else { c };
    let mut cut: String = text.chars().take(TEXT_MAX).map(plain).collect();
    if text.chars().nth(TEXT_MAX).is_some() {
        cut.push('…');
    }
    cut
}

fn bytes_of(message: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(message).expect("plain values without maps")
}
