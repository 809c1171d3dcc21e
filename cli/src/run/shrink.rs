//! `rocinante run --shrink`: the smallest schedule of faults with which a command still fails.
//!
//! First whole rules are left out, as delta debugging does it, then words of the rules, and last
//! the amounts get smaller. Each try is a process of its own, with the same seed: `draws` keeps the
//! random numbers of a rule whose place changes.

use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rocinante::OpenOptions;
use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use toml::{Table, Value};

use super::{Args, say};

/// How often a process is looked at.
const LOOK: Duration = Duration::from_millis(5);

/// The most steps by which an amount gets smaller.
const STEPS: usize = 12;

/// Words whose smaller amounts are less of a fault, and those whose larger ones are.
const SMALLER: [&str; 14] = [
    "loss",
    "burst",
    "burst_length",
    "dup",
    "reorder",
    "reorder_by",
    "corrupt",
    "ecn",
    "delay",
    "jitter",
    "for",
    "rnr",
    "chance",
    "at",
];
const LARGER: [&str; 4] = ["every", "rate", "queue", "mtu"];

/// Words without which a rule may be more of a fault.
const NARROWING: [&str; 11] = [
    "side",
    "peer",
    "qp",
    "opcode",
    "wc",
    "nth",
    "chance",
    "for",
    "at",
    "burst_length",
    "reorder_by",
];

/// The result of a try.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Status(i32),
    Signal(i32),
    /// It ran longer than it may.
    Hung,
}

impl Outcome {
    fn says(self) -> String {
        match self {
            Self::Status(0) => "succeeds".to_owned(),
            Self::Status(status) => format!("fails with status {status}"),
            Self::Signal(signal) => format!("is ended by signal {signal}"),
            Self::Hung => "does not end in time".to_owned(),
        }
    }
}

/// Why no smaller schedule is found.
enum Stop {
    Why(String),
    /// A signal came.
    Signal(usize),
}

impl From<String> for Stop {
    fn from(why: String) -> Self {
        Self::Why(why)
    }
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Why(error.to_string())
    }
}

/// Prints the smallest schedule.
#[must_use]
pub(super) fn shrink(args: &Args, limit: Duration) -> ExitCode {
    let words = args.fault.as_deref().unwrap_or_default();
    let (seed, rules) = match schedule(words) {
        Ok(schedule) => schedule,
        Err(why) => {
            say(&format!("--fault {words} --shrink: {why}"));
            return ExitCode::from(2);
        }
    };
    let shrunk = Tries::new(args, limit, seed).and_then(|tries| tries.smallest(rules));
    let printed = shrunk.and_then(|rules| {
        let mut out = io::stdout().lock();
        let done = out.write_all(text(seed, &rules).as_bytes()).and_then(|()| out.flush());
        done.map_err(|error| Stop::Why(format!("the schedule is not printed: {error}")))
    });
    match printed {
        Ok(()) => ExitCode::SUCCESS,
        Err(Stop::Why(why)) => {
            say(&why);
            ExitCode::FAILURE
        }
        Err(Stop::Signal(signal)) => ExitCode::from(128 + signal as u8),
    }
}

/// The seed and the rules of an option, each with its own beginning. Without a seed, one is drawn.
fn schedule(words: &str) -> Result<(i64, Vec<Table>), String> {
    if !OpenOptions::check_fault(words)? {
        return Err("there are no faults".to_owned());
    }
    let mut file = match words.ends_with(".toml") {
        true => {
            let text =
                std::fs::read_to_string(words).map_err(|error| format!("{words}: {error}"))?;
            toml::from_str(&text).map_err(|error| format!("{words}: {error}"))?
        }
        false => table_of(words),
    };
    let seed = match file.remove("seed") {
        None => i64::from(std::process::id()),
        Some(Value::Integer(seed)) => seed,
        // The integers of TOML end there.
        Some(_) => return Err(format!("give it a seed up to {}", i64::MAX)),
    };
    let rules = match file.remove("fault") {
        Some(Value::Array(rules)) => rules,
        _ => Vec::new(),
    };
    let tables = rules.into_iter().filter_map(|rule| match rule {
        Value::Table(table) => Some(table),
        _ => None,
    });
    let tables: Vec<Table> = tables.collect();
    let beginnings = OpenOptions::check_schedule(&text(seed, &tables))?;
    let begins = |(place, (mut rule, at)): (i64, (Table, Duration))| {
        rule.entry("draws").or_insert(Value::Integer(place));
        let _ = (rule.remove("name"), rule.remove("then"), rule.remove("at"));
        if !at.is_zero() {
            rule.insert("at".to_owned(), Value::String(format!("{}us", at.as_micros())));
        }
        rule
    };
    Ok((seed, (0..).zip(tables.into_iter().zip(beginnings)).map(begins).collect()))
}

/// Words of a command line as a schedule.
fn table_of(words: &str) -> Table {
    let (mut file, mut rules) = (Table::new(), Vec::new());
    for rule in words.split(';') {
        let mut table = Table::new();
        for word in rule.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            let (key, value) = (key.trim().to_owned(), value.trim());
            let text = Value::String(value.to_owned());
            if key == "seed" {
                file.insert(key, value.parse().map_or(text, Value::Integer));
            } else {
                table.insert(key, text);
            }
        }
        if !table.is_empty() {
            rules.push(Value::Table(table));
        }
    }
    file.insert("fault".to_owned(), Value::Array(rules));
    file
}

fn text(seed: i64, rules: &[Table]) -> String {
    let mut text = format!("seed = {seed}\n");
    for rule in rules {
        text += "\n[[fault]]\n";
        for (key, value) in rule {
            // TOML has JSON's form of the values that a rule may have.
            let value = serde_json::to_string(value).unwrap_or_default();
            text += &format!("{key} = {value}\n");
        }
    }
    text
}

/// The processes of the command.
struct Tries<'a> {
    args: &'a Args,
    limit: Duration,
    seed: i64,
    schedule: File,
    signal: Arc<AtomicUsize>,
    count: std::cell::Cell<u32>,
}

/// A file that is removed with this.
struct File(PathBuf);

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl<'a> Tries<'a> {
    fn new(args: &'a Args, limit: Duration, seed: i64) -> Result<Self, Stop> {
        let name = format!("rocinante-shrink-{}.toml", std::process::id());
        let schedule = File(std::env::temp_dir().join(name));
        let signal = Arc::new(AtomicUsize::new(0));
        for number in [SIGINT, SIGTERM, SIGHUP, SIGQUIT] {
            let value = number.unsigned_abs() as usize;
            signal_hook::flag::register_usize(number, signal.clone(), value)?;
        }
        Ok(Self { args, limit, seed, schedule, signal, count: 0.into() })
    }

    /// The smallest schedule that fails as all of it does.
    fn smallest(&self, rules: Vec<Table>) -> Result<Vec<Table>, Stop> {
        let without = self.outcome(None)?;
        if without != Outcome::Status(0) {
            let why = format!("without faults the command {}, too", without.says());
            return Err(why.into());
        }
        let with = self.outcome(Some(&rules))?;
        if with == Outcome::Status(0) {
            let why = "with all of the faults the command succeeds: there is nothing to shrink";
            return Err(why.to_owned().into());
        }
        say(&format!("with all {} rules the command {}", rules.len(), with.says()));
        let fails = |rules: &[Table]| -> Result<bool, Stop> {
            // Words that make no sense any more are no smaller schedule.
            if OpenOptions::check_schedule(&text(self.seed, rules)).is_err() {
                return Ok(false);
            }
            Ok(self.outcome(Some(rules))? == with)
        };
        let mut rules = fewest(rules, fails)?;
        for index in 0..rules.len() {
            for key in rules[index].keys().cloned().collect::<Vec<_>>() {
                lessen(&mut rules, (index, &key), fails)?;
            }
        }
        let again = self.outcome(Some(&rules))?;
        let (tries, count) = (self.count.get(), rules.len());
        let ends = format!("after {tries} tries: {count} rules, and the command {}", again.says());
        if again != with {
            let text = text(self.seed, &rules);
            return Err(format!("it fails only sometimes; {ends}\n{text}").into());
        }
        say(&ends);
        Ok(rules)
    }

    /// Runs the command with these rules, or without faults.
    fn outcome(&self, rules: Option<&[Table]>) -> Result<Outcome, Stop> {
        self.count.set(self.count.get() + 1);
        let mut fault = PathBuf::from("off");
        if let Some(rules) = rules {
            fault.clone_from(&self.schedule.0);
            write(&fault, &text(self.seed, rules))?;
        }
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("run").arg("--fault").arg(fault);
        command.args(self.args.netdev.iter().flat_map(|netdev| ["--netdev", netdev]));
        command.args(self.args.device.iter().flat_map(|device| ["--device", device]));
        command.arg("--").args(&self.args.program);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
        let outcome = self.wait(&mut command.spawn()?);
        if let Ok(outcome) = &outcome
            && self.args.verbose
        {
            let rules = rules.map_or(0, <[Table]>::len);
            say(&format!("try {}: {rules} rules: {}", self.count.get(), outcome.says()));
        }
        outcome
    }

    /// Waits for a process, and ends all of its group.
    fn wait(&self, child: &mut Child) -> Result<Outcome, Stop> {
        let until = Instant::now() + self.limit;
        let ended = loop {
            match (child.try_wait()?, self.signal.load(Ordering::Relaxed)) {
                (Some(status), _) => {
                    let signal = status.signal().map(Outcome::Signal);
                    break Ok(signal.unwrap_or(Outcome::Status(status.code().unwrap_or(-1))));
                }
                (None, 0) if Instant::now() >= until => break Ok(Outcome::Hung),
                (None, 0) => std::thread::sleep(LOOK),
                (None, signal) => break Err(Stop::Signal(signal)),
            }
        };
        if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
            // A group that is gone needs no end.
            let _ = kill_process_group(group, Signal::KILL);
        }
        child.wait()?;
        ended
    }
}

fn write(path: &Path, text: &str) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // Another user may have put a link there.
    let mut file =
        std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes())
}

/// The fewest items that still fail: without any one of them they do not (ddmin of Zeller and
/// Hildebrandt, 2002).
fn fewest<T: Clone, E>(
    mut items: Vec<T>,
    fails: impl Fn(&[T]) -> Result<bool, E>,
) -> Result<Vec<T>, E> {
    let mut parts = 2;
    while items.len() > 1 {
        let size = items.len().div_ceil(parts);
        let mut fewer = None;
        for start in (0..items.len()).step_by(size) {
            let mut rest = items.clone();
            rest.drain(start..(start + size).min(items.len()));
            if fails(&rest)? {
                fewer = Some(rest);
                break;
            }
        }
        match fewer {
            Some(rest) => {
                items = rest;
                parts = (parts - 1).max(2);
            }
            None if size == 1 => break,
            None => parts = (2 * parts).min(items.len()),
        }
    }
    Ok(items)
}

/// Leaves a word of a rule out, or makes its amount less.
fn lessen<E>(
    rules: &mut Vec<Table>,
    (index, key): (usize, &str),
    fails: impl Fn(&[Table]) -> Result<bool, E>,
) -> Result<(), E> {
    if !NARROWING.contains(&key) {
        let mut without = rules.clone();
        without[index].remove(key);
        if fails(&without)? {
            *rules = without;
            return Ok(());
        }
    }
    // A rule without an end holds longer if it begins earlier.
    if key == "at" && !rules[index].contains_key("for") {
        return Ok(());
    }
    for _ in 0..STEPS {
        let mut less = rules.clone();
        let Some(value) = lesser(key, &rules[index][key]) else { break };
        less[index].insert(key.to_owned(), value);
        if !fails(&less)? {
            break;
        }
        *rules = less;
    }
    Ok(())
}

/// A lesser amount for a word, about half of a fault; `None` if there is none.
fn lesser(key: &str, value: &Value) -> Option<Value> {
    let by = match key {
        key if SMALLER.contains(&key) => 0.5,
        key if LARGER.contains(&key) => 2.0,
        _ => return None,
    };
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Integer(number) => number.to_string(),
        Value::Float(number) => number.to_string(),
        _ => return None,
    };
    let is_number = |c: char| c.is_ascii_digit() || c == '.';
    let end = text.find(|c: char| !is_number(c)).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let amount = number.parse::<f64>().ok()? * by;
    let is_whole = ["burst_length", "every", "queue", "mtu"].contains(&key);
    let amount = if is_whole { amount.floor() } else { amount };
    // Nothing is gained below these.
    let is_least = amount < if unit == "ns" || is_whole { 1.0 } else { 1e-6 };
    (!is_least).then(|| Value::String(format!("{amount}{unit}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_remain_are_needed() {
        let count = std::cell::Cell::new(0);
        let fails = |items: &[u32]| {
            count.set(count.get() + 1);
            Ok::<_, ()>([3, 17, 40].iter().all(|needed| items.contains(needed)))
        };
        assert_eq!(fewest((0..64).collect(), fails), Ok(vec![3, 17, 40]));
        assert!(count.get() < 100, "{}", count.get());
        assert_eq!(fewest(vec![1], |_: &[u32]| Ok::<_, ()>(true)), Ok(vec![1]));
    }

    #[test]
    fn words_and_files_are_one_schedule() {
        let words = "loss=50%,seed=7;partition,at=1s,for=200ms";
        let (seed, rules) = schedule(words).unwrap();
        assert_eq!((seed, rules.len()), (7, 2));
        let printed = text(seed, &rules);
        assert_eq!(OpenOptions::check_schedule(&printed).unwrap().len(), 2);
        assert!(
            printed.contains("at = \"1000000us\"") && printed.contains("seed = 7"),
            "{printed}"
        );
        for wrong in ["los=1%", "loss=200%", "/nowhere/a.toml", "off", "loss=0"] {
            assert!(schedule(wrong).is_err(), "{wrong}");
        }
        let most = |seed: u64| schedule(&format!("seed={seed};loss=1%")).map(|(seed, _)| seed);
        assert_eq!(most(i64::MAX as u64), Ok(i64::MAX));
        assert!(most(1 << 63).unwrap_err().contains("a seed up to 9223372036854775807"));
    }

    #[test]
    fn no_rule_becomes_more_of_a_fault() {
        let words = "verb=reg_mr,nth=2,errno=EIO,at=1s;rnr=1,qp=1,peer=10.0.0.1,at=1s,for=1s";
        let (_, mut rules) = schedule(words).unwrap();
        for index in 0..2 {
            for key in rules[index].keys().cloned().collect::<Vec<_>>() {
                let fails = |rules: &[Table]| Ok::<_, ()>(rules[1].contains_key("rnr"));
                lessen(&mut rules, (index, &key), fails).unwrap();
            }
        }
        let keys = |rule: &Table| rule.keys().cloned().collect::<Vec<_>>().join(",");
        assert_eq!(rules.iter().map(keys).collect::<Vec<_>>(), ["at,nth", "at,for,peer,qp,rnr"]);
        assert_eq!(rules[0]["at"].as_str(), Some("1000000us"));
        assert_eq!(rules[1]["at"].as_str(), Some("244.140625us"));
    }

    #[test]
    fn amounts_get_less_in_their_own_way() {
        let text = |key: &str, text: &str| {
            lesser(key, &Value::String(text.to_owned()))
                .map(|value| value.as_str().unwrap().to_owned())
        };
        for (key, before, after) in [
            ("loss", "50%", Some("25%")),
            ("delay", "100us", Some("50us")),
            ("for", "1ns", None),
            ("every", "3", Some("6")),
            ("burst_length", "1", None),
            ("rate", "1Gbit", Some("2Gbit")),
            ("peer", "10.0.0.2", None),
        ] {
            assert_eq!(text(key, before).as_deref(), after, "{key}={before}");
        }
        assert_eq!(lesser("loss", &Value::Float(0.5)).unwrap().as_str(), Some("0.25"));
    }
}
