//! `rocinante-dropin`: runs the table of programs, or rdma-core's own tests. `cargo xtask dropin`
//! builds all that it needs.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use rocinante_dropin::install::Installation;
use rocinante_dropin::suite::{self, State, Verdict};
use rocinante_dropin::table::{self, Row};
use rocinante_dropin::{Outcome, document, foreign, kills, row, transports};
use rocinante_lab::kill_children_on_signal;
use serde_json::json;

const USAGE: &str = "\
rocinante-dropin [--json] [--suite|--kills|--transports FOLDER] [--accept FILE] [WORD...]
rocinante-dropin --foreign EMULATOR ROOT BUILT [--json] [WORD...]

  --json         a JSON object for each row
  --suite        rdma-core's own tests in the place of the table of programs
  --kills        20 rounds of 32 pairs of processes on one pair of addresses, a third of them killed
  --transports FOLDER
                 programs over this project and over TCP, on a machine that does nothing else; all
                 that they print goes into a file in the folder
  --foreign EMULATOR ROOT BUILT
                 programs of another processor, from a root file system for it, on the libraries
                 that cargo built for it: with each other, and with those of this processor
  --accept FILE  write the results into the table of that document
  WORD...        only rows with each of these in program, mode and backend";

/// The command line.
#[derive(Default)]
struct Options {
    json: bool,
    suite: bool,
    kills: bool,
    transports: Option<PathBuf>,
    foreign: Option<[String; 3]>,
    accept: Option<PathBuf>,
    words: Vec<String>,
}

/// Number of rows by their result.
#[derive(Default)]
struct Count {
    passed: usize,
    failed: usize,
    skipped: usize,
}

fn main() -> ExitCode {
    let done = options(std::env::args().skip(1)).and_then(|options| {
        kill_children_on_signal().map_err(|error| error.to_string())?;
        let own = std::env::current_exe().map_err(|error| error.to_string())?;
        let built = own.parent().unwrap_or(Path::new("."));
        let installed = Installation::of(&built.join("rocinante"), built)
            .map_err(|error| format!("{error}: `cargo xtask dropin` builds all"))?;
        if let Some(folder) = &options.transports {
            return race(folder, &options, &installed);
        }
        if let Some([emulator, root, built]) = &options.foreign {
            let added = installed.add_foreign(emulator, Path::new(root), Path::new(built));
            added.map_err(|error| format!("--foreign: {error}"))?;
            return on_foreign(&options, &installed);
        }
        match (options.suite, options.kills) {
            (true, _) => tests(&options, &installed),
            (_, true) => kill_rounds(&options, &installed),
            _ => programs(&options, &installed),
        }
    });
    match done {
        Ok(Count { passed, failed, skipped }) => {
            println!("{passed} passed, {failed} failed, {skipped} skipped");
            if failed + skipped == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("rocinante-dropin: {error}");
            ExitCode::FAILURE
        }
    }
}

fn options(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options::default();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--json" => options.json = true,
            "--suite" => options.suite = true,
            "--kills" => options.kills = true,
            "--foreign" => {
                let words = [(); 3].map(|()| args.next());
                let [Some(emulator), Some(root), Some(built)] = words else {
                    return Err(USAGE.to_owned());
                };
                options.foreign = Some([emulator, root, built]);
            }
            "--transports" => options.transports = Some(args.next().ok_or(USAGE)?.into()),
            "--accept" => options.accept = Some(args.next().ok_or(USAGE)?.into()),
            word if word.starts_with("--") => return Err(USAGE.to_owned()),
            _ => options.words.push(arg),
        }
    }
    let others =
        options.suite || options.kills || options.transports.is_some() || options.foreign.is_some();
    if options.accept.is_some() && (others || !options.words.is_empty()) {
        return Err("a document has the results of all programs: --accept alone".to_owned());
    }
    Ok(options)
}

impl Options {
    fn want(&self, text: &str) -> bool {
        self.words.iter().all(|word| text.contains(word.as_str()))
    }

    /// Those rows that have all words.
    fn choose(&self, mut rows: Vec<Row>) -> Result<Vec<Row>, String> {
        rows.retain(|row| self.want(&format!("{} {} {}", row.program, row.mode, row.netdev)));
        if rows.is_empty() { Err("there is no such row".to_owned()) } else { Ok(rows) }
    }
}

fn programs(options: &Options, installed: &Installation) -> Result<Count, String> {
    let mut outcomes = Vec::new();
    for row in options.choose(table::rows())? {
        let outcome = row::run(row, installed);
        if options.json {
            println!("{}", outcome.json());
        } else {
            println!("{}", outcome.line());
        }
        outcomes.push(outcome);
    }
    if let Some(path) = &options.accept {
        write(path, &outcomes).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    let passed = outcomes.iter().filter(|outcome| outcome.result.is_ok()).count();
    Ok(Count { passed, failed: outcomes.len() - passed, skipped: 0 })
}

/// Runs the rows of [`foreign`]: both sides on the other processor, and each with this one.
fn on_foreign(options: &Options, installed: &Installation) -> Result<Count, String> {
    let mut count = Count::default();
    for row in options.choose(foreign::rows())? {
        let sides = if row.is_alone() { &foreign::SIDES[..1] } else { &foreign::SIDES };
        for (sides, name) in sides {
            let outcome = row::run_foreign(row, installed, *sides);
            if options.json {
                let mut object = outcome.json();
                object["sides"] = json!(name);
                println!("{object}");
            } else {
                println!("{name:<14}  {}", outcome.line());
            }
            if outcome.result.is_ok() { count.passed += 1 } else { count.failed += 1 }
        }
    }
    Ok(count)
}

/// The rounds of `--kills`.
const ROUNDS: usize = 20;

fn kill_rounds(options: &Options, installed: &Installation) -> Result<Count, String> {
    let mut count = Count::default();
    let netdev = options.words.first().map_or("udp", String::as_str);
    for nth in 1..=ROUNDS {
        let kills::Round { killed, ended, failed } = kills::round(netdev, installed)?;
        if options.json {
            println!(
                "{}",
                json!({"round": nth, "netdev": netdev, "killed": killed, "ended": ended, "failed": failed})
            );
        } else {
            println!("round {nth}, {netdev}: {killed} killed, {ended} others ended with 0");
            failed.iter().for_each(|why| println!("FAILED  {why}"));
        }
        count.passed += ended;
        count.failed += failed.len();
    }
    Ok(count)
}

/// Prints a table, and puts all that the programs printed beside it.
fn race(folder: &Path, options: &Options, installed: &Installation) -> Result<Count, String> {
    let want = |name: &str| options.want(name);
    let all = transports::run(want, installed, |line| println!("{line}"))?;
    for (name, text) in [("table.md", &all.table), ("raw.txt", &all.raw)] {
        let path = folder.join(name);
        std::fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(Count { passed: all.table.lines().count().saturating_sub(2), ..Count::default() })
}

fn write(path: &Path, outcomes: &[Outcome]) -> Result<(), String> {
    let document = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    let document = document::with_table(&document, outcomes)?;
    std::fs::write(path, document).map_err(|error| error.to_string())
}

fn tests(options: &Options, installed: &Installation) -> Result<Count, String> {
    let mut tests = suite::tests();
    tests.retain(|test| options.want(test.name));
    let names: Vec<&str> =
        tests.iter().filter(|test| test.state == State::Must).map(|test| test.name).collect();
    let mut count = Count::default();
    suite::run(&names, installed, |name, verdict| {
        let (word, why) = match verdict {
            Verdict::Passed => ("ok", ""),
            Verdict::Skipped(why) => ("skipped", why.as_str()),
            Verdict::Failed(why) => ("failed", why.as_str()),
        };
        match verdict {
            Verdict::Passed => count.passed += 1,
            Verdict::Skipped(_) => count.skipped += 1,
            Verdict::Failed(_) => count.failed += 1,
        }
        print(options, name, word, why);
    })?;
    for test in tests.iter().filter(|test| test.state != State::Must) {
        let word = if test.state == State::Out { "out of scope" } else { "later" };
        print(options, test.name, word, test.reason);
    }
    Ok(count)
}

fn print(options: &Options, test: &str, state: &str, why: &str) {
    if options.json {
        println!("{}", json!({"test": test, "state": state, "why": why}));
    } else {
        println!("{state:<12}  {test}{}{why}", if why.is_empty() { "" } else { ": " });
    }
}
