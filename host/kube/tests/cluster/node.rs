//! A node: the kubelet with containerd and the CNI plugins, an agent, and the driver as its device
//! plugin. Pods are of uid 1000 without any capability.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use futures_util::FutureExt as _;
use serde_json::{Value, json};

use crate::parts::{Cluster, Process, sh, until};
use crate::{Done, Scenario};

const NEEDS: &[&str] = &["kubelet", "containerd", "ctr", "runc"];
const NAME: &str = "node";
const IMAGE: &str = "localhost/rocinante:1";
const CONTROL: &str = "/run/rocinante-agent/control.sock";
/// Devices of the driver.
const DEVICES: usize = 64;

pub(crate) const ALL: &[Scenario] = &[
    Scenario { name: "node_plugin", needs: NEEDS, run: |c, _| plugin(c).boxed_local() },
    Scenario { name: "node_kubelet_restarts", needs: NEEDS, run: |c, _| kubelet(c).boxed_local() },
    Scenario { name: "node_parts_restart", needs: NEEDS, run: |c, _| parts(c).boxed_local() },
    Scenario { name: "node_fifty_at_once", needs: NEEDS, run: |c, _| fifty(c).boxed_local() },
];

/// A program of this workspace, as `cargo xtask kubernetes` builds it.
fn built(name: &str) -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_rocinante-kube")).with_file_name(name)
}

/// The parts of a node besides Kubernetes' control plane. They end with this value.
struct Node {
    driver: Process,
    agent: Process,
    kubelet: Process,
    _scheduler: Process,
    _containerd: Process,
}

impl Node {
    async fn start(cluster: &mut Cluster) -> Result<Self, String> {
        let folder = cluster.folder.display().to_string();
        sh("mount --make-rprivate /
            for folder in /var/lib /var/log /run; do mount -t tmpfs tmpfs $folder; done
            mkdir -p /run/rocinante /run/rocinante-agent
            ip link show uplink 2>/dev/null || ip link add uplink type veth peer name outside
            ip link set outside up
            ip addr replace 192.168.77.1/24 dev uplink; ip link set uplink up")?;
        image(&cluster.folder)?;
        let containerd = containerd(cluster, &folder)?;
        let ctr = format!("ctr --address {folder}/containerd.sock --namespace k8s.io");
        until("containerd answers", async || sh(&format!("{ctr} version")).ok()).await?;
        sh(&format!("{ctr} images import {folder}/image.tar"))?;
        let (agent, driver) = (Self::agent(cluster)?, Self::driver(cluster)?);
        let kubelet = Self::kubelet(cluster)?;
        let scheduler = cluster.scheduler(None)?;
        let this = Self { driver, agent, kubelet, _scheduler: scheduler, _containerd: containerd };
        this.ready(cluster).await.map(|()| this)
    }

    fn agent(cluster: &mut Cluster) -> Result<Process, String> {
        let config = cluster.folder.join("agent.toml");
        let guardian = built("rocinante");
        let text = format!(
            "guardian = {guardian:?}\n[[uplink]]\ninterface = \"uplink\"\nrate = \"10gbit\"\n"
        );
        fs::write(&config, text).map_err(|error| error.to_string())?;
        let mut agent = Command::new(built("rocinante-agent"));
        cluster.begin("agent", agent.args(["run", "--config"]).arg(config))
    }

    fn driver(cluster: &mut Cluster) -> Result<Process, String> {
        let mut driver = Command::new(built("rocinante-kube"));
        driver.args(["driver", "--node", NAME, "--agent", CONTROL]);
        let kubeconfig = cluster.kubeconfig.clone();
        cluster.begin("driver", driver.env("KUBECONFIG", kubeconfig))
    }

    fn kubelet(cluster: &mut Cluster) -> Result<Process, String> {
        let folder = cluster.folder.display().to_string();
        let config = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs", "cgroupsPerQOS": false, "enforceNodeAllocatable": [],
            "failSwapOn": false, "evictionHard": {"memory.available": "1Mi"},
            "imageGCHighThresholdPercent": 100, "registryPullQPS": 0, "resolvConf": "",
            "kubeAPIQPS": 100, "kubeAPIBurst": 100,
        });
        fs::write(format!("{folder}/kubelet.json"), config.to_string())
            .map_err(|error| error.to_string())?;
        let mut words = vec![
            format!("--config={folder}/kubelet.json"),
            format!("--kubeconfig={}", cluster.kubeconfig.display()),
            format!("--hostname-override={NAME}"),
            "--node-ip=192.168.77.1".to_owned(),
            format!("--container-runtime-endpoint=unix://{folder}/containerd.sock"),
        ];
        if cluster.binaries.minor < 27 {
            words.push("--container-runtime=remote".to_owned());
        }
        cluster.spawn("kubelet", &words)
    }

    /// Waits until the node has its devices and the uplink's rate.
    async fn ready(&self, cluster: &Cluster) -> Done {
        until("the node's devices", async || {
            let node = cluster.nodes().get(NAME).await.ok()?.status?;
            let of = |name: &str| node.allocatable.as_ref()?.get(name).map(|it| it.0.clone());
            let (hca, mbps) = (of(rocinante_kube::HCA)?, of(rocinante_kube::MBPS)?);
            (hca == DEVICES.to_string() && mbps == "10k").then_some(())
        })
        .await
    }
}

/// containerd with its own folder, and a bridge network of the CNI plugins.
fn containerd(cluster: &mut Cluster, folder: &str) -> Result<Process, String> {
    let own = built("rocinante-cni");
    sh(&format!(
        "mkdir -p {folder}/net.d {folder}/cni
         ln -s /usr/lib/cni/* {folder}/cni; ln -s {} {folder}/cni/rocinante-cni",
        own.display()
    ))?;
    let network = json!({
        "cniVersion": "0.4.0", "name": "pods",
        "plugins": [
            {
                "type": "bridge", "bridge": "pods0", "isGateway": true,
                "ipam": {
                    "type": "host-local", "dataDir": format!("{folder}/ipam"),
                    "ranges": [[{"subnet": "10.88.0.0/16"}]],
                },
            },
            {"type": "rocinante-cni", "capabilities": {"bandwidth": true}},
        ],
    });
    fs::write(format!("{folder}/net.d/pods.conflist"), network.to_string())
        .map_err(|error| error.to_string())?;
    let config = format!(
        "version = 2\nroot = \"{folder}/containerd\"\nstate = \"{folder}/state\"\n\
         [grpc]\naddress = \"{folder}/containerd.sock\"\n\
         [plugins.\"io.containerd.grpc.v1.cri\"]\nsandbox_image = \"{IMAGE}\"\n\
         restrict_oom_score_adj = true\ndisable_apparmor = true\n\
         [plugins.\"io.containerd.grpc.v1.cri\".cni]\n\
         bin_dir = \"{folder}/cni\"\nconf_dir = \"{folder}/net.d\"\n\
         [plugins.\"io.containerd.grpc.v1.cri\".containerd]\nsnapshotter = \"native\"\n"
    );
    fs::write(format!("{folder}/containerd.toml"), config).map_err(|error| error.to_string())?;
    cluster.spawn("containerd", &[format!("--config={folder}/containerd.toml")])
}

/// An image of this machine's programs, as an archive of Docker's format.
fn image(folder: &Path) -> Result<(), String> {
    let (folder, rocinante) = (folder.display(), built("rocinante"));
    sh(&format!(
        "mkdir -p {folder}/image/usr/bin {folder}/image/tmp; cd {folder}/image; chmod 1777 tmp
         ln -s usr/bin bin
         for program in $(which sh sleep cat) {}; do
             cp -L $program usr/bin/
             for library in $(ldd $program | grep -o '/[^ ]*'); do
                 mkdir -p .$(dirname $library); cp -Ln $library .$library
             done
         done
         tar -cf ../layer.tar .",
        rocinante.display()
    ))?;
    let digest = sh(&format!("sha256sum {folder}/layer.tar | cut -d' ' -f1"))?;
    let config = json!({
        "architecture": if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" },
        "os": "linux",
        "config": {"Cmd": ["/usr/bin/sleep", "infinity"], "Env": ["PATH=/usr/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{}", digest.trim())]},
    });
    let manifest = json!([{"Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]);
    for (name, value) in [("config.json", config), ("manifest.json", manifest)] {
        fs::write(format!("{folder}/{name}"), value.to_string()).map_err(|it| it.to_string())?;
    }
    sh(&format!(
        "cd {folder}; tar -cf image.tar manifest.json config.json layer.tar
         rm -r image layer.tar"
    ))
    .map(drop)
}

/// A pod with a device, that runs a script once.
fn pod(name: &str, script: &str) -> Value {
    let container = json!({
        "name": "main", "image": IMAGE, "imagePullPolicy": "Never",
        "command": ["sh", "-c", script],
        "resources": {"limits": {rocinante_kube::HCA: "1"}},
        "securityContext": {
            "runAsUser": 1000, "runAsNonRoot": true, "allowPrivilegeEscalation": false,
            "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
        },
    });
    json!({
        "metadata": {"name": name},
        "spec": {
            "containers": [container], "restartPolicy": "Never", "nodeName": NAME,
            "automountServiceAccountToken": false, "terminationGracePeriodSeconds": 0,
            "enableServiceLinks": false,
        },
    })
}

/// Waits until the pod's phase is one of these; the phase.
async fn phase(cluster: &Cluster, name: &str, of: &[&str]) -> Result<String, String> {
    until(&format!("{name} is {of:?}"), async || {
        let phase = cluster.pods().get(name).await.ok()?.status?.phase?;
        of.contains(&&*phase).then_some(phase)
    })
    .await
}

/// The output of a pod's container.
fn written(name: &str) -> String {
    let logs = format!("cat /var/log/pods/default_{name}_*/main/*.log");
    sh(&logs).unwrap_or_default()
}

/// The output of a pod that ended well.
async fn succeeded(cluster: &Cluster, name: &str) -> Result<String, String> {
    let phase = phase(cluster, name, &["Succeeded", "Failed"]).await?;
    let text = written(name);
    if phase == "Succeeded" {
        return Ok(text);
    }
    let status = cluster.pods().get(name).await.ok().and_then(|it| it.status).unwrap_or_default();
    Err(format!("{name}: {phase}, {:?}: {:?}: {text}", status.reason, status.message))
}

/// Pods are deleted, and containers and their network are gone with them.
async fn nothing_is_left(cluster: &Cluster) -> Done {
    for pod in cluster.all_pods().await? {
        cluster.delete_pod(pod["metadata"]["name"].as_str().unwrap_or_default()).await?;
    }
    let socket = cluster.folder.join("containerd.sock");
    let left = format!(
        "ctr --address {} --namespace k8s.io containers list --quiet
         ip -o link show master pods0",
        socket.display()
    );
    let (agent, config) = (built("rocinante-agent"), cluster.folder.join("agent.toml"));
    let status = format!("{} status --json --config {}", agent.display(), config.display());
    until("nothing is left", async || {
        let status: Value = serde_json::from_str(&sh(&status).ok()?).ok()?;
        let is_known = !status["containers"].as_array()?.is_empty();
        (!is_known && sh(&left).ok()?.trim().is_empty()).then_some(())
    })
    .await
    .map_err(|why| format!("{why}: {}", sh(&left).unwrap_or_default()))
}

/// Makes pods until one has a device: the kubelet refuses a pod while no healthy one is there.
async fn admitted(cluster: &Cluster) -> Done {
    const TRIES: usize = 30;
    let mut refusal = String::new();
    for at in 0..TRIES {
        let name = format!("afterwards{at}");
        cluster.create(pod(&name, DEVICES_OF_THE_POD)).await?;
        match succeeded(cluster, &name).await {
            Ok(text) => return has_packet(&name, &text),
            Err(why) => refusal = why,
        }
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    }
    Err(refusal)
}

const DEVICES_OF_THE_POD: &str = "exec rocinante devices";

fn has_packet(name: &str, text: &str) -> Done {
    let line = text.lines().find(|it| it.contains("eth0/1"));
    match line {
        Some(line) if line.contains("backend packet") || line.contains("backend afxdp") => Ok(()),
        _ => Err(format!("{name} has no fast port: {text}")),
    }
}

/// A pod that asks for a device gets a fast port; one that does not ask has none.
async fn plugin(cluster: &mut Cluster) -> Done {
    let node = Node::start(cluster).await?;
    cluster.create(pod("one", DEVICES_OF_THE_POD)).await?;
    let mut plain = pod("plain", DEVICES_OF_THE_POD);
    plain["spec"]["containers"][0]["resources"] = json!({});
    cluster.create(plain).await?;
    has_packet("one", &succeeded(cluster, "one").await?)?;
    let text = succeeded(cluster, "plain").await?;
    if !text.contains("backend udp") {
        return Err(format!("a pod without a device: {text}"));
    }
    nothing_is_left(cluster).await?;
    drop(node);
    Ok(())
}

/// Two pods with traffic between them for 40 s.
async fn traffic(cluster: &Cluster) -> Result<(), String> {
    let server = "exec rocinante perf write-bw -D 40";
    cluster.create(pod("server", server)).await?;
    phase(cluster, "server", &["Running"]).await?;
    let address = until("the server's address", async || {
        cluster.pods().get("server").await.ok()?.status?.pod_ip
    });
    let client = format!("exec rocinante perf write-bw -D 40 {}", address.await?);
    cluster.create(pod("client", &client)).await?;
    phase(cluster, "client", &["Running"]).await.map(drop)
}

/// While the kubelet is away, traffic goes on; afterwards the plugin is registered again.
async fn kubelet(cluster: &mut Cluster) -> Done {
    let mut node = Node::start(cluster).await?;
    traffic(cluster).await?;
    node.kubelet.kill();
    // A kubelet wipes its folder of plugins at its start.
    node.kubelet = Node::kubelet(cluster)?;
    admitted(cluster).await?;
    node.ready(cluster).await?;
    let text = succeeded(cluster, "client").await?;
    println!("  the client: {}", text.lines().last().unwrap_or_default());
    succeeded(cluster, "server").await?;
    nothing_is_left(cluster).await
}

/// Driver and agent are killed under traffic, and others take their places: no connection ends.
async fn parts(cluster: &mut Cluster) -> Done {
    let mut node = Node::start(cluster).await?;
    traffic(cluster).await?;
    node.driver.kill();
    node.driver = Node::driver(cluster)?;
    node.agent.kill();
    node.agent = Node::agent(cluster)?;
    admitted(cluster).await?;
    node.ready(cluster).await?;
    succeeded(cluster, "client").await?;
    succeeded(cluster, "server").await?;
    nothing_is_left(cluster).await
}

async fn fifty(cluster: &mut Cluster) -> Done {
    let _node = Node::start(cluster).await?;
    let names: Vec<String> = (0..50).map(|at| format!("p{at}")).collect();
    for name in &names {
        cluster.create(pod(name, DEVICES_OF_THE_POD)).await?;
    }
    for name in &names {
        has_packet(name, &succeeded(cluster, name).await?)?;
    }
    nothing_is_left(cluster).await
}
