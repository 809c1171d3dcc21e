//! The rows of a study, in a file that has each the moment it is measured.
//!
//! `rows.jsonl` has a line for each time that the study was begun or resumed, with the machine and
//! the settings, and then a line for each row that was measured.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use rocinante_cli::output::{self, Failure, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::plan::Choice;
use crate::machine::Machine;

/// The command of each line.
pub(super) const COMMAND: &str = "rocinante-bench evaluate";
/// The file in the directory of a study.
pub(super) const ROWS: &str = "rows.jsonl";
/// The file of rows that a resumed study did not take.
pub(super) const LEFT_OUT: &str = "left-out.jsonl";

/// The circumstances of rows. Only those of one machine and the same settings can be compared;
/// where the load was another the report says so.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Session {
    pub(super) machine: Machine,
    pub(super) load: Load,
    pub(super) choice: Choice,
    /// Addresses and devices of the command line.
    pub(super) place: Vec<String>,
}

/// Whether other programs had the processors when a session began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Load {
    Quiet,
    Busy,
}

/// A row: the figures of one measurement, or why there are none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Row {
    #[serde(flatten)]
    pub(super) key: Key,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) figures: BTreeMap<String, f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) missing: Option<String>,
}

/// The identity of a row: a study has one of each.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Key {
    pub(super) experiment: String,
    pub(super) mode: String,
    pub(super) x: u64,
    pub(super) round: u32,
}

/// What a directory had.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) rows: Vec<Row>,
    /// The lines of these rows, each behind that of its session.
    lines: Vec<String>,
    /// Those of a session with other programs.
    busy: usize,
    /// The choice of the last session.
    pub(super) choice: Option<Choice>,
    place: Vec<String>,
    /// Lines that are not taken, by the reason.
    left: BTreeMap<String, Vec<String>>,
}

/// The open file of a study.
#[derive(Debug)]
pub(super) struct Store {
    file: File,
    path: PathBuf,
    load: Load,
    pub(super) rows: Vec<Row>,
    /// Rows that were measured beside other programs.
    pub(super) busy: usize,
}

impl Store {
    /// Begins a study in a directory that is new or empty. Error: it is not, or cannot be written.
    pub(super) fn create(dir: &Path, session: &Session) -> Result<Self> {
        let failed = |error| cannot(dir, &error);
        fs::create_dir_all(dir).map_err(failed)?;
        if dir.join(ROWS).exists() {
            let dir = dir.display();
            let why = format!("{dir} has a study already: --resume {dir} goes on with it");
            return Err(Failure::Failed(why));
        }
        if fs::read_dir(dir).map_err(failed)?.next().is_some() {
            let why = format!("{} has files of others: choose another directory", dir.display());
            return Err(Failure::Failed(why));
        }
        Self::write(dir, session, Found::default())
    }

    /// Goes on with a study, of which `found` is what can be taken. The other lines go to a file of
    /// their own. Error: the directory cannot be written.
    pub(super) fn resume(dir: &Path, session: &Session, mut found: Found) -> Result<Self> {
        let left = std::mem::take(&mut found.left).into_values().flatten();
        let left = left.map(|line| line + "\n");
        let left: String = left.collect();
        if !left.is_empty() {
            let path = dir.join(LEFT_OUT);
            let file = OpenOptions::new().create(true).append(true).open(&path);
            file.and_then(|mut file| file.write_all(left.as_bytes()))
                .map_err(|error| cannot(&path, &error))?;
        }
        Self::write(dir, session, found)
    }

    /// The file with what was found and the new session replaces the one that there was at once:
    /// whenever this process is killed, the directory has one of the two.
    fn write(dir: &Path, session: &Session, found: Found) -> Result<Self> {
        let (path, new) = (dir.join(ROWS), dir.join("rows.jsonl.new"));
        let Found { rows, lines, busy, .. } = found;
        let begun = std::iter::once(output::object(COMMAND, session));
        let text: String = lines.into_iter().chain(begun).map(|line| line + "\n").collect();
        let file = File::create(&new).and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&new, &path)?;
            Ok(file)
        });
        let file = file.map_err(|error| {
            let _ = fs::remove_file(&new);
            cannot(&path, &error)
        })?;
        Ok(Self { file, path, load: session.load, rows, busy })
    }

    /// Adds a row, which is in the file when this returns. Error: it cannot be written.
    pub(super) fn add(&mut self, row: Row) -> Result {
        let line = output::object(COMMAND, &row) + "\n";
        let written = self.file.write_all(line.as_bytes()).and_then(|()| self.file.sync_data());
        written.map_err(|error| cannot(&self.path, &error))?;
        self.rows.push(row);
        self.busy += usize::from(self.load == Load::Busy);
        Ok(())
    }

    /// Whether a row is there.
    pub(super) fn has(&self, key: &Key) -> bool {
        self.rows.iter().any(|row| row.key == *key)
    }
}

impl Found {
    /// Reads the lines of a directory. Error: it has no study.
    pub(super) fn read(dir: &Path) -> Result<String> {
        let path = dir.join(ROWS);
        fs::read_to_string(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                let dir = dir.display();
                let why = format!("{dir} has no study: --report {dir} begins one there");
                Failure::Failed(why)
            }
            _ => cannot(&path, &error),
        })
    }

    /// The rows of `text` that can be compared with those of a session, which `now` makes of the
    /// choice and the place of the file.
    pub(super) fn of(text: &str, now: impl FnOnce(Option<Choice>, Vec<String>) -> Session) -> Self {
        let mut found = Self::default();
        let mut lines: Vec<&str> = text.split_inclusive('\n').collect();
        if let Some(last) = lines.pop_if(|line| !line.ends_with('\n')) {
            found.leave("a line that was cut".into(), last);
        }
        let parsed: Vec<(&str, Option<Line>)> =
            lines.into_iter().map(|line| (line.trim_end(), Line::of(line))).collect();
        for session in parsed.iter().filter_map(|(_, line)| match line {
            Some(Line::Session(session)) => Some(session),
            _ => None,
        }) {
            (found.choice, found.place) = (Some(session.choice.clone()), session.place.clone());
        }
        let now = now(found.choice.clone(), found.place.clone());
        let (mut session, mut begun, mut keys) = (None, None, BTreeSet::new());
        for (text, line) in parsed {
            match line {
                Some(Line::Session(of)) => (session, begun) = (Some(of), Some(text)),
                Some(Line::Other(version)) => found.leave(format!("of version {version}"), text),
                Some(Line::Row(row)) => match session.as_ref().and_then(|of| of.differs(&now)) {
                    _ if session.is_none() => found.leave("without a session".into(), text),
                    Some(why) => found.leave(why, text),
                    // It is measured again.
                    None if row.missing.is_some() => {}
                    None if !keys.insert(row.key.clone()) => {
                        found.leave("there twice".into(), text);
                    }
                    None => {
                        let is_busy = session.as_ref().is_some_and(|of| of.load == Load::Busy);
                        found.busy += usize::from(is_busy);
                        found
                            .lines
                            .extend(begun.take().into_iter().chain([text]).map(str::to_owned));
                        found.rows.push(row);
                    }
                },
                None => found.leave("no row".into(), text),
            }
        }
        found
    }

    fn leave(&mut self, why: String, line: &str) {
        self.left.entry(why).or_default().push(line.trim_end().to_owned());
    }

    /// Which lines are taken and which are not.
    pub(super) fn told(&self) -> String {
        let left = self.left.iter().map(|(why, lines)| format!("{} {why}", lines.len()));
        let left: Vec<String> = left.collect();
        let beside = match self.busy {
            0 => String::new(),
            count => format!(", {count} of them measured beside other programs"),
        };
        let taken = format!("{} rows are taken{beside}", self.rows.len());
        if left.is_empty() {
            return taken;
        }
        format!("{taken}; not taken, and now in {LEFT_OUT}: {}", left.join(", "))
    }
}

impl Session {
    /// Why rows of this session cannot stand beside those of another.
    fn differs(&self, other: &Self) -> Option<String> {
        if self.machine != other.machine {
            return Some(format!("of another machine ({})", self.machine));
        }
        let settings = |of: &Self| (of.choice.quick, of.choice.patient, of.place.clone());
        (settings(self) != settings(other))
            .then(|| "of other settings (--quick, --patient, addresses, devices)".into())
    }
}

enum Line {
    Session(Session),
    Row(Row),
    /// A line of another version.
    Other(String),
}

impl Line {
    fn of(text: &str) -> Option<Self> {
        let value: Value = serde_json::from_str(text).ok()?;
        if value["command"] != COMMAND {
            return None;
        }
        let version = value["version"].as_str()?;
        if version != env!("CARGO_PKG_VERSION") || value["schema"] != output::SCHEMA {
            return Some(Self::Other(version.to_owned()));
        }
        if value.get("machine").is_some() {
            return serde_json::from_value(value).ok().map(Self::Session);
        }
        let row: Row = serde_json::from_value(value).ok()?;
        (row.figures.is_empty() == row.missing.is_some()).then_some(Self::Row(row))
    }
}

fn cannot(path: &Path, error: &io::Error) -> Failure {
    let advice = match error.kind() {
        io::ErrorKind::StorageFull => ": make room, and go on with --resume",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            ": choose a directory that you may write"
        }
        _ => "",
    };
    Failure::Failed(format!("{}: {error}{advice}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    fn session() -> Session {
        let machine = Machine { cpu: "a CPU".into(), cpus: 2, kernel: "6.18".into() };
        Session { machine, load: Load::Quiet, choice: Choice::default(), place: Vec::new() }
    }

    fn row(x: u64) -> Row {
        let key = Key { experiment: "size".into(), mode: "udp".into(), x, round: 1 };
        Row { key, figures: BTreeMap::from([("write_gbps".into(), 1.5)]), missing: None }
    }

    fn text(session: &Session, rows: &[Row]) -> String {
        let rows = rows.iter().map(|row| output::object(COMMAND, row) + "\n");
        output::object(COMMAND, session) + "\n" + &rows.collect::<String>()
    }

    fn found(text: &str) -> Found {
        Found::of(text, |choice, place| Session {
            choice: choice.unwrap_or_default(),
            place,
            ..session()
        })
    }

    #[test]
    fn rows_are_in_the_file_when_they_are_added_and_are_taken_again() {
        let dir = TempDir::new().unwrap();
        let dir = dir.path();
        let mut store = Store::create(dir, &session()).unwrap();
        for x in [2, 4] {
            store.add(row(x)).unwrap();
            let read = found(&Found::read(dir).unwrap());
            assert_eq!(read.rows.last(), Some(&row(x)));
        }
        assert!(store.has(&row(4).key) && !store.has(&row(8).key));
        let again = Store::create(dir, &session()).unwrap_err().to_string();
        assert!(again.contains("has a study already: --resume"), "{again}");
        let read = found(&Found::read(dir).unwrap());
        assert_eq!(read.told(), "2 rows are taken");
        let store = Store::resume(dir, &session(), read).unwrap();
        assert_eq!(store.rows, [row(2), row(4)]);
        assert!(!dir.join(LEFT_OUT).exists());
    }

    #[test]
    fn only_rows_of_the_same_circumstances_are_taken() {
        let mine = text(&session(), &[row(1), row(2)]);
        let other = |change: fn(&mut Session)| {
            let mut session = session();
            change(&mut session);
            text(&session, &[row(7)])
        };
        for (before, why) in [
            (other(|of| of.machine.kernel = "6.1".into()), "1 of another machine (a CPU"),
            (other(|of| of.choice.quick = true), "1 of other settings"),
            (other(|of| of.place = vec!["mlx5_0".into()]), "1 of other settings"),
            (mine.replace(env!("CARGO_PKG_VERSION"), "0.0.7"), "3 of version 0.0.7"),
            ("{}\nhello\n[1]\n".into(), "3 no row"),
            (text(&session(), &[row(2)]), "1 there twice"),
        ] {
            let found = found(&(before + &mine));
            let told = found.told();
            let mut rows = found.rows;
            rows.sort_by_key(|row| row.key.x);
            assert_eq!(rows, [row(1), row(2)], "{told}");
            assert!(told.contains(why), "{told}");
        }
    }

    /// Other programs come and go in the hours of a study.
    #[test]
    fn rows_of_another_load_are_taken_and_keep_it() {
        let dir = TempDir::new().unwrap();
        let dir = dir.path();
        let mut busy = session();
        busy.load = Load::Busy;
        let mut store = Store::create(dir, &session()).unwrap();
        store.add(row(1)).unwrap();
        for (nth, session) in [&busy, &busy, &session()].into_iter().enumerate() {
            let read = found(&Found::read(dir).unwrap());
            let beside = ["", ", 1 of them measured beside", ", 2 of them measured beside"][nth];
            let told = format!("{} rows are taken{beside}", nth + 1);
            assert!(read.told().starts_with(&told), "{}", read.told());
            let mut store = Store::resume(dir, session, read).unwrap();
            store.add(row(2 + nth as u64)).unwrap();
            assert_eq!((store.rows.len(), store.busy), (2 + nth, (1 + nth).min(2)));
        }
        let loads = Found::read(dir).unwrap();
        let loads = loads.lines().map(|line| match Line::of(line) {
            Some(Line::Session(of)) => Some(of.load),
            _ => None,
        });
        let [quiet, busy] = [Load::Quiet, Load::Busy].map(Some);
        assert!(loads.eq([quiet, None, busy, None, busy, None, quiet, None]));
        assert!(!dir.join(LEFT_OUT).exists());
    }

    #[test]
    fn a_cut_line_is_dropped_and_kept_apart() {
        let whole = text(&session(), &[row(1), row(2)]);
        for cut in 1..whole.len() {
            let found = found(&whole[..cut]);
            assert!(found.rows.len() < 2, "cut at {cut}");
            let is_cut = !whole[..cut].ends_with('\n');
            assert_eq!(found.told().contains("1 a line that was cut"), is_cut, "cut at {cut}");
        }
        let dir = TempDir::new().unwrap();
        let dir = dir.path();
        let found = found(&whole[..whole.len() - 9]);
        let store = Store::resume(dir, &session(), found).unwrap();
        assert_eq!(store.rows, [row(1)]);
        let left = fs::read_to_string(dir.join(LEFT_OUT)).unwrap();
        assert!(whole.contains(left.trim_end()) && left.contains("\"x\":2"), "{left}");
    }

    #[test]
    fn what_failed_is_measured_again() {
        let failed = Row { figures: BTreeMap::new(), missing: Some("it died".into()), ..row(3) };
        let read = found(&text(&session(), &[row(1), failed]));
        assert_eq!((read.rows, read.left.len()), (vec![row(1)], 0));
        let both = Row { missing: Some("it died".into()), ..row(3) };
        let read = found(&text(&session(), &[both]));
        assert_eq!(
            read.told(),
            format!("0 rows are taken; not taken, and now in {LEFT_OUT}: 1 no row")
        );
    }

    #[test]
    fn a_full_disk_and_strange_directories_are_told() {
        let dir = TempDir::new().unwrap();
        let dir = dir.path();
        let none = Found::read(dir).unwrap_err().to_string();
        assert!(none.contains("has no study: --report"), "{none}");
        let path = PathBuf::from("/dev/full");
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        let mut store = Store { file, path, load: Load::Quiet, rows: Vec::new(), busy: 0 };
        let full = store.add(row(1)).unwrap_err().to_string();
        assert!(full.contains("/dev/full") && full.contains("make room"), "{full}");
        assert!(store.rows.is_empty());
        fs::write(dir.join("letter.txt"), "dear").unwrap();
        let theirs = Store::create(dir, &session()).unwrap_err().to_string();
        assert!(theirs.contains("files of others"), "{theirs}");
        let below = Store::create(&dir.join("letter.txt"), &session()).unwrap_err().to_string();
        assert!(below.contains("letter.txt"), "{below}");
    }
}
