//! Unmodified programs of others on `rocinante run`: their command lines, and their reports.

use std::env;
use std::path::Path;
use std::process::Command;

use rocinante_cli::measure::Side;
use rocinante_cli::output::{Failure, Result};
use serde::{Deserialize, Serialize};

use super::measure::{Figure, Measure, Step};

/// The command beside this program.
const RUN: &str = "rocinante";
/// Seconds that a program may take. It ends by a number of messages, and beside many others each
/// waits for a processor.
pub(super) const SECONDS_MAX: f64 = 15.0;
/// Bytes in each second of a step.
const BYTES_PER_S: f64 = 4e9;
/// The fewest messages, which are more than are outstanding, and the most.
const MESSAGES: (f64, f64) = (200.0, 20_000.0);
/// The same to and fro, one after the other.
const ROUND_TRIPS: (f64, f64) = (100.0, 3000.0);
/// Messages of fewer bytes are small.
const SMALL: u64 = 4096;
/// UCX's messages before those that count.
const WARM_UP: &str = "20";
/// The most characters of a report that an error repeats.
const SHOWN: usize = 300;

/// A family of programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Suite {
    Perftest,
    /// UCX over RC, and neither shared memory nor TCP.
    Ucx,
}

/// A measurement by a program of others on a backend.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Foreign {
    pub(crate) suite: Suite,
    pub(crate) netdev: String,
    pub(crate) mtu: u32,
    pub(crate) step: Step,
}

impl Suite {
    /// The measures of messages of a size, those with an installed program. Error: there is none.
    pub(crate) fn measures(self, size: u64, quick: bool) -> Result<Vec<Measure>> {
        let all = self.of_size(size, quick);
        let there: Vec<Measure> =
            all.iter().filter(|(_, name)| is_there(name)).map(|(measure, _)| *measure).collect();
        if there.is_empty() {
            let names: Vec<&str> = all.iter().map(|(_, name)| *name).collect();
            return Err(not_there(&names.join(", "), self.package()));
        }
        Ok(there)
    }

    /// All measures of messages of a size. With `quick` small ones have latency alone, and others
    /// throughput.
    pub(crate) fn of_size(self, size: u64, quick: bool) -> Vec<(Measure, &'static str)> {
        let is_of = |(measure, _): &(Measure, &str)| {
            !quick || (*measure == Measure::WriteLat) == (size < SMALL)
        };
        self.programs().iter().copied().filter(is_of).collect()
    }

    /// Its measures, and the program of each.
    const fn programs(self) -> &'static [(Measure, &'static str)] {
        match self {
            Self::Perftest => &[
                (Measure::WriteBw, "ib_write_bw"),
                (Measure::SendBw, "ib_send_bw"),
                (Measure::ReadBw, "ib_read_bw"),
                (Measure::WriteLat, "ib_write_lat"),
            ],
            // Tagged messages for SENDs, and to and fro.
            Self::Ucx => &[(Measure::SendBw, "ucx_perftest"), (Measure::WriteLat, "ucx_perftest")],
        }
    }

    const fn package(self) -> &'static str {
        match self {
            Self::Perftest => "perftest",
            Self::Ucx => "ucx-utils",
        }
    }
}

impl Foreign {
    fn name(&self) -> &'static str {
        let is_of = |(measure, _): &&(Measure, _)| *measure == self.step.measure;
        self.suite.programs().iter().find(is_of).map_or("no program", |(_, name)| name)
    }

    fn is_latency(&self) -> bool {
        self.step.measure == Measure::WriteLat
    }

    fn is_small(&self) -> bool {
        (self.step.size as u64) < SMALL
    }

    /// Messages of a run.
    fn messages(&self) -> u64 {
        let Step { size, seconds, .. } = self.step;
        let (least, most) = if self.is_latency() { ROUND_TRIPS } else { MESSAGES };
        (BYTES_PER_S * seconds / size as f64).clamp(least, most) as u64
    }

    /// The command line of a side. Error: the command `rocinante` is not there.
    pub(super) fn command(&self, side: Side, remote: &str) -> Result<Command> {
        let run = env::current_exe().map(|program| program.with_file_name(RUN));
        let run = run.map_err(|error| Failure::Failed(error.to_string()))?;
        if !run.exists() {
            let build =
                "cargo build --release -p rocinante-cli -p rocinante-capi -p rocinante-paths";
            let why = format!("{} is not there: {build}", run.display());
            return Err(Failure::Failed(why));
        }
        Ok(self.by(&run, side, remote))
    }

    fn by(&self, run: &Path, side: Side, remote: &str) -> Command {
        let mut command = Command::new(run);
        command.args(["run", "--netdev", &self.netdev, "--", self.name()]);
        let leads = side == Side::First;
        let (size, count) = (self.step.size.to_string(), self.messages().to_string());
        match self.suite {
            Suite::Perftest => {
                // Processors of virtual machines have changing frequencies.
                command.args(["-F", "-m", &self.mtu.to_string(), "-s", &size, "-n", &count]);
                command.args((!self.is_latency()).then_some("--report_gbits"));
                command.args(leads.then_some(remote));
            }
            Suite::Ucx => {
                command.env("UCX_NET_DEVICES", "roce0:1").env("UCX_TLS", "rc_v,self");
                // Its log would be lines of the report.
                command.env("UCX_LOG_FILE", "stderr");
                let test = if self.is_latency() { "tag_lat" } else { "tag_bw" };
                if leads {
                    command.args([remote, "-f", "-v", "-t", test, "-s", &size, "-n", &count]);
                    command.args(["-w", WARM_UP]);
                }
            }
        }
        command
    }

    /// The figures of the report of the leading side. Error: it is not whole, or it is of another
    /// run, or its figures cannot be.
    pub(super) fn figures(&self, report: &str) -> Result<Vec<Figure>> {
        let told = match self.suite {
            Suite::Perftest => self.of_perftest(report),
            Suite::Ucx => self.of_ucx(report),
        };
        let figures = told.map_err(|why| self.failed(&why, report))?;
        let values: Vec<f64> = figures.iter().map(|figure| figure.value).collect();
        let can_be = values.iter().all(|value| value.is_finite() && *value > 0.0);
        if !can_be || self.is_latency() && !values.is_sorted() {
            return Err(self.failed("figures that cannot be", report));
        }
        Ok(figures)
    }

    /// An error of this program, with the end of its output.
    pub(super) fn failed(&self, why: &str, output: &str) -> Failure {
        let output = output.split_whitespace().collect::<Vec<_>>().join(" ");
        let from = output.char_indices().rev().nth(SHOWN - 1).map_or(0, |(at, _)| at);
        let colon = if output.is_empty() { "" } else { ": " };
        Failure::Failed(format!("{}: {why}{colon}{}", self.name(), &output[from..]))
    }

    /// A table of one row, below the names of its columns with their units.
    fn of_perftest(&self, report: &str) -> Result<Vec<Figure>, String> {
        const LATENCY: [(Measure, usize); 3] =
            [(Measure::WriteLat, 4), (Measure::WriteLatP99, 7), (Measure::WriteLatP999, 8)];
        let names: &[(Measure, usize)] = match self.step.measure {
            // Of fewer the last is the longest of all.
            Measure::WriteLat if self.messages() < 1000 => &LATENCY[..2],
            Measure::WriteLat => &LATENCY,
            // Few bits have two decimals; the messages of a second have six.
            measure if self.is_small() => &[(measure, 4)],
            measure => &[(measure, 3)],
        };
        let unit =
            if self.is_latency() || !self.is_small() { 1.0 } else { self.step.size as f64 * 8e-3 };
        let columns: &[&str] = if self.is_latency() {
            &["t_min[usec]", "t_typical[usec]", "99% percentile[usec]", "99.9% percentile[usec]"]
        } else {
            &["BW peak[Gb/sec]", "BW average[Gb/sec]", "MsgRate[Mpps]"]
        };
        let count = if self.is_latency() { 9 } else { 5 };
        let mut lines = whole_lines(report).skip_while(|line| !line.trim().starts_with("#bytes"));
        let head = lines.next().ok_or("no figures")?;
        if let Some(column) = columns.iter().find(|column| !head.contains(**column)) {
            return Err(format!("no column {column}"));
        }
        let row = numbers(lines.next().ok_or("no figures")?.split_whitespace())?;
        self.is_of_this_run(&row, Some(0), 1)?;
        if row.len() != count {
            return Err(format!("{} columns, and not {count}", row.len()));
        }
        Ok(names.iter().map(|(measure, at)| self.step.figure(*measure, row[*at] * unit)).collect())
    }

    /// Two lines: the names of the columns, and a row, with commas.
    fn of_ucx(&self, report: &str) -> Result<Vec<Figure>, String> {
        let mut lines = whole_lines(report).skip_while(|line| !line.starts_with("iterations,"));
        let head: Vec<&str> = lines.next().ok_or("no figures")?.trim().split(',').collect();
        let row = numbers(lines.next().ok_or("no figures")?.trim().split(','))?;
        self.is_of_this_run(&row, None, 0)?;
        if row.len() != head.len() {
            return Err(format!("{} columns, and not {}", row.len(), head.len()));
        }
        // Of 2^20 bytes per second.
        let gbps = f64::from(1 << 20) * 8.0 / 1e9;
        let (column, unit) =
            if self.is_latency() { ("50.0_percentile_lat", 1.0) } else { ("overall_bw", gbps) };
        let at = head.iter().position(|name| *name == column);
        let at = at.ok_or_else(|| format!("no column {column}"))?;
        Ok(vec![self.step.figure(self.step.measure, row[at] * unit)])
    }

    /// Whether a row has the size and the number of messages that were asked for.
    fn is_of_this_run(&self, row: &[f64], size: Option<usize>, count: usize) -> Result<(), String> {
        let is = |at: usize, asked: f64| row.get(at) == Some(&asked);
        if size.is_some_and(|at| !is(at, self.step.size as f64)) {
            return Err(format!("figures of messages that have not {} bytes", self.step.size));
        }
        let messages = self.messages();
        if is(count, messages as f64) {
            Ok(())
        } else {
            Err(format!("figures that are not of {messages} messages"))
        }
    }
}

/// Whether a program is installed.
pub(super) fn is_there(name: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|at| at.join(name).is_file())
}

/// The error of programs that are not.
pub(super) fn not_there(names: &str, package: &str) -> Failure {
    Failure::Failed(format!("not found in PATH: {names}: install {package}"))
}

/// The lines that have their end.
fn whole_lines(report: &str) -> impl Iterator<Item = &str> {
    report.split_inclusive('\n').filter(|line| line.ends_with('\n'))
}

fn numbers<'a>(words: impl Iterator<Item = &'a str>) -> Result<Vec<f64>, String> {
    let number = |word: &str| word.trim().parse().map_err(|_| format!("no number: {word:?}"));
    words.map(number).collect()
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::time::{Duration, Instant};
    use std::{fs, thread};

    use super::super::job::Work;
    use super::super::place::{Link, PlaceArgs, Places};
    use super::*;

    fn of(suite: Suite, measure: Measure, size: usize) -> Foreign {
        let step = Step { measure, size, seconds: 0.04 };
        Foreign { suite, netdev: "udp".into(), mtu: 4096, step }
    }

    fn words(command: &Command) -> String {
        let words = command.get_args().map(|word| word.to_string_lossy());
        words.collect::<Vec<_>>().join(" ")
    }

    /// What perftest 4.5 (6.06) and UCX 1.13.1 printed.
    const READ_BW: &str = "Device not recognized to implement inline feature. Disabling it
---------------------------------------------------------------------------------------
                    RDMA_Read BW Test
 Dual-port       : OFF\t\tDevice         : roce0
 Number of qps   : 1\t\tTransport type : IB
 Mtu             : 4096[B]
 Outstand reads  : 128
 rdma_cm QPs\t : OFF
---------------------------------------------------------------------------------------
 local address: LID 0000 QPN 0x7a82 PSN 0x4724c8 OUT 0x80 RKey 0x8a91a7e5 VAddr 0x007efd47079000
 GID: 00:00:00:00:00:00:00:00:00:00:255:255:10:78:00:01
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 1048576    200              4.62               4.61   \t\t   0.000551
---------------------------------------------------------------------------------------
";
    const WRITE_LAT: &str = "---------------------------------------------------------------------
                    RDMA_Write Latency Test
 GID: 00:00:00:00:00:00:00:00:00:00:255:255:10:78:00:02
---------------------------------------------------------------------------------------
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    \
t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] 
 64      3000          8.77           26675.94      24.68    \t       289.36      \t1214.79\t\t5664.84 \t\t26675.94
---------------------------------------------------------------------------------------
";
    const TAG_BW: &str = "\
iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr
 200,0.160,481.900,481.900,2075.12,2075.12,2075,2075
";
    const TAG_LAT: &str = "\
iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr
3000,47.311,117.562,117.562,0.52,0.52,8506,8506
";

    fn recorded() -> [(Foreign, &'static str); 4] {
        use Measure::{ReadBw, SendBw, WriteLat};
        [
            (of(Suite::Perftest, ReadBw, 1 << 20), READ_BW),
            (of(Suite::Perftest, WriteLat, 64), WRITE_LAT),
            (of(Suite::Ucx, SendBw, 1 << 20), TAG_BW),
            (of(Suite::Ucx, WriteLat, 64), TAG_LAT),
        ]
    }

    #[test]
    fn what_the_programs_print_is_read() {
        let values = |(of, report): &(Foreign, &str)| -> Vec<_> {
            let figures = of.figures(report).unwrap();
            figures.iter().map(|figure| (figure.measure, figure.value)).collect()
        };
        let [read, write, tags, tag] = recorded();
        assert_eq!(values(&read), [(Measure::ReadBw, 4.61)]);
        let expected = [
            (Measure::WriteLat, 24.68),
            (Measure::WriteLatP99, 5664.84),
            (Measure::WriteLatP999, 26675.94),
        ];
        assert_eq!(values(&write), expected);
        let few = WRITE_LAT.replace("64      3000", "1048576 152");
        let few = (of(Suite::Perftest, Measure::WriteLat, 1 << 20), &*few);
        assert_eq!(values(&few), expected[..2]);
        let row = "64 20000 0.05 0.05 0.101234";
        let small = READ_BW
            .replace("1048576    200              4.62               4.61   \t\t   0.000551", row);
        let small = (of(Suite::Perftest, Measure::ReadBw, 64), &*small);
        assert_eq!(values(&small), [(Measure::ReadBw, 0.101_234 * (64.0 * 8e-3))]);
        // 2^20 bytes at 2075.12 a second.
        assert_eq!(values(&tags), [(Measure::SendBw, 2075.12 * 8.388_608e-3)]);
        assert_eq!(values(&tag), [(Measure::WriteLat, 47.311)]);
    }

    /// Cut anywhere before the end of the row there are no figures, and no panic.
    #[test]
    fn a_report_that_is_cut_has_no_figures() {
        for (of, report) in recorded() {
            let dashes = report.rfind("\n---").map_or(report.len(), |at| at + 1);
            for cut in 0..dashes {
                let why = of.figures(&report[..cut]).unwrap_err().to_string();
                assert!(why.starts_with(of.name()), "{why}");
            }
            assert!(of.figures(&report[..dashes]).is_ok());
        }
    }

    #[test]
    fn a_program_that_lies_is_found() {
        let [read, write, tags, tag] = recorded();
        for ((of, report), true_word, word, why) in [
            (&read, " 4.61 ", " -4.61 ", "cannot be"),
            (&read, " 4.61 ", " NaN ", "cannot be"),
            (&read, " 4.61 ", " inf ", "cannot be"),
            (&read, " 4.61 ", " 0 ", "cannot be"),
            (&read, " 4.61 ", " four ", "no number: \"four\""),
            (&read, " 4.61 ", " ", "4 columns, and not 5"),
            (&read, " 4.61 ", " 4.61 7 ", "6 columns, and not 5"),
            (&read, "\n 1048576", "\n 65536", "not 1048576 bytes"),
            (&read, " 200 ", " 5000 ", "not of 200 messages"),
            (&read, "average[Gb/sec]", "average[MB/sec]", "no column BW average[Gb/sec]"),
            (&read, "#bytes", "bytes", "no figures"),
            (&write, "24.68", "6000.0", "cannot be"),
            (&write, "24.68", "-1", "cannot be"),
            (&write, "5664.84", "nan", "cannot be"),
            (&tags, ",2075.12,2075,", ",-1,2075,", "cannot be"),
            (&tags, ",2075.12,2075,", ",NaN,2075,", "cannot be"),
            (&tags, "overall_bw", "bw", "no column overall_bw"),
            (&tags, " 200,", " 201,", "not of 200 messages"),
            (&tag, ",8506\n", "\n", "7 columns, and not 8"),
            (&tag, "47.311", "0", "cannot be"),
        ] {
            let lie = report.replacen(true_word, word, 1);
            assert_ne!(lie, *report, "{true_word:?}");
            let said = of.figures(&lie).unwrap_err().to_string();
            assert!(said.contains(why), "{word:?}: {said}");
        }
    }

    /// A program that hangs is killed, and so is all that it has started.
    #[test]
    fn a_program_that_hangs_ends_with_its_children() {
        let name = format!("rocinante-bench-hangs-{}", std::process::id());
        let dir = env::temp_dir().join(name);
        fs::create_dir(&dir).unwrap();
        let (script, draft) = (dir.join("program"), dir.join("draft"));
        let hang = format!("sleep 600 & echo $! > {}/pid$$; wait", dir.display());
        fs::write(&draft, format!("#!/bin/sh\nexec setsid sh -c '{hang}'\n")).unwrap();
        // By another process: a child that another test starts meanwhile would hold this one's
        // descriptor, and a file that can be written to does not start (ETXTBSY).
        let mut install = Command::new("install");
        assert!(install.args(["-m", "755"]).args([&draft, &script]).status().unwrap().success());
        let [local, remote] = [1, 2].map(|end| Some(Ipv4Addr::new(127, 0, 0, end).into()));
        let args = PlaceArgs { local, remote, devices: Vec::new(), patient: true, agent: false };
        let places = Places::of(&args, Link::Plain, 2).unwrap();
        // Both sides are to write their files within this time, and that of the work.
        let places = places.with_program(script.to_str().unwrap(), Duration::from_secs(4));
        let work = Work::Foreign(of(Suite::Perftest, Measure::ReadBw, 64));
        let why = places.figures(Link::Plain, &work).unwrap_err().to_string();
        assert!(why.contains("did not end within"), "{why}");
        let files = fs::read_dir(&dir).unwrap().map(|file| file.unwrap().path());
        let mut pids: Vec<String> = files
            .filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("pid"))
            .map(|path| fs::read_to_string(path).unwrap().trim().to_owned())
            .collect();
        assert_eq!(pids.len(), 2);
        let deadline = Instant::now() + Duration::from_secs(60);
        while !pids.is_empty() && Instant::now() < deadline {
            pids.retain(|pid| Path::new("/proc").join(pid).exists());
            thread::sleep(Duration::from_millis(5));
        }
        assert!(pids.is_empty(), "{pids:?} live");
        fs::remove_dir_all(dir).unwrap();
    }

    /// An error repeats the end of what was printed, cut between characters.
    #[test]
    fn an_error_is_short() {
        let of = of(Suite::Ucx, Measure::SendBw, 64);
        let said = of.failed("exit status: 1", &"µs\n".repeat(500)).to_string();
        assert!(said.starts_with("ucx_perftest: exit status: 1: "), "{said}");
        assert!(said.ends_with("µs µs") && said.chars().count() < SHOWN + 60, "{said}");
        assert_eq!(of.failed("it", " \n").to_string(), "ucx_perftest: it");
    }

    #[test]
    fn both_sides_have_the_same_options() {
        let line = |of: &Foreign, side| words(&of.by(Path::new("rocinante"), side, "10.0.0.2"));
        let [bw, lat] = [Measure::SendBw, Measure::WriteLat].map(|measure| {
            let of = of(Suite::Perftest, measure, 1 << 20);
            let (client, server) = (line(&of, Side::First), line(&of, Side::Second));
            assert_eq!(client, format!("{server} 10.0.0.2"));
            server
        });
        let run = "run --netdev udp --";
        assert_eq!(bw, format!("{run} ib_send_bw -F -m 4096 -s 1048576 -n 200 --report_gbits"));
        assert_eq!(lat, format!("{run} ib_write_lat -F -m 4096 -s 1048576 -n 152"));
        let of = of(Suite::Ucx, Measure::WriteLat, 64);
        assert_eq!(line(&of, Side::Second), format!("{run} ucx_perftest"));
        let options = "10.0.0.2 -f -v -t tag_lat -s 64 -n 3000 -w 20";
        assert_eq!(line(&of, Side::First), format!("{run} ucx_perftest {options}"));
    }
}
