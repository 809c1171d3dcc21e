//! The connection manager against Linux': `rping` of librdmacm in the virtual machine, over `rdma_rxe`, and `rocinante rping`, with either as the
//! client.

use std::net::IpAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rocinante_cli::lab::{ChildGuard, Lab, LabConfig, Netns};
use rocinante_interop::guest::{Guest, GuestConfig, Image, Link, Outcome};
use rocinante_tests::{need, require};

const SOON: Duration = Duration::from_secs(30);

#[test]
fn rping_of_librdmacm_is_our_client_and_our_server() {
    require!(need::guest());
    let lab = Lab::new(&LabConfig { containers: 1, ..LabConfig::default() }).unwrap();
    let image = Image::prepare().unwrap();
    let programs = Path::new(env!("CARGO_BIN_EXE_rocinante-interop")).parent().unwrap();
    let guest = Guest::boot(&lab, &image, &GuestConfig::new(programs)).unwrap();
    let container = guest.network().container(&lab, Link::Veth);
    let ours: [IpAddr; 2] = [container.ipv4().into(), container.ipv6().unwrap().into()];
    for (backend, ipv6) in
        ["udp", "packet", "afxdp"].iter().flat_map(|backend| [(*backend, false), (*backend, true)])
    {
        let place = Place {
            guest: &guest,
            netns: container.netns(),
            backend,
            ours: ours[usize::from(ipv6)],
            theirs: guest.network().address(Link::Veth, ipv6),
        };
        place.nobody_listens();
        place.we_ask();
        place.they_ask();
    }
}

/// Where both sides are.
struct Place<'a> {
    guest: &'a Guest,
    netns: &'a Netns,
    backend: &'a str,
    ours: IpAddr,
    theirs: IpAddr,
}

/// A command of ours that runs.
struct Running(ChildGuard);

impl Running {
    /// Its exit status, standard output and standard error.
    fn finish(mut self) -> (i32, String, String) {
        let deadline = Instant::now() + SOON;
        while self.0.try_wait().unwrap().is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        let status = self.0.try_wait().unwrap().and_then(|status| status.code()).unwrap_or(-1);
        self.0.kill();
        let child = self.0.child_mut();
        let (out, err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let read = |pipe| std::io::read_to_string(pipe).unwrap();
        (status, read(out), std::io::read_to_string(err).unwrap())
    }
}

impl Place<'_> {
    fn run(&self, line: &str) -> Running {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rocinante-under-interop"));
        command.args(line.split_whitespace()).args(["--netdev", self.backend, "--json"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Running(self.netns.spawn(&mut command).unwrap())
    }

    fn describe(&self) -> String {
        format!("{} {}", self.backend, self.ours)
    }

    fn nobody_listens(&self) {
        let (status, _, err) =
            self.run(&format!("rping -c -a {} -I {} -p 9 -C 1", self.theirs, self.ours)).finish();
        assert_eq!(status, 1, "{}: {err}", self.describe());
        assert!(err.contains("rejects the connection"), "{}: {err}", self.describe());
    }

    fn we_ask(&self) {
        let server = format!("rping -s -v -a {}", self.theirs);
        let server = self.guest.start(&server, SOON).unwrap();
        let line = format!("rping -c -a {} -I {} -C 5 -V", self.theirs, self.ours);
        // Before it listens it rejects.
        let deadline = Instant::now() + SOON;
        let (out, err) = loop {
            let (status, out, err) = self.run(&line).finish();
            if status == 0 {
                break (out, err);
            }
            assert!(err.contains("rejects the connection"), "{}: {err}", self.describe());
            assert!(Instant::now() < deadline, "{}: {err}", self.describe());
            std::thread::sleep(Duration::from_millis(100));
        };
        assert!(out.contains("\"rounds\":5"), "{}: {out}{err}", self.describe());
        self.theirs_went_well(&server.wait().unwrap(), "server ping data: rdma-ping-4: EFGHIJ");
    }

    fn they_ask(&self) {
        let server = self.run(&format!("rping -s -a {} -v", self.ours));
        let client = format!("rping -c -v -V -C 5 -S 3000 -a {}", self.ours);
        let deadline = Instant::now() + SOON;
        let outcome = loop {
            let outcome = self.guest.run(&client, SOON).unwrap();
            if outcome.code == 0 || Instant::now() > deadline {
                break outcome;
            }
            std::thread::sleep(Duration::from_millis(100));
        };
        let (status, out, err) = server.finish();
        let said = format!("{out}{err}");
        assert!(outcome.code == 0, "{}: {outcome:?}; ours: {status} {said}", self.describe());
        self.theirs_went_well(&outcome, "ping data: rdma-ping-4: EFGHIJ");
        assert_eq!(status, 0, "{}: {err}", self.describe());
        assert!(out.contains("\"rounds\":5") && err.contains("rdma-ping-4: EFGH"), "{out}{err}");
    }

    #[track_caller]
    fn theirs_went_well(&self, outcome: &Outcome, says: &str) {
        let said = format!("{}: {}{}", self.describe(), outcome.stdout, outcome.stderr);
        assert!(outcome.stdout.contains(says), "{said}");
    }
}
