//! `rocinante decode` from end to end: captures of another implementation, and files of each kind
//! made here.

#[path = "../common/schema.rs"]
mod schema;

mod captures;
mod files;
mod follow;
mod hostile;
mod links;
mod live;
mod made;
mod rewrite;
mod runs;

use std::ffi::OsStr;
use std::io::Write;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::{NamedTempFile, TempPath};

/// The result of the command.
struct Done {
    status: i32,
    out: String,
    err: String,
}

impl Done {
    /// The last line of standard output.
    fn json(&self) -> Value {
        let line = self.out.lines().last().unwrap_or_else(|| panic!("no output: {}", self.err));
        serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))
    }

    /// The lines about packets: not the counts, and not the errors.
    fn lines(&self) -> Vec<&str> {
        let text = if self.out.starts_with('{') { &self.err } else { &self.out };
        text.lines().filter(|line| line.contains(" → ")).collect()
    }
}

fn decode(args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Done {
    done(command().args(args).output().unwrap())
}

/// The result of the command. Its JSON must be as documented.
fn done(output: Output) -> Done {
    let out = String::from_utf8(output.stdout).unwrap();
    for line in out.lines().filter(|line| line.starts_with('{')) {
        schema::check(&serde_json::from_str(line).unwrap());
    }
    Done {
        status: output.status.code().expect("an exit status"),
        out,
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rocinante-under-test"));
    command.arg("decode");
    command
}

/// Runs the command over bytes on its standard input.
fn decode_bytes(bytes: &[u8], args: &[&str]) -> Done {
    let mut command = command();
    command.arg("-").args(args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let bytes = bytes.to_vec();
    // The command may end before it has read everything; that does not fail the test.
    let writer = std::thread::spawn(move || drop(stdin.write_all(&bytes)));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    done(output)
}

/// A file that is removed when it is dropped.
fn temporary(bytes: &[u8]) -> TempPath {
    let file = NamedTempFile::new().unwrap();
    file.as_file().write_all(bytes).unwrap();
    file.into_temp_path()
}
