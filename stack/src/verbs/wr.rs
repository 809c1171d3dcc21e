//! Work requests: `struct ibv_send_wr` and `struct ibv_recv_wr`.

use super::{Destination, SendOp};
use crate::mem::{FlushLevel, Placement, RemoteSlice, Sge};
use crate::types::Key;

/// The data of a send work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendData<'a> {
    /// Ranges of registered memory: source of SEND, WRITE and ATOMIC WRITE, destination of READ and
    /// atomics.
    Sges(&'a [Sge]),
    /// Bytes copied when posted (`IBV_SEND_INLINE`); not for READ and atomics.
    Inline(&'a [u8]),
}

impl SendData<'_> {
    /// No bytes.
    pub const NONE: Self = Self::Sges(&[]);

    /// Its length in bytes.
    #[must_use]
    #[inline]
    pub fn len(&self) -> u64 {
        match self {
            Self::Sges(sges) => sges.iter().map(|sge| u64::from(sge.len)).sum(),
            Self::Inline(bytes) => bytes.len() as u64,
        }
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<'a> From<&'a [Sge]> for SendData<'a> {
    fn from(sges: &'a [Sge]) -> Self {
        Self::Sges(sges)
    }
}

impl<'a, const N: usize> From<&'a [Sge; N]> for SendData<'a> {
    fn from(sges: &'a [Sge; N]) -> Self {
        Self::Sges(sges)
    }
}

impl<'a> From<&'a [u8]> for SendData<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self::Inline(bytes)
    }
}

impl<'a, const N: usize> From<&'a [u8; N]> for SendData<'a> {
    fn from(bytes: &'a [u8; N]) -> Self {
        Self::Inline(bytes)
    }
}

/// A send work request (`struct ibv_send_wr`).
///
/// Each constructor makes a request whose completion is signaled, without fence, without solicited
/// event, and with 0 as its number. Its methods change that: `SendWr::send(b"ping").wr_id(7)`.
///
/// The data of a SEND or a WRITE is a list of registered ranges (`&[Sge]`), or bytes that are
/// copied when the request is posted (`&[u8]`, `IBV_SEND_INLINE`). A queue pair takes at most
/// `max_inline_data` bytes of the second kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SendWr<'a> {
    /// Returned in the completion.
    pub wr_id: u64,
    /// The operation.
    pub op: SendOp,
    /// The data.
    pub data: SendData<'a>,
    /// Whether success makes a completion (`IBV_SEND_SIGNALED`); errors always do.
    pub signaled: bool,
    /// Whether the receiver shall be woken (`IBV_SEND_SOLICITED`).
    pub solicited: bool,
    /// Whether to wait for all READs and atomics before it (`IBV_SEND_FENCE`).
    pub fence: bool,
}

impl<'a> SendWr<'a> {
    /// A request for any operation.
    #[must_use]
    #[inline]
    pub fn new(op: SendOp, data: impl Into<SendData<'a>>) -> Self {
        let data = data.into();
        Self { wr_id: 0, op, data, signaled: true, solicited: false, fence: false }
    }

    /// SEND: the data goes to the peer's oldest receive.
    #[must_use]
    #[inline]
    pub fn send(data: impl Into<SendData<'a>>) -> Self {
        Self::new(SendOp::Send { imm: None }, data)
    }

    /// SEND of a datagram to `to`.
    #[must_use]
    #[inline]
    pub fn send_to(data: impl Into<SendData<'a>>, to: Destination) -> Self {
        Self::new(SendOp::SendTo { to, imm: None }, data)
    }

    /// SEND that also invalidates the window `rkey` of the receiver.
    #[must_use]
    #[inline]
    pub fn send_inv(data: impl Into<SendData<'a>>, rkey: Key) -> Self {
        Self::new(SendOp::SendInv { rkey }, data)
    }

    /// RDMA WRITE to the beginning of `remote`.
    ///
    /// # Panics
    /// If the data is longer than `remote`.
    #[must_use]
    #[inline]
    pub fn write(data: impl Into<SendData<'a>>, remote: RemoteSlice) -> Self {
        let (data, RemoteSlice { address, rkey, .. }) = (data.into(), remote);
        fits(data, remote);
        Self::new(SendOp::Write { remote: address, rkey, imm: None }, data)
    }

    /// RDMA READ from the beginning of `remote`, of the length of the list.
    ///
    /// # Panics
    /// If the list is longer than `remote`.
    #[must_use]
    #[inline]
    pub fn read(sges: &'a [Sge], remote: RemoteSlice) -> Self {
        let RemoteSlice { address, rkey, .. } = remote;
        fits(SendData::Sges(sges), remote);
        Self::new(SendOp::Read { remote: address, rkey }, sges)
    }

    /// Compare and swap of the first eight bytes of `remote`. The list receives the value found.
    ///
    /// # Panics
    /// If `remote` has fewer than eight bytes.
    #[must_use]
    #[inline]
    pub fn compare_swap(sges: &'a [Sge], remote: RemoteSlice, compare: u64, swap: u64) -> Self {
        let RemoteSlice { address, rkey, .. } = remote.word();
        Self::new(SendOp::CompareSwap { remote: address, rkey, compare, swap }, sges)
    }

    /// Fetch and add of the first eight bytes of `remote`. The list receives the value found.
    ///
    /// # Panics
    /// If `remote` has fewer than eight bytes.
    #[must_use]
    #[inline]
    pub fn fetch_add(sges: &'a [Sge], remote: RemoteSlice, add: u64) -> Self {
        let RemoteSlice { address, rkey, .. } = remote.word();
        Self::new(SendOp::FetchAdd { remote: address, rkey, add }, sges)
    }

    /// ATOMIC WRITE of eight bytes to the beginning of `remote`.
    ///
    /// # Panics
    /// If `remote` has fewer than eight bytes.
    #[must_use]
    #[inline]
    pub fn atomic_write(data: impl Into<SendData<'a>>, remote: RemoteSlice) -> Self {
        let RemoteSlice { address, rkey, .. } = remote.word();
        Self::new(SendOp::AtomicWrite { remote: address, rkey }, data)
    }

    /// FLUSH of `remote`.
    ///
    /// # Panics
    /// If `remote` has 4 GiB or more.
    #[must_use]
    pub fn flush(remote: RemoteSlice, placement: Placement, level: FlushLevel) -> Self {
        let RemoteSlice { address: remote, len, rkey } = remote;
        let len = u32::try_from(len).expect("the range of a FLUSH is shorter than 4 GiB");
        Self::new(SendOp::Flush { remote, rkey, len, placement, level }, SendData::NONE)
    }

    /// Invalidates the window `rkey` of this side.
    #[must_use]
    pub fn local_inv(rkey: Key) -> Self {
        Self::new(SendOp::LocalInv { rkey }, SendData::NONE)
    }

    /// The number that its completion returns; 0 by default.
    #[must_use]
    #[inline]
    pub const fn wr_id(mut self, wr_id: u64) -> Self {
        self.wr_id = wr_id;
        self
    }

    /// Whether success makes a completion (`IBV_SEND_SIGNALED`); by default it does.
    #[must_use]
    #[inline]
    pub const fn signaled(mut self, signaled: bool) -> Self {
        self.signaled = signaled;
        self
    }

    /// The receiver shall be woken (`IBV_SEND_SOLICITED`).
    #[must_use]
    #[inline]
    pub const fn solicited(mut self) -> Self {
        self.solicited = true;
        self
    }

    /// It waits for all READs and atomics before it (`IBV_SEND_FENCE`).
    #[must_use]
    #[inline]
    pub const fn fence(mut self) -> Self {
        self.fence = true;
        self
    }

    /// Immediate data for the receiver, a number that travels in network byte order.
    ///
    /// # Panics
    /// Unless it is a SEND or a WRITE.
    #[must_use]
    #[inline]
    pub const fn imm(mut self, data: u32) -> Self {
        match &mut self.op {
            SendOp::Send { imm } | SendOp::SendTo { imm, .. } | SendOp::Write { imm, .. } => {
                *imm = Some(data.to_be_bytes());
            }
            _ => panic!("only SEND and WRITE have immediate data"),
        }
        self
    }
}

#[inline]
fn fits(data: SendData<'_>, remote: RemoteSlice) {
    let len = data.len();
    assert!(len <= remote.len, "{len} bytes are longer than the peer's {}", remote.len);
}

/// A receive work request (`struct ibv_recv_wr`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecvWr<'a> {
    /// Returned in the completion.
    pub wr_id: u64,
    /// Destination of an incoming SEND.
    pub sges: &'a [Sge],
}

impl<'a> RecvWr<'a> {
    /// A receive into `sges`, whose completion returns `wr_id`.
    #[must_use]
    #[inline]
    pub const fn new(wr_id: u64, sges: &'a [Sge]) -> Self {
        Self { wr_id, sges }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REMOTE: RemoteSlice = RemoteSlice { address: 0x1000, len: 64, rkey: Key(7) };

    fn sge(len: u32) -> Sge {
        Sge { addr: 0x2000, len, lkey: Key(9) }
    }

    #[test]
    fn each_constructor_makes_its_operation() {
        let (remote, rkey) = (REMOTE.address, REMOTE.rkey);
        let sges = [sge(8)];
        let to = Destination { qpn: crate::types::Qpn::new(5), ..Destination::default() };
        let (placement, level) = (Placement::GLOBAL, FlushLevel::Range);
        let table = [
            (SendWr::send(&sges), SendOp::Send { imm: None }),
            (SendWr::send_to(&sges, to), SendOp::SendTo { to, imm: None }),
            (SendWr::send_inv(&sges, rkey), SendOp::SendInv { rkey }),
            (SendWr::write(&sges, REMOTE), SendOp::Write { remote, rkey, imm: None }),
            (SendWr::read(&sges, REMOTE), SendOp::Read { remote, rkey }),
            (
                SendWr::compare_swap(&sges, REMOTE, 1, 2),
                SendOp::CompareSwap { remote, rkey, compare: 1, swap: 2 },
            ),
            (SendWr::fetch_add(&sges, REMOTE, 3), SendOp::FetchAdd { remote, rkey, add: 3 }),
            (SendWr::atomic_write(&sges, REMOTE), SendOp::AtomicWrite { remote, rkey }),
        ];
        for (wr, op) in table {
            assert_eq!((wr.op, wr.data), (op, SendData::Sges(&sges)));
            assert!(wr.signaled && !wr.fence && !wr.solicited && wr.wr_id == 0, "{wr:?}");
        }
        let flush = SendWr::flush(REMOTE, placement, level);
        assert_eq!(flush.op, SendOp::Flush { remote, rkey, len: 64, placement, level });
        assert_eq!((flush.data, SendWr::local_inv(rkey).data), (SendData::NONE, SendData::NONE));
        assert_eq!(SendWr::local_inv(rkey).op, SendOp::LocalInv { rkey });
    }

    #[test]
    fn each_method_sets_its_field() {
        let wr = SendWr::send(b"x");
        assert_eq!(wr.data, SendData::Inline(b"x"));
        assert_eq!(wr.wr_id(7), SendWr { wr_id: 7, ..wr });
        assert_eq!(wr.signaled(false), SendWr { signaled: false, ..wr });
        assert_eq!(wr.solicited(), SendWr { solicited: true, ..wr });
        assert_eq!(wr.fence(), SendWr { fence: true, ..wr });
        let imm = Some([0x01, 0x02, 0x03, 0x04]);
        for wr in [wr, SendWr::send_to(b"x", Destination::default()), SendWr::write(b"x", REMOTE)] {
            assert_eq!(wr.imm(0x0102_0304).op.immediate(), imm);
        }
    }

    #[test]
    fn data_beyond_the_peers_range_is_refused() {
        assert_eq!(SendWr::write(&[sge(60), sge(4)], REMOTE).data.len(), 64);
        let panics = |make: fn() -> SendWr<'static>| std::panic::catch_unwind(make).is_err();
        assert!(panics(|| SendWr::write(&[0; 65], REMOTE)));
        assert!(panics(|| SendWr::fetch_add(&[], REMOTE.slice(0, 7), 1)));
        assert!(panics(|| SendWr::read(&[], REMOTE).imm(1)));
        assert!(
            std::panic::catch_unwind(|| SendWr::write(&[sge(60), sge(5)], REMOTE).wr_id).is_err()
        );
        assert!(std::panic::catch_unwind(|| SendWr::read(&[sge(65)], REMOTE).wr_id).is_err());
    }
}
