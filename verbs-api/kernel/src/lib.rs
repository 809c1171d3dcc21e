//! The kernel provider: devices of the kernel, which are cards and Soft-RoCE (`rdma_rxe`). It uses
//! them through the system's `libibverbs`, and connects their queue pairs through the system's
//! `librdmacm`. It opens both libraries at run time.
//!
//! Only `ffi` is unsafe; `mr` passes its caller's promise on. The handles of `ffi` own the
//! library's objects; the modules here give them the semantics of our API.
//!
//! This crate is a part of `rocinante`: programs use that.

// The lists of the kernel's devices, which programs see, have documentation.
#![allow(missing_docs)]

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
#[warn(missing_docs)]
mod sysfs;
mod tuning;
mod watch;

pub use self::ah::Ah;
pub use self::device::{Device, Pd, exists, no_device};
pub use self::mr::{Change, Registration};
pub use self::mw::Window;
pub use self::queue::{Channel, Cq, Qp, QpInitAttr};
pub use self::srq::Srq;
pub use self::sysfs::{HardwareDevice, HardwareGid, HardwarePort, hardware_devices};
