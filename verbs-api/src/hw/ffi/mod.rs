//! Everything unsafe about the system's `libibverbs` and `librdmacm`: loading them, and handles that own their objects.
//!
//! A handle keeps what it depends on alive, so that objects go in the order in which the library wants it. All
//! of the libraries' functions may be called from any thread.

pub(super) mod abi;
mod extended;
mod library;
mod memory;
mod objects;
mod post;
pub(super) mod rdmacm;

pub(super) use self::extended::SendOps;
pub(super) use self::library::{Library, SONAME};
pub(super) use self::memory::{Mr, Mw, Windows};
pub(super) use self::objects::{Ah, Channel, Context, Cq, Event, OpenError, Pd, Qp, Srq};
