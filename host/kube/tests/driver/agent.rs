//! An agent at its control socket, as `docs/agent.md` describes it.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with,
    bind, listen, recv, send, socket_with,
};
use serde_json::{Value, json};

#[derive(Default)]
struct State {
    uplinks: Mutex<Value>,
    /// It accepts connections, and answers nothing.
    hangs: AtomicBool,
    /// Its answers are no replies.
    raves: AtomicBool,
    is_over: AtomicBool,
    /// Questions that cost a look at each container, and those that do not.
    statuses: AtomicUsize,
    probes: AtomicUsize,
}

/// An agent. It ends with this value, and leaves its socket as one does that is killed.
pub(crate) struct Agent {
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

impl Agent {
    /// With uplinks of these rates, in Gbit/s.
    pub(crate) fn start(path: &Path, rates: &[u64]) -> Self {
        let _ = std::fs::remove_file(path);
        let state = Arc::<State>::default();
        let mut this = Self { state: Arc::clone(&state), thread: None };
        this.has_uplinks(rates);
        let flags = SocketFlags::CLOEXEC;
        let listener =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
        listen(&listener, 16).unwrap();
        this.thread = Some(std::thread::spawn(move || serve(&listener, &state)));
        this
    }

    pub(crate) fn has_uplinks(&self, rates: &[u64]) {
        let uplink = |rate: &u64| json!({"interface": "ens1", "rate": rate * 1_000_000_000});
        *self.state.uplinks.lock() = rates.iter().map(uplink).collect();
    }

    pub(crate) fn hangs(&self, hangs: bool) {
        self.state.hangs.store(hangs, Ordering::Relaxed);
    }

    pub(crate) fn raves(&self, raves: bool) {
        self.state.raves.store(raves, Ordering::Relaxed);
    }

    /// Questions: those that cost a look at each container, and the others.
    pub(crate) fn asked(&self) -> (usize, usize) {
        let of = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        (of(&self.state.statuses), of(&self.state.probes))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.state.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

fn is_readable(fd: &OwnedFd, within: Duration) -> bool {
    let within = Timespec::try_from(within).unwrap();
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    poll(&mut fds, Some(&within)).is_ok_and(|ready| ready > 0)
}

fn serve(listener: &OwnedFd, state: &State) {
    let mut kept = Vec::new();
    while !state.is_over.load(Ordering::Relaxed) {
        if !is_readable(listener, Duration::from_millis(5)) {
            continue;
        }
        let client = accept_with(listener, SocketFlags::CLOEXEC).unwrap();
        if state.hangs.load(Ordering::Relaxed) {
            kept.push(client);
            continue;
        }
        kept.clear();
        if is_readable(&client, Duration::from_secs(2)) {
            answer(&client, state);
        }
    }
}

fn answer(client: &OwnedFd, state: &State) {
    let mut bytes = vec![0; 16 << 10];
    let length = recv(client, &mut bytes[..], RecvFlags::empty()).map_or(0, |(length, _)| length);
    let Ok(request) = serde_json::from_slice::<Value>(&bytes[..length]) else { return };
    assert_eq!((&request["version"], &request["command"]), (&json!(1), &json!("status")));
    let lines = if state.raves.load(Ordering::Relaxed) {
        vec![json!("raving").to_string()[1..].to_owned()]
    } else if let Some(name) = request["name"].as_str() {
        state.probes.fetch_add(1, Ordering::Relaxed);
        let reason = format!("no container is called {name:?}");
        vec![json!({"refused": {"reason": reason}}).to_string(), json!({"done": {}}).to_string()]
    } else {
        state.statuses.fetch_add(1, Ordering::Relaxed);
        let agent = json!({
            "version": "0.1.0", "uptime_s": 7, "containers": 0, "ports": 0, "bytes": 0,
            "uplinks": *state.uplinks.lock(),
        });
        vec![json!({"agent": agent}).to_string(), json!({"done": {}}).to_string()]
    };
    for line in lines {
        // The client may have gone.
        let _ = send(client, format!("{line}\n").as_bytes(), SendFlags::NOSIGNAL);
    }
}

/// The path of an agent's socket in a folder of a test.
pub(crate) fn socket(folder: &crate::folder::Folder) -> PathBuf {
    folder.at("control.sock")
}
