//! Errors of calls, and the errno that a C program would have seen.

use std::fmt;
use std::io;

use rocinante_netdev::OpenError;
use rocinante_stack::cm::CmError;
use rocinante_stack::{ModifyError, PostError};
use rustix::io::Errno;

use super::cm::CmFailure;
use super::wc::WcError;

/// Why a call failed. After an error nothing has changed, unless the error or the call's
/// documentation says so.
#[derive(Debug)]
#[non_exhaustive]
pub enum VerbsError {
    /// A port could not be opened.
    Open(OpenError),
    /// No interface has that name or address.
    NoDevice(String),
    /// A work request cannot be posted.
    Post(PostError),
    /// A work request failed.
    Completion(WcError),
    /// A queue pair cannot be modified.
    Modify(ModifyError),
    /// The object is in use (`EBUSY`).
    Busy(&'static str),
    /// The device has reached a limit (`ENOMEM`).
    Limit {
        /// The objects that are limited.
        what: &'static str,
        /// Their maximum number.
        max: u64,
    },
    /// The container has reached a limit that its host's agent sets (`EAGAIN`, as of the kernel's
    /// controller `rdma`; `ENOMEM` for `mr_bytes`).
    Quota {
        /// `hca_handle` (contexts), `hca_object` or `mr_bytes`.
        resource: &'static str,
        /// The most that all processes of the container may have.
        limit: u64,
    },
    /// An argument is invalid (`EINVAL`).
    Invalid(String),
    /// The process has no such memory (`EFAULT`).
    Fault {
        /// Address of its first byte.
        address: u64,
        /// Its length in bytes.
        len: usize,
        /// Whether it was to be written, too.
        writable: bool,
    },
    /// The path to the peer cannot be used: no route, wrong address family.
    Path(io::Error),
    /// The exchange of connection data failed.
    Exchange(String),
    /// The system's RDMA stack, or one of its devices, refused.
    Hardware(Box<HardwareError>),
    /// The connection manager, or that of the peer, refused.
    Cm(CmFailure),
    /// The operating system refused.
    Io(io::Error),
    /// The timeout expired (`ETIMEDOUT`).
    TimedOut,
}

impl VerbsError {
    /// The errno of the matching call in `libibverbs`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Open(error) if error.errno() != 0 => error.errno(),
            Self::Open(_) | Self::NoDevice(_) => Errno::NODEV.raw_os_error(),
            Self::Post(PostError::Full) | Self::Limit { .. } => Errno::NOMEM.raw_os_error(),
            Self::Quota { resource: "mr_bytes", .. } => Errno::NOMEM.raw_os_error(),
            Self::Quota { .. } => Errno::AGAIN.raw_os_error(),
            Self::Post(PostError::Refused(errno)) => errno.abs(),
            Self::Post(PostError::Unsupported) => Errno::OPNOTSUPP.raw_os_error(),
            Self::Post(_) | Self::Modify(_) | Self::Invalid(_) => Errno::INVAL.raw_os_error(),
            Self::Fault { .. } => Errno::FAULT.raw_os_error(),
            Self::Busy(_) => Errno::BUSY.raw_os_error(),
            Self::Path(error) | Self::Io(error) => errno_of(error),
            Self::Hardware(error) => error.errno(),
            Self::Exchange(_) => Errno::PROTO.raw_os_error(),
            Self::Cm(failure) => failure.errno().raw_os_error(),
            Self::TimedOut => Errno::TIMEDOUT.raw_os_error(),
            Self::Completion(_) => Errno::IO.raw_os_error(),
        }
    }
}

/// An error that is not the kernel's has the errno of its kind.
fn errno_of(error: &io::Error) -> i32 {
    let of_kind = match error.kind() {
        io::ErrorKind::InvalidInput => Errno::INVAL,
        io::ErrorKind::NetworkUnreachable => Errno::NETUNREACH,
        io::ErrorKind::HostUnreachable => Errno::HOSTUNREACH,
        io::ErrorKind::NetworkDown => Errno::NETDOWN,
        io::ErrorKind::AddrNotAvailable => Errno::ADDRNOTAVAIL,
        io::ErrorKind::PermissionDenied => Errno::ACCESS,
        io::ErrorKind::OutOfMemory => Errno::NOMEM,
        _ => Errno::IO,
    };
    rocinante_netdev::errno(error).unwrap_or(of_kind.raw_os_error())
}

impl fmt::Display for VerbsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open(error) => error.fmt(f),
            Self::NoDevice(what) => {
                write!(f, "no interface has {what}: see `rocinante devices` or `ip address`")
            }
            Self::Post(PostError::Refused(errno)) => {
                let error = io::Error::from_raw_os_error(errno.abs());
                write!(f, "the device refused the request: {error}")
            }
            Self::Post(error) => error.fmt(f),
            Self::Completion(error) => error.fmt(f),
            Self::Modify(error) => error.fmt(f),
            Self::Busy(why) => write!(f, "in use: {why}"),
            Self::Limit { what, max } => {
                write!(f, "the device has {max} {what} at most: raise the limit when opening it")
            }
            Self::Quota { resource, limit } => write!(
                f,
                "all processes of this container together may have {resource}={limit}: release \
                 some, or raise rdma_max in the configuration of the host's agent"
            ),
            Self::Invalid(why) => f.write_str(why),
            Self::Fault { address, len, writable } => {
                let lacks = if *writable { "mapped and writable" } else { "mapped and readable" };
                write!(
                    f,
                    "the {len} bytes at {address:#x} are not all {lacks}: name memory that the \
                     process has, and leave LOCAL_WRITE out for memory that it only reads"
                )
            }
            Self::Path(error) => write!(
                f,
                "no path to the peer: {error}: check `ip route get` and that both sides use the \
                 same address family"
            ),
            Self::Exchange(why) => write!(f, "exchange of connection data: {why}"),
            Self::Hardware(error) => error.fmt(f),
            Self::Cm(failure) => failure.fmt(f),
            Self::Io(error) => {
                error.fmt(f)?;
                match error.raw_os_error() {
                    Some(libc::EMFILE | libc::ENFILE) => {
                        f.write_str(": raise the limit of open files (`ulimit -n`)")
                    }
                    _ => Ok(()),
                }
            }
            Self::TimedOut => f.write_str("the time given is over"),
        }
    }
}

/// Its own text has the whole cause, and so have its variants. So it has no source: a printer of
/// all sources (`{:#}` of `anyhow`) would print the cause twice.
impl std::error::Error for VerbsError {}

impl From<OpenError> for VerbsError {
    fn from(error: OpenError) -> Self {
        Self::Open(error)
    }
}

impl From<ModifyError> for VerbsError {
    fn from(error: ModifyError) -> Self {
        Self::Modify(error)
    }
}

impl From<PostError> for VerbsError {
    fn from(error: PostError) -> Self {
        Self::Post(error)
    }
}

impl From<WcError> for VerbsError {
    fn from(error: WcError) -> Self {
        Self::Completion(error)
    }
}

impl From<CmError> for VerbsError {
    fn from(error: CmError) -> Self {
        Self::Cm(match error {
            CmError::Unknown => CmFailure::Ended,
            other => CmFailure::Call(other),
        })
    }
}

impl From<io::Error> for VerbsError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// A call that takes an object by value did not do its work: why, and the object, which the program
/// can use again. `?` turns it into its [`VerbsError`] and drops the object.
#[derive(Debug)]
pub struct Refused<T> {
    /// Why.
    pub error: VerbsError,
    /// The object.
    pub value: Box<T>,
}

impl<T> Refused<T> {
    #[doc(hidden)]
    pub fn new(value: T, error: VerbsError) -> Self {
        Self { error, value: Box::new(value) }
    }
}

impl<T> From<Refused<T>> for VerbsError {
    fn from(refused: Refused<T>) -> Self {
        refused.error
    }
}

impl<T> fmt::Display for Refused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<T: fmt::Debug> std::error::Error for Refused<T> {}

/// The system's RDMA stack, or one of its devices, refused.
#[derive(Debug)]
pub struct HardwareError {
    what: String,
    source: io::Error,
    advice: String,
}

impl HardwareError {
    /// The errno.
    #[must_use]
    pub fn errno(&self) -> i32 {
        self.source.raw_os_error().unwrap_or(Errno::NODEV.raw_os_error())
    }

    /// A refusal: its subject, its reason, and the user's remedy.
    #[doc(hidden)]
    pub fn refused(
        what: impl Into<String>,
        source: impl Into<io::Error>,
        advice: impl Into<String>,
    ) -> VerbsError {
        let (what, source, advice) = (what.into(), source.into(), advice.into());
        VerbsError::Hardware(Box::new(Self { what, source, advice }))
    }
}

impl fmt::Display for HardwareError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, source, advice } = self;
        write!(f, "{what}: {source}")?;
        if advice.is_empty() { Ok(()) } else { write!(f, ": {advice}") }
    }
}

impl std::error::Error for HardwareError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_keeps_its_errno_under_other_words() {
        for errno in [
            Errno::INVAL,
            Errno::NETUNREACH,
            Errno::HOSTUNREACH,
            Errno::NETDOWN,
            Errno::ADDRNOTAVAIL,
            Errno::ACCESS,
            Errno::NOBUFS,
        ] {
            let plain = || io::Error::from(errno);
            let kind = io::Error::new(plain().kind(), "other words");
            let worded = rocinante_netdev::worded(&plain(), "other words".into());
            let twice = rocinante_netdev::worded(&worded, "others yet".into());
            for error in [plain(), worded, twice] {
                assert_eq!(VerbsError::Path(error).errno(), errno.raw_os_error());
            }
            let kept = if errno == Errno::NOBUFS { Errno::IO } else { errno };
            assert_eq!(VerbsError::Path(kind).errno(), kept.raw_os_error(), "{errno}");
        }
    }

    #[test]
    fn a_limit_of_descriptors_has_its_hint() {
        let error = |errno| VerbsError::Io(io::Error::from_raw_os_error(errno)).to_string();
        for errno in [libc::EMFILE, libc::ENFILE] {
            assert!(error(errno).ends_with(": raise the limit of open files (`ulimit -n`)"));
        }
        assert!(!error(libc::EIO).contains("ulimit"));
    }

    /// The text of a program that prints all sources, as `anyhow` does.
    fn chain(error: &dyn std::error::Error) -> String {
        let sources = std::iter::successors(error.source(), |error| error.source());
        sources.fold(error.to_string(), |text, source| format!("{text}: {source}"))
    }

    #[test]
    fn an_error_shows_its_cause_once() {
        let io = || io::Error::other("the cause");
        let backend = rocinante_netdev::Backend::Udp;
        let open = OpenError::os(backend, "a port cannot be opened", io(), "");
        let status = rocinante_stack::verbs::WcStatus::RetryExcErr;
        let failed = super::super::wc::Wc { status, ..Default::default() }.ok().unwrap_err();
        let refused = Refused::new((), VerbsError::Io(io()));
        let errors: [(Box<dyn std::error::Error>, &str); 8] = [
            (Box::new(VerbsError::Io(io())), "the cause"),
            (Box::new(VerbsError::Path(io())), "the cause"),
            (Box::new(VerbsError::Open(open)), "the cause"),
            (Box::new(HardwareError::refused("a card", io(), "look at it")), "the cause"),
            (Box::new(refused), "the cause"),
            (Box::new(VerbsError::Post(PostError::Full)), &PostError::Full.to_string()),
            (Box::new(VerbsError::Completion(failed)), "RETRY_EXC_ERR"),
            (Box::new(VerbsError::Cm(CmFailure::Ended)), &CmFailure::Ended.to_string()),
        ];
        for (error, cause) in errors {
            let (text, chain) = (error.to_string(), chain(&*error));
            assert_eq!(text.matches(cause).count(), 1, "{text}");
            assert_eq!(chain.matches(cause).count(), 1, "{chain}");
        }
    }
}
