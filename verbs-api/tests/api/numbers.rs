//! Smallest, largest and absurd numbers from a program or a peer: the device refuses them, or
//! accepts them and then works.

use std::net::TcpListener;
use std::time::Duration;

use crate::sim::{ADDRESSES, PATIENCE, Side, request, sides, until};
use rocinante::cm::{Listener, Params};
use rocinante::device::Limits;
use rocinante::exchange::Exchange;
use rocinante::verbs::{Budget, Key, PostListError, SendData, SendOp};
use rocinante::{
    Access, ConnectOptions, Context, Endpoint, OpenOptions, PreparedQp, Qp, RecvWr, RemoteSlice,
    VerbsError, WcStatus, cm,
};
use rocinante_netdev::AnyPort;
use rocinante_netdev::sim::{SimConfig, SimNet};

fn build(side: &Side) -> PreparedQp {
    side.pd.qp(&side.cq, &side.cq).access(Access::ALL).max_send_wr(512).build().unwrap()
}

fn connect(qp: PreparedQp, to: &Endpoint, options: &ConnectOptions) -> Result<Qp, VerbsError> {
    qp.connect(to, options).map_err(VerbsError::from)
}

/// Carries more than a window of WRITEs.
fn works(sides: &[Side; 2], qp: &Qp, what: &str) {
    let [a, b] = sides;
    let (remote, rkey) = (b.mr.address(), b.mr.rkey());
    let write = SendOp::Write { remote, rkey, imm: None };
    for round in 0..20 {
        let data = [a.mr.sge(0, 4096)];
        let list = [(); 10].map(|()| request(round, write, SendData::Sges(&data)));
        qp.post_send(&list).unwrap();
        let mut left = list.len();
        until(what, || {
            b.ctx.progress();
            while let Some(wc) = a.cq.poll_one().unwrap() {
                assert_eq!(wc.status, WcStatus::Success, "{what}");
                left -= 1;
            }
            left == 0
        });
    }
}

#[test]
fn whatever_a_peer_says_that_its_queue_holds_something_gets_through() {
    let most = u32::MAX;
    for (bytes, datagrams) in
        [(0, 0), (0, 1), (1, 0), (1, 1), (0, most), (most, 0), (most, 1), (1, most), (most, most)]
    {
        let sides = sides(&SimNet::new(), [false, false]);
        let [qp, peer] = sides.each_ref().map(build);
        let options = ConnectOptions::default();
        let [own, other] = [qp.endpoint(), peer.endpoint()];
        let _peer = connect(peer, &own, &options).unwrap();
        let to = other.budget(Budget { bytes, datagrams });
        let qp = connect(qp, &to, &options).unwrap();
        works(&sides, &qp, &format!("{bytes} bytes, {datagrams} datagrams"));
    }
}

#[test]
fn any_patience_of_a_connection_is_taken_or_refused() {
    let plain = ConnectOptions::default();
    for (what, options) in [
        ("no timeout", plain.timeout(0)),
        ("the longest", plain.timeout(31)),
        ("beyond", plain.timeout(32)),
        ("absurd", plain.timeout(u8::MAX)),
        ("no retry", plain.timeout(20).retry_cnt(0)),
        ("too many", plain.retry_cnt(8)),
        ("absurdly many", plain.retry_cnt(u8::MAX)),
        ("no RNR retry", plain.rnr_retry(0)),
        ("too many RNR retries", plain.rnr_retry(8)),
        ("the least RNR timer", plain.min_rnr_timer(0)),
        ("the greatest RNR timer", plain.min_rnr_timer(31)),
        ("too great a RNR timer", plain.min_rnr_timer(32)),
        ("no READs", plain.max_rd_atomic(0).max_dest_rd_atomic(0)),
        ("many READs", plain.max_rd_atomic(128).max_dest_rd_atomic(128)),
        ("too many READs", plain.max_rd_atomic(129)),
        ("too many READs here", plain.max_dest_rd_atomic(129)),
        ("no hops", plain.hop_limit(0)),
        ("all hops", plain.hop_limit(u8::MAX).traffic_class(u8::MAX)),
    ] {
        let refused = ["beyond", "too ", "absurd"].iter().any(|word| what.starts_with(word));
        let sides = sides(&SimNet::new(), [false, false]);
        let [qp, peer] = sides.each_ref().map(build);
        let ends = [qp.endpoint(), peer.endpoint()];
        let _peer = connect(peer, &ends[0], &plain).unwrap();
        match connect(qp, &ends[1], &options) {
            Ok(qp) => {
                assert!(!refused, "{what}");
                works(&sides, &qp, what);
            }
            Err(error) => assert!(refused, "{what}: {error}"),
        }
    }
}

#[test]
fn any_window_of_a_device_works() {
    for window in [0, 1, 2, 1 << 16, u32::MAX] {
        let net = SimNet::new();
        let [a, b] = ADDRESSES.map(|address| {
            let port = net.port(&[address], &SimConfig::default()).unwrap();
            let options = OpenOptions::new().background(false).window_max(window);
            let limits = Limits::default().max_qp(64).max_mr(64);
            let options = options.limits(limits);
            let ctx = options.open_port("sim", AnyPort::from(port), "a test wants it").unwrap();
            let (cq, pd) = (ctx.create_cq(1024).unwrap(), ctx.alloc_pd());
            let mr = pd.allocate(4096, rocinante::Access::ALL).unwrap();
            Side { ctx, pd, cq, mr }
        });
        let sides = [a, b];
        let [qp, _peer] = crate::sim::connect(&sides, 20);
        works(&sides, &qp, &format!("a window of {window}"));
    }
}

#[test]
fn a_wait_without_end_ends_when_there_is_something() {
    let sides = sides(&SimNet::new(), [true, true]);
    let [a, b] = &sides;
    let for_ever = Duration::MAX;
    let channel = a.ctx.create_comp_channel().unwrap();
    let cq = a.ctx.create_cq_with(16, &channel).unwrap();
    cq.req_notify(false).unwrap();
    let qp = a.pd.qp(&cq, &cq).access(Access::ALL).build().unwrap();
    qp.post_recv(&[RecvWr { wr_id: 1, sges: &[a.mr.sge(0, 64)] }]).unwrap();
    let listener = Listener::bind(&b.ctx, (ADDRESSES[1], 7471).into(), usize::MAX).unwrap();
    let to = listener.address();
    let theirs = std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            let request = listener.request(Some(for_ever)).unwrap();
            let accepted = request.accept(build(b), &Params::default()).unwrap();
            accepted.wait(for_ever).unwrap()
        });
        let mine = cm::connect(qp, to, &Params::default(), for_ever).unwrap();
        let theirs = server.join().unwrap();
        theirs.post_send(&[crate::sim::send(2, &[7; 8])]).unwrap();
        assert_eq!(b.cq.wait_one(for_ever).unwrap().wr_id, 2);
        assert!(channel.wait_event(Some(for_ever)).unwrap() == cq);
        assert_eq!(cq.wait_one(for_ever).unwrap().wr_id, 1);
        mine.disconnect().unwrap();
        theirs
    });
    theirs.wait_disconnected(for_ever).unwrap();
}

/// Over TCP and over a queue pair.
#[test]
fn an_exchange_may_be_waited_for_without_end() {
    let (here, there) = rocinante::doc::addresses();
    let listener = TcpListener::bind((there, 0)).unwrap();
    let at = listener.local_addr().unwrap();
    let asking = std::thread::spawn(move || {
        let mut exchange = Exchange::connect(at, Duration::MAX).unwrap();
        exchange.set_patience(Some(Duration::MAX));
        exchange.barrier("met").unwrap();
        let ctx = Context::open(here).unwrap();
        let at = (there, 7471).into();
        Exchange::connect_cm(&ctx, at, Duration::MAX).unwrap().barrier("met").unwrap();
    });
    let mut exchange = Exchange::accept_from(&listener).unwrap();
    let ctx = Context::open(there).unwrap();
    let listener = Listener::bind(&ctx, (there, 7471).into(), 1).unwrap();
    exchange.barrier("met").unwrap();
    let request = listener.request(Some(PATIENCE)).unwrap();
    Exchange::accept_cm(&ctx, request).unwrap().barrier("met").unwrap();
    asking.join().unwrap();
}

#[test]
fn a_region_in_private_data_says_any_number() {
    for (address, len, rkey) in
        [(0, 0, 0), (1, 2, 3), (u64::MAX, u64::MAX, u32::MAX), (u64::MAX, 0, 1 << 31)]
    {
        let region = RemoteSlice { address, len, rkey: Key(rkey) };
        let mut bytes = region.to_bytes().to_vec();
        assert_eq!(RemoteSlice::from_bytes(&bytes), Some(region));
        bytes.extend([0xff; 36]);
        assert_eq!(RemoteSlice::from_bytes(&bytes), Some(region));
        assert!((0..20).all(|len| RemoteSlice::from_bytes(&bytes[..len]).is_none()));
    }
}

/// Each of them is taken whole and works, and one more is refused.
#[test]
fn what_a_device_says_that_it_takes_it_takes() {
    let net = SimNet::new();
    let limits = Limits::default().max_qp(8).max_mr(8).max_mw(8).max_cq(8).max_srq(8);
    let limits = limits.max_cqe(24).max_qp_wr(11).max_sge(3).max_inline_data(40);
    let limits = limits.max_srq_wr(7).max_srq_sge(2).max_qp_rd_atom(5);
    let [a, b] = ADDRESSES.map(|address| {
        let port = net.port(&[address], &SimConfig::default()).unwrap();
        let options = OpenOptions::new().background(false).limits(limits);
        let ctx = options.open_port("sim", AnyPort::from(port), "a test wants it").unwrap();
        let (cq, pd) = (ctx.create_cq(24).unwrap(), ctx.alloc_pd());
        let mr = pd.allocate(4096, Access::ALL).unwrap();
        Side { ctx, pd, cq, mr }
    });
    assert_eq!(a.ctx.query_device().limits, limits);
    let refused = |what: &str, is: Option<VerbsError>| {
        assert!(matches!(is, Some(VerbsError::Invalid(_))), "{what}: {is:?}");
    };
    refused("max_cqe", a.ctx.create_cq(25).err());
    refused("max_srq_wr", a.pd.create_srq(8, 2).err());
    refused("max_srq_sge", a.pd.create_srq(7, 3).err());
    let most = |side: &Side| {
        let builder = side.pd.qp(&side.cq, &side.cq).access(Access::ALL);
        builder.max_send_wr(11).max_recv_wr(11).max_sge(3).max_inline_data(40)
    };
    for (what, builder) in [
        ("max_send_wr", most(&a).max_send_wr(12)),
        ("max_recv_wr", most(&a).max_recv_wr(12)),
        ("max_sge", most(&a).max_sge(4)),
        ("max_inline_data", most(&a).max_inline_data(41)),
    ] {
        refused(what, builder.build_reset().err());
    }
    let srq = b.pd.create_srq(7, 2).unwrap();
    let (qp, peer) = (most(&a).build().unwrap(), most(&b).srq(&srq).build().unwrap());
    let ends = [qp.endpoint(), peer.endpoint()];
    let options = ConnectOptions::default().max_rd_atomic(5).max_dest_rd_atomic(5);
    let other = most(&a).build().unwrap();
    refused("max_rd_atomic", connect(other, &ends[1], &options.max_rd_atomic(6)).err());
    let _peer = connect(peer, &ends[0], &options).unwrap();
    let qp = connect(qp, &ends[1], &options).unwrap();
    let full = |what: &str, is: Result<(), PostListError>| assert!(is.is_err(), "{what}");
    let own = [a.mr.sge(0, 8); 4];
    for wr_id in 0..11 {
        qp.post_recv(&[RecvWr { wr_id, sges: &own[..3] }]).unwrap();
    }
    full("a receive too many", qp.post_recv(&[RecvWr { wr_id: 11, sges: &own[..3] }]));
    let theirs = [b.mr.sge(0, 24), b.mr.sge(24, 24), b.mr.sge(0, 0)];
    for wr_id in 0..7 {
        srq.post_recv(&[RecvWr { wr_id, sges: &theirs[..2] }]).unwrap();
    }
    full("a shared receive too many", srq.post_recv(&[RecvWr { wr_id: 7, sges: &theirs[..2] }]));
    let inline = [7; 41];
    let send = |wr_id, data| request(wr_id, SendOp::Send { imm: None }, data);
    full("too much inline data", qp.post_send(&[send(0, SendData::Inline(&inline))]));
    full("an element too many", qp.post_send(&[send(0, SendData::Sges(&own))]));
    // Seven messages with as much as one takes of each, and four READs.
    let data = [SendData::Inline(&inline[..40]), SendData::Sges(&own[..3])];
    let mut list: Vec<_> = (0..7).map(|at| send(at, data[at as usize % 2])).collect();
    let read = SendOp::Read { remote: b.mr.address(), rkey: b.mr.rkey() };
    list.extend((7..11).map(|at| request(at, read, SendData::Sges(&own[..3]))));
    qp.post_send(&list).unwrap();
    full("a request too many", qp.post_send(&[send(11, data[0])]));
    let mut done = 0;
    until("all are executed", || {
        b.ctx.progress();
        while let Some(wc) = a.cq.poll_one().unwrap() {
            assert_eq!((wc.wr_id, wc.status), (done, WcStatus::Success));
            done += 1;
        }
        done == 11
    });
    for at in 0..7 {
        let wc = b.cq.poll_one().unwrap().unwrap();
        assert_eq!((wc.wr_id, wc.byte_len), (at, [40, 24][at as usize % 2]));
    }
}
