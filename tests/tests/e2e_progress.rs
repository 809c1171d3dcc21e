//! Who drives a device, and who hears of what: channels, solicited events, several threads, a target that does nothing.

use std::time::Duration;

use rocinante::{Access, Backend, SendOp};
use rocinante_tests::harness::{Harness, PATIENCE, Setup, next, wait_until, wr};
use rocinante_tests::lab::Match;
use rocinante_tests::{on_each_backend, require_nft};

on_each_backend!(progress::*);
on_each_backend!(a_sleeper_keeps_the_time_of_others);

/// One thread sleeps on a channel; another posts meanwhile, and what it sends is lost: somebody must send it again.
fn a_sleeper_keeps_the_time_of_others(backend: Backend) {
    require_nft!();
    let harness = Harness::new(&Setup::new(backend));
    let [a, b] = &harness.sides;
    let channel = a.ctx.create_comp_channel().unwrap();
    let cq = a.ctx.create_cq_with(1024, &channel).unwrap();
    let mine = a.pd.qp(&cq, &cq).build().unwrap();
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
