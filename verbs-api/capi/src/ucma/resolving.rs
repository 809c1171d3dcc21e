//! Ways to peers whose neighbours are being asked for. As in the kernel, an address is resolved
//! once its next hop's Ethernet address is known, and the program says for how long to ask.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Ucma;
use super::event::{Kind, Param};
use super::id::{Earlier, Id, Phase};
use crate::ffi::without_signals;
use crate::plain::NextHop;

/// The interval at which the kernel's table of neighbours is read.
const STEPS: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(1)..=Duration::from_millis(20);
/// How often it is made to ask the link again, which it gives up after three tries.
const AGAIN: Duration = Duration::from_secs(1);

/// The ids that wait.
#[derive(Default)]
pub(super) struct Resolving(Arc<Mutex<List>>);

#[derive(Default)]
struct List {
    waiting: Vec<Waiting>,
    /// Whether a thread looks after them.
    is_served: bool,
}

struct Waiting {
    it: Weak<Ucma>,
    id: Arc<Id>,
    hop: NextHop,
    until: Instant,
    asked: Instant,
}

impl Resolving {
    /// Tells the id that its address is resolved once the next hop is known, or after `patience`
    /// that it is not. Its phase is [`Phase::AddrQuery`] until then. `false`, without a word to the
    /// id, if there can be no thread: the connection's own messages find out.
    pub(super) fn add(
        &self,
        it: &Arc<Ucma>,
        id: &Arc<Id>,
        (mut hop, patience): (NextHop, Duration),
    ) -> bool {
        hop.resolve();
        let now = Instant::now();
        let (it, id) = (Arc::downgrade(it), id.clone());
        let waiting = Waiting { it, id, hop, until: now + patience, asked: now };
        let mut list = self.0.lock();
        list.waiting.push(waiting);
        if !list.is_served {
            let work = Self(self.0.clone());
            let thread = std::thread::Builder::new().name("roce-cm-resolve".to_owned());
            list.is_served = without_signals(|| thread.spawn(move || work.serve())).is_ok();
        }
        // Nothing else is there while it is not served.
        if !list.is_served {
            list.waiting.clear();
        }
        list.is_served
    }

    /// Looks after those that wait until there are none.
    fn serve(&self) {
        let mut step = *STEPS.start();
        loop {
            // Not under the lock, which comes after that of an id.
            let waiting = std::mem::take(&mut self.0.lock().waiting);
            let left: Vec<_> = waiting.into_iter().filter_map(Waiting::look).collect();
            let mut list = self.0.lock();
            list.waiting.extend(left);
            if list.waiting.is_empty() {
                list.is_served = false;
                return;
            }
            drop(list);
            std::thread::sleep(step);
            step = (step * 2).min(*STEPS.end());
        }
    }
}

impl Waiting {
    /// `None` if it waits no longer.
    fn look(mut self) -> Option<Self> {
        let now = Instant::now();
        let outcome = match self.hop.is_known() {
            Ok(false) if !self.id.is_querying() => return None,
            Ok(false) if now < self.until => {
                if now.duration_since(self.asked) >= AGAIN {
                    self.hop.resolve();
                    self.asked = now;
                }
                return Some(self);
            }
            Ok(false) => Err(libc::ETIMEDOUT),
            Ok(true) | Err(_) => Ok(()),
        };
        settle(&self.it, &self.id, outcome);
        None
    }
}

/// The end of the question of an id, unless it is destroyed or its device gone.
pub(super) fn settle(it: &Weak<Ucma>, id: &Arc<Id>, outcome: Result<(), i32>) {
    let mut held = id.held.lock();
    let Phase::AddrQuery(earlier) = &mut held.phase else { return };
    let earlier = std::mem::take(earlier);
    match outcome {
        Ok(()) => {
            held.phase = Phase::AddrResolved;
            id.tell(Kind::AddrResolved, 0, Param::default());
        }
        Err(errno) => {
            held.phase = Phase::Bound;
            let Earlier { local, found, opened } = earlier;
            (held.local, held.found, held.opened) = (local, found, opened);
            if held.has_port
                && let (Some(local), Some(it)) = (local, it.upgrade())
            {
                let _ = it.ports.lock().change(id.space, &held.bound(id, local));
            }
            id.tell(Kind::AddrError, -errno, Param::default());
        }
    }
}
