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
    /// The last interval may lack a hundredth: work that lasts for whole intervals ends with it.
    pub fn start(length: Duration, mut tick: impl FnMut(u32) + Send + 'static) -> Self {
        let (stop, stopped) = channel();
        let start = Instant::now();
        let thread = std::thread::spawn(move || {
            let mut end = None;
            for number in 1.. {
                let left = (length * number).saturating_sub(start.elapsed());
                let goes_on = || stopped.recv_timeout(left) == Err(RecvTimeoutError::Timeout);
                if end.is_none() && !goes_on() {
                    end = Some(start.elapsed());
                }
                if end.is_some_and(|end| length * number > end + length / 100) {
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

    #[test]
    fn an_interval_that_ends_with_the_work_counts() {
        for lengths in 1..4 {
            let length = Duration::from_millis(100);
            let (told, heard) = channel();
            let ticks = Ticks::start(length, move |number| {
                let _ = told.send(number);
            });
            std::thread::sleep(length * lengths - length / 200);
            drop(ticks);
            assert!((1..=lengths).eq(heard.iter().take(lengths as usize)), "{lengths}");
        }
    }
}
