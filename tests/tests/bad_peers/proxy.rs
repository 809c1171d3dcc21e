//! Between two programs: passes on what they tell each other over TCP, up to a message in whose place the one in the middle does something else.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// How a program's words are cut into messages.
#[derive(Debug, Clone, Copy)]
pub(super) enum Framing {
    /// At the ends of lines.
    Lines,
    /// Into so many bytes each, and then one by one.
    Sizes(&'static [usize]),
}

/// What comes in place of a message.
#[derive(Debug, Clone)]
pub(super) enum Fault {
    /// Nothing, ever, and the connection stays.
    Silence,
    /// The end of the connection.
    Close,
    /// Half of it, and then the end of the connection.
    Half,
    /// A byte of it per second.
    Drip,
    /// As many bytes that no text has.
    Noise,
    /// These bytes, and nothing afterwards.
    Words(Vec<u8>),
    /// What becomes of it, and everything afterwards as it is.
    Edit(fn(&str) -> String),
}

/// Connects `victim`, which is one end, to the other end, and does `fault` in place of message `at` of those to the victim.
pub(super) fn between(
    victim: TcpStream,
    other: TcpStream,
    framing: Framing,
    at: usize,
    fault: &Fault,
) {
    let (mut from_victim, mut to_other) = (victim.try_clone().unwrap(), other.try_clone().unwrap());
    std::thread::spawn(move || {
        // Until one of them goes, as the other shall hear.
        let _ = std::io::copy(&mut from_victim, &mut to_other);
        let _ = to_other.shutdown(Shutdown::Both);
    });
    let mut reader = BufReader::new(other);
    let mut victim = victim;
    for number in 0.. {
        let Some(message) = next(&mut reader, framing, number) else { break };
        let said = if number == at { twisted(&mut victim, &message, fault) } else { Some(message) };
        let Some(said) = said else { break };
        if victim.write_all(&said).is_err() {
            break;
        }
    }
    let _ = victim.shutdown(Shutdown::Both);
}

/// The next message; what is not cut is passed on as it comes.
fn next(reader: &mut BufReader<TcpStream>, framing: Framing, number: usize) -> Option<Vec<u8>> {
    let mut message = Vec::new();
    match framing {
        Framing::Lines => {
            reader.read_until(b'\n', &mut message).ok()?;
        }
        Framing::Sizes(sizes) => {
            message.resize(sizes.get(number).copied().unwrap_or(1), 0);
            reader.read_exact(&mut message).ok()?;
        }
    }
    (!message.is_empty()).then_some(message)
}

/// What to pass on in place of `message`, if anything.
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
            let text = String::from_utf8(message.to_vec()).expect("what is edited is text");
            let edited = edit(&text);
            assert_ne!(edited, text, "nothing was changed");
            Some(edited.into_bytes())
        }
    }
}

/// Waits until whoever is at the other end has closed. The thread that reads its words sees that, too, so this only looks whether it can be written to.
fn until_gone(victim: &TcpStream) -> Option<Vec<u8>> {
    let mut next = [0; 1];
    while !matches!(victim.peek(&mut next), Ok(0) | Err(_)) {
        std::thread::sleep(Duration::from_millis(20));
    }
    None
}

/// A connection to whoever listens on `address`.
pub(super) fn reach(address: SocketAddr) -> TcpStream {
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    loop {
        match TcpStream::connect(address) {
            Ok(stream) => return stream,
            Err(error) => assert!(std::time::Instant::now() < deadline, "{address}: {error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The first who comes.
pub(super) fn accept(listener: &TcpListener) -> TcpStream {
    let (stream, _) = listener.accept().unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}
