//! Faults of the device: calls, completions, receives, events and stalls, by a plan.

mod sim;

use std::fs;
use std::time::{Duration, Instant};

use rocinante::verbs::{
    AsyncEvent, MwType, PeerPath, PostError, QpState, Rereg, SendData, SendOp, WcOpcode,
};
use rocinante::{
    Access, ConnectOptions, Context, Mr, OpenOptions, Qp, RecvWr, VerbsError, WcStatus,
};
use rocinante_netdev::sim::{SimConfig, SimNet};
use sim::{ADDRESSES, Side, connect, done, send, until, write};

/// Two devices that only the test drives, the second of which meets faults.
fn against(net: &SimNet, fault: &str) -> [Side; 2] {
    let plain = || OpenOptions::new().background(false);
    let options = [plain().fault("off"), plain().fault(fault)];
    let mut addresses = ADDRESSES.iter();
    options.map(|options| {
        let port = net.port(&[*addresses.next().unwrap()], &SimConfig::default()).unwrap();
        Side::with(options, port, "sim")
    })
}

fn faulty(fault: &str) -> Side {
    let [_, faulty] = against(&SimNet::new(), fault);
    faulty
}

/// The number and status of a queue's next `count` completions.
fn completed(sides: &[Side; 2], of: usize, count: usize) -> Vec<(u64, WcStatus)> {
    let mut all = Vec::new();
    until("all is completed", || {
        sides.iter().for_each(|side| side.ctx.progress());
        all.extend(sides[of].cq.poll_one().unwrap().map(|wc| (wc.wr_id, wc.status)));
        all.len() == count
    });
    all
}

fn receive(qp: &Qp, by: &Side, wr_id: u64) {
    qp.post_recv(&[RecvWr { wr_id, sges: &[by.mr.sge(64 * wr_id as usize, 64)] }]).unwrap();
}

fn events(ctx: &Context) -> Vec<AsyncEvent> {
    ctx.progress();
    std::iter::from_fn(|| ctx.poll_async_event()).collect()
}

#[test]
fn the_nth_call_fails_with_its_errno_and_no_other() {
    let side = faulty("verb=ibv_reg_mr+create_cq,nth=4,errno=EMFILE");
    // The side has a queue and a region.
    let allocate = || side.pd.allocate(64, Access::ALL).map(drop);
    allocate().unwrap();
    assert_eq!(side.ctx.create_cq(4).unwrap_err().errno(), libc::EMFILE);
    (0..20).for_each(|_| allocate().unwrap());
}

#[test]
fn each_call_can_fail_and_does_nothing_then() {
    type Call = fn(&[Side; 2], &[Qp; 2], &mut Mr) -> Result<(), VerbsError>;
    let calls: [(&str, Call); 12] = [
        ("alloc_pd", |[_, b], _, _| b.ctx.alloc_pd().allocate(64, Access::NONE).map(drop)),
        ("reg_mr", |[_, b], _, _| b.pd.allocate(64, Access::NONE).map(drop)),
        ("rereg_mr", |_, _, mr| {
            mr.rereg(&Rereg { access: Some(Access::NONE), ..Rereg::default() })
        }),
        ("alloc_mw", |[_, b], _, _| b.pd.alloc_mw(MwType::Type1).map(drop)),
        ("create_comp_channel", |[_, b], _, _| b.ctx.create_comp_channel().map(drop)),
        ("create_cq", |[_, b], _, _| b.ctx.create_cq(8).map(drop)),
        ("resize_cq", |[_, b], _, _| b.cq.resize(512)),
        ("create_srq", |[_, b], _, _| b.pd.create_srq(4, 1).map(drop)),
        ("create_qp", |[_, b], _, _| b.pd.qp(&b.cq, &b.cq).build_reset().map(drop)),
        ("modify_qp", |[_, b], _, _| b.pd.qp(&b.cq, &b.cq).build().map(drop)),
        ("post_send", |[a, _], [_, peer], _| {
            let posted = peer.post(write(1, (a.mr.address(), a.mr.rkey())));
            posted.map_err(VerbsError::from)
        }),
        ("post_recv", |[_, b], [_, peer], _| {
            let posted = peer.post_recv(&[RecvWr { wr_id: 1, sges: &[b.mr.sge(0, 64)] }]);
            posted.map_err(|refused| refused.error.into())
        }),
    ];
    let ah: Call = |[_, b], _, _| b.pd.create_ah(&PeerPath::new(ADDRESSES[0])).map(drop);
    for (verb, call) in calls.into_iter().chain([("create_ah", ah)]) {
        let net = SimNet::new();
        let begin = Instant::now();
        // Late enough that the sides are there.
        let sides = against(&net, &format!("verb={verb},errno=EBUSY,at=100ms"));
        let qps = connect(&sides, 14);
        let mut mr = sides[1].pd.allocate(64, Access::NONE).unwrap();
        if let Err(error) = call(&sides, &qps, &mut mr) {
            assert!(begin.elapsed() >= Duration::from_millis(100), "{verb}: {error}");
        }
        std::thread::sleep(Duration::from_millis(100));
        let before = sides[1].ctx.resources();
        for _ in 0..3 {
            let error = call(&sides, &qps, &mut mr).unwrap_err();
            assert_eq!(error.errno(), libc::EBUSY, "{verb}: {error}");
        }
        assert_eq!(sides[1].ctx.resources(), before, "{verb}");
    }
}

/// A request that a fault refuses is not posted, and the queue is as deep as it was.
#[test]
fn a_queue_that_meets_faults_is_as_deep_as_another() {
    let net = SimNet::new();
    let sides = against(&net, "verb=post_send+post_recv,nth=2,errno=12");
    let [_peer, qp] = connect(&sides, 14);
    let to = (sides[0].mr.address(), sides[0].mr.rkey());
    let list = [write(1, to), write(2, to)];
    qp.post_send(&list).unwrap();
    let refused = qp.post_send(&list).unwrap_err();
    assert_eq!((refused.index, refused.error), (0, PostError::Refused(libc::ENOMEM)));
    qp.post_send_all(&list).unwrap();
    let all = completed(&sides, 1, 4).into_iter().map(|(wr_id, status)| {
        assert_eq!(status, WcStatus::Success);
        wr_id
    });
    assert_eq!(all.collect::<Vec<_>>(), [1, 2, 1, 2]);
    let caps = qp.query().2;
    let posted =
        (0..).take_while(|wr_id| qp.post_recv(&[RecvWr { wr_id: *wr_id, sges: &[] }]).is_ok());
    assert_eq!(posted.count(), caps.max_recv_wr as usize);
}

#[test]
fn a_seed_repeats_the_calls_that_fail() {
    let failed = |seed: u64| {
        let side = faulty(&format!("verb=create_srq,chance=30%,seed={seed}"));
        (0..200).map(|_| side.pd.create_srq(1, 1).is_err()).collect::<Vec<bool>>()
    };
    let one = failed(7);
    assert_eq!(one, failed(7));
    assert_ne!(one, failed(8));
    let count = one.iter().filter(|failed| **failed).count();
    assert!((30..=95).contains(&count), "{count}");
}

#[test]
fn a_completion_becomes_an_error_and_its_queue_pair_breaks() {
    let net = SimNet::new();
    let sides = against(&net, "status=IBV_WC_REM_OP_ERR,wc=rdma-write,nth=3");
    let [peer, qp] = connect(&sides, 14);
    let to = (sides[0].mr.address(), sides[0].mr.rkey());
    receive(&qp, &sides[1], 9);
    let list: Vec<_> = (0..5).map(|wr_id| write(wr_id, to)).collect();
    qp.post_send(&list).unwrap();
    let mut all = completed(&sides, 1, 6);
    all.sort_unstable_by_key(|(wr_id, _)| *wr_id);
    let flushed = WcStatus::WrFlushErr;
    let statuses = [WcStatus::Success, WcStatus::Success, WcStatus::RemOpErr, flushed, flushed];
    let expected = (0..5).zip(statuses).chain([(9, flushed)]);
    assert_eq!(all, expected.collect::<Vec<_>>());
    assert_eq!(qp.state(), QpState::Err);
    // The peer finds out as with hardware: it gets no answer.
    peer.post_send(&[send(1, &[1; 8])]).unwrap();
    assert_eq!(completed(&sides, 0, 1), [(1, WcStatus::RetryExcErr)]);
    // Another queue pair is whole.
    let [_peer, other] = connect(&sides, 14);
    other.post_send(&[write(1, to)]).unwrap();
    assert_eq!(completed(&sides, 1, 1), [(1, WcStatus::Success)]);
}

#[test]
fn a_completion_that_overruns_its_queue_breaks_its_queue_pairs() {
    let net = SimNet::new();
    let sides = against(&net, "event=CQ_ERR,wc=recv,nth=2");
    let [peer, qp] = connect(&sides, 14);
    (0..4).for_each(|wr_id| receive(&qp, &sides[1], wr_id));
    for wr_id in 0..2 {
        assert_eq!(done(&sides, &peer, send(wr_id, &[1; 8])), WcStatus::Success);
    }
    assert_eq!(sides[1].cq.poll_one().unwrap().map(|wc| wc.wr_id), Some(0));
    // The second is lost, and the others are flushed.
    let error = loop {
        match sides[1].cq.poll_one() {
            Ok(wc) => {
                assert!(wc.is_some_and(|wc| wc.wr_id > 1 && wc.status == WcStatus::WrFlushErr));
            }
            Err(error) => break error,
        }
    };
    assert!(error.to_string().contains("overflowed"), "{error}");
    let overflow = AsyncEvent::CqOverflow { cq: sides[1].cq.number() };
    assert!(events(&sides[1].ctx).contains(&overflow));
    assert_eq!(qp.state(), QpState::Err);
}

#[test]
fn messages_find_no_receive_for_a_while_and_then_those_that_are_there() {
    let net = SimNet::new();
    let sides = against(&net, "rnr=60%,seed=2");
    let [peer, qp] = connect(&sides, 14);
    let imm = SendOp::Write {
        remote: sides[1].mr.address(),
        rkey: sides[1].mr.rkey(),
        imm: Some([1; 4]),
    };
    for wr_id in 0..40_u64 {
        receive(&qp, &sides[1], wr_id % 8);
        let data = SendData::Inline(&[wr_id as u8; 8]);
        let op = if wr_id % 3 == 0 { imm } else { SendOp::Send { imm: None } };
        assert_eq!(done(&sides, &peer, sim::request(wr_id, op, data)), WcStatus::Success);
        let wc = sides[1].cq.poll_one().unwrap().expect("it came before its acknowledgement");
        assert_eq!((wc.wr_id, wc.status), (wr_id % 8, WcStatus::Success));
        let is_send = wc.opcode == WcOpcode::Recv;
        assert_eq!(is_send, wr_id % 3 != 0);
        let at = if is_send { 64 * (wr_id as usize % 8) } else { 0 };
        assert_eq!(sides[1].mr.load_byte(at), wr_id as u8, "{wr_id}");
    }
    let refused = sides[1].ctx.counters().transport.send_rnr_err;
    assert!((20..=200).contains(&refused), "{refused}");
}

#[test]
fn a_storm_of_rnr_exhausts_the_retries_of_a_sender() {
    let net = SimNet::new();
    let sides = against(&net, "rnr=1");
    let srq = sides[1].pd.create_srq(4, 1).unwrap();
    for shared in [false, true] {
        let [a, b] = &sides;
        let one = a.pd.qp(&a.cq, &a.cq).max_inline_data(64).build().unwrap();
        let other = b.pd.qp(&b.cq, &b.cq);
        let other = if shared { other.srq(&srq) } else { other }.build().unwrap();
        let ends = [one.endpoint(), other.endpoint()];
        let options = ConnectOptions::default().rnr_retry(2);
        let other = other.connect(&ends[0], &options).unwrap();
        let one = one.connect(&ends[1], &options).unwrap();
        let list = [RecvWr { wr_id: 5, sges: &[b.mr.sge(0, 64)] }];
        if shared {
            srq.post_recv(&list).unwrap();
        } else {
            other.post_recv(&list).unwrap();
        }
        let before = b.ctx.counters().transport.send_rnr_err;
        assert_eq!(done(&sides, &one, send(1, &[1; 8])), WcStatus::RnrRetryExcErr);
        assert_eq!(b.ctx.counters().transport.send_rnr_err - before, 3);
        // The receive is still posted: no message has filled it.
        assert_eq!(b.cq.poll_one().unwrap(), None);
        drop(other);
        assert_eq!(b.cq.poll_one().unwrap(), None);
    }
}

/// The engine holds a message behind a lost packet, and executes it later.
#[test]
fn a_message_that_comes_too_early_finds_no_receive_either() {
    let net = SimNet::new();
    let sides = against(&net, "rnr=1;partition,opcode=rdma-write,for=100ms");
    let [one, other] = sides.each_ref().map(|side| {
        side.pd.qp(&side.cq, &side.cq).access(Access::ALL).max_inline_data(64).build().unwrap()
    });
    let ends = [one.endpoint(), other.endpoint()];
    let options = ConnectOptions::default().rnr_retry(1);
    let other = other.connect(&ends[0], &options).unwrap();
    let one = one.connect(&ends[1], &options).unwrap();
    receive(&other, &sides[1], 5);
    let to = (sides[1].mr.address(), sides[1].mr.rkey());
    one.post_send(&[write(1, to), send(2, &[1; 8])]).unwrap();
    let statuses = [(1, WcStatus::Success), (2, WcStatus::RnrRetryExcErr)];
    assert_eq!(completed(&sides, 0, 2), statuses);
}

#[test]
fn events_come_at_their_times_with_their_consequences() {
    let net = SimNet::new();
    let begin = Instant::now();
    let sides = against(
        &net,
        "event=PORT_ERR,at=150ms,for=150ms;event=GID_CHANGE,at=400ms;event=DEVICE_FATAL,at=500ms",
    );
    // A packet that is lost comes again after half a millisecond, seven times.
    let [qp, _peer] = connect(&sides, 7);
    let at =
        |ms: u64| (begin + Duration::from_millis(ms)).saturating_duration_since(Instant::now());
    let next = |expected: &[AsyncEvent]| {
        let mut found = Vec::new();
        until("the events come", || {
            found.extend(events(&sides[1].ctx));
            found.len() >= expected.len()
        });
        assert_eq!(found, expected);
    };
    let to = (sides[1].mr.address(), sides[1].mr.rkey());
    next(&[AsyncEvent::PortErr]);
    assert!(begin.elapsed() >= Duration::from_millis(150));
    let lost = done(&sides, &qp, write(1, to));
    if at(300) > Duration::ZERO {
        assert_eq!(lost, WcStatus::RetryExcErr, "nothing passes a port that is down");
    }
    next(&[AsyncEvent::PortActive]);
    let [qp, broken] = connect(&sides, 14);
    if at(500) > Duration::from_millis(50) {
        assert_eq!(done(&sides, &qp, write(2, to)), WcStatus::Success);
    }
    next(&[AsyncEvent::GidChange]);
    next(&[AsyncEvent::DeviceFatal]);
    assert_eq!(broken.state(), QpState::Err);
    assert!(sides[1].cq.poll_one().unwrap_err().to_string().contains("gone"));
}

#[test]
fn a_device_that_stalls_goes_on() {
    let net = SimNet::new();
    let begin = Instant::now();
    let sides = against(&net, "stall,at=100ms,for=400ms");
    let [qp, _peer] = connect(&sides, 20);
    let to = (sides[1].mr.address(), sides[1].mr.rkey());
    std::thread::sleep(Duration::from_millis(200));
    // Polls find no completion, and do not block.
    let poll = Instant::now();
    assert_eq!(sides[1].cq.poll_one().unwrap(), None);
    assert!(poll.elapsed() < Duration::from_millis(100) || begin.elapsed().as_millis() > 400);
    assert_eq!(done(&sides, &qp, write(1, to)), WcStatus::Success);
    assert!(begin.elapsed() >= Duration::from_millis(490), "{:?}", begin.elapsed());
    sides[1].pd.allocate(64, Access::NONE).unwrap();
}

#[test]
fn the_log_names_each_call_and_its_fault() {
    let path = std::env::temp_dir().join(format!("device-faults-{}", std::process::id()));
    let plain = || OpenOptions::new().background(false).fault_log(&path);
    let net = SimNet::new();
    let port = net.port(&[ADDRESSES[0]], &SimConfig::default()).unwrap();
    let fault = "verb=create_srq,nth=2;event=GID_CHANGE;seed=4";
    let side = Side::with(plain().fault(fault), port, "sim");
    side.pd.create_srq(1, 1).unwrap();
    assert_eq!(side.pd.create_srq(1, 1).unwrap_err().errno(), libc::ENOMEM);
    until("the event came", || events(&side.ctx) == [AsyncEvent::GidChange]);
    let text = fs::read_to_string(&path).unwrap();
    fs::remove_file(&path).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    let first = lines.remove(0);
    assert!(first.contains(r#""seed":4"#) && first.contains(r#""port":null"#), "{first}");
    lines.sort_unstable_by_key(|line| line.contains("GID_CHANGE"));
    for (line, parts) in lines.iter().zip([
        [r#""what":"call""#, r#""name":"create_srq""#, r#""nth":2"#, r#""did":["ENOMEM"]"#],
        [r#""what":"event""#, r#""rule":1"#, r#""qp":null"#, r#""did":["GID_CHANGE"]"#],
    ]) {
        assert!(parts.iter().all(|part| line.contains(part)), "{line}");
    }
    assert_eq!(lines.len(), 2, "{text}");
}
