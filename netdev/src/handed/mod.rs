//! A port that another process opened.
//!
//! A program without a right gets the parts of its ports from an *agent*, a process with rights in
//! the same or another container. The program connects to the agent's socket, sends one
//! [`Request`], and gets one [`Answer`] with descriptors: `docs/agent.md` describes the messages.
//!
//! - The agent's side: [`receive_request`], then [`give`](crate::give) on a thread in the program's
//!   network namespace, then [`send_answer`]. It keeps each [`Kept`](crate::Kept) as long as
//!   the program may use the port.
//! - The program's side: an [`Agent`] is where to ask; [`auto`](crate::choose::auto) asks it.
//!
//! Input from a program is hostile. An agent is trusted as the kernel is, and yet all its answers
//! are compared with the descriptors.

mod agent;
pub mod capture;
pub mod guard;
mod message;
pub mod page;
mod transport;

pub use crate::tuning::handed::{WAIT_MAX, XDP_WAIT_MAX};

pub use self::agent::{AGENT_VARIABLE, Agent, DEFAULT_PATH};
pub(crate) use self::agent::{Handed, unusable};
pub use self::message::{
    ADDRESSES_MAX, Answer, Code, DESCRIPTORS_MAX, Granted, MESSAGE_BYTES_MAX, Refused, Report,
    ReportedRule, Request, Ring, SHARDS_MAX, VERSION,
};
pub(crate) use self::transport::connected;
pub use self::transport::{receive_answer, receive_request, send_answer, send_request};
pub use crate::tuning::handed::RING_FRAMES;

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
