//! The verbs agent carries out the steps of a scenario on a device. For a device of the kernel it
//! runs on the machine with the device, such as the guest, and is reached over TCP. For Rocinante's
//! device it runs in the scenario's own process.

pub(crate) mod host;
pub mod machine;
pub mod proto;
mod remote;
mod verbs;
mod words;

use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};

pub use self::remote::RemoteAgent;
pub use self::verbs::Verbs;
use proto::{Difference, Request};
use rocinante_tests::harness::pattern;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// What a verb answered, or why it failed.
pub type Answer = Result<Value, String>;

/// A device that executes verbs.
pub trait Agent {
    /// Does one step.
    fn ask(&mut self, request: Request) -> Answer;
}

/// Does one step, with an answer of its type. Error: the error of the side.
pub fn call<T: DeserializeOwned>(agent: &mut dyn Agent, request: Request) -> Result<T, String> {
    serde_json::from_value(agent.ask(request)?).map_err(|error| error.to_string())
}

/// The TCP port where agents listen by default.
pub const PORT: u16 = 18_515;

/// Entries of each queue of a queue pair.
const QUEUE_DEPTH: u32 = 64;
/// Entries of the completion queue.
const CQ_DEPTH: u32 = 1024;
/// Scatter-gather elements.
const ELEMENTS: u32 = 4;
/// Bytes of inline data.
const INLINE: u32 = 64;

/// Serves scenarios with the kernel's devices, through the system's libibverbs. Each connection to
/// `address` is one scenario.
///
/// Any client of that address may use the devices, and nothing else of the machine. Error: the
/// address cannot be bound.
pub fn serve(address: &str) -> io::Result<()> {
    let listener = TcpListener::bind(address)?;
    eprintln!("the verbs agent listens on {}; Ctrl-C ends it", listener.local_addr()?);
    for stream in listener.incoming() {
        let stream = stream?;
        std::thread::spawn(move || {
            // The scenario reports errors of its connection.
            let _ = attend(&stream, &mut Verbs::kernel());
        });
    }
    Ok(())
}

fn attend(stream: &TcpStream, agent: &mut impl Agent) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut out = stream;
    for line in BufReader::new(stream).lines() {
        let reply = match serde_json::from_str(&line?) {
            Ok(request) => agent.ask(request),
            Err(error) => Err(format!("not understood: {error}")),
        };
        out.write_all((serde_json::to_string(&reply)? + "\n").as_bytes())?;
    }
    Ok(())
}

/// The difference of `bytes` from a seed's pattern, compared from a given byte of the pattern on;
/// without a seed, from zeros.
fn difference(bytes: &[u8], with: Option<(u64, usize)>) -> Option<Difference> {
    let wanted = match with {
        Some((seed, skip)) => pattern(skip + bytes.len(), seed).split_off(skip),
        None => vec![0; bytes.len()],
    };
    let mut differing = bytes.iter().zip(&wanted).enumerate().filter(|(_, (is, want))| is != want);
    let (first, _) = differing.next()?;
    let mut found = [0; 8];
    found.iter_mut().zip(&bytes[first..]).for_each(|(to, from)| *to = *from);
    Some(Difference { first, count: 1 + differing.count(), found })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_found() {
        let mut bytes = pattern(100, 7);
        assert_eq!(difference(&bytes, Some((7, 0))), None);
        assert_eq!(difference(&bytes[10..], Some((7, 10))), None);
        bytes[30] ^= 1;
        bytes[99] ^= 1;
        let found = difference(&bytes, Some((7, 0))).unwrap();
        assert_eq!((found.first, found.count, &found.found[..]), (30, 2, &bytes[30..38]));
        let found = [1, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(difference(&[0, 0, 1], None), Some(Difference { first: 2, count: 1, found }));
    }
}
