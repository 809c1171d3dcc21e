//! The sums that a restarted agent goes on from: a file beside the state, of one boot and one
//! network namespace.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use rocinante_netdev::handed::page::{Amounts, NO_LIMIT, RESOURCES, Usage};
use serde::{Deserialize, Serialize};

use super::quota::Quota;
use super::{Container, Counters, Device};
use crate::state::replace;

const VERSION: u32 = 1;
/// The longest file that is read.
const BYTES_MAX: u64 = 64 << 20;

/// Where it is, and whose.
#[derive(Debug)]
pub(super) struct CountersFile {
    path: PathBuf,
    boot: String,
    namespace: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Content {
    version: u32,
    boot: String,
    namespace: u64,
    containers: Vec<Kept>,
}

/// A container.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Kept {
    pub(super) host_end: u32,
    name: String,
    namespace: u64,
    /// The counters of devices that are gone, in the order of a page: a later agent may have more.
    past: BTreeMap<String, Vec<u64>>,
    devices: Vec<KeptDevice>,
    /// The most that its programs held, and refusals.
    #[serde(default)]
    peak: Amounts,
    #[serde(default)]
    events: Amounts,
    /// The most that its programs could hold: their limits, or the excess that was tolerated.
    bound: Option<Amounts>,
}

#[derive(Debug, Serialize, Deserialize)]
struct KeptDevice {
    key: u64,
    name: String,
    counters: Vec<u64>,
}

pub(super) fn path(state: &Path) -> PathBuf {
    state.with_file_name("counters.json")
}

impl CountersFile {
    /// Beside the state, whose directory is the agent's own.
    pub(super) fn beside(state: &Path, namespace: u64) -> io::Result<Self> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
        Ok(Self { path: path(state), boot, namespace })
    }

    /// The containers of an earlier agent.
    ///
    /// # Errors
    /// Why the file is not used. Without one there are none.
    pub(super) fn read(&self) -> Result<Vec<Kept>, String> {
        let mut text = String::new();
        match fs::File::open(&self.path) {
            Ok(file) => {
                file.take(BYTES_MAX).read_to_string(&mut text).map_err(|e| e.to_string())?
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(e.to_string()),
        };
        let content: Content = serde_json::from_str(&text).map_err(|e| e.to_string())?;
        let is = (content.version, content.boot.as_str(), content.namespace);
        if is != (VERSION, self.boot.as_str(), self.namespace) {
            return Err("they are of another boot, network namespace or version".into());
        }
        Ok(content.containers)
    }

    /// Writes these.
    ///
    /// # Errors
    /// No room, or no right: the old file stays.
    pub(super) fn write(&self, containers: Vec<Kept>) -> io::Result<()> {
        let (boot, namespace) = (self.boot.clone(), self.namespace);
        let content = Content { version: VERSION, boot, namespace, containers };
        replace(&self.path, &serde_json::to_vec(&content).map_err(io::Error::other)?)
    }
}

impl Kept {
    pub(super) fn of(host_end: u32, container: &Container) -> Self {
        let past = container.past.iter().map(|(name, it)| (name.clone(), it.0.to_vec())).collect();
        let kept = |device: &Device| {
            let (key, counters) = (device.key, device.counters.0.to_vec());
            Some(KeptDevice { key, name: device.name.clone()?, counters })
        };
        let devices = container.devices.values().filter_map(kept).collect();
        let (name, namespace) = (container.name.clone(), container.namespace);
        let Usage { peak, events, .. } = container.quota.usage;
        let bound = Some(container.quota.bound());
        Self { host_end, name, namespace, past, devices, peak, events, bound }
    }
}

impl From<Kept> for Container {
    fn from(kept: Kept) -> Self {
        let past = kept.past.into_iter().map(|(name, counts)| (name, all(&counts))).collect();
        let device = |it: KeptDevice| Device {
            key: it.key,
            page: None,
            slot: None,
            name: Some(it.name),
            counters: all(&it.counters),
            now: None,
        };
        let devices = (0..).zip(kept.devices.into_iter().map(device)).collect();
        let usage = Usage { peak: kept.peak, events: kept.events, ..Usage::default() };
        let quota = Quota::of_earlier(usage, kept.bound.unwrap_or([NO_LIMIT; RESOURCES.len()]));
        Self { name: kept.name, namespace: kept.namespace, past, devices, quota }
    }
}

fn all(counts: &[u64]) -> Counters {
    let mut all = Counters::default();
    all.0.iter_mut().zip(counts).for_each(|(to, from)| *to = *from);
    all
}
