mod rules;
mod stale;

use std::os::fd::BorrowedFd;

use super::*;
use crate::kernel::descriptors::wait_readable;
use crate::port::contract::{Capabilities, PortStats, RxDatagram, TxFailure, TxSlot};
use crate::testing::testns::{Pair, or_skip};

/// A guard that only hands out paths.
#[derive(Default)]
struct Paths(Vec<PathSpec>);

impl Port for Paths {
    fn capabilities(&self) -> &Capabilities {
        unreachable!("a table only adds and removes paths")
    }
    fn addresses(&self) -> &[IpAddr] {
        &[]
    }
    fn add_path(&mut self, spec: &PathSpec) -> io::Result<Path> {
        self.0.push(*spec);
        Ok(Path { id: PathId(self.0.len() as u32 + 99), src_port: 4791 })
    }
    fn remove_path(&mut self, path: PathId) {
        assert!(path.0 >= 100, "the guard's own id");
    }
    fn join(&mut self, _: IpAddr) -> io::Result<()> {
        unreachable!("a table joins nothing")
    }
    fn leave(&mut self, _: IpAddr) {}
    fn receive(&mut self, _: usize, _: impl FnMut(RxDatagram<'_>)) -> io::Result<usize> {
        Ok(0)
    }
    fn reserve(&mut self, _: PathId, _: usize) -> Option<TxSlot<'_>> {
        None
    }
    fn commit(&mut self) {}
    fn flush(&mut self, _: impl FnMut(TxFailure)) {}
    fn wants_write(&self) -> bool {
        false
    }
    fn wait_fd(&self) -> BorrowedFd<'_> {
        unreachable!("a table does not wait")
    }
    fn watch(&mut self, _: bool) -> io::Result<()> {
        Ok(())
    }
    fn maintain(&mut self) -> Option<Duration> {
        None
    }
    fn stats(&self) -> PortStats {
        PortStats::default()
    }
}

fn spec(local: &str, remote: &str) -> PathSpec {
    PathSpec {
        local: local.parse().expect("address"),
        remote: remote.parse().expect("address"),
        src_port: 0xc001,
        tos: 0,
        ttl: 64,
        flow_label: 0,
    }
}

fn open() -> PathTable {
    let iface = Interface::by_name("v0").expect("v0");
    let addresses: Vec<IpAddr> = iface.addresses.iter().map(|(a, _)| *a).collect();
    PathTable::open(&iface, &addresses).expect("netlink")
}

/// Runs `test` in the first namespace, with a table that it opens there.
fn with_table(pair: &Pair, test: impl FnOnce(PathTable, Paths) + Send) {
    pair.a.run(|| test(open(), Paths::default()));
}

/// The destination of the next datagram: an Ethernet address, `loopback` or `guard`.
fn hop(table: &mut PathTable, path: PathId) -> String {
    match table.hop(path).expect("a path") {
        Hop::Direct(template) => format!("{:02x}", template.dst_mac()[5]),
        Hop::Guard(_) => "guard".into(),
    }
}

/// Maintains as if the time were up and every path had been used.
fn maintain(table: &mut PathTable) -> Option<Duration> {
    table.entries.iter_mut().flatten().for_each(|entry| entry.used = true);
    maintain_idle(table)
}

/// Maintains as if the time were up.
fn maintain_idle(table: &mut PathTable) -> Option<Duration> {
    maintain_while(table, |_| false)
}

/// As [`maintain_idle`], while frames of some paths wait for the kernel.
fn maintain_while(table: &mut PathTable, waits: impl Fn(&Sent) -> bool) -> Option<Duration> {
    table.due = Instant::now();
    table.maintain(waits)
}

/// Maintains until there is no need to, as the driver of a port does: the table may rest from the
/// last refresh.
fn settle(table: &mut PathTable) {
    while let Some(wait) = table.maintain(|_| false) {
        assert!(wait <= REFRESH);
        std::thread::sleep(wait);
    }
}

/// The port wakes up ever more rarely for a neighbour that does not answer, and then no more.
#[test]
fn a_neighbour_that_nobody_asks_for_again_is_given_up() {
    let pair = or_skip!(Pair::new());
    with_table(&pair, |mut table, mut guard| {
        let path = table.add(&spec("10.9.0.1", "10.9.0.99"), &mut guard).expect("a path").id;
        assert_eq!(hop(&mut table, path), "guard");
        let mut waits = Vec::new();
        while let Some(wait) = maintain_idle(&mut table) {
            assert!(wait < REFRESH, "{waits:?}");
            waits.push(wait);
        }
        assert!(waits.len() > 5 && waits.is_sorted(), "{waits:?}");
        hop(&mut table, path);
        assert!(maintain_idle(&mut table).is_some(), "until something is sent there");
    });
}

#[test]
fn a_path_follows_the_neighbour_cache() {
    let pair = or_skip!(Pair::new());
    for (local, remote) in [("10.9.0.1", "10.9.0.7"), ("fd09::1", "fd09::7")] {
        let neigh = |what: &str| pair.a.sh(&format!("ip neigh {what}").replace('@', remote));
        with_table(&pair, |mut table, mut guard| {
            let path = table.add(&spec(local, remote), &mut guard).expect("a path");
            assert_eq!(path.src_port, 4791, "the guard's choice");
            assert_eq!(hop(&mut table, path.id), "guard", "unknown");
            let first = maintain(&mut table).expect("unresolved");
            assert!(maintain(&mut table).expect("unresolved") > first, "it backs off");

            neigh("replace @ lladdr 02:00:00:00:00:07 dev v0 nud reachable");
            maintain(&mut table);
            assert_eq!(hop(&mut table, path.id), "guard", "waiting datagrams may still be leaving");
            maintain(&mut table);
            assert_eq!(hop(&mut table, path.id), "07", "reachable");
            assert_eq!(maintain(&mut table), None, "the kernel announces changes");

            neigh("replace @ lladdr 02:00:00:00:00:08 dev v0 nud permanent");
            maintain(&mut table);
            assert_eq!(hop(&mut table, path.id), "08", "moved");

            neigh("replace @ lladdr 02:00:00:00:00:08 dev v0 nud stale");
            maintain(&mut table);
            assert_eq!(hop(&mut table, path.id), "guard", "stale: this burst asks the kernel");
            assert_eq!(hop(&mut table, path.id), "guard", "a burst is not split");
            table.flushed(|_| false);
            assert_eq!(hop(&mut table, path.id), "08", "the next burst leaves directly");

            neigh("del @ dev v0");
            maintain(&mut table);
            assert_eq!(hop(&mut table, path.id), "guard", "gone");
        });
    }
}

#[test]
fn a_new_path_has_its_neighbour_resolved() {
    let pair = or_skip!(Pair::new());
    for (local, remote) in [("10.9.0.1", "10.9.0.2"), ("fd09::1", "fd09::2")] {
        with_table(&pair, |mut table, mut guard| {
            let path = table.add(&spec(local, remote), &mut guard).expect("a path").id;
            let until = Instant::now() + Duration::from_secs(20);
            while hop(&mut table, path) == "guard" {
                assert!(
                    Instant::now() < until,
                    "nothing was sent, and no solicitation for {remote}"
                );
                maintain(&mut table);
            }
        });
    }
}

#[test]
fn a_path_turns_when_its_own_frames_are_gone_whatever_waits_on_others() {
    let pair = or_skip!(Pair::new());
    let neigh = |what: &str| {
        for host in [7, 8] {
            pair.a.sh(&format!("ip neigh {what}").replace('@', &format!("10.9.0.{host}")));
        }
    };
    neigh("add @ lladdr 02:00:00:00:00:07 dev v0 nud permanent");
    with_table(&pair, |mut table, mut guard| {
        let [busy, idle] = ["10.9.0.7", "10.9.0.8"]
            .map(|remote| table.add(&spec("10.9.0.1", remote), &mut guard).expect("a path").id);
        table.sent(busy, 5);
        let waits = |sent: &Sent| {
            assert_eq!(sent.last, if sent.path == busy { 5 } else { 0 });
            assert!(sent.guard.0 >= 100, "the guard's own id");
            sent.path == busy
        };
        // Another address on the same way is adopted at once.
        neigh("replace @ lladdr 02:00:00:00:00:09 dev v0 nud permanent");
        table.entries.iter_mut().flatten().for_each(|entry| entry.used = true);
        maintain_while(&mut table, waits);
        assert_eq!((hop(&mut table, busy), hop(&mut table, idle)), ("09".into(), "09".into()));

        neigh("del @ dev v0");
        maintain_while(&mut table, waits);
        assert_eq!(hop(&mut table, idle), "guard", "nothing of it waits");
        assert!(table.hop(busy).is_none() && table.is_turning(), "it would be overtaken");
        table.flushed(waits);
        assert!(table.hop(busy).is_none(), "something of it still waits");
        // The state at the time of the turn counts.
        neigh("add @ lladdr 02:00:00:00:00:0a dev v0 nud permanent");
        maintain_while(&mut table, waits);
        table.flushed(|_| false);
        assert_eq!(hop(&mut table, busy), "0a");
        assert!(!table.is_turning());

        // The path was not used since, but its earlier datagrams have not left: no check is due.
        for _ in 0..10 {
            maintain_while(&mut table, waits);
        }
        assert_eq!(hop(&mut table, busy), "0a");
        // It takes the guard for a burst, and leaves directly again only when that is gone.
        neigh("replace @ lladdr 02:00:00:00:00:0a dev v0 nud stale");
        maintain(&mut table);
        assert_eq!(hop(&mut table, busy), "guard");
        table.flushed(waits);
        assert_eq!(hop(&mut table, busy), "guard");
        table.flushed(|_| false);
        assert_eq!(hop(&mut table, busy), "0a");
        table.remove(busy, &mut guard);
        table.flushed(|_| false);
        assert!(table.hop(busy).is_none());
    });
}

/// Nothing is sent, and the table is maintained only when there are announcements to read.
#[test]
fn an_idle_path_is_told_of_changes() {
    let pair = or_skip!(Pair::new_in_calm());
    pair.a.sh("ip neigh add 10.9.0.7 lladdr 02:00:00:00:00:07 dev v0
               ip neigh add 10.9.0.9 lladdr 02:00:00:00:00:09 dev v0
               ip route add 192.0.2.0/24 via 10.9.0.7");
    with_table(&pair, |mut table, mut guard| {
        let [near, far] = ["10.9.0.7", "192.0.2.1"]
            .map(|remote| table.add(&spec("10.9.0.1", remote), &mut guard).expect("a path").id);
        // Read the announcements from before.
        table.maintain(|_| false);
        let mut told = |what: &str| {
            pair.a.sh(what);
            assert!(wait_readable(table.wait_fd(), 20_000).expect("poll"), "{what}");
            // No further call is needed.
            settle(&mut table);
            let hops = [near, far].map(|path| hop(&mut table, path));
            // The path was used only by this query.
            table.entries.iter_mut().flatten().for_each(|entry| entry.used = false);
            hops
        };
        assert_eq!(told("ip neigh change 10.9.0.7 lladdr 02:00:00:00:00:08 dev v0"), ["08", "08"]);
        assert_eq!(told("ip route change 192.0.2.0/24 via 10.9.0.9"), ["08", "09"]);
        assert_eq!(told("ip neigh change 10.9.0.9 dev v0 nud stale"), ["08", "guard"]);
        table.flushed(|_| false);
        assert_eq!(hop(&mut table, far), "09", "the kernel was asked once");
        table.entries.iter_mut().flatten().for_each(|entry| entry.used = false);
        pair.a
            .sh("ip link add w0 type veth peer name w1; ip link set w0 up; ip neigh add 10.9.0.7 lladdr 02:00:00:00:00:01 dev w0");
        let own = |entry: &Option<PathEntry>| entry.as_ref().is_some_and(|entry| entry.changed);
        table.read_changes();
        assert!(!table.entries.iter().any(own), "announcements of others");
    });
}

/// Announcements are lost: everything is refreshed.
#[test]
fn an_idle_path_is_looked_at_if_it_may_have_changed() {
    let pair = or_skip!(Pair::new());
    pair.a.sh("ip neigh add 10.9.0.7 lladdr 02:00:00:00:00:07 dev v0");
    with_table(&pair, |mut table, mut guard| {
        let path = table.add(&spec("10.9.0.1", "10.9.0.7"), &mut guard).expect("a path").id;
        table.maintain(|_| false);
        assert!(table.take_interface_change() && !table.take_interface_change());
        let others: String = (10..60)
            .map(|host| format!("ip neigh add 10.9.0.{host} lladdr 02:00:00:00:00:09 dev v0\n"))
            .collect();
        // More than the queue holds: our own change is not among the announcements left.
        table.monitor.shrink();
        pair.a.sh(&others);
        pair.a.sh("ip neigh change 10.9.0.7 lladdr 02:00:00:00:00:08 dev v0");
        settle(&mut table);
        assert!(table.take_interface_change(), "anything may have changed");
        assert_eq!(hop(&mut table, path), "08");
    });
}

/// A program that changes routes without end does not keep a port from sending.
#[test]
fn what_is_told_without_end_is_followed_with_rests() {
    let pair = or_skip!(Pair::new());
    pair.a.sh("ip neigh add 10.9.0.7 lladdr 02:00:00:00:00:07 dev v0");
    with_table(&pair, |mut table, mut guard| {
        for _ in 0..1000 {
            table.add(&spec("10.9.0.1", "10.9.0.7"), &mut guard).expect("a path");
        }
        let tell = |table: &mut PathTable| {
            for entry in table.entries.iter_mut().flatten() {
                (entry.changed, entry.rerouted) = (true, true);
            }
            table.changes = true;
        };
        let changed = |table: &PathTable| table.entries.iter().flatten().any(|e| e.changed);
        let first = Instant::now();
        tell(&mut table);
        assert_eq!(table.maintain(|_| false), None, "the first is followed at once");
        let until = table.rests_until;
        // No kernel answers a thousand requests in half a millisecond.
        assert!(until - first >= Duration::from_millis(5), "rests after a thousand questions");
        tell(&mut table);
        let wait = table.maintain(|_| false);
        assert!(Instant::now() >= until || wait.is_some_and(|wait| wait <= REFRESH), "{wait:?}");
        assert_eq!(changed(&table), wait.is_some(), "noted, if not followed");
        settle(&mut table);
        assert!(!changed(&table), "followed at last");
        // Nothing was announced, unless it happened just then.
        assert!((0..100).any(|_| {
            let until = table.rests_until;
            maintain(&mut table);
            table.rests_until == until
        }));
    });
}

#[test]
fn a_path_follows_the_routes() {
    let pair = or_skip!(Pair::new());
    pair.a.sh("ip neigh add 10.9.0.8 lladdr 02:00:00:00:00:08 dev v0
               ip neigh add 10.9.0.9 lladdr 02:00:00:00:00:09 dev v0
               ip route add 192.0.2.0/24 via 10.9.0.8");
    with_table(&pair, |mut table, mut guard| {
        let path = table.add(&spec("10.9.0.1", "192.0.2.1"), &mut guard).expect("a path").id;
        let mut later = || {
            for _ in 0..ROUTE_REFRESHES {
                maintain(&mut table);
            }
            hop(&mut table, path)
        };
        assert_eq!(later(), "08");
        pair.a.sh("ip route replace 192.0.2.0/24 via 10.9.0.9");
        assert_eq!(later(), "09");
        pair.a.sh("ip route del 192.0.2.0/24");
        assert_eq!(later(), "guard");
        assert_eq!(later(), "guard", "still no route");
        pair.a.sh("ip route add 192.0.2.0/24 via 10.9.0.8");
        assert_eq!(later(), "08");
    });
}

#[test]
fn gateways_groups_and_own_addresses() {
    let pair = or_skip!(Pair::new());
    pair.a.sh("ip neigh add 10.9.0.9 lladdr 02:00:00:00:00:09 dev v0
               ip neigh add fd09::9 lladdr 02:00:00:00:00:0a dev v0
               ip route add 192.0.2.0/24 via 10.9.0.9
               ip route add 203.0.113.0/24 via inet6 fd09::9 dev v0
               ip link add w0 type veth peer name w1; ip link set w0 up; ip link set w1 up
               ip address add 10.8.0.1/24 dev w0");
    with_table(&pair, |mut table, mut guard| {
        let mut to = |remote: &str| {
            let path = table.add(&spec("10.9.0.1", remote), &mut guard)?;
            Ok::<_, io::Error>(hop(&mut table, path.id))
        };
        assert_eq!(to("192.0.2.77").expect("a path"), "09", "through the gateway");
        assert_eq!(to("203.0.113.7").expect("a path"), "0a", "through an IPv6 gateway");
        assert_eq!(to("239.1.2.3").expect("a path"), "guard", "a group");
        assert_eq!(to("10.9.0.1").expect("a path"), "guard");
        assert_eq!(to("10.8.0.1").expect("a path"), "guard", "w0's address, over loopback");
        assert_eq!(to("127.0.0.1").expect("a path"), "guard", "over loopback");
        for (remote, why) in [
            ("10.8.0.7", "w0's network"),
            ("10.9.0.255", "broadcast"),
            ("8.8.8.8", "no route"),
            ("fd09::9", "families"),
        ] {
            to(remote).expect_err(why);
        }
        table.add(&spec("10.9.0.5", "10.9.0.9"), &mut guard).expect_err("not our address");
    });
}

#[test]
fn removed_paths_are_unknown_and_their_ids_used_again() {
    let pair = or_skip!(Pair::new());
    with_table(&pair, |mut table, mut guard| {
        let first = table.add(&spec("10.9.0.1", "10.9.0.2"), &mut guard).expect("a path").id;
        let second = table.add(&spec("10.9.0.1", "10.9.0.3"), &mut guard).expect("a path").id;
        assert_eq!(table.of_guard(PathId(101)), Some(second));
        table.remove(first, &mut guard);
        assert!(table.hop(first).is_none() && table.hop(PathId(77)).is_none());
        table.remove(first, &mut guard);
        assert_eq!(table.add(&spec("10.9.0.1", "10.9.0.4"), &mut guard).expect("a path").id, first);
    });
}

#[test]
fn identifications_stay_below_the_segment_limit() {
    let pair = or_skip!(Pair::new());
    with_table(&pair, |mut table, mut guard| {
        let path = table.add(&spec("10.9.0.1", "10.9.0.2"), &mut guard).expect("a path").id;
        assert_eq!([60, 60, 60, 1].map(|n| table.take_ip_ids(path, n)), [0, 60, 0, 60]);
        assert_eq!([128, 1, 127].map(|n| table.take_ip_ids(path, n)), [0, 0, 1]);
    });
}
