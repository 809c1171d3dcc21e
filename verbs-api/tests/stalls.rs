//! A process that did not run for a while reads its waiting packets before it concludes that a peer
//! is silent, and does not spin where it keeps others from the processor. Two devices on a
//! simulated network, in real time.

mod sim;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rocinante::SendWr;
use rocinante::verbs::{SendData, SendOp};
use rocinante_netdev::sim::{SimNet, Verdict};
use sim::{Side, connect, sides};

fn timeouts(side: &Side) -> u64 {
    side.ctx.counters().transport.local_ack_timeout_err
}

/// Answers the packets that have arrived. A plain acknowledgement waits for the second call.
fn serve(side: &Side) {
    side.ctx.progress();
    side.ctx.progress();
}

/// A WRITE of eight bytes.
fn write(wr_id: u64, to: &Side, signaled: bool) -> SendWr<'static> {
    let op = SendOp::Write { remote: to.mr.address(), rkey: to.mr.rkey(), imm: None };
    sim::request(wr_id, op, SendData::Inline(&[7; 8])).signaled(signaled)
}

/// The answer is the last packet of more than one burst, and the process reads the bursts only long
/// after the timeout.
#[test]
fn an_answer_that_waits_behind_many_packets_is_no_silence() {
    const BEFORE: usize = 400;
    const TIMEOUT_10: Duration = Duration::from_nanos(4096 << 10);
    let net = SimNet::new();
    let sides = sides(&net, [false, false]);
    let [a, b] = &sides;
    let [_its, busy] = connect(&sides, 20);
    let [qp, _peer] = connect(&sides, 10);
    qp.post_send(&[write(1, b, true)]).unwrap();
    busy.post_send(&vec![write(2, a, false); BEFORE]).unwrap();
    // b reads the WRITE and answers only now.
    serve(b);
    assert!(net.stats().delivered > 300, "more than a burst, if not all at once");
    std::thread::sleep(3 * TIMEOUT_10);
    a.succeed(1);
    let counters = a.ctx.counters().transport;
    assert_eq!((counters.local_ack_timeout_err, counters.retransmitted_pkts), (0, 0));
    assert_eq!(b.ctx.counters().transport.duplicate_request, 0);
}

/// The process stands still between writing a packet and sending it, for longer than the timeout.
/// The peer's time starts only when the packet leaves.
#[test]
fn the_timeout_begins_when_the_packet_leaves() {
    const TIMEOUT_14: Duration = Duration::from_nanos(4096 << 14);
    let net = SimNet::new();
    let sides = sides(&net, [false, false]);
    let [a, b] = &sides;
    let [qp, _peer] = connect(&sides, 14);
    let left = Arc::new(Mutex::new(None));
    for round in 0..20 {
        let stamp = left.clone();
        net.set_tap(Some(Box::new(move |_| {
            std::thread::sleep(2 * TIMEOUT_14);
            *stamp.lock().unwrap() = Some(Instant::now());
            Verdict::Pass
        })));
        let before = timeouts(a);
        qp.post_send(&[write(round, b, true)]).unwrap();
        net.set_tap(None);
        a.ctx.progress();
        let waited = left.lock().unwrap().take().map(|left: Instant| left.elapsed()).unwrap();
        let after = timeouts(a);
        serve(b);
        a.succeed(round);
        // Unless the machine stalled this thread once more.
        if waited < TIMEOUT_14 {
            assert_eq!(before, after);
            return;
        }
    }
    panic!("this machine is too busy: a thread never ran for {TIMEOUT_14:?}");
}

/// The program polled a moment ago and has stopped. A thread that a packet wakes handles it at
/// once, without leaving it to the program first: on a busy machine the program may not run again
/// for long.
#[test]
fn who_is_woken_by_a_packet_reads_it_before_it_stands_aside() {
    let net = SimNet::new();
    let sides = sides(&net, [false, true]);
    let [a, b] = &sides;
    let [qp, _peer] = connect(&sides, 20);
    // A thread that stands aside first takes at least 0.5 ms. If other programs occupy the
    // processor, few rounds show the real time.
    const AT_ONCE: Duration = Duration::from_micros(300);
    let deadline = Instant::now() + Duration::from_secs(60);
    let (mut best, mut round) = (Duration::MAX, 0);
    while best >= AT_ONCE && Instant::now() < deadline {
        // The background thread falls asleep.
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(b.cq.poll_one().unwrap(), None);
        let start = Instant::now();
        qp.post_send(&[write(round, b, true)]).unwrap();
        a.succeed(round);
        best = best.min(start.elapsed());
        round += 1;
    }
    assert!(best < AT_ONCE, "{best:?} at best of {round}");
}

/// How often this thread has gone to sleep.
fn sleeps() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.unwrap().trim().parse().unwrap()
}

/// Threads that compute have the processors. A thread that polls a queue, or the device, in vain
/// sleeps in its polls then.
#[test]
#[cfg(not(miri))]
fn a_thread_that_polls_in_vain_beside_others_sleeps() {
    use std::sync::atomic::{AtomicBool, Ordering};
    if rocinante::Turns::of_thread().is_none() {
        eprintln!("SKIPPED: the kernel does not say how long a thread waits for a processor");
        return;
    }
    let sides = sides(&SimNet::new(), [true, true]);
    let [qp, _peer] = connect(&sides, 20);
    let [a, b] = &sides;
    let until = Instant::now() + Duration::from_secs(120);
    let over = AtomicBool::new(false);
    let threads = 4 * std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        struct Over<'a>(&'a AtomicBool);
        impl Drop for Over<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let _over = Over(&over);
        for _ in 0..threads {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let polls: [&dyn Fn(); 3] = [
            &|| assert!(a.cq.poll_one().unwrap().is_none()),
            &|| assert!(a.cq.poll(&mut [rocinante::Wc::default(); 4]).unwrap().is_empty()),
            &|| a.ctx.progress(),
        ];
        for (way, poll) in polls.iter().enumerate() {
            let before = sleeps();
            // Other reasons to sleep are rare.
            while sleeps() < before + 200 {
                assert!(Instant::now() < until, "way {way}: {} sleeps", sleeps() - before);
                (0..64).for_each(|_| poll());
            }
        }
        // The next completion is found.
        qp.post_send(&[write(5, b, true)]).unwrap();
        a.succeed(5);
    });
}
