//! Running other programs.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

/// `cargo ARGS`: the same cargo that runs this program.
pub(crate) fn cargo(args: &str) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args.split_whitespace());
    command
}

/// A program and its arguments.
pub(crate) fn words(line: &str) -> Command {
    let mut words = line.split_whitespace();
    let mut command = Command::new(words.next().unwrap_or_default());
    command.args(words);
    command
}

/// The error of a command of cargo's that is not installed.
pub(crate) fn needs_cargo(subcommand: &str) -> Result<(), String> {
    let missing = format!("cargo-{subcommand} is not installed");
    let version = read(&mut cargo(&format!("{subcommand} --version")));
    version.map(drop).map_err(|_| format!("{missing}: cargo install --locked cargo-{subcommand}"))
}

/// Runs a command with its output shown; an error unless it succeeds.
pub(crate) fn run(command: &mut Command) -> Result<(), String> {
    let status = command.status().map_err(|error| cannot_start(command, &error))?;
    if status.success() { Ok(()) } else { Err(format!("{}: {status}", describe(command))) }
}

/// Becomes a command, whose exit status is then that of this process.
pub(crate) fn become_it(command: &mut Command) -> Result<(), String> {
    let error = command.exec();
    Err(cannot_start(command, &error))
}

/// Runs a command silently. Returns its standard output if it succeeded, else the end of its
/// standard error.
pub(crate) fn read(command: &mut Command) -> Result<String, String> {
    let output =
        command.stdin(Stdio::null()).output().map_err(|error| cannot_start(command, &error))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let last = stderr.trim().lines().last().unwrap_or_default();
    Err(format!("{}: {}: {last}", describe(command), output.status))
}

/// The result of a command that was shown while it ran.
pub(crate) struct Shown {
    /// Whether it succeeded.
    pub(crate) ok: bool,
    /// The lines of its standard output.
    pub(crate) stdout: Vec<String>,
    /// The lines of its standard error.
    pub(crate) stderr: Vec<String>,
}

/// Runs a command, shows its output line by line as it arrives, and keeps it.
pub(crate) fn show(command: &mut Command) -> Result<Shown, String> {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| cannot_start(command, &error))?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let (stdout, stderr) = std::thread::scope(|scope| {
        let stderr = scope.spawn(|| pass_on(stderr, std::io::stderr()));
        (pass_on(stdout, std::io::stdout()), stderr.join().unwrap_or_default())
    });
    let status = child.wait().map_err(|error| cannot_start(command, &error))?;
    Ok(Shown { ok: status.success(), stdout, stderr })
}

/// Whether a program is on the search path or among the system's own.
pub(crate) fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(Into::into);
    std::env::split_paths(&path).chain(system).any(|dir| dir.join(program).is_file())
}

/// The command line, for messages.
pub(crate) fn describe(command: &Command) -> String {
    let program = std::path::Path::new(command.get_program()).file_name().unwrap_or_default();
    std::iter::once(program)
        .chain(command.get_args())
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

fn cannot_start(command: &Command, error: &std::io::Error) -> String {
    format!("cannot run {}: {error}", command.get_program().to_string_lossy())
}

fn pass_on(from: Option<impl Read>, mut to: impl Write) -> Vec<String> {
    let mut lines = Vec::new();
    let Some(from) = from else { return lines };
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    while from.read_until(b'\n', &mut line).is_ok_and(|len| len > 0) {
        // Losing our own terminal is no reason to stop.
        let _ = to.write_all(&line);
        lines.push(String::from_utf8_lossy(&line).trim_end().to_owned());
        line.clear();
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_is_kept() {
        let shown =
            show(Command::new("sh").args(["-c", "echo one; echo two; echo end >&2; exit 4"]));
        let shown = shown.unwrap();
        assert!(!shown.ok);
        assert_eq!(
            (shown.stdout, shown.stderr),
            (vec!["one".into(), "two".into()], vec!["end".into()])
        );
    }

    #[test]
    fn failures_carry_the_last_line() {
        let error = read(Command::new("sh").args(["-c", "echo a >&2; echo b >&2; exit 1"]));
        assert!(error.unwrap_err().ends_with("exit status: 1: b"));
        assert!(become_it(&mut Command::new("/not/there")).unwrap_err().contains("/not/there"));
    }
}
