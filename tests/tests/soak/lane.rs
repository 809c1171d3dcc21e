//! The work of one queue pair, the same at both of its ends: turns of all operations. Each byte is
//! compared where it arrives.
//!
//! A turn is a WRITE that is read back, a WRITE with immediate, a SEND, a fetch-and-add and a
//! compare-and-swap. The receiver of a turn compares all its data and posts receives for the next.
//! Then it writes the number of turns received into the sender's memory.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use rocinante::cm::Connection;
use rocinante::verbs::{QpState, SendData, SendOp, Sge, WcOpcode};
use rocinante::{
    Access, Cq, Mr, Pd, PreparedQp, RecvWr, RemoteSlice, SendWr, VerbsError, Wc, WcStatus,
};
use rocinante_tests::harness::{assert_same, pattern, wr};

/// Turns in flight.
const SLOTS: usize = 4;
/// The longest message.
const LEN_MAX: usize = 20_000;
/// Posted receives: two for each turn, and one for the last word.
const RECEIVES: usize = 2 * SLOTS + 1;
/// Requests of a turn.
const TURN: usize = 6;
/// Depth of the send queue: for the turns, and for the WRITEs that confirm turns received.
const SENDS: usize = 64;

/// Entries of a completion queue for `lanes` lanes.
pub(super) const fn completions(lanes: usize) -> u32 {
    (lanes * (SENDS + RECEIVES)) as u32
}

/// The label at the start of a message: its sender, the turn, the kind.
const LABEL: usize = 24;

// Memory that the peer reaches: the number of our turns that it has received, the word of its
// atomics, and the targets of its WRITEs.
const HEARD: usize = 0;
const WORD: usize = 8;
const TARGETS: usize = 64;
const SHARED: usize = TARGETS + 2 * SLOTS * LEN_MAX;

// Memory that the peer does not reach: labels, results of atomics, data read back, data received.
const LABELS: usize = 0;
const RESULTS: usize = LABELS + 3 * SLOTS * LABEL;
const READ_BACK: usize = RESULTS + 16 * SLOTS;
const RECEIVED: usize = READ_BACK + SLOTS * LEN_MAX;
const OWN: usize = RECEIVED + RECEIVES * LEN_MAX;

/// Distinguishes receives from requests.
const RECEIVE: u64 = 1 << 63;
/// The immediate data of the last word.
const LAST: [u8; 4] = *b"last";

/// The requests of a turn, in order, and two more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Write,
    Read,
    WriteImm,
    Send,
    FetchAdd,
    CompareSwap,
    Heard,
    Last,
}

const KINDS: [Kind; 8] = [
    Kind::Write,
    Kind::Read,
    Kind::WriteImm,
    Kind::Send,
    Kind::FetchAdd,
    Kind::CompareSwap,
    Kind::Heard,
    Kind::Last,
];

/// Random bytes; each message is a piece of them.
pub(super) struct Source {
    mr: Mr,
    bytes: Vec<u8>,
}

impl Source {
    pub(super) fn new(pd: &Pd) -> Self {
        let bytes = pattern(LEN_MAX + 4096, 5);
        let mr = pd.allocate(bytes.len(), Access::NONE).unwrap();
        mr.write(0, &bytes);
        Self { mr, bytes }
    }
}

/// A message: its label, and which piece of the source follows.
#[derive(Debug, Clone, Copy)]
struct Message {
    label: [u64; 3],
    from: usize,
    len: usize,
}

impl Message {
    fn new(voice: u64, turn: u64, kind: Kind) -> Self {
        let mixed = mix(voice ^ mix(turn ^ mix(kind as u64)));
        let len = match mixed % 8 {
            0..3 => LABEL + (mixed >> 8) as usize % 64,
            3..5 => 1020 + (mixed >> 8) as usize % 8,
            _ => LABEL + (mixed >> 8) as usize % (LEN_MAX - LABEL + 1),
        };
        Self { label: [voice, turn, kind as u64], from: (mixed >> 32) as usize % 4096, len }
    }

    fn label(&self) -> [u8; LABEL] {
        let mut bytes = [0; LABEL];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(self.label) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

/// The operands of a turn's atomics, and the value of the word after them.
struct Atomics {
    add: u64,
    compare: u64,
    swap: u64,
    after: u64,
}

impl Atomics {
    fn new(voice: u64, turn: u64, before: u64) -> Self {
        let add = mix(voice ^ turn);
        let (sum, swap) = (before.wrapping_add(add), mix(add));
        // Some swaps must fail.
        let fails = turn % 5 == 4;
        let compare = if fails { !sum } else { sum };
        Self { add, compare, swap, after: if fails { sum } else { swap } }
    }
}

/// The finalizer of SplitMix64.
pub(super) const fn mix(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

/// Counts of a lane's work.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Tally {
    /// Requests that succeeded.
    pub(super) requests: u64,
    /// Requests and receives that were flushed, or failed, because the peer died.
    pub(super) cut_off: u64,
    /// Messages of the peer.
    pub(super) received: u64,
    /// Bytes compared here: received, written by the peer, and read back.
    pub(super) bytes: u64,
    /// The longest time without a completion.
    pub(super) silence: Duration,
}

impl Tally {
    pub(super) fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.cut_off += other.cut_off;
        self.received += other.received;
        self.bytes += other.bytes;
        self.silence = self.silence.max(other.silence);
    }
}

/// The memory of a lane without a connection.
pub(super) struct Unconnected {
    shared: Mr,
    own: Mr,
}

impl Unconnected {
    /// Also makes a queue pair with posted receives.
    pub(super) fn new(pd: &Pd, cq: &Cq) -> Result<(Self, PreparedQp), VerbsError> {
        let shared = pd.allocate(SHARED, Access::ALL)?;
        let own = pd.allocate(OWN, Access::LOCAL_WRITE)?;
        let qp = pd
            .qp(cq, cq)
            .access(Access::ALL)
            .max_send_wr(SENDS as u32)
            .max_recv_wr(RECEIVES as u32);
        let qp = qp.max_sge(2).max_inline_data(64).build()?;
        for number in 0..RECEIVES as u64 {
            qp.post_recv(&[receive(number, &[place(&own, number)])]).expect("room");
        }
        Ok((Self { shared, own }, qp))
    }

    /// The region that the peer needs.
    pub(super) fn region(&self) -> RemoteSlice {
        self.shared.remote()
    }

    pub(super) fn connected(self, qp: Connection, remote: RemoteSlice, voices: [u64; 2]) -> Lane {
        let Self { shared, own } = self;
        let [voice, hears] = voices;
        Lane {
            remote,
            voice,
            hears,
            begun: 0,
            done: 0,
            under_way: VecDeque::new(),
            posted_word: 0,
            word: 0,
            heard: 0,
            their_word: 0,
            received: 0,
            receives: RECEIVES as u64,
            told: 0,
            last: [Last::No; 2],
            dies: false,
            failed: false,
            moved: Instant::now(),
            tally: Tally::default(),
            scratch: vec![0; LEN_MAX],
            qp,
            shared,
            own,
        }
    }
}

fn place(own: &Mr, number: u64) -> Sge {
    own.sge(RECEIVED + number as usize % RECEIVES * LEN_MAX, LEN_MAX)
}

fn receive(number: u64, sges: &[Sge]) -> RecvWr<'_> {
    RecvWr { wr_id: RECEIVE | number, sges }
}

/// The state of a last word, sent or received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Last {
    No,
    Posted,
    Yes,
}

/// A working queue pair.
pub(super) struct Lane {
    remote: RemoteSlice,
    /// Labels of our messages and of the peer's. They are in each message, so that it is not
    /// mistaken for that of another lane or of an earlier life.
    voice: u64,
    hears: u64,
    /// Our turns: posted, and completed.
    begun: u64,
    done: u64,
    /// Outstanding requests, in order.
    under_way: VecDeque<u64>,
    /// The peer's word after all posted requests, and after all completed ones.
    posted_word: u64,
    word: u64,
    /// Number of the peer's turns that were received and compared, and the value that our word has
    /// after the peer's atomics.
    heard: u64,
    their_word: u64,
    /// Messages received, and receives posted.
    received: u64,
    receives: u64,
    /// Number of the peer's turns that were confirmed to it.
    told: u64,
    /// Our last word, and the peer's.
    last: [Last; 2],
    dies: bool,
    failed: bool,
    moved: Instant,
    tally: Tally,
    scratch: Vec<u8>,
    qp: Connection,
    shared: Mr,
    own: Mr,
}

impl Lane {
    pub(super) fn qp(&self) -> &Connection {
        &self.qp
    }

    pub(super) fn tally(&self) -> &Tally {
        &self.tally
    }

    /// All lanes exist: the work begins.
    pub(super) fn start(&mut self) {
        self.moved = Instant::now();
    }

    /// Posts all that can be posted.
    pub(super) fn work(&mut self, source: &Source, stopping: bool) {
        if self.told < self.heard && self.has_room(1) {
            self.tell();
        }
        let known = self.shared.load_u64(HEARD);
        assert!(known <= self.begun, "{self}: the peer has heard {known} turns");
        while !stopping && self.begun < known.min(self.done) + SLOTS as u64 && self.has_room(TURN) {
            self.begin(source);
        }
        let all = stopping && self.begun == self.done && self.begun == known;
        if all && self.last[0] == Last::No && self.has_room(1) {
            let bytes = Message::new(self.voice, self.begun, Kind::Last).label();
            self.inline(Kind::Last, self.begun, SendOp::Send { imm: Some(LAST) }, &bytes);
            self.last[0] = Last::Posted;
        }
    }

    fn has_room(&self, count: usize) -> bool {
        self.under_way.len() + count <= SENDS
    }

    /// Confirms to the peer the number of its turns that were received.
    fn tell(&mut self) {
        self.told = self.heard;
        let (remote, rkey) = (self.remote.address + HEARD as u64, self.remote.rkey);
        let op = SendOp::Write { remote, rkey, imm: None };
        self.inline(Kind::Heard, self.heard, op, &self.heard.to_ne_bytes());
    }

    fn inline(&mut self, kind: Kind, turn: u64, op: SendOp, bytes: &[u8]) {
        let wr_id = turn * 8 + kind as u64;
        let request = SendWr::new(op, SendData::Inline(bytes)).wr_id(wr_id);
        self.qp.post_send(&[request]).unwrap_or_else(|e| panic!("{self}: {e}"));
        self.under_way.push_back(wr_id);
    }

    /// Posts a turn.
    fn begin(&mut self, source: &Source) {
        let turn = self.begun;
        let slot = turn as usize % SLOTS;
        let [write, imm, send] = [Kind::Write, Kind::WriteImm, Kind::Send]
            .map(|kind| Message::new(self.voice, turn, kind));
        let sges = [(0, write), (1, imm), (2, send)].map(|(nth, message)| {
            let at = LABELS + (3 * slot + nth) * LABEL;
            self.own.write(at, &message.label());
            [self.own.sge(at, LABEL), source.mr.sge(message.from, message.len - LABEL)]
        });
        let back = [self.own.sge(READ_BACK + slot * LEN_MAX, write.len)];
        let results = [0, 8].map(|nth| [self.own.sge(RESULTS + 16 * slot + nth, 8)]);
        let rkey = self.remote.rkey;
        let [there, with_imm] = [0, 1].map(|nth| self.remote.address + target(slot, nth) as u64);
        let word = self.remote.address + WORD as u64;
        let Atomics { add, compare, swap, after } =
            Atomics::new(self.voice, turn, self.posted_word);
        let id = |kind: Kind| turn * 8 + kind as u64;
        let list = [
            wr(id(Kind::Write), SendOp::Write { remote: there, rkey, imm: None }, &sges[0]),
            wr(id(Kind::Read), SendOp::Read { remote: there, rkey }, &back),
            wr(
                id(Kind::WriteImm),
                SendOp::Write { remote: with_imm, rkey, imm: Some(immediate(turn)) },
                &sges[1],
            ),
            wr(id(Kind::Send), SendOp::Send { imm: send_immediate(turn) }, &sges[2]),
            wr(id(Kind::FetchAdd), SendOp::FetchAdd { remote: word, rkey, add }, &results[0]),
            wr(
                id(Kind::CompareSwap),
                SendOp::CompareSwap { remote: word, rkey, compare, swap },
                &results[1],
            ),
        ];
        self.qp.post_send(&list).unwrap_or_else(|e| panic!("{self}: {e}"));
        self.under_way.extend(list.iter().map(|request| request.wr_id));
        self.posted_word = after;
        self.begun += 1;
    }

    /// Takes a completion of this queue pair.
    pub(super) fn take(&mut self, wc: &Wc, source: &Source) {
        let now = Instant::now();
        if !self.dies {
            self.tally.silence = self.tally.silence.max(now - self.moved);
        }
        self.moved = now;
        if wc.wr_id & RECEIVE != 0 {
            return self.receive(wc, source);
        }
        assert_eq!(self.under_way.pop_front(), Some(wc.wr_id), "{self}: {wc:?} out of order");
        if wc.status != WcStatus::Success {
            return self.fail(wc);
        }
        assert!(!self.failed, "{self}: {wc:?} after a failure");
        self.tally.requests += 1;
        let (turn, kind) = (wc.wr_id / 8, KINDS[(wc.wr_id % 8) as usize]);
        let slot = turn as usize % SLOTS;
        let result = |nth| self.own.load_u64(RESULTS + 16 * slot + nth);
        let Atomics { add, after, .. } = Atomics::new(self.voice, turn, self.word);
        match kind {
            Kind::Read => {
                let message = Message::new(self.voice, turn, Kind::Write);
                self.compare(Mine::Own, READ_BACK + slot * LEN_MAX, message, source);
            }
            Kind::FetchAdd => assert_eq!(result(0), self.word, "{self}: fetch-and-add {turn}"),
            Kind::CompareSwap => {
                let found = self.word.wrapping_add(add);
                assert_eq!(result(8), found, "{self}: compare-and-swap {turn}");
                self.word = after;
                self.done += 1;
            }
            Kind::Last => self.last[0] = Last::Yes,
            Kind::Write | Kind::WriteImm | Kind::Send | Kind::Heard => {}
        }
    }

    /// A request or receive that failed by the peer's death.
    fn fail(&mut self, wc: &Wc) {
        assert!(self.dies, "{self}: {wc:?}, though the peer lives");
        let receive = wc.wr_id & RECEIVE != 0;
        // The peer's next life may have ended this connection before.
        let first = !receive && !self.failed && !self.qp.is_disconnected();
        let expected = if first { WcStatus::RetryExcErr } else { WcStatus::WrFlushErr };
        assert_eq!(wc.status, expected, "{self}: {wc:?}");
        self.failed |= !receive;
        self.tally.cut_off += 1;
    }

    /// A message has arrived.
    fn receive(&mut self, wc: &Wc, source: &Source) {
        assert_eq!(wc.wr_id, RECEIVE | self.received, "{self}: {wc:?} out of order");
        self.received += 1;
        if wc.status != WcStatus::Success {
            return self.fail(wc);
        }
        self.tally.received += 1;
        let (number, len) = (self.received - 1, wc.byte_len as usize);
        let (turn, at) = (number / 2, RECEIVED + number as usize % RECEIVES * LEN_MAX);
        let slot = turn as usize % SLOTS;
        if wc.imm == Some(LAST) {
            let mut found = [0; LABEL];
            self.own.read(at, &mut found);
            let last = Message::new(self.hears, self.heard, Kind::Last);
            assert_same(&found, &last.label(), &format!("{self}: the last word"));
            assert_eq!(self.shared.load_u64(WORD), self.their_word, "{self}: the word");
            self.last[1] = Last::Yes;
        } else if number % 2 == 0 {
            let [write, imm] =
                [Kind::Write, Kind::WriteImm].map(|kind| Message::new(self.hears, turn, kind));
            assert_eq!(wc.opcode, WcOpcode::RecvRdmaWithImm, "{self}: {wc:?}");
            assert_eq!((wc.imm, len), (Some(immediate(turn)), imm.len), "{self}: {wc:?}");
            self.compare(Mine::Shared, target(slot, 0), write, source);
            self.compare(Mine::Shared, target(slot, 1), imm, source);
        } else {
            let send = Message::new(self.hears, turn, Kind::Send);
            assert_eq!(wc.opcode, WcOpcode::Recv, "{self}: {wc:?}");
            assert_eq!((wc.imm, len), (send_immediate(turn), send.len), "{self}: {wc:?}");
            self.compare(Mine::Own, at, send, source);
            // The atomics follow. The side that posted them compares the values they found.
            self.their_word = Atomics::new(self.hears, turn, self.their_word).after;
            self.heard += 1;
        }
        if !self.dies {
            let sges = [place(&self.own, self.receives)];
            let list = [receive(self.receives, &sges)];
            self.qp.post_recv(&list).unwrap_or_else(|e| panic!("{self}: {e}"));
            self.receives += 1;
        }
    }

    /// Compares each byte of the message at `at`.
    fn compare(&mut self, mine: Mine, at: usize, message: Message, source: &Source) {
        let mut found = std::mem::take(&mut self.scratch);
        let region = if mine == Mine::Own { &self.own } else { &self.shared };
        region.read(at, &mut found[..message.len]);
        let (label, rest) = found[..message.len].split_at(LABEL);
        let expected = &source.bytes[message.from..][..message.len - LABEL];
        if label != message.label() || rest != expected {
            let what = format!("{self}: {message:?}");
            assert_same(label, &message.label(), &what);
            assert_same(rest, expected, &what);
        }
        self.tally.bytes += message.len as u64;
        self.scratch = found;
    }

    /// Whether both sides have sent and received all.
    pub(super) fn is_over(&self) -> bool {
        self.last == [Last::Yes; 2] && self.under_way.is_empty()
    }

    /// The time since the last completion.
    pub(super) fn silent_for(&self) -> Duration {
        self.moved.elapsed()
    }

    /// The peer was killed. Keeps at least one request outstanding, which notices that. Returns
    /// whether all posted requests have completed.
    pub(super) fn die(&mut self) -> bool {
        self.dies = true;
        // Requests that the peer had acknowledged before still succeed.
        if self.under_way.is_empty() && !self.failed && self.qp.state() == QpState::Rts {
            self.tell();
        }
        let dead = self.under_way.is_empty() && self.received == self.receives;
        assert!(!dead || self.qp.state() == QpState::Err, "{self}: not in error");
        dead
    }
}

/// Which of the lane's regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mine {
    Own,
    Shared,
}

/// Where the WRITEs of a slot go: the one that is read back, and the one with immediate.
fn target(slot: usize, nth: usize) -> usize {
    TARGETS + (2 * slot + nth) * LEN_MAX
}

fn immediate(turn: u64) -> [u8; 4] {
    (turn as u32).to_be_bytes()
}

/// Every other SEND has immediate data.
fn send_immediate(turn: u64) -> Option<[u8; 4]> {
    (turn % 2 == 1).then_some(immediate(turn))
}

impl std::fmt::Display for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { voice, begun, done, heard, told, received, receives, last, .. } = self;
        write!(
            f,
            "queue pair {} (voice {voice:#x}): {begun} turns begun, {done} done, {} heard by the peer; {heard} of its turns heard, {told} told; \
             {} requests under way, {received} of {receives} receives; last words {last:?}; silent for {:?}, {:?}",
            self.qp.qpn(),
            self.shared.load_u64(HEARD),
            self.under_way.len(),
            self.moved.elapsed(),
            self.qp.state(),
        )
    }
}
