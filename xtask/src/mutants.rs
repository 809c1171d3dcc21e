//! `cargo xtask mutants`: which changes of the engine its tests notice, by cargo-mutants.
//!
//! Thirty test programs to link would cost more than all else, for each of four thousand mutants. So the engine is copied, with its tests and
//! those of the wire (`tests/tests/wire_*.rs`) as modules of one test program, and mutated there: about a second each. Most tests take
//! no time, a few take most of it: those are only asked for what the others did not notice.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command::{self, cargo};

/// Tests that take long; parts of their names.
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
/// How long the quick tests, and all of them, may take on a busy machine, seconds. Mutants that never end cost as much.
const PATIENCE_S: [u32; 2] = [30, 400];
/// Those of the wire that need no other crate of ours, and what they stand on.
const WIRE_TESTS: [&str; 4] = ["wire_captures", "wire_cm", "wire_hostile", "wire_opcodes"];
const WIRE_SUPPORT: [&str; 2] = ["captures", "snapshot"];
/// A test that would start another program for each mutant ends instead.
const NO_PROGRAMS: &str = "\
#[cfg(test)]
macro_rules! require_program { ($program:expr) => { if true { return } } }
#[cfg(test)]
pub(crate) use require_program;
#[cfg(test)]
mod tshark { pub(crate) fn number(_: &str) -> Option<u64> { None } }
";
/// What no mutant has: memory in KiB. Some would ask for all there is.
const MEMORY_MAX_KIB: u32 = 8 << 20;

const MANIFESTS: [(&str, &str); 3] = [
    (
        "Cargo.toml",
        "[workspace]\nresolver = \"3\"\nmembers = [\"stack\"]\n\n\
         [profile.dev]\ndebug = false\n\n[profile.dev.package.\"*\"]\nopt-level = 2\n",
    ),
    (
        "crc/Cargo.toml",
        "[package]\nname = \"rocinante-crc\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n\
         [dependencies]\ncrc32fast = \"*\"\n",
    ),
    (
        "stack/Cargo.toml",
        "[package]\nname = \"rocinante-stack\"\nversion = \"0.1.0\"\nedition = \"2024\"\nautotests = false\n\n\
         [dependencies]\ncrc32fast = \"*\"\nrocinante-crc = { path = \"../crc\" }\n\n\
         [dev-dependencies]\netherparse = \"*\"\npcap-file = \"*\"\n\
         proptest = { version = \"*\", default-features = false, features = [\"std\"] }\n",
    ),
];

/// What became of a mutant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fate {
    Caught,
    Missed,
    Timeout,
    Unviable,
}

impl Fate {
    const ALL: [Self; 4] = [Self::Caught, Self::Missed, Self::Timeout, Self::Unviable];

    /// Where cargo-mutants lists them.
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

/// `cargo xtask mutants [SHARD/OF] [ARGS of cargo-mutants]`.
///
/// # Errors
/// cargo-mutants is missing or fails; not, that mutants survive.
pub(crate) fn run(args: &[&str]) -> Result<(), String> {
    command::read(&mut cargo(["mutants", "--version"])).map_err(|_| {
        "cargo-mutants is not installed: cargo install --locked cargo-mutants".to_owned()
    })?;
    let home = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    let home =
        std::path::absolute(Path::new(&home).join("mutants")).map_err(|error| error.to_string())?;
    let tree = home.join("tree");
    plant(&tree).map_err(|error| error.to_string())?;
    let wanted = match args.split_first() {
        Some((shard, rest)) if shard.contains('/') && !shard.starts_with('-') => {
            [&["--sharding", "round-robin", "--shard", shard], rest].concat()
        }
        _ => args.to_vec(),
    };
    let quick: Vec<&str> = SLOW.iter().flat_map(|name| ["--skip", *name]).collect();
    let mut fates = pass(&home, "quick", &wanted, PATIENCE_S[0], &quick)?;
    let left: Vec<String> = fates
        .iter()
        .filter(|(_, fate)| matches!(fate, Fate::Missed | Fate::Timeout))
        .map(|(name, _)| format!("--re=^{}$", escaped(name)))
        .collect();
    if !left.is_empty() {
        let left: Vec<&str> = left.iter().map(String::as_str).collect();
        fates.extend(pass(&home, "all", &left, PATIENCE_S[1], &[])?);
    }
    print!("{}", report(&fates));
    Ok(())
}

/// Lets cargo-mutants try the mutants that `wanted` names.
fn pass(
    home: &Path,
    name: &str,
    wanted: &[&str],
    patience_s: u32,
    tests: &[&str],
) -> Result<Fates, String> {
    let out = home.join(name);
    fs::create_dir_all(&out).map_err(|error| error.to_string())?;
    let limited = format!("ulimit -v {MEMORY_MAX_KIB}; exec \"$@\"");
    let mut command = Command::new("sh");
    command.args(["-c", &limited, "sh"]).arg(cargo::<&str>([]).get_program());
    command.args(["mutants", "--in-place", "--no-shuffle", "--colors", "never", "-d"]);
    command.arg(home.join("tree")).arg("-o").arg(&out);
    command.args(["--build-timeout", "120", "--timeout", &patience_s.to_string()]).args(wanted);
    // To end with the first failure is an option of the test program that is not stable, but works with the stable one.
    command.args(["--", "--lib", "--", "-Zunstable-options", "--fail-fast"]).args(tests);
    command.env("RUSTC_BOOTSTRAP", "1").env("CARGO_TARGET_DIR", home.join("build"));
    let status = command.status().map_err(|error| error.to_string())?;
    // 2 and 3: some survived, or did not end.
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

/// Makes the copy that is mutated: it says the same, in one crate.
fn plant(tree: &Path) -> io::Result<()> {
    if tree.exists() {
        fs::remove_dir_all(tree)?;
    }
    for folder in ["crc/src", "stack/src", "stack/tests", "tests/data"] {
        let to = if folder == "tests/data" { "stack/data" } else { folder };
        copy(Path::new(folder), &tree.join(to), &|text| text)?;
    }
    fs::create_dir_all(tree.join(".cargo"))?;
    for file in ["Cargo.lock", ".cargo/mutants.toml"] {
        fs::copy(file, tree.join(file))?;
    }
    for (file, text) in MANIFESTS {
        fs::write(tree.join(file), text)?;
    }
    let mut modules = vec!["extern crate self as rocinante_stack;".to_owned()];
    let mut module = |path: &Path, name: &str| {
        modules.push(format!("#[path = {path:?}]\nmod {name};"));
    };
    let tests = tree.join("stack/tests");
    module(&tests.join("common/mod.rs"), "common");
    let scripts = tests.join("rocinante_scripts");
    copy(Path::new("scripts/src"), &scripts, &|text| {
        text.replace("$crate::", "$crate::rocinante_scripts::")
            .replace(" crate::", " crate::rocinante_scripts::")
    })?;
    module(&scripts.join("lib.rs"), "rocinante_scripts");
    copy(Path::new("stack/tests/common"), &tests.join("common"), &|text| of_scripts(&text))?;
    module(&tests.join("cm/main.rs"), "cm_tests");
    copy(Path::new("stack/tests/cm"), &tests.join("cm"), &|text| {
        text.replace("crate::", "crate::cm_tests::")
    })?;
    for file in files(Path::new("stack/tests"))? {
        let to = tests.join(file.file_name().unwrap_or_default());
        if to.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&file)?;
            let text = text.replace("\nmod common;\n", "\nuse crate::common;\n");
            fs::write(&to, of_scripts(&text))?;
            module(&to, &format!("{}_tests", stem(&to)));
        }
    }
    let support = WIRE_SUPPORT.map(|name| format!("tests/src/{name}.rs"));
    for file in support.into_iter().chain(WIRE_TESTS.map(|name| format!("tests/tests/{name}.rs"))) {
        let to = tests.join(Path::new(&file).file_name().unwrap_or_default());
        fs::write(&to, fs::read_to_string(&file)?.replace("rocinante_tests::", "crate::"))?;
        module(&to, &stem(&to));
    }
    let root = tree.join("stack/src/lib.rs");
    // The engine has no unsafe code, but a test that counts allocations has.
    let engine = fs::read_to_string(&root)?.replace("#![forbid(unsafe_code)]", "");
    let modules = modules.iter().map(|module| format!("#[cfg(test)]\n{module}\n"));
    fs::write(root, engine + &modules.collect::<String>() + NO_PROGRAMS)
}

/// What names the crate of the scripts names the module that it is here.
fn of_scripts(text: &str) -> String {
    text.replace("rocinante_scripts::each_script!", "crate::each_script!")
        .replace("rocinante_scripts::", "crate::rocinante_scripts::")
}

fn copy(from: &Path, to: &Path, change: &dyn Fn(String) -> String) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target, change)?;
        } else if let Ok(text) = fs::read_to_string(entry.path()) {
            fs::write(target, change(text))?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder)?.collect::<io::Result<Vec<_>>>()?;
    let mut files: Vec<_> = entries.iter().map(fs::DirEntry::path).collect();
    files.retain(|path| path.is_file());
    files.sort();
    Ok(files)
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// A name as a regular expression for nothing else.
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

/// The part of the engine that a mutant is in: a folder of it or a file.
fn part(name: &str) -> &str {
    let path = name.trim_start_matches("stack/src/");
    path.split(['/', '.']).next().unwrap_or(path)
}

/// Counts by part of the engine, and who survived: as docs/proof.md has it.
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
        // Whoever hangs is noticed.
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
            mutant("stack/src/rc/plan.rs:1:2: replace a with b", Fate::Caught),
            mutant("stack/src/rc/plan.rs:2:2: replace a with b", Fate::Missed),
            mutant("stack/src/rc/rtt.rs:1:2: delete !", Fate::Timeout),
            mutant("stack/src/any.rs:1:2: delete !", Fate::Unviable),
        ]);
        let report = report(&fates);
        assert!(report.contains("\n| rc | 1 | 1 | 1 | 0 | 66.7 % |\n"), "{report}");
        assert!(report.contains("\n| any | 0 | 0 | 0 | 1 | 0.0 % |\n"), "{report}");
        assert!(report.contains("\n| all | 1 | 1 | 1 | 1 | 66.7 % |\n"), "{report}");
        assert!(report.ends_with("\n- `stack/src/rc/plan.rs:2:2: replace a with b`\n"), "{report}");
    }

    #[test]
    fn a_name_stands_for_itself() {
        assert_eq!(escaped("a.rs:1: f -> (u8) [+]"), r"a\.rs:1: f -> \(u8\) \[\+\]");
    }
}
