//! Tests of `ports.rs`.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use crate::host::{NsId, Sources};
use rocinante_netdev::Shards;
use rocinante_netdev::handed::Answer;

use super::*;
use crate::called::Called;
use crate::config::Config;
use crate::containers::subject;
use crate::control::Requests;
use crate::limits::{Limits, Share};
use crate::pages::Pages;
use crate::state::{Introduced, StateFile};
use crate::tally::End;

/// An agent with containers at the ends 3 and 4.
struct World {
    containers: Containers,
    state: PathBuf,
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.state);
    }
}

fn addresses() -> [IpAddr; 2] {
    ["10.0.0.2", "fe80::2"].map(|own| own.parse().expect("an address"))
}

fn end(index: u32, config: &Config) -> HostEnd {
    let sources = Sources { mac: [2; 6], addresses: addresses().into(), is_closed: false };
    let name = format!("end{index}");
    let bounds = config.bounds(&subject(&name, None, &sources)).expect("a class");
    HostEnd { index, name, sources, bounds }
}

impl World {
    fn new(name: &str, config: &Config) -> Self {
        let state = std::env::temp_dir().join(format!("agent-{name}-{}", std::process::id()));
        let file = StateFile::open(&state.join("state.json"), 7).expect("a state");
        let limits = Arc::new(Limits::new(1));
        let pages = Pages::new(&state.join("state.json"), 7, limits.alike()).expect("a boot");
        let pages = Arc::new(pages);
        let containers = Containers::new(config, file, &Arc::default(), (&limits, &pages));
        let containers = containers.expect("rtnetlink");
        let world = Self { containers, state };
        [3, 4].into_iter().for_each(|index| world.comes(index));
        world
    }

    fn comes(&self, index: u32) {
        let container = Container {
            name: format!("end{index}"),
            peer: (NsId(1), index),
            namespace: index.into(),
            fixed: None,
            introduced: None,
            called: None,
            unguarded: BTreeMap::new(),
            sources: Sources::default(),
            dropped: Default::default(),
            ports: BTreeMap::new(),
            shaped: Default::default(),
        };
        self.containers.lock().containers.insert(index, container);
    }

    fn reserve(&self, index: u32, request: &Request) -> Result<Room<'_>, Refused> {
        let end = end(index, &self.containers.config());
        self.containers.reserve(&end, request).map(|(room, _)| room)
    }

    /// Every room that exists for such requests, and the refusal of the next.
    fn all(&self, index: u32, request: &Request) -> (Vec<Room<'_>>, Refused) {
        let mut rooms = Vec::new();
        while rooms.len() < 100 {
            match self.reserve(index, request) {
                Ok(room) => rooms.push(room),
                Err(refused) => return (rooms, refused),
            }
        }
        panic!("no limit holds")
    }

    /// The reserved and the taken resources at the ends.
    fn held(&self) -> [(Taken, Taken); 2] {
        let inner = self.containers.lock();
        let reserved = |end| inner.reserved.get(&end).copied().unwrap_or_default();
        [3, 4].map(|end| (reserved(end), inner.taken(end)))
    }
}

/// A request for rings of the least that each gets.
fn request(shards: usize) -> Request {
    Request {
        backend: Backend::Packet,
        interface: 2,
        addresses: addresses().into(),
        shards: Shards { count: shards, ..Shards::ONE },
        ring_frames: Some(15),
        tx_buffer_bytes: None,
        despite_rules: false,
        wait_ms: None,
    }
}

/// Ports that were opened for a request.
fn fill(room: Room<'_>, shards: u64, backend: Backend) -> Result<PortId, Refused> {
    let ring = Ring { block_bytes: 4096, blocks: 1, frame_bytes: 2048, frames: 2 };
    let granted = match backend {
        Backend::Xdp => Granted::Xdp { chunks: 64 },
        _ => Granted::Packet { ring },
    };
    let answer = Answer { outcome: Ok(granted), report: None };
    let bytes = room.taken.bytes;
    let mut given = Given { answer, descriptors: Vec::new(), kept: Vec::new(), bytes };
    room.fill((0..shards).collect(), &mut given)
}

/// Each limit, reached by requests none of which is over: requests under way count, whether
/// their port is handed over then or given up.
#[test]
fn requests_at_one_time_get_no_more_than_one_after_the_other() {
    let rooms_of = |mib: usize| (mib << 20) / GiveLimits::default().memory_bytes(&request(1));
    let usual = Config::default;
    let alone = |config| Config { containers_expected: 1, ..config };
    for (name, config, shards, rooms, said) in [
        ("one", Config { ports_max: 1, ..usual() }, 1, 1, "1 ports"),
        ("shards", Config { ports_max: 7, ..usual() }, 2, 3, "6 ports"),
        ("usual", usual(), 1, 64, "64 ports"),
        ("ring", Config { ring_mib_max: 4, ..usual() }, 1, rooms_of(4), "4 MiB already"),
        ("total", alone(Config { ring_mib_total: 6, ..usual() }), 1, rooms_of(6), "all have 6"),
    ] {
        let (world, request) = (World::new(name, &config), request(shards));
        let mut ports = Vec::new();
        for round in 0..3 {
            let before = world.held();
            let (made, refused) = world.all(3, &request);
            assert_eq!(made.len(), rooms, "{name}, {round}: {refused}");
            assert_eq!(refused.code, Code::Busy, "{name}: {refused}");
            // What another container may have is its own, or what all have together.
            let others = world.all(4, &request).0.len();
            assert_eq!(others, if name == "total" { 0 } else { rooms }, "{name}");
            if round < 2 {
                drop(made);
                assert_eq!(world.held(), before, "{name}: they were given up");
                continue;
            }
            for room in made {
                ports.push(fill(room, shards as u64, Backend::Packet).expect("it is there"));
                assert_eq!(world.all(3, &request).0.len(), 0, "{name}: each counts");
            }
        }
        let refused = world.all(3, &request).1;
        assert!(refused.reason.contains(said), "{name}: {refused}");
        // The room of a port that goes is for the next.
        world.containers.remove_port(ports.remove(0));
        assert_eq!(world.all(3, &request).0.len(), 1, "{name}");
    }
}

/// Two of three containers take all that they get, also while their requests are under way. The
/// third one's part stays.
#[test]
fn what_a_container_is_promised_is_there_beside_two_hogs() {
    let config = Config { ring_mib_total: 24, containers_expected: 3, ..Config::default() };
    let world = World::new("hogs", &config);
    world.comes(5);
    let large = Request { ring_frames: Some(256), ..request(1) };
    let hogs = [3, 4].map(|hog| world.all(hog, &large).0);
    let taken = |rooms: &[Room<'_>]| rooms.iter().map(|room| room.taken.bytes).sum::<usize>();
    assert_eq!(hogs.each_ref().map(|rooms| taken(rooms) >> 20), [4 + 12, 4]);
    for round in 0..3 {
        let (rooms, refused) = world.all(5, &large);
        let sizes: Vec<usize> = rooms.iter().map(|room| room.taken.bytes >> 20).collect();
        assert_eq!(sizes, [2, 1, 1], "{round}: {refused}");
        assert!(refused.reason.contains("4 MiB already, all have 24"), "{refused}");
    }
    // A port of a hog goes: any of them may have its room beyond its part.
    let [mut first, _second] = hogs;
    let returned = first.pop().expect("many").taken.bytes >> 20;
    assert_eq!(taken(&world.all(5, &large).0) >> 20, 4 + returned);
}

/// Of several containers that go at once none stays.
#[test]
fn containers_that_go_at_once_are_all_forgotten() {
    use crate::containers::HeardOf;
    let world = World::new("gone", &Config::default());
    // No interface has such a number.
    let ends = [2_000_000_000, 2_000_000_001, 2_000_000_002];
    ends.into_iter().for_each(|index| world.comes(index));
    let known = || world.containers.lock().containers.keys().copied().collect::<Vec<_>>();
    let told = ends[..2].iter().map(|index| HeardOf::HostEnd(*index)).collect();
    world.containers.hear(&told);
    assert_eq!(known(), [3, 4, ends[2]], "the others have said nothing");
    world.comes(ends[0]);
    world.containers.lock().containers.retain(|index, _| *index > 4);
    world.containers.hear(&[HeardOf::Anything].into());
    assert!(known().is_empty(), "{:?}", known());
}

/// A port that was handed over counts once, also before its request is over.
#[test]
fn a_port_counts_as_reserved_or_as_taken() {
    let world = World::new("once", &Config { ports_max: 3, ..Config::default() });
    let [first, second] = [(); 2].map(|()| world.reserve(3, &request(1)).expect("room"));
    let each = first.taken;
    let id = fill(first, 1, Backend::Packet).expect("it is there");
    assert_eq!(world.held()[0], (each, each));
    let third = world.reserve(3, &request(1)).expect("there is room for one more");
    drop((second, third));
    assert_eq!(world.held(), [(Taken::default(), each), Default::default()]);
    world.containers.remove_port(id);
    world.containers.remove_port(id);
    assert_eq!(world.held(), <[(Taken, Taken); 2]>::default());
}

/// No interface has such a number.
#[test]
fn a_container_that_asks_is_released_by_force_alone() {
    use crate::control::Reply;
    let world = World::new("released", &Config::default());
    let end = 2_000_000_000;
    world.containers.lock().containers.clear();
    world.comes(end);
    let release = |name: &str, force| {
        let mut said = Vec::new();
        world.containers.release(Some(name), force, &mut |reply| said.push(reply));
        said
    };
    let room = world.reserve(end, &request(1)).expect("room");
    let name = format!("end{end}");
    let reason = "a request of it is under way".to_owned();
    assert_eq!(release(&name, false), [Reply::Kept { name: name.clone(), reason }]);
    assert!(matches!(release("end3", true)[..], [Reply::Refused { .. }]), "no such one");
    assert_eq!(release(&name, true), [Reply::Released { name: name.clone() }]);
    let refused = fill(room, 1, Backend::Packet).expect_err("it was released");
    assert_eq!(refused.code, Code::Interface);
    // The next one is as the first.
    world.comes(end);
    let room = world.reserve(end, &request(1)).expect("room");
    fill(room, 1, Backend::Packet).expect("it is there");
    let reason = "it has open ports".to_owned();
    assert_eq!(release(&name, false), [Reply::Kept { name: name.clone(), reason }]);
    assert_eq!(world.containers.totals().ports, 1);
    assert_eq!(release(&name, true), [Reply::Released { name }]);
    assert_eq!(world.containers.totals(), crate::containers::Totals::default());
}

/// Two containers in two classes, and the same ones in others from then on.
#[test]
fn each_container_has_the_limits_of_its_class() {
    let class = |text: &str| toml::from_str::<Config>(text).expect("a configuration");
    let config = class(
        "ports_max = 5\n\
         [[class]]\nname = \"few\"\ncontainers = [\"end3\"]\nports_max = 2\nring_frames_max = 15\n\
         [[class]]\nname = \"small\"\ncontainers = [\"end4\"]\nring_mib_max = 3\nbackends = [\"packet\"]",
    );
    let world = World::new("classes", &config);
    world.comes(5);
    let rooms = [3, 4, 5].map(|end| world.all(end, &request(1)));
    assert_eq!(rooms.each_ref().map(|(rooms, _)| rooms.len()), [2, 3, 5]);
    for ((_, refused), class) in rooms.iter().zip(["few", "small", "default"]) {
        assert!(refused.hint.contains(&format!("of the class {class:?}")), "{refused:?}");
    }
    let frames = |end_of: u32| {
        let request = Request { ring_frames: Some(120), ..request(1) };
        let end = end(end_of, &world.containers.config());
        Some(world.containers.reserve(&end, &request).ok()?.1.ring_frames_max)
    };
    drop(rooms);
    assert_eq!((frames(3), frames(5) >= Some(120)), (Some(15), true));
    let xdp = Request { backend: Backend::Xdp, ring_frames: None, ..request(1) };
    let refused = world.reserve(4, &xdp).expect_err("packet alone");
    assert_eq!(refused.code, Code::Forbidden);
    assert!(refused.reason.contains("\"small\"") && refused.reason.contains("afxdp"));
    drop(world.reserve(3, &xdp).expect("each backend"));
    let held = world.all(5, &request(1)).0;
    world.containers.configure(class("[[class]]\nname = \"default\"\nports_max = 6"));
    assert_eq!(world.all(3, &request(1)).0.len(), 6);
    assert_eq!(world.all(5, &request(1)).0.len(), 6 - held.len());
}

/// Two ends of one container, each in a class of its own, in both orders.
#[test]
fn a_container_asks_as_often_as_the_stricter_of_its_classes_says() {
    for (first, second) in [(2, 5), (5, 2)] {
        let world = World::new(&format!("stricter-{first}"), &Config::default());
        world.comes(5);
        world.containers.lock().containers.get_mut(&4).expect("it is there").namespace = 3;
        let text = format!(
            "requests_per_second = 9\n\
             [[class]]\nname = \"a\"\ncontainers = [\"end3\"]\nrequests_per_second = {first}\n\
             [[class]]\nname = \"b\"\ncontainers = [\"end4\"]\nrequests_per_second = {second}"
        );
        world.containers.configure(toml::from_str(&text).expect("a configuration"));
        let (limits, now) = (&world.containers.limits, std::time::Instant::now());
        let counts = |of| limits.enter(Share::Container(of), now).is_some_and(|it| it.counts(now));
        let asked = [3, 5].map(|of| (0..20).filter(|_| counts(of)).count());
        assert_eq!(asked, [2, 9], "{first}, {second}");
    }
}

/// The same of what its programs hold, each resource for itself.
#[test]
fn a_container_holds_what_the_strictest_of_its_classes_says() {
    let world = World::new("strictest", &Config::default());
    (5..=6).for_each(|end| world.comes(end));
    for end in [4, 5] {
        world.containers.lock().containers.get_mut(&end).expect("it is there").namespace = 3;
    }
    let class = |end, max| {
        format!("[[class]]\nname = \"{end}\"\ncontainers = [\"{end}\"]\nrdma_max = \"{max}\"\n")
    };
    let maxes = ["hca_handle=9 hca_object=2", "hca_handle=3 hca_object=5", "mr_bytes=7"];
    for turn in 0..3 {
        let text: String =
            (0..3).map(|nth| class(format!("end{}", nth + 3), maxes[(nth + turn) % 3])).collect();
        let config: Config = toml::from_str(&text).expect("a configuration");
        let (_, held) = world.containers.lock().strictest(&config);
        assert_eq!(held[&3].to_string(), "hca_handle=3 hca_object=2 mr_bytes=7", "{turn}");
        assert!(held[&6].is_none(), "another's");
    }
    assert!(world.containers.lock().strictest(&Config::default()).1.is_empty());
}

/// Whichever of its ends a request came by.
#[test]
fn a_container_of_two_ends_stays_while_a_request_is_under_way() {
    use crate::control::Reply;
    let ends = [2_000_000_000, 2_000_000_001];
    for asking in ends {
        let world = World::new(&format!("either-{asking}"), &Config::default());
        world.containers.lock().containers.clear();
        ends.into_iter().for_each(|end| world.comes(end));
        let _room = world.reserve(asking, &request(1)).expect("room");
        let mut said = Vec::new();
        world.containers.release(Some("end2000000000"), false, &mut |it| said.push(it));
        assert!(said.iter().all(|it| matches!(it, Reply::Kept { .. })), "{asking}: {said:?}");
        assert_eq!((said.len(), world.containers.totals().containers), (2, 2));
    }
}

#[test]
fn whatever_is_refused_takes_nothing() {
    let config = Config { ports_max: 2, ring_mib_max: 64, ..Config::default() };
    let world = World::new("refused", &config);
    let xdp = Request { backend: Backend::Xdp, ring_frames: None, ..request(1) };
    let room = world.reserve(4, &xdp).expect("room");
    fill(room, 1, Backend::Xdp).expect("it is there");
    let foreign = vec!["fe80::3".parse().expect("an address")];
    for (end, request, code) in [
        (3, Request { addresses: foreign, ..request(1) }, Code::Interface),
        (3, request(3), Code::Busy),
        (3, request(1 << 20), Code::Busy),
        (3, Request { ring_frames: None, ..request(256) }, Code::Busy),
        (4, xdp.clone(), Code::InUse),
    ] {
        let before = world.held();
        for _ in 0..3 {
            assert_eq!(world.reserve(end, &request).expect_err("refused").code, code);
            assert_eq!(world.held(), before, "{request:?}");
        }
    }
    // The container goes while its ports are made, and one comes to its place.
    let gone = world.reserve(3, &request(2)).expect("room");
    world.containers.lock().containers.remove(&3);
    let refused = fill(gone, 2, Backend::Packet).expect_err("it has gone");
    assert_eq!((refused.code, world.held()[0]), (Code::Interface, Default::default()));
    world.comes(3);
    assert_eq!(world.all(3, &request(1)).0.len(), 2);
}

/// Of an introduction that failed nothing stays, also where a program asked meanwhile.
#[test]
fn a_refused_word_goes_while_a_port_stays() {
    let world = World::new("refused-word", &Config::default());
    let ends = [2_000_000_001, 2_000_000_002];
    let introduced = || {
        let inner = world.containers.lock();
        ends.map(|end| inner.containers.get(&end).map(|it| it.introduced.is_some()))
    };
    for end in ends {
        world.comes(end);
        let mut inner = world.containers.lock();
        let container = inner.containers.get_mut(&end).expect("it came");
        let called = Called { id: "c0ffee".into(), engine: "test".into() };
        let given = crate::state::Fixed::from(&Sources::default());
        let word = Introduced {
            called,
            class: None,
            rates: None,
            pod: None,
            claimed: Default::default(),
            given,
        };
        container.introduced = Some(word);
    }
    let room = world.reserve(ends[0], &request(1)).expect("room");
    let words = [(ends[0], None)].into();
    world.containers.take_back(ends[0], None, &words);
    assert_eq!(introduced(), [Some(false), Some(true)]);
    drop(room);
    world.containers.take_back(ends[0], None, &words);
    assert_eq!(introduced(), [None, Some(true)]);
}

/// A port sends by all ends of its container: both stay while either has one, or is about to.
#[test]
fn no_end_of_a_container_is_forgotten_while_either_has_a_port() {
    let ends = [2_000_000_001, 2_000_000_002];
    for (asking, is_filled) in [(0, false), (0, true), (1, false), (1, true)] {
        let world = World::new(&format!("either-word-{asking}-{is_filled}"), &Config::default());
        ends.into_iter().for_each(|end| world.comes(end));
        let words = ends.map(|end| (end, None)).into();
        let is_known = || {
            ends.into_iter().for_each(|end| world.containers.take_back(end, None, &words));
            let inner = world.containers.lock();
            ends.map(|end| inner.containers.contains_key(&end))
        };
        let room = world.reserve(ends[asking], &request(1)).expect("room");
        if is_filled {
            let port = fill(room, 1, Backend::Packet).expect("it is there");
            assert_eq!(is_known(), [true; 2], "{asking}: a port");
            world.containers.remove_port(port);
        } else {
            assert_eq!(is_known(), [true; 2], "{asking}: a request");
            drop(room);
        }
        assert_eq!(is_known(), [false; 2], "{asking}: nothing");
    }
}

/// Two ends of a network namespace that is cut off, and one of another. The kernel has no such
/// links, nor programs there.
#[test]
fn a_number_is_cut_off_no_more_when_the_last_end_of_its_namespace_goes() {
    let world = World::new("cut-off", &Config::default());
    let ends = [2_000_000_001, 2_000_000_002, 2_000_000_003];
    let begins = || {
        ends.into_iter().for_each(|end| world.comes(end));
        let mut inner = world.containers.lock();
        let namespaces = [71, 71, 72].into_iter().zip([7, 7, 8]);
        for (end, (namespace, id)) in ends.into_iter().zip(namespaces) {
            let container = inner.containers.get_mut(&end).expect("it came");
            (container.namespace, container.peer.0) = (namespace, NsId(id));
            inner.cut_off.insert(namespace, std::time::Instant::now());
        }
    };
    let are_cut_off = || {
        let inner = world.containers.lock();
        inner.cut_off.keys().copied().collect::<Vec<u64>>()
    };
    begins();
    for (end, left) in ends.into_iter().zip([&[71, 72][..], &[72], &[]]) {
        world.containers.hear(&[crate::containers::HeardOf::HostEnd(end)].into());
        assert_eq!(are_cut_off(), left, "an announcement");
    }
    begins();
    for (name, left) in [("end2000000002", &[72][..]), ("end2000000003", &[])] {
        world.containers.release(Some(name), true, &mut drop);
        assert_eq!(are_cut_off(), left, "a command");
    }
    begins();
    let words = ends.map(|end| (end, None)).into();
    for (end, left) in ends.into_iter().zip([&[71, 72][..], &[72], &[]]) {
        world.containers.take_back(end, None, &words);
        assert_eq!(are_cut_off(), left, "a refusal");
    }
}

/// A later network namespace may have the number of one that has gone.
#[test]
fn the_log_forgets_a_container_with_its_last_end() {
    let world = World::new("forgotten", &Config::default());
    world.comes(5);
    let mut inner = world.containers.lock();
    inner.containers.get_mut(&4).expect("it is there").namespace = 3;
    let journal = Arc::clone(&inner.journal);
    for of in [3, 5].map(Share::Container) {
        journal.names(of, "an end");
        journal.count(of, End::Refused(Code::Busy));
    }
    let is_known = |namespace| {
        let share = Share::Container(namespace);
        let has_requests = journal.requests(Some(share)) != Requests::default();
        assert_eq!(journal.name(share) == "an end", has_requests, "{share:?}");
        assert!(has_requests || journal.name(share) == format!("net:[{namespace}]"));
        has_requests
    };
    for (end, known) in [(4, [true, true]), (3, [false, true]), (5, [false, false])] {
        inner.remove(end).expect("it is there");
        assert_eq!([3, 5].map(is_known), known, "without {end}");
    }
}

/// The next agent counts what an earlier one handed over, as that has written it, before it finds
/// the processes that hold it; and what it writes itself is the same.
#[test]
fn ports_of_an_earlier_agent_count_as_before() {
    let own = crate::asker::Own::new().expect("/proc");
    let config = Config { ports_max: 3, ..Config::default() };
    let earlier = World::new("taken-up-before", &config);
    for (shards, backend) in [(2, Backend::Packet), (1, Backend::Xdp)] {
        let room = earlier.reserve(3, &request(shards as usize)).expect("room");
        fill(room, shards, backend).expect("it is there");
    }
    let written = |world: &World| {
        let inner = world.containers.lock();
        inner.containers[&3].ports.values().map(KnownPort::from).collect::<Vec<_>>()
    };
    let next = World::new("taken-up", &config);
    for port in &written(&earlier) {
        next.containers.lock().take_up(3, port, &own).expect("it is known");
    }
    assert_eq!(written(&next), written(&earlier));
    assert_eq!(
        (next.held(), next.containers.totals()),
        (earlier.held(), earlier.containers.totals())
    );
    for world in [earlier, next] {
        assert_eq!(world.reserve(3, &request(1)).expect_err("no room").code, Code::Busy);
        let has_xdp = world.containers.lock().containers[&3].ports.values().any(Port::is_xdp);
        assert!(has_xdp);
    }
}
