//! Connections by the connection manager, between two containers, on every backend.

use std::net::SocketAddr;

use rocinante::cm::{Connecting, Listener, Params};
use rocinante::device::Backend;
use rocinante_tests::harness::{Harness, PATIENCE, Setup};
use rocinante_tests::{need, on_each_backend, require};

on_each_backend!(cm::*);

const PORT: u16 = 7471;

/// A program that connects and disconnects all the time: each queue pair is a new one, and nothing
/// is left.
#[test]
fn many_connections_at_once_and_nothing_is_left() {
    const COUNT: usize = 300;
    require!(need::backend(Backend::Udp));
    let harness = Harness::new(&Setup::new(Backend::Udp));
    let server = SocketAddr::new(harness.sides[1].address, PORT);
    let listener = Listener::bind(&harness.sides[1].ctx, server, COUNT).unwrap();
    let all = harness.both(|at, side| {
        let params = Params::default();
        let mut pending = Vec::new();
        for _ in 0..COUNT {
            let qp = side.small_qp();
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
