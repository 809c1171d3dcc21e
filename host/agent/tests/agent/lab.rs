//! A host with containers and an agent.

use std::fs;
use std::io::{self, Write as _};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use rocinante_agent::host::{Reason, SourceFilter};
use rocinante_lab::{ChildGuard, Container, Lab, LabConfig, LabError, Privilege};

use rustix::process::Signal;

use crate::asker::{As, Asker, eventually};

pub(crate) struct Host {
    // Dropped first.
    agent: Option<ChildGuard>,
    pub(crate) lab: Lab,
    dir: PathBuf,
    config: String,
}

impl Host {
    /// A host with this number of containers, without an agent.
    pub(crate) fn new(containers: u8) -> Result<Self, LabError> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        if rocinante_lab::enter_user_namespace()? != Privilege::Machine {
            return Err(LabError::Namespace {
                doing: "load a program for tc",
                source: std::io::ErrorKind::PermissionDenied.into(),
            });
        }
        let lab = Lab::new(&LabConfig { containers, ..LabConfig::default() })?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        // A tmpfs where there is one, as /run is.
        let tmpfs = PathBuf::from("/dev/shm");
        let above = if tmpfs.is_dir() { tmpfs } else { std::env::temp_dir() };
        let dir = above.join(format!("agent-{}-{number}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir(&dir).expect("a directory");
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).expect("ours");
        Ok(Self { agent: None, lab, dir, config: String::new() })
    }

    /// Adds a line to the configuration.
    pub(crate) fn configure(&mut self, line: &str) {
        self.config.push_str(line);
        self.config.push('\n');
    }

    /// Sends bytes from a container to a socket elsewhere by TCP.
    pub(crate) fn transfer(&self, from: usize, to: TcpListener, bytes: usize) {
        let address = to.local_addr().expect("an address");
        let reader = thread::spawn(move || {
            let (mut stream, _) = to.accept().expect("a client");
            io::copy(&mut stream, &mut io::sink()).expect("read")
        });
        let connected = self.container(from).run(|| TcpStream::connect(address));
        let mut stream = connected.expect("entered").expect("connected");
        stream.write_all(&vec![7; bytes]).expect("written");
        drop(stream);
        assert_eq!(reader.join().expect("no panic"), bytes as u64);
    }

    /// A directory of the test's own.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The agent's socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.join("s/agent.sock")
    }

    /// The agent's state.
    pub(crate) fn state(&self) -> PathBuf {
        self.dir.join("t/state.json")
    }

    pub(crate) fn config(&self) -> PathBuf {
        self.dir.join("agent.toml")
    }

    /// The command that starts an agent.
    pub(crate) fn command(&self) -> Command {
        let path = self.config();
        let (socket, state) = (self.socket(), self.state());
        let text = format!("socket = {socket:?}\nstate = {state:?}\n{}", self.config);
        fs::write(&path, text).expect("written");
        let mut command = Command::new(env!("CARGO_BIN_EXE_rocinante-agent"));
        command.arg("run").arg("--config").arg(path);
        command
    }

    /// Starts an agent and waits until it serves.
    pub(crate) fn start(&mut self) {
        self.start_as(self.command());
    }

    /// Starts this command, which becomes an agent.
    pub(crate) fn start_as(&mut self, mut command: Command) {
        let ready = std::os::unix::net::UnixDatagram::bind(self.dir.join("notify"));
        let ready = ready.expect("a socket");
        ready.set_read_timeout(Some(crate::asker::SOON)).expect("set");
        command.env("NOTIFY_SOCKET", self.dir.join("notify"));
        let log = fs::OpenOptions::new().create(true).append(true).open(self.dir.join("log"));
        command.stderr(log.expect("a file"));
        self.agent = Some(self.lab.host().spawn(&mut command).expect("an agent"));
        let mut said = [0; 64];
        let length = ready.recv(&mut said).expect("the agent is ready");
        assert_eq!(&said[..length], b"READY=1\n");
        fs::remove_file(self.dir.join("notify")).expect("removed");
    }

    /// Runs a command of the operator's, and returns whether it succeeds and its words.
    pub(crate) fn operator(&self, words: &[&str]) -> (bool, String) {
        let command = self.command();
        let mut operator = Command::new(command.get_program());
        operator.args(words).arg("--config").arg(self.config());
        let output = self.lab.host().output(&mut operator).expect("it runs");
        let said = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&said).into_owned())
    }

    pub(crate) fn status(&self) -> serde_json::Value {
        let (is_good, said) = self.operator(&["status", "--json"]);
        assert!(is_good, "{said}");
        serde_json::from_str(&said).expect("JSON")
    }

    /// The lines that agents have logged.
    pub(crate) fn log(&self) -> Vec<String> {
        let text = fs::read_to_string(self.dir.join("log")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Waits until a line has each of these words, and returns it.
    pub(crate) fn logged(&self, words: &[&str]) -> String {
        let has = |line: &String| words.iter().all(|word| line.contains(word));
        eventually(&format!("a line with {words:?}"), || self.log().iter().any(has));
        self.log().into_iter().find(has).expect("it was there")
    }

    /// Ends the agent, as `kill -9` does.
    pub(crate) fn kill(&mut self) {
        self.agent.take().expect("an agent").kill();
    }

    /// Starts an agent that stops itself the first time that it gets to this step.
    pub(crate) fn start_stopping_at(&mut self, step: &str) {
        let mut command = self.command();
        command.env("ROCINANTE_AGENT_STOP_AT", step);
        self.start_as(command);
    }

    /// Waits until the agent has stopped itself, does something, and lets it go on.
    pub(crate) fn while_it_stops<T>(&self, work: impl FnOnce() -> T) -> T {
        let stat = format!("/proc/{}/stat", self.agent_id());
        eventually("the agent stops itself", || {
            fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") T "))
        });
        let done = work();
        self.signal(Signal::CONT);
        done
    }

    /// Sends the agent a signal.
    pub(crate) fn signal(&self, signal: Signal) {
        let pid = rustix::process::Pid::from_raw(self.agent_id().cast_signed()).expect("a process");
        rustix::process::kill_process(pid, signal).expect("it is there");
    }

    /// Waits until the agent has ended by itself.
    pub(crate) fn ended(&mut self) {
        let mut agent = self.agent.take().expect("an agent");
        agent.wait(crate::asker::SOON).expect("it ends");
    }

    /// The process id of the agent.
    pub(crate) fn agent_id(&self) -> u32 {
        self.agent.as_ref().expect("an agent").id()
    }

    /// A program without rights in a container.
    pub(crate) fn asker(&self, container: usize) -> Asker {
        Asker::start(self.container(container).netns(), &self.socket(), As::Nobody)
    }

    /// Asks for a port on the first address of each container, from the first on.
    pub(crate) fn grant_each(&self, askers: &mut [Asker]) {
        for (index, asker) in askers.iter_mut().enumerate() {
            asker.granted(self.addresses(index)[0]);
        }
    }

    /// Sends this number of IPv6 frames of no address from a container, and waits until they are
    /// dropped.
    pub(crate) fn forge(&self, container: usize, asker: &mut Asker, count: u64) {
        let mac = self.mac(container);
        for _ in 0..count {
            asker.send(&[&[0xff; 6][..], &mac, &[0x86, 0xdd], &[0x60; 60]].concat());
        }
        eventually("they are dropped", || self.dropped(container)[3] >= count);
    }

    pub(crate) fn container(&self, index: usize) -> &Container {
        self.lab.container(index)
    }

    /// Adds an interface to a container: the host's end of its veth, and its name in there.
    pub(crate) fn add_interface(&self, container: usize, end: &str, name: &str) {
        let path = self.container(container).netns().path();
        let veth = ["link", "add", end, "type", "veth", "peer", "name", name, "netns", &path];
        self.lab.host().ip(&veth).expect("a veth");
    }

    /// The addresses of a container.
    pub(crate) fn addresses(&self, index: usize) -> [IpAddr; 2] {
        let container = self.container(index);
        [container.ipv4().into(), container.ipv6().expect("it has one").into()]
    }

    /// The index of an interface of the host.
    pub(crate) fn index(&self, name: &str) -> u32 {
        let of = || rocinante_netdev::Interface::by_name(name).map(|i| i.index);
        self.lab.host().run(of).expect("entered").expect("the interface")
    }

    /// The program at the host's end of a container.
    pub(crate) fn filter(&self, container: usize) -> Option<SourceFilter> {
        let index = self.index(self.container(container).host_end());
        self.lab.host().run(|| SourceFilter::find(index)).expect("entered").expect("a query")
    }

    /// The addresses that may leave a container.
    pub(crate) fn may_leave(&self, container: usize) -> Vec<IpAddr> {
        let filter = self.filter(container).expect("a program");
        filter.sources().expect("read").expect("sound").addresses.into_iter().collect()
    }

    /// The Ethernet address that may leave a container.
    pub(crate) fn mac(&self, container: usize) -> [u8; 6] {
        let filter = self.filter(container).expect("a program");
        filter.sources().expect("read").expect("sound").mac
    }

    /// Packets dropped at the host's end of a container, by reason.
    pub(crate) fn dropped(&self, container: usize) -> [u64; Reason::ALL.len()] {
        let filter = self.filter(container).expect("a program");
        Reason::ALL.map(|reason| filter.dropped(reason).expect("a counter"))
    }

    /// The socket of the operator's commands.
    pub(crate) fn control(&self) -> PathBuf {
        self.dir.join("t/control.sock")
    }

    /// The agent's state as it is written.
    pub(crate) fn state_text(&self) -> serde_json::Value {
        let text = fs::read_to_string(self.state()).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }

    /// The number of containers that the state has.
    pub(crate) fn known(&self) -> usize {
        self.state_text()["containers"].as_array().map_or(0, Vec::len)
    }

    /// The number of answers whose ports the state has.
    pub(crate) fn ports(&self) -> usize {
        let state = self.state_text();
        let containers = state["containers"].as_array().cloned().unwrap_or_default();
        containers.iter().map(|c| c["ports"].as_array().map_or(0, Vec::len)).sum()
    }

    /// Bytes that the agent counts for the ports of all containers.
    pub(crate) fn bytes(&self) -> u64 {
        let state = self.state_text();
        let containers = state["containers"].as_array().into_iter().flatten();
        let ports = containers.flat_map(|it| it["ports"].as_array().into_iter().flatten());
        ports.map(|port| port["bytes"].as_u64().expect("a number")).sum()
    }

    /// The slots of the rings that a container has, in the order of its ports.
    pub(crate) fn slots(&self, container: usize) -> Vec<u64> {
        let index = self.index(self.container(container).host_end());
        let state = self.state_text();
        let mut all = state["containers"].as_array().into_iter().flatten();
        let own = all.find(|known| known["host_end"] == index).expect("it is known");
        let ports = own["ports"].as_array().into_iter().flatten();
        ports.map(|port| port["ring"]["frames"].as_u64().expect("a ring")).collect()
    }

    /// The number of rings that the agent has mapped, so that their holders cannot resize them.
    pub(crate) fn guarded_rings(&self) -> usize {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.agent_id()));
        maps.expect("a process").lines().filter(|line| line.contains("socket:[")).count()
    }

    /// The number of descriptors that the agent has.
    pub(crate) fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.agent_id())).expect("a process").count()
    }

    /// The number of the agent's children, with those that were not waited for.
    pub(crate) fn children(&self) -> usize {
        let parent = format!("\nPPid:\t{}\n", self.agent_id());
        let processes = fs::read_dir("/proc").expect("mounted").flatten();
        let statuses = processes.filter_map(|it| fs::read_to_string(it.path().join("status")).ok());
        statuses.filter(|status| status.contains(&parent)).count()
    }

    /// Ends the agent, as systemd does.
    pub(crate) fn terminate(&mut self) {
        self.signal(Signal::TERM);
        self.ended();
    }

    /// Waits until that number of ports is there.
    pub(crate) fn has_ports(&self, count: usize) {
        eventually(&format!("{count} ports, not {}", self.ports()), || self.ports() == count);
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.agent = None;
        if std::thread::panicking() {
            eprintln!("the agent logged:\n{}", self.log().join("\n"));
        }
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Reports on the real stderr that a test did not run.
pub(crate) fn skip(name: &str, reason: &dyn std::fmt::Display) {
    use std::os::fd::AsFd as _;
    if let Ok(fd) = std::io::stderr().as_fd().try_clone_to_owned() {
        let _ = writeln!(fs::File::from(fd), "SKIPPED {name}: {reason}");
    }
}

/// A host, or a `SKIPPED` line and a return from the calling test.
macro_rules! host_or_skip {
    ($name:literal, $containers:expr) => {
        match $crate::lab::Host::new($containers) {
            Ok(host) => host,
            Err(error) => return $crate::lab::skip($name, &error),
        }
    };
}
pub(crate) use host_or_skip;

/// Resident memory of a process in KiB.
pub(crate) fn resident_kib(pid: u32) -> u64 {
    let status = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("status"));
    let status = status.expect("a process");
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).expect("a line");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}
