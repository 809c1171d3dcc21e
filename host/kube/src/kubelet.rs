//! Where the kubelet finds the device plugin: a socket in its folder, and a registration that is
//! made again for each kubelet.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tonic::transport::Endpoint;

use crate::plugin::api::RegisterRequest;
use crate::plugin::api::device_plugin_server::DevicePluginServer;
use crate::plugin::api::registration_client::RegistrationClient;
use crate::plugin::{HCA, Plugin};
use crate::said::Said;

/// The folder in the kubelet's, its socket there, and the version that is spoken.
const FOLDER: &str = "device-plugins";
const KUBELET: &str = "kubelet.sock";
const VERSION: &str = "v1beta1";

/// Plugins' sockets there begin so.
const PREFIX: &str = "rocinante-hca-";
/// Plugins of one node at a time: two while a driver replaces another.
const SLOTS: usize = 8;
/// Connections of kubelets at a time.
const CLIENTS_MAX: usize = 64;
/// How long a kubelet takes to connect to a plugin at most: before it answers the registration, or
/// after it (until 1.24).
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// The longest that a registration may take.
const REGISTER_MAX: Duration = Duration::from_secs(15);
/// The longest pause between two registrations that lead to nothing.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// How long to leave connections alone that cannot be accepted.
const REST: Duration = Duration::from_millis(100);

/// One socket of those that had its path. An inode has the number of the one before at once, and
/// never its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    changed: (i64, i64),
}

impl Identity {
    fn of(path: &Path) -> Option<Self> {
        let it = std::fs::symlink_metadata(path).ok()?;
        let changed = (it.ctime(), it.ctime_nsec());
        Some(Self { device: it.dev(), inode: it.ino(), changed })
    }
}

/// The plugin's socket, until this value ends.
struct Socket {
    folder: PathBuf,
    slot: usize,
    identity: Option<Identity>,
    /// Removals from the folder.
    removals: OwnedFd,
    _server: JoinSet<()>,
}

fn endpoint(slot: usize) -> String {
    format!("{PREFIX}{slot}.sock")
}

impl Socket {
    /// Takes the first slot in which no other plugin listens, also one that a killed one left.
    /// Plugins that start at once do so in turn.
    async fn at(folder: &Path, plugin: &Plugin) -> io::Result<Self> {
        let turn = File::open(folder)?;
        turn.try_lock()?;
        let removals = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        inotify::add_watch(&removals, folder, WatchFlags::DELETE)?;
        for slot in 0..SLOTS {
            let path = folder.join(endpoint(slot));
            if is_taken(&path).await {
                continue;
            }
            let listener = match UnixListener::bind(&path) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => continue,
                listener => listener?,
            };
            let mut server = JoinSet::new();
            server.spawn(served(listener, plugin.clone()));
            let (folder, identity) = (folder.to_owned(), Identity::of(&path));
            return Ok(Self { folder, slot, identity, removals, _server: server });
        }
        Err(io::Error::other(format!("{SLOTS} plugins listen there")))
    }

    fn path(&self) -> PathBuf {
        self.folder.join(endpoint(self.slot))
    }

    fn is_there(&self) -> bool {
        self.identity.is_some() && Identity::of(&self.path()) == self.identity
    }

    /// Whether another plugin has ended since the last look.
    async fn lost_another(&self) -> bool {
        for slot in (0..SLOTS).filter(|slot| *slot != self.slot) {
            is_taken(&self.folder.join(endpoint(slot))).await;
        }
        let mut bytes = [MaybeUninit::uninit(); 4096];
        let mut events = inotify::Reader::new(&self.removals, &mut bytes);
        let mut has_lost = false;
        while let Ok(event) = events.next() {
            let name = event.file_name().map(CStr::to_bytes);
            // Without a name there were too many events.
            has_lost |= name.is_none_or(|name| {
                name.starts_with(PREFIX.as_bytes()) && name != endpoint(self.slot).as_bytes()
            });
        }
        has_lost
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if self.is_there() {
            let _ = std::fs::remove_file(self.path());
        }
    }
}

/// Whether a plugin listens at a socket. One that a killed plugin left is removed.
async fn is_taken(path: &Path) -> bool {
    match UnixStream::connect(path).await {
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            let _ = std::fs::remove_file(path);
            false
        }
        // Also one whose queue is full.
        _ => true,
    }
}

async fn served(listener: UnixListener, plugin: Plugin) {
    let service = TowerToHyperService::new(DevicePluginServer::new(plugin));
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if connections.len() < CLIENTS_MAX => match accepted {
                Ok((stream, _)) => {
                    let server = http2::Builder::new(TokioExecutor::new());
                    let served = server.serve_connection(TokioIo::new(stream), service.clone());
                    connections.spawn(async move {
                        if let Err(error) = served.await {
                            tracing::debug!("a connection ended: {error}");
                        }
                    });
                }
                Err(error) => {
                    tracing::error!("no connection is accepted: {error}");
                    tokio::time::sleep(REST).await;
                }
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Has the kubelet below `root` know the plugin, for ever. It looks every `period`: a kubelet that
/// starts removes all sockets of its folder. Of two plugins the kubelet asks the one that came
/// last, and takes the end of either for the end of that one (`PluginDisconnected` of its device
/// manager), so the one that stays registers again.
pub(crate) async fn follow(root: &Path, plugin: &Plugin, period: Duration) {
    let folder = root.join(FOLDER);
    let kubelet = folder.join(KUBELET);
    let mut said = Said::default();
    let mut socket = None;
    // Whether the kubelet has to be asked although it watches.
    let mut is_due = true;
    let (mut again, mut pause) = (Instant::now(), period);
    loop {
        let mut is_new = false;
        if !socket.as_ref().is_some_and(Socket::is_there) {
            is_new = true;
            socket = match Socket::at(&folder, plugin).await {
                Ok(socket) => Some(socket),
                Err(error) => {
                    said.warn(format!("no socket in {}: {error}", folder.display()));
                    None
                }
            };
        }
        if let Some(socket) = &socket {
            is_new |= socket.lost_another().await;
            if !kubelet.exists() {
                said.warn(format!("no kubelet at {}", kubelet.display()));
                is_new = true;
            }
            is_due |= is_new;
            if is_new || !is_due && plugin.watchers() > 0 {
                (again, pause) = (Instant::now(), period);
            }
            if (is_due || plugin.watchers() == 0) && kubelet.exists() && Instant::now() >= again {
                let mut wait = pause;
                match register(&kubelet, endpoint(socket.slot)).await {
                    Ok(()) => {
                        said = Said::default();
                        tracing::info!("the kubelet knows {HCA}");
                        is_due = false;
                        wait = wait.max(CONNECT_MAX);
                    }
                    Err(why) => said.warn(format!("the kubelet does not take {HCA}: {why}")),
                }
                again = Instant::now() + wait;
                pause = (pause * 2).min(PAUSE_MAX);
            }
        }
        tokio::time::sleep(period).await;
    }
}

async fn register(kubelet: &Path, endpoint: String) -> Result<(), String> {
    let request = RegisterRequest {
        version: VERSION.into(),
        endpoint,
        resource_name: HCA.into(),
        options: Some(Default::default()),
    };
    let asked = async {
        let address = Endpoint::from_shared(format!("unix://{}", kubelet.display()));
        let channel = address.map_err(words)?.connect().await.map_err(words)?;
        RegistrationClient::new(channel).register(request).await.map_err(words)
    };
    match tokio::time::timeout(REGISTER_MAX, asked).await {
        Ok(answer) => answer.map(drop),
        Err(_) => Err(format!("no answer within {REGISTER_MAX:?}")),
    }
}

/// An error with its causes.
fn words(error: impl std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(it) = cause {
        text = format!("{text}: {it}");
        cause = it.source();
    }
    text
}
