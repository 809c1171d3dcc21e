//! A container that does not behave.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};
use std::time::Duration;

use rocinante_agent::STEPS;

use crate::asker::{As, Asker, eventually};
use crate::lab::{Host, host_or_skip};

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The other container still gets the port that it asks for.
fn others_are_served(host: &Host) {
    host.asker(1).granted(host.addresses(1)[0]);
    host.has_ports(0);
}

#[test]
fn messages_that_are_none_are_answered() {
    let mut host = host_or_skip!("bad_input::messages_that_are_none", 2);
    host.configure("requests_per_second = 10000");
    host.start();
    let mut asker = host.asker(0);
    let good = r#"{"version":1,"backend":"packet","interface":2,"addresses":["10.77.0.1"]}"#;
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut noise = |len: usize| -> Vec<u8> {
        (0..len)
            .map(|_| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (random >> 56) as u8
            })
            .collect()
    };
    let deep = "[".repeat(16_000);
    let mut messages = vec![
        (deep.into_bytes(), "Malformed"),
        (vec![b'x'; 16 << 10], "Malformed"),
        (vec![b'x'; (16 << 10) + 1], "Malformed"),
        (vec![b'x'; 100_000], "Malformed"),
        (good.replace(":1,", ":2,").into_bytes(), "Version"),
        (good.replace("packet", "none").into_bytes(), "Unsupported"),
        (good.replace("[\"10.77.0.1\"]", "[]").into_bytes(), "Malformed"),
        (good.replace(":2,", ":-2,").into_bytes(), "Malformed"),
        (good.replace(":2,", ":4294967296,").into_bytes(), "Malformed"),
        (vec![0; 100], "Malformed"),
    ];
    for len in [1, 2, 100, 4000] {
        messages.push((noise(len), "Malformed"));
    }
    for cut in 1..good.len() {
        messages.push((good.as_bytes()[..cut].to_vec(), "Malformed"));
    }
    for (message, code) in messages {
        let answer = asker.tell(&format!("raw {}", hex(&message)));
        let expected = answer.starts_with(&format!("refused {code}"));
        assert!(
            expected,
            "{:?}: {answer}",
            String::from_utf8_lossy(&message[..message.len().min(80)])
        );
    }
    // The good one among them.
    let answer = asker.tell(&format!("raw {}", hex(good.as_bytes())));
    assert!(answer.starts_with("granted 1"), "{answer}");
    host.has_ports(0);
    others_are_served(&host);
}

#[test]
fn descriptors_that_come_along_are_not_kept() {
    let mut host = host_or_skip!("bad_input::descriptors_that_come_along", 2);
    host.start();
    let mut asker = host.asker(0);
    let before = host.descriptors();
    let good = r#"{"version":1,"backend":"packet","interface":2,"addresses":["10.77.0.1"]}"#;
    for count in [1, 3, 200] {
        let answer = asker.tell(&format!("raw {} {count}", hex(good.as_bytes())));
        // The kernel refuses to send them from Linux 6.16 on.
        let is_refused =
            answer.starts_with("refused Malformed") || answer.contains("Operation not permitted");
        assert!(is_refused, "{answer}");
    }
    others_are_served(&host);
    eventually("no descriptor stays", || host.descriptors() <= before);
}

#[test]
fn a_flood_is_bounded_and_others_are_served() {
    let mut host = host_or_skip!("bad_input::a_flood", 2);
    host.configure("requests_per_second = 20");
    host.start();
    let before = host.descriptors();
    let mut floods: Vec<Asker> = (0..3).map(|_| host.asker(0)).collect();
    // Connections that say nothing, some that hang up, and requests.
    floods[0].say("hold 500");
    floods[1].say("flood 3000");
    floods[2].say("flood 1000 10.77.0.1");
    for _ in 0..5 {
        let mut other = host.asker(1);
        other.granted(host.addresses(1)[0]);
    }
    assert_eq!(floods[0].hear(), "done");
    assert!(floods[1].hear().starts_with("busy"));
    floods[2].hear();
    // While others have the processors, it asks too seldom.
    eventually("most of it is not looked at", || {
        let answer = floods[2].tell("flood 1000 10.77.0.1");
        let busy = answer.split_whitespace().nth(1).and_then(|n| n.parse::<u32>().ok());
        busy.is_some_and(|busy| busy > 500)
    });
    drop(floods);
    host.has_ports(0);
    eventually("no descriptor stays", || host.descriptors() <= before);
    // The same container is served again after a while.
    let mut asker = host.asker(0);
    eventually("it is served again", || {
        asker.tell(&format!("ask {}", host.addresses(0)[0])).starts_with("granted")
    });
}

#[test]
fn a_container_has_so_many_ports_and_so_much_memory() {
    let mut host = host_or_skip!("bad_input::a_container_has_so_many", 2);
    host.configure("ports_max = 3\nring_mib_max = 40");
    host.start();
    let mut asker = host.asker(0);
    let [v4, _] = host.addresses(0);
    for _ in 0..3 {
        asker.granted(v4);
    }
    let refused = asker.refused(v4);
    assert!(refused.starts_with("Busy") && refused.contains("3 ports"), "{refused}");
    // Another program of the container has the remaining room, which is none.
    assert!(host.asker(0).refused(v4).starts_with("Busy"));
    host.asker(1).granted(host.addresses(1)[0]);
    assert_eq!(asker.tell("close"), "done");
    host.has_ports(0);
    // More frames than there may be are those that may be.
    asker.tell("close");
    host.has_ports(0);
    let answer = asker.tell(&format!("ask {v4} 2 16384"));
    assert!(answer.starts_with("granted"), "{answer}");
    asker.tell("close");
    host.has_ports(0);
    host.kill();
    host.configure("containers_expected = 1\nring_mib_total = 2");
    host.start();
    let mut other = host.asker(1);
    for _ in 0..2 {
        other.granted(host.addresses(1)[0]);
    }
    let refused = host.asker(0).refused(v4);
    assert!(refused.starts_with("Busy") && refused.contains("MiB already"), "{refused}");
}

/// The default number of ports, which is more than may be asked for at a time.
#[test]
fn a_program_keeps_as_many_ports_as_a_container_may_have() {
    let mut host = host_or_skip!("bad_input::a_program_keeps_as_many_ports", 2);
    host.start();
    let [v4, v6] = host.addresses(0);
    let (mut asker, mut other) = (host.asker(0), host.asker(0));
    for nth in 0..64 {
        let own = if nth % 2 == 0 { v4 } else { v6 };
        let answer = asker.tell(&format!("ask {own} 2 2"));
        assert!(answer.starts_with("granted 1 "), "port {nth}: {answer}");
    }
    let refused = other.refused(v6);
    assert!(refused.starts_with("Busy") && refused.contains("64 ports"), "{refused}");
    // Once they are closed there is room for them again.
    assert_eq!(asker.tell("close"), "done");
    host.has_ports(0);
    other.granted(v6);
}

/// Programs of a container that ask at one time get together no more than one after the other.
#[test]
fn programs_that_ask_at_once_share_what_a_container_may_have() {
    let mut host = host_or_skip!("bad_input::programs_that_ask_at_once", 1);
    host.configure("ports_max = 3");
    host.start();
    let [v4, v6] = host.addresses(0);
    let mut askers = [(); 8].map(|()| host.asker(0));
    askers.iter_mut().for_each(|asker| drop(asker.tell("rights")));
    for own in [v4, v6] {
        askers.iter_mut().for_each(|asker| asker.say(&format!("ask {own} 2 2")));
        let answers = askers.each_mut().map(Asker::hear);
        let granted = answers.iter().filter(|answer| answer.starts_with("granted 1 ")).count();
        assert_eq!((granted, host.ports()), (3, 3), "{answers:?}");
        askers.iter_mut().for_each(|asker| drop(asker.tell("close")));
        host.has_ports(0);
    }
}

#[test]
fn one_that_ends_at_each_step_leaves_nothing() {
    leaves_nothing("ask", "granted");
}

#[test]
fn one_that_ends_at_each_step_of_afxdp_leaves_nothing() {
    leaves_nothing("open afxdp", "opened");
}

/// The command that gets a port, and the answer that grants it.
fn leaves_nothing(ask: &str, granted: &str) {
    let mut host = host_or_skip!("bad_input::one_that_ends_at_each_step", 2);
    // A port left behind would count.
    host.configure("ports_max = 1");
    let line = format!("{ask} {}", host.addresses(0)[0]);
    // The state is written first when the agent starts, and in each of two other steps.
    for step in STEPS.into_iter().filter(|step| *step != "state written") {
        host.start_stopping_at(step);
        let before = host.descriptors();
        let mut asker = host.asker(0);
        asker.tell("rights");
        asker.say(&line);
        host.while_it_stops(|| asker.kill());
        others_are_served(&host);
        eventually(&format!("nothing stays of {step:?}"), || {
            host.descriptors() <= before && (host.ports(), host.guarded_rings()) == (0, 0)
        });
        // The next program of the same container is served as if the first had not asked.
        let answer = host.asker(0).tell(&line);
        assert!(answer.starts_with(granted), "{step}: {answer}");
        host.has_ports(0);
        host.kill();
    }
}

/// The kernel refuses the program at the host's end: the answer says where it was tried, and the
/// errno.
#[test]
fn without_room_for_its_program_there_is_no_port() {
    let mut host = host_or_skip!("bad_input::without_room_for_its_program", 2);
    host.start();
    let index = host.index("veth0");
    // As many as the kernel takes: 63.
    let fill = || {
        let attach = |_| rocinante_netdev::TcxDrop::attach(index, true, [1, 2]).ok();
        (0..100).map_while(attach).collect::<Vec<_>>()
    };
    let programs = host.lab.host().run(fill).expect("entered");
    let refused = host.asker(0).refused(host.addresses(0)[0]);
    assert!(refused.starts_with("Unsupported"), "{refused}");
    assert!(refused.contains("at the tcx ingress of veth0: ") && refused.contains("os error"));
    host.has_ports(0);
    assert_eq!(host.guarded_rings(), 0);
    others_are_served(&host);
    drop(programs);
    host.asker(0).granted(host.addresses(0)[0]);
}

#[test]
fn it_works_without_any_program_in_its_path() {
    let mut host = host_or_skip!("bad_input::it_works_without_any_program", 1);
    let mut command = host.command();
    command.env("PATH", "");
    host.start_as(command);
    let [v4, v6] = host.addresses(0);
    host.asker(0).granted(v4);
    assert!(host.may_leave(0).contains(&v6));
}

#[test]
fn without_a_right_the_agent_says_what_is_missing() {
    let host = host_or_skip!("bad_input::without_a_right", 1);
    let command = host.command();
    let mut few = std::process::Command::new("setpriv");
    few.args(["--bounding-set=-all,+net_admin", "--inh-caps=-all"]);
    few.arg(command.get_program()).args(command.get_args());
    let output = host.lab.host().output(&mut few).expect("started");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{said}");
    assert!(said.contains("CAP_NET_BROADCAST"), "{said}");
    assert!(said.contains("CAP_BPF") && !said.contains("CAP_NET_ADMIN"), "{said}");
}

#[test]
fn it_keeps_the_rights_that_it_needs_and_no_others() {
    let mut host = host_or_skip!("bad_input::it_keeps_the_rights", 1);
    host.start();
    let status = std::fs::read_to_string(format!("/proc/{}/status", host.agent_id()));
    let status = status.expect("a process");
    let set = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a line");
        u64::from_str_radix(line.trim_start_matches(':').trim(), 16).expect("a set")
    };
    // KILL, SETGID, SETUID, NET_ADMIN, NET_RAW, IPC_LOCK, SYS_PTRACE, SYS_ADMIN, BPF.
    let kept = 1 << 5 | 1 << 6 | 1 << 7 | 1 << 12 | 1 << 13 | 1 << 14 | 1 << 19 | 1 << 21 | 1 << 39;
    assert_eq!((set("CapEff"), set("CapPrm"), set("CapInh")), (kept, kept, 0));
    assert_eq!(set("CapBnd") & !kept, 0);
    // It works with these.
    let mut root = Asker::start(host.container(0).netns(), &host.socket(), As::Root);
    root.granted(host.addresses(0)[0]);
}

#[test]
fn a_namespace_of_very_many_links_is_refused() {
    let mut host = host_or_skip!("bad_input::a_namespace_of_very_many_links", 2);
    host.start();
    let netns = host.container(0).netns();
    let links = |way: &str, of: std::ops::Range<usize>| {
        let line = |nth| format!("link {way} d{nth} type veth\n");
        let lines: String = of.map(line).collect();
        let mut batch = Command::new("ip");
        batch.args(["-batch", "-"]).stdin(Stdio::piped());
        let mut batch = netns.spawn(&mut batch).expect("ip");
        let mut to = batch.child_mut().stdin.take().expect("a pipe");
        to.write_all(lines.as_bytes()).expect("it reads");
        drop(to);
        assert!(batch.wait(Duration::from_secs(60)).expect("it ends").success());
    };
    // Beside loopback and eth0.
    links("add", 0..512);
    let mut asker = host.asker(0);
    let [v4, _] = host.addresses(0);
    let refused = asker.refused(v4);
    assert!(refused.contains("has 1026 interfaces"), "{refused}");
    links("delete", 0..1);
    asker.granted(v4);
}

/// Containers have files whose close waits for a server that does not answer, as many as there are
/// searches for the holder of a port at a time. A search does not open them.
#[test]
fn files_that_do_not_close_hold_up_no_search() {
    const SEARCHED_AT_ONCE: usize = 2;
    let mut host = host_or_skip!("bad_input::files_that_do_not_close", 3);
    host.start();
    let held = |nth: usize| {
        let mut server = Command::new("python3");
        server.args(["-c", include_str!("fuse.py")]).stdout(Stdio::piped());
        let mut server = host.container(nth).spawn(&mut server).expect("python3");
        let said = server.child_mut().stdout.take().expect("a pipe");
        let mut line = String::new();
        BufReader::new(said).read_line(&mut line).expect("text");
        (line == "held\n").then_some(server)
    };
    let Some(servers) = (0..SEARCHED_AT_ONCE).map(held).collect::<Option<Vec<_>>>() else {
        return crate::lab::skip("bad_input::files_that_do_not_close", &"FUSE cannot be mounted");
    };
    let all = 0..=SEARCHED_AT_ONCE;
    let mut askers: Vec<Asker> = all.clone().map(|nth| host.asker(nth)).collect();
    for (nth, asker) in askers.iter_mut().enumerate() {
        asker.granted(host.addresses(nth)[0]);
    }
    let has = |expected: [usize; 3]| all.clone().all(|nth| host.slots(nth).len() == expected[nth]);
    askers.iter_mut().for_each(|asker| drop(asker.tell("close")));
    eventually("all are closed", || has([0, 0, 0]));
    drop(servers);
}
