//! The kubelet's plugin manager and its manager of dynamic resources, as Kubernetes 1.34 to 1.36
//! have them: `pluginmanager/pluginwatcher`, `pluginmanager/operationexecutor`, and
//! `cm/dra/{manager.go,plugin/dra_plugin_manager.go}`. Each behaviour names its function.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::JoinSet;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Streaming};
use tonic_prost::ProstCodec;

use self::api::registration_client::RegistrationClient;
use self::api::{InfoRequest, RegistrationStatus};
use self::dra::{
    Claim, Device, PrepareRequest, PrepareResponse, UnprepareRequest, UnprepareResponse,
};
use self::health::{WatchRequest, WatchResponse};
use crate::folder::names;

#[allow(dead_code, missing_docs, unreachable_pub, clippy::all)]
pub(crate) mod api {
    include!(concat!(env!("OUT_DIR"), "/pluginregistration.rs"));
}
#[allow(dead_code, missing_docs, unreachable_pub, clippy::all)]
pub(crate) mod dra {
    include!(concat!(env!("OUT_DIR"), "/k8s.io.kubelet.pkg.apis.dra.v1.rs"));
}

#[allow(dead_code, missing_docs, unreachable_pub, clippy::all)]
pub(crate) mod health {
    include!(concat!(env!("OUT_DIR"), "/v1.rs"));
}

/// A registered driver.
#[derive(Clone)]
struct Plugin {
    /// Its registration's socket.
    socket: String,
    endpoint: String,
    channel: Channel,
}

/// `ClaimInfo`.
#[derive(Default, Clone)]
struct Info {
    uid: String,
    pods: BTreeSet<String>,
    is_prepared: bool,
    devices: Vec<Device>,
}

#[derive(Default)]
struct State {
    plugins: Vec<Plugin>,
    /// Sockets that were asked, and what they said.
    statuses: Vec<(String, bool)>,
    claims: BTreeMap<String, Info>,
}

/// The part of a kubelet that knows drivers. Its clones are one.
#[derive(Clone)]
pub(crate) struct Manager {
    pub(crate) registry: PathBuf,
    /// The services that it speaks, best first, and how they are called on the wire.
    version: &'static str,
    state: Arc<Mutex<State>>,
    running: Arc<Mutex<JoinSet<()>>>,
}

impl Manager {
    /// One that is not running yet, below the kubelet's folder.
    pub(crate) fn new(root: &std::path::Path) -> Self {
        let registry = root.join("plugins_registry");
        Self { registry, version: "v1", state: Arc::default(), running: Arc::default() }
    }

    /// One of another version of the API.
    pub(crate) fn speaks(&mut self, version: &'static str) {
        self.version = version;
    }

    /// A start: what was prepared is in the checkpoint, and is prepared again for each pod
    /// (`newClaimInfoFromState`).
    pub(crate) fn start(&self) {
        *self.running.lock() = JoinSet::new();
        let mut state = self.state.lock();
        state.plugins.clear();
        state.claims.values_mut().for_each(|it| it.is_prepared = false);
        drop(state);
        std::fs::create_dir_all(&self.registry).unwrap();
        let this = self.clone();
        self.running.lock().spawn(async move {
            loop {
                this.look().await;
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
    }

    /// `pluginwatcher.Watcher`: sockets that came and went, without names that begin with a dot.
    async fn look(&self) {
        let sockets: Vec<String> = match self.registry.exists() {
            true => names(&self.registry).into_iter().filter(|it| !it.starts_with('.')).collect(),
            false => Vec::new(),
        };
        self.state.lock().plugins.retain(|it| sockets.contains(&it.socket));
        for socket in sockets {
            let is_known = self.state.lock().plugins.iter().any(|it| it.socket == socket);
            if !is_known {
                // An error is tried again.
                let _ = self.register(socket).await;
            }
        }
    }

    /// `GenerateRegisterPluginFunc`, `RegisterPlugin`.
    async fn register(&self, socket: String) -> Result<(), Box<dyn std::error::Error>> {
        let path = self.registry.join(&socket);
        let channel =
            Endpoint::from_shared(format!("unix://{}", path.display()))?.connect().await?;
        let mut client = RegistrationClient::new(channel);
        let info = client.get_info(InfoRequest {}).await?.into_inner();
        assert_eq!((&*info.r#type, &*info.name), ("DRAPlugin", rocinante_kube::DRIVER));
        // `pickHealthService`.
        for version in ["v1", "v1alpha1"] {
            assert!(info.versions.contains(&format!("{version}.DRAResourceHealth")));
        }
        // `validateSupportedServices`.
        let speaks = info.versions.contains(&format!("{}.DRAPlugin", self.version));
        let is_taken = self.state.lock().plugins.iter().any(|it| it.endpoint == info.endpoint);
        let error = match (speaks, is_taken) {
            (false, _) => format!("the kubelet supports {}.DRAPlugin", self.version),
            (_, true) => format!("endpoint {} already registered", info.endpoint),
            _ => String::new(),
        };
        let is_registered = error.is_empty();
        let status = RegistrationStatus { is_registered, error };
        client.notify_registration_status(status).await?;
        let mut state = self.state.lock();
        state.statuses.push((socket.clone(), is_registered));
        if is_registered {
            // `grpc.NewClient` connects by itself, and again.
            let channel =
                Endpoint::from_shared(format!("unix://{}", info.endpoint))?.connect_lazy();
            state.plugins.push(Plugin { socket, endpoint: info.endpoint, channel });
        }
        Ok(())
    }

    /// Sockets of drivers that are registered.
    pub(crate) fn plugins(&self) -> Vec<String> {
        self.state.lock().plugins.iter().map(|it| it.socket.clone()).collect()
    }

    /// How many registrations were taken, and were not.
    pub(crate) fn registrations(&self) -> (usize, usize) {
        let state = self.state.lock();
        let taken = state.statuses.iter().filter(|it| it.1).count();
        (taken, state.statuses.len() - taken)
    }

    async fn called<I, O>(&self, method: &str, claims: I) -> Result<O, String>
    where
        I: prost::Message + Send + Sync + 'static,
        O: prost::Message + Default + Send + Sync + 'static,
    {
        // `DRAPluginManager.get`: the last one.
        let plugin = self.state.lock().plugins.last().cloned();
        let plugin = plugin.ok_or("DRA driver rocinante.dev is not registered")?;
        let path = format!("/k8s.io.kubelet.pkg.apis.dra.{}.DRAPlugin/{method}", self.version);
        let mut grpc = Grpc::new(plugin.channel);
        grpc.ready().await.map_err(|error| error.to_string())?;
        let path: PathAndQuery = path.parse().unwrap();
        // `defaultClientCallTimeout`.
        let call = grpc.unary(Request::new(claims), path, ProstCodec::<I, O>::default());
        let answer = tokio::time::timeout(Duration::from_secs(45), call).await;
        let answer =
            answer.map_err(|_| "deadline exceeded")?.map_err(|status| status.to_string())?;
        Ok(answer.into_inner())
    }

    /// `startHealthStream`, of this version of the service.
    pub(crate) async fn watch(&self, version: &str) -> Result<Streaming<WatchResponse>, String> {
        let plugin = self.state.lock().plugins.last().cloned();
        let mut grpc = Grpc::new(plugin.ok_or("no driver")?.channel);
        grpc.ready().await.map_err(|error| error.to_string())?;
        let path = format!("/{version}.DRAResourceHealth/NodeWatchResources").parse().unwrap();
        let codec = ProstCodec::<WatchRequest, WatchResponse>::default();
        let answer = grpc.server_streaming(Request::new(WatchRequest {}), path, codec).await;
        answer.map(tonic::Response::into_inner).map_err(|status| status.to_string())
    }

    /// One call for claims, by UID and name: devices or the error of each.
    pub(crate) async fn call_prepare(
        &self,
        claims: &[(&str, &str)],
    ) -> Result<BTreeMap<String, Result<Vec<Device>, String>>, String> {
        let request = PrepareRequest { claims: claims.iter().map(claim).collect() };
        let answer: PrepareResponse = self.called("NodePrepareResources", request).await?;
        let each = answer.claims.into_iter().map(|(uid, it)| {
            (uid, if it.error.is_empty() { Ok(it.devices) } else { Err(it.error) })
        });
        Ok(each.collect())
    }

    pub(crate) async fn call_unprepare(&self, claims: &[(&str, &str)]) -> Result<(), String> {
        let request = UnprepareRequest { claims: claims.iter().map(claim).collect() };
        let answer: UnprepareResponse = self.called("NodeUnprepareResources", request).await?;
        assert_eq!(answer.claims.len(), claims.len());
        answer.claims.into_values().map(|it| it.error).find(|it| !it.is_empty()).map_or(Ok(()), Err)
    }

    /// `prepareResources` of a pod with a claim: what its containers get by CDI.
    pub(crate) async fn prepare(
        &self,
        pod: &str,
        (uid, name): (&str, &str),
    ) -> Result<Vec<String>, String> {
        {
            let mut state = self.state.lock();
            let info = state.claims.entry(name.to_owned()).or_default();
            if !info.uid.is_empty() && info.uid != uid {
                return Err("old ResourceClaim with same name still exists".into());
            }
            info.uid = uid.to_owned();
            info.pods.insert(pod.to_owned());
            if info.is_prepared {
                return Ok(ids(&info.devices));
            }
        }
        let mut answer = self.call_prepare(&[(uid, name)]).await?;
        let devices = answer.remove(uid).ok_or("skipped")??;
        assert!(answer.is_empty());
        let mut state = self.state.lock();
        let info = state.claims.get_mut(name).unwrap();
        (info.is_prepared, info.devices) = (true, devices);
        Ok(ids(&info.devices))
    }

    /// `unprepareResources` of a pod: the last one of a claim has it unprepared.
    pub(crate) async fn unprepare(&self, pod: &str, name: &str) -> Result<(), String> {
        let info = self.state.lock().claims.get(name).cloned();
        let Some(info) = info else { return Ok(()) };
        if info.pods.len() > 1 {
            self.state.lock().claims.get_mut(name).unwrap().pods.remove(pod);
            return Ok(());
        }
        self.call_unprepare(&[(&info.uid, name)]).await?;
        self.state.lock().claims.remove(name);
        Ok(())
    }
}

fn claim((uid, name): &(&str, &str)) -> Claim {
    Claim { namespace: "default".into(), uid: (*uid).into(), name: (*name).into() }
}

fn ids(devices: &[Device]) -> Vec<String> {
    devices.iter().flat_map(|it| it.cdi_ids.clone()).collect()
}
