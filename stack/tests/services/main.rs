//! Unreliable services, datagrams of the connection manager, groups, shared queues, windows, pace.

#[path = "../common/mod.rs"]
mod common;

mod gone;
mod groups;
mod gsi;
mod pace;
mod srq;
mod uc;
mod uc_random;
mod ud;
mod windows;
