//! How a process finds the others on an address: by an abstract name of a Unix socket (unix(7)),
//! which is of a network namespace and ends with the last descriptor.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fs::{
    MemfdFlags, OFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fcntl_getfl, fstat, ftruncate,
    memfd_create,
};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::net::{
    AddressFamily, RecvFlags, ReturnFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with,
    bind, connect, listen, socket_with, sockopt,
};
use rustix::process::geteuid;

use super::closing;
use super::layout::{FILE_BYTES, NOTES_AT};
use super::locks::file_bytes_max;
use super::socket_table::{SocketTable, is_socket, is_stream};
use crate::kernel::descriptors::{self, Peer};
use crate::kernel::inherited;
use crate::kernel::rights;
use crate::tuning::shared::{ANSWER, JOIN_PATIENCE};
use crate::udp::holder;

/// The first bytes of each name. The number is the version of the shared objects.
const NAMES: &str = "rocinante/1/";
/// The descriptors that a process gets when it joins: the listening socket, the two ends
/// of the socket table, the file.
pub(super) const DESCRIPTORS: usize = 4;
pub(super) const SPACE: usize = rustix::cmsg_space!(ScmRights(DESCRIPTORS));
const BACKLOG: i32 = 128;

/// The objects that the processes on an address share.
#[derive(Debug)]
pub(super) struct Objects {
    pub(super) listener: OwnedFd,
    pub(super) sockets: SocketTable,
    pub(super) memory: OwnedFd,
}

/// Why a process cannot share an address.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) error: io::Error,
    pub(super) hint: String,
}

impl From<Errno> for Refused {
    fn from(error: Errno) -> Self {
        Self { error: error.into(), hint: String::new() }
    }
}

impl From<io::Error> for Refused {
    fn from(error: io::Error) -> Self {
        Self { error, hint: String::new() }
    }
}

/// Joins the processes on an address, or is the first. Error: another user has the name; the others
/// do not answer; no descriptors left.
pub(super) fn join(address: &str) -> Result<Objects, Refused> {
    let end = Instant::now() + JOIN_PATIENCE;
    let name = name(address)?;
    loop {
        let mut peer = None;
        let error = match ask(&name, &mut peer) {
            Ok(objects) => return Ok(objects),
            Err(Ask::Nobody) => match found(&name) {
                Ok(objects) => return Ok(objects),
                // Another process is doing the same, or the last of the others is just ending.
                Err(Errno::ADDRINUSE) => Errno::ADDRINUSE,
                Err(Errno::FBIG) => {
                    let hint = "raise the limit of file sizes (`ulimit -f`)".into();
                    return Err(Refused { error: Errno::FBIG.into(), hint });
                }
                Err(error) => return Err(error.into()),
            },
            Err(Ask::Refused(refused)) => return Err(refused),
            Err(Ask::Again(error)) => error,
        };
        if Instant::now() >= end {
            let hint = format!(
                "the processes on this address do not answer ({}): let them go on if they are \
                 stopped, else end them, or use another address",
                holders(&name, peer)
            );
            return Err(Refused { error: error.into(), hint });
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

enum Ask {
    Nobody,
    Again(Errno),
    Refused(Refused),
}

impl From<Errno> for Ask {
    fn from(error: Errno) -> Self {
        match error {
            Errno::CONNREFUSED => Self::Nobody,
            // The last of them has ended meanwhile, or none of them accepts in time.
            Errno::CONNRESET | Errno::PIPE | Errno::AGAIN => Self::Again(error),
            error => Self::Refused(error.into()),
        }
    }
}

/// Asks the processes that are there. `peer` is the first of them, as far as it came to be known.
fn ask(name: &SocketAddrUnix, peer: &mut Option<Peer>) -> Result<Objects, Ask> {
    let connection = seqpacket(SocketFlags::CLOEXEC)?;
    sockopt::set_socket_timeout(&connection, sockopt::Timeout::Recv, Some(ANSWER))?;
    sockopt::set_socket_timeout(&connection, sockopt::Timeout::Send, Some(ANSWER))?;
    connect(&connection, name)?;
    check_user(&connection).map_err(Ask::Refused)?;
    *peer = descriptors::peer(&connection).ok();
    let flags = RecvFlags::empty();
    let (bytes, said, all) = rights::receive::<SPACE>(&connection, &mut [0], flags)?;
    let all: Vec<OwnedFd> = all.into_iter().map(inherited::noted).collect();
    if bytes == 0 && all.is_empty() {
        return Err(Ask::Again(Errno::CONNRESET));
    }
    let wrong = || Ask::Refused(strange(name, *peer));
    if said.contains(ReturnFlags::CTRUNC) && all.len() < DESCRIPTORS {
        let hint = "raise the limit of open files (`ulimit -n`)".into();
        return Err(Ask::Refused(Refused { error: Errno::MFILE.into(), hint }));
    }
    Objects::from_descriptors(all).ok_or_else(wrong)
}

impl Objects {
    /// Those that another process has sent; `None` if they are none of ours.
    pub(super) fn from_descriptors(all: Vec<OwnedFd>) -> Option<Self> {
        let all = <[OwnedFd; DESCRIPTORS]>::try_from(all).ok().filter(are_ours)?;
        let [listener, reader, writer, memory] = all;
        Some(Self { listener, sockets: SocketTable::from_ends([reader, writer]), memory })
    }

    /// What another process is sent.
    pub(super) fn descriptors(&self) -> [BorrowedFd<'_>; DESCRIPTORS] {
        let [reader, writer] = self.sockets.ends();
        [self.listener.as_fd(), reader, writer, self.memory.as_fd()]
    }
}

/// Whether these can be used as the objects of an address without harm: no call of ours waits for
/// another process, and reads find their bytes.
fn are_ours([listener, reader, writer, memory]: &[OwnedFd; DESCRIPTORS]) -> bool {
    let listens = is_socket(listener, AddressFamily::UNIX, SocketType::SEQPACKET)
        && sockopt::socket_acceptconn(listener) == Ok(true)
        && fcntl_getfl(listener).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK));
    // No process can shorten it.
    let seals = fcntl_get_seals(memory).unwrap_or(SealFlags::empty());
    let is_long = fstat(memory).is_ok_and(|file| file.st_size.cast_unsigned() >= NOTES_AT);
    let lasts = seals.contains(SealFlags::SHRINK) && is_long;
    listens && is_stream(reader) && is_stream(writer) && lasts
}

/// The error for an object that is none of ours, or of another version.
fn strange(name: &SocketAddrUnix, peer: Option<Peer>) -> Refused {
    let hint = format!(
        "what the processes on this address share is not as it should be ({}): end them, or use \
         another address, or programs of one release",
        holders(name, peer)
    );
    Refused { error: io::ErrorKind::InvalidData.into(), hint }
}

pub(super) fn strange_at(address: &str) -> Refused {
    name(address).map_or_else(Refused::from, |name| strange(&name, None))
}

/// The processes that have a name, in words: those that are visible, else the one that had it
/// first.
pub(super) fn holders(name: &SocketAddrUnix, peer: Option<Peer>) -> String {
    let text = name.abstract_name().map(String::from_utf8_lossy).unwrap_or_default();
    let visible = holder::of_name(&text);
    match peer {
        _ if !visible.is_empty() => holder::listed(&visible),
        Some(Peer { uid, pid: 0, .. }) => format!("processes of user {uid}, not visible from here"),
        Some(Peer { uid, pid, .. }) => format!("the first was pid {pid} of user {uid}"),
        None => "not visible from here: `ss -xlp` as root names them".to_owned(),
    }
}

/// Makes the objects: this process is the first.
fn found(name: &SocketAddrUnix) -> Result<Objects, Errno> {
    let listener = seqpacket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    bind(&listener, name)?;
    let memory = memfd_create("rocinante", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    // Beyond the limit it would be a signal that ends the program. Notes may have no room.
    let bytes = FILE_BYTES.min(file_bytes_max());
    if bytes < NOTES_AT {
        return Err(Errno::FBIG);
    }
    ftruncate(&memory, bytes)?;
    fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let sockets =
        SocketTable::new().map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::NOMEM))?;
    // The others send nothing there.
    descriptors::refuse_rights(&listener);
    listen(&listener, BACKLOG)?;
    Ok(Objects { listener, sockets, memory: inherited::noted(memory) })
}

/// An error unless the process that made the socket at the other end is of this user.
pub(super) fn check_user(connection: &OwnedFd) -> Result<(), Refused> {
    let Peer { uid, pid, .. } = descriptors::peer(connection)?;
    if is_own_user(uid) {
        return Ok(());
    }
    let first = if pid == 0 { "is not visible".to_owned() } else { format!("was pid {pid}") };
    let hint = format!(
        "it is shared by processes of user {uid}, of which the first {first}: only processes of \
         one user share one. Use the same user, or another address"
    );
    Err(Refused { error: io::Error::from_raw_os_error(libc::EADDRINUSE), hint })
}

/// Whether that is this process's user: the kernel lets no other share a port.
fn is_own_user(uid: u32) -> bool {
    uid == geteuid().as_raw()
}

pub(super) fn name(address: &str) -> Result<SocketAddrUnix, Errno> {
    SocketAddrUnix::new_abstract_name(format!("{NAMES}{address}").as_bytes())
}

/// The address that a name is of, and its interface if it is of the link alone.
pub(super) fn address_of(name: &str) -> Option<(IpAddr, Option<u32>)> {
    match name.split_once('%') {
        Some((address, index)) => Some((address.parse().ok()?, Some(index.parse().ok()?))),
        None => Some((name.parse().ok()?, None)),
    }
}

pub(super) fn seqpacket(flags: SocketFlags) -> Result<OwnedFd, Errno> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).map(inherited::noted)
}

/// Answers one process that waits, once poll(2) has found one. Returns whether there was a
/// descriptor for it.
pub(super) fn welcome(objects: &Objects) -> bool {
    if !closing::has_room() {
        return false;
    }
    // All processes on the address have the same open file description, and any can change it. If
    // another one was faster, a call that waits would wait for the next that joins.
    let _ = ioctl_fionbio(&objects.listener, true);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connection = match accept_with(&objects.listener, flags) {
        Ok(connection) => connection,
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return true,
        Err(_) => return false,
    };
    let peer = descriptors::peer(&connection);
    if peer.is_ok_and(|peer| is_own_user(peer.uid)) {
        // It may have gone.
        let _ = rights::send::<SPACE>(&connection, &[0], &objects.descriptors());
    } else {
        closing::close_elsewhere(connection);
    }
    true
}
