//! Processes of this program in containers. Each gets orders on its standard input, one JSON object
//! per line, and writes one answer per line to its standard output.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Write};
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::{ChildStdin, Command, ExitCode, Stdio};

use rocinante::{Context, OpenOptions, VerbsError};
use rocinante_lab::{ChildGuard, exit_with_parent};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// This program with these arguments, and with pipes for orders and answers.
pub(crate) fn command<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(own_path());
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}

/// Hands each line that a process writes to `take`, and `None` at their end, until that returns
/// false. Returns where orders go.
pub(crate) fn listen(
    child: &mut ChildGuard,
    mut take: impl FnMut(Option<String>) -> bool + Send + 'static,
) -> ChildStdin {
    let stdout = child.child_mut().stdout.take().expect("a pipe was asked for");
    std::thread::spawn(move || {
        let lines = BufReader::new(stdout).lines().map_while(Result::ok);
        lines.map(Some).chain([None]).all(&mut take)
    });
    child.child_mut().stdin.take().expect("a pipe was asked for")
}

/// Gives an order. If the process has ended, its missing answer shows that.
pub(crate) fn give(to: &mut ChildStdin, order: &impl Serialize) -> Result<(), String> {
    let line = serde_json::to_string(order).map_err(|error| error.to_string())?;
    let _ = writeln!(to, "{line}");
    Ok(())
}

/// In the container: runs the process `name` until standard input ends.
pub(crate) fn run(name: &str, work: impl FnOnce() -> io::Result<()>) -> ExitCode {
    exit_with_parent();
    match work() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rocinante {name}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// In the container: answers each order. `failed` makes an answer of an error.
pub(crate) fn obey_all<O: DeserializeOwned, A: Serialize>(
    mut obey: impl FnMut(&O) -> Result<A, String>,
    failed: impl Fn(String) -> A,
) -> io::Result<()> {
    for line in io::stdin().lock().lines() {
        let order = serde_json::from_str(&line?).map_err(|error| error.to_string());
        let answer = order.and_then(|order| obey(&order)).unwrap_or_else(&failed);
        let mut out = io::stdout().lock();
        writeln!(out, "{}", serde_json::to_string(&answer)?)?;
        out.flush()?;
    }
    Ok(())
}

/// In the container: opens the device. The inner error says why the backend is not to be had here.
pub(crate) fn open(netdev: &str, address: IpAddr) -> Result<Result<Context, String>, String> {
    match OpenOptions::new().netdev(netdev.parse()?).open(address) {
        Ok(ctx) => Ok(Ok(ctx)),
        Err(error @ VerbsError::Open(_)) => Ok(Err(error.to_string())),
        Err(error) => Err(error.to_string()),
    }
}

/// The path of this program, even if its file was replaced meanwhile. `ROCINANTE_PROGRAM` names it
/// to a program that only uses this library.
fn own_path() -> PathBuf {
    if let Some(path) = std::env::var_os("ROCINANTE_PROGRAM") {
        return path.into();
    }
    match std::env::current_exe() {
        Ok(path) if path.exists() => path,
        _ => "/proc/self/exe".into(),
    }
}
