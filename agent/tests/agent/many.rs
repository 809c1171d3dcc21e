//! A hundred containers: what an attachment takes, and what the agent.

use std::time::Instant;

use rocinante_netdev::handed::{GiveLimits, give};

use crate::asker::{Asker, eventually};
use crate::lab::{Host, host_or_skip, resident_kib};

const CONTAINERS: u8 = 100;
/// The most resident memory of the agent.
const RESIDENT_KIB_MAX: u64 = 30 << 10;

fn voluntary_switches(pid: u32) -> u64 {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("a process");
    let switches = |entry: std::io::Result<std::fs::DirEntry>| {
        let status = std::fs::read_to_string(entry.ok()?.path().join("status")).ok()?;
        let line = status.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"))?;
        line.trim().parse::<u64>().ok()
    };
    tasks.filter_map(switches).sum()
}

/// What a port costs that is opened in a container by one with the rights, at the median.
fn opened_by_oneself(host: &Host) -> u64 {
    let mut times: Vec<u64> = (0..20)
        .map(|index| {
            let address = host.addresses(index)[0];
            let open = || {
                let start = Instant::now();
                let given =
                    give(&crate::asker::request(&address.to_string()), &GiveLimits::default());
                assert!(given.answer.outcome.is_ok(), "{:?}", given.answer);
                start.elapsed().as_micros() as u64
            };
            host.container(index).run(open).expect("entered")
        })
        .collect();
    times.sort_unstable();
    times[times.len() / 2]
}

#[test]
fn a_hundred_containers() {
    let mut host = host_or_skip!("many::a_hundred_containers", CONTAINERS);
    host.start();
    let mut askers: Vec<Asker> = (0..CONTAINERS).map(|index| host.asker(index.into())).collect();
    // The first is the first that asks; each one after that finds more containers there.
    let mut times = Vec::new();
    for (index, asker) in askers.iter_mut().enumerate() {
        asker.tell("rights");
        times.push(asker.timed(host.addresses(index)[0]));
    }
    // With all of them there: a second port each.
    let mut again = Vec::new();
    for (index, asker) in askers.iter_mut().enumerate() {
        again.push(asker.timed(host.addresses(index)[1]));
    }
    times.sort_unstable();
    again.sort_unstable();
    let resident = resident_kib(host.agent_id());
    println!(
        "attach with a port, us: median {} p99 {} max {}; another port: median {} p99 {}; agent {} KiB",
        times[50], times[98], times[99], again[50], again[98], resident
    );
    let alone = opened_by_oneself(&host);
    println!("the same port without an agent: median {alone} us");
    assert!(resident <= RESIDENT_KIB_MAX, "{resident} KiB");
    assert_eq!(host.ports(), 200);
    // Nothing happens, and nothing wakes.
    eventually("the worker threads end", || {
        std::fs::read_dir(format!("/proc/{}/task", host.agent_id())).expect("tasks").count() == 1
    });
    let before = voluntary_switches(host.agent_id());
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert_eq!(voluntary_switches(host.agent_id()), before);
    // All at once, after they closed what they have.
    for asker in &mut askers {
        asker.say("close");
    }
    for asker in &mut askers {
        assert_eq!(asker.hear(), "done");
    }
    host.has_ports(0);
    for (index, asker) in askers.iter_mut().enumerate() {
        asker.say(&format!("ask {}", host.addresses(index)[0]));
    }
    for asker in &mut askers {
        let answer = asker.hear();
        assert!(answer.starts_with("granted"), "{answer}");
    }
    assert_eq!(host.ports(), 100);
}
