//! The unsafe part of using the system's `libibverbs` and `librdmacm`: loading them, and handles
//! that own their objects.
//!
//! A handle keeps its dependencies alive, so that objects are destroyed in the order that the
//! library requires. Any thread may call any function of the libraries.

mod extended;
mod library;
mod memory;
mod objects;
mod post;
pub(super) mod rdmacm;

pub(super) use rocinante_abi as abi;

pub(super) use self::extended::SendOps;
pub(super) use self::library::{Library, SONAME};
pub(super) use self::memory::{Mr, Mw, Windows};
pub(super) use self::objects::{Ah, Channel, Context, Cq, Event, OpenError, Pd, Qp, Srq};
