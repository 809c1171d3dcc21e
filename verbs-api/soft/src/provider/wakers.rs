//! Tasks that wait for something. The event wakes them: no runtime is needed, and no thread.

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use super::listeners::fresh_number;
use super::sync::Mutex;
use crate::tuning::tasks::{NAMELESS_AGE, NAMELESS_MAX};

/// A task that waits.
#[derive(Debug)]
struct Task {
    /// 0 if its owner has no number.
    number: u64,
    waker: Waker,
    /// The begin of its wait, if it has no number.
    since: Option<Instant>,
}

/// The tasks that wait for one thing.
///
/// A task registers and then looks again. A thread changes the state that the task looks at and
/// then calls [`take`](Self::take). So either the task sees the change, or the thread wakes the
/// task.
#[derive(Debug, Default)]
pub struct Wakers {
    tasks: Mutex<Vec<Task>>,
    /// No order with anything else depends on it, so the models of the threads do without it.
    is_claimed: AtomicBool,
}

impl Wakers {
    /// With room for this many.
    pub(crate) fn with_room(tasks: usize) -> Self {
        Self { tasks: Mutex::new(Vec::with_capacity(tasks)), ..Self::default() }
    }

    /// Claims all that comes for one waiter. Returns whether no other has it.
    pub fn claim(&self) -> bool {
        !self.is_claimed.swap(true, Ordering::Relaxed)
    }

    /// Gives the claim back.
    pub fn unclaim(&self) {
        self.is_claimed.store(false, Ordering::Relaxed);
    }

    /// A place for one future.
    pub(crate) fn place(&self) -> Place<'_> {
        Place { wakers: self, number: 0 }
    }

    /// Has the task woken once.
    pub fn register(&self, cx: &Context<'_>) {
        self.set(0, cx.waker());
    }

    /// Has the task woken once. It replaces the task with the same number, unless that is 0. Tasks
    /// of number 0 may have given up without a word: if there are too many, the oldest is woken
    /// after a while, and looks again.
    pub fn set(&self, number: u64, waker: &Waker) {
        let mut tasks = self.tasks.lock();
        let same = |task: &&mut Task| {
            task.number == number && (number != 0 || task.waker.will_wake(waker))
        };
        let (mut replaced, mut oldest) = (None, None);
        match tasks.iter_mut().find(same) {
            Some(task) if task.waker.will_wake(waker) => {}
            Some(task) => replaced = Some(std::mem::replace(&mut task.waker, waker.clone())),
            None => {
                if number == 0 && tasks.len() >= NAMELESS_MAX {
                    oldest = long_gone(&tasks).map(|at| tasks.swap_remove(at).waker);
                }
                let since = (number == 0).then(Instant::now);
                tasks.push(Task { number, waker: waker.clone(), since });
            }
        }
        // The last waker may drop its task, which may wait here: not under the lock.
        drop(tasks);
        drop(replaced);
        oldest.into_iter().for_each(Waker::wake);
    }

    /// The task with this number waits no more.
    pub fn forget(&self, number: u64) {
        let mut tasks = self.tasks.lock();
        let at = tasks.iter().position(|task| task.number == number);
        let gone = at.map(|at| tasks.swap_remove(at));
        drop(tasks);
        drop(gone);
    }

    /// Takes all tasks, to be woken.
    pub fn take(&self) -> Woken {
        let mut woken = Woken::default();
        for task in self.tasks.lock().drain(..) {
            woken.add(task.waker);
        }
        woken
    }
}

/// The oldest task without a number, if there are too many of these and it has waited for long.
#[cold]
fn long_gone(tasks: &[Task]) -> Option<usize> {
    let nameless = || tasks.iter().enumerate().filter_map(|(at, task)| Some((at, task.since?)));
    if nameless().count() < NAMELESS_MAX {
        return None;
    }
    let (at, since) = nameless().min_by_key(|(_, since)| *since)?;
    (since.elapsed() >= NAMELESS_AGE).then_some(at)
}

/// Which look of a poll it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// The first: the device may be driven.
    First,
    /// The second, because it may have come before the task registered.
    Again,
}

/// Looks, registers the task if there is nothing, and looks again.
pub fn poll_until<T, E>(
    register: impl FnOnce() -> Result<(), E>,
    mut look: impl FnMut(Look) -> Result<Option<T>, E>,
) -> Poll<Result<T, E>> {
    if let Some(found) = look(Look::First)? {
        return Poll::Ready(Ok(found));
    }
    register()?;
    look(Look::Again)?.map_or(Poll::Pending, |found| Poll::Ready(Ok(found)))
}

/// Waits until `look` finds something. `announce` is called once the task has registered.
pub async fn until<T, E>(
    tasks: &Wakers,
    announce: impl Fn() -> Result<(), E>,
    mut look: impl FnMut(Look) -> Result<Option<T>, E>,
) -> Result<T, E> {
    let mut place = tasks.place();
    poll_fn(|cx| {
        let register = || {
            place.register(cx);
            announce()
        };
        poll_until(register, &mut look)
    })
    .await
}

/// A future's place among the tasks, which it leaves when it is dropped.
#[derive(Debug)]
pub(crate) struct Place<'a> {
    wakers: &'a Wakers,
    /// 0 until it has waited.
    number: u64,
}

impl Place<'_> {
    /// Has the future's task woken once.
    pub(crate) fn register(&mut self, cx: &Context<'_>) {
        if self.number == 0 {
            self.number = fresh_number();
        }
        self.wakers.set(self.number, cx.waker());
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if self.number != 0 {
            self.wakers.forget(self.number);
        }
    }
}

/// Tasks that are woken when this is dropped: once no lock is held, because a runtime may poll or
/// drop a task on the spot.
#[derive(Debug, Default)]
pub struct Woken {
    first: Option<Waker>,
    more: Vec<Waker>,
}

impl Woken {
    fn add(&mut self, task: Waker) {
        match &self.first {
            None => self.first = Some(task),
            Some(_) => self.more.push(task),
        }
    }

    /// Adds the others.
    pub fn append(&mut self, mut others: Self) {
        for task in others.first.take().into_iter().chain(others.more.drain(..)) {
            self.add(task);
        }
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.first.is_none()
    }
}

impl Drop for Woken {
    fn drop(&mut self) {
        for task in self.first.take().into_iter().chain(self.more.drain(..)) {
            task.wake();
        }
    }
}
