//! Ports of `afxdp`: only for programs that name them, one on an interface; the agent keeps nothing
//! of them.

use rocinante_netdev::Backend;

use crate::asker::eventually;
use crate::lab::{Host, host_or_skip};

/// Whether an XDP program is on the interface of a container.
fn attached(host: &Host, container: usize) -> bool {
    let links = host.container(container).netns().json("ip -j -details link show eth0");
    links.expect("listed").to_string().contains("\"xdp\"")
}

/// Descriptors of a process that are of AF_XDP sockets, their memory or bpf(2).
fn of_afxdp(pid: u32) -> Vec<String> {
    let links = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("a process");
    let named = links.filter_map(|link| std::fs::read_link(link.ok()?.path()).ok());
    let named = named.map(|to| to.to_string_lossy().into_owned());
    named.filter(|to| ["memfd", "bpf"].iter().any(|word| to.contains(word))).collect()
}

#[test]
fn who_names_it_gets_it_and_nobody_else() {
    let mut host = host_or_skip!("afxdp::who_names_it_gets_it", 2);
    host.start();
    let [v4, v6] = host.addresses(0);
    let mut asker = host.asker(0);
    let choice = asker.tell(&format!("open auto {v4}"));
    assert!(choice.starts_with("opened packet: "), "{choice}");
    assert!(!attached(&host, 0));
    asker.tell("close");
    asker.opened(Backend::Xdp, v4);
    assert!(attached(&host, 0) && !attached(&host, 1));
    // The same guard as for `packet`.
    assert!(host.may_leave(0).contains(&v4) && host.may_leave(0).contains(&v6));
    host.has_ports(1);
    assert_eq!((host.guarded_rings(), of_afxdp(host.agent_id())), (0, vec![]));
    // Another container has one of its own.
    host.asker(1).opened(Backend::Xdp, host.addresses(1)[0]);
    assert_eq!(asker.tell("close"), "done");
    eventually("the program goes", || !attached(&host, 0));
    host.has_ports(0);
}

#[test]
fn an_interface_has_one_at_a_time_and_others_are_served() {
    let mut host = host_or_skip!("afxdp::an_interface_has_one", 2);
    host.start();
    let [v4, v6] = host.addresses(0);
    let mut first = host.asker(0);
    first.opened(Backend::Xdp, v4);
    let mut second = host.asker(0);
    second.say(&format!("open afxdp {v6}"));
    // While it asks again and again.
    for _ in 0..5 {
        let mut other = host.asker(1);
        other.granted(host.addresses(1)[0]);
    }
    let error = second.hear();
    assert!(error.starts_with("no port") && error.contains("on this interface already"), "{error}");
    // Ports of `packet` beside it are had.
    second.granted(v6);
    // It ends while another asks.
    second.say(&format!("open afxdp {v6}"));
    std::thread::sleep(std::time::Duration::from_millis(200));
    first.kill();
    // A program asks for some seconds. On a busy machine the agent may see the end later.
    let mut answer = second.hear();
    for _ in 0..10 {
        if answer.contains("on this interface already") {
            second.say(&format!("open afxdp {v6}"));
            answer = second.hear();
        }
    }
    assert!(answer.starts_with("opened afxdp: "), "{answer}");
}

#[test]
fn it_outlives_the_agent_and_ends_with_its_process() {
    let mut host = host_or_skip!("afxdp::it_outlives_the_agent", 1);
    host.start();
    let [v4, v6] = host.addresses(0);
    let mut asker = host.asker(0);
    asker.opened(Backend::Xdp, v4);
    let before = host.bytes();
    assert!(before > 2 << 20, "{before}");
    host.kill();
    assert!(attached(&host, 0));
    host.start();
    // The next agent knows of the port, and of its resources.
    assert_eq!((host.ports(), host.guarded_rings(), host.bytes()), (1, 0, before));
    let refused = host.asker(0).not_opened(Backend::Xdp, v6);
    assert!(refused.contains("on this interface already"), "{refused}");
    host.kill();
    assert!(attached(&host, 0));
    asker.kill();
    eventually("the program goes with the process, without an agent", || !attached(&host, 0));
    host.start();
    host.has_ports(0);
    host.asker(0).opened(Backend::Xdp, v6);
}

#[test]
fn its_memory_counts() {
    let mut host = host_or_skip!("afxdp::its_memory_counts", 1);
    let [v4, _] = host.addresses(0);
    // 256 chunks of each direction are 2 MiB, and more. Fewer are what a container may have.
    for (limit, mib) in [("", 3), ("ring_frames_max = 128", 2), ("ring_mib_max = 1", 1)] {
        host.configure(limit);
        host.start();
        let mut asker = host.asker(0);
        asker.opened(Backend::Xdp, v4);
        assert_eq!(host.bytes().div_ceil(1 << 20), mib, "{limit}");
        asker.kill();
        host.has_ports(0);
        host.kill();
    }
}
