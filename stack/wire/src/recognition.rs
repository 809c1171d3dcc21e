//! The datagrams by which two Rocinantes recognise each other: a probe, and the reply, which
//! describes the receive queue of the replying side.
//!
//! They are of the [class of a vendor](super::vendor), so a standard peer drops them without an
//! answer.
//!
//! ```text
//!  0..40   as all of the class
//! 40       version 1
//! 41       kind of the queue, QueueKind::code          in a reply
//! 42       QPN slots that have such a queue
//! 43       reserved
//! 44..48   bytes that a queue holds
//! 48..52   datagrams that it holds
//! 52..56   nanoseconds that a datagram takes
//! 56..60   nanoseconds that 1,024 bytes of payload take besides
//! ```

use super::mad::{MadBytes, u32_at};
use super::vendor::Frame;
use crate::types::QueueKind;

const VERSION: u8 = 1;
const PROBE: u16 = 0x0010;
const REPLY: u16 = 0x0011;

/// The receive queues of a Rocinante, as it replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PeerInfo {
    /// Bytes that a queue holds, as `Budget` counts them.
    pub bytes: u32,
    /// Datagrams that it holds.
    pub datagrams: u32,
    /// The kind of the queue.
    pub queue: QueueKind,
    /// Queue pairs whose numbers have an upper byte below this are behind such queues, one for each
    /// upper byte. It does not describe others.
    pub slots: u8,
    /// Nanoseconds that it takes for a datagram.
    pub packet_ns: u32,
    /// Nanoseconds that it takes for 1,024 bytes of payload besides.
    pub kib_ns: u32,
}

/// A datagram of recognition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RecognitionMad {
    /// Asks the peer whether it is a Rocinante.
    Probe,
    /// A Rocinante's receive queues; `None` if the reply is of a version that is not known here, or
    /// has values without a meaning.
    Reply(Option<PeerInfo>),
    /// Neither, of a version that is not known here.
    Unknown,
}

impl RecognitionMad {
    /// Reads a datagram, and its transaction id; `None` if it is none of recognition.
    #[must_use]
    pub fn parse(payload: &[u8]) -> Option<(u64, Self)> {
        let Frame { tid, attribute, mad } = Frame::read(payload)?;
        let mad = match attribute {
            PROBE => Self::Probe,
            REPLY => Self::Reply(PeerInfo::read(mad)),
            _ => Self::Unknown,
        };
        Some((tid, mad))
    }

    /// Its bytes with a transaction id. A reply that describes nothing has a version that no
    /// reader knows.
    #[must_use]
    pub fn emit(&self, tid: u64) -> MadBytes {
        let attribute = match self {
            Self::Probe => PROBE,
            Self::Reply(_) => REPLY,
            Self::Unknown => 0,
        };
        let mut mad = Frame::write(attribute, tid);
        match self {
            Self::Probe => mad[40] = VERSION,
            Self::Reply(Some(info)) => info.write(&mut mad),
            Self::Reply(None) | Self::Unknown => {}
        }
        mad
    }
}

impl PeerInfo {
    fn read(mad: &MadBytes) -> Option<Self> {
        let queue = QueueKind::from_code(mad[41])?;
        let slots = mad[42];
        let known = mad[40] == VERSION && slots > 0;
        known.then(|| Self {
            bytes: u32_at(mad, 44),
            datagrams: u32_at(mad, 48),
            queue,
            slots,
            packet_ns: u32_at(mad, 52),
            kib_ns: u32_at(mad, 56),
        })
    }

    fn write(&self, mad: &mut MadBytes) {
        mad[40..44].copy_from_slice(&[VERSION, self.queue.code(), self.slots, 0]);
        let numbers = [self.bytes, self.datagrams, self.packet_ns, self.kib_ns];
        for (at, number) in (44..).step_by(4).zip(numbers) {
            mad[at..at + 4].copy_from_slice(&number.to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AliveMad, MadHeader};

    const INFO: PeerInfo = PeerInfo {
        bytes: 0x0102_0304,
        datagrams: 0x0506_0708,
        queue: QueueKind::Places,
        slots: 9,
        packet_ns: 0x0a0b_0c0d,
        kib_ns: 0x0e0f_1011,
    };

    #[test]
    fn what_is_said_is_understood() {
        for mad in [RecognitionMad::Probe, RecognitionMad::Reply(Some(INFO))] {
            let bytes = mad.emit(0x1122_3344_5566_7788);
            assert_eq!(RecognitionMad::parse(&bytes), Some((0x1122_3344_5566_7788, mad)));
        }
        let bytes = RecognitionMad::Reply(Some(INFO)).emit(1);
        assert_eq!(&bytes[36..44], [0, 0x52, 0x6f, 0x63, 1, 2, 9, 0]);
        assert_eq!(&bytes[44..60], (1..=0x10).map(|n| n + u8::from(n > 8)).collect::<Vec<u8>>());
    }

    #[test]
    fn other_versions_and_values_without_a_meaning_say_nothing() {
        let reply = RecognitionMad::Reply(Some(INFO)).emit(7);
        for (at, value) in [(40, 0), (40, 2), (40, 255), (41, 0), (41, 4), (42, 0)] {
            let mut bytes = reply;
            bytes[at] = value;
            let unknown = Some((7, RecognitionMad::Reply(None)));
            assert_eq!(RecognitionMad::parse(&bytes), unknown, "{at} {value}");
        }
        // A probe of a later version is a probe still.
        let mut probe = RecognitionMad::Probe.emit(7);
        probe[40] = 2;
        assert_eq!(RecognitionMad::parse(&probe), Some((7, RecognitionMad::Probe)));
        probe[17] = 0x12;
        assert_eq!(RecognitionMad::parse(&probe), Some((7, RecognitionMad::Unknown)));
    }

    #[test]
    fn other_classes_are_not_of_recognition() {
        let probe = RecognitionMad::Probe.emit(7);
        // The base version, the class, its version, the method, and the organisation.
        for at in [0, 1, 2, 3, 37, 38, 39] {
            let mut bytes = probe;
            bytes[at] ^= 0x80;
            assert_eq!(RecognitionMad::parse(&bytes), None, "{at}");
        }
        assert_eq!(RecognitionMad::parse(&probe[..255]), None);
        assert_eq!(RecognitionMad::parse(&[probe, probe].concat()), None);
        assert_eq!(RecognitionMad::parse(&MadHeader::cm(0x10, 7).bytes()), None);
        assert_eq!(AliveMad::parse(&probe), None);
    }
}
