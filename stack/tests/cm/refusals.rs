//! Refused calls change nothing, and a failed connection frees its place for the next.

use std::net::IpAddr;

use rocinante_stack::cm::{
    Accept, CmConfig, CmError, CmEvent, ConnId, Connect, ConnectionManager, SidrReqId,
};
use rocinante_stack::types::{Qpn, Time};
use rocinante_stack::wire::cm::{CommId, PortSpace, RejReason, ServiceId};

use crate::net::{A, B, MS, Net, SERVICE, address, ask, config, side};
use crate::scenarios::FOR_EVER;
use crate::tables::{assert_same, tables};
use crate::thirds::{STEPS, Step, at};

const UDP: ServiceId = ServiceId::of_port(PortSpace::Udp, 7174);
const LONG: [u8; 300] = [7; 300];
const V6: IpAddr = IpAddr::V6(std::net::Ipv6Addr::LOCALHOST);

/// A call, and the error with which it must be refused.
type Refused =
    (CmError, &'static str, fn(&mut ConnectionManager, Time, ConnId) -> Result<(), CmError>);

const fn too_long(max: usize) -> CmError {
    CmError::PrivateTooLong { max }
}

/// Calls that are refused in every state of the connection.
const ALWAYS: [Refused; 15] = [
    (CmError::InUse, "listen", |cm, _, _| cm.listen(SERVICE, None, 1).map(drop)),
    (CmError::InUse, "listen to datagrams", |cm, _, _| cm.listen_datagrams(UDP, None, 1).map(drop)),
    (CmError::Family, "connect", |cm, now, _| {
        cm.connect(now, &Connect { remote: V6, ..ask(5, b"") }).map(drop)
    }),
    (too_long(56), "connect", |cm, now, _| cm.connect(now, &ask(5, &LONG[..57])).map(drop)),
    (too_long(92), "connect", |cm, now, _| {
        let service = ServiceId(5);
        cm.connect(now, &Connect { service, ..ask(5, &LONG[..93]) }).map(drop)
    }),
    (CmError::Family, "resolve", |cm, now, _| {
        cm.resolve(now, (address(A), V6), (UDP, 1), b"").map(drop)
    }),
    (too_long(180), "resolve", |cm, now, _| {
        cm.resolve(now, (address(A), address(B)), (UDP, 1), &LONG[..181]).map(drop)
    }),
    (too_long(196), "accept", |cm, now, conn| {
        cm.accept(now, conn, &Accept { side: side(5), keep_alive: None, private: &LONG[..197] })
    }),
    (too_long(148), "reject", |cm, _, conn| cm.reject(conn, RejReason::CONSUMER, &LONG[..149])),
    (too_long(224), "establish", |cm, _, conn| cm.establish(conn, &LONG[..225])),
    (too_long(220), "disconnect", |cm, now, conn| cm.disconnect(now, conn, &LONG[..221])),
    (too_long(136), "answer", |cm, now, _| {
        cm.answer(now, SidrReqId(1), Ok((Qpn::new(9), 9)), &LONG[..137])
    }),
    (CmError::Unknown, "answer", |cm, now, _| {
        cm.answer(now, SidrReqId(1), Ok((Qpn::new(9), 9)), b"")
    }),
    (CmError::Unknown, "accept nothing", |cm, now, _| {
        cm.accept(now, ConnId(CommId(1)), &Accept { side: side(5), keep_alive: None, private: b"" })
    }),
    (CmError::Unknown, "reject nothing", |cm, _, _| {
        cm.reject(ConnId(CommId(1)), RejReason::CONSUMER, b"")
    }),
];

const ACCEPT: fn(&mut ConnectionManager, Time, ConnId) -> Result<(), CmError> =
    |cm, now, conn| cm.accept(now, conn, &Accept { side: side(5), keep_alive: None, private: b"" });
const REJECT: fn(&mut ConnectionManager, Time, ConnId) -> Result<(), CmError> =
    |cm, _, conn| cm.reject(conn, RejReason::CONSUMER, b"");
const ESTABLISH: fn(&mut ConnectionManager, Time, ConnId) -> Result<(), CmError> =
    |cm, _, conn| cm.establish(conn, b"");
const DISCONNECT: fn(&mut ConnectionManager, Time, ConnId) -> Result<(), CmError> =
    |cm, now, conn| cm.disconnect(now, conn, b"");

/// Calls that are refused because of the connection's state, at the asking side and at the other.
fn at_the_wrong_time(step: Step, at: usize) -> Vec<Refused> {
    let (state, unknown) = (CmError::State, CmError::Unknown);
    let accept = |why| (why, "accept", ACCEPT);
    let reject = |why| (why, "reject", REJECT);
    let establish = |why| (why, "establish", ESTABLISH);
    let disconnect = |why| (why, "disconnect", DISCONNECT);
    let none = |why| vec![accept(why), reject(why), establish(why)];
    match (step, at) {
        (Step::Asked | Step::Accepted, A) => [none(state), vec![disconnect(state)]].concat(),
        (Step::Asked, _) => vec![establish(state), disconnect(state)],
        (Step::Replied, A) => vec![accept(state), disconnect(state)],
        (Step::Accepted | Step::Replied, _) | (Step::Established, _) => none(state),
        // Only the asking side knows that it has ended: the DREP was lost.
        (Step::Ending | Step::Ended, _) => [none(unknown), vec![disconnect(unknown)]].concat(),
    }
}

#[test]
fn what_is_refused_changes_nothing_in_any_state() {
    for step in STEPS {
        let (mut net, a, b) = at(step);
        for (side, conn) in [(A, a), (B, b)] {
            let cm = &mut net.cm[side];
            let _ = cm.listen(SERVICE, None, 1);
            cm.listen_datagrams(UDP, None, 1).unwrap();
            let calls = ALWAYS.into_iter().chain(at_the_wrong_time(step, side));
            for (why, what, call) in calls {
                let before = tables(cm);
                assert_eq!(call(cm, net.now, conn), Err(why), "{what} at {side} {step:?}");
                assert_same(&before, &tables(cm), &(what, side, step));
            }
        }
    }
}

/// A connection beyond the limit is refused, and leaves no state.
#[test]
fn a_connection_more_than_there_may_be_leaves_nothing() {
    let mut net = Net::with(|side| CmConfig { max_connections: 2, ..config(side) }, 1);
    for qpn in [1, 2] {
        net.connect(qpn);
    }
    let now = net.now;
    let before = tables(&net.cm[A]);
    assert_eq!(net.cm[A].connect(now, &ask(3, b"")), Err(CmError::Full));
    assert_same(&before, &tables(&net.cm[A]), &"connect");
}

/// The ways in which a connection fails or ends.
#[derive(Debug, Clone, Copy)]
enum End {
    NobodyListens,
    Refused,
    BacklogFull,
    ReplyRefused,
    SilentListener,
    SilentAsker,
    ForgottenByAsker(Step),
    ForgottenByListener(Step),
    Died,
}

impl End {
    const ALL: [Self; 17] = [
        Self::NobodyListens,
        Self::Refused,
        Self::BacklogFull,
        Self::ReplyRefused,
        Self::SilentListener,
        Self::SilentAsker,
        Self::ForgottenByAsker(Step::Asked),
        Self::ForgottenByAsker(Step::Accepted),
        Self::ForgottenByAsker(Step::Replied),
        Self::ForgottenByAsker(Step::Established),
        Self::ForgottenByAsker(Step::Ending),
        Self::ForgottenByListener(Step::Asked),
        Self::ForgottenByListener(Step::Accepted),
        Self::ForgottenByListener(Step::Replied),
        Self::ForgottenByListener(Step::Established),
        Self::ForgottenByListener(Step::Ending),
        Self::Died,
    ];
}

/// Brings a connection to `step`.
fn reach(net: &mut Net, step: Step, qpn: u32) -> [ConnId; 2] {
    let (a, b) = net.asked(qpn);
    if step == Step::Asked {
        return [a, b];
    }
    net.mute[B] = step == Step::Accepted;
    net.accept(b, 0x2000 + qpn);
    net.run(1);
    net.mute[B] = false;
    if matches!(step, Step::Accepted | Step::Replied) {
        return [a, b];
    }
    net.cm[A].establish(a, b"").unwrap();
    net.run(1);
    if step == Step::Ending {
        net.mute[B] = true;
        net.leave(A, a);
        net.mute[B] = false;
    }
    [a, b]
}

fn come_to(net: &mut Net, end: End, qpn: u32) {
    match end {
        End::NobodyListens => {
            let now = net.now;
            let service = ServiceId::of_port(PortSpace::Tcp, 9);
            net.cm[A].connect(now, &Connect { service, ..ask(qpn, b"") }).unwrap();
        }
        End::Refused => {
            let [_, b] = reach(net, Step::Asked, qpn);
            net.cm[B].reject(b, RejReason::CONSUMER, b"").unwrap();
        }
        End::BacklogFull => {
            let [a, _] = reach(net, Step::Asked, qpn);
            net.connect(qpn + 0x100);
            net.run(1);
            net.cm[A].forget(net.now, a);
        }
        End::ReplyRefused => {
            let [a, _] = reach(net, Step::Replied, qpn);
            net.cm[A].reject(a, RejReason::CONSUMER, b"").unwrap();
        }
        End::SilentListener => {
            net.connect(qpn);
            net.mute[B] = true;
        }
        End::SilentAsker => {
            reach(net, Step::Accepted, qpn);
            net.mute[A] = true;
        }
        End::ForgottenByAsker(step) | End::ForgottenByListener(step) => {
            let both = reach(net, step, qpn);
            let of = usize::from(matches!(end, End::ForgottenByListener(_)));
            net.cm[of].forget(net.now, both[of]);
        }
        End::Died => {
            reach(net, Step::Established, qpn);
            net.restart(A, u64::from(qpn));
            net.connect(qpn);
        }
    }
    net.run(FOR_EVER);
    net.mute = [false; 2];
    net.run(FOR_EVER);
    let _ = [A, B].map(|side| net.take(side));
}

/// Each kind of end, more often than the limits of connections and backlog allow at a time.
#[test]
fn whatever_becomes_of_a_connection_its_place_is_the_next_ones() {
    for end in End::ALL {
        let mut net = Net::with(|side| CmConfig { max_connections: 2, ..config(side) }, 1);
        net.listen(1);
        for round in 0..5 {
            come_to(&mut net, end, 0x11 + round);
            // Only the next request of a dead peer shows that the peer died.
            assert_eq!([A, B].map(|side| net.cm[side].len()), [0, 0], "{end:?} in round {round}");
            assert_eq!([A, B].map(|side| net.cm[side].poll_timeout()), [None; 2], "{end:?}");
        }
        let (a, b) = net.connected(0x99, 0x98);
        assert!(a != b && net.now.0 > MS);
        let others = tables(&net.cm[B]);
        let entries = |name: &str| others.matches(name).count();
        assert_eq!(entries("Conn {"), 1, "{end:?}: {others}");
    }
}

/// Questions that the program never answers, more of them than the backlog holds.
#[test]
fn questions_that_are_never_answered_take_no_room_for_ever() {
    let mut net = Net::new();
    net.cm[B].listen_datagrams(UDP, None, 2).unwrap();
    for _ in 0..5 {
        let (now, way) = (net.now, (address(A), address(B)));
        let queries = [1, 2].map(|port| net.cm[A].resolve(now, way, (UDP, port), b"").unwrap());
        net.run(80_000);
        let over = |event: &CmEvent| matches!(event, CmEvent::AskOver { .. });
        assert_eq!(net.take(B).iter().filter(|event| over(event)).count(), 2);
        for query in queries {
            net.cm[A].forget_query(query);
        }
        net.take(A);
        assert!(net.cm[A].is_empty() && net.cm[B].poll_timeout().is_none());
    }
    assert_eq!(net.cm[B].counters().backlog_overflow, 0);
}
