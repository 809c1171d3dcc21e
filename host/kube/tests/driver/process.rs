//! The command, as a process.

use std::process::{Child, Command, Stdio};

use crate::folder::names;
use crate::{Node, until};

/// Devices of the command.
const ALL: usize = 64;

/// A running driver. It is killed with this value.
pub(crate) struct Process(Child);

impl Process {
    fn start(node: &Node) -> Self {
        Self::start_with(node, &[])
    }

    /// With further options.
    pub(crate) fn start_with(node: &Node, options: &[&str]) -> Self {
        let config = node.folder.at("config.json");
        let mut command = Command::new(env!("CARGO_BIN_EXE_rocinante-kube"));
        command
            .args(["driver", "--node", "n1", "--period", "0.02"])
            .args(options)
            .stdin(Stdio::null())
            .env("KUBECONFIG", &config);
        for (option, name) in
            [("--agent", "control.sock"), ("--kubelet", "kubelet"), ("--cdi", "cdi")]
        {
            command.arg(option).arg(node.folder.at(name));
        }
        Self(command.spawn().unwrap())
    }

    fn signal(&self, name: &str) {
        let pid = self.0.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    }

    fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.0.id())).unwrap().count()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn registered(node: &Node) {
    until("all are healthy", async || node.kubelet.count() == (ALL, 0)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_driver_leaves_a_socket_that_the_next_one_takes() {
    let node = Node::new().await;
    let _agent = node.agent(&[10]);
    node.kubelet.start();
    for _ in 0..3 {
        let process = Process::start(&node);
        registered(&node).await;
        assert_eq!(node.sockets(), ["rocinante-hca-0.sock"]);
        node.kubelet.allocate(1).await.unwrap();
        drop(process);
        until("none is healthy", async || node.kubelet.count() == (0, ALL)).await;
        assert_eq!(node.sockets(), ["rocinante-hca-0.sock"]);
    }
    // Beside another one, which is killed.
    let (first, _second) = (Process::start(&node), Process::start(&node));
    until("both", async || node.sockets().len() == 2).await;
    registered(&node).await;
    drop(first);
    until("the other's is removed", async || node.sockets().len() == 1).await;
    until("again", async || node.kubelet.allocate(1).await.is_ok()).await;
    registered(&node).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_signal_ends_the_driver_and_leaves_the_capacity() {
    let node = Node::new().await;
    let _agent = node.agent(&[10]);
    node.kubelet.start();
    let mut process = Process::start(&node);
    registered(&node).await;
    until("the capacity", async || node.mbps().as_deref() == Some("10k")).await;
    process.signal("-TERM");
    let status = tokio::task::spawn_blocking(move || process.0.wait().map(|it| (it, process)));
    assert!(status.await.unwrap().unwrap().0.success());
    until("none is healthy", async || node.kubelet.count() == (0, ALL)).await;
    assert_eq!(node.mbps().as_deref(), Some("10k"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_registrations_leave_nothing() {
    let node = Node::new().await;
    let _agent = node.agent(&[10]);
    node.kubelet.start();
    let process = Process::start(&node);
    registered(&node).await;
    until("the capacity", async || node.mbps().is_some()).await;
    let before = process.descriptors();
    for _ in 0..100 {
        let asked = node.kubelet.registrations().len();
        // The plugin's socket goes, and its kubelet asks for it anew.
        let path = node.kubelet.folder().join(&node.sockets()[0]);
        std::fs::remove_file(path).unwrap();
        until("again", async || node.kubelet.registrations().len() > asked).await;
        registered(&node).await;
    }
    assert_eq!(node.sockets().len(), 1);
    assert_eq!(names(node.kubelet.folder()).len(), 3);
    until("no descriptor is left", async || process.descriptors() <= before).await;
}
