//! Queueing disciplines and filters: `RTM_GETQDISC`, `RTM_GETTFILTER`.

use std::io;

use netlink_packet_core::{DecodeError, NlasIterator, Parseable};
use netlink_packet_route::tc::{TcHandle, TcHeader, TcMessage};

use super::Rtnl;

const RTM_NEWQDISC: u16 = 36;
const RTM_GETQDISC: u16 = 38;
const RTM_NEWTFILTER: u16 = 44;
const RTM_GETTFILTER: u16 = 46;
const TC_HEADER_LEN: usize = 20;
const TCA_KIND: u16 = 1;

/// A queueing discipline on an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Qdisc {
    /// Its name: `noqueue`, `fq_codel`, `tbf`, `clsact` …
    pub kind: String,
}

/// Attachment point of filters that act on all of an interface's packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FilterHook {
    /// The `ingress` discipline.
    IngressQdisc,
    /// The receiving half of `clsact`.
    ClsactIngress,
    /// The sending half of `clsact`.
    ClsactEgress,
}

impl FilterHook {
    /// The handle that filters name as their parent (`TC_H_MIN_INGRESS` and so on).
    fn parent(self) -> TcHandle {
        let minor = match self {
            Self::IngressQdisc => 0,
            Self::ClsactIngress => 0xfff2,
            Self::ClsactEgress => 0xfff3,
        };
        TcHandle { major: 0xffff, minor }
    }
}

/// The header and the kind. The options of a discipline or filter are not parsed, so an unknown one
/// cannot make the message undecodable.
struct KindMessage {
    index: i32,
    kind: String,
}

impl Parseable<[u8]> for KindMessage {
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

/// Parses the payload of a message as one of a discipline.
#[cfg(feature = "fuzzing")]
pub(super) fn try_payload(payload: &[u8]) {
    let _ = KindMessage::parse(payload);
}

impl Rtnl {
    /// All disciplines of an interface: root, children, `ingress` and `clsact`. Error: the kernel's
    /// error.
    pub(crate) fn qdiscs(&mut self, interface: u32) -> io::Result<Vec<Qdisc>> {
        let query = TcMessage::default();
        let found: Vec<KindMessage> = self.ask(RTM_GETQDISC, RTM_NEWQDISC, true, &query)?;
        Ok(found
            .into_iter()
            .filter(|q| u32::try_from(q.index) == Ok(interface))
            .map(|q| Qdisc { kind: q.kind })
            .collect())
    }

    /// Whether there are filters at a hook of an interface. Error: the kernel's error.
    pub(crate) fn has_filters(&mut self, interface: u32, hook: FilterHook) -> io::Result<bool> {
        let mut query = TcMessage::default();
        query.header.index = i32::try_from(interface).map_err(io::Error::other)?;
        query.header.parent = hook.parent();
        let found: Vec<KindMessage> = self.ask(RTM_GETTFILTER, RTM_NEWTFILTER, true, &query)?;
        Ok(!found.is_empty())
    }
}
