//! How a command ends: with its result, with an error, or by a signal. In each case the user sees
//! the results so far, the stage, and the device's counters.
//!
//! The first SIGINT, SIGTERM or SIGHUP ends the command with a report, the second at once. The exit
//! status is 128 plus the number of the first, as a shell reports it. A process with PID 1 needs
//! handlers, because the kernel discards signals that it does not handle.
//!
//! The report of a signal comes from the main thread if that has promised to look at [`signal`]
//! often ([`attentive`]): it has the results so far. Otherwise the thread that receives signals
//! reports, because the main thread may be waiting for a peer without a limit.

use std::io;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rocinante::Context;
use serde::Serialize;
use serde_json::{Map, Value, json};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag::register_usize;
use signal_hook::iterator::Signals;

use crate::counters;
use crate::output::{self, Failure, Kind, Output, Result};

/// How often an attentive thread looks at [`signal`], at least.
pub const LOOK: Duration = Duration::from_millis(100);
/// How long an attentive thread may take to report.
const GRACE: Duration = Duration::from_secs(2);

/// The number of a signal that has come, or 0.
static SIGNAL: LazyLock<Arc<AtomicUsize>> = LazyLock::new(Arc::default);
/// Number of [`Attentive`]s.
static ATTENTIVE: AtomicUsize = AtomicUsize::new(0);
static STATE: Mutex<State> = Mutex::new(State::Idle);

/// Which thread is to report.
enum State {
    /// No command has begun that reports here.
    Idle,
    Running(Running),
    /// A thread has taken the turn.
    Over,
}

/// The state of a running command.
struct Running {
    program: String,
    out: Output,
    /// Whether the user asked for counters.
    counters: bool,
    stage: String,
    results: Vec<Value>,
    /// The device, once it is open.
    ctx: Option<Context>,
}

/// Handles signals from now on, except those that the parent has this process ignore, as nohup(1)
/// does. Error: the kernel refuses the handler or its pipe.
pub fn handle_signals() -> io::Result<()> {
    let handled = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| !is_ignored(*signal));
    let handled: Vec<i32> = handled.collect();
    // First, so that none is lost: a main thread that waits does not look at the number.
    let mut signals = Signals::new(&handled)?;
    for signal in &handled {
        // At once, so that a call that the signal interrupts is not taken for a failure.
        register_usize(*signal, Arc::clone(&SIGNAL), signal.unsigned_abs() as usize)?;
    }
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        let mut all = signals.forever();
        if let Some(first) = all.next() {
            std::thread::spawn(move || end_by(first));
            all.next();
            std::process::exit(128 + first);
        }
    })?;
    Ok(())
}

/// Whether this process ignores a signal (`SigIgn` of proc_pid_status(5), a bit for each).
#[must_use]
pub fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = field.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
    ignored >> (signal - 1) & 1 == 1
}

fn end_by(signal: i32) {
    if ATTENTIVE.load(Ordering::SeqCst) > 0 {
        std::thread::sleep(GRACE);
    }
    let state = std::mem::replace(&mut *state(), State::Over);
    let running = match state {
        State::Running(running) => running,
        State::Idle => Running::unknown("rocinante", Output { json: false }),
        // The main thread reports, and ends the process.
        State::Over => return,
    };
    running.report(&stopped_by(signal));
    std::process::exit(128 + signal);
}

/// The signal that has come, if one has.
#[must_use]
pub fn signal() -> Option<i32> {
    i32::try_from(SIGNAL.load(Ordering::Relaxed)).ok().filter(|signal| *signal > 0)
}

/// An error if a signal has come. Error: [`Kind::Signal`].
pub fn check_signal() -> Result {
    signal().map_or(Ok(()), |signal| Err(stopped_by(signal)))
}

/// The failure of a command that this signal ended.
#[must_use]
pub fn stopped_by(signal: i32) -> Failure {
    let name = match signal {
        SIGINT => "SIGINT",
        SIGTERM => "SIGTERM",
        _ => "SIGHUP",
    };
    Failure::Of(Kind::Signal(signal), format!("stopped by {name}"))
}

/// The promise to look at [`signal`] every [`LOOK`] and to return its error, until this is dropped.
#[derive(Debug)]
pub struct Attentive(());

/// Makes the promise of [`Attentive`].
#[must_use]
pub fn attentive() -> Attentive {
    ATTENTIVE.fetch_add(1, Ordering::SeqCst);
    Attentive(())
}

impl Drop for Attentive {
    fn drop(&mut self) {
        // After a signal the promise stands: the report is still to come.
        if signal().is_none() {
            ATTENTIVE.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Does `work` with the promise of [`attentive`]. Once `stops` is true, another thread calls
/// `abandon`, which must make `work` fail.
pub fn breakable<T>(
    stops: impl Fn() -> bool + Send,
    abandon: impl FnOnce() + Send,
    work: impl FnOnce() -> T,
) -> T {
    let _attentive = attentive();
    let (done, is_done) = channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while is_done.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                if stops() {
                    return abandon();
                }
            }
        });
        let result = work();
        drop(done);
        result
    })
}

/// Begins a command. If it fails, its counters are printed if `counters`.
pub fn begin(program: &str, out: Output, counters: bool) {
    let stage = "options".to_owned();
    let program = program.to_owned();
    *state() =
        State::Running(Running { program, out, counters, stage, results: Vec::new(), ctx: None });
}

/// Names the stage of the command that begins.
pub fn enter(stage: &str) {
    running(|running| stage.clone_into(&mut running.stage));
}

/// The device is open. Of several it is the last one that is named here.
pub fn opened(ctx: &Context) {
    running(|running| running.ctx = Some(ctx.clone()));
}

/// Adds a result to those that are reported if the command fails later.
pub fn add(result: &impl Serialize) {
    let result = serde_json::to_value(result).expect("results are JSON");
    running(|running| running.results.push(result));
}

/// One of several results of the command that runs. Panics if it is no object.
#[must_use]
pub fn object(result: &impl Serialize) -> String {
    let program = match &*state() {
        State::Running(running) => running.program.clone(),
        State::Idle | State::Over => String::from("rocinante"),
    };
    output::object(&program, result)
}

/// Runs `work`, which looks at [`check_signal`] itself: the end of a command that measures nothing.
pub(crate) fn attended(program: &str, out: Output, work: impl FnOnce() -> Result) -> ExitCode {
    begin(program, out, false);
    let _attentive = attentive();
    match work() {
        Ok(()) => {
            forget();
            ExitCode::SUCCESS
        }
        Err(failure) => out.end::<Value>(program, &Err(failure)),
    }
}

/// Forgets results and device: the command begins with another client.
pub fn forget() {
    running(|running| {
        running.results.clear();
        running.ctx = None;
    });
}

impl Output {
    /// Ends the command: prints the JSON object if one is wanted and the error, after the words of
    /// `program`, if there is one, with the state above. Returns the exit code.
    #[must_use]
    pub fn end<T: Serialize>(self, program: &str, result: &Result<T>) -> ExitCode {
        let state = {
            let mut state = state();
            match *state {
                State::Idle => State::Idle,
                _ => std::mem::replace(&mut *state, State::Over),
            }
        };
        let failure = match (result, signal()) {
            (Ok(value), _) => {
                let counted = match &state {
                    State::Running(running) => running.with_counters(value),
                    _ => None,
                };
                if self.json {
                    let object = output::object(program, value);
                    self.result(counted.map_or(object, |value| output::object(program, value)));
                }
                return ExitCode::SUCCESS;
            }
            // Any failure is a consequence of the signal.
            (Err(_), Some(signal)) => &stopped_by(signal),
            (Err(failure), None) => failure,
        };
        match state {
            State::Running(running) => running.report(failure),
            State::Idle => Running::unknown(program, self).report(failure),
            State::Over => loop {
                // The thread that receives signals reports, and ends the process.
                std::thread::park();
            },
        }
        ExitCode::from(failure.code())
    }
}

impl Running {
    fn unknown(program: &str, out: Output) -> Self {
        let (program, stage) = (program.to_owned(), String::new());
        Self { program, out, counters: false, stage, results: Vec::new(), ctx: None }
    }

    /// Prints the counters if the user asked for them and the result has none. Returns the result
    /// with them.
    fn with_counters(&self, result: &impl Serialize) -> Option<Value> {
        let ctx = self.ctx.as_ref().filter(|_| self.counters)?;
        let mut result = serde_json::to_value(result).expect("results are JSON");
        let members = result.as_object_mut().filter(|members| !members.contains_key("counters"))?;
        let counters = ctx.counters();
        self.out.note(counters::text(&counters));
        members.insert("counters".into(), counters::json(&counters));
        Some(result)
    }

    fn report(self, failure: &Failure) {
        let counters = self.ctx.as_ref().map(Context::counters);
        if let Some(counters) = counters.as_ref().filter(|_| self.counters) {
            self.out.note(counters::text(counters));
        }
        self.out.note(format_args!("{}: {failure}", self.program));
        if !self.out.json {
            return;
        }
        let mut error = Map::new();
        error.insert("kind".into(), failure.kind().into());
        if !self.stage.is_empty() {
            error.insert("stage".into(), snake_case(&self.stage).into());
        }
        if let Some(status) = failure.status() {
            error.insert("status".into(), status.to_string().into());
        }
        error.insert("message".into(), failure.to_string().into());
        let mut object = json!({"error": error, "results": self.results});
        if let Some(counters) = &counters {
            object["counters"] = counters::json(counters);
        }
        self.out.result(output::object(&self.program, object));
    }
}

/// Words of a stage as one word of JSON: `first message` is `first_message`. Advice in brackets is
/// left out.
fn snake_case(stage: &str) -> String {
    let words = stage.split(" (").next().unwrap_or(stage);
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' };
    words.chars().map(plain).collect()
}

fn running(change: impl FnOnce(&mut Running)) {
    if let State::Running(running) = &mut *state() {
        change(running);
    }
}

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_are_one_word() {
        assert_eq!(snake_case("exchange of endpoints"), "exchange_of_endpoints");
        assert_eq!(snake_case("ping-pong"), "ping_pong");
        assert_eq!(snake_case("telling addresses (the same -q)"), "telling_addresses");
    }
}
