//! Completions and events for tasks.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use rocinante_soft::model::error::VerbsError;
use rocinante_soft::provider::wakers::{Look, Wakers, poll_until, until};

use super::{ChannelKind, CompChannel, Cq, CqKind, Wc};

/// A thread that sleeps until it is woken as a task.
struct Sleeper(Thread);

impl Wake for Sleeper {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

impl Cq {
    /// Takes the next completion, or has the task woken when there is one. The call drives the
    /// device, as [`poll`](Self::poll) does; after it, the background thread does.
    ///
    /// Several tasks may wait. A completion wakes all, and the first one that polls takes it.
    ///
    /// # Errors
    /// [`VerbsError::Invalid`] for a queue with a channel: its tasks wait for
    /// [`CompChannel::poll_event`]. Else as [`poll`](Self::poll).
    pub fn poll_next(&self, cx: &mut Context<'_>) -> Poll<Result<Wc, VerbsError>> {
        let register = || {
            self.tasks().register(cx);
            self.announce_to_tasks()
        };
        poll_until(register, |look| self.look(look))
    }

    /// The next completion. If the future is dropped, no completion is lost.
    ///
    /// # Errors
    /// As [`poll_next`](Self::poll_next).
    pub async fn next(&self) -> Result<Wc, VerbsError> {
        until(self.tasks(), || self.announce_to_tasks(), |look| self.look(look)).await
    }

    pub(crate) fn tasks(&self) -> &Wakers {
        on!(CqKind, &self.kind, cq => cq.tasks())
    }

    pub(crate) fn look(&self, look: Look) -> Result<Option<Wc>, VerbsError> {
        let mut found = match (&self.kind, look) {
            (CqKind::Soft(cq), Look::First) => cq.poll_for_task(),
            (CqKind::Soft(cq), Look::Again) => cq.take_now(),
            (CqKind::Kernel(cq), _) => cq.poll_one(),
        }?;
        if let Some(wc) = &mut found {
            self.complement(wc);
        }
        Ok(found)
    }

    /// Takes the next completion. It sleeps until there is one, as a thread that waits on a channel
    /// does, but needs no channel. Meanwhile the device's background thread drives the device.
    /// [`wait_one`](Self::wait_one) answers sooner and keeps a processor busy.
    ///
    /// # Errors
    /// [`VerbsError::TimedOut`] if there is none within `timeout`; `None` waits without limit. Else
    /// as [`poll_next`](Self::poll_next).
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Wc, VerbsError> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let waker = Waker::from(Arc::new(Sleeper(std::thread::current())));
        let mut next = pin!(self.next());
        loop {
            if let Poll::Ready(done) = next.as_mut().poll(&mut Context::from_waker(&waker)) {
                return done;
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            match left {
                None => std::thread::park(),
                Some(Duration::ZERO) => return Err(VerbsError::TimedOut),
                Some(left) => std::thread::park_timeout(left),
            }
        }
    }

    /// Has the next completion wake the tasks that have registered.
    pub(crate) fn announce_to_tasks(&self) -> Result<(), VerbsError> {
        match &self.kind {
            CqKind::Soft(cq) if !cq.has_channel() => {
                cq.req_notify(false);
                Ok(())
            }
            CqKind::Kernel(cq) if !cq.has_channel() => cq.announce_to_tasks(),
            CqKind::Soft(_) | CqKind::Kernel(_) => Err(VerbsError::Invalid(
                "the completion queue has a channel: wait for the channel's events".into(),
            )),
        }
    }
}

impl CompChannel {
    /// Takes the next event, or has the task woken when there is one. Arm the queues first
    /// ([`Cq::req_notify`]). It does not drive the device: the background thread does.
    ///
    /// # Errors
    /// [`VerbsError::Io`] if a device of the kernel needs a thread for its tasks, and there are no
    /// threads or descriptors left.
    pub fn poll_event(&self, cx: &mut Context<'_>) -> Poll<Result<Cq, VerbsError>> {
        let register = || {
            self.tasks().register(cx);
            self.announce_to_tasks()
        };
        poll_until(register, |_| Ok(self.try_event()))
    }

    /// The queue of the next event. If the future is dropped, no event is lost.
    ///
    /// # Errors
    /// As [`poll_event`](Self::poll_event).
    pub async fn event(&self) -> Result<Cq, VerbsError> {
        until(self.tasks(), || self.announce_to_tasks(), |_| Ok(self.try_event())).await
    }

    fn tasks(&self) -> &Wakers {
        on!(ChannelKind, &self.kind, channel => channel.tasks())
    }

    fn announce_to_tasks(&self) -> Result<(), VerbsError> {
        match &self.kind {
            ChannelKind::Soft(_) => Ok(()),
            ChannelKind::Kernel(channel) => channel.announce_to_tasks(),
        }
    }
}
