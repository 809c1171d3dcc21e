//! Posting: to the engine on the spot, or, while another thread drives it, to a place where that
//! thread finds the request.

use std::sync::Arc;

use rocinante_stack::verbs::{RecvWr, SendWr};

use super::front::{Backlog, Front, QpShared};
use super::progress::Core;
use crate::model::qp::PostListError;
use crate::provider::sync::MutexGuard;

impl QpShared {
    #[inline]
    pub(super) fn post_send(
        self: &Arc<Self>,
        core: &Core,
        list: &[SendWr<'_>],
        most: u32,
    ) -> Result<(), PostListError> {
        self.post_sends(core, self.front.lock(), list, most)
    }

    /// Posts all requests of a list, or none.
    pub(super) fn post_send_all(
        self: &Arc<Self>,
        core: &Core,
        list: &[SendWr<'_>],
        most: u32,
    ) -> Result<(), PostListError> {
        let front = self.front.lock();
        self.check_sends(&front, list, most)?;
        self.post_sends(core, front, list, most)
    }

    #[inline]
    fn post_sends(
        self: &Arc<Self>,
        core: &Core,
        mut front: MutexGuard<'_, Front>,
        list: &[SendWr<'_>],
        most: u32,
    ) -> Result<(), PostListError> {
        let mut failed = None;
        if let Some(mut guard) = core.shard.try_lock() {
            let shard = &mut *guard;
            // Before the staged requests are posted, too: nothing of them is in flight.
            let urgency = shard.engine.post_urgency(self.qpn());
            front.give(self.qpn(), &mut shard.engine, &mut shard.host);
            let mut count = 0;
            for (index, wr) in list.iter().enumerate() {
                let posted = self
                    .admits_send(&front, most)
                    .and_then(|()| shard.engine.post_send(self.qpn(), wr, &mut shard.host));
                if let Err(error) = posted {
                    failed = Some(PostListError { index, error });
                    break;
                }
                front.sends += 1;
                count += 1;
            }
            drop(front);
            shard.take_staged();
            shard.posted(count, urgency);
            if core.release(guard) {
                core.drive_once();
            }
        } else {
            let mut backlog = self.backlog(core, &mut front);
            for (index, wr) in list.iter().enumerate() {
                if let Err(error) = self.check_send(&front, wr, most) {
                    failed = Some(PostListError { index, error });
                    break;
                }
                backlog.stage_send(wr);
                front.sends += 1;
            }
            front.backlog = Some(backlog);
            self.leave(core, front);
        }
        failed.map_or(Ok(()), Err)
    }

    #[inline]
    pub(super) fn post_recv(
        self: &Arc<Self>,
        core: &Core,
        list: &[RecvWr<'_>],
        most: u32,
    ) -> Result<(), PostListError> {
        let mut front = self.front.lock();
        let mut failed = None;
        if let Some(mut guard) = core.shard.try_lock() {
            let shard = &mut *guard;
            front.give(self.qpn(), &mut shard.engine, &mut shard.host);
            for (index, wr) in list.iter().enumerate() {
                let posted = self
                    .admits_recv(&front, most)
                    .and_then(|()| shard.engine.post_recv(self.qpn(), wr, &mut shard.host));
                if let Err(error) = posted {
                    failed = Some(PostListError { index, error });
                    break;
                }
                front.recvs += 1;
            }
            drop(front);
            shard.deliver();
            if core.release(guard) {
                core.drive_once();
            }
        } else {
            let mut backlog = self.backlog(core, &mut front);
            for (index, wr) in list.iter().enumerate() {
                if let Err(error) = self.check_recv(&front, wr, most) {
                    failed = Some(PostListError { index, error });
                    break;
                }
                backlog.stage_recv(wr);
                front.recvs += 1;
            }
            front.backlog = Some(backlog);
            self.leave(core, front);
        }
        failed.map_or(Ok(()), Err)
    }

    /// Where requests are staged, taken out.
    fn backlog(&self, core: &Core, front: &mut Front) -> Box<Backlog> {
        front.backlog.take().unwrap_or_else(|| core.staging.spare_backlog(self.backlog_max()))
    }

    /// Another thread drives: leaves the staged requests to it.
    fn leave(self: &Arc<Self>, core: &Core, mut front: MutexGuard<'_, Front>) {
        let listed = std::mem::replace(&mut front.listed, true);
        drop(front);
        if !listed {
            core.staging.leave(self);
        }
        core.drive_once();
    }
}
