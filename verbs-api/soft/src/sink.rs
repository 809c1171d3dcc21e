//! Between the engine and its port: the paths by which packets leave, and received datagrams.

use rocinante_netdev::{AnyPort, PathId, Port, RxDatagram, RxIpId};
use rocinante_stack::wire::icrc::{DF, Summed, Template};
use rocinante_stack::{Datagram, IpId, TxSink};

/// The ICRC templates of the paths.
#[derive(Debug, Default)]
pub(super) struct Paths {
    templates: Vec<Option<Template>>,
    pub(super) used: usize,
}

impl Paths {
    pub(super) fn set(&mut self, id: PathId, template: Option<Template>) {
        let at = id.0 as usize;
        if self.templates.len() <= at {
            self.templates.resize(at + 1, None);
        }
        self.used -= usize::from(self.templates[at].is_some());
        self.used += usize::from(template.is_some());
        self.templates[at] = template;
    }
}

/// The engine's sink over a port: seals each packet with the ICRC of the headers that the port will
/// write.
pub(super) struct Sink<'a> {
    pub(super) port: &'a mut AnyPort,
    pub(super) paths: &'a mut Paths,
    /// Datagrams that were refused, and the last errno.
    pub(super) refused: &'a mut (u64, i32),
}

impl TxSink for Sink<'_> {
    #[inline]
    fn send<E>(
        &mut self,
        path: u32,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<Option<Summed>, E>,
    ) -> Result<bool, E> {
        let Some(Some(template)) = self.paths.templates.get_mut(path as usize) else {
            // The path is gone, and a queue pair still names it. The packet is lost, as behind a
            // router that knows no way: a full sink would hold up all queue pairs.
            *self.refused = (self.refused.0 + 1, libc::ENETUNREACH);
            return Ok(true);
        };
        let Some(slot) = self.port.reserve(PathId(path), len) else { return Ok(false) };
        let summed = fill(slot.buf)?;
        template.set_id(slot.ip_id, DF);
        template.seal_around(slot.buf, summed);
        self.port.commit();
        Ok(true)
    }
}

/// A datagram of the port, as the engine takes it.
#[inline]
pub(super) fn translate<'a>(datagram: &RxDatagram<'a>) -> Datagram<'a> {
    Datagram {
        bytes: datagram.payload,
        src: datagram.src,
        dst: datagram.dst,
        src_port: datagram.src_port,
        ip_id: match datagram.ip_id {
            RxIpId::Exact { id, flags } => IpId::Exact { id, flags },
            RxIpId::Hint(id) => IpId::Hint(id),
            RxIpId::None => IpId::None,
        },
        tos: datagram.tos.unwrap_or(0),
        hop_limit: None,
    }
}
