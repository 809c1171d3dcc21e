//! A peer is killed (`kill -9`) during a transfer. The survivor learns of it in bounded time, and
//! can connect anew.

use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rocinante::exchange::{Exchange, Hello};
use rocinante::verbs::{QpState, SendOp};
use rocinante::{Access, ConnectOptions, Mr, Qp, RemoteSlice, WcStatus};

use crate::alone::myself;
use crate::harness::{
    DEVICE_VARIABLE, Family, KernelDevice, On, PATIENCE, Setup, Side, address, assert_same,
    pattern, wait_until, wr,
};
use crate::oracles::{Oracle, Oracles};
use rocinante_lab::{ChildGuard, Lab, LabConfig, exit_with_parent};

/// Makes a process of this program the peer of a test; the value is the address on which it waits.
const ROLE: &str = "ROCINANTE_E2E_DEATH";
const PORT: u16 = 18_700;
const LEN: usize = 1 << 20;
const NO_TUNNEL: &str = "the processes of this test have a lab without an encrypted link";
/// Requests outstanding when the peer dies.
const DEPTH: u64 = 32;

/// For the beginning of `main`: if this process was started as the peer of a test on a device of
/// the kernel, acts as that peer and then ends the process.
pub fn be_the_peer_if_asked() {
    if !is_the_peer() {
        return;
    }
    let own: SocketAddr = std::env::var(ROLE).unwrap().parse().unwrap();
    let name = std::env::var(DEVICE_VARIABLE).expect("the name of a device");
    be_the_peer(On::Kernel(KernelDevice { name, address: own.ip() }));
    std::process::exit(0);
}

/// Whether this process was started as the peer of a test.
pub fn is_the_peer() -> bool {
    std::env::var_os(ROLE).is_some()
}

pub fn a_killed_peer_is_noticed(on: On) {
    survive(on, None);
}

/// A device, a queue pair and a region, as each side of an exchange has them.
struct Connection {
    qp: Qp,
    mr: Mr,
    remote: RemoteSlice,
    exchange: Exchange,
}

impl Connection {
    /// Call it inside the namespace.
    fn new(side: &Side, mut exchange: Exchange) -> Self {
        let prepared = side.qp().build().unwrap();
        let mr = side.pd.allocate(2 * LEN, Access::ALL).unwrap();
        let hello = Hello {
            endpoints: vec![prepared.endpoint()],
            regions: vec![mr.remote()],
            note: String::new(),
        };
        let heard = exchange.swap(&hello).unwrap();
        // An ACK timeout of 268 ms, expiring four times.
        let options = ConnectOptions::default().timeout(16).retry_cnt(3);
        let qp = prepared.connect(&heard.endpoints[0], &options).unwrap();
        exchange.barrier("connected").unwrap();
        Self { qp, mr, remote: heard.regions[0], exchange }
    }

    fn write(&self) -> SendOp {
        SendOp::Write { remote: self.remote.address, rkey: self.remote.rkey, imm: None }
    }

    fn read(&self) -> SendOp {
        SendOp::Read { remote: self.remote.address, rkey: self.remote.rkey }
    }
}

/// The process that will be killed: it serves, and streams WRITEs on request.
pub fn be_the_peer(on: On) {
    exit_with_parent();
    let own: SocketAddr = std::env::var(ROLE).unwrap().parse().unwrap();
    let options = rocinante::OpenOptions::new();
    let options = match on {
        On::Software(backend) => options.netdev(backend),
        On::Encrypted => panic!("{NO_TUNNEL}"),
        On::Kernel(device) => options.device(&device.name),
    };
    let ctx = options.open(own.ip()).unwrap();
    let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(1024).unwrap());
    let side = Side::of(ctx, pd, cq, own.ip());
    let exchange = Exchange::accept(own).unwrap();
    let mut connection = Connection::new(&side, exchange);
    loop {
        let Ok(order) = connection.exchange.hear() else { return };
        if order == "stream" {
            let sges = [connection.mr.sge(0, LEN)];
            for wr_id in 0..u64::MAX {
                connection.qp.post_send(&[wr(wr_id, connection.write(), &sges)]).unwrap();
                if wr_id >= 8 {
                    assert_eq!(side.next().status, WcStatus::Success);
                }
            }
        }
        connection.exchange.say("done").unwrap();
    }
}

/// The survivor. The peer is a process of this program: one that runs only `test`, in the second
/// container, or, on a device of the kernel, one without arguments.
pub fn survive(on: On, test: Option<&str>) {
    let place = Place::new(on, test);
    let side = place.open();
    let why = "a peer that is dead answers nothing";
    let _oracles = Oracles::of(&side).may_break(Oracle::Retransmissions, why);
    for transfer in [Transfer::Write, Transfer::Read, Transfer::PeersWrite] {
        let (mut child, mut connection) = place.start(&side);
        verify(&side, &connection);
        match transfer {
            Transfer::Write => die_while_asked(&side, &connection, connection.write(), &mut child),
            Transfer::Read => die_while_asked(&side, &connection, connection.read(), &mut child),
            Transfer::PeersWrite => die_while_writing(&side, &mut connection, &mut child),
        }
    }
    // After three peers' deaths the device still works.
    let (mut child, mut connection) = place.start(&side);
    verify(&side, &connection);
    connection.exchange.say("bye").unwrap();
    assert_eq!(connection.exchange.hear().unwrap(), "done");
    child.kill();
}

#[derive(Debug, Clone, Copy)]
enum Transfer {
    Write,
    Read,
    PeersWrite,
}

/// The place of both processes: two containers, or one device.
struct Place<'a> {
    on: On,
    test: Option<&'a str>,
    lab: Option<Lab>,
}

impl<'a> Place<'a> {
    fn new(on: On, test: Option<&'a str>) -> Self {
        let lab = match on {
            On::Software(_) => Some(Lab::new(&LabConfig::default()).unwrap()),
            On::Encrypted => panic!("{NO_TUNNEL}"),
            On::Kernel(_) => None,
        };
        Self { on, test, lab }
    }

    /// The survivor's device.
    fn open(&self) -> Side {
        match (&self.on, &self.lab) {
            (On::Kernel(device), _) => Side::open_kernels(device, Family::V4),
            (on, Some(lab)) => {
                let own = address(lab, 0, Family::V4);
                Side::open(lab.container(0).netns(), own, &Setup::new(on.clone()))
            }
            (_, None) => unreachable!("a lab was made"),
        }
    }

    /// A new process, and a connection to it.
    fn start(&self, side: &Side) -> (ChildGuard, Connection) {
        let peer = self.lab.as_ref().map_or(side.address, |lab| address(lab, 1, Family::V4));
        let at = SocketAddr::new(peer, PORT);
        let alone = || Command::new(std::env::current_exe().unwrap());
        let mut command = self.test.map_or_else(alone, myself);
        command.env(ROLE, at.to_string()).stdin(Stdio::null());
        let child = match (&self.on, &self.lab) {
            (On::Kernel(device), _) => {
                ChildGuard::spawn(command.env(DEVICE_VARIABLE, &device.name))
            }
            (_, lab) => lab.as_ref().expect("a lab").container(1).spawn(&mut command),
        };
        let connection = side.run(|| {
            let exchange = Exchange::connect(at, PATIENCE).unwrap();
            Connection::new(side, exchange)
        });
        (child.unwrap(), connection)
    }
}

/// Writes, reads back and compares.
fn verify(side: &Side, connection: &Connection) {
    let bytes = pattern(LEN, 6);
    connection.mr.write(0, &bytes);
    let list = [[connection.mr.sge(0, LEN)], [connection.mr.sge(LEN, LEN)]];
    connection.qp.post_send(&[wr(1, connection.write(), &list[0])]).unwrap();
    connection.qp.post_send(&[wr(2, connection.read(), &list[1])]).unwrap();
    side.succeed(1);
    side.succeed(2);
    assert_same(&connection.mr.to_vec(LEN, LEN), &bytes, "written and read back");
}

/// The peer dies while the survivor writes to it or reads from it.
fn die_while_asked(side: &Side, connection: &Connection, op: SendOp, child: &mut ChildGuard) {
    let sges = [connection.mr.sge(0, LEN)];
    let mut next = 0;
    while next < DEPTH {
        connection.qp.post_send(&[wr(next, op, &sges)]).unwrap();
        next += 1;
    }
    for done in 0..20 {
        side.succeed(done);
        connection.qp.post_send(&[wr(next, op, &sges)]).unwrap();
        next += 1;
    }
    // The peer's last ACK arrives after this.
    let killed = Instant::now();
    child.kill();
    let mut done = 20;
    let failed = loop {
        let wc = side.next();
        assert_eq!(wc.wr_id, done);
        done += 1;
        if wc.status != WcStatus::Success {
            break wc;
        }
    };
    // The kernel destroys a dead process's objects one by one. If the region goes before the queue
    // pair, the queue pair answers with an access error.
    let refused = !side.is_software() && failed.status == WcStatus::RemAccessErr;
    if !refused {
        assert_eq!(failed.status, WcStatus::RetryExcErr);
        // The ACK timeout expires four times. The first may run when the peer is killed.
        assert!(killed.elapsed() > Duration::from_millis(500), "{:?}", killed.elapsed());
    }
    // A generous bound for a busy machine.
    assert!(killed.elapsed() < PATIENCE, "{:?}", killed.elapsed());
    for wr_id in done..next {
        side.complete(wr_id, WcStatus::WrFlushErr);
    }
    assert_eq!(connection.qp.state(), QpState::Err);
    if !refused {
        wait_until("it is counted", || side.ctx.counters().transport.retry_exceeded_err >= 1);
    }
}

/// The peer dies while it writes. Its target notices nothing, and can be destroyed.
fn die_while_writing(side: &Side, connection: &mut Connection, child: &mut ChildGuard) {
    connection.exchange.say("stream").unwrap();
    let before = side.ctx.counters().transport.rcvd_pkts;
    let many = 20 * LEN as u64 / 4096;
    wait_until("a stream", || side.ctx.counters().transport.rcvd_pkts > before + many);
    child.kill();
    side.quiet(Duration::from_millis(300));
    assert_eq!(connection.qp.state(), QpState::Rts);
}
