//! One TCP stream with both ends spinning.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{SocketAddrV4, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::figure::REGION;

/// Bytes written or read at once.
const CHUNK: usize = 256 << 10;
const PORT: u16 = 18_516;
const PATIENCE: Duration = Duration::from_secs(10);

/// Sends for `time` from a region of the usual size.
///
/// # Errors
/// Nobody listens.
pub(super) fn send(remote: std::net::Ipv4Addr, time: Duration) -> io::Result<()> {
    let mut stream = TcpStream::connect(SocketAddrV4::new(remote, PORT))?;
    stream.set_nonblocking(true)?;
    let region = vec![0x5a; REGION];
    let end = Instant::now() + time;
    let mut at = 0;
    while Instant::now() < end {
        match stream.write(&region[at..at + CHUNK]) {
            Ok(_) => at = (at + CHUNK) % REGION,
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Where [`receive`] listens.
///
/// # Errors
/// The port is taken.
pub(super) fn listen(local: std::net::Ipv4Addr) -> io::Result<TcpListener> {
    TcpListener::bind(SocketAddrV4::new(local, PORT))
}

/// Receives until the sender is done; 10⁹ bits per second.
///
/// # Errors
/// Nobody connects.
pub(super) fn receive(listener: &TcpListener) -> io::Result<f64> {
    let (mut stream, _) = listener.accept()?;
    stream.set_nonblocking(true)?;
    let mut region = vec![0; REGION];
    let (mut at, mut bytes) = (0, 0);
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        match stream.read(&mut region[at..at + CHUNK]) {
            Ok(0) => break,
            Ok(read) => {
                bytes += read;
                at = (at + CHUNK) % REGION;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => return Err(error),
        }
    }
    Ok(bytes as f64 * 8.0 / start.elapsed().as_secs_f64() / 1e9)
}
