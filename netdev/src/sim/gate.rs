//! The descriptor of a simulated port, and the gate that can block a port.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::kernel::descriptors::EventFd;

/// The descriptor of a port: readable between [`signal`](Self::signal) and [`clear`](Self::clear).
pub(super) enum Bell {
    /// Always writable.
    Plain(EventFd),
    /// Writable while the gate is open.
    Gated(SimGate),
}

/// Blocks a port's sending, as a full socket buffer or ring does: see
/// [`SimNet::gated_port`](super::SimNet::gated_port).
///
/// While it is shut, a flush keeps the committed datagrams, the port wants to write, and its
/// descriptor is not writable.
#[derive(Debug, Clone)]
pub struct SimGate(Arc<Gate>);

#[derive(Debug)]
struct Gate {
    shut: AtomicBool,
    /// The port's end of a socket pair; its buffer is full while the gate is shut.
    port: UnixStream,
    far: UnixStream,
}

impl SimGate {
    pub(super) fn new() -> io::Result<Self> {
        let (port, far) = UnixStream::pair()?;
        port.set_nonblocking(true)?;
        far.set_nonblocking(true)?;
        Ok(Self(Arc::new(Gate { shut: AtomicBool::new(false), port, far })))
    }

    /// Closes the gate: from now on a flush sends nothing.
    pub fn shut(&self) {
        self.0.shut.store(true, Ordering::SeqCst);
        while (&self.0.port).write(&[0; 4096]).is_ok() {}
    }

    /// Opens the gate again.
    pub fn open(&self) {
        self.0.shut.store(false, Ordering::SeqCst);
        drain(&self.0.far);
    }
}

impl Bell {
    pub(super) fn signal(&self) {
        match self {
            Self::Plain(event) => event.signal(),
            // The only error is a full buffer: then it is readable already.
            Self::Gated(gate) => _ = (&gate.0.far).write(&[0]),
        }
    }

    pub(super) fn clear(&self) {
        match self {
            Self::Plain(event) => event.clear(),
            Self::Gated(gate) => drain(&gate.0.port),
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Plain(event) => event.as_fd(),
            Self::Gated(gate) => gate.0.port.as_fd(),
        }
    }

    pub(super) fn is_shut(&self) -> bool {
        matches!(self, Self::Gated(gate) if gate.0.shut.load(Ordering::SeqCst))
    }
}

/// Reads everything available.
fn drain(mut socket: &UnixStream) {
    while socket.read(&mut [0; 4096]).is_ok_and(|count| count > 0) {}
}
