//! For the fuzz target `ucma` only: commands to rdma_cm without a C program around them.

use std::ffi::c_int;
use std::sync::Arc;

use crate::devices;
use crate::ucma::{Memory, Outcome, Ucma};

/// A process that has opened `/dev/infiniband/rdma_cm`, with loopback as its one device.
pub struct RdmaCm(Arc<Ucma>);

impl std::fmt::Debug for RdmaCm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.left())
    }
}

/// The numbers of files, ids, groups and ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Left {
    pub files: usize,
    pub ids: usize,
    pub groups: usize,
    pub ports: usize,
}

/// Memory that begins with the same bytes wherever it is read, and takes all answers.
struct Everywhere<'a>(&'a [u8]);

impl Memory for Everywhere<'_> {
    fn check(&self, _: u64, len: usize, writable: bool) -> Outcome<()> {
        if writable || len <= self.0.len() { Ok(()) } else { Err(libc::EFAULT) }
    }

    fn load(&self, _: u64, len: usize) -> Outcome<Vec<u8>> {
        self.0.get(..len).map(<[u8]>::to_vec).ok_or(libc::EFAULT)
    }
}

impl RdmaCm {
    /// Without a device if loopback is not there.
    #[must_use]
    pub fn on_loopback() -> Self {
        Self(Arc::new(Ucma::with_devices(devices::limited(Some("lo")).unwrap_or_default())))
    }

    /// A file's descriptor. Error: an errno.
    pub fn open(&self) -> Result<c_int, c_int> {
        self.0.open()
    }

    /// Closes a file; `false` if there is none with this descriptor.
    pub fn close(&self, fd: c_int) -> bool {
        self.0.close(fd)
    }

    /// Gives a command to a file. The command reads `memory` at every address of the program's
    /// memory. Returns an answer and where in that memory it belongs. Error: an errno.
    pub fn command(&self, fd: c_int, bytes: &[u8], memory: &[u8]) -> Result<(u64, Vec<u8>), c_int> {
        let file = self.0.file(fd).ok_or(libc::EBADF)?;
        let done = self.0.command(&file, bytes, &Everywhere(memory));
        done.map(|answer| (answer.to, answer.bytes))
    }

    /// The objects that are not closed and destroyed.
    #[must_use]
    pub fn left(&self) -> Left {
        let [files, ids, groups, ports] = self.0.counts();
        Left { files, ids, groups, ports }
    }
}
