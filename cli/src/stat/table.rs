//! The lines of an interval.

use super::Limit;
use super::rates::{ContainerRates, QueuePairRates, Rates};
use crate::devices::columns::Columns;
use crate::output::digits;

/// After this number of lines the head comes again, as in vmstat(8).
const HEAD_EVERY: usize = 20;

const CONTAINERS: [&str; 10] = [
    "container",
    "netdev",
    "tx_Gb/s",
    "rx_Gb/s",
    "tx_op/s",
    "rx_op/s",
    "retrans",
    "rnr_rx/tx",
    "cnp_rx/tx",
    "drops limits",
];
const QUEUE_PAIRS: [&str; 11] = [
    "container",
    "qpn",
    "state",
    "peer",
    "peer_qpn",
    "tx_Gb/s",
    "rx_Gb/s",
    "tx_op/s",
    "rx_op/s",
    "retrans",
    "rnr_rx",
];

/// Lines below each other over several intervals.
#[derive(Debug)]
pub(super) struct Table {
    qps: bool,
    /// Since the head.
    lines: usize,
    /// No column gets narrower.
    columns: Vec<usize>,
}

impl Table {
    pub(super) fn new(qps: bool) -> Self {
        Self { qps, lines: HEAD_EVERY, columns: Vec::new() }
    }

    /// The lines of an interval.
    pub(super) fn lines(&mut self, rates: &Rates) -> Vec<String> {
        let head: &[&str] = if self.qps { &QUEUE_PAIRS } else { &CONTAINERS };
        let mut columns = Columns::of_numbers(head);
        columns.at_least(&self.columns);
        for container in &rates.containers {
            match self.qps {
                true => {
                    let rows = container.queue_pairs.iter();
                    rows.for_each(|qp| columns.push(of_queue_pair(&container.name, qp)));
                }
                false => columns.push(of_container(container)),
            }
        }
        self.columns = columns.widths();
        let text = columns.to_string();
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        if self.lines < HEAD_EVERY {
            lines.remove(0);
        } else {
            self.lines = 0;
        }
        self.lines += lines.len();
        lines
    }
}

fn of_container(it: &ContainerRates) -> Vec<String> {
    let pair = |received: u64, sent: u64| format!("{received}/{sent}");
    let drops = it.drops.iter().map(|(reason, count)| format!("{reason}={count}"));
    let limits = it.limits.iter().map(limit);
    let notes: Vec<String> = drops.chain(limits).collect();
    vec![
        it.name.clone(),
        if it.netdevs.is_empty() { "-".to_owned() } else { it.netdevs.join(",") },
        digits(it.tx_gbps),
        digits(it.rx_gbps),
        per_second(it.tx_mops),
        per_second(it.rx_mops),
        it.retransmitted.to_string(),
        pair(it.rnr_received, it.rnr_sent),
        pair(it.cnp_received, it.cnp_sent),
        if notes.is_empty() { "-".to_owned() } else { notes.join(" ") },
    ]
}

fn of_queue_pair(container: &str, it: &QueuePairRates) -> Vec<String> {
    vec![
        container.to_owned(),
        it.qpn.to_string(),
        format!("{} {}", it.service, it.state),
        it.peer.map_or_else(|| "-".to_owned(), |peer| peer.to_string()),
        it.peer_qpn.to_string(),
        digits(it.tx_gbps),
        digits(it.rx_gbps),
        per_second(it.tx_mops),
        per_second(it.rx_mops),
        it.retransmitted.to_string(),
        it.rnr_received.to_string(),
    ]
}

fn per_second(millions: f64) -> String {
    format!("{:.0}", millions * 1e6)
}

/// `hca_object=3/100`, or a rate: `egress_rate=1e9`.
fn limit(it: &Limit) -> String {
    let Limit { name, current, max } = it;
    current.map_or_else(|| format!("{name}={max}"), |current| format!("{name}={current}/{max}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(name: &str, gbps: f64) -> ContainerRates {
        ContainerRates {
            name: name.to_owned(),
            id: None,
            netdevs: vec!["packet".into(), "udp".into()],
            tx_gbps: gbps,
            rx_gbps: 0.0,
            tx_mops: 0.012_345,
            rx_mops: 0.0,
            retransmitted: 3,
            rnr_received: 1,
            rnr_sent: 2,
            cnp_received: 4,
            cnp_sent: 5,
            undriven_us: 0,
            drops: [("qkey".to_owned(), 6)].into(),
            queues: Vec::new(),
            unread: 0,
            limits: vec![Limit { name: "hca_object".into(), current: Some(7), max: 8 }],
            queue_pairs: Vec::new(),
        }
    }

    #[test]
    fn lines_of_all_intervals_stand_below_each_other() {
        let mut table = Table::new(false);
        let mut lines = |names: &[&str]| {
            let containers = names.iter().map(|name| container(name, 12.34)).collect();
            table.lines(&Rates { seconds: 1.0, containers })
        };
        let first = lines(&["veth0123456789"]);
        assert_eq!(first.len(), 2, "a head and a line");
        assert!(first[0].starts_with("container") && first[0].ends_with("drops limits"));
        let words: Vec<&str> = first[1].split_whitespace().collect();
        let all =
            ["veth0123456789", "packet,udp", "12.3", "0.0000", "12345", "0", "3", "1/2", "4/5"];
        assert_eq!(words[..9], all);
        assert_eq!(words[9..], ["qkey=6", "hca_object=7/8"]);
        let second = lines(&["v"]);
        assert_eq!(second.len(), 1, "no head");
        assert_eq!(second[0].find("12.3"), first[1].find("12.3"));
        let heads = (0..2 * HEAD_EVERY).flat_map(|_| lines(&["v"]));
        let heads = heads.filter(|line| line.starts_with("container"));
        assert_eq!(heads.count(), 2);
        assert!(lines(&[]).is_empty());
    }
}
