//! Two hundred containers: the costs of an attachment, of the agent and of the kernel.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rocinante_netdev::Backend;
use rocinante_netdev::{GiveLimits, give};

use crate::asker::{Asker, eventually};
use crate::lab::{Host, host_or_skip, resident_kib};
use crate::pages::{begins, got};

const CONTAINERS: u8 = 200;
/// The limit for the ports of all of them, in MiB and in bytes: 1 GB.
const MIB_TOTAL: u64 = 953;
const BYTES_TOTAL: u64 = 1_000_000_000;
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

/// The cost of a port opened in a container by a process with the rights, at the median.
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

/// Bytes of memory that the machine has left.
fn available_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").expect("a table");
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:")).expect("a line");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

/// Closes what all programs have.
fn close(host: &Host, askers: &mut [Asker]) {
    for asker in &mut *askers {
        asker.say("close");
    }
    for asker in askers {
        assert_eq!(asker.hear(), "done");
    }
    host.has_ports(0);
}

/// The medians of a scrape, and of the command `status` as a whole, in microseconds.
fn looks(host: &Host) -> [u64; 2] {
    let scrape = || {
        let text = got(host, "/metrics");
        let open = text.lines().filter(|line| line.starts_with("rocinante_ports{"));
        assert_eq!(open.count(), usize::from(CONTAINERS));
    };
    let status = || {
        let (is_good, said) = host.operator(&["status"]);
        assert!(is_good && said.lines().count() >= usize::from(CONTAINERS), "{said}");
    };
    [&scrape as &dyn Fn(), &status].map(|look| {
        let time = |_| {
            let start = Instant::now();
            look();
            start.elapsed().as_micros() as u64
        };
        let mut times: Vec<u64> = (0..15).map(time).collect();
        times.sort_unstable();
        times[7]
    })
}

/// A port for each, one after the other; the sorted times in microseconds.
fn one_after_the_other(host: &Host, askers: &mut [Asker], family: usize) -> Vec<u64> {
    let ask = |(index, asker): (usize, &mut Asker)| asker.timed(host.addresses(index)[family]);
    let mut times: Vec<u64> = askers.iter_mut().enumerate().map(ask).collect();
    times.sort_unstable();
    assert_eq!(host.ports(), askers.len());
    times
}

#[test]
fn two_hundred_containers() {
    let mut host = host_or_skip!("many::two_hundred_containers", CONTAINERS);
    let socket = host.dir().join("metrics.sock");
    host.configure(&format!("ring_mib_total = {MIB_TOTAL}\nmetrics = {socket:?}"));
    begins(&mut host);
    let mut askers: Vec<Asker> = (0..CONTAINERS).map(|index| host.asker(index.into())).collect();
    askers.iter_mut().for_each(|asker| drop(asker.tell("rights")));
    // The first is the first that asks; each one after that finds more containers there.
    let before = available_bytes();
    let times = one_after_the_other(&host, &mut askers, 0);
    let taken = before.saturating_sub(available_bytes());
    let counted = host.bytes();
    assert!(counted <= BYTES_TOTAL, "{counted}");
    let resident = resident_kib(host.agent_id());
    assert!(resident <= RESIDENT_KIB_MAX, "{resident} KiB");
    let [scrape, status] = looks(&host);
    println!("with {CONTAINERS} ports, us: a scrape {scrape}, `status` {status}");
    // Nothing happens, and nothing wakes.
    eventually("the worker threads end", || {
        std::fs::read_dir(format!("/proc/{}/task", host.agent_id())).expect("tasks").count() == 1
    });
    let switches = voluntary_switches(host.agent_id());
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert_eq!(voluntary_switches(host.agent_id()), switches);
    // With all of them known: another port each.
    close(&host, &mut askers);
    let again = one_after_the_other(&host, &mut askers, 1);
    close(&host, &mut askers);
    let p99 = |times: &[u64]| times[times.len() * 99 / 100];
    println!(
        "attach with a port, us: median {} p99 {} max {}; another port: median {} p99 {}; agent \
         {resident} KiB; ports: {counted} bytes by its count, {taken} fewer available",
        times[times.len() / 2],
        p99(&times),
        times[times.len() - 1],
        again[again.len() / 2],
        p99(&again),
    );
    let alone = opened_by_oneself(&host);
    println!("the same port without an agent: median {alone} us");
    // All at once.
    let start = Instant::now();
    for (index, asker) in askers.iter_mut().enumerate() {
        asker.say(&format!("ask {}", host.addresses(index)[0]));
    }
    let answered = |asker: &mut Asker| {
        let answer = asker.hear();
        let took = answer.strip_prefix("granted 1 ").and_then(|us| us.parse::<u64>().ok());
        took.unwrap_or_else(|| panic!("{answer}"))
    };
    let mut times: Vec<u64> = askers.iter_mut().map(answered).collect();
    times.sort_unstable();
    println!(
        "all at once, us: median {} p99 {} max {}; in all {} ms",
        times[times.len() / 2],
        p99(&times),
        times[times.len() - 1],
        start.elapsed().as_millis(),
    );
    assert_eq!(host.ports(), usize::from(CONTAINERS));
    let counted = host.bytes();
    assert!(counted <= BYTES_TOTAL, "{counted}");
    // And as programs do, which wait for their turn. On a busy machine the last ones wait in vain,
    // and ask again.
    close(&host, &mut askers);
    let start = Instant::now();
    let mut ask: Vec<usize> = (0..askers.len()).collect();
    while !ask.is_empty() {
        let before = ask.len();
        for index in &ask {
            askers[*index].say(&format!("open packet {}", host.addresses(*index)[0]));
        }
        ask.retain(|index| {
            let answer = askers[*index].hear();
            let late = answer.contains("it does not answer in time");
            assert!(late || answer.starts_with("opened packet: "), "{answer}");
            late
        });
        assert!(ask.len() < before, "each of {before} waited in vain");
    }
    println!("programs, all at once: in all {} ms", start.elapsed().as_millis());
    // A hundred of them have the same.
    close(&host, &mut askers);
    host.kill();
    host.configure("containers_expected = 100");
    host.start();
    one_after_the_other(&host, &mut askers[..100], 0);
    let (first, last) = (host.slots(0), host.slots(99));
    assert_eq!((&first, &last), (&vec![60], &vec![60]));
}

#[test]
fn a_hundred_ports_of_afxdp() {
    let mut host = host_or_skip!("many::a_hundred_ports_of_afxdp", 100);
    host.start();
    let mut askers: Vec<Asker> = (0..100).map(|index| host.asker(index)).collect();
    askers.iter_mut().for_each(|asker| drop(asker.tell("rights")));
    let before = available_bytes();
    let start = Instant::now();
    for (index, asker) in askers.iter_mut().enumerate() {
        asker.opened(Backend::Xdp, host.addresses(index)[0]);
    }
    let (took, counted) = (start.elapsed(), host.bytes());
    let taken = before.saturating_sub(available_bytes());
    let resident = resident_kib(host.agent_id());
    println!(
        "100 ports of afxdp: {} us each; agent {resident} KiB; {counted} bytes by its count, \
         {taken} fewer available",
        took.as_micros() / 100
    );
    assert_eq!(host.ports(), 100);
    assert!((200 << 20..240 << 20).contains(&counted), "2 MiB each, and some: {counted}");
    // None of it is mapped by the agent any more.
    assert!(resident <= RESIDENT_KIB_MAX, "{resident} KiB");
}

/// The times of a container alone, and beside others that do their worst.
#[test]
fn a_container_is_served_beside_hostile_ones() {
    const PLACES: usize = 8192;
    let mut host = host_or_skip!("many::a_container_is_served", 3);
    host.configure("requests_per_second = 1000");
    host.start();
    let mut asker = host.asker(0);
    asker.tell("rights");
    let [address, searched, flooding] = [0, 1, 2].map(|nth| host.addresses(nth)[0]);
    let mut times = |beside: &str| {
        let time = |_| {
            let time = asker.timed(address);
            asker.tell("close");
            eventually("the agent has closed it", || host.slots(0).is_empty());
            time
        };
        let mut times: Vec<u64> = (0..100).map(time).collect();
        times.sort_unstable();
        println!("a port {beside}, us: median {} p99 {}", times[50], times[98]);
    };
    times("alone");
    // Each closed port has the places of a container's processes searched.
    let mut four: Vec<Asker> = (0..4).map(|_| host.asker(1)).collect();
    for asker in &mut four {
        assert_eq!(asker.tell(&format!("occupy {PLACES}")), PLACES.to_string());
    }
    let ask = |asker: &mut Asker| {
        asker.tell(&format!("ask {searched}"));
        asker.tell("close");
    };
    let other = || times("beside four loops over 32,768 places");
    beside(four, ask, other);
    let four = (0..4).map(|_| host.asker(2)).collect();
    let flood = |asker: &mut Asker| drop(asker.tell(&format!("flood 200 {flooding}")));
    beside(four, flood, || times("beside four floods of requests"));
}

/// Has each of these programs do something again and again, beside something else.
fn beside(programs: Vec<Asker>, again: impl Fn(&mut Asker) + Sync, other: impl FnOnce()) {
    /// Ends the loops, also if the other thing fails.
    struct End<'a>(&'a AtomicBool);
    impl Drop for End<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let (is_over, again) = (AtomicBool::new(false), &again);
    std::thread::scope(|scope| {
        let end = End(&is_over);
        for mut asker in programs {
            let is_over = end.0;
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    again(&mut asker);
                }
            });
        }
        other();
    });
}
