//! Options that perftest's users know.

use rocinante::QpType;

use super::plan::Managed;
use crate::compat::device::DeviceArgs;
use crate::compat::refused::{Option_, Refused, Table};
use crate::output::Failure;
use crate::perf::plan::Test;

/// Options that `--compat perftest` adds to those of `perf`.
#[derive(Debug, clap::Args)]
pub struct Options {
    #[command(flatten)]
    pub(super) device: DeviceArgs,
    /// With --compat: index of the GID to use (`rocinante devices` shows them) [default: that of
    /// the address of the TCP connection]
    #[arg(short = 'x', long, value_name = "INDEX")]
    pub(super) gid_index: Option<usize>,
    /// With --compat: use the device's first global IPv6 address; TCP stays on IPv4
    #[arg(long)]
    pub(super) ipv6: bool,
    /// With --compat: accepted without effect, as the processor's frequency is not used here
    #[arg(short = 'F', long = "CPU-freq")]
    pub(super) cpu_freq: bool,
    /// With --compat: sleep on completion events instead of polling
    #[arg(short, long)]
    pub(super) events: bool,
    /// With --compat: send messages up to this size inline [default: 0 for bandwidth, 64 for
    /// latency]
    #[arg(short = 'I', long = "inline_size", value_name = "BYTES", value_parser = clap::value_parser!(u32).range(..=4096))]
    pub(super) inline_size: Option<u32>,
    /// With --compat: READs or atomics outstanding at a time [default: 16]
    #[arg(short = 'o', long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=128))]
    pub(super) outs: Option<u8>,
    /// With --compat: wait 4.096 µs · 2^N for an acknowledgement [default: 16]
    #[arg(short = 'u', long = "qp-timeout", value_name = "N", value_parser = clap::value_parser!(u8).range(1..=31))]
    pub(super) qp_timeout: Option<u8>,
    /// With --compat: do not look for the best stretch
    #[arg(short = 'N', long)]
    pub(super) no_peak: bool,
    /// With --compat and -D: do not count the first and the last seconds [default: a quarter of -D
    /// each]
    #[arg(short = 'f', long, value_name = "SECONDS")]
    pub(super) margin: Option<u64>,
    /// With --compat: traffic class of the packets
    #[arg(long, value_name = "CLASS")]
    pub(super) tclass: Option<u8>,
    /// With --compat: print Gb/sec (10⁹ bits) instead of MB/sec (2²⁰ bytes)
    #[arg(long = "report_gbits", alias = "report-gbits")]
    pub(super) report_gbits: bool,
    /// With --compat: the transport: RC, UC for send and write, UD for send [default: RC]
    #[arg(short = 'c', long, value_name = "TYPE")]
    pub(super) connection: Option<String>,
    /// With --compat: connect by the connection manager, as --cm does without --compat; also the
    /// messages of both sides go over a queue pair
    #[arg(short = 'R', long = "rdma_cm", alias = "rdma-cm")]
    pub(super) rdma_cm: bool,
    /// With --compat: exchange all messages over a queue pair that the connection manager connects,
    /// but connect the other queue pairs without it
    #[arg(short = 'z', long = "comm_rdma_cm", alias = "com_rdma_cm")]
    pub(super) comm_rdma_cm: bool,
    /// With --compat and -R: type of service of the packets, as --tclass
    #[arg(short = 'T', long, value_name = "TOS")]
    pub(super) tos: Option<u8>,
    /// With --compat: the service level, always 0
    #[arg(short = 'S', long = "sl", value_name = "LEVEL")]
    pub(super) service_level: Option<u8>,
    #[command(flatten)]
    refused: Refused<Perftest>,
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
const ALWAYS: &str =
    "give -D with more seconds than it shall last: Ctrl-C ends it with the figures so far";
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
        option(Some('w'), "limit_bw", true, "compare the figure of --json"),
        option(Some('y'), "limit_msgrate", true, "compare the figure of --json"),
        option(None, "out_json", false, JSON),
        option(None, "cpu_util", false, "`time` and `perf stat` tell it"),
        option(None, "report-both", false, "only the sum of both directions is told: leave it out"),
        option(None, "report_per_port", false, "a device has one port"),
        option(None, "run_infinitely", false, ALWAYS),
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
    /// Checks that no option was given that needs `--compat`.
    ///
    /// # Errors
    /// Such an option was given.
    pub fn check_absent(&self) -> Result<(), Failure> {
        let given = [
            ("-d", self.device.ib_dev.is_some()),
            ("-i", self.device.ib_port.is_some()),
            ("-x", self.gid_index.is_some()),
            ("--ipv6", self.ipv6),
            ("-F", self.cpu_freq),
            ("-e", self.events),
            ("-I", self.inline_size.is_some()),
            ("-o", self.outs.is_some()),
            ("-u", self.qp_timeout.is_some()),
            ("-N", self.no_peak),
            ("-f", self.margin.is_some()),
            ("--tclass", self.tclass.is_some()),
            ("--report_gbits", self.report_gbits),
            ("-c", self.connection.is_some()),
            ("-T", self.tos.is_some()),
            ("-S", self.service_level.is_some()),
        ];
        self.refused.check()?;
        if self.rdma_cm || self.comm_rdma_cm {
            let why = "-R and -z are for --compat perftest: without it --cm has the connection manager connect";
            return Err(Failure::Usage(why.into()));
        }
        match given.iter().find(|(_, given)| *given) {
            Some((option, _)) => Err(Failure::Usage(format!(
                "{option} is for --compat perftest: without it both sides are rocinante's, and --bind says which address to use"
            ))),
            None => Ok(()),
        }
    }

    /// The connections that the connection manager makes. `cm` is `--cm`.
    pub(super) fn managed(&self, cm: bool) -> Managed {
        match (self.rdma_cm || cm, self.comm_rdma_cm) {
            (true, _) => Managed::All,
            (false, true) => Managed::Words,
            (false, false) => Managed::Nothing,
        }
    }

    /// The transport service of a test.
    ///
    /// # Errors
    /// There is no such service, or it has no such operations.
    pub(super) fn service(&self, test: Test) -> Result<QpType, Failure> {
        let kind = self.connection.as_deref().unwrap_or("RC");
        let found = match kind {
            "RC" => Some(QpType::Rc),
            "UC" if test.is_send() || test.is_write() => Some(QpType::Uc),
            "UD" if test.is_send() => Some(QpType::Ud),
            _ => None,
        };
        found.ok_or_else(|| {
            Failure::Usage(format!(
                "-c {kind}: RC is for every test, UC for send and write, UD for send: give both sides the same"
            ))
        })
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
            ("x -w 10", "--json"),
            ("x --run_infinitely", "-D"),
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
            checked("x -F -d eth0 -i 1 -x 0 -c RC -S 0 --report_gbits -u 14 -N -e -R -z -T 4"),
            Ok(())
        );
    }

    #[test]
    fn each_needs_compat() {
        for line in
            ["x -F", "x -x 1", "x -e", "x -c RC", "x -f 1", "x --ipv6", "x -o 4", "x -R", "x -z"]
        {
            let options = OptionLine::try_parse_from(line.split_whitespace()).unwrap().options;
            let why = options.check_absent().unwrap_err().to_string();
            assert!(why.contains("--compat perftest"), "{why}");
        }
    }
}
