//! Containers of real engines, made of local files: each engine by its file in
//! `examples/containers`, with ports that the host's agent hands over.

use super::container::{Image, apart, found, ulimits};
use super::handed::Agent;
use super::{Done, Running};
use rocinante_lab::{ChildGuard, Lab, LabConfig};
use rocinante_tests::running::{install_script, retried};
use rocinante_tests::{need, require};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
const PROGRAM: &str = "/opt/rocinante/rocinante";
/// Stands for the name of a container, among the words of an image.
const NAME: &str = "NAME";
const AGENT: &str = env!("CARGO_BIN_EXE_rocinante-agent-under-test");
/// Options of unshare(1): all processes of an engine end with it, whatever becomes of the test.
const OF_ITS_OWN: [&str; 4] = ["--pid", "--fork", "--kill-child", "--mount-proc"];
/// The directories that an engine sees: its own, with the agent's sockets, the CDI file and the
/// network plugins at their places.
const PREPARE: &str = "set -e; folder=$1 sockets=$2 state=$3 cdi=$4 agent=$5 cni=$6; shift 6
    mount -t tmpfs tmpfs /var/lib; mount -t tmpfs tmpfs /run; mount -t tmpfs tmpfs /opt
    mkdir -p /run/rocinante /run/rocinante-agent /run/cdi /opt/cni/bin
    mount --bind \"$sockets\" /run/rocinante
    mount --bind \"$state\" /run/rocinante-agent
    sed \"s,/usr/bin/rocinante-agent,$agent,\" \"$cdi\" > /run/cdi/rocinante.json
    ln -s /usr/lib/cni/* /opt/cni/bin
    ln -s \"$cni\" /opt/cni/bin/rocinante-cni
    PATH=$folder/bin:$PATH exec \"$@\"";

/// A host with an agent, and an engine on it that keeps everything in a folder.
struct Engine {
    /// The engine's processes end with it.
    daemon: Option<ChildGuard>,
    /// The container's root file system.
    image: Image,
    agent: Agent,
    lab: Lab,
    /// The file in `examples/containers`.
    example: &'static str,
    /// The words of an image.
    of_image: Vec<String>,
}

impl Engine {
    /// An engine whose program is this script, which gets the words of the example.
    fn new(example: &'static str, program: &str, script: impl FnOnce(&Image) -> String) -> Self {
        let lab = Lab::new(&LabConfig::default()).unwrap();
        let agent = Agent::start(lab.host());
        let image = Image::new();
        let bin = image.folder.path().join("bin");
        fs::create_dir_all(&bin).unwrap();
        let script = format!("#!/bin/sh\nset -e\n{}\n", script(&image));
        install_script(script, &bin.join(program), 0o755);
        let of_image = vec![image.root().display().to_string()];
        Self { daemon: None, image, agent, lab, example, of_image }
    }

    /// podman, with a bridge of the CNI plugins.
    fn podman() -> Self {
        Self::new("podman.sh", "podman", |image| {
            let net = network(image, "");
            let backend = image.folder.path().join("containers.conf");
            fs::write(&backend, "[network]\nnetwork_backend = \"cni\"\n").unwrap();
            let (podman, kept) = (found("podman"), image.kept().join(" "));
            // `run` comes before its options.
            format!(
                "shift\nexport CONTAINERS_CONF={}\nexec {} {kept} --network-config-dir {net} run {} --rootfs \"$@\"",
                backend.display(),
                podman.display(),
                ulimits().join(" "),
            )
        })
    }

    /// Docker's daemon, with a network of its own.
    fn docker() -> Self {
        let mut engine = Self::new("docker.sh", "docker", |image| {
            let socket = image.folder.path().join("socket");
            format!("exec {} -H unix://{} \"$@\"", found("docker").display(), socket.display())
        });
        let folder = engine.image.folder.path().display().to_string();
        engine.begin(&[
            "dockerd",
            "--storage-driver=vfs",
            &format!("--data-root={folder}/data"),
            &format!("--exec-root={folder}/exec"),
            &format!("--pidfile={folder}/pid"),
            &format!("--host=unix://{folder}/socket"),
        ]);
        engine.until("docker version");
        engine.does(&format!("tar -C {folder}/root -c . | docker import - rocinante"));
        engine.does("docker network create rdma");
        engine.of_image = vec!["rocinante".to_owned()];
        engine
    }

    /// containerd, with its own command and a bridge of the CNI plugins.
    fn containerd() -> Self {
        let mut engine = Self::new("ctr.sh", "ctr", |image| {
            let (ctr, socket) = (found("ctr"), image.folder.path().join("socket"));
            let ctr = format!("{} --address {}", ctr.display(), socket.display());
            format!(
                "if [ $1 = run ]; then shift; set -- run --rootfs \"$@\"; fi\nexec {ctr} \"$@\""
            )
        });
        let folder = engine.image.folder.path().display().to_string();
        let net = network(&engine.image, r#", {"type": "rocinante-cni"}"#);
        let config = format!(
            "version = 2\nroot = {:?}\nstate = {:?}\ndisabled_plugins = [{:?}]\n\
             [grpc]\naddress = {:?}\n",
            format!("{folder}/data"),
            format!("{folder}/state"),
            "io.containerd.grpc.v1.cri",
            format!("{folder}/socket"),
        );
        fs::write(format!("{folder}/config.toml"), config).unwrap();
        engine.begin(&["containerd", &format!("--config={folder}/config.toml")]);
        engine.until("ctr version");
        // Where ctr looks for networks, whatever the host has there.
        engine.does(&format!(
            "mkdir -p {folder}/etc/cni && ln -sfn {net} {folder}/etc/cni/net.d && \
             mount -t overlay -o lowerdir={folder}/etc:/etc overlay /etc"
        ));
        engine.of_image.push(NAME.to_owned());
        engine
    }

    /// Starts a daemon.
    fn begin(&mut self, words: &[&str]) {
        let mut daemon = apart(&OF_ITS_OWN, PREPARE);
        daemon.args(self.places()).args(words).stdout(Stdio::null()).stderr(Stdio::null());
        self.daemon = Some(self.lab.host().spawn(&mut daemon).unwrap());
    }

    /// The arguments of [`PREPARE`], the name of the shell first.
    fn places(&self) -> [PathBuf; 7] {
        let cdi = PathBuf::from(format!("{REPOSITORY}/host/agent/dist/cdi.json"));
        let sockets = self.agent.socket().parent().unwrap().to_owned();
        let cni = env!("CARGO_BIN_EXE_rocinante-cni-under-test").into();
        let (folder, state) = (self.image.folder.path().to_owned(), self.agent.state());
        ["sh".into(), folder, sockets, state, cdi, AGENT.into(), cni]
    }

    /// A command beside the engine's daemon, or where the engine is to run.
    fn command(&self, words: &[&str]) -> Command {
        let mut command = match &self.daemon {
            Some(daemon) => {
                let of = |kind: &str| format!("/proc/{}/ns/{kind}", daemon.id());
                let mut enter = Command::new("nsenter");
                enter.arg(format!("--mount={}", of("mnt")));
                enter.arg(format!("--pid={}", of("pid_for_children")));
                let path = "PATH=$1/bin:$PATH; shift 6; exec \"$@\"";
                enter.args(["sh", "-c", path]).stdin(Stdio::null());
                enter
            }
            None => apart(&OF_ITS_OWN, PREPARE),
        };
        command.args(self.places()).args(words);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn does(&self, script: &str) {
        let done = self.lab.host().output(&mut self.command(&["sh", "-c", script])).unwrap();
        assert!(done.status.success(), "{script}: {done:?}");
    }

    /// Tries a command until it succeeds.
    fn until(&self, script: &str) {
        retried(|| {
            let done = self.lab.host().output(&mut self.command(&["sh", "-c", script])).unwrap();
            done.status.success().then_some(()).ok_or_else(|| format!("{script}: {done:?}"))
        });
    }

    /// Starts a shell in a container.
    fn start(&self, script: &str) -> Running {
        // containerd sets none for a root file system.
        let script = format!("PATH=/usr/bin; {script}");
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let example = format!("{REPOSITORY}/examples/containers/{}", self.example);
        let name = format!("rdma{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let image = self.of_image.iter().map(|word| if word == NAME { &name } else { &word[..] });
        let words: Vec<&str> = ["sh", &example]
            .into_iter()
            .chain(image)
            .chain(["/usr/bin/sh", "-c", &script])
            .collect();
        Running::of(self.lab.host().spawn(&mut self.command(&words)).unwrap())
    }

    fn run(&self, script: &str) -> Done {
        self.start(script).finish()
    }
}

/// A folder with the configuration of a network of the CNI plugins, and of those behind them.
fn network(image: &Image, behind: &str) -> String {
    let (net, addresses) = (image.folder.path().join("net"), image.folder.path().join("addresses"));
    fs::create_dir_all(&net).unwrap();
    let ranges = r#"[[{"subnet": "10.88.7.0/24"}]]"#;
    let addresses = addresses.display();
    let network = format!(
        r#"{{"cniVersion": "0.4.0", "name": "rdma", "plugins": [{{
            "type": "bridge", "bridge": "rdma0", "isGateway": true, "mtu": 4200,
            "ipam": {{"type": "host-local", "dataDir": "{addresses}", "ranges": {ranges}}}
        }}{behind}]}}"#
    );
    fs::write(net.join("rdma.conflist"), network).unwrap();
    net.display().to_string()
}

/// Containers without any privilege get `packet` from the agent, and exchange messages. The agent
/// knows the engine of one.
fn has_fast_ports(engine: &Engine, user: &str, called: &str) {
    let what = "grep -E '^(Uid|CapBnd|NoNewPrivs):' /proc/1/status";
    let rights = engine.run(what).succeeded().out;
    let rights: Vec<&str> = rights.split_whitespace().collect();
    let none = "0000000000000000";
    let expected = ["Uid:", user, user, user, user, "CapBnd:", none, "NoNewPrivs:", "1"];
    assert_eq!(rights, expected);
    let devices = format!("{PROGRAM} devices -v");
    let mut server = engine.start(&format!("{devices} >&2; exec {PROGRAM} pingpong"));
    let mut address = None;
    server.hears("its address", |line| {
        let own = line.split_once("::ffff:").map(|(_, rest)| rest);
        let own = own.and_then(|rest| rest.split(' ').next()).filter(|it| !it.starts_with("127."));
        address = own.map(str::to_owned);
        address.is_some()
    });
    server.says("netdev:           packet: eth0");
    server.says("waiting for a client");
    let mut status = Command::new(AGENT);
    status.args(["status", "--json", "--config"]).arg(engine.agent.config());
    let status = engine.lab.host().output(&mut status).unwrap();
    let status: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    assert_eq!(status["containers"][0]["engine"], called, "{status:#}");
    let client = engine.run(&format!("{PROGRAM} pingpong {}", address.unwrap())).succeeded();
    assert!(client.out.contains("1000 iters in"), "{}", client.out);
    for side in [client, server.finish().succeeded()] {
        assert!(side.err.contains("opened by the agent"), "{}", side.err);
    }
}

fn has_network_plugins() -> Result<(), &'static str> {
    let bridge = Path::new("/usr/lib/cni/bridge");
    bridge.exists().then_some(()).ok_or("no plugins: apt install containernetworking-plugins")
}

#[test]
fn podman_by_cdi_and_its_hook() {
    require!(need::machine_root());
    require!(need::program("podman"));
    require!(has_network_plugins());
    has_fast_ports(&Engine::podman(), "1000", "libpod");
}

#[test]
fn docker_by_a_volume() {
    require!(need::machine_root());
    require!(need::program("dockerd"));
    has_fast_ports(&Engine::docker(), "1000", "docker");
}

#[test]
fn containerd_by_a_mount_and_cni() {
    require!(need::machine_root());
    require!(need::program("ctr"));
    require!(has_network_plugins());
    has_fast_ports(&Engine::containerd(), "0", "cni");
}
