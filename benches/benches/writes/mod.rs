//! Goodput of WRITEs between two containers.

use std::time::{Duration, Instant};

use rocinante::verbs::SendOp;
use rocinante::{Mr, Qp, WcStatus};
use rocinante_tests::harness::{Side, wr};

/// Writes all of `mine` over all of `its`, with `depth` WRITEs in flight, for `time`. Returns Gb/s
/// of acknowledged bytes. Panics if a request fails.
pub(crate) fn goodput(
    side: &Side,
    qp: &Qp,
    [mine, its]: [&Mr; 2],
    depth: u64,
    time: Duration,
) -> f64 {
    let op = SendOp::Write { remote: its.address(), rkey: its.rkey(), imm: None };
    let list = [mine.sge(0, mine.len())];
    let post = |number| qp.post_send(&[wr(number, op, &list)]).expect("room");
    (0..depth).for_each(post);
    let (start, mut done) = (Instant::now(), 0);
    while start.elapsed() < time {
        assert_eq!(side.next().status, WcStatus::Success);
        done += 1;
        post(done);
    }
    let gigabits = done as f64 * mine.len() as f64 * 8.0 / start.elapsed().as_nanos() as f64;
    (0..depth).for_each(|_| assert_eq!(side.next().status, WcStatus::Success));
    gigabits
}

/// Whether `cargo bench` runs this program: a run by `cargo test --benches` is not a measurement.
#[must_use]
pub(crate) fn is_wanted() -> bool {
    std::env::args().any(|argument| argument == "--bench")
}
