//! Flows over loopback.

use super::super::pair::{Owner, connected};
use super::*;
use rocinante::device::Backend;
use rocinante::{Access, ConnectOptions, OpenOptions};

fn plan(op: Option<BulkOp>, receive: Receive, until: Until) -> FlowPlan {
    FlowPlan {
        op,
        receive,
        size: 300,
        room: 300,
        slots: 12,
        stride: 320,
        depth: 16,
        recv_depth: 24,
        list: 1,
        signal_every: 4,
        until,
        mark_last: false,
        second: false,
    }
}

fn lanes<'a>(here: &'a Owner, there: &Owner) -> Lanes<'a> {
    let remote = there.region();
    let lane = Lane {
        qp: &here.qp,
        source: 0,
        landing: here.mr.len() / 2,
        remote: remote.address + remote.len / 2,
        rkey: remote.rkey,
        to: None,
    };
    let (ctx, cqs) = (here.ctx(), std::slice::from_ref(&here.cq));
    Lanes { ctx, cqs, channel: None, mr: &here.mr, lanes: vec![lane] }
}

fn patient(_: &Flowed, idle: Duration) -> Result<Idle, MeasureError> {
    let patience = Duration::from_secs(10);
    if idle < patience {
        Ok(Idle::Wait)
    } else {
        Err(MeasureError::Silence { what: "anything", patience })
    }
}

/// Runs both sides, each on its own thread. The receives of both sides are posted before either
/// begins.
fn both(a: &FlowPlan, b: &FlowPlan) -> (Flowed, Flowed) {
    let [first, second] = connected();
    let (ours, theirs) = (lanes(&first, &second), lanes(&second, &first));
    ours.post_receives(a).unwrap();
    theirs.post_receives(b).unwrap();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| theirs.flow(b, |_| (), patient).unwrap());
        (ours.flow(a, |_| (), patient).unwrap(), other.join().unwrap())
    })
}

#[test]
fn sends_cross_each_other() {
    let first = plan(Some(BulkOp::Send), Receive::Until, Until::Messages(1001));
    let second = FlowPlan { second: true, list: 5, ..first };
    let (a, b) = both(&first, &second);
    assert_eq!((a.sent, a.received), (1001, 1001));
    assert_eq!((b.sent, b.received), (1001, 1001));
}

#[test]
fn time_ends_a_flow_by_a_mark_or_at_once() {
    let until = Until::Time(Duration::from_millis(80));
    let marked = FlowPlan { mark_last: true, ..plan(Some(BulkOp::Send), Receive::Marked, until) };
    let (a, b) = both(&marked, &marked);
    assert_eq!((a.sent, b.sent), (b.received, a.received));
    let once = plan(Some(BulkOp::Send), Receive::No, until);
    let (a, b) = both(&once, &plan(None, Receive::Until, until));
    assert!(a.elapsed >= Duration::from_millis(80) && a.sent > 0 && b.received > 0);
    assert!(b.elapsed >= Duration::from_millis(80) && b.sent == 0);
}

#[test]
fn atomics_reach_their_places() {
    let [a, b] = connected();
    let ours = lanes(&a, &b);
    let until = Until::Messages(100);
    let what = FlowPlan {
        size: 8,
        room: 8,
        slots: 7,
        stride: 64,
        ..plan(Some(BulkOp::FetchAdd), Receive::No, until)
    };
    let flowed = ours.flow(&what, |_| (), patient).unwrap();
    assert_eq!(flowed.sent, 100);
    let half = b.mr.len() / 2;
    let counts: Vec<u64> = (0..8).map(|slot| b.mr.load_u64(half + slot * 64)).collect();
    assert_eq!(counts, [15, 15, 14, 14, 14, 14, 14, 0]);
}

#[test]
fn reads_and_writes_flow_with_nobody_at_the_other_end() {
    let [a, b] = connected();
    let ours = lanes(&a, &b);
    for op in [BulkOp::Read, BulkOp::Write, BulkOp::CompareSwap] {
        let size = if op == BulkOp::CompareSwap { 8 } else { 300 };
        let what =
            FlowPlan { size, room: size, ..plan(Some(op), Receive::No, Until::Messages(77)) };
        let mut seen = 0;
        let flowed = ours.flow(&what, |so_far| seen = so_far.sent, patient).unwrap();
        assert_eq!((flowed.sent, seen), (77, 77));
    }
}

#[test]
fn a_side_that_waits_may_give_up() {
    let [a, b] = connected();
    let ours = lanes(&a, &b);
    let what = plan(None, Receive::Until, Until::Messages(1));
    let error = ours.flow(
        &what,
        |_| (),
        |_, idle| {
            let patience = Duration::from_millis(50);
            if idle < patience {
                Ok(Idle::Wait)
            } else {
                Err(MeasureError::Silence { what: "message", patience })
            }
        },
    );
    assert!(matches!(error, Err(MeasureError::Silence { .. })));
}

/// Chance decides which poll of a queue ends the connection.
#[test]
fn a_flush_is_told_by_its_cause_in_the_other_queue() {
    (0..16).for_each(|_| a_flow_that_breaks());
}

fn a_flow_that_breaks() {
    let (here, there) = rocinante::doc::addresses();
    let open = |address| OpenOptions::new().netdev(Backend::Udp).open(address).unwrap();
    let (ctx, peer) = (open(here), open(there));
    let half = |ctx: &Context| {
        let (pd, cqs) = (ctx.alloc_pd(), [(); 2].map(|()| ctx.create_cq(64).unwrap()));
        let mr = pd.allocate(1 << 16, Access::ALL).unwrap();
        let qp = pd
            .qp(&cqs[1], &cqs[0])
            .access(Access::ALL)
            .max_send_wr(16)
            .max_recv_wr(24)
            .build()
            .unwrap();
        (cqs, mr, qp)
    };
    let ((cqs, mr, qp), (_, remote, gone)) = (half(&ctx), half(&peer));
    let retry = ConnectOptions::default().timeout(10).retry_cnt(1);
    let qp = qp.connect(&gone.endpoint(), &retry).unwrap();
    let remote = remote.remote();
    drop((gone, peer));
    let lane = Lane {
        qp: &qp,
        source: 0,
        landing: mr.len() / 2,
        remote: remote.address,
        rkey: remote.rkey,
        to: None,
    };
    let lanes = Lanes { ctx: &ctx, cqs: &cqs, channel: None, mr: &mr, lanes: vec![lane] };
    let what = plan(Some(BulkOp::Send), Receive::Until, Until::Messages(100));
    lanes.post_receives(&what).unwrap();
    let error = lanes.flow(&what, |_| (), patient).unwrap_err();
    assert!(matches!(error, MeasureError::Completion(WcStatus::RetryExcErr)), "{error}");
}
