//! A thread that does something again and again beside the work.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Ticks until it is dropped.
#[must_use]
#[derive(Debug)]
pub struct Ticks {
    /// Closing it ends the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Ticks {
    /// Calls `tick` at the end of each interval of this length, with the interval's number from 1.
    pub fn start(length: Duration, mut tick: impl FnMut(u32) + Send + 'static) -> Self {
        let (stop, stopped) = channel();
        let thread = std::thread::spawn(move || {
            let start = Instant::now();
            for number in 1.. {
                let left = (length * number).saturating_sub(start.elapsed());
                if stopped.recv_timeout(left) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
                tick(number);
            }
        });
        Self { stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for Ticks {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_numbered_and_end() {
        let (told, heard) = channel();
        let ticks = Ticks::start(Duration::from_millis(1), move |number| {
            let _ = told.send(number);
        });
        assert_eq!([heard.recv(), heard.recv()], [Ok(1), Ok(2)]);
        drop(ticks);
        // The iterator ends because the thread has ended, and the sender with it.
        assert!(heard.iter().zip(3..).all(|(number, wanted)| number == wanted));
    }
}
