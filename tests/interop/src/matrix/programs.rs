//! Programs of other projects: rdma-core's ping-pongs and perftest's measurements. The agent starts
//! them on the machine with the kernel's device. The same programs run at our end, on `rocinante
//! run`, over the connections that they make themselves.

use std::net::IpAddr;
use std::process::Command;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use rocinante::device::Backend;
use rocinante_dropin::install::Installation;
use rocinante_lab::Netns;

use super::Bench;
use super::cell::{MTUS, Requester, Setting};
use super::node::Step;
use super::ours::{DEVICE, Ours, PATIENCE, unprivileged};
use crate::agent::proto::{Invocation, Request};
use crate::agent::{self, Agent};
use crate::guest::{Link, Outcome};

/// A program, and how it is run on both sides.
#[derive(Debug)]
pub struct Program {
    /// The cell's name.
    pub name: &'static str,
    /// The command on the machine with the device.
    tool: &'static str,
    /// Options of both sides.
    options: &'static str,
    /// The option for its GID.
    gid: &'static str,
}

impl Program {
    /// The program of this name. Error: if there is none.
    pub(crate) fn by_name(name: &str) -> Step<&'static Self> {
        let program = PROGRAMS.iter().find(|program| program.name == name);
        program.ok_or_else(|| format!("there is no program {name:?}"))
    }

    /// The command on a device, and its arguments.
    pub(crate) fn words(
        &self,
        device: &str,
        gid: u8,
        port: u16,
        mtu: u32,
        server: Option<IpAddr>,
    ) -> Vec<String> {
        let mut line = format!("{} -d {device} {} {gid} -p {port}", self.tool, self.gid);
        // Datagrams use the link's path MTU.
        if self.tool != "ibv_ud_pingpong" {
            line += &format!(" -m {mtu}");
        }
        line += &format!(" {}", self.options);
        let server = server.map(|server| server.to_string());
        line.split_whitespace().map(str::to_owned).chain(server).collect()
    }

    /// All sizes up to 8 MiB take long on an emulated machine: they run in one setting only, with
    /// the path MTU that has the fewest packets.
    fn is_long(&self) -> bool {
        self.options.starts_with("-a")
    }

    /// Whether the connection manager connects the queue pairs (`-R`), or their exchange (`-z`).
    /// perftest 4.5 does that over IPv4 only, and `rdma_cm` with the link's path MTU.
    pub(crate) fn is_managed(&self) -> bool {
        self.options.split_whitespace().any(|option| matches!(option, "-R" | "-z"))
    }

    /// Whether it runs on this backend with this address family.
    fn is_run(&self, backend: Backend, ipv6: bool) -> bool {
        let once = (backend, ipv6) == (Backend::Packet, false);
        (once || !self.is_long()) && !(ipv6 && self.is_managed())
    }
}

const fn ibv(name: &'static str, tool: &'static str, options: &'static str) -> Program {
    Program { name, tool, options, gid: "-g" }
}

const fn perf(name: &'static str, tool: &'static str, options: &'static str) -> Program {
    Program { name, tool, options, gid: "-x" }
}

/// All programs.
#[rustfmt::skip]
pub static PROGRAMS: [Program; 42] = [
    ibv("ibv_rc_pingpong", "ibv_rc_pingpong", "-c -n 20 -s 10001"),
    ibv("ibv_rc_pingpong_events", "ibv_rc_pingpong", "-c -e -n 20 -s 64"),
    ibv("ibv_uc_pingpong", "ibv_uc_pingpong", "-c -n 20 -s 3000"),
    ibv("ibv_ud_pingpong", "ibv_ud_pingpong", "-c -n 20 -s 200"),
    ibv("ibv_srq_pingpong", "ibv_srq_pingpong", "-c -n 60 -q 5 -s 5000"),
    perf("ib_send_bw", "ib_send_bw", "-n 40 -q 2 -s 9000"),
    perf("ib_send_bw_both", "ib_send_bw", "-b -n 40 -s 3000"),
    perf("ib_send_bw_all", "ib_send_bw", "-a -n 5"),
    perf("ib_send_bw_events", "ib_send_bw", "-e -n 40 -s 3000"),
    perf("ib_send_bw_uc", "ib_send_bw", "-c UC -n 40 -s 3000"),
    perf("ib_send_bw_ud", "ib_send_bw", "-c UD -n 40 -q 2 -s 200"),
    perf("ib_send_lat", "ib_send_lat", "-n 20 -s 600"),
    perf("ib_send_lat_uc", "ib_send_lat", "-c UC -n 20 -s 600"),
    perf("ib_send_lat_ud", "ib_send_lat", "-c UD -n 20 -s 200"),
    perf("ib_send_lat_all", "ib_send_lat", "-a -n 5"),
    perf("ib_write_bw", "ib_write_bw", "-n 40 -q 3 -s 9000"),
    perf("ib_write_bw_all", "ib_write_bw", "-a -n 5"),
    perf("ib_write_bw_both", "ib_write_bw", "-b -n 40 -s 3000 -l 4"),
    perf("ib_write_bw_time", "ib_write_bw", "-D 1 -f 0 -s 500"),
    perf("ib_write_bw_uc", "ib_write_bw", "-c UC -n 40 -s 9000"),
    perf("ib_write_lat_uc", "ib_write_lat", "-c UC -n 20 -s 600"),
    perf("ib_write_lat", "ib_write_lat", "-n 20 -s 600"),
    perf("ib_write_lat_all", "ib_write_lat", "-a -n 5"),
    perf("ib_read_bw", "ib_read_bw", "-n 40 -q 2 -s 9000"),
    perf("ib_read_bw_all", "ib_read_bw", "-a -n 5"),
    perf("ib_read_bw_both", "ib_read_bw", "-b -n 40 -s 3000 -o 4"),
    perf("ib_read_lat", "ib_read_lat", "-n 20 -s 600"),
    perf("ib_read_lat_all", "ib_read_lat", "-a -n 5"),
    perf("ib_atomic_bw", "ib_atomic_bw", "-n 40 -q 2"),
    perf("ib_atomic_bw_swap", "ib_atomic_bw", "-b -n 40 -A CMP_AND_SWAP"),
    perf("ib_atomic_lat", "ib_atomic_lat", "-n 20"),
    perf("ib_send_bw_cm", "ib_send_bw", "-R -n 40 -q 2 -s 9000"),
    perf("ib_send_bw_ud_cm", "ib_send_bw", "-R -c UD -n 40 -q 2 -s 200"),
    perf("ib_send_lat_cm", "ib_send_lat", "-R -n 20 -s 600"),
    perf("ib_send_lat_ud_cm", "ib_send_lat", "-R -c UD -n 20 -s 200"),
    perf("ib_write_bw_cm", "ib_write_bw", "-R -n 40 -q 3 -s 9000"),
    perf("ib_write_bw_words_cm", "ib_write_bw", "-z -n 40 -q 2 -s 9000"),
    perf("ib_write_lat_cm", "ib_write_lat", "-R -n 20 -s 600"),
    perf("ib_read_bw_cm", "ib_read_bw", "-R -b -n 40 -s 3000"),
    perf("ib_read_lat_cm", "ib_read_lat", "-R -n 20 -s 600"),
    perf("ib_atomic_bw_cm", "ib_atomic_bw", "-R -n 40 -q 2"),
    perf("ib_atomic_lat_cm", "ib_atomic_lat", "-R -n 20"),
];

/// A program in a setting; the requesting side is the client.
#[derive(Debug, Clone, Copy)]
pub struct ProgramCell {
    /// The program.
    pub program: &'static Program,
    /// Where and how.
    pub setting: Setting,
}

impl ProgramCell {
    /// Its name: `ib_write_bw_run::ours::packet::veth::v4::1024`.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}_run::{}", self.program.name, self.setting)
    }
}

const BACKENDS: [Backend; 3] = [Backend::Udp, Backend::Packet, Backend::Xdp];

/// Each program with either side as the client, on each backend, with IPv4 and, unless the
/// connection manager connects, IPv6. Links and path MTUs take turns, so each program runs with
/// each of them and with each side as the client.
#[must_use]
pub fn all() -> Vec<ProgramCell> {
    let mut cells = Vec::new();
    for (p, program) in PROGRAMS.iter().enumerate() {
        for (r, requester) in [Requester::Ours, Requester::Rxe].into_iter().enumerate() {
            for (b, backend) in BACKENDS.into_iter().enumerate() {
                for (f, ipv6) in [false, true].into_iter().enumerate() {
                    let mtu = MTUS[(p + r + 2 * b + f) % MTUS.len()];
                    let link = [Link::Veth, Link::Tap][(p + b + f) % 2];
                    let link = if program.is_long() { Link::Veth } else { link };
                    let mtu = if program.is_long() || program.is_managed() { 4096 } else { mtu };
                    let setting = Setting { requester, backend, link, ipv6, mtu };
                    if program.is_run(backend, ipv6) {
                        cells.push(ProgramCell { program, setting });
                    }
                }
            }
        }
    }
    cells
}

/// The part for each test run: each program that is not long twice, with either side as the client.
/// Of those that the connection manager connects, some, with theirs as the client: their servers
/// refuse our clients more often than not in a slow guest.
#[must_use]
pub fn subset() -> Vec<ProgramCell> {
    let short = all().into_iter().filter(|cell| !cell.program.is_long());
    let (managed, others): (Vec<_>, Vec<_>) = short.partition(|cell| cell.program.is_managed());
    // Each program and client has six cells in a row: take another one of the six each time.
    let others = others.into_iter().enumerate();
    let others = others.filter(|(index, _)| index % 6 == (index / 6) % 6).map(|(_, cell)| cell);
    // Each program has three: take another one of the three, of every other program.
    let managed = managed.into_iter().filter(|cell| cell.setting.requester == Requester::Rxe);
    others.chain(managed.step_by(5)).collect()
}

/// How long ours may take to notice that the other program has failed.
const ALONE: Duration = Duration::from_secs(20);

/// The place of a program's cell.
pub struct ProgramPlace<'a> {
    /// Our namespace, if it is not the present one.
    pub netns: Option<&'a Netns>,
    /// The command `rocinante` and its libraries.
    pub installed: &'a Installation,
    /// Our interface, and the index of our address among its GIDs.
    pub own: (&'a str, u8),
    /// The kernel's device.
    pub device: &'a str,
    /// The device's address.
    pub address: IpAddr,
    /// The IPv4 addresses of the TCP connection, ours and the device's: perftest's programs know no
    /// other family.
    pub meet: [IpAddr; 2],
}

/// perftest's messages when it fails because the emulated processor is slow, and why: it cannot
/// measure the rate of the processor's clock, and then ends without a report; or a server with `-R`
/// reported to its client that it listens a moment before it did. A datagram service that is not
/// there is unreachable, of SIDR's status 1.
const TOO_SLOW: [(&str, &str); 3] = [
    ("Correlation coefficient", "perftest makes nothing of the guest's clock"),
    ("RDMA_CM_EVENT_REJECTED; error: 8", "perftest's server does not listen yet"),
    ("RDMA_CM_EVENT_UNREACHABLE; error: 1", "perftest's server does not listen yet"),
];
/// How often to start a program that prints one of these.
const TRIES: u32 = 20;

/// The message and its reason, if that is why a cell failed.
fn too_slow(why: &str) -> Option<&'static (&'static str, &'static str)> {
    TOO_SLOW.iter().find(|(said, _)| why.contains(said))
}

impl Bench {
    /// Runs a program's cell. Error: one of both fails, or prints something unexpected: the text
    /// has the output of both.
    pub fn run_program(&self, cell: &ProgramCell, installed: &Installation) -> Step {
        let setting = cell.setting;
        let network = self.guest.network();
        let container = network.container(&self.lab, setting.link);
        if setting.ipv6 && container.ipv6().is_none() {
            return Err("the container has no IPv6".into());
        }
        let there = network.address(setting.link, false);
        let place = ProgramPlace {
            netns: Some(container.netns()),
            installed,
            own: ("eth0", u8::from(setting.ipv6)),
            device: network.device(setting.link),
            address: network.address(setting.link, setting.ipv6),
            meet: [container.ipv4().into(), there],
        };
        let mut tries = 1;
        loop {
            let ended = cell.run(&place, super::agent(container, there)?);
            match ended.as_ref().err().and_then(|why| too_slow(why)) {
                Some((said, why)) if tries < TRIES => {
                    println!("{}: {why}, again: {said}", cell.name());
                    tries += 1;
                }
                _ => return ended,
            }
        }
    }
}

impl ProgramCell {
    /// Runs the cell; `agent` starts the program on the machine with the device. Error: one of both
    /// fails, or prints something unexpected: the text has the output of both.
    pub fn run(&self, place: &ProgramPlace<'_>, agent: Box<dyn Agent>) -> Step {
        let Self { program, setting, .. } = *self;
        let port = next_port();
        let ours = |server| Ours::start(place.netns, &mut self.command(place, port, server));
        let invocation = |server: Option<IpAddr>| Invocation {
            program: program.name.to_owned(),
            device: place.device.to_owned(),
            address: place.address,
            mtu: setting.mtu,
            port,
            server,
        };
        let [here, there] = place.meet;
        let (ours, theirs) = match setting.requester {
            Requester::Ours => {
                let mut theirs = Theirs::start(agent, invocation(None))?;
                (finish(ours(Some(there))?, &mut theirs)?, theirs)
            }
            Requester::Rxe => {
                let mut server = ours(None)?;
                server.opens()?;
                let mut theirs = Theirs::start(agent, invocation(Some(here)))?;
                (finish(server, &mut theirs)?, theirs)
            }
        };
        let Ended { ours, theirs: outcome } = ours;
        if ours.code != 0 {
            // Theirs may wait for ever. If it ended, its output says why ours still waits.
            return Err(both(&ours, outcome.as_ref()));
        }
        let theirs = outcome.map_or_else(|| theirs.wait(), Ok)?;
        verdict(self, &ours, &theirs)
    }

    /// The command at our end.
    fn command(&self, place: &ProgramPlace<'_>, port: u16, server: Option<IpAddr>) -> Command {
        let Setting { backend, mtu, .. } = self.setting;
        let (interface, gid) = place.own;
        let words = self.program.words(DEVICE, gid, port, mtu, server);
        unprivileged(place.installed, backend, interface, words)
    }
}

/// The command on the machine with the device. It is killed when this is dropped.
struct Theirs {
    agent: Box<dyn Agent>,
}

impl Theirs {
    fn start(mut agent: Box<dyn Agent>, invocation: Invocation) -> Step<Self> {
        agent::call::<()>(&mut *agent, Request::start { invocation })?;
        Ok(Self { agent })
    }

    /// The outcome, if the program ends in time.
    fn ended(&mut self, timeout_ms: u64) -> Step<Option<Outcome>> {
        agent::call(&mut *self.agent, Request::ended { timeout_ms })
    }

    fn wait(mut self) -> Step<Outcome> {
        // The agent kills a program that takes too long.
        loop {
            if let Some(outcome) = self.ended(10_000)? {
                return Ok(outcome);
            }
        }
    }
}

fn next_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    20_000 + NEXT.fetch_add(1, Ordering::Relaxed) % 10_000
}

/// The outcomes of both ends, as far as they ended.
struct Ended {
    ours: Outcome,
    theirs: Option<Outcome>,
}

/// Waits for both ends, but not for a server that waits for a failed client.
fn finish(mut ours: Ours, job: &mut Theirs) -> Step<Ended> {
    let mut deadline = Instant::now() + PATIENCE;
    let mut theirs: Option<Outcome> = None;
    let code = loop {
        if let Some(code) = ours.ended()? {
            break code;
        }
        if theirs.is_none() {
            theirs = job.ended(5)?;
            if theirs.as_ref().is_some_and(|outcome| outcome.code != 0) {
                deadline = deadline.min(Instant::now() + ALONE);
            }
        }
        if Instant::now() > deadline {
            break -1;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    Ok(Ended { ours: ours.outcome(code), theirs })
}

/// How both ended, and all that they printed.
fn both(ours: &Outcome, theirs: Option<&Outcome>) -> String {
    let end = |outcome: &Outcome| {
        format!("ended with {}: {}{}", outcome.code, outcome.stdout, outcome.stderr)
    };
    format!("ours {}; theirs {}", end(ours), theirs.map_or("goes on".to_owned(), end))
}

/// Checks that both ended well and report the work of the cell.
fn verdict(cell: &ProgramCell, ours: &Outcome, theirs: &Outcome) -> Step {
    let both = || both(ours, Some(theirs));
    if ours.code != 0 || theirs.code != 0 {
        return Err(both());
    }
    for (end, asks) in [(ours, Requester::Ours), (theirs, Requester::Rxe)] {
        said(cell, &end.stdout, asks).map_err(|what| format!("{what}: {}", both()))?;
    }
    Ok(())
}

/// Checks the output of the program that is the client if `asks` is the requester.
fn said(cell: &ProgramCell, text: &str, asks: Requester) -> Step {
    let ProgramCell { program, setting } = cell;
    let client = setting.requester == asks;
    if program.gid == "-g" {
        let whole = text.contains(" iters in ") && !text.contains("invalid data");
        return if whole { Ok(()) } else { Err("not all data came whole".into()) };
    }
    let mtu = text.lines().find_map(|line| line.trim().strip_prefix("Mtu")?.split(':').nth(1));
    if mtu.map(str::trim) != Some(&format!("{}[B]", setting.mtu)) {
        return Err(format!("the path MTU is {mtu:?}"));
    }
    // perftest's servers of latencies in which they take no part print no table.
    let passive = matches!(program.tool, "ib_read_lat" | "ib_atomic_lat");
    if passive && !client {
        return Ok(());
    }
    let measured = text.lines().filter(|line| is_row(line)).count();
    let sizes = if program.is_long() { 23 } else { 1 };
    // Nor does a server of a bandwidth always know when a size is over.
    let all = if client { measured == sizes } else { text.contains("#bytes") };
    if all { Ok(()) } else { Err(format!("{measured} of {sizes} sizes were measured")) }
}

/// Whether a line of perftest has the figures of a size: bytes, messages, and figures.
fn is_row(line: &str) -> bool {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [bytes, messages, rest @ ..] = &words[..] else { return false };
    let counts = bytes.parse::<u64>().is_ok() && messages.parse::<u64>().is_ok_and(|n| n > 0);
    counts && rest.len() >= 2 && rest.iter().all(|word| word.parse::<f64>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// A change of this number needs a reason: cells do not vanish.
    #[test]
    fn no_cell_is_missing() {
        // 25 programs with either side as the client, 3 backends, 2 families; 6 long ones with
        // either side as the client; 11 that the connection manager connects, with either side as
        // the client, 3 backends.
        assert_eq!(all().len(), 25 * 2 * 3 * 2 + 6 * 2 + 11 * 2 * 3);
        assert_eq!(subset().len(), 25 * 2 + 7);
        let names: BTreeSet<String> = all().iter().map(ProgramCell::name).collect();
        assert_eq!(names.len(), all().len());
    }

    /// A server is killed once its client has failed, and the client has the reason.
    #[test]
    fn a_client_that_was_too_early_starts_again() {
        let outcome = |code, stderr: &str| {
            let (stdout, stderr) = (String::new(), stderr.to_owned());
            Outcome { code, stdout, stderr }
        };
        let (killed, early) = (outcome(-1, ""), outcome(1, TOO_SLOW[2].0));
        assert_eq!(too_slow(&both(&killed, Some(&early))), Some(&TOO_SLOW[2]));
        assert_eq!(too_slow(&both(&killed, Some(&outcome(1, "no memory")))), None);
        assert_eq!(too_slow(&both(&killed, None)), None);
    }

    #[test]
    fn what_a_program_prints_is_judged() {
        let cell = |name: &str, requester| {
            let of = |cell: &&ProgramCell| {
                (cell.program.name, cell.setting.requester) == (name, requester)
            };
            all().iter().find(of).copied().unwrap()
        };
        let one = cell("ib_write_bw", Requester::Ours);
        let mtu = |mtu: u32| format!(" Mtu             : {mtu}[B]\n #bytes     #iterations\n");
        let row = |bytes: u32| format!(" {bytes}       40             12.34   11.80   0.0013\n");
        let good = mtu(one.setting.mtu) + &row(9000);
        assert_eq!(said(&one, &good, Requester::Ours), Ok(()));
        assert_eq!(said(&one, &mtu(one.setting.mtu), Requester::Rxe), Ok(()));
        for bad in [mtu(one.setting.mtu), mtu(999) + &row(9000), row(9000)] {
            said(&one, &bad, Requester::Ours).unwrap_err();
        }
        let all_sizes = cell("ib_write_bw_all", Requester::Rxe);
        let rows: Vec<String> = (1..=23).map(|shift| row(1 << shift)).collect();
        let good = mtu(4096) + &rows.concat();
        assert_eq!(said(&all_sizes, &good, Requester::Rxe), Ok(()));
        said(&all_sizes, &(mtu(4096) + &rows[1..].concat()), Requester::Rxe).unwrap_err();
        let game = cell("ibv_rc_pingpong", Requester::Ours);
        assert_eq!(said(&game, "20 iters in 0.01 seconds", Requester::Ours), Ok(()));
        for bad in ["", "20 iters in 0.01 seconds\ninvalid data in page 0"] {
            said(&game, bad, Requester::Rxe).unwrap_err();
        }
    }

    #[test]
    fn every_program_sees_every_path_mtu_and_link() {
        let seen = |of: fn(&Setting) -> String, cells: &[ProgramCell]| {
            let pairs = cells
                .iter()
                .filter(|cell| !cell.program.is_long() && !cell.program.is_managed())
                .map(|cell| (cell.program.name, of(&cell.setting)));
            pairs.collect::<BTreeSet<_>>().len()
        };
        assert_eq!(seen(|s| s.mtu.to_string(), &all()), 25 * 5);
        assert_eq!(seen(|s| format!("{:?} {:?}", s.link, s.requester), &all()), 25 * 4);
        let part = subset();
        let managed: Vec<_> = part.iter().filter(|cell| cell.program.is_managed()).collect();
        let backends: BTreeSet<String> =
            managed.iter().map(|cell| cell.setting.backend.to_string()).collect();
        let programs: BTreeSet<&str> = managed.iter().map(|cell| cell.program.name).collect();
        assert_eq!((managed.len(), backends.len(), programs.len()), (7, 3, 7));
        // In the part all settings occur, though not with each program.
        let of: [fn(&Setting) -> String; 4] = [
            |s| s.mtu.to_string(),
            |s| format!("{:?}", s.link),
            |s| s.backend.to_string(),
            |s| s.ipv6.to_string(),
        ];
        for (of, count) in of.into_iter().zip([5, 2, 3, 2]) {
            let seen: BTreeSet<String> = subset().iter().map(|cell| of(&cell.setting)).collect();
            assert_eq!(seen.len(), count, "{seen:?}");
        }
    }
}
