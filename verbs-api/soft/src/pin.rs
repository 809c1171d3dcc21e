//! Threads pinned to one processor.

use std::sync::mpsc;
use std::thread::JoinHandle;

use rustix::thread::{CpuSet, sched_setaffinity};

use crate::model::error::VerbsError;

/// Starts a thread, pinned to `cpu` if that is given. Error: the system has no more threads, or
/// this process may not use the processor.
pub(super) fn spawn(
    name: &str,
    cpu: Option<usize>,
    work: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, VerbsError> {
    let (tell, hear) = mpsc::sync_channel(1);
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        let pinned = cpu.map_or(Ok(()), pin);
        let go = pinned.is_ok();
        if tell.send(pinned).is_ok() && go {
            work();
        }
    })?;
    match hear.recv() {
        Ok(Ok(())) => Ok(thread),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(VerbsError::Io(std::io::ErrorKind::BrokenPipe.into())),
    }
}

/// Pins the calling thread to this processor (`sched_setaffinity(2)`).
fn pin(cpu: usize) -> Result<(), VerbsError> {
    let refused = |why: String| {
        VerbsError::Invalid(format!(
            "a thread cannot be kept on processor {cpu}: {why}; `taskset -p $$` shows those that may be used"
        ))
    };
    if cpu >= CpuSet::MAX_CPU {
        return Err(refused(format!("there are {} at most", CpuSet::MAX_CPU)));
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).map_err(|error| refused(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_stays_where_it_was_put() {
        let allowed = rustix::thread::sched_getaffinity(None).unwrap();
        let cpu = (0..CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu)).unwrap();
        let (tell, hear) = mpsc::channel();
        let work = move || tell.send(rustix::thread::sched_getaffinity(None).unwrap()).unwrap();
        spawn("pinned", Some(cpu), work).unwrap().join().unwrap();
        let set = hear.recv().unwrap();
        assert!(set.is_set(cpu) && set.count() == 1);
    }

    #[test]
    fn a_processor_that_is_not_there_is_named() {
        for cpu in [CpuSet::MAX_CPU - 1, CpuSet::MAX_CPU, usize::MAX] {
            let error = spawn("nowhere", Some(cpu), || ()).unwrap_err().to_string();
            assert!(error.contains(&format!("processor {cpu}")), "{error}");
        }
    }
}
