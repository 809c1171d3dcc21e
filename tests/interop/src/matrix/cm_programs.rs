//! Programs of librdmacm in the guest, over the kernel's `rdma_cm` and Soft-RoCE, and the same
//! programs on `rocinante run`, or `rocinante rping`. The connection manager connects them, with
//! either side as the client.

mod mckey;
mod place;

use std::net::IpAddr;
use std::sync::atomic::{AtomicU16, Ordering};

use rocinante::device::Backend;
use rocinante_dropin::install::Installation;

use super::Bench;
use super::cell::{Requester, Setting};
use super::node::Step;
use crate::guest::Link;
use place::CmPlace;

/// The commands of a program: `{here}` is the own address, `{there}` the peer's, `{port}` a port of
/// RDMA_PS_TCP.
#[derive(Debug)]
struct CmProgram {
    name: &'static str,
    /// The server's and the client's command.
    words: [&'static str; 2],
    /// The words that the server and the client print.
    say: [&'static str; 2],
}

static CM_PROGRAMS: [CmProgram; 4] = [
    CmProgram {
        name: "rping",
        words: [
            "rping -s -v -S 3000 -a {here} -p {port}",
            "rping -c -v -V -C 5 -S 3000 -a {there} -p {port}",
        ],
        say: ["server ping data: rdma-ping-4: EFGHIJ", "ping data: rdma-ping-4: EFGHIJ"],
    },
    CmProgram {
        name: "ucmatose",
        words: [
            "ucmatose -b {here} -p {port} -c 4 -C 20 -S 3000",
            "ucmatose -s {there} -p {port} -c 4 -C 20 -S 3000",
        ],
        say: ["return status 0", "return status 0"],
    },
    CmProgram {
        name: "udaddy",
        words: ["udaddy -b {here} -c 2 -C 20 -S 900", "udaddy -s {there} -c 2 -C 20 -S 900"],
        say: ["return status 0", "return status 0"],
    },
    CmProgram {
        name: "rdma_server",
        words: ["rdma_server -s {here} -p {port}", "rdma_client -s {there} -p {port}"],
        say: ["rdma_server: end 0", "rdma_client: end 0"],
    },
];

/// The server's and the client's command of `rocinante rping`.
const RPING: [&str; 2] =
    ["rping -s -v -a {here} -p {port}", "rping -c -V -C 5 -a {there} -I {here} -p {port}"];

/// The kinds of runs.
#[derive(Debug, Clone, Copy)]
enum What {
    /// librdmacm's rping and ours.
    Rping,
    /// `rocinante rping` requests a connection where no program listens.
    NobodyListens,
    /// The same program at both ends.
    Program(&'static CmProgram),
    /// Our udaddy requests a datagram service that no program offers.
    NobodyServes,
    /// mckey of the requesting side sends to a multicast group that the other's has joined.
    Mckey,
}

/// A program in a setting; the requesting side is the client. The path MTU is the link's, as
/// `rdma_cm` sets it.
#[derive(Debug, Clone, Copy)]
pub struct CmCell {
    what: What,
    /// Where and how.
    pub setting: Setting,
}

impl CmCell {
    /// Its name: `cm_rping::ours::packet::veth::v4::4096`, or, of a program on `rocinante run`,
    /// `cm_ucmatose_run::ours::packet::veth::v4::4096`.
    #[must_use]
    pub fn name(&self) -> String {
        let name = match self.what {
            What::Rping => "rping".to_owned(),
            What::NobodyListens => "nobody_listens".to_owned(),
            What::Program(program) => format!("{}_run", program.name),
            What::NobodyServes => "nobody_serves_run".to_owned(),
            What::Mckey => "mckey_run".to_owned(),
        };
        format!("cm_{name}::{}", self.setting)
    }
}

impl What {
    fn fits(self, requester: Requester, ipv6: bool) -> bool {
        match self {
            Self::Rping | Self::Program(_) => true,
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
    let programs = CM_PROGRAMS.iter().map(What::Program);
    let others = [What::Rping, What::NobodyListens, What::NobodyServes, What::Mckey];
    for (p, what) in programs.chain(others).enumerate() {
        for (r, requester) in [Requester::Ours, Requester::Rxe].into_iter().enumerate() {
            for (b, backend) in
                [Backend::Udp, Backend::Packet, Backend::Xdp].into_iter().enumerate()
            {
                for (f, ipv6) in [false, true].into_iter().enumerate() {
                    if what.fits(requester, ipv6) {
                        let link = [Link::Veth, Link::Tap][(p + r + b + f) % 2];
                        let setting = Setting { requester, backend, link, ipv6, mtu: 4096 };
                        cells.push(CmCell { what, setting });
                    }
                }
            }
        }
    }
    cells
}

/// The part for each test run: of six settings in a row, two.
#[must_use]
pub fn subset() -> Vec<CmCell> {
    let cells = all().into_iter().enumerate();
    cells.filter(|(index, _)| (index % 6) % 3 == (index / 6) % 3).map(|(_, cell)| cell).collect()
}

impl Bench {
    /// Runs a cell. Error: one of both fails, or prints something unexpected: the text has the
    /// output of both.
    pub fn run_cm_program(&self, cell: &CmCell, installed: &Installation) -> Step {
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
            installed,
            backend: setting.backend,
            here,
            there: network.address(setting.link, setting.ipv6),
            port: 20_000 + NEXT.fetch_add(1, Ordering::Relaxed) % 10_000,
        };
        match (cell.what, setting.requester) {
            (What::Rping, Requester::Ours) => place.we_ask(&CM_PROGRAMS[0], Some(RPING)),
            (What::Rping, Requester::Rxe) => place.they_ask(&CM_PROGRAMS[0], Some(RPING)),
            (What::Program(program), Requester::Ours) => place.we_ask(program, None),
            (What::Program(program), Requester::Rxe) => place.they_ask(program, None),
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
        // Four programs and our rping with either side as the client, 3 backends, 2 families; two
        // runs without a server, for which only we ask; and multicast with either side as the
        // sender, over IPv4.
        assert_eq!(all().len(), 5 * 2 * 3 * 2 + 2 * 3 * 2 + 2 * 3);
        assert_eq!(subset().len(), 5 * 2 * 2 + 2 * 2 + 2);
        let names: BTreeSet<String> = all().iter().map(CmCell::name).collect();
        assert_eq!(names.len(), all().len());
        let of = |of: fn(&Setting) -> String| {
            subset().iter().map(|cell| of(&cell.setting)).collect::<BTreeSet<_>>().len()
        };
        assert_eq!(of(|s| s.backend.to_string()), 3);
        assert_eq!(of(|s| format!("{:?} {}", s.link, s.ipv6)), 4);
    }
}
