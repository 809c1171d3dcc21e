//! `cargo xtask mutants`: which changes of the code its tests notice, by cargo-mutants.
//!
//! Linking thirty test programs for each of thousands of mutants would cost more than all else. So
//! each part is copied, with its tests as modules of one test program, and mutated there
//! (`mutants/trees.rs`): about a second per mutant. Most tests take no time, and a few take most of
//! it: those few run only for mutants that the others did not notice.
//!
//! The fate of each mutant is written to a file as soon as it is known: an interrupted run
//! continues where it stopped.

mod trees;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command::{self, cargo};
use crate::demo;

/// A mutated part of the code, and the tests that must notice.
struct Part {
    name: &'static str,
    /// Makes the copy.
    plant: fn(&Path) -> io::Result<()>,
    /// The mutants: arguments of cargo-mutants.
    of: &'static [&'static str],
    /// Each runs for the mutants that those before it did not notice.
    passes: &'static [Pass],
}

/// Some tests.
struct Pass {
    /// The most seconds that they may take on a busy machine. A mutant that takes longer counts as
    /// one that never ends, and as noticed.
    patience_s: u32,
    /// The programs: arguments of cargo-mutants.
    programs: &'static [&'static str],
    /// The selection of their tests: arguments of cargo.
    cargo: &'static [&'static str],
    /// Parts of the names of tests to run; none means all.
    only: &'static [&'static str],
    /// Parts of the names of tests to leave out.
    skipped: &'static [&'static str],
}

/// The unit tests of a crate, which are all of its tests here, except some.
const fn units(patience_s: u32, skipped: &'static [&'static str]) -> Pass {
    Pass { patience_s, programs: &[], cargo: UNITS, only: &[], skipped }
}

const UNITS: &[&str] = &["--lib"];

const PARTS: [Part; 4] = [
    Part { name: "stack", plant: trees::stack, of: &[], passes: ENGINES },
    Part {
        name: "cm",
        plant: trees::stack,
        of: &["--file", "stack/src/cm/*.rs"],
        passes: &[
            Pass { only: &["cm_tests::", "cm::"], ..units(20, &SLOW_OF_CM) },
            units(100, &SLOW),
        ],
    },
    Part {
        name: "netdev",
        plant: trees::netdev,
        of: &["--package", "rocinante-netdev"],
        passes: &[units(120, &SLOW_OF_NETDEV), units(600, &[])],
    },
    Part {
        name: "verbs-api",
        plant: trees::verbs_api,
        // The guest of `interop` covers the code that asks a device of the kernel.
        of: &["--package", "rocinante", "--exclude", "verbs-api/src/kernel/**"],
        passes: &[
            units(60, &SLOW_OF_VERBS),
            Pass {
                patience_s: 200,
                programs: &["--test-package", "rocinante-models"],
                cargo: &["--test", "threads"],
                only: &[],
                skipped: &[],
            },
            units(400, &[]),
        ],
    },
];

const ENGINES: &[Pass] = &[units(30, &SLOW), units(400, &[])];

/// Slow tests; parts of their names.
const SLOW: [&str; 18] = [
    "rc_hostile_tests::",
    "goodput_tests::",
    "allocations_tests::",
    "random_work_over_a_bad_network",
    "losses_do_not_repeat_or_skip",
    "every_connection_ends_once",
    "writes_of_all_stay_within",
    "a_message_arrives_whole_once",
    "every_operation_with_random_loss",
    "hostile_bytes_do_no_harm",
    "every_truncation_of_every_captured_packet",
    "every_flipped_bit_is_noticed",
    "the_solver_finds_the_identification",
    "damage_passes_for_an_identification",
    "the_rate_is_one_that_a_receiver_in_software_takes",
    "everything_through_a_window_stays_inside",
    "reads_and_writes_share_without_blocking",
    "a_window_admits_the_peer_until_it_is_invalidated",
];
/// Slow tests of the connection manager.
const SLOW_OF_CM: [&str; 2] = ["every_connection_ends_once", "damaged_messages_do_no_harm"];
/// Slow tests of `netdev`: they wait for the kernel.
const SLOW_OF_NETDEV: [&str; 10] = [
    "xdp::tests::",
    "group_tests::",
    "policy::tests::",
    "tests::life::",
    "a_new_path_has_its_neighbour_resolved",
    "a_full_ring_drops_and_counts",
    "what_is_told_without_end_is_followed_with_rests",
    "an_idle_path_is_looked_at_if_it_may_have_changed",
    "what_did_not_fit_may_have_been_anything",
    "a_blocked_port_is_woken_when_it_can_write",
];
/// Slow tests of `verbs-api`: they take real time, or depend on scheduling.
const SLOW_OF_VERBS: [&str; 4] = [
    "stalls_of_tests::",
    "a_bad_network_only_takes_time",
    "a_program_that_polls_without_pause_is_left_alone",
    "what_is_held_while_nobody_reads_is_given_back",
];
/// The memory limit of a mutant, in KiB. Some would allocate all there is.
const MEMORY_MAX_KIB: u32 = 8 << 20;
/// The number of mutants tried before their fates are written.
const AT_A_TIME: usize = 8;

/// The fate of a mutant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fate {
    Caught,
    Missed,
    Timeout,
    Unviable,
}

impl Fate {
    const ALL: [Self; 4] = [Self::Caught, Self::Missed, Self::Timeout, Self::Unviable];

    /// The file in which cargo-mutants lists them.
    const fn file(self) -> &'static str {
        match self {
            Self::Caught => "caught.txt",
            Self::Missed => "missed.txt",
            Self::Timeout => "timeout.txt",
            Self::Unviable => "unviable.txt",
        }
    }
}

type Fates = BTreeMap<String, Fate>;

/// `cargo xtask mutants [--of PART] [--anew] [SHARD/OF] [ARGS of cargo-mutants]`.
///
/// # Errors
/// cargo-mutants is missing or fails; not, that mutants survive.
pub(crate) fn run(args: &[&str]) -> Result<(), String> {
    command::read(&mut cargo(["mutants", "--version"])).map_err(|_| {
        "cargo-mutants is not installed: cargo install --locked cargo-mutants".to_owned()
    })?;
    let Args { part, anew, chosen } = Args::parse(args)?;
    let home = std::path::absolute(demo::target()?.join("mutants").join(part.name));
    let home = home.map_err(|error| error.to_string())?;
    let place = Place { tree: home.join("tree"), home };
    place.plant(part).map_err(|error| error.to_string())?;
    if anew {
        let _ = fs::remove_file(place.kept());
    }
    let names = place.list(part, &chosen)?;
    let mut fates = place.known();
    fates.retain(|name, _| names.contains(name));
    let left: Vec<&String> = names.iter().filter(|name| !fates.contains_key(*name)).collect();
    println!("{} mutants, {} of them tried before", names.len(), fates.len());
    for (nth, some) in left.chunks(AT_A_TIME).enumerate() {
        let new = place.try_out(part, some, nth == 0)?;
        place.keep(&new).map_err(|error| error.to_string())?;
        fates.extend(new);
    }
    print!("{}", report(&fates));
    Ok(())
}

/// The request of the command line.
struct Args {
    part: &'static Part,
    /// Whether to ignore earlier findings.
    anew: bool,
    /// The selected mutants: arguments of cargo-mutants.
    chosen: Vec<String>,
}

impl Args {
    fn parse(args: &[&str]) -> Result<Self, String> {
        let mut wanted = Self { part: &PARTS[0], anew: false, chosen: Vec::new() };
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            match *arg {
                "--of" => {
                    let name = args.next().copied().unwrap_or_default();
                    let named = PARTS.iter().find(|part| part.name == name);
                    let parts = PARTS.each_ref().map(|part| part.name).join(", ");
                    wanted.part = named.ok_or_else(|| format!("--of takes one of {parts}"))?;
                }
                "--anew" => wanted.anew = true,
                shard if shard.contains('/') && shard.starts_with(|c: char| c.is_ascii_digit()) => {
                    let shard = ["--sharding", "round-robin", "--shard", shard];
                    wanted.chosen.extend(shard.map(str::to_owned));
                }
                other => wanted.chosen.push(other.to_owned()),
            }
        }
        Ok(wanted)
    }
}

/// The folder in which a part is mutated.
struct Place {
    home: PathBuf,
    tree: PathBuf,
}

impl Place {
    fn plant(&self, part: &Part) -> io::Result<()> {
        if self.tree.exists() {
            fs::remove_dir_all(&self.tree)?;
        }
        fs::create_dir_all(&self.tree)?;
        (part.plant)(&self.tree)
    }

    /// The file with the fates of the mutants tried so far.
    fn kept(&self) -> PathBuf {
        self.home.join("fates.txt")
    }

    fn known(&self) -> Fates {
        let kept = fs::read_to_string(self.kept()).unwrap_or_default();
        let one = |line: &str| {
            let (fate, name) = line.split_once(' ')?;
            let fate =
                Fate::ALL.into_iter().find(|it| it.file().strip_suffix(".txt") == Some(fate))?;
            Some((name.to_owned(), fate))
        };
        kept.lines().filter_map(one).collect()
    }

    fn keep(&self, new: &Fates) -> io::Result<()> {
        use io::Write as _;
        let mut file = fs::OpenOptions::new().create(true).append(true).open(self.kept())?;
        for (name, fate) in new {
            let fate = fate.file().strip_suffix(".txt").unwrap_or_default();
            writeln!(file, "{fate} {name}")?;
        }
        Ok(())
    }

    /// The names of the requested mutants.
    fn list(&self, part: &Part, chosen: &[String]) -> Result<Vec<String>, String> {
        let mut list = cargo(["mutants", "--list", "--colors", "never", "-d"]);
        list.arg(&self.tree).args(part.of).args(chosen);
        Ok(command::read(&mut list)?.lines().map(str::to_owned).collect())
    }

    /// Finds the fates of these mutants. With `first`, also runs the tests without a mutant.
    fn try_out(&self, part: &Part, names: &[&String], first: bool) -> Result<Fates, String> {
        let mut fates = Fates::new();
        let mut left: Vec<String> = names.iter().map(|name| (*name).clone()).collect();
        for (nth, pass) in part.passes.iter().enumerate() {
            if left.is_empty() {
                break;
            }
            fates.extend(self.ask(&format!("pass-{nth}"), part, pass, &left, first)?);
            left.retain(|name| fates.get(name) == Some(&Fate::Missed));
        }
        Ok(fates)
    }

    /// The lines of these mutants, as a diff. cargo-mutants 27.1 does not select a deleted field by
    /// its name, but by its line.
    fn lines(&self, names: &[String]) -> Result<String, String> {
        let mut files: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
        for name in names {
            let mut parts = name.splitn(3, ':');
            let (file, line) = (parts.next().unwrap_or_default(), parts.next());
            files.entry(file).or_default().extend(line.and_then(|line| line.parse::<usize>().ok()));
        }
        let mut diff = String::new();
        for (file, lines) in files {
            let text =
                fs::read_to_string(self.tree.join(file)).map_err(|e| format!("{file}: {e}"))?;
            let text: Vec<&str> = text.lines().collect();
            diff += &format!("--- a/{file}\n+++ b/{file}\n");
            for line in lines {
                let is = text.get(line - 1).unwrap_or(&"");
                diff += &format!("@@ -{line},1 +{line},1 @@\n-\n+{is}\n");
            }
        }
        Ok(diff)
    }

    /// Makes cargo-mutants try these mutants with these tests.
    fn ask(
        &self,
        out: &str,
        part: &Part,
        pass: &Pass,
        names: &[String],
        first: bool,
    ) -> Result<Fates, String> {
        let out = self.home.join(out);
        fs::create_dir_all(&out).map_err(|error| error.to_string())?;
        let limited = format!("ulimit -v {MEMORY_MAX_KIB}; exec \"$@\"");
        let mut command = Command::new("sh");
        command.args(["-c", &limited, "sh"]).arg(cargo::<&str>([]).get_program());
        command.args(["mutants", "--in-place", "--no-shuffle", "--colors", "never", "-d"]);
        command.arg(&self.tree).arg("-o").arg(&out);
        command.args(["--build-timeout", "300", "--timeout", &pass.patience_s.to_string()]);
        command.args(["--baseline", if first { "run" } else { "skip" }]);
        command.args(part.of).args(pass.programs);
        command.args(names.iter().map(|name| format!("--re=^{}$", escaped(name))));
        let lines = out.join("lines.diff");
        fs::write(&lines, self.lines(names)?).map_err(|error| error.to_string())?;
        command.arg("--in-diff").arg(lines);
        // Stopping at the first failure is an unstable option of the test program, but works with
        // the stable compiler.
        command.arg("--").args(pass.cargo).args(["--", "-Zunstable-options", "--fail-fast"]);
        command.args(pass.only).args(pass.skipped.iter().flat_map(|name| ["--skip", *name]));
        command.env("RUSTC_BOOTSTRAP", "1").env("CARGO_TARGET_DIR", self.home.join("build"));
        // Less time to build means less time to try.
        command.env("CARGO_PROFILE_DEV_OPT_LEVEL", "0").env("CARGO_PROFILE_DEV_DEBUG", "0");
        let status = command.status().map_err(|error| error.to_string())?;
        // 2 and 3: some mutants survived, or did not end.
        if !matches!(status.code(), Some(0 | 2 | 3)) {
            return Err(format!("{}: {status}", command::describe(&command)));
        }
        let mut fates = Fates::new();
        for fate in Fate::ALL {
            let list = fs::read_to_string(out.join("mutants.out").join(fate.file()))
                .map_err(|error| error.to_string())?;
            fates.extend(list.lines().map(|line| (line.to_owned(), fate)));
        }
        Ok(fates)
    }
}

/// A regular expression that matches only this name.
fn escaped(name: &str) -> String {
    let mut escaped = String::new();
    for c in name.chars() {
        if r"\.+*?()|[]{}^$".contains(c) {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

/// The place of a mutant: a folder of its crate, or a file.
fn part(name: &str) -> &str {
    let (_, path) = name.split_once("src/").unwrap_or(("", name));
    path.split(['/', '.']).next().unwrap_or(path)
}

/// Counts by folder, and the survivors, in the form of docs/proof.md.
fn report(fates: &Fates) -> String {
    let mut counts: BTreeMap<&str, [usize; 4]> = BTreeMap::new();
    for (name, fate) in fates {
        counts.entry(part(name)).or_default()[*fate as usize] += 1;
        counts.entry("~ all").or_default()[*fate as usize] += 1;
    }
    let mut report = String::from(
        "\n| part | caught | missed | timeout | unviable | caught of viable |\n|---|--:|--:|--:|--:|--:|\n",
    );
    for (part, [caught, missed, timeout, unviable]) in counts {
        // A mutant that hangs is noticed.
        let (found, viable) = (caught + timeout, caught + missed + timeout);
        let percent = 100.0 * found as f64 / viable.max(1) as f64;
        report += &format!(
            "| {} | {caught} | {missed} | {timeout} | {unviable} | {percent:.1} % |\n",
            part.trim_start_matches("~ ")
        );
    }
    report += "\nSurvivors:\n\n";
    for (name, _) in fates.iter().filter(|(_, fate)| **fate == Fate::Missed) {
        report += &format!("- `{name}`\n");
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_counts_by_part_and_names_the_survivors() {
        let mutant = |name: &str, fate| (name.to_owned(), fate);
        let fates = Fates::from([
            mutant("stack/src/rc/requester/burst.rs:1:2: replace a with b", Fate::Caught),
            mutant("stack/src/rc/requester/burst.rs:2:2: replace a with b", Fate::Missed),
            mutant("stack/src/rc/congestion/rtt.rs:1:2: delete !", Fate::Timeout),
            mutant("stack/src/any.rs:1:2: delete !", Fate::Unviable),
        ]);
        let report = report(&fates);
        assert!(report.contains("\n| rc | 1 | 1 | 1 | 0 | 66.7 % |\n"), "{report}");
        assert!(report.contains("\n| any | 0 | 0 | 0 | 1 | 0.0 % |\n"), "{report}");
        assert!(report.contains("\n| all | 1 | 1 | 1 | 1 | 66.7 % |\n"), "{report}");
        assert!(
            report.ends_with("\n- `stack/src/rc/requester/burst.rs:2:2: replace a with b`\n"),
            "{report}"
        );
    }

    #[test]
    fn a_name_stands_for_itself() {
        assert_eq!(escaped("a.rs:1: f -> (u8) [+]"), r"a\.rs:1: f -> \(u8\) \[\+\]");
    }

    #[test]
    fn arguments_name_a_part_and_what_of_it() {
        let args =
            Args::parse(&["--of", "netdev", "3/40", "--anew", "--file", "a/b.rs"]).expect("ok");
        assert_eq!((args.part.name, args.anew), ("netdev", true));
        let shard = ["--sharding", "round-robin", "--shard", "3/40", "--file", "a/b.rs"];
        assert_eq!(args.chosen, shard);
        assert_eq!(Args::parse(&[]).expect("ok").part.name, "stack");
        assert!(Args::parse(&["--of", "x"]).is_err() && Args::parse(&["--of"]).is_err());
    }

    #[test]
    fn what_was_kept_is_known_again() {
        let home = std::env::temp_dir().join(format!("rocinante-fates-{}", std::process::id()));
        fs::create_dir_all(&home).expect("a folder");
        let place = Place { tree: home.join("tree"), home: home.clone() };
        let all = Fate::ALL.map(|fate| (format!("a.rs:1:2: replace {fate:?} with ()"), fate));
        for some in all.chunks(2) {
            place.keep(&some.iter().cloned().collect()).expect("room");
        }
        assert_eq!(place.known(), Fates::from(all));
        fs::remove_dir_all(home).expect("it is ours");
    }

    #[test]
    fn the_lines_of_mutants_are_a_diff() {
        let home = std::env::temp_dir().join(format!("rocinante-lines-{}", std::process::id()));
        fs::create_dir_all(home.join("src")).expect("a folder");
        fs::write(home.join("src/a.rs"), "one\ntwo\nthree\n").expect("room");
        let place = Place { tree: home.clone(), home: home.clone() };
        let names = ["src/a.rs:3:1: delete !", "src/a.rs:1:2: delete field x", "src/a.rs:3:9: x"];
        let lines = place.lines(&names.map(str::to_owned)).expect("it is there");
        let wanted = "--- a/src/a.rs\n+++ b/src/a.rs\n@@ -1,1 +1,1 @@\n-\n+one\n@@ -3,1 +3,1 @@\n-\n+three\n";
        assert_eq!(lines, wanted);
        fs::remove_dir_all(home).expect("it is ours");
    }
}
