//! How commands end: by a signal, also with PID 1, and by an error. They print the results so far.

use super::{Addresses, Running, rocinante, run, with_results, words};
use nix::sys::signal::Signal;
use rocinante_lab::{ChildGuard, Lab, LabConfig, Match};
use rocinante_tests::harness::wait_until;
use rocinante_tests::{need, require, unique};
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A command that is stopped ends within this time: the grace of an attentive thread, and a busy
/// machine.
const SOON: Duration = Duration::from_secs(10);

const SIGNALS: [(Signal, i32, &str); 3] = [
    (Signal::SIGINT, 130, "SIGINT"),
    (Signal::SIGTERM, 143, "SIGTERM"),
    (Signal::SIGHUP, 129, "SIGHUP"),
];

/// Every command that waits, by its command line and its message then.
fn waiting() -> Vec<(String, &'static str)> {
    let at = || unique::loopback();
    vec![
        (format!("pingpong --netdev udp --bind {}", at()), "waiting for a client"),
        (format!("pingpong --cm --netdev udp --bind {}", at()), "waiting for a client"),
        (format!("perf write-bw --netdev udp --bind {}", at()), "waiting for a client"),
        (format!("perf send-lat --cm --netdev udp --bind {}", at()), "waiting for a client"),
        (format!("rping -s --netdev udp -a {}", at()), "waiting for a client"),
        (format!("rping -s -P --netdev udp -a {}", at()), "waiting for a client"),
        (format!("rping -c --netdev udp -I {} -a {}", at(), at()), "device"),
        (format!("pingpong --cm --netdev udp --bind {} {}", at(), at()), "device"),
    ]
}

#[test]
fn a_signal_ends_every_command_that_waits() {
    for (index, (line, says)) in waiting().into_iter().enumerate() {
        let (signal, status, name) = SIGNALS[index % SIGNALS.len()];
        let mut running = Running::start(&mut rocinante(words(&format!("{line} --json"))));
        running.says(says);
        let start = Instant::now();
        running.child.signal(signal);
        let done = running.finish().failed(status, &[&format!("stopped by {name}")]);
        assert!(start.elapsed() < SOON, "{line}: {:?}", start.elapsed());
        let json = done.json();
        assert_eq!(json["error"]["kind"], "signal", "{line}: {json}");
        assert!(json["error"]["stage"].as_str().is_some_and(|s| !s.is_empty()), "{line}: {json}");
        assert!(json["results"].is_array(), "{line}: {json}");
    }
}

#[test]
fn decode_of_a_pipe_ends_by_a_signal() {
    let mut command = rocinante(["decode", "-"]);
    command.stdin(Stdio::piped());
    let mut running = Running::start(&mut command);
    running.handles(Signal::SIGTERM);
    // It has read the head of a file, and waits for more.
    let mut pipe = running.child.child_mut().stdin.take().unwrap();
    pipe.write_all(&[0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0]).unwrap();
    wait_until("it has read", || rustix::io::ioctl_fionread(&pipe).unwrap() == 0);
    running.child.signal(Signal::SIGTERM);
    running.finish().failed(143, &["stopped by SIGTERM"]);
    drop(pipe);
}

/// The kernel discards a signal that a process with PID 1 does not handle.
#[test]
fn pid_1_ends_by_a_signal() {
    require!(need::machine_root());
    require!(need::program("unshare"));
    for (line, says) in waiting().into_iter().step_by(3) {
        for (signal, status, _) in &SIGNALS[..2] {
            let mut command = Command::new("unshare");
            command.args(["--pid", "--fork", "--mount-proc", "--kill-child"]);
            command.arg(env!("CARGO_BIN_EXE_rocinante-under-test")).args(words(&line));
            let running = Running::start(command.stdin(Stdio::null())).that_says(says);
            let unshare = running.child.id();
            let children = format!("/proc/{unshare}/task/{unshare}/children");
            let child = std::fs::read_to_string(children).unwrap();
            let child = nix::unistd::Pid::from_raw(child.trim().parse().unwrap());
            let start = Instant::now();
            nix::sys::signal::kill(child, *signal).unwrap();
            assert_eq!(running.finish().status, *status, "{line}");
            assert!(start.elapsed() < SOON, "{line}");
        }
    }
}

/// The first signal ends the measuring: the figures so far are printed, and the peer hears why.
#[test]
fn a_signal_ends_a_measurement_with_its_figures() {
    for test in ["write-bw", "send-bw", "send-bw -b", "write-lat", "read-lat", "send-lat"] {
        let addresses = Addresses::new();
        let server = addresses.serve(&format!("perf {test}"));
        let line = addresses.client_line(&format!("perf {test} -D 60 -i 0.1 --json --counters"));
        let mut client = Running::start(&mut rocinante(words(&line))).that_says("#bytes");
        client.hears("an interval with messages", |line| {
            let messages = line.split_whitespace().nth(1);
            line.ends_with(" s") && messages.is_some_and(|messages| messages != "0")
        });
        client.child.signal(Signal::SIGINT);
        let client = client.finish().failed(130, &["stopped by SIGINT", "transport.sent_pkts"]);
        let json = client.json();
        assert_eq!(json["error"]["kind"], "signal", "{test}: {json}");
        assert_eq!(json["error"]["stage"], "measuring", "{test}: {json}");
        assert!(json["results"][0]["messages"].as_u64() > Some(0), "{test}: {json}");
        assert!(json["counters"]["transport"]["sent_pkts"].as_u64() > Some(0), "{test}: {json}");
        server.finish().failed(1, &["stopped by SIGINT"]);
    }
}

/// The server of a one-sided test only waits. Its client hears why it ended.
#[test]
fn a_signal_at_a_server_that_only_answers_reaches_the_client() {
    let tests = ["write-bw", "write-bw -e", "read-lat", "read-bw --cm", "atomic-lat --cm"];
    for (index, test) in tests.into_iter().enumerate() {
        let (signal, status, name) = SIGNALS[index % SIGNALS.len()];
        let stopped = format!("stopped by {name}");
        let addresses = Addresses::new();
        let mut server = addresses.serve(&format!("perf {test}"));
        let line = addresses.client_line(&format!("perf {test} -D 60 -i 0.1 --json"));
        let mut client = Running::start(&mut rocinante(words(&line))).that_says("#bytes");
        client.says(" s");
        server.child.signal(signal);
        server.finish().failed(status, &[&stopped]);
        let json = client.finish().failed(1, &[&format!("it gave up: {stopped}")]).json();
        assert_eq!(json["error"]["kind"], "peer", "{test}: {json}");
    }
}

#[test]
fn a_signal_ends_a_ping_pong_with_its_figures() {
    for both in ["pingpong", "pingpong -e", "pingpong --cm"] {
        let client = with_results(|time| {
            let addresses = Addresses::new();
            let server = addresses.serve(both);
            let line = addresses.client_line(&format!("{both} -n 1000000000 --json"));
            let mut client = Running::start(&mut rocinante(words(&line)));
            client.says("remote address");
            std::thread::sleep(time);
            client.child.signal(Signal::SIGTERM);
            let client = client.finish().failed(143, &["stopped by SIGTERM"]);
            server.finish().failed(1, &["stopped by SIGTERM"]);
            client
        });
        let json = client.failed(143, &["usec/iter"]).json();
        assert_eq!(json["error"]["stage"], "ping_pong", "{json}");
        assert!(json["results"][0]["iters"].as_u64() > Some(0), "{json}");
    }
    // The same of rping, whose client plays for ever.
    let client = with_results(|time| {
        let Addresses { server, client } = Addresses::new();
        let line = format!("rping -s --netdev udp -a {server}");
        let mut at_server = Running::start(&mut rocinante(words(&line))).that_waits();
        let line = format!("rping -c --netdev udp -a {server} -I {client} --json");
        let mut client = Running::start(&mut rocinante(words(&line))).that_says("device");
        std::thread::sleep(time);
        client.child.signal(Signal::SIGINT);
        let client = client.finish();
        at_server.child.signal(Signal::SIGTERM);
        let _ = at_server.finish();
        client
    });
    let json = client.failed(130, &["stopped by SIGINT"]).json();
    assert!(json["results"][0]["rounds"].as_u64() > Some(0), "{json}");
}

/// A client that cannot report, because its output is not read.
#[test]
fn a_second_signal_ends_it_at_once() {
    // Before the first would have: on a busy machine not each time.
    assert!((0..5).any(|_| two_signals() < Duration::from_millis(1900)));
}

/// The time from the first signal to the end.
fn two_signals() -> Duration {
    let Addresses { server, client } = Addresses::new();
    let mut at_server =
        Running::start(&mut rocinante(words(&format!("rping -s --netdev udp -a {server}"))));
    at_server.says("waiting for a client");
    let mut command =
        rocinante(words(&format!("rping -c -v --netdev udp -a {server} -I {client}")));
    let mut stuck =
        ChildGuard::spawn(command.stdout(Stdio::piped()).stderr(Stdio::null())).unwrap();
    let asleep = || {
        let stat =
            std::fs::read_to_string(format!("/proc/{}/wchan", stuck.id())).unwrap_or_default();
        stat.contains("pipe_write")
    };
    wait_until("its output is full", asleep);
    let start = Instant::now();
    stuck.signal(Signal::SIGINT);
    std::thread::sleep(Duration::from_millis(300));
    let ended = stuck.try_wait().unwrap();
    assert!(ended.is_none() || start.elapsed() > Duration::from_secs(1), "it may still report");
    stuck.signal(Signal::SIGTERM);
    assert_eq!(stuck.wait(SOON).unwrap().code(), Some(130));
    start.elapsed()
}

/// nohup(1) and shells start programs that ignore a signal: so they stay.
#[test]
fn an_ignored_signal_stays_ignored() {
    let line = format!("rping -s --netdev udp -a {}", unique::loopback());
    let mut command = Command::new("sh");
    let program = env!("CARGO_BIN_EXE_rocinante-under-test");
    command.args(["-c", &format!("trap '' HUP; exec {program} {line}")]).stdin(Stdio::null());
    let mut running = Running::start(&mut command).that_waits();
    running.child.signal(Signal::SIGHUP);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(running.child.try_wait().unwrap(), None);
    running.child.signal(Signal::SIGTERM);
    assert_eq!(running.finish().status, 143);
}

/// The results before the peer went silent are printed, with the counters.
#[test]
fn a_run_that_fails_has_figures_and_counters() {
    require!(need::nft());
    for test in ["write-bw", "read-lat"] {
        let lab = Lab::new(&LabConfig::default()).unwrap();
        let start = |index: usize, line: &str| {
            let mut command = rocinante(words(line));
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
            Running::of(lab.container(index).spawn(&mut command).unwrap())
        };
        let server = start(1, &format!("perf {test} --netdev udp")).that_waits();
        let line = format!("perf {test} --netdev udp -D 60 -i 0.1 --counters --json");
        let mut client = start(0, &format!("{line} {}", lab.container(1).ipv4()));
        // The line of an interval in which messages were counted.
        client.hears("messages", |line| {
            let messages = line.split_whitespace().nth(1).and_then(|word| word.parse().ok());
            line.ends_with(" s") && messages > Some(0u64)
        });
        let _rule = lab.block(&Match::roce()).unwrap();
        let client = client.finish().failed(1, &["transport.sent_pkts", "RETRY_EXC_ERR"]);
        let json = client.json();
        assert_eq!(json["error"]["kind"], "completion", "{json}");
        assert_eq!(json["error"]["status"], "RETRY_EXC_ERR", "{json}");
        assert_eq!(json["error"]["stage"], "measuring", "{json}");
        assert!(json["results"][0]["messages"].as_u64() > Some(0), "{json}");
        assert!(json["counters"]["transport"]["retransmitted_pkts"].is_u64(), "{json}");
        let _ = server.finish();
    }
}

#[test]
fn an_error_has_a_kind_and_a_stage() {
    let addresses = Addresses::new();
    let kind = |line: &str, status| {
        let json = run(&format!("{line} --json")).failed(status, &[]).json();
        let field = |name: &str| json["error"][name].as_str().unwrap_or_default().to_owned();
        assert!(!field("message").is_empty(), "{json}");
        (field("kind"), field("stage"))
    };
    let expect = |kind: &str, stage: &str| (kind.to_owned(), stage.to_owned());
    let line = addresses.client_line("pingpong --patience 1");
    assert_eq!(kind(&line, 1), expect("connect", "connecting"));
    let line = format!("pingpong --netdev udp --bind 192.0.2.250 {}", addresses.server);
    assert_eq!(kind(&line, 1), expect("device", "opening_the_device"));
    assert_eq!(kind("devices nosuch0", 1).0, "device");
    assert_eq!(kind("perf write-bw -S 1", 2), expect("usage", "options"));
    assert_eq!(kind("perf write-bw --nosuch", 2), expect("usage", "options"));
    assert_eq!(run("perf --help --json").succeeded().err, "");
    let server = addresses.serve("perf write-bw -s 64");
    assert_eq!(
        kind(&addresses.client_line("perf write-bw -s 65"), 1),
        expect("peer", "first_words")
    );
    let _ = server.finish();
}
