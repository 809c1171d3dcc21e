//! Everything unsafe about the system's `libibverbs`: loading it, and handles that own its objects.
//!
//! A handle keeps what it depends on alive, so that objects go in the order in which the library wants it. All
//! of the library's functions may be called from any thread.

pub(super) mod abi;
mod library;
mod objects;
mod post;

pub(super) use self::library::{Library, SONAME};
pub(super) use self::objects::{Ah, Channel, Context, Cq, Event, Mr, OpenError, Pd, Qp, Srq};
