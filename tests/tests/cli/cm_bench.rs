//! `rocinante cm-bench`: what it reports, not how fast it is here.

use rocinante_tests::{need, require};

use super::{Addresses, Running, rocinante, run, words};

#[test]
fn connections_are_made_held_and_released() {
    require!(need::lab());
    for netdev in ["udp", "packet"] {
        let line = format!("cm-bench --json -D 0.3 --connections 1000 --netdev {netdev}");
        let done = run(&line).succeeded();
        let json = done.json();
        assert_eq!((&json["netdev"], &json["held"]), (&netdev.into(), &1000.into()));
        assert!(json["connections"].as_u64().unwrap() > 32, "{json}");
        for side in ["client", "server"] {
            // Descriptors are not what limits the number of connections.
            assert!(json[side]["descriptors"].as_i64().unwrap() < 64, "{json}");
            let each = json[side]["bytes_per_connection"].as_f64().unwrap();
            assert!(each < 64e3, "{json}");
        }
    }
}

/// As between two machines.
#[test]
fn a_server_serves_a_client() {
    let Addresses { server, client } = Addresses::new();
    let mut serving = Running::start(&mut rocinante(words(&format!(
        "cm-bench --server --bind {server} --netdev udp"
    ))));
    serving.says("waiting for a client");
    let done = run(&format!(
        "cm-bench --bind {client} --netdev udp -D 0.2 --connections 50 --at-a-time 5 {server}"
    ));
    let done = done.succeeded();
    assert!(done.out.contains("50 held at once"), "{}", done.out);
    serving.finish().succeeded();
    let alone = run(&format!("cm-bench --bind {client} --netdev udp {server}"));
    assert_eq!(alone.status, 1);
    assert!(alone.err.contains("cannot connect to"), "{}", alone.err);
}
