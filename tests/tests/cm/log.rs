//! A replicated log of three members on the connection manager. The leader writes each entry into
//! the logs of the others. It is killed (`kill -9`) while nothing is in flight; the others get the
//! event, the lowest that lives leads, and the log goes on.

use std::io::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::process::{ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use rocinante::cm::{Connecting, Connection, Listener, Params};
use rocinante::device::Backend;
use rocinante::verbs::{Key, SendOp};
use rocinante::{Access, Mr, OpenOptions};
use rocinante_lab::{ChildGuard, Lab, LabConfig, exit_with_parent};
use rocinante_tests::alone::myself;
use rocinante_tests::harness::{Family, PATIENCE, Side, address, wr};
use rocinante_tests::{need, require};

/// Makes a process of this program a member: its number, and the addresses of all.
const ROLE: &str = "ROCINANTE_LOG";
const MEMBERS: usize = 3;
const PORT: u16 = 7471;
/// The silence after which members ask each other.
const SILENCE: Duration = Duration::from_secs(1);
/// Entries that a log has room for. An entry is no 0.
const ENTRIES: usize = 64;
const ENTRY: usize = size_of::<u64>();

/// Another member.
struct Peer {
    number: usize,
    connection: Connection,
    log: (u64, Key),
}

struct Member {
    number: usize,
    side: Side,
    log: Mr,
    peers: Vec<Peer>,
}

impl Member {
    /// The private data of this member: its number, and where its log is.
    fn params(number: usize, log: &Mr) -> Params {
        let words =
            [&[number as u8][..], &log.address().to_be_bytes(), &log.rkey().0.to_be_bytes()];
        Params::default().keep_alive(Some(SILENCE)).private_data(&words.concat())
    }

    /// Connects to those before it, which listen, and waits for those behind it.
    fn join(number: usize, all: &[IpAddr]) -> Self {
        let ctx = OpenOptions::new().netdev(Backend::Udp).open(all[number]).unwrap();
        let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(256).unwrap());
        let side = Side::of(ctx, pd, cq, all[number]);
        let log = side.pd.allocate(ENTRIES * ENTRY, Access::ALL).unwrap();
        let params = Self::params(number, &log);
        let here = SocketAddr::new(all[number], PORT);
        let listener = Listener::bind(&side.ctx, here, MEMBERS).unwrap();
        println!("\nlistening");
        let peer = |connection: Connection, words: &[u8]| {
            let (address, key) =
                (words[1..9].try_into().unwrap(), words[9..13].try_into().unwrap());
            let log = (u64::from_be_bytes(address), Key(u32::from_be_bytes(key)));
            Peer { number: words[0].into(), connection, log }
        };
        let mut peers = Vec::new();
        for there in &all[..number] {
            let qp = side.qp().build().unwrap();
            let connecting = Connecting::start(qp, SocketAddr::new(*there, PORT), &params).unwrap();
            let connection = connecting.wait(PATIENCE).unwrap();
            let words = connection.private_data().to_vec();
            peers.push(peer(connection, &words));
        }
        while peers.len() < all.len() - 1 {
            let request = listener.request(Some(PATIENCE)).unwrap();
            let words = request.private_data().to_vec();
            let connecting = request.accept(side.qp().build().unwrap(), &params).unwrap();
            peers.push(peer(connecting.wait(PATIENCE).unwrap(), &words));
        }
        Self { number, side, log, peers }
    }

    fn living(&self) -> impl Iterator<Item = &Peer> {
        self.peers.iter().filter(|peer| !peer.connection.is_disconnected())
    }

    fn leader(&self) -> usize {
        self.living().map(|peer| peer.number).min().map_or(self.number, |it| it.min(self.number))
    }

    fn entries(&self) -> Vec<u64> {
        let all = (0..ENTRIES).map(|at| self.log.load_u64(at * ENTRY));
        all.take_while(|entry| *entry != 0).collect()
    }

    /// Appends an entry as the leader. Others may lack the last entries of the leader before it,
    /// so they get the whole log. Returns whether most members have it.
    fn append(&self, entry: u64) -> bool {
        let len = (self.entries().len() + 1) * ENTRY;
        self.log.write(len - ENTRY, &entry.to_ne_bytes());
        let mut have = 1;
        for peer in self.living() {
            let (remote, rkey) = peer.log;
            let op = SendOp::Write { remote, rkey, imm: None };
            let sge = [self.log.sge(0, len)];
            if peer.connection.qp().post_send(&[wr(len as u64, op, &sge)]).is_ok() {
                have += usize::from(self.side.next().ok().is_ok());
            }
        }
        2 * have > MEMBERS
    }

    /// Carries out the lines of standard input, and prints the leader.
    fn serve(&self) {
        let (say, told) = channel();
        std::thread::spawn(move || {
            std::io::stdin().lines().map_while(Result::ok).try_for_each(|line| say.send(line))
        });
        let mut leader = None;
        loop {
            if leader != Some(self.leader()) {
                leader = Some(self.leader());
                println!("leader {}", self.leader());
            }
            match told.recv_timeout(Duration::from_millis(20)) {
                Ok(line) if line == "show" => println!("log {:?}", self.entries()),
                Ok(_) if leader != Some(self.number) => println!("refused"),
                Ok(line) => println!("appended {}", self.append(line.parse().unwrap())),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }
}

/// A member in its container, as the test sees it.
struct Process {
    child: ChildGuard,
    to: ChildStdin,
    from: Receiver<String>,
}

impl Process {
    fn start(lab: &Lab, number: usize, all: &[IpAddr]) -> Self {
        let mut command = myself(concat!(module_path!(), "::a_replicated_log_outlives_its_leader"));
        let all: Vec<String> = all.iter().map(IpAddr::to_string).collect();
        command.env(ROLE, format!("{number} {}", all.join(" ")));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = lab.container(number).spawn(&mut command).unwrap();
        let to = child.child_mut().stdin.take().unwrap();
        let from = rocinante_lab::lines(child.child_mut().stdout.take().unwrap());
        Self { child, to, from }
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.to, "{line}").unwrap();
    }

    /// Waits until it says this.
    #[track_caller]
    fn says(&self, expected: &str) {
        let end = Instant::now() + PATIENCE;
        let left = || end.saturating_duration_since(Instant::now());
        let mut said = std::iter::from_fn(|| self.from.recv_timeout(left()).ok());
        assert!(said.any(|line| line == expected), "{expected}");
    }
}

#[test]
fn a_replicated_log_outlives_its_leader() {
    if let Ok(role) = std::env::var(ROLE) {
        exit_with_parent();
        let mut words = role.split(' ');
        let number = words.next().unwrap().parse().unwrap();
        let all: Vec<IpAddr> = words.map(|word| word.parse().unwrap()).collect();
        return Member::join(number, &all).serve();
    }
    require!(need::backend(Backend::Udp));
    let lab = Lab::new(&LabConfig { containers: MEMBERS as u8, ..LabConfig::default() }).unwrap();
    let all: Vec<IpAddr> = (0..MEMBERS).map(|nth| address(&lab, nth, Family::V4)).collect();
    let mut members = Vec::new();
    for number in 0..MEMBERS {
        let member = Process::start(&lab, number, &all);
        member.says("listening");
        members.push(member);
    }
    for member in &members {
        member.says("leader 0");
    }
    for entry in ["11", "22"] {
        members[0].tell(entry);
        members[0].says("appended true");
        members[1].tell(entry);
        members[1].says("refused");
    }
    // Nothing is in flight: only by asking do they find out.
    members.remove(0).child.signal(Signal::SIGKILL);
    for member in &members {
        member.says("leader 1");
    }
    members[0].tell("33");
    members[0].says("appended true");
    members[1].tell("44");
    members[1].says("refused");
    for member in &mut members {
        member.tell("show");
        member.says("log [11, 22, 33]");
    }
    // One of three is not most of them.
    members.remove(1).child.signal(Signal::SIGKILL);
    members[0].tell("55");
    members[0].says("appended false");
}
