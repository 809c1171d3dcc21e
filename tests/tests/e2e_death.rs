//! A peer that is killed (`kill -9`) in mid-transfer: the survivor hears of it in bounded time, and can connect anew.

use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rocinante::{
    Access, Backend, ConnectOptions, Exchange, Hello, Mr, Qp, QpState, RemoteRegion, SendOp,
    WcStatus,
};
use rocinante_tests::harness::{
    Family, PATIENCE, Setup, Side, address, assert_same, pattern, wait_until, wr,
};
use rocinante_tests::lab::{ChildGuard, Lab, LabConfig, exit_with_parent};
use rocinante_tests::require_backend;

/// Makes a process of this program the peer of a test, with its backend.
const ROLE: &str = "ROCINANTE_E2E_DEATH";
const PORT: u16 = 18_515;
const LEN: usize = 1 << 20;
/// Requests under way when the peer dies.
const DEPTH: u64 = 32;

macro_rules! deaths {
    ($( $name:ident: $backend:ident; )*) => {$(
        #[test]
        fn $name() {
            if std::env::var_os(ROLE).is_some() {
                return peer(Backend::$backend);
            }
            require_backend!(Backend::$backend);
            survive(Backend::$backend, stringify!($name));
        }
    )*};
}

deaths! {
    a_killed_peer_udp: Udp;
    a_killed_peer_packet: Packet;
    a_killed_peer_afxdp: Xdp;
}

/// 67 ms, four times.
fn options() -> ConnectOptions {
    ConnectOptions { timeout: 14, retry_cnt: 3, ..ConnectOptions::default() }
}

/// A device, a queue pair and a region on either side of an exchange.
struct Connection {
    qp: Qp,
    mr: Mr,
    remote: RemoteRegion,
    exchange: Exchange,
}

impl Connection {
    /// To be called inside the namespace.
    fn new(side: &Side, mut exchange: Exchange) -> Self {
        let prepared = side.qp().build().unwrap();
        let mr = side.pd.allocate(2 * LEN, Access::ALL).unwrap();
        let hello = Hello {
            endpoints: vec![prepared.endpoint()],
            regions: vec![RemoteRegion::from(&mr)],
            note: String::new(),
        };
        let heard = exchange.swap(&hello).unwrap();
        let qp = prepared.connect(&heard.endpoints[0], &options()).map_err(|(_, e)| e).unwrap();
        exchange.barrier("connected").unwrap();
        Self { qp, mr, remote: heard.regions[0], exchange }
    }

    fn write(&self) -> SendOp {
        SendOp::Write { remote: self.remote.address, rkey: self.remote.key(), imm: None }
    }

    fn read(&self) -> SendOp {
        SendOp::Read { remote: self.remote.address, rkey: self.remote.key() }
    }
}

/// The process that will be killed: serves, and streams WRITEs if it is told to.
fn peer(backend: Backend) {
    exit_with_parent();
    let own: SocketAddr = std::env::var(ROLE).unwrap().parse().unwrap();
    let ctx = rocinante::OpenOptions::new().netdev(backend).open(own.ip()).unwrap();
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

fn survive(backend: Backend, test: &str) {
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let setup = Setup::new(backend);
    let side = Side::open(lab.container(0).netns(), address(&lab, 0, Family::V4), &setup);
    for transfer in [Transfer::Write, Transfer::Read, Transfer::PeersWrite] {
        let (mut child, mut connection) = start(&lab, &side, test);
        verify(&side, &connection);
        match transfer {
            Transfer::Write => die_while_asked(&side, &connection, connection.write(), &mut child),
            Transfer::Read => die_while_asked(&side, &connection, connection.read(), &mut child),
            Transfer::PeersWrite => die_while_writing(&side, &mut connection, &mut child),
        }
    }
    // Two peers' deaths later the device is as good as new.
    let (mut child, mut connection) = start(&lab, &side, test);
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

/// A new process in the second container, and a connection to it.
fn start(lab: &Lab, side: &Side, test: &str) -> (ChildGuard, Connection) {
    let at = SocketAddr::new(address(lab, 1, Family::V4), PORT);
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(ROLE, at.to_string()).stdin(Stdio::null());
    let child = lab.container(1).spawn(&mut command).unwrap();
    let connection = side.run(|| {
        let exchange = Exchange::connect(at, PATIENCE).unwrap();
        Connection::new(side, exchange)
    });
    (child, connection)
}

/// Writes and reads back.
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

/// The peer dies while it is written to or read from.
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
    child.kill();
    let killed = Instant::now();
    let mut done = 20;
    let failed = loop {
        let wc = side.next();
        assert_eq!(wc.wr_id, done);
        done += 1;
        if wc.status != WcStatus::Success {
            break wc;
        }
    };
    assert_eq!(failed.status, WcStatus::RetryExcErr);
    // Four times 67 ms from the last sign of life on; the bound is a busy machine's.
    assert!(killed.elapsed() > Duration::from_millis(150), "{:?}", killed.elapsed());
    assert!(killed.elapsed() < Duration::from_secs(10), "{:?}", killed.elapsed());
    for wr_id in done..next {
        side.complete(wr_id, WcStatus::WrFlushErr);
    }
    assert_eq!(connection.qp.state(), QpState::Err);
    assert!(side.ctx.counters().transport.retry_exceeded_err >= 1);
}

/// The peer dies while it writes: its target notices nothing, and can be destroyed.
fn die_while_writing(side: &Side, connection: &mut Connection, child: &mut ChildGuard) {
    connection.exchange.say("stream").unwrap();
    let before = side.ctx.counters().transport.rcvd_bytes;
    wait_until("a stream", || side.ctx.counters().transport.rcvd_bytes > before + 20 * LEN as u64);
    child.kill();
    side.quiet(Duration::from_millis(300));
    assert_eq!(connection.qp.state(), QpState::Rts);
}
