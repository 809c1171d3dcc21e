//! The choice of a backend: the program's, else the environment's, else the best.

use std::ffi::OsStr;

use rocinante_netdev::Backend;

use super::wishes::NETDEV_VARIABLE;
use crate::model::error::VerbsError;

/// The program's choice.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum BackendChoice {
    /// None: the environment may choose.
    #[default]
    Unsaid,
    /// The best backend, with no regard to the environment.
    Auto,
    /// This backend.
    Only(Backend),
}

impl BackendChoice {
    /// The backend to use, or `None` for the best. `variable` is the value of `NETDEV_VARIABLE`.
    /// Error: the variable decides and names no backend.
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
        let settled = |choice: BackendChoice, variable: Option<&str>| {
            choice.settle(variable.map(OsStr::new)).unwrap()
        };
        for (variable, backend) in [
            (None, None),
            (Some(""), None),
            (Some("auto"), None),
            (Some("udp"), Some(Backend::Udp)),
            (Some("afxdp"), Some(Backend::Xdp)),
        ] {
            assert_eq!(settled(BackendChoice::default(), variable), backend);
            assert_eq!(settled(BackendChoice::Auto, variable), None);
            assert_eq!(
                settled(BackendChoice::Only(Backend::Packet), variable),
                Some(Backend::Packet)
            );
        }
    }

    #[test]
    fn a_variable_that_names_nothing_matters_only_if_it_counts() {
        let variable = Some(OsStr::new("pigeon"));
        let error = BackendChoice::Unsaid.settle(variable).unwrap_err().to_string();
        assert!(error.contains(NETDEV_VARIABLE) && error.contains("pigeon"), "{error}");
        assert_eq!(BackendChoice::Auto.settle(variable).unwrap(), None);
    }
}
