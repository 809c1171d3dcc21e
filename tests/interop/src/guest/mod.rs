//! A small virtual machine with a recent Debian kernel, `rdma_rxe`, perftest and the programs of
//! rdma-core, in a [`Lab`].
//!
//! ```text
//!  container 0                 host                   guest
//!  eth0 10.77.0.1/24 ── veth0 ┐ br0 ┌ bridged (tap) ── rxe0 on eth0 10.77.0.200/24, fd00:77::c8/64
//!                             └─────┘
//!  direct container
//!  eth0 10.78.0.1/24 (the tap itself) ──────────────── rxe1 on eth1 10.78.0.2/24, fd00:78::2/64
//! ```
//!
//! It is made of Debian packages ([`Image`]), and boots in about five seconds if the processor must
//! be emulated. It goes with its handle, and with the process, however the process ends.

mod apt;
pub mod control;
mod cpio;
mod image;
mod kernel;
mod network;
mod qemu;
mod tool;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rocinante_lab::{ChildGuard, Lab, LabConfig, Netns};

pub use self::control::Outcome;
use self::control::{ControlReply, ControlRequest, lock};
pub use self::image::Image;
pub use self::network::{Link, Network};
pub use self::qemu::Accelerator;
use self::qemu::{Nic, QemuMachine};
use self::tool::Tool;
use crate::error::{Error, Result};

/// A boot that takes longer counts as hung. An emulated guest, whose processor others may have,
/// gets twice the time at each further boot.
const BOOT_MAX: Duration = Duration::from_secs(40);

/// How often a hung boot is repeated.
const BOOTS_MAX: u32 = 3;

/// How long after its limit to wait for a command: the guest should have killed it.
const LATE_MAX: Duration = Duration::from_secs(30);

/// The configuration of a [`Guest`].
#[derive(Debug, Clone)]
pub struct GuestConfig {
    /// Virtual processors.
    pub cpus: u8,
    /// Memory.
    pub memory_mib: u32,
    /// The directory that the guest sees, read-only, at `/host`; it must contain
    /// `rocinante-interop`.
    pub programs: PathBuf,
    /// A directory that the guest sees at `/share` and may write to.
    pub share: Option<PathBuf>,
}

impl GuestConfig {
    /// Two processors, 768 MiB, and the directory that contains `rocinante-interop`.
    #[must_use]
    pub fn new(programs: impl Into<PathBuf>) -> Self {
        Self { cpus: 2, memory_mib: 768, programs: programs.into(), share: None }
    }
}

/// A running virtual machine. It is killed when this is dropped.
#[derive(Debug)]
pub struct Guest {
    machine: ChildGuard,
    console: Arc<Mutex<Vec<u8>>>,
    control: Arc<Control>,
    kernel: String,
    accelerator: Accelerator,
    network: Network,
    _keeper: Sender<()>,
}

/// The control channel's end on the host.
#[derive(Debug)]
struct Control {
    to_guest: Mutex<Option<ChildStdin>>,
    /// Whether a command should have ended long ago.
    hangs: AtomicBool,
    waiting: Mutex<BTreeMap<u64, Sender<Outcome>>>,
    numbers: AtomicU64,
}

/// A command running in the guest.
#[derive(Debug)]
pub struct Job {
    id: u64,
    command: String,
    ended: Receiver<Outcome>,
    control: Arc<Control>,
    limit: Duration,
}

impl Guest {
    /// Boots a guest in a lab of its own, which must outlive it, with the programs that are beside
    /// this one.
    pub fn beside_this_program() -> Result<(Lab, Self)> {
        let lab = Lab::new(&LabConfig { containers: 1, ..LabConfig::default() })?;
        let program = std::env::current_exe()?;
        let programs = program.parent().ok_or_else(|| Error::new("no directory of programs"))?;
        let guest = Self::boot(&lab, &Image::prepare()?, &GuestConfig::new(programs))?;
        Ok((lab, guest))
    }

    /// Boots a guest in `lab`, with its taps, and makes its RDMA devices.
    ///
    /// A hung boot is killed, reported on standard error, and repeated, up to three boots. KVM is
    /// used if a guest boots with it here; the image's directory keeps a note whether one does.
    /// Error: no QEMU, no `/dev/net/tun`, or a guest that does not boot: the text has the end of
    /// its console.
    pub fn boot(lab: &Lab, image: &Image, config: &GuestConfig) -> Result<Self> {
        if !config.programs.join("rocinante-interop").exists() {
            let programs = config.programs.display();
            return Err(Error::new(format!(
                "there is no rocinante-interop in {programs}: build it"
            )));
        }
        Tool::new(qemu::PROGRAM).arg("--version").read()?;
        let network = Network::prepare(lab)?;
        let machine = QemuMachine {
            image,
            cpus: config.cpus,
            memory_mib: config.memory_mib,
            programs: config.programs.clone(),
            share: config.share.clone(),
            nics: network.nics(),
        };
        let (accelerator, mut guest) = match try_kvm(lab, image, &machine, &network) {
            Some(guest) => (Accelerator::Kvm, guest),
            None => (Accelerator::Tcg, boot_emulated(lab, &machine, &network)?),
        };
        guest.accelerator = accelerator;
        network.join(lab, &guest)?;
        Ok(guest)
    }

    fn attempt(
        lab: &Lab,
        machine: &QemuMachine<'_>,
        accelerator: Accelerator,
        network: &Network,
        patience: Duration,
    ) -> Result<Self> {
        let (mut child, keeper) = start(lab.host(), &machine.command(accelerator))?;
        let (Some(to_guest), Some(from_guest), Some(console_pipe)) = (
            child.child_mut().stdin.take(),
            child.child_mut().stdout.take(),
            child.child_mut().stderr.take(),
        ) else {
            return Err(Error::new("the virtual machine has no pipes"));
        };
        let control = Arc::new(Control {
            to_guest: Mutex::new(Some(to_guest)),
            hangs: AtomicBool::new(false),
            waiting: Mutex::default(),
            numbers: AtomicU64::new(1),
        });
        let console = Arc::new(Mutex::new(Vec::new()));
        let (ready, is_ready) = channel();
        {
            let (console, control) = (console.clone(), control.clone());
            std::thread::spawn(move || keep_console(console_pipe, &console));
            std::thread::spawn(move || control.listen(from_guest, &ready));
        }
        let deadline = Instant::now() + patience;
        let kernel = loop {
            match is_ready.recv_timeout(Duration::from_millis(50)) {
                Ok(kernel) => break kernel,
                Err(_) if child.try_wait()?.is_none() && Instant::now() < deadline => {}
                Err(_) => {
                    let what = match child.try_wait()? {
                        Some(status) => format!("ended ({status})"),
                        None => format!("is not up after {} s", patience.as_secs()),
                    };
                    child.kill();
                    let tail = console_tail(&console);
                    return Err(Error::new(format!("the guest {what}; its console: {tail}")));
                }
            }
        };
        let beats = control.clone();
        std::thread::spawn(move || {
            while beats.send(&ControlRequest::Alive).is_ok() {
                std::thread::sleep(Duration::from_secs(5));
            }
        });
        let (accelerator, network) = (Accelerator::Tcg, network.clone());
        Ok(Self { machine: child, console, control, kernel, accelerator, network, _keeper: keeper })
    }

    /// Release of its kernel.
    #[must_use]
    pub fn kernel(&self) -> &str {
        &self.kernel
    }

    /// The accelerator that executes its instructions.
    #[must_use]
    pub fn accelerator(&self) -> Accelerator {
        self.accelerator
    }

    /// Its interfaces, and their other ends.
    #[must_use]
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// The process id of the virtual machine.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.machine.id()
    }

    /// The last output of its kernel.
    #[must_use]
    pub fn console(&self) -> String {
        console_tail(&self.console)
    }

    /// The kernel's output from its breakdown on, or its last lines.
    #[must_use]
    pub fn last_words(&self) -> String {
        last_words(&String::from_utf8_lossy(&lock(&self.console)))
    }

    /// Runs `sh -c command` in the guest to its end, at most for `limit`. Error: the guest is gone.
    /// A command that fails is no error: see [`Outcome::code`].
    pub fn run(&self, command: &str, limit: Duration) -> Result<Outcome> {
        self.start(command, limit)?.wait()
    }

    /// Runs `sh -c command` in the guest, which must succeed; returns its standard output. Error:
    /// the command failed, or did not end within `limit`: the text has its output.
    pub fn read(&self, command: &str, limit: Duration) -> Result<String> {
        let outcome = self.run(command, limit)?;
        if outcome.code == 0 {
            return Ok(outcome.stdout);
        }
        let said = format!("{} {}", outcome.stdout.trim(), outcome.stderr.trim());
        Err(Error::new(format!("in the guest, {command:?} ended with {}: {said}", outcome.code)))
    }

    /// Starts `sh -c command` in the guest, which kills it after `limit`. Error: the guest is gone.
    pub fn start(&self, command: &str, limit: Duration) -> Result<Job> {
        let id = self.control.numbers.fetch_add(1, Ordering::Relaxed);
        let (end, ended) = channel();
        lock(&self.control.waiting).insert(id, end);
        let timeout_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        self.control.send(&ControlRequest::Run { id, command: command.to_owned(), timeout_ms })?;
        let (command, control) = (command.to_owned(), self.control.clone());
        Ok(Job { id, command, ended, control, limit })
    }

    /// Whether the virtual machine still runs. A hung one is ended.
    pub fn is_alive(&mut self) -> bool {
        if self.control.hangs.load(Ordering::Relaxed) {
            self.machine.kill();
        }
        self.machine.try_wait().is_ok_and(|status| status.is_none())
    }

    /// Ends the virtual machine at once: it has no state to save.
    pub fn stop(self) {}
}

impl Drop for Guest {
    fn drop(&mut self) {
        // This ends the guest's sign of life.
        *lock(&self.control.to_guest) = None;
    }
}

impl Job {
    /// Waits until the command ends. Error: the guest is gone, or reports no end long after the
    /// limit. Then the guest is ended.
    pub fn wait(self) -> Result<Outcome> {
        self.ended.recv_timeout(self.limit.saturating_add(LATE_MAX)).map_err(|error| match error {
            RecvTimeoutError::Disconnected => {
                Error::new(format!("the guest ended while it ran {:?}", self.command))
            }
            RecvTimeoutError::Timeout => {
                self.control.hangs.store(true, Ordering::Relaxed);
                self.control.hang_up();
                Error::new(format!("the guest hangs: {:?} should have ended", self.command))
            }
        })
    }

    /// The outcome, if the command has ended.
    #[must_use]
    pub fn try_wait(&self) -> Option<Outcome> {
        self.ended.try_recv().ok()
    }

    /// Kills the command with all its children. Error: the guest is gone.
    pub fn kill(self) -> Result<Outcome> {
        self.control.send(&ControlRequest::Kill { id: self.id })?;
        self.wait()
    }
}

impl Control {
    fn send(&self, request: &ControlRequest) -> Result<()> {
        let line = serde_json::to_string(request)? + "\n";
        let mut guest = lock(&self.to_guest);
        let sent = guest.as_mut().map(|pipe| pipe.write_all(line.as_bytes()));
        match sent {
            Some(Ok(())) => Ok(()),
            _ => Err(Error::new("the guest has ended")),
        }
    }

    fn listen(&self, from_guest: impl Read, ready: &Sender<String>) {
        for line in BufReader::new(from_guest).lines().map_while(std::result::Result::ok) {
            match serde_json::from_str(&line) {
                Ok(ControlReply::Ready { kernel }) => {
                    let _ = ready.send(kernel);
                }
                Ok(ControlReply::Ended { id, outcome }) => {
                    if let Some(end) = lock(&self.waiting).remove(&id) {
                        let _ = end.send(outcome);
                    }
                }
                Err(error) => eprintln!("interop: the guest said {line:?}: {error}"),
            }
        }
        // No caller waits any longer for a command that will never end.
        self.hang_up();
    }

    /// Closes the channel, and forgets all waiting callers.
    fn hang_up(&self) {
        *lock(&self.to_guest) = None;
        lock(&self.waiting).clear();
    }
}

/// Starts a command in a namespace. The kernel kills it when this process ends, however that
/// happens. Linux ties this to the thread that started it (`PR_SET_PDEATHSIG`), so that thread
/// stays until the returned sender is dropped.
fn start(netns: &Netns, command: &Command) -> Result<(ChildGuard, Sender<()>)> {
    let mut bound = Command::new("setpriv");
    bound.args(["--pdeathsig", "KILL", "--"]).arg(command.get_program()).args(command.get_args());
    bound.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let netns = netns.clone();
    let (give, given) = channel();
    let (keeper, released) = channel();
    std::thread::spawn(move || {
        let child = match netns.enter() {
            Ok(()) => ChildGuard::spawn(&mut bound).map_err(Error::from),
            Err(error) => Err(Error::because("cannot enter the lab's namespace", error)),
        };
        let _ = give.send(child);
        // Until the other end is dropped.
        let _ = released.recv();
    });
    let child = given.recv().map_err(|_| Error::new("cannot start the virtual machine"))??;
    Ok((child, keeper))
}

/// A guest with KVM, if KVM works here.
fn try_kvm(
    lab: &Lab,
    image: &Image,
    machine: &QemuMachine<'_>,
    network: &Network,
) -> Option<Guest> {
    fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").ok()?;
    let note = image.note("kvm-unusable");
    let host = fs::read_to_string("/proc/version").unwrap_or_default();
    if fs::read_to_string(&note).is_ok_and(|noted| noted == host) {
        return None;
    }
    match Guest::attempt(lab, machine, Accelerator::Kvm, network, BOOT_MAX) {
        Ok(guest) => Some(guest),
        Err(error) => {
            let place = note.display();
            eprintln!(
                "interop: no guest with KVM here, from now on one is emulated (until {place} is removed): {error}"
            );
            // If the note cannot be written, the next guest tries KVM again.
            let _ = fs::write(&note, host);
            None
        }
    }
}

fn boot_emulated(lab: &Lab, machine: &QemuMachine<'_>, network: &Network) -> Result<Guest> {
    let mut attempt = 1;
    loop {
        let patience = BOOT_MAX * (1 << (attempt - 1));
        match Guest::attempt(lab, machine, Accelerator::Tcg, network, patience) {
            Ok(guest) => return Ok(guest),
            Err(error) if attempt < BOOTS_MAX => {
                eprintln!("interop: boot {attempt} of {BOOTS_MAX} failed: {error}");
            }
            Err(error) => return Err(error),
        }
        attempt += 1;
    }
}

/// Bytes of the console that are kept.
const CONSOLE_MAX: usize = 64 << 10;

fn keep_console(mut pipe: impl Read, console: &Mutex<Vec<u8>>) {
    let mut part = [0; 1024];
    while let Ok(count @ 1..) = pipe.read(&mut part) {
        let mut console = lock(console);
        console.extend_from_slice(&part[..count]);
        let over = console.len().saturating_sub(CONSOLE_MAX);
        console.drain(..over);
    }
}

fn console_tail(console: &Mutex<Vec<u8>>) -> String {
    tail(&String::from_utf8_lossy(&lock(console))).join(" | ")
}

/// The last lines of a console.
fn tail(text: &str) -> Vec<&str> {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(12)..].to_vec()
}

/// A console's text from the line on that reports a breakdown of the kernel; else its last lines.
fn last_words(text: &str) -> String {
    const SIGNS: [&str; 5] =
        ["BUG:", "Oops", "general protection fault", "Kernel panic", "cut here"];
    let breaks = |line: &str| SIGNS.iter().any(|sign| line.contains(sign));
    match text.lines().position(breaks) {
        Some(first) => text.lines().skip(first).take(200).collect::<Vec<_>>().join("\n"),
        None => tail(text).join("\n"),
    }
}

impl From<&network::Port> for Nic {
    fn from(port: &network::Port) -> Self {
        Self { tap: port.tap.clone(), mac: port.mac.clone() }
    }
}
