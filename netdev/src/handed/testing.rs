//! An agent for tests: it gives what is asked for, or does something else.

use std::fs::{self, Permissions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
};

use super::{Agent, GiveLimits, Kept, Request, WAIT_MAX, give, receive_request, send_answer};
use crate::fd::wait_readable;
use crate::testns::NetNs;

/// Connections, and what is kept for them.
type Given = Arc<Mutex<Vec<(OwnedFd, Vec<Kept>)>>>;

/// A socket of its own on which a thread answers, until this value is dropped.
pub(crate) struct Server {
    dir: PathBuf,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    /// What an honest agent gave.
    pub(crate) given: Given,
}

impl Server {
    /// Hands each connection to `answer`.
    pub(crate) fn new(mut answer: impl FnMut(OwnedFd) + Send + 'static) -> Self {
        Self::keeping(Arc::default(), move |connection, _| answer(connection))
    }

    fn keeping(given: Given, mut answer: impl FnMut(OwnedFd, &Given) + Send + 'static) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("rocinante-handed-{}-{number}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir(&dir).expect("a directory");
        fs::set_permissions(&dir, Permissions::from_mode(0o755)).expect("ours");
        let path = dir.join("socket");
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let socket = socket.expect("a socket");
        bind(&socket, &SocketAddrUnix::new(&path).expect("a path")).expect("free");
        listen(&socket, 16).expect("bound");
        fs::set_permissions(&path, Permissions::from_mode(0o666)).expect("ours");
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, kept) = (stop.clone(), given.clone());
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                if wait_readable(&socket, 5).expect("poll")
                    && let Ok(connection) = accept_with(&socket, SocketFlags::CLOEXEC)
                {
                    answer(connection, &kept);
                }
            }
        });
        Self { dir, stop, thread: Some(thread), given }
    }

    /// An agent that gives what is asked for in this namespace.
    pub(crate) fn honest(ns: &NetNs) -> Self {
        let ns = NetNs::at(&ns.path()).expect("the same");
        Self::keeping(Arc::default(), move |connection, kept| {
            let Some(request) = request(&connection) else { return };
            let given = ns.run(|| give(&request, &GiveLimits::default()));
            if send_answer(&connection, &given.answer, &given.descriptors()).is_ok() {
                kept.lock().expect("no panic").push((connection, given.kept));
            }
        })
    }

    /// Where it is.
    pub(crate) fn agent(&self) -> Agent {
        Agent::at(self.path())
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.join("socket")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking(), "the agent's thread panicked");
        }
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Waits for a request; answers what is none.
pub(crate) fn request(connection: &OwnedFd) -> Option<Request> {
    wait_readable(connection, WAIT_MAX.as_millis() as i32).expect("poll");
    match receive_request(connection).ok()? {
        Ok(request) => Some(request),
        Err(refused) => {
            let _ = send_answer(connection, &super::Answer::refusal(refused), &[]);
            None
        }
    }
}
