//! The rules and limits that bind in another kernel, and RDMA over links that are no veth:
//! `cargo xtask interop policy`.
//!
//! The guest's kernel runs the matrix of `rocinante policy-check`, and then cells that the kernels
//! of many machines lack: fq with a rate or departure times, `police`, ipvlan, netkit, WireGuard
//! and IPsec. A cell of these is a link and a backend. Its expectation is written from where the
//! kernel's code has its hooks.

use std::time::Duration;

use crate::error::{Error, Result};
use crate::guest::Guest;

const SCRIPT: &str = include_str!("links.sh");
/// How long the matrix may take, also in an emulated machine.
const MATRIX_MAX: Duration = Duration::from_secs(5400);
/// How long a cell may take.
const CELL_MAX: Duration = Duration::from_secs(300);
/// The rate of fq, departure times and `police` in Gb/s, with a margin for rounding.
const RATE_GBPS: f64 = 0.011;

/// The behaviour of a backend on a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expected {
    /// RDMA works, and the host's counter, limit or encryption applies.
    Binds,
    /// The same, at no more than the rate.
    Limited,
    /// It takes the backend `udp`, and the above holds.
    BindsAsUdp,
    /// The error has these words.
    Refused(&'static str),
}

use Expected::{Binds, BindsAsUdp, Limited, Refused};

const BACKENDS: [&str; 4] = ["udp", "packet", "afxdp", "auto"];

const NO_XDP: Expected = Refused("no native XDP");

/// A link's name, and the behaviour of each of [`BACKENDS`] there.
type Link = (&'static str, [Option<Expected>; 4]);

/// All links.
///
/// - fq, the program with departure times and `police` are at the host's ends, which every frame
///   passes.
/// - ipvlan and netkit hand each frame to the device below or at the other end, whose hooks it
///   passes. Neither has native XDP.
/// - WireGuard's device has no Ethernet header. The driver encrypts all that it gets.
/// - IPsec encrypts where IP sends, in either mode. A packet socket does not pass there: `auto`
///   sees the policy. Named by the program, `packet` is in its own hands, and not tried.
const LINKS: [Link; 10] = [
    ("fq", [Some(Limited), Some(Limited), Some(Limited), Some(Limited)]),
    ("edt", [Some(Limited), Some(Limited), Some(Limited), Some(Limited)]),
    ("police", [Some(Limited), Some(Limited), Some(Limited), Some(Limited)]),
    ("ipvlan-l2", [Some(Binds), Some(Binds), Some(NO_XDP), Some(Binds)]),
    ("ipvlan-l3", [Some(Binds), Some(Binds), Some(NO_XDP), Some(Binds)]),
    ("netkit", [Some(Binds), Some(Binds), Some(NO_XDP), Some(Binds)]),
    ("netkit-l2", [Some(Binds), Some(Binds), Some(NO_XDP), Some(Binds)]),
    (
        "wireguard",
        [Some(Binds), Some(Refused("not an Ethernet interface")), Some(NO_XDP), Some(BindsAsUdp)],
    ),
    ("ipsec", [Some(Binds), None, None, Some(BindsAsUdp)]),
    ("ipsec-tunnel", [Some(Binds), None, None, Some(BindsAsUdp)]),
];

/// Boots a guest and tries all. `args` are arguments of `rocinante policy-check`; or `--links`: not
/// that matrix; or `--links` and names of links: only these. `rocinante` and `rocinante-interop`
/// must be beside this program. Error: a name is no link's, the guest does not start, or something
/// is not as expected.
pub fn run(args: &[String]) -> Result<()> {
    let (with_matrix, links) = match args.split_first() {
        Some((first, names)) if first == "--links" => (false, named(names)?),
        _ => (true, LINKS.to_vec()),
    };
    let (_lab, guest) = Guest::beside_this_program()?;
    println!("Linux {}, {:?}", guest.kernel(), guest.accelerator());
    let mut as_documented = true;
    if with_matrix {
        let command = format!("/host/rocinante policy-check {}", args.join(" "));
        let outcome = guest.run(&command, MATRIX_MAX)?;
        print!("{}{}", outcome.stdout, outcome.stderr);
        as_documented = outcome.code == 0;
    }
    let script = format!("cat > /tmp/links.sh <<'END_OF_LINKS'\n{SCRIPT}END_OF_LINKS\n");
    guest.read(&script, CELL_MAX)?;
    let (mut cells, mut wrong) = (0, 0);
    for (link, expectations) in links {
        for (backend, expected) in BACKENDS.into_iter().zip(expectations) {
            let Some(expected) = expected else { continue };
            let outcome = guest.run(&format!("sh /tmp/links.sh {link} {backend}"), CELL_MAX)?;
            let said = outcome.stdout.trim().replace('\n', "; ");
            let is_so = Said::of(&outcome.stdout).is(expected);
            println!("{} {link:<12} {backend:<7} {said}", if is_so { "ok    " } else { "FAILED" });
            if !is_so {
                println!("       expected: {expected:?}; {}", outcome.stderr.trim());
                wrong += 1;
            }
            cells += 1;
        }
    }
    println!("{cells} cells of links: {} as expected", cells - wrong);
    if wrong > 0 {
        return Err(Error::new(format!("{wrong} links are not as expected")));
    }
    if as_documented { Ok(()) } else { Err(Error::new("the matrix is not as documented")) }
}

/// The links with these names; all, if there are none.
fn named(names: &[String]) -> Result<Vec<Link>> {
    if let Some(unknown) = names.iter().find(|name| LINKS.iter().all(|(link, _)| name != link)) {
        let links = LINKS.map(|(link, _)| link).join(", ");
        return Err(Error::new(format!("{unknown} is no link; there are {links}")));
    }
    let is_wanted = |(link, _): &Link| names.is_empty() || names.iter().any(|name| name == link);
    Ok(LINKS.into_iter().filter(is_wanted).collect())
}

/// The script's output for a cell.
#[derive(Debug, PartialEq)]
struct Said<'a> {
    /// Gb/s of WRITEs.
    works: Option<f64>,
    refused: &'a str,
    /// The server's line about its device.
    server: &'a str,
    counted: Option<u64>,
}

impl<'a> Said<'a> {
    fn of(output: &'a str) -> Self {
        let word = |name: &str| {
            let after = output.lines().find_map(|line| line.strip_prefix(name));
            after.map_or("", str::trim)
        };
        Self {
            works: word("works").parse().ok(),
            refused: word("refused:"),
            server: word("server:"),
            counted: word("counted").parse().ok(),
        }
    }

    fn is(&self, expected: Expected) -> bool {
        let binds = self.works.is_some() && self.counted.is_some_and(|count| count > 0);
        match expected {
            Binds => binds,
            Limited => binds && self.works.is_some_and(|rate| rate <= RATE_GBPS),
            BindsAsUdp => binds && self.server.contains(", udp:"),
            Refused(words) => self.works.is_none() && self.refused.contains(words),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_chosen_by_their_names() {
        let of = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            named(&names).map(|links| links.iter().map(|(link, _)| *link).collect::<Vec<_>>())
        };
        assert_eq!(of(&[]).expect("all").len(), LINKS.len());
        assert_eq!(of(&["ipsec", "fq"]).expect("two"), ["fq", "ipsec"]);
        let error = of(&["fq", "ipsec-tunel"]).expect_err("a typing error").to_string();
        assert!(error.starts_with("ipsec-tunel is no link") && error.contains("ipsec-tunnel"));
    }

    #[test]
    fn a_cell_is_judged_by_all_that_was_said() {
        let works = "works 0.01\nserver: device eth0 at 10.7.0.2, udp: asked for\ncounted 48\n";
        let said = Said::of(works);
        assert_eq!((said.works, said.counted), (Some(0.01), Some(48)));
        assert!(said.is(Binds) && said.is(Limited) && said.is(BindsAsUdp));
        assert!(!said.is(Refused("")));
        assert!(!Said::of(&works.replace("0.01", "0.02")).is(Limited));
        let uncounted = works.replace("48", "0");
        assert!(!Said::of(&uncounted).is(Binds) && !Said::of(&uncounted).is(BindsAsUdp));
        assert!(!Said::of(&works.replace(", udp:", ", packet:")).is(BindsAsUdp));
        let refused = Said::of("refused: packet: wg0 is not an Ethernet interface\n");
        assert!(refused.is(Refused("not an Ethernet")) && !refused.is(Refused("no native XDP")));
        assert!(!refused.is(Binds) && !Said::of("").is(Binds) && !Said::of("").is(Limited));
    }
}
