//! The listener of a server with connections by the connection manager, once it has its client. It
//! accepts the client's queue pairs, and rejects other clients at once.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use rocinante::VerbsError;
use rocinante::cm::Request;
use rocinante::exchange::Exchange;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::listeners::{self, Listeners};

/// Requests for queue pairs that may wait for the server. The client sends one after the other.
const WAITING: usize = 16;

/// Listens on its own thread, which sleeps until a request comes and does not drive the device.
#[derive(Debug)]
pub(super) struct Door {
    asked: Receiver<Request>,
    /// Closing it ends the thread.
    open: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Door {
    pub(super) fn new(listeners: Arc<Listeners>) -> io::Result<Self> {
        let (open, ends) = UnixStream::pair()?;
        let (passes, asked) = sync_channel(WAITING);
        let thread = std::thread::Builder::new().name("door".into());
        let thread = thread.spawn(move || keep(&listeners, &ends, &passes))?;
        Ok(Self { asked, open: Some(open), thread: Some(thread) })
    }

    /// The next request for a queue pair, if one comes soon.
    pub(super) fn request(&self, patience: Duration) -> Option<Request> {
        self.asked.recv_timeout(patience).ok()
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        drop(self.open.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Rejects a request, with the reason.
pub(super) fn turn_away(request: Request) {
    // The peer may be gone; that does no harm here.
    let _: Result<(), VerbsError> =
        request.reject(b"another client is being served: try again later");
}

fn keep(listeners: &Listeners, ends: &UnixStream, passes: &SyncSender<Request>) {
    let fds: Vec<_> = listeners.descriptors().chain([ends.as_fd()]).collect();
    while listeners::wait(&fds, None).is_ok() && !is_closed(ends.as_fd()) {
        loop {
            let request = match listeners.next(Some(Duration::ZERO)) {
                Ok(Some((_, request))) => request,
                Ok(None) => break,
                // A listener is broken: no more requests will come.
                Err(_) => return,
            };
            let other = Exchange::is_asked_for_by(&request);
            let passed = if other { Err(request) } else { passes.try_send(request).map_err(back) };
            passed.unwrap_or_else(turn_away);
        }
    }
}

fn back(refused: TrySendError<Request>) -> Request {
    match refused {
        TrySendError::Full(request) | TrySendError::Disconnected(request) => request,
    }
}

fn is_closed(ends: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(ends, PollFlags::IN)];
    let polled = poll(&mut fds, Some(&Timespec::default()));
    polled.is_ok() && !fds[0].revents().is_empty()
}
