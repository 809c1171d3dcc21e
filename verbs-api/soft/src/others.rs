//! The other shards of a device, seen from one: mail to them, and mail from them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use rocinante_stack::types::{Qpn, Time};
use rocinante_stack::verbs::QpState;
use rocinante_stack::{Datagram, Engine, HandOff, QpAttr};

use super::clock::Clock;
use super::host::Host;
use super::mail::{Command, Letters};
use super::progress::Core;
use super::shard::accepted;
use super::staging::Staging;
use crate::tuning::shard::OVERDUE_MAX;

/// The most shards: the bits of a word.
pub const SHARDS_MAX: usize = 64;
/// The shard of a queue pair, of those whose slots begin with `first`; otherwise a number that no
/// shard has.
pub(super) const fn shard_of(qpn: Qpn, first: u8) -> usize {
    qpn.slot().wrapping_sub(first) as usize
}

/// The destination of a datagram, if it is so long.
#[inline]
pub(super) fn dest_qpn(bytes: &[u8]) -> Option<Qpn> {
    let &[upper, middle, lower] = bytes.get(5..8)?.first_chunk()?;
    Some(Qpn::new(u32::from_be_bytes([0, upper, middle, lower])))
}

/// State that all shards of a device share.
#[derive(Debug, Default)]
pub(super) struct Common {
    /// Set once all shards are made.
    pub(super) cores: OnceLock<Box<[Weak<Core>]>>,
    /// Number of shards whose ports have broken.
    broken: AtomicUsize,
}

/// The shards of a device, for one of them.
#[derive(Debug)]
pub(super) struct Others {
    own: usize,
    /// The slot of the first shard.
    first: u8,
    /// Those of all shards, by shard.
    boxes: Arc<[Arc<Staging>]>,
    common: Arc<Common>,
    /// Shards that have new mail and have not been rung yet.
    unrung: u64,
    /// The mail taken from the own box.
    letters: Letters,
    /// Orders of other shards, each with the last round in which it must be done; until then it
    /// waits for the port to be drained.
    commands: VecDeque<(u64, Command)>,
    /// Number of rounds with waiting commands.
    round: u64,
    /// Datagrams handed over to other shards.
    pub(super) handed_over: u64,
}

impl Others {
    pub(super) fn new(
        own: usize,
        first: u8,
        boxes: &Arc<[Arc<Staging>]>,
        common: &Arc<Common>,
    ) -> Self {
        Self {
            own,
            first,
            boxes: boxes.clone(),
            common: common.clone(),
            unrung: 0,
            letters: Letters::new(),
            commands: VecDeque::with_capacity(64),
            round: 0,
            handed_over: 0,
        }
    }

    pub(super) fn own_staging(&self) -> Arc<Staging> {
        self.boxes[self.own].clone()
    }

    /// Hands a datagram over if it belongs to another shard. One without an owner stays here.
    #[inline]
    pub(super) fn hand_over(&mut self, datagram: &Datagram<'_>) -> bool {
        let Some(dest) = dest_qpn(datagram.bytes) else { return false };
        let owner = if dest == Qpn::GSI { 0 } else { self.shard_of(dest) };
        if owner == self.own {
            return false;
        }
        let Some(other) = self.boxes.get(owner) else { return false };
        #[allow(clippy::cast_possible_truncation, reason = "64 shards at most")]
        if !other.mail.hand_over(self.own as u8, datagram) {
            self.boxes[self.own].mail.waste();
        }
        self.unrung |= 1 << owner;
        self.handed_over += 1;
        true
    }

    /// The number on the device of this shard's object `number`.
    pub(super) fn number_of(&self, number: u32) -> u32 {
        #[allow(clippy::cast_possible_truncation, reason = "64 shards at most")]
        let (count, own) = (self.boxes.len() as u32, self.own as u32);
        number * count + own
    }

    /// This shard's port has broken. Returns whether it is the first of the device, and whether it
    /// is the last.
    pub(super) fn breaks(&self) -> (bool, bool) {
        let others = self.common.broken.fetch_add(1, Ordering::AcqRel);
        (others == 0, others + 1 == self.boxes.len())
    }

    fn shard_of(&self, qpn: Qpn) -> usize {
        shard_of(qpn, self.first)
    }

    /// Leaves a command for the shard of a queue pair. Returns whether that is another one.
    pub(super) fn command_owner(&mut self, qpn: Qpn, command: Command) -> bool {
        let owner = self.shard_of(qpn);
        let is_other = owner != self.own;
        if is_other {
            self.command(owner, command);
        }
        is_other
    }

    /// Leaves a command for a shard.
    fn command(&mut self, shard: usize, command: Command) {
        if let Some(other) = self.boxes.get(shard) {
            other.mail.command(command);
            self.unrung |= 1 << shard;
        }
    }

    /// Leaves a command for every other shard.
    pub(super) fn command_all(&mut self, command: Command) {
        for shard in (0..self.boxes.len()).filter(|shard| *shard != self.own) {
            self.boxes[shard].mail.command(command);
            self.unrung |= 1 << shard;
        }
    }

    /// The next command that is due.
    fn next_command(&mut self, drained: bool) -> Option<Command> {
        let (latest, _) = self.commands.front()?;
        let due = drained || self.round >= *latest;
        due.then(|| self.commands.pop_front())?.map(|(_, command)| command)
    }

    /// Whether a command to break the queue pair is waiting.
    pub(super) fn is_to_break(&self, qpn: Qpn) -> bool {
        self.commands.iter().any(|(_, command)| *command == Command::Break(qpn))
    }

    /// Rings the shards that have new mail.
    #[inline]
    pub(super) fn ring(&mut self) {
        if self.unrung != 0 {
            self.ring_all();
        }
    }

    #[cold]
    fn ring_all(&mut self) {
        let cores = self.common.cores.get();
        while self.unrung != 0 {
            let shard = self.unrung.trailing_zeros() as usize;
            self.unrung &= self.unrung - 1;
            // A device in setup or shutdown has no thread to wake.
            if let Some(core) = cores.and_then(|cores| cores[shard].upgrade()) {
                core.kick();
            }
        }
    }

    /// Handles the datagrams of other shards, and queues their commands. Returns whether there was
    /// mail in the own box.
    #[inline]
    pub(super) fn read_mail(
        &mut self,
        own: &Staging,
        now: Time,
        engine: &mut Engine,
        host: &mut Host,
    ) -> bool {
        if !own.mail.take(&mut self.letters) {
            return false;
        }
        for (from, datagram) in self.letters.datagrams() {
            own.take(engine, host);
            let before = accepted(engine);
            host.judge(now, &datagram, engine);
            // Tells the receiving shard, which can then leave its port alone for a moment and wake
            // no thread meanwhile.
            if accepted(engine) == before {
                self.boxes[from].mail.waste();
            }
        }
        let latest = self.round + u64::from(OVERDUE_MAX);
        self.commands.extend(self.letters.commands().map(|command| (latest, command)));
        true
    }

    /// Whether commands wait.
    pub(super) fn has_commands(&self) -> bool {
        !self.commands.is_empty()
    }

    /// Executes the commands of other shards once the port is drained: messages that arrived before
    /// a command still count, as a connection ends after its last messages. If a peer keeps the
    /// port full, commands wait no longer than deadlines do.
    #[inline]
    pub(super) fn execute(
        &mut self,
        drained: bool,
        clock: Clock,
        engine: &mut Engine,
        host: &mut Host,
    ) {
        if self.commands.is_empty() {
            return;
        }
        self.round += 1;
        while let Some(command) = self.next_command(drained) {
            match command {
                // The queue pair may be gone, or already in the error state.
                Command::Break(qpn) => break_down(engine, host, qpn),
                Command::Release(qpn) => engine.release_qpn(qpn),
                Command::Arrived(conn) => {
                    if let Some(cm) = engine.cm() {
                        cm.message_arrived(conn);
                    }
                }
                Command::Look(conn, qpn) => {
                    self.command(0, Command::Looked(conn, engine.packets_of(qpn)));
                }
                Command::Looked(conn, packets) => {
                    if let Some(cm) = engine.cm() {
                        cm.looked(clock.now(), conn, packets);
                    }
                }
                Command::HandOff(report) => engine.take_hand_off(clock.now(), &report),
                // The queue may be gone, and its number reused.
                Command::Overflow(cq) => {
                    if host.cqs.get(cq.0).is_some_and(|cq| cq.has_ended()) {
                        engine.cq_overflow(cq, host);
                    }
                }
            }
        }
    }

    /// Leaves mail for events of the engine that concern other shards.
    pub(super) fn write_mail(&mut self, engine: &mut Engine) {
        while let Some(conn) = engine.poll_arrived() {
            self.command(0, Command::Arrived(conn));
        }
        while let Some((conn, qpn)) = engine.poll_look() {
            self.command(self.shard_of(qpn), Command::Look(conn, qpn));
        }
        self.ring();
    }

    /// Leaves mail for the engine's reports about peers.
    pub(super) fn report_peers(&mut self, engine: &mut Engine) {
        while let Some(report) = engine.poll_hand_off() {
            match report {
                HandOff::FirstPacket { .. } => self.command(0, Command::HandOff(report)),
                HandOff::Learn(..) => self.command_all(Command::HandOff(report)),
            }
        }
        self.ring();
    }
}

/// Takes the queue pair to the error state, which every other state allows.
pub(super) fn break_down(engine: &mut Engine, host: &mut Host, qpn: Qpn) {
    let error = QpAttr { state: Some(QpState::Err), ..QpAttr::default() };
    // The queue pair may be gone, or already in the error state.
    let _ = engine.modify_qp(qpn, &error, host);
}
