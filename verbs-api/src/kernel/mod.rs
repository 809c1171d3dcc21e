//! The kernel provider: devices of the kernel, which are cards and Soft-RoCE (`rdma_rxe`). It uses
//! them through the system's `libibverbs`, and connects their queue pairs through the system's
//! `librdmacm`. It opens both libraries at run time.
//!
//! Only `ffi` is unsafe; `mr` passes its caller's promise on. The handles of `ffi` own the
//! library's objects; the modules here give them the semantics of our API.

mod ah;
mod cm;
mod convert;
mod device;
mod error;
mod ffi;
mod groups;
mod known;
mod mr;
mod mw;
mod queue;
mod srq;
mod sysfs;
mod watch;

pub(crate) use self::ah::Ah;
pub(crate) use self::device::{Device, Pd, exists, no_device};
pub(crate) use self::mr::{Change, Registration};
pub(crate) use self::mw::Window;
pub(crate) use self::queue::{Channel, Cq, Qp, QpInitAttr};
pub(crate) use self::srq::Srq;
pub use self::sysfs::{HardwareDevice, HardwareGid, HardwarePort, hardware_devices};
