//! `capi`'s library where an ordinary user finds it, and the programs of `data/capi` that get it.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rocinante_lab::Container;
use tempfile::TempDir;

use crate::running::{Done, Running, open_to_all};

/// The user `nobody`.
pub const NOBODY: u32 = 65534;

/// A folder with the library under its name, where every user can read it.
#[derive(Debug)]
pub struct Library(TempDir);

impl Library {
    /// Makes the folder, which goes with the value. Panics if the file system refuses, or the
    /// library was not built.
    #[allow(clippy::new_without_default, reason = "it makes a folder")]
    #[must_use]
    pub fn new() -> Self {
        let folder = open_to_all();
        // Cargo builds it beside this program.
        let built = std::env::current_exe().unwrap().with_file_name("librocinante_ibverbs.so");
        let copy = folder.path().join("libibverbs.so.1");
        fs::copy(built, &copy).unwrap();
        fs::set_permissions(&copy, fs::Permissions::from_mode(0o755)).unwrap();
        Self(folder)
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// A program that gets the library, as the user `nobody`, without capabilities.
    pub fn command(&self, line: &str) -> Command {
        let mut words = line.split_whitespace();
        let mut command = Command::new(words.next().unwrap());
        command
            .args(words)
            .uid(NOBODY)
            .gid(NOBODY)
            .current_dir("/")
            .env("LD_PRELOAD", self.path().join("libibverbs.so.1"))
            .env("LD_LIBRARY_PATH", self.path())
            .env("ROCINANTE_NETDEV", "udp")
            .env("ROCINANTE_LOG", "warn")
            .stdin(Stdio::null());
        command
    }

    /// The library that `rocinante run` preloads besides.
    pub fn copy_of_paths(&self) -> PathBuf {
        let built = std::env::current_exe().unwrap().with_file_name("librocinante_paths.so");
        let copy = self.path().join("librocinante_paths.so");
        fs::copy(built, &copy).unwrap();
        fs::set_permissions(&copy, fs::Permissions::from_mode(0o755)).unwrap();
        copy
    }

    /// The command line of a script beside the library.
    pub fn script(&self, name: &str) -> String {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/capi");
        for file in [name, "verbs.py"] {
            fs::copy(from.join(file), self.path().join(file)).unwrap();
        }
        format!("/usr/bin/python3 -B {}", self.path().join(name).display())
    }

    /// Compiles a C program with the system's headers and libraries.
    pub fn compiled(&self, name: &str, libraries: &[&str]) -> String {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/capi").join(name);
        let program = self.path().join(name).with_extension("");
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-Wall", "-Werror"]).arg(source).arg("-o").arg(&program).args(libraries);
        assert!(cc.status().unwrap().success(), "{cc:?}");
        program.display().to_string()
    }

    /// Starts a program of [`command`](Self::command) in a container.
    pub fn start(&self, at: &Container, line: &str) -> Running {
        let mut command = self.command(line);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Running::of(at.spawn(&mut command).unwrap())
    }

    /// Runs one to its end.
    pub fn run(&self, at: &Container, line: &str) -> Done {
        self.start(at, line).finish()
    }
}

/// librdmacm's own headers, which its programs are compiled with. Error: there are none.
pub fn librdmacm() -> Result<(), String> {
    let is_there = Path::new("/usr/include/rdma/rdma_cma.h").exists();
    is_there.then_some(()).ok_or_else(|| "no librdmacm: apt install librdmacm-dev".into())
}
