//! The configuration is read again at SIGHUP.

use std::fs;
use std::os::unix::net::UnixDatagram;

use rustix::process::Signal;

use crate::asker::{As, Asker, SOON, eventually};
use crate::lab::{Host, host_or_skip};

/// Changes the configuration, has it read, and returns the notes to the service manager.
pub(crate) fn reload(host: &Host, options: &str) -> [String; 2] {
    let (socket, state) = (host.socket(), host.state());
    let text = format!("socket = {socket:?}\nstate = {state:?}\n{options}");
    fs::write(host.config(), text).expect("written");
    signalled(host)
}

fn signalled(host: &Host) -> [String; 2] {
    let path = host.dir().join("notify");
    let manager = UnixDatagram::bind(&path).expect("a socket");
    manager.set_read_timeout(Some(SOON)).expect("set");
    host.signal(Signal::HUP);
    let notes = [(); 2].map(|()| {
        let mut note = [0; 128];
        let length = manager.recv(&mut note).expect("a note");
        String::from_utf8_lossy(&note[..length]).into_owned()
    });
    fs::remove_file(path).expect("removed");
    notes
}

#[test]
fn what_can_change_changes_and_nonsense_does_not() {
    let mut host = host_or_skip!("reload::what_can_change", 2);
    host.configure("ports_max = 1");
    host.start();
    let [v4, _] = host.addresses(0);
    let mut asker = host.asker(0);
    asker.granted(v4);
    assert!(asker.refused(v4).contains("1 ports already"));
    let [reloading, ready] = reload(&host, "ports_max = 2\nring_frames_max = 30");
    let since = reloading.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").expect("the first note");
    assert!(since.trim().parse::<u64>().is_ok_and(|us| us > 0), "{reloading}");
    assert_eq!(ready, "READY=1\n");
    host.logged(&["was read again", "changed=\"ports_max, ring_frames_max\""]);
    asker.granted(v4);
    // The port from before is as it was.
    assert_eq!(host.status()["containers"][0]["ports"][0]["slots"], 180 + 30);
    assert!(asker.refused(v4).contains("2 ports already"));
    // Nonsense, and a file that is not there: it is ready again, as before.
    let [_, ready] = reload(&host, "ports_max = 0");
    assert_eq!(ready, "READY=1\n");
    host.logged(&["stays as it was", "ports_max is at least 1"]);
    reload(&host, "ports_max = 9\nprots_max = 3");
    host.logged(&["stays as it was", "prots_max"]);
    fs::remove_file(host.config()).expect("removed");
    signalled(&host);
    host.logged(&["stays as it was", "No such file"]);
    assert!(asker.refused(v4).contains("2 ports already"));
    // The level: a granted request writes nothing then.
    reload(&host, "ports_max = 3\nlog = \"warn\"");
    asker.granted(v4);
    let granted = host.log().iter().filter(|line| line.contains(" granted ")).count();
    assert_eq!(granted, 2, "{:#?}", host.log());
    host.asker(1).granted(host.addresses(1)[0]);
}

#[test]
fn a_rate_that_changes_holds_for_pages_as_well() {
    let mut host = host_or_skip!("reload::a_rate_that_changes", 1);
    host.configure("requests_per_second = 1000");
    host.start();
    let mut asker = host.asker(0);
    reload(&host, "requests_per_second = 1");
    let mut opens = |key: &u32| asker.tell(&format!("device {key} eth0")).starts_with("device ");
    let open = (0..30).filter(&mut opens).count();
    assert!((1..30).contains(&open), "{open}");
}

#[test]
fn what_cannot_change_is_said() {
    let mut host = host_or_skip!("reload::what_cannot_change", 1);
    host.start();
    let text = format!(
        "socket = {:?}\nstate = {:?}\nguardian = \"\"\nrequests_per_second = 1",
        host.dir().join("elsewhere/agent.sock"),
        host.dir().join("u/state.json"),
    );
    fs::write(host.config(), text).expect("written");
    signalled(&host);
    host.logged(&["a change of socket, state, guardian needs a restart"]);
    host.logged(&["was read again", "changed=\"requests_per_second\""]);
    assert!(!host.dir().join("elsewhere").exists() && !host.dir().join("u").exists());
    // It serves where it was, at the new rate.
    let [v4, _] = host.addresses(0);
    let mut asker = host.asker(0);
    asker.granted(v4);
    eventually("it asks too often", || asker.tell(&format!("ask {v4}")).contains("too often"));
}

/// The rule for containers that administer their network holds for the next request.
#[test]
fn containers_that_administer_themselves_may_be_refused_from_then_on() {
    let mut host = host_or_skip!("reload::containers_that_administer", 1);
    host.start();
    let [v4, _] = host.addresses(0);
    let mut root = Asker::start(host.container(0).netns(), &host.socket(), As::Root);
    root.granted(v4);
    reload(&host, "self_administered = \"refuse\"");
    let refused = root.refused(v4);
    assert!(refused.starts_with("Forbidden"), "{refused}");
    host.has_ports(1);
}

#[test]
fn a_hundred_signals_hold_nothing_up() {
    let mut host = host_or_skip!("reload::a_hundred_signals", 1);
    host.start();
    (0..100).for_each(|_| host.signal(Signal::HUP));
    host.asker(0).granted(host.addresses(0)[0]);
    host.logged(&["was read again", "changed=\"\""]);
}
