//! The agent between containers that the tests make. Each test has a "host" of its own: a namespace
//! with a bridge, in which an agent runs.

mod asker;
mod bad_input;
mod ends;
mod forged;
mod identity;
mod lab;
mod many;
mod restart;

/// Not a test: what a program in a container does. Other tests start it as a process of its own.
#[test]
#[ignore = "a role of other tests"]
fn role() {
    asker::run();
}
