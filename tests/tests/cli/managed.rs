//! `--cm`: the connection manager connects both sides of `pingpong` and `perf`; TCP is not used.

use super::{Addresses, Running, both, rocinante, words};

#[test]
fn a_ping_pong_is_the_same() {
    let (server, client) =
        both("pingpong --cm --json", "pingpong --cm --json -n 200 -s 5000 -m 512 -c");
    let (server, client) = (server.succeeded().json(), client.succeeded().json());
    for json in [&server, &client] {
        let found = ["iters", "size", "mtu", "validated"].map(|name| json[name].to_string());
        assert_eq!(found, ["200", "5000", "512", "true"]);
    }
    assert_eq!((&server["local"], &server["remote"]), (&client["remote"], &client["local"]));
    let (server, client) = both("pingpong --cm -e", "pingpong --cm -e -n 20 -s 0");
    server.succeeded();
    client.succeeded();
}

#[test]
fn everything_can_be_measured() {
    for test in [
        "write-lat -n 50",
        "send-lat -n 50",
        "read-lat -n 50",
        "atomic-lat -n 50",
        "write-bw -n 200 -q 5",
        "read-bw -n 100",
        "send-bw -n 200 -q 2 -m 256",
        "send-bw -b -n 200",
        "atomic-bw -n 100",
    ] {
        let server = format!("perf {} --cm", test.split(' ').next().unwrap());
        let (server, client) = both(&server, &format!("perf {test} --cm"));
        server.succeeded();
        let client = client.succeeded();
        assert!(client.out.contains("(CM 127."), "{}", client.out);
    }
}

#[test]
fn the_server_still_decides_what_it_was_given() {
    let (server, client) = both("pingpong --cm -s 64", "pingpong --cm -s 128");
    for done in [server, client] {
        assert_eq!(done.status, 1);
        assert!(done.err.contains("--size is 128 at the client and 64 at"), "{}", done.err);
    }
}

#[test]
fn a_client_without_a_server_learns_what_to_do() {
    let addresses = Addresses::new();
    let alone = addresses.call("pingpong --cm --patience 1");
    assert_eq!(alone.status, 1);
    for word in ["the server started with", "(NAT)"] {
        assert!(alone.err.contains(word), "{}", alone.err);
    }
    // A server that listens only on TCP has the device open, and rejects.
    let server = addresses.serve("pingpong");
    let client = addresses.call("pingpong --cm --patience 1");
    assert_eq!(client.status, 1);
    assert!(client.err.contains("start the server first"), "{}", client.err);
    drop(server);
}

/// The second client is rejected at once, in the middle of the first client's run. The first does
/// not notice.
#[test]
fn a_second_client_is_turned_away() {
    // Longer and longer runs, until the first is still running when the second is rejected.
    for iters in (0..9).map(|doubled| 300u64 << (2 * doubled)) {
        let addresses = Addresses::new();
        let mut server = addresses.serve("pingpong --cm");
        let line = addresses.client_line(&format!("pingpong --cm -n {iters} -s 100"));
        let mut first = Running::start(&mut rocinante(words(&line)));
        server.says("client ");
        let other = Addresses { server: addresses.server, client: Addresses::new().client };
        let second = other.call("pingpong --cm");
        let in_the_middle = first.child.try_wait().unwrap().is_none();
        first.finish().succeeded();
        server.finish().succeeded();
        if in_the_middle {
            second.failed(1, &["rejects", "another client is being served: try again later"]);
            return;
        }
    }
    panic!("20 million round trips were over before a client was refused");
}
