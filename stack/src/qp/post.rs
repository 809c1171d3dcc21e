//! Why a work request cannot be posted.

/// Why a work request cannot be posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
