//! Options that perftest's users know.

use super::PerftestProgram;
use super::plan::Managed;
use crate::compat::device::{AddressChoice, DeviceArgs};
use crate::compat::refused::{Option_, Refused, Table};
use crate::output::Failure;
use crate::perf::test::{Service, Test};
use crate::size::size;

/// Options that perftest's users type by heart, beside those of `perf`.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Compatibility with perftest")]
pub struct Options {
    /// The other side is a program of this kind
    #[arg(long, value_enum, value_name = "PROGRAM")]
    pub compat: Option<PerftestProgram>,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    /// Index of the GID to use (`rocinante devices` shows them) [default: that of the address of
    /// the TCP connection]
    #[arg(short = 'x', long, value_name = "INDEX")]
    pub(super) gid_index: Option<usize>,
    /// Use the device's first global IPv6 address; TCP may stay on IPv4
    #[arg(long)]
    pub(super) ipv6: bool,
    /// Connect by the connection manager, as --cm. With --compat also the messages of both sides go
    /// over a queue pair
    #[arg(short = 'R', long = "rdma_cm", alias = "rdma-cm")]
    pub(crate) rdma_cm: bool,
    /// With --compat: exchange all messages over a queue pair that the connection manager connects,
    /// but connect the other queue pairs without it; else as --cm
    #[arg(short = 'z', long = "comm_rdma_cm", alias = "com_rdma_cm")]
    pub(crate) comm_rdma_cm: bool,
    /// Type of service of the packets, as --tclass; with --compat only with -R
    #[arg(short = 'T', long, value_name = "TOS")]
    pub(super) tos: Option<u8>,
    /// Do not look for the best stretch, with --compat; else without effect
    #[arg(short = 'N', long, alias = "noPeak")]
    pub(super) no_peak: bool,
    /// With --compat and -D: do not count the first and the last seconds [default: a quarter of -D
    /// each]; else without effect
    #[arg(short = 'f', long, value_name = "SECONDS")]
    pub(super) margin: Option<u64>,
    /// With --compat: print Gb/sec (10⁹ bits) instead of MB/sec (2²⁰ bytes); else always so
    #[arg(long = "report_gbits", alias = "report-gbits")]
    pub(super) report_gbits: bool,
    /// Without effect: the processor's frequency is not used here
    #[arg(short = 'F', long = "CPU-freq")]
    pub(super) cpu_freq: bool,
    /// The service level, always 0: --tclass marks packets
    #[arg(short = 'S', long = "sl", value_name = "LEVEL")]
    pub(super) service_level: Option<u8>,
    #[command(flatten)]
    refused: Refused<Perftest>,
}

/// Options of the queue pairs.
#[derive(Debug, clap::Args)]
pub struct QpOptions {
    /// The transport service: RC, UC for send and write, UD for send [default: RC]
    #[arg(short = 'c', long, value_name = "TYPE")]
    pub(super) connection: Option<String>,
    /// Sleep on completion events instead of polling
    #[arg(short, long)]
    pub(crate) events: bool,
    /// Send messages up to this size inline [default: 0 for bandwidth, 64 for latency]
    #[arg(short = 'I', long = "inline_size", alias = "inline-size", value_name = "BYTES", value_parser = size::<0, 4096>)]
    pub(crate) inline_size: Option<u32>,
    /// READs or atomics outstanding at a time [default: 16]
    #[arg(short = 'o', long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=128))]
    pub(crate) outs: Option<u8>,
    /// Wait 4.096 µs · 2^N for an acknowledgement [default: 14; with --compat 16]
    #[arg(short = 'u', long = "qp-timeout", value_name = "N", value_parser = clap::value_parser!(u8).range(1..=31))]
    pub(crate) qp_timeout: Option<u8>,
    /// Traffic class of the packets: DSCP in the upper six bits, ECN in the lower two
    #[arg(long, value_name = "CLASS")]
    pub(super) tclass: Option<u8>,
}

impl QpOptions {
    /// The transport service, if one was given.
    ///
    /// # Errors
    /// There is no such service, or it has no operations of the test.
    pub fn service(&self, test: Test) -> Result<Option<Service>, Failure> {
        self.connection.as_deref().map(|name| Service::of(name, test)).transpose()
    }
}

/// perftest's programs.
#[derive(Debug)]
struct Perftest;

const fn option(
    short: Option<char>,
    long: &'static str,
    value: bool,
    why: &'static str,
) -> Option_ {
    Option_ { short, long, value, why }
}

const JSON: &str = "--json has all figures";
const SRQ: &str = "shared receive queues are not used on this side; the other may use them";
const MEMORY: &str = "memory is ordinary memory here";
const SAMPLES: &str =
    "times are kept as a histogram, of which --json has percentiles: leave it out";
const GROUPS: &str = "multicast groups are not measured: -c UD measures datagrams";
const RATE: &str = "the host's traffic control shapes what is sent (`tc qdisc`)";

impl Table for Perftest {
    const OPTIONS: &'static [Option_] = &[
        option(Some('g'), "mcg", false, GROUPS),
        option(Some('M'), "MGID", true, GROUPS),
        option(Some('O'), "dualport", false, "a device has one port"),
        option(Some('L'), "hop_limit", true, "packets leave with a hop limit of 64"),
        option(None, "latency_gap", true, "round trips follow each other at once"),
        option(Some('C'), "report-cycles", false, "times are in microseconds: leave it out"),
        option(Some('H'), "report-histogram", false, SAMPLES),
        option(Some('U'), "report-unsorted", false, SAMPLES),
        option(Some('W'), "report-counters", true, "--counters prints all of this process's"),
        option(Some('V'), "version", false, "`rocinante --version` tells it"),
        option(None, "output", true, JSON),
        option(None, "source_ip", true, "--bind says which address to use"),
        option(None, "bind_source_ip", true, "--bind says which address to use"),
        option(None, "retry_count", true, "requests are sent again 7 times, which is the most"),
        option(None, "wait_destroy", true, "queue pairs go when the work is done: leave it out"),
        option(None, "reversed", false, "start the client where the server would be"),
        option(None, "use_old_post_send", false, "there is one way to post: leave it out"),
        option(None, "pkey_index", true, "RoCE devices have the default P_Key alone: leave it out"),
        option(None, "dlid", true, "Ethernet has no LIDs: the server is found by its IP address"),
        option(None, "out_json", false, JSON),
        option(None, "cpu_util", false, "`time` and `perf stat` tell it"),
        option(None, "report-both", false, "only the sum of both directions is told: leave it out"),
        option(None, "report_per_port", false, "a device has one port"),
        option(None, "rate_limit", true, RATE),
        option(None, "rate_limit_type", true, RATE),
        option(None, "burst_size", true, RATE),
        option(None, "use-srq", false, SRQ),
        option(
            None,
            "recv_post_list",
            true,
            "receives are posted one by one; the other side may do otherwise",
        ),
        option(None, "perform_warm_up", false, "nothing is warmed up before measuring"),
        option(None, "dont_xchg_versions", false, "the other side must tell its version"),
        option(None, "flows", true, "each queue pair is a flow: give -q"),
        option(None, "mr_per_qp", false, "all queue pairs share a region"),
        option(None, "use_hugepages", false, MEMORY),
        option(None, "odp", false, MEMORY),
        option(None, "mmap", true, MEMORY),
        option(None, "use_cuda", true, MEMORY),
        option(None, "use_rocm", true, MEMORY),
    ];
}

impl Options {
    /// Whether the results are printed in Gb/sec.
    #[must_use]
    pub fn reports_gbits(&self) -> bool {
        self.report_gbits
    }

    /// The choice among the device's addresses.
    #[must_use]
    pub fn choice(&self) -> AddressChoice {
        match self.gid_index {
            Some(index) => AddressChoice::Gid { index, option: "-x" },
            None if self.ipv6 => AddressChoice::Ipv6,
            None => AddressChoice::Any,
        }
    }

    /// The traffic class, if one was given.
    #[must_use]
    pub fn traffic_class(&self, qp: &QpOptions) -> Option<u8> {
        qp.tclass.or(self.tos)
    }

    /// The connections that the connection manager makes. `cm` is `--cm`.
    pub(super) fn managed(&self, cm: bool) -> Managed {
        match (self.rdma_cm || cm, self.comm_rdma_cm) {
            (true, _) => Managed::All,
            (false, true) => Managed::Words,
            (false, false) => Managed::Nothing,
        }
    }

    /// Checks that the options are supported.
    ///
    /// # Errors
    /// An option is not supported here.
    pub fn check(&self) -> Result<(), Failure> {
        self.refused.check()?;
        if self.service_level.is_some_and(|level| level != 0) {
            return Err(Failure::Usage(
                "-S: a service level is a VLAN's priority on Ethernet, and the kernel sets that: --tclass marks packets".into(),
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct OptionLine {
        #[command(flatten)]
        options: Options,
    }

    fn checked(line: &str) -> Result<(), String> {
        let line = OptionLine::try_parse_from(line.split_whitespace())
            .map_err(|error| error.to_string())?;
        line.options.check().map_err(|failure| failure.to_string())
    }

    #[test]
    fn what_is_not_taken_says_why() {
        for (line, word) in [
            ("x -S 3", "--tclass"),
            ("x --use-srq", "shared receive queues"),
            ("x -H", "histogram, of which --json has percentiles"),
            ("x -L 3", "-L (--hop_limit)"),
            ("x --latency_gap 3", "--latency_gap is not taken"),
            ("x --reversed", "start the client"),
            ("x --retry_count 3", "7 times"),
            ("x --wait_destroy=9", "leave it out"),
            ("x --output bandwidth", "--json"),
            ("x --source_ip 10.0.0.1", "--bind"),
            ("x -W port_rcv_data", "--counters"),
            ("x -V", "rocinante --version"),
            ("x --use_old_post_send", "one way"),
            ("x --pkey_index 1", "P_Key"),
            ("x --dlid 4", "no LIDs"),
            ("x --no-such-option", "unexpected argument"),
        ] {
            let why = checked(line).unwrap_err();
            assert!(why.contains(word), "no {word:?} in: {why}");
        }
        assert_eq!(
            checked("x -F -d eth0 --ib-port 1 -x 0 -S 0 --report_gbits -N -R -z -T 4 -f 1 --ipv6"),
            Ok(())
        );
    }
}
