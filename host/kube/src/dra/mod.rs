//! The driver of dynamic resource allocation: `rocinante.dev`. The scheduler shares the capacities
//! of a node's uplinks out ([`slices`]); the kubelet has a claim prepared before its pods have a
//! network ([`Dra::prepare`]), and the agent reserves what was allocated.

pub(crate) mod claim;
pub(crate) mod health;
mod objects;
pub(crate) mod quantity;
pub(crate) mod slices;
pub(crate) mod socket;
pub(crate) mod state;
pub(crate) mod tend;

use std::path::PathBuf;
use std::sync::Arc;

use futures_util::future::join_all;
use serde_json::json;
use tokio::sync::Notify;
use tokio::sync::watch::Receiver;
use tonic::{Request, Response, Status};

use self::api::dra_plugin_server::DraPlugin;
use self::api::{
    Device, PrepareRequest, PrepareResponse, Prepared, UnprepareRequest, UnprepareResponse,
    Unprepared,
};
use self::claim::{Record, is_id};
use self::health::Devices;
use self::quantity::short;
use self::state::{Locked, Store};
use crate::agent::{self, commanded};
use crate::look::Look;
use crate::objects::Cluster;

/// The kubelet's API. Tests have the other halves of it.
#[allow(dead_code, missing_docs, unreachable_pub, clippy::all)]
pub(crate) mod api {
    include!(concat!(env!("OUT_DIR"), "/k8s.io.kubelet.pkg.apis.dra.v1.rs"));
}

/// The driver's name.
pub const DRIVER: &str = "rocinante.dev";

/// The driver. Its clones are one.
#[derive(Clone)]
pub(crate) struct Dra {
    cluster: Cluster,
    node: Arc<str>,
    agent: Arc<PathBuf>,
    store: Arc<Store>,
    /// Something is to be mended.
    unsettled: Arc<Notify>,
    look: Look,
}

impl Dra {
    pub(crate) fn new(
        cluster: Cluster,
        node: &str,
        agent: PathBuf,
        store: Store,
        look: Look,
    ) -> Self {
        let (agent, store) = (Arc::new(agent), Arc::new(store));
        Self { cluster, node: node.into(), agent, store, unsettled: Arc::default(), look }
    }

    /// A call left something, or the agent may have forgotten all.
    pub(crate) fn unsettle(&self) {
        self.unsettled.notify_one();
    }

    /// Its devices, by the agent's last word, by whether it answers, and by whether it serves.
    pub(crate) fn devices(
        &self,
        uplinks: Receiver<Option<agent::Status>>,
        is_there: Receiver<bool>,
        serves: Receiver<Option<bool>>,
    ) -> Devices {
        let (node, store) = (Arc::clone(&self.node), Arc::clone(&self.store));
        Devices { node, store, uplinks, is_there, serves }
    }

    /// Prepares a claim, also one that is prepared: it is as the API server has it now, or stays as
    /// it was if that does not answer. A claim that cannot be prepared leaves nothing.
    async fn prepare(&self, asked: &api::Claim) -> Result<Record, String> {
        let uid = &asked.uid;
        if !is_id(uid) {
            return Err(format!("{} is no claim's UID", short(uid)));
        }
        let claim = self.cluster.claim(&asked.namespace, &asked.name).await;
        let claim = claim.map_err(|failed| format!("the claim: {failed}"));
        let fresh = claim.and_then(|claim| Record::read(&claim, uid, &self.node));
        let mut state = self.locked().await?;
        let known = state.records.get(uid).cloned();
        let is_new = known.is_none();
        let record = match (known, fresh) {
            (Some(known), Err(_)) => known,
            (_, fresh) => fresh?,
        };
        let done = self.apply(&mut state, &record, is_new).await;
        if let Err(why) = &done
            && is_new
        {
            tracing::warn!(claim = record.name, "it is not prepared: {why}");
            self.undo(&mut state, uid).await.unwrap_or_else(|error| tracing::error!("{error}"));
        }
        done.map(|()| record)
    }

    async fn locked(&self) -> Result<Locked<'_>, String> {
        let locked = self.store.locked().await.map_err(|error| format!("the state: {error}"))?;
        if locked.is_lost {
            self.unsettle();
        }
        Ok(locked)
    }

    /// Has the file, CDI and the agent say what a claim is. One that is new is in the file first,
    /// in case the driver is killed meanwhile. Other pods are there last: that the file has them
    /// means that the agent has.
    async fn apply(
        &self,
        state: &mut Locked<'_>,
        record: &Record,
        is_new: bool,
    ) -> Result<(), String> {
        let no_state = |error| format!("the state: {error}");
        if is_new {
            state.insert(record).map_err(no_state)?;
        }
        state.write_cdi(record).map_err(|error| format!("the file of CDI: {error}"))?;
        commanded(&self.agent, &record.command()).await?;
        state.insert(record).map_err(no_state)
    }

    /// Forgets a claim. The agent may be away: it is settled when it is back.
    async fn undo(&self, state: &mut Locked<'_>, uid: &str) -> Result<(), String> {
        let unclaim = json!({"version": 1, "command": "unclaim", "name": uid});
        if let Err(why) = commanded(&self.agent, &unclaim).await {
            tracing::warn!(uid, "the agent keeps the claim: {why}");
            self.unsettle();
        }
        state.remove(uid).map_err(|error| format!("the state: {error}"))
    }

    /// Forgets a claim, also one that is not known.
    async fn unprepare(&self, uid: &str) -> Result<(), String> {
        if !is_id(uid) {
            return Ok(());
        }
        self.undo(&mut self.locked().await?, uid).await
    }
}

fn device(record: &Record, share: &claim::Share) -> Device {
    Device {
        requests: vec![share.request.split('/').next().unwrap_or_default().to_owned()],
        pool: share.pool.clone(),
        device: share.device.clone(),
        cdi_ids: vec![record.cdi_id(share)],
        share_id: share.share_id.clone(),
    }
}

#[tonic::async_trait]
impl DraPlugin for Dra {
    async fn node_prepare_resources(
        &self,
        request: Request<PrepareRequest>,
    ) -> Result<Response<PrepareResponse>, Status> {
        let each = request.into_inner().claims.into_iter().map(async |claim| {
            let prepared = match self.prepare(&claim).await {
                Ok(record) => Prepared {
                    devices: record.shares.iter().map(|it| device(&record, it)).collect(),
                    error: String::new(),
                },
                Err(error) => Prepared { devices: Vec::new(), error },
            };
            (claim.uid, prepared)
        });
        let claims = join_all(each).await.into_iter().collect();
        // Their status, and the slice.
        self.look.now();
        Ok(Response::new(PrepareResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<UnprepareRequest>,
    ) -> Result<Response<UnprepareResponse>, Status> {
        let each = request.into_inner().claims.into_iter().map(async |claim| {
            let error = self.unprepare(&claim.uid).await.err().unwrap_or_default();
            (claim.uid, Unprepared { error })
        });
        Ok(Response::new(UnprepareResponse { claims: join_all(each).await.into_iter().collect() }))
    }
}
