//! The matrix as named tests, in one guest that boots once; the whole matrix in two that share the
//! work.
//!
//! `cargo test -p rocinante-interop --test matrix -- [--whole | --write-subset | --list]
//! [FILTER…]`: without `--whole`, only the committed subset. A cell runs if each FILTER is part of
//! its name; with `--some`, it is an error if no cell runs. `--times=N` runs everything N times.

mod device;

use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use rocinante::device::Backend;
use rocinante_dropin::install::Installation;
use rocinante_interop::guest::{Guest, GuestConfig, Image, Link};
use rocinante_interop::matrix::cm_programs::{self, CmCell};
use rocinante_interop::matrix::programs::{self, ProgramCell};
use rocinante_interop::matrix::scripts::{self, ScriptCell};
use rocinante_interop::matrix::{self, Bench, Cell, Requester, Setting, Table, subset};
use rocinante_interop::vrf::{self, VrfCell};
use rocinante_interop::{Error, Result, hardware};
use rocinante_lab::{Lab, LabConfig, kill_children_on_signal};
use rocinante_tests::{need, skip};

/// How long the committed subset may take, and the whole matrix. Where the guest is emulated by two
/// processors, the whole takes 45 to 60 minutes.
const SUBSET_MAX: Duration = Duration::from_secs(55 * 60);
const WHOLE_MAX: Duration = Duration::from_secs(120 * 60);

/// From this number of tests on, two guests share them if there are two processors.
const MANY: usize = 1000;

/// How often a guest that died during a cell is replaced.
const GUESTS_MAX: u32 = 3;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let has = |flag: &str| args.iter().any(|arg| arg == flag);
    if has("--write-subset") {
        return write_subset();
    }
    let times = match options(&args) {
        Ok(times) => times,
        Err(why) => return fail(&Error::new(why)),
    };
    let filters: Vec<&str> =
        args.iter().map(String::as_str).filter(|arg| !arg.starts_with('-')).collect();
    let cells = match if has("--whole") { Ok(matrix::all()) } else { subset::committed() } {
        Ok(cells) => cells,
        Err(error) => return fail(&Error::new(error)),
    };
    let mut tests: Vec<Test> = witnesses(has("--whole")).map(Test::Witness).collect();
    tests.extend(hardware::all(has("--whole")).into_iter().map(Test::Hardware));
    // Each takes a minute where the guest is emulated.
    tests.extend(vrf::CELLS.into_iter().filter(|_| has("--whole")).map(Test::Vrf));
    tests.extend(device::CASES.iter().map(Test::Device));
    let scripts = if has("--whole") { scripts::all() } else { scripts::subset() };
    tests.extend(scripts.into_iter().map(Test::Script));
    tests.extend(cells.into_iter().map(Test::Cell));
    let programs = if has("--whole") { programs::all() } else { programs::subset() };
    tests.extend(programs.into_iter().map(Test::Program));
    let programs = if has("--whole") { cm_programs::all() } else { cm_programs::subset() };
    tests.extend(programs.into_iter().map(Test::CmProgram));
    let total = tests.len();
    tests.retain(|test| filters.iter().all(|part| test.name().contains(part)));
    if has("--list") {
        tests.iter().for_each(|test| println!("{}: test", test.name()));
        return ExitCode::SUCCESS;
    }
    if tests.is_empty() && has("--some") {
        let words = filters.join(" ");
        return fail(&Error::new(format!("no cell has {words:?} in its name: --list names them")));
    }
    if tests.is_empty() {
        println!(
            "test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; {total} filtered out"
        );
        return ExitCode::SUCCESS;
    }
    if let Err(reason) = need::guest() {
        skip::report("interop::matrix", &reason);
        println!("test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out");
        return ExitCode::SUCCESS;
    }
    // Ctrl-C ends the guest, too.
    if let Err(error) = kill_children_on_signal() {
        return fail(&Error::because("no handler for Ctrl-C", error));
    }
    let limit = if has("--whole") { WHOLE_MAX } else { SUBSET_MAX };
    match run(&tests, times as usize, total - tests.len(), limit * times) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => fail(&error),
    }
}

/// How often to run everything.
fn options(args: &[String]) -> std::result::Result<u32, String> {
    const OWN: [&str; 4] = ["--whole", "--write-subset", "--list", "--some"];
    // Options of the usual harness, which a run of all tests may pass.
    const USUAL: [&str; 12] = [
        "--quiet",
        "-q",
        "--nocapture",
        "--no-capture",
        "--show-output",
        "--test-threads",
        "--color",
        "--format",
        "--exact",
        "--ignored",
        "--include-ignored",
        "-Z",
    ];
    let mut times = 1;
    for arg in args.iter().filter(|arg| arg.starts_with('-')) {
        let (name, value) = arg.split_once('=').unwrap_or((arg, ""));
        if name == "--times" {
            let count: Option<u32> = value.parse().ok();
            times = count.filter(|count| *count > 0).ok_or("--times=N wants a number from 1 on")?;
        } else if !OWN.contains(&name) && !USUAL.contains(&name) {
            return Err(format!(
                "there is no option {name}: {} and --times=N are all",
                OWN.join(", ")
            ));
        }
    }
    Ok(times)
}

/// Our program, which runs other programs.
const OURS: &str = env!("CARGO_BIN_EXE_rocinante-under-interop");

/// The installation of `rocinante run`, made when the first program runs.
type Installed = LazyLock<std::result::Result<Installation, String>>;

/// Installs it. The libraries lie beside this program, in cargo's directory of artifacts.
fn install() -> std::result::Result<Installation, String> {
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    Installation::of(Path::new(OURS), own.parent().unwrap_or(Path::new(".")))
        .map_err(|error| format!("{error}: cargo build -p rocinante-capi -p rocinante-paths, too"))
}

/// The directory of the programs; the guest sees it at `/host`.
fn host_programs() -> &'static Path {
    let guest = Path::new(env!("CARGO_BIN_EXE_rocinante-interop"));
    guest.parent().unwrap_or(Path::new("."))
}

/// A named test.
enum Test {
    /// A cell of the matrix.
    Cell(Cell),
    /// A program of another project.
    Program(ProgramCell),
    /// A program of librdmacm.
    CmProgram(CmCell),
    /// A script of packets.
    Script(ScriptCell),
    /// tshark's view of the packets in this setting.
    Witness(Setting),
    /// The kernel provider on its own.
    Hardware(hardware::HardwareCell),
    /// Interfaces of VRFs.
    Vrf(VrfCell),
    /// The command for machines with a device, and its report.
    Device(&'static device::Case),
}

impl Test {
    fn name(&self) -> String {
        match self {
            Self::Cell(cell) => cell.name(),
            Self::Program(cell) => cell.name(),
            Self::CmProgram(cell) => cell.name(),
            Self::Script(cell) => cell.name(),
            Self::Witness(setting) => format!("as_tshark_sees_it::{setting}"),
            Self::Hardware(cell) => cell.to_string(),
            Self::Vrf(cell) => cell.to_string(),
            Self::Device(case) => format!("device::{}", case.name),
        }
    }

    fn run(&self, bench: &Bench, installed: &Installed) -> std::result::Result<(), String> {
        let installed = || installed.as_ref().map_err(Clone::clone);
        match self {
            Self::Cell(cell) => bench.run(cell),
            Self::Hardware(cell) => cell.run(bench, host_programs()),
            Self::Program(cell) => bench.run_program(cell, installed()?),
            Self::CmProgram(cell) => bench.run_cm_program(cell, installed()?),
            Self::Script(cell) => bench.run_script(cell),
            Self::Vrf(cell) => cell.run(&bench.guest),
            Self::Device(case) => case.run(bench),
            Self::Witness(setting) => match need::program("tshark") {
                Ok(()) => bench.witness(*setting),
                Err(reason) => {
                    skip::report(&format!("interop::{}", self.name()), &reason);
                    Ok(())
                }
            },
        }
    }
}

/// One setting for each way in which packets are made; in the subset one family of each, in turn.
fn witnesses(whole: bool) -> impl Iterator<Item = Setting> {
    let ways = [(Backend::Udp, false), (Backend::Packet, true), (Backend::Xdp, false)];
    ways.into_iter().flat_map(move |(backend, chosen)| {
        [false, true].into_iter().filter(move |ipv6| whole || *ipv6 == chosen).map(move |ipv6| {
            let (requester, link) = (Requester::Ours, Link::Veth);
            Setting { requester, backend, link, ipv6, mtu: 1024 }
        })
    })
}

fn fail(error: &Error) -> ExitCode {
    eprintln!("interop: {error}");
    println!("test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out");
    ExitCode::FAILURE
}

fn boot() -> Result<Bench> {
    let start = Instant::now();
    let lab = Lab::new(&LabConfig { containers: 1, ..LabConfig::default() })?;
    let image = Image::prepare()?;
    let guest = Guest::boot(&lab, &image, &GuestConfig::new(host_programs()))?;
    let (kernel, accelerator) = (guest.kernel().to_owned(), guest.accelerator());
    let bench = Bench::new(lab, guest)?;
    let seconds = start.elapsed().as_secs_f64();
    println!("guest: Linux {kernel}, {accelerator:?}, up after {seconds:.1} s");
    Ok(bench)
}

/// Runs the cells; returns the number that failed.
fn run(tests: &[Test], times: usize, filtered_out: usize, limit: Duration) -> Result<usize> {
    let (start, total) = (Instant::now(), tests.len() * times);
    println!("running {} tests", tests.len());
    // Made once, before several guests need it.
    Image::prepare()?;
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let guests = if total > MANY { processors.min(2) } else { 1 };
    let installed = Installed::new(install);
    let (next, outcomes) = (AtomicUsize::new(0), Mutex::new(Outcomes::default()));
    let attend = || -> Result<()> {
        let mut bench = boot()?;
        let mut boots = 1;
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= total {
                return Ok(());
            }
            let test = &tests[index % tests.len()];
            let begun = Instant::now();
            let mut once_more = true;
            let result = loop {
                let result = if start.elapsed() < limit {
                    test.run(&bench, &installed)
                } else {
                    Err(format!("not run: the time of {} s is over", limit.as_secs()))
                };
                if bench.guest.is_alive() {
                    break result;
                }
                println!("{}: the guest has died: {}", test.name(), bench.guest.last_words());
                lock(&outcomes).deaths.push(test.name());
                if boots == GUESTS_MAX {
                    return Err(Error::new(format!("{boots} guests have died")));
                }
                bench = boot()?;
                boots += 1;
                // A kernel may break once by itself. If it breaks again, the test is the cause.
                if !std::mem::take(&mut once_more) {
                    break Err("the guest has died twice".into());
                }
                println!("{}: once more, in another guest", test.name());
            };
            lock(&outcomes).add(test, begun.elapsed(), result);
        }
    };
    let attended: Vec<Result<()>> = std::thread::scope(|scope| {
        let attendants: Vec<_> = (0..guests).map(|_| scope.spawn(attend)).collect();
        let ended = attendants.into_iter().map(ScopedJoinHandle::join);
        ended.map(|end| end.unwrap_or_else(|_| Err(Error::new("a test has panicked")))).collect()
    });
    let outcomes = outcomes.into_inner().unwrap_or_else(PoisonError::into_inner);
    print!("\n{}", outcomes.table);
    for failure in &outcomes.failures {
        println!("failed: {failure}");
    }
    for death in &outcomes.deaths {
        println!("the guest died during {death}");
    }
    attended.into_iter().collect::<Result<()>>()?;
    let failed = outcomes.failures.len();
    let verdict = if failed == 0 { "ok" } else { "FAILED" };
    println!(
        "test result: {verdict}. {} passed; {failed} failed; 0 ignored; 0 measured; {filtered_out} filtered out; \
         finished in {:.2}s",
        total - failed,
        start.elapsed().as_secs_f64()
    );
    Ok(failed)
}

/// The results of the tests.
#[derive(Default)]
struct Outcomes {
    table: Table,
    failures: Vec<String>,
    /// Tests during which a guest's kernel broke, passed or not.
    deaths: Vec<String>,
}

impl Outcomes {
    fn add(&mut self, test: &Test, time: Duration, result: std::result::Result<(), String>) {
        let verdict = if result.is_ok() { "ok" } else { "FAILED" };
        println!("test {} ... {verdict} ({:.2} s)", test.name(), time.as_secs_f64());
        match test {
            Test::Cell(cell) => self.table.add(cell, result.is_ok()),
            Test::Program(cell) => self.table.add_program(&cell.name(), result.is_ok()),
            Test::CmProgram(cell) => self.table.add_program(&cell.name(), result.is_ok()),
            Test::Script(_)
            | Test::Witness(_)
            | Test::Hardware(_)
            | Test::Vrf(_)
            | Test::Device(_) => {}
        }
        if let Err(why) = result {
            println!("    {why}");
            self.failures.push(test.name());
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Replaces the committed list.
fn write_subset() -> ExitCode {
    let cells = subset::cover();
    let names: String = cells.iter().map(|cell| cell.name() + "\n").collect();
    let head = "# Cells of the matrix in which every pair of properties occurs: what `cargo xtask test` runs.\n\
                # Written by `cargo xtask interop --write-subset`.\n";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("subset.txt");
    match std::fs::write(&path, format!("{head}{names}")) {
        Ok(()) => {
            println!("{} of {} cells: {}", cells.len(), matrix::all().len(), path.display());
            ExitCode::SUCCESS
        }
        Err(error) => fail(&Error::because(path.display(), error)),
    }
}
