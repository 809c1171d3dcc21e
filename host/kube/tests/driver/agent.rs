//! An agent at its control socket, as `docs/agent.md` describes it, with members that a later one
//! may have.

use std::collections::BTreeMap;
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
    /// By their UIDs.
    claims: Mutex<BTreeMap<String, Value>>,
    /// Why it takes no claim.
    refuses: Mutex<Option<String>>,
    refused: AtomicUsize,
    /// The container of each pod, by its UID.
    pods: Mutex<BTreeMap<String, Value>>,
    /// As one of before claims and `watch`.
    is_old: AtomicBool,
    /// Drivers that began to watch.
    asked: AtomicUsize,
    /// Whether the drivers have yet to receive a change.
    news: AtomicBool,
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
        self.tells();
    }

    fn tells(&self) {
        self.state.news.store(true, Ordering::Relaxed);
    }

    /// With these claims, as one that has the state of an earlier one.
    pub(crate) fn has_claims(&self, claims: BTreeMap<String, Value>) {
        *self.state.claims.lock() = claims;
    }

    pub(crate) fn claims(&self) -> BTreeMap<String, Value> {
        self.state.claims.lock().clone()
    }

    pub(crate) fn refuses(&self, why: Option<&str>) {
        *self.state.refuses.lock() = why.map(str::to_owned);
    }

    /// How many claims it refused.
    pub(crate) fn refused(&self) -> usize {
        self.state.refused.load(Ordering::Relaxed)
    }

    pub(crate) fn is_old(&self) {
        self.state.is_old.store(true, Ordering::Relaxed);
    }

    /// A container of a pod is introduced.
    pub(crate) fn has_pod(&self, uid: &str, mac: &str, address: &str) {
        let network = json!({"pod": uid, "mac": mac, "addresses": [address]});
        self.state.pods.lock().insert(uid.to_owned(), network);
        self.tells();
    }

    /// The interface of a pod goes.
    pub(crate) fn lacks_pod(&self, uid: &str) {
        self.state.pods.lock().remove(uid);
        self.tells();
    }

    /// The uplinks, each with a rate in Gbit/s and perhaps a fault.
    pub(crate) fn has(&self, uplinks: &[(&str, u64, Option<&str>)]) {
        let uplink = |(interface, rate, fault): &(&str, u64, Option<&str>)| {
            let mut uplink = json!({"interface": interface, "rate": rate * 1_000_000_000});
            if let Some(fault) = fault {
                uplink["fault"] = json!(fault);
            }
            uplink
        };
        *self.state.uplinks.lock() = uplinks.iter().map(uplink).collect();
        self.tells();
    }

    pub(crate) fn hangs(&self, hangs: bool) {
        self.state.hangs.store(hangs, Ordering::Relaxed);
    }

    pub(crate) fn raves(&self, raves: bool) {
        self.state.raves.store(raves, Ordering::Relaxed);
    }

    /// How often a driver began to watch.
    pub(crate) fn asked(&self) -> usize {
        self.state.asked.load(Ordering::Relaxed)
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
    let (mut kept, mut watching) = (Vec::new(), Vec::new());
    while !state.is_over.load(Ordering::Relaxed) {
        if state.news.swap(false, Ordering::Relaxed) {
            watching.retain(|client| sent(client, &status(state)));
        }
        if !is_readable(listener, Duration::from_millis(5)) {
            continue;
        }
        let client = accept_with(listener, SocketFlags::CLOEXEC).unwrap();
        if state.hangs.load(Ordering::Relaxed) {
            kept.push(client);
            continue;
        }
        kept.clear();
        if is_readable(&client, Duration::from_secs(2)) && answer(&client, state) {
            watching.retain(|client| !is_readable(client, Duration::ZERO));
            watching.push(client);
        }
    }
}

/// Whether the client was still there.
fn sent(client: &OwnedFd, line: &str) -> bool {
    send(client, format!("{line}\n").as_bytes(), SendFlags::NOSIGNAL).is_ok()
}

fn status(state: &State) -> String {
    let agent = json!({
        "version": "0.1.0", "uptime_s": 7, "containers": 0, "ports": 0, "bytes": 0,
        "uplinks": *state.uplinks.lock(), "later": [{}],
    });
    json!({"agent": agent}).to_string()
}

/// Whether the client watches from now on.
fn answer(client: &OwnedFd, state: &State) -> bool {
    let mut bytes = vec![0; 16 << 10];
    let length = recv(client, &mut bytes[..], RecvFlags::empty()).map_or(0, |(length, _)| length);
    let Ok(request) = serde_json::from_slice::<Value>(&bytes[..length]) else { return false };
    assert_eq!(request["version"], 1);
    let is_old = state.is_old.load(Ordering::Relaxed);
    let watches = request["command"] == "watch" && !is_old;
    let lines = if request["command"] == "status" {
        let container = json!({"container": {"name": "veth0"}}).to_string();
        vec![status(state), container, json!({"done": {}}).to_string()]
    } else if is_old {
        let reason = format!("unknown variant `{}`", request["command"].as_str().unwrap());
        vec![json!({"refused": {"reason": reason}}).to_string()]
    } else if !watches {
        about_claims(&request, state)
    } else if state.raves.load(Ordering::Relaxed) {
        vec![json!("raving").to_string()[1..].to_owned()]
    } else {
        state.asked.fetch_add(1, Ordering::Relaxed);
        vec![status(state)]
    };
    lines.iter().all(|line| sent(client, line)) && watches
}

/// The answer to a command of a driver, as `host/agent/src/containers/claims.rs` has it.
fn about_claims(request: &Value, state: &State) -> Vec<String> {
    let done = json!({"done": {"later": 1}}).to_string();
    let refused = |reason: &str| vec![json!({"refused": {"reason": reason}}).to_string()];
    let mut claims = state.claims.lock();
    match request["command"].as_str().unwrap() {
        "claim" => {
            if let Some(why) = &*state.refuses.lock() {
                state.refused.fetch_add(1, Ordering::Relaxed);
                return refused(why);
            }
            let claim = &request["claim"];
            claims.insert(claim["uid"].as_str().unwrap().to_owned(), claim.clone());
            vec![done]
        }
        "unclaim" => {
            claims.remove(request["name"].as_str().unwrap());
            vec![done]
        }
        "claims" => {
            let pods = state.pods.lock();
            let lines = |(uid, claim): (&String, &Value)| {
                let of_claim = claim["pods"].as_array().unwrap().iter();
                let its = of_claim.filter_map(|pod| pods.get(pod.as_str().unwrap()));
                let mut its: Vec<Value> = its.cloned().collect();
                if its.is_empty() {
                    its.push(json!({}));
                }
                its.iter_mut().for_each(|it| (it["uid"], it["later"]) = (json!(uid), json!({})));
                its.into_iter().map(|it| json!({"claimed": it}).to_string())
            };
            claims.iter().flat_map(lines).chain([done]).collect()
        }
        _ => panic!("{request}"),
    }
}

/// The path of an agent's socket in a folder of a test.
pub(crate) fn socket(folder: &crate::folder::Folder) -> PathBuf {
    folder.at("control.sock")
}
