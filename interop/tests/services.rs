//! Datagram services and multicast against Linux': `udaddy` and `mckey` of librdmacm in the virtual machine, over `rdma_rxe`, with
//! `rocinante udaddy` and `rocinante mckey`, in either role.

use std::net::IpAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rocinante_cli::lab::{ChildGuard, Lab, LabConfig, Netns};
use rocinante_interop::guest::{Guest, GuestConfig, Image, Link, Outcome};
use rocinante_tests::{need, require};

const SOON: Duration = Duration::from_secs(30);

#[test]
fn udaddy_and_mckey_of_librdmacm_play_either_role() {
    require!(need::guest());
    let lab = Lab::new(&LabConfig { containers: 1, ..LabConfig::default() }).unwrap();
    let image = Image::prepare().unwrap();
    let programs = Path::new(env!("CARGO_BIN_EXE_rocinante-interop")).parent().unwrap();
    let guest = Guest::boot(&lab, &image, &GuestConfig::new(programs)).unwrap();
    let container = guest.network().container(&lab, Link::Veth);
    let ours: [IpAddr; 2] = [container.ipv4().into(), container.ipv6().unwrap().into()];
    for (number, (backend, ipv6)) in
        (1..).zip(["udp", "packet", "afxdp"].iter().flat_map(|b| [(*b, false), (*b, true)]))
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
        // Linux joins no IPv6 group for RoCE v2 (`cma_iboe_join_multicast`: ENOTSUPP).
        if !ipv6 {
            place.we_send(number);
            place.they_send(number);
        }
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
        let line = format!("udaddy -s {} -b {} --port 9", self.theirs, self.ours);
        let (status, _, err) = self.run(&line).finish();
        assert_eq!(status, 1, "{}: {err}", self.describe());
        assert!(err.contains("nobody serves that"), "{}: {err}", self.describe());
    }

    fn we_ask(&self) {
        let server = format!("udaddy -b {} -c 2 -C 20 -S 900", self.theirs);
        let server = self.guest.start(&server, SOON).unwrap();
        let options = "-c 2 -C 20 -S 900 --patience 8";
        let line = format!("udaddy -s {} -b {} {options}", self.theirs, self.ours);
        // Before it listens there is no such service.
        let deadline = Instant::now() + SOON;
        let (out, err) = loop {
            let (status, out, err) = self.run(&line).finish();
            if status == 0 {
                break (out, err);
            }
            let early = err.contains("nobody serves that") && Instant::now() < deadline;
            assert!(early, "{}: {err}", self.describe());
            std::thread::sleep(Duration::from_millis(100));
        };
        let all = out.contains("\"sent\":40,\"received\":40");
        assert!(all, "{}: {out}{err}", self.describe());
        self.theirs_went_well(&server.wait().unwrap(), "data transfers complete");
    }

    fn they_ask(&self) {
        let server = self.run(&format!("udaddy -b {} -c 2 -C 20 -S 1000", self.ours));
        let client = format!("udaddy -s {} -c 2 -C 20 -S 1000", self.ours);
        let deadline = Instant::now() + SOON;
        let outcome = loop {
            let outcome = self.guest.run(&client, SOON).unwrap();
            // Before ours listens.
            let early = outcome.stdout.contains("UNREACHABLE") || outcome.stdout.contains("REJECT");
            if !early || Instant::now() > deadline {
                break outcome;
            }
            std::thread::sleep(Duration::from_millis(100));
        };
        let (status, out, err) = server.finish();
        assert_eq!(status, 0, "{}: {out}{err}; theirs: {outcome:?}", self.describe());
        self.theirs_went_well(&outcome, "data transfers complete");
        let all = out.contains("\"sent\":40,\"received\":40");
        assert!(all, "{}: {out}{err}", self.describe());
    }

    /// Theirs waits for 3 s after it has joined, sends then, and destroys its queue pair at once: what has not left until then is lost, on a busy
    /// machine nearly all. Then it is started again, which is said.
    fn they_send(&self, number: u8) {
        let group = format!("239.81.0.{number}");
        let line = format!("mckey -m {group} -b {} -C 10 -S 700 --patience 8", self.ours);
        let theirs = format!("mckey -m {group} -b {} -s -C 200 -S 700", self.theirs);
        for left in (0..3).rev() {
            let receiver = self.run(&line);
            let outcome = self.guest.run(&theirs, SOON).unwrap();
            let (status, out, err) = receiver.finish();
            self.theirs_went_well(&outcome, &format!("joined dgid: ::ffff:{group}"));
            if left > 0 && status == 1 && err.contains("of 10 datagrams have come") {
                println!("{}: mckey sent too few: {err}", self.describe());
                continue;
            }
            assert_eq!(status, 0, "{}: {out}{err}; theirs: {outcome:?}", self.describe());
            let all = out.contains("\"sent\":0,\"received\":10");
            assert!(all, "{}: {out}{err}", self.describe());
            return;
        }
    }

    fn we_send(&self, number: u8) {
        let group = format!("239.81.1.{number}");
        let line = format!("mckey -m {group} -b {} -C 25 -S 700", self.theirs);
        let receiver = self.guest.start(&line, SOON).unwrap();
        // Its receives are posted before it joins, and what it says comes when it ends.
        let line = format!("mckey -m {group} -b {} -s -C 25 -S 700 --pause 4", self.ours);
        let (status, out, err) = self.run(&line).finish();
        assert_eq!(status, 0, "{}: {out}{err}", self.describe());
        let outcome = receiver.wait().unwrap();
        self.theirs_went_well(&outcome, "data transfers complete");
        let all = out.contains("\"sent\":25,\"received\":0");
        assert!(all, "{}: {out}{err}", self.describe());
    }

    #[track_caller]
    fn theirs_went_well(&self, outcome: &Outcome, says: &str) {
        let said = format!("{}: {outcome:?}", self.describe());
        assert!(outcome.code == 0 && outcome.stdout.contains(says), "{said}");
    }
}
