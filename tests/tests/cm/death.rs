//! Peers are killed (`kill -9`) at each step of the handshake, all while one survivor goes on. The
//! survivor gets the error or the end within the time that the protocol allows: four messages in
//! the place of the usual sixteen, 0.4 s apart, none of them answered. Afterwards it holds nothing
//! of them, and connects to the next.

use std::io::{BufRead, BufReader, Lines};
use std::net::SocketAddr;
use std::process::{ChildStdout, Stdio};
use std::time::{Duration, Instant};

use rocinante::cm::{
    CmFailure, Connecting, Connection, DatagramListener, Listener, Params, Resolving,
};
use rocinante::device::Backend;
use rocinante::verbs::SendOp;
use rocinante::{Access, ConnectOptions, Cq, Mr, PreparedQp, RecvWr, VerbsError, WcStatus};
use rocinante_lab::{ChildGuard, Lab, LabConfig, exit_with_parent};
use rocinante_stack::cm::CmConfig;
use rocinante_stack::wire::cm::code_to_ns;
use rocinante_tests::alone::{Held, alone, at_rest, myself};
use rocinante_tests::harness::{Family, PATIENCE, Setup, Side, address, wait_until, wr};
use rocinante_tests::{need, require, test_name};
use rustix::event::{PollFd, PollFlags, poll};

macro_rules! deaths {
    ($( $name:ident: $backend:ident; )*) => {$(
        #[test]
        fn $name() {
            if let Some(role) = Role::of_this_process() {
                return role.play(Backend::$backend);
            }
            require!(need::backend(Backend::$backend));
            let name = test_name!();
            alone(name, Duration::from_secs(240), || survive(Backend::$backend, name));
        }
    )*};
}

deaths! {
    killed_at_each_step_udp: Udp;
    killed_at_each_step_packet: Packet;
    killed_at_each_step_afxdp: Xdp;
}

const ROLE: &str = "ROCINANTE_CM_DEATH";
const PORT: u16 = 7471;
/// How often the survivor repeats a message.
const RETRIES: u8 = 3;

/// How far a peer gets before it is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// It has sent a REQ, and the survivor accepts.
    Asked,
    /// It has sent a REQ, and the survivor rejects.
    AskedInVain,
    /// It has our REP and has not sent an RTU.
    Replied,
    /// As `Replied`, and it has sent an MRA.
    RepliedLater,
    /// It is connected as the active side.
    Established,
    /// It is connected as the active side, and we send data.
    EstablishedForData,
    /// It has ended the connection.
    Ended,
    /// It has our REQ, and has not decided.
    WasAsked,
    /// As `WasAsked`, and it has sent an MRA that grants it 69 s: longer than our program waits.
    WasAskedLater,
    /// It has accepted, and dies before our RTU.
    Accepted,
    /// It is connected as the passive side.
    AcceptedAndEstablished,
    /// It has our SIDR_REQ for a datagram queue pair.
    WasAskedForDatagrams,
    /// No step: it lives until we are done.
    Lives,
}

const STEPS: [Step; 12] = [
    Step::Asked,
    Step::AskedInVain,
    Step::Replied,
    Step::RepliedLater,
    Step::Established,
    Step::EstablishedForData,
    Step::Ended,
    Step::WasAsked,
    Step::WasAskedLater,
    Step::Accepted,
    Step::AcceptedAndEstablished,
    Step::WasAskedForDatagrams,
];

impl Step {
    fn peer_asks(self) -> bool {
        (self as usize) <= Step::Ended as usize || self == Step::Lives
    }

    /// Whether a timeout of the survivor's connection manager expires.
    fn times_out(self) -> bool {
        !matches!(self, Step::AskedInVain | Step::Ended | Step::WasAskedLater | Step::Lives)
    }
}

/// A process that will be killed.
struct Role {
    step: Step,
    own: SocketAddr,
    survivor: SocketAddr,
}

impl Role {
    fn of_this_process() -> Option<Self> {
        let role = std::env::var(ROLE).ok()?;
        let [step, own, survivor] = role.split(' ').collect::<Vec<_>>()[..] else { panic!() };
        let all = STEPS.into_iter().chain([Step::Lives]);
        Some(Self {
            step: all.into_iter().find(|it| format!("{it:?}") == step).unwrap(),
            own: own.parse().unwrap(),
            survivor: survivor.parse().unwrap(),
        })
    }

    fn play(&self, backend: Backend) {
        exit_with_parent();
        // A peer that must not send an MRA by itself has no background thread: at its step it
        // drives nothing.
        let background = self.step != Step::WasAsked;
        let options = rocinante::OpenOptions::new().netdev(backend).background(background);
        let ctx = options.open(self.own.ip()).unwrap();
        let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(16).unwrap());
        let side = Side::of(ctx, pd, cq, self.own.ip());
        if self.step.peer_asks() { self.ask(&side) } else { self.answer(&side) }
    }

    fn ask(&self, side: &Side) {
        let qp = side.qp().build().unwrap();
        let mut connecting = Connecting::start(qp, self.survivor, &params()).unwrap();
        match self.step {
            Step::Asked | Step::AskedInVain => there(),
            Step::Replied | Step::RepliedLater => {
                wait_until_readable(&connecting);
                let before = side.ctx.counters().port.tx_datagrams;
                if self.step == Step::RepliedLater {
                    // No other datagram is left to be sent.
                    wait_until("an MRA", || side.ctx.counters().port.tx_datagrams > before);
                }
                there();
            }
            _ => {
                let connection = loop {
                    wait_until_readable(&connecting);
                    if let Some(connection) = connecting.try_finish().unwrap() {
                        break connection;
                    }
                };
                if self.step == Step::Ended {
                    connection.disconnect().unwrap();
                }
                there();
            }
        }
    }

    fn answer(&self, side: &Side) {
        if self.step == Step::WasAskedForDatagrams {
            let listener = DatagramListener::bind(&side.ctx, self.own, 1).unwrap();
            say("listening");
            let _request = listener.request(Some(PATIENCE)).unwrap();
            there();
        }
        let listener = Listener::bind(&side.ctx, self.own, 1).unwrap();
        say("listening");
        let request = listener.request(Some(PATIENCE)).unwrap();
        let before = side.ctx.counters().port.tx_datagrams;
        match self.step {
            Step::WasAsked => there(),
            Step::WasAskedLater => {
                wait_until("an MRA", || side.ctx.counters().port.tx_datagrams > before);
                there();
            }
            _ => {
                let connecting = request.accept(side.qp().build().unwrap(), &params()).unwrap();
                if self.step == Step::Accepted {
                    there();
                }
                let _connection = connecting.wait(PATIENCE).unwrap();
                there();
            }
        }
    }
}

fn params() -> Params {
    Params::default().options(ConnectOptions::default().retry_cnt(3))
}

/// Starts on a new line: the test harness leaves its own lines unfinished.
fn say(what: &str) {
    println!("\n{what}");
}

/// The step is reached: waits to be killed.
fn there() -> ! {
    say("there");
    loop {
        std::thread::park();
    }
}

fn wait_until_readable(connecting: &Connecting) {
    let fd = connecting.fd().unwrap();
    let timeout = PATIENCE.try_into().unwrap();
    let count = poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&timeout)).unwrap();
    assert_eq!(count, 1, "not in time");
}

/// After this silence the survivor gives up a peer.
fn gives_up() -> Duration {
    let config = CmConfig::default();
    let interval = 2 * code_to_ns(config.packet_lifetime) + code_to_ns(config.response_timeout);
    Duration::from_nanos(interval) * (u32::from(RETRIES) + 1)
}

/// A peer that has sent an MRA gets 4.4 s more, once. The factor is for a busy machine.
fn bound() -> Duration {
    6 * (gives_up() + Duration::from_nanos(2 * code_to_ns(20)))
}

/// One device survives all its peers.
fn survive(backend: Backend, test: &str) {
    let containers = STEPS.len() as u8 + 1;
    let lab = Lab::new(&LabConfig { containers, ..LabConfig::default() }).unwrap();
    let own = address(&lab, 0, Family::V4);
    let setup = Setup { cm_retries: Some(RETRIES), ..Setup::new(backend) };
    let side = Side::open(lab.container(0).netns(), own, &setup);
    let scene = Scene { lab: &lab, side: &side, test };
    let (before, counted) = (Held::now(&[&side.ctx]), side.ctx.cm_counters().unwrap());
    assert_eq!(before.resources, [at_rest()]);
    std::thread::scope(|scope| {
        for (at, step) in STEPS.into_iter().enumerate() {
            scope.spawn(move || scene.act(step, at + 1));
        }
    });
    // Numbers are kept a little longer; the connection manager keeps its paths to the peers for 2
    // s.
    before.is_again(&[&side.ctx], bound());
    let now = side.ctx.cm_counters().unwrap();
    let timeouts = now.timeouts - counted.timeouts;
    // A message is also repeated if its answer is late.
    let (repeated, retries) = (now.repeated - counted.repeated, u64::from(RETRIES));
    assert!((1..3).contains(&(repeated / (retries * timeouts))), "{repeated} for {timeouts}");
    assert_eq!(timeouts, STEPS.into_iter().filter(|step| step.times_out()).count() as u64);
    scene.act(Step::Lives, 1);
}

#[derive(Clone, Copy)]
struct Scene<'a> {
    lab: &'a Lab,
    side: &'a Side,
    test: &'a str,
}

/// A process that reports its step.
struct Peer {
    child: ChildGuard,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Peer {
    fn says(&mut self, what: &str) {
        let said = self.lines.by_ref().map_while(Result::ok).any(|line| line == what);
        assert!(said, "it never said {what:?}");
    }

    /// Kills the peer as soon as it has reached its step.
    fn dies(&mut self) {
        if self.child.try_wait().unwrap().is_none() {
            self.says("there");
            self.child.kill();
        }
    }
}

impl Scene<'_> {
    fn start(&self, role: &Role, container: usize) -> Peer {
        let mut command = myself(self.test);
        let words = format!("{:?} {} {}", role.step, role.own, role.survivor);
        command.env(ROLE, words).stdout(Stdio::piped());
        let mut child = self.lab.container(container).spawn(&mut command).unwrap();
        let lines = BufReader::new(child.child_mut().stdout.take().unwrap()).lines();
        Peer { child, lines }
    }

    /// A peer dies at this step; checks the survivor's result.
    fn act(&self, step: Step, container: usize) {
        let port = PORT + container as u16;
        let own = SocketAddr::new(address(self.lab, container, Family::V4), port);
        let role = Role { step, own, survivor: SocketAddr::new(self.side.address, port) };
        println!("{step:?} begins");
        self.side.run(|| match step {
            Step::WasAskedForDatagrams => self.resolve(&role, container),
            _ if step.peer_asks() => self.accept(&role, container),
            _ => self.connect(&role, container),
        });
        println!("{step:?} is over");
    }

    fn accept(&self, role: &Role, container: usize) {
        let end = End::new(self.side);
        let listener = Listener::bind(&self.side.ctx, role.survivor, 1).unwrap();
        let mut peer = self.start(role, container);
        let request = listener.request(Some(PATIENCE)).unwrap();
        let qp = end.qp(self.side);
        match role.step {
            Step::AskedInVain => {
                peer.dies();
                // The request may have been taken back for the dead process already.
                let rejected = request.reject(b"");
                assert!(
                    matches!(rejected, Ok(()) | Err(VerbsError::Cm(CmFailure::Ended))),
                    "{rejected:?}"
                );
            }
            Step::Asked => {
                peer.dies();
                let begin = Instant::now();
                let connecting = request.accept(qp, &params()).unwrap();
                silent(&connecting.wait(bound()));
                assert!(begin.elapsed() >= gives_up() * 3 / 4, "{:?}", begin.elapsed());
            }
            Step::Replied | Step::RepliedLater => {
                let connecting = request.accept(qp, &params()).unwrap();
                peer.dies();
                silent(&connecting.wait(bound()));
            }
            _ => {
                let connection = request.accept(qp, &params()).unwrap().wait(PATIENCE).unwrap();
                end.outlive(&connection, role.step, &mut peer);
            }
        }
    }

    fn connect(&self, role: &Role, container: usize) {
        let end = End::new(self.side);
        let mut peer = self.start(role, container);
        peer.says("listening");
        let begin = Instant::now();
        let connecting = Connecting::start(end.qp(self.side), role.own, &params()).unwrap();
        match role.step {
            Step::WasAsked => {
                peer.dies();
                silent(&connecting.wait(bound()));
                assert!(begin.elapsed() >= gives_up() * 3 / 4, "{:?}", begin.elapsed());
            }
            Step::WasAskedLater => {
                peer.dies();
                silent(&connecting.wait(Duration::from_secs(1)));
            }
            step => {
                if step == Step::Accepted {
                    wait_until_readable(&connecting);
                    peer.dies();
                }
                end.outlive(&connecting.wait(PATIENCE).unwrap(), step, &mut peer);
            }
        }
    }

    fn resolve(&self, role: &Role, container: usize) {
        let mut peer = self.start(role, container);
        peer.says("listening");
        let begin = Instant::now();
        let resolving = Resolving::start(&self.side.ctx, 0, role.own, b"").unwrap();
        peer.dies();
        silent(&resolving.wait(bound()));
        assert!(begin.elapsed() >= gives_up() * 3 / 4, "{:?}", begin.elapsed());
    }
}

#[track_caller]
fn silent<T: std::fmt::Debug>(outcome: &Result<T, VerbsError>) {
    assert!(matches!(outcome, Err(VerbsError::TimedOut)), "{outcome:?}");
}

/// The objects that a program has for each connection.
struct End {
    cq: Cq,
    mr: Mr,
}

impl End {
    fn new(side: &Side) -> Self {
        let cq = side.ctx.create_cq(16).unwrap();
        Self { cq, mr: side.pd.allocate(4096, Access::ALL).unwrap() }
    }

    fn qp(&self, side: &Side) -> PreparedQp {
        let qp = side.pd.qp(&self.cq, &self.cq).access(Access::ALL).build().unwrap();
        qp.post_recv(&[RecvWr { wr_id: 1, sges: &[self.mr.sge(0, 64)] }]).unwrap();
        qp
    }

    /// The peer of this connection dies, or ends it.
    fn outlive(&self, connection: &Connection, step: Step, peer: &mut Peer) {
        if step == Step::Lives {
            peer.says("there");
        } else {
            peer.dies();
        }
        if matches!(step, Step::EstablishedForData | Step::Accepted) {
            let op = SendOp::Send { imm: None };
            connection.post_send(&[wr(2, op, &[self.mr.sge(64, 64)])]).unwrap();
            let wc = self.cq.wait_one(bound()).unwrap();
            assert_eq!((wc.wr_id, wc.status), (2, WcStatus::RetryExcErr), "{step:?}");
        }
        if step != Step::Ended {
            connection.disconnect().unwrap();
        }
        connection.wait_disconnected(bound()).unwrap_or_else(|e| panic!("{step:?}: {e}"));
        // The receive for its messages is flushed.
        let wc = self.cq.wait_one(PATIENCE).unwrap();
        assert_eq!((wc.wr_id, wc.status), (1, WcStatus::WrFlushErr), "{step:?}");
    }
}
