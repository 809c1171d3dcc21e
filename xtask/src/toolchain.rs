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
    /// fetches.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn of(version: &'static str) -> Result<Self, String> {
        let running = Self { name: None };
        if running.is(version) {
            return Ok(running);
        }
        let other = Self { name: Some(version) };
        if !other.is(version) {
            println!("set-up: rustup toolchain install {version}");
            let mut install = Command::new("timeout");
            install.args(["300", "rustup", "toolchain", "install", version, "--no-self-update"]);
            command::read(install.args(["--profile", "minimal"]))?;
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
        let sysroot = command::read(&mut self.run("rustc", &["--print", "sysroot"]))?;
        Ok(PathBuf::from(sysroot.trim()).join("bin/rustdoc"))
    }

    /// Whether it is the one that runs this program.
    pub(crate) fn is_running(&self) -> bool {
        self.name.is_none()
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
                // Cargo names its own toolchain and compiler to what it runs.
                command.env_remove("RUSTC").env_remove("RUSTDOC").env_remove("CARGO");
                command.args(["run", name, program]);
            }
        }
        command.args(args);
        command
    }
}
