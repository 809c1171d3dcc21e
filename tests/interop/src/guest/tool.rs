//! Programs of the machine for making the guest's image.

use std::ffi::OsStr;
use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::error::{Error, Result};

/// A program that runs to its end.
pub(crate) struct Tool {
    command: Command,
    name: String,
}

impl Tool {
    pub(crate) fn new(program: &str) -> Self {
        let mut command = Command::new(program);
        command.env("LC_ALL", "C").stdin(Stdio::null());
        Self { command, name: program.to_owned() }
    }

    pub(crate) fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.command.arg(arg);
        self
    }

    pub(crate) fn args(mut self, args: &[&str]) -> Self {
        self.command.args(args);
        self
    }

    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    pub(crate) fn in_directory(mut self, path: &Path) -> Self {
        self.command.current_dir(path);
        self
    }

    /// With this file as its standard input.
    pub(crate) fn input(mut self, file: File) -> Self {
        self.command.stdin(file);
        self
    }

    /// Runs the program and returns its standard output. Error: it is not installed, or it failed:
    /// the text has its error output.
    pub(crate) fn read(self) -> Result<String> {
        self.bytes().map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    }

    /// As [`read`](Self::read), as bytes.
    pub(crate) fn bytes(mut self) -> Result<Vec<u8>> {
        let output = self.command.output().map_err(|error| match error.kind() {
            ErrorKind::NotFound => Error::new(missing(&self.name)),
            _ => Error::because(&self.name, error),
        })?;
        if output.status.success() {
            return Ok(output.stdout);
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let last: Vec<&str> = said.lines().rev().take(4).collect();
        let last: Vec<&str> = last.into_iter().rev().collect();
        Err(Error::new(format!("{} failed ({}): {}", self.name, output.status, last.join(" | "))))
    }
}

/// Advice for a missing program.
pub(crate) fn missing(program: &str) -> String {
    let package = match program {
        "qemu-system-x86_64" => "qemu-system-x86",
        "xz" => "xz-utils",
        "apt-get" | "apt-cache" | "dpkg-deb" => {
            return format!("{program} is not there: the guest is made of Debian packages");
        }
        other => other,
    };
    format!("{program} is not installed: apt install {package}")
}
