//! The verbs agent: does on a device what a scenario asks, step by step. On the kernel's device it runs inside the guest
//! and is asked over TCP; on Rocinante's it is in the scenario's own process.

mod ffi;
mod kernel;
pub mod proto;
mod remote;
mod soft;

use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};

pub use self::remote::Remote;
pub use self::soft::Soft;
use proto::{Reply, Request};

/// A device that does what it is asked.
pub trait Agent {
    /// Does one step.
    fn ask(&mut self, request: &Request) -> Reply;
}

/// Entries of each queue of a queue pair, and of the shared receive queue.
const QUEUE_DEPTH: u32 = 64;
/// Entries of the completion queue.
const CQ_DEPTH: u32 = 1024;
/// Scatter-gather elements.
const ELEMENTS: u32 = 4;
/// Bytes of inline data.
const INLINE: u32 = 64;

/// Serves scenarios with the devices of the system's libibverbs, each on its own connection to `address`.
///
/// # Errors
/// The address cannot be bound, or there is no libibverbs.
pub fn serve(address: &str) -> io::Result<()> {
    let library = ffi::Library::open().map_err(io::Error::other)?;
    let listener = TcpListener::bind(address)?;
    for stream in listener.incoming() {
        let stream = stream?;
        std::thread::spawn(move || {
            // What goes wrong with a connection is the scenario's to tell.
            let _ = attend(&stream, &mut kernel::Kernel::new(library));
        });
    }
    Ok(())
}

fn attend(stream: &TcpStream, agent: &mut impl Agent) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut out = stream;
    for line in BufReader::new(stream).lines() {
        let reply = match serde_json::from_str(&line?) {
            Ok(request) => agent.ask(&request),
            Err(error) => Reply::Failed(format!("not understood: {error}")),
        };
        out.write_all((serde_json::to_string(&reply)? + "\n").as_bytes())?;
    }
    Ok(())
}

/// `len` bytes that differ with `seed` and do not repeat soon.
#[must_use]
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        // xorshift64*
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        bytes.extend_from_slice(&state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// A checksum that depends on every byte and its place (FNV-1a).
#[must_use]
pub fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
