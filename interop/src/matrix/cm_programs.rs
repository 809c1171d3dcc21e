//! Programs of librdmacm in the guest, over the kernel's `rdma_cm` and Soft-RoCE, and ours of the same names: connected by the connection
//! manager, with either side as the client.

use std::net::IpAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use rocinante::Backend;
use rocinante_cli::lab::{ChildGuard, Netns};

use super::Bench;
use super::cell::{Requester, Setting};
use super::node::Step;
use crate::guest::{Link, Outcome};

/// A program as both sides are told to run it: `{here}` is the own address, `{there}` the other's, `{port}` a port of RDMA_PS_TCP.
#[derive(Debug)]
pub struct CmProgram {
    /// What the cell is called.
    name: &'static str,
    /// Its server and its client in the guest.
    theirs: [&'static str; 2],
    /// Ours.
    ours: [&'static str; 2],
    /// What the server and the client in the guest print.
    say: [&'static str; 2],
    /// What ours has in its JSON.
    done: &'static str,
}

/// All of them.
pub static CM_PROGRAMS: [CmProgram; 3] = [
    CmProgram {
        name: "rping",
        theirs: [
            "rping -s -v -a {here} -p {port}",
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
        name: "rdma_server",
        theirs: ["rdma_server -s {here} -p {port}", "rdma_client -s {there} -p {port}"],
        ours: ["rdma-server -s {here} -p {port}", "rdma-client -s {there} -b {here} -p {port}"],
        say: ["rdma_server: end 0", "rdma_client: end 0"],
        done: "\"messages\":2",
    },
];

/// A program in a setting; who asks is the client. The path MTU is the link's, as `rdma_cm` has it.
#[derive(Debug, Clone, Copy)]
pub struct CmCell {
    /// What; or nothing where nobody listens, and we ask.
    program: Option<&'static CmProgram>,
    /// Where and how.
    pub setting: Setting,
}

impl CmCell {
    /// Its name: `cm_ucmatose::ours::packet::veth::v4::4096`.
    #[must_use]
    pub fn name(&self) -> String {
        let name = self.program.map_or("nobody_listens", |program| program.name);
        format!("cm_{name}::{}", self.setting)
    }
}

/// Every program with either side as the client, on every backend, with IPv4 and IPv6; and a port where nobody listens. Links take turns.
#[must_use]
pub fn all() -> Vec<CmCell> {
    let mut cells = Vec::new();
    let programs = CM_PROGRAMS.iter().map(Some).chain([None]);
    for (p, program) in programs.enumerate() {
        for (r, requester) in [Requester::Ours, Requester::Rxe].into_iter().enumerate() {
            if program.is_none() && requester == Requester::Rxe {
                continue;
            }
            for (b, backend) in
                [Backend::Udp, Backend::Packet, Backend::Xdp].into_iter().enumerate()
            {
                for (f, ipv6) in [false, true].into_iter().enumerate() {
                    let link = [Link::Veth, Link::Tap][(p + r + b + f) % 2];
                    let setting = Setting { requester, backend, link, ipv6, mtu: 4096 };
                    cells.push(CmCell { program, setting });
                }
            }
        }
    }
    cells
}

/// The part that every test run takes: of the six settings of each program and client two.
#[must_use]
pub fn subset() -> Vec<CmCell> {
    let all = all().into_iter().enumerate();
    all.filter(|(index, _)| (index % 6) % 3 == (index / 6) % 3).map(|(_, cell)| cell).collect()
}

/// How long either side may take.
const PATIENCE: Duration = Duration::from_secs(30);

impl Bench {
    /// Runs a cell: `ours` is the `rocinante` to run.
    ///
    /// # Errors
    /// One of both fails, or says something else than it should: what both said.
    pub fn run_cm_program(&self, cell: &CmCell, ours: &Path) -> Step {
        static NEXT: AtomicU16 = AtomicU16::new(0);
        let setting = cell.setting;
        let network = self.guest.network();
        let container = network.container(&self.lab, setting.link);
        let here: IpAddr = match setting.ipv6 {
            true => container.ipv6().ok_or("the container has no IPv6")?.into(),
            false => container.ipv4().into(),
        };
        let place = Place {
            bench: self,
            netns: container.netns(),
            program: ours,
            backend: setting.backend,
            here,
            there: network.address(setting.link, setting.ipv6),
            port: 20_000 + NEXT.fetch_add(1, Ordering::Relaxed) % 10_000,
        };
        match (cell.program, setting.requester) {
            (None, _) => place.nobody_listens(),
            (Some(program), Requester::Ours) => place.we_ask(program),
            (Some(program), Requester::Rxe) => place.they_ask(program),
        }
    }
}

/// Where both sides are.
struct Place<'a> {
    bench: &'a Bench,
    netns: &'a Netns,
    program: &'a Path,
    backend: Backend,
    here: IpAddr,
    there: IpAddr,
    port: u16,
}

/// A command of ours that runs.
struct Running(ChildGuard);

impl Running {
    /// What became of it.
    fn finish(self) -> Step<Outcome> {
        let output = self.0.wait_with_output(PATIENCE).map_err(|error| format!("ours: {error}"))?;
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        let code = output.status.code().unwrap_or(-1);
        Ok(Outcome { code, stdout: text(output.stdout), stderr: text(output.stderr) })
    }
}

impl Place<'_> {
    fn run(&self, line: &str) -> Step<Running> {
        let mut command = Command::new(self.program);
        command.args(self.filled(line, self.here, self.there).split_whitespace());
        command.args(["--netdev", &self.backend.to_string(), "--json"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        self.netns.spawn(&mut command).map(Running).map_err(|error| error.to_string())
    }

    fn filled(&self, line: &str, here: IpAddr, there: IpAddr) -> String {
        line.replace("{here}", &here.to_string())
            .replace("{there}", &there.to_string())
            .replace("{port}", &self.port.to_string())
    }

    fn nobody_listens(&self) -> Step {
        let ours = self.run(CM_PROGRAMS[0].ours[1])?.finish()?;
        let said = ours.stderr.contains("rejects the connection");
        if ours.code == 1 && said { Ok(()) } else { Err(format!("not rejected: {ours:?}")) }
    }

    fn we_ask(&self, program: &CmProgram) -> Step {
        let line = self.filled(program.theirs[0], self.there, self.here);
        let server = self.bench.guest.start(&line, PATIENCE).map_err(|error| error.to_string())?;
        // Before it listens it rejects.
        let deadline = Instant::now() + PATIENCE;
        let ours = loop {
            let ours = self.run(program.ours[1])?.finish()?;
            if ours.code == 0
                || !ours.stderr.contains("rejects the connection")
                || Instant::now() > deadline
            {
                break ours;
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        if ours.code != 0 {
            return Err(format!("ours: {ours:?}"));
        }
        let theirs = server.wait().map_err(|error| error.to_string())?;
        verdict(program, 0, &ours, &theirs)
    }

    fn they_ask(&self, program: &CmProgram) -> Step {
        let server = self.run(program.ours[0])?;
        let line = self.filled(program.theirs[1], self.there, self.here);
        // Before ours listens it rejects.
        let deadline = Instant::now() + PATIENCE;
        let theirs = loop {
            let theirs =
                self.bench.guest.run(&line, PATIENCE).map_err(|error| error.to_string())?;
            let rejected = (theirs.stdout.clone() + &theirs.stderr).to_lowercase();
            let early = rejected.contains("reject") || rejected.contains("refused");
            if !early || Instant::now() > deadline {
                break theirs;
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        if !theirs.stdout.contains(program.say[1]) {
            return Err(format!("theirs: {theirs:?}"));
        }
        let ours = server.finish()?;
        verdict(program, 1, &ours, &theirs)
    }
}

/// Both ended well, and both say what they did. `role` is the other program's: 0 is the server.
fn verdict(program: &CmProgram, role: usize, ours: &Outcome, theirs: &Outcome) -> Step {
    // rping's server ends with an error of its own when the client goes.
    let fine = ours.code == 0
        && ours.stdout.contains(program.done)
        && theirs.stdout.contains(program.say[role]);
    if fine { Ok(()) } else { Err(format!("ours: {ours:?}; theirs: {theirs:?}")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Whoever changes these numbers says why: cells do not vanish.
    #[test]
    fn no_cell_is_missing() {
        // Three programs with either side as the client, 3 backends, 2 families; and nobody, whom only we ask.
        assert_eq!(all().len(), 3 * 2 * 3 * 2 + 3 * 2);
        assert_eq!(subset().len(), 3 * 2 * 2 + 2);
        let names: BTreeSet<String> = all().iter().map(CmCell::name).collect();
        assert_eq!(names.len(), all().len());
        let of = |of: fn(&Setting) -> String| {
            subset().iter().map(|cell| of(&cell.setting)).collect::<BTreeSet<_>>().len()
        };
        assert_eq!(of(|s| s.backend.to_string()), 3);
        assert_eq!(of(|s| format!("{:?} {}", s.link, s.ipv6)), 4);
    }
}
