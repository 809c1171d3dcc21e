//! The rings of many containers, and of one beside others that take all they get.

use crate::asker::Asker;
use crate::lab::{Host, host_or_skip};

#[test]
fn the_last_of_many_containers_has_the_ring_of_the_first() {
    const MANY: u8 = 48;
    let mut host = host_or_skip!("rings::the_last_of_many", MANY);
    // More come than are expected.
    host.configure("ring_mib_total = 512\ncontainers_expected = 32");
    host.start();
    let mut askers: Vec<Asker> = (0..MANY).map(|index| host.asker(index.into())).collect();
    host.grant_each(&mut askers);
    let all: Vec<Vec<u64>> = (0..MANY).map(|index| host.slots(index.into())).collect();
    assert_eq!((&all[0], &all[usize::from(MANY) - 1]), (&vec![60], &vec![60]), "{all:?}");
    assert!(all.iter().all(|slots| *slots == all[0]), "{all:?}");
    // As many as alone on the host.
    askers.iter_mut().for_each(|asker| assert_eq!(asker.tell("close"), "done"));
    host.has_ports(0);
    askers[7].granted(host.addresses(7)[0]);
    assert_eq!(host.slots(7), all[0]);
}

#[test]
fn a_container_beside_six_hogs_has_what_it_is_promised() {
    const HOGS: usize = 6;
    let mut host = host_or_skip!("rings::a_container_beside_six_hogs", 8);
    host.configure("ring_mib_total = 256\ncontainers_expected = 8\nrequests_per_second = 1000");
    host.start();
    let alone = {
        let mut asker = host.asker(HOGS);
        asker.granted(host.addresses(HOGS)[0]);
        host.slots(HOGS)
    };
    host.has_ports(0);
    let mut hogs: Vec<Asker> = (0..HOGS).map(|index| host.asker(index)).collect();
    let mut more = true;
    while std::mem::take(&mut more) {
        for (index, hog) in hogs.iter_mut().enumerate() {
            // Each keeps its ports.
            more |= ask(&host, hog, index, 256).is_ok();
        }
    }
    let own = |index: usize| host.slots(index).iter().sum::<u64>() / 15;
    assert_eq!((0..HOGS).map(own).sum::<u64>(), 128 + 6 * 16, "MiB");
    for victim in [HOGS, HOGS + 1] {
        let mut asker = host.asker(victim);
        asker.granted(host.addresses(victim)[0]);
        assert_eq!(host.slots(victim), alone);
        while ask(&host, &mut asker, victim, 256).is_ok() {}
        let refused = ask(&host, &mut asker, victim, 256).expect_err("it has all");
        assert!(refused.contains("Busy") && refused.contains("16 MiB already"), "{refused}");
        assert_eq!(host.slots(victim), [120, 60, 30, 15, 15]);
    }
    // A hog that ends leaves its room to others, here to another hog.
    let before = own(1);
    hogs.remove(0).kill();
    crate::asker::eventually("its ports are gone", || host.slots(0).is_empty());
    ask(&host, &mut hogs[0], 1, 256).expect("there is room");
    assert!(own(1) > before);
}

/// Asks for a ring with this number of frames.
fn ask(host: &Host, asker: &mut Asker, container: usize, frames: u32) -> Result<(), String> {
    let eth0 = 2;
    let answer = asker.tell(&format!("ask {} {eth0} {frames}", host.addresses(container)[0]));
    if answer.starts_with("granted") { Ok(()) } else { Err(answer) }
}
