//! Connections over a network that loses, duplicates and corrupts; and programs that leave at the
//! wrong time.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::sim::{self, ADDRESSES, Side};
use rocinante::cm::{self, CmFailure, Connecting, Listener, Params, RejReason};
use rocinante::verbs::{QpState, QpType};
use rocinante::{Access, OpenOptions, RecvWr, SendWr, VerbsError};
use rocinante_netdev::sim::{SimConfig, SimNet, Verdict};

const PATIENCE: Duration = Duration::from_secs(60);

const SERVER: SocketAddr = SocketAddr::new(ADDRESSES[1], 7471);

fn sides(net: &SimNet) -> [Side; 2] {
    sim::sides(net, [true; 2])
}

#[test]
fn a_bad_network_only_takes_time() {
    let net = SimNet::new();
    let open = |address| {
        let port = net.port(&[address], &SimConfig::default()).unwrap();
        let faults = "loss=20%,dup=20%,corrupt=5%,side=egress,seed=7";
        Side::with(OpenOptions::new().fault(faults), port, "sim")
    };
    let [a, b] = &ADDRESSES.map(open);
    let listener = Listener::bind(&b.ctx, SERVER, 64).unwrap();
    const COUNT: usize = 20;
    std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            let accept = |_| {
                let request = listener.request(Some(PATIENCE)).unwrap();
                request.accept(b.qp(), &Params::default()).unwrap()
            };
            let pending: Vec<_> = (0..COUNT).map(accept).collect();
            pending.into_iter().map(|it| it.wait(PATIENCE).unwrap()).collect::<Vec<_>>()
        });
        let start = |_| Connecting::start(a.qp(), SERVER, &Params::default()).unwrap();
        let pending: Vec<_> = (0..COUNT).map(start).collect();
        let mine: Vec<_> = pending.into_iter().map(|it| it.wait(PATIENCE).unwrap()).collect();
        let theirs = server.join().unwrap();
        for connection in &mine {
            connection.disconnect().unwrap();
        }
        for connection in mine.iter().chain(&theirs) {
            connection.wait_disconnected(PATIENCE).unwrap();
            assert_eq!(connection.state(), QpState::Err);
        }
    });
    let counters = a.ctx.cm_counters().unwrap();
    assert!(counters.repeated > 0, "{counters:?}");
    assert!(a.ctx.counters().drops.icrc + b.ctx.counters().drops.icrc > 0);
}

#[test]
fn a_peer_that_is_silent_costs_as_long_as_was_allowed() {
    let net = SimNet::new();
    let [a, _b] = &sides(&net);
    net.set_tap(Some(Box::new(|_| Verdict::Drop)));
    let start = Instant::now();
    let patience = Duration::from_millis(300);
    let error = cm::connect(a.qp(), SERVER, &Params::default(), patience).unwrap_err();
    assert!(matches!(error, VerbsError::TimedOut), "{error}");
    assert!((patience..PATIENCE).contains(&start.elapsed()));
}

#[test]
fn a_request_that_is_dropped_is_rejected() {
    let net = SimNet::new();
    let [a, b] = &sides(&net);
    let listener = Listener::bind(&b.ctx, "0.0.0.0:7471".parse().unwrap(), 1).unwrap();
    let asked = Connecting::start(a.qp(), SERVER, &Params::default()).unwrap();
    drop(listener.request(Some(PATIENCE)).unwrap());
    let error = asked.wait(PATIENCE).unwrap_err();
    let VerbsError::Cm(CmFailure::Rejected { reason, .. }) = error else { panic!("{error}") };
    assert_eq!(reason, RejReason::CONSUMER);
}

/// One for each family; that of IPv4 is the more precise for requests over it.
#[test]
fn wildcards_of_both_families_have_a_listener_each() {
    let net = SimNet::new();
    let [a, b] = &sides(&net);
    let at = |address: &str| Listener::bind(&b.ctx, address.parse().unwrap(), 4);
    let [v4, all] = ["0.0.0.0:7471", "[::]:7471"].map(|address| at(address).unwrap());
    for address in ["0.0.0.0:7471", "[::]:7471"] {
        let error = at(address).unwrap_err();
        let kind = std::io::Error::from_raw_os_error(error.errno()).kind();
        assert_eq!(kind, std::io::ErrorKind::AddrInUse, "{error}");
    }
    let asked = Connecting::start(a.qp(), SERVER, &Params::default()).unwrap();
    drop(v4.request(Some(PATIENCE)).unwrap());
    assert!(asked.wait(PATIENCE).is_err() && all.try_request().unwrap().is_none());
    drop(v4);
    let asked = Connecting::start(a.qp(), SERVER, &Params::default()).unwrap();
    drop(all.request(Some(PATIENCE)).unwrap());
    assert!(asked.wait(PATIENCE).is_err());
    // A refused listener has taken nothing, and the place of the one that is gone is free.
    let _v4 = at("0.0.0.0:7471").unwrap();
}

#[test]
fn who_does_not_wait_any_more_is_not_offered() {
    let net = SimNet::new();
    let [a, b] = &sides(&net);
    let listener = Listener::bind(&b.ctx, SERVER, 4).unwrap();
    let gone = Connecting::start(a.qp(), SERVER, &Params::default()).unwrap();
    let taken = listener.request(Some(PATIENCE)).unwrap();
    drop(gone);
    let withdrawn = |requests| {
        let deadline = Instant::now() + PATIENCE;
        while b.ctx.cm_counters().unwrap().rejects_received < requests {
            assert!(Instant::now() < deadline, "the rejection never came");
            b.ctx.progress();
        }
    };
    // The program had taken the request; the peer has withdrawn it since.
    withdrawn(1);
    let error = taken.accept(b.qp(), &Params::default()).unwrap_err();
    assert!(matches!(error, VerbsError::Cm(CmFailure::Ended)), "{error}");
    // The program has not taken this request.
    drop(Connecting::start(a.qp(), SERVER, &Params::default()).unwrap());
    withdrawn(2);
    assert!(listener.try_request().unwrap().is_none());
}

#[test]
fn what_makes_no_sense_is_refused() {
    let net = SimNet::new();
    let [a, b] = &sides(&net);
    let listen = |address: &str| Listener::bind(&b.ctx, address.parse().unwrap(), 1);
    assert!(matches!(listen("10.0.0.9:1"), Err(VerbsError::Invalid(_))));
    assert!(matches!(listen("10.0.0.2:0"), Err(VerbsError::Invalid(_))));
    let long = Params::default().private_data(&[1; 57]);
    let error = Connecting::start(a.qp(), SERVER, &long).unwrap_err();
    assert!(error.to_string().contains("56 bytes at most"), "{error}");
    let datagrams = a.pd.qp(&a.cq, &a.cq).qp_type(QpType::Ud).build().unwrap();
    let error = Connecting::start(datagrams, SERVER, &Params::default()).unwrap_err();
    assert!(error.to_string().contains("the connection manager connects RC and UC"), "{error}");
    let family = "[fd00::1]:1".parse().unwrap();
    let error = Connecting::start(a.qp(), family, &Params::default()).unwrap_err();
    assert!(error.to_string().contains("different families"), "{error}");
}

#[test]
fn a_device_connects_to_itself() {
    let net = SimNet::new();
    let [_, b] = &sides(&net);
    let listener = Listener::bind(&b.ctx, SERVER, 1).unwrap();
    let asked = Connecting::start(b.qp(), SERVER, &Params::default()).unwrap();
    let request = listener.request(Some(PATIENCE)).unwrap();
    let accepted = request.accept(b.qp(), &Params::default()).unwrap();
    let asked = asked.wait(PATIENCE).unwrap();
    drop(accepted.wait(PATIENCE).unwrap());
    asked.wait_disconnected(PATIENCE).unwrap();
}

/// The client's first message overtakes its last word of the handshake. The server knows whose it
/// is by the context, and the queue pair is there, although the connection is not.
#[test]
fn a_message_before_the_connection_is_known_by_its_context() {
    let net = SimNet::new();
    let [a, b] = &sides(&net);
    let listener = Listener::bind(&b.ctx, SERVER, 4).unwrap();
    let mut asking = Connecting::start(a.qp(), SERVER, &Params::default()).unwrap();
    let request = listener.request(Some(PATIENCE)).unwrap();
    let qp = b.pd.qp(&b.cq, &b.cq).context(77).build().unwrap();
    let mr = b.pd.allocate(64, Access::LOCAL_WRITE).unwrap();
    qp.post_recv(&[RecvWr::new(5, &[mr.sge(0, 64)])]).unwrap();
    let mut accepting = request.accept(qp, &Params::default()).unwrap();
    until_some(|| asking.try_finish().unwrap()).post(SendWr::send(b"early")).unwrap();
    let wc = b.cq.wait_one(PATIENCE).unwrap().ok().unwrap();
    assert_eq!((wc.wr_id, wc.context, mr.slice(0, 5).to_vec()), (5, 77, b"early".to_vec()));
    assert_eq!(accepting.qp().map(rocinante::Qp::qpn), Some(wc.qpn));
    let server = until_some(|| accepting.try_finish().unwrap());
    assert_eq!((server.qpn(), accepting.qp().is_none()), (wc.qpn, true));
}

fn until_some<T>(mut what: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(found) = what() {
            return found;
        }
        assert!(begin.elapsed() < PATIENCE, "it never came");
        std::thread::sleep(Duration::from_micros(200));
    }
}
