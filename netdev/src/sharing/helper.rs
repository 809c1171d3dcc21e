//! A thread that is asked to end, and is waited for as long as that usually takes. A process that
//! shares the objects of an address can have a call on them wait.

use crate::tuning::shared::HELPER_PATIENCE;
use std::io;
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread::{Builder, JoinHandle};

/// The thread, and the result of its work.
#[derive(Debug)]
pub(super) struct Helper<T> {
    result: Mutex<mpsc::Receiver<T>>,
    thread: JoinHandle<()>,
}

impl<T: Send + 'static> Helper<T> {
    /// Starts it. `work` must have released all that it holds when it returns. Error: no thread
    /// left.
    pub(super) fn start(name: &str, work: impl FnOnce() -> T + Send + 'static) -> io::Result<Self> {
        let (send, result) = mpsc::sync_channel(1);
        let thread = Builder::new().name(name.into()).spawn(move || {
            let _ = send.send(work());
        })?;
        Ok(Self { result: Mutex::new(result), thread })
    }

    /// Waits for the result of a thread that has been asked to end. `None` if it has panicked, or
    /// does not end: then it stays behind with its descriptors.
    pub(super) fn end(self) -> Option<T> {
        let result = self.result.into_inner().unwrap_or_else(PoisonError::into_inner);
        match result.recv_timeout(HELPER_PATIENCE) {
            Err(mpsc::RecvTimeoutError::Timeout) => None,
            result => self.thread.join().ok().and(result.ok()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_does_not_end_is_left_behind() {
        assert_eq!(Helper::start("test", || 7).unwrap().end(), Some(7));
        let panics = Helper::<()>::start("test", || std::panic::resume_unwind(Box::new(())));
        assert_eq!(panics.unwrap().end(), None);
        let (release, waits) = mpsc::channel::<()>();
        let stuck = Helper::start("test", move || waits.recv()).unwrap();
        assert_eq!(stuck.end(), None);
        drop(release);
    }
}
