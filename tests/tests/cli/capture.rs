//! `rocinante capture`: the packets of containers, whatever their backend.

use super::handed::{self, Agent};
use super::{Done, Running, rocinante, start, start_on_host, words};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rocinante::device::Backend;
use rocinante_cli::decode::line::opcode_name;
use rocinante_lab::{Container, Lab, LabConfig};
use rocinante_stack::wire::Opcode;
use rocinante_tests::harness::wait_until;
use rocinante_tests::running::retried;
use rocinante_tests::{on_backends, on_each_backend};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::{NamedTempFile, TempPath};

/// A file that a program of any user makes, removed at the end of the test.
fn written() -> TempPath {
    let path = NamedTempFile::new().unwrap().into_temp_path();
    fs::remove_file(&path).unwrap();
    path
}

fn capture(lab: &Lab, agent: &str, line: &str, file: &Path) -> Running {
    let line = format!("capture --agent {agent} -w {} {line}", file.display());
    start_on_host(lab, &line)
}

/// A client that writes to a server, until they are dropped.
fn traffic(lab: &Lab, line: &str) -> [Running; 2] {
    let [client, server] = [0, 1].map(|index| lab.container(index));
    let waiting = start(server, line).that_waits();
    let writes = start(client, &format!("{line} {}", server.ipv4())).that_says(" write-bw ");
    [writes, waiting]
}

/// The counts of `rocinante decode`.
fn decoded(file: &Path, more: &str) -> Value {
    let line = format!("decode -q --json {more} {}", file.display());
    Running::start(&mut rocinante(words(&line))).finish().succeeded().json()
}

/// Captures, decodes, and does so again until it is `enough`: while others have the processors, few
/// packets come in a moment.
fn until_enough(
    capture: impl Fn() -> (Done, Value),
    enough: impl Fn(&Value) -> bool,
) -> (Done, Value) {
    retried(|| {
        let (done, counts) = capture();
        if enough(&counts) { Ok((done, counts)) } else { Err(counts) }
    })
}

/// The queue pair of the only connection of a container, from the pages of its processes.
fn queue_pair(lab: &Lab, of: &Container) -> Value {
    let line = format!("stat --agent off -i 0.1 -c 1 --qps --json {}", netns_of(of));
    let mut found = Value::Null;
    wait_until("its page is there", || {
        let object = start_on_host(lab, &line).finish().succeeded().json();
        found = object["containers"][0]["queue_pairs"][0].clone();
        found.is_object()
    });
    found
}

/// The network namespace of a container, as the kernel writes it.
fn netns_of(of: &Container) -> String {
    let inode = fs::metadata(of.netns().path()).unwrap();
    format!("net:[{}]", std::os::unix::fs::MetadataExt::ino(&inode))
}

/// All packets have a valid ICRC, and those of one queue pair go both ways.
fn packets_are_those_of_a_wire(backend: Backend) {
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let sides = traffic(&lab, &format!("perf write-bw --netdev {backend} -D 600 -s 60000 --json"));
    let end = lab.container(0).host_end();
    let file = written();
    let line = format!("--seconds 0.3 {end}");
    let (done, all) = until_enough(
        || {
            let done = capture(&lab, "off", &line, &file).finish().succeeded();
            (done, decoded(&file, ""))
        },
        |all| all["icrc_ok"].as_u64() > Some(100),
    );
    assert!(done.err.contains(&format!("container {end}")), "{}", done.err);
    assert!(done.err.contains("packets in") && done.err.contains("the kernel dropped"));
    assert_eq!((&all["icrc_bad"], &all["icrc_unknown"]), (&0.into(), &0.into()), "{all}");
    // One of its queue pairs, by a process, and no byte beyond the headers.
    let qp = queue_pair(&lab, lab.container(0));
    let line = format!("--qp {} --seconds 0.3 --snap 128 {}", qp["qpn"], sides[0].child.id());
    let both_ways = |counts: &Value| counts["flows"].as_array().is_some_and(|it| it.len() > 1);
    let (done, flows) = until_enough(
        || {
            let done = capture(&lab, "off", &line, &file).finish().succeeded();
            (done, decoded(&file, "--flows"))
        },
        both_ways,
    );
    let named = format!("queue pair {} (RC) with {}", qp["qpn"], lab.container(1).ipv4());
    assert!(done.err.contains(&named), "{}", done.err);
    witnessed(&file);
    let bytes = fs::read(&file).unwrap();
    assert!(bytes.windows(named.len()).any(|it| it == named.as_bytes()), "a comment");
    let flows = flows["flows"].as_array().unwrap();
    let numbers: Vec<&Value> = flows.iter().map(|flow| &flow["dest_qpn"]).collect();
    assert_eq!(flows.len(), 2, "{flows:?}");
    assert!(numbers.contains(&&qp["qpn"]) && numbers.contains(&&qp["peer_qpn"]), "{numbers:?}");
    // A wrong number, and a place where no file can be.
    let line = format!("--qp 1 --seconds 0.1 {}", sides[0].child.id());
    capture(&lab, "off", &line, &file).finish().failed(1, &["has no queue pair 1"]);
    let nowhere = Path::new("/nowhere/x.pcapng");
    let line = format!("--seconds 0.1 {end}");
    capture(&lab, "off", &line, nowhere).finish().failed(1, &["cannot be written"]);
    let full = capture(&lab, "off", &format!("--seconds 1 {end}"), Path::new("/dev/full"));
    full.finish().failed(1, &["/dev/full cannot be written"]);
    capture(&lab, "off", "--seconds 1 nosuch", &file).finish().failed(1, &["is called nosuch"]);
    // A signal ends it with a whole file.
    let stopped = || {
        let endless = capture(&lab, "off", end, &file).that_says(&format!("at {end}"));
        std::thread::sleep(Duration::from_millis(200));
        kill(Pid::from_raw(endless.child.id().cast_signed()), Signal::SIGINT).unwrap();
        let done = endless.finish();
        assert_eq!(done.status, 130, "{}", done.err);
        (done, decoded(&file, ""))
    };
    let (_, all) = until_enough(stopped, |all| all["icrc_ok"].as_u64() > Some(100));
    assert_eq!(all["icrc_bad"], 0);
    witnessed(&file);
}

/// tshark reads the same opcodes, PSNs and lengths of WRITEs.
fn witnessed(file: &Path) {
    let mut command = Command::new("tshark");
    command.arg("-r").arg(file).args(["-n", "-T", "fields", "-e", "infiniband.bth.opcode"]);
    let fields = ["-e", "infiniband.bth.psn", "-e", "infiniband.reth.dmalen"];
    let Ok(output) = command.args(fields).output() else { return println!("no tshark") };
    let text = String::from_utf8(output.stdout).unwrap();
    let theirs = text.lines().map(|line| {
        let numbers: Vec<Option<u64>> = line.split('\t').map(|it| it.parse().ok()).collect();
        let opcode = numbers[0].map(|opcode| opcode_name(Opcode(opcode as u8)));
        (opcode.unwrap_or_default(), numbers[1], numbers[2])
    });
    let line = format!("decode --json-packets {}", file.display());
    let ours = Running::start(&mut rocinante(words(&line))).finish().succeeded().out;
    let ours = ours.lines().filter_map(|line| {
        let object: Value = serde_json::from_str(line).ok()?;
        let packet = object.get("packet")?;
        let opcode = packet["opcode"].as_str()?.to_owned();
        Some((opcode, packet["psn"].as_u64(), packet["reth"]["len"].as_u64()))
    });
    let (ours, theirs): (Vec<_>, Vec<_>) = (ours.collect(), theirs.collect());
    assert!(ours.len() > 10 && ours.iter().any(|(_, _, len)| len.is_some()), "{}", ours.len());
    assert!(ours == theirs, "{ours:?}\n{theirs:?}");
}

on_each_backend!(packets_are_those_of_a_wire);

/// Of UD, those that go to a queue pair and come from it, and no others.
#[test]
fn datagrams_are_those_of_one_queue_pair() {
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let line = "perf send-bw -c UD --netdev udp -q 2 -D 600 -s 1K --json";
    let [client, server] = [0, 1].map(|index| lab.container(index));
    let waiting = start(server, line).that_waits();
    let sends = start(client, &format!("{line} {}", server.ipv4())).that_says(" send-bw ");
    let file = written();
    for (of, process, receives) in [(client, &sends, false), (server, &waiting, true)] {
        let qp = queue_pair(&lab, of);
        assert_eq!((&qp["service"], &qp["peer"]), (&"UD".into(), &Value::Null));
        let line = format!("--qp {} --seconds 0.3 {}", qp["qpn"], process.child.id());
        let (_, decoded) = until_enough(
            || {
                let done = capture(&lab, "off", &line, &file).finish().succeeded();
                (done, decoded(&file, "--flows"))
            },
            |all| all["icrc_ok"].as_u64() > Some(10),
        );
        assert_eq!(decoded["icrc_bad"], 0, "{decoded}");
        let [flow] = &decoded["flows"].as_array().unwrap()[..] else { panic!("{decoded}") };
        assert_eq!(flow["dest_qpn"] == qp["qpn"], receives, "{flow} {qp}");
    }
    // Its interface goes down and comes up again, and then goes: the file is whole.
    let end = client.host_end();
    let mut endless = capture(&lab, "off", end, &file).that_says(&format!("at {end}"));
    std::thread::sleep(Duration::from_millis(200));
    for change in ["set {} down", "set {} up", "delete {}"] {
        assert_eq!(endless.child.try_wait().unwrap(), None);
        lab.host().command(&format!("ip link {}", change.replace("{}", end))).unwrap();
    }
    endless.finish().failed(1, &[&format!("{end} is not there any more")]);
    assert_eq!(decoded(&file, "")["icrc_bad"], 0);
}

/// An agent knows the containers by name, and their queue pairs.
fn by_the_agent_on(backend: Backend) {
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let agent = Agent::start(lab.host());
    let [client, server] = [0, 1].map(|index| lab.container(index));
    let line = format!("perf write-bw --netdev {backend} -D 600 -s 1K --json");
    let _waiting = handed::start(server, &agent, &line).that_waits();
    let mut writes = handed::start(client, &agent, &format!("{line} {}", server.ipv4()));
    writes.says(" write-bw ");
    let file = written();
    let place = agent.state().join("stat.sock");
    let line = format!("--seconds 0.3 {}", server.host_end());
    let (done, all) = until_enough(
        || {
            let done = capture(&lab, place.to_str().unwrap(), &line, &file);
            (done.finish().succeeded(), decoded(&file, ""))
        },
        |all| all["icrc_ok"].as_u64() > Some(10),
    );
    let named = format!("(RC) with {} queue pair", client.ipv4());
    assert!(done.err.contains(&named), "{}", done.err);
    assert_eq!(all["icrc_bad"], 0, "{all}");
}

/// A user without any right captures the own container's packets, and no others.
fn of_the_own_container_on(backend: Backend) {
    let lab = Lab::new(&LabConfig { containers: 4, ..LabConfig::default() }).unwrap();
    let agent = Agent::start(lab.host());
    let mut running = Vec::new();
    for (from, to) in [(0, 2), (1, 3)].map(|(from, to)| (lab.container(from), lab.container(to))) {
        let line = format!("perf write-bw --netdev {backend} -D 600 -s 60000 --json");
        let waiting = handed::start(to, &agent, &line).that_waits();
        let mut writes = handed::start(from, &agent, &format!("{line} {}", to.ipv4()));
        writes.says(" write-bw ");
        running.extend([waiting, writes]);
    }
    let files = [0, 1, 3].map(|nth| (nth, written()));
    let captures: Vec<Running> = files
        .iter()
        .map(|(nth, file)| {
            // All of each packet, then a part.
            let snap = if *nth == 0 { "" } else { "--snap 128" };
            let line = format!("capture --seconds 2 {snap} -w {}", file.display());
            handed::start(lab.container(*nth), &agent, &line)
        })
        .collect();
    for (capture, (nth, _)) in captures.into_iter().zip(&files) {
        let done = capture.finish().succeeded();
        let end = lab.container(*nth).host_end();
        assert!(done.err.contains(&format!("at {end}")), "{}", done.err);
    }
    for (nth, file) in &files {
        let all = decoded(file, "--flows");
        assert_eq!(all["icrc_bad"], 0, "{all}");
        let flows = all["flows"].as_array().unwrap();
        let own = [*nth, (*nth + 2) % 4].map(|nth| lab.container(nth).ipv4().to_string());
        assert_eq!(flows.len(), 2, "{all}");
        for flow in flows {
            let both = [&flow["src"], &flow["dst"]].map(|it| it.as_str().unwrap());
            assert!(both.iter().all(|it| own.iter().any(|own| own == it)), "{nth}: {all}");
        }
    }
    // One of its queue pairs, by the pages of the own user.
    let [_, (nth, file), _] = &files;
    let qp = queue_pair(&lab, lab.container(*nth));
    let line = format!("capture --seconds 2 --qp {} -w {}", qp["qpn"], file.display());
    handed::start(lab.container(*nth), &agent, &line).finish().succeeded();
    let flows = decoded(file, "--flows");
    assert_eq!(flows["flows"].as_array().unwrap().len(), 2, "{flows}");
    // On the host the agent takes none, and elsewhere there is none.
    let line = format!("capture --seconds 0.1 -w {}", file.display());
    let mut command = agent.asker(&rocinante(words(&line)));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let here = Running::of(lab.host().spawn(&mut command).unwrap());
    here.finish().failed(1, &["cannot capture this container", "refuses"]);
}

on_backends! {
    a_user_captures_the_own_container: Packet + machine_root =>
        of_the_own_container_on(Backend::Packet);
}

on_backends! {
    the_agent_names_what_is_captured: Packet + machine_root =>
        by_the_agent_on(Backend::Packet);
}
