//! The counts of a capture.

use std::collections::BTreeMap;
use std::fmt;

use rocinante_wire::Opcode;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::check::Verdict;
use super::frame::LinkType;
use super::line::{NO_BTH, opcode_name};
use super::tunnel::VXLAN;
use crate::ending;

/// The counts of a capture. Each RoCEv2 packet counts under its verdict and under its opcode.
#[derive(Debug, Default, Serialize)]
pub struct Summary {
    /// Frames in the file.
    pub packets: u64,
    /// RoCEv2 packets; several where a frame is a super-packet.
    pub roce: u64,
    /// RoCEv2 packets with a right ICRC.
    pub icrc_ok: u64,
    /// RoCEv2 packets with a wrong ICRC.
    pub icrc_bad: u64,
    /// RoCEv2 packets with an ICRC that cannot be computed.
    pub icrc_unknown: u64,
    /// RoCEv2 packets by opcode; `None` for those without a BTH in the file.
    #[serde(serialize_with = "by_name")]
    pub by_opcode: BTreeMap<Option<Opcode>, u64>,
    /// Frames that could not be read, by link type.
    #[serde(skip)]
    pub unread: BTreeMap<LinkType, u64>,
    /// RoCEv2 datagrams inside of tunnels, by the kind of the tunnel. They are not decoded.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub tunnelled: BTreeMap<&'static str, u64>,
    /// The traffic of each flow, with `--flows`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flows: Option<Value>,
    /// RoCEv2 packets of flows that were too many to follow.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub untracked: Option<u64>,
    /// The error that ended reading before the end of the file.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "as_failure")]
    pub error: Option<Ended>,
}

/// Why reading ended before the end of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// The capture cannot be read further, or the copy cannot be written.
    File(String),
    /// This signal came.
    Signal(i32),
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(why) => f.write_str(why),
            Self::Signal(signal) => ending::stopped_by(*signal).fmt(f),
        }
    }
}

/// The error as that of other commands.
fn as_failure<S: Serializer>(error: &Option<Ended>, to: S) -> Result<S::Ok, S::Error> {
    let Some(error) = error else { return to.serialize_none() };
    let kind = match error {
        Ended::File(_) => "file",
        Ended::Signal(_) => "signal",
    };
    json!({"kind": kind, "stage": "reading", "message": error.to_string()}).serialize(to)
}

impl Summary {
    /// Counts a RoCEv2 packet.
    pub fn count(&mut self, opcode: Option<Opcode>, verdict: Verdict) {
        self.roce += 1;
        *self.by_opcode.entry(opcode).or_default() += 1;
        match verdict {
            Verdict::Ok => self.icrc_ok += 1,
            Verdict::Bad { .. } => self.icrc_bad += 1,
            Verdict::Unknown(_) => self.icrc_unknown += 1,
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (opcode, count) in &self.by_opcode {
            writeln!(f, "{count:9}  {}", name(*opcode))?;
        }
        for (link, count) in &self.unread {
            writeln!(f, "{count:9}  not read: link type {}", link.0)?;
        }
        write!(
            f,
            "{} packets, {} of them RoCEv2: ICRC {} ok, {} bad, {} unknown",
            self.packets, self.roce, self.icrc_ok, self.icrc_bad, self.icrc_unknown
        )?;
        for (tunnel, count) in &self.tunnelled {
            write!(
                f,
                "\n{count} more are RoCEv2 inside of {tunnel}, which is not decoded: capture where the tunnel has ended, as at \
                 the container's own interface{}",
                // Ethernet, IPv4, UDP, VXLAN.
                if *tunnel == VXLAN {
                    ", or take it off: `editcap -C 50 FILE INNER` over IPv4"
                } else {
                    ""
                }
            )?;
        }
        Ok(())
    }
}

fn name(opcode: Option<Opcode>) -> String {
    opcode.map_or_else(|| NO_BTH.to_owned(), opcode_name)
}

fn by_name<S: Serializer>(
    counts: &BTreeMap<Option<Opcode>, u64>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(counts.iter().map(|(opcode, count)| (name(*opcode), count)))
}
