//! The parts of the lab that are available here, found out by trying.

use crate::error::{LabError, Result};
use crate::netns::Netns;
use crate::rules::{Match, Rule};
use crate::userns::{Privilege, privilege};
use crate::{Lab, LabConfig, Tbf, VXLAN};

/// The available parts, and why others are not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Availability {
    /// Where the rights come from; `None` without rights.
    pub privilege: Option<Privilege>,
    /// Namespaces, veths and a bridge: without them there is no lab.
    pub lab: Result<(), String>,
    /// The host's nftables rules on the bridge.
    pub nft: Result<(), String>,
    /// The host's traffic shaping.
    pub tc: Result<(), String>,
    /// [`Container::set_udp_segmentation`](crate::Container::set_udp_segmentation).
    pub ethtool: Result<(), String>,
    /// VXLAN between hosts.
    pub vxlan: Result<(), String>,
}

impl Availability {
    /// Tries everything once, in a small lab of its own; takes some 50 ms.
    #[must_use]
    pub fn probe() -> Self {
        let in_words = |error: LabError| error.to_string();
        let lab = match Lab::new(&LabConfig { containers: 1, ..LabConfig::default() }) {
            Ok(lab) => lab,
            Err(error) => return Self::nothing(&in_words(error)),
        };
        Self {
            privilege: privilege(),
            lab: Ok(()),
            nft: rules_work(lab.host()).map_err(in_words),
            tc: lab.shape(0, &Tbf::mbit(100)).and_then(|s| s.stats()).map(drop).map_err(in_words),
            ethtool: lab.container(0).set_udp_segmentation(false).map_err(in_words),
            vxlan: lab
                .host()
                .command(&format!("ip link add {VXLAN} type vxlan id 77 dstport 4789"))
                .map_or_else(|error| Err(format!("this kernel has no VXLAN: {error}")), |_| Ok(())),
        }
    }

    fn nothing(why: &str) -> Self {
        let lab = || Err(why.to_owned());
        let privilege = privilege();
        Self { privilege, lab: lab(), nft: lab(), tc: lab(), ethtool: lab(), vxlan: lab() }
    }
}

fn rules_work(host: &Netns) -> Result {
    Rule::count(host, &Match::roce())?.counter()?;
    Rule::lose(host, &Match::roce(), 1.0)?.remove()
}
