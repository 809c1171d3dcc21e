//! The datagrams by which a Rocinante asks another whether it still has a connection that has been
//! idle for long: a question, its answer, and the notice that a packet came for a queue pair that
//! does not exist.
//!
//! They are of the [class of a vendor](super::vendor), so a standard peer drops them without an
//! answer; it is never asked.
//!
//! ```text
//!  0..40   as all of the class
//! 40       version 1
//! 41       number of connections, 1 to 26          in a question and in an answer
//! 42..44   reserved
//! 44..48   a bit for each connection, from the lowest on: it exists           in an answer
//!          the queue pair that does not exist                                  in a notice
//! 48..     for each connection the communication id of the side that asks, then that of the
//!          side that answers, four bytes each
//! ```
//!
//! An answer repeats the transaction id and the connections of its question, so the side that
//! answers keeps nothing.

use super::cm::CommId;
use super::mad::{MAD_LEN, MadBytes, u32_at};
use super::vendor::Frame;
use crate::types::Qpn;

const VERSION: u8 = 1;
const QUESTION: u16 = 0x0020;
const ANSWER: u16 = 0x0021;
const NOTICE: u16 = 0x0022;
/// The offset of the connections, and the length of each.
const PAIRS: usize = 48;
const PAIR: usize = 8;

/// The connections of a question, each by its two communication ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pairs {
    len: u8,
    ids: [(CommId, CommId); Self::MAX],
}

impl Pairs {
    /// The most in a datagram.
    pub const MAX: usize = (MAD_LEN - PAIRS) / PAIR;

    /// The first of these, each with the id of the side that asks, and that of the side that
    /// answers. Those beyond [`MAX`](Self::MAX) are left out.
    pub fn new(pairs: impl IntoIterator<Item = (CommId, CommId)>) -> Self {
        let mut all = Self { len: 0, ids: [(CommId(0), CommId(0)); Self::MAX] };
        for (place, pair) in all.ids.iter_mut().zip(pairs) {
            *place = pair;
            all.len += 1;
        }
        all
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (CommId, CommId)> {
        self.ids[..usize::from(self.len)].iter().copied()
    }
}

/// A datagram about connections that may have gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AliveMad {
    /// Do you have these connections?
    Question(Pairs),
    /// A bit for each connection of the question, from the lowest on: I have it.
    Answer(Pairs, u32),
    /// A packet came from you for a queue pair that I do not have.
    Notice(Qpn),
    /// None of these, of a version that is not known here.
    Unknown,
}

impl AliveMad {
    /// Reads a datagram, and its transaction id; `None` if it is none of these.
    #[must_use]
    pub fn parse(payload: &[u8]) -> Option<(u64, Self)> {
        let Frame { tid, attribute, mad } = Frame::read(payload)?;
        let pairs = || {
            let len = usize::from(mad[41]);
            let id = |at| CommId(u32_at(mad, at));
            let places = (PAIRS..).step_by(PAIR).take(len);
            (1..=Pairs::MAX)
                .contains(&len)
                .then(|| Pairs::new(places.map(|at| (id(at), id(at + 4)))))
        };
        let known = || match attribute {
            QUESTION => Some(Self::Question(pairs()?)),
            ANSWER => Some(Self::Answer(pairs()?, u32_at(mad, 44))),
            _ => Some(Self::Notice(Qpn::new(u32_at(mad, 44)))),
        };
        (QUESTION..=NOTICE).contains(&attribute).then(|| {
            let known = Some(mad[40]).filter(|version| *version == VERSION).and_then(|_| known());
            (tid, known.unwrap_or(Self::Unknown))
        })
    }

    /// Its bytes with a transaction id.
    #[must_use]
    pub fn emit(&self, tid: u64) -> MadBytes {
        let (attribute, version, word, pairs) = match self {
            Self::Question(pairs) => (QUESTION, VERSION, 0, Some(pairs)),
            Self::Answer(pairs, known) => (ANSWER, VERSION, *known, Some(pairs)),
            Self::Notice(qpn) => (NOTICE, VERSION, qpn.value(), None),
            Self::Unknown => (NOTICE, 0, 0, None),
        };
        let mut mad = Frame::write(attribute, tid);
        mad[40] = version;
        mad[41] = pairs.map_or(0, |pairs| pairs.len);
        mad[44..48].copy_from_slice(&word.to_be_bytes());
        let ids = pairs.into_iter().flat_map(Pairs::iter).flat_map(|(one, other)| [one, other]);
        for (place, id) in mad[PAIRS..].chunks_exact_mut(4).zip(ids) {
            place.copy_from_slice(&id.0.to_be_bytes());
        }
        mad
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(count: u32) -> Pairs {
        Pairs::new((0..count).map(|n| (CommId(0x0102_0300 + n), CommId(0x0a0b_0c00 + n))))
    }

    #[test]
    fn what_is_said_is_understood() {
        let most = u32::try_from(Pairs::MAX).unwrap();
        for mad in [
            AliveMad::Question(pairs(1)),
            AliveMad::Question(pairs(most)),
            AliveMad::Answer(pairs(2), 0b10),
            AliveMad::Answer(pairs(most), (1 << most) - 1),
            AliveMad::Notice(Qpn::new(0x01_0203)),
        ] {
            let bytes = mad.emit(0x1122_3344_5566_7788);
            assert_eq!(AliveMad::parse(&bytes), Some((0x1122_3344_5566_7788, mad)));
        }
        let bytes = AliveMad::Answer(pairs(2), 0b10).emit(1);
        assert_eq!(&bytes[36..48], [0, 0x52, 0x6f, 0x63, 1, 2, 0, 0, 0, 0, 0, 2]);
        assert_eq!(&bytes[48..56], [1, 2, 3, 0, 0x0a, 0x0b, 0x0c, 0]);
        assert_eq!(&bytes[56..65], [1, 2, 3, 1, 0x0a, 0x0b, 0x0c, 1, 0]);
        // Connections that do not fit are left out.
        assert_eq!(pairs(most + 9), pairs(most));
    }

    #[test]
    fn other_versions_and_numbers_without_a_meaning_say_nothing() {
        let question = AliveMad::Question(pairs(3)).emit(7);
        for (at, value) in [(40, 0), (40, 2), (41, 0), (41, 27), (41, 255)] {
            let mut bytes = question;
            bytes[at] = value;
            assert_eq!(AliveMad::parse(&bytes), Some((7, AliveMad::Unknown)), "{at} {value}");
        }
        for attribute in [0x1f, 0x23] {
            let mut bytes = question;
            bytes[17] = attribute;
            assert_eq!(AliveMad::parse(&bytes), None, "{attribute}");
        }
        assert_eq!(AliveMad::parse(&question[..255]), None);
    }
}
