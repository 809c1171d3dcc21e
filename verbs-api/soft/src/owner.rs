//! The owner of a connection gets the connection manager's events: a mailbox of the Rust API, or
//! the C ABI's emulation of the kernel's `rdma_cm`.

use std::fmt;

use rocinante_stack::cm::{CmEvent, ConnId, SidrReqId};

use crate::model::error::VerbsError;
use crate::provider::mailbox::Mailbox;
use crate::provider::wakers::Woken;

/// Takes the events of a connection, a listener or a question. It is called while the device is
/// locked, and so must not call the device. By default each event is the program's at once, and
/// the end of a device is an event of its context.
pub trait Owner: fmt::Debug + Send + Sync {
    /// Takes an event. Returns the tasks that wait for one; `None` for a request for which there is
    /// no room.
    fn put(&self, event: CmEvent) -> Option<Woken>;

    /// No more events will come, for this reason.
    fn fail(&self, _why: VerbsError) -> Woken {
        Woken::default()
    }

    /// A peer has withdrawn its request.
    fn withdraw(&self, _gone: ConnId) {}

    /// The program did not answer a question in time.
    fn withdraw_ask(&self, _gone: SidrReqId) {}

    /// Whether the program has not taken the request yet.
    fn has_request(&self, _of: ConnId) -> bool {
        false
    }

    /// Whether the program has not taken the question yet.
    fn has_ask(&self, _of: SidrReqId) -> bool {
        false
    }

    /// Whether the queue pair goes to the error state when its connection ends.
    fn breaks(&self) -> bool {
        false
    }
}

impl Owner for Mailbox {
    fn put(&self, event: CmEvent) -> Option<Woken> {
        // The release of a number is nothing to the program.
        let is_news = !matches!(event, CmEvent::Released { .. });
        is_news.then(|| self.push(event))
    }

    fn fail(&self, why: VerbsError) -> Woken {
        Self::fail(self, why)
    }

    fn withdraw(&self, gone: ConnId) {
        Self::withdraw(self, gone);
    }

    fn withdraw_ask(&self, gone: SidrReqId) {
        self.retain(|event| !is_asked(event, gone));
    }

    fn has_request(&self, of: ConnId) -> bool {
        Self::has_request(self, of)
    }

    fn has_ask(&self, of: SidrReqId) -> bool {
        self.any(|event| is_asked(event, of))
    }

    fn breaks(&self) -> bool {
        true
    }
}

fn is_asked(event: &CmEvent, of: SidrReqId) -> bool {
    matches!(event, CmEvent::Asked { ask, .. } if *ask == of)
}
