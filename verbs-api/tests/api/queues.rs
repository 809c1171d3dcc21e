//! Completion queues that change, and lists that are posted wholly or not at all.

use crate::sim::{Side, connect, done, send, undriven, until};
use rocinante::verbs::{ModifyAttr, PostError, QpState};
use rocinante::{Qp, RecvWr, SendWr, VerbsError, WcStatus};
use rustix::event::epoll;

/// Exponent of the ACK timeout: about four seconds.
const TIMEOUT: u8 = 20;

/// Posts SENDs to a peer with receives for them, and returns once all are acknowledged.
fn exchange(sides: &[Side; 2], [qp, peer]: &[Qp; 2], wr_ids: &[u64]) {
    for wr_id in wr_ids {
        peer.post_recv(&[RecvWr { wr_id: *wr_id, sges: &[sides[1].mr.sge(0, 8)] }]).unwrap();
        qp.post_send(&[send(*wr_id, &[1; 8])]).unwrap();
    }
    let mut count = 0;
    until("the SENDs", || {
        sides[1].ctx.progress();
        count += usize::from(sides[0].cq.poll_one().unwrap().is_some());
        count == wr_ids.len()
    });
}

fn taken(side: &Side) -> Vec<u64> {
    std::iter::from_fn(|| side.cq.poll_one().unwrap()).map(|wc| wc.wr_id).collect()
}

#[test]
fn a_queue_is_resized_and_keeps_what_is_in_it() {
    let sides = undriven();
    let (small, other) = (sides[1].ctx.create_cq(2).unwrap(), sides[1].ctx.create_cq(2).unwrap());
    let max = sides[1].ctx.query_device().limits.max_cqe;
    for depth in [0, max + 1] {
        assert_eq!(small.resize(depth).unwrap_err().errno(), 22);
    }
    small.resize(5).unwrap();
    assert_eq!((small.depth(), other.depth()), (5, 2));
    let peer = sides[1].pd.qp(&small, &small).build().unwrap();
    let qp = sides[0].pd.qp(&sides[0].cq, &sides[0].cq).max_inline_data(64).build().unwrap();
    let ends = [qp.endpoint(), peer.endpoint()];
    let options = rocinante::ConnectOptions::default().timeout(TIMEOUT);
    let pair = [qp.connect(&ends[1], &options).unwrap(), peer.connect(&ends[0], &options).unwrap()];
    exchange(&sides, &pair, &[1, 2, 3]);
    let error = small.resize(2).unwrap_err();
    assert!(matches!(error, VerbsError::Invalid(_)) && small.depth() == 5, "{error}");
    small.resize(3).unwrap();
    let seen = std::iter::from_fn(|| small.poll_one().unwrap()).map(|wc| wc.wr_id);
    assert_eq!(seen.collect::<Vec<_>>(), [1, 2, 3]);
    // Full is full at the new depth.
    exchange(&sides, &pair, &[4, 5, 6]);
    small.resize(4).unwrap();
    exchange(&sides, &pair, &[7]);
    assert_eq!(small.wait_one(crate::sim::PATIENCE).unwrap().wr_id, 4);
    small.resize(3).unwrap();
    pair[1].post_recv(&[RecvWr { wr_id: 8, sges: &[] }]).unwrap();
    pair[1].modify(&ModifyAttr::state(QpState::Err)).unwrap();
    let seen: Vec<_> = std::iter::from_fn(|| small.poll_one().ok().flatten()).collect();
    assert_eq!(seen.iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [5, 6, 7]);
    assert!(matches!(small.poll_one(), Err(VerbsError::Busy(_))), "it overflowed");
}

#[test]
fn completions_of_a_reset_or_destroyed_queue_pair_leave_the_queue() {
    let sides = undriven();
    let [first, second, third] = [(); 3].map(|()| connect(&sides, TIMEOUT));
    exchange(&sides, &first, &[1]);
    exchange(&sides, &second, &[2]);
    exchange(&sides, &third, &[3]);
    exchange(&sides, &first, &[4]);
    let [_first, reset] = first;
    reset.modify(&ModifyAttr::state(QpState::Reset)).unwrap();
    let [_third, destroyed] = third;
    drop(destroyed);
    assert_eq!(taken(&sides[1]), [2]);
    // Those that an error leaves are the program's.
    let [_second, broken] = second;
    broken.post_recv(&[RecvWr { wr_id: 5, sges: &[] }]).unwrap();
    broken.modify(&ModifyAttr::state(QpState::Err)).unwrap();
    assert_eq!(taken(&sides[1]), [5]);
}

#[test]
fn each_event_is_an_edge() {
    let sides = undriven();
    let channel = sides[1].ctx.create_comp_channel().unwrap();
    let queues = [(); 2].map(|()| sides[1].ctx.create_cq_with(8, &channel).unwrap());
    let pairs = queues.each_ref().map(|cq| {
        let peer = sides[1].pd.qp(cq, cq).build().unwrap();
        let qp = sides[0].pd.qp(&sides[0].cq, &sides[0].cq).max_inline_data(64).build().unwrap();
        let ends = [qp.endpoint(), peer.endpoint()];
        let options = rocinante::ConnectOptions::default().timeout(TIMEOUT);
        [qp.connect(&ends[1], &options).unwrap(), peer.connect(&ends[0], &options).unwrap()]
    });
    let poller = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let interest = epoll::EventFlags::IN | epoll::EventFlags::ET;
    epoll::add(&poller, &channel, epoll::EventData::new_u64(1), interest).unwrap();
    let edges = || {
        let mut room = Vec::with_capacity(4);
        let now = rustix::event::Timespec::default();
        epoll::wait(&poller, rustix::buffer::spare_capacity(&mut room), Some(&now)).unwrap();
        room.len()
    };
    queues.iter().for_each(|cq| cq.req_notify(false).unwrap());
    exchange(&sides, &pairs[0], &[1]);
    assert_eq!((edges(), edges()), (1, 0));
    // The program has not taken the first event.
    exchange(&sides, &pairs[1], &[2]);
    assert_eq!((edges(), edges()), (1, 0));
    let taken: Vec<u32> =
        std::iter::from_fn(|| channel.try_event()).map(|cq| cq.number()).collect();
    assert_eq!(taken, queues.each_ref().map(rocinante::Cq::number));
    // An event that was taken holds its queue.
    queues[0].req_notify(false).unwrap();
    exchange(&sides, &pairs[0], &[3]);
    let event = channel.try_event().unwrap();
    drop(pairs);
    let [first, second] = queues;
    let first = first.destroy().unwrap_err();
    assert!(matches!(first.error, VerbsError::Busy(_)), "{first}");
    second.destroy().unwrap();
    drop(event);
    first.value.destroy().unwrap();
}

#[test]
fn a_list_is_posted_wholly_or_not_at_all() {
    let sides = undriven();
    let [qp, peer] = connect(&sides, TIMEOUT);
    let (long, fits) = ([0; 65], [0; 64]);
    let lists: [(&[SendWr<'_>], _, _); 2] = [
        (&[send(1, &fits), send(2, &fits), send(3, &long)], 2, PostError::InlineTooLong),
        (&[send(1, &fits); 513], 512, PostError::Full),
    ];
    for (list, at, why) in lists {
        let refused = qp.post_send_all(list).unwrap_err();
        assert_eq!((refused.index, refused.error), (at, why));
    }
    for _ in 0..3 {
        peer.post_recv(&[RecvWr { wr_id: 7, sges: &[sides[1].mr.sge(0, 64)] }]).unwrap();
    }
    // Nothing of those lists was posted: the next is all that the peer gets.
    qp.post_send_all(&[send(4, &fits), send(5, &fits)]).unwrap();
    assert_eq!(done(&sides, &qp, send(6, &fits)), WcStatus::Success, "request 4");
    // `done` took the first of them.
    let mut rest = Vec::new();
    until("the others", || {
        sides[1].ctx.progress();
        rest.extend(taken(&sides[0]));
        rest.len() == 2
    });
    assert_eq!((rest, taken(&sides[1]).len()), (vec![5, 6], 3));
    qp.modify(&ModifyAttr::state(QpState::Reset)).unwrap();
    let refused = qp.post_send_all(&[send(9, &fits)]).unwrap_err();
    assert!(refused.index == 0 && refused.error == PostError::State, "{refused}");
    qp.post_send_all(&[]).unwrap();
}
