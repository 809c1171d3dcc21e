//! `cargo xtask policies`: what each policy gives and costs. A policy is a module of a `tuning.rs`
//! with a switch `ENABLED`. `rocinante-bench` is built with it and without it, and the two run in
//! turns.
//!
//! A *gain* above 1 says that the policy helps. A policy whose effect needs losses, other programs
//! or many peers shows none in these rows: the last column has where it was measured.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::command::{self, words};
use crate::files::read;
use crate::nursery::Nursery;

/// The groups of rows, unless the command line names others.
const ROWS: &str = "bandwidth,rate,latency,qps";
/// How often both run.
const RUNS: usize = 3;

/// `cargo xtask policies [--rows GROUPS] [NAME...]`.
pub(crate) fn run(args: &[&str]) -> Result<(), String> {
    let (rows, names) = match args {
        ["--rows", rows, names @ ..] => (*rows, names),
        names => (ROWS, names),
    };
    let listed = command::read(&mut words("git ls-files *tuning.rs"))?;
    let mut policies = Vec::new();
    for file in listed.lines() {
        policies.extend(Policy::find(file, &read(file)?));
    }
    if let Some(unknown) = names.iter().find(|name| policies.iter().all(|p| p.name != **name)) {
        return Err(format!("{unknown} is no policy of a tuning.rs"));
    }
    policies.retain(|policy| names.is_empty() || names.contains(&policy.name.as_str()));
    let nursery = Nursery::new("policies")?;
    nursery.copy()?;
    let with = nursery.release("rocinante-bench", "with")?;
    println!("| policy | largest gain | least gain | lines, states, constants, tests | measured |");
    println!("|---|---|---|--:|---|");
    for policy in &policies {
        let build = || nursery.release("rocinante-bench", &policy.name);
        let without = nursery.with(&policy.file, |text| policy.switch_off(text), build)??;
        let mut gains = BTreeMap::<String, Vec<f64>>::new();
        for run in 0..RUNS {
            let pair = if run % 2 == 0 { [&with, &without] } else { [&without, &with] };
            let mut found = [measure(pair[0], rows)?, measure(pair[1], rows)?];
            found.rotate_left(run % 2);
            for (name, row) in &found[0] {
                let gain = found[1].get(name).map(|other| row.gain(other));
                gains.entry(name.clone()).or_default().extend(gain);
            }
        }
        let (most, least) = ends(&gains).ok_or("nothing was measured in both")?;
        let price = policy.price()?;
        println!("| {} | {most} | {least} | {price} | {} |", policy.name, policy.measured);
    }
    Ok(())
}

#[derive(Debug, PartialEq, Eq)]
struct Policy {
    name: String,
    /// The `tuning.rs`.
    file: String,
    /// The files that its comment names, which are the policy's own.
    own: Vec<PathBuf>,
    /// From its comment.
    measured: String,
    constants: usize,
}

impl Policy {
    fn find(file: &str, text: &str) -> Vec<Self> {
        let root = Path::new(file).parent().unwrap_or(Path::new(""));
        let blocks = text.split("\n}\n").filter(|block| block.contains("ENABLED: bool = true"));
        let policy = |block: &str| {
            let comment: Vec<&str> =
                block.lines().filter_map(|line| line.strip_prefix("///")).collect();
            let comment = comment.concat();
            let quoted = comment.split('`').skip(1).step_by(2);
            let own = quoted.filter(|word| word.ends_with(".rs")).map(|word| root.join(word));
            let measured = comment.split_once("Measured: ").map_or("not measured", |(_, it)| it);
            let measured = measured.split(". ").next()?.trim_end_matches('.');
            Some(Self {
                name: block.split_once("mod ")?.1.split_once(" {")?.0.to_owned(),
                file: file.to_owned(),
                own: own.collect(),
                measured: measured.to_owned(),
                constants: block.matches(" const ").count() - 1,
            })
        };
        blocks.filter_map(policy).collect()
    }

    fn switch_off(&self, text: &str) -> Result<String, String> {
        let (before, module) = text
            .split_once(&format!("mod {} {{", self.name))
            .ok_or_else(|| format!("{} has no {}", self.file, self.name))?;
        let off = module.replacen("ENABLED: bool = true", "ENABLED: bool = false", 1);
        Ok(format!("{before}mod {} {{{off}", self.name))
    }

    /// The price of the files that are its own.
    fn price(&self) -> Result<String, String> {
        let (mut lines, mut states, mut tests) = (0, 0, 0);
        for file in &self.own {
            let text = read(file)?;
            let (code, units) = text.split_once("#[cfg(test)]").unwrap_or((&text, ""));
            lines += code.lines().filter(|line| is_code(line)).count();
            states += fields(code);
            tests += units.matches("#[test]").count();
        }
        Ok(format!("{lines}, {states}, {}, {tests}", self.constants))
    }
}

fn is_code(line: &str) -> bool {
    let line = line.trim();
    !line.is_empty() && !line.starts_with("//")
}

/// Fields of structures and variants of enumerations.
fn fields(code: &str) -> usize {
    let mut inside = false;
    let mut count = 0;
    for line in code.lines().filter(|line| is_code(line)) {
        let starts = |word: &str| line.split(' ').any(|each| each == word) && line.ends_with('{');
        match inside {
            false => inside = !line.starts_with(' ') && (starts("struct") || starts("enum")),
            true if line == "}" => inside = false,
            true => count += usize::from(line.ends_with(',') && !line.starts_with("     ")),
        }
    }
    count
}

#[derive(Debug)]
struct Row {
    value: f64,
    /// More is better.
    rises: bool,
}

impl Row {
    /// How much better this is than `other`: 1 is no difference.
    fn gain(&self, other: &Self) -> f64 {
        if self.rises { self.value / other.value } else { other.value / self.value }
    }
}

/// The rows of one run, by name.
fn measure(program: &Path, rows: &str) -> Result<BTreeMap<String, Row>, String> {
    let mut bench = Command::new(program);
    bench.args(["--quick", "--json", "--runs", "1", "--only", rows]);
    Ok(command::read(&mut bench)?.lines().filter_map(row).collect())
}

/// A row of our own backends.
fn row(line: &str) -> Option<(String, Row)> {
    let row: Value = serde_json::from_str(line).ok()?;
    let text = |key: &str| row[key].as_str().unwrap_or_default().to_owned();
    let netdev = text("netdev");
    if !["udp", "packet", "afxdp"].contains(&netdev.as_str()) {
        return None;
    }
    let number = |key: &str| row[key].as_u64().unwrap_or(0);
    let name = format!(
        "`{}` {netdev} {} B, MTU {}, {} QP",
        text("measure"),
        number("size"),
        number("mtu"),
        number("qps")
    );
    let rises = matches!(text("unit").as_str(), "Gb/s" | "Mop/s" | "1");
    let value = row["value"].as_f64().filter(|value| *value > 0.0)?;
    Some((name, Row { value, rises }))
}

/// The rows with the largest and the least median.
fn ends(gains: &BTreeMap<String, Vec<f64>>) -> Option<(String, String)> {
    let median = |gains: &Vec<f64>| {
        let mut gains = gains.clone();
        gains.sort_by(f64::total_cmp);
        gains.get(gains.len() / 2).copied()
    };
    let mut rows: Vec<(f64, &String)> =
        gains.iter().filter_map(|(name, gains)| Some((median(gains)?, name))).collect();
    rows.sort_by(|a, b| a.0.total_cmp(&b.0));
    let show = |(gain, name): &(f64, &String)| format!("{gain:.2} {name}");
    Some((show(rows.last()?), show(rows.first()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TUNING: &str = "//! Constants.\n\n\
        /// Waits (`rc/mod.rs`). Measured: the table, 7 % of\n/// WRITEs. More text.\n\
        pub(crate) mod waits {\n    /// The switch.\n    pub(crate) const ENABLED: bool = true;\n    \
        pub(crate) const A: u32 = 2;\n}\n\n\
        /// Runs (`lib.rs`). Measured: design note 01.\n\
        pub(crate) mod runs {\n    pub(crate) const ENABLED: bool = true;\n}\n\n\
        /// No policy.\nmod sizes {\n    pub(crate) const B: u32 = 1;\n}\n";

    #[test]
    fn policies_are_modules_with_a_switch() {
        let found = Policy::find("stack/src/tuning.rs", TUNING);
        let names: Vec<(&str, usize, &str)> =
            found.iter().map(|p| (p.name.as_str(), p.constants, p.measured.as_str())).collect();
        let expected = [("waits", 1, "the table, 7 % of WRITEs"), ("runs", 0, "design note 01")];
        assert_eq!(names, expected);
        assert_eq!(found[0].own, [Path::new("stack/src/rc/mod.rs")]);
        let off = found[1].switch_off(TUNING).unwrap();
        assert_eq!(off.matches("true").count(), 1);
        assert!(off.find("true").unwrap() < off.find("false").unwrap(), "only the second");
    }

    #[test]
    fn a_gain_is_of_rates_and_of_times() {
        let line = |unit: &str, value: f64| {
            format!(
                r#"{{"measure":"m","netdev":"udp","size":64,"mtu":1024,"qps":1,"value":{value},"unit":"{unit}"}}"#
            )
        };
        for (unit, gain) in [("Gb/s", 2.0), ("µs", 0.5)] {
            let (with, without) = (row(&line(unit, 4.0)).unwrap(), row(&line(unit, 2.0)).unwrap());
            assert_eq!(with.0, "`m` udp 64 B, MTU 1024, 1 QP");
            assert!((with.1.gain(&without.1) - gain).abs() < 1e-9, "{unit}");
        }
        assert!(row(&line("Gb/s", 4.0).replace("udp", "tcp-spin")).is_none());
    }

    #[test]
    fn the_ends_are_of_medians() {
        let gains = [("a", vec![1.0, 9.0, 1.1]), ("b", vec![1.3, 1.2, 1.4])];
        let gains = gains.map(|(name, gains)| (name.to_owned(), gains)).into();
        assert_eq!(ends(&gains), Some(("1.30 b".to_owned(), "1.10 a".to_owned())));
    }

    #[test]
    fn states_are_fields_and_variants() {
        let code = "struct A {\n    /// Bytes.\n    b: u32,\n    c: Vec<u8>,\n}\nenum E {\n    X,\n    Y {\n        z: u8,\n    },\n}\nfn f(\n    a: u8,\n) {}\n";
        assert_eq!(fields(code), 4);
    }
}
