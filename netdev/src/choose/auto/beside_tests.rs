//! `afxdp` beside a neighbour that has it.

use super::*;
use crate::frames::xdp::tests::another_program;
use crate::testing::testns::{Pair, or_skip, wait_until, without_capability};

/// `CAP_NET_RAW` of capabilities(7).
const NET_RAW: u32 = 13;

fn v0() -> (Interface, Vec<IpAddr>) {
    let iface = Interface::by_name("v0").expect("the interface");
    let addresses = iface.addresses.iter().map(|(a, _)| *a).take(1).collect();
    (iface, addresses)
}

/// A process's ports, their backend, and its slots. To the kernel two of these in one process are
/// as two processes.
type Process = (Vec<AnyPort>, Choice, Option<Arc<Slots>>);

fn process(want: Option<Backend>) -> Result<Process, OpenError> {
    process_after(want, || ())
}

/// Calls `opens` when it has its slots and opens its ports.
fn process_after(want: Option<Backend>, opens: impl FnOnce()) -> Result<Process, OpenError> {
    let (iface, addresses) = v0();
    let config = PortConfig::default();
    let (shards, slots) = lease(&iface, &addresses, &config, 1)?;
    let sharing = (shards, slots.as_ref());
    opens();
    let (ports, choice) = choose_shards(&iface, &addresses, want, &config, sharing, &Agent::off())?;
    assert_eq!(ports[0].capabilities().backend, choice.backend);
    Ok((ports, choice, slots))
}

fn previewed(want: Option<Backend>) -> Choice {
    let (iface, addresses) = v0();
    let (_, choice) =
        preview(&iface, &addresses, want, &PortConfig::default(), &Agent::off()).expect("a choice");
    choice
}

#[test]
fn the_next_backend_is_taken_beside_a_neighbour_that_has_afxdp() {
    let pair = or_skip!("auto::the_next_backend_is_taken_beside", Pair::new_seeing());
    let want = Some(Backend::Xdp);
    let first = or_skip!("auto::the_next_backend_is_taken_beside", pair.a.run(|| process(want)));
    assert_eq!((first.1.backend, &*first.1.reason), (Backend::Xdp, "asked for"));
    let because = "not afxdp, because another process on 10.9.0.1 has it, and v0 has one program";
    let beside = pair.a.run(|| process(want)).expect("the next backend");
    assert_eq!((beside.1.backend, &*beside.1.reason), (Backend::Packet, because));
    assert_eq!(beside.1.tried.iter().map(|(it, _)| *it).collect::<Vec<_>>(), [Backend::Xdp]);
    assert_eq!(pair.a.run(|| previewed(want)), beside.1);
    // Other wishes are as ever.
    let choice = pair.a.run(|| process(Some(Backend::Packet))).expect("packet").1;
    assert_eq!((choice.backend, &*choice.reason), (Backend::Packet, "asked for"));
    let choice = pair.a.run(|| process(None)).expect("a port").1;
    assert_eq!((choice.backend, choice.tried.len()), (Backend::Packet, 0), "{choice}");
    // Where that is denied, both reasons are given.
    let lame = || without_capability(NET_RAW, || process(want));
    let choice = pair.a.run(lame).expect("udp").1;
    assert_eq!((choice.backend, choice.tried.len()), (Backend::Udp, 2), "{choice}");
    assert!(choice.reason.starts_with(because), "{choice}");
    assert!(choice.reason.contains("; not packet, because packet: cannot open"), "{choice}");
    // Rules bind none the less by being named.
    pair.a.sh("nft add table inet t
               nft add chain inet t out '{ type filter hook output priority 0; }'
               nft add rule inet t out udp dport 4791 drop");
    let choice = pair.a.run(|| process(want)).expect("packet").1;
    assert!(choice.reason.starts_with(&format!("{because}; it bypasses nft: rule")), "{choice}");
    pair.a.sh("nft flush ruleset");
    // The neighbour keeps its backend, and the next one gets the free one.
    drop(first);
    let next = pair.a.run(|| process(want)).expect("afxdp");
    assert_eq!((next.1.backend, &*next.1.reason), (Backend::Xdp, "asked for"));
    assert_eq!(pair.a.run(|| process(want)).expect("the next backend").1.backend, Backend::Packet);
}

/// The first one has it, and the other one learns that.
#[test]
fn of_two_that_name_afxdp_at_once_one_has_it() {
    let pair = or_skip!("auto::of_two_that_name_afxdp_at_once", Pair::new());
    let want = Some(Backend::Xdp);
    drop(or_skip!("auto::of_two_that_name_afxdp_at_once", pair.a.run(|| process(want))));
    for round in 0..5 {
        let start = std::sync::Barrier::new(2);
        let run = || pair.a.run(|| process_after(want, || _ = start.wait()));
        let both = std::thread::scope(|scope| {
            [scope.spawn(run), scope.spawn(run)].map(|it| it.join().unwrap())
        });
        let mut got = both.map(|it| {
            let (ports, choice, slots) = it.unwrap_or_else(|e| panic!("round {round}: {e}"));
            ((choice.backend == Backend::Xdp, choice.tried.len()), ports, slots)
        });
        got.sort_by_key(|it| it.0);
        assert_eq!(got.map(|it| it.0), [(false, 1), (true, 0)], "round {round}");
    }
}

/// The budget announced to peers follows the ring.
#[test]
fn a_port_that_joins_has_a_smaller_ring_and_says_so() {
    let pair = or_skip!("auto::a_port_that_joins_has_a_smaller_ring", Pair::new());
    let mut all = Vec::new();
    for _ in 0..5 {
        all.push(or_skip!(
            "auto::a_port_that_joins_has_a_smaller_ring",
            pair.a.run(|| process(Some(Backend::Packet)))
        ));
    }
    let budgets = all.iter().map(|it| it.0[0].capabilities().rx_budget.datagrams);
    // Of whole blocks of 15, three quarters.
    assert_eq!(budgets.collect::<Vec<_>>(), [203, 102, 102, 57, 57]);
}

#[test]
fn a_program_of_a_stranger_is_an_error_beside_neighbours_too() {
    let pair = or_skip!("auto::a_program_of_a_stranger", Pair::new());
    let want = Some(Backend::Xdp);
    let stranger =
        or_skip!("auto::a_program_of_a_stranger", pair.a.run(|| another_program(v0().0.index)));
    let _neighbour = pair.a.run(|| process(Some(Backend::Udp))).expect("udp");
    // While it tries, a neighbour sees that it does, if that one gets a processor meanwhile.
    let is_seen = || {
        std::thread::scope(|scope| {
            let tries = scope.spawn(|| pair.a.run(|| process(want)).map(|it| it.1));
            let is_seen = loop {
                let is_seen = pair.a.run(|| previewed(want).backend) == Backend::Packet;
                if is_seen || tries.is_finished() {
                    break is_seen;
                }
            };
            let error = tries.join().unwrap().expect_err("it is attached");
            assert!(error.to_string().contains("another XDP program"), "{error}");
            is_seen
        })
    };
    wait_until("others see that one process opens it", is_seen);
    // A failed try is seen by no other process.
    drop(stranger);
    let choice = pair.a.run(|| process(want)).expect("it has gone").1;
    assert_eq!(choice.backend, Backend::Xdp);
}
