//! RDMA bandwidth of Kubernetes' nodes: reserved, placed, and never promised twice.
//!
//! [`extender`] serves kube-scheduler. [`node`] runs on each node: it publishes the node's uplinks,
//! and names the taken rates as the daemon of Link et al. does. `docs/kubernetes.md` is the manual.

#![forbid(unsafe_code)]

mod extender;
mod http;
mod ledger;
mod objects;
mod pfs;
mod publish;
mod said;
mod sysfs;
mod watch;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use kube::{Client, Config};
use parking_lot::Mutex;
use rocinante_placement::{Uplink, to_json};
use tokio::net::TcpListener;
use tokio::sync::watch::channel;

use self::extender::{Extender, REQUEST_TIMES};
use self::http::Service;
use self::ledger::Ledger;
use self::objects::Cluster;
use self::pfs::Pfs;

pub use self::extender::ASSUMED_FOR;
pub use self::http::BODY_MAX;
pub use self::objects::{PLACED, REQUIRED, UPLINKS};
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
/// whether a pod is bound that the watch has not shown.
pub async fn extender(client: Client, listener: TcpListener, assumed_for: Duration) {
    let (cluster, ledger) = (Cluster::new(client), Arc::<Mutex<Ledger>>::default());
    let extender = Extender::new(cluster.clone(), Arc::clone(&ledger), assumed_for);
    let watched = async {
        cluster.fence_all(assumed_for * REQUEST_TIMES).await;
        watch::watch(&cluster, &ledger, None).await;
    };
    tokio::select! {
        () = watched => {}
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
    let (to, wanted) = channel(None);
    let read = async {
        loop {
            match to_json(&uplinks()) {
                Ok(text) => to.send_if_modified(|wanted| wanted.replace(text) != *wanted),
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
        () = publish::keep(&cluster, name, wanted) => {}
        () = watch::watch(&cluster, &ledger, Some(name)) => {}
        () = http::serve(listener, Service::Node(pfs)) => {}
    }
}
