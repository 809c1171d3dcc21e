//! The sockets that programs connect to. Each has a path of its own: it is not another agent's, it
//! comes back when it vanishes, and it goes with the agent.

use std::fs::{self, Permissions};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::inotify;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    socket_with,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::closers::{Closers, Foreign};
use crate::journal::Seldom;
use crate::limits::Share;
use crate::ready::readable;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 256;
/// How long to leave connections alone that cannot be accepted, for want of descriptors.
const REST: Duration = Duration::from_millis(100);
/// How long to leave a path alone at which no socket can be made.
const PATH_REST: Duration = Duration::from_secs(1);
/// Changes in a directory that may take a socket's name away, and those of the directory itself.
const CHANGES: inotify::WatchFlags = inotify::WatchFlags::MOVE
    .union(inotify::WatchFlags::DELETE)
    .union(inotify::WatchFlags::DELETE_SELF)
    .union(inotify::WatchFlags::MOVE_SELF);

/// A listening socket at its path.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: OwnedFd,
    place: Place,
    kind: Kind,
}

/// How a socket is made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kind {
    /// The mode of the file: a user that may write may connect.
    pub(crate) mode: u32,
    /// Sets the options of the socket, and of each that comes later in its place.
    pub(crate) prepare: fn(&OwnedFd),
}

impl Kind {
    /// Each program may connect. Its identity decides the answer.
    pub(crate) const PUBLIC: Self = Self { mode: 0o666, prepare: |_| {} };
    /// Only the agent's own user may, and root.
    pub(crate) const PRIVATE: Self = Self { mode: 0o600, ..Self::PUBLIC };
}

/// A path, as long as it leads to the socket: dropped, it takes the file away.
#[derive(Debug)]
struct Place {
    path: PathBuf,
    /// Device and inode.
    file: (u64, u64),
    /// Readable after changes in the directory, where the kernel reports them.
    changes: Option<OwnedFd>,
}

impl Listener {
    /// Listens at `path`, in the place of a socket that an earlier agent left. Error: another
    /// process listens there, or the file there is no socket; or the kernel's.
    pub(crate) fn at(path: &Path, kind: Kind) -> io::Result<Self> {
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory)?;
        }
        let exists = |what: &str| Err(io::Error::new(io::ErrorKind::AddrInUse, what));
        match fs::symlink_metadata(path) {
            Ok(file) if !file.file_type().is_socket() => return exists("the file is no socket"),
            Ok(_) if is_served(path)? => return exists("another agent listens there"),
            _ => {}
        }
        let socket = unix_socket()?;
        // Under another name until it can be connected to.
        let fresh = path.with_extension("new");
        match fs::remove_file(&fresh) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        bind(&socket, &SocketAddrUnix::new(&fresh)?)?;
        fs::set_permissions(&fresh, Permissions::from_mode(kind.mode))?;
        let file = file_at(&fresh)?;
        listen(&socket, BACKLOG)?;
        (kind.prepare)(&socket);
        fs::rename(&fresh, path)?;
        let changes = changes_beside(path).ok();
        Ok(Self { socket, place: Place { path: path.to_owned(), file, changes }, kind })
    }
}

impl Place {
    /// Waits until the path leads to it no more.
    async fn vanishes(&self) {
        let changes = self.changes.as_ref().and_then(|it| readable(it.as_fd()).ok());
        let Some(changes) = changes else { return std::future::pending().await };
        while file_at(&self.path).is_ok_and(|file| file == self.file) {
            let Ok(mut ready) = changes.readable().await else { return };
            let mut events = [0; 4096];
            if rustix::io::read(changes.get_ref(), &mut events).is_err() {
                ready.clear_ready();
            }
        }
    }
}

/// A descriptor that is readable after changes in a path's directory.
fn changes_beside(path: &Path) -> io::Result<OwnedFd> {
    let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
    let changes = inotify::init(flags)?;
    inotify::add_watch(&changes, path.parent().unwrap_or(Path::new("/")), CHANGES)?;
    Ok(changes)
}

impl Drop for Place {
    fn drop(&mut self) {
        if file_at(&self.path).is_ok_and(|file| file == self.file) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn unix_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// Device and inode of the file at a path.
fn file_at(path: &Path) -> io::Result<(u64, u64)> {
    let file = fs::symlink_metadata(path)?;
    Ok((file.dev(), file.ino()))
}

/// Removes a socket that a killed agent left.
pub(crate) fn remove_left(path: &Path) {
    let is_socket = fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
    if is_socket && matches!(is_served(path), Ok(false)) {
        let _ = fs::remove_file(path);
    }
}

/// Whether a process listens at a path.
fn is_served(path: &Path) -> io::Result<bool> {
    match connect(&unix_socket()?, &SocketAddrUnix::new(path)?) {
        Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => Ok(true),
        Err(Errno::CONNREFUSED | Errno::NOENT) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Has each connection served by a task of its own, for ever.
pub(crate) async fn accept_all<S>(
    mut listener: Listener,
    closers: &Arc<Closers>,
    serve: impl Fn(Foreign<OwnedFd>) -> S,
) where
    S: Future<Output = ()> + Send + 'static,
{
    let mut vanished = Seldom::default();
    loop {
        let Listener { socket, place, kind } = listener;
        // Connections that were not accepted are closed with it.
        let listening = readable(Foreign::new(socket, Share::Stranger, closers));
        match &listening {
            Ok(listening) => tokio::select! {
                () = accept_here(listening, closers, &serve) => {}
                () = place.vanishes() => if vanished.permits(Instant::now()) {
                    tracing::warn!(path = %place.path.display(), "the socket vanished");
                }
            },
            Err(error) => tracing::error!("cannot wait for connections: {error}"),
        }
        let mut last = String::new();
        listener = loop {
            match Listener::at(&place.path, kind) {
                Ok(listener) => break listener,
                Err(error) if error.to_string() == last => {}
                Err(error) => {
                    last = error.to_string();
                    tracing::error!(path = %place.path.display(), "no socket: {error}");
                }
            }
            tokio::time::sleep(PATH_REST).await;
        };
    }
}

async fn accept_here<S>(
    listener: &AsyncFd<Foreign<OwnedFd>>,
    closers: &Arc<Closers>,
    serve: &impl Fn(Foreign<OwnedFd>) -> S,
) where
    S: Future<Output = ()> + Send + 'static,
{
    let mut failed = Seldom::default();
    loop {
        match accepted(listener).await {
            Ok(connection) => {
                tokio::spawn(serve(Foreign::new(connection, Share::Stranger, closers)));
            }
            Err(error) => {
                if failed.permits(Instant::now()) {
                    tracing::error!("cannot accept connections: {error}");
                }
                tokio::time::sleep(REST).await;
            }
        }
    }
}

async fn accepted(listener: &AsyncFd<Foreign<OwnedFd>>) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    loop {
        let accept = |listener: &Foreign<OwnedFd>| Ok(accept_with(listener, flags)?);
        match listener.async_io(Interest::READABLE, accept).await {
            // It went before it was accepted.
            Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => {}
            accepted => return accepted,
        }
    }
}
