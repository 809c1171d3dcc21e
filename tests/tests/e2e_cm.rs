//! Connections by the connection manager, between two containers, on every backend.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rocinante::cm::{CmFailure, Connecting, Connection, Listener, Params, RejReason};
use rocinante::{
    Access, Backend, Budget, ConnectOptions, Mtu, QpState, RecvWr, SendOp, VerbsError, WcStatus,
};
use rocinante_tests::harness::{Family, Harness, PATIENCE, Setup, Side, pattern, wr};
use rocinante_tests::{on_each_backend, require_backend};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

on_each_backend!(
    ipv4_connects_exchanges_and_disconnects,
    ipv6_connects_exchanges_and_disconnects,
    who_is_not_wanted_hears_why,
    nothing_waits_but_descriptors,
);

const PORT: u16 = 7471;

fn ipv4_connects_exchanges_and_disconnects(backend: Backend) {
    connect_exchange_disconnect(&Setup::new(backend));
}

fn ipv6_connects_exchanges_and_disconnects(backend: Backend) {
    connect_exchange_disconnect(&Setup::new(backend).family(Family::V6));
}

fn server_of(harness: &Harness) -> SocketAddr {
    SocketAddr::new(harness.sides[1].address, PORT)
}

fn connect_exchange_disconnect(setup: &Setup) {
    let harness = Harness::new(setup);
    let server = server_of(&harness);
    let listener = Listener::bind(&harness.sides[1].ctx, server, 4).unwrap();
    // Each side ends one connection, and the ports are as good as before.
    for ending in [0, 1] {
        harness.both(|at, side| {
            let connection = if at == 0 { ask(side, server) } else { answer(side, &listener) };
            exchange(at, side, &connection);
            if at == ending {
                connection.disconnect().unwrap();
            }
            connection.wait_disconnected(PATIENCE).unwrap();
            assert_eq!(connection.state(), QpState::Err);
            // What is posted completes, whoever ended it.
            side.complete(99, WcStatus::WrFlushErr);
        });
    }
    let [a, b] = harness.sides.each_ref().map(|side| side.ctx.cm_counters().unwrap());
    assert_eq!((a.connects, a.established, b.requests, b.established), (2, 2, 2, 2));
    assert_eq!((a.malformed, b.malformed, a.tx_overflow, b.tx_overflow), (0, 0, 0, 0));
}

fn ask(side: &Side, server: SocketAddr) -> Connection {
    let qp = side.qp().build().unwrap();
    let params = Params::default().private_data(b"from the client");
    let connection = rocinante::cm::connect(qp, server, &params, PATIENCE).unwrap();
    assert_eq!((connection.peer(), connection.private_data().len()), (server, 196));
    assert_eq!(&connection.private_data()[..16], b"from the server\0");
    connection
}

fn answer(side: &Side, listener: &Listener) -> Connection {
    let request = listener.request(Some(PATIENCE)).unwrap();
    assert_eq!((request.local(), request.private_data().len()), (side.address, 56));
    assert_eq!(&request.private_data()[..16], b"from the client\0");
    assert_eq!(
        (request.mtu(), request.rd_atomic()),
        (side.ctx.query_device().active_mtu, (16, 16))
    );
    let options = ConnectOptions { max_rd_atomic: 3, max_dest_rd_atomic: 5, ..Default::default() };
    let params = Params::default().options(options).private_data(b"from the server");
    let qp = side.qp().build().unwrap();
    request.accept(qp, &params).unwrap().wait(PATIENCE).unwrap()
}

/// Each side sends, the client reads and writes; both know what the other's receive queue holds, and keep to what was agreed.
fn exchange(at: usize, side: &Side, connection: &Connection) {
    const LEN: usize = 100_000;
    let (state, attr, _) = connection.query();
    let budget = attr.peer.unwrap().budget;
    assert_eq!(state, QpState::Rts);
    assert!(budget.datagrams > Budget::STRANGER.datagrams, "{budget:?}");
    let agreed = (attr.max_rd_atomic, attr.max_dest_rd_atomic);
    assert_eq!(agreed, [(Some(5), Some(3)), (Some(3), Some(5))][at]);
    let out = side.pd.allocate(LEN, Access::NONE).unwrap();
    let into = side.pd.allocate(LEN, Access::LOCAL_WRITE).unwrap();
    out.write(0, &pattern(LEN, at as u64));
    connection.post_recv(&[RecvWr { wr_id: 1, sges: &[into.sge(0, LEN)] }]).unwrap();
    connection.post_send(&[wr(2, SendOp::Send { imm: None }, &[out.sge(0, LEN)])]).unwrap();
    let mut done = [side.next(), side.next()];
    done.sort_by_key(|wc| wc.wr_id);
    assert_eq!(done.map(|wc| (wc.wr_id, wc.status)), [1, 2].map(|id| (id, WcStatus::Success)));
    assert_eq!(into.to_vec(0, LEN), pattern(LEN, 1 - at as u64));
    // For the end. Both have it posted before either ends the connection, or it would be refused or flushed alike.
    connection.post_recv(&[RecvWr { wr_id: 99, sges: &[] }]).unwrap();
}

#[track_caller]
fn rejection<T: std::fmt::Debug>(result: Result<T, VerbsError>) -> (RejReason, Vec<u8>) {
    match result {
        Err(VerbsError::Cm(CmFailure::Rejected { reason, private_data })) => (reason, private_data),
        other => panic!("{other:?}"),
    }
}

fn who_is_not_wanted_hears_why(backend: Backend) {
    let harness = Harness::new(&Setup::new(backend));
    let [client, _] = &harness.sides;
    let server = server_of(&harness);
    let params = Params::default();
    let connect = || {
        let qp = client.qp().build().unwrap();
        client.run(|| rocinante::cm::connect(qp, server, &params, PATIENCE))
    };
    // Nobody listens; not even the port's device was asked for anything before.
    let start = Instant::now();
    let error = connect();
    assert!(start.elapsed() < Duration::from_secs(5));
    let text = error.as_ref().unwrap_err().to_string();
    assert!(text.contains("start the server first"), "{text}");
    assert_eq!(rejection(error).0, RejReason::INVALID_SERVICE_ID);
    // The program does not want it.
    let listener = Listener::bind(&harness.sides[1].ctx, server, 1).unwrap();
    let twice = Listener::bind(&harness.sides[1].ctx, server, 1);
    assert!(twice.is_err_and(|error| error.errno() == 98));
    let results = harness.both(|at, _| match at {
        0 => Some(rejection(connect())),
        _ => {
            listener.request(Some(PATIENCE)).unwrap().reject(b"come back later").unwrap();
            None
        }
    });
    let (reason, words) = results[0].clone().unwrap();
    assert_eq!(
        (reason, &words[..15], words.len()),
        (RejReason::CONSUMER, &b"come back later"[..], 148)
    );
    // Who listened goes.
    drop(listener);
    assert_eq!(rejection(connect()).0, RejReason::INVALID_SERVICE_ID);
}

fn readable(fd: BorrowedFd<'_>) {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    let timeout = Timespec { tv_sec: 30, tv_nsec: 0 };
    assert_eq!(poll(&mut fds, Some(&timeout)).unwrap(), 1, "not in time");
}

/// As in a program with a loop of its own: the background threads drive.
fn nothing_waits_but_descriptors(backend: Backend) {
    let harness = Harness::new(&Setup::new(backend));
    let server = server_of(&harness);
    let listener = Listener::bind(&harness.sides[1].ctx, server, 1).unwrap();
    let finish = |mut connecting: Connecting| loop {
        readable(connecting.fd().unwrap().as_fd());
        if let Some(connection) = connecting.try_finish().unwrap() {
            return connection;
        }
    };
    let [a, b] = harness.both(|at, side| {
        let qp = side.qp().build().unwrap();
        let params = Params::default();
        finish(if at == 0 {
            Connecting::start(qp, server, &params).unwrap()
        } else {
            readable(listener.as_fd());
            listener.try_request().unwrap().accept(qp, &params).unwrap()
        })
    });
    assert!(!a.is_disconnected() && !b.is_disconnected());
    // Destroyed without a word, which the peer hears nevertheless.
    drop(a);
    readable(b.fd().unwrap().as_fd());
    assert!(b.is_disconnected());
}

#[test]
fn the_asking_side_chooses_the_path_mtu() {
    require_backend!(Backend::Udp);
    let harness = Harness::new(&Setup::new(Backend::Udp));
    let server = server_of(&harness);
    let listener = Listener::bind(&harness.sides[1].ctx, server, 1).unwrap();
    harness.both(|at, side| {
        let options = ConnectOptions { mtu: Some(Mtu::Mtu256), ..ConnectOptions::default() };
        let params = Params::default().options(options);
        let qp = side.qp().build().unwrap();
        // The asking side counts, also where it asks for little.
        let connection = if at == 0 {
            rocinante::cm::connect(qp, server, &params, PATIENCE).unwrap()
        } else {
            let request = listener.request(Some(PATIENCE)).unwrap();
            request.accept(qp, &Params::default()).unwrap().wait(PATIENCE).unwrap()
        };
        assert_eq!(connection.query().1.path_mtu, Some(Mtu::Mtu256));
    });
}

/// A program that connects and disconnects all day: every queue pair is another, and nothing is left.
#[test]
fn many_connections_at_once_and_nothing_is_left() {
    const COUNT: usize = 300;
    require_backend!(Backend::Udp);
    let harness = Harness::new(&Setup::new(Backend::Udp));
    let server = server_of(&harness);
    let listener = Listener::bind(&harness.sides[1].ctx, server, COUNT).unwrap();
    let all = harness.both(|at, side| {
        let params = Params::default();
        let mut pending = Vec::new();
        for _ in 0..COUNT {
            let qp = side.pd.qp(&side.cq, &side.cq).max_send_wr(1).max_recv_wr(1).build().unwrap();
            pending.push(if at == 0 {
                Connecting::start(qp, server, &params).unwrap()
            } else {
                listener.request(Some(PATIENCE)).unwrap().accept(qp, &params).unwrap()
            });
        }
        let finish = |connecting: Connecting| connecting.wait(PATIENCE).unwrap();
        pending.into_iter().map(finish).collect::<Vec<_>>()
    });
    let [mine, theirs] = all;
    assert_eq!((mine.len(), theirs.len()), (COUNT, COUNT));
    drop(mine);
    for connection in &theirs {
        harness.sides[1].run(|| connection.wait_disconnected(PATIENCE)).unwrap();
    }
}
