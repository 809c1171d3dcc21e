//! The same program over this project and over the kernel's TCP, in turns on veths of one kind:
//! `cargo xtask dropin --transports`. TCP has CUBIC, which most hosts run.

use std::fmt::Write as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::Duration;

use rocinante_lab::{Container, LabConfig, Pair};

use crate::install::Installation;
use crate::row::{ended, opens, succeeded};
use crate::table::{MPI_AWAY, REMOTE};
use crate::{NOBODY, in_words};

/// How often each is measured.
const RUNS: usize = 3;
const LIMIT: Duration = Duration::from_secs(90);
/// The backends, and TCP of the kernel.
const CARRIERS: [&str; 3] = ["udp", "packet", "tcp"];

/// A program, and the figure of one of its runs.
#[derive(Debug)]
struct Race {
    name: &'static str,
    unit: &'static str,
    /// The scripts of the server and of the client over this project, and over TCP.
    ours: [&'static str; 2],
    tcp: [&'static str; 2],
    /// Finds the figure in the client's output.
    figure: fn(&str) -> Option<f64>,
}

/// UCX on our device, or on TCP.
macro_rules! ucx {
    (ours $rest:literal) => {
        concat!("export UCX_NET_DEVICES=roce0:1 UCX_TLS=rc_v,self; exec ucx_perftest ", $rest)
    };
    (tcp $rest:literal) => {
        concat!("export UCX_NET_DEVICES=eth0 UCX_TLS=tcp,self; exec ucx_perftest ", $rest)
    };
}

/// NetPIPE between two containers: over UCX on our device, or over OpenMPI's own TCP.
macro_rules! netpipe {
    ($options:literal, $measure:literal) => {
        concat!(
            "export TMPDIR=$(mktemp -dp $XDG_RUNTIME_DIR); export HOME=$TMPDIR; cd $HOME; \
             echo 'shift; exec /usr/bin/python3 -c \"$MPI_ASK\" \"$*\"' > ask; \
             export OMPI_MCA_plm_rsh_agent=\"sh $PWD/ask\" UCX_TLS=rc_v,self \
             UCX_NET_DEVICES=roce0:1; exec mpirun --allow-run-as-root --leave-session-attached \
             -H $HERE:1,$THERE:1 --map-by node --bind-to none --mca oob_tcp_if_include eth0 ",
            $options,
            " -n 2 NPopenmpi -p 0 -o np ",
            $measure,
            " 2>&1"
        )
    };
    (ours $measure:literal) => {
        [MPI_AWAY, netpipe!("--mca pml ucx --mca btl self -x UCX_TLS -x UCX_NET_DEVICES", $measure)]
    };
    (tcp $measure:literal) => {
        [
            MPI_AWAY,
            netpipe!("--mca pml ob1 --mca btl tcp,self --mca btl_tcp_if_include eth0", $measure),
        ]
    };
}

const RACES: [Race; 10] = [
    Race {
        name: "ucx_perftest tag_lat, 8 B",
        unit: "µs",
        ours: [ucx!(ours ""), ucx!(ours "$THERE -t tag_lat -s 8 -n 20000 -w 500")],
        tcp: [ucx!(tcp ""), ucx!(tcp "$THERE -t tag_lat -s 8 -n 20000 -w 500")],
        figure: |said| column(said, "Final:", 3),
    },
    Race {
        name: "ucx_perftest tag_bw, 1 MiB",
        unit: "MB/s",
        ours: [ucx!(ours ""), ucx!(ours "$THERE -t tag_bw -s 1048576 -n 2000 -w 50")],
        tcp: [ucx!(tcp ""), ucx!(tcp "$THERE -t tag_bw -s 1048576 -n 2000 -w 50")],
        figure: |said| column(said, "Final:", 6),
    },
    Race {
        name: "fi_pingpong -e msg, 64 B",
        unit: "µs",
        ours: [
            "exec fi_pingpong -p verbs -e msg -S 64 -I 20000",
            "exec fi_pingpong -p verbs -e msg -S 64 -I 20000 $THERE",
        ],
        tcp: [
            "exec fi_pingpong -p tcp -e msg -S 64 -I 20000",
            "exec fi_pingpong -p tcp -e msg -S 64 -I 20000 $THERE",
        ],
        figure: |said| column(said, "64 ", 6),
    },
    Race {
        name: "fi_pingpong -e msg, 1 MiB",
        unit: "MB/s",
        ours: [
            "exec fi_pingpong -p verbs -e msg -S 1048576 -I 1000",
            "exec fi_pingpong -p verbs -e msg -S 1048576 -I 1000 $THERE",
        ],
        tcp: [
            "exec fi_pingpong -p tcp -e msg -S 1048576 -I 1000",
            "exec fi_pingpong -p tcp -e msg -S 1048576 -I 1000 $THERE",
        ],
        figure: |said| column(said, "1m ", 5),
    },
    Race {
        name: "qperf lat, 1 B",
        unit: "µs",
        ours: ["exec qperf", "exec qperf -cm1 -t 2 $THERE rc_lat"],
        tcp: ["exec qperf", "exec qperf -t 2 $THERE tcp_lat"],
        figure: |said| qperf(said, &[("us", 1.0), ("ms", 1e3)]),
    },
    Race {
        name: "qperf bw, 64 KiB",
        unit: "MB/s",
        ours: ["exec qperf", "exec qperf -cm1 -t 2 -m 64K $THERE rc_bw"],
        tcp: ["exec qperf", "exec qperf -t 2 -m 64K $THERE tcp_bw"],
        figure: |said| qperf(said, &[("MB/sec", 1.0), ("GB/sec", 1e3)]),
    },
    Race {
        name: "NPopenmpi, 8 B",
        unit: "µs",
        ours: netpipe!(ours "-l 8 -u 8"),
        tcp: netpipe!(tcp "-l 8 -u 8"),
        figure: |said| netpipe(said, "8", " in "),
    },
    Race {
        name: "NPopenmpi, 1 MiB",
        unit: "Mb/s",
        ours: netpipe!(ours "-l 1048576 -u 1048576"),
        tcp: netpipe!(tcp "-l 1048576 -u 1048576"),
        figure: |said| netpipe(said, "1048576", "--> "),
    },
    Race {
        name: "NPopenmpi -s, 1 MiB",
        unit: "Mb/s",
        ours: netpipe!(ours "-s -l 1048576 -u 1048576"),
        tcp: netpipe!(tcp "-s -l 1048576 -u 1048576"),
        figure: |said| netpipe(said, "1048576", "--> "),
    },
    // No program has both: the rate of each carrier on this machine at that moment.
    Race {
        name: "rocinante perf write-bw, iperf3, 1 MiB",
        unit: "Gb/s",
        ours: [
            "exec $OWN perf write-bw -s 1048576 -D 2 --netdev $NETDEV",
            "exec $OWN perf write-bw -s 1048576 -D 2 --netdev $NETDEV $THERE",
        ],
        tcp: ["exec iperf3 -s -1", "exec iperf3 -c $THERE -t 2 -l 1M"],
        figure: |said| iperf(said).or_else(|| column(said, " 1048576", 3)),
    },
];

/// A word of the last line that begins with `with`.
fn column(said: &str, with: &str, at: usize) -> Option<f64> {
    let line = said.lines().rfind(|line| line.starts_with(with))?;
    line.split_whitespace().nth(at)?.parse().ok()
}

/// The value behind the last `=`, in the unit whose factor is 1.
fn qperf(said: &str, units: &[(&str, f64)]) -> Option<f64> {
    let (_, value) = said.lines().rev().find_map(|line| line.split_once('='))?;
    let (number, unit) = value.trim().split_once(' ')?;
    let (_, factor) = units.iter().find(|(name, _)| *name == unit.trim())?;
    Some(number.parse::<f64>().ok()? * factor)
}

/// The rate of iperf3's receiver, in Gb/s.
fn iperf(said: &str) -> Option<f64> {
    let line = said.lines().rfind(|line| line.ends_with("receiver"))?;
    let (before, _) = line.split_once(" Gbits/sec")?;
    before.split_whitespace().last()?.parse().ok()
}

/// The value behind a word in the line of a size.
fn netpipe(said: &str, size: &str, behind: &str) -> Option<f64> {
    let of_size = |line: &&str| line.split_whitespace().skip(1).take(2).eq([size, "bytes"]);
    let (_, value) = said.lines().find(of_size)?.split_once(behind)?;
    value.split_whitespace().next()?.parse().ok()
}

/// The result: the table, and all output of the programs.
#[derive(Debug, Default)]
pub struct Compared {
    /// A table for a document.
    pub table: String,
    /// Each run's output, under its program, carrier and number.
    pub raw: String,
}

/// Runs all whose names have the words that `want` asks for, each in turns. Error: a program fails,
/// or prints no figure.
pub fn run(
    want: impl Fn(&str) -> bool,
    installed: &Installation,
    mut each: impl FnMut(&str),
) -> Result<Compared, String> {
    let mut all = Compared::default();
    all.table += "| program | `udp` | `packet` | TCP (CUBIC) | `packet` by TCP |\n";
    all.table += "|---|---|---|---|---|\n";
    for race in RACES.iter().filter(|race| want(race.name)) {
        let mut figures = [[0.0; RUNS]; CARRIERS.len()];
        for run in 0..RUNS {
            for (carrier, figures) in CARRIERS.iter().zip(&mut figures) {
                let of = |why: String| format!("{} over {carrier}: {why}", race.name);
                let said = race.said(carrier, installed).map_err(of)?;
                let _ = writeln!(all.raw, "== {}, {carrier}, run {}\n{said}", race.name, run + 1);
                figures[run] = (race.figure)(&said).ok_or_else(|| of("no figure".into()))?;
            }
        }
        figures.iter_mut().for_each(|runs| runs.sort_by(f64::total_cmp));
        let [udp, packet, tcp] = figures
            .map(|[least, median, most]| (format!("{median:.1} ({least:.1}–{most:.1})"), median));
        let (name, unit, ratio) = (race.name, race.unit, packet.1 / tcp.1);
        let line =
            format!("| `{name}`, {unit} | {} | {} | {} | {ratio:.2} |\n", udp.0, packet.0, tcp.0);
        each(line.trim_end());
        all.table += &line;
    }
    Ok(all)
}

impl Race {
    /// The client's output. Server and client have namespaces of their own.
    fn said(&self, carrier: &str, installed: &Installation) -> Result<String, String> {
        let pair = Pair::new(&LabConfig::default()).map_err(in_words)?;
        let [a, b] = pair.containers();
        for container in [a, b] {
            cubic(container)?;
        }
        let is_tcp = carrier == "tcp";
        let [server, client] = if is_tcp { self.tcp } else { self.ours };
        let command = |script: &str| {
            let words = ["sh", "-c", script];
            let mut command =
                if is_tcp { installed.plain(words) } else { installed.run(carrier, words) };
            let [here, there] = [a, b].map(|container| container.ipv4().to_string());
            command.env("HERE", here).env("THERE", there);
            command.env("OWN", installed.program()).env("NETDEV", carrier);
            command.env("MPI_SERVE", REMOTE[0]).env("MPI_ASK", REMOTE[1]);
            if carrier == "udp" {
                command.uid(NOBODY).gid(NOBODY);
            }
            command
        };
        let mut server = b.spawn(&mut command(server)).map_err(in_words)?;
        opens(&mut server)?;
        let client = a.spawn(&mut command(client)).map_err(in_words)?;
        let client = ended("the client", client, LIMIT)?;
        server.kill();
        succeeded("the client", &client)?;
        Ok(String::from_utf8_lossy(&client.stdout).into_owned())
    }
}

/// TCP's connections over the route have CUBIC, also if the machine has another default.
fn cubic(container: &Container) -> Result<(), String> {
    let mut ip = Command::new("ip");
    let routes = container.output(ip.args(["-o", "route", "show", "dev", "eth0"]));
    let routes = routes.map_err(in_words)?;
    for route in String::from_utf8_lossy(&routes.stdout).lines() {
        let mut ip = Command::new("ip");
        ip.args(["route", "change"]).args(route.split_whitespace());
        let changed = container.output(ip.args(["dev", "eth0", "congctl", "cubic"]));
        succeeded("ip route", &changed.map_err(in_words)?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found() {
        let ucx = "[thread 0]\nFinal:   20000   7.1   8.25   8.3   0.9   0.93   120000  121000\n";
        assert_eq!((column(ucx, "Final:", 3), column(ucx, "Final:", 6)), (Some(8.25), Some(0.93)));
        let said = "rc_bw:\n    bw  =  1.16 GB/sec\n";
        assert_eq!(qperf(said, &[("MB/sec", 1.0), ("GB/sec", 1e3)]), Some(1160.0));
        assert_eq!(qperf(said, &[("us", 1.0)]), None);
        let said = "  0:       8 bytes   3000 times -->      1.23 Mbps in      49.10 usec\n";
        assert_eq!(netpipe(said, "8", " in "), Some(49.1));
        assert_eq!(netpipe(said, "8", "--> "), Some(1.23));
        assert_eq!(netpipe(said, "18", "--> "), None);
        let said = "[  5]   0.00-2.00   sec  12.3 GBytes  52.9 Gbits/sec                  receiver";
        assert_eq!((iperf(said), iperf("")), (Some(52.9), None));
    }
}
