use std::fs;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use rocinante_netdev::handed::page::{Account, Head, Page, hand_over, make, receive};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::*;
use crate::quota::RdmaMax;

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
    /// As it would charge, if it keeps limits.
    account: Account,
}

fn pages(state: &std::path::Path) -> Pages {
    Pages::new(state, 7, Limits::new(100)).expect("a boot")
}

impl World {
    fn new(name: &str) -> Self {
        let directory = format!("agent-pages-{name}-{}", std::process::id());
        let state = std::env::temp_dir().join(directory).join("state.json");
        fs::create_dir_all(state.parent().expect("a directory")).expect("made");
        let pages = pages(&state);
        Self { state, pages }
    }

    /// One of a program that keeps no limits.
    fn opens(&self, end: u32, key: u64) -> Option<Program> {
        self.opens_with((end, end), key, Account::default(), false)
    }

    /// One of a program that keeps them.
    fn joins(&self, end: u32, key: u64) -> Program {
        self.opens_with((end, end), key, Account::default(), true).expect("room")
    }

    fn opens_with(
        &self,
        (end, namespace): (u32, u32),
        key: u64,
        account: Account,
        keeps: bool,
    ) -> Option<Program> {
        let made = make().expect("a page");
        let file = File::from(made.try_clone().expect("a copy"));
        let of = (end, &*format!("v{namespace}"), namespace.into());
        let (id, seat) = self.pages.begin(of, (key, keeps), file)?;
        let (one, other): (OwnedFd, OwnedFd) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .expect("a pair");
        let ledger = seat.as_ref().map(|(shared, slot)| (shared.file.as_fd(), *slot));
        hand_over(&one, made.as_fd(), ledger).expect("sent");
        let (page, seat) = receive(&other).expect("a page");
        assert_eq!(seat.is_some(), keeps);
        seat.into_iter().for_each(|seat| account.sit(seat));
        Some(Program { page, id, file: made.into(), account })
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
                assert!(sum.counters.iter().all(|(_, count)| count == sum.counters.0[0]));
                (name.clone(), device, sum.counters.0[0])
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
            section.counters([count; page::COUNTERS.len()]);
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
        assert!(
            Pages::new(&world.state, 8, Limits::new(1))
                .expect("a boot")
                .sums(None, None)
                .is_empty()
        );
    }
}

/// A page that is refused leaves all sums as they are, whichever container it is for.
#[test]
fn a_refused_page_makes_no_container_known() {
    let world = World::new("refused");
    let own: Vec<Program> = (0..PAGES_MAX as u64).filter_map(|key| world.opens(3, key)).collect();
    own.iter().for_each(|it| it.counts("eth0", 1));
    let names = || {
        let sums = world.pages.sums(None, None).into_iter();
        sums.map(|it| (it.name, it.namespace)).collect::<Vec<_>>()
    };
    let full = names();
    assert!(world.opens(3, 99).is_none());
    // Another network namespace has come to the end, or it has another name.
    assert!(world.opens_with((3, 7), 99, Account::default(), true).is_none());
    assert_eq!(names(), full);
    // All that there may be: devices share a file here, as each takes three descriptors.
    let file = Arc::new(own[0].file.try_clone().expect("a copy"));
    for end in 1000..1000 + ((ALL_PAGES_MAX - PAGES_MAX) / PAGES_MAX) as u32 {
        let device = |key| Device {
            key,
            page: Some(Arc::clone(&file)),
            slot: None,
            name: None,
            counters: Counters::default(),
            now: None,
        };
        let devices = (0..PAGES_MAX as u64).map(|key| (key, device(key))).collect();
        let container = Container { devices, ..Container::default() };
        world.pages.lock().containers.insert(end, container);
    }
    let full = names();
    for _ in 0..2 {
        assert!(world.opens(4, 1).is_none(), "another's");
        assert_eq!(names(), full);
    }
    world.pages.end(own[0].id);
    assert!(world.opens(4, 1).is_some() && world.opens(5, 1).is_none());
}

/// Programs that the next agent knows by their numbers keep what they hold when others come.
#[test]
fn programs_that_come_back_have_places_of_their_own() {
    let mut world = World::new("back");
    let mut all = [1, 2].map(|key| (key, world.joins(3, key)));
    for (_, it) in &all {
        it.account.charge(&[1, 2, 0]).expect("no limit");
    }
    // An agent that ended, or was killed, had read their pages or had not, or they had not
    // published anything to it.
    for (round, (publish, is_read, is_killed)) in [
        (false, false, true),
        (true, false, true),
        (true, true, true),
        (true, true, true),
        (true, false, false),
        (true, false, false),
        (false, false, false),
    ]
    .into_iter()
    .enumerate()
    {
        if publish {
            all.iter().for_each(|(_, it)| it.counts("eth0", 1));
        }
        if is_read {
            world.counts();
        }
        world.restarts(is_killed);
        let known = world.pages.lock().containers.get(&3).map_or(0, |it| it.devices.len());
        let was_known = publish && (is_read || !is_killed);
        assert!(!was_known || known >= all.len(), "{round}: {known}");
        all = all
            .map(|(key, it)| (key, world.opens_with((3, 3), key, it.account, true).expect("room")));
        let third = world.joins(3, 9);
        third.account.charge(&[1, 1, 0]).expect("no limit");
        assert_eq!(used(&world, 3, "hca_object").1, 5, "{round}");
        world.pages.end(third.id);
        assert_eq!(used(&world, 3, "hca_object").1, 4, "{round}");
        let (one, other) = (round % 2, 1 - round % 2);
        all[one].1.account.charge(&[0, 1, 0]).expect("no limit");
        all[other].1.account.refund(&[0, 1, 0]);
        assert_eq!(used(&world, 3, "hca_object").1, 4, "{round}");
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
    assert!(
        Pages::new(&world.state, 7, Limits::new(1)).expect("a boot").sums(None, None).is_empty()
    );
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

/// The use of one resource by a container, by the container's number.
fn used(world: &World, end: u32, resource: &str) -> (Option<u64>, u64, u64, u64) {
    let uses = world.pages.uses();
    let it = uses[&u64::from(end)][resource];
    (it.max, it.current, it.peak, it.events)
}

fn limit(world: &World, max: &str) {
    let max: RdmaMax = max.parse().expect("limits");
    // They are of the container 3 alone.
    world.pages.limit(LimitOf::new(move |namespace, name: &str| {
        assert_eq!(name, format!("v{namespace}"));
        if namespace == 3 { max } else { RdmaMax::default() }
    }));
}

#[test]
fn programs_of_one_container_share_its_limits() {
    let mut world = World::new("quota");
    let [one, two, other] = [(3, 1), (3, 2), (4, 1)].map(|(end, key)| world.joins(end, key));
    limit(&world, "hca_object=3 mr_bytes=100");
    one.account.charge(&[1, 2, 60]).expect("room");
    two.account.charge(&[1, 2, 0]).expect_err("4 of 3");
    two.account.charge(&[1, 1, 40]).expect("room");
    other.account.charge(&[1, 9, 900]).expect("another's");
    assert_eq!(used(&world, 3, "hca_handle"), (None, 2, 2, 0));
    assert_eq!(used(&world, 3, "hca_object"), (Some(3), 3, 3, 1));
    assert_eq!(used(&world, 3, "mr_bytes"), (Some(100), 100, 100, 0));
    assert_eq!(used(&world, 4, "mr_bytes"), (None, 900, 900, 0));
    // It is killed, and another one gets its slot.
    world.pages.end(one.id);
    assert_eq!(used(&world, 3, "hca_object"), (Some(3), 1, 3, 1));
    let third = world.joins(3, 3);
    third.account.charge(&[0, 2, 0]).expect("given back");
    // Higher and lower while they run.
    limit(&world, "hca_object=4");
    third.account.charge(&[0, 1, 1000]).expect("more now");
    limit(&world, "hca_object=2");
    two.account.refund(&[0, 1, 0]);
    two.account.charge(&[0, 1, 0]).expect_err("4 of 2");
    // One of a program of before counts as its page says.
    let old = world.opens(3, 7).expect("room");
    old.counts("eth0", 10);
    world.counts();
    assert_eq!(used(&world, 3, "hca_object"), (Some(2), 3 + 50, 53, 2));
    // The next agent gets what they hold, and goes on from the most that it was.
    world.restarts(false);
    assert_eq!(used(&world, 3, "hca_object"), (None, 0, 53, 2));
    let [two, third] =
        [two, third].map(|it| world.opens_with((3, 3), 9, it.account, true).expect("room"));
    limit(&world, "hca_object=4");
    assert_eq!(used(&world, 3, "hca_object"), (Some(4), 3, 53, 2));
    two.account.charge(&[0, 1, 0]).expect("4 of 4");
    third.account.charge(&[0, 1, 0]).expect_err("5 of 4");
}

/// The end that the kernel lists first goes, while a device is open.
#[test]
fn a_namespace_has_one_ledger_whichever_end_is_its_first() {
    let world = World::new("ends");
    let joins = |end, key| world.opens_with((end, 3), key, Account::default(), true).expect("room");
    let one = joins(3, 1);
    limit(&world, "hca_object=3");
    let [two, other] = [joins(9, 2), world.joins(4, 1)];
    one.account.charge(&[1, 2, 0]).expect("room");
    two.account.charge(&[1, 2, 0]).expect_err("4 of 3");
    two.account.charge(&[1, 1, 0]).expect("room");
    other.account.charge(&[1, 9, 0]).expect("another's");
    assert_eq!(used(&world, 3, "hca_object"), (Some(3), 3, 3, 1));
    for id in [one.id, two.id] {
        world.pages.end(id);
    }
    assert_eq!(used(&world, 3, "hca_object"), (Some(3), 0, 3, 1));
    // Nothing of it is open any more: the namespace of a number may be another one.
    joins(9, 3).account.charge(&[0, 3, 0]).expect("room");
}

#[test]
fn a_container_that_holds_more_is_named_and_one_whose_limit_fell_is_not() {
    let mut world = World::new("exceeding");
    let [kept, _] = [1, 2].map(|key| world.joins(3, key));
    let start = Instant::now();
    let at = |seconds| start + std::time::Duration::from_secs(seconds);
    kept.account.charge(&[1, 9, 0]).expect("no limit");
    limit(&world, "hca_object=5");
    (0..9).for_each(|second| assert!(world.pages.exceeding(at(second)).is_empty()));
    kept.account.refund(&[0, 2, 0]);
    assert!(world.pages.exceeding(at(10)).is_empty());
    // A program that keeps nothing, for a moment and for longer.
    let hostile = world.joins(3, 3);
    let hold = |count| {
        limit(&world, "");
        hostile.account.charge(&[0, count, 0]).expect("no limit");
    };
    hold(1);
    limit(&world, "hca_object=5");
    hostile.account.refund(&[0, 1, 0]);
    assert!(world.pages.exceeding(at(20)).is_empty());
    let old = world.opens(3, 4).expect("room");
    old.counts("eth0", 2);
    assert!(world.pages.exceeding(at(30)).is_empty(), "a charge that is taken back looks so");
    let named = world.pages.exceeding(at(31));
    let Exceeding { name, held, is_news } = &named[&3];
    assert_eq!((name.as_str(), held.as_str(), *is_news), ("v3", "hca_object=17 of 5", true));
    assert!(!world.pages.exceeding(at(90))[&3].is_news, "the log has it");
    assert!(world.pages.exceeding(at(91))[&3].is_news);
    // A program that comes, and the same limits once more, excuse nothing.
    let late = world.joins(3, 5);
    assert!(world.pages.exceeding(at(91)).contains_key(&3));
    limit(&world, "hca_object=5");
    assert!(world.pages.exceeding(at(91)).contains_key(&3));
    world.pages.end(late.id);
    world.pages.end(old.id);
    assert!(world.pages.exceeding(at(92)).is_empty());
    // The next time is a moment, too, at first.
    let old = world.opens(3, 6).expect("room");
    old.counts("eth0", 2);
    assert!(world.pages.exceeding(at(100)).is_empty());
    assert!(world.pages.exceeding(at(101)).contains_key(&3));
    // Another limit of its class changes, and this one.
    for max in ["hca_object=5 mr_bytes=7", "hca_object=4", "hca_object=5"] {
        limit(&world, max);
        assert!(world.pages.exceeding(at(101)).contains_key(&3), "{max}");
    }
    world.pages.end(old.id);
    assert!(world.pages.exceeding(at(102)).is_empty());
    // Programs come back to the next agent one after the other.
    world.restarts(false);
    let come =
        [kept, hostile].map(|it| world.opens_with((3, 3), 9, it.account, true).expect("room"));
    limit(&world, "hca_object=5");
    let now = Instant::now();
    let after = |seconds| now + std::time::Duration::from_secs(seconds);
    (1..30).for_each(|second| assert!(world.pages.exceeding(after(second)).is_empty()));
    assert!(world.pages.exceeding(after(70)).is_empty(), "they hold no more than before");
    // One that holds more does not get rid of that by the agent's next start.
    let more = |world: &mut World, key| {
        let old = world.opens(3, key).expect("room");
        old.counts("eth0", 2);
        old
    };
    let old = more(&mut world, 5);
    world.pages.exceeding(after(71));
    assert!(world.pages.exceeding(after(72)).contains_key(&3));
    world.pages.uses();
    world.restarts(true);
    drop(old);
    let _come = come.map(|it| world.opens_with((3, 3), 9, it.account, true).expect("room"));
    let _old = more(&mut world, 6);
    limit(&world, "hca_object=5");
    (1..30).for_each(|second| assert!(world.pages.exceeding(after(second)).is_empty()));
    world.pages.exceeding(after(80));
    assert!(world.pages.exceeding(after(81)).contains_key(&3));
}

#[test]
fn a_ledger_of_nonsense_harms_its_container_alone() {
    let world = World::new("nonsense");
    let [hostile, other] = [(3, 1), (4, 1)].map(|(end, key)| world.joins(end, key));
    other.account.charge(&[1, 1, 1]).expect("no limit");
    limit(&world, "hca_object=5");
    let shared = world.pages.lock().containers[&3].quota.shared_now().expect("it is there");
    let file = File::from(shared.file.try_clone().expect("a copy"));
    for value in [0, 7, u64::MAX - 1, u64::MAX] {
        let words = file.metadata().expect("a length").len() / 8;
        (0..words).for_each(|word| {
            file.write_all_at(&value.to_ne_bytes(), word * 8).expect("written");
        });
        let (_, current, peak, events) = used(&world, 3, "hca_object");
        assert!(current <= peak && events >= value.min(1) && peak >= value, "{value}");
        let _ = hostile.account.charge(&[0, 1, 0]);
        hostile.account.refund(&[0, 1, 0]);
        assert_eq!(used(&world, 4, "hca_object"), (None, 1, 1, 0));
        // The agent writes its limits again.
        limit(&world, "hca_object=5");
        assert_eq!(hostile.account.limits()[1], 5);
    }
    file.set_len(0).expect_err("its size is sealed");
    world.pages.end(hostile.id);
    assert_eq!(world.joins(3, 2).account.limits()[1], 5);
}

/// A program's pages end one by one: the others of its container are not read each time.
#[test]
fn the_end_of_a_device_reads_its_page_alone() {
    let world = World::new("alone");
    let [one, other] = [1, 2].map(|key| world.opens(3, key).expect("room"));
    one.counts("eth0", 10);
    other.counts("eth0", 20);
    world.pages.end(one.id);
    let read = |world: &World| {
        let inner = world.pages.lock();
        let container = &inner.containers[&3];
        (container.past["eth0"].0[0], container.devices[&other.id.number].counters.0[0])
    };
    assert_eq!(read(&world), (10, 0));
    assert_eq!(world.counts(), named(&[("v3", "eth0", 30)]));
    assert_eq!(read(&world), (10, 20));
}

#[test]
fn devices_end_one_after_the_other() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    runtime.expect("a runtime").block_on(async {
        let mut world = World::new("turns");
        let all = [(3, 1), (4, 1)].map(|(end, key)| world.opens(end, key).expect("room"));
        all.iter().for_each(|it| it.counts("eth0", 7));
        let shared = Arc::new(std::mem::replace(&mut world.pages, pages(&world.state)));
        let open = || shared.lock().containers.values().map(Container::open).sum::<usize>();
        let turn = shared.ends.turn(3, std::future::ready(())).await;
        for Program { id, .. } in &all {
            let soon = std::time::Duration::from_millis(20);
            tokio::time::timeout(soon, shared.ended(*id)).await.expect_err("not yet");
        }
        assert_eq!(open(), 2);
        drop(turn);
        for (left, Program { id, .. }) in [(1, &all[0]), (0, &all[1])] {
            shared.ended(*id).await;
            assert_eq!(open(), left);
        }
    });
}
