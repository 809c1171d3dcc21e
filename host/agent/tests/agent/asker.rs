//! A program in a container, without any capability: a process that follows the test's commands.

use std::io::{BufRead as _, BufReader, IoSlice, Write as _};
use std::mem::MaybeUninit;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rocinante_lab::{ChildGuard, Netns};
use rocinante_netdev::handed::{Agent, Answer, Code, Request, receive_answer, send_request};
use rocinante_netdev::handed::{guard, page};
use rocinante_netdev::{AnyPort, Backend, Interface, PortConfig, Shards, auto};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix,
    SocketFlags, SocketType, UCred, connect, send, sendmsg, shutdown, socket_with,
    sockopt::set_socket_linger,
};
use rustix::process::{Gid, Pid, Resource, Rlimit, Uid};

/// The variable that has the path of the agent's socket.
const SOCKET: &str = "TEST_AGENT_SOCKET";
/// The variable that says that the standard error is a connection with the agent.
const INHERITED: &str = "TEST_AGENT_INHERITED";
/// Before each answer.
const MARK: char = '@';
/// Bytes of the virtio header before a frame.
const VNET: [u8; 10] = [0; 10];

/// How the process runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum As {
    /// Without any capability, and without a way to one.
    Nobody,
    Root,
}

/// A running program.
pub(crate) struct Asker {
    child: ChildGuard,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Asker {
    /// Starts one in a namespace.
    pub(crate) fn start(netns: &Netns, socket: &Path, who: As) -> Self {
        let own = std::env::current_exe().expect("this program");
        let mut command = match who {
            As::Nobody => {
                let mut command = Command::new("setpriv");
                command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
                command.args(["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]);
                command.arg(own);
                command
            }
            As::Root => Command::new(own),
        };
        Self::of_command(netns, socket, &mut command)
    }

    /// Starts this program by a command that ends with its name.
    pub(crate) fn of_command(netns: &Netns, socket: &Path, command: &mut Command) -> Self {
        command.args(["--exact", "role", "--nocapture"]).env(SOCKET, socket);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        Self::of(netns, command)
    }

    /// Starts this command, with pipes, which becomes one.
    pub(crate) fn of(netns: &Netns, command: &mut Command) -> Self {
        let mut child = netns.spawn(command).expect("a program in a container");
        let to = child.child_mut().stdin.take().expect("a pipe");
        let from = BufReader::new(child.child_mut().stdout.take().expect("a pipe"));
        Self { child, to, from }
    }

    /// Sends a command, and returns the answer.
    pub(crate) fn tell(&mut self, command: &str) -> String {
        self.say(command);
        self.hear()
    }

    /// Tells it something, without waiting.
    pub(crate) fn say(&mut self, command: &str) {
        writeln!(self.to, "{command}").expect("it reads");
    }

    /// The next answer.
    pub(crate) fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.from.read_line(&mut line).expect("it writes") > 0, "it ended");
            // The first answer may stand behind text of the test harness.
            if let Some((_, answer)) = line.split_once(MARK) {
                return answer.trim().to_owned();
            }
        }
    }

    /// Asks for a port of `packet` on an interface with this address, and expects it.
    pub(crate) fn granted(&mut self, address: IpAddr) {
        let answer = self.tell(&format!("ask {address}"));
        assert!(answer.starts_with("granted 1 "), "{answer}");
    }

    /// As [`granted`](Self::granted); returns the microseconds that it took.
    pub(crate) fn timed(&mut self, address: IpAddr) -> u64 {
        let answer = self.tell(&format!("ask {address}"));
        assert!(answer.starts_with("granted 1 "), "{answer}");
        answer.rsplit(' ').next().and_then(|us| us.parse().ok()).expect("a time")
    }

    /// Opens a port of a backend on `eth0`, with the agent's help, and expects it.
    pub(crate) fn opened(&mut self, backend: Backend, address: IpAddr) {
        let answer = self.tell(&format!("open {backend} {address}"));
        assert!(answer.starts_with(&format!("opened {backend}: ")), "{answer}");
        assert!(answer.contains("opened by the agent"), "{answer}");
    }

    /// Opens likewise, and returns the error.
    pub(crate) fn not_opened(&mut self, backend: Backend, address: IpAddr) -> String {
        let answer = self.tell(&format!("open {backend} {address}"));
        answer.strip_prefix("no port ").unwrap_or_else(|| panic!("{answer}")).to_owned()
    }

    /// Asks likewise, and returns the code of the refusal with its reason.
    pub(crate) fn refused(&mut self, address: IpAddr) -> String {
        let answer = self.tell(&format!("ask {address}"));
        answer.strip_prefix("refused ").unwrap_or_else(|| panic!("{answer}")).to_owned()
    }

    /// Sends a frame from the last port.
    pub(crate) fn send(&mut self, frame: &[u8]) {
        let hex: String = frame.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(self.tell(&format!("send {hex}")), "sent");
    }

    pub(crate) fn kill(mut self) {
        self.child.kill();
    }

    /// Kills it. The process that has its connection goes on.
    pub(crate) fn kill_first(&mut self) {
        self.child.kill();
    }

    /// The process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }
}

/// The process's side: it reads commands and answers.
pub(crate) fn run() {
    let Some(path) = std::env::var_os(SOCKET).map(PathBuf::from) else { return };
    let mut devices = crate::pages::Devices::default();
    let (mut leases, mut sockets) = (Vec::new(), Vec::<OwnedFd>::new());
    let mut ports = Vec::<AnyPort>::new();
    let (mut silent, mut places, mut asked) = (Vec::new(), Vec::<OwnedFd>::new(), None);
    let mut captures = crate::captures::Captures::default();
    if std::env::var_os(INHERITED).is_some() {
        asked = std::io::stderr().as_fd().try_clone_to_owned().ok();
        println!("{MARK}here");
    }
    for line in std::io::stdin().lines() {
        let line = line.expect("a line");
        let mut words = line.split_whitespace();
        let answer = match (words.next(), words.next()) {
            (Some("ask"), Some(address)) => {
                let request = request_with(address, words.next(), words.next());
                match ask(&path, &request) {
                    Ok((lease, answer, fds, took)) => {
                        let said = told(&answer, fds.len(), took);
                        if answer.outcome.is_ok() {
                            leases.push(lease);
                            sockets.extend(fds);
                        }
                        said
                    }
                    Err(what) => what,
                }
            }
            (Some("send-request"), Some(address)) => {
                // As `ask`.
                let sent = || {
                    let connection = connected(&path).expect("an agent");
                    send_request(&connection, &request(address)).ok().map(|()| connection)
                };
                asked = Some((0..3).find_map(|_| sent()).expect("sent"));
                "sent".into()
            }
            (Some("wait-for"), Some(address)) => {
                // As `send-request`, of a program that waits for its turn.
                let connection = connected(&path).expect("an agent");
                let request = Request { wait_ms: Some(20_000), ..request(address) };
                send_request(&connection, &request).expect("sent");
                let (answer, fds) = answer(&connection).expect("an answer").expect("an answer");
                asked = Some(connection);
                told(&answer, fds.len(), Duration::ZERO)
            }
            (Some("hear-answer"), _) => {
                let connection = asked.take().expect("a connection");
                match answer(&connection) {
                    Ok(Ok((answer, fds))) => {
                        leases.push(connection);
                        let said = told(&answer, fds.len(), Duration::ZERO);
                        sockets.extend(fds);
                        said
                    }
                    other => format!("error {other:?}"),
                }
            }
            (Some("move"), Some(netns)) => {
                // The same process, with its first thread in another namespace.
                let mut command = Command::new("nsenter");
                command.arg(format!("--net={netns}"));
                let error = with_connection(&mut command, asked.take()).exec();
                format!("error {error}")
            }
            (Some("pass-on"), _) => {
                // This one reads no line any more: they are for the other process.
                let mut command = Command::new("env");
                let child = with_connection(&mut command, asked.take()).spawn();
                let _ = child.and_then(|mut child| child.wait());
                return;
            }
            (Some("forge"), Some(pid)) => {
                let request = request(words.next().expect("an address"));
                let request = request.encode().expect("short");
                let pid = Pid::from_raw(pid.parse().expect("a number")).expect("a process");
                let credentials = UCred { pid, uid: Uid::ROOT, gid: Gid::ROOT };
                raw(&path, &request, Some(SendAncillaryMessage::ScmCredentials(credentials)))
            }
            (Some("raw"), Some(hex)) => {
                let descriptors = words.next().map_or(0, |count| count.parse().expect("a number"));
                let stdin = std::io::stdin();
                let fds = vec![stdin.as_fd(); descriptors];
                let along = (descriptors > 0).then_some(SendAncillaryMessage::ScmRights(&fds));
                raw(&path, &bytes(hex), along)
            }
            (Some("flood"), Some(count)) => {
                flood(&path, count.parse().expect("a number"), words.next())
            }
            (Some("open"), Some(backend)) => {
                match opened(&path, backend, words.next().expect("an address")) {
                    Ok((port, choice)) => {
                        ports.push(port);
                        format!("opened {choice}")
                    }
                    Err(error) => format!("no port {error}"),
                }
            }
            (Some("send"), Some(hex)) => {
                let sent = match ports.last_mut() {
                    Some(AnyPort::Xdp(port)) => port.send_frame(&bytes(hex)),
                    Some(other) => panic!("{other:?} sends no frames"),
                    None => {
                        let frame = [&VNET[..], &bytes(hex)].concat();
                        let socket = sockets.last().expect("a port");
                        send(socket, &frame, SendFlags::empty()).map(drop).map_err(Into::into)
                    }
                };
                sent.map_or_else(|error| format!("error {error}"), |()| "sent".into())
            }
            (Some(which @ ("device" | "old-device")), Some(key)) => {
                let name = words.next().expect("a name");
                devices.open(&path, key, name, which == "old-device")
            }
            (Some(way @ ("charge" | "refund")), Some(first)) => {
                let amounts: Vec<&str> = std::iter::once(first).chain(words).collect();
                devices.charge(&amounts, way == "refund")
            }
            (Some("count"), Some(count)) => devices.count(count),
            (Some(way @ ("capture" | "taken" | "let-go")), at) => captures.obey(&path, way, at),
            (Some("close-devices"), _) => devices.close(),
            (Some(what @ ("hold" | "hold-pages")), Some(count)) => {
                // Connections that say nothing.
                let count: usize = count.parse().expect("a number");
                let path = if what == "hold" { path.clone() } else { page::path(&path) };
                leases.extend((0..count).map_while(|_| connected(&path).ok()));
                "done".into()
            }
            (Some("leave-pages"), Some(count)) => {
                // It asks, and is not there when the page comes.
                let count: u64 = count.parse().expect("a number");
                let path = page::path(&path);
                (0..count).for_each(|key| {
                    page::ask(connected(&path).expect("an agent"), key).expect("sent");
                });
                "done".into()
            }
            (Some("occupy"), Some(count)) => {
                let count: u64 = count.parse().expect("a number");
                let maximum = rustix::process::getrlimit(Resource::Nofile).maximum;
                let raised = Rlimit { current: maximum, maximum };
                rustix::process::setrlimit(Resource::Nofile, raised).expect("as permitted");
                let stdin = std::io::stdin();
                let copy = |_| stdin.as_fd().try_clone_to_owned().ok();
                places.extend((0..count).map_while(copy));
                places.len().to_string()
            }
            (Some("obstruct"), Some(count)) => {
                // Each descriptor's text has a line for each file.
                let maximum = rustix::process::getrlimit(Resource::Nofile).maximum;
                let raised = Rlimit { current: maximum, maximum };
                rustix::process::setrlimit(Resource::Nofile, raised).expect("as permitted");
                let poll = epoll::create(epoll::CreateFlags::CLOEXEC).expect("a descriptor");
                let (event, _) = rustix::pipe::pipe().expect("a pipe");
                for _ in 0..count.parse().expect("a number") {
                    let file = event.try_clone().expect("a descriptor");
                    epoll::add(&poll, &file, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
                        .expect("added");
                    places.extend([file, poll.try_clone().expect("a descriptor")]);
                }
                "done".into()
            }
            (Some("hang-up"), _) => {
                leases.clear();
                "done".into()
            }
            (Some("close"), _) => {
                leases.clear();
                sockets.clear();
                ports.clear();
                "done".into()
            }
            (Some("leave-a-child"), Some(seconds)) => {
                // It inherits the last port as its standard input.
                let port = sockets.last().expect("a port").try_clone().expect("a copy");
                let child = Command::new("sleep").arg(seconds).stdin(Stdio::from(port)).spawn();
                child.map_or_else(|e| format!("error {e}"), |child| child.id().to_string())
            }
            (Some("leave-a-stranger"), Some(seconds)) => {
                // The same, in a network namespace of its own.
                let port = sockets.last().expect("a port").try_clone().expect("a copy");
                let mut unshare = Command::new("unshare");
                unshare.args(["--user", "--net", "sleep", seconds]).stdin(Stdio::from(port));
                unshare.spawn().map_or_else(|e| format!("error {e}"), |it| it.id().to_string())
            }
            (Some("hide-in-a-thread"), _) => {
                // The thread's own descriptors are those of now.
                let (to, from) = std::sync::mpsc::channel();
                std::thread::spawn(move || {
                    let own = nix::sched::unshare(nix::sched::CloneFlags::CLONE_FILES);
                    to.send(own).expect("it waits");
                    loop {
                        std::thread::park();
                    }
                });
                from.recv().expect("an answer").expect("descriptors of its own");
                sockets.clear();
                // The thread has the connections, too.
                leases.drain(..).for_each(|it| shutdown(it, Shutdown::Both).expect("connected"));
                "hidden".into()
            }
            (Some("rights"), _) => rights(),
            (Some("leave"), Some(count)) => {
                let [count, parcels] = [Some(count), words.next()]
                    .map(|word| word.and_then(|word| word.parse().ok()).expect("a number"));
                let path = guard::path(&path);
                leases.extend((0..count).map_while(|_| left(&path, parcels).ok()));
                format!("connected {}", leases.len())
            }
            (Some("linger"), Some(count)) => {
                // Parcels, and then a message that is too long.
                let count: usize = count.parse().expect("a number");
                let path = guard::path(&path);
                let sent = (0..count).try_for_each(|_| {
                    let connection = connected(&path)?;
                    [1, 100].iter().try_for_each(|length| {
                        send_lingering(&connection, &vec![0; *length], &mut silent)
                    })
                });
                sent.map_or_else(|error| format!("error {error}"), |()| "sent".into())
            }
            (Some("linger-request"), Some(count)) => {
                let count: usize = count.parse().expect("a number");
                let sent = (0..count)
                    .try_for_each(|_| send_lingering(&connected(&path)?, b"{}", &mut silent));
                sent.map_or_else(|error| format!("error {error}"), |()| "sent".into())
            }
            other => format!("error {other:?}"),
        };
        println!("{MARK}{answer}");
    }
}

/// A request for a port on `eth0`.
pub(crate) fn request(address: &str) -> Request {
    request_with(address, None, None)
}

fn request_with(address: &str, interface: Option<&str>, frames: Option<&str>) -> Request {
    let interfaces = rocinante_netdev::Interface::all().expect("interfaces");
    let eth0 = interfaces.iter().find(|i| i.name == "eth0").map_or(0, |i| i.index);
    Request {
        backend: Backend::Packet,
        interface: interface.map_or(eth0, |index| index.parse().expect("a number")),
        addresses: address.split(',').map(|a| a.parse().expect("an address")).collect(),
        shards: Shards::ONE,
        ring_frames: frames.map(|frames| frames.parse().expect("a number")),
        tx_buffer_bytes: None,
        despite_rules: false,
        wait_ms: None,
    }
}

/// Opens a port as programs do.
fn opened(path: &Path, backend: &str, address: &str) -> Result<(AnyPort, auto::Choice), String> {
    let eth0 = Interface::by_name("eth0").map_err(|e| e.to_string())?;
    let own = [address.parse().expect("an address")];
    let want = (backend != "auto").then(|| backend.parse().expect("a backend"));
    auto::choose(&eth0, &own, want, &PortConfig::default(), &Agent::at(path))
        .map_err(|e| e.to_string())
}

pub(crate) fn connected(path: &Path) -> rustix::io::Result<OwnedFd> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Sends a message with descriptors.
///
/// The kernel counts descriptors on their way by user, and programs of other tests have the same
/// user: the call waits while it says ETOOMANYREFS.
fn pass(
    to: &OwnedFd,
    bytes: &[u8],
    control: &mut SendAncillaryBuffer<'_, '_, '_>,
) -> rustix::io::Result<()> {
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        match sendmsg(to, &[IoSlice::new(bytes)], control, SendFlags::NOSIGNAL) {
            Err(Errno::TOOMANYREFS) if Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(1));
            }
            sent => return sent.map(drop),
        }
    }
}

/// A connection on which parcels are left with the agent: copies of the standard input. It may hang
/// up before it has read them.
fn left(path: &Path, parcels: usize) -> rustix::io::Result<OwnedFd> {
    let connection = connected(path)?;
    let stdin = std::io::stdin();
    let fds = [stdin.as_fd(); guard::PARCEL_DESCRIPTORS];
    for _ in 0..parcels {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        if pass(&connection, b"\0\x0010.77.0.1", &mut control).is_err() {
            break;
        }
    }
    Ok(connection)
}

/// Sends a message with descriptors whose close waits for a day: sockets of TCP whose peers, which
/// stay here, do not read. No process has the sockets then.
fn send_lingering(to: &OwnedFd, bytes: &[u8], peers: &mut Vec<TcpStream>) -> std::io::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut sockets = Vec::new();
    for _ in 0..guard::PARCEL_DESCRIPTORS + 1 {
        let mut socket = TcpStream::connect(listener.local_addr()?)?;
        peers.push(listener.accept()?.0);
        set_socket_linger(&socket, Some(Duration::from_secs(86_400)))?;
        socket.set_nonblocking(true)?;
        while socket.write(&[0; 1 << 16]).is_ok() {}
        socket.set_nonblocking(false)?;
        sockets.push(socket);
    }
    // A parcel has four. The kernel closes more than that when it is received.
    let number = if bytes.len() > 66 { sockets.len() } else { guard::PARCEL_DESCRIPTORS };
    let fds: Vec<_> = sockets.iter().take(number).map(|socket| socket.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(5))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let sent = pass(to, bytes, &mut control);
    // The agent may be the first to close them.
    std::thread::spawn(move || drop(sockets));
    Ok(sent?)
}

/// The connection, the answer, its descriptors, and how long it took.
type Answered = (OwnedFd, Answer, Vec<OwnedFd>, Duration);

fn ask(path: &Path, request: &Request) -> Result<Answered, String> {
    for _ in 0..3 {
        let start = Instant::now();
        let connection = connected(path).map_err(|e| format!("error {e}"))?;
        // The agent may answer without reading.
        let _ = send_request(&connection, request);
        match answer(&connection) {
            Ok(Ok((answer, fds))) => return Ok((connection, answer, fds, start.elapsed())),
            Ok(Err(what)) => return Err(format!("error {what}")),
            // An agent hangs up on a program that did not run for a second.
            Err(_) if start.elapsed() >= Duration::from_secs(1) => {}
            Err(error) => return Err(format!("closed {error}")),
        }
    }
    Err("closed each time".into())
}

fn told(answer: &Answer, descriptors: usize, took: Duration) -> String {
    match &answer.outcome {
        Ok(_) => format!("granted {descriptors} {}", took.as_micros()),
        Err(refused) => format!("refused {:?} {refused}", refused.code),
    }
}

/// A command that becomes another one like this, with the connection. It answers first.
fn with_connection(command: &mut Command, connection: Option<OwnedFd>) -> &mut Command {
    let own = std::env::current_exe().expect("this program");
    command.arg(own).args(["--exact", "role", "--nocapture"]).env(INHERITED, "yes");
    command.stderr(connection.expect("a connection"))
}

/// Sends any bytes, with the ancillary data `along`.
fn raw(path: &Path, bytes: &[u8], along: Option<SendAncillaryMessage<'_, '_>>) -> String {
    let Ok(connection) = connected(path) else { return "error".into() };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(200))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if let Some(along) = along {
        assert!(control.push(along));
    }
    if let Err(error) = pass(&connection, bytes, &mut control) {
        return format!("error {error}");
    }
    match answer(&connection) {
        Ok(Ok((answer, fds))) => told(&answer, fds.len(), Duration::ZERO),
        Ok(Err(what)) => format!("error {what}"),
        Err(error) => format!("closed {error}"),
    }
}

/// Connects and asks again and again; without an address it says nothing and hangs up at once.
fn flood(path: &Path, count: usize, address: Option<&str>) -> String {
    let request = address.map(request);
    let (mut busy, mut other) = (0, 0);
    for _ in 0..count {
        match (&request, connected(path)) {
            (Some(request), Ok(connection)) => {
                let _ = send_request(&connection, request);
                match answer(&connection) {
                    Ok(Ok((Answer { outcome: Err(refused), .. }, _)))
                        if refused.code == Code::Busy =>
                    {
                        busy += 1;
                    }
                    _ => other += 1,
                }
            }
            (None, Ok(connection)) => drop(connection),
            (_, Err(_)) => other += 1,
        }
    }
    format!("busy {busy} other {other}")
}

fn answer(connection: &OwnedFd) -> std::io::Result<Result<(Answer, Vec<OwnedFd>), String>> {
    let mut fds = [PollFd::new(connection, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 20, tv_nsec: 0 })).expect("poll");
    match receive_answer(connection) {
        // The agent hung up without reading; its answer comes next.
        Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => receive_answer(connection),
        received => received,
    }
}

/// The capabilities of this process.
fn rights() -> String {
    let status = std::fs::read_to_string("/proc/thread-self/status").expect("status");
    let effective = status.lines().find_map(|l| l.strip_prefix("CapEff:")).expect("a line").trim();
    let own = socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::empty(), None);
    format!("{effective} {:?}", own.err())
}

fn bytes(hex: &str) -> Vec<u8> {
    let pair = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex digits");
    (0..hex.len() / 2).map(|at| pair(2 * at)).collect()
}

/// A deadline for an event that must happen, on a machine that is busy.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// Waits until something holds.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + SOON;
    while !holds() {
        assert!(Instant::now() < end, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
