//! Random requests over a random network, compared with a model: exactly once, in order, byte for
//! byte.
//!
//! A failure prints its seed. `ROCINANTE_SEED=n cargo test -p rocinante-stack --test rc random::`
//! replays it. `ROCINANTE_SEEDS=n` runs more seeds than the default.

use std::collections::VecDeque;

use crate::common::{BASE, End, PORT, Setup, sge};
use fastrand::Rng;
use rocinante_stack::mem::{Access, FlushLevel, Placement, Sge};
use rocinante_stack::types::{Key, Mtu, Time};
use rocinante_stack::verbs::{Cqe, RecvWr, SendData, SendOp, SendWr, WcOpcode, WcStatus};
use rocinante_stack::wire::icrc::DF;
use rocinante_stack::{Budget, Datagram, IpId, Urgency};

const FLUSHABLE: Access = Access::ALL.with(Access::FLUSH_GLOBAL);

/// True once in `n` times; never for 0.
fn one_in(random: &mut Rng, n: u64) -> bool {
    n > 0 && random.u64(..n) == 0
}

/// The longest message, and the most messages in a queue.
const LONGEST: u64 = 6000;
const DEPTH: u64 = 8;

/// Layout of each end's arena, per queue pair: sources of the requests that it sends, receives, the
/// window that the peer writes, a window that the peer only reads, and words for atomics.
const SLOTS: u64 = DEPTH * LONGEST;
const RECEIVES: u64 = SLOTS;
const WINDOW: u64 = 2 * SLOTS;
const CONSTANT: u64 = WINDOW + LONGEST;
const WORDS: u64 = CONSTANT + LONGEST;
const SHARE: u64 = WORDS + 16;

/// The expected effect of a request.
enum Expect {
    Nothing,
    /// A READ places these bytes in this slot.
    Bytes(u64, Vec<u8>),
}

/// One direction of one queue pair: `at` sends requests, the other end responds.
struct Stream {
    left: u32,
    posted: VecDeque<(u64, WcOpcode, bool, Expect)>,
    next_id: u64,
    /// The next request has to wait for the READ before it.
    fence: bool,
    /// The peer's window and words as this direction's requests leave them.
    window: Vec<u8>,
    words: [u64; 2],
    /// Messages sent that have not yet completed a receive of the peer, and the receives posted.
    sent: VecDeque<(Vec<u8>, Option<[u8; 4]>, bool)>,
    receives: VecDeque<(u64, u32)>,
    next_receive: u64,
}

struct World {
    random: Rng,
    ends: [End; 2],
    keys: [Key; 2],
    streams: Vec<[Stream; 2]>,
    constants: Vec<u8>,
    now: Time,
    /// Packets in flight: arrival, order, destination, bytes.
    flying: Vec<(u64, u64, usize, Vec<u8>)>,
    order: u64,
    loss: u64,
    dup: u64,
    late: u64,
    damage: u64,
}

impl World {
    fn new(seed: u64, requests: u32) -> Self {
        let mut random = Rng::with_seed(seed);
        let qps = 1 + random.u64(..3) as usize;
        let datagrams = 1 << random.u64(..8);
        let setup = Setup {
            mtu: Mtu::ALL[random.u64(..5) as usize],
            psn: [0, 1].map(|_| (0x100_0000 - random.u64(..3000)) as u32 & 0xff_ffff),
            timeout: 6 + random.u64(..4) as u8,
            rd_atomic: 1 + random.u64(..6) as u8,
            arena: (SHARE * qps as u64) as usize,
            access: FLUSHABLE,
            depth: DEPTH as u32,
            budget: Budget { bytes: 8704 * datagrams, datagrams },
            held: [0, 3, 2048][random.u64(..3) as usize],
            split_writes: one_in(&mut random, 2),
            qps,
            ..Setup::default()
        };
        let mut ends = [End::new(1, &setup), End::new(2, &setup)];
        for i in 0..qps {
            let [a, b] = [ends[0].qpns[i], ends[1].qpns[i]];
            ends[0].connect(a, 0, b, &setup);
            ends[1].connect(b, 1, a, &setup);
        }
        let mut constants = vec![0; LONGEST as usize];
        random.fill(&mut constants);
        let keys = [0, 1].map(|at: usize| {
            let host = &mut ends[at].host;
            for qp in 0..qps as u64 {
                let at = (qp * SHARE + CONSTANT) as usize;
                host.arena[at..at + constants.len()].copy_from_slice(&constants);
            }
            host.register(0, setup.arena as u64, FLUSHABLE)
        });
        let stream = || Stream {
            left: requests,
            posted: VecDeque::new(),
            next_id: 0,
            fence: false,
            window: vec![0; LONGEST as usize],
            words: [0; 2],
            sent: VecDeque::new(),
            receives: VecDeque::new(),
            next_receive: 0,
        };
        let streams = (0..qps).map(|_| [stream(), stream()]).collect();
        // Few faults, so that eight tries in a row do not all fail.
        let odds = |random: &mut Rng, n: &[u64]| n[random.u64(..n.len() as u64) as usize];
        let loss = odds(&mut random, &[0, 20, 40, 100]);
        let dup = odds(&mut random, &[0, 10, 50]);
        let late = odds(&mut random, &[0, 10, 100]);
        let damage = odds(&mut random, &[0, 100, 300]);
        let (now, flying) = (Time(1000), Vec::new());
        Self {
            random,
            ends,
            keys,
            streams,
            constants,
            now,
            flying,
            order: 0,
            loss,
            dup,
            late,
            damage,
        }
    }

    fn length(&mut self) -> u64 {
        match self.random.u64(..6) {
            0 => self.random.u64(..4),
            1 => 256 << self.random.u64(..5),
            2 => (256 << self.random.u64(..5)) - 1 + self.random.u64(..3),
            _ => self.random.u64(..LONGEST + 1),
        }
        .min(LONGEST)
    }

    /// A list of one to four elements over `len` bytes at `offset`.
    fn cut(&mut self, offset: u64, len: u64, key: Key) -> Vec<Sge> {
        let mut list = Vec::new();
        let mut at = 0;
        for _ in 0..self.random.u64(..4) {
            let part = self.random.u64(..len - at + 1);
            list.push(sge(offset + at, part as u32, key));
            at += part;
        }
        list.push(sge(offset + at, (len - at) as u32, key));
        list
    }

    /// Posts a random request of end `at` on queue pair `qp`.
    fn post(&mut self, at: usize, qp: usize) {
        let len = self.length();
        let share = qp as u64 * SHARE;
        let stream = &mut self.streams[qp][at];
        let wr_id = stream.next_id;
        let slot = share + (wr_id % DEPTH) * LONGEST;
        let rkey = self.keys[1 - at];
        let kind = self.random.u64(..10);
        let imm = one_in(&mut self.random, 2).then(|| (wr_id as u32).to_be_bytes());
        let start = self.random.u64(..LONGEST - len + 1);
        let range = start as usize..(start + len) as usize;
        let mut fence = one_in(&mut self.random, 6);
        let mut data = vec![0; len as usize];
        self.random.fill(&mut data);
        let stream = &mut self.streams[qp][at];
        fence |= std::mem::take(&mut stream.fence);
        let (op, opcode, list_len, expect) = match kind {
            0 | 1 => {
                stream.sent.push_back((data.clone(), imm, false));
                (SendOp::Send { imm }, WcOpcode::Send, len, Expect::Nothing)
            }
            2 | 3 => {
                stream.window[range].copy_from_slice(&data);
                if imm.is_some() {
                    stream.sent.push_back((data.clone(), imm, true));
                }
                let remote = BASE + share + WINDOW + start;
                (SendOp::Write { remote, rkey, imm }, WcOpcode::RdmaWrite, len, Expect::Nothing)
            }
            4 => {
                let remote = BASE + share + CONSTANT + start;
                let bytes = Expect::Bytes(slot, self.constants[range].to_vec());
                (SendOp::Read { remote, rkey }, WcOpcode::RdmaRead, len, bytes)
            }
            5 => {
                // The memory that it reads must not be written before the READ is done.
                stream.fence = true;
                let remote = BASE + share + WINDOW + start;
                let bytes = Expect::Bytes(slot, stream.window[range].to_vec());
                (SendOp::Read { remote, rkey }, WcOpcode::RdmaRead, len, bytes)
            }
            6 => {
                let add = self.random.u64(..) >> 40;
                let found = stream.words[0];
                stream.words[0] = found.wrapping_add(add);
                let remote = BASE + share + WORDS;
                let bytes = Expect::Bytes(slot, found.to_ne_bytes().to_vec());
                (SendOp::FetchAdd { remote, rkey, add }, WcOpcode::FetchAdd, 8, bytes)
            }
            7 => {
                // The word that the next compare and swap uses.
                stream.words[1] = self.random.u64(..);
                data = stream.words[1].to_ne_bytes().to_vec();
                let op = SendOp::AtomicWrite { remote: BASE + share + WORDS + 8, rkey };
                (op, WcOpcode::AtomicWrite, 8, Expect::Nothing)
            }
            8 => {
                data.clear();
                let (placement, level) = (Placement::GLOBAL, FlushLevel::Range);
                let remote = BASE + share + WINDOW + start;
                let op = SendOp::Flush { remote, rkey, len: len as u32, placement, level };
                (op, WcOpcode::Flush, 0, Expect::Nothing)
            }
            _ => {
                let found = stream.words[1];
                let compare = if imm.is_some() { found } else { found ^ 1 };
                let swap = self.random.u64(..);
                if compare == found {
                    stream.words[1] = swap;
                }
                let remote = BASE + share + WORDS + 8;
                let bytes = Expect::Bytes(slot, found.to_ne_bytes().to_vec());
                (SendOp::CompareSwap { remote, rkey, compare, swap }, WcOpcode::CompSwap, 8, bytes)
            }
        };
        // Unsignaled requests are known to be done only when a later one completes.
        let last = stream.left == 1 || stream.posted.len() as u64 + 1 == DEPTH;
        let signaled = last || !one_in(&mut self.random, 4);
        let list = self.cut(slot, list_len, self.keys[at]);
        let inline = !op.has_result() && data.len() <= 64 && one_in(&mut self.random, 2);
        let end = &mut self.ends[at];
        if !op.has_result() {
            end.host.arena[slot as usize..][..data.len()].copy_from_slice(&data);
        }
        let sent = if inline { SendData::Inline(&data) } else { SendData::Sges(&list) };
        let mut wr = SendWr::new(op, sent).wr_id(wr_id).signaled(signaled);
        wr.fence = fence;
        end.engine.post_send(end.qpns[qp], &wr, &mut end.host).expect("there is room");
        let stream = &mut self.streams[qp][at];
        stream.posted.push_back((wr_id, opcode, signaled, expect));
        stream.next_id += 1;
        stream.left -= 1;
    }

    /// Posts a receive at the peer of end `at`.
    fn post_receive(&mut self, at: usize, qp: usize) {
        let stream = &mut self.streams[qp][at];
        let wr_id = stream.next_receive;
        stream.next_receive += 1;
        stream.receives.push_back((wr_id, LONGEST as u32));
        let offset = qp as u64 * SHARE + RECEIVES + (wr_id % DEPTH) * LONGEST;
        let list = self.cut(offset, LONGEST, self.keys[1 - at]);
        let end = &mut self.ends[1 - at];
        let wr = RecvWr { wr_id, sges: &list };
        end.engine.post_recv(end.qpns[qp], &wr, &mut end.host).expect("there is room");
    }

    /// Posts requests and receives, roughly up to the depth. Returns whether more are left to post.
    fn work(&mut self) -> bool {
        for qp in 0..self.streams.len() {
            for at in 0..2 {
                let stream = &self.streams[qp][at];
                let room = (stream.posted.len() as u64) < DEPTH;
                if stream.left > 0 && room && one_in(&mut self.random, 2) {
                    self.post(at, qp);
                }
                let room = (self.streams[qp][at].receives.len() as u64) < DEPTH;
                if room && one_in(&mut self.random, 3) {
                    self.post_receive(at, qp);
                }
            }
        }
        self.streams.iter().flatten().any(|stream| stream.left > 0)
    }

    /// Compares the completions with the expected ones.
    fn check(&mut self) {
        for at in 0..2 {
            for cqe in std::mem::take(&mut self.ends[at].host.completions) {
                assert_eq!(cqe.status, WcStatus::Success, "{cqe:?}");
                let qp = self.ends[at].qpns.iter().position(|qpn| *qpn == cqe.qpn).unwrap();
                match cqe.opcode {
                    WcOpcode::Recv | WcOpcode::RecvRdmaWithImm => self.received(1 - at, qp, &cqe),
                    _ => self.completed(at, qp, &cqe),
                }
            }
        }
    }

    fn completed(&mut self, at: usize, qp: usize, cqe: &Cqe) {
        loop {
            let stream = &mut self.streams[qp][at];
            let (id, opcode, signaled, expect) = stream.posted.pop_front().expect("was posted");
            if let Expect::Bytes(slot, bytes) = expect {
                let found = &self.ends[at].host.arena[slot as usize..][..bytes.len()];
                assert!(found == bytes, "result of {opcode:?} {id} of end {at}");
            }
            if signaled {
                assert_eq!((cqe.wr_id, cqe.opcode), (id, opcode));
                return;
            }
        }
    }

    fn received(&mut self, at: usize, qp: usize, cqe: &Cqe) {
        let stream = &mut self.streams[qp][at];
        let (data, imm, write) = stream.sent.pop_front().expect("was sent");
        let (id, _) = stream.receives.pop_front().expect("was posted");
        let opcode = if write { WcOpcode::RecvRdmaWithImm } else { WcOpcode::Recv };
        assert_eq!((cqe.wr_id, cqe.opcode, cqe.imm), (id, opcode, imm));
        assert_eq!(cqe.byte_len as usize, data.len());
        if !write {
            let offset = qp as u64 * SHARE + RECEIVES + (id % DEPTH) * LONGEST;
            let found = &self.ends[1 - at].host.arena[offset as usize..][..data.len()];
            assert!(found == data, "message {id} from end {at}");
        }
    }

    /// Lets both ends send, with faults in the network.
    fn send(&mut self) {
        for at in 0..2 {
            let end = &mut self.ends[at];
            end.out.room = self.random.u64(..40) as usize;
            let budget = 1 + self.random.u64(..100) as usize;
            end.engine.poll_transmit(self.now, budget, &mut end.host, &mut end.out);
            while let Some(mut packet) = self.ends[at].out.packets.pop_front() {
                let copies = 1 + u32::from(one_in(&mut self.random, self.dup));
                for _ in 0..copies {
                    if one_in(&mut self.random, self.loss) {
                        continue;
                    }
                    let far = if one_in(&mut self.random, self.late) { 30_000 } else { 0 };
                    let due = self.now.0 + 5_000 + self.random.u64(..1 + far);
                    let mut packet =
                        if copies > 1 { packet.clone() } else { std::mem::take(&mut packet) };
                    if one_in(&mut self.random, self.damage) {
                        let bit = self.random.u64(..packet.len() as u64 * 8);
                        packet[(bit / 8) as usize] ^= 1 << (bit % 8);
                    }
                    self.order += 1;
                    self.flying.push((due, self.order, 1 - at, packet));
                }
            }
        }
    }

    /// Advances to the next event; `false` if there is none.
    fn pass(&mut self) -> bool {
        let arrival = self.flying.iter().map(|(due, order, ..)| (*due, *order)).min();
        let timer = self.ends.iter().filter_map(|end| end.engine.poll_timeout()).min();
        let busy = self.ends.iter().any(|end| end.engine.urgency() != Urgency::Idle);
        let next =
            [arrival.map(|(due, _)| due), timer.map(|due| due.0)].into_iter().flatten().min();
        let Some(next) = next else {
            self.now = self.now.after(100);
            return busy;
        };
        let soon = self.now.0 + if busy { 100 } else { u64::MAX / 2 };
        self.now = Time(next.min(soon).max(self.now.0));
        for end in &mut self.ends {
            end.engine.handle_timeout(self.now, &mut end.host);
        }
        let now = self.now.0;
        let mut due: Vec<_> = self.flying.extract_if(.., |packet| packet.0 <= now).collect();
        due.sort_by_key(|(due, order, ..)| (*due, *order));
        for (_, _, to, packet) in due {
            let (src, dst) = (self.ends[1 - to].addr, self.ends[to].addr);
            let ip_id = IpId::Exact { id: 0, flags: DF };
            let datagram = Datagram {
                bytes: &packet,
                src,
                dst,
                src_port: PORT,
                ip_id,
                tos: 0,
                hop_limit: None,
            };
            let end = &mut self.ends[to];
            end.engine.handle_datagram(self.now, &datagram, &mut end.host);
        }
        true
    }

    fn run(&mut self) {
        for _ in 0..2_000_000 {
            let more = self.work();
            self.send();
            let alive = self.pass();
            self.check();
            if !more && !alive {
                return self.compare();
            }
        }
        panic!("it does not end");
    }

    /// After everything is done: compares the memory with the model.
    fn compare(&mut self) {
        for at in 0..2 {
            let end = &self.ends[at];
            let mut retired = 0;
            for (qp, streams) in self.streams.iter().enumerate() {
                let share = (qp as u64 * SHARE) as usize;
                let ours = &streams[1 - at];
                let part =
                    |offset: u64, len: usize| &end.host.arena[share + offset as usize..][..len];
                assert!(part(WINDOW, ours.window.len()) == ours.window, "the written part");
                assert!(
                    part(CONSTANT, self.constants.len()) == self.constants,
                    "the part that was only read"
                );
                let words = [part(WORDS, 8), part(WORDS + 8, 8)];
                assert_eq!(words, ours.words.each_ref().map(|word| word.to_ne_bytes()), "words");
                assert!(
                    streams[at].posted.is_empty() && streams[at].sent.is_empty(),
                    "all is done"
                );
                retired += streams[at].next_id;
            }
            assert_eq!(u64::from(end.host.sends_retired), retired, "every request was retired");
        }
    }
}

/// Prints how to replay the run.
struct Replay(u64);

impl Drop for Replay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("replay with ROCINANTE_SEED={}", self.0);
        }
    }
}

#[test]
fn random_work_over_a_bad_network_is_done_exactly_once_and_in_order() {
    #[allow(clippy::disallowed_methods, reason = "a test may read its environment")]
    let number = |name: &str| std::env::var(name).ok().map(|n| n.parse::<u64>().expect(name));
    let (seed, last) = (number("ROCINANTE_SEED"), number("ROCINANTE_SEEDS").unwrap_or(200));
    let seeds = seed.map_or(1..=last, |seed| seed..=seed);
    let (mut packets, mut again) = (0, 0);
    for seed in seeds {
        let _replay = Replay(seed);
        let mut world = World::new(seed, 120);
        world.run();
        for end in &world.ends {
            packets += end.engine.counters().sent_pkts;
            again += end.engine.counters().retransmitted_pkts;
        }
    }
    println!("{packets} packets, {again} of them sent again");
    assert!(seed.is_some() || again > 1000, "the network was not bad enough");
}
