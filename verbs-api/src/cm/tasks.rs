//! Listening and connecting for tasks.

use std::pin::Pin;
use std::task::{Context, Poll};

use rocinante_soft::model::cm::CmFailure;
use rocinante_soft::model::error::VerbsError;

use super::{Connecting, Connection, DatagramService, Resolving};

/// Completes when the connection is established, or has failed: see
/// [`try_finish`](Connecting::try_finish). Dropping it gives the connection up, for instance when
/// the runtime's timeout is over.
impl Future for Connecting {
    type Output = Result<Connection, VerbsError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.inbox().cloned() {
            Some(inbox) => inbox.poll(cx, || self.try_finish()),
            None => Poll::Ready(Err(VerbsError::Cm(CmFailure::Ended))),
        }
    }
}

/// Completes when the peer has answered, or the request has failed: see
/// [`try_finish`](Resolving::try_finish).
impl Future for Resolving {
    type Output = Result<DatagramService, VerbsError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let inbox = self.inbox().clone();
        inbox.poll(cx, || self.try_finish())
    }
}

impl Connection {
    /// Whether either side has ended it; if not, has the task woken when one has.
    pub fn poll_disconnected(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.inbox().poll(cx, || Ok(self.has_ended())).map(|_| ())
    }

    /// Waits until either side has ended it.
    pub async fn disconnected(&self) {
        // Without further events it has ended, too.
        let _ = self.inbox().until(|| Ok(self.has_ended())).await;
    }

    fn has_ended(&self) -> Option<()> {
        // Another task may just have taken the event.
        (self.is_disconnected() || self.inbox().is_over()).then_some(())
    }
}
