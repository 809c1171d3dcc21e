//! Commands of a user without any capability, on ports that an agent opened.

use super::{Running, command, rocinante, start_command, words};
use nix::sys::signal::Signal;
use rocinante::device::Backend;
use rocinante_lab::{ChildGuard, Container, Lab, LabConfig, Match, Netns};
use rocinante_netdev::handed::page::COUNTERS;
use rocinante_tests::on_backends;
use rocinante_tests::running::{PATIENCE, open_to_all, retried};
use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// `rocinante-agent` on a host of a lab.
pub(super) struct Agent {
    /// It ends before its files are removed: it would write its counters there.
    child: Option<ChildGuard>,
    dir: TempDir,
}

impl Agent {
    pub(super) fn start(host: &Netns) -> Self {
        let dir = open_to_all();
        let [config, state, socket] = ["agent.toml", "state/state.json", "socket/agent.sock"]
            .map(|name| dir.path().join(name));
        let guardian = env!("CARGO_BIN_EXE_rocinante-under-test");
        let lines = format!("socket = {socket:?}\nstate = {state:?}\nguardian = {guardian:?}\n");
        fs::write(&config, lines).unwrap();
        let mut agent = Self { child: None, dir };
        agent.start_again(host);
        agent
    }

    /// Starts it and waits until it serves.
    pub(super) fn start_again(&mut self, host: &Netns) {
        let notify = self.dir.path().join("notify");
        let ready = UnixDatagram::bind(&notify).unwrap();
        ready.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut agent =
            command(env!("CARGO_BIN_EXE_rocinante-agent-under-test"), ["run", "--config"]);
        agent.arg(self.dir.path().join("agent.toml")).env("NOTIFY_SOCKET", &notify);
        self.child = Some(host.spawn(&mut agent).unwrap());
        ready.recv(&mut [0; 64]).expect("the agent is ready");
        fs::remove_file(notify).unwrap();
    }

    /// Ends it, as `kill -9` does.
    pub(super) fn kill(&mut self) {
        self.child.take().unwrap().kill();
    }

    pub(super) fn config(&self) -> PathBuf {
        self.dir.path().join("agent.toml")
    }

    /// The directory of its state.
    pub(super) fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.dir.path().join("socket/agent.sock")
    }

    /// The process id.
    pub(super) fn id(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// A program that asks this agent, as a user without capabilities that can get none.
    pub(super) fn asker(&self, program: &Command) -> Command {
        let mut command = Command::new("setpriv");
        command
            .args(["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"])
            .args(["--bounding-set=-all", "--no-new-privs"])
            .arg(program.get_program())
            .args(program.get_args())
            .env_remove("ROCINANTE_NETDEV")
            .env("ROCINANTE_AGENT", self.socket())
            .stdin(Stdio::null());
        command
    }
}

/// Starts a command line in a container, as a user without capabilities that can get none.
pub(super) fn start(container: &Container, agent: &Agent, line: &str) -> Running {
    let mut command = agent.asker(&rocinante(words(line)));
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
    let agent = Agent::start(lab.host());
    let [there, here] = [0, 1].map(|index| lab.container(index));
    for (first, managed) in [(0, ""), (1, "--cm"), (2, "--cm")] {
        let line = |nth: usize, netdev: &str| {
            let port = 18600 + nth;
            format!("pingpong -p {port} --netdev {netdev} {managed} --bind {}", here.ipv4())
        };
        let mut servers = Vec::new();
        for nth in (0..3).map(|nth| (first + nth) % 3) {
            let server = match nth {
                0 => start(here, &agent, &line(0, backend.name())),
                1 => start(here, &agent, &line(1, "udp")),
                _ => start_with_right(here, &line(2, "packet")),
            }
            .that_waits();
            servers.push((nth, server));
        }
        // Beside an `afxdp` that an agent opened there is none, and of `packet` it opens more.
        let fourth = start(here, &agent, &line(3, backend.name())).that_waits();
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

on_backends! {
    a_handed_packet_lives_beside_others_on_its_address: Packet + machine_root =>
        beside_others_on(Backend::Packet);
    a_handed_afxdp_lives_beside_others_on_its_address: Xdp + machine_root =>
        beside_others_on(Backend::Xdp);
}

/// Two sides in two containers exchange messages and compare them, over both families.
fn ping_pong_on(backend: Backend) {
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let agent = Agent::start(lab.host());
    let [client, server] = [0, 1].map(|index| lab.container(index));
    for to in [server.ipv4().to_string(), server.ipv6().unwrap().to_string()] {
        let line = format!("pingpong --netdev {backend}");
        let waiting = start(server, &agent, &line).that_waits();
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

on_backends! {
    ping_pong_on_packet_without_a_capability: Packet + machine_root =>
        ping_pong_on(Backend::Packet);
    ping_pong_on_afxdp_without_a_capability: Xdp + machine_root =>
        ping_pong_on(Backend::Xdp);
}

/// The place of a counter in the agent's file.
fn place_of(counter: &str) -> usize {
    COUNTERS.iter().position(|(name, _)| *name == counter).unwrap()
}

/// The agent has what programs have counted that are gone, by any backend: of each container its
/// own. Opening a device waits for no page.
fn counters_stay_with_the_agent_on(backend: Backend) {
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let agent = Agent::start(lab.host());
    let [client, server] = [0, 1].map(|index| lab.container(index));
    let line = format!("pingpong --netdev {backend}");
    let waiting = start(server, &agent, &line).that_waits();
    let to = server.ipv4();
    start(client, &agent, &format!("{line} -n 3000 -s 5000 {to}")).finish().succeeded();
    waiting.finish().succeeded();
    let counted = || -> Option<[[u64; 2]; 2]> {
        let text = fs::read_to_string(agent.state().join("counters.json")).ok()?;
        let all: serde_json::Value = serde_json::from_str(&text).ok()?;
        let of = |container: &Container| {
            let mut known = all["containers"].as_array()?.iter();
            let own = known.find(|it| it["name"] == container.host_end())?;
            let past = &own["past"]["eth0"];
            let count = |name| past[place_of(name)].as_u64();
            Some([count("sent_pkts")?, count("rcvd_pkts")?])
        };
        Some([of(client)?, of(server)?])
    };
    let [[sent, received], [sent_back, received_there]] =
        retried(|| counted().ok_or_else(|| format!("{backend}: nothing is counted")));
    // Five packets for each message, at least one way; a lost one is sent again.
    assert!(received >= 3000 && received_there >= 3000, "{received} {received_there}");
    assert!(sent >= received_there && sent_back >= received, "{sent} {sent_back}");
}

on_backends! {
    counters_stay_with_the_agent_on_udp: Udp + machine_root =>
        counters_stay_with_the_agent_on(Backend::Udp);
    counters_stay_with_the_agent_on_packet: Packet + machine_root =>
        counters_stay_with_the_agent_on(Backend::Packet);
}

/// Two sides that compare every byte go on while the agent is killed and started again: neither
/// their ports nor the programs at the host's ends are the agent's.
fn messages_flow_while_the_agent_is_killed_on(backend: Backend) {
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let mut agent = Agent::start(lab.host());
    let [client, server] = [0, 1].map(|index| lab.container(index));
    let line = format!("pingpong --netdev {backend}");
    let waiting = start(server, &agent, &line).that_waits();
    let to = server.ipv4();
    let line = format!("{line} -n 1000000000 -s 5000 -c --json {to}");
    let mut asking = start(client, &agent, &line).that_says("opened by the agent");
    let seen = lab.count(&Match::roce()).unwrap();
    let mut more_come = |while_the_agent: &str| {
        let before = seen.counter().unwrap().packets;
        let end = Instant::now() + PATIENCE;
        while seen.counter().unwrap().packets < before + 200 {
            let ended = asking.child.try_wait().unwrap();
            assert_eq!(ended, None, "{backend}, while the agent {while_the_agent}");
            assert!(Instant::now() < end, "no packets while the agent {while_the_agent}");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    for _ in 0..4 {
        more_come("runs");
        agent.kill();
        more_come("is dead");
        agent.start_again(lab.host());
    }
    more_come("runs again");
    asking.child.signal(Signal::SIGTERM);
    // A byte that differs would have ended it with another status.
    let json = asking.finish().failed(143, &["stopped by SIGTERM"]).json();
    assert!(json["results"][0]["iters"].as_u64() > Some(100), "{json}");
    waiting.finish().failed(1, &["stopped by SIGTERM"]);
}

on_backends! {
    messages_flow_on_packet_while_the_agent_is_killed: Packet + machine_root + nft =>
        messages_flow_while_the_agent_is_killed_on(Backend::Packet);
    messages_flow_on_afxdp_while_the_agent_is_killed: Xdp + machine_root + nft =>
        messages_flow_while_the_agent_is_killed_on(Backend::Xdp);
}
