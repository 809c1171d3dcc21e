//! What the queue pairs of an engine share, and what it may hold.

use std::collections::VecDeque;

use crate::ah::Handles;
use crate::pool::{Budget, CALM, Pools};
use crate::rc::held::Store;
use crate::rc::lists::SpareLists;
use crate::srq::Srqs;
use crate::stats::{Counters, Drops};
use crate::timer::Timers;
use crate::types::{Mtu, Qpn};
use crate::verbs::QpEvent;

/// What an engine may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineConfig {
    /// Queue pairs, at most 65,000.
    pub max_qp: u32,
    /// The upper 8 bits of every QPN.
    pub qpn_slot: u8,
    /// What our own receive queue holds for READ responses and atomic results that we ask for.
    pub own_budget: Budget,
    /// The path MTU of datagrams.
    pub port_mtu: Mtu,
    /// The most packets a queue pair has unacknowledged.
    pub window_max: u32,
    /// Whether acknowledgements tell the peer how many receives are posted, as hardware does; else they set no limit, as those of
    /// rxe and of shared receive queues.
    pub advertise_credits: bool,
    /// Packets that came too early and are held until what is missing before them comes (selective repeat), of all queue pairs whose peers
    /// announced a budget: 4132 bytes each, allocated when it is needed. With 0 they are dropped, as the specification has it, and everything
    /// behind a loss is sent again.
    pub held_packets_max: u32,
    /// Whether a WRITE of several packets, without immediate, may leave as that many messages of one packet, if others to that peer are not acknowledged yet and that fills
    /// more of the super-packets of a port that sends runs of equal packets as one. So it should be where the port does.
    pub cut_writes: bool,
    /// So many packets without a loss, and a peer whose queue may have overflowed is taken again to hold more of what leaves as super-packets
    /// ([`Engine::departed`](crate::Engine::departed)).
    pub calm_packets: u32,
    /// Packets that a queue pair sends before others have their turn, 65,535 at most.
    pub quantum: u32,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            max_qp: 16_384,
            qpn_slot: 0,
            own_budget: Budget::STRANGER,
            port_mtu: Mtu::Mtu4096,
            window_max: 512,
            advertise_credits: false,
            held_packets_max: 2048,
            cut_writes: false,
            calm_packets: CALM,
            quantum: 64,
        }
    }
}

/// What the queue pairs of an engine share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: EngineConfig,
    pub(crate) pools: Pools,
    pub(crate) handles: Handles,
    pub(crate) srqs: Srqs,
    /// Memory for what came too early.
    pub(crate) store: Store,
    /// Lists for what is under way.
    pub(crate) lists: SpareLists,
    pub(crate) timers: Timers,
    pub(crate) counters: Counters,
    pub(crate) drops: Drops,
    /// Queue pairs with something to send, oldest first.
    pub(crate) dirty: VecDeque<u32>,
    /// One of them has more to send than an acknowledgement.
    pub(crate) urgent: bool,
    pub(crate) events: VecDeque<(Qpn, QpEvent)>,
}

impl Shared {
    /// Packets of a turn.
    #[inline]
    pub(crate) fn quantum(&self) -> u16 {
        u16::try_from(self.config.quantum).unwrap_or(u16::MAX)
    }

    #[inline]
    pub(crate) fn enqueue(&mut self, slot: u32, queued: &mut bool) {
        self.urgent = true;
        self.enqueue_lazily(slot, queued);
    }

    /// As [`enqueue`](Self::enqueue), for a plain acknowledgement: it may wait for company.
    #[inline]
    pub(crate) fn enqueue_lazily(&mut self, slot: u32, queued: &mut bool) {
        if !*queued {
            *queued = true;
            self.dirty.push_back(slot);
        }
    }

    pub(crate) fn event(&mut self, qpn: Qpn, event: QpEvent) {
        self.events.push_back((qpn, event));
    }
}
