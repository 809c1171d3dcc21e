//! Two ports of one device, on two receive queues.

use super::*;
use crate::testing::ReceiveBy as _;
use crate::testing::testns::needs;

/// Ports on both queues of `v0` in `b`, with a neighbour that `a` knows from the start.
fn on_two_queues() -> Result<(Pair, Vec<XdpPort>), String> {
    needs(&["ethtool"]).map_err(|e| e.to_string())?;
    let pair = Pair::new().map_err(|e| e.to_string())?;
    for ns in [&pair.a, &pair.b] {
        ns.sh("ethtool -L v0 rx 2 tx 2");
    }
    let ports = pair.b.run(|| {
        let iface = Interface::by_name("v0").expect("v0");
        let addresses: Vec<IpAddr> = iface.addresses.iter().map(|(a, _)| *a).collect();
        XdpPort::open_shards(
            &iface,
            &addresses,
            &PortConfig::default(),
            Shards { shared: false, first: 0, count: 2, selector: 5 },
        )
    });
    Ok((pair, ports.map_err(|e| e.to_string())?))
}

/// Sends datagrams from many ports to the Ethernet address that ends in `mac`; returns their
/// number.
fn send_many(pair: &Pair, mac: u8) -> usize {
    pair.a.sh(&format!(
        "ip neigh replace 10.9.0.2 lladdr 02:00:00:00:09:{mac:02x} dev v0
         ip neigh replace fd09::2 lladdr 02:00:00:00:09:{mac:02x} dev v0"
    ));
    pair.a.run(|| {
        for to in ["10.9.0.2:4791", "[fd09::2]:4791"] {
            let from = if to.starts_with('[') { "[fd09::1]:0" } else { "10.9.0.1:0" };
            for number in 0..32 {
                let socket = std::net::UdpSocket::bind(from).expect("a socket");
                socket.send_to(&[number; 64], to).expect("sent");
            }
        }
    });
    64
}

/// Datagrams received by each port until `want` have arrived.
fn receive(ports: &mut [XdpPort], want: usize) -> Vec<usize> {
    let end = Instant::now() + PATIENCE;
    let mut heard = vec![0; ports.len()];
    while heard.iter().sum::<usize>() < want && Instant::now() < end {
        for (port, heard) in ports.iter_mut().zip(&mut heard) {
            port.maintain();
            *heard += port.receive_by(64, &mut |d| assert_eq!(d.payload.len(), 64)).expect("alive");
        }
    }
    heard
}

#[test]
fn two_queues_hear_everything_once_and_follow_their_interface_together() {
    let (pair, mut ports) = or_skip!(on_two_queues());
    for mac in [2, 0x12, 2, 0x13] {
        pair.b.sh(&format!("ip link set v0 address 02:00:00:00:09:{mac:02x}"));
        // Each of them reads the announcement; both share the address.
        for _ in 0..2 {
            for port in &mut ports {
                port.maintain();
            }
        }
        let sent = send_many(&pair, mac);
        let heard = receive(&mut ports, sent);
        assert_eq!(heard.iter().sum::<usize>(), sent, "{mac:x}: {heard:?}");
        assert!(heard.iter().all(|heard| *heard > 0), "{mac:x}: one queue has all: {heard:?}");
        assert_eq!(receive_more(&mut ports), 0, "nothing comes twice");
    }
    for port in &ports {
        assert_eq!((port.stats().rx_queue_drops, port.stats().rx_malformed), (0, 0));
    }
    // The program stays for the remaining port, which receives from its queue.
    drop(ports.remove(0));
    assert!(attached(&pair.b));
    send_many(&pair, 0x13);
    assert!(receive(&mut ports, 1)[0] > 0);
    drop(ports);
    detaches(&pair.b);
}

/// The number of datagrams available now.
fn receive_more(ports: &mut [XdpPort]) -> usize {
    ports.iter_mut().map(|port| port.receive_by(64, &mut |_| ()).expect("alive")).sum()
}
