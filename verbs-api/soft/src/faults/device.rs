//! Faults of the device: its decisions, and the thread that brings events and stalls.

use std::net::IpAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rocinante_netdev::fault::{DeviceFaults as Decisions, Happening, Plan, Trouble};
use rocinante_stack::Datagram;
use rocinante_stack::verbs::{Cqe, WcOpcode, WcStatus};
use rocinante_stack::wire::{Opcode, OpcodeInfo, Operation, Place, Service};

use crate::model::error::VerbsError;
use crate::model::event::AsyncEvent;
use crate::progress::{Core, Held};
use crate::provider::wake;
use crate::provider::wakers::Woken;
use crate::provider::worker::Worker;

/// A call that may fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    AllocPd,
    RegMr,
    ReregMr,
    AllocMw,
    CreateChannel,
    CreateCq,
    ResizeCq,
    CreateSrq,
    CreateQp,
    ModifyQp,
    CreateAh,
    PostSend,
    PostRecv,
}

/// All calls, by the number of each, with their names in `verbs.h` without `ibv_`.
pub(super) const VERBS: [(Verb, &str); 13] = [
    (Verb::AllocPd, "alloc_pd"),
    (Verb::RegMr, "reg_mr"),
    (Verb::ReregMr, "rereg_mr"),
    (Verb::AllocMw, "alloc_mw"),
    (Verb::CreateChannel, "create_comp_channel"),
    (Verb::CreateCq, "create_cq"),
    (Verb::ResizeCq, "resize_cq"),
    (Verb::CreateSrq, "create_srq"),
    (Verb::CreateQp, "create_qp"),
    (Verb::ModifyQp, "modify_qp"),
    (Verb::CreateAh, "create_ah"),
    (Verb::PostSend, "post_send"),
    (Verb::PostRecv, "post_recv"),
];

/// Operations that complete, by their numbers in a plan.
pub(super) const KINDS: [WcOpcode; 11] = [
    WcOpcode::Send,
    WcOpcode::RdmaWrite,
    WcOpcode::RdmaRead,
    WcOpcode::CompSwap,
    WcOpcode::FetchAdd,
    WcOpcode::Flush,
    WcOpcode::AtomicWrite,
    WcOpcode::BindMw,
    WcOpcode::LocalInv,
    WcOpcode::Recv,
    WcOpcode::RecvRdmaWithImm,
];

/// Failures of a completion, by their numbers in a plan.
pub(super) const STATUSES: [WcStatus; 16] = [
    WcStatus::LocLenErr,
    WcStatus::LocQpOpErr,
    WcStatus::LocProtErr,
    WcStatus::WrFlushErr,
    WcStatus::MwBindErr,
    WcStatus::BadRespErr,
    WcStatus::LocAccessErr,
    WcStatus::RemInvReqErr,
    WcStatus::RemAccessErr,
    WcStatus::RemOpErr,
    WcStatus::RetryExcErr,
    WcStatus::RnrRetryExcErr,
    WcStatus::RemAbortErr,
    WcStatus::FatalErr,
    WcStatus::RespTimeoutErr,
    WcStatus::GeneralErr,
];

/// The faults of a device.
#[derive(Debug)]
pub struct DeviceFaults {
    began: Instant,
    decisions: Mutex<Decisions>,
    /// A bit for each call that may fail.
    verbs: u32,
    has_completions: bool,
    has_unready: bool,
}

impl DeviceFaults {
    /// The faults of a device with this address; `None` if there are none. Error: the log cannot
    /// be written.
    pub(super) fn new(
        plan: (&Plan, u64),
        device: IpAddr,
        log: Option<&Path>,
    ) -> std::io::Result<Option<Arc<Self>>> {
        let Some(decisions) = Decisions::new(plan, device, log)? else { return Ok(None) };
        let bit =
            |(verb, _): &(Verb, &str)| u32::from(decisions.has_calls(*verb as u8)) << *verb as u32;
        Ok(Some(Arc::new(Self {
            began: Instant::now(),
            verbs: VERBS.iter().map(bit).sum(),
            has_completions: decisions.has_completions(),
            has_unready: decisions.has_unready(),
            decisions: Mutex::new(decisions),
        })))
    }

    /// Whether some of these calls fail.
    pub(crate) fn judges(&self, verb: Verb) -> bool {
        self.verbs >> verb as u32 & 1 == 1
    }

    /// The errno of a call, if it fails.
    pub(crate) fn fails(&self, verb: Verb) -> Option<i32> {
        if !self.judges(verb) {
            return None;
        }
        let (_, name) = VERBS[verb as usize];
        self.decisions.lock().call(self.began.elapsed(), (verb as u8, name))
    }

    /// Whether completions are to be [changed](Self::change).
    pub(crate) fn judges_completions(&self) -> bool {
        self.has_completions
    }

    /// Whether packets may find [no receive](Self::is_unready).
    pub(crate) fn judges_receives(&self) -> bool {
        self.has_unready
    }

    /// Decides on a completion without an error. Returns whether its queue overruns instead.
    pub(crate) fn change(&self, cqe: &mut Cqe) -> bool {
        let Some(kind) = KINDS.iter().position(|kind| *kind == cqe.opcode) else { return false };
        let (of, qp) = ((kind as u8, cqe.opcode.name()), cqe.qpn.value());
        let name_of = |status: u8| STATUSES[usize::from(status)].name();
        let now = self.began.elapsed();
        match self.decisions.lock().completion(now, of, qp, name_of) {
            None => false,
            Some(Trouble::Status(status)) => {
                fail(cqe, STATUSES[usize::from(status)]);
                false
            }
            Some(Trouble::Overrun) => true,
        }
    }

    /// Whether a packet that needs a receive of a reliable connection finds none.
    pub(crate) fn is_unready(&self, datagram: &Datagram<'_>) -> bool {
        let opcode = datagram.bytes.first().map(|byte| Opcode(*byte));
        if !opcode.and_then(Opcode::info).is_some_and(needs_receive) {
            return false;
        }
        self.decisions.lock().is_unready(self.began.elapsed(), datagram.src, datagram.bytes)
    }

    /// Starts the thread that brings events and stalls, if there are some. Error: there are no
    /// descriptors or threads left.
    pub(crate) fn start(
        self: &Arc<Self>,
        cores: Vec<Arc<Core>>,
    ) -> Result<Option<Worker>, VerbsError> {
        let timeline = self.decisions.lock().timeline();
        if timeline.is_empty() {
            return Ok(None);
        }
        let faults = self.clone();
        let work = move |stop: &OwnedFd| {
            for (at, rule, what) in timeline {
                if !faults.wait(stop, at) {
                    return;
                }
                faults.decisions.lock().happened(faults.began.elapsed(), rule, what);
                faults.bring(what, &cores, stop);
            }
        };
        Ok(Some(Worker::start("roce-faults".to_owned(), work)?))
    }

    /// Waits until a time of the plan. Returns whether it has come; otherwise the thread ends.
    fn wait(&self, stop: &OwnedFd, at: Duration) -> bool {
        let left = at.saturating_sub(self.began.elapsed());
        left.is_zero() || wake::wait(None, stop.as_fd(), Some(left))
    }

    fn bring(&self, what: Happening, cores: &[Arc<Core>], stop: &OwnedFd) {
        let announce = |event| {
            if let Some(first) = cores.first() {
                first.hold().announce(event);
            }
        };
        match what {
            Happening::DeviceFatal => cores.iter().for_each(|core| core.hold().break_down()),
            Happening::PortErr => announce(AsyncEvent::PortErr),
            Happening::PortActive => announce(AsyncEvent::PortActive),
            Happening::GidChange => announce(AsyncEvent::GidChange),
            // Other threads see a device that this thread drives for a long time.
            Happening::StallUntil(end) => {
                let held: Vec<Held<'_>> = cores.iter().map(|core| core.hold()).collect();
                self.wait(stop, end);
                let mut woken = Woken::default();
                held.into_iter().rev().for_each(|held| held.release_into(&mut woken));
            }
        }
    }
}

/// A completion as a failed request has it.
pub(crate) fn fail(cqe: &mut Cqe, status: WcStatus) {
    let Cqe { wr_id, opcode, qpn, context, .. } = *cqe;
    *cqe = Cqe {
        wr_id,
        status,
        opcode,
        byte_len: 0,
        imm: None,
        invalidated: None,
        qpn,
        context,
        sender: None,
        solicited: true,
    };
}

/// Whether a packet begins to fill a receive, or consumes one that stays unfilled.
fn needs_receive(info: &OpcodeInfo) -> bool {
    let begins = matches!(info.place, Place::First | Place::Only);
    let is_write = info.operation == Operation::Write;
    info.service == Service::Rc && info.consumes_receive() && (begins || is_write)
}
