//! Bugs of the connection manager.

use super::{Bug, Test, test};

const fn of(name: &'static str) -> Test {
    test("rocinante-stack", "cm", name)
}

pub(super) const BUGS: &[Bug] = &[
    Bug {
        name: "retries-of-the-request",
        what: "a disconnect is repeated only as often as the repetitions of the message before it left over",
        file: "stack/src/cm/mod.rs",
        right: "        conn.state = State::DreqSent;
        conn.retries = retries;
",
        wrong: "        conn.state = State::DreqSent;
        let _ = retries;
",
        found_by: &[of("twos::each_message_is_repeated_as_often_as_any_other")],
    },
    Bug {
        name: "deadline-of-before",
        what: "a connection's old timer goes off although its deadline has moved",
        file: "stack/src/cm/mod.rs",
        right: "        if let Some(old) = std::mem::replace(&mut conn.deadline, due) {
            self.timers.remove(&(old, timer));
        }
",
        wrong: "        conn.deadline = due;
",
        found_by: &[of("scenarios::connect_and_disconnect")],
    },
    Bug {
        name: "backlog-left-twice",
        what: "a connection leaves its listener's backlog when it is established and again when it ends",
        file: "stack/src/cm/mod.rs",
        right: "self.conns.get_mut(&id).and_then(|conn| conn.listener.take()) else {",
        wrong: "self.conns.get_mut(&id).and_then(|conn| conn.listener) else {",
        found_by: &[of("twos::a_connection_leaves_its_listeners_backlog_once")],
    },
    Bug {
        name: "request-forgotten-at-the-end",
        what: "a request is forgotten when its connection ends, not when it is released: a late copy of it makes another",
        file: "stack/src/cm/mod.rs",
        right: "        conn.state = State::TimeWait;
        conn.mad = None;
        let due = now.after(conn.timewait());
",
        wrong: "        conn.state = State::TimeWait;
        conn.mad = None;
        let due = now.after(conn.timewait());
        let request = (conn.addresses.1, conn.remote);
        self.by_request.remove(&request);
",
        found_by: &[of("twos::a_late_copy_of_a_request_makes_no_second_connection_until_the_first_is_released")],
    },
    Bug {
        name: "withdrawal-by-address",
        what: "a peer that withdraws a request is looked for by its address: of two requests the first is meant",
        file: "stack/src/cm/receive.rs",
        right: "            CommId(0) => self.by_request.get(&(src, rej.local)).copied().unwrap_or_default(),
",
        wrong: "            CommId(0) => {
                let of_peer = self.by_request.iter().find(|((peer, _), _)| *peer == src);
                of_peer.map(|(_, id)| *id).unwrap_or_default()
            }
",
        found_by: &[of("twos::of_two_requests_of_a_peer_the_one_that_it_withdraws_goes")],
    },
    Bug {
        name: "patience-of-the-request",
        what: "a side that asked for patience before it accepted does not grant any to the peer after: a flag of one phase stays for the next",
        file: "stack/src/cm/calls.rs",
        right: "(it.state, it.mra, it.qpn, it.retries) = (State::RepSent, false, side.qpn, retries);",
        wrong: "(it.state, it.qpn, it.retries) = (State::RepSent, side.qpn, retries);",
        found_by: &[of("twos::who_is_accepted_may_ask_for_patience_whoever_asked_for_it_before")],
    },
    Bug {
        name: "timewait-of-ours",
        what: "a connection waits for its last packets for a time of ours, not for the time that the peer named",
        file: "stack/src/cm/receive.rs",
        right: "            deadline: None,
            ack_timeout: req.primary.ack_timeout,
",
        wrong: "            deadline: None,
            ack_timeout: self.config.packet_lifetime,
",
        found_by: &[of("twos::the_accepter_waits_for_as_long_as_the_asker_said_that_packets_take")],
    },
    Bug {
        name: "accepters-not-noted",
        what: "queue pairs of peers that accepted are not noted, only of those that asked: one that died and accepts again is not found stale",
        file: "stack/src/cm/receive.rs",
        right: "        self.by_qpn.insert((peer, rep.qpn), id);
",
        wrong: "        let _ = peer;
",
        found_by: &[of("twos::a_peer_that_died_and_accepts_with_the_same_queue_pair_ends_the_old_connection")],
    },
    Bug {
        name: "established-twice",
        what: "a message that arrives after the RTU establishes the connection again",
        file: "stack/src/cm/receive.rs",
        right: "        if self.conns.get(&conn.0).is_some_and(|conn| conn.state == State::RepSent) {
            self.counters.by_message += 1;
",
        wrong: "        if self.conns.get(&conn.0).is_some_and(|conn| !conn.active) {
            self.counters.by_message += 1;
",
        found_by: &[of("twos::a_connection_is_established_once_by_its_rtu_and_by_a_message")],
    },
    Bug {
        name: "any-address-first",
        what: "of two listeners the one on all addresses hears what came to the address of the other",
        file: "stack/src/cm/tables.rs",
        right: "    [Some(dst), Some(family), None].map(|address| (service, address))
",
        wrong: "    [None, Some(family), Some(dst)].map(|address| (service, address))
",
        found_by: &[of("scenarios::a_listener_on_another_address_does_not_hear")],
    },
    Bug {
        name: "question-timer-stays",
        what: "the timer of a question that was repeated stays behind when it is answered",
        file: "stack/src/cm/sidr.rs",
        right: "        query.retries -= 1;
        query.due = due;
",
        wrong: "        query.retries -= 1;
",
        found_by: &[of("twos::a_question_that_was_repeated_leaves_no_timer_behind")],
    },
    Bug {
        name: "question-number-reused",
        what: "a peer that uses the number of an answered question again has its new question forgotten with the old one",
        file: "stack/src/cm/asks.rs",
        right: "                self.counters.stray += 1;
                return true;
            }
            self.remove_ask(id);
        }
",
        wrong: "                self.counters.stray += 1;
                return true;
            }
            let _ = id;
        }
",
        found_by: &[of("twos::a_number_that_a_peer_uses_again_is_the_new_questions")],
    },
];
