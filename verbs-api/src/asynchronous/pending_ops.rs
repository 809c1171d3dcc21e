//! Where the operations of a queue pair wait for their completions.

use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};

use parking_lot::Mutex;
use rocinante_soft::model::error::VerbsError;
use rocinante_soft::model::wc::Wc;
use rocinante_soft::provider::listeners::fresh_number;
use rocinante_soft::provider::wakers::{Look, poll_until};

use crate::cq::Cq;

/// The operations of a queue pair in flight.
///
/// Completions wake the [`Dispatcher`] and not the tasks: it takes them from the queue and wakes
/// the task of each. So a task that waits and is not polled keeps no other waiting.
#[derive(Debug)]
pub(super) struct PendingOps {
    cqs: Vec<Own>,
    /// Its number among the tasks of its queues.
    number: u64,
    dispatcher: Waker,
    slots: Mutex<Slots>,
}

#[derive(Debug, Default)]
struct Slots {
    by_number: HashMap<u64, Slot>,
    /// No more completions will come.
    is_closed: bool,
}

#[derive(Debug)]
enum Slot {
    /// In flight; the task that waits, if it has been polled.
    Posted(Option<Waker>),
    /// Complete; `None` if its completion was lost.
    Done(Option<Wc>),
    /// In flight, and its future is gone: the memory that the device still uses.
    Dropped(Box<dyn Any + Send>),
}

/// Takes completions from the queues of a queue pair whenever there are some.
struct Dispatcher(Weak<PendingOps>);

impl Wake for Dispatcher {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if let Some(pending) = self.0.upgrade() {
            pending.collect(Look::Again);
        }
    }
}

impl Drop for PendingOps {
    fn drop(&mut self) {
        self.cqs.iter().for_each(|cq| cq.0.tasks().forget(self.number));
    }
}

/// A completion queue that no other `PendingOps` takes from.
#[derive(Debug)]
struct Own(Cq);

impl Own {
    fn new(cq: &Cq) -> Result<Self, VerbsError> {
        cq.announce_to_tasks()?;
        if !cq.tasks().claim() {
            let why = "another AsyncQp has the completion queue: make one for each";
            return Err(VerbsError::Invalid(why.into()));
        }
        Ok(Self(cq.clone()))
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        self.0.tasks().unclaim();
    }
}

impl PendingOps {
    /// For a queue pair that completes to these queues. Error: one of them has a channel, or
    /// another `PendingOps`.
    pub(super) fn new([send, recv]: [&Cq; 2]) -> Result<Arc<Self>, VerbsError> {
        let mut cqs = vec![Own::new(send)?];
        if recv != send {
            cqs.push(Own::new(recv)?);
        }
        Ok(Arc::new_cyclic(|pending| Self {
            cqs,
            number: fresh_number(),
            dispatcher: Waker::from(Arc::new(Dispatcher(pending.clone()))),
            slots: Mutex::default(),
        }))
    }

    /// A slot for a new operation: its number. `None` if no completions will come.
    pub(super) fn open(&self) -> Option<u64> {
        let mut slots = self.slots.lock();
        if slots.is_closed {
            return None;
        }
        // Programs number their own requests from 0 up, and this counts down from the end.
        let number = !fresh_number();
        slots.by_number.insert(number, Slot::Posted(None));
        Some(number)
    }

    /// Why no completions will come.
    pub(super) fn why_closed(&self) -> VerbsError {
        let error = self.cqs.iter().find_map(|cq| cq.0.look(Look::Again).err());
        error.unwrap_or(VerbsError::Busy("the completion queue takes no more"))
    }

    /// The number of slots.
    #[cfg(test)]
    pub(super) fn in_flight(&self) -> usize {
        self.slots.lock().by_number.len()
    }

    /// The operation was not posted.
    pub(super) fn withdraw(&self, number: u64) {
        self.slots.lock().by_number.remove(&number);
    }

    /// The completion of an operation; `None` if it was lost. Drives the device.
    pub(super) fn poll(&self, number: u64, cx: &Context<'_>) -> Poll<Option<Wc>> {
        if let Poll::Ready(done) = self.look(number, Some(cx)) {
            return Poll::Ready(done);
        }
        self.collect(Look::First);
        self.look(number, None)
    }

    /// Looks for a completion, and notes the task if there is none.
    fn look(&self, number: u64, cx: Option<&Context<'_>>) -> Poll<Option<Wc>> {
        let mut slots = self.slots.lock();
        let mut replaced = None;
        let done = match slots.by_number.get_mut(&number) {
            Some(Slot::Posted(task)) => {
                if let Some(cx) = cx {
                    replaced = task.replace(cx.waker().clone());
                }
                Poll::Pending
            }
            Some(Slot::Done(wc)) => {
                let wc = *wc;
                slots.by_number.remove(&number);
                Poll::Ready(wc)
            }
            Some(Slot::Dropped(_)) | None => Poll::Ready(None),
        };
        drop(slots);
        drop(replaced);
        done
    }

    /// The future of an operation is gone: keeps `memory` until it is complete.
    pub(super) fn keep(&self, number: u64, memory: Box<dyn Any + Send>) {
        let mut slots = self.slots.lock();
        let freed = match slots.by_number.get_mut(&number) {
            Some(slot @ Slot::Posted(_)) => std::mem::replace(slot, Slot::Dropped(memory)),
            _ => {
                slots.by_number.remove(&number);
                Slot::Dropped(memory)
            }
        };
        drop(slots);
        drop(freed);
        // It may never have been polled.
        self.collect(Look::Again);
    }

    /// Takes all completions from the queues, and has the dispatcher woken by the next.
    fn collect(&self, first: Look) {
        for Own(cq) in &self.cqs {
            loop {
                let register = || {
                    cq.tasks().set(self.number, &self.dispatcher);
                    cq.announce_to_tasks()
                };
                let look = |look| cq.look(if look == Look::First { first } else { look });
                match poll_until(register, look) {
                    Poll::Ready(Ok(wc)) => self.complete(wc),
                    // The queue overflowed or the device is gone, so that its queue pairs broke.
                    Poll::Ready(Err(_)) => {
                        self.close();
                        break;
                    }
                    Poll::Pending => break,
                }
            }
        }
    }

    fn complete(&self, wc: Wc) {
        let mut slots = self.slots.lock();
        let (mut task, mut freed) = (None, None);
        match slots.by_number.get_mut(&wc.wr_id) {
            Some(slot @ Slot::Posted(_)) => {
                if let Slot::Posted(waiting) = std::mem::replace(slot, Slot::Done(Some(wc))) {
                    task = waiting;
                }
            }
            Some(Slot::Dropped(_)) => freed = slots.by_number.remove(&wc.wr_id),
            // Not one of these requests.
            Some(Slot::Done(_)) | None => {}
        }
        drop(slots);
        run(|| drop(freed));
        if let Some(task) = task {
            run(|| task.wake());
        }
    }

    /// No more completions will come, and the device uses no memory any more.
    fn close(&self) {
        let mut slots = self.slots.lock();
        slots.is_closed = true;
        let open = std::mem::take(&mut slots.by_number);
        let (mut woken, mut freed) = (Vec::new(), Vec::new());
        for (number, slot) in open {
            let done = match slot {
                Slot::Posted(task) => {
                    woken.extend(task);
                    None
                }
                Slot::Done(wc) => wc,
                Slot::Dropped(memory) => {
                    freed.push(memory);
                    continue;
                }
            };
            slots.by_number.insert(number, Slot::Done(done));
        }
        drop(slots);
        freed.into_iter().for_each(|memory| run(|| drop(memory)));
        woken.into_iter().for_each(|task| run(|| task.wake()));
    }
}

/// Runs code of the program, on whichever thread has found a completion. A panic there reaches the
/// panic hook, and keeps no other operation from its completion.
fn run(work: impl FnOnce()) {
    let _ = catch_unwind(AssertUnwindSafe(work));
}

/// Operations whose queue pair is gone when this is dropped.
#[derive(Debug)]
pub(super) struct Open(pub(super) Arc<PendingOps>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.collect(Look::Again);
        self.0.close();
    }
}
