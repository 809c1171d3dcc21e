//! VRFs, which few kernels of tests have: two with the same addresses, and a third interface with
//! these in none.

use std::fmt;
use std::time::Duration;

use rocinante::device::Backend;

use crate::guest::Guest;
use crate::matrix::Step;

const SCRIPT: &str = include_str!("vrf.sh");
/// How long the script may take, also beside other programs.
const PATIENCE: Duration = Duration::from_secs(240);

/// The steps of `vrf.sh` on a backend, inside the guest.
#[derive(Debug, Clone, Copy)]
pub struct VrfCell(Backend);

/// The cells, one for each backend.
pub const CELLS: [VrfCell; 3] =
    [VrfCell(Backend::Udp), VrfCell(Backend::Packet), VrfCell(Backend::Xdp)];

impl fmt::Display for VrfCell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vrf::{}", self.0)
    }
}

impl VrfCell {
    /// Runs the steps; the guest sees the programs at `/host`. Error: the step that failed, and
    /// what its programs printed.
    pub fn run(self, guest: &Guest) -> Step {
        let script = format!(
            "cat >/tmp/vrf.sh <<'END_OF_VRF'\n{SCRIPT}END_OF_VRF\nsh /tmp/vrf.sh {}",
            self.0
        );
        let outcome = guest.run(&script, PATIENCE).map_err(|error| error.to_string())?;
        if outcome.code == 0 { Ok(()) } else { Err(outcome.stdout + &outcome.stderr) }
    }
}
