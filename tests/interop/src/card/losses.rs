//! Packet loss without a bridge of ours between the sides: an nftables table of our own, at an
//! interface that the packets pass.
//!
//! The table belongs to the `nft` that made it (`flags owner`). That `nft` ends when its standard
//! input does. So the table goes with its holder, and with this process, however the process ends.

use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rocinante::device::Backend;
use rocinante_lab::{ChildGuard, Netns};

use crate::agent::machine::Kind;
use crate::matrix::{Losing, Node, Step, Wire, cannot};

#[derive(Debug, Clone)]
pub(super) struct LossPlace {
    /// The namespace, if it is not the present one.
    pub(super) netns: Option<Netns>,
    pub(super) interface: String,
    /// Whether the interface is the other end of our veth instead of our own interface.
    pub(super) beyond: bool,
}

/// Loss for the packets of one backend.
pub(super) struct Rules<'a> {
    pub(super) place: &'a LossPlace,
    pub(super) backend: Backend,
}

/// Two queue pairs of one device: their packets pass no interface of ours.
pub(super) struct Inside;

/// A table with a rule.
struct LossTable {
    netns: Option<Netns>,
    name: String,
    // When it ends, the table goes.
    _nft: ChildGuard,
}

impl Wire for Inside {
    fn lose(&self, _: &Node, _: &Node, _: f64) -> Step<Box<dyn Losing>> {
        Err(cannot("between two queue pairs of one device nothing can be lost from outside"))
    }
}

impl Wire for Rules<'_> {
    fn lose(&self, from: &Node, to: &Node, percent: f64) -> Step<Box<dyn Losing>> {
        let LossPlace { netns, interface, beyond } = self.place;
        let ours_sends = from.kind() == Kind::Rocinante;
        let bound = match (self.backend, ours_sends) {
            _ if *beyond => true,
            (Backend::Udp, _) | (Backend::Packet, true) => true,
            _ => false,
        };
        if !bound {
            let does = if ours_sends { "sends" } else { "receives" };
            return Err(cannot(format!(
                "no rule on our own interface {interface} binds what {} {does}: run the software side with --netns in a namespace whose \
                 veth ends in this one, and packets are lost there",
                self.backend
            )));
        }
        let hook = if ours_sends == *beyond { "ingress" } else { "egress" };
        let ip = if from.address().is_ipv6() { "ip6" } else { "ip" };
        let what = format!("{ip} saddr {} {ip} daddr {}", from.address(), to.address());
        Ok(Box::new(LossTable::new(netns.clone(), interface, hook, &what, percent)?))
    }
}

impl LossTable {
    fn new(
        netns: Option<Netns>,
        interface: &str,
        hook: &str,
        what: &str,
        percent: f64,
    ) -> Step<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("rocinante_interop_{}_{number}", std::process::id());
        // At 100 percent no random number is needed.
        let lot = match (percent.clamp(0.0, 100.0) * 10.0).round() {
            1000.0 => String::new(),
            of_1000 => format!("numgen random mod 1000 < {of_1000}"),
        };
        let script = format!(
            "add table netdev {name} {{ flags owner; counter lost {{ }}; chain lose {{ type filter hook {hook} device \"{interface}\" \
             priority 0; policy accept; meta l4proto udp udp dport 4791 {what} {lot} \
             counter name \"lost\" drop; }}; }}\n"
        );
        let mut command = Command::new("nft");
        command.arg("-i").env("LC_ALL", "C").env("PATH", search_path()).stdin(Stdio::piped());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let nft = match &netns {
            Some(netns) => netns.spawn(&mut command),
            None => ChildGuard::spawn(&mut command),
        };
        let mut nft = nft.map_err(|error| cannot(format!("packets are lost by nft: {error}")))?;
        // Standard input stays in place: closing it would remove the table.
        if let Some(stdin) = nft.child_mut().stdin.as_mut() {
            stdin.write_all(script.as_bytes()).map_err(|error| format!("nft: {error}"))?;
        }
        let mut table = Self { netns, name, _nft: nft };
        let deadline = Instant::now() + Duration::from_secs(3);
        while let Err(why) = table.lost() {
            if Instant::now() > deadline {
                let said = table.complaint();
                return Err(cannot(format!("nft makes no table at {interface}: {said}{why}")));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(table)
    }

    /// Ends `nft`, and returns its error output.
    fn complaint(&mut self) -> String {
        self._nft.kill();
        let mut said = String::new();
        let outputs = self._nft.child_mut();
        if let Some(stderr) = outputs.stderr.as_mut() {
            let _ = stderr.read_to_string(&mut said);
        }
        if let Some(stdout) = outputs.stdout.as_mut() {
            let _ = stdout.read_to_string(&mut said);
        }
        said.lines().next().map_or_else(String::new, |line| format!("{line}; "))
    }
}

impl Losing for LossTable {
    fn lost(&self) -> Step<u64> {
        let mut command = Command::new("nft");
        command.args(["-j", "list", "counter", "netdev", &self.name, "lost"]);
        command.env("LC_ALL", "C").env("PATH", search_path()).stdin(Stdio::null());
        let output = match &self.netns {
            Some(netns) => netns.output(&mut command).map_err(|error| error.to_string())?,
            None => command.output().map_err(|error| format!("nft: {error}"))?,
        };
        let found: Option<u64> = serde_json::from_slice(&output.stdout)
            .ok()
            .and_then(|listing: serde_json::Value| counter(&listing));
        found.ok_or_else(|| {
            let said = String::from_utf8_lossy(&output.stderr);
            said.lines().next().unwrap_or("nft shows no counter").to_owned()
        })
    }
}

fn counter(listing: &serde_json::Value) -> Option<u64> {
    let items = listing["nftables"].as_array()?;
    items.iter().find_map(|item| item["counter"]["packets"].as_u64())
}

/// The search path and the directories of system programs, which users often lack.
fn search_path() -> String {
    let path = std::env::var("PATH").unwrap_or_default();
    format!("{path}:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin")
}

#[cfg(test)]
mod tests {
    use super::*;
    use rocinante_lab::{Lab, LabConfig};
    use rocinante_tests::{need, require};

    #[test]
    fn a_table_is_there_as_long_as_it_is_held() {
        require!(need::nft());
        let lab = Lab::new(&LabConfig { containers: 1, ..LabConfig::default() }).unwrap();
        let netns = lab.container(0).netns();
        let tables = || {
            let listing = netns.output(Command::new("nft").args(["list", "ruleset"])).unwrap();
            String::from_utf8_lossy(&listing.stdout).into_owned()
        };
        let what = "ip saddr 10.77.0.1 ip daddr 10.77.0.200";
        let table = LossTable::new(Some(netns.clone()), "eth0", "egress", what, 6.0).unwrap();
        assert_eq!(table.lost(), Ok(0));
        assert!(tables().contains("udp dport 4791 ip saddr 10.77.0.1"), "{}", tables());
        drop(table);
        let deadline = Instant::now() + Duration::from_secs(5);
        while !tables().is_empty() {
            assert!(Instant::now() < deadline, "{}", tables());
            std::thread::sleep(Duration::from_millis(5));
        }
        let all = LossTable::new(Some(netns.clone()), "eth0", "ingress", what, 100.0).unwrap();
        assert!(!tables().contains("numgen"), "{}", tables());
        drop(all);
        let error =
            LossTable::new(Some(netns.clone()), "eth0", "sideways", what, 6.0).err().unwrap();
        assert!(error.contains("no table at eth0: Error: "), "{error}");
    }
}
