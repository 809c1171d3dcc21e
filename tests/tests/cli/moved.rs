//! A container with its addresses goes from one host to another.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpStream};

use rocinante::device::Backend;
use rocinante_lab::{Between, Container, Hosts, Lab, LabConfig, Match};
use rocinante_tests::harness::wait_until;
use rocinante_tests::on_backends;
use rocinante_tests::running::PATIENCE;
use serde_json::Value;

use super::handed::{Agent, start};
use super::{command, start as start_unmanaged};

/// The addresses that the agent of a host lets out of this container; none if it does not know it.
fn let_out(agent: &Agent, host_end: &str) -> Vec<IpAddr> {
    let mut status = command(
        env!("CARGO_BIN_EXE_rocinante-agent-under-test"),
        ["status", host_end, "--json", "--config"],
    );
    let output = status.arg(agent.config()).output().unwrap();
    if String::from_utf8_lossy(&output.stderr).contains("no container is called") {
        return Vec::new();
    }
    assert!(output.status.success(), "{output:?}");
    let status: Value = serde_json::from_slice(&output.stdout).unwrap();
    let addresses = &status["containers"][0]["addresses"];
    let addresses = addresses.as_array().unwrap_or_else(|| panic!("{status:#}"));
    addresses.iter().map(|address| address.as_str().unwrap().parse().unwrap()).collect()
}

fn until_lets_out(agent: &Agent, host_end: &str, address: IpAddr, is_let: bool) {
    wait_until(&format!("{host_end}: {address} is let out: {is_let}"), || {
        let_out(agent, host_end).contains(&address) == is_let
    });
}

/// A connection to it ends by error, on both sides. A peer that connects again reaches it at its
/// new place, and the agent of the old one lets its addresses out no more.
fn connections_follow_a_container_on(backend: Backend) {
    let shape = Hosts { hosts: 3, containers_each: 1, between: Between::Vxlan { ipv6: false } };
    let lab = Lab::of_hosts(&shape, &LabConfig::default()).unwrap();
    let agents = [1, 2].map(|at| Agent::start(lab.host_of(at)));
    let [peer, old, new] = [0, 1, 2].map(|at| lab.container(at));
    let ends = [old, new].map(Container::host_end);
    let serves = format!("pingpong --cm --netdev {backend}");
    let asks = |more: &str, to: IpAddr| {
        start_unmanaged(peer, &format!("pingpong --cm --netdev udp {more} -c {to}"))
    };
    let before = start(old, &agents[0], &serves).that_waits();
    let asking = asks("-n 1000000000 -s 5000", old.ipv4().into());
    let seen = lab.count(&Match::roce()).unwrap();
    wait_until("packets flow", || seen.counter().unwrap().packets >= 200);
    new.take_addresses(old).unwrap();
    for v6 in [false, true] {
        until_lets_out(&agents[0], ends[0], old.address(v6), false);
        // The new place says that no program has the port.
        let to = SocketAddr::new(old.address(v6), 9);
        let refused = peer.run(|| TcpStream::connect_timeout(&to, PATIENCE)).unwrap();
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::ConnectionRefused);
    }
    asking.finish().failed(1, &["RETRY_EXC_ERR"]);
    before.finish().failed(1, &[]);
    for v6 in [false, true] {
        let after = start(new, &agents[1], &serves).that_waits();
        until_lets_out(&agents[1], ends[1], old.address(v6), true);
        asks("-n 200 -s 5000", old.address(v6)).finish().succeeded();
        after.finish().succeeded();
    }
}

on_backends! {
    connections_follow_a_container_to_another_host_on_packet:
        Packet + machine_root + nft => connections_follow_a_container_on(Backend::Packet);
    connections_follow_a_container_to_another_host_on_afxdp:
        Xdp + machine_root + nft => connections_follow_a_container_on(Backend::Xdp);
}
