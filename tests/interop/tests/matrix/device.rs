//! `rocinante-interop device`, the command for machines with a card. Here the guest is that
//! machine, and the container at the bridge is our side. The report must account for the whole
//! matrix, also if only a part of it ran.

use std::process::Command;

use rocinante_interop::guest::Link;
use rocinante_interop::matrix::{Bench, Step};

/// The program that users run by `cargo xtask interop --device`.
const PROGRAM: &str = env!("CARGO_BIN_EXE_rocinante-interop");

/// A run of the command and its expected results.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// Whether it runs in the bridge's namespace and enters the container's by `--netns`; else it
    /// starts in the container's.
    beside: bool,
    /// Options besides those that name the guest's device; and replacements for these.
    options: &'static [&'static str],
    instead: &'static [(&'static str, &'static str)],
    filters: &'static [&'static str],
    /// Number of cells that pass, and that fail.
    passed: usize,
    failed: usize,
    /// Words that the report and the errors must contain.
    says: &'static [&'static str],
}

const USUAL: Case = Case {
    name: "",
    beside: false,
    options: &[],
    instead: &[],
    filters: &[],
    passed: 0,
    failed: 0,
    says: &[],
};

pub(crate) static CASES: [Case; 8] = [
    Case {
        name: "every_part",
        filters: &[
            "check::device,check::operations::ipv6_1024,itself::send_sizes::v4::1024,itself::requests_lost::v6::512,read_many::ours::packet::v6::2048,\
             message_too_long::ours::udp::v4::256,mixed::device::afxdp::v4::4096,ib_write_lat::ours::packet::v4",
        ],
        passed: 7,
        says: &[
            "| driver | rdma_rxe |",
            "| node GUID | ",
            "libibverbs libibverbs.so.1",
            "perftest ",
            "10.77.0.200",
            "between two queue pairs of one device nothing can be lost",
            "a SEND longer than the receive ends in REM_OP_ERR",
            "left out by the filter",
        ],
        ..USUAL
    },
    Case {
        name: "losses_at_our_interface",
        filters: &["requests_lost::", "ours::,device::", "v4::1024"],
        // udp both ways, packet only as the sender.
        passed: 3,
        says: &["no rule on our own interface eth0 binds what afxdp sends", "what packet receives"],
        ..USUAL
    },
    Case {
        name: "losses_at_the_other_end",
        beside: true,
        filters: &[
            "requests_lost::,nobody_answers::,invalidations_lost::",
            "ours::,device::",
            "v6::1024",
        ],
        passed: 18,
        says: &["veth0 (the other end of our veth)"],
        ..USUAL
    },
    Case {
        name: "held_to_the_specification",
        options: &["--expect", "specification"],
        filters: &["message_too_long::ours::udp::v4::1024,send_zero::ours::udp::v4::1024"],
        passed: 1,
        failed: 1,
        says: &["- `message_too_long::ours::udp::v4::1024`", "should end in REM_INV_REQ_ERR"],
        ..USUAL
    },
    Case {
        name: "no_agent",
        instead: &[("--agent", "10.77.0.200:9")],
        says: &["no verbs agent answers at 10.77.0.200:9", "cargo xtask interop agent"],
        ..USUAL
    },
    Case {
        name: "no_device",
        instead: &[("--device", "rxe99")],
        says: &["there is no device \"rxe99\"", "RDMA devices: rxe0"],
        ..USUAL
    },
    Case {
        name: "no_address",
        instead: &[("--address", "10.77.0.99")],
        says: &["has not the RoCE v2 address 10.77.0.99", "rxe0 has 10.77.0.200"],
        ..USUAL
    },
    Case {
        name: "no_address_of_ours",
        instead: &[("--ours", "10.77.0.99")],
        says: &["no interface has 10.77.0.99", "eth0 has 10.77.0.1", "--netns"],
        ..USUAL
    },
];

impl Case {
    pub(crate) fn run(&self, bench: &Bench) -> Step {
        let network = bench.guest.network();
        let container = network.container(&bench.lab, Link::Veth);
        let theirs = network.address(Link::Veth, false).to_string();
        let ours = container.ipv4().to_string();
        // The report does not exist before.
        let folder = tempfile::TempDir::new().map_err(|error| error.to_string())?;
        let file = folder.path().join("report.md");
        let mut command = Command::new(PROGRAM);
        command.arg("device").arg("--report").arg(&file).args(self.options).args(self.filters);
        for (option, value) in [
            ("--device", network.device(Link::Veth)),
            ("--address", &theirs),
            ("--agent", &theirs),
            ("--ours", &ours),
        ] {
            let other = self.instead.iter().find(|(name, _)| *name == option);
            command.args([option, other.map_or(value, |(_, value)| value)]);
        }
        let output = match self.beside {
            true => {
                let netns = container.netns();
                bench.lab.host().output(command.args(["--netns", &netns.path()]))
            }
            false => container.output(&mut command),
        };
        let output = output.map_err(|error| error.to_string())?;
        let report = std::fs::read_to_string(&file).map_err(|error| error.to_string());
        let said = format!(
            "{}{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
            report?
        );
        self.judge(output.status.success(), &said).map_err(|why| format!("{why}: {said}"))
    }

    fn judge(&self, success: bool, said: &str) -> Step {
        let Self { passed, failed, .. } = self;
        let whole = whole()?;
        let not_run = whole - passed - failed;
        let totals = format!("{whole} cells: {passed} passed, {failed} failed, {not_run} not run");
        if !said.contains(&totals) {
            return Err(format!("not {totals:?}"));
        }
        if success != (*failed == 0 && *passed > 0) {
            return Err(format!("success is {success}"));
        }
        match self.says.iter().find(|part| !said.contains(*part)) {
            None => Ok(()),
            Some(part) => Err(format!("{part:?} is missing")),
        }
    }
}

/// The number of cells of the whole matrix.
fn whole() -> Step<usize> {
    let output = Command::new(PROGRAM).args(["device", "--device", "any", "--list"]).output();
    let output = output.map_err(|error| error.to_string())?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().count())
}
