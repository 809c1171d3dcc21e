//! The agent outlives programs of containers, and has the connections of those ended that are
//! killed. No end asks silent peers here, and no other process has the address: nothing else could
//! be the reason.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use rocinante::cm::{Connection, Listener, Params};
use rocinante::device::Backend;
use rocinante_lab::{ChildGuard, Container, Lab, LabConfig};
use rocinante_tests::alone::myself;
use rocinante_tests::harness::{Family, PATIENCE, Setup, Side, address, wait_until};
use rocinante_tests::idle::{Client, be_client};
use rocinante_tests::{need, require, test_name};

use super::handed::Agent;
use super::run::Installed;

const PORT: u16 = 7471;
const CONNECTIONS: usize = 3;
/// The script of the first process of a pid namespace: it starts a program, which ends with it, and
/// ends with this process.
const INSIDE: &str = "ROCINANTE_PARENT_PID=1 \"$@\" & read line";

macro_rules! outlived {
    ($( $name:ident: $backend:ident $work:ident; )*) => {$(
        #[test]
        fn $name() {
            be_client(Backend::$backend);
            require!(need::machine_root());
            require!(need::backend(Backend::$backend));
            $work(Backend::$backend, test_name!());
        }
    )*};
}

outlived! {
    peers_of_programs_in_containers_that_are_killed_are_told_udp: Udp are_told;
    peers_of_programs_in_containers_that_are_killed_are_told_packet: Packet are_told;
    an_agent_that_is_started_again_knows_who_lives: Udp are_told_by_another_agent;
    a_program_of_run_has_two_and_one_does_it: Udp of_run_are_told;
}

/// A host with an agent, and the survivor in its last container.
struct Scene<'a> {
    lab: &'a Lab,
    side: &'a Side,
    listener: Listener,
}

/// A program, and the survivor's ends of its connections.
struct Program {
    child: ChildGuard,
    connections: Vec<Connection>,
}

fn with_scene(containers: u8, work: impl FnOnce(&Scene<'_>) + Send) {
    let lab = Lab::new(&LabConfig { containers, ..LabConfig::default() }).unwrap();
    let last = usize::from(containers) - 1;
    let survivor = address(&lab, last, Family::V4);
    let side = Side::open(lab.container(last).netns(), survivor, &Setup::new(Backend::Udp));
    side.run(|| {
        let listener = Listener::bind(&side.ctx, SocketAddr::new(survivor, PORT), 16).unwrap();
        work(&Scene { lab: &lab, side: &side, listener });
    });
}

impl Scene<'_> {
    /// No questions to silent peers.
    fn params() -> Params {
        Params::default().keep_alive(None)
    }

    /// Starts a command that becomes a program in a container, on an address of that.
    fn start(&self, container: &Container, own: IpAddr, mut command: Command) -> Program {
        let client = Client { own, connections: CONNECTIONS };
        let mut child = container.spawn(client.prepare(&mut command, &self.listener)).unwrap();
        let server = (self.side, &self.listener);
        let connections = client.accept(&mut child, server, &Self::params());
        Program { child, connections }
    }
}

impl Program {
    fn kill(&mut self) {
        self.child.signal(Signal::SIGKILL);
        self.is_known();
    }

    /// Waits until the survivor knows that the program has gone.
    fn is_known(&self) {
        let killed = Instant::now();
        for connection in &self.connections {
            connection.wait_disconnected(PATIENCE.saturating_sub(killed.elapsed())).unwrap();
        }
        println!("known after {:?}", killed.elapsed());
    }

    fn lives(&self) -> bool {
        self.connections.iter().all(|connection| !connection.is_disconnected())
    }
}

/// The programs that the agent has something of.
fn wards(agent: &Agent) -> usize {
    let all = fs::read_dir(format!("/proc/{}/fd", agent.id())).unwrap().flatten();
    let links = all.filter_map(|entry| fs::read_link(entry.path()).ok());
    // Pages of counters have another name.
    links.filter(|link| link.to_string_lossy().starts_with("/memfd:rocinante (")).count()
}

fn are_told(_: Backend, test: &str) {
    with_scene(3, |scene| {
        let agent = Agent::start(scene.lab.host());
        let [first, second] = [0, 1].map(|index| scene.lab.container(index));
        let program = || agent.asker(&myself(test));
        let mut one = scene.start(first, first.ipv4().into(), program());
        // It has another address of the same container, so it could do nothing for the first.
        first.netns().ip(&["address", "add", "10.77.0.101/24", "dev", Container::DEVICE]).unwrap();
        let beside = scene.start(first, "10.77.0.101".parse().unwrap(), program());
        // All processes of the other container die with the first of their pid namespace.
        let inside = program();
        let mut container = Command::new("unshare");
        container.args(["--pid", "--fork", "--kill-child", "sh", "-c", INSIDE, "sh"]);
        container.arg(inside.get_program()).args(inside.get_args());
        for (name, value) in inside.get_envs() {
            container.env(name, value.unwrap_or_default());
        }
        container.env_remove("ROCINANTE_NETDEV").stdin(Stdio::piped());
        let mut two = scene.start(second, second.ipv4().into(), container);
        wait_until("the agent has all three", || wards(&agent) == 3);
        one.kill();
        assert!(two.lives() && beside.lives());
        two.kill();
        assert!(beside.lives());
        wait_until("the agent has let go of them", || wards(&agent) == 1);
    });
}

fn are_told_by_another_agent(_: Backend, test: &str) {
    with_scene(2, |scene| {
        let mut agent = Agent::start(scene.lab.host());
        let first = scene.lab.container(0);
        let own = first.ipv4().into();
        let mut one = scene.start(first, own, agent.asker(&myself(test)));
        let mut two = scene.start(first, own, agent.asker(&myself(test)));
        wait_until("the agent has both", || wards(&agent) == 2);
        for _ in 0..2 {
            agent.kill();
            agent.start_again(scene.lab.host());
            wait_until("both have found it", || wards(&agent) == 2);
        }
        // The other one does this itself.
        one.kill();
        assert!(two.lives());
        two.kill();
    });
}

/// The guardian of `run` is killed with its program, as with a container. Where both live a lock
/// lets one of them do it.
fn of_run_are_told(_: Backend, test: &str) {
    with_scene(2, |scene| {
        let agent = Agent::start(scene.lab.host());
        let installed = Installed::new();
        let first = scene.lab.container(0);
        let start = || {
            let mut run = installed.run(&["--"]);
            let program = myself(test);
            run.arg(program.get_program()).args(program.get_args());
            run.env("ROCINANTE_AGENT", agent.socket());
            scene.start(first, first.ipv4().into(), run)
        };
        for is_guardian_killed in [true, false] {
            let mut one = start();
            wait_until("the agent has it", || wards(&agent) == 1);
            let guardians = guardians_in(first);
            assert_eq!(guardians.len(), 1);
            for pid in guardians.into_iter().filter(|_| is_guardian_killed) {
                kill(pid, Signal::SIGKILL).unwrap();
            }
            one.kill();
            wait_until("both have ended", || wards(&agent) + guardians_in(first).len() == 0);
        }
    });
}

/// The guardians in the network namespace of a container.
fn guardians_in(container: &Container) -> Vec<Pid> {
    let of = |path: &Path| fs::metadata(path).map(|it| (it.dev(), it.ino())).ok();
    let place = of(Path::new(&container.netns().path()));
    let all = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    let inside = all.filter(|process| of(&process.join("ns/net")) == place);
    let is_guardian = |process: &PathBuf| {
        let line = fs::read(process.join("cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).any(|word| word == b"guardian")
    };
    let pid = |process: PathBuf| process.file_name()?.to_str()?.parse().ok().map(Pid::from_raw);
    inside.filter(is_guardian).filter_map(pid).collect()
}

/// How long a server holds the queue pairs of many programs that die at once: all processes of an
/// address, or of an address each, by one signal, while nothing is in flight. `ROCINANTE_TEST_MANY`
/// is their number.
#[test]
fn many_at_once() {
    const NAME: &str = "cli::outlived::many_at_once";
    const MANY: &str = "ROCINANTE_TEST_MANY";
    be_client(Backend::Udp);
    require!(need::machine_root());
    let count = std::env::var(MANY).map_or(12, |number| number.parse().unwrap());
    let modes = [("neither", 1), ("agent", 1), ("agent", count), ("run", 1)];
    for (mode, containers) in modes {
        with_scene(containers as u8 + 1, |scene| {
            let agent = (mode == "agent").then(|| Agent::start(scene.lab.host()));
            let installed = Installed::new();
            let (mut programs, mut connections) = (Vec::<ChildGuard>::new(), Vec::new());
            for nth in 0..count {
                let container = scene.lab.container(nth % containers);
                let program = myself(NAME);
                let mut command = match mode {
                    "run" => installed.run(&["--"]),
                    _ => Command::new("env"),
                };
                command.arg(program.get_program()).args(program.get_args());
                let socket = agent.as_ref().map_or("off".into(), Agent::socket);
                let client = Client { own: container.ipv4().into(), connections: CONNECTIONS };
                client.prepare(&mut command, &scene.listener).stdout(Stdio::null());
                command.env("ROCINANTE_AGENT", socket);
                let group = programs.first().map_or(0, ChildGuard::id);
                command.process_group(group.cast_signed());
                programs.push(container.spawn(&mut command).unwrap());
                for _ in 0..CONNECTIONS {
                    let request = scene.listener.request(Some(PATIENCE)).unwrap();
                    let qp = scene.side.qp().build().unwrap();
                    let connecting = request.accept(qp, &Params::default()).unwrap();
                    connections.push(connecting.wait(PATIENCE).unwrap());
                }
            }
            let held = || scene.side.ctx.resources().unwrap().qps;
            assert_eq!(held(), count * CONNECTIONS);
            killpg(Pid::from_raw(programs[0].id().cast_signed()), Signal::SIGKILL).unwrap();
            let killed = Instant::now();
            for connection in connections {
                connection.wait_disconnected(PATIENCE).unwrap();
            }
            assert_eq!(held(), 0);
            let took = killed.elapsed();
            println!("{count} programs, containers {containers}, {mode}: after {took:?}");
        });
    }
}
