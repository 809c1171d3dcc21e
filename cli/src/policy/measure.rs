//! One cell: a control, a backend and a family, with traffic.

use std::net::{IpAddr, UdpSocket};

use rocinante_lab::{Between, Lab};
use serde::Serialize;

use super::install::{HITS, Installed, OTHERS, SHORT_BURST, Trouble};
use super::lab::{Family, netns, uplink_address};
use super::table::{Action, Control, Effect, Group, Mark, Place, Rule, Shaper, Taken};
use super::{BURST, LIMIT, MTU, RATE};
use crate::measure::jain;
use crate::messages::{Answer, Bulk, BulkRequest, ConnectRequest, MESSAGE, PROBE, Request};
use crate::output::rounded;
use crate::workers::{RECEIVER, SECOND, SENDER, Workers};

/// The ACK timeout of a connection that is to fail: 33.6 ms, and its retries.
const TIMEOUT: u8 = 13;
const RETRIES: u8 = 2;
/// The longest time until a WRITE fails: a requester that waits up to four times the ACK timeout
/// (the specification's limit), once for each attempt.
const PROMISED_SECONDS: f64 = (RETRIES as f64 + 1.0) * 4.0 * 4.096e-6 * (1u32 << TIMEOUT) as f64;
/// The ACK timeout and the retries of a connection that is to last.
const LASTING: (u8, u8) = (14, 7);
const SUCCESS: &str = "SUCCESS";
const FAILED: &str = "RETRY_EXC_ERR";
/// A path MTU that fits a link of 1500 bytes.
const SMALL_MTU: u32 = 1024;
/// ECT(0) in a TOS or traffic class.
const ECT0: u8 = 2;

/// Begins the complaint that a WRITE failed too late.
pub(super) const LATE: &str = "it took";
/// The part of a rate that must be reached after the warm-up.
const REACHED: f64 = 0.9;
/// The part of a rate that must not be exceeded by all that was sent: nothing that was under way
/// when a part of the time began or ended can blur it.
const EXCEEDED: f64 = 1.01;
/// The bytes that nft's limit lets pass at once beside its `burst`: the rate of one of its units of
/// time, a second (net/netfilter/nft_limit.c, `tokens_max`).
const SECOND_OF_RATE: u64 = RATE as u64 / 8;
/// Part of the rate that bypassing traffic exceeds.
const FREE: f64 = 1.3;
const FAIR: f64 = 0.95;
/// Bytes that VXLAN over IPv4 puts before a packet.
const OUTER: usize = Between::Vxlan { ipv6: false }.overhead() as usize;
/// The WRITEs of a bulk transfer, of a quarter of a second before the measurement.
const WRITES: BulkRequest =
    BulkRequest { size: MESSAGE, depth: 8, list: 1, warm_millis: 250, millis: 1250, served: false };
const BURSTS: u64 = 10;

/// The figures of a cell.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Packets (skbs) that the rule took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub packets: Option<u64>,
    /// Bytes of the WRITE that lay at the peer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placed_bytes: Option<u64>,
    /// The status of the WRITE.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<String>,
    /// Time until its completion.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// The rate on the wire after the warm-up, of the limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub of_limit: Option<f64>,
    /// The same of all bytes sent, less the burst that the limit lets pass at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub of_limit_in_all: Option<f64>,
    /// Bytes that the shaper's own figures show.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shaper_bytes: Option<u64>,
    /// Packets that it dropped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shaper_drops: Option<u64>,
    /// Jain's index of the containers' rates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub jain: Option<f64>,
}

/// The outcome of a cell.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Outcome {
    pub(super) figures: Figures,
    /// The differences from the documentation.
    pub(super) wrong: Vec<String>,
}

/// The processes of a backend and a family in a network.
pub(super) struct Bench<'a> {
    pub(super) network: &'a Lab,
    pub(super) sides: &'a mut Workers,
    pub(super) family: Family,
    /// Leaves out every control: each cell must then fail.
    pub(super) without_rules: bool,
}

impl Bench<'_> {
    /// Tries a control.
    pub(super) fn cell(&mut self, control: &Control, expected: Effect) -> Result<Outcome, Trouble> {
        let mut outcome = Outcome { figures: Figures::default(), wrong: Vec::new() };
        match control.action {
            Action::Drop(rule) => self.dropping(rule, expected, &mut outcome)?,
            Action::Limit(shaper) => self.limiting(shaper, expected, &mut outcome)?,
            Action::Mark(Mark::Mtu) => self.short_link(&mut outcome)?,
            Action::Mark(mark) => self.marking(mark, &mut outcome)?,
        }
        debug_assert!(control.group != Group::Mark || expected == Effect::Binds);
        Ok(outcome)
    }

    fn dropping(&mut self, rule: Rule, expected: Effect, out: &mut Outcome) -> Result<(), Trouble> {
        self.connect(SENDER, MTU, (TIMEOUT, RETRIES), 0)?;
        self.must_arrive("before the rule", 1, out)?;
        let network = self.network;
        let mut control = self.install(|family| Installed::rule(network, rule, family))?;
        // The answers of the receiver are dropped, not requests and the probe.
        let answers = rule == Rule::NewFromThePeer;
        let mut before = 0;
        if !answers {
            self.probe(rule)?;
            before = out.noted(control.count(HITS)).unwrap_or(0);
            out.must(before > 0, || "the rule did not count the kernel's own datagram".into());
        }
        control.complete()?;

        let (status, seconds) = self.write(2)?;
        let placed = self.placed(2)?;
        let counted = out.noted(control.count(HITS)).map_or(0, |now| now.saturating_sub(before));
        match expected {
            Effect::Binds => {
                out.must(status == FAILED, || format!("the WRITE ended in {status}"));
                out.must(seconds <= PROMISED_SECONDS, || {
                    format!("{LATE} {seconds:.3} s, not at most {PROMISED_SECONDS:.3}")
                });
                out.must(counted > 0, || "the rule counted nothing".into());
                let due = if answers { MESSAGE as u64 } else { 0 };
                out.must(placed == due, || format!("{placed} bytes lay at the peer, not {due}"));
            }
            Effect::Bypassed => {
                out.must(status == SUCCESS, || format!("the WRITE ended in {status}"));
                out.must(placed == MESSAGE as u64, || format!("{placed} bytes lay at the peer"));
            }
        }
        let own_input = matches!(rule, Rule::Nft { chain: (_, "input"), .. });
        if own_input && expected == Effect::Binds {
            let seen = out.noted(control.count(OTHERS)).unwrap_or(0);
            out.must(seen > counted, || "prerouting did not see what input dropped".into());
        }
        let seconds = Some(rounded(seconds));
        let (status, packets) = (Some(status), Some(counted));
        out.figures =
            Figures { packets, placed_bytes: Some(placed), status, seconds, ..Figures::default() };
        control.remove().map_err(Trouble::Failed)?;

        self.connect(SENDER, MTU, LASTING, 0)?;
        self.must_arrive("without the rule", 3, out)?;
        if answers {
            for (untracked, fill) in [(false, 4), (true, 5)] {
                let remedy = Installed::remedy(network, untracked)?;
                self.must_arrive("with an exception for RoCEv2", fill, out)?;
                remedy.remove().map_err(Trouble::Failed)?;
            }
        }
        Ok(())
    }

    fn limiting(
        &mut self,
        shaper: Shaper,
        expected: Effect,
        out: &mut Outcome,
    ) -> Result<(), Trouble> {
        let both = matches!(shaper, Shaper::Uplink | Shaper::Tunnel);
        self.connect(SENDER, MTU, LASTING, 0)?;
        if both {
            self.connect(SECOND, MTU, LASTING, 0)?;
        }
        let network = self.network;
        let control = self.install(|family| Installed::shaper(network, shaper, family))?;
        let flows = self.bulk(both)?;
        let burst = u64::from(BURST);
        let (factor, at_once) = match shaper {
            // nft counts a super-packet's headers once, and neither Ethernet's nor each datagram's.
            Shaper::Policer => (1.0, SECOND_OF_RATE + burst),
            // A class sends by its own tokens, and then borrows those of its parent.
            Shaper::Uplink => (self.wire_factor(0), 3 * burst),
            Shaper::Tunnel => (self.wire_factor(OUTER), 3 * burst),
            Shaper::Htb => (self.wire_factor(0), 2 * burst),
            Shaper::Tbf | Shaper::Ifb | Shaper::Own | Shaper::On(_) => (self.wire_factor(0), burst),
            Shaper::ShortTbf => (self.wire_factor(0), SHORT_BURST.into()),
        };
        let on_wire = |payload: u64| payload as f64 * factor;
        let rates: Vec<f64> = flows
            .iter()
            .map(|flow| on_wire(flow.bytes) * 8.0 / flow.seconds.max(1e-3) / f64::from(RATE))
            .collect();
        let all_bytes: u64 = flows.iter().map(|flow| flow.all_bytes).sum();
        let beyond = on_wire(all_bytes) - at_once as f64;
        let in_all = beyond * 8.0 / seconds_of_all(&flows) / f64::from(RATE);
        let of_limit = match shaper {
            // The burst that passes at once can last beyond the warm-up.
            Shaper::Policer => in_all,
            _ => rates.iter().sum(),
        };
        out.figures.of_limit = Some(rounded(of_limit));
        out.figures.of_limit_in_all = Some(rounded(in_all));
        let shown = if shaper == Shaper::Policer {
            let drops = out.noted(control.count(HITS));
            out.noted(control.passed()).zip(drops)
        } else {
            out.noted(control.shaped()).map(|stats| {
                let held = stats.overlimits > 0;
                out.must(held == (expected == Effect::Binds), || {
                    format!("the shaper held back {} times", stats.overlimits)
                });
                (stats.bytes, stats.drops)
            })
        };
        let (bytes, drops) = shown.unwrap_or_default();
        (out.figures.shaper_bytes, out.figures.shaper_drops) = (Some(bytes), Some(drops));
        match expected {
            Effect::Binds => {
                let reached = of_limit >= REACHED;
                out.must(reached && in_all <= EXCEEDED, || {
                    let [part, all] = [of_limit, in_all].map(|rate| rate * 100.0);
                    format!("{part:.1} % of the rate came through, {all:.1} % in all")
                });
                out.must(bytes >= all_bytes, || {
                    format!("the shaper passed {bytes} bytes, of {all_bytes} of payload")
                });
                out.must(all_bytes >= BURSTS * u64::from(BURST), || {
                    format!("only {all_bytes} bytes were sent: less than ten bursts")
                });
                // A limit that was not reached has nothing to drop.
                if reached && matches!(shaper, Shaper::Policer | Shaper::ShortTbf) {
                    out.must(drops > 0, || "it dropped nothing".into());
                }
            }
            Effect::Bypassed => {
                out.must(of_limit > FREE, || format!("only {:.2} of the rate came", of_limit));
                out.must(bytes < all_bytes / 2, || format!("{bytes} bytes passed the shaper"));
            }
        }
        if both {
            let index = jain(rates);
            out.figures.jain = Some(rounded(index));
            out.must(index >= FAIR, || format!("the containers' shares have a Jain of {index:.3}"));
        }
        control.remove().map_err(Trouble::Failed)
    }

    fn marking(&mut self, mark: Mark, out: &mut Outcome) -> Result<(), Trouble> {
        let ecn = matches!(mark, Mark::Ce | Mark::OuterCe);
        self.connect(SENDER, MTU, LASTING, if ecn { ECT0 } else { 0 })?;
        let network = self.network;
        let control = self.install(|family| Installed::mark(network, mark, family))?;
        let before = [self.cnps(SENDER)?, self.cnps(RECEIVER)?];
        self.must_arrive("with the mark", 1, out)?;
        if ecn {
            for fill in 2..6 {
                self.must_arrive("with the mark", fill, out)?;
            }
            let after = [self.cnps(SENDER)?, self.cnps(RECEIVER)?];
            let (received, sent) = (after[0].0 - before[0].0, after[1].1 - before[1].1);
            out.must(received > 0 && sent > 0, || {
                format!("the receiver sent {sent} CNPs, the sender got {received}")
            });
        }
        let marked = out.noted(control.count(HITS)).unwrap_or(0);
        let others = out.noted(control.count(OTHERS)).unwrap_or(0);
        out.must(marked > 0, || "no packet had the mark behind the rule".into());
        out.must(others == 0, || format!("{others} packets had no mark behind the rule"));
        out.figures.packets = Some(marked);
        control.remove().map_err(Trouble::Failed)
    }

    fn short_link(&mut self, out: &mut Outcome) -> Result<(), Trouble> {
        self.connect(SENDER, MTU, (TIMEOUT, RETRIES), 0)?;
        self.must_arrive("before the short link", 1, out)?;
        let network = self.network;
        let control = self.install(|family| Installed::mark(network, Mark::Mtu, family))?;
        let (status, seconds) = self.write(2)?;
        let placed = self.placed(2)?;
        out.must(status == FAILED, || format!("a WRITE in packets of 4096 ended in {status}"));
        out.must(placed == 0, || format!("{placed} bytes in packets of 4096 lay at the peer"));
        self.connect(SENDER, SMALL_MTU, LASTING, 0)?;
        self.must_arrive("in packets of 1024", 3, out)?;
        out.figures = Figures {
            placed_bytes: Some(placed),
            status: Some(status),
            seconds: Some(rounded(seconds)),
            ..Figures::default()
        };
        control.remove().map_err(Trouble::Failed)?;
        // The kernel remembers the path's MTU.
        for container in network.containers() {
            for family in ["-4", "-6"] {
                container.netns().command(&format!("ip {family} route flush cache"))?;
            }
        }
        self.connect(SENDER, MTU, LASTING, 0)?;
        self.must_arrive("without the short link", 4, out)
    }

    fn install<'n>(
        &self,
        make: impl FnOnce(Family) -> Result<Installed<'n>, Trouble>,
    ) -> Result<Installed<'n>, Trouble> {
        let control = make(self.family)?;
        if self.without_rules { control.forget() } else { Ok(control) }
    }

    /// Connects the first or second sender with the receiver.
    fn connect(
        &mut self,
        sender: usize,
        mtu: u32,
        (timeout, retry_cnt): (u8, u8),
        traffic_class: u8,
    ) -> Result<(), Trouble> {
        let how = ConnectRequest { slot: 0, mtu, half: MESSAGE, timeout, retry_cnt, traffic_class };
        let request = |slot| Some(Request::Connect(ConnectRequest { slot, ..how }));
        let mut requests = vec![None; self.network.containers().len()];
        requests[sender] = request(0);
        requests[RECEIVER] = request(usize::from(sender == SECOND));
        self.sides.each(&requests, LIMIT).map(drop).map_err(Trouble::Failed)
    }

    fn ask(&mut self, index: usize, request: Request) -> Result<Answer, Trouble> {
        self.sides.one(index, request, LIMIT).map_err(Trouble::Failed)
    }

    /// One WRITE: its status and its time.
    fn write(&mut self, fill: u8) -> Result<(String, f64), Trouble> {
        match self.ask(SENDER, Request::Write { fill })? {
            Answer::Wrote { status, seconds } => Ok((status, seconds)),
            other => Err(unexpected(&other)),
        }
    }

    /// The bytes of a WRITE at the receiver.
    fn placed(&mut self, fill: u8) -> Result<u64, Trouble> {
        match self.ask(RECEIVER, Request::Look { fill })? {
            Answer::Found { bytes } => Ok(bytes),
            other => Err(unexpected(&other)),
        }
    }

    /// A WRITE that must succeed.
    fn must_arrive(&mut self, when: &str, fill: u8, out: &mut Outcome) -> Result<(), Trouble> {
        let (status, _) = self.write(fill)?;
        let placed = self.placed(fill)?;
        out.must(status == SUCCESS && placed == MESSAGE as u64, || {
            format!("{when} a WRITE ended in {status} with {placed} bytes at the peer")
        });
        Ok(())
    }

    /// Congestion notifications received and sent.
    fn cnps(&mut self, index: usize) -> Result<(u64, u64), Trouble> {
        match self.ask(index, Request::Count)? {
            Answer::Counted { rcvd_cnp, sent_cnp } => Ok((rcvd_cnp, sent_cnp)),
            other => Err(unexpected(&other)),
        }
    }

    fn bulk(&mut self, both: bool) -> Result<Vec<Bulk>, Trouble> {
        let mut requests = vec![None; self.network.containers().len()];
        let senders: &[usize] = if both { &[SENDER, SECOND] } else { &[SENDER] };
        for sender in senders {
            requests[*sender] = Some(Request::Bulk(WRITES));
        }
        let answers = self.sides.each(&requests, LIMIT).map_err(Trouble::Failed)?;
        let flows = answers.into_iter().filter(|answer| *answer != Answer::Done);
        flows
            .map(|answer| match answer {
                Answer::Bulk(bulk) => Ok(bulk),
                other => Err(unexpected(&other)),
            })
            .collect()
    }

    /// Has a datagram sent that the rule must take: by the sender, or, where only an outer header
    /// is looked at, by its host.
    fn probe(&mut self, rule: Rule) -> Result<(), Trouble> {
        if !matches!(rule, Rule::Nft { taken: Taken::Outer, .. }) {
            return self.ask(SENDER, Request::Probe).map(drop);
        }
        let peer = uplink_address(netns(self.network, Place::PeerHost)).map_err(Trouble::Failed)?;
        let sent = netns(self.network, Place::Host).run(|| {
            let any: IpAddr = if peer.is_ipv4() { [0; 4].into() } else { [0u16; 8].into() };
            UdpSocket::bind((any, 0))?.send_to(&[0], (peer, PROBE))
        })?;
        sent.map(drop).map_err(|error| Trouble::Failed(format!("the host's probe: {error}")))
    }

    /// Bytes with all headers, of one byte of payload. Each packet has `outer` bytes of others.
    fn wire_factor(&self, outer: usize) -> f64 {
        let ip = if self.family == Family::V4 { 20 } else { 40 };
        // Ethernet, IP, UDP, BTH, ICRC; RETH in the first packet.
        let packets = MESSAGE / MTU as usize;
        let headers = packets * (outer + 14 + ip + 8 + 12 + 4) + 16;
        1.0 + headers as f64 / MESSAGE as f64
    }
}

impl Outcome {
    fn must(&mut self, holds: bool, otherwise: impl FnOnce() -> String) {
        if !holds {
            self.wrong.push(otherwise());
        }
    }

    /// The value, or a note of why there is none.
    fn noted<T>(&mut self, value: Result<T, String>) -> Option<T> {
        value.map_err(|why| self.wrong.push(why)).ok()
    }
}

fn unexpected(answer: &Answer) -> Trouble {
    Trouble::Failed(format!("unexpected answer {answer:?}"))
}

/// From the first that was posted to the last completion.
fn seconds_of_all(flows: &[Bulk]) -> f64 {
    let from = flows.iter().map(|flow| flow.from_to.0).min().unwrap_or(0);
    let to = flows.iter().map(|flow| flow.from_to.1).max().unwrap_or(0);
    (to.saturating_sub(from) as f64 / 1e9).max(1e-3)
}
