//! The Rust toolchain that runs this program, and others by their versions.

use crate::command::{self, cargo, words};
use std::path::PathBuf;
use std::process::Command;

/// A Rust toolchain.
pub(crate) struct Toolchain {
    /// Its name at rustup; without one it is the toolchain that runs this program.
    pub(crate) name: Option<&'static str>,
}

/// Fetches a toolchain with its `parts`, which are options of rustup.
pub(crate) fn install(name: &str, parts: &str) -> Command {
    println!("set-up: rustup toolchain install {name}");
    let minimal = "--no-self-update --profile minimal";
    words(&format!("timeout 300 rustup toolchain install {name} {minimal} {parts}"))
}

impl Toolchain {
    /// The toolchain of this version: the running one, one that rustup has, or one that it
    /// fetches. It compiles for `targets`, too.
    pub(crate) fn of(version: &'static str, targets: &[&str]) -> Result<Self, String> {
        let running = Self { name: None };
        if running.is(version) {
            // `setup::toolchain` gave it all targets.
            return Ok(running);
        }
        let other = Self { name: Some(version) };
        if !other.has(targets) {
            let targets = targets.iter().flat_map(|target| ["--target", *target]);
            command::read(install(version, "").args(targets))?;
        }
        Ok(other)
    }

    /// `cargo ARGS` of it.
    pub(crate) fn cargo(&self, args: &str) -> Command {
        if self.is_running() { cargo(args) } else { self.run(&format!("cargo {args}")) }
    }

    /// Whether it is the one that runs this program.
    pub(crate) fn is_running(&self) -> bool {
        self.name.is_none()
    }

    /// Whether it compiles for these targets.
    pub(crate) fn has(&self, targets: &[&str]) -> bool {
        let libraries = self.sysroot().map(|sysroot| sysroot.join("lib/rustlib"));
        libraries.is_ok_and(|folder| targets.iter().all(|target| folder.join(target).is_dir()))
    }

    /// The folder of its programs and libraries.
    pub(crate) fn sysroot(&self) -> Result<PathBuf, String> {
        let sysroot = command::read(&mut self.run("rustc --print sysroot"))?;
        Ok(PathBuf::from(sysroot.trim()))
    }

    fn is(&self, version: &str) -> bool {
        command::read(&mut self.run("rustc --version"))
            .is_ok_and(|says| says.split(' ').nth(1) == Some(version))
    }

    fn run(&self, line: &str) -> Command {
        let Some(name) = self.name else { return words(line) };
        let mut command = words(&format!("rustup run {name} {line}"));
        // Cargo names its own toolchain and compiler to its children.
        command.env_remove("RUSTC").env_remove("RUSTDOC").env_remove("CARGO");
        command
    }
}
