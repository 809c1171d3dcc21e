//! The kind of a peer, as far as it announces itself when it connects.

use crate::budget::Budget;
use crate::types::QueueKind;

/// The implementation of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum PeerKind {
    /// It announced nothing: hardware, Soft-RoCE, or another implementation. It gets the protocol
    /// of the specification and no more.
    #[default]
    Standard,
    /// Another Rocinante, with the kind of the receive queue that it announced. It understands
    /// reports of gaps, and sends responses as super-packets where its port can.
    Rocinante(QueueKind),
}

impl PeerKind {
    /// The kind of a peer that announced `budget`, and perhaps the kind of its queue.
    ///
    /// Earlier versions announce no kind. This function alone derives it for them, by their own
    /// rule: they announce [`Budget::STANDARD`] for a device of the kernel's, a slot for
    /// super-packets has more than 65,535 bytes, and a socket counts no datagram below the cost of
    /// the smallest. A queue that is no larger than the standard one counted frames by that rule.
    #[must_use]
    pub const fn announced(budget: Budget, queue: Option<QueueKind>) -> Self {
        if let Some(queue) = queue {
            return Self::Rocinante(queue);
        }
        let Budget { bytes, datagrams } = Budget::STANDARD;
        if budget.bytes == bytes && budget.datagrams == datagrams {
            return Self::Standard;
        }
        let each = budget.bytes / if budget.datagrams == 0 { 1 } else { budget.datagrams };
        Self::Rocinante(if budget.bytes <= bytes {
            QueueKind::Frames
        } else if each > u16::MAX as u32 {
            QueueKind::Places
        } else if each < 2 * Budget::cost(0) {
            QueueKind::Memory
        } else {
            QueueKind::Frames
        })
    }

    /// Whether it is another Rocinante.
    #[must_use]
    pub const fn is_rocinante(self) -> bool {
        matches!(self, Self::Rocinante(_))
    }

    /// The kind of its receive queue. A standard peer is taken to receive frame by frame.
    #[must_use]
    pub const fn queue(self) -> QueueKind {
        match self {
            Self::Standard => QueueKind::Frames,
            Self::Rocinante(queue) => queue,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_of_an_earlier_version_follows_from_its_numbers() {
        for (bytes, datagrams, kind) in [
            (Budget::STANDARD.bytes, Budget::STANDARD.datagrams, PeerKind::Standard),
            (Budget::STANDARD.bytes, 17, PeerKind::Rocinante(QueueKind::Frames)),
            // The queues of its three ports, as they are and as its connection manager rounds them.
            (279_552, 336, PeerKind::Rocinante(QueueKind::Memory)),
            (262_144, 320, PeerKind::Rocinante(QueueKind::Memory)),
            (150 * 133_118, 150, PeerKind::Rocinante(QueueKind::Places)),
            (18_874_368, 144, PeerKind::Rocinante(QueueKind::Places)),
            (1792 * 8448, 1792, PeerKind::Rocinante(QueueKind::Frames)),
            (14_680_064, 1792, PeerKind::Rocinante(QueueKind::Frames)),
            (8 * 1024, 8, PeerKind::Rocinante(QueueKind::Frames)),
            (0, 0, PeerKind::Rocinante(QueueKind::Frames)),
            (u32::MAX, 0, PeerKind::Rocinante(QueueKind::Places)),
        ] {
            assert_eq!(PeerKind::announced(Budget { bytes, datagrams }, None), kind);
        }
    }

    #[test]
    fn a_kind_that_was_announced_is_believed() {
        for queue in QueueKind::ALL {
            let kind = PeerKind::announced(Budget::STANDARD, Some(queue));
            assert_eq!((kind, kind.queue()), (PeerKind::Rocinante(queue), queue));
        }
        assert!(!PeerKind::Standard.is_rocinante());
    }
}
