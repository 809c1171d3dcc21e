//! Progress and notification: channels, solicited events, several threads, a passive target.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rocinante::cm::{CmFailure, SidrStatus, resolve};
use rocinante::device::Backend;
use rocinante::verbs::SendOp;
use rocinante::{Access, ConnectOptions, VerbsError};
use rocinante_lab::Match;
use rocinante_tests::harness::{Harness, PATIENCE, Setup, StopOnDrop, next, wait_until, wr};
use rocinante_tests::oracles::Oracle;
use rocinante_tests::{need, on_each_backend, require};

on_each_backend!(progress::*);
on_each_backend!(a_sleeper_keeps_the_time_of_others, a_device_is_driven_from_elsewhere);

/// One thread sleeps on a channel. Another posts meanwhile, and its packets are lost: the device
/// must retransmit them.
fn a_sleeper_keeps_the_time_of_others(backend: Backend) {
    require!(need::nft());
    let why = "the bridge drops some of the first packets";
    let mut setup = Setup::new(backend).may_break(Oracle::Retransmissions, why);
    // It must outlive the block, which ends when two programs have run.
    setup.connect = setup.connect.timeout(17);
    let harness = Harness::new(&setup);
    let [a, b] = &harness.sides;
    let channel = a.channel();
    let cq = a.ctx.create_cq_with(1024, &channel).unwrap();
    let mine = a.pd.qp(&cq, &cq).access(Access::ALL).build().unwrap();
    let [qp, _peer] = harness.connect([mine, b.qp().build().unwrap()]);
    let target = b.pd.allocate(64, Access::ALL).unwrap();
    let write = SendOp::Write { remote: target.address(), rkey: target.rkey(), imm: None };
    for round in 0..3 {
        cq.req_notify(false).unwrap();
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| channel.wait_event(Some(PATIENCE)).map(drop));
            std::thread::sleep(Duration::from_millis(50));
            let block = harness.lab().block(&Match::roce()).unwrap();
            qp.post_send(&[wr(round, write, &[])]).unwrap();
            wait_until("a loss", || block.counter().unwrap().packets > 0);
            block.remove().unwrap();
            sleeper.join().unwrap().expect("the WRITE completes");
        });
        assert_eq!(next(&cq).wr_id, round);
    }
    let counters = a.ctx.counters().transport;
    assert!(counters.retransmitted_pkts + counters.tail_probes >= 3, "{counters:?}");
}

/// The only thread that drives the device has never been in its container. Sockets that it opens on
/// the way, to connect or to answer the connection manager, must belong to the container.
fn a_device_is_driven_from_elsewhere(backend: Backend) {
    let mut setup = Setup::new(backend);
    setup.background = false;
    let harness = Harness::new(&setup);
    let [a, b] = &harness.sides;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                b.ctx.progress();
            }
        });
        let _stop = StopOnDrop(&stop);
        let nobody = resolve(&a.ctx, 0, SocketAddr::new(b.address, 7175), b"", PATIENCE);
        let Err(VerbsError::Cm(CmFailure::Unresolved { status, .. })) = &nobody else {
            panic!("{nobody:?}")
        };
        assert_eq!(*status, SidrStatus::UNSUPPORTED);
        let [qp, peer] = [a, b].map(|side| side.qp().build().unwrap());
        let ends = [qp.endpoint(), peer.endpoint()];
        let options = ConnectOptions::default();
        let _peer = peer.connect(&ends[0], &options).unwrap();
        let qp = qp.connect(&ends[1], &options).unwrap();
        let target = b.pd.allocate(8, Access::ALL).unwrap();
        let op = SendOp::Write { remote: target.address(), rkey: target.rkey(), imm: None };
        qp.post_send(&[wr(1, op, &[])]).unwrap();
        a.succeed(1);
    });
}
