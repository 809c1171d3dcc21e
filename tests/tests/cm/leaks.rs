//! A thousand connections are made and ended one after the other, as by a program that does so all
//! the time. Descriptors, queue pairs, their numbers, regions and paths are all given back, and the
//! memory of the process does not grow.

use std::net::SocketAddr;

use rocinante::cm::{self, Listener, Params};
use rocinante::device::Backend;
use rocinante::verbs::SendOp;
use rocinante::{Access, RecvWr, WcStatus};
use rocinante_tests::alone::{Held, at_rest, resident_bytes};
use rocinante_tests::alone_on_each_backend;
use rocinante_tests::harness::{Harness, PATIENCE, Setup, Side, wait_until, wr};

alone_on_each_backend! { 300:
    a_thousand_cycles_udp: Udp cycles;
    a_thousand_cycles_packet: Packet cycles;
    a_thousand_cycles_afxdp: Xdp cycles;
}

const PORT: u16 = 7471;
const COUNT: usize = 1000;
/// Connections after which lists, caches and the allocator's arenas have reached their size.
const FIRST: usize = 500;
/// The most growth of the memory after [`COUNT`] more, in bytes. The allocator alone makes it vary
/// by one million. A queue pair's queues that are not given back, or a page for each connection,
/// would be more than this.
const GROWTH_MAX: usize = COUNT * 4096;

fn cycles(backend: Backend) {
    let harness = Harness::new(&Setup::new(backend));
    let server = SocketAddr::new(harness.sides[1].address, PORT);
    let listener = Listener::bind(&harness.sides[1].ctx, server, 4).unwrap();
    let first = held_after(FIRST, &harness, &listener);
    let then = held_after(COUNT, &harness, &listener);
    assert_eq!(then.0, first.0);
    let mut rest = [at_rest(); 2];
    rest[1].listeners = 1;
    assert_eq!(then.0.resources, rest);
    let growth = then.1.saturating_sub(first.1);
    println!("{} KiB resident, {growth} bytes more than before", then.1 >> 10);
    assert!(growth < GROWTH_MAX, "{growth} bytes more after {COUNT} connections");
}

/// The resources held, and the resident memory, after `count` more connections.
fn held_after(count: usize, harness: &Harness, listener: &Listener) -> (Held, usize) {
    harness.both(|at, side| {
        for turn in 0..count {
            let ends = turn % 2 == at;
            cycle(side, (at == 1).then_some(listener), listener.address(), ends);
        }
    });
    let held = || Held::now(&[&harness.sides[0].ctx, &harness.sides[1].ctx]);
    // Numbers of queue pairs are kept a little longer.
    let all = |held: &Held| held.resources.iter().all(|it| it.kept_qpns + it.connections == 0);
    wait_until("all connections are forgotten", || all(&held()));
    (held(), resident_bytes())
}

/// One connection of one side, with all its objects.
fn cycle(side: &Side, listener: Option<&Listener>, server: SocketAddr, ends: bool) {
    let cq = side.ctx.create_cq(4).unwrap();
    let mr = side.pd.allocate(8192, Access::LOCAL_WRITE).unwrap();
    let qp =
        side.pd.qp(&cq, &cq).access(Access::ALL).max_send_wr(2).max_recv_wr(2).build().unwrap();
    qp.post_recv(&[RecvWr { wr_id: 1, sges: &[mr.sge(0, 64)] }]).unwrap();
    let params = Params::default();
    let connection = match listener {
        None => cm::connect(qp, server, &params, PATIENCE).unwrap(),
        Some(listener) => {
            let request = listener.request(Some(PATIENCE)).unwrap();
            request.accept(qp, &params).unwrap().wait(PATIENCE).unwrap()
        }
    };
    connection.post_send(&[wr(2, SendOp::Send { imm: None }, &[mr.sge(64, 64)])]).unwrap();
    for _ in 0..2 {
        assert_eq!(cq.wait_one(PATIENCE).unwrap().status, WcStatus::Success);
    }
    // Each second time the connection is dropped, as a program does that returns early.
    if !ends {
        connection.wait_disconnected(PATIENCE).unwrap();
    }
}
