use std::fs;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use rocinante_netdev::handed::page::{Head, Page, hand_over, make, receive};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::*;

/// An agent's table, and its file.
struct World {
    state: PathBuf,
    pages: Pages,
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(self.state.parent().expect("a directory"));
    }
}

/// A program's device.
struct Program {
    page: Page,
    id: PageId,
    file: File,
}

fn pages(state: &std::path::Path) -> Pages {
    Pages::new(state, 7, 100).expect("a boot")
}

impl World {
    fn new(name: &str) -> Self {
        let directory = format!("agent-pages-{name}-{}", std::process::id());
        let state = std::env::temp_dir().join(directory).join("state.json");
        fs::create_dir_all(state.parent().expect("a directory")).expect("made");
        let pages = pages(&state);
        Self { state, pages }
    }

    fn opens(&self, end: u32, key: u64) -> Option<Program> {
        let made = make().expect("a page");
        let file = File::from(made.try_clone().expect("a copy"));
        let id = self.pages.begin((end, &format!("v{end}"), end.into()), key, file)?;
        let (one, other): (OwnedFd, OwnedFd) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .expect("a pair");
        hand_over(&one, made.as_fd()).expect("sent");
        Some(Program { page: receive(&other).expect("a page"), id, file: made.into() })
    }

    /// The agent ends and another one begins, without the first one's last look if it is killed.
    fn restarts(&mut self, is_killed: bool) {
        if !is_killed {
            self.pages.last();
        }
        self.pages = pages(&self.state);
    }

    /// The first counter of each device of each container.
    fn counts(&self) -> Vec<(String, String, u64)> {
        let sums = self.pages.sums(None, None).into_iter();
        sums.flat_map(|sums| {
            let name = sums.name;
            sums.devices.into_iter().map(move |(device, sum)| {
                assert!(sum.counters.iter().all(|count| *count == sum.counters[0]));
                (name.clone(), device, sum.counters[0])
            })
        })
        .collect()
    }
}

impl Program {
    fn counts(&self, device: &str, count: u64) {
        let (device, backend) = (device.into(), "packet".into());
        let head = Head { device, backend, why: "v0 is a veth".into(), shards: 1 };
        self.page.publish(&head, 0, |section| {
            section.objects([count as usize; OBJECTS.len()]);
            section.counters([count; COUNTERS.len()]);
        });
    }
}

fn named(counts: &[(&str, &str, u64)]) -> Vec<(String, String, u64)> {
    counts.iter().map(|(name, device, count)| ((*name).into(), (*device).into(), *count)).collect()
}

#[test]
fn what_is_open_and_what_has_gone_is_counted_for_its_container() {
    let world = World::new("sums");
    let all = [(3, 1), (3, 2), (4, 1)].map(|(end, key)| world.opens(end, key).expect("room"));
    let [one, two, other] = all;
    assert!(world.counts().is_empty(), "nothing is published");
    one.counts("eth0", 10);
    two.counts("eth0", 20);
    other.counts("eth0", 40);
    assert_eq!(world.counts(), named(&[("v3", "eth0", 30), ("v4", "eth0", 40)]));
    let sums = world.pages.sums(None, None);
    assert_eq!((sums[0].namespace, sums[0].devices["eth0"].objects), (3, [30; OBJECTS.len()]));
    assert_eq!(sums[0].devices["eth0"].open["packet"].len(), 2);
    // The last figures of a device are read when it ends.
    two.counts("eth0", 21);
    world.pages.end(two.id);
    one.counts("eth0", 11);
    assert_eq!(world.counts()[0].2, 32);
    let eth0 = &world.pages.sums(None, None)[0].devices["eth0"];
    assert_eq!((eth0.objects, eth0.open["packet"].len()), ([11; OBJECTS.len()], 1));
    let another = world.opens(3, 9).expect("room");
    another.counts("eth1", 1);
    let now = named(&[("v3", "eth0", 32), ("v3", "eth1", 1), ("v4", "eth0", 40)]);
    assert_eq!(world.counts(), now);
}

#[test]
fn no_sum_gets_less_whatever_a_program_writes() {
    let world = World::new("hostile");
    let [hostile, other] = [3, 4].map(|end| world.opens(end, 1).expect("room"));
    other.counts("eth0", 5);
    let mut last = 0;
    for count in [7, 3, 0, u64::MAX - 1, 2, u64::MAX, 0] {
        hostile.counts("eth0", count);
        let counts = world.counts();
        assert!(counts[0].2 >= last && counts[0].2 >= count, "{count}: {counts:?}");
        assert_eq!(counts[1].2, 5, "another's");
        last = counts[0].2;
    }
    // Its sums stay at the end, and do not begin anew.
    let second = world.opens(3, 2).expect("room");
    second.counts("eth0", u64::MAX);
    assert_eq!(world.counts()[0].2, u64::MAX);
    world.pages.end(second.id);
    world.pages.end(hostile.id);
    assert_eq!(world.counts()[0].2, u64::MAX);
    // A page that is never whole is as the last whole one.
    other.file.write_all_at(&u64::to_ne_bytes(1), 1024).expect("written");
    assert_eq!(world.counts()[1].2, 5);
    for name in ["a\0b", "\u{1b}[2J\n\"{}", &"x".repeat(500)] {
        let named = world.opens(5, 1).expect("room");
        named.counts(name, 1);
        world.pages.end(named.id);
    }
    for (_, device, _) in world.counts() {
        assert!(device.len() <= 64 && !device.contains(char::is_control), "{device:?}");
    }
}

#[test]
fn a_container_has_as_many_pages_and_names_as_it_may() {
    let world = World::new("many");
    let all: Vec<Program> = (0..).map_while(|key| world.opens(3, key)).collect();
    assert_eq!(all.len(), PAGES_MAX);
    assert!(world.opens(4, 0).is_some(), "another's");
    all.iter().enumerate().for_each(|(nth, it)| it.counts(&format!("eth{nth}"), 1));
    let counts = world.counts();
    assert_eq!(counts.len(), DEVICES_MAX + 1, "{counts:?}");
    assert_eq!(counts.iter().map(|(_, _, count)| count).sum::<u64>(), PAGES_MAX as u64);
    let other = counts.iter().find(|(_, device, _)| device == OTHER).expect("others");
    assert_eq!(other.2, (PAGES_MAX - DEVICES_MAX) as u64);
    world.pages.end(all[0].id);
    assert!(world.opens(3, 0).is_some(), "one has gone");
    assert!(world.opens(3, 0).is_none());
}

#[test]
fn another_agent_goes_on_from_what_the_first_one_read() {
    for is_killed in [false, true] {
        let mut world = World::new(&format!("restart-{is_killed}"));
        let [one, two] = [1, 2].map(|key| world.opens(3, key).expect("room"));
        one.counts("eth0", 10);
        two.counts("eth0", 20);
        assert_eq!(world.counts()[0].2, 30);
        world.pages.end(two.id);
        world.pages.write();
        one.counts("eth0", 12);
        world.restarts(is_killed);
        let kept = if is_killed { 30 } else { 32 };
        assert_eq!(world.counts(), named(&[("v3", "eth0", kept)]));
        // The program is there still, and has counted on. Another one has the same key.
        let [again, thief] = [1, 1].map(|key| world.opens(3, key).expect("room"));
        assert_eq!(world.counts()[0].2, kept);
        again.counts("eth0", 15);
        thief.counts("eth0", 100);
        assert_eq!(world.counts()[0].2, 135);
        world.pages.end(again.id);
        world.restarts(is_killed);
        assert_eq!(world.counts()[0].2, 135);
        // A file of nonsense, or of another namespace, is none.
        fs::write(Pages::path(&world.state), b"{}").expect("written");
        world.restarts(true);
        assert!(world.counts().is_empty());
        let written = world.opens(3, 1).expect("room");
        written.counts("eth0", 1);
        world.pages.last();
        assert!(Pages::new(&world.state, 8, 1).expect("a boot").sums(None, None).is_empty());
    }
}

/// Devices without a page are bounded, as no program may ever take them up.
#[test]
fn what_devices_of_many_earlier_agents_counted_stays() {
    let mut world = World::new("earlier");
    for agent in 0..4 {
        let keys = (0..PAGES_MAX as u64).map(|nth| agent << 32 | nth);
        let all: Vec<Program> = keys.map(|key| world.opens(3, key).expect("room")).collect();
        all.iter().for_each(|it| it.counts("eth0", 1));
        assert_eq!(world.counts(), named(&[("v3", "eth0", (agent + 1) * PAGES_MAX as u64)]));
        world.restarts(false);
    }
}

#[test]
fn a_container_is_forgotten_with_its_last_end_and_page() {
    let world = World::new("gone");
    let open = world.opens(3, 1).expect("room");
    open.counts("eth0", 1);
    let gone = world.opens(4, 1).expect("room");
    gone.counts("eth0", 2);
    world.pages.end(gone.id);
    let names = |ends: Option<&BTreeMap<u32, End>>| {
        let sums = world.pages.sums(ends, None);
        sums.into_iter().map(|sums| sums.name).collect::<Vec<_>>()
    };
    assert_eq!(names(None), ["v3", "v4"], "the ends are not known");
    assert_eq!(names(Some(&BTreeMap::new())), ["v3"], "its page is there still");
    world.pages.end(open.id);
    assert!(names(Some(&BTreeMap::new())).is_empty());
    assert!(Pages::new(&world.state, 7, 1).expect("a boot").sums(None, None).is_empty());
}

#[test]
fn a_full_disk_is_tried_again() {
    let mut world = World::new("full");
    let one = world.opens(3, 1).expect("room");
    one.counts("eth0", 1);
    let blocked = Pages::path(&world.state).with_extension("new");
    fs::create_dir(&blocked).expect("made");
    assert_eq!(world.counts()[0].2, 1);
    assert!(!Pages::path(&world.state).exists());
    fs::remove_dir(&blocked).expect("removed");
    world.pages.write();
    world.restarts(true);
    assert_eq!(world.counts()[0].2, 1);
}
