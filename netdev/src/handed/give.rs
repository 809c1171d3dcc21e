//! The agent's side: opens ports for another process.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use super::message::{Answer, Code, Granted, Refused, Report, ReportedRule, Request};
use crate::config::{PacketConfig, PortConfig};
use crate::error::OpenError;
use crate::iface::Interface;
use crate::packet::{self, Kept};
use crate::policy::{self, Audit, AuditVerdict};
use crate::port::Backend;

/// Frames in the receive ring of a port that is handed over, unless the program asks for another
/// number.
pub const RING_FRAMES: u32 = 180;

/// Frames of the smallest ring that [`GiveLimits::within`] allows: one block of 1 MiB.
const RING_FRAMES_MIN: u32 = 15;
/// A request takes no more of the memory that is left than one part in this many.
const SHARES: usize = 64;

/// What an agent hands over at most, whatever a program asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GiveLimits {
    /// Frames in a receive ring; 256 by default. Each takes 68 KiB of kernel memory.
    pub ring_frames_max: u32,
    /// Bytes of a send buffer; 4 MiB by default.
    pub tx_buffer_bytes_max: u32,
}

impl Default for GiveLimits {
    fn default() -> Self {
        Self { ring_frames_max: 256, tx_buffer_bytes_max: 4 << 20 }
    }
}

/// The answer to a request, and what belongs to it.
#[derive(Debug)]
pub struct Given {
    /// The answer.
    pub answer: Answer,
    /// The descriptors to send with it; then the agent drops them.
    pub descriptors: Vec<OwnedFd>,
    /// To be kept as long as the program may use the ports: see [`Kept`].
    pub kept: Vec<Kept>,
}

impl GiveLimits {
    /// The limits of a request to an agent that has `left` bytes of kernel memory left for rings.
    /// Each takes a 64th of what is left, or the least: where there are few ports they are fast,
    /// and where there are many each is answered. `None` if not even the least is left.
    #[must_use]
    pub fn within(left: usize, request: &Request) -> Option<Self> {
        let shards = request.shards.count;
        let most = (left / SHARES).max(packet::ring_bytes(RING_FRAMES_MIN) * shards);
        let default = Self::default();
        let fits = |frames: &u32| packet::ring_bytes(*frames) * shards <= most.min(left);
        // Whole blocks: a part of one takes as much memory.
        let blocks = (1..=default.ring_frames_max / RING_FRAMES_MIN).rev();
        let ring_frames_max = blocks.map(|blocks| blocks * RING_FRAMES_MIN).find(fits)?;
        Some(Self { ring_frames_max, ..default })
    }

    /// Bytes of kernel memory that the rings of a request take, before they are made.
    #[must_use]
    pub fn ring_bytes(&self, request: &Request) -> usize {
        packet::ring_bytes(self.ring_frames(request)) * request.shards.count
    }

    fn ring_frames(&self, request: &Request) -> u32 {
        request.ring_frames.unwrap_or(RING_FRAMES).min(self.ring_frames_max)
    }
}

impl Given {
    /// The descriptors, as [`send_answer`](super::send_answer) takes them.
    #[must_use]
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.descriptors.iter().map(OwnedFd::as_fd).collect()
    }

    fn refused(refused: Refused, report: Option<Report>) -> Self {
        let answer = Answer { outcome: Err(refused), report };
        Self { answer, descriptors: Vec::new(), kept: Vec::new() }
    }
}

/// Opens the ports that a program asks for, in the network namespace of the calling thread, which
/// must be the program's. The agent decides before whether it may have any.
///
/// Takes `CAP_NET_RAW`, and for the rules `CAP_NET_ADMIN` over the namespace; those of tcx take it
/// over the machine.
#[must_use]
pub fn give(request: &Request, limits: &GiveLimits) -> Given {
    let iface = match interface(request) {
        Ok(iface) => iface,
        Err(refused) => return Given::refused(refused, None),
    };
    let audit = policy::audit(&iface);
    let report = Report::from(&audit);
    match open(request, limits, &iface, &audit) {
        Ok((granted, descriptors, kept)) => {
            let answer = Answer { outcome: Ok(granted), report: Some(report) };
            Given { answer, descriptors, kept }
        }
        Err(refused) => Given::refused(refused, Some(report)),
    }
}

fn interface(request: &Request) -> Result<Interface, Refused> {
    let refused = |reason: String| Refused::new(Code::Interface, reason, "see `ip address`");
    let all = Interface::all()
        .map_err(|e| Refused::new(Code::Failed, format!("interfaces cannot be listed: {e}"), ""))?;
    let iface = all.into_iter().find(|iface| iface.index == request.interface);
    let iface = iface.ok_or_else(|| refused(format!("no interface {}", request.interface)))?;
    match request.addresses.iter().find(|address| !iface.has(**address)) {
        None => Ok(iface),
        Some(address) => Err(refused(format!("{address} is not an address of {}", iface.name))),
    }
}

fn open(
    request: &Request,
    limits: &GiveLimits,
    iface: &Interface,
    audit: &Audit,
) -> Result<(Granted, Vec<OwnedFd>, Vec<Kept>), Refused> {
    if request.backend != Backend::Packet {
        let what = format!("this agent hands over ports of packet, not of {}", request.backend);
        return Err(Refused::new(Code::Unsupported, what, ""));
    }
    if !request.despite_rules {
        match audit.verdict(request.backend) {
            AuditVerdict::Clear => {}
            AuditVerdict::Bypasses(_) => {
                return Err(Refused::new(Code::Bypasses, "it would bypass rules", ""));
            }
            AuditVerdict::Unseen(_) => {
                return Err(Refused::new(Code::Unseen, "not all rules can be read", ""));
            }
        }
    }
    let defaults = PortConfig::default();
    let bytes = request.tx_buffer_bytes.unwrap_or(defaults.tx_buffer_bytes);
    let config = PortConfig {
        tx_buffer_bytes: bytes.min(limits.tx_buffer_bytes_max),
        packet: PacketConfig { ring_frames: limits.ring_frames(request) },
        ..defaults
    };
    let opened = packet::open_for_another(iface, &request.addresses, &config, request.shards);
    let (ring, descriptors, kept) = opened.map_err(failed)?;
    Ok((Granted::Packet { ring }, descriptors, kept))
}

fn failed(error: OpenError) -> Refused {
    let reason = match error.source {
        Some(source) => format!("{}: {source}", error.what),
        None => error.what,
    };
    Refused::new(Code::Failed, reason, error.hint)
}

impl From<&Audit> for Report {
    fn from(audit: &Audit) -> Self {
        let rule = |rule: &policy::Rule| ReportedRule {
            what: rule.what.clone(),
            packet_bypasses: rule.packet_bypasses,
        };
        Self { rules: audit.rules.iter().map(rule).collect(), unseen: audit.unseen.clone() }
    }
}

impl From<Report> for Audit {
    fn from(report: Report) -> Self {
        let rule = |rule: ReportedRule| policy::Rule {
            what: rule.what,
            packet_bypasses: rule.packet_bypasses,
        };
        Self { rules: report.rules.into_iter().map(rule).collect(), unseen: report.unseen }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Shards;
    use crate::sides::ip;

    fn request(count: usize) -> Request {
        Request {
            backend: Backend::Packet,
            interface: 2,
            addresses: vec![ip("10.9.0.1")],
            shards: Shards { first: 0, count, selector: 0 },
            ring_frames: None,
            tx_buffer_bytes: None,
            despite_rules: false,
        }
    }

    #[test]
    fn of_a_gigabyte_the_first_have_large_rings_and_two_hundred_have_one() {
        let (request, total) = (request(1), 1_000_000_000);
        let (mut left, mut sizes) = (total, Vec::new());
        while let Some(limits) = GiveLimits::within(left, &request) {
            left -= limits.ring_bytes(&request);
            sizes.push(limits.ring_frames(&request));
        }
        assert!(sizes[..15].iter().all(|frames| *frames == RING_FRAMES), "{sizes:?}");
        assert!(sizes.is_sorted_by(|one, next| one >= next));
        assert!(sizes.len() >= 200, "{}", sizes.len());
        assert_eq!(sizes.last(), Some(&RING_FRAMES_MIN));
        assert!(left < 1 << 20, "nothing is left over: {left}");
    }

    #[test]
    fn shards_share_what_one_request_takes() {
        let limits = GiveLimits::within(1_000_000_000, &request(4)).expect("room");
        assert!(limits.ring_bytes(&request(4)) <= 1_000_000_000 / SHARES);
        assert!(GiveLimits::within(63 << 20, &request(64)).is_none(), "64 take 64 MiB");
        assert!(GiveLimits::within(64 << 20, &request(64)).is_some());
        let larger = Request { ring_frames: Some(256), ..request(1) };
        let limits = GiveLimits::within(1 << 30, &larger).expect("room");
        assert!(limits.ring_bytes(&larger) <= 1 << 24, "nobody takes more by asking for it");
    }
}
