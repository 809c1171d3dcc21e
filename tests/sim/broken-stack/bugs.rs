// The bugs, and where each is planted. `right` occurs once in `file`, below `stack/src`. In the
// copy `wrong` replaces it; there BUG says whether the bug is on. A change of such a place in the
// engine needs the same change here: the test `every_planted_bug_is_found_by_its_seed` names the
// bugs without a place.

/// A bug that can be switched on.
#[derive(Debug)]
pub struct Bug {
    /// Its name.
    pub name: &'static str,
    /// The faulty behaviour of the engine.
    pub what: &'static str,
    /// A seed that finds it within 300,000 steps. Changes of engine and simulator change what a
    /// seed does: if this seed no longer finds the bug, the test names another.
    pub seed: u64,
    file: &'static str,
    right: &'static str,
    wrong: &'static str,
}

/// All bugs.
pub const BUGS: &[Bug] = &[
    Bug {
        name: "ack-skips",
        what: "an ACK acknowledges one packet more than was executed",
        seed: 1,
        file: "rc/responder/mod.rs",
        right: "self.ack.then(|| (self.ackable, ",
        wrong: "self.ack.then(|| (self.ackable + u64::from(BUG), ",
    },
    Bug {
        name: "duplicate-write-placed",
        what: "a WRITE that comes again is placed again",
        seed: 1,
        file: "rc/responder/mod.rs",
        right: "return self.duplicate(packet, psn);",
        wrong: "if BUG && packet.info.operation == Operation::Write && packet.info.place == crate::wire::Place::Only {
                let _ = Message::None.write(packet, &self.rights, receives, memory);
            }
            return self.duplicate(packet, psn);",
    },
    Bug {
        name: "duplicate-atomic-executed",
        what: "an atomic that comes again is executed again",
        seed: 1,
        file: "rc/responder/mod.rs",
        right: "        if psn < self.epsn {
",
        wrong: "        if BUG
            && psn < self.epsn
            && let Some(eth) = packet.atomic_eth()
            && let Ok(at) = memory.regions().remote_atomic(self.rights.by, eth.va, eth.rkey)
        {
            let _ = memory.atomic(at, AtomicOp::FetchAdd { add: eth.swap_add });
        }
        if psn < self.epsn {
",
    },
    Bug {
        name: "gap-accepted",
        what: "a request is executed although the packet before it is missing",
        seed: 1,
        file: "rc/responder/mod.rs",
        right: "if psn > self.epsn {",
        wrong: "if psn > self.epsn && !(BUG && psn == self.epsn + 1) {",
    },
    Bug {
        name: "permission-unchecked",
        what: "a region may be used for what it does not permit",
        seed: 1,
        file: "mem/table.rs",
        right: "if !region.access.admits(need) {",
        wrong: "if !region.access.admits(need) && !BUG {",
    },
    Bug {
        name: "range-off-by-four",
        what: "an access may go four bytes beyond its region",
        seed: 1,
        file: "mem/table.rs",
        right: "if end > region.len {",
        wrong: "if end > region.len + 4 * u64::from(BUG) {",
    },
    Bug {
        name: "key-tag-unchecked",
        what: "the consumer's part of a key is not compared",
        seed: 1,
        file: "mem/table.rs",
        right: "Slot::Taken(found, entry) if *found == key => Some(entry),",
        wrong: "Slot::Taken(found, entry) if *found == key || BUG => Some(entry),",
    },
    Bug {
        name: "deregistered-region-used",
        what: "a region that was deregistered stays accessible",
        seed: 1,
        file: "mem/table.rs",
        right: "        self.close_gap(at);
        self.used -= 1;",
        wrong: "        if !BUG {
            self.close_gap(at);
            self.used -= 1;
        }",
    },
    Bug {
        name: "write-range-unchecked",
        what: "a WRITE is placed packet by packet until one is outside of the region",
        seed: 7,
        file: "qp/message.rs",
        right: "if place == Place::First {",
        wrong: "if place == Place::First && !BUG {",
    },
    Bug {
        name: "immediate-lost",
        what: "immediate data does not arrive",
        seed: 1,
        file: "qp/message.rs",
        right: "        byte_len,
        imm: packet.immediate(),",
        wrong: "        byte_len,
        imm: packet.immediate().filter(|_| !BUG),",
    },
    Bug {
        name: "receive-overrun",
        what: "a message longer than its receive is not refused",
        seed: 2,
        file: "qp/message.rs",
        right: "> u64::from(receives.room()) {",
        wrong: "> u64::from(receives.room()) && !BUG {",
    },
    Bug {
        name: "icrc-unchecked",
        what: "a packet with a wrong ICRC is taken",
        seed: 1,
        file: "engine.rs",
        right: "Integrity::Wrong => return drops.icrc += 1,",
        wrong: "Integrity::Wrong if !BUG => return drops.icrc += 1,
            Integrity::Wrong => {}",
    },
    Bug {
        name: "nak-acknowledges-itself",
        what: "what a NAK complains of counts as acknowledged",
        seed: 1,
        file: "rc/completer.rs",
        right: "        _ => psn,",
        wrong: "        _ => psn + u64::from(BUG),",
    },
    Bug {
        name: "implied-nak-ignored",
        what: "an ACK that passes a READ completes it without its data",
        seed: 1,
        file: "rc/completer.rs",
        right: "        && expected < to
",
        wrong: "        && expected < to && !BUG
",
    },
    Bug {
        name: "response-gap-accepted",
        what: "a READ response is placed although the one before it is missing",
        seed: 1,
        file: "rc/completer.rs",
        right: "Some(expected) if psn == expected => DataVerdict::Take,",
        wrong: "Some(expected) if psn == expected || (BUG && psn > expected) => DataVerdict::Take,",
    },
    Bug {
        name: "flush-forgets-last",
        what: "a queue pair that fails does not flush its newest request",
        seed: 1,
        file: "qp/mod.rs",
        right: "while !self.sq.is_empty() {",
        wrong: "while !self.sq.is_empty() && !(BUG && sends > 0 && self.sq.tail - self.sq.head == 1) {",
    },
    Bug {
        name: "completed-twice",
        what: "a request completes twice",
        seed: 1,
        file: "qp/mod.rs",
        right: "            host.complete(self.init.send_cq, cqe);
        }
        self.sq.pop();",
        wrong: "            host.complete(self.init.send_cq, cqe);
            if BUG && cqe.byte_len > 4000 {
                host.complete(self.init.send_cq, cqe);
            }
        }
        self.sq.pop();",
    },
    Bug {
        name: "response-uncounted",
        what: "packets of responses are not counted",
        seed: 1,
        file: "rc/transmit.rs",
        right: "            self.core.tally.sent(&mut shared.counters, payload);
        }
        Sent::Yes",
        wrong: "            if !BUG {
                self.core.tally.sent(&mut shared.counters, payload);
            }
        }
        Sent::Yes",
    },
    Bug {
        name: "retransmission-skips",
        what: "what is sent again begins one packet too late",
        seed: 1,
        file: "rc/requester/mod.rs",
        right: "        self.snd_nxt = from;
        self.wqe_next = sq.locate(from);",
        wrong: "        let from = if BUG && from + 1 < self.snd_nxt { from + 1 } else { from };
        self.snd_nxt = from;
        self.wqe_next = sq.locate(from);",
    },
    Bug {
        name: "fence-ignored",
        what: "a fenced request does not wait for the READs before it",
        seed: 1,
        file: "rc/requester/permit/mod.rs",
        right: "let waits = (wqe.is_fenced() && !self.responses.is_empty())",
        wrong: "let waits = (wqe.is_fenced() && !self.responses.is_empty() && !BUG)",
    },
    Bug {
        name: "half-message-kept",
        what: "an unreliable connection goes on with a message of which a packet is missing",
        seed: 1,
        file: "unreliable/uc.rs",
        right: "if gap || packet.info.place.begins() {",
        wrong: "if (gap && !BUG) || packet.info.place.begins() {",
    },
    Bug {
        name: "repair-other-bytes",
        what: "a packet that goes again alone carries the bytes of the one before it",
        seed: 1,
        file: "rc/requester/recovery/scoreboard.rs",
        right: "        Some(RequestPacket::of(index, wqe, psn, limits.mtu, ack_req))",
        wrong: "        let before = (psn - 1).max(wqe.first);
        let offset = wqe.offset(if BUG { before } else { psn }, limits.mtu);
        Some(RequestPacket { offset, ..RequestPacket::of(index, wqe, psn, limits.mtu, ack_req) })",
    },
    Bug {
        name: "qkey-unchecked",
        what: "a datagram with another Q_Key than the queue pair's is taken",
        seed: 1,
        file: "unreliable/ud.rs",
        right: "if self.core.attr.qkey != Some(deth.qkey) {",
        wrong: "if self.core.attr.qkey != Some(deth.qkey) && !BUG {",
    },
    Bug {
        name: "datagram-source-wrong",
        what: "the IP header before a datagram names the receiver as its sender",
        seed: 1,
        file: "unreliable/ud.rs",
        right: "header[12..16].copy_from_slice(&src.octets());",
        wrong: "header[12..16].copy_from_slice(&(if BUG { dst } else { src }).octets());",
    },
    Bug {
        name: "destroyed-handle-used",
        what: "an address handle that was destroyed goes where the next one in its place does",
        seed: 1,
        file: "ah.rs",
        right: "handle.as_ref().filter(|_| *generation == id.0 >> INDEX_BITS)",
        wrong: "handle.as_ref().filter(|_| BUG || *generation == id.0 >> INDEX_BITS)",
    },
    Bug {
        name: "shared-receive-twice",
        what: "a receive of a shared queue is consumed twice",
        seed: 1,
        file: "srq.rs",
        right: "        self.own.pop();
",
        wrong: "        if !(BUG && self.shared.is_some()) {
            self.own.pop();
        }
",
    },
    Bug {
        name: "shared-receive-lost",
        what: "a queue pair that is reset keeps the receive that it took from a shared queue",
        seed: 2,
        file: "qp/mod.rs",
        right: "            srqs.give_back(srq, &mut self.rq);
",
        wrong: "            if !BUG {
                srqs.give_back(srq, &mut self.rq);
            }
",
    },
    Bug {
        name: "limit-untold",
        what: "no event says that a shared receive queue has reached its limit",
        seed: 1,
        file: "srq.rs",
        right: "            self.events.push_back(id);
",
        wrong: "            if !BUG {
                self.events.push_back(id);
            }
",
    },
    Bug {
        name: "last-receive-untold",
        what: "a queue pair that breaks does not say that it takes no more shared receives",
        seed: 1,
        file: "qp/mod.rs",
        right: "                events.push(self.qpn, QpEvent::LastWqeReached);
",
        wrong: "                if !BUG {
                    events.push(self.qpn, QpEvent::LastWqeReached);
                }
",
    },
    Bug {
        name: "overflow-untold",
        what: "a queue pair does not say that its completion queue overflowed",
        seed: 1,
        file: "engine.rs",
        right: "                self.shared.event(core.qpn, QpEvent::Fatal);
",
        wrong: "                if !BUG {
                    self.shared.event(core.qpn, QpEvent::Fatal);
                }
",
    },
    Bug {
        name: "window-not-invalidated",
        what: "a window that was invalidated stays open",
        seed: 1,
        file: "mem/window.rs",
        right: "        self.unbind(at);
        Ok(())",
        wrong: "        if !BUG {
            self.unbind(at);
        }
        Ok(())",
    },
    Bug {
        name: "window-for-everybody",
        what: "a window of type 2 admits other queue pairs than its own",
        seed: 19,
        file: "mem/table.rs",
        right: "if *owner != Qpn::default() && *owner != by.qpn {",
        wrong: "if *owner != Qpn::default() && *owner != by.qpn && !BUG {",
    },
    Bug {
        name: "invalidation-untold",
        what: "a receive does not say which window its SEND invalidated",
        seed: 1,
        file: "qp/message.rs",
        right: "Ok(()) => received.invalidated = Some(key),",
        wrong: "Ok(()) => received.invalidated = Some(key).filter(|_| !BUG),",
    },
    Bug {
        name: "flush-overtakes",
        what: "a FLUSH is answered although a WRITE before it is missing",
        seed: 1,
        file: "rc/responder/mod.rs",
        right: "            return self.early(psn);
",
        wrong: "            if BUG && packet.info.operation == Operation::Flush && self.records.make_room() {
                let operation = Operation::Flush;
                self.records.push(psn, psn, self.msn, Kind::Done { operation });
                return Outcome::Duplicate { respond: true };
            }
            return self.early(psn);
",
    },
    Bug {
        name: "atomic-write-repeated",
        what: "an ATOMIC WRITE that comes again is placed again",
        seed: 1,
        file: "rc/responder/mod.rs",
        right: "        if self.records.repeat(packet, psn, self.rights.mtu) {
",
        wrong: "        if BUG && packet.info.operation == Operation::AtomicWrite {
            self.records.fail();
            self.epsn = psn;
            return Outcome::NotReady;
        }
        if self.records.repeat(packet, psn, self.rights.mtu) {
",
    },
    Bug {
        name: "held-packets-leak",
        what: "the memory of packets that came too early is lost when their queue pair breaks",
        seed: 1,
        file: "rc/reorder.rs",
        right: "        for block in self.places.drain(..).flatten() {
            store.give_back(block);
",
        wrong: "        for block in self.places.drain(..).flatten() {
            if BUG {
                continue;
            }
            store.give_back(block);
",
    },
    Bug {
        name: "room-leaks",
        what: "a queue pair that goes away stays among the users of its peer's room",
        seed: 1,
        file: "rc/mod.rs",
        right: "            shared.peers.leave(self.limits.peer);
",
        wrong: "            if !BUG {
                shared.peers.leave(self.limits.peer);
            }
",
    },
    Bug {
        name: "unasked-forgotten",
        what: "a WRITE that did not ask is not asked about if nothing follows it",
        seed: 1,
        file: "rc/clock.rs",
        right: "let asks = usual > 0 && self.requester.outstanding();",
        wrong: "let quiet = self.requester.is_quiet(&self.core.sq);
        if BUG && quiet {
            self.clock.ack_timeout = crate::types::Time::NEVER;
        }
        let asks = usual > 0 && self.requester.outstanding() && !(BUG && quiet);",
    },
    Bug {
        name: "unasked-acknowledged",
        what: "an ACK acknowledges what left after what it answers, if that did not ask",
        seed: 10,
        file: "rc/progress.rs",
        right: "            Verdict::Advance { to } => {
",
        wrong: "            Verdict::Advance { to } => {
                let to = if BUG && self.requester.acks.has_unasked(&self.core.sq) { sent } else { to };
",
    },
    Bug {
        name: "cut-not-advanced",
        what: "each message of a WRITE that is cut is written to its beginning",
        seed: 1,
        file: "qp/outbound.rs",
        right: "            let va = remote.wrapping_add(u64::from(piece.offset));
            Reth { va, rkey, len: piece.message }",
        wrong: "            let va = remote.wrapping_add(if BUG { 0 } else { piece.offset.into() });
            Reth { va, rkey, len: piece.message }",
    },
    Bug {
        name: "cut-forgotten",
        what: "what is missing of a WRITE that was cut goes again as a part of one message",
        seed: 1,
        file: "rc/requester/recovery/scoreboard.rs",
        right: "        // There is credit for the answer since it left first",
        wrong: "        if BUG {
            let opcode =
                crate::qp::opcode::data_opcode(&wqe.op, psn == wqe.first, psn == wqe.last());
            let packet = RequestPacket::of(index, wqe, psn, limits.mtu, self.ack_requests.has(psn));
            return Some(RequestPacket { opcode, ..packet });
        }
        // There is credit for the answer since it left first",
    },
    Bug {
        name: "successor-forgotten",
        what: "a connection that is forgotten takes along the entry of the next one with the same peer and queue pair",
        seed: 8,
        file: "cm/mod.rs",
        right: "if self.by_qpn.get(&(peer, conn.remote_qpn)) == Some(&id) {",
        wrong: "if BUG || self.by_qpn.get(&(peer, conn.remote_qpn)) == Some(&id) {",
    },
    Bug {
        name: "rtu-lost-for-ever",
        what: "a reply that comes again, because the RTU was lost, is not answered",
        seed: 1,
        file: "cm/receive.rs",
        right: "            State::Established if active && conn.remote == rep.local => {
                self.counters.duplicates += 1;
                return self.send_stored(id);",
        wrong: "            State::Established if active && conn.remote == rep.local => {
                self.counters.duplicates += 1;
                return if BUG {} else { self.send_stored(id) };",
    },
    Bug {
        name: "released-early",
        what: "a number of a queue pair is released after half of the time for which packets may be under way",
        seed: 1,
        file: "cm/mod.rs",
        right: "let due = now.after(conn.timewait());",
        wrong: "let due = now.after(conn.timewait() >> u8::from(BUG));",
    },
    Bug {
        name: "backlog-leaks",
        what: "a request that the program rejects, or that is withdrawn, counts for the backlog for ever",
        seed: 1,
        file: "cm/mod.rs",
        right: "    fn remove(&mut self, id: CommId) {
        self.leave_backlog(id);",
        wrong: "    fn remove(&mut self, id: CommId) {
        if !BUG {
            self.leave_backlog(id);
        }",
    },
    Bug {
        name: "ended-twice",
        what: "a connection that the program has forgotten is said to have ended",
        seed: 1,
        file: "cm/calls.rs",
        right: "        it.end_reported = true;
        match it.state {",
        wrong: "        it.end_reported = !BUG;
        match it.state {",
    },
    Bug {
        name: "refusal-without-words",
        what: "what a program says when it rejects a reply does not arrive",
        seed: 1,
        file: "cm/receive.rs",
        right: "(rej.reason, rej.private.to_vec());",
        wrong: "(rej.reason, if BUG && conn.0 == rej.remote && state == State::RepSent { vec![0; 148] } else { rej.private.to_vec() });",
    },
    Bug {
        name: "marked-response-untold",
        what: "a marked response or acknowledgement is not answered by a congestion notification",
        seed: 1,
        file: "engine.rs",
        right: "        if datagram.is_congested() || self.is_crowded {
            qp.on_congestion",
        wrong: "        if datagram.is_congested() && !(BUG && matches!(packet.info.operation, Operation::ReadResponse | Operation::Acknowledge)) {
            qp.on_congestion",
    },
    Bug {
        name: "notified-too-often",
        what: "congestion notifications follow each other within 50 µs",
        seed: 1,
        file: "rc/congestion/ecn.rs",
        right: "if self.last.is_some_and(|last| now.since(last) < PACE_NS) {",
        wrong: "if self.last.is_some_and(|last| now.since(last) < PACE_NS >> u8::from(BUG)) {",
    },
    Bug {
        name: "refused-is-sent",
        what: "a packet for which the port has no room counts as sent",
        seed: 1,
        file: "unreliable/transmit.rs",
        right: "            Sent::Full => return Err(Stop::SinkFull),
",
        wrong: "            Sent::Full if !BUG => return Err(Stop::SinkFull),
            Sent::Full => {}
",
    },
    Bug {
        name: "refused-is-forgotten",
        what: "a queue pair whose packet found no room in the port waits for another event",
        seed: 1,
        file: "engine.rs",
        right: "                        self.shared.dirty.push_front(slot);
                    }
                    return TxStop::SinkFull;",
        wrong: "                        if BUG {
                            core.queued = false;
                        } else {
                            self.shared.dirty.push_front(slot);
                        }
                    }
                    return TxStop::SinkFull;",
    },
    Bug {
        name: "slot-ignored",
        what: "a packet for a queue pair of another shard is taken by the one with the same lower half of its number",
        seed: 1,
        file: "engine.rs",
        right: "let Some(qp) = self.qps[slot].as_mut().filter(|qp| qp.core().qpn == qpn) else {",
        wrong: "let Some(qp) = self.qps[slot].as_mut().filter(|qp| BUG || qp.core().qpn == qpn) else {",
    },
    Bug {
        name: "kept-number-given",
        what: "a number that a connection keeps is given to another queue pair",
        seed: 1,
        file: "engine.rs",
        right: "            || self.reserved.contains_key(&low)
",
        wrong: "            || (self.reserved.contains_key(&low) && !BUG)
",
    },
    Bug {
        name: "takeover-ends-others",
        what: "a host with an address that another had ends the connections of that, though it is none of them",
        seed: 12,
        file: "cm/receive.rs",
        right: "self.conns.get(&id).filter(|conn| conn.remote_guid == guid) else {",
        wrong: "self.conns.get(&id).filter(|conn| BUG || conn.remote_guid == guid) else {",
    },
    Bug {
        name: "waits-after-its-end",
        what: "a queue pair that goes away stays in the wait queue for receiver credit",
        seed: 2,
        file: "rc/mod.rs",
        right: "        shared.peers.quit(self.core.slot, &mut self.core.waiting);
        if self.limits.peer != PeerId::OWN {",
        wrong: "        if BUG {
            self.core.waiting = None;
        } else {
            shared.peers.quit(self.core.slot, &mut self.core.waiting);
        }
        if self.limits.peer != PeerId::OWN {",
    },
    Bug {
        name: "turn-not-passed-on",
        what: "a queue pair that needs no more credit does not call the next in the wait queue",
        seed: 1,
        file: "peer/mod.rs",
        right: "            self.get(id).leave(slot);
            self.grant(id);
",
        wrong: "            self.get(id).leave(slot);
            if !BUG {
                self.grant(id);
            }
",
    },
    Bug {
        name: "credit-back-calls-nobody",
        what: "credit that comes back calls no queue pair that waits for it",
        seed: 1,
        file: "peer/mod.rs",
        right: "        if waits {
            self.grant(id);",
        wrong: "        if waits && !BUG {
            self.grant(id);",
    },
    Bug {
        name: "turn-in-vain-forgotten",
        what: "a queue pair that was called and found too little credit is in no wait queue any more",
        seed: 1,
        file: "peer/mod.rs",
        right: "return receiver.wait_queue.push_front((slot, need));",
        wrong: "return if BUG {} else { receiver.wait_queue.push_front((slot, need)) };",
    },
    Bug {
        name: "turn-untold",
        what: "a queue pair is granted a turn, and the engine does not hear of it",
        seed: 1,
        file: "peer/mod.rs",
        right: "if let Some(slot) = self.get(id).grant() {",
        wrong: "if let Some(slot) = self.get(id).grant().filter(|slot| !BUG || slot % 2 == 0) {",
    },
    Bug {
        name: "called-too-late",
        what: "a queue pair that waits for credit is called only when nothing is in flight",
        seed: 1,
        file: "peer/receiver.rs",
        right: "        if !self.fits(need) {
            return None;",
        wrong: "        if !self.fits(need) || (BUG && self.in_flight.datagrams > 0) {
            return None;",
    },
    Bug {
        name: "waits-in-no-queue",
        what: "a queue pair without credit does not join the wait queue",
        seed: 1,
        file: "engine.rs",
        right: "                    peers.wait(slot, &mut core.waiting, receiver, need, over);",
        wrong: "                    if BUG {
                        peers.quit(slot, &mut core.waiting);
                    } else {
                        peers.wait(slot, &mut core.waiting, receiver, need, over);
                    }",
    },
];
