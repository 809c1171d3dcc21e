//! The cells of the matrix: each scenario in each setting that makes sense for it, with a name.

use std::fmt;

use rocinante::device::Backend;

use super::scenario::{SCENARIOS, Scenario};
use crate::guest::Link;

/// The requesting side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Requester {
    /// Rocinante requests, the kernel's Soft-RoCE responds.
    Ours,
    /// The kernel's Soft-RoCE requests, Rocinante responds.
    Rxe,
}

/// Where and how a scenario is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting {
    /// The requesting side.
    pub requester: Requester,
    /// How Rocinante's packets are carried.
    pub backend: Backend,
    /// The link.
    pub link: Link,
    /// With IPv6 addresses.
    pub ipv6: bool,
    /// Path MTU in bytes.
    pub mtu: u32,
}

impl Setting {
    /// Whether it is this link's turn.
    pub(super) fn is_their_turn(&self) -> bool {
        self.link == [Link::Veth, Link::Tap][self.number() % 2]
    }

    /// A number by which settings take turns: neighbouring settings have neighbouring numbers.
    pub(super) fn number(&self) -> usize {
        let mtu = MTUS.iter().position(|mtu| *mtu == self.mtu).unwrap_or(0);
        let backend = BACKENDS.iter().position(|backend| *backend == self.backend).unwrap_or(0);
        mtu + backend + usize::from(self.ipv6)
    }
}

/// A scenario in a setting.
#[derive(Clone, Copy)]
pub struct Cell {
    /// The scenario.
    pub scenario: &'static Scenario,
    /// The setting.
    pub setting: Setting,
}

/// All path MTUs.
pub const MTUS: [u32; 5] = [256, 512, 1024, 2048, 4096];

const BACKENDS: [Backend; 3] = [Backend::Udp, Backend::Packet, Backend::Xdp];

/// All cells, in an order in which neighbours share the most.
#[must_use]
pub fn all() -> Vec<Cell> {
    let mut cells = Vec::new();
    for link in [Link::Veth, Link::Tap] {
        for backend in BACKENDS {
            for ipv6 in [false, true] {
                for requester in [Requester::Ours, Requester::Rxe] {
                    for mtu in MTUS {
                        let setting = Setting { requester, backend, link, ipv6, mtu };
                        let fitting = SCENARIOS.iter().filter(|s| s.fits(&setting));
                        cells.extend(fitting.map(|scenario| Cell { scenario, setting }));
                    }
                }
            }
        }
    }
    cells
}

impl Cell {
    /// Its name: `write_sizes::ours::packet::veth::v4::1024`.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}::{}", self.scenario.name, self.setting)
    }

    /// Its properties; the subset covers all pairs of them.
    #[must_use]
    pub fn properties(&self) -> [String; 6] {
        let name = self.name();
        let mut parts = name.split("::").map(str::to_owned);
        [(); 6].map(|()| parts.next().unwrap_or_default())
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let requester = match self.requester {
            Requester::Ours => "ours",
            Requester::Rxe => "rxe",
        };
        let link = match self.link {
            Link::Veth => "veth",
            Link::Tap => "tap",
        };
        let family = if self.ipv6 { "v6" } else { "v4" };
        write!(f, "{requester}::{}::{link}::{family}::{}", self.backend, self.mtu)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::scenario::Needs;
    use std::collections::BTreeSet;

    /// A change of these numbers needs a reason: cells do not vanish.
    #[test]
    fn no_cell_is_missing() {
        let count = |needs| SCENARIOS.iter().filter(|scenario| scenario.needs == needs).count();
        let [everywhere, bridge, turns] = [Needs::Nothing, Needs::Bridge, Needs::Turns].map(count);
        let ours = count(Needs::OursAsks);
        // Of reliable connections: on both links, and three with losses on the bridge only. Of the
        // other services and shared receives: in turns, and another one with losses. Of ATOMIC
        // WRITE three in turns and one with losses; FLUSH in turns where Rocinante requests. Of
        // memory windows and invalidation nine in turns and one with losses. In turns one of
        // regions registered anew, and two of multicast.
        assert_eq!([everywhere, bridge, turns], [34, 6, 34]);
        assert_eq!(ours, 1);
        // With either side as the requester, 3 backends, 2 families, 5 path MTUs.
        let settings = 2 * 3 * 2 * 5;
        let either = (2 * everywhere + bridge + turns) * settings;
        assert_eq!(all().len(), either + ours * settings / 2);
    }

    #[test]
    fn what_takes_turns_is_on_both_links() {
        let cells = all().into_iter().filter(|cell| cell.scenario.needs == Needs::Turns);
        let of = |link| move |cell: &&Cell| cell.setting.link == link;
        let cells: Vec<Cell> = cells.collect();
        for of in [of(Link::Veth), of(Link::Tap)] {
            let seen: BTreeSet<String> = cells
                .iter()
                .filter(of)
                .map(|cell| format!("{:?} {}", cell.setting.requester, cell.setting.backend))
                .collect();
            assert_eq!(seen.len(), 6, "each backend with each side as the requester");
        }
    }

    #[test]
    fn names_are_unique() {
        let names: BTreeSet<String> = all().iter().map(Cell::name).collect();
        assert_eq!(names.len(), all().len());
    }
}
