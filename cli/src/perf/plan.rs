//! The parameters of a measurement: the options of one side, and the plan of both.

use std::time::Duration;

use rocinante::ConnectOptions;
use rocinante::verbs::Mtu;
use serde::{Deserialize, Serialize};

use super::test::{Atomic, Service, Test};
use crate::measure::{Bulk, BulkOp, Until};
use crate::output::{Failure, Result};

/// Largest message in bytes.
pub const SIZE_MAX: u32 = 1 << 30;
/// Largest number of queue pairs.
pub const QPS_MAX: i64 = 1024;
/// Largest depth of a queue.
pub const DEPTH_MAX: i64 = 16_384;
/// The sizes of `-a`: 2^1 to 2^23.
const ALL_SHIFTS: std::ops::RangeInclusive<u32> = 1..=23;
/// Limit of the bytes of each size with `-a` and without `-n`.
const ALL_BYTES: u64 = 1 << 30;
/// Limit of the completion queue that all queue pairs share. The device takes more.
const COMPLETIONS_MAX: u64 = 1 << 19;

/// The options on a side's command line, by their names there.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Given {
    /// `-s`.
    pub size: Option<u32>,
    /// `-a`.
    pub all: bool,
    /// `-n`.
    pub iters: Option<u64>,
    /// `-D`.
    pub duration: Option<u64>,
    /// `-q`.
    pub qps: Option<u32>,
    /// `-m`.
    pub mtu: Option<u32>,
    /// `-t`.
    pub tx_depth: Option<u32>,
    /// `-r`.
    pub rx_depth: Option<u32>,
    /// `-l`.
    pub post_list: Option<u32>,
    /// `-Q`.
    pub cq_mod: Option<u32>,
    /// `-A`.
    pub atomic: Option<Atomic>,
    /// `-b`.
    pub bidirectional: bool,
    /// `-c`.
    pub connection: Option<Service>,
    /// `-o`.
    pub outs: Option<u8>,
    /// `-u`.
    pub qp_timeout: Option<u8>,
    /// `--tclass`.
    pub tclass: Option<u8>,
}

impl Given {
    /// Checks that the options suit the test. Error: an option does not suit the test.
    pub fn check(&self, test: Test) -> Result {
        let usage = |what: &str| Err(Failure::Usage(what.to_owned()));
        if !test.is_bandwidth() {
            let given = [
                ("-b", self.bidirectional),
                ("-q", self.qps.is_some_and(|qps| qps > 1)),
                ("-t", self.tx_depth.is_some()),
                ("-l", self.post_list.is_some()),
                ("-Q", self.cq_mod.is_some()),
            ];
            if let Some((option, _)) = given.iter().find(|(_, given)| *given) {
                return usage(&format!(
                    "{option} is for bandwidth: {test} has one message at a time"
                ));
            }
        }
        if test.is_atomic() {
            if self.all || self.size.is_some_and(|size| size != 8) {
                return usage("an atomic has 8 bytes: leave out -s and -a");
            }
        } else if self.atomic.is_some() {
            return usage("-A is for atomic-bw and atomic-lat");
        }
        if self.outs.is_some() && !test.has_response() {
            return usage(&format!("-o is for READs and atomics: {test} has none"));
        }
        if self.connection == Some(Service::Ud) && self.qp_timeout.is_some() {
            return usage("-u is for connections: a datagram is not acknowledged");
        }
        Ok(())
    }

    /// The plan of a client with these options.
    #[must_use]
    pub fn plan(&self, test: Test) -> Plan {
        let bulk = test.is_bandwidth();
        let connection = self.connection.unwrap_or_default();
        let default_size = match test {
            Test::AtomicBw | Test::AtomicLat => 8,
            // Every link takes such datagrams.
            _ if bulk && connection == Service::Ud => self.mtu.unwrap_or(1024).min(1024),
            _ if bulk => 65_536,
            _ => 2,
        };
        let tx_depth = self.tx_depth.unwrap_or(if bulk { 128 } else { 16 });
        let iters = match (self.iters, self.duration) {
            (None, None) => Some(if bulk { 5000 } else { 1000 }),
            (iters, _) => iters,
        };
        Plan {
            size: self.size.unwrap_or(default_size),
            all: self.all,
            iters,
            limited: self.all && self.iters.is_none(),
            duration: self.duration,
            qps: self.qps.unwrap_or(1),
            mtu: self.mtu,
            tx_depth,
            rx_depth: self.rx_depth.unwrap_or(if bulk { 512 } else { 2 }),
            post_list: self.post_list.unwrap_or(1).min(tx_depth),
            cq_mod: self.cq_mod.unwrap_or(32).min(tx_depth / 2).max(1),
            atomic: self.atomic.unwrap_or(Atomic::FetchAdd),
            bidirectional: self.bidirectional,
            connection,
            outs: self.outs.unwrap_or_else(outs),
            qp_timeout: self.qp_timeout.unwrap_or_else(qp_timeout),
            tclass: self.tclass.unwrap_or_default(),
        }
    }
}

fn outs() -> u8 {
    ConnectOptions::default().max_rd_atomic
}

fn qp_timeout() -> u8 {
    ConnectOptions::default().timeout
}

/// The parameters of both sides. The client chooses them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Plan {
    size: u32,
    /// Whether all sizes are measured.
    pub all: bool,
    /// Messages of each queue pair; `None` in a test for a time.
    iters: Option<u64>,
    /// Whether the messages of each size are limited to 1 GiB.
    limited: bool,
    /// Duration in seconds.
    duration: Option<u64>,
    /// Queue pairs.
    pub qps: u32,
    /// Path MTU, if one was given.
    pub mtu: Option<u32>,
    /// Requests outstanding per queue pair.
    pub tx_depth: u32,
    /// Receives posted per queue pair.
    pub rx_depth: u32,
    post_list: u32,
    cq_mod: u32,
    /// The kind of atomic.
    pub atomic: Atomic,
    /// Whether messages go in both directions at once.
    #[serde(default)]
    pub bidirectional: bool,
    /// The transport service.
    #[serde(default)]
    pub connection: Service,
    /// READs or atomics outstanding at a time.
    #[serde(default = "outs")]
    pub outs: u8,
    /// The ACK timeout: 4.096 µs · 2^qp_timeout.
    #[serde(default = "qp_timeout")]
    pub qp_timeout: u8,
    /// Traffic class of the packets.
    #[serde(default)]
    pub tclass: u8,
}

impl Plan {
    /// Checks that the plan can be carried out. It may come from a peer. Error: a parameter is out
    /// of range. The text names it.
    pub fn check(&self, test: Test) -> Result {
        let depths = DEPTH_MAX;
        let ranges = [
            ("size", self.size, i64::from(SIZE_MAX)),
            ("qps", self.qps, QPS_MAX),
            ("tx-depth", self.tx_depth, depths),
            ("rx-depth", self.rx_depth, depths),
            ("post-list", self.post_list, i64::from(self.tx_depth)),
            ("cq-mod", self.cq_mod, i64::from(self.tx_depth)),
            ("outs", self.outs.into(), 128),
            ("qp-timeout", self.qp_timeout.into(), 31),
        ];
        for (name, value, max) in ranges {
            if value == 0 || i64::from(value) > max {
                return Err(Failure::Failed(format!("--{name} is {value}: it may be 1 to {max}")));
            }
        }
        if self.completions() > COMPLETIONS_MAX {
            return Err(Failure::Failed(format!(
                "{} queue pairs of {} sends and {} receives need a completion queue of {} entries, and it may have \
                 {COMPLETIONS_MAX}: give smaller -q, -t or -r",
                self.qps,
                self.tx_depth,
                self.rx_depth,
                self.completions()
            )));
        }
        if self.mtu.is_some() && self.path_mtu().is_none() {
            return Err(Failure::Failed("a path MTU is 256, 512, 1024, 2048 or 4096".to_owned()));
        }
        if self.iters.is_none() == self.duration.is_none() || self.iters == Some(0) {
            return Err(Failure::Failed(
                "either -n or -D says when to end: give one of them".to_owned(),
            ));
        }
        if self.bidirectional && !test.is_bandwidth() {
            return Err(Failure::Failed("-b is for bandwidth: leave it out".to_owned()));
        }
        Service::of(&self.connection.to_string(), test)?;
        if test.is_atomic() && self.size != 8 {
            return Err(Failure::Failed("an atomic has 8 bytes: leave out -s".to_owned()));
        }
        Ok(())
    }

    /// Entries of the completion queue that all queue pairs share.
    #[must_use]
    pub fn completions(&self) -> u64 {
        u64::from(self.qps) * (u64::from(self.tx_depth) + u64::from(self.rx_depth))
    }

    /// The requested path MTU.
    #[must_use]
    pub fn path_mtu(&self) -> Option<Mtu> {
        self.mtu.and_then(Mtu::from_bytes)
    }

    /// The sizes to measure.
    pub fn sizes(&self) -> impl Iterator<Item = usize> + use<> {
        let (all, size) = (self.all, self.size);
        let powers = ALL_SHIFTS.map(|shift| 1 << shift).filter(move |_| all);
        powers.chain((!all).then_some(size as usize))
    }

    /// The options of the connections.
    #[must_use]
    pub fn options(&self) -> ConnectOptions {
        ConnectOptions::default()
            .mtu(self.path_mtu())
            .max_rd_atomic(self.outs)
            .max_dest_rd_atomic(self.outs)
            .timeout(self.qp_timeout)
            .traffic_class(self.tclass)
    }

    /// The end of the measurement with messages of `size` bytes, on each queue pair.
    #[must_use]
    pub fn until(&self, size: usize) -> Until {
        match (self.duration, self.iters) {
            (Some(seconds), _) => Until::Time(Duration::from_secs(seconds)),
            (None, iters) => {
                let iters = iters.unwrap_or(1);
                let limit = if self.limited { ALL_BYTES / size as u64 } else { u64::MAX };
                Until::Messages(iters.min(limit).max(1))
            }
        }
    }

    /// The bulk transfer of `size` bytes per message, over all queue pairs.
    #[must_use]
    pub fn bulk(&self, op: BulkOp, size: usize, inline: bool) -> Bulk {
        let until = match self.until(size) {
            Until::Messages(each) => Until::Messages(each.saturating_mul(self.qps.into())),
            time @ Until::Time(_) => time,
        };
        Bulk {
            op,
            size,
            depth: self.tx_depth as usize,
            list: self.post_list as usize,
            signal_every: self.cq_mod as usize,
            inline,
            until,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum as _;

    #[test]
    fn defaults_are_possible_for_every_test() {
        for test in Test::value_variants() {
            let given = Given::default();
            given.check(*test).unwrap();
            let plan = given.plan(*test);
            plan.check(*test).unwrap();
            let sizes: Vec<usize> = plan.sizes().collect();
            assert_eq!(sizes.len(), 1);
            let line = serde_json::to_string(&plan).unwrap();
            assert_eq!(serde_json::from_str::<Plan>(&line).unwrap(), plan);
        }
    }

    #[test]
    fn all_sizes_are_limited_unless_told_otherwise() {
        let given = Given { all: true, ..Given::default() };
        let plan = given.plan(Test::WriteBw);
        let sizes: Vec<usize> = plan.sizes().collect();
        assert_eq!((sizes.len(), sizes[0], sizes[22]), (23, 2, 8 << 20));
        assert_eq!(plan.until(64), Until::Messages(5000));
        assert_eq!(plan.until(8 << 20), Until::Messages(128));
        let given = Given { iters: Some(777), ..given };
        assert_eq!(given.plan(Test::WriteBw).until(8 << 20), Until::Messages(777));
    }

    #[test]
    fn options_that_do_nothing_are_refused() {
        let given = Given { tx_depth: Some(4), ..Given::default() };
        assert!(given.check(Test::WriteBw).is_ok());
        assert_eq!(given.check(Test::WriteLat).unwrap_err().code(), 2);
        let given = Given { atomic: Some(Atomic::CompareSwap), ..Given::default() };
        assert!(given.check(Test::AtomicLat).is_ok() && given.check(Test::ReadLat).is_err());
        let given = Given { size: Some(16), ..Given::default() };
        assert!(given.check(Test::AtomicLat).is_err());
        let given = Given { outs: Some(4), ..Given::default() };
        assert!(given.check(Test::ReadBw).is_ok() && given.check(Test::SendBw).is_err());
        let datagrams = Some(Service::Ud);
        let given = Given { connection: datagrams, qp_timeout: Some(9), ..Given::default() };
        assert!(given.check(Test::SendLat).is_err());
    }

    #[test]
    fn a_peers_plan_is_checked() {
        let good = Given::default().plan(Test::WriteBw);
        let bad: [fn(&mut Plan); 10] = [
            |plan| plan.size = 0,
            |plan| plan.size = u32::MAX,
            |plan| plan.qps = 5000,
            |plan| plan.cq_mod = plan.tx_depth + 1,
            |plan| plan.mtu = Some(1500),
            |plan| plan.duration = Some(1),
            |plan| plan.iters = None,
            |plan| (plan.qps, plan.tx_depth) = (1024, 16_384),
            |plan| plan.connection = Service::Ud,
            |plan| plan.outs = 0,
        ];
        for spoil in bad {
            let mut plan = good.clone();
            spoil(&mut plan);
            assert!(plan.check(Test::WriteBw).is_err(), "{plan:?}");
        }
    }
}
