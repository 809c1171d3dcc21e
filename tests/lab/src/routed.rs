//! Containers on networks of their own, with a host that forwards between them.

use crate::container::Container;
use crate::error::LabError;
use crate::netns::Netns;
use crate::{LabConfig, forward, wait_until_none};

/// Containers behind a host that routes.
///
/// ```text
///  container 0                  host                    container 1
///  eth0 10.78.0.2/24 ── veth0 10.78.0.1 │ veth1 10.78.1.1 ── eth0 10.78.1.2/24
/// ```
///
/// From the view of container 0, `veth1` is the host's uplink.
#[derive(Debug)]
pub struct Routed {
    host: Netns,
    containers: Vec<Container>,
}

impl Routed {
    /// Creates the namespaces, joins them, and waits until the links are up and every address
    /// usable. The links have one queue, also if `config` has another number.
    ///
    /// # Errors
    /// As [`Lab::new`](crate::Lab::new); also if `/proc/sys` cannot be written.
    pub fn new(config: &LabConfig) -> Result<Self, LabError> {
        let host = Container::new_netns()?;
        forward(&host)?;
        let containers = (0..config.containers)
            .map(|index| Container::routed(&host, index, config))
            .collect::<Result<Vec<_>, _>>()?;
        let routed = Self { host, containers };
        wait_until_none(|| {
            let waiting = routed.containers.iter().map(Container::not_yet_up);
            Ok(waiting.collect::<Result<Vec<_>, _>>()?.concat())
        })?;
        Ok(routed)
    }

    /// The host's namespace.
    #[must_use]
    pub fn host(&self) -> &Netns {
        &self.host
    }

    /// All containers.
    #[must_use]
    pub fn containers(&self) -> &[Container] {
        &self.containers
    }
}
