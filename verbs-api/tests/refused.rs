//! A call that fails leaves everything as it was: objects, paths, numbers, connections,
//! descriptors, and the caller's values.
//!
//! One test, because it counts the descriptors of its process.

mod sim;

use std::net::{IpAddr, SocketAddr};

use rocinante::cm::{self, Connecting, DatagramListener, Listener, Params};
use rocinante::device::Limits;
use rocinante::stats::Resources;
use rocinante::verbs::{
    BindMw, ModifyAttr, Mtu, MwPart, MwType, PeerPath, Psn, QpAttr, QpCaps, QpState, QpType, Qpn,
    Rereg, SendData, SendOp, SrqChange,
};
use rocinante::{
    Access, ConnectOptions, Endpoint, OpenOptions, PreparedQp, Qp, RecvWr, VerbsError, WcStatus,
};
use rocinante_netdev::AnyPort;
use rocinante_netdev::sim::{SimConfig, SimNet};
use sim::{ADDRESSES, Side, connect, sides};

/// The objects of the calls.
struct World {
    a: Side,
    b: Side,
    /// A device at all its limits.
    full: Side,
    /// Connected queue pairs of a and b.
    connected: [Qp; 2],
    listener: Listener,
    datagrams: DatagramListener,
    _held: (Qp, rocinante::Srq),
}

impl World {
    fn new() -> Self {
        let net = SimNet::new();
        let sides = sides(&net, [false, false]);
        let port = net.port(&[[10, 0, 0, 3].into()], &SimConfig::default()).unwrap();
        let limits = Limits::default().max_qp(1).max_mr(1).max_cq(1).max_srq(1);
        let options = OpenOptions::new().background(false).limits(limits);
        let ctx = options.open_port("full", AnyPort::from(port), "a test wants it").unwrap();
        let (cq, pd) = (ctx.create_cq(4).unwrap(), ctx.alloc_pd());
        let mr = pd.allocate(64, Access::ALL).unwrap();
        let srq = pd.create_srq(1, 1).unwrap();
        let qp = pd.qp(&cq, &cq).build_reset().unwrap();
        let connected = connect(&sides, 14);
        let [a, b] = sides;
        let listener = Listener::bind(&b.ctx, (ADDRESSES[1], 7471).into(), 2).unwrap();
        let datagrams = DatagramListener::bind(&b.ctx, (ADDRESSES[1], 7471).into(), 2).unwrap();
        let full = Side { ctx, pd, cq, mr };
        Self { a, b, full, connected, listener, datagrams, _held: (qp, srq) }
    }

    fn held(&self) -> ([Resources; 3], usize) {
        let devices = [&self.a, &self.b, &self.full].map(|side| side.ctx.resources().unwrap());
        (devices, std::fs::read_dir("/proc/self/fd").unwrap().count())
    }

    fn qp(&self) -> PreparedQp {
        self.a.qp()
    }

    fn datagram_qp(&self) -> PreparedQp {
        self.a.pd.qp(&self.a.cq, &self.a.cq).qp_type(QpType::Ud).build().unwrap()
    }

    /// A valid change from INIT to RTR.
    fn rtr(&self) -> ModifyAttr {
        let attr = QpAttr {
            state: Some(QpState::Rtr),
            path_mtu: Some(Mtu::Mtu1024),
            dest_qpn: Some(Qpn::new(77)),
            rq_psn: Some(Psn::new(1)),
            max_dest_rd_atomic: Some(1),
            min_rnr_timer: Some(12),
            ..QpAttr::default()
        };
        ModifyAttr { attr, path: Some(PeerPath::new(ADDRESSES[1])) }
    }

    /// Applies a change that must fail, to a queue pair in INIT.
    fn modified(&self, change: &ModifyAttr) -> Result<(), VerbsError> {
        let qp = self.a.pd.qp(&self.a.cq, &self.a.cq).build_reset()?;
        qp.modify(&ModifyAttr::init(Access::ALL))?;
        let before = (self.held(), qp.query());
        let result = qp.modify(change);
        assert_eq!((self.held(), qp.query()), before);
        result
    }

    /// Makes a connection that must fail, and then a valid one with the same queue pair.
    fn connected(&self, to: Endpoint, options: &ConnectOptions) -> Result<(), VerbsError> {
        let qp = self.qp();
        let before = self.held();
        let Err(rocinante::Refused { value: qp, error }) = qp.connect(&to, options) else {
            return Ok(());
        };
        assert_eq!(self.held(), before);
        let well = self.connected[1].endpoint();
        drop(qp.connect(&well, &ConnectOptions::default()).unwrap());
        Err(error)
    }

    /// A request from a's queue pair, taken by b.
    fn asked(&self, qp: PreparedQp) -> (Connecting, cm::Request) {
        let asked = Connecting::start(qp, self.listener.address(), &Params::default()).unwrap();
        self.b.ctx.progress();
        (asked, self.listener.try_request().unwrap().expect("it has come"))
    }

    /// The connection and the service from before a refusal work as before.
    fn still_works(&self, what: &str) {
        let op = SendOp::Write { remote: self.b.mr.address(), rkey: self.b.mr.rkey(), imm: None };
        let wr = sim::request(1, op, SendData::Inline(&[7; 8]));
        assert_eq!(self.connected[0].post(wr), Ok(()), "{what}");
        let mut asked =
            cm::Resolving::start(&self.a.ctx, 0, self.datagrams.address(), &[]).unwrap();
        sim::until(what, || {
            self.b.ctx.progress();
            self.a.cq.poll_one().unwrap().is_some_and(|wc| wc.status == WcStatus::Success)
        });
        self.datagrams.try_request().unwrap().expect(what).reject(&[]).unwrap();
        self.a.ctx.progress();
        assert!(asked.try_finish().is_err(), "{what}");
    }

    /// Counts without the connection manager's numbers, which it keeps for a while after the end.
    fn after_asking(
        &self,
        call: impl FnOnce(cm::Request) -> Result<(), VerbsError>,
    ) -> Result<(), VerbsError> {
        let (mut asked, request) = self.asked(self.qp());
        let paths = |world: &Self| world.held().0.map(|of| (of.paths, of.mrs));
        let before = (paths(self), self.b.ctx.resources().unwrap().qps);
        let result = call(request);
        assert_eq!((paths(self), self.b.ctx.resources().unwrap().qps), before);
        self.a.ctx.progress();
        assert!(asked.try_finish().is_err(), "the peer learns of it");
        result
    }
}

type Call = fn(&World) -> Result<(), VerbsError>;

const ABSENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 77));
const OTHER_FAMILY: IpAddr = IpAddr::V6(std::net::Ipv6Addr::LOCALHOST);

/// Objects that cannot be made.
const CREATE: [(&str, Call); 22] = [
    ("a queue without entries", |w| w.a.ctx.create_cq(0).map(drop)),
    ("a queue of the most entries", |w| w.a.ctx.create_cq(u32::MAX).map(drop)),
    ("a queue too many", |w| w.full.ctx.create_cq(1).map(drop)),
    ("a queue with another's channel", |w| {
        let channel = w.b.ctx.create_comp_channel().unwrap();
        w.a.ctx.create_cq_with(1, &channel).map(drop)
    }),
    ("a queue pair too many", |w| {
        w.full.pd.qp(&w.full.cq, &w.full.cq).access(Access::ALL).build().map(drop)
    }),
    ("with another's queue", |w| w.a.pd.qp(&w.a.cq, &w.b.cq).access(Access::ALL).build().map(drop)),
    ("without such an address", |w| {
        w.a.pd.qp(&w.a.cq, &w.a.cq).access(Access::ALL).sgid_index(usize::MAX).build().map(drop)
    }),
    ("without such a shard", |w| {
        w.a.pd.qp(&w.a.cq, &w.a.cq).access(Access::ALL).shard(usize::MAX).build().map(drop)
    }),
    ("too deep", |w| {
        w.a.pd.qp(&w.a.cq, &w.a.cq).access(Access::ALL).max_send_wr(u32::MAX).build().map(drop)
    }),
    ("too wide", |w| {
        w.a.pd.qp(&w.a.cq, &w.a.cq).access(Access::ALL).max_sge(u32::MAX).build().map(drop)
    }),
    ("with the most of everything", |w| {
        let max = u32::MAX;
        let caps = QpCaps {
            max_send_wr: max,
            max_recv_wr: max,
            max_send_sge: max,
            max_recv_sge: max,
            max_inline_data: max,
        };
        w.a.pd.qp(&w.a.cq, &w.a.cq).access(Access::ALL).caps(caps).build().map(drop)
    }),
    ("a shared queue too many", |w| w.full.pd.create_srq(1, 1).map(drop)),
    ("a shared queue without depth", |w| w.a.pd.create_srq(0, 1).map(drop)),
    ("a shared queue too deep", |w| w.a.pd.create_srq(u32::MAX, u32::MAX).map(drop)),
    ("a region too many", |w| w.full.pd.allocate(64, Access::ALL).map(drop)),
    ("a region of rights that contradict", |w| w.a.pd.allocate(64, Access::REMOTE_WRITE).map(drop)),
    ("a region that shall persist", |w| w.a.pd.allocate(64, Access::FLUSH_PERSISTENT).map(drop)),
    ("a region of all memory", |w| w.a.pd.allocate(usize::MAX, Access::ALL).map(drop)),
    ("a window too many", |w| w.full.pd.alloc_mw(MwType::Type1).map(drop)),
    ("a handle without such an address", |w| {
        w.a.pd.create_ah(&PeerPath::new(ADDRESSES[1]).sgid_index(usize::MAX)).map(drop)
    }),
    ("a handle of another family", |w| w.a.pd.create_ah(&PeerPath::new(OTHER_FAMILY)).map(drop)),
    ("a second device at an address", |w| {
        // Objects that were made for a device that then fails to open go with it.
        drop(w.a.ctx.create_comp_channel().unwrap());
        let net = SimNet::new();
        let _first = net.port(&[ADDRESSES[0]], &SimConfig::default()).unwrap();
        Ok(net.port(&[ADDRESSES[0]], &SimConfig::default()).map(drop)?)
    }),
];

/// Changes that fail.
const CHANGE: [(&str, Call); 29] = [
    ("to RTR without a number", |w| {
        let mut change = w.rtr();
        change.attr.dest_qpn = None;
        w.modified(&change)
    }),
    ("to RTR without a PSN", |w| {
        let mut change = w.rtr();
        change.attr.rq_psn = None;
        w.modified(&change)
    }),
    ("to RTR with an absurd timer", |w| {
        let mut change = w.rtr();
        change.attr.min_rnr_timer = Some(u8::MAX);
        w.modified(&change)
    }),
    ("to RTR with an attribute of RTS", |w| {
        let mut change = w.rtr();
        change.attr.sq_psn = Some(Psn::new(1));
        w.modified(&change)
    }),
    ("to RTR with absurdly many READs", |w| {
        let mut change = w.rtr();
        change.attr.max_dest_rd_atomic = Some(u8::MAX);
        w.modified(&change)
    }),
    ("to RTR by a path from no address", |w| {
        let path = PeerPath::new(ADDRESSES[1]).sgid_index(usize::MAX);
        w.modified(&ModifyAttr { path: Some(path), ..w.rtr() })
    }),
    ("to RTR by a path of another family", |w| {
        w.modified(&ModifyAttr { path: Some(PeerPath::new(OTHER_FAMILY)), ..w.rtr() })
    }),
    ("to RTS from INIT, with a path", |w| {
        let mut change = w.rtr();
        change.attr.state = Some(QpState::Rts);
        w.modified(&change)
    }),
    ("to RESET, with a path", |w| {
        w.modified(&ModifyAttr { path: w.rtr().path, ..ModifyAttr::state(QpState::Reset) })
    }),
    ("to RTR in RTS, with a path", |w| w.connected[0].modify(&w.rtr())),
    ("connected to another family", |w| {
        let to = w.connected[1].endpoint().address(OTHER_FAMILY);
        w.connected(to, &ConnectOptions::default())
    }),
    ("connected with an absurd timeout", |w| {
        let options = ConnectOptions::default().timeout(32);
        w.connected(w.connected[1].endpoint(), &options)
    }),
    ("connected with absurd retries", |w| {
        let options = ConnectOptions::default().retry_cnt(8);
        w.connected(w.connected[1].endpoint(), &options)
    }),
    ("connected with absurdly many READs", |w| {
        let options = ConnectOptions::default().max_rd_atomic(u8::MAX);
        w.connected(w.connected[1].endpoint(), &options)
    }),
    ("a group of connections", |w| w.connected[0].attach_mcast([239, 1, 1, 1].into())),
    ("a group that is none", |w| {
        let qp = w.datagram_qp().ready()?;
        qp.attach_mcast(ABSENT)
    }),
    ("a shared queue beyond the limit", |w| {
        let srq = w.a.pd.create_srq(2, 1)?;
        let before = srq.query()?;
        let result = srq.modify(&SrqChange { max_wr: Some(u32::MAX), srq_limit: Some(1) });
        assert_eq!(srq.query()?, before);
        result
    }),
    ("a shared queue's limit above its depth", |w| {
        let srq = w.a.pd.create_srq(2, 1)?;
        let before = srq.query()?;
        let result = srq.arm(3);
        assert_eq!(srq.query()?, before);
        result
    }),
    ("the end of a shared queue that is in use", |w| {
        let srq = w.a.pd.create_srq(2, 1)?;
        let user = w.a.pd.qp(&w.a.cq, &w.a.cq).access(Access::ALL).srq(&srq).build()?;
        let Err(rocinante::Refused { value: srq, error }) = srq.destroy() else { return Ok(()) };
        drop(user);
        srq.destroy().expect("it is free");
        Err(error)
    }),
    ("a region in another's domain", |w| {
        changed_region(w, &Rereg { pd: Some(&w.b.pd), ..Rereg::default() })
    }),
    ("a region to rights that contradict", |w| {
        let access = Some(Access::REMOTE_ATOMIC);
        changed_region(w, &Rereg { access, len: Some(8), ..Rereg::default() })
    }),
    ("a region to all memory", |w| {
        changed_region(w, &Rereg { len: Some(usize::MAX), ..Rereg::default() })
    }),
    ("a group too many", |w| {
        let qp = w.datagram_qp().ready()?;
        let group = |n: u8| IpAddr::from([239, 1, 1, n]);
        (0..=u8::MAX).for_each(|n| qp.attach_mcast(group(n)).unwrap());
        let full = w.a.ctx.resources();
        let refused = qp.attach_mcast("ff15::1".parse().unwrap());
        assert_eq!(w.a.ctx.resources(), full);
        qp.detach_mcast(group(7))?;
        qp.attach_mcast("ff15::1".parse().unwrap())?;
        assert_eq!(w.a.ctx.resources(), full);
        refused
    }),
    ("a group that it is not in", |w| {
        let [first, second] = [(); 2].map(|()| w.datagram_qp().ready().unwrap());
        let group = IpAddr::from([239, 1, 1, 1]);
        first.attach_mcast(group)?;
        let refused = second.detach_mcast(group);
        assert_eq!(w.a.ctx.resources().unwrap().groups, 1, "the other's");
        first.detach_mcast(group)?;
        refused
    }),
    ("the end of a region that a request names", |w| {
        let mr = w.a.pd.allocate(64, Access::ALL)?;
        let qp = w.qp();
        qp.post_recv(&[RecvWr { wr_id: 1, sges: &[mr.sge(0, 64)] }]).unwrap();
        let Err(rocinante::Refused { value: mr, error }) = mr.deregister() else { return Ok(()) };
        mr.check(mr.address(), 64, Access::REMOTE_WRITE).unwrap();
        drop(qp);
        mr.deregister().expect("it is free");
        Err(error)
    }),
    ("the end of a queue that is in use", |w| {
        let cq = w.a.ctx.create_cq(4)?;
        let qp = w.a.pd.qp(&cq, &cq).build()?;
        let Err(rocinante::Refused { value: cq, error }) = cq.destroy() else { return Ok(()) };
        qp.post_recv(&[RecvWr { wr_id: 8, sges: &[] }]).unwrap();
        let qp = qp.connect(&w.connected[1].endpoint(), &ConnectOptions::default()).unwrap();
        qp.modify(&ModifyAttr::state(QpState::Err))?;
        assert_eq!(cq.poll_one()?.map(|wc| wc.wr_id), Some(8), "it still completes");
        drop(qp);
        cq.destroy().expect("it is free");
        Err(error)
    }),
    ("a queue smaller than its contents", |w| {
        let cq = w.a.ctx.create_cq(4)?;
        let qp = w.a.pd.qp(&cq, &cq).build_reset()?;
        qp.modify(&ModifyAttr::init(Access::ALL))?;
        (0..4).for_each(|wr_id| qp.post_recv(&[RecvWr { wr_id, sges: &[] }]).unwrap());
        qp.modify(&ModifyAttr::state(QpState::Err))?;
        let refused = cq.resize(3);
        let all = std::iter::from_fn(|| cq.poll_one().unwrap()).map(|wc| wc.wr_id);
        assert_eq!((cq.depth(), all.collect::<Vec<_>>()), (4, vec![0, 1, 2, 3]));
        cq.resize(3)?;
        refused
    }),
    ("a shared queue smaller than its contents", |w| {
        let srq = w.a.pd.create_srq(4, 1)?;
        (0..3).for_each(|wr_id| srq.post_recv(&[RecvWr { wr_id, sges: &[] }]).unwrap());
        srq.arm(2)?;
        let before = srq.query()?;
        let result = srq.modify(&SrqChange { max_wr: Some(2), srq_limit: Some(1) });
        assert_eq!(srq.query()?, before, "armed as it was, too");
        srq.post_recv(&[RecvWr { wr_id: 3, sges: &[] }]).expect("there is room for one");
        srq.post_recv(&[RecvWr { wr_id: 4, sges: &[] }]).expect_err("and no more");
        result
    }),
    ("a window of another's", |w| {
        let mw = w.b.pd.alloc_mw(MwType::Type1)?;
        let part = MwPart { mr: &w.b.mr, offset: 0, len: 8, access: Access::REMOTE_READ };
        let before = mw.rkey();
        let bind = BindMw { wr_id: 1, part, signaled: true, fence: false };
        let result = w.connected[0].bind_mw(&mw, &bind).map(drop);
        assert_eq!(mw.rkey(), before);
        result
    }),
];

/// Calls to the connection manager that fail.
const CONNECT: [(&str, Call); 16] = [
    ("a second listener", |w| Listener::bind(&w.b.ctx, w.listener.address(), 1).map(drop)),
    ("a second listener for datagrams", |w| {
        DatagramListener::bind(&w.b.ctx, w.datagrams.address(), 1).map(drop)
    }),
    ("a listener elsewhere", |w| Listener::bind(&w.b.ctx, (ABSENT, 1).into(), 1).map(drop)),
    ("a listener at no port", |w| Listener::bind(&w.b.ctx, (ADDRESSES[1], 0).into(), 1).map(drop)),
    ("too many words", |w| {
        let long = Params::default().private_data(&[1; 57]);
        Connecting::start(w.qp(), w.listener.address(), &long).map(drop)
    }),
    ("a connection for datagrams", |w| {
        Connecting::start(w.datagram_qp(), w.listener.address(), &Params::default()).map(drop)
    }),
    ("a connection to another family", |w| {
        let peer = SocketAddr::new(OTHER_FAMILY, 7471);
        Connecting::start(w.qp(), peer, &Params::default()).map(drop)
    }),
    ("too many words to a service", |w| {
        cm::Resolving::start(&w.a.ctx, 0, w.datagrams.address(), &[1; 200]).map(drop)
    }),
    ("a service of another family", |w| {
        let peer = SocketAddr::new(OTHER_FAMILY, 7471);
        cm::Resolving::start(&w.a.ctx, 0, peer, &[]).map(drop)
    }),
    ("accepted with another's queue pair", |w| {
        w.after_asking(|request| request.accept(w.qp(), &Params::default()).map(drop))
    }),
    ("accepted with too many words", |w| {
        let long = Params::default().private_data(&[1; 197]);
        w.after_asking(|request| {
            let qp = w.b.pd.qp(&w.b.cq, &w.b.cq).access(Access::ALL).build()?;
            request.accept(qp, &long).map(drop)
        })
    }),
    ("accepted with another kind of queue pair", |w| {
        w.after_asking(|request| {
            let qp = w.b.pd.qp(&w.b.cq, &w.b.cq).access(Access::ALL).qp_type(QpType::Uc).build()?;
            request.accept(qp, &Params::default()).map(drop)
        })
    }),
    ("rejected with too many words", |w| w.after_asking(|request| request.reject(&[1; 149]))),
    ("refused with too many words", |w| after_question(w, |question| question.reject(&[1; 137]))),
    ("answered with too many words", |w| {
        let qp = w.b.pd.qp(&w.b.cq, &w.b.cq).qp_type(QpType::Ud).build()?;
        let qp = qp.ready()?;
        after_question(w, |question| question.accept(&qp, &[1; 137]))
    }),
    ("answered with a connection", |w| {
        after_question(w, |question| question.accept(&w.connected[1], &[]))
    }),
];

/// The peer gets a refusal after such an answer.
fn after_question(
    w: &World,
    call: impl FnOnce(cm::DatagramRequest) -> Result<(), VerbsError>,
) -> Result<(), VerbsError> {
    let mut asked = cm::Resolving::start(&w.a.ctx, 0, w.datagrams.address(), &[])?;
    w.b.ctx.progress();
    let result = call(w.datagrams.try_request()?.expect("it has come"));
    w.a.ctx.progress();
    assert!(asked.try_finish().is_err(), "the peer learns of it");
    result
}

/// A region keeps keys, address and content after a failed change, and still works.
fn changed_region(w: &World, change: &Rereg<'_>) -> Result<(), VerbsError> {
    let mut mr = w.a.pd.allocate(64, Access::ALL)?;
    mr.write(0, &[7; 64]);
    let before = (w.held(), mr.rkey(), mr.lkey(), mr.address(), mr.len(), mr.access());
    let result = mr.rereg(change);
    assert_eq!((w.held(), mr.rkey(), mr.lkey(), mr.address(), mr.len(), mr.access()), before);
    assert_eq!(mr.to_vec(0, 64), [7; 64]);
    mr.check(mr.address(), 64, Access::REMOTE_WRITE).unwrap();
    result
}

/// More often than there is room for leftovers of each call.
const TIMES: usize = 24;

#[test]
fn whatever_is_refused_leaves_nothing_behind() {
    let world = World::new();
    for (what, call) in CREATE.into_iter().chain(CHANGE).chain(CONNECT) {
        // Calls that reach a peer leave numbers that are kept for a while, so they run only once.
        let asks = what.starts_with("accepted") || what.starts_with("rejected");
        let before = world.held();
        for round in 0..if asks { 1 } else { TIMES } {
            let error = call(&world).expect_err(what);
            assert_ne!(error.errno(), 0, "{what}: {error}");
            if !asks {
                assert_eq!(world.held(), before, "{what}, {round}: {error}");
            }
        }
        let paths = |held: &([Resources; 3], usize)| held.0.map(|of| (of.paths, of.qps, of.mrs));
        assert_eq!(paths(&world.held()), paths(&before), "{what}");
        world.still_works(what);
    }
}
