//! Runs `ip`, `nft`, `tc` and `ethtool` inside a namespace, and reads their JSON.

use crate::child::ChildGuard;
use crate::error::{LabError, Result};
use crate::netns::Netns;
use serde_json::Value;
use std::io::{self, Write};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Duration;

/// How long a program may take. On a machine that makes many namespaces at once the kernel lets one
/// wait for seconds.
const LIMIT: Duration = Duration::from_secs(30);

/// Feeds `script` to `nft -f -`. The whole script takes effect, or nothing.
pub(super) fn nft_script(netns: &Netns, script: &str) -> Result {
    let mut command = command("nft", &["-f", "-"]);
    let output = netns.run(|| fed(&mut command, script.as_bytes(), LIMIT))??;
    succeeded(&command, &output).map(drop)
}

/// Runs a command line, whose words have no spaces. Returns its standard output if it succeeded.
pub(super) fn run(netns: &Netns, line: &str) -> Result<String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    run_words(netns, &words)
}

/// The same with words of any kind. The first is the program.
pub(super) fn run_words(netns: &Netns, words: &[&str]) -> Result<String> {
    let mut command = command(words[0], &words[1..]);
    let output = netns.run(|| fed(&mut command, &[], LIMIT))??;
    succeeded(&command, &output)
}

/// Runs a command line that writes JSON. Returns `null` for no output at all (`ip -j` with nothing
/// to list).
pub(super) fn json(netns: &Netns, line: &str) -> Result<Value> {
    let stdout = run(netns, line)?;
    if stdout.trim().is_empty() {
        return Ok(Value::Null);
    }
    serde_json::from_str(&stdout)
        .map_err(|error| LabError::Output { command: line.to_owned(), problem: error.to_string() })
}

/// The non-empty objects of a JSON array. `ip -j` lists filtered objects as `{}`.
pub(super) fn objects(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array()
        .into_iter()
        .flatten()
        .filter(|item| item.as_object().is_some_and(|o| !o.is_empty()))
}

/// Runs `command` to its end with no standard input.
pub(super) fn output(command: &mut Command) -> Result<Output> {
    command.stdin(Stdio::null()).output().map_err(|error| cannot_start(command, error))
}

/// The error of a command that could not be started.
pub(super) fn cannot_start(command: &Command, source: io::Error) -> LabError {
    let program = command.get_program().to_string_lossy().into_owned();
    match source.kind() {
        io::ErrorKind::NotFound => LabError::Missing { program },
        _ => LabError::Spawn { program, source },
    }
}

/// The command line, for messages.
pub(super) fn describe(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

fn command(program: &str, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args).env("LC_ALL", "C").env("PATH", search_path());
    command
}

/// The search path with the directories of system programs, which users often lack.
fn search_path() -> String {
    let path = std::env::var("PATH").unwrap_or_default();
    format!("{path}:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin")
}

/// Runs `command` to its end with this input, for no longer than `limit`.
fn fed(command: &mut Command, input: &[u8], limit: Duration) -> Result<Output> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = ChildGuard::spawn(command)?;
    let stdin = child.child_mut().stdin.take();
    // The input is written on its own thread: a child whose output fills the pipe reads no more
    // input until this thread reads that output.
    thread::scope(|scope| {
        if let Some(mut stdin) = stdin {
            // A program that does not read its input gives the reason on its standard error.
            scope.spawn(move || drop(stdin.write_all(input)));
        }
        child.wait_with_output(limit)
    })
}

fn succeeded(command: &Command, output: &Output) -> Result<String> {
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let stderr = if stderr.trim().is_empty() { output.status.to_string() } else { stderr.into() };
    Err(LabError::Failed { command: describe(command), stderr })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let error = output(&mut command("no-such-program", &[])).unwrap_err();
        assert_eq!(
            error.to_string(),
            "no-such-program is not installed: apt install no-such-program"
        );
    }

    #[test]
    fn a_failure_carries_what_the_program_said() {
        let mut failing = command("sh", &["-c", "echo first second >&2; exit 3"]);
        let output = output(&mut failing).unwrap();
        let error = succeeded(&failing, &output).unwrap_err().to_string();
        assert!(error.ends_with("failed: first second"), "{error}");
    }

    /// The child writes more than a pipe holds before it reads its input, which does not fit into
    /// a pipe either.
    #[test]
    fn a_program_may_write_before_it_reads() {
        let (done, result) = mpsc::channel();
        thread::spawn(move || {
            let mut chatty = command("sh", &["-c", "head -c 300000 /dev/zero; exec wc -c"]);
            done.send(fed(&mut chatty, &[b'x'; 300_000], LIMIT))
        });
        let output = result.recv_timeout(Duration::from_secs(20)).expect("it ends").unwrap();
        assert_eq!(output.stdout.len(), 300_000 + "300000\n".len());
    }

    /// It does not read its input either, which does not fit into a pipe.
    #[test]
    fn a_program_that_hangs_is_named() {
        let (done, result) = mpsc::channel();
        thread::spawn(move || {
            let mut hanging = command("sleep", &["60"]);
            done.send(fed(&mut hanging, &[b'x'; 300_000], Duration::from_millis(50)))
        });
        let result = result.recv_timeout(Duration::from_secs(20)).expect("it ends");
        assert_eq!(
            result.unwrap_err().to_string(),
            "\"sleep 60\" did not end within 0.05 s and was killed"
        );
    }

    #[test]
    fn a_program_may_end_without_reading() {
        let mut deaf = command("sh", &["-c", "exec 0<&-; echo no >&2; exit 4"]);
        let output = fed(&mut deaf, &[b'x'; 300_000], LIMIT).unwrap();
        assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(4), &b"no\n"[..]));
    }

    #[test]
    fn filtered_objects_are_skipped() {
        assert_eq!(objects(&serde_json::json!([{}, {"ifname": "eth0"}, 3])).count(), 1);
        assert_eq!(objects(&Value::Null).count(), 0);
    }
}
