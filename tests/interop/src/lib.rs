//! Real peers for Rocinante: a virtual machine with Linux Soft-RoCE, and the matrix of all that we
//! do with it.
#![warn(missing_docs)]

pub mod agent;
pub mod card;
mod error;
pub mod guest;
pub mod hardware;
pub mod links;
pub mod matrix;
pub mod policy;
pub mod side_by_side;
pub mod vrf;

pub use error::{Error, Result};
