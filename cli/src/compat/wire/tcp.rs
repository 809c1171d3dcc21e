//! TCP streams: connecting, writing, and noticing the end of a peer, all within time limits.

use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv, sockopt};

/// Connects to one of `addresses`, which are tried in turn until one answers or `patience` is over.
/// `patience` is for all of them: a silent address gets an equal share of what is left of it, so
/// that it does not keep the others from their turn.
///
/// # Errors
/// The last address that was tried, and why it failed; `None` if there is no address.
pub(super) fn reach(
    addresses: &[SocketAddr],
    patience: Duration,
) -> Result<(TcpStream, SocketAddr), Option<(SocketAddr, std::io::Error)>> {
    const PAUSE: Duration = Duration::from_millis(50);
    let deadline = Instant::now() + patience;
    loop {
        let mut last = None;
        for (address, untried) in addresses.iter().zip((1..=addresses.len() as u32).rev()) {
            let left = deadline.saturating_duration_since(Instant::now());
            // Each is tried, if only for a moment: the limit must not be zero.
            let share = (left / untried).max(Duration::from_millis(1));
            match TcpStream::connect_timeout(address, share) {
                Ok(stream) => return Ok((stream, *address)),
                Err(error) => last = Some((*address, error)),
            }
        }
        if last.is_none() || Instant::now() + PAUSE >= deadline {
            return Err(last);
        }
        std::thread::sleep(PAUSE);
    }
}

/// Writes all of `message`. A peer that reads a little now and then does not prolong the time.
///
/// # Errors
/// [`ErrorKind::WouldBlock`] or [`ErrorKind::TimedOut`] at the deadline; errors of the connection.
pub(super) fn write_until(
    mut stream: &TcpStream,
    mut message: &[u8],
    deadline: Instant,
) -> std::io::Result<()> {
    while !message.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_write_timeout(Some(left))?;
        match stream.write(message) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => message = &message[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Lets the kernel send keepalives to a silent peer, and end the connection after half a minute
/// without an answer. A machine that lost its power closes no connection.
pub(super) fn notice_dead_machines(stream: &TcpStream) -> std::io::Result<()> {
    const PAUSE: Duration = Duration::from_secs(5);
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, 2 * PAUSE)?;
    sockopt::set_tcp_keepintvl(stream, PAUSE)?;
    sockopt::set_tcp_keepcnt(stream, 4)?;
    Ok(())
}

/// Whether there is something to read: `Some(false)` if the peer is gone, `None` if it is there and
/// silent.
pub(super) fn peek(stream: &TcpStream) -> Option<bool> {
    let mut next = [0; 1];
    match recv(stream, &mut next, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((count, _)) => Some(count > 0),
        Err(Errno::WOULDBLOCK | Errno::INTR) => None,
        Err(_) => Some(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// A listener whose queue is full: the kernel drops further requests, as a firewall does.
    fn silent() -> (TcpListener, [TcpStream; 1]) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let first = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (listener, [first])
    }

    /// The time limit is for all addresses together, not for each.
    #[test]
    fn many_silent_addresses_take_no_longer_than_one() {
        const PATIENCE: Duration = Duration::from_secs(1);
        let silent: Vec<_> = [(); 8].map(|()| silent()).into();
        let addresses: Vec<SocketAddr> =
            silent.iter().map(|(listener, _)| listener.local_addr().unwrap()).collect();
        let begin = Instant::now();
        let (address, error) = reach(&addresses, PATIENCE).unwrap_err().unwrap();
        assert!(addresses.contains(&address) && error.kind() == ErrorKind::TimedOut, "{error}");
        assert!(begin.elapsed() < 4 * PATIENCE, "{:?}", begin.elapsed());
    }

    #[test]
    fn an_address_behind_a_silent_one_has_its_turn() {
        let (silent, _full) = silent();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addresses = [&silent, &listener].map(|listener| listener.local_addr().unwrap());
        let (_, address) = reach(&addresses, Duration::from_secs(2)).unwrap();
        assert_eq!(address, addresses[1]);
        assert!(reach(&[], Duration::from_secs(2)).unwrap_err().is_none());
    }
}
