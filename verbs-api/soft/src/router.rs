//! The ways into a shard beside its port, and out of it: other threads of the program, other shards
//! of the device, other processes on its addresses.

use std::sync::Arc;

use rocinante_netdev::RxDatagram;
use rocinante_stack::types::{Qpn, Time};
use rocinante_stack::verbs::{CqId, SrqId};
use rocinante_stack::{Datagram, Engine};

use super::clock::Clock;
use super::host::Host;
use super::io::translate;
use super::mail::Command;
use super::neighbours::Neighbours;
use super::others::{self, Others};
use super::staging::Staging;

/// Says for each datagram and command whether it is the shard's, and passes it on if not.
#[derive(Debug, Default)]
pub(super) struct Router {
    /// Requests posted by threads that do not hold the shard, and the mail of other shards.
    pub(super) staging: Arc<Staging>,
    /// The other shards of the device, if there are some.
    others: Option<Box<Others>>,
    /// Other processes on its addresses, if it shares them.
    neighbours: Option<Box<Neighbours>>,
}

impl Router {
    pub(super) fn new(others: Option<Others>, neighbours: Option<Neighbours>) -> Self {
        Self {
            staging: others.as_ref().map_or_else(Arc::default, Others::own_staging),
            others: others.map(Box::new),
            neighbours: neighbours.map(Box::new),
        }
    }

    /// Hands a datagram over if it belongs to another process or shard. Returns it if not.
    #[inline]
    pub(super) fn route<'a>(&mut self, datagram: &RxDatagram<'a>) -> Option<Datagram<'a>> {
        if let Some(neighbours) = &mut self.neighbours
            && neighbours.hand_over(datagram)
        {
            return None;
        }
        let datagram = translate(datagram);
        if let Some(others) = &mut self.others
            && others.hand_over(&datagram)
        {
            return None;
        }
        Some(datagram)
    }

    /// A burst was routed: rings the shards that got some of it. Returns the number of datagrams
    /// that their owners have found useless since.
    #[inline]
    pub(super) fn routed(&mut self) -> u64 {
        let Some(others) = &mut self.others else { return 0 };
        others.ring();
        self.staging.mail.take_wasted()
    }

    /// Datagrams handed over to other shards and to other processes.
    pub(super) fn handed_over(&self) -> u64 {
        let to_shards = self.others.as_ref().map_or(0, |others| others.handed_over);
        to_shards + self.neighbours.as_ref().map_or(0, |neighbours| neighbours.handed_over)
    }

    /// Datagrams of other shards that this one dropped for lack of room, and those of other
    /// processes that these had no room for.
    pub(super) fn lost_mail(&self) -> u64 {
        let of_neighbours = self.neighbours.as_ref().map_or(0, |neighbours| neighbours.lost);
        self.staging.mail.lost() + of_neighbours
    }

    /// Handles the datagrams of other shards, and queues their commands. Returns whether there was
    /// mail.
    #[inline]
    pub(super) fn read_mail(&mut self, now: Time, engine: &mut Engine, host: &mut Host) -> bool {
        let Some(others) = &mut self.others else { return false };
        others.read_mail(&self.staging, now, engine, host)
    }

    /// Executes the commands of other shards once the port is drained: see [`Others::execute`].
    #[inline]
    pub(super) fn execute(
        &mut self,
        drained: bool,
        clock: Clock,
        engine: &mut Engine,
        host: &mut Host,
    ) {
        if let Some(others) = &mut self.others {
            others.execute(drained, clock, engine, host);
        }
    }

    /// Whether there are commands of other shards, read or not.
    pub(super) fn has_commands(&self) -> bool {
        self.staging.mail.has_some() || self.others.as_ref().is_some_and(|it| it.has_commands())
    }

    /// Whether a command to break the queue pair is waiting.
    pub(super) fn is_to_break(&self, qpn: Qpn) -> bool {
        self.others.as_ref().is_some_and(|it| it.is_to_break(qpn))
    }

    /// Leaves mail for events of the engine that concern other shards.
    pub(super) fn write_mail(&mut self, engine: &mut Engine) {
        if let Some(others) = &mut self.others {
            others.write_mail(engine);
        }
    }

    /// Passes the engine's reports about peers on to the other shards.
    pub(super) fn report_peers(&mut self, engine: &mut Engine) {
        if let Some(others) = &mut self.others {
            others.report_peers(engine);
        }
    }

    /// A completion queue has overflowed: tells the other shards.
    pub(super) fn overflowed(&mut self, cq: CqId) {
        if let Some(others) = &mut self.others {
            others.command_all(Command::Overflow(cq));
            others.ring();
        }
    }

    /// Ends the connection of a queue pair of any shard.
    pub(super) fn end_connection_of(&mut self, qpn: Qpn, engine: &mut Engine, host: &mut Host) {
        if !self.command_owner(qpn, Command::Break(qpn)) {
            others::break_down(engine, host, qpn);
        }
    }

    /// Releases the number of a queue pair of any shard for reuse.
    pub(super) fn release_number(&mut self, qpn: Qpn, engine: &mut Engine) {
        if !self.command_owner(qpn, Command::Release(qpn)) {
            engine.release_qpn(qpn);
        }
    }

    /// Leaves a command for the shard of a queue pair. Returns whether that is another one.
    fn command_owner(&mut self, qpn: Qpn, command: Command) -> bool {
        self.others.as_mut().is_some_and(|others| others.command_owner(qpn, command))
    }

    /// This shard's port has broken. Returns whether it is the first of the device, and whether it
    /// is the last.
    pub(super) fn breaks(&self) -> (bool, bool) {
        self.others.as_ref().map_or((true, true), |others| others.breaks())
    }

    /// The number on the device of a shared receive queue.
    pub(super) fn number_of(&self, srq: SrqId) -> u32 {
        self.others.as_ref().map_or(srq.0, |others| others.number_of(srq.0))
    }

    /// Writes down for the neighbours which connections begin and end, before the peers learn of
    /// it.
    pub(super) fn note_connections(&self, engine: &mut Engine) {
        if let (Some(neighbours), Some(cm)) = (&self.neighbours, engine.cm()) {
            neighbours.note_connections(cm);
        }
    }

    /// Before the engine refuses requests that have no listener here.
    pub(super) fn leave_requests(&self, now: Time, engine: &mut Engine) {
        if let (Some(neighbours), Some(cm)) = (&self.neighbours, engine.cm()) {
            neighbours.leave_requests(now, cm);
        }
    }

    /// Ends the connections of neighbours that have gone. Returns whether there were some.
    pub(super) fn end_for_neighbours(&self, now: Time, engine: &mut Engine) -> bool {
        match (&self.neighbours, engine.cm()) {
            (Some(neighbours), Some(cm)) => neighbours.end_for_the_dead(now, cm),
            _ => false,
        }
    }
}
