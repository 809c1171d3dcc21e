//! Quiet messages: small SENDs and WRITEs, unsignaled and in answer to the peer's. Only every
//! eighth has AckReq, and a probe asks in time about those not acknowledged.

use crate::common::{BASE, Pair, Setup, Solo, qp_init, seal, to};
use rocinante_scripts::packet;
use rocinante_stack::mem::{Access, MwType};
use rocinante_stack::types::{Key, Psn, Qpn};
use rocinante_stack::verbs::{QpEvent, QpState, SendData, SendOp, SendWr, WcStatus};
use rocinante_stack::wire::{NakCode, Opcode as Op, Syndrome};
use rocinante_stack::{Budget, EngineConfig, QpAttr, QpInit, Urgency};

const TIMEOUT_14: u64 = 4096 << 14;
/// After this time without a response, the probe asks.
const PROBE: u64 = 2_000_000;
/// Time from one WRITE to the next.
const STEP: u64 = 5_000;
const WRITE: SendOp = SendOp::Write { remote: BASE, rkey: Key(0x99), imm: None };

fn inline(wr_id: u64, bytes: &[u8]) -> SendWr<'_> {
    let data = SendData::Inline(bytes);
    SendWr::new(WRITE, data).wr_id(wr_id).signaled(false)
}

/// One end; it answers its peer's WRITEs.
struct Talk {
    solo: Solo,
    heard: i64,
}

fn setup() -> Setup {
    Setup { mtu: rocinante_stack::types::Mtu::Mtu1024, ..Setup::script() }
}

fn talk(setup: &Setup) -> Talk {
    begin(Solo::new(setup))
}

/// With a known round trip: PSN 0 is acknowledged.
fn begin(mut solo: Solo) -> Talk {
    solo.know_round_trip(1000);
    Talk { solo, heard: 0 }
}

impl Talk {
    /// A WRITE without AckReq arrives.
    fn receive(&mut self) {
        let first = i64::from(self.solo.setup.psn[1]);
        let psn = Psn::new((first + self.heard) as u32);
        let reth = self.solo.reth(0, 1);
        let mut bytes =
            packet(Op::RC_RDMA_WRITE_ONLY, self.solo.end.qpn, psn, false, &[&reth, &[1]]);
        seal(&mut bytes);
        self.solo.receive(&bytes);
        self.heard += 1;
    }

    /// The PSNs of the packets that leave now, and whether they have AckReq.
    fn leaving(&mut self) -> Vec<(u32, bool)> {
        let first = self.solo.setup.psn[0];
        let told = |packet: &Vec<u8>| {
            let psn = u32::from_be_bytes([0, packet[9], packet[10], packet[11]]);
            (psn.wrapping_sub(first) & 0xff_ffff, packet[8] & 0x80 != 0)
        };
        self.solo.packets().iter().map(told).collect()
    }

    /// Whether `wr` has AckReq if it answers a WRITE of the peer.
    fn asks(&mut self, wr: &SendWr<'_>) -> bool {
        self.solo.wait(STEP);
        self.receive();
        self.asks_unheard(wr)
    }

    /// Whether `wr` has AckReq if it does not answer a WRITE.
    fn asks_unheard(&mut self, wr: &SendWr<'_>) -> bool {
        self.solo.post_wr(wr).expect("a good request");
        let [(_, asks)] = self.leaving()[..] else { panic!("one packet") };
        asks
    }

    /// Sends `count` WRITEs; none has AckReq.
    fn hush(&mut self, count: u64) {
        for wr_id in 0..count {
            assert!(!self.asks(&inline(100 + wr_id, &[7; 64])), "number {wr_id}");
        }
    }

    fn modify(&mut self, state: QpState) {
        let attr = QpAttr { state: Some(state), ..QpAttr::default() };
        self.solo.end.modify(self.solo.end.qpn, &attr).expect("a legal change");
    }
}

// ---- which packets ask ----

#[test]
fn one_of_eight_asks_and_its_answer_is_for_all() {
    let mut talk = talk(&setup());
    for round in 1..4 {
        let asked: Vec<bool> = (0..8).map(|id| talk.asks(&inline(id, &[3; 64]))).collect();
        assert_eq!(asked, [[false; 7].as_slice(), &[true]].concat(), "round {round}");
        talk.solo.receive_ack(8 * round);
        assert_eq!(u64::from(talk.solo.end.host.sends_retired), 1 + 8 * round as u64);
    }
    talk.solo.wait(10 * PROBE);
    assert_eq!(talk.leaving(), [], "nothing is awaited");
    assert_eq!(talk.solo.completed(), []);
}

#[test]
fn who_waits_or_sends_anything_else_asks() {
    let small = [5; 64];
    let wr = inline(7, &small);
    assert!(!talk(&setup()).asks(&wr), "as the others do not");
    for (what, wr) in [
        ("signaled", wr.signaled(true)),
        ("fenced", wr.fence()),
        ("one that invalidates", SendWr::new(SendOp::SendInv { rkey: Key(0x99) }, wr.data)),
    ] {
        assert!(talk(&setup()).asks(&wr), "{what}");
    }
    let mut registered = talk(&setup());
    let sges = [registered.solo.sge(0, 64)];
    assert!(registered.asks(&SendWr::new(wr.op, &sges)), "from registered memory");
}

#[test]
fn what_takes_a_receive_asks_as_seldom_while_the_peer_has_enough_of_them() {
    let imm = Some([0; 4]);
    let write = SendOp::Write { remote: BASE, rkey: Key(0x99), imm };
    for op in [SendOp::Send { imm: None }, SendOp::Send { imm }, write] {
        let wr = SendWr::new(op, SendData::Inline(&[5; 64])).signaled(false);
        let asked = |syndrome: Option<Syndrome>, count: usize| -> Vec<bool> {
            let mut talk = talk(&setup());
            if let Some(syndrome) = syndrome {
                talk.solo.receive_syndrome(0, syndrome);
            }
            (0..count).map(|_| talk.asks(&wr)).collect()
        };
        let seldom = [[false; 7].as_slice(), &[true]].concat();
        assert_eq!(asked(None, 8), seldom, "{op:?}");
        // The peer counts none yet, and one was sent before. A quiet request has eight behind it.
        assert_eq!(asked(Some(Syndrome::credits(16)), 8), seldom);
        let some = asked(Some(Syndrome::credits(12)), 8);
        assert_eq!(some.iter().position(|asks| *asks), Some(3), "{some:?}");
        assert_eq!(asked(Some(Syndrome::credits(8)), 4), [true; 4]);
    }
}

#[test]
fn every_request_of_a_queue_that_signals_all_asks_and_what_is_long() {
    let solo = |sq_sig_all| {
        let setup = setup();
        let init = QpInit { sq_sig_all, max_inline_data: 512, ..qp_init(&setup) };
        let make = |engine: &mut rocinante_stack::Engine| {
            (None, vec![engine.create_qp(&init, 0x1234).expect("room")])
        };
        let mut end = crate::common::End::of(1, &setup, make);
        end.connect(end.qpn, 0, crate::common::PEER, &setup);
        let key = end.host.register(0, setup.arena as u64, Access::ALL);
        Solo { end, now: rocinante_stack::types::Time(1_000), setup, key }
    };
    assert!(begin(solo(true)).asks(&inline(7, &[1; 64])));
    assert!(!begin(solo(false)).asks(&inline(7, &[1; 256])));
    assert!(begin(solo(false)).asks(&inline(7, &[1; 257])));
}

#[test]
fn what_answers_nothing_or_comes_seldom_asks() {
    let wr = inline(7, &[5; 64]);
    let mut alone = talk(&setup());
    assert!(!alone.asks(&wr) && alone.asks_unheard(&wr), "nothing came between the two");
    let mut seldom = talk(&setup());
    seldom.solo.wait(125_000);
    assert!(seldom.asks(&wr));
    seldom.solo.receive_ack(1);
    assert!(!seldom.asks(&wr));
}

#[test]
fn who_is_followed_asks_with_the_last() {
    let mut talk = talk(&setup());
    talk.receive();
    for wr_id in 0..3 {
        talk.solo.post_wr(&inline(wr_id, &[5; 64])).expect("a good request");
    }
    assert_eq!(talk.leaving().last(), Some(&(3, true)));
}

#[test]
fn where_room_or_time_is_short_everything_asks() {
    let asked = |setup: &Setup| -> Vec<bool> {
        let mut talk = talk(setup);
        (0..4).map(|id| talk.asks(&inline(id, &[5; 64]))).collect()
    };
    assert_eq!(asked(&setup()), [false; 4]);
    let stranger = Setup { budget: Budget::STANDARD, ..setup() };
    assert_eq!(asked(&stranger), [true; 4], "a peer that says nothing of its queue");
    let small = Setup { budget: Budget { bytes: 1 << 20, datagrams: 40 }, ..setup() };
    assert_eq!(asked(&small), [false, false, false, true], "a quarter of its queue");
    let shallow = Setup { depth: 8, ..setup() };
    assert_eq!(asked(&shallow), [false, false, true, true], "a quarter of the send queue");
    assert_eq!(asked(&Setup { timeout: 10, ..setup() }), [true; 4], "over before the probe");
    assert_eq!(asked(&Setup { timeout: 0, ..setup() }), [false; 4], "none at all");
    let mut far = Solo::new(&setup());
    far.know_round_trip(600_000);
    let mut far = Talk { solo: far, heard: 0 };
    assert!(far.asks(&inline(1, &[5; 64])));
    far.solo.receive_ack(1);
    assert!(far.asks(&inline(1, &[5; 64])), "so far away that the probe comes late");
}

#[test]
fn a_path_that_is_not_known_is_asked_about() {
    let mut talk = Talk { solo: Solo::new(&setup()), heard: 0 };
    assert!(talk.asks(&inline(1, &[5; 64])));
    assert!(talk.asks(&inline(2, &[5; 64])), "nothing was answered yet");
}

#[test]
fn what_is_sent_again_asks() {
    let mut talk = talk(&setup());
    talk.hush(2);
    talk.solo.receive_nak(1, NakCode::PsnSequenceError);
    assert_eq!(talk.leaving(), [(1, true), (2, true)]);
    talk.solo.receive_ack(2);
    talk.solo.wait(TIMEOUT_14);
    assert_eq!(talk.solo.end.host.sends_retired, 3);
    // Also one that is alone and answers.
    let mut talk = self::talk(&setup());
    talk.hush(1);
    talk.receive();
    talk.solo.receive_nak(1, NakCode::PsnSequenceError);
    assert_eq!(talk.leaving(), [(1, true)]);
}

// ---- the state of earlier packets ----

#[test]
fn the_probe_asks_once_and_costs_no_retry() {
    let mut talk = talk(&Setup { retry_cnt: 0, ..setup() });
    talk.hush(2);
    let qpn = talk.solo.end.qpn;
    assert_eq!(
        talk.solo.end.engine.post_urgency(qpn),
        Urgency::Now,
        "no timer and no response will drive"
    );
    assert_eq!(talk.solo.wait_for_timer(), Some(PROBE - STEP), "since the first of them left");
    assert_eq!(talk.leaving(), [(2, true)]);
    assert_eq!(talk.solo.end.engine.post_urgency(qpn), Urgency::Idle);
    talk.solo.receive_ack(2);
    assert_eq!((talk.solo.completed(), talk.solo.end.host.sends_retired), (vec![], 3));
    assert_eq!(talk.solo.end.engine.poll_timeout(), None, "no thread is woken again");
    let counters = talk.solo.end.engine.counters();
    assert_eq!((counters.tail_probes, counters.retransmitted_pkts), (1, 0));
}

/// As after our own process was stopped: it would first have read the ACK of a packet with AckReq.
#[test]
fn who_was_stopped_himself_asks_before_he_calls_the_peer_silent() {
    let mut talk = talk(&Setup { retry_cnt: 0, ..setup() });
    talk.hush(2);
    talk.solo.wait(3 * TIMEOUT_14);
    assert_eq!((talk.leaving(), talk.solo.state()), (vec![(2, true)], QpState::Rts));
    assert_eq!(talk.solo.end.engine.counters().local_ack_timeout_err, 0);
    talk.solo.receive_ack(2);
    assert_eq!((talk.solo.completed(), talk.solo.end.host.sends_retired), (vec![], 3));

    // A peer that was asked and does not answer is gone.
    let mut talk = self::talk(&Setup { retry_cnt: 0, ..setup() });
    talk.hush(1);
    talk.solo.wait(3 * TIMEOUT_14);
    assert_eq!(talk.leaving(), [(1, true)]);
    talk.solo.wait(3 * TIMEOUT_14);
    assert_eq!(talk.solo.state(), QpState::Err);
    assert_eq!(talk.solo.completed(), [(100, WcStatus::RetryExcErr)]);
}

#[test]
fn a_lost_one_is_noticed_by_the_probe_or_by_the_gap_in_front_of_the_next() {
    let mut talk = talk(&Setup { retry_cnt: 0, ..setup() });
    talk.hush(2);
    talk.solo.wait_for_timer();
    assert_eq!(talk.leaving(), [(2, true)]);
    talk.solo.receive_nak(1, NakCode::PsnSequenceError);
    assert_eq!(talk.leaving(), [(1, true), (2, true)], "both had been lost");
    talk.solo.receive_ack(2);
    assert_eq!((talk.solo.completed(), talk.solo.end.host.sends_retired), (vec![], 3));

    talk.solo.send(2, 8);
    assert_eq!(talk.leaving(), [(3, true)]);
    talk.solo.receive_ack(3);
    talk.hush(3);
    talk.solo.receive_nak(5, NakCode::PsnSequenceError);
    assert_eq!(talk.leaving(), [(5, true), (6, true)], "the packets before the gap have arrived");
    assert_eq!(talk.solo.end.host.sends_retired, 5);
}

#[test]
fn one_of_us_that_holds_what_followed_gets_the_missing_one_alone_and_is_asked() {
    let held = EngineConfig::default().reorder_packets_max;
    let mut talk = talk(&Setup { held, ..setup() });
    talk.hush(3);
    talk.solo.receive_gap(1, &[2, 3]);
    assert_eq!(talk.leaving(), [(1, true)]);
    talk.solo.receive_ack(3);
    assert_eq!(talk.solo.end.host.sends_retired, 4);
}

#[test]
fn a_lost_probe_is_repeated_and_the_end_comes_when_it_was_promised() {
    // The time until it gives up, and the number of timeouts.
    let gives_up = |signaled: bool| {
        let mut talk = talk(&Setup { retry_cnt: 2, ..setup() });
        assert_eq!(talk.asks(&inline(7, &[5; 64]).signaled(signaled)), signaled);
        let left = talk.solo.now;
        while talk.solo.state() == QpState::Rts {
            talk.solo.wait_for_timer().expect("a timer");
            talk.leaving();
        }
        assert_eq!(talk.solo.completed(), [(7, WcStatus::RetryExcErr)]);
        let counters = talk.solo.end.engine.counters();
        assert!(counters.tail_probes > 3, "{}", counters.tail_probes);
        (talk.solo.now.since(left), counters.local_ack_timeout_err)
    };
    assert_eq!(gives_up(true), (3 * TIMEOUT_14, 3));
    assert_eq!(gives_up(false), gives_up(true));
}

#[test]
fn what_is_lost_with_its_probe_arrives_when_the_network_is_back() {
    for timeout in [0, 14] {
        let mut talk = talk(&Setup { retry_cnt: 1, timeout, ..setup() });
        talk.hush(1);
        for _ in 0..4 {
            talk.solo.wait_for_timer().expect("another probe");
            assert_eq!(talk.leaving(), [(1, true)]);
        }
        talk.solo.receive_ack(1);
        assert_eq!(talk.solo.end.host.sends_retired, 2);
    }
}

#[test]
fn one_without_a_receive_goes_again_and_asks() {
    let mut talk = talk(&setup());
    let wr = SendWr::send(SendData::Inline(&[5; 64])).signaled(false);
    assert!(!talk.asks(&wr) && !talk.asks(&wr));
    talk.solo.receive_rnr(1, 1);
    assert_eq!(talk.leaving(), []);
    talk.solo.wait_for_timer();
    assert_eq!(talk.leaving().first(), Some(&(1, true)));
}

// ---- the responder ----

#[test]
fn who_goes_says_what_came_unasked() {
    let mut talk = talk(&setup());
    let qpn = talk.solo.end.qpn;
    let acks = |talk: &mut Talk, of| {
        talk.solo.end.engine.acknowledge_unasked(of);
        talk.solo.sent()
    };
    assert_eq!(acks(&mut talk, None), [""; 0], "nothing came");
    talk.receive();
    talk.receive();
    assert_eq!(talk.solo.sent(), [""; 0], "no packet asked");
    assert_eq!(acks(&mut talk, Some(Qpn::new(qpn.value() + 1))), [""; 0], "it is another's");
    let one = acks(&mut talk, Some(qpn));
    assert!(one.len() == 1 && one[0].contains("ACK"), "{one:?}");
    assert_eq!(acks(&mut talk, None), [""; 0], "all are acknowledged");
    talk.receive();
    assert_eq!(acks(&mut talk, None).len(), 1);
}

#[test]
fn a_reset_queue_pair_owes_no_acknowledgement_and_leaves_the_engine_idle() {
    let mut talk = talk(&setup());
    talk.receive();
    let solo = &mut talk.solo;
    let qpn = solo.end.qpn;
    solo.end.modify(qpn, &to(QpState::Reset)).unwrap();
    solo.end.engine.acknowledge_unasked(None);
    assert_eq!(solo.sent(), [""; 0]);
    assert_eq!(solo.end.engine.urgency(), Urgency::Idle);
}

// ---- packets that cannot wait for the probe ----

#[test]
fn what_is_signaled_behind_asks_for_all() {
    let mut talk = talk(&setup());
    talk.hush(3);
    assert!(talk.asks(&inline(7, &[5; 64]).signaled(true)));
    talk.solo.receive_ack(4);
    assert_eq!(talk.solo.completed(), [(7, WcStatus::Success)]);
    assert_eq!(talk.solo.end.host.sends_retired, 5);
}

#[test]
fn what_sends_nothing_and_is_signaled_makes_it_ask_at_once() {
    let mut talk = talk(&setup());
    let host = &mut talk.solo.end.host;
    let region = host.register(0, 4096, Access::LOCAL_WRITE | Access::MW_BIND);
    let mw =
        host.regions.insert_window(crate::common::PD, MwType::Type2, 0x7654_3200).expect("room");
    talk.hush(2);
    let rkey = Key(mw.0 + 1);
    let access = Access::REMOTE_READ;
    let bind = SendOp::BindMw { mw, rkey, region, addr: BASE, len: 64, access };
    for (psn, op) in [(2, bind), (3, SendOp::LocalInv { rkey })] {
        if psn == 3 {
            talk.hush(1);
        }
        talk.solo.post(u64::from(psn), op, &[]);
        assert_eq!(talk.leaving(), [(psn, true)], "the WRITE again, and it asks");
        assert_eq!(talk.solo.completed(), []);
        talk.solo.receive_ack(psn.into());
        assert_eq!(talk.leaving(), []);
        assert_eq!(talk.solo.completed(), [(u64::from(psn), WcStatus::Success)]);
    }
}

#[test]
fn a_queue_that_is_drained_asks_at_once() {
    let mut talk = talk(&setup());
    talk.hush(2);
    let notify = Some(true);
    let attr = QpAttr { state: Some(QpState::Sqd), sqd_async_notify: notify, ..QpAttr::default() };
    talk.solo.end.modify(talk.solo.end.qpn, &attr).expect("from RTS");
    assert_eq!(talk.leaving(), [(2, true)]);
    assert_eq!(talk.solo.event(), None);
    talk.solo.receive_ack(2);
    assert_eq!(talk.solo.event(), Some(QpEvent::SqDrained));
    talk.modify(QpState::Rts);
    talk.hush(1);
}

#[test]
fn an_error_flushes_what_was_not_told_of() {
    let mut talk = talk(&setup());
    talk.hush(3);
    talk.solo.receive_nak(2, NakCode::RemoteAccessError);
    let flushed = WcStatus::WrFlushErr;
    let done = [(101, WcStatus::RemAccessErr), (102, flushed)];
    assert_eq!((talk.solo.completed(), talk.solo.state()), (done.to_vec(), QpState::Err));

    let mut broken = self::talk(&setup());
    broken.hush(2);
    broken.modify(QpState::Err);
    assert_eq!(broken.solo.completed(), [(100, flushed), (101, flushed)]);
    broken.solo.wait(10 * TIMEOUT_14);
    assert_eq!(broken.leaving(), []);
}

#[test]
fn nothing_is_left_of_it_after_a_reset_or_destruction() {
    for destroy in [false, true] {
        let mut talk = talk(&setup());
        talk.hush(3);
        assert_eq!(talk.solo.end.engine.footprint().in_flight_packets, 3);
        let qpn = talk.solo.end.qpn;
        if destroy {
            talk.solo.end.engine.destroy_qp(qpn).expect("it is there");
        } else {
            talk.modify(QpState::Reset);
        }
        let left = talk.solo.end.engine.footprint();
        assert_eq!((left.in_flight_packets, left.timers, left.in_flight_lists), (0, 0, 0));
        assert_eq!((talk.solo.end.engine.poll_timeout(), talk.leaving()), (None, vec![]));
        if !destroy {
            talk.solo.end.connect(qpn, 0, crate::common::PEER, &setup());
            talk.heard = 0;
            talk.solo.send(9, 8);
            assert_eq!(talk.leaving(), [(0, true)], "another connection begins as any");
        }
    }
}

// ---- both sides ----

/// Two ends that answer each other.
struct Both {
    pair: Pair,
    keys: [Key; 2],
}

fn both(setup: &Setup) -> Both {
    let mut pair = Pair::new(setup);
    let keys = pair.register();
    // Each end has measured the round trip.
    for at in [0, 1] {
        let op = SendOp::Write { remote: BASE, rkey: keys[1 - at], imm: None };
        pair.send(at, 0, op, &[crate::common::sge(0, 8, keys[at])]);
        pair.run();
        assert_eq!(pair.completions(at).len(), 1);
    }
    Both { pair, keys }
}

impl Both {
    /// Side `at` posts `number`, and it leaves.
    fn say(&mut self, at: usize, number: u64, signaled: bool) {
        let op = SendOp::Write { remote: BASE + 64, rkey: self.keys[1 - at], imm: None };
        let bytes = number.to_be_bytes();
        let end = &mut self.pair.ends[at];
        let wr = SendWr::new(op, &bytes).wr_id(number).signaled(signaled);
        end.engine.post_send(end.qpn, &wr, &mut end.host).expect("room in the queue");
        self.pair.now = self.pair.now.after(STEP);
        self.pair.deliver(at);
    }

    fn has_heard(&self, at: usize) -> u64 {
        let arena = &self.pair.ends[at].host.arena;
        u64::from_be_bytes(arena[64..72].try_into().expect("eight bytes"))
    }

    /// Both sides answer up to `last`; no side posts before it has received the other's number.
    fn talk(&mut self, last: u64) {
        for number in 1..=last {
            let at = (number % 2) as usize;
            self.say(at, number, number + 1 >= last);
            self.pair.run_until(|pair| {
                let arena = &pair.ends[1 - at].host.arena;
                arena[64..72] == number.to_be_bytes()
            });
            assert_eq!(self.has_heard(1 - at), number);
        }
        self.pair.run();
        for at in [0, 1] {
            let done = self.pair.ends[at].host.completed();
            assert_eq!(done.len(), 1, "{done:?}");
            assert_eq!(done[0].1, WcStatus::Success);
        }
    }

    fn acks(&self) -> u64 {
        self.pair.ends.iter().map(|end| end.engine.counters().sent_acks).sum()
    }
}

#[test]
fn everything_is_told_of_by_an_eighth_of_the_acknowledgements_wherever_the_psn_wraps() {
    for before in [1, 2, 7, 8, 9, 20] {
        let psn = [0x100_0000 - before, 0x100_0000 - before / 2];
        let mut both = both(&Setup { psn, ..Setup::default() });
        let first = both.acks();
        both.talk(160);
        let acks = both.acks() - first;
        assert!((20..=24).contains(&acks), "{acks} for 160 WRITEs");
        for end in &both.pair.ends {
            assert_eq!(end.host.sends_retired, 81, "all, and the first");
            let counters = end.engine.counters();
            assert_eq!((counters.tail_probes, counters.local_ack_timeout_err), (0, 0));
        }
    }
}

#[test]
fn a_queue_of_any_depth_never_fills_with_what_was_not_asked_about() {
    for depth in 1..=20 {
        let mut both = both(&Setup { depth, ..Setup::default() });
        both.talk(100);
    }
}

#[test]
fn over_a_bad_network_all_arrives_in_order_and_is_told_of() {
    for (seed, held) in (0..40u64).flat_map(|seed| [(seed, 0), (seed, 64)]) {
        let psn = [0xff_fff0, 0xff_ff80];
        let mut both = both(&Setup { psn, held, ..Setup::default() });
        both.pair.pass = crate::common::one_lost_in(8, seed);
        both.talk(200);
        for end in &both.pair.ends {
            assert_eq!(end.host.sends_retired, 101, "seed {seed}");
            assert_eq!(end.engine.footprint().in_flight_packets, 0, "seed {seed}");
        }
    }
}

#[test]
fn who_needs_the_peers_room_does_not_wait_for_the_probe() {
    // A queue of 40. Quiet WRITEs hold a part of its quarter.
    let budget = Budget { bytes: 1 << 20, datagrams: 40 };
    let mut both = both(&Setup { budget, qps: 2, ..Setup::default() });
    for number in 1..=4 {
        both.say((number % 2) as usize, number, false);
    }
    for at in [0, 1] {
        assert!(both.pair.ends[at].engine.footprint().in_flight_packets > 0, "it is held");
    }
    let begun = both.pair.now;
    let op = SendOp::Write { remote: BASE + 4096, rkey: both.keys[1], imm: None };
    both.pair.send_on(0, 1, 9, op, &[crate::common::sge(4096, 300_000, both.keys[0])]);
    both.pair.run_until(|pair| !pair.ends[0].host.completions.is_empty());
    assert!(both.pair.now.since(begun) < PROBE / 2, "{} ns", both.pair.now.since(begun));
}
