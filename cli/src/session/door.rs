//! The door of a server that the connection manager connects, from when it has its client: the client's queue pairs come in, other clients are told at once.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use rocinante::cm::{Listener, Request};
use rocinante::{Exchange, VerbsError};
use rustix::event::{PollFd, PollFlags, poll};

/// Requests for queue pairs that wait for the server to look: the client asks for one after the other.
const WAITING: usize = 16;

/// Listens on a thread of its own, which sleeps until somebody comes and does not drive the device.
#[derive(Debug)]
pub(super) struct Door {
    asked: Receiver<Request>,
    /// Closed, it ends the thread.
    open: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Door {
    pub(super) fn new(listener: Listener) -> io::Result<Self> {
        let (open, ends) = UnixStream::pair()?;
        let (passes, asked) = sync_channel(WAITING);
        let thread = std::thread::Builder::new().name("door".into());
        let thread = thread.spawn(move || keep(&listener, &ends, &passes))?;
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

/// Says why.
pub(super) fn turn_away(request: Request) {
    // Whether it hears that or has gone does not matter here.
    let _: Result<(), VerbsError> =
        request.reject(b"another client is being served: try again later");
}

fn keep(listener: &Listener, ends: &UnixStream, passes: &SyncSender<Request>) {
    while wait(listener.as_fd(), ends.as_fd()) {
        loop {
            let request = match listener.try_request() {
                Ok(Some(request)) => request,
                Ok(None) => break,
                // Nobody will come.
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

/// Sleeps until somebody comes; whether the door is still to be kept.
fn wait(comes: BorrowedFd<'_>, ends: BorrowedFd<'_>) -> bool {
    let mut fds = [comes, ends].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    match poll(&mut fds, None) {
        Err(rustix::io::Errno::INTR) => true,
        Err(_) => false,
        Ok(_) => fds[1].revents().is_empty(),
    }
}
