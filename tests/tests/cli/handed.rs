//! Commands of a user without any capability, on ports that an agent opened.

use super::{Running, command, rocinante, start_command, words};
use rocinante::device::Backend;
use rocinante_node::{ChildGuard, Container, Lab, LabConfig};
use rocinante_tests::{require_backend, require_machine_root};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// `rocinante-agent` on the host of a lab.
struct Agent {
    _child: ChildGuard,
    dir: PathBuf,
}

impl Agent {
    fn start(lab: &Lab, test: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("handed-{test}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir(&dir).unwrap();
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
        let (config, state) = (dir.join("agent.toml"), dir.join("state/state.json"));
        let socket = dir.join("socket/agent.sock");
        fs::write(&config, format!("socket = {socket:?}\nstate = {state:?}\n")).unwrap();
        let mut agent =
            command(env!("CARGO_BIN_EXE_rocinante-agent-under-test"), ["run", "--config"]);
        let child = lab.host().spawn(agent.arg(config)).unwrap();
        let end = Instant::now() + Duration::from_secs(20);
        while !socket.exists() {
            assert!(Instant::now() < end, "the agent does not start");
            std::thread::sleep(Duration::from_millis(5));
        }
        Self { _child: child, dir }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Starts a command line in a container, as a user without capabilities that can get none.
fn start(container: &Container, agent: &Agent, line: &str) -> Running {
    let program = rocinante(words(line));
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"])
        .args(["--bounding-set=-all", "--no-new-privs"])
        .arg(program.get_program())
        .args(program.get_args())
        .env_remove("ROCINANTE_NETDEV")
        .env("ROCINANTE_AGENT", agent.dir.join("socket/agent.sock"))
        .stdin(Stdio::null());
    start_command(container, &mut command)
}

/// Two sides in two containers exchange messages and compare them, over both families.
fn ping_pong_on(backend: Backend) {
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let agent = Agent::start(&lab, backend.name());
    let [client, server] = [0, 1].map(|index| lab.container(index));
    for to in [server.ipv4().to_string(), server.ipv6().unwrap().to_string()] {
        let line = format!("pingpong --netdev {backend}");
        let mut waiting = start(server, &agent, &line);
        waiting.says("waiting for a client");
        let done = start(client, &agent, &format!("{line} -n 500 -s 5000 -c {to}")).finish();
        let done = [done.succeeded(), waiting.finish().succeeded()];
        for side in done {
            let said = format!("{backend}: asked for");
            assert!(
                side.err.contains(&said) && side.err.contains("opened by the agent"),
                "{}",
                side.err
            );
        }
    }
}

#[test]
fn ping_pong_on_packet_without_a_capability() {
    require_machine_root!();
    require_backend!(Backend::Packet);
    ping_pong_on(Backend::Packet);
}

#[test]
fn ping_pong_on_afxdp_without_a_capability() {
    require_machine_root!();
    require_backend!(Backend::Xdp);
    ping_pong_on(Backend::Xdp);
}
