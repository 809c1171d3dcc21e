//! Programs of librdmacm in the guest, over the kernel's `rdma_cm` and Soft-RoCE, and our programs
//! of the same names, or the same programs on `rocinante run`. The connection manager connects
//! them, with either side as the client.

mod mckey;
mod place;

use std::net::IpAddr;
use std::sync::atomic::{AtomicU16, Ordering};

use rocinante::device::Backend;

use super::Bench;
use super::cell::{Requester, Setting};
use super::node::Step;
use super::ours::Programs;
use crate::guest::Link;
use place::CmPlace;

/// The commands of a program on both sides: `{here}` is the own address, `{there}` the peer's,
/// `{port}` a port of RDMA_PS_TCP.
#[derive(Debug)]
pub struct CmProgram {
    /// The cell's name.
    name: &'static str,
    /// The server's and the client's command in the guest, and, unmodified, at our end.
    theirs: [&'static str; 2],
    /// Our server's and client's commands.
    ours: [&'static str; 2],
    /// The words that the server and the client in the guest print.
    say: [&'static str; 2],
    /// A word of our JSON.
    done: &'static str,
}

/// All programs.
pub static CM_PROGRAMS: [CmProgram; 4] = [
    CmProgram {
        name: "rping",
        theirs: [
            "rping -s -v -S 3000 -a {here} -p {port}",
            "rping -c -v -V -C 5 -S 3000 -a {there} -p {port}",
        ],
        ours: [
            "rping -s -v -a {here} -p {port}",
            "rping -c -V -C 5 -a {there} -I {here} -p {port}",
        ],
        say: ["server ping data: rdma-ping-4: EFGHIJ", "ping data: rdma-ping-4: EFGHIJ"],
        done: "\"rounds\":5",
    },
    CmProgram {
        name: "ucmatose",
        theirs: [
            "ucmatose -b {here} -p {port} -c 4 -C 20 -S 3000",
            "ucmatose -s {there} -p {port} -c 4 -C 20 -S 3000",
        ],
        ours: [
            "ucmatose -b {here} -p {port} -c 4 -C 20 -S 3000",
            "ucmatose -s {there} -b {here} -p {port} -c 4 -C 20 -S 3000",
        ],
        say: ["return status 0", "return status 0"],
        done: "\"messages\":160",
    },
    CmProgram {
        name: "udaddy",
        theirs: ["udaddy -b {here} -c 2 -C 20 -S 900", "udaddy -s {there} -c 2 -C 20 -S 900"],
        ours: [
            "udaddy -b {here} -c 2 -C 20 -S 900",
            "udaddy -s {there} -b {here} -c 2 -C 20 -S 900 --patience 8",
        ],
        say: ["return status 0", "return status 0"],
        done: "\"sent\":40,\"received\":40",
    },
    CmProgram {
        name: "rdma_server",
        theirs: ["rdma_server -s {here} -p {port}", "rdma_client -s {there} -p {port}"],
        ours: ["rdma-server -s {here} -p {port}", "rdma-client -s {there} -b {here} -p {port}"],
        say: ["rdma_server: end 0", "rdma_client: end 0"],
        done: "\"messages\":2",
    },
];

/// The kinds of runs.
#[derive(Debug, Clone, Copy)]
enum What {
    /// A program at both sides.
    Program(&'static CmProgram),
    /// We request a connection where no program listens.
    NobodyListens,
    /// We request a datagram service that no program offers.
    NobodyServes,
    /// The requesting side sends to a multicast group that the other has joined.
    Mckey,
}

/// A program in a setting; the requesting side is the client. The path MTU is the link's, as
/// `rdma_cm` sets it.
#[derive(Debug, Clone, Copy)]
pub struct CmCell {
    what: What,
    /// Where and how.
    pub setting: Setting,
    /// The same program runs at our end, too.
    pub unmodified: bool,
}

impl CmCell {
    /// Its name: `cm_ucmatose::ours::packet::veth::v4::4096`, or, unmodified,
    /// `cm_ucmatose_run::ours::packet::veth::v4::4096`.
    #[must_use]
    pub fn name(&self) -> String {
        let run = if self.unmodified { "_run" } else { "" };
        format!("cm_{}{run}::{}", self.what.name(), self.setting)
    }
}

impl What {
    fn name(self) -> &'static str {
        match self {
            Self::Program(program) => program.name,
            Self::NobodyListens => "nobody_listens",
            Self::NobodyServes => "nobody_serves",
            Self::Mckey => "mckey",
        }
    }

    fn fits(self, requester: Requester, ipv6: bool) -> bool {
        match self {
            Self::Program(_) => true,
            Self::NobodyListens | Self::NobodyServes => requester == Requester::Ours,
            // Linux joins no IPv6 group for RoCE v2 (`cma_iboe_join_multicast`: ENOTSUPP).
            Self::Mckey => !ipv6,
        }
    }
}

/// Each program with either side as the client, on each backend, with IPv4 and IPv6; and ports
/// without a listener or a service. Links take turns.
#[must_use]
pub fn all() -> Vec<CmCell> {
    let mut cells = Vec::new();
    let others = [What::NobodyListens, What::NobodyServes, What::Mckey];
    for (p, what) in CM_PROGRAMS.iter().map(What::Program).chain(others).enumerate() {
        for (r, requester) in [Requester::Ours, Requester::Rxe].into_iter().enumerate() {
            for (b, backend) in
                [Backend::Udp, Backend::Packet, Backend::Xdp].into_iter().enumerate()
            {
                for (f, ipv6) in [false, true].into_iter().enumerate() {
                    if what.fits(requester, ipv6) {
                        let link = [Link::Veth, Link::Tap][(p + r + b + f) % 2];
                        let setting = Setting { requester, backend, link, ipv6, mtu: 4096 };
                        cells.push(CmCell { what, setting, unmodified: false });
                    }
                }
            }
        }
    }
    cells
}

/// The programs' settings again, unmodified at both ends.
#[must_use]
pub fn unmodified() -> Vec<CmCell> {
    let programs = all().into_iter().filter(|cell| matches!(cell.what, What::Program(_)));
    programs.map(|cell| CmCell { unmodified: true, ..cell }).collect()
}

/// The part for each test run: of the six settings of each program and client, two; and some of
/// those unmodified.
#[must_use]
pub fn subset() -> Vec<CmCell> {
    let own = all().into_iter().enumerate();
    let own = own.filter(|(index, _)| (index % 6) % 3 == (index / 6) % 3).map(|(_, cell)| cell);
    own.chain(unmodified().into_iter().step_by(7)).collect()
}

impl Bench {
    /// Runs a cell; `ours` is what runs at our end.
    ///
    /// # Errors
    /// One of both fails, or prints something unexpected: the text has the output of both.
    pub fn run_cm_program(&self, cell: &CmCell, ours: Programs<'_>) -> Step {
        static NEXT: AtomicU16 = AtomicU16::new(0);
        let setting = cell.setting;
        let network = self.guest.network();
        let container = network.container(&self.lab, setting.link);
        let here: IpAddr = match setting.ipv6 {
            true => container.ipv6().ok_or("the container has no IPv6")?.into(),
            false => container.ipv4().into(),
        };
        let place = CmPlace {
            bench: self,
            netns: container.netns(),
            device: network.device(setting.link),
            ours,
            backend: setting.backend,
            here,
            there: network.address(setting.link, setting.ipv6),
            port: 20_000 + NEXT.fetch_add(1, Ordering::Relaxed) % 10_000,
        };
        match (cell.what, setting.requester) {
            (What::Program(program), Requester::Ours) => place.we_ask(program),
            (What::Program(program), Requester::Rxe) => place.they_ask(program),
            (What::NobodyListens, _) => place.nobody_listens(),
            (What::NobodyServes, _) => place.nobody_serves(),
            (What::Mckey, Requester::Ours) => place.we_send(),
            (What::Mckey, Requester::Rxe) => place.they_send(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// A change of these numbers needs a reason: cells do not vanish.
    #[test]
    fn no_cell_is_missing() {
        // Four programs with either side as the client, 3 backends, 2 families; two runs without a
        // server, for which only we ask; and multicast with either side as the sender, over IPv4.
        // Unmodified, the four programs again.
        assert_eq!(all().len(), 4 * 2 * 3 * 2 + 2 * 3 * 2 + 2 * 3);
        assert_eq!(unmodified().len(), 4 * 2 * 3 * 2);
        assert_eq!(subset().len(), 4 * 2 * 2 + 2 * 2 + 2 + 7);
        let cells = [all(), unmodified()].concat();
        let names: BTreeSet<String> = cells.iter().map(CmCell::name).collect();
        assert_eq!(names.len(), cells.len());
        let of = |of: fn(&Setting) -> String| {
            subset().iter().map(|cell| of(&cell.setting)).collect::<BTreeSet<_>>().len()
        };
        assert_eq!(of(|s| s.backend.to_string()), 3);
        assert_eq!(of(|s| format!("{:?} {}", s.link, s.ipv6)), 4);
    }
}
