//! What is wished for as a backend: by the program, else by the environment, else nothing.

use std::ffi::OsStr;

use rocinante_netdev::Backend;

use crate::error::VerbsError;
use crate::open::NETDEV_VARIABLE;

/// What the program says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Wish {
    /// Nothing: the environment may say something.
    #[default]
    Unsaid,
    /// The best, whatever the environment says.
    Auto,
    /// This one.
    Only(Backend),
}

impl Wish {
    /// The backend that it shall be, or `None` for the best, where `variable` is what [`NETDEV_VARIABLE`] says.
    ///
    /// # Errors
    /// The variable counts, and names no backend.
    pub(crate) fn settle(self, variable: Option<&OsStr>) -> Result<Option<Backend>, VerbsError> {
        match self {
            Self::Only(backend) => Ok(Some(backend)),
            Self::Auto => Ok(None),
            Self::Unsaid => match variable.map(OsStr::to_string_lossy).as_deref() {
                None | Some("" | "auto") => Ok(None),
                Some(name) => name.parse().map(Some).map_err(|why| {
                    VerbsError::Invalid(format!("{NETDEV_VARIABLE}: {why}, or auto"))
                }),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_has_the_last_word() {
        let settled =
            |wish: Wish, variable: Option<&str>| wish.settle(variable.map(OsStr::new)).unwrap();
        for (variable, heard) in [
            (None, None),
            (Some(""), None),
            (Some("auto"), None),
            (Some("udp"), Some(Backend::Udp)),
            (Some("afxdp"), Some(Backend::Xdp)),
        ] {
            assert_eq!(settled(Wish::default(), variable), heard);
            assert_eq!(settled(Wish::Auto, variable), None);
            assert_eq!(settled(Wish::Only(Backend::Packet), variable), Some(Backend::Packet));
        }
    }

    #[test]
    fn a_variable_that_names_nothing_matters_only_if_it_counts() {
        let variable = Some(OsStr::new("pigeon"));
        let error = Wish::Unsaid.settle(variable).unwrap_err().to_string();
        assert!(error.contains(NETDEV_VARIABLE) && error.contains("pigeon"), "{error}");
        assert_eq!(Wish::Auto.settle(variable).unwrap(), None);
    }
}
