//! Two containers and the veth between them: the shortest path of packets.

use crate::container::Container;
use crate::error::Result;
use crate::{LabConfig, wait_until_none};

/// Two containers joined by one veth, without a host between them. Each `eth0` is the other end of
/// the other's veth.
#[derive(Debug)]
pub struct Pair {
    containers: [Container; 2],
}

impl Pair {
    /// Creates the namespaces, joins them, and waits until the links are up and every address
    /// usable. Ignores the number of containers in `config`: there are two.
    pub fn new(config: &LabConfig) -> Result<Self> {
        let pair = Self { containers: Container::pair(config)? };
        wait_until_none(|| {
            let waiting = pair.containers.iter().map(Container::not_yet_up);
            Ok(waiting.collect::<Result<Vec<_>, _>>()?.concat())
        })?;
        Ok(pair)
    }

    /// Both containers.
    #[must_use]
    pub fn containers(&self) -> &[Container; 2] {
        &self.containers
    }
}
