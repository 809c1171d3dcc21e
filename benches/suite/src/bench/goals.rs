//! The goals, and how the rows meet them.

use super::plan::{
    IDLE_QPS, IPERF3_WRITES, LARGE, LINK_MTU, MTU, Peer, QUEUED_QPS, SENDERS, SHARED, SMALL,
    TCP_WRITES, path_mtu,
};
use super::rows::{BACKENDS, Key, Row};
use crate::goal::{Bound, Goal, Judged};
use crate::workers::{Link, Measure};

/// All goals, judged by the rows that count.
pub(super) fn all(rows: &[Row]) -> Vec<Judged> {
    let [valid, any] =
        [false, true].map(|with_invalid| goals(&JudgedRows { all: rows, with_invalid }));
    let judged =
        |(goal, of_any): (Goal, Goal)| Judged { goal, has_invalid: of_any.value.is_some() };
    valid.into_iter().zip(any).map(judged).collect()
}

fn goals(rows: &JudgedRows<'_>) -> Vec<Goal> {
    let mut goals = Vec::new();
    for netdev in BACKENDS {
        rows.bandwidth(netdev, &mut goals);
    }
    for netdev in BACKENDS {
        rows.latency(netdev, &mut goals);
    }
    goals.push(Goal {
        text: "64 B WRITE, half round trip, on the best backend, µs".into(),
        bound: Bound::AtMost(2.0),
        value: rows.best_latency(),
    });
    for (what, measure, netdev, least) in [
        ("64 B WRITEs on one queue pair", Measure::WriteRate, "udp", 5.0),
        ("64 B WRITEs one by one", Measure::WriteRateSingle, "udp", 2.5),
        ("64 B WRITEs one by one", Measure::WriteRateSingle, "packet", 4.0),
        ("64 B datagrams of UD", Measure::UdRate, "udp", 4.0),
        ("64 B datagrams of UD", Measure::UdRate, "packet", 4.0),
    ] {
        goals.push(Goal {
            text: format!("{what}, `{netdev}`, 10⁶/s"),
            bound: Bound::AtLeast(least),
            value: rows.value(measure, netdev, SMALL),
        });
    }
    for netdev in ["udp", "packet"] {
        rows.many(netdev, &mut goals);
        rows.fan_in(netdev, &mut goals);
        rows.links(netdev, &mut goals);
    }
    for netdev in BACKENDS {
        rows.small_buffers(netdev, &mut goals);
        rows.costs(netdev, &mut goals);
    }
    goals
}

struct JudgedRows<'a> {
    all: &'a [Row],
    /// Whether rows of invalid runs count, too.
    with_invalid: bool,
}

impl JudgedRows<'_> {
    fn counts(&self, row: &Row) -> bool {
        self.with_invalid || row.counts()
    }

    fn row(&self, measure: Measure, netdev: &str, size: usize, mtu: u32, qps: u32) -> Option<&Row> {
        self.row_over(Link::Plain, measure, netdev, size, mtu, qps)
    }

    fn row_over(
        &self,
        link: Link,
        measure: Measure,
        netdev: &str,
        size: usize,
        mtu: u32,
        qps: u32,
    ) -> Option<&Row> {
        let is_of = |key: &Key| {
            (key.measure, key.netdev, key.link) == (measure, netdev, link)
                && (key.size, key.mtu, key.qps) == (size, mtu, qps)
        };
        self.all.iter().find(|row| is_of(&row.key) && self.counts(row))
    }

    fn value(&self, measure: Measure, netdev: &str, size: usize) -> Option<f64> {
        Some(self.row(measure, netdev, size, MTU, 1)?.value)
    }

    /// The best of TCP's rows, with any congestion control: of the streams and sizes that `of`
    /// names, among the sizes that are measured for long.
    fn of_tcp(&self, measure: Measure, of: impl Fn(Peer, usize) -> bool) -> Option<f64> {
        self.of_tcp_over(Link::Plain, measure, of)
    }

    fn of_tcp_over(
        &self,
        link: Link,
        measure: Measure,
        of: impl Fn(Peer, usize) -> bool,
    ) -> Option<f64> {
        let is_of = |key: &Key| {
            let peers = [Peer::TcpSpin, Peer::TcpBlocking, Peer::Iperf3];
            let peer = peers.into_iter().find(|peer| peer.name() == key.netdev);
            let sizes = measure != Measure::WriteBw
                || TCP_WRITES.contains(&key.size)
                || key.size == IPERF3_WRITES && peer == Some(Peer::Iperf3);
            (key.measure, key.link) == (measure, link)
                && sizes
                && peer.is_some_and(|peer| of(peer, key.size))
        };
        let values = self.all.iter().filter(|row| is_of(&row.key) && self.counts(row));
        let values = values.map(|row| row.value);
        if measure.rises() { values.max_by(f64::total_cmp) } else { values.min_by(f64::total_cmp) }
    }

    fn bandwidth(&self, netdev: &str, goals: &mut Vec<Goal>) {
        let is_raw = netdev != "afxdp";
        let large = |measure, mtu| self.row(measure, netdev, LARGE, mtu, 1);
        for (mtu, least) in
            [(MTU, if is_raw { 0.9 } else { 0.95 }), (1024, if is_raw { 0.8 } else { 0.95 })]
        {
            for (measure, what) in [(Measure::WriteBw, "WRITE"), (Measure::SendBw, "SEND")] {
                goals.push(Goal {
                    text: format!("1 MiB {what}, `{netdev}`, path MTU {mtu}, of the baseline"),
                    bound: Bound::AtLeast(least),
                    value: large(measure, mtu).and_then(|row| row.ratio),
                });
            }
            goals.push(Goal {
                text: format!("1 MiB READ, `{netdev}`, path MTU {mtu}, of our WRITE"),
                bound: Bound::AtLeast(0.95),
                value: by(
                    large(Measure::ReadBw, mtu).map(|row| row.value),
                    large(Measure::WriteBw, mtu).map(|row| row.value),
                ),
            });
        }
        if is_raw {
            for (measure, what) in [(Measure::WriteBw, "WRITE"), (Measure::SendBw, "SEND")] {
                let tcp = self.of_tcp(Measure::WriteBw, |_, _| true);
                let row = large(measure, MTU);
                // Where the raw baseline itself is slower than TCP, it is the bound.
                let baseline = by(row.and_then(|row| row.baseline), tcp);
                let least = baseline.map_or(0.85, |baseline| (0.95 * baseline).min(0.85));
                goals.push(Goal {
                    text: format!("1 MiB {what}, `{netdev}`, path MTU {MTU}, by the fastest TCP"),
                    bound: Bound::AtLeast(least),
                    value: by(row.map(|row| row.value), tcp),
                });
            }
        }
        goals.push(Goal {
            text: format!("1 MiB WRITEs in both directions, `{netdev}`, by one direction"),
            bound: Bound::AtLeast(0.9),
            value: by(
                self.value(Measure::WriteBwBoth, netdev, LARGE),
                self.value(Measure::WriteBw, netdev, LARGE),
            ),
        });
        goals.push(Goal {
            text: format!(
                "WRITEs by size, `{netdev}`: the lowest point by the line between its neighbours"
            ),
            bound: Bound::AtLeast(0.9),
            value: self.dent(netdev),
        });
    }

    fn latency(&self, netdev: &str, goals: &mut Vec<Goal>) {
        let write = self.row(Measure::WriteLat, netdev, SMALL, MTU, 1);
        goals.push(Goal {
            text: format!("64 B WRITE, half round trip, `{netdev}`, of the baseline's"),
            bound: Bound::AtMost(1.15),
            value: write.and_then(|row| row.ratio),
        });
        let middle = match netdev {
            "packet" => Some(1.0),
            "udp" => Some(1.3),
            _ => None,
        };
        for (kib, most) in middle.iter().flat_map(|most| [4, 8, 16, 32, 64].map(|kib| (kib, *most)))
        {
            let size = kib << 10;
            goals.push(Goal {
                text: format!("{kib} KiB WRITE, half round trip, `{netdev}`, by spinning TCP's"),
                bound: Bound::AtMost(most),
                value: by(
                    self.value(Measure::WriteLat, netdev, size),
                    self.of_tcp(Measure::WriteLat, |peer, of| peer == Peer::TcpSpin && of == size),
                ),
            });
        }
        goals.push(Goal {
            text: format!(
                "64 B READ, `{netdev}`, one processor, by a WRITE's half round trip there"
            ),
            bound: Bound::AtMost(3.0),
            value: by(
                self.value(Measure::ReadLatOneCpu, netdev, SMALL),
                self.value(Measure::WriteLatOneCpu, netdev, SMALL),
            ),
        });
        let round_trip = write.map(|row| 2.0 * row.value);
        let wake_up = self.row(Measure::WakeUp, Peer::Udp.name(), SMALL, LINK_MTU, 1);
        for (what, size, active, passive, asleep) in [
            ("64 B READ", SMALL, Measure::ReadLat, Measure::ReadLatPassive, Measure::ReadLatAsleep),
            ("FAA", 8, Measure::AtomicLat, Measure::AtomicLatPassive, Measure::AtomicLatAsleep),
        ] {
            for (measure, target) in
                [(active, "active target"), (passive, "passive target under traffic")]
            {
                goals.push(Goal {
                    text: format!("{what}, `{netdev}`, {target}, by a WRITE's round trip"),
                    bound: Bound::AtMost(1.2),
                    value: by(self.value(measure, netdev, size), round_trip),
                });
            }
            // A run has no wake-up figure if the machine was busy, and then everything takes
            // longer.
            let beyond = self.row(asleep, netdev, size, MTU, 1).zip(wake_up);
            let beyond = beyond.filter(|(row, wake_up)| wake_up.samples >= row.samples);
            goals.push(Goal {
                text: format!("{what}, `{netdev}`, sleeping target, beyond a wake-up, µs"),
                bound: Bound::AtMost(5.0),
                value: beyond.map(|(row, wake_up)| row.value - wake_up.value),
            });
        }
        goals.push(Goal {
            text: format!(
                "64 B SEND, both sides sleeping, `{netdev}`, by a blocking UDP ping-pong"
            ),
            bound: Bound::AtMost(1.2),
            value: by(
                self.value(Measure::SendLatBlocking, netdev, SMALL),
                self.row(Measure::SendLatBlocking, Peer::Udp.name(), SMALL, LINK_MTU, 1)
                    .map(|row| row.value),
            ),
        });
    }

    fn best_latency(&self) -> Option<f64> {
        let of = |netdev: &&str| self.value(Measure::WriteLat, netdev, SMALL);
        BACKENDS.iter().filter_map(of).min_by(f64::total_cmp)
    }

    /// Many queue pairs with long queues, by one with such a queue.
    fn many(&self, netdev: &str, goals: &mut Vec<Goal>) {
        let of = |measure, qps| Some(self.row(measure, netdev, SHARED, MTU, qps)?.value);
        let bw = |qps| of(Measure::WriteBwQueued, qps);
        for qps in QUEUED_QPS.into_iter().filter(|qps| *qps > 1) {
            let what = format!("64 KiB WRITEs, 16 outstanding on each of {qps} queue pairs");
            goals.push(Goal {
                text: format!("{what}, `{netdev}`, by one queue pair's"),
                bound: Bound::AtLeast(0.85),
                value: by(bw(qps), bw(1)),
            });
            goals.push(Goal {
                text: format!("{what}, `{netdev}`, Jain's index"),
                bound: Bound::AtLeast(0.95),
                value: of(Measure::WriteBwQueuedFairness, qps),
            });
        }
    }

    /// Many processes that send to one, by one that does.
    fn fan_in(&self, netdev: &str, goals: &mut Vec<Goal>) {
        let of = |measure, senders| {
            Some(self.row_over(Link::Bridge, measure, netdev, SHARED, MTU, senders)?.value)
        };
        for senders in SENDERS.into_iter().filter(|senders| *senders > 1) {
            let what = format!("64 KiB WRITEs of {senders} senders to one receiver, `{netdev}`");
            goals.push(Goal {
                text: format!("{what}, sum by one sender's"),
                bound: Bound::AtLeast(0.8),
                value: by(of(Measure::FanIn, senders), of(Measure::FanIn, 1)),
            });
            goals.push(Goal {
                text: format!("{what}, Jain's index"),
                bound: Bound::AtLeast(0.9),
                value: of(Measure::FanInFairness, senders),
            });
            goals.push(Goal {
                text: format!("{what}, queue pairs in error"),
                bound: Bound::AtMost(0.0),
                value: of(Measure::FanInErrors, senders),
            });
        }
    }

    /// Other links, compared with their raw baseline; without offload also with TCP there.
    fn links(&self, netdev: &str, goals: &mut Vec<Goal>) {
        for (link, what) in [
            (Link::Mtu1500, "MTU 1500"),
            (Link::Bridge, "over a bridge"),
            (Link::NoOffload, "no offload"),
        ] {
            let row = self.row_over(link, Measure::WriteBw, netdev, SHARED, path_mtu(link), 1);
            goals.push(Goal {
                text: format!("64 KiB WRITE, `{netdev}`, {what}, of the baseline"),
                bound: Bound::AtLeast(0.9),
                value: row.and_then(|row| row.ratio),
            });
            if link == Link::NoOffload {
                goals.push(Goal {
                    text: format!("64 KiB WRITE, `{netdev}`, {what}, by the fastest TCP"),
                    bound: Bound::AtLeast(1.0),
                    value: by(
                        row.map(|row| row.value),
                        self.of_tcp_over(link, Measure::WriteBw, |_, _| true),
                    ),
                });
            }
        }
    }

    fn small_buffers(&self, netdev: &str, goals: &mut Vec<Goal>) {
        for (what, small, large, size, mtu) in [
            (
                "1 MiB WRITE, path MTU 4096",
                Measure::WriteBwSmallBuffers,
                Measure::WriteBw,
                LARGE,
                MTU,
            ),
            (
                "1 MiB WRITE, path MTU 1024",
                Measure::WriteBwSmallBuffers,
                Measure::WriteBw,
                LARGE,
                1024,
            ),
            ("64 B WRITE rate", Measure::WriteRateSmallBuffers, Measure::WriteRate, SMALL, MTU),
        ] {
            let value = |measure| Some(self.row(measure, netdev, size, mtu, 1)?.value);
            goals.push(Goal {
                text: format!("{what}, `{netdev}`, receive buffers of 212,992 B, by large ones"),
                bound: Bound::AtLeast(0.8),
                value: by(value(small), value(large)),
            });
        }
    }

    fn costs(&self, netdev: &str, goals: &mut Vec<Goal>) {
        goals.push(Goal {
            text: format!("processor time per GB, `{netdev}`, by iperf3's"),
            bound: Bound::AtMost(0.7),
            value: by(
                self.value(Measure::CpuPerGb, netdev, LARGE),
                self.of_tcp(Measure::CpuPerGb, |peer, _| peer == Peer::Iperf3),
            ),
        });
        let idle = |measure| Some(self.row(measure, netdev, 0, MTU, IDLE_QPS)?.value);
        goals.push(Goal {
            text: format!("wake-ups per second, 1,000 idle queue pairs, `{netdev}`"),
            bound: Bound::AtMost(0.0),
            value: idle(Measure::IdleWakeups),
        });
        goals.push(Goal {
            text: format!("bytes per queue pair of 16 sends and 16 receives, `{netdev}`"),
            bound: Bound::AtMost(4096.0),
            value: idle(Measure::QpBytes),
        });
    }

    /// Bandwidth by size: the lowest ratio of a point to the straight line between its neighbours.
    /// `None` with fewer than three sizes.
    fn dent(&self, netdev: &str) -> Option<f64> {
        let is_of = |key: &Key| {
            (key.measure, key.netdev, key.mtu, key.qps) == (Measure::WriteBw, netdev, MTU, 1)
                && key.link.is_plain()
        };
        // Without one of its points the line has another shape.
        let mut points = self
            .all
            .iter()
            .filter(|row| is_of(&row.key))
            .map(|row| self.counts(row).then_some((row.key.size as f64, row.value)))
            .collect::<Option<Vec<(f64, f64)>>>()?;
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let dents = points.windows(3).map(|window| {
            let [(x0, y0), (x1, y1), (x2, y2)] = [window[0], window[1], window[2]];
            y1 / (y0 + (y2 - y0) * (x1 - x0) / (x2 - x0))
        });
        dents.min_by(f64::total_cmp)
    }
}

fn by(value: Option<f64>, of: Option<f64>) -> Option<f64> {
    value.zip(of.filter(|of| *of > 0.0)).map(|(value, of)| value / of)
}

#[cfg(test)]
mod tests;
