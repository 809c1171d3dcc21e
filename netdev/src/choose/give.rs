//! The agent's side: opens ports for another process.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use crate::choose::policy::{self, Audit, AuditVerdict};
use crate::frames::packet::{self, Kept};
use crate::frames::xdp;
use crate::handed::{Answer, Code, Granted, Refused, Report, Request};
use crate::kernel::interface::Interface;
use crate::port::config::{PacketConfig, PortConfig, XdpConfig};
use crate::port::contract::Backend;
use crate::port::error::OpenError;
use crate::tuning::handed::{RING_FRAMES, XDP_CHUNKS};
use crate::tuning::xdp::CHUNKS_MIN;

/// Frames of the smallest ring that [`GiveLimits::within`] allows: one block of 1 MiB.
const RING_FRAMES_MIN: u32 = 15;

/// The most that an agent hands over, for any request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GiveLimits {
    /// Frames in a receive ring; 256 by default. Each takes 68 KiB of kernel memory, of `afxdp`
    /// about 8 KiB.
    pub ring_frames_max: u32,
    /// Bytes of a send buffer; 4 MiB by default.
    pub tx_buffer_bytes_max: u32,
}

impl Default for GiveLimits {
    fn default() -> Self {
        Self { ring_frames_max: 256, tx_buffer_bytes_max: 4 << 20 }
    }
}

/// The answer to a request, and the objects that belong to it.
#[derive(Debug)]
pub struct Given {
    /// The answer.
    pub answer: Answer,
    /// The descriptors to send with it; then the agent drops them.
    pub descriptors: Vec<OwnedFd>,
    /// To be kept as long as the program may use the ports: see [`Kept`]. Ports of `afxdp` have
    /// nothing to be kept.
    pub kept: Vec<Kept>,
    /// Bytes of memory that the kernel keeps for the ports.
    pub bytes: usize,
}

impl GiveLimits {
    /// The limits of a request that takes `fair` bytes of kernel memory, or the least for its ports
    /// if that is more, but never more than `most`. `None` if not even the least is left.
    #[must_use]
    pub fn within(fair: usize, most: usize, request: &Request) -> Option<Self> {
        let default = Self::default();
        let sizes: Vec<u32> = match request.backend {
            // All that there are.
            Backend::Xdp => vec![CHUNKS_MIN, 2 * CHUNKS_MIN, 4 * CHUNKS_MIN],
            // Whole blocks: a part of one takes the same memory.
            _ => (RING_FRAMES_MIN..=default.ring_frames_max)
                .step_by(RING_FRAMES_MIN as usize)
                .collect(),
        };
        let bytes = |frames: u32| Self { ring_frames_max: frames, ..default }.most_bytes(request);
        let most = fair.max(bytes(sizes[0])).min(most);
        let ring_frames_max = sizes.into_iter().rev().find(|frames| bytes(*frames) <= most)?;
        Some(Self { ring_frames_max, ..default })
    }

    /// Bytes of kernel memory that the ports of a request take, before they are made.
    #[must_use]
    pub fn memory_bytes(&self, request: &Request) -> usize {
        port_bytes(request.backend, self.ring_frames(request)) * request.shards.count
    }

    /// The same of a request that asks for all that it may have.
    fn most_bytes(&self, request: &Request) -> usize {
        port_bytes(request.backend, self.ring_frames_max) * request.shards.count
    }

    fn ring_frames(&self, request: &Request) -> u32 {
        match request.backend {
            Backend::Xdp => {
                let frames = request.ring_frames.unwrap_or(XDP_CHUNKS).min(self.ring_frames_max);
                xdp::chunks_within(frames)
            }
            _ => request.ring_frames.unwrap_or(RING_FRAMES).min(self.ring_frames_max),
        }
    }
}

/// Bytes of kernel memory of a port.
fn port_bytes(backend: Backend, frames: u32) -> usize {
    match backend {
        Backend::Xdp => xdp::memory_bytes(frames),
        _ => packet::ring_bytes(frames),
    }
}

impl Given {
    /// The descriptors, as [`send_answer`](crate::handed::send_answer) takes them.
    #[must_use]
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.descriptors.iter().map(OwnedFd::as_fd).collect()
    }

    /// The descriptors that are the ports' sockets.
    pub fn sockets(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let sockets = match &self.answer.outcome {
            // Each with its memory, and then what all share.
            Ok(Granted::Xdp { .. }) => (2, self.descriptors.len().saturating_sub(2)),
            _ => (1, self.descriptors.len()),
        };
        self.descriptors[..sockets.1].iter().step_by(sockets.0).map(OwnedFd::as_fd)
    }

    fn refused(refused: Refused, report: Option<Report>) -> Self {
        let answer = Answer { outcome: Err(refused), report };
        Self { answer, descriptors: Vec::new(), kept: Vec::new(), bytes: 0 }
    }
}

/// Opens the ports that a program asks for, in the network namespace of the calling thread, which
/// must be the program's. The agent decides before whether it may have any.
///
/// Takes `CAP_NET_RAW`, and for the rules `CAP_NET_ADMIN` over the namespace; those of tcx take it
/// over the machine. `afxdp` takes `CAP_NET_ADMIN`, `CAP_BPF` and `CAP_IPC_LOCK`.
#[must_use]
pub fn give(request: &Request, limits: &GiveLimits) -> Given {
    let iface = match interface(request) {
        Ok(iface) => iface,
        Err(refused) => return Given::refused(refused, None),
    };
    let audit = policy::audit(&iface);
    let report = Report::from(&audit);
    match open(request, limits, &iface, &audit) {
        Ok(Opened { granted, descriptors, kept, bytes }) => {
            let answer = Answer { outcome: Ok(granted), report: Some(report) };
            Given { answer, descriptors, kept, bytes }
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

/// Opened ports.
struct Opened {
    granted: Granted,
    descriptors: Vec<OwnedFd>,
    kept: Vec<Kept>,
    bytes: usize,
}

fn open(
    request: &Request,
    limits: &GiveLimits,
    iface: &Interface,
    audit: &Audit,
) -> Result<Opened, Refused> {
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
        xdp: XdpConfig { ring_frames: limits.ring_frames(request), ..defaults.xdp },
        ..defaults
    };
    let Request { addresses, shards, .. } = request;
    match request.backend {
        Backend::Packet => {
            let opened = packet::open_for_another(iface, addresses, &config, *shards);
            let (ring, descriptors, kept) = opened.map_err(failed)?;
            let bytes = kept.iter().map(Kept::ring_bytes).sum();
            Ok(Opened { granted: Granted::Packet { ring }, descriptors, kept, bytes })
        }
        Backend::Xdp => {
            let opened = xdp::open_for_another(iface, addresses, &config, *shards);
            let (chunks, descriptors) = opened.map_err(failed)?;
            let bytes = xdp::memory_bytes(chunks) * shards.count;
            let granted = Granted::Xdp { chunks };
            Ok(Opened { granted, descriptors, kept: Vec::new(), bytes })
        }
        other => {
            let what = format!("this agent hands over ports of packet and afxdp, not of {other}");
            Err(Refused::new(Code::Unsupported, what, ""))
        }
    }
}

fn failed(error: OpenError) -> Refused {
    let code = match error.errno() {
        // A packet socket is never in the way of another.
        libc::EBUSY | libc::EEXIST if error.backend == Backend::Xdp => Code::InUse,
        _ => Code::Failed,
    };
    let reason = match error.source {
        Some(source) => format!("{}: {source}", error.what),
        None => error.what,
    };
    Refused::new(code, reason, error.hint)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::config::Shards;
    use crate::testing::sides::ip;

    fn request(count: usize) -> Request {
        of(Backend::Packet, count)
    }

    fn of(backend: Backend, count: usize) -> Request {
        Request {
            backend,
            interface: 2,
            addresses: vec![ip("10.9.0.1")],
            shards: Shards { shared: false, first: 0, count, selector: 0 },
            ring_frames: None,
            tx_buffer_bytes: None,
            despite_rules: false,
            wait_ms: None,
        }
    }

    #[test]
    fn a_request_takes_the_whole_blocks_that_fit() {
        for (mib, frames) in [(1_usize, 15), (2, 30), (11, 165), (12, 180), (17, 255), (100, 255)] {
            let limits = |least| GiveLimits::within((mib << 20) + least, 1 << 30, &request(1));
            for least in [0, (1 << 20) - 1] {
                let limits = limits(least).expect("room");
                assert_eq!(limits.ring_frames_max, frames, "{mib}");
                assert!(limits.memory_bytes(&request(1)) <= 12 << 20, "it asks for no more");
            }
        }
        let larger = Request { ring_frames: Some(256), ..request(1) };
        let limits = GiveLimits::within(1 << 24, 1 << 30, &larger).expect("room");
        assert_eq!(limits.memory_bytes(&larger), 1 << 24, "a request for more gets no more");
    }

    #[test]
    fn shards_share_what_one_request_takes() {
        let limits = GiveLimits::within(16 << 20, 1 << 30, &request(4)).expect("room");
        assert_eq!(limits.memory_bytes(&request(4)), 16 << 20);
        assert!(GiveLimits::within(0, (64 << 20) - 1, &request(64)).is_none(), "64 take 64 MiB");
        let least = GiveLimits::within(0, 64 << 20, &request(64)).expect("room");
        assert_eq!(least.ring_frames_max, RING_FRAMES_MIN);
    }

    #[test]
    fn ports_of_afxdp_are_counted_by_their_own_size() {
        let of_chunks = |chunks| xdp::memory_bytes(chunks);
        for (bytes, chunks) in [(0, 64), (of_chunks(128), 128), (of_chunks(256), 256)] {
            let limits = GiveLimits::within(bytes, 1 << 30, &of(Backend::Xdp, 1)).expect("room");
            assert_eq!(limits.ring_frames(&of(Backend::Xdp, 1)), chunks);
        }
        let least = of_chunks(CHUNKS_MIN);
        assert!(GiveLimits::within(0, least - 1, &of(Backend::Xdp, 1)).is_none());
        // What cannot be is the next that can.
        for (asked, chunks) in [(0, 64), (100, 64), (128, 128), (255, 128), (u32::MAX, 256)] {
            let asked = Request { ring_frames: Some(asked), ..of(Backend::Xdp, 2) };
            assert_eq!(GiveLimits::default().ring_frames(&asked), chunks);
            assert_eq!(GiveLimits::default().memory_bytes(&asked), 2 * xdp::memory_bytes(chunks));
        }
    }
}
