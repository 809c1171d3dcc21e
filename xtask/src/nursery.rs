//! A copy of the workspace for changes that a test must notice.

use std::fs;
use std::path::PathBuf;
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

    /// Updates the copy by git, with an index of its own: git leaves unchanged files alone, so that
    /// they are not built again, and removes those that are gone.
    pub(crate) fn copy(&self) -> Result<(), String> {
        fs::create_dir_all(&self.tree).map_err(said(&self.tree))?;
        let (now, copied) = (self.build.with_extension("now"), self.build.with_extension("copied"));
        // The files that git knows, as they are now.
        let known = command::read(&mut words("git rev-parse --git-path index"))?;
        files::copy(known.trim(), &now)?;
        command::read(words("git add --update").env("GIT_INDEX_FILE", &now))?;
        let now = command::read(words("git write-tree").env("GIT_INDEX_FILE", &now))?;
        let mut update = words("git read-tree --reset -u");
        update.env("GIT_INDEX_FILE", &copied).env("GIT_WORK_TREE", &self.tree);
        command::read(update.arg(now.trim())).map(drop)
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
