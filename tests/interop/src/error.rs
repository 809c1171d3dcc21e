//! Errors around a guest. Their texts say what to do next.

use std::fmt;

/// Why an operation on the guest failed.
#[derive(Debug)]
pub struct Error(String);

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error with this text.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// `doing: cause`.
    #[must_use]
    pub fn because(doing: impl fmt::Display, cause: impl fmt::Display) -> Self {
        Self(format!("{doing}: {cause}"))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

impl From<rocinante_lab::LabError> for Error {
    fn from(error: rocinante_lab::LabError) -> Self {
        Self(error.to_string())
    }
}

impl From<rocinante::VerbsError> for Error {
    fn from(error: rocinante::VerbsError) -> Self {
        Self(error.to_string())
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Self(error.to_string())
    }
}

impl From<serde_json::Error> for Error {
    fn from(error: serde_json::Error) -> Self {
        Self(error.to_string())
    }
}
