//! Two engines and a lossy link.

use std::net::IpAddr;

use rocinante_stack::mem::{Access, Sge};
use rocinante_stack::types::{Key, Time};
use rocinante_stack::verbs::{Cqe, QpState, RecvWr, SendData, SendOp, SendWr};
use rocinante_stack::wire::icrc::DF;
use rocinante_stack::{Datagram, IpId};

use super::{End, PORT, Setup};

/// Decides for each packet whether it arrives. Arguments: the sender, and the packet's bytes.
pub type Pass = Box<dyn FnMut(usize, &[u8]) -> bool>;

/// Loses one packet in `n`, at random.
pub fn one_lost_in(n: u64, seed: u64) -> Pass {
    let mut random = fastrand::Rng::with_seed(seed);
    Box::new(move |_, _| random.u64(..n) != 0)
}

/// Two connected ends.
pub struct Pair {
    pub ends: [End; 2],
    pub now: Time,
    /// Decides for each packet whether it arrives.
    pub pass: Pass,
    pub delivered: u64,
}

impl Pair {
    pub fn new(setup: &Setup) -> Self {
        let mut ends = [End::new(1, setup), End::new(2, setup)];
        for i in 0..setup.qps {
            let [a, b] = [ends[0].qpns[i], ends[1].qpns[i]];
            ends[0].connect(a, 0, b, setup);
            ends[1].connect(b, 1, a, setup);
        }
        Self { ends, now: Time(1_000), pass: Box::new(|_, _| true), delivered: 0 }
    }

    /// Resets the queue pairs number `qp` of both ends and connects them again.
    pub fn reconnect(&mut self, qp: usize, setup: &Setup) {
        let qpns = self.ends.each_ref().map(|end| end.qpns[qp]);
        for (at, end) in self.ends.iter_mut().enumerate() {
            end.modify(qpns[at], &super::to(QpState::Reset)).unwrap();
            end.connect(qpns[at], at, qpns[1 - at], setup);
        }
    }

    /// Registers the whole arena of both ends with all rights.
    pub fn register(&mut self) -> [Key; 2] {
        [0, 1].map(|at| {
            let host = &mut self.ends[at].host;
            host.register(0, host.arena.len() as u64, Access::ALL)
        })
    }

    /// Posts a signaled request on the first queue pair.
    pub fn send(&mut self, at: usize, wr_id: u64, op: SendOp, sges: &[Sge]) {
        self.send_on(at, 0, wr_id, op, sges);
    }

    pub fn send_on(&mut self, at: usize, qp: usize, wr_id: u64, op: SendOp, sges: &[Sge]) {
        let end = &mut self.ends[at];
        let wr = SendWr::new(op, SendData::Sges(sges)).wr_id(wr_id);
        end.engine.post_send(end.qpns[qp], &wr, &mut end.host).expect("room in the queue");
    }

    pub fn recv(&mut self, at: usize, wr_id: u64, sges: &[Sge]) {
        let end = &mut self.ends[at];
        let wr = RecvWr { wr_id, sges };
        end.engine.post_recv(end.qpn, &wr, &mut end.host).expect("room in the queue");
    }

    /// Lets `from` send, and delivers the packets that pass.
    pub fn deliver(&mut self, from: usize) -> bool {
        let end = &mut self.ends[from];
        end.engine.poll_transmit(self.now, 1 << 20, &mut end.host, &mut end.out);
        end.probe();
        let (src, dst) = (self.ends[from].addr, self.ends[1 - from].addr);
        let mut any = false;
        while let Some(packet) = self.ends[from].out.packets.pop_front() {
            any = true;
            if !(self.pass)(from, &packet) {
                continue;
            }
            self.delivered += 1;
            self.inject(1 - from, src, dst, &packet);
        }
        any
    }

    /// Hands a sealed packet to an engine.
    pub fn inject(&mut self, to: usize, src: IpAddr, dst: IpAddr, packet: &[u8]) {
        let end = &mut self.ends[to];
        let datagram = Datagram {
            bytes: packet,
            src,
            dst,
            src_port: PORT,
            ip_id: IpId::Exact { id: 0, flags: DF },
            tos: 0,
            hop_limit: None,
        };
        end.engine.handle_datagram(self.now, &datagram, &mut end.host);
    }

    /// Runs until nothing more happens, or until `done`.
    pub fn run_until(&mut self, mut done: impl FnMut(&Self) -> bool) {
        for _ in 0..1_000_000 {
            if done(self) {
                return;
            }
            let any = self.deliver(0) | self.deliver(1);
            if any {
                self.now = self.now.after(1_000);
            }
            let next = self.ends.iter().filter_map(|end| end.engine.poll_timeout()).min();
            match next {
                None if !any => return,
                Some(next) if !any => self.now = self.now.max(next),
                Some(next) if next <= self.now => {}
                _ => continue,
            }
            let now = self.now;
            for end in &mut self.ends {
                end.engine.handle_timeout(now, &mut end.host);
            }
        }
        panic!("it does not end");
    }

    pub fn run(&mut self) {
        self.run_until(|_| false);
    }

    pub fn completions(&mut self, at: usize) -> Vec<Cqe> {
        std::mem::take(&mut self.ends[at].host.completions)
    }
}
