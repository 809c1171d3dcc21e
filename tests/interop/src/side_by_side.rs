//! Soft-RoCE and Rocinante side by side in one kernel: the guest's, over veth pairs.

use std::path::PathBuf;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::guest::Guest;

/// Two Soft-RoCE devices on the ends of a veth pair. Both must be in the first network namespace,
/// so routing rules make packets between the two addresses leave through the pair instead of
/// staying inside.
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
const LIMIT: Duration = Duration::from_secs(7200);

/// Where a report is written in the guest.
const REPORT: &str = "/tmp/report";

/// Runs `rocinante-bench` with `args` in a guest, with Soft-RoCE beside ours, and prints the
/// output. A report is copied out of the guest. `rocinante-bench` and `rocinante-interop` must be
/// beside this program. Error: the guest does not start, or the command failed.
pub fn run(args: &[String]) -> Result<()> {
    let (words, report) = with_report_inside(args)?;
    let (_lab, guest) = Guest::beside_this_program()?;
    let (kernel, accelerator) = (guest.kernel(), guest.accelerator());
    eprintln!(
        "Linux {kernel}, {accelerator:?}: where the processor is emulated, only ratios mean anything"
    );
    guest.read(DEVICES, Duration::from_secs(60))?;
    let words = words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ");
    let place = "--local 10.66.0.1 --remote 10.66.0.2 --devices sbs_rxe0,sbs_rxe1";
    let command = format!("/host/rocinante-bench {place} {words}");
    let outcome = guest.run(&command, LIMIT)?;
    eprint!("{}", outcome.stderr);
    print!("{}", outcome.stdout);
    if outcome.code != 0 {
        return Err(Error::new("rocinante-bench failed"));
    }
    if let Some(dir) = report {
        let failed = |error: std::io::Error| Error::new(format!("{}: {error}", dir.display()));
        std::fs::create_dir_all(&dir).map_err(failed)?;
        for file in guest.read(&format!("ls {REPORT}"), Duration::from_secs(10))?.lines() {
            let text = guest.read(&format!("cat {REPORT}/{file}"), Duration::from_secs(60))?;
            std::fs::write(dir.join(file), text).map_err(failed)?;
        }
    }
    Ok(())
}

/// The arguments for the guest, where `--report` names a directory of the guest, and the directory
/// of this machine that it named.
fn with_report_inside(args: &[String]) -> Result<(Vec<String>, Option<PathBuf>)> {
    let mut words = args.to_vec();
    let Some(at) = words.iter().position(|word| word == "--report") else {
        return Ok((words, None));
    };
    let dir = words.get_mut(at + 1).ok_or_else(|| Error::new("--report needs a directory"))?;
    let dir = PathBuf::from(std::mem::replace(dir, REPORT.to_owned()));
    Ok((words, Some(dir)))
}

/// A word, quoted for the shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_written_inside_and_brought_out() {
        let of = |line: &str| {
            with_report_inside(&line.split(' ').map(str::to_owned).collect::<Vec<_>>())
        };
        let (words, dir) = of("--quick --report out --runs 1").unwrap();
        assert_eq!(words.join(" "), "--quick --report /tmp/report --runs 1");
        assert_eq!(dir, Some(PathBuf::from("out")));
        assert_eq!(of("--runs 1").unwrap().1, None);
        assert!(of("--report").is_err());
    }
}
