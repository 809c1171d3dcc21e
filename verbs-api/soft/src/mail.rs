//! Mail between shards: datagrams that arrived at another shard's port, and commands for queue
//! pairs of another shard.
//!
//! A shard never takes another's lock. It leaves mail, which the thread that drives the other shard
//! takes, and kicks it ([`Core::kick`](super::progress::Core::kick)).

use std::net::IpAddr;

use rocinante_stack::cm::ConnId;
use rocinante_stack::types::Qpn;
use rocinante_stack::verbs::CqId;
use rocinante_stack::{Datagram, HandOff, IpId};

use crate::provider::sync::{AtomicBool, AtomicU64, Mutex, Ordering};
use crate::tuning::room::{MAIL_BYTES, MAIL_DATAGRAMS};

/// The mail of one shard.
#[derive(Debug, Default)]
pub(crate) struct Mail {
    /// There is mail.
    some: AtomicBool,
    letters: Mutex<Letters>,
    /// Datagrams dropped for lack of room.
    lost: AtomicU64,
    /// Datagrams that this shard handed over and their owners refused or dropped, since the last
    /// `take_wasted`.
    wasted: AtomicU64,
}

/// The mail, in order.
#[derive(Debug, Default)]
pub(crate) struct Letters {
    bytes: Vec<u8>,
    heads: Vec<Head>,
    commands: Vec<Command>,
}

/// A datagram without its bytes.
#[derive(Debug, Clone, Copy)]
struct Head {
    from: u8,
    len: usize,
    src: IpAddr,
    dst: IpAddr,
    src_port: u16,
    ip_id: IpId,
    tos: u8,
    hop_limit: Option<u8>,
}

/// A task for a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Command {
    /// The connection of this queue pair has ended: take it to the error state.
    Break(Qpn),
    /// The number may be reused.
    Release(Qpn),
    /// The first message of a connection has arrived, so the peer is ready. For the shard of the
    /// connection manager.
    Arrived(ConnId),
    /// Asks for the number of packets that this queue pair of an idle connection has received. From
    /// the shard of the connection manager.
    Look(ConnId, Qpn),
    /// The answer; `None` if the queue pair is gone.
    Looked(ConnId, Option<u64>),
    /// Completions were lost.
    Overflow(CqId),
    /// A report of the engine.
    HandOff(HandOff),
}

impl Letters {
    /// The kernel backs the memory only when it is used, and datagrams never need more. Each
    /// connection that ends leaves few commands. If more wait than there is room for, the list
    /// grows.
    pub(super) fn new() -> Self {
        Self {
            bytes: Vec::with_capacity(MAIL_BYTES),
            heads: Vec::with_capacity(MAIL_DATAGRAMS),
            commands: Vec::with_capacity(64),
        }
    }

    fn push(&mut self, from: u8, datagram: &Datagram<'_>) -> bool {
        let len = datagram.bytes.len();
        let fits = self.bytes.capacity() - self.bytes.len() >= len;
        if !fits || self.heads.len() == self.heads.capacity() {
            return false;
        }
        let Datagram { bytes, src, dst, src_port, ip_id, tos, hop_limit } = *datagram;
        self.bytes.extend_from_slice(bytes);
        self.heads.push(Head { from, len, src, dst, src_port, ip_id, tos, hop_limit });
        true
    }

    /// The datagrams, each with the shard of the port that received it.
    pub(super) fn datagrams(&self) -> impl Iterator<Item = (usize, Datagram<'_>)> {
        let mut rest = &self.bytes[..];
        self.heads.iter().map(move |head| {
            let Head { from, len, src, dst, src_port, ip_id, tos, hop_limit } = *head;
            let (bytes, behind) = rest.split_at(len);
            rest = behind;
            (from.into(), Datagram { bytes, src, dst, src_port, ip_id, tos, hop_limit })
        })
    }

    pub(super) fn commands(&self) -> impl Iterator<Item = Command> {
        self.commands.iter().copied()
    }

    fn clear(&mut self) {
        self.bytes.clear();
        self.heads.clear();
        self.commands.clear();
    }
}

impl Mail {
    /// For one of several shards.
    pub(super) fn new() -> Self {
        Self { letters: Mutex::new(Letters::new()), ..Self::default() }
    }

    /// Leaves a datagram that arrived at the port of shard `from`, or counts it as lost if there is
    /// no room. Returns whether there was room. The caller kicks the shard afterwards.
    pub(super) fn hand_over(&self, from: u8, datagram: &Datagram<'_>) -> bool {
        let fits = self.letters.lock().push(from, datagram);
        if !fits {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        self.some.store(true, Ordering::Relaxed);
        fits
    }

    /// Leaves a command. The caller kicks the shard afterwards.
    pub(super) fn command(&self, command: Command) {
        self.letters.lock().commands.push(command);
        self.some.store(true, Ordering::Relaxed);
    }

    /// Whether there is mail.
    pub(super) fn has_some(&self) -> bool {
        self.some.load(Ordering::Relaxed)
    }

    /// Swaps the mail for the cleared `read`. Returns whether there was any; costs one load if not.
    #[inline]
    pub(super) fn take(&self, read: &mut Letters) -> bool {
        if !self.some.load(Ordering::Relaxed) {
            return false;
        }
        read.clear();
        let mut letters = self.letters.lock();
        self.some.store(false, Ordering::Relaxed);
        std::mem::swap(&mut *letters, read);
        true
    }

    /// Datagrams dropped for lack of room.
    pub(super) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Counts a datagram that this shard handed over and its owner refused or dropped.
    #[cold]
    pub(super) fn waste(&self) {
        self.wasted.fetch_add(1, Ordering::Relaxed);
    }

    /// The count since the last call. Costs one load if it is 0.
    #[inline]
    pub(super) fn take_wasted(&self) -> u64 {
        if self.wasted.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        self.wasted.swap(0, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn datagram(bytes: &[u8]) -> Datagram<'_> {
        Datagram {
            bytes,
            src: [10, 0, 0, 1].into(),
            dst: [10, 0, 0, 2].into(),
            src_port: 0xc123,
            ip_id: IpId::Hint(3),
            tos: 7,
            hop_limit: Some(9),
        }
    }

    #[test]
    fn what_is_left_is_found_once_and_in_order() {
        let (mail, mut read) = (Mail::new(), Letters::new());
        assert!(!mail.take(&mut read) && !mail.has_some());
        for round in 0..3u8 {
            assert!(mail.hand_over(round, &datagram(&[round; 100])));
            mail.command(Command::Break(Qpn::new(5)));
            assert!(mail.hand_over(8, &datagram(&[])));
            assert!(mail.hand_over(9, &datagram(&[round + 1; 7])));
            assert!(mail.has_some() && mail.take(&mut read));
            let (from, found): (Vec<_>, Vec<_>) = read.datagrams().unzip();
            assert_eq!(from, [round.into(), 8, 9]);
            assert_eq!(found.iter().map(|d| d.bytes.len()).collect::<Vec<_>>(), [100, 0, 7]);
            assert!(found[0].bytes.iter().all(|byte| *byte == round));
            assert!(found[2].bytes.iter().all(|byte| *byte == round + 1));
            let left = datagram(found[2].bytes);
            assert_eq!(format!("{:?}", found[2]), format!("{left:?}"));
            assert_eq!(read.commands().collect::<Vec<_>>(), [Command::Break(Qpn::new(5))]);
            assert!(!mail.take(&mut read));
        }
    }

    #[test]
    fn a_full_box_counts_what_it_does_not_take_and_never_grows() {
        for len in [0, 4096, 1 << 20] {
            let (mail, mut read) = (Mail::new(), Letters::new());
            let bytes = vec![1; len];
            let fit = MAIL_DATAGRAMS.min(MAIL_BYTES.checked_div(len).unwrap_or(usize::MAX));
            for nth in 0..fit + 3 {
                assert_eq!(mail.hand_over(1, &datagram(&bytes)), nth < fit, "{len}");
            }
            assert_eq!(mail.lost(), 3, "{len}");
            assert!(mail.take(&mut read));
            assert_eq!(read.datagrams().count(), fit);
            assert_eq!(
                (read.bytes.capacity(), read.heads.capacity()),
                (MAIL_BYTES, MAIL_DATAGRAMS)
            );
            assert!(mail.hand_over(1, &datagram(&bytes)));
            assert_eq!(mail.lost(), 3, "{len}");
        }
    }
}
