//! Other Rust toolchains than the one that runs this program, by their versions.

use crate::command::{self, cargo};
use std::path::PathBuf;
use std::process::Command;

/// A Rust toolchain.
#[derive(Debug)]
pub(crate) struct Toolchain {
    /// Its name at rustup; without one it is the toolchain that runs this program.
    name: Option<&'static str>,
}

impl Toolchain {
    /// The toolchain of this version: the running one, one that rustup has, or one that it
    /// fetches. It compiles for `targets`, too.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn of(version: &'static str, targets: &[&str]) -> Result<Self, String> {
        let running = Self { name: None };
        if running.is(version) {
            // `setup::toolchain` gave it all targets.
            return Ok(running);
        }
        let other = Self { name: Some(version) };
        if !other.has(targets) {
            println!("set-up: rustup toolchain install {version}");
            let mut install = Command::new("timeout");
            install.args(["300", "rustup", "toolchain", "install", version, "--no-self-update"]);
            install.args(["--profile", "minimal"]);
            command::read(install.args(targets.iter().flat_map(|target| ["--target", *target])))?;
        }
        Ok(other)
    }

    /// `cargo ARGS` of it.
    pub(crate) fn cargo(&self, args: &[&str]) -> Command {
        match self.name {
            None => cargo(args),
            Some(_) => self.run("cargo", args),
        }
    }

    /// Its rustdoc.
    ///
    /// # Errors
    /// It has no rustc.
    pub(crate) fn rustdoc(&self) -> Result<PathBuf, String> {
        Ok(self.sysroot()?.join("bin/rustdoc"))
    }

    /// Whether it is the one that runs this program.
    pub(crate) fn is_running(&self) -> bool {
        self.name.is_none()
    }

    fn has(&self, targets: &[&str]) -> bool {
        let libraries = self.sysroot().map(|sysroot| sysroot.join("lib/rustlib"));
        libraries.is_ok_and(|folder| targets.iter().all(|target| folder.join(target).is_dir()))
    }

    fn sysroot(&self) -> Result<PathBuf, String> {
        let sysroot = command::read(&mut self.run("rustc", &["--print", "sysroot"]))?;
        Ok(PathBuf::from(sysroot.trim()))
    }

    fn is(&self, version: &str) -> bool {
        command::read(&mut self.run("rustc", &["--version"]))
            .is_ok_and(|says| says.split(' ').nth(1) == Some(version))
    }

    fn run(&self, program: &str, args: &[&str]) -> Command {
        let mut command;
        match self.name {
            None => command = Command::new(program),
            Some(name) => {
                command = Command::new("rustup");
                // Cargo names its own toolchain and compiler to its children.
                command.env_remove("RUSTC").env_remove("RUSTDOC").env_remove("CARGO");
                command.args(["run", name, program]);
            }
        }
        command.args(args);
        command
    }
}
