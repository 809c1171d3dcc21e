//! Faults besides those of the network.

use rocinante_stack::verbs::{QpState, WcStatus};

use crate::check::{Verdict, queue_of};
use crate::memory::Zone;
use crate::model::{EndId, Op, Phase, peer};
use crate::network::Event;
use crate::world::{Host, Stage, World};

impl World<'_> {
    /// Causes a fault that is not the network's.
    pub(crate) fn mishap(&mut self) -> Verdict {
        let later = self.now + self.random.range(20_000, 400_000);
        self.agenda.at(later, Event::Mishap);
        // Nights are long.
        let rests = self.now < self.asleep_until && !self.random.one_in(100);
        if self.stage != Stage::Storm || rests {
            return Ok(());
        }
        let end = self.random.index(self.ends.len());
        let host = self.ends[end].host;
        let usable = self.hosts[host].engine.is_some() && !self.hosts[host].stalled;
        if !usable {
            return Ok(());
        }
        let ready = self.ends[end].phase == Phase::Ready;
        let is_datagram = self.is_datagram(end);
        let may = self.has.faults;
        let faults = &mut self.tally.faults;
        match self.random.below(24) {
            0 if may.crash => {
                faults.crash += 1;
                self.crash(host)
            }
            1 | 2 if may.stall => {
                faults.stall += 1;
                self.hosts[host].stalled = true;
                let later = self.now + self.random.range(10_000, 3_000_000);
                self.agenda.at(later, Event::Resume(host));
                Ok(())
            }
            3..=5 if may.starve => {
                faults.starve += 1;
                self.ends[end].starved_until = self.now + self.random.range(100_000, 3_000_000);
                Ok(())
            }
            6 | 7 if ready && may.dereg => {
                faults.dereg += 1;
                self.deregister(end);
                Ok(())
            }
            8 if ready => match self.random.one_in(2) {
                true if may.destroy => {
                    self.tally.faults.destroy += 1;
                    self.destroy(end)
                }
                false if may.reset => {
                    self.tally.faults.reset += 1;
                    self.reset(end)
                }
                _ => Ok(()),
            },
            9 if ready && may.fail => {
                faults.fail += 1;
                self.fail(end)
            }
            10..=12
                if may.drain && ready && !self.ends[end].draining && !self.ends[end].stopped =>
            {
                faults.drain += 1;
                self.drain(end)
            }
            13 | 14 if is_datagram && may.drop_handle => {
                faults.drop_handle += 1;
                self.drop_handle(end)
            }
            15 if ready && may.cq_overflow => self.overrun(end),
            16 | 17 => self.spoil_shared(host),
            23 if may.refused => {
                self.hosts[host].refusing_until = self.now + self.random.range(5_000, 300_000);
                Ok(())
            }
            21 | 22 if may.night => {
                faults.night += 1;
                let night = self.random.of(&[1_000_000, 150_000_000, 300_000_000]);
                self.asleep_until = self.now + night;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// A completion queue of the host of `end` overflows: all queue pairs that use it break, and
    /// report it.
    fn overrun(&mut self, end: EndId) -> Verdict {
        let host = self.ends[end].host;
        let cq = queue_of(end, self.random.one_in(2));
        for at in 0..self.hosts[host].ends.len() {
            let other = self.hosts[host].ends[at];
            let uses = [false, true].map(|receives| queue_of(other, receives)).contains(&cq);
            // Also a queue pair that was reset and waits for its peer. One that broke in this way
            // before reports nothing more.
            let this = &self.ends[other];
            let idle = this.phase == Phase::Absent && this.qpn.is_some() && this.reason.is_none();
            if uses && (idle || self.ends[other].phase == Phase::Ready) {
                let this = &mut self.ends[other];
                this.reason.get_or_insert(WcStatus::FatalErr);
                (this.overrun, this.touched) = (true, true);
            }
        }
        self.tally.faults.cq_overflow += 1;
        self.tally.steps += 1;
        let Host { engine: Some(engine), ram, .. } = &mut self.hosts[host] else { return Ok(()) };
        engine.cq_overflow(cq, ram);
        self.settle(host, None)
    }

    /// Destroys a shared receive queue of the host, or deregisters its memory.
    fn spoil_shared(&mut self, host: usize) -> Verdict {
        let count = self.hosts[host].srqs.len();
        if count == 0 {
            return Ok(());
        }
        let at = self.random.index(count);
        match self.random.one_in(4) {
            true if self.has.faults.renew => {
                self.tally.faults.renew += 1;
                self.renew(host, at)
            }
            false if self.has.faults.dereg => {
                self.tally.faults.dereg += 1;
                self.deregister_shared(host, at);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn crash(&mut self, host: usize) -> Verdict {
        self.stop(host)?;
        for end in self.hosts[host].ends.clone() {
            self.end_life(end, "crashed");
            Zone::ALL.into_iter().for_each(|zone| self.excuse(end, zone));
            (self.ends[end].qpn, self.ends[end].conn) = (None, None);
            self.ends[end].keys = [None; 5];
            self.connections[end / 2].rejoining = true;
            self.connections[end / 2].crashed = true;
            let later = self.now + self.random.range(100_000, 5_000_000);
            self.agenda.at(later, Event::Rejoin(end / 2));
        }
        let back = self.now + self.random.range(50_000, 5_000_000);
        self.agenda.at(back, Event::Restart(host));
        Ok(())
    }

    /// Deregisters a region while others use it.
    pub(crate) fn deregister(&mut self, end: EndId) {
        let zone = Zone::ALL[self.random.index(5)];
        let this = &mut self.ends[end];
        let Some(key) = this.keys[zone as usize].take() else { return };
        this.stale = Some(key);
        let (host, index) = (this.host, this.index);
        let ram = &mut self.hosts[host].ram;
        ram.registered[index][zone as usize] = false;
        ram.regions.remove(key);
        self.tally.steps += 1;
        self.excuse(end, zone);
        if zone == Zone::Window {
            self.revoke_panes(end);
        }
    }

    /// Requests in flight may find the memory of `zone` gone.
    pub(crate) fn excuse(&mut self, end: EndId, zone: Zone) {
        let (asker, excuse) = match zone {
            Zone::Receive => {
                return self.ends[end].receives.iter_mut().for_each(|receive| receive.bad = true);
            }
            Zone::Local => (end, WcStatus::LocProtErr),
            _ => (peer(end), WcStatus::RemAccessErr),
        };
        for stream in &mut self.ends[asker].streams {
            for request in stream.pending_mut() {
                let concerned = match request.op {
                    Op::Send { .. } | Op::SendInv { .. } | Op::Datagram { .. } => {
                        zone == Zone::Local
                    }
                    Op::Flush => zone == Zone::Window,
                    Op::Bind | Op::Invalidate => false,
                    Op::Write { .. } | Op::AtomicWrite { .. } => {
                        zone == Zone::Local || zone == Zone::Window
                    }
                    Op::Read { .. } | Op::Atomic { .. } => true,
                };
                if concerned {
                    request.excuses.push(excuse);
                }
            }
        }
    }

    pub(crate) fn drain(&mut self, end: EndId) -> Verdict {
        self.change(end, QpState::Sqd)?;
        self.ends[end].draining = true;
        let later = self.now + self.random.range(10_000, 500_000);
        self.agenda.at(later, Event::Undrain(end, self.ends[end].generation));
        self.settle(self.ends[end].host, None)
    }

    pub(crate) fn undrain(&mut self, end: EndId, generation: u32) -> Verdict {
        let this = &self.ends[end];
        if this.generation != generation || this.phase != Phase::Ready || !this.draining {
            return Ok(());
        }
        if self.hosts[this.host].stalled {
            self.agenda.at(self.now + 50_000, Event::Undrain(end, generation));
            return Ok(());
        }
        self.ends[end].draining = false;
        if self.ends[end].stopped {
            return Ok(());
        }
        self.go_on(end)
    }
}
