//! Flows: the packets of one direction between two queue pairs, the two directions of a connection,
//! and a packet with its retransmissions.
//!
//! A packet names only the queue pair that it goes to. The one that sent it is known from the
//! connection manager's messages, or from the first answer whose PSN only one flow of the other
//! direction has. Captures are input from the network: all that is kept has a limit.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::net::IpAddr;

use rocinante_wire::types::{Psn, Seq};
use rocinante_wire::{AckKind, Operation, Service};
use serde::Serialize;
use serde_json::{Value, json};

use super::line::Decoded;
use super::manage::Managed;
use crate::output::present;

/// Flows that are followed.
pub const FLOWS_MAX: usize = 4096;
/// Communication ids that are remembered.
const COMM_IDS_MAX: usize = 4096;
/// Messages of the connection manager that are remembered.
const MESSAGES_MAX: usize = 256;
/// Answers of a flow that are used to look for its other direction.
const TRIES: u8 = 64;
/// PSNs of a flow that are remembered, and send times.
const SPAN: u64 = 8192;
const TIMES: usize = 128;

/// One direction: from an address to a queue pair at another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct FlowKey {
    /// The sender's address.
    pub src: IpAddr,
    /// The receiver's address.
    pub dst: IpAddr,
    /// The receiver's queue pair.
    pub qpn: u32,
}

impl FlowKey {
    /// The direction to queue pair `qpn` of this one's sender.
    const fn back(self, qpn: u32) -> Self {
        Self { src: self.dst, dst: self.src, qpn }
    }
}

/// Facts about a packet that follow from the packets before it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Known {
    /// Whether it has been seen before: the same PSN, or the same message.
    pub again: bool,
    /// The queue pair that sent it.
    pub src_qpn: Option<u32>,
    /// The queue pairs that a message of the connection manager is about.
    pub about: [Option<u32>; 2],
}

/// The flows of a capture.
#[derive(Debug, Default)]
pub struct Flows {
    flows: BTreeMap<FlowKey, Flow>,
    /// The senders of flows, known before they begin.
    senders: BTreeMap<FlowKey, u32>,
    /// The queue pair of each communication id.
    comm_ids: BTreeMap<(IpAddr, u32), u32>,
    /// The latest messages of the connection manager: sender, transaction and kind.
    messages: VecDeque<(IpAddr, u64, &'static str)>,
    /// Packets of flows beyond the limit.
    pub(super) untracked: u64,
}

#[derive(Debug, Default)]
struct Flow {
    src_qpn: Option<u32>,
    /// Whether datagrams of several queue pairs are in it.
    mixed: bool,
    service: Option<Service>,
    counts: Counts,
    round_trips: RoundTrips,
    /// Of requests, and of answers with a PSN for each packet: their PSNs are numbered apart.
    requests: Option<Box<Psns>>,
    answers: Option<Box<Psns>>,
    /// When the latest requests were sent.
    times: Option<Box<[SentAt; TIMES]>>,
    tries: u8,
}

#[derive(Debug, Default, Clone, Copy, Serialize)]
struct Counts {
    packets: u64,
    payload_bytes: u64,
    again: u64,
    acks: u64,
    naks: u64,
    rnr_naks: u64,
}

/// A request, and when it was sent; without a time if that is ambiguous.
type SentAt = Option<(Psn, i128)>;

#[derive(Debug, Default, Clone, Copy)]
struct RoundTrips {
    count: u64,
    min_ns: u64,
    sum_ns: u128,
    max_ns: u64,
}

impl RoundTrips {
    fn add(&mut self, ns: i128) {
        let Ok(ns) = u64::try_from(ns) else { return };
        self.min_ns = if self.count == 0 { ns } else { self.min_ns.min(ns) };
        self.max_ns = self.max_ns.max(ns);
        self.sum_ns += u128::from(ns);
        self.count += 1;
    }

    fn us(&self) -> Option<[f64; 3]> {
        let avg = self.sum_ns as f64 / self.count as f64;
        (self.count > 0).then(|| [self.min_ns as f64, avg, self.max_ns as f64].map(|ns| ns / 1e3))
    }
}

/// The PSNs that have been seen: the newest, expanded, and which of the [`SPAN`] up to it.
#[derive(Debug)]
struct Psns {
    newest: Seq,
    seen: [u64; SPAN as usize / 64],
}

impl Psns {
    fn starting(psn: Psn) -> Self {
        let mut it = Self { newest: psn.first(), seen: [0; SPAN as usize / 64] };
        it.set(it.newest, true);
        it
    }

    fn bit(psn: Seq) -> (usize, u64) {
        let place = psn.0 % SPAN;
        (place as usize / 64, 1 << (place % 64))
    }

    fn set(&mut self, psn: Seq, seen: bool) {
        let (word, bit) = Self::bit(psn);
        if seen {
            self.seen[word] |= bit;
        } else {
            self.seen[word] &= !bit;
        }
    }

    fn has(&self, psn: Psn) -> bool {
        let psn = psn.expand(self.newest);
        let (word, bit) = Self::bit(psn);
        psn <= self.newest && self.newest - psn < SPAN && self.seen[word] & bit != 0
    }

    /// Notes a PSN. Returns whether it has been seen.
    fn note(&mut self, psn: Psn) -> bool {
        let seen = self.has(psn);
        let at = psn.expand(self.newest);
        if at.0.abs_diff(self.newest.0) >= SPAN {
            // Far ahead; or far behind, which means another connection.
            *self = Self::starting(psn);
            return false;
        }
        (self.newest + 1).until(at).for_each(|skipped| self.set(skipped, false));
        self.newest = self.newest.max(at);
        self.set(at, true);
        seen
    }
}

impl Flows {
    /// The queue pair that sends each flow, as far as it is known now.
    #[must_use]
    pub fn senders(&self) -> BTreeMap<FlowKey, u32> {
        let known = self.flows.iter().filter_map(|(key, flow)| Some((*key, flow.src_qpn?)));
        known.collect()
    }

    /// Flows whose senders are known already.
    #[must_use]
    pub fn knowing(senders: BTreeMap<FlowKey, u32>) -> Self {
        Self { senders, ..Self::default() }
    }

    /// Takes in the next packet, from `ends.0` to `ends.1`.
    pub fn note(
        &mut self,
        ends: (IpAddr, IpAddr),
        time_ns: Option<i128>,
        packet: &Decoded<'_>,
    ) -> Known {
        let Some(bth) = &packet.bth else { return Known::default() };
        let (src, dst) = ends;
        let key = FlowKey { src, dst, qpn: bth.dest_qpn.value() };
        let mut known = Known::default();
        if let Some(managed) = packet.managed.as_ref().filter(|_| !packet.is_bad()) {
            self.manage(ends, managed, &mut known);
        }
        let senders = &self.senders;
        let room = self.flows.len() < FLOWS_MAX;
        if !room && !self.flows.contains_key(&key) {
            self.untracked += 1;
            return known;
        }
        let flow = self.flows.entry(key).or_default();
        flow.counts.packets += 1;
        flow.counts.payload_bytes += packet.len() as u64;
        let service = packet.info.map(|info| info.service);
        flow.service = flow.service.or(service);
        flow.src_qpn = flow.src_qpn.or_else(|| senders.get(&key).copied());
        // Its receiver drops a packet with a wrong ICRC, and gets it again.
        if service == Some(Service::Rc) && !packet.is_bad() {
            known.again = self.reliable(key, time_ns, packet, bth.psn);
        }
        let Some(flow) = self.flows.get_mut(&key) else { return known };
        flow.counts.again += u64::from(known.again);
        if let Some(deth) = packet.headers.deth {
            let sender = Some(deth.src_qpn.value());
            flow.mixed |= flow.counts.packets > 1 && flow.src_qpn != sender;
            flow.src_qpn = sender.filter(|_| !flow.mixed);
            known.src_qpn = sender;
        } else {
            known.src_qpn = flow.src_qpn;
        }
        known
    }

    /// Takes in a packet of a reliable connection. Returns whether it has been seen before.
    fn reliable(
        &mut self,
        key: FlowKey,
        time_ns: Option<i128>,
        packet: &Decoded<'_>,
        psn: Psn,
    ) -> bool {
        let Some(info) = packet.info else { return false };
        let Some(flow) = self.flows.get_mut(&key) else { return false };
        if info.is_request() {
            let again = note(&mut flow.requests, psn);
            let times = flow.times.get_or_insert_with(|| Box::new([None; TIMES]));
            // The answer may be for the first packet or for its repetition: no time tells.
            times[place(psn)] = time_ns.filter(|_| !again).map(|time| (psn, time));
            return again;
        }
        let positive = match packet.headers.aeth.map(|aeth| aeth.syndrome.kind()) {
            Some(AckKind::Nak(_)) => {
                flow.counts.naks += 1;
                false
            }
            Some(AckKind::RnrNak { .. }) => {
                flow.counts.rnr_naks += 1;
                false
            }
            Some(AckKind::Ack { .. }) => {
                flow.counts.acks += u64::from(info.operation == Operation::Acknowledge);
                true
            }
            Some(AckKind::Reserved) | None => false,
        };
        let again = info.operation != Operation::Acknowledge && note(&mut flow.answers, psn);
        let sender = self.sender(key, psn);
        if let Some(back) = sender.filter(|_| positive).map(|qpn| key.back(qpn))
            && let Some(asked) = self.flows.get_mut(&back)
            && let Some(times) = &mut asked.times
            && let Some((sent, at)) = times[place(psn)]
            && sent == psn
        {
            times[place(psn)] = None;
            if let (Some(now), Some(flow)) = (time_ns, self.flows.get_mut(&key)) {
                flow.round_trips.add(now - at);
            }
        }
        again
    }

    /// The queue pair that sends flow `key`. If it is not known, it is the destination of the one
    /// flow in the other direction that has a request with the PSN of this answer.
    fn sender(&mut self, key: FlowKey, psn: Psn) -> Option<u32> {
        let flow = self.flows.get_mut(&key)?;
        if flow.src_qpn.is_some() || flow.tries >= TRIES {
            return flow.src_qpn;
        }
        flow.tries += 1;
        let all = key.back(0)..=key.back(u32::MAX);
        let has = |flow: &Flow| flow.requests.as_ref().is_some_and(|psns| psns.has(psn));
        let mut asking = self.flows.range(all).filter(|(_, flow)| has(flow));
        let (asked, None) = (asking.next()?.0.qpn, asking.next()) else { return None };
        self.pair(key, asked);
        Some(asked)
    }

    /// Queue pair `src_qpn` sends flow `key`; so the flow to it comes from that one's destination.
    fn pair(&mut self, key: FlowKey, src_qpn: u32) {
        for (key, sender) in [(key, src_qpn), (key.back(src_qpn), key.qpn)] {
            if self.flows.len() < FLOWS_MAX || self.flows.contains_key(&key) {
                self.flows.entry(key).or_default().src_qpn = Some(sender);
            }
        }
    }

    /// Takes in a message of the connection manager.
    fn manage(&mut self, (src, dst): (IpAddr, IpAddr), managed: &Managed, known: &mut Known) {
        let message = (src, managed.tid, managed.message);
        known.again = self.messages.contains(&message);
        if !known.again {
            if self.messages.len() == MESSAGES_MAX {
                self.messages.pop_front();
            }
            self.messages.push_back(message);
        }
        if let Some((id, qpn)) = managed.local_comm_id.zip(managed.qpn) {
            if self.comm_ids.len() >= COMM_IDS_MAX {
                self.comm_ids.clear();
            }
            self.comm_ids.insert((src, id), qpn);
        }
        let of =
            |address, id: Option<u32>| id.and_then(|id| self.comm_ids.get(&(address, id)).copied());
        let local = managed.qpn.or_else(|| of(src, managed.local_comm_id));
        let remote = managed.remote_qpn.or_else(|| of(dst, managed.remote_comm_id));
        // A REQ comes before its REP, which a first reading of the file has met.
        let remote = remote.or_else(|| {
            let to_sender = FlowKey { src: dst, dst: src, qpn: local? };
            self.senders.get(&to_sender).copied()
        });
        known.about = [local, remote];
        if let ("REP", false, Some(local), Some(remote)) =
            (managed.message, known.again, local, remote)
        {
            let there = FlowKey { src, dst, qpn: remote };
            self.pair(there, local);
            // A new connection: its PSNs mean other packets than those of an earlier one.
            for key in [there, there.back(local)] {
                if let Some(flow) = self.flows.get_mut(&key) {
                    (flow.requests, flow.answers, flow.times) = (None, None, None);
                }
            }
        }
    }

    /// Forgets the flows that are not wanted. A flow is named with the queue pair that sends it, if
    /// that is known.
    pub fn retain(&mut self, wanted: impl Fn(&FlowKey, Option<u32>) -> bool) {
        self.flows.retain(|key, flow| wanted(key, flow.src_qpn));
    }

    /// The flows with packets, as JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        self.shown().map(|(key, flow)| flow.json(key)).collect()
    }

    fn shown(&self) -> impl Iterator<Item = (&FlowKey, &Flow)> {
        self.flows.iter().filter(|(_, flow)| flow.counts.packets > 0)
    }
}

/// The place of a PSN's send time.
const fn place(psn: Psn) -> usize {
    psn.value() as usize % TIMES
}

fn note(psns: &mut Option<Box<Psns>>, psn: Psn) -> bool {
    match psns {
        Some(psns) => psns.note(psn),
        None => {
            *psns = Some(Box::new(Psns::starting(psn)));
            false
        }
    }
}

const fn service_name(service: Service) -> &'static str {
    match service {
        Service::Rc => "RC",
        Service::Uc => "UC",
        Service::Ud => "UD",
        Service::Cnp => "CNP",
    }
}

/// A flow, as an object of JSON.
#[derive(Serialize)]
struct FlowLine {
    src: IpAddr,
    src_qpn: Option<u32>,
    dst: IpAddr,
    dest_qpn: u32,
    service: Option<&'static str>,
    #[serde(flatten)]
    counts: Counts,
    round_trips: Option<Value>,
}

impl Flow {
    fn json(&self, key: &FlowKey) -> Value {
        let round_trips = self.round_trips.us().map(|[min, avg, max]| {
            json!({"count": self.round_trips.count, "us_min": min, "us_avg": avg, "us_max": max})
        });
        present(json!(FlowLine {
            src: key.src,
            src_qpn: self.src_qpn,
            dst: key.dst,
            dest_qpn: key.qpn,
            service: self.service.map(service_name),
            counts: self.counts,
            round_trips,
        }))
    }
}

impl fmt::Display for Flows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = |address: &IpAddr, qpn: Option<u32>| match qpn {
            Some(qpn) => format!("{address} qp 0x{qpn:06x}"),
            None => format!("{address} qp unknown"),
        };
        let rows: Vec<_> = self
            .shown()
            .map(|(key, flow)| (end(&key.src, flow.src_qpn), end(&key.dst, Some(key.qpn)), flow))
            .collect();
        let width = |of: fn(&(String, String, &Flow)) -> usize| rows.iter().map(of).max();
        let from = width(|row| row.0.chars().count()).unwrap_or(0).max("from".len());
        let to = width(|row| row.1.chars().count()).unwrap_or(0).max("to".len());
        writeln!(
            f,
            "{:<from$}  {:<to$}  {:<4} {:>9} {:>13} {:>7} {:>7} {:>6} {:>6}  answered after (us: min avg max)",
            "from", "to", "", "packets", "payload bytes", "again", "ACKs", "NAKs", "RNRs"
        )?;
        for (src, dst, flow) in rows {
            let service = flow.service.map_or("", service_name);
            let Counts { packets, payload_bytes, again, acks, naks, rnr_naks } = flow.counts;
            write!(
                f,
                "{src:<from$}  {dst:<to$}  {service:<4} {packets:>9} {payload_bytes:>13} {again:>7} {acks:>7} \
                 {naks:>6} {rnr_naks:>6}"
            )?;
            match flow.round_trips.us() {
                Some([min, avg, max]) => writeln!(f, "  {min:.1} {avg:.1} {max:.1}")?,
                None => writeln!(f, "  -")?,
            }
        }
        if self.untracked > 0 {
            writeln!(
                f,
                "{} packets of further flows: only the first {FLOWS_MAX} are followed",
                self.untracked
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn psns_are_seen_again_across_their_end() {
        let mut psns = Psns::starting(Psn::new(0xff_fffe));
        let seen: Vec<bool> = [0xff_ffff, 0, 1, 0xff_fffe, 2, 0, 0xff_fffd, 0xff_fffd]
            .map(|psn| psns.note(Psn::new(psn)))
            .to_vec();
        assert_eq!(seen, [false, false, false, true, false, true, false, true]);
    }

    #[test]
    fn a_far_psn_begins_anew() {
        let mut psns = Psns::starting(Psn::new(100_000));
        let [near, far] = [500, 500 + SPAN as u32].map(Psn::new);
        assert!(!psns.note(near) && psns.note(near) && !psns.note(Psn::new(501)));
        // A PSN ahead by less than the span replaces the PSN one span earlier.
        assert!(!psns.note(far), "the place of 500, another packet");
        assert!(psns.has(Psn::new(501)) && !psns.has(near));
        assert!(psns.note(far));
    }

    #[test]
    fn psns_may_go_back_for_ever() {
        let mut psns = Psns::starting(Psn::new(0));
        for step in 1..100u32 {
            // Each is a quarter of all PSNs behind the one before.
            assert!(!psns.note(Psn::new(step.wrapping_mul(3 << 22))));
        }
    }
}
