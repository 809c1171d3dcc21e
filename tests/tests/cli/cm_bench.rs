//! `rocinante-bench cm`: its report, not its speed here.

use rocinante_tests::{need, require};

use super::{Addresses, Running, rocinante_bench, run, run_bench, words};

#[test]
fn connections_are_made_held_and_released() {
    require!(need::lab());
    for netdev in ["udp", "packet"] {
        let line = format!("cm --json -D 1 --connections 1000 --netdev {netdev}");
        let done = run_bench(&line).succeeded();
        let json = done.json();
        assert_eq!((&json["netdev"], &json["held"]), (&netdev.into(), &1000.into()));
        // More than are made at the same time.
        assert!(json["connections"].as_u64().unwrap() > 32, "{json}");
        let figure = |name: &str| json[name].as_f64().unwrap();
        let rate = figure("connections") / figure("seconds");
        assert!((figure("connections_per_s") / rate - 1.0).abs() < 1e-6, "{json}");
        // The last connections began within the time, and ended after it.
        assert!(figure("seconds") >= 1.0 && figure("held_after_s") > 0.0, "{json}");
        let [half, most] = ["connect_us_p50", "connect_us_p99"].map(figure);
        assert!(0.0 < half && half <= most && most < 1.01e6 * figure("seconds"), "{json}");
        for side in ["client", "server"] {
            // Descriptors must not limit the number of connections.
            assert!(json[side]["descriptors"].as_i64().unwrap() < 64, "{json}");
            let each = json[side]["bytes_per_connection"].as_f64().unwrap();
            // The queues of 16 requests alone take more than the lower bound.
            assert!((1e3..24e3).contains(&each), "{json}");
        }
    }
}

/// A client that sends no plan makes its server fail: the lab gets an error.
#[test]
fn a_server_without_its_client_fails() {
    let Addresses { server, client } = Addresses::new();
    let serving = Running::start(&mut rocinante_bench(words(&format!(
        "cm --server --bind {server} --netdev udp"
    ))))
    .that_waits();
    let line = format!("pingpong --cm --netdev udp --bind {client} --port 18515 {server}");
    run(&line).failed(1, &["peer"]);
    serving.finish().failed(1, &["its plan is none"]);
}

/// As between two machines.
#[test]
fn a_server_serves_a_client() {
    let Addresses { server, client } = Addresses::new();
    let serving = Running::start(&mut rocinante_bench(words(&format!(
        "cm --server --bind {server} --netdev udp"
    ))))
    .that_waits();
    let done = run_bench(&format!(
        "cm --bind {client} --netdev udp -D 0.2 --connections 50 --at-a-time 5 {server}"
    ));
    let done = done.succeeded();
    assert!(done.out.contains("50 held at once"), "{}", done.out);
    serving.finish().succeeded();
    let alone = run_bench(&format!("cm --bind {client} --netdev udp {server}"));
    assert_eq!(alone.status, 1);
    assert!(alone.err.contains("cannot connect to"), "{}", alone.err);
}
