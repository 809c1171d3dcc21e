//! The devices of a process, and the record of those that processes share.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::counts::{self, PortKey};
use super::files::hold;
use super::{nodes, tree};
use crate::devices::names::{NamedInterface, Names};
use crate::kernel::descriptors::network_namespace;

/// Names the environment variable with the directory. The library of paths leads into it.
pub const PATHS_VARIABLE: &str = "ROCINANTE_PATHS";

/// The file with the names.
const RECORD: &str = "names";

/// The contents of the directory's record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    /// The only network namespace whose devices it has.
    namespace: u64,
    /// The list of devices, as the user has given it.
    list: String,
    names: Names,
}

/// The devices of this process.
#[derive(Debug, Default, Clone)]
pub struct Devices {
    names: Names,
    root: Option<PathBuf>,
}

impl Devices {
    /// Those that this process names by itself.
    #[must_use]
    pub const fn own() -> Self {
        Self { names: Names::none(), root: None }
    }

    /// Those of the processes that share this directory.
    #[must_use]
    pub fn shared(root: &Path) -> Self {
        Self { names: Names::none(), root: Some(root.to_owned()) }
    }

    /// Those of the directory that the environment names, if it names one.
    #[must_use]
    pub fn of_environment() -> Self {
        let root = std::env::var_os(PATHS_VARIABLE).map(PathBuf::from);
        Self { names: Names::none(), root: root.filter(|root| root.is_absolute()) }
    }

    /// The directory.
    #[must_use]
    pub fn root(&self) -> Option<&Path> {
        self.root.as_deref()
    }

    /// Whether the directory is for the calling thread's network namespace and this list.
    #[must_use]
    pub fn is_for(&self, list: &str) -> bool {
        let record = self.root.as_deref().and_then(read);
        record.is_some_and(|it| {
            it.list == list.trim() && network_namespace().is_ok_and(|own| own == it.namespace)
        })
    }

    /// The devices as they are now; brings the directory up to date, if this process may. Error: as
    /// [`Names::list`].
    pub fn list(&mut self, list: Option<&str>) -> io::Result<Vec<NamedInterface>> {
        let Some(root) = self.root.clone() else { return self.names.list(list) };
        // Without it names may be read all the same.
        let held = hold(&root);
        let fresh = Record {
            namespace: network_namespace()?,
            list: list.unwrap_or_default().trim().to_owned(),
            names: Names::none(),
        };
        let known = read(&root).unwrap_or_else(|| fresh.clone());
        // A program that enters another namespace, or asks for other devices, is on its own.
        if (known.namespace, &known.list) != (fresh.namespace, &fresh.list) {
            return self.names.list(list);
        }
        self.names.take_in(&known.names);
        let devices = self.names.list(list)?;
        if held.is_ok() {
            // Another user's process may only read.
            let now = Record { names: self.names.clone(), ..fresh };
            let written = if read(&root).as_ref() == Some(&now) {
                Ok(())
            } else {
                let text = serde_json::to_vec(&now).map_err(io::Error::other);
                text.and_then(|text| tree::replace(&root, Path::new(RECORD), &text))
            };
            let _ = written.and_then(|()| tree::show(&root, &devices));
        }
        Ok(devices)
    }

    /// Writes the counters of the devices, as far as they have changed. Error: the directory is
    /// another user's, or others write for too long.
    pub fn count(&mut self, list: Option<&str>) -> io::Result<()> {
        let Some(root) = self.root.clone() else { return Ok(()) };
        let devices = self.list(list)?;
        if !self.is_for(list.unwrap_or_default()) {
            return Ok(());
        }
        let _held = hold(&root)?;
        let all = counts::sum(&root);
        for device in &devices {
            let port = PortKey::of(device.interface.index)?;
            let mut counts = all.get(&port).cloned().unwrap_or_default();
            nodes::count_downs(&device.interface, &mut counts);
            tree::count(&root, device, &counts)?;
        }
        Ok(())
    }
}

fn read(root: &Path) -> Option<Record> {
    serde_json::from_slice(&fs::read(root.join(RECORD)).ok()?).ok()
}

#[cfg(test)]
mod tests;
