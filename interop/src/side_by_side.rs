//! Soft-RoCE and Rocinante side by side in one kernel: the guest's, over veth pairs.

use std::time::Duration;

use rocinante_cli::lab::{Lab, LabConfig};

use crate::error::{Error, Result};
use crate::guest::{Guest, GuestConfig, Image};

/// Two Soft-RoCE devices on the ends of a veth pair. Both must be in the first network namespace, so routing rules make packets
/// between the two addresses leave through the pair instead of staying inside.
const DEVICES: &str = "\
set -e
modprobe -a veth rdma_rxe
ip link add sbs0 type veth peer name sbs1
for side in 0 1; do
    ip link set sbs$side mtu 9000 up
    ip address add 10.66.0.$((side + 1))/32 dev sbs$side
done
for dev in all sbs0 sbs1; do
    for setting in rp_filter=0 accept_local=1 arp_ignore=1; do
        echo ${setting#*=} > /proc/sys/net/ipv4/conf/$dev/${setting%=*}
    done
done
for side in 0 1; do
    own=10.66.0.$((side + 1)) other=10.66.0.$((2 - side)) table=$((101 + side))
    ip rule add pref $((10 + side)) oif sbs$side lookup $table
    ip rule add pref $((20 + side)) from $own to $other iif lo lookup $table
    ip route add $other dev sbs$side src $own table $table
    ip neighbour replace $other lladdr $(cat /sys/class/net/sbs$((1 - side))/address) dev sbs$side
done
ip rule add pref 50 lookup local
ip rule del pref 0
rdma link add sbs_rxe0 type rxe netdev sbs0
rdma link add sbs_rxe1 type rxe netdev sbs1
";

/// How long the measurements may take.
const LIMIT: Duration = Duration::from_secs(3600);

/// Runs `rocinante compare` in a guest, with Soft-RoCE as the baseline, and prints what it says. `rocinante` and
/// `rocinante-interop` must lie beside this program.
///
/// # Errors
/// The guest cannot be had, or the comparison failed.
pub fn run(args: &[String]) -> Result<()> {
    let lab = Lab::new(&LabConfig { containers: 1, ..LabConfig::default() })?;
    let image = Image::prepare()?;
    let program = std::env::current_exe()?;
    let Some(programs) = program.parent() else {
        return Err(Error::new("no directory of programs"));
    };
    let guest = Guest::boot(&lab, &image, &GuestConfig::new(programs))?;
    let (kernel, accelerator) = (guest.kernel(), guest.accelerator());
    eprintln!(
        "Linux {kernel}, {accelerator:?}: where the processor is emulated, only ratios mean anything"
    );
    guest.read(DEVICES, Duration::from_secs(60))?;
    let command = format!(
        "/host/rocinante compare --local 10.66.0.1 --remote 10.66.0.2 --devices sbs_rxe0,sbs_rxe1 {}",
        args.iter().map(|arg| quoted(arg)).collect::<Vec<_>>().join(" ")
    );
    let outcome = guest.run(&command, LIMIT)?;
    eprint!("{}", outcome.stderr);
    print!("{}", outcome.stdout);
    if outcome.code == 0 { Ok(()) } else { Err(Error::new("the comparison failed")) }
}

/// A word that the shell leaves alone.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}
