//! A copy of the workspace for changes that a test must notice.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::command::{self, cargo};
use crate::demo;

/// The tests of one program.
pub(crate) struct Tests {
    /// Arguments of `cargo test` that select the program.
    pub(crate) select: &'static [&'static str],
    /// The folder of its package, in which cargo would run it.
    pub(crate) home: &'static str,
}

/// How long a test may take to notice.
const PATIENCE: Duration = Duration::from_secs(60);

/// The end of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    Passed,
    Failed,
    /// There is no test with that name.
    Unknown,
    /// It ran for longer than [`PATIENCE`].
    TooLate,
}

/// The copy of the workspace.
pub(crate) struct Nursery {
    tree: PathBuf,
    build: PathBuf,
}

impl Nursery {
    /// A copy below the build directory, in the folder `name`.
    pub(crate) fn new(name: &str) -> Result<Self, String> {
        let home = std::path::absolute(demo::target()?.join(name));
        let home = home.map_err(|error| error.to_string())?;
        Ok(Self { tree: home.join("tree"), build: home.join("build") })
    }

    /// Updates the copy. Unchanged files are not written, so that they are not built again.
    pub(crate) fn copy(&self) -> Result<(), String> {
        let listed = command::read(Command::new("git").args(["ls-files", "-z"]))?;
        let files: BTreeSet<&Path> =
            listed.split('\0').filter(|file| !file.is_empty()).map(Path::new).collect();
        for file in &files {
            let to = self.tree.join(file);
            let Ok(bytes) = fs::read(file) else { continue };
            if fs::read(&to).is_ok_and(|old| old == bytes) {
                continue;
            }
            fs::create_dir_all(to.parent().unwrap_or(&to)).map_err(|error| said(&to, &error))?;
            fs::write(&to, bytes).map_err(|error| said(&to, &error))?;
        }
        self.remove_others(&self.tree, &files).map_err(|error| said(&self.tree, &error))
    }

    /// Removes files that no longer exist: cargo would still build them, because it finds tests by
    /// their place.
    fn remove_others(&self, folder: &Path, files: &BTreeSet<&Path>) -> std::io::Result<()> {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                self.remove_others(&path, files)?;
            } else if path.strip_prefix(&self.tree).is_ok_and(|file| !files.contains(file)) {
                fs::remove_file(&path)?;
            }
        }
        Ok(())
    }

    /// Does `work` while `file` is as `plant` makes it.
    pub(crate) fn with<T>(
        &self,
        file: &str,
        plant: impl FnOnce(&str) -> Result<String, String>,
        work: impl FnOnce() -> T,
    ) -> Result<T, String> {
        let file = self.tree.join(file);
        let good = fs::read_to_string(&file).map_err(|error| said(&file, &error))?;
        fs::write(&file, plant(&good)?).map_err(|error| said(&file, &error))?;
        let done = work();
        fs::write(&file, good).map_err(|error| said(&file, &error))?;
        Ok(done)
    }

    /// Builds the program of these tests.
    pub(crate) fn build(&self, tests: &Tests) -> Result<Program, String> {
        let mut build = cargo(["test", "--no-run", "--message-format=json", "--quiet"]);
        build.args(tests.select).current_dir(&self.tree).env("CARGO_TARGET_DIR", &self.build);
        // Each build runs one test: a fast build saves more time than a fast program.
        build.env("CARGO_PROFILE_DEV_OPT_LEVEL", "0").env("CARGO_PROFILE_DEV_DEBUG", "0");
        let said = command::read(&mut build)?;
        let path = said
            .lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok())
            .filter(|said| said["profile"]["test"] == true)
            .find_map(|said| said["executable"].as_str().map(PathBuf::from))
            .ok_or_else(|| format!("{}: nothing was built", command::describe(&build)))?;
        Ok(Program { path, home: self.tree.join(tests.home) })
    }

    /// Builds the program of `package` with optimisation; it stays as `name` beside the copy.
    pub(crate) fn release(&self, package: &str, name: &str) -> Result<PathBuf, String> {
        let mut build = cargo(["build", "--release", "--quiet", "-p", package]);
        build.current_dir(&self.tree).env("CARGO_TARGET_DIR", &self.build);
        command::read(&mut build)?;
        let (from, to) = (self.build.join("release").join(package), self.build.join(name));
        fs::copy(&from, &to).map_err(|error| said(&from, &error))?;
        Ok(to)
    }
}

/// A program of tests.
pub(crate) struct Program {
    path: PathBuf,
    /// Where cargo would run it.
    home: PathBuf,
}

impl Program {
    /// Runs one test; returns how it ended and how long it ran.
    pub(crate) fn run(&self, test: &str) -> Result<(Ended, Duration), String> {
        let mut command = Command::new(&self.path);
        command.args(["--exact", test]).current_dir(&self.home);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let begin = Instant::now();
        let child = command.spawn().map_err(|error| said(test, &error))?;
        let ended = judge(child, begin).map_err(|error| said(test, &error))?;
        Ok((ended, begin.elapsed()))
    }
}

/// Waits for a test program.
fn judge(mut child: Child, begin: Instant) -> std::io::Result<Ended> {
    // The output is short, so the pipes do not fill up before the program ends.
    while child.try_wait()?.is_none() {
        if begin.elapsed() > PATIENCE {
            child.kill()?;
            child.wait()?;
            return Ok(Ended::TooLate);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output()?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    Ok(if stdout.contains("test result: ok. 1 passed") {
        Ended::Passed
    } else if stdout.contains("test result: ok. 0 passed") {
        Ended::Unknown
    } else {
        // A failure of the test, or an abort.
        Ended::Failed
    })
}

fn said(what: impl AsRef<Path>, error: &std::io::Error) -> String {
    format!("{}: {error}", what.as_ref().display())
}
