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

/// Starts a command line in a container as the same user, with a right of its own to `packet` and
/// without an agent.
fn start_with_right(container: &Container, line: &str) -> Running {
    let program = rocinante(words(line));
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .args(["--inh-caps=-all,+net_raw", "--ambient-caps=-all,+net_raw"])
        .arg(program.get_program())
        .args(program.get_args())
        .env_remove("ROCINANTE_NETDEV")
        .env("ROCINANTE_AGENT", "off")
        .stdin(Stdio::null());
    start_command(container, &mut command)
}

/// On one address: a port that an agent opened, a process on `udp`, and one on a `packet` of its
/// own. Each is the first in its turn, reached from another container and from beside it.
fn beside_others_on(backend: Backend) {
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let agent = Agent::start(&lab, &format!("beside-{backend}"));
    let [there, here] = [0, 1].map(|index| lab.container(index));
    for (first, managed) in [(0, ""), (1, "--cm"), (2, "--cm")] {
        let line = |nth: usize, netdev: &str| {
            let port = 18600 + nth;
            format!("pingpong -p {port} --netdev {netdev} {managed} --bind {}", here.ipv4())
        };
        let mut servers = Vec::new();
        for nth in (0..3).map(|nth| (first + nth) % 3) {
            let mut server = match nth {
                0 => start(here, &agent, &line(0, backend.name())),
                1 => start(here, &agent, &line(1, "udp")),
                _ => start_with_right(here, &line(2, "packet")),
            };
            server.says("waiting for a client");
            servers.push((nth, server));
        }
        // Beside an `afxdp` that an agent opened there is none, and of `packet` it opens more.
        let mut fourth = start(here, &agent, &line(3, backend.name()));
        fourth.says("waiting for a client");
        servers.push((3, fourth));
        for (nth, server) in servers {
            let client = format!("pingpong -p {} {managed} -e -n 300 -s 5000", 18600 + nth);
            // The last two are asked from the servers' own address.
            let from = if nth < 2 { there } else { here };
            let client = format!("{client} --netdev udp --bind {} -c {}", from.ipv4(), here.ipv4());
            start(from, &agent, &client).finish().succeeded();
            let said = server.finish().succeeded().err;
            let (name, is_handed) = match (nth, backend) {
                (0, _) => (backend.name(), true),
                (1, _) => ("udp", false),
                (2, _) => ("packet", false),
                _ => ("packet", true),
            };
            assert!(said.contains(&format!(", {name}: ")), "{nth}: {said}");
            assert_eq!(said.contains("opened by the agent"), is_handed, "{nth}: {said}");
            let gave_way = nth == 3 && backend == Backend::Xdp;
            assert_eq!(said.contains("not afxdp, because another"), gave_way, "{nth}: {said}");
        }
    }
}

#[test]
fn a_handed_packet_lives_beside_others_on_its_address() {
    require_machine_root!();
    require_backend!(Backend::Packet);
    beside_others_on(Backend::Packet);
}

#[test]
fn a_handed_afxdp_lives_beside_others_on_its_address() {
    require_machine_root!();
    require_backend!(Backend::Xdp);
    beside_others_on(Backend::Xdp);
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
