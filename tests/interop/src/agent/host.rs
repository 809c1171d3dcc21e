//! The agent of a machine with devices of the kernel. It describes and checks the devices, and
//! starts the programs of other projects. All else it leaves to [`Verbs`].

use std::io::Read;
use std::net::IpAddr;
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rocinante::device::hardware_devices;
use rocinante_dropin::row;
use rocinante_lab::{ChildGuard, LabError};

use super::machine::Machine;
use super::proto::{Invocation, Reply, Request};
use super::{Agent, Verbs};
use crate::guest::Outcome;
use crate::guest::control::TIMED_OUT;
use crate::matrix::cannot;
use crate::matrix::ours::PATIENCE;
use crate::matrix::programs::Program;

/// How long a check may take; the asking side waits longer.
const CHECK_MAX: Duration = Duration::from_secs(100);

/// The agent of this machine.
#[derive(Debug)]
pub struct Host {
    verbs: Verbs,
    running: Option<RunningProgram>,
}

/// A running program. It is killed when this is dropped.
#[derive(Debug)]
struct RunningProgram {
    child: ChildGuard,
    stdout: JoinHandle<String>,
    stderr: JoinHandle<String>,
    since: Instant,
}

impl Default for Host {
    fn default() -> Self {
        Self { verbs: Verbs::kernel(), running: None }
    }
}

impl Agent for Host {
    fn ask(&mut self, request: &Request) -> Reply {
        let done = match request {
            Request::Describe { name, address } => Machine::with_device(name, *address)
                .map(|machine| Reply::Machine(Box::new(machine))),
            Request::Check { check, name, address } => {
                self::check(check, name, *address).map(|()| Reply::Done)
            }
            Request::Start(invocation) => self.start(invocation).map(|()| Reply::Done),
            Request::Ended { timeout_ms } => {
                self.ended(Duration::from_millis(*timeout_ms)).map(Reply::Ended)
            }
            other => return self.verbs.ask(other),
        };
        done.unwrap_or_else(Reply::Failed)
    }
}

impl Host {
    fn start(&mut self, invocation: &Invocation) -> Result<(), String> {
        self.running = None;
        let program = Program::by_name(&invocation.program)?;
        let index = gid_index(&invocation.device, invocation.address)?;
        let device = invocation.device.split(':').next().unwrap_or_default();
        let Invocation { port, mtu, server, .. } = *invocation;
        let words = program.words(device, index, port, mtu, server);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = ChildGuard::spawn(&mut command).map_err(|error| match error {
            LabError::Missing { program } => cannot(format!(
                "{program} is not installed on the device's machine: `apt-get install ibverbs-utils perftest`"
            )),
            other => other.to_string(),
        })?;
        if server.is_none() {
            listens(program, &mut child, port)?;
        }
        let outputs = child.child_mut();
        let (stdout, stderr) = (outputs.stdout.take(), outputs.stderr.take());
        let (stdout, stderr) = (collect(stdout), collect(stderr));
        self.running = Some(RunningProgram { child, stdout, stderr, since: Instant::now() });
        Ok(())
    }

    fn ended(&mut self, patience: Duration) -> Result<Option<Outcome>, String> {
        let Some(mut running) = self.running.take() else {
            return Err("no program was started".into());
        };
        let deadline = Instant::now() + patience;
        loop {
            let status = running.child.try_wait().map_err(|error| error.to_string())?;
            let late = running.since.elapsed() > PATIENCE;
            if status.is_some() || late {
                running.child.kill();
                let code = status.map_or(TIMED_OUT, |status| status.code().unwrap_or(-1));
                let stdout = running.stdout.join().unwrap_or_default();
                let stderr = running.stderr.join().unwrap_or_default();
                return Ok(Some(Outcome { code, stdout, stderr }));
            }
            if Instant::now() > deadline {
                self.running = Some(running);
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Waits until a server listens: programs of others ask once.
fn listens(program: &Program, child: &mut ChildGuard, port: u16) -> Result<(), String> {
    if !program.is_managed() {
        return row::listens_on(child, port);
    }
    let deadline = Instant::now() + PATIENCE;
    while child.try_wait().is_ok_and(|ended| ended.is_none()) && Instant::now() < deadline {
        let shown = Command::new("rdma").args(["resource", "show", "cm_id"]).output();
        // Without the tool nothing tells.
        let Ok(shown) = shown else { break };
        if is_listening(&String::from_utf8_lossy(&shown.stdout), port) {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Whether an id of `rdma_cm` listens at this port, by the output of `rdma resource show cm_id`.
pub(crate) fn is_listening(shown: &str, port: u16) -> bool {
    let at_port = |word: &str| word.rsplit_once(':').is_some_and(|(_, at)| at == port.to_string());
    let listener =
        |line: &str| line.contains("state LISTEN") && line.split_whitespace().any(at_port);
    shown.lines().any(listener)
}

/// Runs a check in a process of its own. A check that hangs or crashes takes nothing with it, and a
/// skipped check reports it.
fn check(check: &str, name: &str, address: IpAddr) -> Result<(), String> {
    let mut command = Command::new(std::env::current_exe().map_err(|error| error.to_string())?);
    command.args(["check", check, name, &address.to_string()]).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = ChildGuard::spawn(&mut command).map_err(|error| error.to_string())?;
    let output = child.wait_with_output(CHECK_MAX).map_err(|error| error.to_string())?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    let skipped = said.lines().find(|line| line.contains("SKIPPED "));
    match skipped {
        _ if !output.status.success() => Err(said.trim().to_owned()),
        Some(line) => Err(cannot(line.trim())),
        None => Ok(()),
    }
}

/// Reads an output to its end.
fn collect(output: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut output) = output {
            // An error ends the output: keep the bytes read so far.
            let _ = output.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// The index of an address in the device's GID table.
fn gid_index(device: &str, address: IpAddr) -> Result<u8, String> {
    let name = device.split(':').next().unwrap_or_default();
    let devices = hardware_devices();
    let ports = devices.iter().filter(|found| found.name == name).flat_map(|found| &found.ports);
    let gid = ports.flat_map(|port| &port.gids).find(|gid| gid.address == address);
    gid.map(|gid| gid.index).ok_or_else(|| format!("{device} has no GID for {address}"))
}
