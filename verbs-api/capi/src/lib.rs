//! `libibverbs.so.1` over the device in software: programs that know nothing of Rocinante run on it
//! unchanged.
//!
//! `rocinante-abi` has the structures of `verbs.h`, `ffi` the functions, `plain` the objects. The
//! rest is safe code: the list of devices, values from one side to the other, reports of failures
//! and at the exit, and `ucma`: the kernel's `rdma_cm` as librdmacm sees it. `fuzzing` exports no
//! symbol.

mod convert;
mod devices;
mod failures;
mod ffi;
#[doc(hidden)]
pub mod fuzzing;
mod log;
mod plain;
mod report;
mod ucma;

use rocinante_abi as abi;
