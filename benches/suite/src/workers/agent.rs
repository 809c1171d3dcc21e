//! An agent on the host of a measurement.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{fs, io};

use rocinante_cli::output::{Failure, Result};
use rocinante_lab::{ChildGuard, Lab};

const PROGRAM: &str = "rocinante-agent";
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
        let program = std::env::current_exe().map(|program| program.with_file_name(PROGRAM));
        let program = program.map_err(|error| Failure::Failed(error.to_string()))?;
        if !program.exists() {
            let why = format!(
                "{} is not there: cargo build --release -p rocinante-agent",
                program.display()
            );
            return Err(Failure::Failed(why));
        }
        let dir = std::env::temp_dir().join(format!("rocinante-bench-{}", std::process::id()));
        let configured = configure(&dir)
            .map_err(|error| Failure::Failed(format!("cannot write {}: {error}", dir.display())));
        let mut command = Command::new(program);
        command.arg("run").arg("--config").arg(configured?).stdin(Stdio::null());
        let child = lab.host().spawn(&mut command);
        let child = child.map_err(|error| Failure::Failed(error.to_string()))?;
        let agent = Self { child, dir };
        let end = Instant::now() + STARTS_WITHIN;
        while !agent.socket().exists() {
            if Instant::now() > end {
                return Err(Failure::Failed("the agent does not start".into()));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(agent)
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

/// Writes the configuration into a new directory.
fn configure(dir: &Path) -> io::Result<PathBuf> {
    fs::create_dir(dir)?;
    let path = dir.join("agent.toml");
    let (socket, state) = (dir.join("agent.sock"), dir.join("state/state.json"));
    fs::write(&path, format!("socket = {socket:?}\nstate = {state:?}\nlog = \"warn\"\n"))?;
    Ok(path)
}
