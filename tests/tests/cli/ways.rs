//! The address and the interface that a command takes, and its error where none can be used.

use std::process::Command;

use super::{rocinante, start_command, words};
use rocinante_lab::{Lab, LabConfig};
use rocinante_tests::{confined, need, require};

/// An address that the kernel still asks others for is waited for: by a client that has no other,
/// and where it is named.
#[test]
fn tentative_addresses_are_waited_for() {
    require!(need::lab());
    let lab = Lab::new(&LabConfig { ipv6: false, ..LabConfig::default() }).unwrap();
    let add = |index: usize, address: &str, dad: &[&str]| {
        let netns = lab.container(index).netns();
        netns.ip(&[&["address", "add", address, "dev", "eth0"], dad].concat()).unwrap();
    };
    let mut served = 0;
    // The kernel asks three times, a second apart each.
    let asks = "cd /proc/sys/net/ipv6/conf && echo 1 > all/accept_dad && echo 1 > eth0/accept_dad \
                && echo 3 > eth0/dad_transmits";
    let done = lab.container(0).output(Command::new("sh").args(["-c", asks])).unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    for options in ["", "--bind fd00:77::1", "--bind eth0"] {
        for index in [0, 1] {
            let netns = lab.container(index).netns();
            let _ = netns.ip(&["-6", "address", "flush", "dev", "eth0"]);
        }
        add(1, "fd00:77::2/64", &["nodad"]);
        let server = start_command(
            lab.container(1),
            &mut rocinante(words("pingpong --netdev udp --bind fd00:77::2")),
        )
        .that_waits();
        add(0, "fd00:77::1/64", &[]);
        let line = format!("pingpong --netdev udp -n 20 {options} fd00:77::2");
        let client = start_command(lab.container(0), &mut rocinante(words(&line))).finish();
        let client = client.succeeded();
        server.finish().succeeded();
        served += usize::from(client.err.contains("waiting: the address fd00:77::1 of eth0"));
    }
    // A machine may be so slow that it was no longer tentative.
    assert!(served > 0, "none has waited");
}

/// Each command names a sandbox without netlink, and not a missing address.
#[test]
fn a_sandbox_without_netlink_is_named() {
    require!(need::lab());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    for line in ["devices", "pingpong --netdev udp --bind 127.0.0.1", "pingpong --bind eth0"] {
        let mut command = rocinante(words(line));
        confined::without_netlink(&mut command);
        let done = start_command(lab.container(0), &mut command).finish();
        assert!(done.status != 0, "{line}: {}", done.out);
        assert!(done.err.contains("allow AF_NETLINK"), "{line}: {}", done.err);
    }
}
