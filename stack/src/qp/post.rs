//! The checks of a work request before it is posted, and why one is refused.

use crate::types::Mtu;
use crate::verbs::{QpType, RecvWr, SendData, SendOp, SendWr};

/// The most bytes of one message: 2^31.
pub const MESSAGE_MAX: u64 = 1 << 31;

/// The limits of a queue pair for its send requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendLimits {
    qp_type: QpType,
    /// Scatter-gather elements of a request.
    pub(super) max_sge: u16,
    /// Bytes of inline data of a request.
    pub(super) max_inline: u32,
    /// Bytes of a message.
    longest: u32,
}

impl SendLimits {
    /// The limits of a queue pair of this type, with at most `max_sge` scatter-gather elements and
    /// `max_inline` bytes of inline data in a request. A datagram must fit `mtu`, the MTU of the
    /// port.
    #[must_use]
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "2^31 and the lesser of two fit")]
    pub const fn new(qp_type: QpType, max_sge: u32, max_inline: u32, mtu: Mtu) -> Self {
        let longest = match qp_type {
            QpType::Ud => mtu.bytes(),
            QpType::Rc | QpType::Uc => MESSAGE_MAX as u32,
        };
        let max_sge = if max_sge < u16::MAX as u32 { max_sge as u16 } else { u16::MAX };
        Self { qp_type, max_sge, max_inline, longest }
    }

    /// Checks a request. Returns the length of its message in bytes. Whether the queue has room,
    /// and whether the memory is registered, is checked elsewhere.
    ///
    /// # Errors
    /// [`PostError`] says which limit the request exceeds, or how its fields contradict each other.
    #[inline]
    pub fn check(&self, wr: &SendWr<'_>) -> Result<u32, PostError> {
        if !self.qp_type.has(&wr.op) {
            return Err(PostError::Operation);
        }
        let len = match wr.data {
            // The usual case: one element.
            SendData::Sges([sge]) if self.max_sge > 0 => sge.len.into(),
            _ => self.data_len(wr)?,
        };
        if !wr.op.carries_data() {
            return check_special(&wr.op, len);
        }
        if len > u64::from(self.longest) {
            return Err(if len > MESSAGE_MAX { PostError::TooLong } else { PostError::BeyondMtu });
        }
        Ok(len as u32)
    }

    #[inline(never)]
    fn data_len(&self, wr: &SendWr<'_>) -> Result<u64, PostError> {
        match wr.data {
            SendData::Sges(list) if list.len() > self.max_sge.into() => Err(PostError::TooManySges),
            SendData::Sges(list) => Ok(list.iter().map(|sge| u64::from(sge.len)).sum()),
            SendData::Inline(_) if wr.op.has_result() => Err(PostError::InlineResponse),
            SendData::Inline(bytes) if bytes.len() > self.max_inline as usize => {
                Err(PostError::InlineTooLong)
            }
            SendData::Inline(bytes) => Ok(bytes.len() as u64),
        }
    }
}

/// The length of a request that is neither SEND nor WRITE.
#[inline(never)]
fn check_special(op: &SendOp, len: u64) -> Result<u32, PostError> {
    match op {
        SendOp::CompareSwap { remote, .. } | SendOp::FetchAdd { remote, .. }
            if remote % 8 != 0 || len < 8 =>
        {
            Err(PostError::BadAtomic)
        }
        _ if op.is_local() => Ok(0),
        SendOp::AtomicWrite { remote, .. } if remote % 8 != 0 || len != 8 => {
            Err(PostError::BadAtomic)
        }
        SendOp::Flush { .. } if len > 0 => Err(PostError::FlushData),
        _ if len > MESSAGE_MAX => Err(PostError::TooLong),
        _ if op.is_atomic() => Ok(8),
        _ => Ok(len as u32),
    }
}

/// Checks a receive request of a queue whose requests have at most `max_sge` scatter-gather
/// elements. Returns its room in bytes.
///
/// # Errors
/// [`PostError::TooManySges`], [`PostError::TooLong`].
#[inline]
pub fn check_recv(wr: &RecvWr<'_>, max_sge: u32) -> Result<u32, PostError> {
    if wr.sges.len() > max_sge as usize {
        return Err(PostError::TooManySges);
    }
    let len: u64 = wr.sges.iter().map(|sge| u64::from(sge.len)).sum();
    if len > MESSAGE_MAX {
        return Err(PostError::TooLong);
    }
    Ok(len as u32)
}

/// Why a work request cannot be posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PostError {
    /// No such queue pair.
    UnknownQp,
    /// The state does not allow it: receives from INIT on, sends from RTS on (`EINVAL`).
    State,
    /// The queue is full (`ENOMEM`).
    Full,
    /// More scatter-gather elements than the queue pair was made for (`EINVAL`).
    TooManySges,
    /// More inline data than the queue pair was made for (`EINVAL`).
    InlineTooLong,
    /// The message is longer than 2^31 bytes (`EINVAL`).
    TooLong,
    /// The queue pair's type does not have the operation (`EINVAL`).
    Operation,
    /// The queue pair has a shared receive queue, and none of its own (`EINVAL`).
    Shared,
    /// The datagram is longer than the path MTU (`EINVAL`).
    BeyondMtu,
    /// Inline data with an operation that returns data (`EINVAL`).
    InlineResponse,
    /// An atomic that is not aligned to eight bytes, or has no room for eight; or an ATOMIC WRITE
    /// that does not have exactly eight bytes (`EINVAL`).
    BadAtomic,
    /// A FLUSH with data (`EINVAL`).
    FlushData,
    /// A hardware device, or its library, does not have the operation (`EOPNOTSUPP`); never from
    /// the software device.
    Unsupported,
    /// A hardware device takes the data of an ATOMIC WRITE inline only (`EINVAL`); never from the
    /// software device.
    NotInline,
    /// A hardware device refused it, with this errno; never from the software device.
    Refused(i32),
}

impl core::fmt::Display for PostError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Refused(errno) => return write!(f, "the device refused it: errno {errno}"),
            Self::UnknownQp => "no such queue pair",
            Self::State => {
                "the queue pair's state does not allow it: receives need INIT, sends need RTS"
            }
            Self::Full => "the queue is full: poll its completion queue first, or make it deeper",
            Self::TooManySges => "more scatter-gather elements than the queue pair was made for",
            Self::InlineTooLong => "more inline data than the queue pair was made for",
            Self::TooLong => "the message is longer than 2 GiB",
            Self::Operation => {
                "the queue pair's type does not have this operation: UC has SEND and WRITE, UD has SendTo, RC all but SendTo"
            }
            Self::Shared => {
                "the queue pair takes its receives from a shared receive queue: post them there"
            }
            Self::BeyondMtu => {
                "the datagram is longer than the path MTU: send several, or use a connected queue pair"
            }
            Self::InlineResponse => "READ and atomics cannot be inline",
            Self::BadAtomic => {
                "an atomic needs an address aligned to 8 and 8 bytes for its result, or as its data"
            }
            Self::Unsupported => "the device, or its part of libibverbs, does not have this operation",
            Self::NotInline => "this device takes the eight bytes of an ATOMIC WRITE inline only",
            Self::FlushData => "a FLUSH has no data: its list must be empty",
        })
    }
}

impl core::error::Error for PostError {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::{Access, FlushLevel, Placement, Sge};
    use crate::types::{Key, Qpn};
    use crate::verbs::{AhId, Destination};

    const KEY: Key = Key(9);

    fn wr(op: SendOp, data: SendData<'_>) -> SendWr<'_> {
        SendWr::new(op, data).wr_id(1).signaled(false)
    }

    /// A request at each limit passes with its length, one beyond it is refused by name.
    #[test]
    fn each_limit_is_kept_and_named() {
        use PostError as E;
        let rc = SendLimits::new(QpType::Rc, 2, 16, Mtu::Mtu1024);
        let ud = SendLimits::new(QpType::Ud, 2, 2000, Mtu::Mtu1024);
        let none = SendLimits::new(QpType::Rc, 0, 0, Mtu::Mtu1024);
        let to = Destination { ah: AhId(0), qpn: Qpn::new(2), qkey: 0 };
        let send = SendOp::Send { imm: None };
        let send_to = SendOp::SendTo { to, imm: None };
        let write = SendOp::Write { remote: 1, rkey: KEY, imm: None };
        let read = SendOp::Read { remote: 1, rkey: KEY };
        let add = |remote| SendOp::FetchAdd { remote, rkey: KEY, add: 1 };
        let swap = |remote| SendOp::CompareSwap { remote, rkey: KEY, compare: 0, swap: 1 };
        let atomic_write = |remote| SendOp::AtomicWrite { remote, rkey: KEY };
        let (placement, level) = (Placement::GLOBAL, FlushLevel::Range);
        let flush = SendOp::Flush { remote: 1, rkey: KEY, len: 99, placement, level };
        let (mw, access) = (KEY, Access::REMOTE_READ);
        let bind = SendOp::BindMw { mw, rkey: KEY, region: KEY, addr: 0, len: 8, access };
        let half = 1 << 30;
        // The lengths of the elements.
        for (limits, op, lens, expected) in [
            (rc, send, &[][..], Ok(0)),
            (rc, send, &[half, half], Ok(1 << 31)),
            (rc, send, &[half, half + 1], Err(E::TooLong)),
            (rc, write, &[1 << 31], Ok(1 << 31)),
            (rc, write, &[(1 << 31) + 1], Err(E::TooLong)),
            (rc, read, &[(1 << 31) + 1], Err(E::TooLong)),
            (rc, send, &[1, 1, 1], Err(E::TooManySges)),
            (none, send, &[1], Err(E::TooManySges)),
            (none, send, &[], Ok(0)),
            (rc, send_to, &[1], Err(E::Operation)),
            (ud, send, &[1], Err(E::Operation)),
            (ud, send_to, &[1000, 24], Ok(1024)),
            (ud, send_to, &[1000, 25], Err(E::BeyondMtu)),
            (ud, send_to, &[half, half + 1], Err(E::TooLong)),
            (rc, add(8), &[4, 4], Ok(8)),
            (rc, add(8), &[9], Ok(8)),
            (rc, add(8), &[7], Err(E::BadAtomic)),
            (rc, swap(12), &[8], Err(E::BadAtomic)),
            (rc, atomic_write(8), &[8], Ok(8)),
            (rc, atomic_write(8), &[9], Err(E::BadAtomic)),
            (rc, atomic_write(9), &[8], Err(E::BadAtomic)),
            (rc, flush, &[], Ok(0)),
            (rc, flush, &[1], Err(E::FlushData)),
            (rc, bind, &[7], Ok(0)),
        ] {
            let list: Vec<_> =
                lens.iter().map(|len| Sge { addr: 0, len: *len, lkey: KEY }).collect();
            let checked = limits.check(&wr(op, SendData::Sges(&list)));
            assert_eq!(checked, expected, "{op:?} of {lens:?}");
        }
        let bytes = [0; 2001];
        for (limits, op, len, expected) in [
            (rc, write, 16, Ok(16)),
            (rc, write, 17, Err(E::InlineTooLong)),
            (ud, send_to, 1024, Ok(1024)),
            (ud, send_to, 1025, Err(E::BeyondMtu)),
            (ud, send_to, 2001, Err(E::InlineTooLong)),
            (rc, read, 1, Err(E::InlineResponse)),
            (rc, add(8), 8, Err(E::InlineResponse)),
            (rc, atomic_write(8), 8, Ok(8)),
        ] {
            let checked = limits.check(&wr(op, SendData::Inline(&bytes[..len])));
            assert_eq!(checked, expected, "{op:?} of {len} inline");
        }
    }

    #[test]
    fn a_receive_has_a_longest_list_and_a_most_of_bytes() {
        let check = |lens: &[u32], max_sge| {
            let list: Vec<_> =
                lens.iter().map(|len| Sge { addr: 0, len: *len, lkey: KEY }).collect();
            check_recv(&RecvWr { wr_id: 1, sges: &list }, max_sge)
        };
        assert_eq!([check(&[], 0), check(&[1 << 30; 2], 2)], [Ok(0), Ok(1 << 31)]);
        assert_eq!(check(&[1, 1], 1), Err(PostError::TooManySges));
        assert_eq!(check(&[1 << 31, 1], 2), Err(PostError::TooLong));
    }
}
