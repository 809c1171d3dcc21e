//! Tests of `wakers.rs`, which `tests/models` compiles, too.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Wake, Waker};
use std::time::Instant;

use super::wakers::Wakers;
use crate::tuning::tasks::{NAMELESS_AGE, NAMELESS_MAX};

#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

fn tasks<const N: usize>() -> [(Arc<Count>, Waker); N] {
    [(); N].map(|()| {
        let count = Arc::new(Count::default());
        (count.clone(), Waker::from(count))
    })
}

fn times<const N: usize>(tasks: &[(Arc<Count>, Waker); N]) -> [usize; N] {
    tasks.each_ref().map(|(count, _)| count.0.load(Ordering::Relaxed))
}

#[test]
fn each_task_is_woken_once_however_often_it_was_polled() {
    let (wakers, tasks) = (Wakers::default(), tasks::<3>());
    for _ in 0..5 {
        for (_, waker) in &tasks {
            wakers.register(&Context::from_waker(waker));
        }
    }
    drop(wakers.take());
    assert_eq!(times(&tasks), [1, 1, 1]);
    assert!(wakers.take().is_empty());
}

#[test]
fn a_future_that_is_dropped_leaves_the_others_of_its_task_waiting() {
    let (wakers, tasks) = (Wakers::default(), tasks::<2>());
    let [(_, one), (_, other)] = &tasks;
    let mut places = [(); 2].map(|()| wakers.place());
    for place in &mut places {
        place.register(&Context::from_waker(one));
    }
    let [first, mut second] = places;
    drop(first);
    drop(wakers.take());
    assert_eq!(times(&tasks), [1, 0]);
    // A future may move to another task.
    second.register(&Context::from_waker(one));
    second.register(&Context::from_waker(other));
    drop(wakers.take());
    assert_eq!(times(&tasks), [1, 1]);
    second.register(&Context::from_waker(one));
    drop(second);
    assert!(wakers.take().is_empty());
}

#[test]
fn tasks_that_gave_up_are_not_kept_without_limit() {
    let (wakers, [stays]) = (Wakers::default(), tasks::<1>());
    let mut place = wakers.place();
    place.register(&Context::from_waker(&stays.1));
    let many: Vec<_> = (0..NAMELESS_MAX + 10).flat_map(|_| tasks::<1>()).collect();
    let register = |(_, waker): &(Arc<Count>, Waker)| {
        wakers.register(&Context::from_waker(waker));
    };
    let woken = |(count, _): &&(Arc<Count>, Waker)| count.0.load(Ordering::Relaxed) == 1;
    let begin = Instant::now();
    many.iter().for_each(register);
    let early = many.iter().filter(woken).count();
    assert!(early == 0 || begin.elapsed() >= NAMELESS_AGE, "those that wait are left alone");
    std::thread::sleep(NAMELESS_AGE);
    let more: Vec<_> = (0..10).flat_map(|_| tasks::<1>()).collect();
    more.iter().for_each(register);
    assert_eq!(many.iter().filter(woken).count(), early + 10);
    assert!(!woken(&&stays) && !more.iter().any(|task| woken(&task)));
    drop(wakers.take());
    assert!(many.iter().chain(&more).all(|task| woken(&task)) && woken(&&stays));
}

/// A task that only its waker keeps alive, and that waits here.
#[test]
fn a_task_may_end_when_it_is_forgotten() {
    struct Task(Arc<Wakers>, u64);
    impl Wake for Task {
        fn wake(self: Arc<Self>) {}
    }
    impl Drop for Task {
        fn drop(&mut self) {
            self.0.forget(self.1);
        }
    }
    let wakers = Arc::new(Wakers::default());
    for number in [1, 2] {
        wakers.set(7, &Waker::from(Arc::new(Task(wakers.clone(), number))));
    }
    wakers.forget(7);
    assert!(wakers.take().is_empty());
}
