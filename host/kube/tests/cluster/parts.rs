//! The components of Kubernetes as processes, and requests to the API server.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, Node, Pod};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config, ResourceExt as _};
use rocinante_placement::{Uplink, to_json};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::Done;

/// The bound of events that have to happen, however busy the machine is.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);
/// The API server's port, in a network namespace of its own.
const SERVER: &str = "https://127.0.0.1:6443";
const TOKEN: &str = "everything";
const ETCD: &str = "http://127.0.0.1:2379";

/// Components that every scenario has.
const NEEDED: [&str; 3] = ["etcd", "kube-apiserver", "kube-scheduler"];
/// Components of a node, and the tools of its containers.
const MORE: [&str; 4] = ["kubelet", "containerd", "ctr", "runc"];

/// Where the binaries are.
#[derive(Clone)]
pub(crate) struct Binaries {
    found: BTreeMap<&'static str, PathBuf>,
    /// The minor version of the API server.
    pub(crate) minor: u32,
}

impl Binaries {
    /// The error is the name of a needed one that is missing.
    pub(crate) fn find(folder: Option<&Path>) -> Result<Self, &'static str> {
        let on_path = std::env::var_os("PATH").unwrap_or_default();
        let folders: Vec<PathBuf> =
            folder.map(Path::to_owned).into_iter().chain(std::env::split_paths(&on_path)).collect();
        let place = |name: &str| folders.iter().map(|it| it.join(name)).find(|it| it.is_file());
        let names = NEEDED.iter().chain(&MORE);
        let found: BTreeMap<_, _> = names.filter_map(|name| Some((*name, place(name)?))).collect();
        if let Some(missing) = NEEDED.iter().find(|name| !found.contains_key(**name)) {
            return Err(missing);
        }
        let mut this = Self { found, minor: 0 };
        let version = this.version("kube-apiserver");
        this.minor = version.split('.').nth(1).and_then(|it| it.parse().ok()).unwrap_or(0);
        Ok(this)
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.found.contains_key(name)
    }

    fn version(&self, name: &str) -> String {
        let output = Command::new(&self.found[name]).arg("--version").output();
        let text = output.map(|it| String::from_utf8_lossy(&it.stdout).into_owned());
        text.unwrap_or_default().lines().next().unwrap_or("?").to_owned()
    }

    pub(crate) fn versions(&self) -> String {
        let all = self.found.iter();
        all.map(|(name, at)| format!("{name} ({}): {}\n", at.display(), self.version(name)))
            .collect()
    }
}

/// A component. It is killed with this value.
pub(crate) struct Process {
    child: Child,
    log: PathBuf,
    /// Where the program says that it listens.
    pub(crate) address: Option<SocketAddr>,
}

impl Process {
    pub(crate) fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().expect("kill(1)").success());
    }

    /// Nothing of it is left afterwards.
    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A control plane with nothing in it. It goes with this value, and so do its files.
pub(crate) struct Cluster {
    pub(crate) client: Client,
    pub(crate) binaries: Binaries,
    pub(crate) folder: PathBuf,
    pub(crate) kubeconfig: PathBuf,
    logs: Vec<(String, PathBuf)>,
    /// In the order of their start.
    processes: Vec<Process>,
}

impl Cluster {
    pub(crate) async fn start(binaries: &Binaries) -> Result<Self, String> {
        let folder = std::env::temp_dir().join(format!("rocinante-cluster-{}", nonce()));
        fs::create_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        sh("ip link set lo up")?;
        let kubeconfig = folder.join("kubeconfig");
        let cluster = json!({"server": SERVER, "insecure-skip-tls-verify": true});
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": TOKEN}}],
        });
        fs::write(&kubeconfig, config.to_string()).map_err(|error| error.to_string())?;
        let read = Kubeconfig::read_from(&kubeconfig).map_err(|error| error.to_string())?;
        let config = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await;
        let client = rocinante_kube::client(config.map_err(|error| error.to_string())?);
        let client = client.map_err(|error| error.to_string())?;
        let binaries = binaries.clone();
        let (logs, processes) = (Vec::new(), Vec::new());
        let mut this = Self { client, binaries, folder, kubeconfig, logs, processes };
        this.control_plane().await.map_err(|why| format!("{why}\n{}", this.words()))?;
        Ok(this)
    }

    async fn control_plane(&mut self) -> Done {
        let at = |name: &str| self.folder.join(name).display().to_string();
        let (data, key, tokens, certificates) =
            (at("etcd"), at("key.pem"), at("tokens.csv"), at("certificates"));
        sh(&format!("openssl genrsa -out {key} 2048 2>&1"))?;
        fs::write(&tokens, format!("{TOKEN},admin,admin,system:masters\n"))
            .map_err(|error| error.to_string())?;
        let etcd = [
            format!("--data-dir={data}"),
            format!("--listen-client-urls={ETCD}"),
            format!("--advertise-client-urls={ETCD}"),
            "--listen-peer-urls=http://127.0.0.1:2380".to_owned(),
            // A test does not outlive the machine.
            "--unsafe-no-fsync".to_owned(),
        ];
        let etcd = self.spawn("etcd", &etcd)?;
        let server = [
            format!("--etcd-servers={ETCD}"),
            format!("--token-auth-file={tokens}"),
            format!("--cert-dir={certificates}"),
            format!("--service-account-key-file={key}"),
            format!("--service-account-signing-key-file={key}"),
            "--service-account-issuer=https://test".to_owned(),
            "--bind-address=127.0.0.1".to_owned(),
            "--advertise-address=127.0.0.1".to_owned(),
            "--service-cluster-ip-range=10.96.0.0/24".to_owned(),
            "--authorization-mode=AlwaysAllow".to_owned(),
            // Pods without an account's token, on nodes that nothing calls ready.
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition".to_owned(),
            "--allow-privileged=false".to_owned(),
        ];
        let server = self.spawn("kube-apiserver", &server)?;
        self.processes.extend([etcd, server]);
        let client = self.client.clone();
        until("the API server answers", async || {
            let pods: Api<Pod> = Api::default_namespaced(client.clone());
            pods.list(&ListParams::default()).await.is_ok().then_some(())
        })
        .await?;
        // The API server makes it a moment after it answers.
        until("the namespace", async || self.get::<Value>("/api/v1/namespaces/default").await.ok())
            .await
            .map(drop)
    }

    /// Starts a component of Kubernetes.
    pub(crate) fn spawn(&mut self, name: &str, words: &[String]) -> Result<Process, String> {
        let mut command = Command::new(&self.binaries.found[name]);
        self.begin(name, command.args(words))
    }

    /// Starts `command`, whose words go to a file.
    pub(crate) fn begin(&mut self, name: &str, command: &mut Command) -> Result<Process, String> {
        let log = self.folder.join(format!("{name}-{}.log", self.logs.len()));
        let file = File::create(&log).map_err(|error| error.to_string())?;
        command.stdin(Stdio::null()).stderr(file.try_clone().map_err(|error| error.to_string())?);
        let child = command.stdout(file).spawn().map_err(|error| format!("{name}: {error}"))?;
        self.logs.push((name.to_owned(), log.clone()));
        Ok(Process { child, log, address: None })
    }

    /// kube-scheduler, with an extender if there is one.
    pub(crate) fn scheduler(&mut self, extender: Option<SocketAddr>) -> Result<Process, String> {
        let version = if self.binaries.minor < 25 { "v1beta1" } else { "v1" };
        let extenders = extender.map(|at| {
            json!({
                "urlPrefix": format!("http://{at}/scheduler"), "filterVerb": "filter", "weight": 1,
                "prioritizeVerb": "prioritize", "bindVerb": "bind", "nodeCacheCapable": true,
            })
        });
        let config = json!({
            "apiVersion": format!("kubescheduler.config.k8s.io/{version}"),
            "kind": "KubeSchedulerConfiguration",
            "clientConnection": {"kubeconfig": self.kubeconfig, "qps": 1000, "burst": 1000},
            "leaderElection": {"leaderElect": false},
            "podInitialBackoffSeconds": 1,
            "podMaxBackoffSeconds": 2,
            "extenders": extenders.into_iter().collect::<Vec<_>>(),
        });
        let file = self.folder.join("scheduler.json");
        fs::write(&file, config.to_string()).map_err(|error| error.to_string())?;
        self.spawn("kube-scheduler", &[format!("--config={}", file.display())])
    }

    /// The extender, which listens at `port` (0: at any) and is ready.
    pub(crate) async fn extender(&mut self, port: u16) -> Result<Process, String> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rocinante-kube"));
        command.args(["extender", "--listen", &format!("127.0.0.1:{port}"), "--lease", "3"]);
        command.env("KUBECONFIG", &self.kubeconfig);
        let mut process = self.begin("extender", &mut command)?;
        let said = until("the extender's address", async || {
            let text = fs::read_to_string(&process.log).unwrap_or_default();
            let line = text.lines().find_map(|line| line.strip_prefix("listening at "));
            line.and_then(|it| it.parse::<SocketAddr>().ok())
        });
        let at = said.await?;
        process.address = Some(at);
        until("the extender is ready", async || {
            let asked =
                Command::new("curl").args(["-sf", &format!("http://{at}/healthz")]).output();
            asked.is_ok_and(|it| it.status.success()).then_some(())
        })
        .await?;
        Ok(process)
    }

    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::default_namespaced(self.client.clone())
    }

    pub(crate) fn nodes(&self) -> Api<Node> {
        Api::all(self.client.clone())
    }

    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, String> {
        let request = hyper::Request::get(path).body(Vec::new()).map_err(|it| it.to_string())?;
        self.client.request(request).await.map_err(|error| error.to_string())
    }

    /// A node without a kubelet, with these uplinks in Gb/s and these extended resources.
    pub(crate) async fn add_node(
        &self,
        name: &str,
        uplinks: &[(&str, u64)],
        mbps: Option<u64>,
    ) -> Done {
        let mut annotations = BTreeMap::new();
        if !uplinks.is_empty() {
            annotations.insert(rocinante_kube::UPLINKS, annotation(uplinks));
        }
        let mut capacity = json!({"cpu": "64", "memory": "64Gi", "pods": "1000"});
        if let Some(mbps) = mbps {
            capacity[rocinante_kube::MBPS] = json!(mbps.to_string());
        }
        let node = json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": name, "annotations": annotations},
            "status": {
                "capacity": capacity, "allocatable": capacity,
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        });
        let node: Node = serde_json::from_value(node).map_err(|error| error.to_string())?;
        let made = self.nodes().create(&PostParams::default(), &node).await;
        made.map(drop).map_err(|error| format!("node {name}: {error}"))
    }

    /// Writes the uplinks of a node anew, in Gb/s.
    pub(crate) async fn set_uplinks(&self, name: &str, uplinks: &[(&str, u64)]) -> Done {
        let patch = json!({
            "metadata": {"annotations": {rocinante_kube::UPLINKS: annotation(uplinks)}},
        });
        let patched = self.nodes().patch(name, &PatchParams::default(), &Patch::Merge(patch)).await;
        patched.map(drop).map_err(|error| error.to_string())
    }

    /// A pod that asks for interfaces of these Mb/s, by the annotation.
    pub(crate) async fn add_pod(&self, name: &str, rates: &[u64]) -> Done {
        let wanted: Vec<Value> = rates.iter().map(|it| json!({"min_tx_rate": it})).collect();
        let annotations = match rates {
            [] => json!({}),
            _ => json!({rocinante_kube::REQUIRED: Value::from(wanted).to_string()}),
        };
        let container = json!({"name": "main", "image": "nothing"});
        let pod = json!({
            "metadata": {"name": name, "annotations": annotations},
            "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
        });
        self.create(pod).await
    }

    pub(crate) async fn create(&self, pod: Value) -> Done {
        let pod: Pod = serde_json::from_value(pod).map_err(|error| error.to_string())?;
        let made = self.pods().create(&PostParams::default(), &pod).await;
        made.map(drop).map_err(|error| format!("pod: {error}"))
    }

    pub(crate) async fn delete_pod(&self, name: &str) -> Done {
        let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        match self.pods().delete(name, &now).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            done => done.map(drop).map_err(|error| error.to_string()),
        }
    }

    pub(crate) async fn set_phase(&self, name: &str, phase: &str) -> Done {
        let patch = Patch::Merge(json!({"status": {"phase": phase}}));
        match self.pods().patch_status(name, &PatchParams::default(), &patch).await {
            // It was deleted meanwhile.
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            done => done.map(drop).map_err(|error| error.to_string()),
        }
    }

    /// All pods, as JSON.
    pub(crate) async fn all_pods(&self) -> Result<Vec<Value>, String> {
        let list: Value = self.get("/api/v1/namespaces/default/pods").await?;
        Ok(list["items"].as_array().cloned().unwrap_or_default())
    }

    /// The node that a pod is bound to, once it is.
    pub(crate) async fn bound(&self, name: &str) -> Result<String, String> {
        until(&format!("{name} is bound"), async || {
            self.pods().get(name).await.ok()?.spec?.node_name
        })
        .await
    }

    /// The places of a bound pod: uplinks by name, in the order of its interfaces.
    pub(crate) async fn places(&self, name: &str) -> Result<Vec<String>, String> {
        let pod = self.pods().get(name).await.map_err(|error| error.to_string())?;
        let text = pod.annotations().get(rocinante_kube::PLACED).cloned().unwrap_or_default();
        let placed = rocinante_placement::placed(&text).map_err(|it| format!("{text}: {it}"))?;
        Ok(placed.into_iter().map(|it| it.uplink).collect())
    }

    /// Waits until the scheduler says why it binds the pod nowhere; its words.
    pub(crate) async fn refused(&self, name: &str) -> Result<String, String> {
        let events: Api<Event> = Api::default_namespaced(self.client.clone());
        let of = ListParams::default().fields(&format!("involvedObject.name={name}"));
        until(&format!("{name} is refused"), async || {
            let all = events.list(&of).await.ok()?.items;
            let refused =
                all.into_iter().find(|it| it.reason.as_deref() == Some("FailedScheduling"));
            refused?.message
        })
        .await
    }

    /// The last lines of each component.
    pub(crate) fn words(&self) -> String {
        let last = |path: &PathBuf| {
            let file = File::open(path).ok()?;
            let lines: Vec<String> = BufReader::new(file).lines().map_while(Result::ok).collect();
            Some(lines[lines.len().saturating_sub(8)..].join("\n"))
        };
        let all = self.logs.iter();
        all.map(|(name, log)| format!("-- {name}\n{}\n", last(log).unwrap_or_default())).collect()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // The API server before etcd.
        while let Some(process) = self.processes.pop() {
            process.signal("-TERM");
            drop(process);
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn annotation(uplinks: &[(&str, u64)]) -> String {
    let all: Vec<Uplink> =
        uplinks.iter().map(|(name, g)| Uplink::new(name, g * 1_000_000_000)).collect();
    to_json(&all).expect("names of uplinks")
}

fn nonce() -> String {
    format!("{:08x}", fastrand::u32(..))
}

/// Runs a script; its output.
pub(crate) fn sh(script: &str) -> Result<String, String> {
    let done = Command::new("sh").args(["-ec", script]).output().map_err(|it| it.to_string())?;
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    if done.status.success() {
        return Ok(text);
    }
    Err(format!("{script}: {}{text}", String::from_utf8_lossy(&done.stderr)))
}

/// Waits for an event that has no other announcement; what it brings.
pub(crate) async fn until<T>(
    what: &str,
    mut happened: impl AsyncFnMut() -> Option<T>,
) -> Result<T, String> {
    let waited = tokio::time::timeout(PATIENCE, async {
        loop {
            if let Some(it) = happened().await {
                return it;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    waited.await.map_err(|_| format!("not within {PATIENCE:?}: {what}"))
}
