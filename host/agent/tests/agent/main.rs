//! The agent between containers that the tests make. Each test has a "host" of its own: a namespace
//! with a bridge, in which an agent runs.

mod afxdp;
mod announced;
mod asker;
mod bad_input;
mod called;
mod captures;
mod claims;
mod classes;
mod commands;
mod ends;
mod forged;
mod guards;
mod identity;
mod introduced;
mod lab;
mod log;
mod many;
mod own;
mod pages;
mod quota;
mod rates;
mod reload;
mod restart;
mod rings;
mod sockets;
mod turns;
mod unit;
mod uplinks;

/// The role of a program in a container. Other tests start it as a process of its own, with the
/// agent's socket in its environment; without one there is nothing to do.
#[test]
fn role() {
    asker::run();
}
