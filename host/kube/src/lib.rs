//! RDMA bandwidth of Kubernetes' nodes: reserved, placed, and never promised twice.
//!
//! [`extender`] serves kube-scheduler. [`node`] runs on each node: it publishes the node's uplinks,
//! and names the taken rates as the daemon of Link et al. does. [`driver`] runs beside the agent of
//! a node: for the kubelet it is a device plugin and a driver of dynamic resource allocation.
//! `docs/kubernetes.md` is the manual.

#![forbid(unsafe_code)]

mod agent;
mod authority;
mod dra;
mod extender;
#[doc(hidden)]
pub mod fuzzing;
mod http;
mod kubelet;
mod lease;
mod ledger;
mod look;
mod objects;
mod pfs;
mod plugin;
mod publish;
mod said;
mod sysfs;
mod watch;
mod wire;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kube::{Client, Config};
use parking_lot::Mutex;
use rocinante_placement::{Uplink, to_json};
use tokio::net::TcpListener;
use tokio::sync::watch::{Sender, channel};

use self::dra::Dra;
use self::dra::state::Store;
use self::extender::{Extender, REQUEST_TIMES};
use self::http::Service;
use self::lease::Lease;
use self::ledger::Ledger;
use self::look::{Look, SOON};
use self::objects::Cluster;
use self::pfs::Pfs;
use self::plugin::Plugin;
use self::publish::{OfNode, Wanted};

pub use self::dra::DRIVER;
pub use self::extender::ASSUMED_FOR;
pub use self::http::BODY_MAX;
pub use self::lease::LEASE_FOR;
pub use self::objects::{MBPS, PLACED, REQUIRED, UPLINKS};
pub use self::plugin::HCA;
pub use self::sysfs::{Named, UplinkError};

/// How often a node's uplinks are looked at.
pub const PERIOD: Duration = Duration::from_secs(2);

/// A client of the API server, by TLS in Rust alone. It repeats no request by itself: a bind that
/// was done and sent again would be answered as a conflict, and its reservation given back.
///
/// # Errors
/// The configuration has no usable certificate, key or proxy.
pub fn client(mut config: Config) -> Result<Client, kube::Error> {
    config.default_retry = false;
    // An error says that there is a provider: of this program, or an earlier call's.
    let _ = rustls_graviola::default_provider().install_default();
    Client::try_from(config)
}

/// Serves kube-scheduler's verbs below `/scheduler/` for ever, and `/healthz`, which says 503 until
/// all that is taken was read from the API. After `assumed_for` ([`ASSUMED_FOR`]) the API is asked
/// whether a pod is bound that the watch has not shown. Of several extenders one binds; another
/// takes its lease after `lease_for` ([`LEASE_FOR`]) of silence. Returns when it loses the lease.
pub async fn extender(
    client: Client,
    listener: TcpListener,
    assumed_for: Duration,
    lease_for: Duration,
) {
    let (cluster, ledger) = (Cluster::new(client), Arc::<Mutex<Ledger>>::default());
    let lease = Arc::new(Lease::new(&cluster, lease_for));
    let extender =
        Extender::new(cluster.clone(), Arc::clone(&ledger), Arc::clone(&lease), assumed_for);
    let watched = async {
        lease.first().await;
        cluster.fence_all(assumed_for * REQUEST_TIMES).await;
        watch::watch(&cluster, &ledger, None).await;
    };
    tokio::select! {
        () = watched => {}
        () = lease.keep() => {}
        () = http::serve(listener, Service::Extender(extender)) => {}
    }
}

/// Keeps the annotation [`UPLINKS`] of a node as `uplinks` says it every `period` ([`PERIOD`]), and
/// serves `/getpfs` and `/healthz`, for ever.
pub async fn node(
    client: Client,
    listener: TcpListener,
    name: &str,
    period: Duration,
    mut uplinks: impl FnMut() -> Vec<Uplink>,
) {
    let (cluster, ledger) = (Cluster::new(client), Arc::<Mutex<Ledger>>::default());
    let pfs = Pfs::new(name, Arc::clone(&ledger));
    let (to, wanted) = channel(Wanted::default());
    let read = async {
        loop {
            match to_json(&uplinks()) {
                Ok(text) => to.send_if_modified(|wanted| wanted.has_uplinks(text)),
                Err(error) => {
                    tracing::error!("the uplinks have no JSON: {error}");
                    false
                }
            };
            tokio::time::sleep(period).await;
        }
    };
    tokio::select! {
        () = read => {}
        () = publish::keep(&cluster, name, wanted, drop) => {}
        () = watch::watch(&cluster, &ledger, Some(name)) => {}
        () = http::serve(listener, Service::Node(pfs)) => {}
    }
}

/// What a [`driver`] stands between.
#[derive(Debug, Clone)]
pub struct Places {
    /// The node's name in Kubernetes.
    pub node: String,
    /// The agent's control socket.
    pub agent: PathBuf,
    /// The kubelet's folder.
    pub kubelet: PathBuf,
    /// The folder of files of CDI.
    pub cdi: PathBuf,
    /// The UID of the driver's pod, if uplinks are devices of [`DRIVER`]; else the node has
    /// [`MBPS`].
    pub dra: Option<String>,
}

/// Offers `devices` of [`HCA`] to the kubelet, healthy as long as the agent answers, and keeps the
/// node's [`MBPS`], or its devices of [`DRIVER`], as the agent's uplinks are, for ever. It looks at
/// all of it at events, and every `period`.
pub async fn driver(client: Client, places: Places, devices: u32, period: Duration) {
    let Places { node, agent, kubelet, cdi, dra } = places;
    let cluster = Cluster::new(client);
    let (healthy, health) = channel(false);
    let (to, wanted) = channel(Wanted::default());
    let (found, uplinks) = channel(None::<agent::Status>);
    let (seen, of_node) = channel(OfNode::default());
    let shares = Sender::new(dra.is_some());
    let (look, soon) = (Look::new(period), period.min(SOON));
    let plugin = Plugin::new(cdi.clone(), devices, health.clone(), look.clone());
    let mut folders = vec![kubelet.join(kubelet::FOLDER)];
    if dra.is_some() {
        folders.extend([dra::socket::REGISTRY, dra::socket::PLUGINS].map(|it| kubelet.join(it)));
    }
    let store = Store::new(kubelet.join(dra::socket::PLUGINS), cdi);
    let driver = Dra::new(cluster.clone(), &node, agent.clone(), store, look.clone());
    let wants = |status: &agent::Status| {
        // One authority for an uplink.
        let mbps = if *shares.borrow() { 0 } else { agent::reservable(status) };
        to.send_if_modified(|wanted| wanted.has_mbps(mbps));
    };
    let has = |status: &agent::Status| {
        wants(status);
        found.send_if_modified(|it| it.replace(status.clone()).as_ref() != Some(status));
    };
    let dra = async {
        let Some(uid) = dra else { return std::future::pending().await };
        let (is_keeper, keeps) = channel(false);
        let has_shares = |has| {
            shares.send_replace(has);
            found.borrow().iter().for_each(wants);
        };
        let (word, serves) = channel(None);
        let devices = driver.devices(uplinks.clone(), health.clone(), serves);
        tokio::join!(
            dra::health::judge(health, soon, word),
            dra::socket::follow(&kubelet, &uid, &driver, &devices, look.looks()),
            dra::slices::keep(&driver, uplinks, of_node, is_keeper, has_shares, look.looks()),
            dra::tend::tend(&driver, devices.clone(), keeps, look.looks()),
        );
    };
    tokio::select! {
        () = agent::follow(agent, period, &healthy, &look, has, || driver.unsettle()) => {}
        () = kubelet::follow(&kubelet, &plugin, look.looks(), soon) => {}
        () = publish::keep(&cluster, &node, wanted, |it| _ = seen.send_replace(it)) => {}
        () = dra => {}
        () = look.at_files(&folders) => {}
    }
}
