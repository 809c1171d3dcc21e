//! Goodput over real namespaces while the host's bridge drops packets at random: 1 MiB WRITEs on one queue pair, path MTU 4096, in bytes that were
//! acknowledged. The unit of loss is the kernel's packet: a super-packet, or, with segmentation switched off, a datagram.
//!
//! `cargo bench -p rocinante-benches --bench loss`, as root. It prints a table; there is no delay, which the simulated table beside
//! `stack/tests/goodput.rs` has.

use std::time::{Duration, Instant};

use rocinante::{Access, Backend, Mtu, SendOp, WcStatus};
use rocinante_tests::harness::{Harness, Setup, wr};
use rocinante_tests::lab::Match;

/// Bytes of a message.
const MESSAGE: usize = 1 << 20;
/// Messages under way.
const DEPTH: u64 = 8;
/// Of one cell.
const TIME: Duration = Duration::from_millis(700);
const PERCENT: [f64; 5] = [0.0, 0.01, 0.1, 1.0, 5.0];

fn main() {
    // What `cargo test --benches` runs is not a measurement.
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    println!("| backend | lost is | receive buffers | {} |", PERCENT.map(heading).join(" | "));
    println!("|---|---|---|{}", "---|".repeat(PERCENT.len()));
    for backend in [Backend::Udp, Backend::Packet, Backend::Xdp] {
        for (whole, small) in [(true, false), (true, true), (false, false), (false, true)] {
            // AF_XDP sends no super-packets, and has a ring instead of a buffer.
            if backend == Backend::Xdp && (!whole || small) {
                continue;
            }
            let unit =
                if whole && backend != Backend::Xdp { "a super-packet" } else { "a datagram" };
            let buffers = if small { "212,992 B" } else { "default" };
            let cells = PERCENT.map(|percent| cell(backend, whole, small, percent));
            println!("| `{backend}` | {unit} | {buffers} | {} |", cells.join(" | "));
        }
    }
}

fn heading(percent: f64) -> String {
    format!("{percent} %")
}

/// Gb/s, and packets sent again of a hundred.
fn cell(backend: Backend, whole: bool, small: bool, percent: f64) -> String {
    let mut setup = Setup::new(backend).mtu(Mtu::Mtu4096);
    setup.segmentation = whole;
    if small {
        setup = setup.small_buffers();
    }
    let harness = Harness::new(&setup);
    let [qp, _peer] = harness.pair();
    let [a, b] = &harness.sides;
    let regions = [a, b].map(|side| side.pd.allocate(MESSAGE, Access::ALL).expect("memory"));
    let op = SendOp::Write { remote: regions[1].address(), rkey: regions[1].rkey(), imm: None };
    let list = [regions[0].sge(0, MESSAGE)];
    let post = |number| qp.post_send(&[wr(number, op, &list)]).expect("room");
    post(0);
    a.succeed(0);
    let rule = (percent > 0.0).then(|| harness.lab().lose(&Match::roce(), percent).expect("nft"));
    (0..DEPTH).for_each(post);
    let (start, mut done) = (Instant::now(), 0);
    while start.elapsed() < TIME {
        assert_eq!(a.next().status, WcStatus::Success);
        done += 1;
        post(done);
    }
    let gigabits = done as f64 * MESSAGE as f64 * 8.0 / start.elapsed().as_nanos() as f64;
    drop(rule);
    let counters = a.ctx.counters().transport;
    let again = 100.0 * counters.retransmitted_pkts as f64 / counters.sent_pkts as f64;
    format!("{gigabits:.2} ({again:.1} again)")
}
