//! The command, as a process.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::api::Api;
use crate::{get, until};

/// A running command. It is killed with this value, and leaves nothing.
pub(crate) struct Process {
    pub(crate) address: SocketAddr,
    child: Child,
    config: PathBuf,
}

/// A file that no other test has.
fn config_file() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("rocinante-kube-{}-{number}.json", std::process::id());
    std::env::temp_dir().join(name)
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rocinante-kube"));
    command.args(arguments).stdin(Stdio::null()).env_remove("KUBECONFIG");
    command
}

impl Process {
    pub(crate) fn start(api: &Api, arguments: &[&str]) -> Self {
        let config = config_file();
        api.write_config(&config);
        let mut command = command(arguments);
        let mut child = command.env("KUBECONFIG", &config).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let at = line.trim().strip_prefix("listening at ").expect("the address");
        Self { address: at.parse().unwrap(), child, config }
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        let _ = std::fs::remove_file(&self.config);
    }
}

fn failed(arguments: &[&str]) -> String {
    let Output { status, stderr, .. } = command(arguments).output().unwrap();
    assert!(!status.success(), "{arguments:?}");
    String::from_utf8(stderr).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_signal_ends_the_command() {
    let api = Api::start(std::time::Duration::ZERO).await;
    let mut process = Process::start(&api, &["extender", "--listen", "127.0.0.1:0"]);
    let address = process.address;
    until("it is ready", async || get(address, "/healthz").await.0 == 200).await;
    let pid = process.child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let status = tokio::task::spawn_blocking(move || {
        let status = process.child.wait();
        (status.unwrap(), process)
    });
    assert!(status.await.unwrap().0.success());
}

#[test]
fn bad_arguments_are_refused_with_a_reason() {
    for (arguments, reason) in [
        (&["extender"][..], "--listen"),
        (&["extender", "--listen", "8888"], "no address such as 127.0.0.1:8888 or :8888"),
        (&["extender", "--listen", ":99999"], "no address such as"),
        (&["node", "--name", "n1"], "--uplink"),
        (&["node", "--name", "n1", "--uplink", "a=3Gi"], "no uplink such as ens1 or ens1=10G"),
    ] {
        let text = failed(arguments);
        assert!(text.contains(reason), "{arguments:?}: {text}");
    }
}
