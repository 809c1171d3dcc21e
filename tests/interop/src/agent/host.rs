//! The verbs of a machine with devices of the kernel: it describes and checks the devices, and
//! starts the programs of other projects.
#![allow(clippy::needless_pass_by_value, reason = "arguments of verbs are theirs")]

use std::net::IpAddr;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rocinante::device::hardware_devices;
use rocinante_dropin::row;
use rocinante_lab::{ChildGuard, LabError};

use super::Verbs;
use super::machine::Machine;
use super::proto::Invocation;
use crate::guest::Outcome;
use crate::guest::control::TIMED_OUT;
use crate::matrix::cannot;
use crate::matrix::ours::{Ours, PATIENCE};
use crate::matrix::programs::Program;

/// How long a check may take; the asking side waits longer.
const CHECK_MAX: Duration = Duration::from_secs(100);

impl Verbs {
    pub(super) fn describe(
        &self,
        name: String,
        address: Option<IpAddr>,
    ) -> Result<Machine, String> {
        Machine::with_device(&name, address)
    }

    /// Runs a check in a process of its own. A check that hangs or crashes takes nothing with it,
    /// and a skipped check reports it.
    pub(super) fn check(&self, check: String, name: String, address: IpAddr) -> Result<(), String> {
        let mut command = Command::new(std::env::current_exe().map_err(|error| error.to_string())?);
        command.args(["check", &check, &name, &address.to_string()]).stdin(Stdio::null());
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

    pub(super) fn start(&mut self, invocation: Invocation) -> Result<(), String> {
        self.running = None;
        let program = Program::by_name(&invocation.program)?;
        let index = gid_index(&invocation.device, invocation.address)?;
        let device = invocation.device.split(':').next().unwrap_or_default();
        let Invocation { port, mtu, server, .. } = invocation;
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
        self.running = Some((Ours::of(child), Instant::now()));
        Ok(())
    }

    pub(super) fn ended(&mut self, timeout_ms: u64) -> Result<Option<Outcome>, String> {
        let (mut program, since) = self.running.take().ok_or("no program was started")?;
        let deadline = Instant::now() + Duration::from_millis(timeout_ms);
        loop {
            let code = program.ended()?;
            if code.is_some() || since.elapsed() > PATIENCE {
                return Ok(Some(program.outcome(code.unwrap_or(TIMED_OUT))));
            }
            if Instant::now() > deadline {
                self.running = Some((program, since));
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

/// The index of an address in the device's GID table.
fn gid_index(device: &str, address: IpAddr) -> Result<u8, String> {
    let name = device.split(':').next().unwrap_or_default();
    let devices = hardware_devices();
    let ports = devices.iter().filter(|found| found.name == name).flat_map(|found| &found.ports);
    let gid = ports.flat_map(|port| &port.gids).find(|gid| gid.address == address);
    gid.map(|gid| gid.index).ok_or_else(|| format!("{device} has no GID for {address}"))
}
