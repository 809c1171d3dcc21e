//! The command, as a process.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::dra::{Shared, UID};
use crate::folder::names;
use crate::{Node, until};

/// Devices of the command.
const ALL: usize = 64;

/// A running driver. It is killed with this value.
pub(crate) struct Process(Child);

impl Process {
    fn start(node: &Node) -> Self {
        Self::start_with(node, "0.02", &[])
    }

    /// With this period, in seconds, and further options.
    pub(crate) fn start_with(node: &Node, period: &str, options: &[&str]) -> Self {
        let config = node.folder.at("config.json");
        let mut command = Command::new(env!("CARGO_BIN_EXE_rocinante-kube"));
        command
            .args(["driver", "--node", "n1", "--period", period])
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

    /// How often its threads have gone to sleep.
    fn sleeps(&self) -> u64 {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.0.id())).unwrap();
        let sleeps = |path: std::path::PathBuf| {
            let text = std::fs::read_to_string(path.join("status")).unwrap();
            let line = text.lines().find_map(|it| it.strip_prefix("voluntary_ctxt_switches:"));
            line.unwrap().trim().parse::<u64>().unwrap()
        };
        threads.map(|it| sleeps(it.unwrap().path())).sum()
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

/// With a period longer than the test, so that it has events alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_without_events_sleeps_and_acts_on_each() {
    let it = Shared::new().await;
    let (node, agent) = (&it.node, it.node.agent(&[10]));
    node.kubelet.start();
    it.manager.start();
    let options = ["--accounting", "dra", "--pod-uid", "a"];
    let process = Process::start_with(node, "3600", &options);
    it.registered(1).await;
    registered(node).await;
    until("the slice", async || it.generation() == Some(1)).await;
    it.api().has_claim("c", UID, &["p"]);
    it.manager.prepare("p", (UID, "c")).await.unwrap();
    it.api().put_pod("p", "c");
    it.api().set_phase("p", "Running");
    agent.has_pod("p", "02:00:00:00:00:01", "fd00::7");
    let device = || it.device("c");
    until("its network", async || device()["networkData"].is_object()).await;
    // Threads of the runtime end after a while, and so do the pauses of registrations.
    let mut fewest = u64::MAX;
    until("it sleeps", async || {
        let before = process.sleeps();
        tokio::time::sleep(Duration::from_secs(6)).await;
        fewest = fewest.min(process.sleeps() - before);
        fewest == 0
    })
    .await;
    // The agent's news, a call, files that go, and a stream that ends.
    agent.has_uplinks(&[2]);
    let taint = || it.devices()[0]["taints"][0]["key"].clone();
    until("an uplink has less", async || taint() == "rocinante.dev/short").await;
    it.manager.unprepare("p", "c").await.unwrap();
    until("it has enough", async || taint().is_null()).await;
    let socket = it.manager.registry.join("rocinante.dev-a-reg.sock");
    std::fs::remove_file(&socket).unwrap();
    until("it is there again", async || socket.exists()).await;
    node.kubelet.start();
    registered(node).await;
    node.kubelet.disconnect();
    registered(node).await;
    it.api().has_claim("d", "u-d", &["q"]);
    it.manager.prepare("q", ("u-d", "d")).await.unwrap();
    it.api().put_pod("q", "d");
    it.api().set_phase("q", "Running");
    agent.has_pod("q", "02:00:00:00:00:02", "fd00::8");
    let device = || it.device("d");
    until("the network of the second", async || device()["networkData"].is_object()).await;
    agent.lacks_pod("q");
    until("it is lost", async || device()["conditions"][0]["status"] == "False").await;
    drop(agent);
    until("none is healthy", async || node.kubelet.count() == (0, ALL)).await;
    let _agent = node.agent(&[10]);
    registered(node).await;
}
