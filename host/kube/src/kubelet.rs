//! Where the kubelet finds the device plugin: a socket in its folder, and a registration that is
//! made again for each kubelet.

use std::convert::Infallible;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::{Body, Incoming};
use hyper::server::conn::http2;
use hyper::service::{Service, service_fn};
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tonic::transport::Endpoint;

use crate::authority::Renamed;
use crate::look::Looks;
use crate::plugin::api::RegisterRequest;
use crate::plugin::api::device_plugin_server::DevicePluginServer;
use crate::plugin::api::registration_client::RegistrationClient;
use crate::plugin::{HCA, Plugin};
use crate::said::Said;

/// The folder in the kubelet's, its socket there, and the version that is spoken.
pub(crate) const FOLDER: &str = "device-plugins";
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
/// How long a connection may last without a first request. A kubelet asks a device plugin, and
/// where plugins register, at once.
pub(crate) const IDLE_MAX: Duration = Duration::from_secs(10);
/// The longest that a registration may take.
const REGISTER_MAX: Duration = Duration::from_secs(15);
/// The longest pause between two registrations that lead to nothing.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// How long to leave connections alone that cannot be accepted.
const REST: Duration = Duration::from_millis(100);

/// One socket of those that had its path. An inode has the number of the one before at once, and
/// never its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
    changed: (i64, i64),
}

impl Identity {
    pub(crate) fn of(path: &Path) -> Option<Self> {
        let it = std::fs::symlink_metadata(path).ok()?;
        let changed = (it.ctime(), it.ctime_nsec());
        Some(Self { device: it.dev(), inode: it.ino(), changed })
    }
}

/// The plugin's socket. Its file stays when it ends, so that other plugins see that, however short
/// its time was.
struct Socket {
    folder: PathBuf,
    slot: usize,
    identity: Option<Identity>,
    /// Sockets of other plugins, at the last look.
    others: Vec<Identity>,
    /// Whether one of them has ended.
    has_lost: bool,
    _server: JoinSet<()>,
}

fn endpoint(slot: usize) -> String {
    format!("{PREFIX}{slot}.sock")
}

/// The right to make and remove sockets there, which one plugin has at a time.
pub(crate) fn turn(folder: &Path) -> io::Result<File> {
    let turn = File::open(folder)?;
    turn.try_lock()?;
    Ok(turn)
}

impl Socket {
    /// Takes the first slot in which no other plugin listens, of all in turn from this one on.
    async fn at(folder: &Path, plugin: &Plugin, from: usize) -> io::Result<Self> {
        let _turn = turn(folder)?;
        let mut free = None;
        for slot in (from..from + SLOTS).map(|slot| slot % SLOTS) {
            if !is_taken(&folder.join(endpoint(slot))).await {
                free.get_or_insert(slot);
            }
        }
        let slot = free.ok_or_else(|| io::Error::other(format!("{SLOTS} plugins listen there")))?;
        let path = folder.join(endpoint(slot));
        let mut server = JoinSet::new();
        let service = TowerToHyperService::new(DevicePluginServer::new(plugin.clone()));
        server.spawn(served(UnixListener::bind(&path)?, service, Some(IDLE_MAX)));
        Ok(Self {
            folder: folder.to_owned(),
            slot,
            identity: Identity::of(&path),
            others: Vec::new(),
            has_lost: false,
            _server: server,
        })
    }

    fn path(&self) -> PathBuf {
        self.folder.join(endpoint(self.slot))
    }

    fn is_there(&self) -> bool {
        self.identity.is_some() && Identity::of(&self.path()) == self.identity
    }

    /// Whether another plugin has ended since this one began to listen, and none is left. `None`:
    /// another plugin has the turn.
    async fn is_left_alone(&mut self) -> Option<bool> {
        let _turn = turn(&self.folder).ok()?;
        let mut others = Vec::new();
        for slot in (0..SLOTS).filter(|slot| *slot != self.slot) {
            let path = self.folder.join(endpoint(slot));
            let identity = Identity::of(&path);
            if is_taken(&path).await {
                others.extend(identity);
            } else {
                self.has_lost |= identity.is_some();
            }
        }
        self.has_lost |= self.others.iter().any(|it| !others.contains(it));
        self.others = others;
        Some(self.has_lost && self.others.is_empty())
    }
}

/// Whether a plugin listens at a socket. One that an ended plugin left is removed.
pub(crate) async fn is_taken(path: &Path) -> bool {
    match UnixStream::connect(path).await {
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).is_err()
        }
        // Also one whose queue is full.
        _ => true,
    }
}

/// Serves gRPC at a socket, for ever. A connection without a request ends after the idle time.
pub(crate) async fn served<S, B>(listener: UnixListener, service: S, idle: Option<Duration>)
where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible>,
    S: Clone + Send + 'static,
    S::Future: Send + 'static,
    B: Body<Data: Send, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Send + 'static,
{
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if connections.len() < CLIENTS_MAX => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(answered(stream, service.clone(), idle));
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

/// Serves a connection to its end.
async fn answered<S, B>(stream: UnixStream, service: S, idle: Option<Duration>)
where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible>,
    S::Future: Send + 'static,
    B: Body<Data: Send, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Send + 'static,
{
    let asked = Arc::new(Notify::new());
    let answer = {
        let asked = Arc::clone(&asked);
        service_fn(move |request| {
            asked.notify_one();
            service.call(request)
        })
    };
    let server = http2::Builder::new(TokioExecutor::new());
    let mut served = pin!(server.serve_connection(TokioIo::new(Renamed::new(stream)), answer));
    let first = async {
        match idle {
            Some(idle) => tokio::time::timeout(idle, asked.notified()).await.is_ok(),
            None => true,
        }
    };
    let ended = tokio::select! {
        ended = &mut served => ended,
        is_asked = first => match is_asked {
            true => served.await,
            false => return,
        }
    };
    if let Err(error) = ended {
        tracing::debug!("a connection ended: {error}");
    }
}

/// Has the kubelet below `root` know the plugin, for ever. A kubelet that starts removes all
/// sockets of its folder. The first pause between two registrations is `soon`.
///
/// Kubelets know a plugin by its resource or by its socket (`runClient`, `PluginConnected` of their
/// device manager). The former ask the plugin that came last, and stop at the end of any: one that
/// is left alone may have a stream and be asked nothing. The latter refuse a socket that they have,
/// and lose sight of it. So the plugin registers without a stream alone, and one that is left alone
/// ends its stream, and registers at another socket when the kubelet has seen that.
pub(crate) async fn follow(root: &Path, plugin: &Plugin, mut looks: Looks, soon: Duration) {
    let folder = root.join(FOLDER);
    let kubelet = folder.join(KUBELET);
    let (mut said, mut cdi_said) = (Said::default(), Said::default());
    let mut socket = None::<Socket>;
    let mut from = 0;
    let (mut again, mut pause) = (Instant::now(), soon);
    loop {
        let mut is_settled = false;
        plugin.say_cdi(&mut cdi_said);
        let mut is_left_alone = None;
        if let Some(it) = &mut socket {
            let is_there = it.is_there();
            is_left_alone = it.is_left_alone().await;
            if !is_there || is_left_alone == Some(true) {
                if is_there {
                    let _ = std::fs::remove_file(it.path());
                }
                from = it.slot + 1;
                socket = None;
                (again, pause) = (Instant::now() + soon, soon);
            }
        }
        if socket.is_none() {
            match Socket::at(&folder, plugin, from).await {
                Ok(it) => socket = Some(it),
                Err(error) => said.warn(format!("no socket in {}: {error}", folder.display())),
            }
        }
        if let Some(socket) = &socket {
            if !kubelet.exists() {
                said.warn(format!("no kubelet at {}", kubelet.display()));
                (again, pause) = (Instant::now(), soon);
            } else if plugin.watchers() > 0 {
                // Not before the kubelet has seen the end of the stream.
                (again, pause) = (Instant::now() + soon, soon);
                // The end of another plugin is seen at its socket alone.
                is_settled = is_left_alone.is_some() && socket.others.is_empty();
            } else if Instant::now() >= again {
                let mut wait = pause;
                match register(&kubelet, endpoint(socket.slot)).await {
                    Ok(()) => {
                        said = Said::default();
                        tracing::info!("the kubelet knows {HCA}");
                        wait = wait.max(CONNECT_MAX);
                    }
                    Err(why) => said.warn(format!("the kubelet does not take {HCA}: {why}")),
                }
                again = Instant::now() + wait;
                pause = (pause * 2).min(PAUSE_MAX);
            }
        }
        looks.again(is_settled).await;
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
