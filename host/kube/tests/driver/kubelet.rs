//! A kubelet's device manager, as `pkg/kubelet/cm/devicemanager` of Kubernetes 1.2x to 1.3x has it:
//! `plugin/v1beta1/{server,handler,client}.go` and `manager.go`. Each behaviour names its function.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use parking_lot::Mutex;
use tokio::net::UnixListener;
use tokio::task::{AbortHandle, JoinSet};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response, Status};

use self::api::device_plugin_client::DevicePluginClient;
use self::api::registration_server::{Registration, RegistrationServer};
use self::api::{
    AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse, Empty, RegisterRequest,
};

#[allow(dead_code, missing_docs, unreachable_pub, clippy::all)]
pub(crate) mod api {
    include!(concat!(env!("OUT_DIR"), "/v1beta1.rs"));
}

/// `kubelet_internal_checkpoint`: the one file of the folder that a start leaves.
const CHECKPOINT: &str = "kubelet_internal_checkpoint";

/// What outlives a kubelet, in its checkpoint.
#[derive(Default)]
struct State {
    /// Devices and whether they are healthy, of the last list of a plugin.
    devices: BTreeMap<String, bool>,
    /// Devices of containers.
    allocated: BTreeSet<String>,
    /// `server.clients`: the tasks that read of plugins, by what the kubelet knows them.
    clients: HashMap<String, AbortHandle>,
    /// `manager.endpoints`, by the same.
    endpoints: HashMap<String, DevicePluginClient<Channel>>,
    /// The endpoint that is asked, until it is stopped (`setStopTime`).
    asked: Option<String>,
    registrations: Vec<(Instant, RegisterRequest)>,
    /// Lists of devices that plugins have sent.
    lists: usize,
}

impl State {
    /// `markResourceUnhealthy`.
    fn unhealthy(&mut self) {
        self.devices.values_mut().for_each(|is_healthy| *is_healthy = false);
    }

    fn endpoint(&self) -> Option<DevicePluginClient<Channel>> {
        self.endpoints.get(self.asked.as_ref()?).cloned()
    }
}

/// A node's kubelet, which may be running or not. Its clones are one.
#[derive(Clone)]
pub(crate) struct Kubelet {
    folder: PathBuf,
    state: Arc<Mutex<State>>,
    running: Arc<Mutex<JoinSet<()>>>,
    /// Whether it knows plugins by their sockets, else by their resource.
    by_socket: bool,
}

#[derive(Clone)]
struct Server {
    kubelet: Kubelet,
    version: &'static str,
    latency: Duration,
    /// As until 1.24, whose `Register` has `go m.addEndpoint(r)`.
    answers_first: bool,
}

impl Kubelet {
    /// One that is not running yet, with this folder.
    pub(crate) fn new(root: &Path) -> Self {
        let folder = root.join("device-plugins");
        Self { folder, state: Arc::default(), running: Arc::default(), by_socket: false }
    }

    /// It knows plugins by their sockets.
    pub(crate) fn by_socket(&mut self) {
        self.by_socket = true;
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn start(&self) {
        self.start_as("v1beta1", Duration::ZERO);
    }

    /// One that speaks this version, and takes this time for a registration.
    pub(crate) fn start_as(&self, version: &'static str, latency: Duration) {
        self.serve(version, latency, false);
    }

    /// One that answers a registration before it connects, for which it takes this time.
    pub(crate) fn start_old(&self, latency: Duration) {
        self.serve("v1beta1", latency, true);
    }

    fn serve(&self, version: &'static str, latency: Duration, answers_first: bool) {
        self.stop();
        // `server.Start`, `CleanupPluginDirectory`.
        std::fs::create_dir_all(&self.folder).unwrap();
        for name in crate::folder::names(&self.folder) {
            if name != CHECKPOINT {
                std::fs::remove_file(self.folder.join(name)).unwrap();
            }
        }
        std::fs::write(self.folder.join(CHECKPOINT), "{}").unwrap();
        // `readCheckpoint`: resources have no healthy device until their plugin registers.
        self.state.lock().unhealthy();
        let listener = UnixListener::bind(self.folder.join("kubelet.sock")).unwrap();
        let server = Server { kubelet: self.clone(), version, latency, answers_first };
        let service = TowerToHyperService::new(RegistrationServer::new(server));
        self.running.lock().spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let server = http2::Builder::new(TokioExecutor::new());
                connections.spawn(server.serve_connection(TokioIo::new(stream), service.clone()));
            }
        });
    }

    /// Ends as a killed one does: its socket stays.
    pub(crate) fn stop(&self) {
        *self.running.lock() = JoinSet::new();
        let mut state = self.state.lock();
        state.clients.clear();
        state.endpoints.clear();
        state.asked = None;
    }

    /// Hangs up on the plugin that is asked.
    pub(crate) fn disconnect(&self) {
        let asked = self.state.lock().asked.clone();
        self.end(&asked.unwrap());
    }

    /// `runClient` at the end of a plugin's list: that of any by this name ends the newest one.
    fn end(&self, key: &str) {
        let mut state = self.state.lock();
        // Of a client that it does not have any more it sees no end.
        let Some(run) = state.clients.remove(key) else { return };
        // `Disconnect`, `PluginDisconnected`.
        run.abort();
        state.endpoints.remove(key);
        if state.asked.as_deref() == Some(key) {
            state.asked = None;
            state.unhealthy();
        }
    }

    /// The registrations until now, and when they came.
    pub(crate) fn registrations(&self) -> Vec<(Instant, RegisterRequest)> {
        self.state.lock().registrations.clone()
    }

    /// Lists of devices that plugins have sent until now.
    pub(crate) fn lists(&self) -> usize {
        self.state.lock().lists
    }

    /// Devices by whether they are healthy: the node's allocatable, and the rest of its capacity.
    pub(crate) fn count(&self) -> (usize, usize) {
        let state = self.state.lock();
        let healthy = state.devices.values().filter(|is_healthy| **is_healthy).count();
        (healthy, state.devices.len() - healthy)
    }

    /// The devices of containers that the plugin still lists.
    pub(crate) fn allocated(&self) -> usize {
        let state = self.state.lock();
        state.allocated.iter().filter(|id| state.devices.contains_key(*id)).count()
    }

    /// `allocateContainerResources`, `devicesToAllocate`: of the devices that are healthy and of no
    /// container.
    pub(crate) async fn allocate(&self, count: usize) -> Result<ContainerAllocateResponse, String> {
        let (ids, client) = {
            let state = self.state.lock();
            let healthy = state.devices.iter().filter(|(_, is_healthy)| **is_healthy);
            let free = healthy.filter(|(id, _)| !state.allocated.contains(*id));
            let ids: Vec<String> = free.map(|(id, _)| id.clone()).take(count).collect();
            if ids.len() < count {
                return Err("requested number of devices unavailable".into());
            }
            (ids, state.endpoint().ok_or("endpoint has been stopped")?)
        };
        let given = self.asked(client, ids.clone()).await;
        let mut given = given.map_err(|status| status.to_string())?;
        self.state.lock().allocated.extend(ids);
        assert_eq!(given.len(), 1);
        Ok(given.remove(0))
    }

    /// `Allocate` of these devices, also where containers have them.
    pub(crate) async fn allocate_these(&self, ids: &[&str]) -> Result<(), Status> {
        let client = self.state.lock().endpoint();
        let client = client.ok_or_else(|| Status::unavailable("endpoint has been stopped"))?;
        self.asked(client, ids.iter().map(|id| (*id).to_owned()).collect()).await.map(drop)
    }

    async fn asked(
        &self,
        mut client: DevicePluginClient<Channel>,
        devices: Vec<String>,
    ) -> Result<Vec<ContainerAllocateResponse>, Status> {
        let containers = vec![ContainerAllocateRequest { devices }];
        let answer = client.allocate(AllocateRequest { containers }).await?;
        Ok(answer.into_inner().containers)
    }
}

#[tonic::async_trait]
impl Registration for Server {
    /// `server.Register`.
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let request = request.into_inner();
        self.kubelet.state.lock().registrations.push((Instant::now(), request.clone()));
        if request.version != self.version {
            return Err(Status::unknown(format!(
                "requested API version {:?} is not supported by kubelet. Supported version is {:?}",
                request.version, self.version,
            )));
        }
        // `IsExtendedResourceName`: a domain that is not Kubernetes' own.
        let name = request.resource_name.split_once('/');
        if name.is_none_or(|(domain, _)| domain.ends_with("kubernetes.io")) {
            return Err(Status::unknown("the ResourceName is invalid"));
        }
        if self.answers_first {
            tokio::spawn(self.clone().connect(request));
            return Ok(Response::new(Empty {}));
        }
        self.clone().connect(request).await
    }
}

impl Server {
    /// `client.Connect`, with ten seconds, and `PluginConnected`.
    async fn connect(self, request: RegisterRequest) -> Result<Response<Empty>, Status> {
        tokio::time::sleep(self.latency).await;
        let failed = |error: &dyn std::error::Error| Status::unknown(error.to_string());
        let path = self.kubelet.folder.join(&request.endpoint);
        let endpoint = Endpoint::from_shared(format!("unix://{}", path.display()))
            .map_err(|error| failed(&error))?
            .connect_timeout(Duration::from_secs(10));
        let channel = endpoint.connect().await.map_err(|error| failed(&error))?;
        let mut client = DevicePluginClient::new(channel);
        let options = client.get_device_plugin_options(Empty {}).await?.into_inner();
        assert_eq!(Some(options), request.options);
        let (kubelet, lists) = (self.kubelet.clone(), client.clone());
        let key = if kubelet.by_socket { request.endpoint } else { request.resource_name };
        let mut state = self.kubelet.state.lock();
        if kubelet.by_socket && state.endpoints.contains_key(&key) {
            // `connectClient`: another client of that socket goes, too.
            state.clients.remove(&key);
            return Err(Status::unknown(format!("device plugin already connected: {key}")));
        }
        // A client before it of this name is forgotten, and stays connected.
        let name = key.clone();
        let run = self.kubelet.running.lock().spawn(async move {
            kubelet.run(lists).await;
            kubelet.end(&name);
        });
        state.clients.insert(key.clone(), run);
        state.endpoints.insert(key.clone(), client);
        state.asked = Some(key);
        Ok(Response::new(Empty {}))
    }
}

impl Kubelet {
    /// `client.Run`, `genericDeviceUpdateCallback`.
    async fn run(&self, mut client: DevicePluginClient<Channel>) {
        let Ok(lists) = client.list_and_watch(Empty {}).await else { return };
        let mut lists = lists.into_inner();
        while let Ok(Some(list)) = lists.message().await {
            let mut state = self.state.lock();
            state.lists += 1;
            let device = |it: api::Device| (it.id, it.health == "Healthy");
            state.devices = list.devices.into_iter().map(device).collect();
        }
    }
}
