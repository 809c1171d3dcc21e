//! A port whose datagrams meet faults, in both directions, by the user's plan.
//!
//! It stands before a port of any backend, so it treats each datagram of a super-packet by itself.
//! A datagram that passes stays where it is: the slot of the port behind, or its receive buffer.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path as FilePath;
use std::time::{Duration, Instant};

use crate::choose::any::AnyPort;
use crate::fault::flight::{Flight, flip};
use crate::fault::link::{Fate, Loss};
use crate::fault::log::FaultLog;
use crate::fault::{CONGESTION, Faults, Plan, PortName, Seen, Side, name_of};
use crate::kernel::descriptors::{Epoll, Interest};
use crate::kernel::timer::TimerFd;
use crate::port::contract::{
    Capabilities, Path, PathId, PathSpec, Port, PortRuns, PortStats, RxDatagram, RxIpId, TxFailure,
    TxSlot,
};
use crate::tuning::faults::{HELD_BYTES, HELD_MAX, READS_MAX, ROOM_AGAIN};

/// Writes the ICRC of a datagram to a path from this UDP source port, with this IPv4
/// identification. The ports know no ICRC.
pub type Seal = fn(&PathSpec, u16, u16, &mut [u8]);

/// Failures that wait for the next flush.
const FAILURES_MAX: usize = 64;

/// A port with faults.
pub struct FaultyPort {
    inner: AnyPort,
    /// Its time 0.
    began: Instant,
    faults: Faults,
    log: Option<FaultLog>,
    seal: Seal,
    /// Path, length and identification of the slot that is not committed.
    reserved: Option<(PathId, usize, u16)>,
    ways: Vec<Option<Way>>,
    /// Datagrams that leave later, each with its path and the bit to flip.
    leaving: Flight<(PathId, Option<usize>)>,
    /// Before this time the port behind is not asked for room again.
    room_at: Duration,
    arriving: Flight<Envelope>,
    /// Datagrams so far, of each side.
    counts: [u64; 2],
    /// Of flushes that nothing reported yet.
    failures: Vec<TxFailure>,
    /// Readable if the port behind is, or if the timer says that something held back is due.
    epoll: Epoll,
    timer: TimerFd,
    timer_at: Option<Duration>,
}

/// A path, with the fields that a delayed datagram of it needs.
#[derive(Debug)]
struct Way {
    spec: PathSpec,
    src_port: u16,
    /// Datagrams that are held back.
    held: u32,
    /// The last of these removes it from the port behind.
    is_removed: bool,
}

/// The fields of a received datagram besides its bytes.
#[derive(Debug, Clone, Copy)]
struct Envelope {
    src: IpAddr,
    dst: IpAddr,
    src_port: u16,
    ip_id: RxIpId,
    tos: Option<u8>,
}

impl FaultyPort {
    /// Puts the faults before `inner`, the `nth` port of its device. Error: no descriptor is left,
    /// or the log cannot be written.
    pub(super) fn new(
        inner: AnyPort,
        (plan, seed): (&Plan, u64),
        nth: usize,
        log: Option<&FilePath>,
        seal: Seal,
    ) -> io::Result<Self> {
        let of = PortName { device: name_of(inner.addresses()), nth };
        let log =
            log.map(|path| FaultLog::open(path, plan, seed, (of.device, Some(nth)))).transpose()?;
        let (epoll, timer) = (Epoll::new()?, TimerFd::new()?);
        epoll.add(inner.wait_fd(), Interest::Read)?;
        epoll.add(&timer, Interest::Read)?;
        Ok(Self {
            inner,
            began: Instant::now(),
            faults: Faults::new(plan, seed, of),
            log,
            seal,
            reserved: None,
            ways: Vec::new(),
            leaving: Flight::default(),
            room_at: Duration::ZERO,
            arriving: Flight::default(),
            counts: [0; 2],
            failures: Vec::new(),
            epoll,
            timer,
            timer_at: None,
        })
    }

    /// The port behind.
    pub(super) fn inner(&mut self) -> &mut AnyPort {
        &mut self.inner
    }

    /// Sends all that leaves later at once: the program ends.
    pub(super) fn let_go(&mut self) {
        self.let_leave(Duration::MAX);
        flush(&mut self.inner, &mut self.failures);
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// When the next datagram that is held back may leave.
    fn leaves_at(&self) -> Option<Duration> {
        self.leaving.next().map(|due| due.max(self.room_at))
    }

    /// Commits datagrams that are due by `until`. If there is no room, they wait a little, and stay
    /// in order.
    fn let_leave(&mut self, until: Duration) {
        if until < self.room_at {
            return;
        }
        while let Some((&(path, bit), bytes)) = self.leaving.peek(until) {
            let len = bytes.len();
            if self.inner.reserve(path, len).is_none() {
                flush(&mut self.inner, &mut self.failures);
            }
            let Some(slot) = self.inner.reserve(path, len) else {
                // At the end of the program there is no later.
                self.room_at = self.now() + ROOM_AGAIN;
                break;
            };
            slot.buf.copy_from_slice(bytes);
            if let Some((_, bytes)) = self.leaving.land(until) {
                self.leaving.take_back(bytes);
            }
            let Some(Some(way)) = self.ways.get_mut(path.0 as usize) else { continue };
            (self.seal)(&way.spec, way.src_port, slot.ip_id, slot.buf);
            if let Some(bit) = bit {
                flip(slot.buf, bit);
            }
            self.inner.commit();
            way.held -= 1;
            if way.is_removed && way.held == 0 {
                self.ways[path.0 as usize] = None;
                self.inner.remove_path(path);
            }
        }
    }

    /// Sets the timer to the next datagram that is held back.
    fn arm(&mut self, now: Duration) {
        let next = self.leaves_at().into_iter().chain(self.arriving.next()).min();
        let runs_until = self.timer_at.filter(|at| *at > now);
        match next {
            // It wakes for nothing once, which is cheaper than to stop it.
            None if runs_until.is_some() || self.timer_at.is_none() => {}
            None => {
                self.timer.set(Duration::ZERO);
                self.timer_at = None;
            }
            Some(next) if runs_until.is_some_and(|at| at <= next) => {}
            Some(next) => {
                self.timer.set(next.saturating_sub(now).max(Duration::from_nanos(1)));
                self.timer_at = Some(next.max(now));
            }
        }
    }

    fn write_log(&mut self) {
        if let Some(log) = &mut self.log {
            log.write();
        }
    }

    /// As `receive`. One instance for all sinks: a port behind may be any.
    fn receive_by(
        &mut self,
        budget: usize,
        sink: &mut dyn FnMut(RxDatagram<'_>),
    ) -> io::Result<usize> {
        let now = self.now();
        if self.leaves_at().is_some_and(|at| at <= now) {
            self.let_leave(now);
            flush(&mut self.inner, &mut self.failures);
        }
        let mut handed = 0;
        while handed < budget
            && let Some((envelope, bytes)) = self.arriving.land(now)
        {
            sink(envelope.around(&bytes));
            self.arriving.take_back(bytes);
            handed += 1;
        }
        let (mut result, mut reads) = (Ok(()), 0);
        while handed < budget {
            if reads == READS_MAX {
                // There is more to read, and fewer than the budget would deny that.
                handed = budget;
                break;
            }
            reads += 1;
            let Self { inner, faults, arriving, log, counts, .. } = self;
            let mut judge = |datagram: RxDatagram<'_>| {
                counts[1] += 1;
                let mut held = Held { flight: arriving, log: log.as_mut(), nth: counts[1] };
                handed += held.judge(now, faults, &datagram, sink);
            };
            match inner.receive(budget, &mut judge as &mut dyn FnMut(RxDatagram<'_>)) {
                Ok(read) if read >= budget => {}
                Ok(_) => break,
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        self.arm(now);
        self.write_log();
        result.map(|()| handed)
    }
}

/// Where received datagrams wait.
struct Held<'a> {
    flight: &'a mut Flight<Envelope>,
    log: Option<&'a mut FaultLog>,
    nth: u64,
}

impl Held<'_> {
    /// Decides on a received datagram. Returns the number of its copies handed up.
    fn judge(
        &mut self,
        now: Duration,
        faults: &mut Faults,
        datagram: &RxDatagram<'_>,
        sink: &mut dyn FnMut(RxDatagram<'_>),
    ) -> usize {
        let payload = datagram.payload;
        let seen = Seen { side: Side::Ingress, peer: datagram.src, payload };
        let mut decision = faults.decide(now, &seen);
        if decision.passes(now) {
            sink(*datagram);
            return 1;
        }
        let mut handed = 0;
        for fate in decision.take_copies() {
            let tos = datagram.tos.unwrap_or(0) | if fate.is_marked { CONGESTION } else { 0 };
            let tos = if fate.is_marked { Some(tos) } else { datagram.tos };
            if fate.due <= now && fate.flip.is_none() {
                sink(RxDatagram { tos, ..*datagram });
                handed += 1;
            } else if has_room(self.flight) {
                let RxDatagram { src, dst, src_port, ip_id, .. } = *datagram;
                self.flight.launch(Envelope { src, dst, src_port, ip_id, tos }, payload, &fate);
            } else {
                decision.lose(Loss::Full);
                continue;
            }
            decision.keep(fate);
        }
        if let Some(log) = &mut self.log {
            log.add(now, self.nth, &seen, &decision);
        }
        // One that was only changed is due.
        while let Some((envelope, bytes)) = self.flight.land(now) {
            sink(envelope.around(&bytes));
            self.flight.take_back(bytes);
            handed += 1;
        }
        handed
    }
}

impl Envelope {
    fn around(self, payload: &[u8]) -> RxDatagram<'_> {
        let Self { src, dst, src_port, ip_id, tos } = self;
        RxDatagram { payload, src, dst, src_port, ip_id, tos }
    }
}

fn has_room<T>(flight: &Flight<T>) -> bool {
    flight.len() < HELD_MAX && flight.bytes() < HELD_BYTES
}

/// Flushes the port behind, and keeps its failures.
fn flush(inner: &mut AnyPort, failures: &mut Vec<TxFailure>) {
    let mut failed = |failure| keep(failures, failure);
    inner.flush(&mut failed as &mut dyn FnMut(TxFailure));
}

/// Keeps a failure for the next flush; beyond some, the last stands for more.
fn keep(failures: &mut Vec<TxFailure>, failure: TxFailure) {
    let has_room = failures.len() < FAILURES_MAX;
    match failures.last_mut().filter(|last| last.path == failure.path || !has_room) {
        Some(last) => last.datagrams += failure.datagrams,
        None => failures.push(failure),
    }
}

impl Port for FaultyPort {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn addresses(&self) -> &[IpAddr] {
        self.inner.addresses()
    }

    fn add_path(&mut self, spec: &PathSpec) -> io::Result<Path> {
        let path = self.inner.add_path(spec)?;
        let at = path.id.0 as usize;
        if self.ways.len() <= at {
            self.ways.resize_with(at + 1, || None);
        }
        let (spec, src_port) = (*spec, path.src_port);
        self.ways[at] = Some(Way { spec, src_port, held: 0, is_removed: false });
        Ok(path)
    }

    fn remove_path(&mut self, path: PathId) {
        self.reserved = None;
        let Some(entry) = self.ways.get_mut(path.0 as usize) else { return };
        let Some(way) = entry else { return };
        if way.held > 0 {
            way.is_removed = true;
            return;
        }
        *entry = None;
        self.inner.remove_path(path);
    }

    fn join(&mut self, group: IpAddr) -> io::Result<()> {
        self.inner.join(group)
    }

    fn leave(&mut self, group: IpAddr) {
        self.inner.leave(group);
    }

    fn receive(
        &mut self,
        budget: usize,
        mut sink: impl FnMut(RxDatagram<'_>),
    ) -> io::Result<usize> {
        self.receive_by(budget, &mut sink)
    }

    fn is_filled(&self, eighths: u32) -> bool {
        self.inner.is_filled(eighths)
    }

    fn runs(&self) -> PortRuns {
        self.inner.runs()
    }

    fn reserve(&mut self, path: PathId, len: usize) -> Option<TxSlot<'_>> {
        self.reserved = None;
        let slot = self.inner.reserve(path, len)?;
        self.reserved = Some((path, len, slot.ip_id));
        Some(slot)
    }

    fn commit(&mut self) {
        let Some((path, len, id)) = self.reserved.take() else { return };
        let now = self.now();
        let Some(Some(way)) = self.ways.get_mut(path.0 as usize) else { return };
        // The same slot again, with its content.
        let Some(TxSlot { buf, ip_id }) = self.inner.reserve(path, len) else { return };
        debug_assert_eq!(ip_id, id, "the slot is the same");
        self.counts[0] += 1;
        let seen = Seen { side: Side::Egress, peer: way.spec.remote, payload: buf };
        let mut decision = self.faults.decide(now, &seen);
        if decision.passes(now) {
            self.inner.commit();
            return;
        }
        let mut at_once = None;
        for fate in decision.take_copies() {
            if fate.due <= now && at_once.is_none() {
                at_once = Some(fate);
            } else if has_room(&self.leaving) {
                // Flipped once it is sealed again.
                let whole = Fate { flip: None, ..fate };
                self.leaving.launch((path, fate.flip), buf, &whole);
                way.held += 1;
            } else {
                decision.lose(Loss::Full);
                continue;
            }
            decision.keep(fate);
        }
        if let Some(log) = &mut self.log {
            log.add(now, self.counts[0], &seen, &decision);
        }
        if let Some(fate) = at_once {
            if let Some(bit) = fate.flip {
                flip(buf, bit);
            }
            self.inner.commit();
        }
    }

    fn flush(&mut self, mut failed: impl FnMut(TxFailure)) {
        self.reserved = None;
        let now = self.now();
        self.let_leave(now);
        flush(&mut self.inner, &mut self.failures);
        self.failures.drain(..).for_each(&mut failed);
        self.arm(now);
        self.write_log();
    }

    fn wants_write(&self) -> bool {
        self.inner.wants_write()
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        // It may take note that it is waited for.
        let _ = self.inner.wait_fd();
        self.epoll.as_fd()
    }

    fn watch(&mut self, on: bool) -> io::Result<()> {
        self.inner.watch(on)
    }

    fn maintain(&mut self) -> Option<Duration> {
        self.inner.maintain()
    }

    fn stats(&self) -> PortStats {
        self.inner.stats()
    }
}

impl Drop for FaultyPort {
    fn drop(&mut self) {
        self.let_go();
    }
}

#[cfg(test)]
mod tests;
