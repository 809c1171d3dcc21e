//! The `AF_XDP` backend.

mod asm;
mod bpf;
mod cursor;
mod mapping;
mod prog;
mod ring;
mod socket;
mod umem;
