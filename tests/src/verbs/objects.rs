//! Attributes and events of objects.

use std::os::fd::AsFd;
use std::time::Duration;

use rocinante::verbs::{AsyncEvent, ModifyAttr, Mtu, QpAttr, QpEvent, QpState, SendOp};
use rocinante::{Access, RecvWr, VerbsError};
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};

use crate::harness::{Harness, On, PATIENCE, Setup, woken, wr};
use crate::oracles::is_ready_within;

pub fn a_queue_pair_tells_its_state_and_attributes(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let qp = a.qp().build_reset().unwrap();
    let (state, attr, caps) = qp.query();
    assert_eq!((state, attr.port), (QpState::Reset, None));
    assert!(caps.max_send_wr >= 512 && caps.max_send_sge >= 4 && caps.max_inline_data >= 256);
    let [qp, peer] = harness.pair();
    let (state, attr, _) = qp.query();
    let mtu = a.ctx.query_device().active_mtu.min(b.ctx.query_device().active_mtu);
    assert_eq!((state, attr.dest_qpn, attr.port), (QpState::Rts, Some(peer.qpn()), Some(1)));
    assert_eq!((attr.path_mtu, attr.sq_psn), (Some(mtu), Some(qp.endpoint().psn)));
    assert_eq!(attr.rq_psn, Some(peer.endpoint().psn));
    assert_eq!((attr.retry_cnt, attr.timeout, attr.min_rnr_timer), (Some(7), Some(14), Some(12)));
    assert_eq!(attr.peer.unwrap().remote, b.address);
    assert!(mtu >= Mtu::Mtu256 && a.cq.depth() >= crate::harness::CQ_DEPTH as usize);
}

pub fn a_region_tells_what_it_permits(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, _] = &harness.sides;
    let region = a.pd.allocate(8192, Access::LOCAL_WRITE | Access::REMOTE_WRITE).unwrap();
    let start = region.address();
    assert!(region.check(start, 8192, Access::REMOTE_WRITE).is_ok());
    assert!(region.check(start + 1, 8192, Access::REMOTE_WRITE).is_err());
    assert!(region.check(start - 1, 1, Access::REMOTE_WRITE).is_err());
    assert!(region.check(start, 1, Access::REMOTE_READ).is_err());
    let error = a.pd.allocate(16, Access::REMOTE_WRITE).unwrap_err();
    assert!(matches!(error, VerbsError::Invalid(_)), "{error}");
}

pub fn a_drained_queue_says_so(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let [qp, _peer] = harness.pair();
    let target = b.pd.allocate(4096, Access::ALL).unwrap();
    let source = a.pd.allocate(4096, Access::NONE).unwrap();
    assert_eq!(a.ctx.poll_async_event(), None);
    let write = SendOp::Write { remote: target.address(), rkey: target.rkey(), imm: None };
    qp.post_send(&[wr(1, write, &[source.sge(0, 4096)])]).unwrap();
    qp.modify(&drain()).unwrap();
    let epoll = Epoll::new(&[(a.ctx.async_fd(), 7)]);
    assert_eq!(epoll.wait(PATIENCE), Some(7));
    let drained = AsyncEvent::Qp { qpn: qp.qpn(), event: QpEvent::SqDrained };
    assert_eq!(a.ctx.poll_async_event(), Some(drained));
    assert_eq!(a.ctx.poll_async_event(), None);
    assert_eq!(epoll.wait(Duration::ZERO), None);
    // The requests that were not begun are done when the queue goes on; on Soft-RoCE only once
    // another request is posted.
    qp.modify(&ModifyAttr::state(QpState::Rts)).unwrap();
    qp.post_send(&[wr(2, write, &[])]).unwrap();
    a.succeed(1);
    a.succeed(2);
}

/// To SQD, with an event when the queue has drained.
fn drain() -> ModifyAttr {
    let (state, sqd_async_notify) = (Some(QpState::Sqd), Some(true));
    ModifyAttr { attr: QpAttr { state, sqd_async_notify, ..QpAttr::default() }, path: None }
}

/// Two queues share a channel, and both raise an event before the program looks. The descriptor
/// stays readable until both events are taken.
pub fn a_descriptor_is_ready_until_the_last_event_is_taken(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let channel = b.channel();
    let cqs = [0, 1].map(|_| b.ctx.create_cq_with(16, &channel).unwrap());
    let make = |cq| b.pd.qp(cq, cq).access(Access::ALL).build().unwrap();
    let pairs = cqs.each_ref().map(|cq| harness.connect([a.qp().build().unwrap(), make(cq)]));
    for (cq, [qp, peer]) in cqs.iter().zip(&pairs) {
        cq.req_notify(false).unwrap();
        peer.post_recv(&[RecvWr { wr_id: 1, sges: &[] }]).unwrap();
        qp.post_send(&[wr(2, SendOp::Send { imm: None }, &[])]).unwrap();
        a.succeed(2);
    }
    // Both have raised their events: nothing is in flight any more.
    harness.rests();
    let first = woken(&channel);
    let second = woken(&channel);
    assert!(first != second && cqs.contains(&first) && cqs.contains(&second));
    assert!(channel.try_event().is_none());
}

/// A queue goes with its event not taken: the descriptor is readable no more, unless another queue
/// has an event.
pub fn a_queue_that_goes_takes_its_event_along(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let channel = b.channel();
    let tells = || {
        let cq = b.ctx.create_cq_with(16, &channel).unwrap();
        let its = b.pd.qp(&cq, &cq).access(Access::ALL).build().unwrap();
        let [qp, peer] = harness.connect([a.qp().build().unwrap(), its]);
        cq.req_notify(false).unwrap();
        peer.post_recv(&[RecvWr { wr_id: 1, sges: &[] }]).unwrap();
        qp.post_send(&[wr(2, SendOp::Send { imm: None }, &[])]).unwrap();
        a.succeed(2);
        harness.rests();
        (cq, [qp, peer])
    };
    let (first, pair) = tells();
    assert!(is_ready_within(&channel, PATIENCE));
    drop((pair, first));
    assert!(!is_ready_within(&channel, Duration::ZERO));
    let (gone, pair) = tells();
    let (stays, _other) = tells();
    drop((pair, gone));
    assert!(woken(&channel) == stays);
    assert!(!is_ready_within(&channel, Duration::ZERO));
}

/// One thread waits for two queues' channels and for both devices' asynchronous events, as a server
/// does.
pub fn channels_and_events_are_waited_for_together(on: On) {
    const SEND: SendOp = SendOp::Send { imm: None };
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let channels = [a, b].map(|side| side.channel());
    let cqs = [0, 1].map(|at| {
        harness.sides[at].ctx.create_cq_with(64, &channels[at]).expect("a queue with a channel")
    });
    let make = |at: usize| {
        harness.sides[at].pd.qp(&cqs[at], &cqs[at]).access(Access::ALL).build().unwrap()
    };
    let [qp, peer] = harness.connect([make(0), make(1)]);
    let epoll = Epoll::new(&[
        (channels[0].as_fd(), 0),
        (channels[1].as_fd(), 1),
        (a.ctx.async_fd(), 2),
        (b.ctx.async_fd(), 3),
    ]);
    for round in 0..20 {
        peer.post_recv(&[RecvWr { wr_id: round, sges: &[] }]).unwrap();
        cqs.iter().for_each(|cq| cq.req_notify(false).unwrap());
        assert_eq!(epoll.wait(Duration::ZERO), None);
        qp.post_send(&[wr(round, SEND, &[])]).unwrap();
        // The receiver's completion and the sender's, in either order.
        let mut woken = [false; 2];
        while woken != [true; 2] {
            let at = epoll.wait(PATIENCE).expect("one is woken") as usize;
            assert!(!woken[at], "{at} is woken twice");
            assert!(channels[at].try_event().is_some_and(|cq| cq == cqs[at]));
            assert_eq!(cqs[at].poll_one().unwrap().map(|wc| wc.wr_id), Some(round));
            woken[at] = true;
        }
    }
    qp.modify(&drain()).unwrap();
    assert_eq!(epoll.wait(PATIENCE), Some(2));
    let drained = AsyncEvent::Qp { qpn: qp.qpn(), event: QpEvent::SqDrained };
    assert_eq!(a.ctx.poll_async_event(), Some(drained));
    assert_eq!(epoll.wait(Duration::ZERO), None);
}

/// Descriptors, each with a number.
struct Epoll(std::os::fd::OwnedFd);

impl Epoll {
    fn new(of: &[(std::os::fd::BorrowedFd<'_>, u64)]) -> Self {
        let epoll = epoll::create(CreateFlags::CLOEXEC).unwrap();
        for (fd, number) in of {
            epoll::add(&epoll, fd, EventData::new_u64(*number), EventFlags::IN).unwrap();
        }
        Self(epoll)
    }

    /// The number of a readable descriptor.
    fn wait(&self, timeout: Duration) -> Option<u64> {
        let timeout = Timespec::try_from(timeout).unwrap();
        let mut events = [Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }];
        let ready = epoll::wait(&self.0, &mut events[..], Some(&timeout)).unwrap();
        // A copy: the kernel's structure is packed.
        let data = events[0].data;
        (ready == 1).then(|| data.u64())
    }
}
