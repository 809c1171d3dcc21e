//! The errors of the lab. Their texts say what to do next.

use std::fmt;
use std::io;

/// The result of a step of the lab.
pub type Result<T = (), E = LabError> = std::result::Result<T, E>;

/// The reason why the lab could not do something.
#[derive(Debug)]
pub enum LabError {
    /// A namespace could not be made or entered.
    Namespace {
        /// The attempted operation.
        doing: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// A program is not installed.
    Missing {
        /// The program.
        program: String,
    },
    /// A program is installed, but could not be started.
    Spawn {
        /// The program.
        program: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// A program failed.
    Failed {
        /// The command line.
        command: String,
        /// Its standard error.
        stderr: String,
    },
    /// A program's output has an unknown form.
    Output {
        /// The command line.
        command: String,
        /// The part that was missing in it.
        problem: String,
    },
    /// Links did not come up in time.
    NotUp {
        /// The links, as text.
        links: Vec<String>,
    },
    /// A child process did not end in time and was killed.
    Timeout {
        /// The command line.
        command: String,
        /// Its time limit, in seconds.
        seconds: f64,
    },
}

impl LabError {
    /// The Debian package that has `program`.
    fn package(program: &str) -> &str {
        match program {
            "ip" | "tc" | "ss" | "bridge" => "iproute2",
            "nft" => "nftables",
            other => other,
        }
    }
}

impl fmt::Display for LabError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Namespace { doing, source } => {
                write!(f, "{doing}: {source}")?;
                match source.raw_os_error() {
                    Some(libc::EPERM | libc::EACCES) => f.write_str(
                        ": needs root, or unprivileged user namespaces \
                         (sysctl kernel.unprivileged_userns_clone=1, \
                         kernel.apparmor_restrict_unprivileged_userns=0); \
                         in a container: --cap-add SYS_ADMIN --cap-add NET_ADMIN",
                    ),
                    Some(libc::ENOSPC) => f.write_str(
                        ": the limit of namespaces is reached \
                         (sysctl user.max_user_namespaces, user.max_net_namespaces)",
                    ),
                    _ => Ok(()),
                }
            }
            Self::Missing { program } => {
                write!(f, "{program} is not installed: apt install {}", Self::package(program))
            }
            Self::Spawn { program, source } => write!(f, "cannot start {program}: {source}"),
            Self::Failed { command, stderr } => {
                write!(f, "{command:?} failed: {}", stderr.trim())
            }
            Self::Output { command, problem } => {
                write!(f, "output of {command:?} not understood: {problem}")
            }
            Self::NotUp { links } => write!(f, "links did not come up: {}", links.join(", ")),
            Self::Timeout { command, seconds } => {
                write!(f, "{command:?} did not end within {seconds} s and was killed")
            }
        }
    }
}

/// Its own text has the system's answer, so it has no source.
impl std::error::Error for LabError {}

impl From<LabError> for io::Error {
    fn from(error: LabError) -> Self {
        let kind = match &error {
            LabError::Namespace { source, .. } | LabError::Spawn { source, .. } => source.kind(),
            LabError::Missing { .. } => io::ErrorKind::NotFound,
            LabError::NotUp { .. } | LabError::Timeout { .. } => io::ErrorKind::TimedOut,
            LabError::Failed { .. } | LabError::Output { .. } => io::ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_to_do() {
        let missing = LabError::Missing { program: "tc".into() };
        assert_eq!(missing.to_string(), "tc is not installed: apt install iproute2");
        let denied = LabError::Namespace {
            doing: "make a network namespace",
            source: io::Error::from_raw_os_error(libc::EPERM),
        };
        assert!(denied.to_string().contains("--cap-add SYS_ADMIN"));
    }
}
