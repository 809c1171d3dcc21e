//! Bugs of `netdev`.

use super::{Bug, Test, unit};

const fn of(name: &'static str) -> Test {
    unit("rocinante-netdev", name)
}

pub(super) const BUGS: &[Bug] = &[
    Bug {
        name: "partial-send-taken-for-whole",
        what: "`sendmmsg` took a part of the messages: the others are dropped as if sent",
        file: "netdev/src/udp/tx.rs",
        right: "        let sent = sys::send(paths.socket(index), &mut self.scratch, messages)?;
        for run in &waiting[..sent] {
",
        wrong: "        sys::send(paths.socket(index), &mut self.scratch, messages)?;
        let offered = |run: &&Run| paths.entry(run.path).socket == index && run.refused.is_none();
        let sent = waiting.iter().take_while(offered).count().min(sys::SEND_MAX);
        for run in &waiting[..sent] {
",
        found_by: &[of(
            "udp::tests::wire::a_full_queue_blocks_and_the_descriptor_tells_when_it_drains",
        )],
    },
    Bug {
        name: "enobufs-taken-for-eagain",
        what: "what a full queueing discipline refused waits, as if the socket were full: nothing ends that wait",
        file: "netdev/src/packet/tx.rs",
        right: "        libc::EAGAIN => {
",
        wrong: "        libc::EAGAIN | libc::ENOBUFS => {
",
        found_by: &[of("packet::tests::a_full_queueing_discipline_is_a_failure_at_once")],
    },
    Bug {
        name: "blocked-not-watched-for-writing",
        what: "a blocked port that is watched again is watched for what arrives only",
        file: "netdev/src/frame.rs",
        right: "self.epoll.set(self.io.as_fd(), on.then(|| self.interest()))?;",
        wrong: "self.epoll.set(self.io.as_fd(), on.then_some(Interest::Read))?;",
        found_by: &[of(
            "packet::tests::two::a_blocked_port_is_woken_when_it_can_write_though_it_was_not_watched_for_a_while",
        )],
    },
    Bug {
        name: "drops-not-summed",
        what: "drops are those since the last look, though the kernel clears its counter when it is read",
        file: "netdev/src/packet/rx.rs",
        right: "self.0.set(self.0.get() + u64::from(new));",
        wrong: "self.0.set(u64::from(new));",
        found_by: &[of("packet::tests::a_full_ring_drops_and_counts")],
    },
    Bug {
        name: "path-counted-before-it-is-made",
        what: "a path that is refused is counted as one of its address",
        file: "netdev/src/udp.rs",
        right: "        let path = self.paths.add(spec, self.options)?;
        self.receiver.path_added(spec.local, self.paths.loops(path.id));
        Ok(path)
",
        wrong: "        self.receiver.path_added(spec.local, false);
        self.paths.add(spec, self.options)
",
        found_by: &[of("udp::tests::several::a_path_that_is_refused_is_no_path_of_its_address")],
    },
    Bug {
        name: "turn-of-a-group-that-left",
        what: "after a group was left the next turn may begin at one that is not there",
        file: "netdev/src/udp/groups.rs",
        right: "        self.stats.rx_queue_drops += gone.queue.drops(&gone.socket);
        self.first = 0;
",
        wrong: "        self.stats.rx_queue_drops += gone.queue.drops(&gone.socket);
",
        found_by: &[of("udp::tests::several::who_leaves_groups_hears_those_that_stay")],
    },
    Bug {
        name: "failure-of-another-path",
        what: "a failure at the guard is told of the path of ours that has the number that the guard's path has",
        file: "netdev/src/frame.rs",
        right: "            if let Some(path) = paths.of_guard(failure.path) {
                failed(TxFailure { path, ..failure });
            }
",
        wrong: "            let _ = paths;
            failed(failure);
",
        found_by: &[of(
            "packet::tests::two::a_failure_at_the_guard_is_told_of_the_path_that_it_is_of",
        )],
    },
    Bug {
        name: "guards-path-kept",
        what: "a path that is removed keeps its path at the guard, with its socket",
        file: "netdev/src/resolve.rs",
        right: "        guard.remove_path(entry.guard);
",
        wrong: "        let _ = (entry, guard);
",
        found_by: &[of("packet::tests::two::a_path_that_goes_takes_its_path_at_the_guard_with_it")],
    },
    Bug {
        name: "way-without-tos",
        what: "the cache of ways does not tell two traffic classes apart, which may be routed differently",
        file: "netdev/src/resolve.rs",
        right: "(Instant::now(), (spec.local, spec.remote, spec.tos));",
        wrong: "(Instant::now(), (spec.local, spec.remote, 0));",
        found_by: &[of("resolve::tests::rules::two_traffic_classes_may_go_two_ways_at_once")],
    },
    Bug {
        name: "ports-in-host-order",
        what: "the kernel is asked for the route of a datagram with its ports' bytes swapped",
        file: "netdev/src/rtnl/route.rs",
        right: "        .attribute(RTA_SPORT, &query.src_port.to_be_bytes())
        .attribute(RTA_DPORT, &ROCE_PORT.to_be_bytes())
",
        wrong: "        .attribute(RTA_SPORT, &query.src_port.to_ne_bytes())
        .attribute(RTA_DPORT, &ROCE_PORT.to_ne_bytes())
",
        found_by: &[of("resolve::tests::rules::the_route_is_that_of_our_ports")],
    },
    Bug {
        name: "late-answer-believed",
        what: "the kernel's answer to a question that was given up is taken for the answer to the next",
        file: "netdev/src/rtnl/socket.rs",
        right: "        if header.sequence != sequence {
            continue; // the tail of an answer that an earlier request gave up on
        }
",
        wrong: "        let _ = (header.sequence, sequence);
",
        found_by: &[of(
            "rtnl::socket::tests::answers_to_another_request_are_not_taken_for_this_ones",
        )],
    },
    Bug {
        name: "slot-without-rest",
        what: "a slot whose process has died or left is given to the next one at once",
        file: "netdev/src/shared/locks.rs",
        right: "        Ok(Some(if until <= now() { 0 } else { until }))
",
        wrong: "        Ok(Some(0 * until))
",
        found_by: &[of("shared::tests::what_a_process_leaves_is_where_it_was")],
    },
    Bug {
        name: "slot-free-with-its-first-chunk",
        what: "a frame of several chunks is taken for sent when the first of them comes back",
        file: "netdev/src/xdp/tx.rs",
        right: "                *lent -= 1;
                if *lent == 0 {
                    free.push(slot);
",
        wrong: "                *lent -= 1;
                if !free.contains(&slot) {
                    free.push(slot);
",
        found_by: &[of("xdp::tx::tests::completions_that_make_no_sense_free_nothing")],
    },
    Bug {
        name: "descriptors-length-believed",
        what: "a received frame may go on beyond its chunk if its descriptor says so",
        file: "netdev/src/xdp/rx.rs",
        right: "    (desc.len > 0 && start / CHUNK == (end - 1) / CHUNK).then_some(start..end)
",
        wrong: "    (desc.len > 0).then_some(start..end)
",
        found_by: &[of("xdp::rx::tests::the_chunks_of_frames_that_cannot_be_used_come_back")],
    },
];
