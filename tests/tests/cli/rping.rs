//! `rocinante rping` over loopback.

use super::{Addresses, Running, rocinante, words};

fn start(line: &str) -> Running {
    Running::start(&mut rocinante(words(line)))
}

#[test]
fn texts_go_there_and_come_back() {
    let Addresses { server, client } = Addresses::new();
    let at_server = start(&format!("rping -s -a {server} -v --json")).that_waits();
    let at_client = start(&format!("rping -c -a {server} -I {client} -C 3 -v -V --json")).finish();
    let (at_client, at_server) = (at_client.succeeded(), at_server.finish().succeeded());
    for (done, prefix) in [(&at_client, ""), (&at_server, "server ")] {
        let line = format!("{prefix}ping data: rdma-ping-2: CDEFGHIJ");
        assert!(done.err.contains(&line), "{}", done.err);
        assert_eq!((&done.json()["rounds"], &done.json()["size"]), (&3.into(), &64.into()));
    }
    assert_eq!(at_client.json()["validated"], true);
    assert_eq!(
        at_server.json()["peer"].as_str().unwrap().split(':').next(),
        Some(&*client.to_string())
    );
}

#[test]
fn sizes_and_many_clients_of_one_server() {
    let Addresses { server, client } = Addresses::new();
    let mut at_server = start(&format!("rping -s -P -a {server} -p 7175")).that_waits();
    for size in [26, 4096, 65_535] {
        let line = format!("rping -c -a {server} -p 7175 -I {client} -C 20 -S {size} -V --json");
        let done = start(&line).finish().succeeded();
        assert_eq!((&done.json()["rounds"], &done.json()["size"]), (&20.into(), &size.into()));
        at_server.says("20 rounds with");
    }
}

/// A host has one such process for each of its servers.
#[test]
fn an_idle_device_takes_little_memory() {
    let Addresses { server, .. } = Addresses::new();
    let idle = start(&format!("rping -s -a {server} --netdev udp")).that_waits();
    let rollup =
        std::fs::read_to_string(format!("/proc/{}/smaps_rollup", idle.child.id())).unwrap();
    let own = rollup.lines().find_map(|line| line.strip_prefix("Pss_Anon:")).unwrap();
    let kib: u64 = own.trim().strip_suffix(" kB").unwrap().parse().unwrap();
    assert!((100..3 << 10).contains(&kib), "{rollup}");
}

#[test]
fn errors_say_what_to_do() {
    let Addresses { server, client } = Addresses::new();
    start("rping -a 127.0.0.1").finish().failed(2, &["--server", "--client"]);
    start(&format!("rping -s -c -a {server}")).finish().failed(2, &["cannot be used with"]);
    start("rping -s -a 192.0.2.1").finish().failed(1, &["192.0.2.1", "devices"]);
    let line = format!("rping -c -a {server} -I {client} --patience 1");
    start(&line).finish().failed(1, &["cannot connect", "UDP port 4791", "(NAT)"]);
    start(&format!("rping -s -a {server} --bind {server}")).finish().failed(2, &["leave out -I"]);
    // The advice is one that the command takes.
    let at_server = start(&format!("rping -s -P --netdev udp --bind {server}")).that_waits();
    let line = format!("rping -c --netdev udp -a {server} -C 1 --bind");
    start(&format!("{line} {client}")).finish().succeeded();
    // On its server's address, too.
    start(&format!("{line} {server}")).finish().succeeded();
    let line = format!("rping -s --netdev udp --bind {server}");
    start(&line).finish().failed(1, &["somebody listens there already"]);
    drop(at_server);
    // A device is there, but no program listens on that port.
    let _at_server = start(&format!("rping -s -a {server}")).that_waits();
    let line = format!("rping -c -a {server} -p 9 -I {client} --patience 1");
    start(&line).finish().failed(1, &["nobody listens there", "start the server first"]);
}
