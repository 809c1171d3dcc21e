//! Special connections by the connection manager: unreliable ones, and those established by a
//! message that comes before the RTU.

use std::net::SocketAddr;

use rocinante::cm::{self, CmFailure, Listener, Params, RejReason};
use rocinante::device::Backend;
use rocinante::verbs::{QpType, SendOp};
use rocinante::{Access, RecvWr, VerbsError};
use rocinante_lab::Match;
use rocinante_tests::harness::{Harness, PATIENCE, Setup, wr};
use rocinante_tests::verbs::cm::send;
use rocinante_tests::{need, require};

const PORT: u16 = 7471;

fn server_of(harness: &Harness) -> SocketAddr {
    SocketAddr::new(harness.sides[1].address, PORT)
}

/// A request for one type is not connected to a queue pair of another type.
#[test]
fn types_must_agree() {
    require!(need::backend(Backend::Udp));
    let harness = Harness::new(&Setup::new(Backend::Udp));
    let server = server_of(&harness);
    let listener = Listener::bind(&harness.sides[1].ctx, server, 4).unwrap();
    let [asked, accepted] = harness.both(|at, side| {
        if at == 0 {
            let qp = side.qp().qp_type(QpType::Uc).build().unwrap();
            return cm::connect(qp, server, &Params::default(), PATIENCE).map(|_| ());
        }
        let request = listener.request(Some(PATIENCE)).unwrap();
        request.accept(side.qp().build().unwrap(), &Params::default()).map(|_| ())
    });
    let Err(VerbsError::Cm(CmFailure::Rejected { reason, .. })) = asked else {
        panic!("{asked:?}")
    };
    assert_eq!(reason, RejReason::INVALID_TRANSPORT_TYPE);
    let why = accepted.unwrap_err().to_string();
    assert!(why.contains("asks for Uc"), "{why}");
    let datagrams = harness.sides[0].qp().qp_type(QpType::Ud).build().unwrap();
    let why = cm::connect(datagrams, server, &Params::default(), PATIENCE).unwrap_err();
    assert!(why.to_string().contains("for datagrams"), "{why}");
}

/// Each RTU is lost. The peer's first message also says that the peer is ready, so the connection
/// does not wait for the REP to be repeated after 0.4 s.
#[test]
fn a_lost_rtu_is_made_up_for_by_the_first_message() {
    require!(need::backend(Backend::Udp));
    require!(need::nft());
    for qp_type in [QpType::Rc, QpType::Uc] {
        let harness = Harness::new(&Setup::new(Backend::Udp));
        let [a, b] = &harness.sides;
        let lab = harness.lab();
        // After UDP, BTH and DETH: bytes 16 and 17 of the management datagram.
        let rtus = Match::roce().from(lab.container(0)).and("@ih,288,16 0x0014");
        let lost = lab.block(&rtus).unwrap();
        let server = server_of(&harness);
        let listener = Listener::bind(&b.ctx, server, 4).unwrap();
        let into = b.pd.allocate(64, Access::LOCAL_WRITE).unwrap();
        let [at_a, at_b] = harness.both(|at, side| {
            let qp = side.qp().qp_type(qp_type).build().unwrap();
            if at == 1 {
                qp.post_recv(&[RecvWr { wr_id: 1, sges: &[into.sge(0, 64)] }]).unwrap();
                let request = listener.request(Some(PATIENCE)).unwrap();
                return request.accept(qp, &Params::default()).unwrap().wait(PATIENCE).unwrap();
            }
            let connection = cm::connect(qp, server, &Params::default(), PATIENCE).unwrap();
            let out = side.pd.allocate(64, Access::NONE).unwrap();
            connection.post_send(&[wr(2, SendOp::Send { imm: None }, &[out.sge(0, 64)])]).unwrap();
            side.succeed(2);
            connection
        });
        b.succeed(1);
        // No RTU ever arrives. Without the message, the connection would be given up after 6.4 s.
        let counters = b.ctx.cm_counters().unwrap();
        assert_eq!((counters.established, counters.by_message), (1, 1), "{counters:?}");
        assert!(lost.counter().unwrap().packets >= 1);
        lost.remove().unwrap();
        // It is a connection like any other: it works, and ends once.
        send((a, &at_a), (b, &at_b));
        send((b, &at_b), (a, &at_a));
        at_b.disconnect().unwrap();
        a.run(|| at_a.wait_disconnected(PATIENCE)).unwrap();
    }
}
