//! After warm-up the engine allocates nothing, in any call: a counting allocator watches.
#![allow(unsafe_code)]
#![allow(clippy::disallowed_types, reason = "a test counts what its own thread allocates")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::{BASE, End, PORT, Setup, addr, sge, template};
use rocinante_stack::mem::{Access, FlushLevel, Placement};
use rocinante_stack::types::{Key, Time};
use rocinante_stack::verbs::{
    AhId, Destination, QpType, RecvWr, SendData, SendOp, SendWr, WcStatus,
};
use rocinante_stack::wire::icrc::{DF, Summed, Template};
use rocinante_stack::{Budget, Datagram, IpId, PeerAddress, PeerKind, SrqChange, TxSink};

struct Counting;

thread_local! {
    /// Per thread: other tests and the harness run beside this one.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

fn count() {
    ALLOCATIONS.set(ALLOCATIONS.get() + 1);
}

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static GLOBAL: Counting = Counting;

/// Packets in one preallocated run of bytes.
struct Arena {
    bytes: Vec<u8>,
    ends: Vec<usize>,
    template: Template,
}

impl TxSink for Arena {
    fn send<E>(
        &mut self,
        _path: u32,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<Option<Summed>, E>,
    ) -> Result<bool, E> {
        let start = self.ends.last().copied().unwrap_or(0);
        if self.ends.len() == self.ends.capacity() || start + len > self.bytes.len() {
            return Ok(false);
        }
        let packet = &mut self.bytes[start..start + len];
        fill(packet)?;
        self.template.seal(packet);
        self.ends.push(start + len);
        Ok(true)
    }
}

/// Two engines, joined by arenas; every `loss`th packet is lost.
struct Quiet {
    ends: [End; 2],
    arenas: [Arena; 2],
    keys: [Key; 2],
    now: Time,
    loss: u64,
    count: u64,
    done: u64,
}

impl Quiet {
    fn new() -> Self {
        let budget = Budget { bytes: 1 << 20, datagrams: 40 };
        let access = Access::ALL.with(Access::FLUSH_GLOBAL);
        Self::of(&Setup { access, qps: 3, timeout: 6, rd_atomic: 4, budget, ..Setup::default() })
    }

    fn of(setup: &Setup) -> Self {
        let mut ends = [End::new(1, setup), End::new(2, setup)];
        for i in 0..setup.qps {
            let [a, b] = [ends[0].qpns[i], ends[1].qpns[i]];
            ends[0].connect(a, 0, b, setup);
            ends[1].connect(b, 1, a, setup);
        }
        let keys = [0, 1].map(|at: usize| {
            ends[at].host.completions.reserve(10_000);
            ends[at].host.register(0, setup.arena as u64, setup.access)
        });
        let arenas = [(1, 2), (2, 1)].map(|(src, dst)| Arena {
            bytes: vec![0; 1 << 20],
            ends: Vec::with_capacity(1000),
            template: template(addr(src), addr(dst)),
        });
        Self { ends, arenas, keys, now: Time(1000), loss: 0, count: 0, done: 0 }
    }

    fn exchange(&mut self) -> bool {
        let mut any = false;
        for from in 0..2 {
            let (end, arena) = (&mut self.ends[from], &mut self.arenas[from]);
            end.engine.poll_transmit(self.now, 500, &mut end.host, arena);
            let mut start = 0;
            for stop in arena.ends.drain(..) {
                any = true;
                self.count += 1;
                if self.loss == 0 || !self.count.is_multiple_of(self.loss) {
                    let (src, dst) = (self.ends[from].addr, self.ends[1 - from].addr);
                    let datagram = Datagram {
                        bytes: &arena.bytes[start..stop],
                        src,
                        dst,
                        src_port: PORT,
                        ip_id: IpId::Exact { id: 0, flags: DF },
                        tos: 0,
                        hop_limit: None,
                    };
                    let to = &mut self.ends[1 - from];
                    to.engine.handle_datagram(self.now, &datagram, &mut to.host);
                }
                start = stop;
            }
        }
        self.now = self.now.after(1000);
        any
    }

    /// Runs until nothing is left to do.
    fn run(&mut self) {
        loop {
            if self.exchange() {
                continue;
            }
            let next = self.ends.iter().filter_map(|end| end.engine.poll_timeout()).min();
            let Some(next) = next else { break };
            self.now = self.now.max(next);
            for end in &mut self.ends {
                end.engine.handle_timeout(self.now, &mut end.host);
            }
        }
        for end in &mut self.ends {
            assert!(end.host.completions.iter().all(|cqe| cqe.status == WcStatus::Success));
        }
        self.done += self.ends[0].host.completions.len() as u64;
        self.ends.iter_mut().for_each(|end| end.host.completions.clear());
    }

    /// Posts `op` on all queue pairs of one end, with a receive at the other if it consumes one.
    fn post(&mut self, op: SendOp, len: u32, inline: bool) {
        let lists = [sge(0, len / 2, self.keys[0]), sge(10_000, len - len / 2, self.keys[0])];
        let data = if inline { SendData::Inline(&[7; 32]) } else { SendData::Sges(&lists) };
        for qp in 0..3 {
            if matches!(op, SendOp::Send { .. } | SendOp::Write { imm: Some(_), .. }) {
                let end = &mut self.ends[1];
                let wr = RecvWr { wr_id: 1, sges: &[sge(20_000, len.max(32), self.keys[1])] };
                end.engine.post_recv(end.qpns[qp], &wr, &mut end.host).unwrap();
            }
            let end = &mut self.ends[0];
            let wr = SendWr::new(op, data).wr_id(1);
            end.engine.post_send(end.qpns[qp], &wr, &mut end.host).unwrap();
        }
    }

    fn all(&mut self, rounds: u32) {
        let (remote, rkey, imm) = (BASE + 40_000, self.keys[1], Some([1; 4]));
        let (placement, level) = (Placement::GLOBAL, FlushLevel::Range);
        let ops = [
            (SendOp::Send { imm }, 3000, false),
            (SendOp::Send { imm: None }, 32, true),
            (SendOp::Write { remote, rkey, imm: None }, 3000, false),
            (SendOp::Write { remote, rkey, imm }, 64, false),
            (SendOp::Read { remote, rkey }, 3000, false),
            (SendOp::FetchAdd { remote, rkey, add: 1 }, 8, false),
            (SendOp::CompareSwap { remote, rkey, compare: 0, swap: 1 }, 8, false),
            (SendOp::Flush { remote, rkey, len: 3000, placement, level }, 0, false),
            (SendOp::AtomicWrite { remote, rkey }, 8, false),
        ];
        for round in 0..rounds {
            for (op, len, inline) in ops {
                self.post(op, len, inline);
            }
            if round % 4 == 3 {
                self.run();
            }
        }
        self.run();
    }
}

/// Sends to a peer that has no receive posted at first.
fn not_ready(quiet: &mut Quiet, rounds: u32) {
    for _ in 0..rounds {
        let end = &mut quiet.ends[0];
        let wr = SendWr::new(SendOp::Send { imm: None }, SendData::Inline(&[1; 8])).wr_id(1);
        end.engine.post_send(end.qpn, &wr, &mut end.host).unwrap();
        quiet.exchange();
        let end = &mut quiet.ends[1];
        let wr = RecvWr { wr_id: 1, sges: &[sge(0, 8, quiet.keys[1])] };
        end.engine.post_recv(end.qpn, &wr, &mut end.host).unwrap();
        quiet.run();
    }
}

#[test]
fn ten_thousand_of_each_operation_allocate_nothing() {
    let mut quiet = Quiet::new();
    let measure = |quiet: &mut Quiet, loss, rounds, work: &dyn Fn(&mut Quiet, u32)| {
        quiet.loss = loss;
        work(quiet, 20);
        let before = ALLOCATIONS.get();
        work(quiet, rounds);
        ALLOCATIONS.get() - before
    };
    let all = |quiet: &mut Quiet, rounds| quiet.all(rounds);
    assert_eq!(measure(&mut quiet, 0, 10_000 / 3 + 1, &all), 0);
    assert!(quiet.done > 9 * 10_000);
    assert_eq!(measure(&mut quiet, 50, 500, &all), 0, "with losses");
    assert!(quiet.ends[0].engine.counters().local_ack_timeout_err > 0);
    assert_eq!(measure(&mut quiet, 0, 2000, &not_ready), 0, "with receives that come late");
    assert!(quiet.ends[0].engine.counters().rcvd_rnr_err > 1000);
}

/// Two engines with an unreliable queue pair each, and an address handle of one for the other.
fn unreliable(qp_type: QpType) -> (Quiet, AhId) {
    let setup =
        Setup { qp_type, budget: Budget { bytes: 1 << 20, datagrams: 40 }, ..Setup::default() };
    let mut quiet = Quiet::of(&setup);
    let end = &mut quiet.ends[0];
    let (local, remote, budget) = (end.addr, addr(2), setup.budget);
    let kind = PeerKind::announced(budget, None);
    let ah =
        end.engine.create_ah(common::PD, &PeerAddress { local, remote, path: 0, budget, kind });
    (quiet, ah.unwrap())
}

/// Posts `count` requests, with receives for half of them.
fn lossy(quiet: &mut Quiet, ops: &[(SendOp, u32)], count: u32) {
    for n in 0..count {
        let (op, len) = ops[n as usize % ops.len()];
        let [from, to] = &mut quiet.ends;
        if n % 2 == 0 {
            let wr = RecvWr { wr_id: 1, sges: &[sge(20_000, 3100, quiet.keys[1])] };
            let _ = to.engine.post_recv(to.qpn, &wr, &mut to.host);
        }
        let list = [sge(0, len / 2, quiet.keys[0]), sge(10_000, len - len / 2, quiet.keys[0])];
        let wr = SendWr::new(op, SendData::Sges(&list)).wr_id(1);
        from.engine.post_send(from.qpn, &wr, &mut from.host).unwrap();
        if n % 16 == 15 {
            quiet.run();
        }
    }
    quiet.run();
}

#[test]
fn ten_thousand_unreliable_messages_allocate_nothing() {
    for qp_type in [QpType::Uc, QpType::Ud] {
        let (mut quiet, ah) = unreliable(qp_type);
        let (remote, rkey, imm) = (BASE + 40_000, quiet.keys[1], Some([1; 4]));
        let to = Destination { ah, qpn: quiet.ends[1].qpn, qkey: common::QKEY };
        let ops = match qp_type {
            QpType::Ud => {
                vec![(SendOp::SendTo { to, imm }, 900), (SendOp::SendTo { to, imm: None }, 0)]
            }
            _ => vec![
                (SendOp::Send { imm }, 3000),
                (SendOp::Write { remote, rkey, imm: None }, 3000),
                (SendOp::Write { remote, rkey, imm }, 60),
            ],
        };
        for loss in [0, 50] {
            quiet.loss = loss;
            lossy(&mut quiet, &ops, 200);
            let before = ALLOCATIONS.get();
            lossy(&mut quiet, &ops, 10_000);
            assert_eq!(ALLOCATIONS.get() - before, 0, "{qp_type}, loss {loss}");
        }
        assert!(quiet.done > 20_000 && quiet.ends[1].engine.counters().rcvd_bytes > 1 << 20);
        assert!(quiet.ends[1].engine.drops().no_receive > 100);
    }
}

/// Posts `count` messages over all queue pairs, with a shared receive for each. The limit is set
/// again and again.
fn shared(quiet: &mut Quiet, count: u32) {
    for n in 0..count {
        let [from, to] = &mut quiet.ends;
        to.share(1, &[sge(20_000, 3100, quiet.keys[1])]).unwrap();
        let list = [sge(0, n % 3000, quiet.keys[0])];
        let (op, data) = (SendOp::Send { imm: None }, SendData::Sges(&list));
        let wr = SendWr::new(op, data).wr_id(1);
        from.engine.post_send(from.qpns[n as usize % 3], &wr, &mut from.host).unwrap();
        if n % 16 == 15 {
            let change = SrqChange { srq_limit: Some(16), max_wr: None };
            to.engine.modify_srq(to.srq.unwrap(), &change).unwrap();
            quiet.run();
            assert_eq!(quiet.ends[1].engine.poll_srq_event(), quiet.ends[1].srq);
        }
    }
    quiet.run();
}

#[test]
fn ten_thousand_messages_to_a_shared_receive_queue_allocate_nothing() {
    let budget = Budget { bytes: 1 << 20, datagrams: 40 };
    let setup = Setup { qps: 3, timeout: 6, budget, srq: Some(64), ..Setup::default() };
    let mut quiet = Quiet::of(&setup);
    for loss in [0, 50] {
        quiet.loss = loss;
        shared(&mut quiet, 320);
        let before = ALLOCATIONS.get();
        shared(&mut quiet, 10_000);
        assert_eq!(ALLOCATIONS.get() - before, 0, "loss {loss}");
    }
    assert!(quiet.done > 20_000);
}
