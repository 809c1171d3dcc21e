//! Chooses a core for each of the two processes, so that two spinning processes do not share one by
//! chance.

use std::fs;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// Binds the calling thread to the core with index `index` (0 or 1) of the pair. In a process with
/// one thread this binds the process. Does nothing if there is only one core or the kernel refuses:
/// the scheduler then decides.
pub fn bind(index: usize) {
    let this = Pid::from_raw(0);
    let Ok(allowed) = sched_getaffinity(this) else { return };
    let mut allowed: Vec<usize> =
        (0..CpuSet::count()).filter(|core| allowed.is_set(*core).unwrap_or(false)).collect();
    if let Some(turn) = first_of(&allowed, nix::unistd::getppid().as_raw()) {
        allowed.rotate_left(turn);
    }
    let Some(pair) = pair(&allowed, siblings) else { return };
    let mut one = CpuSet::new();
    if pair.get(index).is_some_and(|core| one.set(*core).is_ok()) {
        let _ = sched_setaffinity(this, &one);
    }
}

/// The first core to use: the same for all processes of one parent, and likely another one for
/// processes of another parent.
fn first_of(allowed: &[usize], parent: i32) -> Option<usize> {
    usize::try_from(parent).ok()?.checked_rem(allowed.len())
}

/// The first core, and the first of the others that is not a hardware thread of the same core, if
/// there is one.
fn pair(allowed: &[usize], siblings: impl Fn(usize) -> Vec<usize>) -> Option<[usize; 2]> {
    let (first, others) = allowed.split_first()?;
    let same = siblings(*first);
    let other = others.iter().find(|core| !same.contains(core)).or(others.first())?;
    Some([*first, *other])
}

/// The hardware threads of the core that `core` belongs to.
fn siblings(core: usize) -> Vec<usize> {
    let path = format!("/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list");
    fs::read_to_string(path).map(|list| numbers(list.trim())).unwrap_or_default()
}

/// Reads one of the kernel's lists: `0-2,8`.
fn numbers(list: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    list.split(',').filter_map(range).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_core_is_not_a_thread_of_the_first() {
        let threads = |list| move |_| numbers(list);
        assert_eq!(pair(&[0, 1, 2, 3], threads("0-1")), Some([0, 2]));
        assert_eq!(pair(&[0, 1, 2, 3], threads("0,2")), Some([0, 1]));
        assert_eq!(pair(&[4, 5], threads("4-5")), Some([4, 5]));
        assert_eq!(pair(&[7], threads("")), None);
        assert_eq!(pair(&[], threads("")), None);
    }
}
