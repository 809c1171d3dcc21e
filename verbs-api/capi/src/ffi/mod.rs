//! The functions of `libibverbs.so.1`.
//!
//! A C program vouches for its pointers: each is NULL, or one that this library made and has not
//! destroyed, or memory of the structure that `verbs.h` names. [`object`] finds the mistakes that
//! can be found without a crash. So the blocks below that only follow such a pointer say no more
//! than that.

mod ah;
mod border;
mod channel;
mod context;
mod cq;
mod cq_ex;
mod device;
mod ending;
mod events;
mod exports;
mod fork;
mod kern;
mod memory;
mod names;
mod object;
mod operations;
mod pd;
mod post;
mod qp;
mod qp_ex;
mod query;
mod slots;
mod srq;
mod stubs;
mod sysfs;
mod ucma;
mod wait;

pub(crate) use self::wait::{Given, may_block, without_signals};
