//! Goodput over real namespaces while the host's bridge drops packets at random: 1 MiB WRITEs on
//! one queue pair, path MTU 4096, in acknowledged bytes. The unit of loss is the kernel's packet: a
//! super-packet, or, without segmentation, a datagram.
//!
//! `cargo bench -p rocinante-benches --bench loss`, as root. It prints a table. There is no delay;
//! the simulated table beside `stack/tests/goodput/main.rs` has one.

mod writes;

use std::time::Duration;

use rocinante::Access;
use rocinante::device::Backend;
use rocinante::verbs::Mtu;
use rocinante_lab::Match;
use rocinante_tests::harness::{Harness, Setup};
use rocinante_tests::oracles::Oracle;

/// Bytes of a message.
const MESSAGE: usize = 1 << 20;
/// Messages in flight.
const DEPTH: u64 = 8;
/// Duration of one cell.
const TIME: Duration = Duration::from_millis(700);
const PERCENT: [f64; 5] = [0.0, 0.01, 0.1, 1.0, 5.0];

fn main() {
    if !writes::is_wanted() {
        return;
    }
    let headings = PERCENT.map(|percent| format!("{percent} %")).join(" | ");
    println!("| backend | lost is | receive buffers | {headings} |");
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

/// Goodput in Gb/s, and the percentage of retransmitted packets.
fn cell(backend: Backend, whole: bool, small: bool, percent: f64) -> String {
    let mut setup = Setup::new(backend)
        .mtu(Mtu::Mtu4096)
        .may_break(Oracle::Retransmissions, "the bridge drops packets");
    setup.segmentation = whole;
    if small {
        setup = setup.small_buffers();
    }
    let harness = Harness::new(&setup);
    let [qp, _peer] = harness.pair();
    let [a, b] = &harness.sides;
    let regions = [a, b].map(|side| side.pd.allocate(MESSAGE, Access::ALL).expect("memory"));
    // The first run resolves the neighbour, without loss.
    writes::goodput(a, &qp, [&regions[0], &regions[1]], 1, Duration::ZERO);
    let rule = (percent > 0.0).then(|| harness.lab().lose(&Match::roce(), percent).expect("nft"));
    let gigabits = writes::goodput(a, &qp, [&regions[0], &regions[1]], DEPTH, TIME);
    drop(rule);
    let counters = a.ctx.counters().transport;
    let again = 100.0 * counters.retransmitted_pkts as f64 / counters.sent_pkts as f64;
    format!("{gigabits:.2} ({again:.1} again)")
}
