//! The software device. Its engine and its port are reduced to the behaviour that the threads can
//! observe.

#[path = "../../../../verbs-api/soft/src/announce.rs"]
pub mod announce;
#[path = "../../../../verbs-api/soft/src/events.rs"]
mod events;
#[path = "../../../../verbs-api/soft/src/front.rs"]
pub mod front;
mod gids;
#[path = "../../../../verbs-api/soft/src/mail.rs"]
mod mail;
#[path = "../../../../verbs-api/soft/src/posting.rs"]
mod posting;
pub mod progress;
pub mod shard;
#[path = "../../../../verbs-api/soft/src/staging.rs"]
mod staging;

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use rocinante_stack::types::Qpn;
use rocinante_stack::verbs::{Cqe, QpState, RecvWr, SendData, SendOp, SendWr};

use self::announce::{ChannelShared, CqShared};
use self::events::{Events, Inbox};
use self::front::QpShared;
use self::mail::Command;
use self::progress::Core;
use self::shard::{Engine, Shard, host};
use self::staging::Staging;
use crate::model::qp::{PostListError, QpCaps, SendRules};
use crate::provider::wake::{self, BorrowedFd, OwnedFd};
use crate::provider::wakers::{Look, Woken, poll_until};

/// A device with a queue pair, and two completion queues with one channel.
#[derive(Debug)]
pub struct Device {
    core: Core,
    /// The asynchronous events of its only context.
    context: Arc<Inbox>,
    staging: Arc<Staging>,
    /// The port's datagrams, and the acknowledgements sent.
    wire: [OwnedFd; 2],
    qp: Arc<QpShared>,
    cq: Arc<CqShared>,
    /// Used by no queue pair.
    other: Arc<CqShared>,
    channel: Arc<ChannelShared>,
}

/// The behaviour of a device's engine with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// The request completes at once, and arriving datagrams need no answer.
    Near,
    /// The request is lost: it completes when its deadline has passed. Arriving datagrams need an
    /// acknowledgement.
    Silent,
}

impl Device {
    pub fn new(peer: Peer) -> Arc<Self> {
        Self::with(peer, true)
    }

    /// The same, for tasks: its queues have no channel.
    pub fn for_tasks(peer: Peer) -> Arc<Self> {
        Self::with(peer, false)
    }

    fn with(peer: Peer, has_channel: bool) -> Arc<Self> {
        let channel = Arc::new(ChannelShared::new().unwrap());
        let of = |id| CqShared::new(id, 16, has_channel.then(|| channel.clone()));
        let [cq, other] = [1, 2].map(|id| Arc::new(of(id)));
        let caps = QpCaps { max_send_wr: 8, max_recv_wr: 8 };
        let qp = Arc::new(QpShared::new(Qpn::default(), SendRules { caps }));
        qp.state.set(QpState::Rts);
        let wire: [OwnedFd; 2] = Default::default();
        let shard = Shard::new(&wire, peer, cq.clone(), qp.clone());
        let staging = shard.router.staging.clone();
        let events = Arc::new(Events::default());
        let context = Arc::new(Inbox::new().unwrap());
        events.join(&context);
        Arc::new(Self {
            staging,
            context,
            core: Core::new(shard, events).unwrap(),
            wire,
            qp,
            cq,
            other,
            channel,
        })
    }

    /// `ibv_post_send`.
    pub fn post_send(&self, wr_id: u64) -> Result<(), PostListError> {
        let (op, data) = (SendOp::Send { imm: None }, SendData::Inline(&[]));
        let wr = SendWr::new(op, data).wr_id(wr_id);
        self.qp.post_send(&self.core, &[wr], self.qp.most_sends())
    }

    /// `ibv_post_recv`.
    pub fn post_recv(&self, wr_id: u64) -> Result<(), PostListError> {
        self.qp.post_recv(&self.core, &[RecvWr { wr_id, sges: &[] }], self.qp.most_recvs())
    }

    /// A reset of the queue pair, as `Qp::modify` does it.
    pub fn reset(&self) {
        let mut shard = self.core.hold();
        shard.take_staged();
        shard.engine.reset();
        self.qp.state.set(QpState::Reset);
        self.qp.forget_posted();
    }

    /// From RESET to RTS.
    pub fn set_up_again(&self) {
        self.core.hold().engine.set_up_again();
        self.qp.state.set(QpState::Rts);
    }

    /// A call that drives the device and takes no completion.
    pub fn drive(&self) {
        self.core.drive();
    }

    /// A call that drives the device, of a program that may not poll.
    pub fn drive_once(&self) {
        self.core.drive_once();
    }

    /// An operation that needs the lock but drives nothing.
    pub fn hold(&self) {
        drop(self.core.hold());
    }

    /// The body of the background thread.
    pub fn background(&self) {
        self.core.background();
    }

    /// Whether a thread of the program waits on the port.
    pub fn is_waited(&self) -> bool {
        self.core.is_waited()
    }

    /// Whether the background thread drives the device, or will in a moment.
    pub fn is_driven(&self) -> bool {
        !self.core.is_asleep()
    }

    /// Closes the device.
    pub fn shut_down(&self) {
        self.core.shut_down();
    }

    /// `ibv_get_async_event`, without waiting.
    pub fn async_event(&self) -> bool {
        self.context.next().is_some()
    }

    pub fn async_fd(&self) -> BorrowedFd<'_> {
        self.context.fd()
    }

    /// `ibv_poll_cq`.
    pub fn poll(&self) -> Option<Cqe> {
        self.cq.take_one().or_else(|| {
            self.core.drive();
            self.cq.take_one()
        })
    }

    /// `Cq::poll_next` of a task.
    pub fn poll_for_task(&self, cx: &Context<'_>) -> Poll<Cqe> {
        let register = || {
            self.cq.tasks.register(cx);
            self.arm(false);
            Ok::<_, Infallible>(())
        };
        let look = |look| {
            Ok(self.cq.take_one().or_else(|| {
                (look == Look::First).then(|| self.core.drive_for_task())?;
                self.cq.take_one()
            }))
        };
        poll_until(register, look).map(|found| found.unwrap())
    }

    /// Takes a completion from the queue, without driving the device.
    pub fn taken(&self) -> Option<Cqe> {
        self.cq.take_one()
    }

    /// A completion for a thread that polls, and sleeps between as [`block_on`](crate::block_on)
    /// does. Nothing else wakes it.
    pub fn rest(&self, cx: &Context<'_>) -> Poll<Cqe> {
        let register = || {
            let _ = self.cq.rests(cx.waker());
            Ok::<_, Infallible>(())
        };
        poll_until(register, |_| Ok(self.taken())).map(|found| found.unwrap())
    }

    /// `ibv_req_notify_cq`.
    pub fn arm(&self, solicited_only: bool) {
        self.cq.arm(solicited_only);
        self.core.expect();
    }

    /// Completions arrive.
    pub fn complete(&self, completions: &[Cqe]) {
        self.cq.push(completions.iter().copied(), &mut Woken::default());
    }

    /// `ibv_req_notify_cq` on both queues.
    pub fn arm_both(&self) {
        self.cq.arm(false);
        self.other.arm(false);
    }

    /// Completions arrive in the other queue.
    pub fn complete_other(&self, completions: &[Cqe]) {
        self.other.push(completions.iter().copied(), &mut Woken::default());
    }

    /// The number of the completion queue that raised the next event.
    pub fn event_number(&self) -> Option<u64> {
        self.channel.next()
    }

    /// `ibv_get_cq_event`, without waiting.
    pub fn event(&self) -> bool {
        self.channel.next().is_some()
    }

    pub fn channel_fd(&self) -> BorrowedFd<'_> {
        self.channel.fd()
    }

    /// `ibv_get_cq_event` of a program that drives the device while it waits.
    pub fn wait_event(&self) {
        while !self.event() {
            self.core.wait(self.channel.fd(), None);
        }
    }

    /// The same for something else, once.
    pub fn wait_for(&self, fd: BorrowedFd<'_>) {
        self.core.wait(fd, None);
    }

    /// `ibv_get_cq_event` by `poll(2)` in the program's own loop: the background thread drives.
    pub fn sleep_for_event(&self) {
        while !self.event() {
            wake::wait(None, self.channel.fd(), None);
        }
    }

    /// Sleeps on the channel until the request is complete.
    pub fn sleep_until_posted(&self, wr_id: u64) {
        loop {
            self.arm(false);
            while let Some(cqe) = self.taken() {
                if cqe.wr_id == wr_id {
                    return;
                }
            }
            wake::wait(None, self.channel.fd(), None);
            self.event();
        }
    }

    /// Another shard leaves a command in this shard's mailbox.
    pub fn leave_mail(&self) {
        self.staging.mail.command(Command::Break(Qpn::default()));
        self.core.kick();
    }

    /// `ibv_get_cq_event` of a program that sleeps on several shards.
    pub fn wait_event_of_several(&self) {
        while !self.event() {
            self.core.sleeps();
            wake::wait(None, self.channel.fd(), None);
            self.core.wakes();
        }
    }

    /// Takes `count` completions, and sleeps on several shards while there are none.
    pub fn sleep_on_several_until_completed(&self, count: usize) {
        let mut seen = 0;
        while seen < count {
            self.arm(false);
            let before = seen;
            while self.taken().is_some() {
                seen += 1;
            }
            if seen == before {
                self.core.sleeps();
                wake::wait(None, self.channel.fd(), None);
                self.core.wakes();
                self.event();
            }
        }
    }

    /// A datagram arrives.
    pub fn arrive(&self) {
        wake::notify(&self.wire[0]);
    }

    /// Sleeps until an arrived datagram is acknowledged.
    pub fn sleep_for_acknowledgement(&self) {
        wake::wait(None, &self.wire[1], None);
    }

    /// The requests posted to the engine, in order.
    pub fn posted(&self) -> Vec<u64> {
        self.core.shard.lock().engine.posted.clone()
    }

    /// Posts sends until the queue is full. Returns their number.
    pub fn room(&self) -> usize {
        (0..8).take_while(|_| self.post_send(99).is_ok()).count()
    }
}
