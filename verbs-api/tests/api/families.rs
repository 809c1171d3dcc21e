//! Every operation by address works by each of a device's addresses: IPv4, IPv6, and link-local
//! ones, which a program may write with their scope. None of it strays to another address.

use std::net::{IpAddr, SocketAddr, SocketAddrV6};

use crate::sim::PATIENCE;
use rocinante::cm::{Connecting, DatagramListener, Listener, Params, Resolving, UDP_QKEY};
use rocinante::exchange::Exchange;
use rocinante::verbs::{GRH_LEN, PeerPath, QpState, QpType, Qpn, SendOp};
use rocinante::{
    Access, ConnectOptions, Context, Cq, OpenOptions, Pd, PreparedQp, Qp, RecvWr, SendWr,
    VerbsError, Wc,
};
use rocinante_netdev::AnyPort;
use rocinante_netdev::sim::{SimConfig, SimNet};

/// The addresses of both devices. The second and the third network have two of a family.
const OWN: [[&str; 5]; 2] = [
    ["10.0.0.1", "192.168.7.1", "fd00::1", "fd00:0:0:7::1", "fe80::1"],
    ["10.0.0.2", "192.168.7.2", "fd00::2", "fd00:0:0:7::2", "fe80::2"],
];
const GROUPS: [&str; 5] = ["239.1.2.3", "::ffff:239.1.2.4", "ff05::1:3", "ff15::7", "ff02::1:9"];
const ALL: std::ops::Range<usize> = 0..5;
const SCOPE: u32 = 7;

fn ip(side: usize, at: usize) -> IpAddr {
    OWN[side][at].parse().unwrap()
}

/// A port at an address, as a program writes it.
fn socket(address: IpAddr, port: u16) -> SocketAddr {
    match address {
        IpAddr::V6(own) if own.is_unicast_link_local() => {
            SocketAddrV6::new(own, port, 0, SCOPE).into()
        }
        other => (other, port).into(),
    }
}

struct Side {
    ctx: Context,
    pd: Pd,
    cq: Cq,
}

impl Side {
    fn qp(&self, at: usize) -> PreparedQp {
        self.pd.qp(&self.cq, &self.cq).access(Access::ALL).sgid_index(at).build().unwrap()
    }

    fn datagrams(&self, at: usize) -> Qp {
        let qp = self.pd.qp(&self.cq, &self.cq).qp_type(QpType::Ud).qkey(UDP_QKEY);
        qp.sgid_index(at).build().unwrap().ready().unwrap()
    }

    fn completion(&self) -> Wc {
        self.cq.poll_one().unwrap().expect("a completion").ok().unwrap()
    }
}

/// Two devices that the test drives, or that drive themselves.
fn sides(background: bool) -> [Side; 2] {
    let net = SimNet::new();
    [0, 1].map(|side| {
        let addresses = ALL.map(|at| ip(side, at)).collect::<Vec<_>>();
        let port = net.port(&addresses, &SimConfig::default()).unwrap();
        let options = OpenOptions::new().background(background);
        let ctx = options.open_port("sim", AnyPort::from(port), "a test wants it").unwrap();
        let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(64).unwrap());
        Side { ctx, pd, cq }
    })
}

/// A queue pair's own address, and its peer's.
fn way(qp: &Qp) -> (IpAddr, IpAddr) {
    let (state, attr, _) = qp.query();
    assert_eq!(state, QpState::Rts);
    let peer = attr.peer.unwrap();
    (peer.local, peer.remote)
}

#[test]
fn queue_pairs_connect_by_the_address_that_they_are_of() {
    let [a, b] = &sides(false);
    let mr = b.pd.allocate(64, Access::ALL).unwrap();
    for at in ALL {
        let (near, far) = (a.qp(at), b.qp(at));
        let ends = [near.endpoint(), far.endpoint()];
        assert_eq!(ends.map(|end| end.address), [ip(0, at), ip(1, at)]);
        let far = far.connect(&ends[0], &ConnectOptions::default()).unwrap();
        let near = near.connect(&ends[1], &ConnectOptions::default()).unwrap();
        assert_eq!((way(&near), way(&far)), ((ip(0, at), ip(1, at)), (ip(1, at), ip(0, at))));
        let word = [at as u8; 8];
        let op = SendOp::Write { remote: mr.address(), rkey: mr.rkey(), imm: None };
        near.post(SendWr::new(op, rocinante::verbs::SendData::Inline(&word))).unwrap();
        (0..2).for_each(|_| b.ctx.progress());
        assert_eq!((a.completion().wr_id, mr.to_vec(0, 8)), (0, word.to_vec()));
    }
    // An address of the other family is refused, and the queue pair is as before.
    let (near, far) = (a.qp(2), b.qp(2));
    let refused = near.connect(&b.qp(0).endpoint(), &ConnectOptions::default()).unwrap_err();
    assert!(matches!(refused.error, VerbsError::Path(_) | VerbsError::Modify(_)), "{refused}");
    refused.value.connect(&far.endpoint(), &ConnectOptions::default()).unwrap();
}

#[test]
fn each_address_has_listeners_of_its_own() {
    let [a, b] = &sides(false);
    let listeners = Vec::from_iter(ALL.map(|at| {
        let listener = Listener::bind(&b.ctx, socket(ip(1, at), 7471), 4).unwrap();
        assert_eq!(listener.address(), socket(ip(1, at), 7471), "with its scope");
        listener
    }));
    assert_eq!(b.ctx.resources().unwrap().listeners, listeners.len());
    for at in ALL {
        let to = socket(ip(1, at), 7471);
        let ask = || {
            let asked = Connecting::start(a.qp(at), to, &Params::default()).unwrap();
            b.ctx.progress();
            let mut requests = listeners
                .iter()
                .map(|listener| listener.try_request().unwrap())
                .collect::<Vec<_>>();
            let request = requests[at].take().expect("the one that was asked");
            assert!(requests.iter().all(Option::is_none), "only that one");
            assert_eq!((request.local(), request.peer().ip()), (ip(1, at), ip(0, at)));
            (asked, request)
        };
        // A queue pair of another address does not serve, and the peer learns of it.
        let (mut asked, request) = ask();
        assert!(request.accept(b.qp((at + 1) % 5), &Params::default()).is_err());
        a.ctx.progress();
        assert!(asked.try_finish().is_err());
        let (mut asked, request) = ask();
        let mut accepted = request.accept(b.qp(at), &Params::default()).unwrap();
        a.ctx.progress();
        let near = asked.try_finish().unwrap().expect("accepted");
        b.ctx.progress();
        let far = accepted.try_finish().unwrap().expect("established");
        assert_eq!((near.peer(), far.peer().ip()), (to, ip(0, at)), "with its scope");
        assert_eq!((way(&near), way(&far)), ((ip(0, at), ip(1, at)), (ip(1, at), ip(0, at))));
    }
    // Addresses of two families have no way.
    let refused = Connecting::start(a.qp(0), socket(ip(1, 4), 7471), &Params::default());
    assert!(refused.unwrap_err().to_string().contains("different families"));
}

#[test]
fn the_unspecified_address_of_a_family_hears_all_of_it() {
    let [a, b] = &sides(false);
    for (wildcard, own) in [("0.0.0.0:7471", 0..2), ("[::]:7471", 2..5)] {
        let listener = Listener::bind(&b.ctx, wildcard.parse().unwrap(), 4).unwrap();
        let questions = DatagramListener::bind(&b.ctx, wildcard.parse().unwrap(), 4).unwrap();
        for at in own {
            let to = socket(ip(1, at), 7471);
            let _asked = Connecting::start(a.qp(at), to, &Params::default()).unwrap();
            let _question = Resolving::start(&a.ctx, at, to, b"").unwrap();
            b.ctx.progress();
            let request = listener.try_request().unwrap().expect("a request");
            let question = questions.try_request().unwrap().expect("a question");
            assert_eq!((request.local(), question.local()), (ip(1, at), ip(1, at)));
        }
    }
    assert_eq!(b.ctx.resources().unwrap().listeners, 0);
}

#[test]
fn a_datagram_and_its_answer_keep_to_their_addresses() {
    let [a, b] = &sides(false);
    for at in ALL {
        let to = socket(ip(1, at), 7471);
        let listener = DatagramListener::bind(&b.ctx, to, 4).unwrap();
        let (near, far) = (a.datagrams(at), b.datagrams(at));
        let ask = || {
            let asked = Resolving::start(&a.ctx, at, to, b"").unwrap();
            b.ctx.progress();
            (asked, listener.try_request().unwrap().expect("a question"))
        };
        // A queue pair of another address does not serve, and the peer learns of it.
        let (mut asked, question) = ask();
        assert_eq!((question.local(), question.peer().ip()), (ip(1, at), ip(0, at)));
        assert!(question.accept(&b.datagrams((at + 1) % 5), b"").is_err());
        a.ctx.progress();
        assert!(asked.try_finish().is_err());
        let (mut asked, question) = ask();
        question.accept(&far, b"").unwrap();
        a.ctx.progress();
        let service = asked.try_finish().unwrap().expect("the answer");
        assert_eq!((service.peer(), service.qpn()), (to, far.qpn()), "with its scope");
        let ah = service.address_handle(&a.pd).unwrap();
        let mrs = [a, b].map(|side| side.pd.allocate(GRH_LEN + 8, Access::LOCAL_WRITE).unwrap());
        near.post_recv(&[RecvWr { wr_id: 1, sges: &[mrs[0].sge(0, GRH_LEN + 8)] }]).unwrap();
        far.post_recv(&[RecvWr { wr_id: 2, sges: &[mrs[1].sge(0, GRH_LEN + 8)] }]).unwrap();
        near.post(SendWr::new(
            SendOp::SendTo { to: service.destination(&ah), imm: None },
            rocinante::verbs::SendData::Inline(b"question"),
        ))
        .unwrap();
        b.ctx.progress();
        let wc = b.completion();
        assert_eq!((wc.wr_id, wc.src_qp), (2, Some(near.qpn())));
        let grh: [u8; GRH_LEN] = mrs[1].to_vec(0, GRH_LEN).try_into().unwrap();
        let back = b.pd.create_ah_from_wc(&wc, &grh).unwrap();
        far.post(SendWr::new(
            SendOp::SendTo { to: back.to(near.qpn(), UDP_QKEY), imm: None },
            rocinante::verbs::SendData::Inline(b"answered"),
        ))
        .unwrap();
        a.ctx.progress();
        assert_eq!([a.completion().wr_id, a.completion().wr_id], [0, 1], "{to}");
        assert_eq!(mrs[0].to_vec(GRH_LEN, 8), b"answered");
        // It came from where the question went.
        let grh: [u8; GRH_LEN] = mrs[0].to_vec(0, GRH_LEN).try_into().unwrap();
        assert_eq!(grh_addresses(&grh), (ip(1, at), ip(0, at)));
        b.completion();
    }
}

/// The addresses of a header as a receive has it: of IPv6, or of IPv4 in its last 20 bytes.
fn grh_addresses(grh: &[u8; GRH_LEN]) -> (IpAddr, IpAddr) {
    let v6 = |at: usize| IpAddr::from(<[u8; 16]>::try_from(&grh[at..at + 16]).unwrap());
    let v4 = |at: usize| IpAddr::from(<[u8; 4]>::try_from(&grh[at..at + 4]).unwrap());
    if grh[0] >> 4 == 6 { (v6(8), v6(24)) } else { (v4(32), v4(36)) }
}

#[test]
fn groups_of_each_family_come_and_go() {
    let [a, b] = &sides(false);
    let far = b.datagrams(0);
    let mr = b.pd.allocate(GRH_LEN + 8, Access::LOCAL_WRITE).unwrap();
    let groups = GROUPS.map(|group| group.parse::<IpAddr>().unwrap());
    for (count, group) in groups.iter().enumerate() {
        far.attach_mcast(*group).unwrap();
        far.attach_mcast(*group).unwrap();
        assert_eq!(b.ctx.resources().unwrap().groups, count + 1, "attached twice is once");
    }
    for (at, group) in groups.into_iter().enumerate() {
        let near = a.datagrams(at);
        let ah = a.pd.create_ah(&PeerPath::new(group.to_canonical()).sgid_index(at)).unwrap();
        far.post_recv(&[RecvWr { wr_id: 2, sges: &[mr.sge(0, GRH_LEN + 8)] }]).unwrap();
        let heard = || {
            let to = ah.to(Qpn::MULTICAST, UDP_QKEY);
            let data = rocinante::verbs::SendData::Inline(b"to all");
            near.post(SendWr::new(SendOp::SendTo { to, imm: None }, data)).unwrap();
            a.completion();
            b.ctx.progress();
            b.cq.poll_one().unwrap().is_some()
        };
        assert!(heard(), "{group}");
        far.detach_mcast(group).unwrap();
        assert!(!heard(), "{group} was left");
        let again = far.detach_mcast(group).unwrap_err();
        assert!(matches!(again, VerbsError::Invalid(_)), "{again}");
        assert_eq!(b.ctx.resources().unwrap().groups, GROUPS.len() - at - 1);
        far.modify(&rocinante::verbs::ModifyAttr::state(QpState::Rts)).unwrap();
    }
}

/// The lines of an exchange go over a queue pair of the address that the peer is reached by.
#[test]
fn an_exchange_finds_its_address() {
    let [a, b] = &sides(true);
    for at in ALL {
        let to = socket(ip(1, at), 7471);
        let listener = Listener::bind(&b.ctx, to, 4).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let request = listener.request(Some(PATIENCE)).unwrap();
                assert!(Exchange::is_asked_for_by(&request));
                let mut exchange = Exchange::accept_cm(&b.ctx, request).unwrap();
                assert_eq!(exchange.local().unwrap().ip(), ip(1, at));
                exchange.barrier("there").unwrap();
            });
            let mut exchange = Exchange::connect_cm(&a.ctx, to, PATIENCE).unwrap();
            assert_eq!(exchange.peer(), to, "with its scope");
            let local = exchange.local().unwrap().ip();
            assert_eq!(local.is_ipv4(), ip(0, at).is_ipv4(), "{local}");
            exchange.barrier("there").unwrap();
        });
    }
}
