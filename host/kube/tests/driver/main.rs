//! The driver between a kubelet, an agent and an API server of the tests' own.

mod agent;
#[path = "../extender/api.rs"]
#[allow(dead_code)]
mod api;
mod dra;
mod faults;
mod folder;
mod health;
mod kubelet;
mod mbps;
mod plugin;
mod plugins;
mod process;
#[path = "../extender/until.rs"]
mod until;

use std::time::Duration;

use rocinante_kube::Places;
use tokio::task::JoinSet;

use self::agent::{Agent, socket};
use self::api::Api;
use self::folder::Folder;
use self::kubelet::Kubelet;
use self::until::until;

/// How often drivers in this process look.
const PERIOD: Duration = Duration::from_millis(10);
/// A period of drivers that have events alone.
const NEVER: Duration = Duration::from_secs(3600);
/// Devices of a driver.
const DEVICES: u32 = 8;

/// A node: its folders, its kubelet, and the API server.
struct Node {
    folder: Folder,
    kubelet: Kubelet,
    api: Api,
}

impl Node {
    async fn new() -> Self {
        Self::with_latency(Duration::ZERO).await
    }

    /// One whose API server takes this time for each request.
    async fn with_latency(latency: Duration) -> Self {
        let (folder, api) = (Folder::new(), Api::start(latency).await);
        let kubelet = Kubelet::new(&folder.at("kubelet"));
        std::fs::create_dir(folder.at("cdi")).unwrap();
        api.write_config(&folder.at("config.json"));
        api.add_bare_node("n1");
        Self { folder, kubelet, api }
    }

    fn agent(&self, rates: &[u64]) -> Agent {
        Agent::start(&socket(&self.folder), rates)
    }

    /// One whose kubelet knows plugins by their sockets, or by their resource.
    async fn with_kubelet(by_socket: bool) -> Self {
        let mut node = Self::new().await;
        if by_socket {
            node.kubelet.by_socket();
        }
        node
    }

    /// The plugins' sockets.
    fn sockets(&self) -> Vec<String> {
        let names = folder::names(self.kubelet.folder()).into_iter();
        names.filter(|name| name.starts_with("rocinante")).collect()
    }

    /// A driver in this process. It ends with the value.
    fn driver(&self) -> JoinSet<()> {
        let places = Places {
            node: "n1".into(),
            agent: socket(&self.folder),
            kubelet: self.folder.at("kubelet"),
            cdi: self.folder.at("cdi"),
            dra: None,
        };
        let mut task = JoinSet::new();
        task.spawn(rocinante_kube::driver(self.api.client(), places, DEVICES, PERIOD));
        task
    }

    /// Waits until the kubelet's devices are healthy, and it can have one.
    async fn serves(&self) {
        self.has_healthy(DEVICES as usize).await;
        until("it serves", async || self.kubelet.allocate_these(&["0"]).await.is_ok()).await;
    }

    /// Waits until the kubelet has this many devices that are healthy, of all.
    async fn has_healthy(&self, count: usize) {
        let all = DEVICES as usize;
        let what = format!("{count} of {all} devices are healthy");
        until(&what, async || self.kubelet.count() == (count, all - count)).await;
    }
}
