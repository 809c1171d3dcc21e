//! Randomness.

use crate::model::error::VerbsError;

/// Four random bytes that a peer cannot guess.
pub fn random() -> Result<u32, VerbsError> {
    getrandom::u32().map_err(|error| VerbsError::Io(std::io::Error::other(error)))
}
