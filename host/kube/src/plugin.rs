//! The device plugin: `rocinante.dev/hca`, of which a container takes one or more to get the
//! agent's socket. A device is leave to use it and reserves nothing, so all are alike.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::StreamExt as _;
use futures_util::stream::{self, BoxStream};
use serde::Deserialize;
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use self::api::device_plugin_server::DevicePlugin;
use self::api::{
    AllocateRequest, AllocateResponse, CdiDevice, ContainerAllocateResponse, Device,
    DevicePluginOptions, Empty, ListAndWatchResponse, Mount,
};
use crate::look::Look;
use crate::said::Said;

/// The kubelet's API. Tests have the other halves of it.
#[allow(dead_code, missing_docs, unreachable_pub, clippy::all)]
pub(crate) mod api {
    include!(concat!(env!("OUT_DIR"), "/v1beta1.rs"));
}

/// The extended resource whose devices a container asks for.
pub const HCA: &str = "rocinante.dev/hca";

/// The folder of the agent's sockets, and the socket that a program asks for ports.
pub(crate) const SOCKETS: &str = "/run/rocinante";
pub(crate) const SOCKET: (&str, &str) = ("ROCINANTE_AGENT", "/run/rocinante/agent.sock");
/// The file of CDI that belongs to the agent, and its device.
const CDI_FILE: &str = "rocinante.json";
const CDI_DEVICE: &str = "0";

/// The plugin. Its clones are one.
#[derive(Clone)]
pub(crate) struct Plugin {
    cdi: Arc<Path>,
    devices: u32,
    healthy: watch::Receiver<bool>,
    watchers: Arc<AtomicUsize>,
    look: Look,
}

/// A stream of the devices' health to a kubelet, counted as long as it is open.
struct Watcher {
    healthy: watch::Receiver<bool>,
    count: Arc<AtomicUsize>,
    look: Look,
}

impl Watcher {
    fn new(plugin: &Plugin) -> Self {
        let mut healthy = plugin.healthy.clone();
        healthy.mark_changed();
        let (count, look) = (Arc::clone(&plugin.watchers), plugin.look.clone());
        count.fetch_add(1, Ordering::Relaxed);
        look.now();
        Self { healthy, count, look }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
        self.look.now();
    }
}

/// The part of a file of CDI that is read.
#[derive(Deserialize)]
struct CdiFile {
    kind: String,
    devices: Vec<CdiEntry>,
}

#[derive(Deserialize)]
struct CdiEntry {
    name: String,
}

impl Plugin {
    pub(crate) fn new(
        cdi: PathBuf,
        devices: u32,
        healthy: watch::Receiver<bool>,
        look: Look,
    ) -> Self {
        Self { cdi: cdi.into(), devices, healthy, watchers: Arc::default(), look }
    }

    /// How many kubelets watch the devices.
    pub(crate) fn watchers(&self) -> usize {
        self.watchers.load(Ordering::Relaxed)
    }

    /// The runtime fails a container whose device of CDI it does not find.
    fn has_cdi(&self) -> bool {
        let text = std::fs::read(self.cdi.join(CDI_FILE)).unwrap_or_default();
        let file = serde_json::from_slice::<CdiFile>(&text);
        file.is_ok_and(|it| it.kind == HCA && it.devices.iter().any(|it| it.name == CDI_DEVICE))
    }

    /// Says whether containers get the device of CDI.
    pub(crate) fn say_cdi(&self, said: &mut Said) {
        let gets = if self.has_cdi() { "get" } else { "do not get" };
        let file = self.cdi.join(CDI_FILE);
        said.info(format!("containers {gets} {HCA}={CDI_DEVICE} of {}", file.display()));
    }

    fn is_device(&self, id: &str) -> bool {
        id.parse().is_ok_and(|number: u32| number < self.devices && number.to_string() == id)
    }

    /// Of CDI and without: kubelets before 1.28 pass over the name, and runtimes without CDI, too.
    /// Those that know it put the same variable and mount in the place of these, and its hook.
    fn allocated(&self, ids: &[String]) -> Result<ContainerAllocateResponse, Status> {
        if ids.is_empty() {
            return Err(Status::invalid_argument("a container without a device"));
        }
        if !ids.iter().all(|id| self.is_device(id)) {
            return Err(Status::not_found(format!("{HCA} has no such device")));
        }
        let name = || CdiDevice { name: format!("{HCA}={CDI_DEVICE}") };
        let path = || SOCKETS.to_owned();
        Ok(ContainerAllocateResponse {
            envs: HashMap::from([(SOCKET.0.into(), SOCKET.1.into())]),
            mounts: vec![Mount { container_path: path(), host_path: path(), read_only: true }],
            cdi_devices: self.has_cdi().then(name).into_iter().collect(),
        })
    }
}

fn listed(count: u32, is_healthy: bool) -> ListAndWatchResponse {
    let health = if is_healthy { "Healthy" } else { "Unhealthy" };
    let device = |id: u32| Device { id: id.to_string(), health: health.into() };
    ListAndWatchResponse { devices: (0..count).map(device).collect() }
}

#[tonic::async_trait]
impl DevicePlugin for Plugin {
    type ListAndWatchStream = BoxStream<'static, Result<ListAndWatchResponse, Status>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(DevicePluginOptions::default()))
    }

    async fn list_and_watch(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let devices = self.devices;
        let watcher = Watcher::new(self);
        let lists = stream::unfold(watcher, move |mut watcher| async move {
            watcher.healthy.changed().await.ok()?;
            let is_healthy = *watcher.healthy.borrow_and_update();
            Some((Ok(listed(devices, is_healthy)), watcher))
        });
        Ok(Response::new(lists.boxed()))
    }

    /// The kubelet gives no container an unhealthy device. One that was given before its agent went
    /// is served: the mount is a folder, in which the next agent makes its socket.
    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let containers = request.into_inner().containers;
        let each = containers.iter().map(|container| self.allocated(&container.devices));
        Ok(Response::new(AllocateResponse { containers: each.collect::<Result<_, _>>()? }))
    }

    async fn get_preferred_allocation(&self, _: Request<Empty>) -> Result<Response<Empty>, Status> {
        Err(Status::unimplemented("the devices are alike"))
    }

    async fn pre_start_container(&self, _: Request<Empty>) -> Result<Response<Empty>, Status> {
        Ok(Response::new(Empty {}))
    }
}
