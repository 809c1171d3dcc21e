//! Queueing disciplines and filters: `RTM_GETQDISC`, `RTM_GETTFILTER`.

use std::collections::HashMap;
use std::io;

use netlink_packet_core::{DecodeError, NlasIterator, Parseable};
use netlink_packet_route::tc::{TcHandle, TcHeader, TcMessage};
use serde::{Deserialize, Serialize};

use super::Rtnl;
use super::query::{text, word};
use super::socket::Attributes;

const RTM_NEWQDISC: u16 = 36;
const RTM_GETQDISC: u16 = 38;
const RTM_NEWTFILTER: u16 = 44;
const RTM_GETTFILTER: u16 = 46;
const TC_HEADER_LEN: usize = 20;
const TCA_KIND: u16 = 1;
const TCA_STATS2: u16 = 7;
const STATS_QUEUE: u16 = 3;
/// The parent of a discipline that all of an interface's packets pass: towards the wire, and from
/// it.
const TOP: [u32; 2] = [0xffff_ffff, 0xffff_fff1];

/// A queueing discipline on an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Qdisc {
    /// Its name: `noqueue`, `fq_codel`, `tbf`, `clsact` …
    pub kind: String,
}

/// The queues of an interface's own disciplines. Those below them are in their counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queued {
    /// Bytes that wait now.
    pub backlog_bytes: u64,
    /// Packets that wait now.
    pub backlog_packets: u64,
    /// Packets that had to wait, modulo 2^32.
    pub delayed: u32,
    /// Packets dropped, modulo 2^32.
    pub dropped: u32,
}

/// The queues of all interfaces of the calling thread's network namespace, by their indices. Error:
/// the kernel's.
pub fn queues() -> io::Result<HashMap<u32, Queued>> {
    let query = TcMessage::default();
    let found: Vec<KindMessage> = Rtnl::open()?.ask(RTM_GETQDISC, RTM_NEWQDISC, true, &query)?;
    let mut all = HashMap::<u32, Queued>::new();
    for it in found.into_iter().filter(|it| TOP.contains(&it.parent)) {
        let Ok(index) = u32::try_from(it.index) else { continue };
        let sum = all.entry(index).or_default();
        let Queued { backlog_bytes, backlog_packets, delayed, dropped } = it.queued;
        sum.backlog_bytes += backlog_bytes;
        sum.backlog_packets += backlog_packets;
        sum.delayed = sum.delayed.wrapping_add(delayed);
        sum.dropped = sum.dropped.wrapping_add(dropped);
    }
    Ok(all)
}

/// Attachment point of filters that act on all of an interface's packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FilterHook {
    /// The `ingress` discipline.
    IngressQdisc,
    /// The receiving half of `clsact`.
    ClsactIngress,
    /// The sending half of `clsact`.
    ClsactEgress,
}

impl FilterHook {
    /// The handle that filters name as their parent (`TC_H_MIN_INGRESS` and so on).
    fn parent(self) -> TcHandle {
        let minor = match self {
            Self::IngressQdisc => 0,
            Self::ClsactIngress => 0xfff2,
            Self::ClsactEgress => 0xfff3,
        };
        TcHandle { major: 0xffff, minor }
    }
}

/// The header, the kind and the queue. The options of a discipline or filter are not parsed, so an
/// unknown one cannot make the message undecodable.
struct KindMessage {
    index: i32,
    parent: u32,
    kind: String,
    queued: Queued,
}

impl Parseable<[u8]> for KindMessage {
    fn parse(bytes: &[u8]) -> Result<Self, DecodeError> {
        let header = TcHeader::parse(bytes)?;
        let TcHandle { major, minor } = header.parent;
        let parent = u32::from(major) << 16 | u32::from(minor);
        let (mut kind, mut queued) = (None, Queued::default());
        for attribute in NlasIterator::new(&bytes[TC_HEADER_LEN..]) {
            let attribute = attribute?;
            match attribute.kind() {
                TCA_KIND => kind = Some(text(attribute.value())),
                TCA_STATS2 => queued = queued_from(attribute.value()).unwrap_or_default(),
                _ => {}
            }
        }
        let missing = || DecodeError::from("a queueing discipline without a kind");
        Ok(Self { index: header.index, parent, kind: kind.ok_or_else(missing)?, queued })
    }
}

/// Of nested statistics.
fn queued_from(statistics: &[u8]) -> Option<Queued> {
    let mut all = Attributes(statistics);
    let (_, queue) = all.find(|(kind, _)| *kind == STATS_QUEUE)?;
    // `struct gnet_stats_queue`: qlen, backlog, drops, requeues, overlimits.
    let number = |at: usize| queue.get(4 * at..4 * at + 4).and_then(word);
    Some(Queued {
        backlog_packets: number(0)?.into(),
        backlog_bytes: number(1)?.into(),
        dropped: number(2)?,
        delayed: number(4)?,
    })
}

/// Parses the payload of a message as one of a discipline.
#[cfg(feature = "fuzzing")]
pub(super) fn try_payload(payload: &[u8]) {
    let _ = KindMessage::parse(payload);
}

impl Rtnl {
    /// All disciplines of an interface: root, children, `ingress` and `clsact`. Error: the kernel's
    /// error.
    pub(crate) fn qdiscs(&mut self, interface: u32) -> io::Result<Vec<Qdisc>> {
        let query = TcMessage::default();
        let found: Vec<KindMessage> = self.ask(RTM_GETQDISC, RTM_NEWQDISC, true, &query)?;
        Ok(found
            .into_iter()
            .filter(|q| u32::try_from(q.index) == Ok(interface))
            .map(|q| Qdisc { kind: q.kind })
            .collect())
    }

    /// Whether there are filters at a hook of an interface. Error: the kernel's error.
    pub(crate) fn has_filters(&mut self, interface: u32, hook: FilterHook) -> io::Result<bool> {
        let mut query = TcMessage::default();
        query.header.index = i32::try_from(interface).map_err(io::Error::other)?;
        query.header.parent = hook.parent();
        let found: Vec<KindMessage> = self.ask(RTM_GETTFILTER, RTM_NEWTFILTER, true, &query)?;
        Ok(!found.is_empty())
    }
}
