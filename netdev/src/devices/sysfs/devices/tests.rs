use std::collections::HashMap;
use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use tempfile::TempDir;

use super::*;
use crate::devices::sysfs::{Counts, Published, keep};
use crate::kernel::interface::Interface;
use crate::testing::testns::{Pair, or_skip, wait_until};

/// A directory of its own, with a place above it.
struct Scratch(TempDir);

impl Scratch {
    fn new() -> Self {
        let place = Self(TempDir::new().unwrap());
        fs::create_dir(place.root()).unwrap();
        place
    }

    fn root(&self) -> PathBuf {
        self.0.path().join("root")
    }
}

fn device(number: u32, gids: &[Option<[u8; 4]>]) -> NamedInterface {
    let interface = Interface {
        name: format!("nosuch{number}"),
        index: 990 + number,
        mtu: 1500,
        mac: [2, 0, 0, 0, 0, 9],
        up: true,
        loopback: false,
        addresses: gids.iter().flatten().map(|it| (IpAddr::from(*it), 24)).collect(),
    };
    let gids = gids.iter().map(|gid| gid.map(IpAddr::from)).collect();
    NamedInterface { name: format!("roce{number}"), number, interface, gids }
}

#[test]
fn a_tree_has_what_sysfs_has_and_follows_the_devices() {
    let scratch = Scratch::new();
    let root = scratch.root();
    let read = |path: &str| fs::read_to_string(root.join(path)).ok();
    let names = |path: &str| {
        let entries = fs::read_dir(root.join(path)).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    };
    let two = [device(0, &[Some([192, 0, 2, 77])]), device(3, &[None, Some([192, 0, 2, 78])])];
    tree::show(&root, &two).unwrap();
    let ib = "sys/class/infiniband";
    assert_eq!(names(ib), ["roce0", "roce3"]);
    assert_eq!(names("sys/class/infiniband_verbs"), ["abi_version", "uverbs0", "uverbs3"]);
    for (path, text) in [
        ("roce0/node_guid", "0000:00ff:fe00:0009"),
        ("roce0/ports/1/state", "4: ACTIVE"),
        ("roce0/ports/1/rate", "2.5 Gb/sec (1X SDR)"),
        ("roce0/ports/1/cap_mask", "0x04010000"),
        ("roce0/ports/1/gids/0", "0000:0000:0000:0000:0000:ffff:c000:024d"),
        ("roce3/ports/1/gids/0", "0000:0000:0000:0000:0000:0000:0000:0000"),
        ("roce3/ports/1/gids/1", "0000:0000:0000:0000:0000:ffff:c000:024e"),
        ("roce3/ports/1/gids/15", "0000:0000:0000:0000:0000:0000:0000:0000"),
        ("roce3/ports/1/gid_attrs/types/1", "RoCE v2"),
        ("roce3/ports/1/gid_attrs/ndevs/1", "nosuch3"),
        ("roce3/ports/1/counters/port_xmit_data", "0"),
        ("roce3/device/infiniband_verbs/uverbs3/ibdev", "roce3"),
        ("roce0/subsystem/roce3/uevent", "NAME=roce3"),
    ] {
        assert_eq!(read(&format!("{ib}/{path}")), Some(format!("{text}\n")), "{path}");
    }
    assert_eq!(read(&format!("{ib}/roce3/ports/1/gid_attrs/types/0")), None);
    assert_eq!(read(&format!("{ib}/roce0/ports/1/gids/16")), None);

    // Counters stay, and a file stays the same one.
    let counts = Counts::from([("counters/port_xmit_data".to_owned(), 12)]);
    let path = format!("{ib}/roce0/ports/1/counters/port_xmit_data");
    let inode = || fs::metadata(root.join(&path)).unwrap().ino();
    let before = inode();
    tree::count(&root, &two[0], &counts).unwrap();
    let mut one = [device(0, &[Some([192, 0, 2, 79])])];
    one[0].interface.up = false;
    tree::show(&root, &one).unwrap();
    assert_eq!((read(&path).as_deref(), inode()), (Some("12\n"), before));
    let nothing = Counts::from([("counters/port_xmit_data".to_owned(), 3)]);
    tree::count(&root, &two[0], &nothing).unwrap();
    assert_eq!((read(&path).as_deref(), inode()), (Some("3\n"), before));
    assert_eq!(fs::metadata(root.join(&path)).unwrap().mode() & 0o777, 0o444);
    // A device that is gone has no file, and the others tell of now.
    assert_eq!(names(ib), ["roce0"]);
    assert_eq!(names("sys/devices/rocinante"), ["roce0"]);
    assert_eq!(names("dev/infiniband"), ["uverbs0"]);
    assert_eq!(read(&format!("{ib}/roce0/ports/1/state")).as_deref(), Some("1: DOWN\n"));
    let gid = read(&format!("{ib}/roce0/ports/1/gids/0"));
    assert_eq!(gid.as_deref(), Some("0000:0000:0000:0000:0000:ffff:c000:024f\n"));
    tree::show(&root, &[]).unwrap();
    assert_eq!((names(ib), names("dev/infiniband")), (vec![], vec![]));
    // A process that was interrupted leaves a tree that is written again.
    fs::remove_file(root.join("state")).unwrap();
    symlink("nowhere", root.join(ib).join("roce9")).unwrap();
    tree::show(&root, &one).unwrap();
    assert_eq!(names(ib), ["roce0"]);
}

/// The files of a device are where they were while its interface gets another name.
#[test]
fn a_device_has_its_files_while_its_interface_is_renamed() {
    let scratch = Scratch::new();
    let root = scratch.root();
    let mut devices = [device(0, &[Some([192, 0, 2, 77])])];
    tree::show(&root, &devices).unwrap();
    let ended = AtomicU32::new(0);
    let file = root.join("sys/devices/rocinante/roce0/infiniband/roce0/ports/1/state");
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut looks = 0;
            while ended.load(Ordering::Relaxed) == 0 {
                assert!(file.exists(), "after {looks} looks");
                looks += 1;
            }
            looks
        });
        for renamed in 0..50 {
            devices[0].interface.name = format!("d{}", renamed % 2);
            tree::show(&root, &devices).unwrap();
        }
        ended.store(1, Ordering::Relaxed);
        assert!(reader.join().unwrap() > 0);
    });
    assert_eq!(fs::read_dir(root.join("sys/devices/rocinante/roce0/net")).unwrap().count(), 1);
}

#[test]
fn processes_that_share_a_directory_share_names() {
    let scratch = Scratch::new();
    let mut one = Devices::shared(&scratch.root());
    let mut other = Devices::shared(&scratch.root());
    let Ok(devices) = one.list(Some("lo=x")) else {
        println!("SKIPPED sysfs::processes_that_share_a_directory_share_names: no lo");
        return;
    };
    assert_eq!((&*devices[0].name, devices[0].number), ("x", 0));
    assert!(other.is_for(" lo=x") && !other.is_for("lo"));
    assert_eq!(other.list(Some("lo=x")).unwrap(), devices);
    assert_eq!(one.names, other.names);
    // Another list is another matter: the directory does not know of it.
    assert_eq!(other.list(Some("lo=y")).unwrap()[0].name, "y");
    assert_eq!(one.list(Some("lo=x")).unwrap(), devices);
    assert_eq!(read(&scratch.root()).unwrap().names, one.names);
    // In a directory below one of another user's nothing is written.
    std::os::unix::fs::chown(scratch.0.path(), Some(65534), None).unwrap_or_default();
    if fs::metadata(scratch.0.path()).unwrap().uid() == 65534 {
        let before = read(&scratch.root());
        assert!(hold(&scratch.root()).is_err() && Published::begin(&scratch.root()).is_err());
        one.list(Some("lo=x")).unwrap();
        assert_eq!(read(&scratch.root()), before);
        std::os::unix::fs::chown(scratch.0.path(), Some(0), None).unwrap();
    }
    // A directory that is gone comes again.
    fs::remove_dir_all(scratch.root()).unwrap();
    assert_eq!(one.list(Some("lo=x")).unwrap(), devices);
    assert!(scratch.root().join("sys/class/infiniband/x/ports/1/gids/0").exists());
}

#[test]
fn counters_are_summed_while_processes_run_and_after() {
    let scratch = Scratch::new();
    let root = scratch.root();
    let ports = [PortKey { namespace: 7, index: 2 }, PortKey { namespace: 8, index: 2 }];
    let name = "counters/port_xmit_data";
    let sum = || -> HashMap<PortKey, u64> {
        counts::sum(&root).into_iter().map(|(port, counts)| (port, counts[name])).collect()
    };
    // A thread that is late counts by its last answer.
    let becomes = |expected: [u64; 2]| {
        let expected = HashMap::from([(ports[0], expected[0]), (ports[1], expected[1])]);
        wait_until(&format!("the sum is {expected:?}"), || sum() == expected);
    };
    assert!(sum().is_empty());
    let round = Arc::new(AtomicU64::new(1));
    let begin = |port: usize, count: u64| {
        let published = Arc::new(Published::begin(&root).unwrap());
        let (answering, round) = (published.clone(), round.clone());
        let thread = std::thread::spawn(move || {
            let mut is_last = false;
            while !is_last {
                let Ok(question) = answering.asked() else { return };
                let round = round.load(Ordering::SeqCst);
                let counts = Counts::from([(name.to_owned(), round * count)]);
                answering.answer([(ports[port], &counts)]).unwrap();
                drop(question);
                is_last = round == 2;
            }
        });
        (published, thread)
    };
    let (one, first) = begin(0, 10);
    let (other, second) = begin(0, 5);
    let (third, last) = begin(1, 1);
    becomes([15, 1]);
    // They answer anew each time.
    round.store(2, Ordering::SeqCst);
    becomes([30, 2]);
    for thread in [first, second, last] {
        thread.join().unwrap();
    }
    // One ends in order; the others are killed, which closes their sockets.
    one.end();
    drop((one, other, third));
    for _ in 0..2 {
        assert_eq!(sum(), HashMap::from([(ports[0], 30), (ports[1], 2)]));
    }
    // A process that does not answer, as it is stopped, counts by its last answer.
    let stopped = Published::begin(&root).unwrap();
    stopped.answer([(ports[1], &Counts::from([(name.to_owned(), 40)]))]).unwrap();
    assert_eq!(sum()[&ports[1]], 42);
    counts::clean(&root);
    assert_eq!(sum()[&ports[1]], 42);
}

/// The view of a program that reads files and nothing else.
#[test]
fn a_tree_is_kept_for_those_that_only_read() {
    let pair = or_skip!("sysfs::a_tree_is_kept_for_those_that_only_read", Pair::new());
    let scratch = Scratch::new();
    let root = scratch.root();
    let comes = |path: &str, text: &str| {
        let path = root.join("sys/class/infiniband").join(path);
        wait_until(&format!("{} is {text:?}", path.display()), || {
            fs::read_to_string(&path).ok().as_deref() == Some(text)
        });
    };
    std::thread::scope(|scope| {
        let (stop, stopped) = std::os::unix::net::UnixStream::pair().unwrap();
        let (at, root) = (&pair.a, &root);
        let keeping = scope.spawn(move || at.run(|| keep(root, "", stopped.as_fd())));
        comes("roce0/ports/1/gid_attrs/ndevs/0", "v0\n");
        pair.a.sh("ip link add d0 type veth peer name d1; ip link set d0 addrgenmode none
                   ip address add 10.8.0.1/24 dev d0");
        comes("roce2/ports/1/gids/0", "0000:0000:0000:0000:0000:ffff:0a08:0001\n");
        comes("roce0/ports/1/state", "4: ACTIVE\n");
        pair.a.sh("ip link set v0 down");
        comes("roce0/ports/1/state", "1: DOWN\n");
        // Another process counts, and it is read again and again.
        let index = pair.a.run(|| Interface::by_name("v0").unwrap().index);
        let port = pair.a.run(|| PortKey::of(index).unwrap());
        let published = Published::begin(root).unwrap();
        let counts = Counts::from([("counters/port_xmit_data".to_owned(), 77)]);
        published.answer([(port, &counts)]).unwrap();
        published.end();
        comes("roce0/ports/1/counters/port_xmit_data", "77\n");
        drop(stop);
        keeping.join().unwrap().unwrap();
    });
}
