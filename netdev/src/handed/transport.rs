//! One message in one packet of a `SOCK_SEQPACKET` socket, and the descriptors with it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, ReturnFlags, SocketAddrUnix, SocketFlags, SocketType, connect,
    socket_with,
};
use serde::de::DeserializeOwned;

use super::message::{Answer, Code, DESCRIPTORS_MAX, MESSAGE_BYTES_MAX, Refused, Request};
use crate::kernel::rights;
use crate::tuning::handed::WAIT_MAX;

/// Room for one descriptor more than an answer has, so that one too many is seen.
const SPACE: usize = rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX + 1));

/// A connection to the socket at this path. Error: the kernel's: `WouldBlock` if it is not taken in
/// time.
pub(crate) fn connected(path: &Path) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let connection = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    // A full queue of connections is waited for as long.
    set_socket_timeout(&connection, Timeout::Send, Some(WAIT_MAX))?;
    connect(&connection, &address)?;
    Ok(connection)
}

/// Receives a message of at most `MAX` bytes of JSON, without waiting. One with descriptors stays
/// where it is: the kernel would close them here, which may take any time. Error: `WouldBlock` if
/// there is none yet; `UnexpectedEof` if there will be none; `InvalidData` if it is none; the
/// kernel's.
pub(super) fn message<T: DeserializeOwned, const MAX: usize>(from: impl AsFd) -> io::Result<T> {
    let peek = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    let (_, flags, _) = rights::receive::<0>(&from, &mut [], peek)?;
    if flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = [0; MAX];
    let (count, flags, _) = rights::receive::<0>(from, &mut bytes, RecvFlags::DONTWAIT)?;
    match count {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ if flags.contains(ReturnFlags::TRUNC) => Err(io::ErrorKind::InvalidData.into()),
        _ => Ok(serde_json::from_slice(&bytes[..count])?),
    }
}

/// Sends a request, without waiting. Error: the kernel's; or the request is none.
pub fn send_request(to: impl AsFd, request: &Request) -> io::Result<()> {
    let bytes = request.encode().map_err(io::Error::other)?;
    send(to.as_fd(), &bytes, &[])
}

/// Receives a request, without waiting. A message with descriptors is none, and stays where it is:
/// the kernel would close them here, which may take any time. Error: the inner one is what to
/// answer. The outer one is the kernel's: `WouldBlock` if there is no message yet, `UnexpectedEof`
/// if there will be none.
pub fn receive_request(from: impl AsFd) -> io::Result<Result<Request, Refused>> {
    let refused = |what: &str| Ok(Err(Refused::new(Code::Malformed, what, "")));
    // Without room for descriptors the kernel installs none.
    let peek = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    let (_, flags, _) = rights::receive::<0>(&from, &mut [], peek)?;
    if flags.contains(ReturnFlags::CTRUNC) {
        return refused("a request has no descriptors");
    }
    let (bytes, flags, _) = receive::<0>(from.as_fd())?;
    if flags.contains(ReturnFlags::TRUNC) {
        return refused("the request is too long");
    }
    Ok(Request::decode(&bytes))
}

/// Sends an answer with its descriptors, without waiting. Error: the kernel's: the program has
/// gone, or does not read.
pub fn send_answer(
    to: impl AsFd,
    answer: &Answer,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    if descriptors.len() > DESCRIPTORS_MAX {
        return Err(io::Error::other("more descriptors than an answer can have"));
    }
    send(to.as_fd(), &answer.encode(), descriptors)
}

/// Receives an answer with its descriptors, without waiting. Error: as [`receive_request`]; the
/// inner one says why there is no answer.
pub fn receive_answer(from: impl AsFd) -> io::Result<Result<(Answer, Vec<OwnedFd>), String>> {
    let (bytes, flags, descriptors) = receive::<SPACE>(from.as_fd())?;
    if flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Ok(Err(
            "an answer that is too long, or more descriptors than there is room for".into()
        ));
    }
    Ok(Answer::decode(&bytes).map(|answer| (answer, descriptors)))
}

fn send(to: BorrowedFd<'_>, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    rights::send::<SPACE>(to, bytes, descriptors)
}

fn receive<const SPACE: usize>(
    from: BorrowedFd<'_>,
) -> io::Result<(Vec<u8>, ReturnFlags, Vec<OwnedFd>)> {
    let mut bytes = vec![0; MESSAGE_BYTES_MAX];
    let (count, flags, descriptors) =
        rights::receive::<SPACE>(from, &mut bytes, RecvFlags::DONTWAIT)?;
    if count == 0 && !flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    bytes.truncate(count);
    Ok((bytes, flags, descriptors))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Sends any bytes with any number of descriptors.
    pub(crate) fn send_with(to: impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
        const MOST: usize = rustix::cmsg_space!(ScmRights(253));
        rights::send::<MOST>(to, bytes, descriptors).expect("sent");
    }
}
