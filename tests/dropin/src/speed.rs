//! The speed of perftest on `rocinante run`, beside `rocinante perf` with the same options: the
//! cost of the C ABI. `cargo xtask dropin --speed`.

use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::Duration;

use rocinante_lab::{LabConfig, Pair};
use serde_json::{Value, json};

use crate::install::Installation;
use crate::row::{ended, listens, succeeded};
use crate::{NOBODY, in_words};

/// How often each side of a row is measured, in turns.
const RUNS: usize = 3;
const LIMIT: Duration = Duration::from_secs(60);
const BACKENDS: [&str; 3] = ["udp", "packet", "afxdp"];

/// The figure that is compared.
#[derive(Debug, Clone, Copy)]
enum Measure {
    /// Half a round trip, in microseconds: the median of the messages.
    Latency,
    /// Gb/s.
    Bandwidth,
    /// Millions of messages per second.
    Rate,
}

/// A row of the comparison.
#[derive(Debug)]
struct Row {
    program: &'static str,
    test: &'static str,
    options: &'static str,
    measure: Measure,
    /// The ratio, at most for a latency and at least for the others.
    bar: f64,
}

/// `write-lat` polls memory and drives the device, as `ib_write_lat` does until its WRITE is done.
const ROWS: [Row; 6] = [
    Row::new("ib_send_lat", "send-lat", "-s 64 -n 20000", Measure::Latency, 1.10),
    Row::new("ib_write_lat", "write-lat", "-s 64 -n 20000", Measure::Latency, 1.15),
    Row::new("ib_write_bw", "write-bw", "-s 1048576 -m 4096 -D 2", Measure::Bandwidth, 0.90),
    Row::new("ib_read_bw", "read-bw", "-s 1048576 -m 4096 -D 2", Measure::Bandwidth, 0.90),
    Row::new("ib_write_bw", "write-bw", "-s 64 -l 32 -n 512000", Measure::Rate, 0.85),
    Row::new("ib_write_bw", "write-bw", "-s 64 -l 1 -n 200000", Measure::Rate, 0.85),
];

impl Row {
    const fn new(
        program: &'static str,
        test: &'static str,
        options: &'static str,
        measure: Measure,
        bar: f64,
    ) -> Self {
        Self { program, test, options, measure, bar }
    }
}

/// A row's figures on a backend, sorted: perftest's and ours.
#[derive(Debug)]
pub struct Compared {
    row: &'static Row,
    netdev: &'static str,
    theirs: [f64; RUNS],
    ours: [f64; RUNS],
    /// perftest's last output.
    pub raw: String,
}

impl Compared {
    fn ratio(&self) -> f64 {
        self.theirs[RUNS / 2] / self.ours[RUNS / 2]
    }

    /// Whether the median is within the bar.
    #[must_use]
    pub fn holds(&self) -> bool {
        match self.row.measure {
            Measure::Latency => self.ratio() <= self.row.bar,
            Measure::Bandwidth | Measure::Rate => self.ratio() >= self.row.bar,
        }
    }

    /// The line of `--json`.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({"program": self.row.program, "mode": self.row.options, "netdev": self.netdev,
            "perftest": self.theirs, "rocinante": self.ours, "ratio": self.ratio(),
            "bar": self.row.bar, "ok": self.holds()})
    }

    /// A row of a table: the median of each, with the minimum and the maximum.
    #[must_use]
    pub fn line(&self) -> String {
        let of = |[min, median, max]: [f64; RUNS]| format!("{median:.2} ({min:.2}–{max:.2})");
        let Row { program, options, measure, bar, .. } = self.row;
        let unit = match measure {
            Measure::Latency => "µs",
            Measure::Bandwidth => "Gb/s",
            Measure::Rate => "10⁶/s",
        };
        format!(
            "| `{program} {options}`, {unit}, {bar:.2} | {} | {} | {} | {:.2} |",
            self.netdev,
            of(self.theirs),
            of(self.ours),
            self.ratio()
        )
    }
}

/// Measures all rows with `words` in them, and gives each to `each`. Error: a program fails.
pub fn run(
    want: impl Fn(&str) -> bool,
    installed: &Installation,
    mut each: impl FnMut(&Compared),
) -> Result<(), String> {
    for row in &ROWS {
        for netdev in BACKENDS {
            if !want(&format!("{} {} {netdev}", row.program, row.options)) {
                continue;
            }
            let (mut theirs, mut ours, mut raw) = ([0.0; RUNS], [0.0; RUNS], String::new());
            for run in 0..RUNS {
                let words = [&[row.program], &*words(row.options)].concat();
                raw = pair(netdev, |_| installed.run(netdev, &words))?;
                theirs[run] = perftests(&raw, row.measure).ok_or("perftest prints no figures")?;
                let perf = ["perf", row.test, "--netdev", netdev];
                let said = pair(netdev, |is_client| {
                    // The server learns the options from the client.
                    let options = if is_client { words_of(row.options) } else { vec![] };
                    installed.command([&perf[..], &options].concat())
                })?;
                ours[run] = of_perf(&said, row.measure).ok_or("perf prints no figures")?;
            }
            theirs.sort_by(f64::total_cmp);
            ours.sort_by(f64::total_cmp);
            each(&Compared { row, netdev, theirs, ours, raw });
        }
    }
    Ok(())
}

fn words(options: &str) -> Vec<&str> {
    options.split(' ').collect()
}

fn words_of(options: &'static str) -> Vec<&'static str> {
    words(options).into_iter().chain(["--json"]).collect()
}

/// The client's output. Server and client have namespaces of their own.
fn pair(netdev: &str, command: impl Fn(bool) -> Command) -> Result<String, String> {
    let pair = Pair::new(&LabConfig::default()).map_err(in_words)?;
    let [a, b] = pair.containers();
    let as_user = |mut command: Command| {
        if netdev == "udp" {
            command.uid(NOBODY).gid(NOBODY);
        }
        command
    };
    let mut server = b.spawn(&mut as_user(command(false))).map_err(in_words)?;
    listens(&mut server)?;
    let mut client = command(true);
    client.arg(b.ipv4().to_string());
    let client = a.spawn(&mut as_user(client)).map_err(in_words)?;
    let client = ended("the client", client, LIMIT)?;
    let _ = ended("the server", server, LIMIT);
    succeeded("the client", &client)?;
    Ok(String::from_utf8_lossy(&client.stdout).into_owned())
}

/// The figure of perftest's last row. Bandwidths are in MiB/s.
fn perftests(said: &str, measure: Measure) -> Option<f64> {
    let numbers = |line: &str| -> Option<Vec<f64>> {
        line.split_whitespace().map(|word| word.parse().ok()).collect()
    };
    let rows = said.lines().rev().filter_map(numbers);
    let row = rows.into_iter().find(|row| row.len() > 3)?;
    match measure {
        // Size, iterations, minimum, maximum, median ("typical").
        Measure::Latency => row.get(4).copied(),
        Measure::Bandwidth => row.get(3).map(|mib| mib * 8.0 * 1_048_576.0 / 1e9),
        Measure::Rate => row.get(4).copied(),
    }
}

fn of_perf(said: &str, measure: Measure) -> Option<f64> {
    let json: Value = serde_json::from_str(said.lines().last()?).ok()?;
    let name = match measure {
        Measure::Latency => "us_p50",
        Measure::Bandwidth => "gbps",
        Measure::Rate => "mpps",
    };
    json["results"][0][name].as_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_where_the_programs_print_them() {
        let lat =
            " #bytes #iterations t_min\n 64 1000 3.58 22.84 3.96 4.13 0.78 8.52 22.84\n----\n";
        assert_eq!(perftests(lat, Measure::Latency), Some(3.96));
        let bw = " 1048576 5000 7190.63 1000.00 0.115047\n";
        assert_eq!(perftests(bw, Measure::Bandwidth), Some(8.388_608));
        assert_eq!(perftests(bw, Measure::Rate), Some(0.115_047));
        assert_eq!(perftests("no figures", Measure::Rate), None);
        let ours = "{\"results\":[{\"us_p50\":4.5,\"gbps\":8.0,\"mpps\":2.5}]}\n";
        let of = |measure| of_perf(ours, measure);
        assert_eq!(
            [of(Measure::Latency), of(Measure::Bandwidth), of(Measure::Rate)],
            [Some(4.5), Some(8.0), Some(2.5)]
        );
    }

    #[test]
    fn a_bar_is_above_latencies_and_below_the_others() {
        let of = |row: &'static Row, theirs: f64| Compared {
            row,
            netdev: "udp",
            theirs: [0.5, theirs, 50.0],
            ours: [1.0; RUNS],
            raw: String::new(),
        };
        assert!(of(&ROWS[0], 1.09).holds() && !of(&ROWS[0], 1.11).holds());
        assert!(of(&ROWS[2], 0.91).holds() && !of(&ROWS[2], 0.89).holds());
    }
}
