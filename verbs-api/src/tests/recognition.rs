//! Devices recognise each other.

use std::time::{Duration, Instant};

use rocinante_netdev::sim::SimNet;
use rocinante_soft::Settings;
use rocinante_soft::model::endpoint::Endpoint;
use rocinante_soft::model::qp::{ConnectOptions, PeerPath};
use rocinante_stack::mem::Access;
use rocinante_stack::types::Qpn;
use rocinante_stack::verbs::SendWr;
use rocinante_stack::verbs::{Destination, QpType, SendData, SendOp};
use rocinante_stack::{Budget, PeerKind};

use super::two::{PATIENCE, QKEY, Side, device_with, ip, settings};
use crate::context::Context;
use crate::qp::Qp;

fn device(net: &SimNet, own: u8, recognises: bool) -> Context {
    device_with(net, &[own], &Settings { recognises, ..settings(true) })
}

impl Side {
    fn kinds(&self) -> Vec<Option<PeerKind>> {
        self.ctx.qps().unwrap().iter().map(|qp| qp.peer_kind).collect()
    }

    fn asked_and_answered(&self) -> [u64; 4] {
        let counters = self.ctx.counters().transport;
        [
            counters.sent_questions,
            counters.rcvd_questions,
            counters.sent_answers,
            counters.rcvd_answers,
        ]
    }
}

/// The endpoint as a program passes it that swaps numbers by hand.
fn by_hand(endpoint: Endpoint) -> Endpoint {
    endpoint.budget(Budget::STANDARD).queue(None)
}

/// Queue pairs of these types, connected by hand.
fn connected(sides: &[Side; 2], types: &[QpType]) -> Vec<[Qp; 2]> {
    let pair = |qp_type: &QpType| {
        let [near, far] = sides.each_ref().map(|side| {
            let qp = side.pd.qp(&side.cq, &side.cq).qp_type(*qp_type);
            qp.access(Access::ALL).build().unwrap()
        });
        let [to_near, to_far] = [&near, &far].map(|qp| by_hand(qp.endpoint()));
        let options = ConnectOptions::default();
        [near.connect(&to_far, &options).unwrap(), far.connect(&to_near, &options).unwrap()]
    };
    types.iter().map(pair).collect()
}

fn send(qp: &Qp) {
    let wr = SendWr::new(
        SendOp::Write { remote: 0, rkey: Default::default(), imm: None },
        SendData::Inline(b""),
    );
    qp.post_send(&[wr]).unwrap();
}

fn wait(until: impl Fn() -> bool) {
    let began = Instant::now();
    while !until() {
        assert!(began.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn is_ours(kind: &Option<PeerKind>) -> bool {
    kind.is_some_and(PeerKind::is_rocinante)
}

#[test]
fn devices_recognise_each_other() {
    let net = SimNet::new();
    let sides = [1, 3].map(|own| Side::new(device(&net, own, true)));
    let pairs = connected(&sides, &[QpType::Rc, QpType::Rc, QpType::Uc]);
    assert_eq!(sides[0].kinds(), [Some(PeerKind::Standard); 3]);
    pairs.iter().for_each(|[near, _]| send(near));
    // Of an unreliable connection the side knows the other that sends; here each sent something.
    wait(|| sides.iter().all(|side| side.kinds().iter().all(is_ours)));
    for side in &sides {
        assert_eq!(side.asked_and_answered(), [1; 4]);
    }
    // A connection that begins later finds it known.
    send(&connected(&sides, &[QpType::Rc])[0][0]);
    wait(|| sides.iter().all(|side| side.kinds().iter().all(is_ours)));
    assert_eq!(sides.each_ref().map(Side::asked_and_answered), [[1; 4]; 2]);
}

#[test]
fn who_does_not_recognise_neither_asks_nor_answers() {
    let net = SimNet::new();
    let sides = [(1, true), (2, false)].map(|(own, yes)| Side::new(device(&net, own, yes)));
    let pairs = connected(&sides, &[QpType::Rc]);
    let [near, far] = &pairs[0];
    send(near);
    send(far);
    wait(|| sides[1].ctx.cm_counters().unwrap().malformed == 1);
    assert_eq!(sides.each_ref().map(Side::asked_and_answered), [[1, 0, 0, 0], [0; 4]]);
    assert_eq!(sides[0].kinds(), [Some(PeerKind::Standard)]);
}

/// Datagrams that wait for company have no completion yet; they count when a queue becomes smaller.
#[test]
fn a_queue_becomes_no_smaller_than_what_was_posted_before() {
    let net = SimNet::new();
    let side = Side::new(device(&net, 1, true));
    let qp = side.pd.qp(&side.cq, &side.cq).qp_type(QpType::Ud).qkey(QKEY).signal_all(true);
    let qp = qp.build().unwrap().ready().unwrap();
    let ah = side.pd.create_ah(&PeerPath::new(ip(2))).unwrap();
    let to = Destination { ah: ah.id(), qpn: Qpn::new(5), qkey: QKEY };
    for round in 0..50 {
        for _ in 0..6 {
            let wr = SendWr::new(SendOp::SendTo { to, imm: None }, SendData::Inline(b"x"));
            qp.post_send(&[wr]).unwrap();
        }
        assert!(side.cq.resize(5).is_err(), "round {round}");
        side.cq.resize(6).unwrap();
        for _ in 0..6 {
            side.cq.wait_one(PATIENCE).unwrap();
        }
        assert_eq!(side.cq.poll_one().unwrap(), None, "round {round}");
    }
}

#[test]
fn the_receiver_of_datagrams_is_recognised() {
    let net = SimNet::new();
    let sides = [1, 2].map(|own| Side::new(device(&net, own, true)));
    let qp = sides[0].pd.qp(&sides[0].cq, &sides[0].cq).qp_type(QpType::Ud).qkey(QKEY);
    let qp = qp.build().unwrap().ready().unwrap();
    let ahs = [(); 2].map(|()| sides[0].pd.create_ah(&PeerPath::new(ip(2))).unwrap());
    for ah in &ahs {
        let to = Destination { ah: ah.id(), qpn: Qpn::new(5), qkey: QKEY };
        let wr = SendWr::new(SendOp::SendTo { to, imm: None }, SendData::Inline(b"x"));
        qp.post_send(&[wr]).unwrap();
    }
    wait(|| sides[0].asked_and_answered() == [1, 0, 0, 1]);
    wait(|| sides[1].asked_and_answered() == [0, 1, 1, 0]);
}
