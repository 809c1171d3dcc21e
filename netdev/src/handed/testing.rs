//! An agent for tests: it gives the requested ports, or does something else; and a process without
//! privileges that asks it.

use std::fs::{self, Permissions};
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
};

use super::{Agent, Answer, Granted, Report, Request, WAIT_MAX, receive_request, send_answer};
use crate::choose::auto::{self, Choice};
use crate::choose::give::{GiveLimits, Given, give};
use crate::frames::packet::Kept;
use crate::kernel::descriptors::wait_readable;
use crate::testing::parts::{A, echo};
use crate::testing::sides::{SELECTOR, ip};
use crate::testing::testns::{NetNs, Pair, drop_privileges};
use crate::{AnyPort, Backend, Interface, OpenError, PortConfig, Shards};

/// Another Ethernet address of `v0` in the child's namespace.
pub(crate) const NEW_MAC: [u8; 6] = [2, 0, 0, 0, 9, 0x77];
/// The child's requests to its parent: that Ethernet address, and the action of the test.
pub(crate) const ASK_NEW_MAC: u8 = 1;
pub(crate) const ASK_OTHER: u8 = 2;

/// Connections, and the objects kept for them.
type Held = Arc<Mutex<Vec<(OwnedFd, Vec<Kept>)>>>;

/// A socket of its own on which a thread answers, until this value is dropped.
pub(crate) struct Server {
    dir: tempfile::TempDir,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    /// The objects that an honest agent gave.
    pub(crate) given: Held,
}

impl Server {
    /// Hands each connection to `answer`.
    pub(crate) fn new(mut answer: impl FnMut(OwnedFd) + Send + 'static) -> Self {
        Self::keeping(Arc::default(), move |connection, _| answer(connection))
    }

    fn keeping(given: Held, mut answer: impl FnMut(OwnedFd, &Held) + Send + 'static) -> Self {
        let all = Permissions::from_mode(0o755);
        let dir = tempfile::Builder::new().permissions(all).tempdir().expect("a directory");
        let path = dir.path().join("socket");
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let socket = socket.expect("a socket");
        bind(&socket, &SocketAddrUnix::new(&path).expect("a path")).expect("free");
        listen(&socket, 16).expect("bound");
        fs::set_permissions(&path, Permissions::from_mode(0o666)).expect("ours");
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, kept) = (stop.clone(), given.clone());
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                if wait_readable(&socket, 5).expect("poll")
                    && let Ok(connection) = accept_with(&socket, SocketFlags::CLOEXEC)
                {
                    answer(connection, &kept);
                }
            }
        });
        Self { dir, stop, thread: Some(thread), given }
    }

    /// An agent that gives the requested ports in this namespace.
    pub(crate) fn honest(ns: &NetNs) -> Self {
        let ns = NetNs::at(&ns.path()).expect("the same");
        Self::keeping(Arc::default(), move |connection, kept| {
            let Some(request) = request(&connection) else { return };
            let given = ns.run(|| give(&request, &GiveLimits::default()));
            if send_answer(&connection, &given.answer, &given.descriptors()).is_ok() {
                kept.lock().expect("no panic").push((connection, given.kept));
            }
        })
    }

    pub(crate) fn agent(&self) -> Agent {
        Agent::at(self.path())
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("socket")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking(), "the agent's thread panicked");
        }
    }
}

/// Waits for a request; refuses other messages.
pub(crate) fn request(connection: &OwnedFd) -> Option<Request> {
    wait_readable(connection, WAIT_MAX.as_millis() as i32).expect("poll");
    match receive_request(connection).ok()? {
        Ok(request) => Some(request),
        Err(refused) => {
            let _ = send_answer(connection, &super::Answer::refusal(refused), &[]);
            None
        }
    }
}

/// Answers a request with these bytes.
pub(crate) fn say(connection: &OwnedFd, bytes: &[u8]) {
    request(connection).expect("a request");
    rustix::net::send(connection, bytes, rustix::net::SendFlags::NOSIGNAL).expect("sent");
}

/// Answers a request, and says that there are no rules.
pub(crate) fn grant(connection: &OwnedFd, granted: Granted, descriptors: &[OwnedFd]) {
    let report = Some(Report::default());
    answer(connection, &Answer { outcome: Ok(granted), report }, descriptors);
}

/// Answers a request.
pub(crate) fn answer(connection: &OwnedFd, answer: &Answer, descriptors: &[OwnedFd]) {
    request(connection).expect("a request");
    let descriptors: Vec<_> = descriptors.iter().map(|fd| fd.as_fd()).collect();
    send_answer(connection, answer, &descriptors).expect("sent");
}

impl Given {
    /// The given ports, or the refusal.
    pub(crate) fn whole(self) -> Result<Self, String> {
        match &self.answer.outcome {
            Err(refused) => Err(refused.to_string()),
            Ok(_) => Ok(self),
        }
    }
}

/// This program again, without any privilege, with one end of a socket as its input. It runs this
/// test alone, and is to get `count` ports.
pub(crate) fn child(
    test: &str,
    agent: &Server,
    count: usize,
) -> std::io::Result<(Child, UnixStream)> {
    let (ours, its) = UnixStream::pair()?;
    let mut command = Command::new("/proc/self/exe");
    command
        .args(["--exact", test, "--nocapture"])
        .env("ROCINANTE_TEST_HANDED", format!("{test} {count} {}", agent.path().display()))
        .stdin(OwnedFd::from(its))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    drop_privileges(&mut command);
    Ok((command.spawn()?, ours))
}

/// Sends the child's datagrams to `peer` back, and fulfils its requests, until it ends.
pub(crate) fn serve(
    pair: &Pair,
    peer: &mut AnyPort,
    (mut child, socket): (Child, UnixStream),
    other: impl Fn(),
) {
    while let Some(asked) = asked_of(pair, peer, (&mut child, &socket)) {
        if asked == ASK_NEW_MAC {
            pair.a.sh("ip link set v0 address 02:00:00:00:09:77");
            pair.b.sh("ip neigh flush dev v0");
        } else {
            other();
        }
        done(&socket);
    }
    succeeds(child);
}

/// Sends the child's datagrams to `peer` back until it makes a request; `None` if it has ended.
pub(crate) fn asked_of(
    pair: &Pair,
    peer: &mut AnyPort,
    (child, socket): (&mut Child, &UnixStream),
) -> Option<u8> {
    let mut socket = socket;
    socket.set_nonblocking(true).expect("a socket");
    let end = Instant::now() + Duration::from_secs(60);
    while child.try_wait().expect("a child").is_none() {
        assert!(Instant::now() < end, "the child does not end");
        echo(pair, peer);
        let mut asked = [0];
        if matches!(socket.read(&mut asked), Ok(1)) {
            return Some(asked[0]);
        }
    }
    None
}

/// Reports to the child that its request is done.
pub(crate) fn done(mut socket: &UnixStream) {
    socket.write_all(&[0]).expect("the child waits");
}

/// Expects that it did all that it should.
pub(crate) fn succeeds(child: Child) {
    let output = child.wait_with_output().expect("its output");
    let text = [output.stdout, output.stderr].map(|out| String::from_utf8_lossy(&out).into_owned());
    let done = output.status.success() && text[0].contains("everything was exchanged");
    assert!(done, "{}", text.concat());
}

/// The number of ports and the agent's path, in a child that was started for this test.
pub(crate) fn expected_of(test: &str) -> Option<(usize, String)> {
    let expected = std::env::var("ROCINANTE_TEST_HANDED").ok()?;
    let (count, path) = expected.strip_prefix(test)?.strip_prefix(' ')?.split_once(' ')?;
    Some((count.parse().expect("a number"), path.to_owned()))
}

/// The other end of a child's input.
pub(crate) struct Parent(UnixStream);

impl Parent {
    pub(crate) fn of_this_process() -> Self {
        Self(std::io::stdin().as_fd().try_clone_to_owned().expect("an input").into())
    }

    /// Asks for something and waits until it is done.
    pub(crate) fn asked(&self, what: u8) {
        (&self.0).write_all(&[what]).expect("the parent listens");
        (&self.0).read_exact(&mut [0]).expect("its answer");
    }
}

/// Chooses ports of this process's namespace, with the help of an agent.
pub(crate) fn choose_from(
    v0: &Interface,
    want: Option<Backend>,
    count: usize,
    agent: &Agent,
) -> Result<(Vec<AnyPort>, Choice), OpenError> {
    let shards = Shards { shared: false, first: 0, count, selector: SELECTOR };
    auto::choose_shards(v0, &A.map(ip), want, &PortConfig::default(), (shards, None), agent)
}

/// The number of this process's descriptors.
pub(crate) fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").expect("descriptors").count()
}
