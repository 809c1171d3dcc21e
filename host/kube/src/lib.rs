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
mod sysfs;
mod watch;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use kube::{Client, Config};
use parking_lot::Mutex;
use rocinante_placement::{Malformed, Uplink, to_json};
use tokio::net::TcpListener;

use self::extender::{Extender, REQUEST_TIMES};
use self::http::Service;
use self::ledger::Ledger;
use self::objects::Cluster;
use self::pfs::Pfs;

pub use self::extender::ASSUMED_FOR;
pub use self::http::BODY_MAX;
pub use self::objects::{PLACED, REQUIRED, UPLINKS};
pub use self::sysfs::{Named, UplinkError};

/// How long to wait before an uplink's annotation is written again, after the API server refused.
const PUBLISH_AGAIN: Duration = Duration::from_secs(5);

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

/// Writes the uplinks of a node into its annotation [`UPLINKS`], and serves `/getpfs` and
/// `/healthz` for ever.
///
/// # Errors
/// The uplinks have no JSON, which cannot be.
pub async fn node(
    client: Client,
    listener: TcpListener,
    name: &str,
    uplinks: &[Uplink],
) -> Result<(), Malformed> {
    let text = to_json(uplinks)?;
    let (cluster, ledger) = (Cluster::new(client), Arc::<Mutex<Ledger>>::default());
    let pfs = Pfs::new(name, Arc::clone(&ledger));
    let published = async {
        while let Err(failed) = cluster.publish(name, &text).await {
            tracing::warn!("the uplinks of {name} are not published: {failed}");
            tokio::time::sleep(PUBLISH_AGAIN).await;
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = published => {}
        () = watch::watch(&cluster, &ledger, Some(name)) => {}
        () = http::serve(listener, Service::Node(pfs)) => {}
    }
    Ok(())
}
