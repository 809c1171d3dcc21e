//! A proxy between two programs. It forwards their words over TCP, up to one message; there it does
//! something else.

use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use rocinante_tests::running::retried;

/// The replacement of a message.
#[derive(Debug, Clone)]
pub(super) enum Fault {
    /// Nothing, ever; the connection stays open.
    Silence,
    /// The end of the connection.
    Close,
    /// Half of the message, and then the end of the connection.
    Half,
    /// The message, one byte per second.
    Drip,
    /// The same number of bytes that occur in no text.
    Noise,
    /// These bytes, and nothing afterwards.
    Words(Vec<u8>),
    /// The edited message; later messages are unchanged.
    Edit(fn(&str) -> String),
}

/// Connects `victim`, which is one end, to the other end. Does `fault` in place of message number
/// `at` to the victim.
pub(super) fn between(victim: TcpStream, other: TcpStream, at: usize, fault: &Fault) {
    let (mut from_victim, mut to_other) = (victim.try_clone().unwrap(), other.try_clone().unwrap());
    std::thread::spawn(move || {
        // Until one end closes; the other end must learn of it.
        let _ = std::io::copy(&mut from_victim, &mut to_other);
        let _ = to_other.shutdown(Shutdown::Both);
    });
    let mut reader = BufReader::new(other);
    let mut victim = victim;
    for number in 0.. {
        let Some(message) = next(&mut reader) else { break };
        let said = if number == at { twisted(&mut victim, &message, fault) } else { Some(message) };
        let Some(said) = said else { break };
        if victim.write_all(&said).is_err() {
            break;
        }
    }
    let _ = victim.shutdown(Shutdown::Both);
}

/// The next message, which is a line.
fn next(reader: &mut BufReader<TcpStream>) -> Option<Vec<u8>> {
    let mut message = Vec::new();
    reader.read_until(b'\n', &mut message).ok()?;
    (!message.is_empty()).then_some(message)
}

/// What to forward in place of `message`, if anything.
fn twisted(victim: &mut TcpStream, message: &[u8], fault: &Fault) -> Option<Vec<u8>> {
    match fault {
        Fault::Silence => until_gone(victim),
        Fault::Close => None,
        Fault::Half => {
            let _ = victim.write_all(&message[..message.len() / 2]);
            None
        }
        Fault::Drip => {
            for byte in message.chunks(1) {
                victim.write_all(byte).ok()?;
                std::thread::sleep(Duration::from_secs(1));
            }
            until_gone(victim)
        }
        Fault::Noise => {
            let mut noise = vec![0xfb; message.len()];
            if message.ends_with(b"\n") {
                noise[message.len() - 1] = b'\n';
            }
            let _ = victim.write_all(&noise);
            until_gone(victim)
        }
        Fault::Words(words) => {
            let _ = victim.write_all(words);
            until_gone(victim)
        }
        Fault::Edit(edit) => {
            let text = String::from_utf8(message.to_vec()).expect("an edited message is text");
            let edited = edit(&text);
            assert_ne!(edited, text, "nothing was changed");
            Some(edited.into_bytes())
        }
    }
}

/// Waits until the peer has closed. Another thread reads the peer's words and sees the end, too, so
/// this one only peeks.
fn until_gone(victim: &TcpStream) -> Option<Vec<u8>> {
    let mut next = [0; 1];
    while !matches!(victim.peek(&mut next), Ok(0) | Err(_)) {
        std::thread::sleep(Duration::from_millis(20));
    }
    None
}

/// A connection to the listener at `address`; waits until there is one.
pub(super) fn reach(address: SocketAddr) -> TcpStream {
    retried(|| TcpStream::connect(address).map_err(|error| format!("{address}: {error}")))
}

/// The first connection to the listener.
pub(super) fn accept(listener: &TcpListener) -> TcpStream {
    let (stream, _) = listener.accept().unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}
