//! Faults of the device: its decisions, and the thread that brings events and stalls.

use std::net::IpAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
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
pub(super) const STATUSES: &[WcStatus] = WcStatus::ALL.as_slice().split_at(1).1;

/// The faults of a device.
#[derive(Debug)]
pub struct DeviceFaults {
    began: Instant,
    /// Readable once the device has a context, which gets the first event.
    opened: OwnedFd,
    /// Rules that have the port down.
    down: AtomicU32,
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
            opened: wake::eventfd()?,
            down: AtomicU32::new(0),
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
        if !self.has_unready {
            return false;
        }
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
            if !wake::wait(Some((faults.opened.as_fd(), false)), stop.as_fd(), None) {
                return;
            }
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

    /// Whether nothing passes the port.
    pub(crate) fn is_port_down(&self) -> bool {
        self.down.load(Ordering::Relaxed) > 0
    }

    /// The device has a context: events and stalls begin.
    pub(crate) fn opened(&self) {
        wake::notify(&self.opened);
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
            Happening::PortErr => {
                if self.down.fetch_add(1, Ordering::Relaxed) == 0 {
                    announce(AsyncEvent::PortErr);
                }
            }
            Happening::PortActive => {
                if self.down.fetch_sub(1, Ordering::Relaxed) == 1 {
                    announce(AsyncEvent::PortActive);
                }
            }
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

#[cfg(test)]
mod tests {
    use rocinante_netdev::AnyPort;
    use rocinante_netdev::sim::{SimConfig, SimNet};

    use super::*;
    use crate::faults::{FaultWish, Met};
    use crate::wishes::Wishes;
    use crate::{Device, Hca, Inbox};

    /// Rules that have the port down at the same time announce it once.
    #[test]
    fn events_begin_with_the_first_context() {
        let words = "event=GID_CHANGE;event=PORT_ERR,for=100ms;event=PORT_ERR,for=200ms;\
                     event=PORT_ERR,at=300ms";
        let fault = FaultWish { words: Some(words.to_owned()), log: None };
        let chosen = fault.settle().unwrap().unwrap();
        let port = SimNet::new().port(&[[10, 0, 0, 1].into()], &SimConfig::default()).unwrap();
        let Met { ports, why, of_device } =
            chosen.before(vec![AnyPort::from(port)], String::new()).unwrap();
        let settings = Wishes { background: Some(false), ..Wishes::default() }.settings();
        let (parts, why) = ((ports, None), (why, None));
        let hca = Hca::start(&settings, "sim", parts, why, of_device, None).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        assert!(!hca.is_port_down());
        let device = Device::new(hca, Arc::new(Inbox::new().unwrap()), true).unwrap();
        let begin = Instant::now();
        let mut found = Vec::new();
        while found.len() < 4 {
            assert!(begin.elapsed() < Duration::from_secs(30), "{found:?}");
            found.extend(device.events.next());
            std::thread::sleep(Duration::from_millis(1));
        }
        let (down, up) = (AsyncEvent::PortErr, AsyncEvent::PortActive);
        assert_eq!(found, [AsyncEvent::GidChange, down, up, down]);
        assert!(device.is_port_down());
    }
}
