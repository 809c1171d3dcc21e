//! The kernel provider on its own: Rocinante's programs inside the guest, on the kernel's device
//! through libibverbs.
//!
//! Each cell of the [matrix](crate::matrix) has this provider at one side already. Here it is at
//! both. The tests of the API run on it ([`rocinante_tests::verbs`]), [`checks`] try features that
//! only hardware has, and `refusals` check the errors for missing or forbidden things.

mod bench;
pub mod checks;
mod events;
mod programs;
mod refusals;

use std::fmt;
use std::path::Path;
use std::time::Duration;

use crate::guest::{Guest, Link};
use crate::matrix::{Bench, SCENARIOS, Scenario, Step};
use checks::CHECKS;
use rocinante_tests::verbs::{TESTS, Test};

use programs::{Kernel, PROGRAMS, Side};
use refusals::REFUSALS;

/// How long a command in the guest may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// A named test of the kernel provider.
#[derive(Clone, Copy)]
pub enum HardwareCell {
    /// A scenario of the matrix with the kernel's device at both sides.
    Both {
        /// Which.
        scenario: &'static Scenario,
        /// With IPv6 addresses.
        ipv6: bool,
        /// Path MTU in bytes.
        mtu: u32,
    },
    /// One of [`CHECKS`].
    Check(&'static str),
    /// One of the tests of the API.
    Verbs(&'static Test),
    /// The port goes down and up, and its addresses change.
    PortEvents,
    /// The device is removed.
    Removal,
    /// `rocinante-bench`, short.
    Bench,
    /// One of the commands of `rocinante` or of the examples.
    Program {
        /// Which.
        program: &'static programs::HardwareProgram,
        /// The sides with the kernel's device.
        kernel: Kernel,
    },
    /// Something is missing or forbidden.
    Refusal(&'static refusals::Refusal),
}

/// Tests of the API that take an emulated guest 15 to 50 seconds: not in the subset. Of the
/// settings of `operations` one stays.
const LONG: [&str; 8] = [
    "many::mixed_operations_on_64_queue_pairs",
    "memory::the_last_byte_of_a_write_comes_last",
    "operations::ipv4_256",
    "operations::ipv4_4096",
    "operations::ipv6_256",
    "operations::ipv6_1024",
    "operations::ipv6_4096",
    "windows::what_cannot_be_bound",
];

/// All cells, or those of the committed subset.
#[must_use]
pub fn all(whole: bool) -> Vec<HardwareCell> {
    let mut cells: Vec<HardwareCell> =
        CHECKS.iter().map(|check| HardwareCell::Check(check.name)).collect();
    let tests = TESTS.iter().filter(|test| whole || !LONG.contains(&test.name));
    cells.extend(tests.map(HardwareCell::Verbs));
    cells.extend([HardwareCell::PortEvents, HardwareCell::Removal, HardwareCell::Bench]);
    for (number, program) in PROGRAMS.iter().enumerate() {
        for kernel in Kernel::ALL {
            // With one end in software: one of the two cells, in turn.
            let turn = [Kernel::Client, Kernel::Server][number % 2];
            let chosen =
                kernel == Kernel::Both || program.has_client() && (whole || kernel == turn);
            if chosen {
                cells.push(HardwareCell::Program { program, kernel });
            }
        }
    }
    cells.extend(REFUSALS.iter().map(HardwareCell::Refusal));
    let scenarios = SCENARIOS.iter().filter(|scenario| scenario.fits_anywhere());
    for (number, scenario) in scenarios.enumerate() {
        for (ipv6, mtu) in [(false, 1024), (true, 4096), (false, 256), (true, 1024)] {
            // One of the first two, in turn.
            let chosen = mtu != 256 && (mtu == 1024) == (number % 2 == 0) && ipv6 == (mtu == 4096);
            if whole || chosen {
                cells.push(HardwareCell::Both { scenario, ipv6, mtu });
            }
        }
    }
    cells
}

impl fmt::Display for HardwareCell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Both { scenario, ipv6, mtu } => {
                let family = if *ipv6 { "v6" } else { "v4" };
                write!(f, "hardware::both::{}::{family}::{mtu}", scenario.name)
            }
            Self::Check(name) => write!(f, "hardware::check::{name}"),
            Self::Verbs(test) => write!(f, "hardware::verbs::{}", test.name),
            Self::PortEvents => f.write_str("hardware::port_events"),
            Self::Removal => f.write_str("hardware::removal"),
            Self::Bench => f.write_str("hardware::bench"),
            Self::Program { program, kernel } => {
                write!(f, "hardware::program::{}::{kernel}", program.name)
            }
            Self::Refusal(refusal) => write!(f, "hardware::refusal::{}", refusal.name),
        }
    }
}

impl HardwareCell {
    /// Runs the cell; `programs` is the directory that the guest sees at `/host`. Error: the first
    /// deviation from the expected result.
    pub fn run(&self, bench: &Bench, programs: &Path) -> Step {
        let network = bench.guest.network();
        let (device, ip) = (network.device(Link::Veth), network.address(Link::Veth, false));
        let address = ip.to_string();
        match self {
            Self::Both { scenario, ipv6, mtu } => bench.run_between_kernels(scenario, *ipv6, *mtu),
            Self::Check(name) | Self::Verbs(Test { name, .. }) => {
                check(&bench.guest, name, device, &address)
            }
            Self::PortEvents => events::of_port(&bench.guest),
            Self::Removal => events::removal(&bench.guest),
            Self::Bench => bench::run(&bench.guest, device, ip),
            Self::Program { program, kernel } => {
                let container = network.container(&bench.lab, Link::Veth);
                let guest = || Side::Guest(&bench.guest, device, ip);
                let soft = || Side::Container(container, programs);
                match kernel {
                    Kernel::Both => program.run(&guest(), &guest()),
                    Kernel::Client => program.run(&soft(), &guest()),
                    Kernel::Server => program.run(&guest(), &soft()),
                }
            }
            Self::Refusal(refusal) => refusal.run(&bench.guest, device, &address),
        }
    }
}

/// Runs a check inside the guest. The guest has all it needs, so a skipped check is a failure.
fn check(guest: &Guest, name: &str, device: &str, address: &str) -> Step {
    let command = format!("/host/rocinante-interop check {name} {device} {address}");
    let outcome = guest.run(&command, PATIENCE).map_err(|error| error.to_string())?;
    let said = outcome.stdout + &outcome.stderr;
    if outcome.code == 0 && !said.contains("SKIPPED ") { Ok(()) } else { Err(said) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// A change of these numbers needs a reason: cells do not vanish.
    #[test]
    fn no_cell_is_missing() {
        let (whole, subset) = (all(true), all(false));
        // With the events of the port, the removal, and the benchmark.
        let fixed = CHECKS.len() + TESTS.len() + REFUSALS.len() + 3;
        let scenarios = SCENARIOS.iter().filter(|scenario| scenario.fits_anywhere()).count();
        // The scenarios that need no bridge; one program with one side, and 14 with two.
        assert_eq!(whole.len(), fixed + scenarios * 4 + 1 + 14 * 3);
        assert_eq!(subset.len(), fixed - LONG.len() + scenarios + 1 + 14 * 2);
        assert!(LONG.iter().all(|name| TESTS.iter().any(|test| test.name == *name)));
        assert_eq!((CHECKS.len(), PROGRAMS.len(), REFUSALS.len()), (2, 15, 9));
        let names: BTreeSet<String> = whole.iter().map(HardwareCell::to_string).collect();
        assert_eq!(names.len(), whole.len());
        assert!(subset.iter().all(|cell| names.contains(&cell.to_string())));
    }
}
