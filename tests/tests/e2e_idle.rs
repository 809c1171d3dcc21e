//! Idle connected devices cost next to nothing, also while the program sleeps on a channel.
//!
//! This is the only test of its process, because it measures the processor time of all threads.

use std::fs;
use std::time::Duration;

use rocinante::verbs::SendOp;
use rocinante::{Qp, RecvWr};
use rocinante_tests::harness::{Harness, Setup, next, wr};
use rocinante_tests::{need, require};

const IDLE: Duration = Duration::from_secs(5);
/// A thousandth of a core.
const CPU_MAX: Duration = Duration::from_millis(5);
/// How often a device may wake in that time: less than once a second, as it would if it polled the
/// network. The kernel reports changes of neighbours.
const WAKES_MAX: u64 = 3;
/// A part of the names of devices' threads.
const BACKGROUND: &str = "roce-";

#[test]
fn idle_connected_devices_cost_next_to_nothing() {
    require!(need::lab());
    let backends = need::backends("e2e_idle::idle_connected_devices_cost_next_to_nothing");
    let harnesses: Vec<Harness> =
        backends.into_iter().map(|backend| Harness::new(&Setup::new(backend))).collect();
    let pairs: Vec<[Qp; 2]> = harnesses.iter().map(Harness::pair).collect();
    // All were busy once.
    for (harness, [qp, peer]) in harnesses.iter().zip(&pairs) {
        let [a, b] = &harness.sides;
        for wr_id in 0..100 {
            peer.post_recv(&[RecvWr { wr_id, sges: &[] }]).unwrap();
            qp.post_send(&[wr(wr_id, SendOp::Send { imm: None }, &[])]).unwrap();
            a.succeed(wr_id);
            assert_eq!(next(&b.cq).wr_id, wr_id);
        }
    }
    // A busy machine may delay what the devices still do.
    let mut too_much = Vec::new();
    for _ in 0..4 {
        too_much = spent_too_much(&harnesses);
        if too_much.is_empty() {
            return;
        }
    }
    panic!("in {IDLE:?}: {too_much:?}");
}

/// The threads that cost more than they may.
fn spent_too_much(harnesses: &[Harness]) -> Vec<String> {
    std::thread::scope(|scope| {
        // The program of each first device sleeps on a channel; that of each second device does
        // nothing.
        for harness in harnesses {
            let sleeper = std::thread::Builder::new().name("sleeper".into());
            let sleeper = sleeper.spawn_scoped(scope, move || {
                let ctx = &harness.sides[0].ctx;
                let channel = ctx.create_comp_channel().unwrap();
                let cq = ctx.create_cq_with(16, &channel).unwrap();
                cq.req_notify(false).unwrap();
                let limit = IDLE + Duration::from_secs(2);
                assert!(channel.wait_event(Some(limit)).is_err(), "nothing happens");
            });
            sleeper.unwrap();
        }
        std::thread::sleep(Duration::from_millis(500));
        let before = threads();
        std::thread::sleep(IDLE);
        let after = threads();
        let (mut looked_at, mut too_much) = (0, Vec::new());
        for (tid, name, spent, wakes) in &after {
            if !name.starts_with(BACKGROUND) && name != "sleeper" {
                continue;
            }
            looked_at += 1;
            let Some(earlier) = before.iter().find(|(id, ..)| id == tid) else {
                too_much.push(format!("{name} {tid} is new"));
                continue;
            };
            let (spent, wakes) = (spent.saturating_sub(earlier.2), wakes - earlier.3);
            println!("{name} {tid}: {spent:?} and {wakes} wake-ups in {IDLE:?}");
            if spent > CPU_MAX || wakes > WAKES_MAX {
                too_much.push(format!("{name} {tid}: {spent:?}, {wakes} wake-ups"));
            }
        }
        // Two devices of two threads each, and one that sleeps on them.
        if looked_at != 5 * harnesses.len() {
            too_much.push(format!("{looked_at} threads"));
        }
        too_much
    })
}

/// For each thread of this process: id, name, processor time, and how often it fell asleep.
fn threads() -> Vec<(String, String, Duration, u64)> {
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    tasks
        .filter_map(|task| {
            let read = |file| fs::read_to_string(task.path().join(file)).ok();
            // Nanoseconds on a processor, nanoseconds waiting for one, and the number of time
            // slices.
            let stat = read("schedstat")?;
            let spent = stat.split_whitespace().next()?.parse().ok()?;
            let name = read("comm")?.trim().to_owned();
            let tid = task.file_name().to_string_lossy().into_owned();
            let status = read("status")?;
            let (_, sleeps) = status.split_once("\nvoluntary_ctxt_switches:")?;
            let sleeps = sleeps.split_whitespace().next()?.parse().ok()?;
            Some((tid, name, Duration::from_nanos(spent), sleeps))
        })
        .collect()
}
