//! Where the kubelet finds the driver: a socket for calls, and one in the folder that the kubelet
//! watches, at which it asks for the former (`pluginwatcher` of the kubelet). Both are named by the
//! UID of the driver's pod, so that two drivers may be there while one replaces the other: the
//! kubelet asks the one that came last. The end of the second socket's file is the end of a driver.

use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper::body::{Body, Incoming};
use hyper::service::{Service, service_fn};
use hyper::{Request, Uri};
use hyper_util::service::TowerToHyperService;
use tokio::net::UnixListener;
use tokio::task::JoinSet;
use tonic::{Response, Status};

use self::api::registration_server::{Registration, RegistrationServer};
use self::api::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use super::api::dra_plugin_server::DraPluginServer;
use super::health::api::dra_resource_health_server::DraResourceHealthServer;
use super::health::{Alpha, Devices};
use super::state::make_folder;
use super::{DRIVER, Dra};
use crate::kubelet::{IDLE_MAX, Identity, is_taken, served, turn};
use crate::look::Looks;
use crate::said::Said;

/// The kubelet's API. Tests have the other half of it.
#[allow(dead_code, missing_docs, unreachable_pub, clippy::all)]
pub(crate) mod api {
    include!(concat!(env!("OUT_DIR"), "/pluginregistration.rs"));
}

/// The folders of the kubelet's: that of all registrations, and that of this driver.
pub(crate) const REGISTRY: &str = "plugins_registry";
pub(crate) const PLUGINS: &str = "plugins/rocinante.dev";

/// The services, as the kubelet names them, and their paths.
const VERSIONS: [&str; 4] =
    ["v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"];
const PREPARE: [&str; 2] = [
    "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/",
    "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/",
];
const HEALTH: [&str; 2] = ["/v1.DRAResourceHealth/", "/v1alpha1.DRAResourceHealth/"];

/// Names of the sockets begin and end so, with the pod's UID between.
const CALLS: (&str, &str) = ("dra-", ".sock");
const ASKED: (&str, &str) = ("rocinante.dev-", "-reg.sock");

#[derive(Clone)]
struct Registrar {
    endpoint: String,
}

#[tonic::async_trait]
impl Registration for Registrar {
    async fn get_info(
        &self,
        _: tonic::Request<InfoRequest>,
    ) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: "DRAPlugin".into(),
            name: DRIVER.into(),
            endpoint: self.endpoint.clone(),
            versions: VERSIONS.map(str::to_owned).to_vec(),
        }))
    }

    /// The kubelet tries again by itself.
    async fn notify_registration_status(
        &self,
        request: tonic::Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let RegistrationStatus { is_registered, error } = request.into_inner();
        match is_registered {
            true => tracing::info!("the kubelet knows the driver {DRIVER}"),
            false => tracing::warn!("the kubelet does not take the driver {DRIVER}: {error}"),
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

/// A socket of this driver, which is there as long as this value.
struct Socket {
    path: PathBuf,
    identity: Option<Identity>,
    _server: JoinSet<()>,
}

impl Socket {
    fn new<S, B>(path: PathBuf, listener: UnixListener, service: S, idle: Option<Duration>) -> Self
    where
        S: Service<Request<Incoming>, Response = hyper::Response<B>, Error = Infallible>,
        S: Clone + Send + 'static,
        S::Future: Send + 'static,
        B: Body<Data: Send, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Send + 'static,
    {
        let mut server = JoinSet::new();
        server.spawn(served(listener, service, idle));
        Self { identity: Identity::of(&path), path, _server: server }
    }

    fn is_there(&self) -> bool {
        self.identity.is_some() && Identity::of(&self.path) == self.identity
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if self.is_there() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Listens at the socket of this pod, and removes those that ended drivers left.
async fn bound(
    folder: &Path,
    (begin, end): (&str, &str),
    uid: &str,
) -> io::Result<(PathBuf, UnixListener)> {
    let _turn = turn(folder)?;
    let path = folder.join(format!("{begin}{uid}{end}"));
    for entry in std::fs::read_dir(folder)? {
        let name = entry?.file_name();
        let name = name.to_string_lossy();
        let is_drivers = name.starts_with(begin) && name.ends_with(end);
        if is_drivers && is_taken(&folder.join(&*name)).await && path.ends_with(&*name) {
            return Err(io::Error::other(format!("another driver listens at {name}")));
        }
    }
    let listener = UnixListener::bind(&path)?;
    Ok((path, listener))
}

/// Has the kubelet below `root` know the driver, for ever, as long as both sockets are there.
pub(crate) async fn follow(root: &Path, uid: &str, dra: &Dra, devices: &Devices, mut looks: Looks) {
    let (registry, folder) = (root.join(REGISTRY), root.join(PLUGINS));
    let mut said = Said::default();
    let (mut calls, mut asked) = (None::<Socket>, None::<Socket>);
    loop {
        calls = calls.filter(Socket::is_there);
        asked = asked.filter(Socket::is_there);
        let listens = async {
            if calls.is_none() {
                make_folder(&folder)?;
                let (path, listener) = bound(&folder, CALLS, uid).await?;
                // A kubelet from 1.34 on connects when it knows the driver, and calls with pods.
                calls = Some(Socket::new(path, listener, service(dra, devices), None));
            }
            if let (None, Some(calls)) = (&asked, &calls) {
                let (path, listener) = bound(&registry, ASKED, uid).await?;
                let endpoint = calls.path.to_string_lossy().into_owned();
                let registrar = RegistrationServer::new(Registrar { endpoint });
                let service = TowerToHyperService::new(registrar);
                asked = Some(Socket::new(path, listener, service, Some(IDLE_MAX)));
            }
            io::Result::Ok(())
        };
        let listens = listens.await;
        if let Err(error) = &listens {
            said.warn(format!("the kubelet does not find {DRIVER} in {}: {error}", root.display()));
        }
        looks.again(listens.is_ok()).await;
    }
}

/// Both versions have the same messages.
fn service(
    dra: &Dra,
    devices: &Devices,
) -> impl Service<
    Request<Incoming>,
    Response = hyper::Response<tonic::body::Body>,
    Error = Infallible,
    Future: Send,
> + Clone
+ Send
+ 'static {
    let calls = TowerToHyperService::new(DraPluginServer::new(dra.clone()));
    let health = TowerToHyperService::new(DraResourceHealthServer::new(devices.clone()));
    service_fn(move |mut request: Request<Incoming>| {
        for [newest, older] in [PREPARE, HEALTH] {
            if let Some(method) = request.uri().path().strip_prefix(older)
                && let Ok(uri) = format!("{newest}{method}").parse::<Uri>()
            {
                *request.uri_mut() = uri;
                request.extensions_mut().insert(Alpha);
            }
        }
        let (calls, health) = (calls.clone(), health.clone());
        async move {
            match request.uri().path().starts_with(HEALTH[0]) {
                true => health.call(request).await,
                false => calls.call(request).await,
            }
        }
    })
}
