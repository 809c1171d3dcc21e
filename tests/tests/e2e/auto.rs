//! The backend of a container's device if the program names none, and the reason.

use rocinante::device::Backend;
use rocinante::verbs::SendOp;
use rocinante::{Access, ConnectOptions, Context, OpenOptions, WcStatus};
use rocinante_lab::{Container, Lab, LabConfig};
use rocinante_tests::harness::{Harness, Setup, wr};
use rocinante_tests::{need, require};

fn lab() -> Lab {
    Lab::new(&LabConfig::default()).unwrap()
}

fn open(container: &Container) -> Context {
    let address = container.ipv4().into();
    // The environment may name a backend for the whole test run.
    container.run(|| OpenOptions::new().netdev_auto().open(address)).unwrap().unwrap()
}

/// Rules by which a container drops matching packets on its own output.
fn forbid(what: &str) -> String {
    format!(
        "table inet guarded {{ chain out {{ type filter hook output priority 0; {what} drop; }}; }}"
    )
}

/// The device's backend, and its reason.
fn choice(ctx: &Context) -> (Backend, String) {
    (ctx.backend().unwrap(), ctx.query_device().chosen_because)
}

#[test]
fn a_container_without_rules_gets_packet() {
    // A process that may not see all rules cannot know that there are none.
    require!(need::machine_root());
    require!(need::lab());
    let lab = lab();
    let (backend, why) = choice(&open(lab.container(0)));
    assert_eq!(backend, Backend::Packet, "{why}");
    assert!(why.contains("veth"), "{why}");
}

#[test]
fn rules_of_the_own_namespace_mean_udp() {
    require!(need::machine_root());
    require!(need::nft());
    let lab = lab();
    let [one, other] = [lab.container(0), lab.container(1)];
    one.nft(&forbid("udp dport 4791 counter")).unwrap();
    let (backend, why) = choice(&open(one));
    assert_eq!(backend, Backend::Udp, "{why}");
    assert!(why.contains("not packet") && why.contains("guarded"), "{why}");
    // A rule that cannot match does not count.
    other.nft(&forbid("tcp dport 80")).unwrap();
    let (backend, why) = choice(&open(other));
    assert_eq!(backend, Backend::Packet, "{why}");
}

#[test]
fn a_named_backend_is_used_and_says_what_it_bypasses() {
    require!(need::backend(Backend::Packet));
    require!(need::nft());
    let lab = lab();
    let one = lab.container(0);
    one.nft(&forbid("udp dport 4791")).unwrap();
    let address = one.ipv4().into();
    let options = OpenOptions::new().netdev(Backend::Packet);
    let ctx = one.run(|| options.open(address)).unwrap().unwrap();
    let (backend, why) = choice(&ctx);
    assert_eq!(backend, Backend::Packet);
    assert!(why.contains("asked for") && why.contains("bypass"), "{why}");
}

/// The rule that made the device choose `udp` also binds it: matching packets do not leave, and the
/// counters report it.
#[test]
fn what_the_own_namespace_forbids_does_not_leave() {
    require!(need::nft());
    let mut setup = Setup::new(Backend::Udp);
    setup.connect.timeout = 12;
    setup.connect.retry_cnt = 2;
    let harness = Harness::new(&setup);
    let [a, b] = &harness.sides;
    let [qp, _peer] = harness.pair();
    let target = b.pd.allocate(64, Access::ALL).unwrap();
    let write = SendOp::Write { remote: target.address(), rkey: target.rkey(), imm: None };
    let one = harness.lab().container(0);
    one.nft(&forbid("udp dport 4791")).unwrap();
    qp.post_send(&[wr(1, write, &[])]).unwrap();
    a.complete(1, WcStatus::RetryExcErr);
    let (datagrams, errno) = a.ctx.counters().refused;
    assert!(datagrams >= 3);
    assert_eq!(errno, rustix::io::Errno::PERM.raw_os_error());
    one.nft("delete table inet guarded").unwrap();
    // This one may take longer on a busy machine.
    let qps = [a, b].map(|side| side.qp().build().unwrap());
    let patient = ConnectOptions::default();
    let [qp, _peer] = harness.connect_with(qps, [&patient, &patient]);
    qp.post_send(&[wr(2, write, &[])]).unwrap();
    a.succeed(2);
}
