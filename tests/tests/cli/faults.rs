//! `--fault`: the commands on a bad network, on each backend, without root's tools.

use std::path::Path;

use super::run::Installed;
use super::{Done, both, rocinante, run, schema, start};
use nix::sys::signal::Signal;
use rocinante::OpenOptions;
use rocinante::device::Backend;
use rocinante_lab::{Lab, LabConfig};
use rocinante_tests::on_each_backend;
use rocinante_tests::running::{Running, retried};
use serde_json::Value;
use tempfile::TempDir;

/// A counter that a command printed; 0 if it did not.
fn counter(done: &Done, name: &str) -> u64 {
    let line = done.err.lines().find_map(|line| line.trim().strip_prefix(name));
    line.map_or(0, |number| number.trim().parse().expect("a number"))
}

/// The lines of a log, each as its schema says.
fn log(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).expect("a log");
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for line in &lines {
        let errors = schema::errors_of("fault-log", line);
        assert!(errors.is_empty(), "{errors:?}: {line}");
    }
    lines
}

/// Whether the parser, and the schema, take a schedule.
fn taken(text: &str) -> [bool; 2] {
    let value: Value = toml::from_str(text).unwrap();
    let parsed = OpenOptions::check_schedule(text);
    [parsed.is_ok(), schema::errors_of("fault", &value).is_empty()]
}

on_each_backend!(losses_are_repaired, changed_packets_are_dropped, others_are_spared);

fn between(backend: Backend, server: &str, client: &str) -> (Done, Done) {
    let lab = Lab::new(&LabConfig { mtu: 9000, ..LabConfig::default() }).unwrap();
    let server = start(lab.container(1), &format!("{server} --netdev {backend}")).that_waits();
    let address = lab.container(1).ipv4();
    let client = start(lab.container(0), &format!("{client} --netdev {backend} {address}"));
    let client = client.finish();
    (server.finish(), client)
}

fn losses_are_repaired(backend: Backend) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("faults.jsonl");
    let fault = format!("--fault loss=2%,dup=1%,reorder=1%,seed=7 --fault-log {}", path.display());
    let client = format!("perf write-bw -n 2000 -s 20000 -q 2 --counters {fault}");
    let (server, client) = between(backend, "perf write-bw", &client);
    server.succeeded();
    let client = client.succeeded();
    let says = "faults are on: loss=2%,dup=1%,reorder=1%,seed=7, seed 7";
    assert!(client.err.contains(says), "never silently: {}", client.err);
    let again = counter(&client, "transport.retransmitted_pkts");
    let lines = log(&path);
    let first = &lines[0];
    assert_eq!((&first["seed"], &first["port"]), (&7.into(), &0.into()));
    // 20,000 packets leave, and those that are sent again.
    let did = |side: &str, what: &str| {
        let is = |line: &&Value| {
            line["side"] == side && line["did"].as_array().unwrap().contains(&what.into())
        };
        lines[1..].iter().filter(is).count() as u64
    };
    let lost = did("egress", "lost");
    assert!((300..560).contains(&lost), "{lost}");
    assert!(again >= lost, "{again} for {lost}");
    assert!(did("egress", "duplicated") > 50 && did("egress", "reordered") > 50);
    assert!(did("ingress", "lost") > 0, "acknowledgements, too");
}

/// Each is changed in one bit, which the ICRC of the receiver tells; the payload is right.
fn changed_packets_are_dropped(backend: Backend) {
    let fault = "--fault corrupt=2%,side=egress,seed=3;delay=20us,corrupt=1%";
    let line = "pingpong -c -s 10000 --counters";
    let (server, client) = between(backend, line, &format!("{line} -n 500 {fault}"));
    let (server, client) = (server.succeeded(), client.succeeded());
    assert!(counter(&server, "drops.icrc") > 5, "{}", server.err);
    assert!(counter(&client, "drops.icrc") > 1, "{}", client.err);
}

/// Without a fault, and with one for another peer, nothing is lost.
fn others_are_spared(backend: Backend) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("faults.jsonl");
    let other = format!("partition,peer=203.0.113.7 --fault-log {}", path.display());
    for fault in ["off", "loss=0", &other] {
        let client = format!("pingpong -c -n 200 -s 10000 --fault {fault}");
        let (server, client) = between(backend, "pingpong -c", &client);
        server.succeeded();
        let is_on = client.succeeded().err.contains("faults are on");
        assert_eq!(is_on, fault == other, "{fault}");
    }
    let none = folder.path().join("none.jsonl");
    let line = format!("pingpong -n 1 --fault off --fault-log {}", none.display());
    let (server, client) = between(backend, "pingpong", &line);
    server.succeeded();
    assert!(client.succeeded().err.contains("there are no faults, so nothing is written"));
    assert!(!none.exists());
    assert_eq!(log(&path).len(), 1, "no decision");
}

#[test]
fn a_partition_is_survived_or_named() {
    // Seven repetitions after 67 ms each are more than it lasts.
    let short = "--fault partition,at=600ms,for=150ms --counters";
    let (server, client) = both("perf write-bw", &format!("perf write-bw -D 3 {short}"));
    server.succeeded();
    let client = client.succeeded();
    assert!(counter(&client, "transport.retransmitted_pkts") > 0, "{}", client.err);
    // With 1 ms each they are over.
    let long = "perf write-bw -D 30 -u 8 --fault partition,at=600ms";
    let (_, client) = both("perf write-bw -u 8", long);
    client.failed(1, &["stopped answering on UDP/4791", "RETRY_EXC_ERR"]);
}

#[test]
fn a_schedule_is_as_its_schema_says_and_is_followed() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("bad.toml");
    let text = r#"
        seed = 5
        [[fault]]
        at = "0ms"
        for = "5ms"
        loss = "1%"
        opcode = ["rdma-write", 0x11]
        then = "slow"
        [[fault]]
        name = "slow"
        delay = "1ms"
        jitter = "20us"
        side = "egress"
    "#;
    std::fs::write(&path, text).unwrap();
    let value: Value = toml::from_str(text).unwrap();
    assert_eq!(schema::errors_of("fault", &value), Vec::<String>::new());
    for wrong in ["fault = [{ los = 1 }]", "fault = [{ loss = -1 }]", "seed = 1", "fault = []"] {
        assert_eq!(taken(wrong), [false; 2], "{wrong}");
    }
    for right in [
        "draws = 0",
        "draws = 63",
        "delay = 0",
        "at = 0",
        "every = 4294967295",
        "every = \"7\"",
        "mtu = \"1500\"",
    ]
    .into_iter()
    .chain(["partition = \"yes\"", "partition = \"\"", "burst = 1\nburst_length = \"5\""])
    .chain(["rate = \"1e9bit\"", "queue = \"64K\"\nrate = \"1Gbit\""])
    {
        assert_eq!(taken(&format!("[[fault]]\nloss = 0.1\n{right}")), [true; 2], "{right}");
    }
    for wrong in [
        "draws = 64",
        "draws = \"1\"",
        "delay = 1",
        "every = 4294967296",
        "every = 0",
        "every = \"0\"",
        "mtu = 65536",
    ]
    .into_iter()
    .chain(["partition = 1", "partition = \"on\"", "burst = 1\nburst_length = 1000001"])
    .chain(["rate = 10", "queue = 0\nrate = \"1Gbit\""])
    {
        assert_eq!(taken(&format!("[[fault]]\nloss = 0.1\n{wrong}")), [false; 2], "{wrong}");
    }
    let line = format!("pingpong -n 1000 --json --fault {}", path.display());
    let (server, client) = both("pingpong", &line);
    server.succeeded();
    let client = client.succeeded();
    assert!(client.err.contains("bad.toml, seed 5"), "{}", client.err);
    // At most half of the turns fit into the first rule.
    let usual = client.json()["us_per_iter"].as_f64().expect("a time");
    assert!(usual > 400.0, "{}", client.out);
}

/// Words of the device, in words of a schedule: the parser and the schema take the same.
#[test]
fn parser_and_schema_take_the_same_faults_of_the_device() {
    for (rule, is_right) in [
        ("verb = \"reg_mr\"", true),
        ("verb = [\"ibv_create_qp\", \"post_send\"]\nerrno = 12\nnth = 3", true),
        ("verb = \"reg_mr\"\nerrno = \"EAGAIN\"\nchance = 0.5", true),
        ("status = \"IBV_WC_RETRY_EXC_ERR\"\nwc = [\"send\", \"recv\"]\nqp = 17", true),
        ("rnr = \"50%\"\npeer = \"10.0.0.1\"", true),
        ("event = \"PORT_ERR\"\nat = \"1s\"\nfor = \"1s\"", true),
        ("event = \"CQ_ERR\"\nnth = \"7\"", true),
        ("stall = true\nfor = \"1s\"", true),
        ("verb = \"reg_mr\"\nnth = 0", false),
        ("verb = \"reg_mr\"\nerrno = 0", false),
        ("event = \"PORT_ACTIVE\"", false),
        ("rnr = 2", false),
        ("stall = 1\nfor = \"1s\"", false),
    ] {
        assert_eq!(taken(&format!("[[fault]]\n{rule}")), [is_right; 2], "{rule}");
    }
}

#[test]
fn shards_a_connection_manager_and_ipv6_meet_faults() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("faults.jsonl");
    let fault = format!("--fault loss=2%,dup=1%,seed=7 --fault-log {}", path.display());
    let line = format!("perf write-bw --shards 2 -q 4 -n 300 -s 20000 {fault}");
    let (server, client) = both("perf write-bw --shards 2", &line);
    server.succeeded();
    client.succeeded();
    let lines = log(&path);
    let lost = |port: u64| {
        let is = |line: &&Value| line["port"] == port && line["side"] == "egress";
        lines.iter().filter(is).count()
    };
    assert!(lost(0) > 3 && lost(1) > 3, "each shard has its own: {} {}", lost(0), lost(1));
    let addresses = super::Addresses::new();
    let (at, from) = (addresses.server, addresses.client);
    let line = format!("rping -s -a {at} {fault}");
    let server = Running::start(&mut rocinante(super::words(&line))).that_waits();
    run(&format!("rping -c -a {at} -I {from} -C 300 -V {fault}")).succeeded();
    server.finish().succeeded();
    let lab = Lab::new(&LabConfig { ipv6: true, ..LabConfig::default() }).unwrap();
    let address = lab.container(1).ipv6().unwrap();
    let line = format!("pingpong -c --netdev udp --bind {address}");
    let server = start(lab.container(1), &line).that_waits();
    let bind = lab.container(0).ipv6().unwrap();
    let line = format!("pingpong -c -n 500 --netdev udp --bind {bind} {fault} {address}");
    start(lab.container(0), &line).finish().succeeded();
    server.finish().succeeded();
    let of_ipv6 = |line: &&Value| line["peer"] == address.to_string().as_str();
    assert!(log(&path).iter().filter(of_ipv6).count() > 3);
}

#[test]
fn a_device_that_fails_is_named_by_its_errno_and_in_the_log() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("faults.jsonl");
    let addresses = super::Addresses::new();
    let fault = format!("--fault verb=create_qp,errno=EMFILE --fault-log {}", path.display());
    let server = addresses.serve("pingpong");
    addresses.call(&format!("pingpong {fault}")).failed(1, &["Too many open files"]);
    drop(server);
    let last = log(&path).pop().unwrap();
    assert_eq!((&last["what"], &last["did"][0]), (&"call".into(), &"EMFILE".into()));
}

/// A program that fails by the words of its schedule alone.
fn shrinks(fault: &str, fails_by: &str, seconds: &str) -> Done {
    shrinking(&Installed::new(), fault, fails_by, seconds).finish()
}

fn shrinking(installed: &Installed, fault: &str, fails_by: &str, seconds: &str) -> Running {
    let script = format!("case $(cat \"$ROCINANTE_FAULT\" 2>&1) in {fails_by} esac");
    let shrink = format!("--shrink={seconds}");
    let words = ["--fault", fault, &shrink, "--", "sh", "-c", &script];
    Running::start(&mut installed.run(&words))
}

#[test]
fn a_signal_ends_the_try_and_its_processes() {
    let installed = Installed::new();
    for signal in [Signal::SIGINT, Signal::SIGQUIT] {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("pid");
        let hangs =
            format!("*) sleep 1000 & echo $! >{0}.new; mv {0}.new {0}; wait;;", path.display());
        let mut running = shrinking(&installed, "loss=1%", &hangs, "1000");
        let pid = retried(|| std::fs::read_to_string(&path));
        running.child.signal(signal);
        running.finish().failed(128 + signal as i32, &[]);
        // It dies when it next runs, and process 1 may yet have to take its end.
        let stat = format!("/proc/{}/stat", pid.trim());
        retried(|| match std::fs::read_to_string(&stat) {
            Ok(stat) if !stat.contains(") Z ") => Err(format!("{signal}: {stat}")),
            _ => Ok(()),
        });
    }
}

#[test]
fn the_smallest_schedule_with_which_a_program_fails_is_found() {
    let all = "loss=50%,seed=7;dup=1%,delay=1us;partition,at=1s,for=200ms;ecn=1%;every=9;mtu=900;\
               corrupt=1%;verb=reg_mr,nth=3";
    // The order in the file is that of the words.
    let done = shrinks(all, "*'loss ='*partition*) exit 3;;", "20").succeeded();
    let value: Value = toml::from_str(&done.out).unwrap();
    assert_eq!(schema::errors_of("fault", &value), Vec::<String>::new());
    let rules = value["fault"].as_array().unwrap();
    assert_eq!((rules.len(), &value["seed"]), (2, &7.into()), "{}", done.out);
    let keys: Vec<&String> = rules[1].as_object().unwrap().keys().collect();
    assert_eq!(keys, ["at", "for", "partition"], "{}", done.out);
    let loss = rules[0]["loss"].as_str().unwrap().trim_end_matches('%').parse::<f64>().unwrap();
    assert!(loss < 1.0, "{}", done.out);
    assert!(done.err.contains("fails with status 3"), "{}", done.err);
    // Another failure is not the same.
    let two = "*'dup ='*) exit 4;; *'loss ='*) exit 3;;";
    let done = shrinks("loss=1%;dup=1%", two, "20").succeeded();
    assert!(done.out.contains("dup") && !done.out.contains("loss"), "{}", done.out);
    // A rule draws as it did in its old place, if that matters.
    let done = shrinks("dup=1%;loss=1%", "*'draws = 1'*) exit 3;;", "20").succeeded();
    let value: Value = toml::from_str(&done.out).unwrap();
    assert_eq!(schema::errors_of("fault", &value), Vec::<String>::new());
    assert_eq!(value["fault"].as_array().unwrap().len(), 1, "{}", done.out);
    assert_eq!(value["fault"][0]["draws"], 1);
    // One that hangs has failed.
    let done = shrinks("loss=1%;ecn=1%", "*ecn*) sleep 1000;;", "2").succeeded();
    assert!(done.out.contains("ecn") && !done.out.contains("loss"), "{}", done.out);
    assert!(done.err.contains("does not end in time"), "{}", done.err);
}

#[test]
fn only_a_failure_by_the_faults_is_shrunk() {
    for (fault, fails_by, says) in [
        ("loss=1%", "x) ;;", "the command succeeds: there is nothing to shrink"),
        ("loss=1%", "*) exit 9;;", "without faults the command fails with status 9, too"),
        ("loss=1%", "*) kill -SEGV $$;;", "without faults the command is ended by signal 11, too"),
    ] {
        shrinks(fault, fails_by, "20").failed(1, &[says]);
    }
    let hangs = shrinks("loss=1%", "*) sleep 1000;;", "1");
    hangs.failed(1, &["without faults the command does not end in time, too"]);
    // Each schedule fails once.
    let seen = TempDir::new().unwrap();
    let once = format!(
        "*'loss ='*) mkdir {}/$(cksum <$ROCINANTE_FAULT | tr -d ' ') && exit 3;;",
        seen.path().display()
    );
    let sometimes = shrinks("loss=1%,seed=7", &once, "20");
    assert!(sometimes.out.is_empty(), "{}", sometimes.out);
    sometimes.failed(1, &["it fails only sometimes", "the command fails with status", "loss = "]);
    let installed = Installed::new();
    let words =
        ["--fault", "loss=1%", "--shrink=20", "--", "sh", "-c", "test $ROCINANTE_FAULT = off"];
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let done = installed.run(&words).stdout(full).output().unwrap();
    let error = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.code() == Some(1) && error.contains("No space left"), "{error}");
    for (fault, says) in
        [("off", "there are no faults"), ("seed=9223372036854775808,loss=1%", "a seed up to")]
    {
        run(&format!("run --fault {fault} --shrink -- true")).failed(2, &[says]);
    }
    run("run --shrink -- true").failed(2, &["--fault"]);
    run("run --fault loss=1% --shrink=0 -- true").failed(2, &["give it seconds"]);
}

#[test]
fn devices_names_the_variable_if_datagrams_meet_faults() {
    for (words, is_on) in [("loss=1%", true), ("loss=0,delay=0", false), ("off", false)] {
        let mut command = rocinante(["devices"]);
        let done = Running::start(command.env("ROCINANTE_FAULT", words)).finish().succeeded();
        let says = format!("ROCINANTE_FAULT={words}: faults are on");
        assert_eq!(done.err.contains(&says), is_on, "{words}: {}", done.err);
    }
}

#[test]
fn a_program_without_faults_logs_none() {
    let installed = Installed::new();
    for (fault, is_on) in [("loss=1%", true), ("loss=0", false)] {
        let words = ["--fault", fault, "--fault-log", "/nowhere/log", "--", "true"];
        let done = Running::start(&mut installed.run(&words)).finish().succeeded();
        assert_eq!(done.err.contains("there are no faults"), !is_on, "{fault}: {}", done.err);
    }
}

#[test]
fn faults_that_make_no_sense_are_refused_with_a_line() {
    for (fault, says) in [
        ("loss=101%", "a chance from 0 to 100%"),
        ("los=1%", "is no word of a fault"),
        ("verb=ibv_fly", "calls such as reg_mr"),
        ("stall", "say how long"),
        ("/nowhere/bad.toml", "No such file"),
    ] {
        for command in ["perf write-bw", "pingpong", "rping", "run -- true"] {
            let (command, rest) = command.split_once(" -- ").unwrap_or((command, ""));
            let done = run(&format!("{command} --fault {fault} {rest}"));
            done.failed(2, &["--fault", says]);
        }
    }
    let addresses = super::Addresses::new();
    let line = addresses.client_line("pingpong --fault loss=1% --fault-log /nowhere/log");
    run(&line).failed(1, &["the faults in /nowhere/log: No such file"]);
}
