//! A thread that a program may end from any thread.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use super::wake;

/// A thread that works until its descriptor is readable. Dropping it ends the thread, and waits for
/// that.
#[derive(Debug)]
pub struct Worker {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Error: there are no descriptors or threads left.
    pub fn start(name: String, work: impl FnOnce(&OwnedFd) + Send + 'static) -> io::Result<Self> {
        let stop = Arc::new(wake::eventfd()?);
        let until = stop.clone();
        let thread = std::thread::Builder::new().name(name).spawn(move || work(&until))?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// Ends the thread before it is dropped.
    pub fn end(&mut self) {
        wake::notify(&self.stop);
        // A task that the thread wakes may drop the last handle of it on that thread, which then
        // ends by itself.
        let thread = self.thread.take();
        if let Some(thread) = thread.filter(|it| it.thread().id() != std::thread::current().id()) {
            // A thread never panics on purpose; if it did, there is nothing left to save.
            let _ = thread.join();
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_thread_that_drops_its_own_handle_goes_on_to_its_end() {
        let (give, own) = channel::<Worker>();
        let (end, ended) = channel();
        let worker = Worker::start("own".to_owned(), move |stop| {
            drop(own.recv().unwrap());
            end.send(wake::take(stop)).unwrap();
        });
        give.send(worker.unwrap()).unwrap();
        assert_eq!(ended.recv_timeout(Duration::from_secs(30)), Ok(true));
    }

    #[test]
    fn each_of_two_threads_ends_with_its_handle() {
        let [(one, kept), (other, others)] = [(); 2].map(|()| {
            let kept = Arc::new(());
            let its = kept.clone();
            let work = move |stop: &OwnedFd| {
                wake::wait(None, stop.as_fd(), None);
                drop(its);
            };
            (Worker::start("one of two".to_owned(), work).unwrap(), kept)
        });
        drop(one);
        assert_eq!([&kept, &others].map(Arc::strong_count), [1, 2]);
        drop(other);
        assert_eq!(Arc::strong_count(&others), 1);
    }
}
