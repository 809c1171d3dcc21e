//! The agent ends, in every way and at every step, and another takes over.

use std::fs;
use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};

use rocinante_agent::STEPS;
use rocinante_lab::Container;

use crate::asker::{As, Asker, SOON, eventually};
use crate::lab::host_or_skip;

#[test]
fn what_is_in_force_outlives_the_agent() {
    let mut host = host_or_skip!("restart::what_is_in_force", 2);
    host.start();
    let mut asker = host.asker(0);
    let [v4, _] = host.addresses(0);
    asker.granted(v4);
    let (program, allowed) = (host.filter(0).unwrap().id().unwrap(), host.may_leave(0));
    host.kill();
    // Nothing in the path of data is the agent's.
    assert_eq!(host.filter(0).unwrap().id().unwrap(), program);
    let mac = host.mac(0);
    let forged = [&[0xff; 6][..], &mac, &[0x86, 0xdd], &[0x60; 60]].concat();
    let before = host.dropped(0);
    asker.send(&forged);
    eventually("it is dropped without an agent", || host.dropped(0) != before);
    // While there is none, an address comes and another goes.
    let netns = host.container(0).netns();
    netns.ip(&["address", "add", "10.77.0.101/24", "dev", Container::DEVICE]).expect("added");
    assert_eq!(host.may_leave(0), allowed);
    host.start();
    let late = "10.77.0.101".parse().unwrap();
    assert!(host.may_leave(0).contains(&late), "it is followed when the agent is ready");
    assert_eq!(host.filter(0).unwrap().id().unwrap(), program, "the program is the same");
    // The port is guarded again once its holder is found, and goes with its program.
    let is_guarded = |count| host.ports() == count && host.guarded_rings() == count;
    eventually("the port is guarded", || is_guarded(1));
    asker.granted(v4);
    assert!(is_guarded(2));
    asker.kill();
    host.has_ports(0);
}

#[test]
fn ports_that_ended_while_no_agent_ran_are_forgotten() {
    let mut host = host_or_skip!("restart::ports_that_ended", 2);
    host.start();
    let mut askers = [host.asker(0), host.asker(1)];
    host.grant_each(&mut askers);
    host.kill();
    let [first, _second] = askers;
    first.kill();
    host.start();
    host.has_ports(1);
    host.kill();
    host.lab.host().ip(&["link", "del", host.container(1).host_end()]).expect("deleted");
    host.start();
    host.has_ports(0);
}

#[test]
fn killed_at_each_step_it_goes_on() {
    goes_on("ask", "granted");
}

#[test]
fn killed_at_each_step_of_afxdp_it_goes_on() {
    goes_on("open afxdp", "opened");
}

/// The command that gets a port, and the answer afterwards.
fn goes_on(ask: &str, granted: &str) {
    let mut host = host_or_skip!("restart::killed_at_each_step", 1);
    let [v4, _] = host.addresses(0);
    for step in STEPS {
        let mut command = host.command();
        command.env("ROCINANTE_AGENT_KILL_AT", step);
        // This one is reached before anybody asks.
        if step == "state written" {
            host.start();
            host.kill();
            let mut agent = host.lab.host().spawn(&mut command).expect("an agent");
            agent.wait(SOON).expect("it kills itself");
        } else {
            host.start_as(command);
            let mut asker = host.asker(0);
            let answer = asker.tell(&format!("{ask} {v4}"));
            let came = answer.starts_with(granted);
            assert_eq!(came, step == "answered", "{step}: {answer}");
            host.ended();
            // Before a port is there, so is the program at the host's end.
            let filtered = host.filter(0).is_some();
            let early = ["asked", "identified"].contains(&step);
            assert!(filtered || early, "{step}");
        }
        host.start();
        let mut asker = host.asker(0);
        let answer = asker.tell(&format!("{ask} {v4}"));
        assert!(answer.starts_with(granted), "{step}: {answer}");
        let programs = host.lab.host().run(|| {
            let index = rocinante_netdev::Interface::by_name("veth0").expect("the end").index;
            rocinante_netdev::tcx_programs(index, true).expect("a query")
        });
        assert_eq!(programs.expect("entered"), 1, "{step}");
        asker.kill();
        host.has_ports(0);
        host.kill();
    }
}

#[test]
fn a_state_that_is_lost_cut_or_anothers_costs_little() {
    let mut host = host_or_skip!("restart::a_state_that_is_lost", 2);
    host.start();
    let mut asker = host.asker(0);
    let [v4, _] = host.addresses(0);
    asker.granted(v4);
    host.kill();
    let (whole, allowed) = (fs::read_to_string(host.state()).expect("a state"), host.may_leave(0));
    let old = whole.replacen("\"boot\":\"", "\"boot\":\"x", 1);
    let anothers = whole.replacen("\"namespace\":", "\"namespace\":1", 1);
    let foreign_end = whole.replacen("\"host_end\":", "\"host_end\":9", 1);
    for (what, text) in [
        ("cut", Some(&whole[..whole.len() / 2])),
        ("empty", Some("")),
        ("huge numbers", Some("{\"version\":99999999999999999999}")),
        ("old", Some(&old)),
        ("another's", Some(&anothers)),
        ("of an interface that is not there", Some(&foreign_end)),
        ("lost", None),
    ] {
        match text {
            Some(text) => fs::write(host.state(), text).expect("written"),
            None => fs::remove_file(host.state()).expect("removed"),
        }
        host.start();
        assert_eq!(host.may_leave(0), allowed, "{what}");
        // The addresses that the program at the host's end lets through are all that is known,
        // until a process asks that cannot change the container's addresses: they are followed
        // then.
        let netns = host.container(0).netns();
        netns.ip(&["address", "add", "10.77.0.101/24", "dev", "eth0"]).expect("added");
        asker.granted(v4);
        netns.ip(&["address", "del", "10.77.0.101/24", "dev", "eth0"]).expect("removed");
        eventually(what, || host.may_leave(0) == allowed);
        host.kill();
        let now = fs::read_to_string(host.state()).expect("a state");
        assert!(now.starts_with("{\"version\":1,"), "{what}: {now}");
    }
}

/// Without a state, a container that may change its addresses gets none besides those that its
/// program lets through.
#[test]
fn a_lost_state_gives_no_container_the_addresses_of_another() {
    let mut host = host_or_skip!("restart::a_lost_state_gives_no_container", 1);
    host.start();
    let [v4, _] = host.addresses(0);
    let mut asker = Asker::start(host.container(0).netns(), &host.socket(), As::Root);
    asker.granted(v4);
    let allowed = host.may_leave(0);
    host.kill();
    fs::remove_file(host.state()).expect("removed");
    host.start();
    let netns = host.container(0).netns();
    netns.ip(&["address", "add", "10.77.0.101/24", "dev", "eth0"]).expect("added");
    for _ in 0..2 {
        asker.granted(v4);
        assert_eq!(host.may_leave(0), allowed);
    }
}

#[test]
fn a_program_that_was_removed_or_passed_comes_back() {
    let mut host = host_or_skip!("restart::a_program_that_was_removed", 1);
    host.start();
    let mut asker = host.asker(0);
    let [v4, _] = host.addresses(0);
    asker.granted(v4);
    let index = host.index("veth0");
    let remove = |host: &crate::lab::Host| {
        let filter = host.filter(0).expect("a program");
        host.lab.host().run(|| filter.detach()).expect("entered").expect("detached");
        assert!(host.filter(0).is_none());
    };
    // The program was removed: the next request puts it back first.
    remove(&host);
    asker.granted(v4);
    assert!(host.filter(0).is_some());
    // While no agent ran, too. A foreign program stays in place.
    host.kill();
    let attach = || rocinante_netdev::TcxDrop::attach(index, true, [1, 2]);
    let foreign = host.lab.host().run(attach).expect("entered").expect("attached");
    remove(&host);
    host.start();
    assert!(host.filter(0).is_some());
    let count = || rocinante_netdev::tcx_programs(index, true).expect("a query");
    assert_eq!(host.lab.host().run(count).expect("entered"), 2);
    drop(foreign);
}

#[test]
fn two_agents_have_not_one_state() {
    let mut host = host_or_skip!("restart::two_agents", 1);
    host.start();
    let output = host.lab.host().output(&mut host.command()).expect("started");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("another agent runs"), "{said}");
    host.asker(0).granted(host.addresses(0)[0]);
}

/// A signal ends it in good order, and the socket goes.
#[test]
fn a_signal_ends_it() {
    let mut host = host_or_skip!("restart::a_signal", 1);
    host.start();
    assert!(host.socket().exists());
    let pid = rustix::process::Pid::from_raw(host.agent_id().cast_signed()).expect("a process");
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("it is there");
    host.ended();
    assert!(!host.socket().exists());
}

/// Datagrams of a container flow while its agent is killed again and again.
#[test]
fn traffic_does_not_notice_that_the_agent_is_killed() {
    let mut host = host_or_skip!("restart::traffic_does_not_notice", 2);
    host.start();
    let mut asker = host.asker(0);
    let [v4, _] = host.addresses(0);
    asker.granted(v4);
    let to = host.addresses(1)[0];
    let open = |address: std::net::IpAddr| {
        let socket = UdpSocket::bind((address, 7000)).expect("a socket");
        socket.set_read_timeout(Some(SOON)).expect("set");
        socket
    };
    let here = host.container(0).run(|| open(v4)).expect("entered");
    let there = host.container(1).run(|| open(to)).expect("entered");
    for round in 0..8_u64 {
        host.kill();
        for number in 0..200_u64 {
            let word = (round * 1000 + number).to_ne_bytes();
            here.send_to(&word, (to, 7000)).expect("sent");
            let mut bytes = [0; 8];
            there.recv(&mut bytes).expect("it arrives");
            assert_eq!(bytes, word);
            if number == 100 {
                host.start();
            }
        }
    }
    assert!(host.dropped(0).iter().all(|count| *count == 0));
}

/// Says that it is over, also if the test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// They go between the list of all links and the question about each.
#[test]
fn links_that_come_and_go_hold_up_neither_a_start_nor_a_release() {
    let mut host = host_or_skip!("restart::links_that_come_and_go", 2);
    let (lab, batch) = (host.lab.host().clone(), host.dir().join("batch"));
    let path = host.container(1).netns().path();
    let lines = |each: &dyn Fn(u32) -> String| (0..16).map(each).collect::<String>();
    let add = lines(&|it| format!("link add c{it} type veth peer name p{it} netns {path}\n"));
    let delete = lines(&|it| format!("link del c{it}\n"));
    fs::write(&batch, add + &delete).expect("written");
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let over = Over(&is_over);
        let churn = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                lab.command(&format!("ip -batch {}", batch.display())).expect("made and deleted");
            }
        });
        for _ in 0..20 {
            host.start();
            host.asker(0).granted(host.addresses(0)[0]);
            host.kill();
            let (is_good, said) = host.operator(&["release", "--all", "--force"]);
            assert!(is_good && said.contains("\"veth0\" released"), "{said}");
        }
        drop(over);
        churn.join().expect("it went on");
    });
    assert!(host.filter(0).is_none());
}

/// A directory in the place of the new file stands for a full disk.
#[test]
fn a_state_that_cannot_be_written_stays_whole_and_containers_are_served() {
    let mut host = host_or_skip!("restart::a_state_that_cannot_be_written", 2);
    host.start();
    let mut first = host.asker(0);
    first.granted(host.addresses(0)[0]);
    let (before, taken) = (host.state_text(), host.state().with_extension("new"));
    fs::create_dir(&taken).expect("made");
    for _ in 0..2 {
        let mut second = host.asker(1);
        second.granted(host.addresses(1)[0]);
        second.kill();
    }
    let unwritten = || {
        let all = host.log().into_iter();
        all.filter(|it| it.contains("the state cannot be written")).count()
    };
    assert_eq!((host.state_text(), unwritten()), (before, 1));
    // The next agent knows the first by its state, and the second by its program.
    host.kill();
    host.start();
    assert_eq!(host.status()["containers"].as_array().map(Vec::len), Some(2));
    assert!(host.may_leave(1).contains(&host.addresses(1)[0]));
    eventually("the first has its port", || host.guarded_rings() == 1);
    fs::remove_dir(&taken).expect("removed");
    let mut second = host.asker(1);
    second.granted(host.addresses(1)[0]);
    assert_eq!(host.known(), 2);
    first.kill();
    second.kill();
    host.has_ports(0);
}
