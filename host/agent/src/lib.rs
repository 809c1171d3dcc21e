//! The agent on a host: it hands containers without any capability ports of the backend `packet`
//! that the host's rules bind.
//!
//! A program of a container connects to the agent's socket and asks (`docs/agent.md`). The agent
//! looks at the process that asks (`asker`), lets only the container's own addresses out of the
//! host's end of its veth (`containers`), and opens the port in the container's network
//! namespace. It has the connections of programs ended that die (`guard`). It works in the network
//! namespace that it is started in. `docs/design/23-agent.md` has the decisions.

#![forbid(unsafe_code)]

mod asker;
mod called;
mod caller;
mod captures;
mod claims;
mod class;
mod closers;
mod config;
mod containers;
pub mod control;
mod ends;
mod error;
#[doc(hidden)]
pub mod fuzzing;
mod guard;
mod holders;
mod hook;
#[doc(hidden)]
pub mod host;
mod http;
mod journal;
mod limits;
mod links;
mod listener;
mod log;
mod metrics;
mod offline;
mod pages;
mod quota;
mod rate;
mod ready;
mod rights;
mod server;
mod state;
mod steps;
mod tally;
mod waits;

pub use class::{Class, Handed, Uplink};
pub use config::{Config, OtherWaysOut, SelfAdministered};
pub use control::{release, status};
pub use error::AgentError;
pub use hook::hook;
pub use log::LogLevel;
pub use quota::{RdmaExceeded, RdmaMax};
pub use rate::Rate;
pub use server::run;
pub use steps::STEPS;
