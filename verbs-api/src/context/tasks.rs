//! Asynchronous events for tasks.

use std::task::{self, Poll};

use rocinante_soft::model::error::VerbsError;
use rocinante_soft::model::event::AsyncEvent;
use rocinante_soft::provider::wakers::{Wakers, poll_until, until};

use super::Context;
use crate::device::Device;

impl Context {
    /// Takes the next asynchronous event, or has the task woken when there is one.
    ///
    /// # Errors
    /// [`VerbsError::Io`] if the tasks need a thread, and there are no threads or descriptors left.
    pub fn poll_event(&self, cx: &mut task::Context<'_>) -> Poll<Result<AsyncEvent, VerbsError>> {
        let register = || {
            self.tasks().register(cx);
            self.announce_to_tasks()
        };
        poll_until(register, |_| Ok(self.poll_async_event()))
    }

    /// The next asynchronous event. If the future is dropped, no event is lost.
    ///
    /// # Errors
    /// As [`poll_event`](Self::poll_event).
    pub async fn async_event(&self) -> Result<AsyncEvent, VerbsError> {
        let look = |_| Ok(self.poll_async_event());
        until(self.tasks(), || self.announce_to_tasks(), look).await
    }

    fn tasks(&self) -> &Wakers {
        on!(Device, &self.device, device => device.tasks())
    }

    fn announce_to_tasks(&self) -> Result<(), VerbsError> {
        match &self.device {
            Device::Soft(device) => Ok(device.events.announce_to_tasks()?),
            Device::Kernel(device) => device.announce_to_tasks(),
        }
    }
}
