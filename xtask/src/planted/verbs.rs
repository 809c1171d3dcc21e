//! Bugs of `verbs-api`.

use super::{Bug, Test, test, unit};

const fn of(name: &'static str) -> Test {
    unit("rocinante", name)
}

/// The models try every order of the threads' steps.
const fn model(name: &'static str) -> Test {
    test("rocinante-models", "threads", name)
}

pub(super) const BUGS: &[Bug] = &[
    Bug {
        name: "decided-too-early",
        what: "a request counts as decided before the connection manager has accepted it: what cannot be accepted is never answered",
        file: "verbs-api/src/cm/listener.rs",
        right: "        let mailbox = self.manager.accept(self.conn, &accept, qp.breaks())?;
        self.decided = true;
",
        wrong: "        self.decided = true;
        let mailbox = self.manager.accept(self.conn, &accept, qp.breaks())?;
",
        found_by: &[of("soft::two_tests::a_decision_that_cannot_be_told_rejects_the_request")],
    },
    Bug {
        name: "depths-swapped",
        what: "of READs and atomics, what is asked at a time is limited by what the peer asks, not by what it serves",
        file: "verbs-api/src/cm/connection.rs",
        right:
            "            .max_rd_atomic(options.max_rd_atomic.min(reply.side.responder_resources))
            .max_dest_rd_atomic(options.max_dest_rd_atomic.min(reply.side.initiator_depth))
",
        wrong: "            .max_rd_atomic(options.max_rd_atomic.min(reply.side.initiator_depth))
            .max_dest_rd_atomic(options.max_dest_rd_atomic.min(reply.side.responder_resources))
",
        found_by: &[of("soft::two_tests::each_side_asks_for_no_more_reads_than_the_other_serves")],
    },
    Bug {
        name: "question-goes-on",
        what: "a question for a datagram service is repeated although its program has given it up",
        file: "verbs-api/src/soft/sidr.rs",
        right: "        shard.post.services.queries.remove(&query);
        shard.cm().forget_query(query);
",
        wrong: "        shard.post.services.queries.remove(&query);
",
        found_by: &[of("soft::two_tests::a_question_that_is_given_up_is_asked_no_more")],
    },
    Bug {
        name: "kept-on-the-first-shard",
        what: "the number of a queue pair in a connection is kept by the connection manager's shard, not by the queue pair's",
        file: "verbs-api/src/soft/cm.rs",
        right: "                let mut held = core.hold();
                keep(&mut held.engine);
",
        wrong: "                let held = core.hold();
                keep(&mut first.engine);
",
        found_by: &[of(
            "soft::two_tests::a_number_in_a_connection_is_kept_by_the_shard_that_gave_it",
        )],
    },
    Bug {
        name: "wish-for-less",
        what: "a wish to hear of solicited completions replaces an earlier one to hear of all",
        file: "verbs-api/src/soft/announce.rs",
        right: "        self.armed.fetch_max(level, Ordering::Relaxed);
",
        wrong: "        self.armed.store(level, Ordering::Relaxed);
",
        found_by: &[model("who_wants_to_hear_of_all_does")],
    },
    Bug {
        name: "channel-cleared-unlocked",
        what: "an event that comes between the look at a channel and the clearing of its descriptor wakes nobody",
        file: "verbs-api/src/soft/announce.rs",
        right: "        let mut events = self.events.lock();
        let number = events.pop_front();
        if events.is_empty() {
            wake::clear(&self.fd);
        }
        number
",
        wrong: "        let mut events = self.events.lock();
        let number = events.pop_front();
        let last = events.is_empty();
        drop(events);
        if last {
            wake::clear(&self.fd);
        }
        number
",
        found_by: &[model("who_arms_then_looks_then_sleeps_misses_nothing")],
    },
    Bug {
        name: "mail-told-of-too-early",
        what: "another shard is told of an order before it is in the box: a look between takes nothing, and the flag with it",
        file: "verbs-api/src/soft/mail.rs",
        right: "        self.letters.lock().orders.push(order);
        self.some.store(true, Ordering::Relaxed);
",
        wrong: "        self.some.store(true, Ordering::Relaxed);
        self.letters.lock().orders.push(order);
",
        found_by: &[model("mail_is_read_whoever_sleeps")],
    },
    Bug {
        name: "earlier-deadline-without-a-timer",
        what: "an earlier deadline is noted for the sleeping background thread, but its timer is not set anew",
        file: "verbs-api/src/soft/progress/core.rs",
        right: "            shard.parked_until = due;
            self.tell(Event::Earlier, Duration::from_nanos(due.since(now)));
",
        wrong: "            shard.parked_until = due;
",
        found_by: &[model("a_deadline_of_the_programs_is_kept_by_the_background_thread")],
    },
    Bug {
        name: "queue-left-on-other-shards",
        what: "a completion queue that goes is forgotten by the first shard only",
        file: "verbs-api/src/soft/cq.rs",
        right: "        for shard in shards.iter_mut() {
            shard.host.cqs.remove(id);
        }
",
        wrong: "        shards.first().host.cqs.remove(id);
",
        found_by: &[of("soft::two_tests::a_queue_that_goes_is_forgotten_by_every_shard")],
    },
    Bug {
        name: "two-queues-of-one-number",
        what: "shared receive queues of two shards have one number",
        file: "verbs-api/src/soft/others.rs",
        right: "        number * count + own
",
        wrong: "        let _ = (count, own);
        number
",
        found_by: &[of("soft::two_tests::shared_receive_queues_of_two_shards_have_two_numbers")],
    },
    Bug {
        name: "handle-gone-before-what-names-it",
        what: "an address handle is destroyed before the datagrams have left that name it",
        file: "verbs-api/src/soft/ah.rs",
        right: "            shard.take_staged();
            let now = shard.now();
            shard.transmit(now);
            shard.engine.destroy_ah(self.id);
",
        wrong: "            shard.engine.destroy_ah(self.id);
",
        found_by: &[of("soft::two_tests::datagrams_leave_before_the_handle_goes_that_they_name")],
    },
    Bug {
        name: "memory-exchanged-before-it-is-granted",
        what: "a region that may not be changed now has its new memory all the same, and the old one is freed",
        file: "verbs-api/src/mr.rs",
        right: "        if let Err(error) = changed {
            if matches!(self.kind, MrKind::Kernel(_)) {
",
        wrong: "        if let (Some(range), true) = (range, buffer.is_some()) {
            self.range = range;
        }
        if let Err(error) = changed {
            if matches!(self.kind, MrKind::Kernel(_)) {
",
        found_by: &[of("soft::two_tests::a_region_that_may_not_be_changed_is_what_it_was")],
    },
    Bug {
        name: "held-receives-kept",
        what: "receives that are held back while much is unread are not given back",
        file: "verbs-api/src/exchange/queue.rs",
        right: "                shared.receive_on()?;
                return Ok(true);
",
        wrong: "                return Ok(true);
",
        found_by: &[of("soft::two_tests::what_is_held_while_nobody_reads_is_given_back")],
    },
    Bug {
        name: "detached-and-still-joined",
        what: "a group stays joined after the last of its queue pairs was destroyed",
        file: "verbs-api/src/soft/qp.rs",
        right: "        self.detach_all(&mut shard);
        let gone: Result<(), ModifyError> = shard.engine.destroy_qp(self.qpn);
",
        wrong: "        let gone: Result<(), ModifyError> = shard.engine.destroy_qp(self.qpn);
",
        found_by: &[of("soft::two_tests::the_last_queue_pair_of_a_group_takes_the_port_out_of_it")],
    },
];
