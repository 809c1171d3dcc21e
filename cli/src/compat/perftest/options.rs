//! Options that perftest's users know.

use super::PerftestProgram;
use super::plan::Managed;
use crate::compat::device::{AddressChoice, DeviceArgs};
use crate::compat::refused::{Option_, Refused, Table, harmless, refused};
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

fn is_zero(value: &str) -> bool {
    value.parse() == Ok(0u32)
}

const JSON: &str = "--json has all figures";
const SRQ: &str = "shared receive queues are not used on this side; the other may use them";
const MEMORY: &str = "memory is ordinary memory here";
const SAMPLES: &str =
    "times are kept as a histogram, of which --json has percentiles: leave it out";
const GROUPS: &str = "multicast groups are not measured: -c UD measures datagrams";
const RATE: &str = "the host's traffic control shapes what is sent (`tc qdisc`)";
const PLAIN: &str = "payload is not encrypted";
const DC: &str = "-c may be RC, UC or UD: there are no DC queue pairs";

impl Table for Perftest {
    const OPTIONS: &'static [Option_] = &[
        refused(Some('g'), "mcg", false, GROUPS),
        refused(Some('M'), "MGID", true, GROUPS),
        refused(Some('O'), "dualport", false, "a device has one port"),
        refused(Some('L'), "hop_limit", true, "packets leave with a hop limit of 64"),
        refused(None, "latency_gap", true, "round trips follow each other at once"),
        refused(Some('C'), "report-cycles", false, "times are in microseconds: leave it out"),
        refused(Some('H'), "report-histogram", false, SAMPLES),
        // So perftest spells it.
        refused(None, "report-histogrm", false, SAMPLES),
        refused(Some('U'), "report-unsorted", false, SAMPLES),
        refused(Some('W'), "report-counters", true, "--counters prints all of this process's"),
        refused(Some('V'), "version", false, "`rocinante --version` tells it"),
        refused(None, "output", true, JSON),
        refused(None, "source_ip", true, "--bind says which address to use"),
        refused(None, "bind_source_ip", true, "--bind says which address to use"),
        refused(None, "retry_count", true, "requests are sent again 7 times, which is the most"),
        harmless("wait_destroy", true),
        refused(None, "reversed", false, "start the client where the server would be"),
        harmless("use_old_post_send", false),
        harmless("disable_pcie_relaxed", false),
        refused(None, "pkey_index", true, "RoCE devices have the default P_Key alone, 0")
            .unless(is_zero),
        refused(None, "force-link", true, "RoCE is on Ethernet: leave it out")
            .unless(|link| link.eq_ignore_ascii_case("ethernet")),
        refused(Some('X'), "vector", true, "all completions come by one vector, 0").unless(is_zero),
        refused(None, "inline_recv", true, "receives have no inline data: leave it out")
            .unless(is_zero),
        refused(None, "dlid", true, "Ethernet has no LIDs: the server is found by its IP address"),
        refused(None, "out_json", false, JSON),
        refused(None, "out_json_file", true, "--json prints all figures: `--json > FILE`"),
        refused(None, "cpu_util", false, "`time` and `perf stat` tell it"),
        refused(
            None,
            "report-both",
            false,
            "only the sum of both directions is told: leave it out",
        ),
        refused(None, "report-per-port", false, "a device has one port"),
        refused(None, "rate_limit", true, RATE),
        refused(None, "rate_limit_type", true, RATE),
        refused(None, "rate_units", true, RATE),
        refused(None, "typical_pkt_size", true, RATE),
        refused(None, "burst_size", true, RATE),
        refused(None, "use-srq", false, SRQ),
        refused(
            None,
            "recv_post_list",
            true,
            "receives are posted one by one; the other side may do otherwise",
        ),
        refused(None, "perform_warm_up", false, "nothing is warmed up before measuring"),
        refused(None, "dont_xchg_versions", false, "the other side must tell its version"),
        refused(None, "flows", true, "each queue pair is a flow: give -q"),
        refused(None, "mr_per_qp", false, "all queue pairs share a region"),
        refused(None, "use_hugepages", false, MEMORY),
        refused(None, "odp", false, MEMORY),
        refused(None, "mmap", true, MEMORY),
        refused(None, "mmap-offset", true, MEMORY),
        refused(None, "use_cuda", true, MEMORY),
        refused(None, "use_cuda_bus_id", true, MEMORY),
        refused(None, "use_rocm", true, MEMORY),
        refused(None, "aes_xts", false, PLAIN),
        refused(None, "encrypt_on_tx", false, PLAIN),
        refused(None, "sig_before", false, PLAIN),
        refused(None, "aes_block_size", true, PLAIN),
        refused(None, "data_enc_keys_number", true, PLAIN),
        refused(None, "data_enc_key_app_path", true, PLAIN),
        refused(None, "kek_path", true, PLAIN),
        refused(None, "credentials_path", true, PLAIN),
        refused(None, "log_dci_streams", true, DC),
        refused(None, "log_active_dci_streams", true, DC),
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
    use clap::{Args as _, Parser};

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
            ("x --output bandwidth", "--json"),
            ("x --source_ip 10.0.0.1", "--bind"),
            ("x -W port_rcv_data", "--counters"),
            ("x -V", "rocinante --version"),
            ("x --pkey_index 1", "P_Key"),
            ("x --force-link=IB", "on Ethernet"),
            ("x --report-per-port", "one port"),
            ("x --vector=2", "-X (--vector) is not taken"),
            ("x -X 1", "one vector"),
            ("x --inline_recv=2", "no inline data"),
            ("x --rate_units=g", "tc qdisc"),
            ("x --typical_pkt_size=9", "tc qdisc"),
            ("x --mmap-offset 9", "ordinary memory"),
            ("x --out_json_file f", "--json > FILE"),
            ("x --aes_block_size=512", "not encrypted"),
            ("x --log_dci_streams=2", "no DC queue pairs"),
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
        for harmless in [
            "--pkey_index=0",
            "--use_old_post_send",
            "--wait_destroy=9",
            "--disable_pcie_relaxed",
            "--force-link=Ethernet",
            "-X 0 --inline_recv 0",
        ] {
            assert_eq!(checked(&format!("x {harmless}")), Ok(()), "{harmless}");
        }
    }

    /// All options of perftest 6.06 that ib_{send,write,read,atomic}_{bw,lat} --help have.
    #[test]
    fn every_option_of_perftest_is_known() {
        let all = "all CPU-freq MGID aes_block_size aes_xts atomic_type bidirectional burst_size \
                   com_rdma_cm comm_rdma_cm connection cpu_util cq-mod credentials_path \
                   data_enc_key_app_path data_enc_keys_number disable_pcie_relaxed dlid \
                   dont_xchg_versions dualport duration encrypt_on_tx events flows force-link \
                   gid-index help hop_limit ib-dev ib-port inline_recv inline_size ipv6 iters \
                   kek_path latency_gap limit_bw limit_msgrate log_active_dci_streams \
                   log_dci_streams margin mcg mmap mmap-offset mr_per_qp mtu noPeak odp out_json \
                   out_json_file output outs perform_warm_up pkey_index port post_list qp \
                   qp-timeout rate_limit rate_limit_type rate_units rdma_cm recv_post_list \
                   report-both report-counters report-cycles report-histogram report-per-port \
                   report-unsorted report_gbits retry_count reversed run_infinitely rx-depth \
                   sig_before size sl source_ip tclass tos tx-depth typical_pkt_size use-srq \
                   use_hugepages use_old_post_send vector version wait_destroy";
        let mut perf = crate::perf::Args::augment_args(clap::Command::new("perf"));

        perf.build();
        let known = |name: &str| {
            let of = |arg: &clap::Arg| {
                arg.get_long() == Some(name)
                    || arg.get_all_aliases().is_some_and(|all| all.contains(&name))
            };
            perf.get_arguments().any(of)
        };
        for name in all.split_whitespace() {
            assert!(known(name), "--{name}");
        }
    }
}
