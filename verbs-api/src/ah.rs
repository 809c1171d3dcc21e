//! Address handles: destinations of datagrams.

use std::net::IpAddr;

use rocinante_kernel as kernel;
use rocinante_soft as soft;
use rocinante_soft::model::error::VerbsError;
use rocinante_soft::model::qp::PeerPath;
use rocinante_soft::model::wc::Wc;
use rocinante_stack::grh_addresses;
use rocinante_stack::types::Qpn;
use rocinante_stack::verbs::{AhId, Destination};

use crate::context::{Pd, PdKind};

/// Bytes before the payload in the receive of a datagram: its IP header. An IPv4 header is in the
/// last 20 of them.
pub const GRH_LEN: usize = 40;

/// An address handle (`struct ibv_ah`): a port to which a queue pair of type UD can send. It must
/// live until the requests that name it are complete. If it is dropped, requests that have not left
/// yet fail.
#[derive(Debug)]
pub struct Ah {
    kind: AhKind,
    _pd: Pd,
}

#[derive(Debug)]
enum AhKind {
    Soft(soft::Ah),
    Kernel(kernel::Ah),
}

impl Ah {
    /// The identifier by which work requests name it.
    #[must_use]
    pub fn id(&self) -> AhId {
        on!(AhKind, &self.kind, ah => ah.id())
    }

    /// The queue pair `qpn` at this address, for [`SendOp::SendTo`](crate::verbs::SendOp).
    /// Datagrams carry `qkey`, which must be that queue pair's Q_Key; if its highest bit is set,
    /// they carry the sender's own Q_Key instead (IBTA volume 1, 10.2.5).
    #[must_use]
    pub fn to(&self, qpn: Qpn, qkey: u32) -> Destination {
        Destination { ah: self.id(), qpn, qkey }
    }
}

impl Pd {
    /// Makes an address handle (`ibv_create_ah(3)`) for datagrams along `path`.
    ///
    /// # Errors
    /// [`VerbsError::Invalid`] if there is no address at `path.sgid_index`, [`VerbsError::Path`] if
    /// there is no path or the two addresses are of different families, [`VerbsError::Limit`] if
    /// the device has too many address handles.
    pub fn create_ah(&self, path: &PeerPath) -> Result<Ah, VerbsError> {
        let local = self.device().local(path.sgid_index)?;
        if local.is_ipv4() != path.remote.is_ipv4() {
            let why = std::io::Error::from(std::io::ErrorKind::InvalidInput);
            return Err(VerbsError::Path(why));
        }
        let kind = match &self.inner.kind {
            PdKind::Soft(pd) => AhKind::Soft(soft::Ah::create(pd, local, path)?),
            PdKind::Kernel(pd) => AhKind::Kernel(kernel::Ah::create(pd, path)?),
        };
        Ok(Ah { kind, _pd: self.clone() })
    }

    /// Makes an address handle for the answer to a datagram (`ibv_create_ah_from_wc(3)`). `grh` are
    /// the first 40 bytes of the receive that `wc` completed. [`Wc::src_qp`](crate::Wc::src_qp) is
    /// the queue pair to answer.
    ///
    /// # Errors
    /// [`VerbsError::Invalid`] if `wc` or `grh` is not a datagram's; else as
    /// [`create_ah`](Self::create_ah).
    pub fn create_ah_from_wc(&self, wc: &Wc, grh: &[u8; GRH_LEN]) -> Result<Ah, VerbsError> {
        let header = wc.src_qp.and_then(|_| grh_addresses(grh));
        let Some((remote, local)) = header else {
            let why = "the receive does not begin with the header of a datagram";
            return Err(VerbsError::Invalid(why.into()));
        };
        let gids = self.device().gid_table();
        // The answer to a datagram to a group leaves from the first address of its family.
        let place = |is: &dyn Fn(IpAddr) -> bool| gids.iter().position(|gid| gid.is_some_and(is));
        let found =
            place(&|gid| gid == local).or_else(|| place(&|gid| gid.is_ipv4() == local.is_ipv4()));
        self.create_ah(&PeerPath::new(remote).sgid_index(found.unwrap_or(0)))
    }
}
