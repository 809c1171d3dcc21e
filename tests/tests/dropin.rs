//! The core of `cargo xtask dropin`: programs of rdma-core and perftest, unmodified, between two
//! containers, and the tests of rdma-core that must pass.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use rocinante_dropin::install::Installation;
use rocinante_dropin::row::opens;
use rocinante_dropin::suite::{self, State, Verdict};
use rocinante_dropin::{kills, row, table};
use rocinante_lab::{ChildGuard, Container, Lab, LabConfig, Pair, lines};
use rocinante_tests::harness::{PATIENCE, wait_until};
use rocinante_tests::{need, rails, skip};

/// Program, mode and backend of rows of the table.
const CORE: [(&str, &str, &str); 33] = [
    ("ibv_devices", "", "udp"),
    ("ibv_devinfo", "-v", "udp"),
    ("ibv_rc_pingpong", "-c", "udp"),
    ("ibv_rc_pingpong", "-e -N -c", "packet"),
    ("ibv_uc_pingpong", "-e -c", "udp"),
    ("ibv_ud_pingpong", "-e -c", "udp"),
    ("ibv_srq_pingpong", "-e -c", "udp"),
    ("ib_send_bw", "-r 512 --use-srq", "udp"),
    ("ib_write_bw", "-q 4", "packet"),
    ("ib_read_lat", "", "udp"),
    ("ib_send_bw", "-e", "udp"),
    ("ib_send_bw", "-c UD", "udp"),
    ("ib_send_lat", "", "packet"),
    ("ib_write_lat", "", "udp"),
    ("ib_read_bw", "", "afxdp"),
    ("ib_atomic_bw", "", "udp"),
    ("ib_atomic_lat", "", "udp"),
    ("rping", "-V", "udp"),
    ("ucmatose", "-c 10 -C 10", "packet"),
    ("udaddy", "-c 4", "udp"),
    ("mckey", "", "packet"),
    ("ib_write_bw", "-R", "udp"),
    ("ib_send_lat", "-z", "udp"),
    ("rcopy", "", "udp"),
    ("ucx_perftest", "rc_v tag_lat", "udp"),
    ("mpi.c", "-n 2, two containers", "udp"),
    ("mpi.c", "-n 8", "udp"),
    ("client.c", "-fsanitize=address", "udp"),
    ("client.c", "-fsanitize=thread", "udp"),
    ("loaders.c", "libibverbs.so", "udp"),
    ("loaders.c", "dlmopen", "udp"),
    ("loaders.c", "system", "udp"),
    ("loaders.c", "others", "udp"),
];

/// The libraries that cargo builds for their tests lie beside this program.
fn installed() -> Result<Installation, String> {
    need::machine_root()?;
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    let built = own.parent().unwrap_or(Path::new("."));
    Installation::of(Path::new(env!("CARGO_BIN_EXE_rocinante-under-test")), built)
        .map_err(|error| format!("{error}: test -p rocinante-capi -p rocinante-paths, too"))
}

/// The libraries; ends the test without them.
macro_rules! installed_or_skip {
    () => {
        match installed() {
            Ok(installed) => installed,
            Err(why) => skip!("{why}"),
        }
    };
}

fn is_there(program: &str) -> bool {
    Path::new("/usr/bin").join(program).exists()
}

#[test]
fn programs_run_unmodified() {
    let programs = ["ibv_rc_pingpong", "ib_write_bw", "rping", "ucx_perftest", "mpirun", "mpicc"];
    if !programs.iter().all(|program| is_there(program)) {
        skip!(
            "no programs: \
             apt install ibverbs-utils perftest rdmacm-utils ucx-utils openmpi-bin libopenmpi-dev gcc"
        );
    }
    let installed = installed_or_skip!();
    let rows = table::rows();
    for core in CORE {
        let row = rows.iter().find(|row| (row.program, row.mode, row.netdev) == core).unwrap();
        let outcome = row::run(*row, &installed);
        assert_eq!(outcome.result, Ok(()), "{}", outcome.line());
    }
}

/// One of the rounds of `cargo xtask dropin --kills`.
#[test]
fn of_many_on_one_address_a_third_is_killed_and_the_others_go_on() {
    if !is_there("ibv_rc_pingpong") {
        skip!("no programs: apt install ibverbs-utils");
    }
    let installed = installed_or_skip!();
    let round = kills::round("udp", &installed).unwrap();
    assert_eq!((round.failed, round.killed, round.ended), (vec![], 22, 42));
}

/// Its peer is killed: a program of librdmacm gets the event, and goes on with the next one.
#[test]
fn a_program_of_rdma_cm_is_told_of_a_peer_that_is_killed() {
    if !is_there("rping") {
        skip!("no programs: apt install rdmacm-utils");
    }
    let installed = installed_or_skip!();
    let lab = Pair::new(&LabConfig::default()).unwrap();
    let [here, there] = lab.containers();
    let address = there.ipv4().to_string();
    let rping = |words: &[&str]| {
        let mut command = installed.run("udp", [&["rping", "-a", &address], words].concat());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let mut server = there.spawn(rping(&["-s", "-P", "-v"]).env("ROCINANTE_AGENT", "off")).unwrap();
    let said = lines(server.child_mut().stdout.take().unwrap());
    let events = lines(server.child_mut().stderr.take().unwrap());
    opens(&mut server).unwrap();
    let mut client = here.spawn(&mut rping(&["-c", "-C", "1000000000"])).unwrap();
    assert!(until(&said, "server ping data"), "it connects");
    client.signal(Signal::SIGKILL);
    assert!(until(&events, "DISCONNECT EVENT"), "it is told");
    let next = here.spawn(&mut rping(&["-c", "-C", "10", "-V"])).unwrap();
    row::succeeded("the client", &next.wait_with_output(PATIENCE).unwrap()).unwrap();
    assert!(until(&events, "DISCONNECT EVENT"), "by the peer itself");
    server.kill();
}

/// The results of a program's client and server under faults, of which the first are the server's.
/// `SERVER` stands for the server's address.
fn with_faults(
    installed: &Installation,
    [server_line, client]: [&str; 2],
    [there_fault, fault]: [&str; 2],
    log: &Path,
) -> [Output; 2] {
    let lab = Pair::new(&LabConfig { ipv6: true, ..LabConfig::default() }).unwrap();
    let [here, there] = lab.containers();
    let address = there.ipv4().to_string();
    let words = |line: &str, fault: &str| {
        let run = ["run", "--netdev", "udp", "--fault", fault, "--fault-log"].map(str::to_owned);
        let line = line.replace("SERVER", &address);
        // A quoted part is one word.
        let parts = line.split('\'').enumerate().flat_map(|(nth, part)| match nth % 2 {
            0 => part.split_whitespace().map(str::to_owned).collect(),
            _ => vec![part.to_owned()],
        });
        let rest: Vec<String> = [log.display().to_string(), "--".to_owned()].into();
        installed.command(run.into_iter().chain(rest).chain(parts))
    };
    let mut server = there.spawn(&mut words(server_line, there_fault)).unwrap();
    // A stalled device opens long before its program listens for the peer over TCP.
    let listens = match server_line.starts_with("rping") {
        true => opens(&mut server),
        false => row::listens_on(&mut server, 18515),
    };
    listens.unwrap();
    let client = here.spawn(&mut words(client, fault)).unwrap();
    let client = client.wait_with_output(PATIENCE).unwrap();
    if !client.status.success() {
        server.kill();
    }
    [client, server.wait_with_output(PATIENCE).unwrap()]
}

/// Packets are lost in both directions and come twice, and a program of others ends right.
#[test]
fn a_program_on_a_bad_network_ends_right() {
    if !["ibv_rc_pingpong", "ib_write_bw", "rping"].iter().all(|name| is_there(name)) {
        skip!("no programs: apt install ibverbs-utils perftest rdmacm-utils");
    }
    let installed = installed_or_skip!();
    let folder = tempfile::TempDir::new().unwrap();
    let fault = "loss=2%,dup=1%,seed=7";
    let programs = [
        ["ibv_rc_pingpong -c -g 0", "ibv_rc_pingpong -c -g 0 SERVER"],
        ["ib_write_bw -n 2000", "ib_write_bw -n 2000 SERVER"],
        ["ib_send_bw -n 500 -q 4", "ib_send_bw -n 500 -q 4 SERVER"],
        // The second address is of IPv6.
        ["ibv_rc_pingpong -g 1", "ibv_rc_pingpong -g 1 SERVER"],
        ["rping -s -a SERVER -C 200", "rping -c -a SERVER -C 200 -V"],
        // A shell forks, and execs.
        ["sh -c 'ib_read_lat -n 500; exit $?'", "sh -c 'exec ib_read_lat -n 500 SERVER'"],
    ];
    for (nth, program) in programs.into_iter().enumerate() {
        let log = folder.path().join(nth.to_string());
        let run = || with_faults(&installed, program, [fault; 2], &log);
        let mut sides = run();
        // Its own seven timeouts of 67 ms may pass while other programs have the processors.
        for _ in 0..2 {
            if sides.iter().any(|side| !side.status.success()) {
                eprintln!("{program:?} runs again: {sides:?}");
                sides = run();
            }
        }
        for side in sides {
            let said = String::from_utf8_lossy(&side.stderr);
            row::succeeded(program[1], &side).unwrap_or_else(|why| panic!("{why}: {said}"));
            assert!(said.contains("faults are on: loss=2%,dup=1%,seed=7, seed 7"), "{said}");
        }
        let lines = std::fs::read_to_string(&log).unwrap();
        let lost = lines.lines().filter(|line| line.contains(r#""did":["lost"]"#)).count();
        assert!(lost > 5, "{program:?}: {lost}");
    }
}

/// The device fails, and an unmodified program ends in time, with its own message.
#[test]
fn a_program_on_a_faulty_device_reports_the_failure() {
    if !is_there("ibv_rc_pingpong") || !is_there("ib_write_bw") {
        skip!("no programs: apt install ibverbs-utils perftest");
    }
    let installed = installed_or_skip!();
    let folder = tempfile::TempDir::new().unwrap();
    let pingpong = ["ibv_rc_pingpong -g 0", "ibv_rc_pingpong -g 0 SERVER"];
    let write = ["ib_write_bw -D 5", "ib_write_bw -D 5 SERVER"];
    for (nth, (program, fault, what, says)) in [
        (pingpong, "verb=reg_mr,errno=ENOMEM", "call", "Couldn't register MR"),
        (pingpong, "verb=modify_qp,nth=2", "call", "Failed to modify QP to RTR"),
        (pingpong, "status=LOC_PROT_ERR,wc=send,nth=40", "completion", "local protection error"),
        (write, "status=RETRY_EXC_ERR,nth=9", "completion", "status 12"),
        // Its completions are flushed.
        (write, "event=DEVICE_FATAL,at=2s", "event", "status 5"),
    ]
    .into_iter()
    .enumerate()
    {
        let log = folder.path().join(nth.to_string());
        let [client, _] = with_faults(&installed, program, ["off", fault], &log);
        assert!(!client.status.success(), "{fault}: {client:?}");
        let said = [&client.stdout, &client.stderr].map(|all| String::from_utf8_lossy(all));
        assert!(said.iter().any(|all| all.contains(says)), "{fault}: {said:?}");
        let lines = std::fs::read_to_string(&log).unwrap();
        assert!(lines.contains(&format!(r#""what":"{what}""#)), "{fault}: {lines}");
    }
    for (fault, did) in [
        ("rnr=20%,seed=1", r#""did":["RNR"]"#),
        ("stall,at=1ms,for=500ms;event=GID_CHANGE,at=1ms", r#""did":["stall"]"#),
    ] {
        let log = folder.path().join(fault);
        for side in with_faults(&installed, pingpong, [fault; 2], &log) {
            row::succeeded(fault, &side).unwrap();
        }
        let lines = std::fs::read_to_string(&log).unwrap();
        assert!(lines.contains(did), "{fault}: {lines}");
    }
}

/// A C program survives the loss of its log's reader. The library prints one line about it.
#[test]
fn a_log_without_a_reader_ends_no_program() {
    if !is_there("ibv_rc_pingpong") {
        skip!("no programs: apt install ibverbs-utils");
    }
    let installed = installed_or_skip!();
    let folder = tempfile::TempDir::new().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let read = pipe.clone();
    // It goes after both sides have begun to write.
    let reader = std::thread::spawn(move || {
        let mut lines = BufReader::new(std::fs::File::open(read).unwrap()).lines();
        assert!(lines.by_ref().filter_map(Result::ok).any(|line| line.contains("did")));
    });
    let program = ["ibv_rc_pingpong -g 0 -n 5000", "ibv_rc_pingpong -g 0 -n 5000 SERVER"];
    // The device and the port have a log each.
    let fault = "delay=1us,side=egress,seed=7;rnr=1%";
    let mut said = 0;
    for side in with_faults(&installed, program, [fault; 2], &pipe) {
        row::succeeded("pingpong", &side).unwrap();
        let errors = String::from_utf8_lossy(&side.stderr).into_owned();
        let count = errors.matches("the log of faults is lost: Broken pipe").count();
        assert!(count <= 1, "{errors}");
        said += count;
    }
    assert!(said > 0);
    reader.join().unwrap();
}

/// Whether a line with this word comes in time.
fn until(lines: &Receiver<String>, word: &str) -> bool {
    let end = Instant::now() + PATIENCE;
    let left = || end.saturating_duration_since(Instant::now());
    std::iter::from_fn(|| lines.recv_timeout(left()).ok()).any(|line| line.contains(word))
}

#[test]
fn tests_of_rdma_core_pass() {
    if !Path::new(suite::TESTS).is_dir() {
        skip!("no suite: apt install rdma-core python3-pyverbs");
    }
    let installed = installed_or_skip!();
    // A test of huge pages needs those that the machine has set aside.
    let is_wanted = |test: &suite::Test| test.state == State::Must && !test.name.contains("huge");
    let wanted: Vec<_> = suite::tests().into_iter().filter(is_wanted).collect();
    let names: Vec<_> = wanted.iter().map(|test| test.name).collect();
    let mut ended = BTreeSet::new();
    let mut failed = Vec::new();
    suite::run(&names, &installed, |name, verdict| {
        ended.insert(name.to_owned());
        if verdict != &Verdict::Passed {
            failed.push(format!("{name}: {verdict:?}"));
        }
    })
    .unwrap();
    assert!(failed.is_empty(), "{failed:#?}");
    assert_eq!(ended, names.iter().map(|name| (*name).to_owned()).collect());
}

/// The TCP port at which both sides meet.
const PORT: u16 = 13337;
/// Bytes that show a rail to be in use.
const MUCH: u64 = 4 << 20;
/// UCX gives a peer up after eight timeouts of a second, and a busy machine is late.
const LIMIT: Duration = Duration::from_secs(90);

/// UCX on two devices; a message goes over both in parts.
fn ucx(installed: &Installation, at: &Container, words: &str) -> ChildGuard {
    let words = format!("ucx_perftest -p {PORT} {words}");
    let mut command = installed.run("udp", words.split_whitespace());
    command
        .env("UCX_NET_DEVICES", "roce0:1,roce1:1")
        .env("UCX_TLS", "rc_v,self")
        .envs([("UCX_MAX_RNDV_RAILS", "2"), ("UCX_MAX_EAGER_RAILS", "2")])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    at.spawn(&mut command).unwrap()
}

/// The bytes that an interface has received and sent; 0 if it is gone.
fn carried(at: &Container, interface: &str) -> u64 {
    let read = at.output(Command::new("cat").arg("/proc/net/dev")).unwrap().stdout;
    let text = String::from_utf8(read).unwrap();
    let line = text.lines().find_map(|line| line.trim().strip_prefix(interface)?.strip_prefix(':'));
    let columns: Vec<u64> =
        line.unwrap_or_default().split_whitespace().map(|it| it.parse().unwrap()).collect();
    columns.first().unwrap_or(&0) + columns.get(8).unwrap_or(&0)
}

/// It succeeded, or has ended with an error of its own: UCX aborts with a message where a program
/// handles none.
fn ended_well(output: &Output) {
    let said = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
    let aborted =
        output.status.signal() == Some(Signal::SIGABRT as i32) && said.contains("Fatal: ");
    assert!(output.status.code().is_some() || aborted, "{}: {said}", output.status);
    assert!(!said.contains("panicked"), "{said}");
}

/// UCX over two rails of each machine, which lie in one subnet. One is deleted while it runs.
#[test]
fn ucx_loses_one_of_two_rails_and_ends_or_goes_on() {
    if !is_there("ucx_perftest") {
        skip!("no ucx_perftest: apt install ucx-utils");
    }
    let installed = installed_or_skip!();
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let [here, there] = [lab.container(0), lab.container(1)];
    for index in [0, 1] {
        let _ = rails::add(&lab, index);
        rails::wait_for_link(&lab, index);
    }
    let mut server = ucx(&installed, there, "");
    row::listens_on(&mut server, PORT).unwrap();
    let words = format!("{} -t tag_bw -s 1048576 -n 1000000000 -w 1", there.ipv4());
    let mut client = ucx(&installed, here, &words);
    wait_until("both rails are in use", || {
        assert_eq!(client.try_wait().unwrap(), None, "the client has ended");
        ["eth0", "eth1"].iter().all(|rail| carried(here, rail) > MUCH)
    });
    rails::ip(here.netns(), "link delete eth1");
    // Both end, or messages go on by the rail that is left.
    let (begin, before) = (Instant::now(), carried(here, "eth0"));
    let goes_on = || begin.elapsed() > LIMIT / 6 && carried(here, "eth0") > before + 64 * MUCH;
    let mut has_ended = [false; 2];
    while !has_ended.contains(&true) && !goes_on() {
        assert!(begin.elapsed() < LIMIT, "neither side ends, and nothing goes on");
        std::thread::sleep(Duration::from_millis(50));
        has_ended = [&mut client, &mut server].map(|it| it.try_wait().unwrap().is_some());
    }
    for (mut side, has_ended) in [client, server].into_iter().zip(has_ended) {
        if !has_ended {
            // It waits for a peer that has gone, as on a card.
            side.signal(Signal::SIGTERM);
        }
        let output = side.wait_with_output(PATIENCE).unwrap();
        let was_asked = output.status.signal() == Some(Signal::SIGTERM as i32);
        if has_ended || !was_asked {
            ended_well(&output);
        }
    }
}
