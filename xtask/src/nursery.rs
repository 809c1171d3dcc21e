//! A copy of the workspace for changes that a test must notice.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::command::{self, cargo, words};
use crate::demo;
use crate::files::{self, said};
use crate::programs::{self, Program};

/// How long a test may take to notice, in seconds.
const PATIENCE_S: u32 = 60;

/// The end of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    Passed,
    Failed,
    /// There is no test with that name.
    Unknown,
    /// It ran for longer than [`PATIENCE_S`].
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
        let home = demo::target()?.join(name);
        Ok(Self { tree: home.join("tree"), build: home.join("build") })
    }

    /// Updates the copy. Unchanged files are not written, so that they are not built again.
    pub(crate) fn copy(&self) -> Result<(), String> {
        let listed = command::read(&mut words("git ls-files -z"))?;
        let files: BTreeSet<&Path> =
            listed.split('\0').filter(|file| !file.is_empty()).map(Path::new).collect();
        for file in &files {
            let to = self.tree.join(file);
            let Ok(bytes) = fs::read(file) else { continue };
            if fs::read(&to).is_ok_and(|old| old == bytes) {
                continue;
            }
            files::write(to, bytes)?;
        }
        self.remove_others(&self.tree, &files).map_err(said(&self.tree))
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
        let good = files::read(&file)?;
        files::write(&file, plant(&good)?)?;
        let done = work();
        files::write(&file, good)?;
        Ok(done)
    }

    /// Builds the program of the tests that these arguments of `cargo test` select.
    pub(crate) fn build(&self, select: &str) -> Result<Program, String> {
        let mut build = cargo(&format!("test --no-run --message-format=json --quiet {select}"));
        build.current_dir(&self.tree).env("CARGO_TARGET_DIR", &self.build);
        // Each build runs one test: a fast build saves more time than a fast program.
        build.env("CARGO_PROFILE_DEV_OPT_LEVEL", "0").env("CARGO_PROFILE_DEV_DEBUG", "0");
        let program = command::read(&mut build)?.lines().find_map(programs::program);
        program.ok_or_else(|| format!("{}: nothing was built", command::describe(&build)))
    }

    /// Builds the program of `package` with optimisation; it stays as `name` beside the copy.
    pub(crate) fn release(&self, package: &str, name: &str) -> Result<PathBuf, String> {
        let mut build = cargo(&format!("build --release --quiet -p {package}"));
        build.current_dir(&self.tree).env("CARGO_TARGET_DIR", &self.build);
        command::read(&mut build)?;
        let (from, to) = (self.build.join("release").join(package), self.build.join(name));
        files::copy(from, &to)?;
        Ok(to)
    }
}

/// Runs one test of a program; returns how it ended and how long it ran.
pub(crate) fn try_test(program: &Program, test: &str) -> Result<(Ended, Duration), String> {
    let mut command = program.command(Some(&format!("timeout {PATIENCE_S}")));
    let begin = Instant::now();
    let output = command.args(["--exact", test]).stdin(Stdio::null()).output();
    let output = output.map_err(said(test))?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    let ended = match output.status.code() {
        // timeout(1).
        Some(124) => Ended::TooLate,
        _ if stdout.contains("test result: ok. 1 passed") => Ended::Passed,
        _ if stdout.contains("test result: ok. 0 passed") => Ended::Unknown,
        // A failure of the test, or an abort.
        _ => Ended::Failed,
    };
    Ok((ended, begin.elapsed()))
}
