//! The values of the API, as far as the files use them.

pub mod qp;

/// The errors, as far as the files use them.
pub mod error {
    /// Why a call failed.
    #[derive(Debug)]
    pub enum VerbsError {
        /// The operating system refused.
        Io(std::io::Error),
    }

    impl VerbsError {
        pub(crate) fn errno(&self) -> i32 {
            let Self::Io(why) = self;
            why.raw_os_error().unwrap_or(0)
        }
    }
}

pub mod event {
    /// Something that happened.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum AsyncEvent {
        /// A deadline passed.
        Expired,
        /// The interface is gone.
        DeviceFatal,
    }
}
