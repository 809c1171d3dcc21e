//! Queueing disciplines: `RTM_GETQDISC`.

use std::io;

use netlink_packet_core::{DecodeError, NlasIterator, Parseable};
use netlink_packet_route::tc::{TcHeader, TcMessage};

use super::Rtnl;

const RTM_NEWQDISC: u16 = 36;
const RTM_GETQDISC: u16 = 38;
const TC_HEADER_LEN: usize = 20;
const TCA_KIND: u16 = 1;

/// A queueing discipline on an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Qdisc {
    /// Its name: `noqueue`, `fq_codel`, `tbf`, `clsact` …
    pub kind: String,
}

/// The header and the kind; the options of a discipline are of no interest, and so a new one cannot
/// make the message undecodable.
struct QdiscMessage {
    index: i32,
    kind: String,
}

impl Parseable<[u8]> for QdiscMessage {
    fn parse(bytes: &[u8]) -> Result<Self, DecodeError> {
        let header = TcHeader::parse(bytes)?;
        for attribute in NlasIterator::new(&bytes[TC_HEADER_LEN..]) {
            let attribute = attribute?;
            if attribute.kind() == TCA_KIND {
                let name = attribute.value().split(|b| *b == 0).next().unwrap_or_default();
                let kind = String::from_utf8_lossy(name).into_owned();
                return Ok(Self { index: header.index, kind });
            }
        }
        Err(DecodeError::from("a queueing discipline without a kind"))
    }
}

impl Rtnl {
    /// All disciplines of an interface: root, children, `ingress` and `clsact`.
    ///
    /// # Errors
    /// Whatever the kernel answers.
    pub fn qdiscs(&mut self, interface: u32) -> io::Result<Vec<Qdisc>> {
        let query = TcMessage::default();
        let found: Vec<QdiscMessage> = self.ask(RTM_GETQDISC, RTM_NEWQDISC, true, &query)?;
        Ok(found
            .into_iter()
            .filter(|q| u32::try_from(q.index) == Ok(interface))
            .map(|q| Qdisc { kind: q.kind })
            .collect())
    }
}
