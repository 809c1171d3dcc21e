//! The figures of an interval: the growth of counters between two moments.

use std::collections::BTreeMap;
use std::net::IpAddr;

use rocinante_netdev::handed::page::DROP;
use serde::Serialize;

use super::{Container, Limit, Moment, QueuePair};

/// All containers in an interval.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Rates {
    pub(crate) seconds: f64,
    pub(crate) containers: Vec<ContainerRates>,
}

/// A container in an interval.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct ContainerRates {
    pub(crate) name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) id: Option<String>,
    /// Without repetitions.
    pub(crate) netdevs: Vec<String>,
    pub(crate) tx_gbps: f64,
    pub(crate) rx_gbps: f64,
    pub(crate) tx_mops: f64,
    pub(crate) rx_mops: f64,
    pub(crate) retransmitted: u64,
    pub(crate) rnr_received: u64,
    pub(crate) rnr_sent: u64,
    pub(crate) cnp_received: u64,
    pub(crate) cnp_sent: u64,
    pub(crate) undriven_us: u64,
    /// Packets, by reason; none that is 0.
    pub(crate) drops: BTreeMap<String, u64>,
    pub(crate) limits: Vec<Limit>,
    /// Those at the host's end in which packets waited.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) queues: Vec<QueueRates>,
    /// Pages that changed whenever they were read: their devices count nothing.
    #[serde(skip_serializing_if = "is_none")]
    pub(crate) unread: usize,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) queue_pairs: Vec<QueuePairRates>,
}

/// A queue in an interval.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct QueueRates {
    pub(crate) name: &'static str,
    /// At its end.
    pub(crate) backlog_bytes: u64,
    pub(crate) delayed: u32,
}

/// A queue pair in an interval.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct QueuePairRates {
    pub(crate) qpn: u32,
    pub(crate) peer: Option<IpAddr>,
    pub(crate) peer_qpn: u32,
    pub(crate) service: String,
    pub(crate) state: String,
    pub(crate) tx_gbps: f64,
    pub(crate) rx_gbps: f64,
    pub(crate) tx_mops: f64,
    pub(crate) rx_mops: f64,
    pub(crate) retransmitted: u32,
    pub(crate) rnr_received: u32,
    /// Turns in which it sent nothing more for want of the peer's room, and for congestion or
    /// losses.
    pub(crate) held_by_peer: u32,
    pub(crate) held_by_network: u32,
}

fn is_none(count: &usize) -> bool {
    *count == 0
}

/// Reasons for drops by the names of their counters, beside those that begin with [`DROP`].
const REASONS: [(&str, &str); 3] = [
    ("rx_icrc_encapsulated", "icrc"),
    ("excessive_buffer_overrun_errors", "queue_full"),
    ("port_xmit_discards", "refused_by_kernel"),
];

impl Rates {
    pub(crate) fn between(before: &Moment, now: &mut Moment) -> Self {
        let seconds = now.at.duration_since(before.at).as_secs_f64().max(1e-3);
        let earlier = |name: &str| before.containers.iter().find(|it| it.name == name);
        for it in &mut now.containers {
            earlier(&it.name).into_iter().for_each(|before| it.keep(before));
        }
        let containers = now.containers.iter();
        let containers = containers.map(|it| of(earlier(&it.name), it, seconds)).collect();
        Self { seconds, containers }
    }
}

fn of(before: Option<&Container>, now: &Container, seconds: f64) -> ContainerRates {
    let grown = grown(before, now);
    let count = |name: &str| grown.get(name).copied().unwrap_or_default();
    let rate = |count: u64, unit: f64| count as f64 * unit / seconds;
    // Words of four bytes.
    let gbps = |name| rate(count(name), 32e-9);
    let own = grown.iter().filter_map(|(name, count)| Some((name.strip_prefix(DROP)?, *count)));
    let others = REASONS.iter().map(|(name, reason)| (*reason, count(name)));
    let queues = now.queues.iter().map(|it| {
        let was = before.and_then(|before| before.queues.iter().find(|was| was.name == it.name));
        // One that has come has counted all in this interval. One that came anew counts less than
        // before, and so may a sum of two that were not read at one moment.
        let grown = |was: Option<u32>, is: u32| {
            was.map_or(is, |was| is.wrapping_sub(was).cast_signed().max(0).cast_unsigned())
        };
        let dropped = grown(was.map(|it| it.dropped), it.dropped);
        let delayed = grown(was.map(|it| it.delayed), it.delayed);
        (QueueRates { name: it.name, backlog_bytes: it.backlog, delayed }, u64::from(dropped))
    });
    let queues: Vec<(QueueRates, u64)> = queues.collect();
    let dropped = queues.iter().map(|(it, dropped)| (it.name, *dropped));
    let drops = own.chain(others).chain(dropped).filter(|(_, count)| *count > 0);
    let mut netdevs = now.backends.clone();
    netdevs.sort_unstable();
    netdevs.dedup();
    let queue_pairs = now.queue_pairs.iter().map(|(key, qp)| {
        let before = before.and_then(|it| it.queue_pairs.get(key).or_else(|| it.away.get(key)));
        queue_pair(key.1, before, qp, seconds)
    });
    let drops = drops.map(|(reason, count)| (reason.to_owned(), count)).collect();
    let waiting = queues.into_iter().map(|(it, _)| it);
    let waiting = waiting.filter(|it| it.backlog_bytes > 0 || it.delayed > 0);
    ContainerRates {
        name: now.name.clone(),
        id: now.id.clone(),
        netdevs,
        tx_gbps: gbps("port_xmit_data"),
        rx_gbps: gbps("port_rcv_data"),
        tx_mops: rate(count("sent_requests"), 1e-6),
        rx_mops: rate(count("rcvd_requests"), 1e-6),
        retransmitted: count("retrans_pkts"),
        rnr_received: count("rcvd_rnr_err"),
        rnr_sent: count("send_rnr_err"),
        cnp_received: count("rp_cnp_handled"),
        cnp_sent: count("np_cnp_sent"),
        undriven_us: count("undriven_us"),
        drops,
        limits: now.limits.clone(),
        queues: waiting.collect(),
        unread: now.unread,
        queue_pairs: queue_pairs.collect(),
    }
}

/// The growth of each counter. A device that was not there before has counted all in this interval.
/// One that wrote nonsense, or began anew, counts from 0.
fn grown<'a>(before: Option<&Container>, now: &'a Container) -> BTreeMap<&'a str, u64> {
    let mut grown = BTreeMap::new();
    for (key, counters) in &now.counters {
        let earlier = before.and_then(|it| it.counters.get(key));
        for (name, count) in counters {
            let was = earlier.and_then(|it| it.get(name)).copied().unwrap_or_default();
            let sum: &mut u64 = grown.entry(name.as_str()).or_default();
            *sum = sum.saturating_add(count.checked_sub(was).unwrap_or(*count));
        }
    }
    grown
}

fn queue_pair(
    qpn: u32,
    before: Option<&QueuePair>,
    now: &QueuePair,
    seconds: f64,
) -> QueuePairRates {
    // Another one of this number has counted less.
    let none = QueuePair::default();
    let is_same = |it: &&QueuePair| {
        let counted = it.sent_bytes <= now.sent_bytes && it.received_bytes <= now.received_bytes;
        counted && (it.peer, it.peer_number) == (now.peer, now.peer_number)
    };
    let before = before.filter(is_same).unwrap_or(&none);
    let gbps = |was: u64, is: u64| (is - was) as f64 * 8e-9 / seconds;
    let grown = |was: u32, is: u32| is.wrapping_sub(was);
    let [tx_mops, rx_mops] = [0, 1]
        .map(|way| f64::from(grown(before.requests[way], now.requests[way])) * 1e-6 / seconds);
    QueuePairRates {
        qpn,
        peer: now.peer,
        peer_qpn: now.peer_number,
        service: now.service.clone(),
        state: now.state.clone(),
        tx_gbps: gbps(before.sent_bytes, now.sent_bytes),
        rx_gbps: gbps(before.received_bytes, now.received_bytes),
        tx_mops,
        rx_mops,
        retransmitted: grown(before.repeated, now.repeated),
        rnr_received: grown(before.not_ready, now.not_ready),
        held_by_peer: grown(before.held[0], now.held[0]),
        held_by_network: grown(before.held[1], now.held[1]),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::stat::Queue;

    fn container(devices: &[(&str, &[(&str, u64)])]) -> Container {
        let counters = |all: &[(&str, u64)]| {
            all.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
        };
        let devices = devices.iter().map(|(key, all)| ((*key).to_owned(), counters(all)));
        Container { name: "veth0".into(), counters: devices.collect(), ..Container::default() }
    }

    fn between(before: Container, now: Container) -> ContainerRates {
        let at = Instant::now();
        let moment = |at, it| Moment { at, containers: vec![it] };
        let (before, mut now) = (moment(at, before), moment(at + Duration::from_secs(2), now));
        Rates::between(&before, &mut now).containers.pop().expect("one")
    }

    #[test]
    fn figures_are_of_the_interval_alone() {
        let before = container(&[
            ("1", &[("port_xmit_data", 1000), ("retrans_pkts", 5), ("drop_qkey", 7)]),
            ("2", &[("port_xmit_data", 50)]),
        ]);
        // The second device ended, and a third began.
        let now = container(&[
            ("1", &[("port_xmit_data", 250_001_000), ("retrans_pkts", 8), ("drop_qkey", 7)]),
            ("3", &[("port_xmit_data", 250_000_000), ("rx_icrc_encapsulated", 2)]),
        ]);
        let rates = between(before, now);
        assert!((rates.tx_gbps - 8.0).abs() < 1e-9, "{rates:?}");
        assert_eq!((rates.retransmitted, rates.rx_gbps), (3, 0.0));
        assert_eq!(rates.drops, [("icrc".to_owned(), 2)].into());
    }

    #[test]
    fn a_page_that_changes_all_the_time_counts_nothing() {
        let one = ("1", &[("retrans_pkts", 5_000)][..]);
        let unread = Container { unread: 1, ..container(&[("2", &[("retrans_pkts", 9)])]) };
        let at = Instant::now();
        let moment =
            |seconds, it| Moment { at: at + Duration::from_secs(seconds), containers: vec![it] };
        let before = moment(0, container(&[one, ("2", &[("retrans_pkts", 2)])]));
        let mut now = moment(1, unread);
        let rates = Rates::between(&before, &mut now).containers.pop().expect("one");
        assert_eq!((rates.retransmitted, rates.unread), (7, 1));
        // It is read again.
        let mut later = moment(2, container(&[("1", &[("retrans_pkts", 5_001)])]));
        let rates = Rates::between(&now, &mut later).containers.pop().expect("one");
        assert_eq!((rates.retransmitted, rates.unread), (1, 0));
    }

    #[test]
    fn a_queue_pair_that_was_away_counts_from_where_it_was() {
        let at = Instant::now();
        let moment = |seconds, qps: &[(u32, u32)]| {
            let mut it = container(&[]);
            for (qpn, repeated) in qps {
                let qp = QueuePair { repeated: *repeated, ..QueuePair::default() };
                it.queue_pairs.insert(("1".into(), *qpn), qp);
            }
            Moment { at: at + Duration::from_secs(seconds), containers: vec![it] }
        };
        let mut last = moment(0, &[(17, 5_000), (18, 9)]);
        let looks = [
            (vec![(18, 10)], vec![1]),
            (vec![(18, 12)], vec![2]),
            (vec![(17, 5_003), (18, 12)], vec![3, 0]),
            (vec![(17, 5_004), (19, 7)], vec![1, 7]),
        ];
        for (seconds, (qps, due)) in (1..).zip(looks) {
            let mut now = moment(seconds, &qps);
            let rates = Rates::between(&last, &mut now).containers.pop().expect("one");
            let all = rates.queue_pairs.iter().map(|qp| qp.retransmitted);
            assert_eq!(all.collect::<Vec<_>>(), due);
            last = now;
        }
    }

    #[test]
    fn queues_show_who_waits() {
        let queue = |name, backlog, delayed, dropped| Queue { name, backlog, delayed, dropped };
        let with = |queues: &[Queue]| Container { queues: queues.to_vec(), ..container(&[]) };
        let before = with(&[queue("egress_rate", 9, u32::MAX, 1), queue("host_end", 9, 5, 6)]);
        let now = [
            queue("egress_rate", 0, 1, 4),
            queue("host_end", 0, 5, 6),
            queue("ingress_rate", 7, 0, 2),
        ];
        let rates = between(before, with(&now));
        let [one, other] = &rates.queues[..] else { panic!("{rates:?}") };
        assert_eq!((one.name, one.backlog_bytes, one.delayed), ("egress_rate", 0, 2));
        assert_eq!((other.name, other.backlog_bytes, other.delayed), ("ingress_rate", 7, 0));
        let drops = [("egress_rate".to_owned(), 3), ("ingress_rate".to_owned(), 2)];
        assert_eq!(rates.drops, drops.into());
    }

    #[test]
    fn counters_that_wrap_or_begin_anew_are_no_nonsense() {
        let qp = |sent_bytes, repeated, peer_number| QueuePair {
            sent_bytes,
            repeated,
            requests: [repeated, 0],
            peer_number,
            ..QueuePair::default()
        };
        let with = |qp: QueuePair, count| {
            let mut it = container(&[("1", &[("retrans_pkts", count)])]);
            it.queue_pairs.insert(("1".into(), 17), qp);
            it
        };
        let rates = between(with(qp(10, u32::MAX, 1), 9), with(qp(1_000_000_010, 1, 1), 4));
        assert_eq!(rates.retransmitted, 4);
        let QueuePairRates { tx_gbps, tx_mops, retransmitted, .. } = &rates.queue_pairs[0];
        assert!((tx_gbps - 4.0).abs() < 1e-9 && (tx_mops - 1e-6).abs() < 1e-12, "{rates:?}");
        assert_eq!(*retransmitted, 2);
        // Its number is another one's now.
        for other in [qp(3, 7, 1), qp(2000, 7, 2)] {
            let rates = between(with(qp(1000, 5, 1), 0), with(other, 0));
            assert_eq!(rates.queue_pairs[0].retransmitted, 7, "{rates:?}");
        }
    }
}
