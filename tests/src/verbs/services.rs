//! Datagram services by our connection manager, or by the kernel's.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use super::readable;
use crate::harness::{Family, Harness, On, PATIENCE, Setup, Side, wr};
use rocinante::cm::{CmFailure, DatagramListener, Resolving, SidrStatus, UDP_QKEY, resolve};
use rocinante::verbs::{GRH_LEN, QpType, SendOp};
use rocinante::{Access, RecvWr, VerbsError, WcStatus};

const PORT: u16 = 7174;

pub fn a_service_is_found_and_used_over_ipv4(on: On) {
    find_and_use(&Setup::new(on));
}

pub fn a_service_is_found_and_used_over_ipv6(on: On) {
    if let On::Kernel(device) = &on {
        crate::require!(device.address_of(Family::V6));
    }
    find_and_use(&Setup::new(on).family(Family::V6));
}

fn server_of(harness: &Harness) -> SocketAddr {
    SocketAddr::new(harness.sides[1].address, PORT)
}

fn ready(side: &Side, qkey: u32) -> rocinante::Qp {
    let qp = side.qp().qp_type(QpType::Ud).qkey(qkey).build().unwrap().ready();
    qp.unwrap()
}

/// Two peers, each with a queue pair and a key of its own at the server.
fn find_and_use(setup: &Setup) {
    let harness = Harness::new(setup);
    let [a, b] = &harness.sides;
    let server = server_of(&harness);
    let listener = DatagramListener::bind(&b.ctx, server, 4).unwrap();
    assert_eq!(listener.address(), server);
    // The kernel's connection manager announces this Q_Key only.
    let keys: &[u32] = if harness.is_software() { &[UDP_QKEY, 0x77] } else { &[UDP_QKEY] };
    for qkey in keys.iter().copied() {
        harness.both(|at, side| {
            let qp = ready(side, qkey);
            let buffer = side.pd.allocate(GRH_LEN + 64, Access::LOCAL_WRITE).unwrap();
            if at == 1 {
                let request = listener.request(Some(PATIENCE)).unwrap();
                assert_eq!((request.local(), request.peer().ip()), (b.address, a.address));
                assert_eq!(&request.private_data()[..6], b"hello\0");
                let sges = [buffer.sge(0, GRH_LEN + 64)];
                qp.post_recv(&[RecvWr { wr_id: 5, sges: &sges }]).unwrap();
                request.accept(&qp, b"welcome").unwrap();
                let wc = side.succeed(5);
                assert_eq!(buffer.to_vec(GRH_LEN, 4), b"data");
                assert_eq!(wc.byte_len, GRH_LEN as u32 + 4);
            } else {
                let service = resolve(&side.ctx, 0, server, b"hello", PATIENCE).unwrap();
                assert_eq!((service.peer(), service.qkey()), (server, qkey));
                assert_eq!(&service.private_data()[..8], b"welcome\0");
                let ah = service.address_handle(&side.pd).unwrap();
                buffer.write(0, b"data");
                let op = SendOp::SendTo { to: service.destination(&ah), imm: None };
                qp.post_send(&[wr(6, op, &[buffer.sge(0, 4)])]).unwrap();
                side.complete(6, WcStatus::Success);
            }
        });
    }
    if let Some(counters) = b.ctx.cm_counters() {
        assert_eq!((counters.requests, counters.sidr_answered, counters.malformed), (2, 2, 0));
    }
}

pub fn a_rejected_peer_gets_the_reason(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let server = server_of(&harness);
    let ask = || resolve(&a.ctx, 0, server, b"", PATIENCE);
    let refused = |with: SidrStatus| match ask() {
        Err(VerbsError::Cm(CmFailure::Unresolved { status, .. })) => assert_eq!(status, with),
        other => {
            let told = [a, b].map(|side| (side.ctx.counters(), side.ctx.cm_counters()));
            panic!("{other:?}: {told:#?}")
        }
    };
    refused(SidrStatus::UNSUPPORTED);
    let listener = DatagramListener::bind(&b.ctx, server, 2).unwrap();
    assert!(DatagramListener::bind(&b.ctx, server, 2).is_err(), "the port is taken");
    // Rejected by call, by dropping the request, by a queue pair of another type, and by too much
    // data.
    for way in 0..4 {
        let asking = Resolving::start(&a.ctx, 0, server, b"").unwrap();
        let request = listener.request(Some(PATIENCE)).unwrap();
        match way {
            0 => request.reject(b"no").unwrap(),
            1 => drop(request),
            2 => {
                let [_, connected] = harness.pair();
                request.accept(&connected, b"").expect_err("not for datagrams");
            }
            _ => {
                request.accept(&ready(b, UDP_QKEY), &[0; 137]).expect_err("too much private data");
            }
        }
        match asking.wait(PATIENCE) {
            Err(VerbsError::Cm(CmFailure::Unresolved { status, private_data })) => {
                let why = if way == 0 { b"no\0" } else { &[0; 3] };
                assert_eq!((status, &private_data[..3]), (SidrStatus::REJECT, &why[..]));
            }
            other => panic!("{other:?}"),
        }
    }
    // A listener that goes rejects its open requests. A client waits for a decision only as long as
    // its patience allows.
    let asking = Resolving::start(&a.ctx, 0, server, b"").unwrap();
    assert!(readable(listener.as_fd(), PATIENCE));
    let impatient = resolve(&a.ctx, 0, server, b"", Duration::from_millis(300));
    assert!(matches!(impatient, Err(VerbsError::TimedOut)), "{impatient:?}");
    // That timeout was the caller's, not the protocol's, which allows sixteen repeats.
    assert_eq!(a.ctx.cm_counters().map_or(0, |counters| counters.timeouts), 0);
    drop(listener);
    match asking.wait(PATIENCE) {
        Err(VerbsError::Cm(CmFailure::Unresolved { status, .. })) => {
            assert_eq!(status, SidrStatus::REJECT);
        }
        other => panic!("{other:?}"),
    }
    refused(SidrStatus::UNSUPPORTED);
}

pub fn nothing_waits_but_descriptors(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let server = server_of(&harness);
    let listener = DatagramListener::bind(&b.ctx, server, 2).unwrap();
    assert!(!readable(listener.as_fd(), Duration::from_millis(50)));
    let mut asking = Resolving::start(&a.ctx, 0, server, b"").unwrap();
    let owned = asking.notifier().unwrap();
    assert!(asking.try_finish().unwrap().is_none());
    assert!(readable(listener.as_fd(), PATIENCE));
    assert!(!readable(owned.as_fd(), Duration::ZERO), "no answer has arrived");
    let qp = ready(b, UDP_QKEY);
    listener.try_request().unwrap().expect("a question").accept(&qp, b"").unwrap();
    assert!(!readable(listener.as_fd(), Duration::ZERO));
    assert!(readable(owned.as_fd(), PATIENCE) && readable(asking.fd().unwrap(), Duration::ZERO));
    assert_eq!(asking.try_finish().unwrap().map(|service| service.qpn()), Some(qp.qpn()));
    // The notifier reports that nothing more comes, also after its request is gone.
    drop(asking);
    assert!(readable(owned.as_fd(), Duration::ZERO));
    // A program may ask for the notifier only after the answer has come.
    let late = Resolving::start(&a.ctx, 0, server, b"").unwrap();
    listener.request(Some(PATIENCE)).unwrap().reject(b"").unwrap();
    assert!(readable(late.notifier().unwrap().as_fd(), PATIENCE));
    let late = late.wait(PATIENCE);
    assert!(matches!(late, Err(VerbsError::Cm(CmFailure::Unresolved { .. }))), "{late:?}");
}
