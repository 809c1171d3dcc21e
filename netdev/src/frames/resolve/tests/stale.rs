//! Cached lookups, and everything that invalidates them: changed ways, reused ids, and missing
//! answers.

use super::*;

/// Where a new path leads: as [`hop`], or `none` if it is refused.
fn way(table: &mut PathTable, guard: &mut Paths, remote: &str) -> String {
    let local = if remote.contains(':') { "fd09::1" } else { "10.9.0.1" };
    match table.add(&spec(local, remote), guard) {
        Ok(path) => hop(table, path.id),
        Err(_) => "none".into(),
    }
}

/// Changes, and where new paths to 10.9.0.7, 192.0.2.1 and fd09::7 lead after each.
const CHANGES: [(&str, [&str; 3]); 17] = [
    ("ip neigh change 10.9.0.7 lladdr 02:00:00:00:00:17 dev v0", ["17", "17", "0a"]),
    ("ip neigh change fd09::7 lladdr 02:00:00:00:00:1a dev v0", ["07", "07", "1a"]),
    ("ip neigh change 10.9.0.7 dev v0 nud stale", ["guard", "guard", "0a"]),
    ("ip neigh del 10.9.0.7 dev v0", ["guard", "guard", "0a"]),
    ("ip neigh del fd09::7 dev v0", ["07", "07", "guard"]),
    ("ip neigh flush dev v0 nud permanent", ["guard", "guard", "guard"]),
    ("ip route replace 192.0.2.0/24 via 10.9.0.8", ["07", "08", "0a"]),
    ("ip route add 192.0.2.1/32 via 10.9.0.8", ["07", "08", "0a"]),
    ("ip route add 10.9.0.7/32 via 10.9.0.8", ["08", "07", "0a"]),
    ("ip route add fd09::7/128 via fd09::8", ["07", "07", "08"]),
    ("ip route del 192.0.2.0/24", ["07", "none", "0a"]),
    ("ip route add prohibit 192.0.2.1/32", ["07", "none", "0a"]),
    // The port has another way to it.
    ("ip route add 192.0.2.1/32 dev w0", ["07", "07", "0a"]),
    (
        "ip route add default via 10.9.0.8 table 77; ip rule add prio 77 to 192.0.2.0/24 lookup 77",
        ["07", "08", "0a"],
    ),
    // More announcements than the queue holds: the change itself is not among those left.
    (
        "for host in $(seq 100 200); do
             ip neigh replace 10.9.0.$host lladdr 02:00:00:00:00:99 dev v0
         done
         ip neigh change 10.9.0.7 lladdr 02:00:00:00:00:17 dev v0",
        ["17", "17", "0a"],
    ),
    ("ip address del 10.9.0.1/24 dev v0", ["none", "none", "0a"]),
    ("ip link set v0 down", ["none", "none", "none"]),
];

/// The initial state, restored after any change.
const KNOWN: &str = "ip link set v0 up
    for way in 10.9.0.7/32 192.0.2.1/32 'prohibit 192.0.2.1/32' fd09::7/128 'default table 77'; do
        ip route del $way 2>/dev/null || ip -6 route del $way 2>/dev/null || true
    done
    ip rule del prio 77 2>/dev/null || true
    ip address replace 10.9.0.1/24 dev v0
    ip neigh replace 10.9.0.7 lladdr 02:00:00:00:00:07 dev v0
    ip neigh replace 10.9.0.8 lladdr 02:00:00:00:00:08 dev v0
    ip neigh replace fd09::7 lladdr 02:00:00:00:00:0a dev v0
    ip neigh replace fd09::8 lladdr 02:00:00:00:00:08 dev v0
    ip route replace 192.0.2.0/24 via 10.9.0.7";

fn neighbours() -> io::Result<Pair> {
    let pair = Pair::new_in_calm()?;
    pair.a.sh("ip link add w0 type veth peer name w1; ip link set w1 up; ip link set w0 up");
    pair.a.sh(KNOWN);
    Ok(pair)
}

#[test]
fn a_path_made_right_after_a_change_goes_where_that_says() {
    const REMOTES: [&str; 3] = ["10.9.0.7", "192.0.2.1", "fd09::7"];
    let pair = or_skip!(neighbours());
    for (change, expected) in CHANGES {
        pair.a.sh(KNOWN);
        with_table(&pair, |mut table, mut guard| {
            table.monitor.shrink();
            let before = REMOTES.map(|remote| way(&mut table, &mut guard, remote));
            assert_eq!(before, ["07", "07", "0a"], "before {change}");
            table.recent.keep();
            let now = Instant::now();
            for remote in REMOTES.map(|remote| remote.parse::<IpAddr>().expect("address")) {
                let local = if remote.is_ipv4() { "10.9.0.1" } else { "fd09::1" };
                let question = (local.parse().expect("address"), remote, 0);
                assert!(table.recent.get(now, &question).is_some(), "it is remembered");
            }
            pair.a.sh(change);
            table.maintain(|_| false);
            let after = REMOTES.map(|remote| way(&mut table, &mut guard, remote));
            assert_eq!(after, expected, "{change}");
        });
    }
}

/// A cached lookup holds for one question only: not for another address, nor for another TOS.
#[test]
fn what_is_remembered_of_one_way_is_not_taken_for_another() {
    let pair = or_skip!(neighbours());
    pair.a.sh("ip address add 10.9.0.11/24 dev v0
               ip route add default via 10.9.0.8 table 77
               ip rule add prio 77 from 10.9.0.11 lookup 77
               ip route add tos 0x10 192.0.2.0/24 via 10.9.0.8");
    with_table(&pair, |mut table, mut guard| {
        let near = spec("10.9.0.1", "192.0.2.1");
        let mut way = |spec: PathSpec| {
            let path = table.add(&spec, &mut guard).expect("a path").id;
            table.recent.keep();
            hop(&mut table, path)
        };
        for _ in 0..3 {
            assert_eq!(way(near), "07");
            assert_eq!(way(PathSpec { local: "10.9.0.11".parse().expect("own"), ..near }), "08");
            assert_eq!(way(PathSpec { tos: 0x10, ..near }), "08");
            assert_eq!(way(PathSpec { remote: "10.9.0.8".parse().expect("peer"), ..near }), "08");
        }
    });
}

/// New paths use the interface's current Ethernet address, even if their lookup was cached.
#[test]
fn a_new_path_leaves_from_the_interfaces_new_address() {
    let pair = or_skip!(neighbours());
    with_table(&pair, |mut table, mut guard| {
        let mut from = |table: &mut PathTable| {
            let path = table.add(&spec("10.9.0.1", "10.9.0.7"), &mut guard).expect("a path").id;
            let Some(Hop::Direct(template)) = table.hop(path) else { panic!("it is known") };
            let mut frame = vec![0; template.header_len()];
            template.write(&mut frame, 0, 0);
            frame[11]
        };
        assert_eq!(from(&mut table), 1);
        table.recent.keep();
        // The kernel drops neighbours on that change.
        pair.a.sh("ip link set v0 address 02:00:00:00:09:77
                   ip neigh replace 10.9.0.7 lladdr 02:00:00:00:00:07 dev v0");
        settle(&mut table);
        assert!(table.take_interface_change());
        table.check_interface().expect("it is there");
        assert_eq!(from(&mut table), 0x77);
    });
}

/// A new path with a reused id inherits nothing, and other paths continue.
#[test]
fn a_path_with_a_reused_id_has_nothing_of_the_one_before() {
    let pair = or_skip!(neighbours());
    with_table(&pair, |mut table, mut guard| {
        let [old, other] = ["10.9.0.7", "fd09::7"].map(|remote| {
            let local = if remote.contains(':') { "fd09::1" } else { "10.9.0.1" };
            table.add(&spec(local, remote), &mut guard).expect("a path").id
        });
        settle(&mut table);
        // Both are busy: checking their neighbours, and about to turn.
        pair.a.sh(
            "ip neigh change 10.9.0.7 dev v0 nud stale; ip neigh change fd09::7 dev v0 nud stale",
        );
        maintain(&mut table);
        assert_eq!([old, other].map(|path| hop(&mut table, path)), ["guard", "guard"]);
        assert_eq!([old, other].map(|path| table.take_ip_ids(path, 60)), [0, 0]);
        [old, other].into_iter().for_each(|path| table.sent(path, 9));
        pair.a.sh("ip neigh del 10.9.0.7 dev v0; ip neigh del fd09::7 dev v0");
        table.flushed(|_| false);
        assert_eq!([old, other].map(|path| hop(&mut table, path)), ["07", "0a"]);
        maintain_while(&mut table, |_| true);
        assert!(table.hop(old).is_none() && table.hop(other).is_none(), "they are to turn");

        table.remove(old, &mut guard);
        let new = table.add(&spec("10.9.0.1", "10.9.0.8"), &mut guard).expect("a path").id;
        assert_eq!(new, old);
        assert_eq!(hop(&mut table, new), "08", "it does not wait for the other's datagrams");
        assert_eq!(table.take_ip_ids(new, 1), 0);
        table.flushed(|sent| {
            assert_eq!((sent.path, sent.last), (other, 9), "nothing else is to be waited for");
            true
        });
        assert!(table.hop(other).is_none() && table.is_turning(), "its frames still wait");
        table.remove(other, &mut guard);
        assert!(!table.is_turning());
        assert_eq!(hop(&mut table, new), "08");
    });
}

/// A burst for a neighbour check belongs to the new path only.
#[test]
fn a_reused_id_does_not_end_a_check_that_is_not_done() {
    let pair = or_skip!(neighbours());
    pair.a.sh("ip neigh change 10.9.0.7 dev v0 nud stale");
    with_table(&pair, |mut table, mut guard| {
        let mut add = |table: &mut PathTable| {
            table.add(&spec("10.9.0.1", "10.9.0.7"), &mut guard).expect("a path").id
        };
        let old = add(&mut table);
        assert_eq!(hop(&mut table, old), "guard", "stale");
        table.remove(old, &mut Paths::default());
        let new = add(&mut table);
        assert_eq!(new, old);
        table.flushed(|_| false);
        assert_eq!(hop(&mut table, new), "guard", "it has sent nothing yet");
        table.flushed(|_| false);
        assert_eq!(hop(&mut table, new), "07");
    });
}

/// The guard has ids of its own, and reuses them too.
#[test]
fn a_failure_of_the_guards_path_is_of_the_path_that_has_it_now() {
    let pair = or_skip!(neighbours());
    with_table(&pair, |mut table, mut guard| {
        let mut add = |remote| table.add(&spec("10.9.0.1", remote), &mut guard).expect("a path").id;
        let paths = ["10.9.0.7", "10.9.0.8", "192.0.2.1"].map(&mut add);
        assert_eq!([100, 101, 102].map(|id| table.of_guard(PathId(id))), paths.map(Some));
        table.remove(paths[1], &mut guard);
        assert_eq!(table.of_guard(PathId(101)), None);
        let new = table.add(&spec("10.9.0.1", "10.9.0.7"), &mut guard).expect("a path").id;
        assert_eq!(new, paths[1]);
        assert_eq!([101, 103].map(|id| table.of_guard(PathId(id))), [None, Some(new)]);
    });
}

/// A path that is refused takes neither an id nor a path of the guard.
#[test]
fn a_path_that_is_refused_takes_nothing() {
    let pair = or_skip!(neighbours());
    with_table(&pair, |mut table, mut guard| {
        let first = table.add(&spec("10.9.0.1", "10.9.0.7"), &mut guard).expect("a path").id;
        let gone = table.add(&spec("10.9.0.1", "10.9.0.7"), &mut guard).expect("a path").id;
        table.remove(gone, &mut guard);
        for _ in 0..100 {
            for (local, remote) in [
                ("10.9.0.1", "203.0.113.1"),
                ("10.9.0.1", "10.9.0.255"),
                ("10.9.0.1", "fd09::7"),
                ("10.9.0.5", "10.9.0.7"),
            ] {
                table.add(&spec(local, remote), &mut guard).expect_err(remote);
            }
        }
        assert_eq!((guard.0.len(), table.entries.len(), table.free.len()), (2, 2, 1));
        let next = table.add(&spec("10.9.0.1", "10.9.0.7"), &mut guard).expect("a path").id;
        assert_eq!((first, next), (PathId(0), gone));
    });
}

#[test]
fn without_answers_paths_stay_as_they_are_and_are_looked_at_again() {
    let pair = or_skip!(neighbours());
    with_table(&pair, |mut table, mut guard| {
        let remotes = ["10.9.0.7", "10.9.0.8", "fd09::7"];
        let paths = remotes.map(|remote| {
            let local = if remote.contains(':') { "fd09::1" } else { "10.9.0.1" };
            table.add(&spec(local, remote), &mut guard).expect("a path").id
        });
        settle(&mut table);
        let _ = table.take_interface_change();
        table.check_interface().expect("it is there");
        let answers = std::mem::replace(&mut table.rtnl, Rtnl::to_nobody().expect("a socket"));
        let mut ask_in_vain = |expected: [&str; 3]| {
            // Too few rounds for a route lookup.
            for round in 0..ROUTE_REFRESHES / 2 {
                let wait = maintain(&mut table).expect("nothing else wakes it");
                assert!(wait <= REFRESH, "round {round}: {wait:?}");
                if table.take_interface_change() {
                    table.check_interface().expect_err("no answer");
                }
                assert_eq!(paths.map(|path| hop(&mut table, path)), expected, "round {round}");
            }
        };
        pair.a.sh("ip neigh change 10.9.0.7 lladdr 02:00:00:00:00:17 dev v0
                   ip neigh change fd09::7 lladdr 02:00:00:00:00:1a dev v0");
        ask_in_vain(["07", "08", "0a"]);
        // Without a known route the kernel has to choose.
        pair.a.sh("ip link set v0 address 02:00:00:00:09:77
                   ip neigh replace 10.9.0.7 lladdr 02:00:00:00:00:17 dev v0
                   ip neigh replace 10.9.0.8 lladdr 02:00:00:00:00:08 dev v0
                   ip neigh replace fd09::7 lladdr 02:00:00:00:00:1a dev v0");
        ask_in_vain(["guard"; 3]);
        table.rtnl = answers;
        settle(&mut table);
        assert_eq!(paths.map(|path| hop(&mut table, path)), ["17", "08", "1a"]);
        assert!(table.take_interface_change(), "the interface is looked at again, too");
        assert_eq!(table.check_interface().expect("an answer")[5], 0x77);
        assert_eq!(settle_wait(&mut table), None, "and then there is no need to");
    });
}

/// Nothing is sent on the path, so only announcements cause a refresh.
#[test]
fn an_idle_path_that_could_not_be_looked_at_is_looked_at_again() {
    let pair = or_skip!(neighbours());
    with_table(&pair, |mut table, mut guard| {
        let path = table.add(&spec("10.9.0.1", "10.9.0.7"), &mut guard).expect("a path").id;
        settle(&mut table);
        let answers = std::mem::replace(&mut table.rtnl, Rtnl::to_nobody().expect("a socket"));
        pair.a.sh("ip neigh change 10.9.0.7 lladdr 02:00:00:00:00:17 dev v0");
        for round in 0..20 {
            assert!(maintain_idle(&mut table).is_some_and(|wait| wait <= REFRESH), "{round}");
        }
        table.rtnl = answers;
        settle(&mut table);
        assert_eq!(hop(&mut table, path), "17");
    });
}

/// The result of `maintain` after everything was read.
fn settle_wait(table: &mut PathTable) -> Option<Duration> {
    settle(table);
    table.maintain(|_| false)
}
