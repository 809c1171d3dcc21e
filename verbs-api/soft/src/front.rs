//! The posting side of a queue pair: the checks before the engine sees a request, and the place
//! where requests wait while another thread drives the engine.

use rocinante_stack::PostError;
use rocinante_stack::mem::Sge;
use rocinante_stack::types::Qpn;
use rocinante_stack::verbs::{QpState, RecvWr, SendData, SendOp, SendWr};

use super::Engine;
use super::host::Host;
use crate::model::qp::{PostListError, QpCaps, SendRules};
use crate::provider::state::StateCell;
use crate::provider::sync::{AtomicU64, Mutex, Ordering};

/// The state that the threads that post and the thread that drives share.
#[derive(Debug)]
pub(crate) struct QpShared {
    qpn: Qpn,
    pub(super) front: Mutex<Front>,
    pub(crate) send_retired: AtomicU64,
    pub(crate) recv_retired: AtomicU64,
    pub(super) state: StateCell,
    rules: SendRules,
    /// Faults decide on each call that posts sends, or receives.
    judged: [bool; 2],
}

/// The posting side.
#[derive(Debug, Default)]
pub(super) struct Front {
    pub(super) sends: u64,
    pub(super) recvs: u64,
    /// Staged requests; `None` while there are none.
    pub(super) backlog: Option<Box<Backlog>>,
    /// In the list of queue pairs with staged work.
    pub(super) listed: bool,
}

/// Work requests that could not be given to the engine at once.
/// [`Staging`](super::staging::Staging) has some for the queue pairs that need them.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    staged: Vec<Staged>,
    sges: Vec<Sge>,
    inline: Vec<u8>,
}

impl Backlog {
    /// Makes room for `requests` requests with one element each.
    pub(super) fn reserve(&mut self, requests: usize) {
        self.staged.reserve(requests.saturating_sub(self.staged.len()));
        self.sges.reserve(requests.saturating_sub(self.sges.len()));
    }

    pub(super) fn clear(&mut self) {
        self.staged.clear();
        self.sges.clear();
        self.inline.clear();
    }
}

/// A work request that could not be given to the engine at once; its lists are in the arenas of
/// [`Backlog`].
#[derive(Debug, Clone, Copy)]
enum Staged {
    Send { wr_id: u64, op: SendOp, sges: u32, inline: Option<u32>, flags: [bool; 3] },
    Recv { wr_id: u64, sges: u32 },
}

impl QpShared {
    pub(super) fn new(qpn: Qpn, rules: SendRules) -> Self {
        Self {
            qpn,
            front: Mutex::new(Front::default()),
            send_retired: AtomicU64::new(0),
            recv_retired: AtomicU64::new(0),
            state: StateCell::default(),
            judged: [false; 2],
            rules,
        }
    }

    /// Faults decide on calls that post sends, or receives.
    pub(super) fn judged(mut self, judged: [bool; 2]) -> Self {
        self.judged = judged;
        self
    }

    /// The most sends; none where faults decide on each call.
    #[inline]
    pub(super) fn most_sends(&self) -> u32 {
        if self.judged[0] { 0 } else { self.rules.caps.max_send_wr }
    }

    /// The most receives, likewise.
    #[inline]
    pub(super) fn most_recvs(&self) -> u32 {
        if self.judged[1] { 0 } else { self.rules.caps.max_recv_wr }
    }

    pub(crate) fn qpn(&self) -> Qpn {
        self.qpn
    }

    pub(super) fn caps(&self) -> QpCaps {
        self.rules.caps
    }

    /// The number of staged requests to have room for.
    pub(super) fn backlog_max(&self) -> usize {
        let caps = self.rules.caps;
        // Requests are staged only while another thread drives: that is worth no more than this.
        ((caps.max_send_wr + caps.max_recv_wr) as usize).min(4096)
    }

    /// A reset forgets all work without completing it.
    pub(super) fn forget_posted(&self) {
        let mut front = self.front.lock();
        front.clear();
        self.send_retired.store(front.sends, Ordering::Relaxed);
        self.recv_retired.store(front.recvs, Ordering::Relaxed);
    }

    /// Gives staged requests to the engine, and returns their memory.
    pub(super) fn post_staged(&self, engine: &mut Engine, host: &mut Host) -> Option<Box<Backlog>> {
        let mut front = self.front.lock();
        front.give(self.qpn, engine, host);
        front.backlog.take()
    }

    /// Whether the queue takes all requests of a list.
    pub(super) fn check_sends(
        &self,
        front: &Front,
        list: &[SendWr<'_>],
        most: u32,
    ) -> Result<(), PostListError> {
        for (index, wr) in list.iter().enumerate() {
            self.admits_after(front, index as u64, most)
                .and_then(|()| self.rules.check(wr))
                .map_err(|error| PostListError { index, error })?;
        }
        Ok(())
    }

    /// Whether the queue, of `most` requests, takes a send request now. The engine checks the
    /// request itself when it is posted to it.
    pub(super) fn admits_send(&self, front: &Front, most: u32) -> Result<(), PostError> {
        self.admits_after(front, 0, most)
    }

    /// The same, for a request that follows `before` others.
    #[inline]
    fn admits_after(&self, front: &Front, before: u64, most: u32) -> Result<(), PostError> {
        if !self.state.get().takes_sends() {
            return Err(PostError::State);
        }
        let out = front.sends + before - self.send_retired.load(Ordering::Relaxed);
        if out >= u64::from(most) {
            return Err(PostError::Full);
        }
        Ok(())
    }

    /// The same, and checks the request: it is staged, and reaches the engine after the call.
    pub(super) fn check_send(
        &self,
        front: &Front,
        wr: &SendWr<'_>,
        most: u32,
    ) -> Result<(), PostError> {
        self.admits_send(front, most)?;
        self.rules.check(wr)
    }

    /// Whether the queue takes a receive request now, as [`admits_send`](Self::admits_send) says of
    /// send requests.
    pub(super) fn admits_recv(&self, front: &Front, most: u32) -> Result<(), PostError> {
        if self.state.get() == QpState::Reset {
            return Err(PostError::State);
        }
        let out = front.recvs - self.recv_retired.load(Ordering::Relaxed);
        if out >= u64::from(most) {
            return Err(PostError::Full);
        }
        Ok(())
    }

    /// The same, and checks the request, as [`check_send`](Self::check_send) does.
    pub(super) fn check_recv(
        &self,
        front: &Front,
        wr: &RecvWr<'_>,
        most: u32,
    ) -> Result<(), PostError> {
        self.admits_recv(front, most)?;
        self.rules.caps.check_recv(wr)
    }
}

impl Backlog {
    pub(super) fn stage_send(&mut self, wr: &SendWr<'_>) {
        let (sges, inline) = match wr.data {
            SendData::Sges(list) => {
                self.sges.extend_from_slice(list);
                (list.len() as u32, None)
            }
            SendData::Inline(bytes) => {
                self.inline.extend_from_slice(bytes);
                (0, Some(bytes.len() as u32))
            }
        };
        let flags = [wr.signaled, wr.solicited, wr.fence];
        self.staged.push(Staged::Send { wr_id: wr.wr_id, op: wr.op, sges, inline, flags });
    }

    pub(super) fn stage_recv(&mut self, wr: &RecvWr<'_>) {
        self.sges.extend_from_slice(wr.sges);
        self.staged.push(Staged::Recv { wr_id: wr.wr_id, sges: wr.sges.len() as u32 });
    }
}

impl Front {
    /// Gives staged requests to the engine. They were checked when they were posted; an engine that
    /// refuses one now has been reset meanwhile, and forgets it as a reset does.
    pub(super) fn give(&mut self, qpn: Qpn, engine: &mut Engine, host: &mut Host) {
        self.listed = false;
        if let Some(backlog) = &mut self.backlog {
            backlog.give(qpn, engine, host);
        }
    }

    pub(super) fn clear(&mut self) {
        if let Some(backlog) = &mut self.backlog {
            backlog.clear();
        }
    }
}

impl Backlog {
    fn give(&mut self, qpn: Qpn, engine: &mut Engine, host: &mut Host) {
        let (mut sge, mut byte) = (0, 0);
        for staged in &self.staged {
            match *staged {
                Staged::Send { wr_id, op, sges, inline, flags } => {
                    let list = &self.sges[sge..sge + sges as usize];
                    sge += sges as usize;
                    let data = match inline {
                        None => SendData::Sges(list),
                        Some(len) => {
                            let bytes = &self.inline[byte..byte + len as usize];
                            byte += len as usize;
                            SendData::Inline(bytes)
                        }
                    };
                    let [signaled, solicited, fence] = flags;
                    let mut wr = SendWr::new(op, data).wr_id(wr_id).signaled(signaled);
                    wr.solicited = solicited;
                    wr.fence = fence;
                    let _ = engine.post_send(qpn, &wr, host);
                }
                Staged::Recv { wr_id, sges } => {
                    let list = &self.sges[sge..sge + sges as usize];
                    sge += sges as usize;
                    let wr = RecvWr { wr_id, sges: list };
                    let _ = engine.post_recv(qpn, &wr, host);
                }
            }
        }
        self.clear();
    }
}
