//! An agent on the host of a measurement.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{fs, io};

use rocinante_cli::output::{Failure, Result};
use rocinante_lab::{ChildGuard, Lab};

const PROGRAM: &str = "rocinante-agent";
const CONFIG: &str = "agent.toml";
/// How long it may take to start.
const STARTS_WITHIN: Duration = Duration::from_secs(10);

/// A running `rocinante-agent`, in the namespace of a lab's host.
pub(super) struct Agent {
    child: ChildGuard,
    dir: PathBuf,
}

impl Agent {
    /// Starts the agent, and waits until programs can connect.
    pub(super) fn start(lab: &Lab) -> Result<Self> {
        let dir = std::env::temp_dir().join(format!("rocinante-bench-{}", std::process::id()));
        let failed = |error| Failure::Failed(format!("cannot write {}: {error}", dir.display()));
        configure(&dir).map_err(failed)?;
        let child = spawn(lab, &dir).inspect_err(|_| drop(fs::remove_dir_all(&dir)))?;
        let agent = Self { child, dir };
        agent.is_ready()?;
        Ok(agent)
    }

    /// Kills it (SIGKILL), starts it again, and waits until programs can connect.
    pub(super) fn restart(&mut self, lab: &Lab) -> Result {
        self.child.kill();
        // The one that was killed leaves its socket there.
        let _ = fs::remove_file(self.socket());
        self.child = spawn(lab, &self.dir)?;
        self.is_ready()
    }

    fn is_ready(&self) -> Result {
        let end = Instant::now() + STARTS_WITHIN;
        while !self.socket().exists() {
            if Instant::now() > end {
                return Err(Failure::Failed("the agent does not start".into()));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.dir.join("agent.sock")
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // It would make its sockets again.
        self.child.kill();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn spawn(lab: &Lab, dir: &Path) -> Result<ChildGuard> {
    let program = std::env::current_exe().map(|program| program.with_file_name(PROGRAM));
    let program = program.map_err(|error| Failure::Failed(error.to_string()))?;
    if !program.exists() {
        let why =
            format!("{} is not there: cargo build --release -p rocinante-agent", program.display());
        return Err(Failure::Failed(why));
    }
    let mut command = Command::new(program);
    command.arg("run").arg("--config").arg(dir.join(CONFIG)).stdin(Stdio::null());
    lab.host().spawn(&mut command).map_err(|error| Failure::Failed(error.to_string()))
}

/// Writes the configuration into a new directory.
fn configure(dir: &Path) -> io::Result<()> {
    fs::create_dir(dir)?;
    let (socket, state) = (dir.join("agent.sock"), dir.join("state/state.json"));
    let lines = format!("socket = {socket:?}\nstate = {state:?}\nlog = \"warn\"\n");
    fs::write(dir.join(CONFIG), lines)
}
