//! Memory as a peer sees it: the last byte of a WRITE comes last, sequence numbers wrap, and a
//! device reaches itself.

use rocinante::Access;
use rocinante::device::Backend;
use rocinante::verbs::SendOp;
use rocinante_tests::harness::{Harness, Setup, assert_same, pattern, wr};
use rocinante_tests::on_each_backend;

on_each_backend!(memory::*);
on_each_backend!(two_addresses_of_one_device_reach_each_other);

fn two_addresses_of_one_device_reach_each_other(backend: Backend) {
    let harness = Harness::new(&Setup::new(backend));
    // The second container's device is opened again, with all its addresses.
    let ([a, b], setup, lab) = harness.take_apart();
    let lab = lab.expect("a lab");
    drop(b);
    lab.container(1)
        .output(std::process::Command::new("ip").args([
            "address",
            "add",
            "10.77.0.99/24",
            "dev",
            "eth0",
        ]))
        .unwrap();
    let netns = lab.container(1).netns().clone();
    let options = rocinante::OpenOptions::new().netdev(backend);
    let ctx = netns.run(|| options.open_interface("eth0")).unwrap().unwrap();
    let of = |text: &str| ctx.gids().iter().position(|gid| gid.to_string() == text).unwrap();
    let (one, other) = (of("10.77.0.2"), of("10.77.0.99"));
    let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(1024).unwrap());
    let make = |index| pd.qp(&cq, &cq).access(Access::ALL).sgid_index(index).build().unwrap();
    let (first, second, outward) = (make(one), make(other), make(other));
    let ends = [first.endpoint(), second.endpoint(), outward.endpoint()];
    assert_ne!(ends[0].address, ends[1].address);
    let from_a = a.qp().build().unwrap();
    let end_a = from_a.endpoint();
    let (first, second, _outward) = netns
        .run(|| {
            let connect = |qp: rocinante::PreparedQp, end: &rocinante::Endpoint| {
                qp.connect(end, &setup.connect).unwrap()
            };
            (connect(first, &ends[1]), connect(second, &ends[0]), connect(outward, &end_a))
        })
        .unwrap();
    let from_a = a.run(|| from_a.connect(&ends[2], &setup.connect)).unwrap();

    let source = pd.allocate(9000, Access::ALL).unwrap();
    source.write(0, &pattern(9000, 1));
    let target = pd.allocate(9000, Access::ALL).unwrap();
    let write = SendOp::Write { remote: target.address(), rkey: target.rkey(), imm: None };
    for qp in [&first, &second] {
        target.write(0, &[0; 9000]);
        qp.post_send(&[wr(5, write, &[source.sge(0, 9000)])]).unwrap();
        let wc = rocinante_tests::harness::next(&cq);
        assert_eq!((wc.wr_id, wc.status), (5, rocinante::WcStatus::Success));
        assert_same(&target.to_vec(0, 9000), &pattern(9000, 1), "WRITE");
    }
    // The second address is also reachable from outside.
    let outside = a.pd.allocate(9000, Access::NONE).unwrap();
    outside.write(0, &pattern(9000, 2));
    from_a.post_send(&[wr(6, write, &[outside.sge(0, 9000)])]).unwrap();
    a.succeed(6);
    assert_same(&target.to_vec(0, 9000), &pattern(9000, 2), "WRITE from outside");
}
