//! Connections by our connection manager, or by the kernel's.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use rocinante::cm::{self, CmFailure, Connecting, Connection, Listener, Params, RejReason};
use rocinante::verbs::{Budget, Mtu, QpState, QpType, SendOp};
use rocinante::{Access, ConnectOptions, RecvWr, VerbsError, WcStatus};

use super::{families, readable};
use crate::harness::{
    Family, Harness, On, PATIENCE, Setup, Side, pattern, requested, wait_until, wr,
};

const PORT: u16 = 7471;

pub fn ipv4_connects_exchanges_and_disconnects(on: On) {
    connect_exchange_disconnect(&Setup::new(on));
}

pub fn ipv6_connects_exchanges_and_disconnects(on: On) {
    if let On::Kernel(device) = &on {
        crate::require!(device.address_of(Family::V6));
    }
    connect_exchange_disconnect(&Setup::new(on).family(Family::V6));
}

fn server_of(harness: &Harness) -> SocketAddr {
    SocketAddr::new(harness.sides[1].address, PORT)
}

fn listen(harness: &Harness, backlog: usize) -> Listener {
    Listener::bind(&harness.sides[1].ctx, server_of(harness), backlog).unwrap()
}

fn connect_exchange_disconnect(setup: &Setup) {
    let harness = Harness::new(setup);
    let listener = listen(&harness, 4);
    let server = listener.address();
    // Each side ends one connection. Afterwards the ports work as before.
    for ending in [0, 1] {
        harness.both(|at, side| {
            let connection = if at == 0 { ask(side, server) } else { answer(side, &listener) };
            exchange(at, side, &connection);
            if at == ending {
                connection.disconnect().unwrap();
            }
            connection.wait_disconnected(PATIENCE).unwrap();
            assert_eq!(connection.state(), QpState::Err);
            // Posted requests complete, whichever side ended the connection.
            side.complete(99, WcStatus::WrFlushErr);
        });
    }
    if harness.is_software() {
        let [a, b] = harness.sides.each_ref().map(|side| side.ctx.cm_counters().unwrap());
        assert_eq!((a.connects, a.established, b.requests, b.established), (2, 2, 2, 2));
        assert_eq!((a.malformed, b.malformed, a.tx_overflow, b.tx_overflow), (0, 0, 0, 0));
    }
}

fn ask(side: &Side, server: SocketAddr) -> Connection {
    let qp = side.qp().build().unwrap();
    let params = Params::default().private_data(b"from the client");
    let connection = cm::connect(qp, server, &params, PATIENCE).unwrap();
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
    // Powers of two: a device may round them up.
    let options = ConnectOptions::default().max_rd_atomic(4).max_dest_rd_atomic(8);
    let params = Params::default().options(options).private_data(b"from the server");
    let qp = side.qp().build().unwrap();
    request.accept(qp, &params).unwrap().wait(PATIENCE).unwrap()
}

/// Each side sends. Both keep to the agreed options, and software devices know the size of the
/// peer's receive queue.
fn exchange(at: usize, side: &Side, connection: &Connection) {
    const LEN: usize = 100_000;
    let (state, attr, _) = connection.query();
    let budget = attr.peer.unwrap().budget;
    assert_eq!(state, QpState::Rts);
    assert!(!side.is_software() || budget.datagrams > Budget::STANDARD.datagrams, "{budget:?}");
    let agreed = (attr.max_rd_atomic, attr.max_dest_rd_atomic);
    assert_eq!(agreed, [(Some(8), Some(4)), (Some(4), Some(8))][at]);
    let out = side.pd.allocate(LEN, Access::NONE).unwrap();
    let into = side.pd.allocate(LEN, Access::LOCAL_WRITE).unwrap();
    out.write(0, &pattern(LEN, at as u64));
    // The second receive is for the end. A side that has received the peer's message knows that
    // both receives are posted on either side, and may end the connection. Soft-RoCE does not flush
    // a receive that is posted after the end.
    let list = [into.sge(0, LEN)];
    let receives = [RecvWr { wr_id: 1, sges: &list }, RecvWr { wr_id: 99, sges: &[] }];
    connection.post_recv(&receives).unwrap();
    connection.post_send(&[wr(2, SendOp::Send { imm: None }, &[out.sge(0, LEN)])]).unwrap();
    let mut done = [side.next(), side.next()];
    done.sort_by_key(|wc| wc.wr_id);
    assert_eq!(done.map(|wc| (wc.wr_id, wc.status)), [1, 2].map(|id| (id, WcStatus::Success)));
    assert_eq!(into.to_vec(0, LEN), pattern(LEN, 1 - at as u64));
}

/// Connects from the first side, with a reliable connection.
fn connect(harness: &Harness, patience: Duration) -> Result<Connection, VerbsError> {
    let (side, server) = (&harness.sides[0], server_of(harness));
    let qp = side.qp().build().unwrap();
    side.run(|| cm::connect(qp, server, &Params::default(), patience))
}

/// A connected pair, of this type.
fn connected(harness: &Harness, listener: &Listener, qp_type: QpType) -> [Connection; 2] {
    harness.both(|at, side| {
        let qp = side.qp().qp_type(qp_type).build().unwrap();
        if at == 0 {
            return cm::connect(qp, listener.address(), &Params::default(), PATIENCE).unwrap();
        }
        let request = requested(listener);
        assert_eq!(request.qp_type(), qp_type);
        request.accept(qp, &Params::default()).unwrap().wait(PATIENCE).unwrap()
    })
}

#[track_caller]
fn rejection<T: std::fmt::Debug>(result: Result<T, VerbsError>) -> (RejReason, Vec<u8>) {
    match result {
        Err(VerbsError::Cm(CmFailure::Rejected { reason, private_data })) => (reason, private_data),
        other => panic!("{other:?}"),
    }
}

pub fn a_rejected_peer_gets_the_reason(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let server = server_of(&harness);
    // No listener exists, and nothing was asked of the port's device before.
    let error = connect(&harness, PATIENCE);
    let text = error.as_ref().unwrap_err().to_string();
    assert!(text.contains("start the server first"), "{text}");
    assert_eq!(rejection(error).0, RejReason::INVALID_SERVICE_ID);
    // The program rejects the request.
    let listener = listen(&harness, 1);
    let twice = Listener::bind(&harness.sides[1].ctx, server, 1);
    assert!(twice.is_err_and(|error| error.errno() == 98));
    let results = harness.both(|at, _| match at {
        0 => Some(rejection(connect(&harness, PATIENCE))),
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
    // The listener goes.
    drop(listener);
    assert_eq!(rejection(connect(&harness, PATIENCE)).0, RejReason::INVALID_SERVICE_ID);
}

/// As in a program with its own event loop: no thread blocks in a call.
pub fn nothing_waits_but_descriptors(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let listener = listen(&harness, 1);
    assert!(!readable(listener.as_fd(), Duration::from_millis(20)));
    assert!(listener.try_request().unwrap().is_none());
    let finish = |mut connecting: Connecting| loop {
        assert!(readable(connecting.fd().unwrap(), PATIENCE));
        if let Some(connection) = connecting.try_finish().unwrap() {
            return connection;
        }
    };
    let [a, b] = harness.both(|at, side| {
        let qp = side.qp().build().unwrap();
        let params = Params::default();
        finish(if at == 0 {
            Connecting::start(qp, listener.address(), &params).unwrap()
        } else {
            assert!(readable(listener.as_fd(), PATIENCE));
            listener.try_request().unwrap().unwrap().accept(qp, &params).unwrap()
        })
    });
    assert!(!a.is_disconnected() && !b.is_disconnected());
    assert!(!readable(b.fd().unwrap(), Duration::ZERO));
    let notifier = b.notifier().unwrap();
    // Destroyed without a disconnect; the peer is informed nevertheless.
    drop(a);
    assert!(readable(b.fd().unwrap(), PATIENCE));
    assert!(b.is_disconnected());
    // From now on every look reports it, also a new one.
    assert!(readable(b.fd().unwrap(), Duration::ZERO) && readable(notifier.as_fd(), PATIENCE));
}

/// The queue pair breaks, though the program looks only at its completions.
pub fn a_program_without_cm_calls_gets_completions(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let listener = listen(&harness, 1);
    let [a, b] = connected(&harness, &listener, QpType::Rc);
    b.post_recv(&[RecvWr { wr_id: 7, sges: &[] }]).unwrap();
    a.disconnect().unwrap();
    harness.sides[1].complete(7, WcStatus::WrFlushErr);
    wait_until("the end of the peer's", || a.is_disconnected());
    // Disconnecting twice is no error, on either side.
    a.disconnect().unwrap();
    b.disconnect().unwrap();
}

pub fn unreliable_connections(on: On) {
    for family in families(&on) {
        let harness = Harness::new(&Setup::new(on.clone()).family(family));
        let [a, b] = &harness.sides;
        let listener = listen(&harness, 4);
        let [at_a, at_b] = connected(&harness, &listener, QpType::Uc);
        assert_eq!((at_a.qp_type(), at_b.qp_type()), (QpType::Uc, QpType::Uc));
        send((a, &at_a), (b, &at_b));
        send((b, &at_b), (a, &at_a));
        // A WRITE works, too; and the end is reported as on any connection.
        let target = b.pd.allocate(64, Access::ALL).unwrap();
        let source = a.pd.allocate(64, Access::NONE).unwrap();
        source.write(0, b"unreliable");
        let imm = Some(*b"imm!");
        let op = SendOp::Write { remote: target.address(), rkey: target.rkey(), imm };
        at_b.post_recv(&[RecvWr { wr_id: 3, sges: &[] }]).unwrap();
        at_a.post_send(&[wr(4, op, &[source.sge(0, 64)])]).unwrap();
        a.succeed(4);
        b.succeed(3);
        assert_eq!(target.to_vec(0, 10), b"unreliable");
        at_a.disconnect().unwrap();
        b.run(|| at_b.wait_disconnected(PATIENCE)).unwrap();
    }
}

/// A SEND of some bytes from one side to the other, which arrives. Panics if it does not.
pub fn send(from: (&Side, &Connection), to: (&Side, &Connection)) {
    const LEN: usize = 10_000;
    let out = from.0.pd.allocate(LEN, Access::NONE).unwrap();
    let into = to.0.pd.allocate(LEN, Access::LOCAL_WRITE).unwrap();
    out.write(0, &pattern(LEN, 7));
    to.1.post_recv(&[RecvWr { wr_id: 1, sges: &[into.sge(0, LEN)] }]).unwrap();
    from.1.post_send(&[wr(2, SendOp::Send { imm: None }, &[out.sge(0, LEN)])]).unwrap();
    from.0.succeed(2);
    to.0.succeed(1);
    assert_eq!(into.to_vec(0, LEN), pattern(LEN, 7));
}

/// Private data of each permitted length arrives; longer data is refused.
pub fn private_data_of_every_length(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let listener = listen(&harness, 4);
    let server = listener.address();
    let of = |len: usize, at: u8| -> Vec<u8> { (0..len).map(|n| n as u8 ^ at).collect() };
    let connections = harness.both(|at, side| {
        let qp = side.qp().build().unwrap();
        if at == 0 {
            let params = Params::default().private_data(&of(56, 0x55));
            return cm::connect(qp, server, &params, PATIENCE).unwrap();
        }
        let request = listener.request(Some(PATIENCE)).unwrap();
        let params = Params::default().private_data(&of(196, 0xaa));
        request.accept(qp, &params).unwrap().wait(PATIENCE).unwrap()
    });
    assert_eq!(connections[0].private_data(), of(196, 0xaa));
    assert_eq!(connections[1].private_data(), of(56, 0x55));
    let side = &harness.sides[0];
    let params = Params::default().private_data(&of(57, 0));
    let why = cm::connect(side.qp().build().unwrap(), server, &params, PATIENCE).unwrap_err();
    assert!(why.to_string().contains("56 bytes at most"), "{why}");
    // A request refused locally was never sent.
    assert!(listener.try_request().unwrap().is_none());
}

/// Each connection is a new one, and leaves nothing behind.
pub fn many_connections_one_after_the_other(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let listener = listen(&harness, 1);
    for round in 0..30 {
        let [a, b] = connected(&harness, &listener, QpType::Rc);
        if round % 3 == 0 {
            send((&harness.sides[0], &a), (&harness.sides[1], &b));
        }
        let [goes, stays] = if round % 2 == 0 { [a, b] } else { [b, a] };
        drop(goes);
        harness.sides[1 - round % 2].run(|| stays.wait_disconnected(PATIENCE)).unwrap();
    }
}

/// A listener that goes rejects each request that the program has not taken. The program still
/// decides on the requests that it has taken.
pub fn a_listener_goes_while_a_peer_waits(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [side, serving] = &harness.sides;
    let listener = listen(&harness, 2);
    let server = listener.address();
    let start = || {
        let qp = side.qp().build().unwrap();
        side.run(|| Connecting::start(qp, server, &Params::default())).unwrap()
    };
    let first = start();
    let taken = listener.request(Some(PATIENCE)).unwrap();
    let second = start();
    assert!(readable(listener.as_fd(), PATIENCE));
    drop(listener);
    let rejected = side.run(|| second.wait(PATIENCE));
    assert!(matches!(rejected, Err(VerbsError::Cm(CmFailure::Rejected { .. }))), "{rejected:?}");
    let qp = serving.qp().build().unwrap();
    let accepted = serving.run(|| taken.accept(qp, &Params::default())).unwrap();
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| side.run(|| first.wait(PATIENCE)));
        let b = serving.run(|| accepted.wait(PATIENCE)).unwrap();
        let a = asked.join().unwrap().unwrap();
        send((side, &a), (serving, &b));
    });
}

/// A wait for an event that does not happen ends at its time limit; a request that was given up
/// leads to no connection.
pub fn patience_ends(on: On) {
    let short = Duration::from_millis(200);
    let harness = Harness::new(&Setup::new(on));
    let serving = &harness.sides[1];
    let listener = listen(&harness, 2);
    assert!(matches!(listener.request(Some(short)), Err(VerbsError::TimedOut)));
    // The program does not decide in time. The side that has taken the request learns that the peer
    // is gone, at the latest when it waits for the connection.
    let [impatient, taken] = harness.both(|at, _| match at {
        0 => (Some(connect(&harness, short)), None),
        _ => (None, Some(listener.request(Some(PATIENCE)).unwrap())),
    });
    let impatient = impatient.0.unwrap();
    assert!(matches!(impatient, Err(VerbsError::TimedOut)), "{impatient:?}");
    let qp = serving.qp().build().unwrap();
    let outcome = serving.run(|| {
        let connecting = taken.1.unwrap().accept(qp, &Params::default())?;
        connecting.wait(PATIENCE)
    });
    assert!(outcome.is_err(), "{outcome:?}");
    // The next request is served.
    let [a, _b] = connected(&harness, &listener, QpType::Rc);
    assert!(matches!(a.wait_disconnected(short), Err(VerbsError::TimedOut)));
    // Requests beyond the backlog are rejected.
    let patient: Vec<_> = (0..2)
        .map(|_| {
            let qp = harness.sides[0].qp().build().unwrap();
            let params = Params::default();
            let server = listener.address();
            let asked = harness.sides[0].run(|| Connecting::start(qp, server, &params)).unwrap();
            (asked, listener.request(Some(PATIENCE)).unwrap())
        })
        .collect();
    rejection(connect(&harness, PATIENCE));
    drop(patient);
}

/// Also a path MTU below that of the links.
pub fn the_asking_side_chooses_the_path_mtu(on: On) {
    for family in families(&on) {
        let harness = Harness::new(&Setup::new(on.clone()).family(family));
        let listener = listen(&harness, 1);
        let [a, b] = harness.both(|at, side| {
            let options = ConnectOptions::default().mtu(Some(Mtu::Mtu256));
            let params = Params::default().options(options);
            let qp = side.qp().build().unwrap();
            let connection = if at == 0 {
                cm::connect(qp, listener.address(), &params, PATIENCE).unwrap()
            } else {
                let request = listener.request(Some(PATIENCE)).unwrap();
                assert_eq!(request.mtu(), Mtu::Mtu256);
                request.accept(qp, &Params::default()).unwrap().wait(PATIENCE).unwrap()
            };
            assert_eq!(connection.query().1.path_mtu, Some(Mtu::Mtu256));
            connection
        });
        send((&harness.sides[0], &a), (&harness.sides[1], &b));
        send((&harness.sides[1], &b), (&harness.sides[0], &a));
    }
}
