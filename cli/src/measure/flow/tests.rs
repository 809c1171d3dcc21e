//! Flows over loopback.

use super::super::pair::{Owner, connected};
use super::*;
use rocinante::device::Backend;
use rocinante::verbs::QpState;
use rocinante::{Access, ConnectOptions, OpenOptions};

fn plan(sends: bool, receive: Receive, until: Until) -> FlowPlan {
    FlowPlan {
        sends,
        receive,
        size: 300,
        slots: 12,
        stride: 320,
        depth: 16,
        recv_depth: 24,
        list: 1,
        signal_every: 4,
        until,
        mark_last: false,
    }
}

fn lanes(owner: &Owner) -> Lanes<'_> {
    let lane = Lane { qp: &owner.qp, landing: owner.mr.len() / 2, to: None };
    let (ctx, cq) = (owner.ctx(), &owner.cq);
    Lanes { ctx, cq, channel: None, mr: &owner.mr, lanes: vec![lane] }
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
    let (ours, theirs) = (lanes(&first), lanes(&second));
    ours.post_receives(a).unwrap();
    theirs.post_receives(b).unwrap();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| theirs.flow(b, |_| (), patient).unwrap());
        (ours.flow(a, |_| (), patient).unwrap(), other.join().unwrap())
    })
}

#[test]
fn sends_cross_each_other() {
    let first = plan(true, Receive::Until, Until::Messages(1001));
    let (a, b) = both(&first, &FlowPlan { list: 5, ..first });
    assert_eq!((a.sent, a.received), (1001, 1001));
    assert_eq!((b.sent, b.received), (1001, 1001));
}

#[test]
fn time_ends_a_flow_by_a_mark_or_at_once() {
    // Longer than a side may be without a processor.
    let time = Duration::from_secs(1);
    let until = Until::Time(time);
    let marked = FlowPlan { mark_last: true, ..plan(true, Receive::Marked, until) };
    let (a, b) = both(&marked, &marked);
    assert_eq!((a.sent, b.sent), (b.received, a.received));
    let once = plan(true, Receive::No, until);
    let (a, b) = both(&once, &plan(false, Receive::Until, until));
    assert!(a.elapsed >= time && a.sent > 0 && b.received > 0);
    assert!(b.elapsed >= time && b.sent == 0);
}

#[test]
fn a_side_that_waits_may_give_up() {
    let [a, _b] = connected();
    let ours = lanes(&a);
    let what = plan(false, Receive::Until, Until::Messages(1));
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

/// A queue pair that is connected to one that is gone.
fn to_nobody() -> (Context, Cq, Mr, Qp) {
    let (here, there) = rocinante::doc::addresses();
    let open = |address| OpenOptions::new().netdev(Backend::Udp).open(address).unwrap();
    let (ctx, peer) = (open(here), open(there));
    let half = |ctx: &Context| {
        let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(64).unwrap());
        let mr = pd.allocate(1 << 16, Access::ALL).unwrap();
        let qp = pd.qp(&cq, &cq).access(Access::ALL).max_send_wr(16).max_recv_wr(24);
        (cq.clone(), mr, qp.build().unwrap())
    };
    let ((cq, mr, qp), (_cq, _mr, gone)) = (half(&ctx), half(&peer));
    let retry = ConnectOptions::default().timeout(10).retry_cnt(1);
    let qp = qp.connect(&gone.endpoint(), &retry).unwrap();
    (ctx, cq, mr, qp)
}

/// The receives that a broken connection flushes are not why it broke.
#[test]
fn a_flow_that_breaks_says_why() {
    let (ctx, cq, mr, qp) = to_nobody();
    let lane = Lane { qp: &qp, landing: mr.len() / 2, to: None };
    let lanes = Lanes { ctx: &ctx, cq: &cq, channel: None, mr: &mr, lanes: vec![lane] };
    let what = plan(true, Receive::Until, Until::Messages(100));
    lanes.post_receives(&what).unwrap();
    let error = lanes.flow(&what, |_| (), patient).unwrap_err();
    assert!(matches!(error, MeasureError::Completion(WcStatus::RetryExcErr)), "{error}");
}

/// Nor is the flush that a look finds first, of a queue pair that waits for memory.
#[test]
fn the_cause_of_a_flush_is_looked_for() {
    let (ctx, cq, mr, qp) = to_nobody();
    qp.post_send(&[SendWr::send(SendData::Sges(&[mr.sge(0, 64)]))]).unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while qp.state() != QpState::Err {
        ctx.progress();
        assert!(Instant::now() < deadline, "it does not break");
    }
    assert_eq!(super::super::cause(WcStatus::WrFlushErr, &cq), WcStatus::RetryExcErr);
    assert_eq!(super::super::cause(WcStatus::WrFlushErr, &cq), WcStatus::WrFlushErr);
}
